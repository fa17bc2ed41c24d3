"""Only the very bytes that are pinned pass, and nothing is read twice without need."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from small_image import LABELS, as_nobody, build, bytes_read, descriptors, other_arch, patch

from kimi_eagle import files
from kimi_eagle.errors import UsageError
from kimi_eagle.images import hashcache, pins

pytestmark = pytest.mark.usefixtures("nobodys_home")


def refused(path: object, word: str, **more: str) -> str:
    with pytest.raises(UsageError, match=word) as caught:
        pins.verified(str(path), **more)
    assert caught.value.where
    return caught.value.line()


# -- what passes --------------------------------------------------------------------------------


def test_a_pinned_image(own: Path) -> None:
    line = refused(own, "pinned in no lock file")
    assert line.endswith(f"fix: kimi-eagle image lock {own}")
    locked = pins.lock(own)
    found = pins.verified(own)
    assert found == locked == pins.Image.from_json(json.loads(json.dumps(found.as_json())))
    assert (found.path, found.name, found.arch) == (str(own), "own", "amd64")
    assert found.sha256 == files.sha256_file(own) and found.bytes == own.stat().st_size
    assert LABELS.items() <= found.labels.items()


def test_other_ways_to_name_it(own: Path, tmp_path: Path) -> None:
    pins.lock(own)
    link = tmp_path / "folder" / "a link"
    link.parent.mkdir()
    link.symlink_to(own)
    assert pins.verified(link) == pins.verified(own) == pins.verified("own.sif")
    assert pins.verified("folder/../own.sif").path == str(own)
    own.rename(tmp_path / "renamed.sif")
    assert pins.verified("renamed.sif").name == "own"  # the bytes count
    (tmp_path / "elsewhere").mkdir()
    shutil.move(tmp_path / "renamed.sif", tmp_path / "elsewhere")
    refused("elsewhere/renamed.sif", "no lock file")
    shutil.move(tmp_path / "images.lock.json", tmp_path / "elsewhere")
    assert pins.verified("elsewhere/renamed.sif").name == "own"


@pytest.mark.parametrize("folder", ["containers", "home/.config/kimi-eagle"])
def test_where_pins_are_looked_up(own: Path, folder: str, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    moved = Path(shutil.move(own, tmp_path / "images"))
    pins.lock(moved, into=Path(folder))
    entry = json.loads((tmp_path / folder / "images.lock.json").read_text())["images"]["own"]
    assert entry["file"] == str(moved)  # absolute: it does not lie below
    assert pins.verified(moved).name == "own"
    os.chdir("/")
    if folder == "containers":
        refused(moved, "no lock file")
    else:
        assert pins.verified(moved).name == "own"


def test_pins_beside_a_link(small: Path, tmp_path: Path) -> None:
    """A shared image that one's own folder links to, with the pins there."""
    (tmp_path / "mine").mkdir()
    link = tmp_path / "mine" / "image.sif"
    link.symlink_to(small)
    pins.lock(link, into=link.parent)
    assert pins.verified(link).path == str(small)
    refused(small, "no lock file")


def test_working_directory_is_gone(own: Path, tmp_path: Path) -> None:
    pins.lock(own)
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    try:
        assert pins.verified(own).name == "own"
    finally:
        os.chdir("/")


@pytest.mark.parametrize("name", ['a "b", c=d.sif', "-rf.sif", "ü $(true) 'x'.sif", "colon:%s.sif"])
def test_odd_names(own: Path, name: str, tmp_path: Path) -> None:
    moved = own.rename(tmp_path / name)
    pins.lock(moved)
    assert pins.verified(moved).name == name.removesuffix(".sif")
    assert pins.verified(name).path == str(moved)


@pytest.mark.parametrize("name", ["a\nb.sif", " .sif", "b\udcff.sif", "\t"])
def test_names_that_no_entry_can_have(own: Path, name: str, tmp_path: Path) -> None:
    moved = own.rename(tmp_path / name)
    with pytest.raises(UsageError, match="not a name.*--name") as caught:
        pins.lock(moved)
    assert "\n" not in caught.value.line()
    pins.lock(moved, name="plain")
    assert pins.verified(moved).name == "plain"


# -- what does not ------------------------------------------------------------------------------


def test_tampered_at_equal_size_and_time(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashcache, "SETTLED_SECONDS", -1)  # so that the digest is remembered
    pins.lock(own)
    pins.verified(own)
    before = own.stat()
    offset = before.st_size - 5000
    patch(own, offset, bytes([own.read_bytes()[offset] ^ 1]))
    os.utime(own, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = own.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert (after.st_ino, after.st_ctime_ns > before.st_ctime_ns) == (before.st_ino, True)
    line = refused(own, "not the file that is pinned as 'own'")
    assert files.sha256_file(own) in line and "images.lock.json" in line and "--replace" in line


def test_truncated_and_grown(own: Path) -> None:
    pins.lock(own)
    whole = own.read_bytes()
    for length in (0, 100, 5000, len(whole) // 2, len(whole) - 1):
        own.write_bytes(whole[:length])
        refused(own, "truncated|empty")
    own.write_bytes(whole + b"\0")
    refused(own, "not the file that is pinned")


def test_two_images_that_changed_places(own: Path, tmp_path: Path) -> None:
    other = build(tmp_path / "other.sif", LABELS)
    pins.lock(own)
    pins.lock(other)
    for source, target in ((own, "x"), (other, own), (tmp_path / "x", other)):
        os.rename(source, target)
    refused(own, "not the file that is pinned as 'own'")
    refused(other, "not the file that is pinned as 'other'")


def test_the_entry_of_the_path_counts_before_that_of_the_name(own: Path, tmp_path: Path) -> None:
    """Two files of one name in two folders, pinned in one place."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    first = Path(shutil.copy(own, tmp_path / "a" / "x.sif"))
    second = build(tmp_path / "b" / "x.sif", LABELS)
    pins.lock(first, into=tmp_path / "containers")
    pins.lock(second, into=tmp_path / "containers", name="y")
    assert [pins.verified(path).name for path in (first, second)] == ["x", "y"]
    shutil.copy(first, second)
    refused(second, "not the file that is pinned as 'y'")


def test_a_rebuilt_image(own: Path, tmp_path: Path) -> None:
    """Same definition, same name, other bytes."""
    pins.lock(own)
    own.unlink()
    build(own, LABELS)
    refused(own, "not the file that is pinned")
    with pytest.raises(UsageError, match="'own' is pinned to sha256.*--replace"):
        pins.lock(own)
    refused(own, "not the file that is pinned")
    pins.lock(own, replace=True)
    assert pins.verified(own).name == "own"


def test_the_fix_mends_it(own: Path, tmp_path: Path) -> None:
    """Whatever the entry is called and wherever it stands."""
    pins.lock(own, name="my image", into=tmp_path / "containers")
    patch(own, own.stat().st_size - 100, b"\xee")
    fix = refused(own, "not the file that is pinned as 'my image'").rpartition("is meant, ")[2]
    words = shlex.split(fix)
    assert words[:2] == ["kimi-eagle", "image"]
    done = subprocess.run([sys.executable, "-m", "kimi_eagle", *words[1:]], capture_output=True)
    assert done.returncode == 0, done.stderr
    assert pins.verified(own).name == "my image"


def test_without_our_labels(plain: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(plain, tmp_path / "plain.sif"))
    pins.lock(path)
    refused(path, r"no label org.opencontainers.image.revision and 4 more")
    some = build(tmp_path / "some.sif", {k: v for k, v in LABELS.items() if "version" not in k})
    pins.lock(some)
    refused(some, r"no label org.opencontainers.image.version;")


def test_other_architecture(own: Path) -> None:
    pins.lock(own)
    assert "expected arm64" in refused(own, "another architecture: amd64", arch="arm64")
    pins.lock(other_arch(own), replace=True)
    assert "expected amd64" in refused(own, "another architecture: arm64")
    # The root folder's architecture is the one that Apptainer looks at.
    patch(own, 45, b"02")
    [system] = [offset for offset, kind, _ in descriptors(own) if kind == 0x4004]
    patch(own, system + 201 + 8, b"04")
    pins.lock(own, replace=True)
    refused(own, "another architecture: arm64")


def test_what_is_no_image(own: Path, sandbox: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to("nothing")
    refused(sandbox, f"a sandbox folder.*fix: kimi-eagle image import {sandbox}")
    refused(tmp_path, "a folder")
    refused("nothing", "no such image")
    refused("dangling", "no such image")
    refused("pipe", "not a file")


def test_unreadable_image(own: Path, tmp_path: Path) -> None:
    pins.lock(own)
    own.chmod(0o600)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    with as_nobody():
        refused(own, "cannot be read: Permission denied")


# -- a file that does not keep still ------------------------------------------------------------


def test_changes_while_it_is_read(own: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(own, tmp_path / "copy"))

    def append(count: int) -> None:
        with open(own, "ab") as file:
            file.write(b"x")

    def replace(count: int) -> None:
        if copy.exists():
            copy.replace(own)

    for change in (append, replace):
        with pytest.raises(UsageError, match="changed while it was read"):
            pins.lock(own, progress=change)
        assert not (tmp_path / "images.lock.json").exists()
    assert pins.lock(own).sha256 == files.sha256_file(own)


# -- the memory of digests ----------------------------------------------------------------------


def test_read_once(own: Path, nobodys_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashcache, "SETTLED_SECONDS", -1)
    pins.lock(own)
    size = own.stat().st_size
    (nobodys_home / ".cache/kimi-eagle/images.json").unlink()
    for least, most in ((size, 2 * size), (0, size // 4), (0, size // 4)):
        before = bytes_read()
        pins.verified(own)
        assert least <= bytes_read() - before <= most
    before = bytes_read()
    pins.pinned(own)
    assert bytes_read() - before >= size
    os.utime(own)  # ctime is another
    before = bytes_read()
    pins.verified(own)
    assert bytes_read() - before >= size


def test_a_young_file_is_not_remembered(own: Path, nobodys_home: Path) -> None:
    """Two changes within one tick of the file system's clock look the same from outside."""
    pins.lock(own)
    pins.verified(own)
    assert not (nobodys_home / ".cache").exists()


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"format": "image-digests/1", "files": 3}', "[" * 100_000, "\udcff",
     '{"format": "image-digests/1", "files": {"OWN": {"stat": "STAT", "sha256": "zz"}}}',
     '{"format": "image-digests/2", "files": {"OWN": {"stat": "STAT", "sha256": "SHA"}}}'],
)  # fmt: skip
def test_damaged_memory(own: Path, text: str, nobodys_home: Path) -> None:
    pins.lock(own)
    cache = nobodys_home / ".cache" / "kimi-eagle" / "images.json"
    cache.parent.mkdir(parents=True)
    values = {"OWN": str(own), "STAT": pins.stat_line(own), "SHA": "a" * 64}
    for word, value in values.items():
        text = text.replace(word, value)
    cache.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert pins.verified(own).name == "own"


def test_memory_of_another_user(own: Path, nobodys_home: Path) -> None:
    """sudo may keep HOME: then the cache is another's, who could vouch for anything."""
    pins.lock(own)
    good, bad = pins.verified(own).sha256, "a" * 64
    cache = nobodys_home / ".cache" / "kimi-eagle" / "images.json"
    cache.parent.mkdir(parents=True)
    entry = {"stat": pins.stat_line(own), "sha256": bad}
    cache.write_text(json.dumps({"format": "image-digests/1", "files": {str(own): entry}}))
    refused(own, bad)
    if os.geteuid() == 0:
        os.chown(cache, 65534, 65534)
        assert pins.verified(own).sha256 == good


@pytest.mark.parametrize("kind", ["a file in the way", "unwritable", "not set"])
def test_no_place_for_a_memory(
    own: Path, kind: str, nobodys_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashcache, "SETTLED_SECONDS", -1)
    pins.lock(own, into=own.parent / "containers")
    if kind == "a file in the way":
        shutil.rmtree(nobodys_home / ".cache", ignore_errors=True)
        (nobodys_home / ".cache").write_text("")
    elif kind == "unwritable":  # procfs takes no files, from root neither
        monkeypatch.setenv("HOME", "/proc/1")
    else:
        monkeypatch.setenv("HOME", "relative")
    assert pins.verified(own).name == "own"


def test_a_full_home(own: Path, ground: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = ground / "full"
    full.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(full)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("cannot mount here")
    try:
        (full / ".cache/kimi-eagle").mkdir(parents=True)
        with (
            open(full / "rest", "wb", buffering=0) as rest,
            pytest.raises(OSError, match="No space"),
        ):
            for _ in range(100):
                rest.write(b"x" * 4096)
        monkeypatch.setattr(hashcache, "SETTLED_SECONDS", -1)
        monkeypatch.setenv("HOME", str(full))
        pins.lock(own)
        assert pins.verified(own).name == "own"
        assert list((full / ".cache/kimi-eagle").iterdir()) == []
    finally:
        subprocess.run(["umount", str(full)], check=True)


# -- what the node compares ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "a b", "a\nb", "-L", "q\"u,o'te", "ü\udcff", "%s%n"])
def test_stat_line_is_that_of_gnu_stat(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(b"x" * 1234)
    link = tmp_path / f"{name} link"
    link.symlink_to(path)
    for ns in (None, 1_700_000_000_000_000_001, 999_999_999, 0, -1, -1_750_000_000):
        if ns is not None:
            os.utime(path, ns=(ns, ns))
        for given in (path, link):
            argv = ["stat", "-Lc", "%s %.9Y %.9Z %i", "--", str(given)]
            done = subprocess.run(argv, capture_output=True, check=True, env={"LC_ALL": "C"})
            assert pins.stat_line(given) == done.stdout.decode().strip()


# -- Image --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [{"bytes": "3"}, {"bytes": True}, {"sha256": None}, {"labels": []}, {"path": 3}, {"name": {}}],
)
def test_image_of_another_shape(change: dict[str, object]) -> None:
    good = pins.Image("/a", "a", "0" * 64, 3, "id", "amd64", {}).as_json()
    assert pins.Image.from_json({**good, "later": 1}).path == "/a"
    with pytest.raises(UsageError, match=f"not an image: {next(iter(change))}"):
        pins.Image.from_json(good | change)
    with pytest.raises(UsageError, match="not an image"):
        pins.Image.from_json([good])
