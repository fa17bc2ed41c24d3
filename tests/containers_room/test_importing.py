"""From every kind of source to a pinned image, or to one reason and no file at all."""

from __future__ import annotations

import bz2
import json
import lzma
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from small_image import LABELS, Archives, gzipped, other_arch, patch

from kimi_eagle import files, turns
from kimi_eagle.errors import KimiEagleError, UsageError
from kimi_eagle.images import importing, pins
from kimi_eagle.images.importing import import_image, kind_of

pytestmark = pytest.mark.usefixtures("nobodys_home")


@pytest.fixture(scope="module")
def archives(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Archives:
    return Archives(tmp_path_factory.mktemp("archives"), small)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, empty."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def runs(image: Path) -> bool:
    argv = ["apptainer", "-q", "exec", "--no-home", str(image), "/bin/sh", "-c", "exit 42"]
    return subprocess.run(argv, capture_output=True, cwd="/").returncode == 42


def refused(word: str, source: object, here: Path, **more: object) -> KimiEagleError:
    """Refused, and nothing is left that was not there."""
    before = sorted(here.rglob("*"))
    with pytest.raises(KimiEagleError, match=word) as caught:
        import_image(str(source), **more)
    assert sorted(here.rglob("*")) == before
    return caught.value


# -- what is taken ------------------------------------------------------------------------------


def test_a_sif_file(small: Path, here: Path) -> None:
    made = import_image(small)
    assert made.path == str(here / "small.sif")
    assert made.sha256 == files.sha256_file(small) == files.sha256_file(here / "small.sif")
    assert pins.verified("small.sif") == made
    assert sorted(p.name for p in here.iterdir()) == ["images.lock.json", "small.sif"]


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("docker-archive", lambda a: a.docker("plain.zip")),  # names say nothing
        ("docker-archive", lambda a: gzipped(a.docker("to be packed"))),
        ("oci-archive", lambda a: a.oci("oci.sif")),
        ("oci-archive", lambda a: a.oci("dots", inside="./")),
        ("oci-archive", lambda a: gzipped(a.oci("oci to be packed"))),
        ("oci", lambda a: a.layout("layout")),
        ("sandbox", lambda a: a.sandbox),
    ],
)
def test_other_kinds(kind: str, make: object, archives: Archives, here: Path) -> None:
    source = make(archives)  # type: ignore[operator]
    assert kind_of(source) == kind
    made = import_image(source, Path("new.sif"), name="a name")
    assert pins.verified("new.sif") == made and made.name == "a name"
    assert LABELS.items() <= made.labels.items()
    assert sorted(p.name for p in here.iterdir()) == ["images.lock.json", "new.sif"]
    assert runs(here / "new.sif")


def test_other_compressions(archives: Archives, here: Path) -> None:
    source = archives.docker("to be compressed").read_bytes()
    for name, pack in (("a.bz2", bz2.compress), ("a.xz", lambda d: lzma.compress(d, preset=0))):
        (archives.folder / name).write_bytes(pack(source))
        assert import_image(archives.folder / name, Path(f"{name}.sif")).labels
    (archives.folder / "a.zst").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(100))
    refused("compressed with zstd.*zstd -d", archives.folder / "a.zst", here)


ODD = ["a:b", 'a "b", c', "-o", "a\nb", "ü\udcff", "docker-archive:x", "a\\b", "$(true)"]


@pytest.mark.parametrize("name", ODD)
def test_odd_names(name: str, small: Path, archives: Archives, here: Path) -> None:
    odd = here / name
    odd.mkdir()
    shutil.copy(small, odd / name)
    shutil.copy(archives.docker("for odd names"), odd / f"{name}.tar")
    for source in (odd / name, odd / f"{name}.tar", name + "/" + name):
        made = import_image(source, odd / "new.sif", name="x")
        assert pins.verified(made.path).name == "x"
        (odd / "new.sif").unlink()
        (odd / "images.lock.json").unlink()


def test_odd_name_of_the_result(small: Path, archives: Archives, here: Path) -> None:
    for source in (small, archives.docker("for an odd result")):
        out = here / f'a, "b":{source.stem} c.sif'
        assert pins.verified(import_image(source, out).path).name == out.stem
    error = refused("not a name", small, here, out=here / "a\nb.sif")
    assert "--name" in error.fix
    assert refused("not a name", archives.docker("again"), here, out=here / "a\nb").fix


@pytest.mark.parametrize("name", ["a:b", "a$(true)b", 'a"b', "a'b", "a;b", "a\nb"])
def test_odd_temporary_folder(
    name: str, archives: Archives, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Apptainer would make an image without labels of it, or fail with four lines."""
    (here / name).mkdir()
    monkeypatch.setenv("APPTAINER_TMPDIR", str(here / name))
    refused("cannot unpack in a folder with", archives.sandbox, here)
    monkeypatch.setenv("APPTAINER_TMPDIR", str(here))
    import_image(archives.sandbox)


def test_into_a_folder(small: Path, here: Path) -> None:
    (here / "images").mkdir()
    made = import_image(small, Path("images"))
    assert made.path == str(here / "images" / "small.sif")


def test_through_a_link(small: Path, archives: Archives, here: Path) -> None:
    (here / "link").symlink_to(archives.sandbox)
    (here / "image").symlink_to(small)
    assert import_image("link", Path("a.sif")).labels
    assert import_image("image", Path("b.sif")).sha256 == files.sha256_file(small)


def test_as_an_ordinary_user(
    small: Path, archives: Archives, ordinary_user: object, ground: Path
) -> None:
    """HOME does not exist, and what root alone may read of a sandbox is missed."""
    folder = ground / "of the user"
    folder.mkdir()
    shutil.copytree(archives.sandbox, folder / "sandbox", symlinks=True)
    shutil.copy(archives.docker("for a user"), folder / "docker.tar")
    ordinary_user.chown(folder)  # type: ignore[attr-defined]

    def call(source: str, out: str) -> str:
        """In a fork, because this Python may lie where that user cannot read it."""
        receive, send = os.pipe()
        if not (pid := os.fork()):
            try:
                if os.geteuid() == 0:
                    who = pwd.getpwnam(ordinary_user.name)  # type: ignore[attr-defined]
                    os.setgroups([])
                    os.setgid(who.pw_gid)
                    os.setuid(who.pw_uid)
                os.chdir(folder)
                os.environ["HOME"] = "/nonexistent"
                made = import_image(source, Path(out))
                assert pins.verified(out) == made
            except BaseException as e:
                os.write(send, f"{type(e).__name__}: {e}".encode())
            finally:
                os._exit(0)
        os.close(send)
        os.waitpid(pid, 0)
        with open(receive) as said:
            return said.read()

    assert call("docker.tar", "a.sif") == "" and call("sandbox", "b.sif") == ""
    if os.geteuid() == 0:
        closed = folder / "sandbox" / "closed"
        closed.mkdir(mode=0o700)
        (closed / "file").touch()
        assert "not all of the sandbox could be read" in call("sandbox", "c.sif")
    assert sorted(p.name for p in folder.iterdir() if p.suffix == ".sif") == ["a.sif", "b.sif"]
    assert not [p for p in folder.iterdir() if p.name.startswith(".")]


# -- what is not --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    ["docker://vllm/vllm-openai:v1", "library://a/b", "https://a.b/c.sif", "oras://a/b:1",
     "docker-daemon:a:1", "docker://a b"],
)  # fmt: skip
def test_nothing_is_fetched(source: str, here: Path) -> None:
    error = refused("would be fetched from elsewhere", source, here)
    quoted = f"'{source}'" if " " in source else source
    assert f"apptainer build image.sif {quoted};" in error.fix


def test_kinds_are_not_named(archives: Archives, here: Path) -> None:
    path = archives.docker("named")
    error = refused("read from the content", f"docker-archive:{path}", here)
    assert error.fix == f"kimi-eagle image import {path}"
    refused("no such file or folder", "docker-archive:/nothing", here)
    refused("no such file or folder", "", here)


def test_what_is_no_image(small: Path, here: Path) -> None:
    (here / "text").write_text("hello")
    (here / "empty").touch()
    (here / "folder").mkdir()
    os.mkfifo(here / "pipe")
    subprocess.run(["tar", "cf", "other.tar", "text"], check=True)
    refused("no SIF and no archive", "text", here)
    refused("no SIF and no archive", "other.tar", here)
    refused("empty file", "empty", here)
    refused("a folder without", "folder", here)
    refused("not a file", "pipe", here)
    refused("no such file", "nothing", here)
    refused("not a path", "a\0b", here)


def test_damaged_sources(small: Path, archives: Archives, here: Path) -> None:
    for source in (
        small,
        archives.docker("whole"),
        gzipped(archives.docker("whole 2")),
        archives.oci("whole 3"),
        gzipped(archives.oci("whole 4")),
    ):
        data = source.read_bytes()
        for share in (0.1, 0.5, 0.9):
            (here / "part").write_bytes(data[: int(len(data) * share)])
            refused("truncated|damaged|no SIF", "part", here, out=here / "new.sif")


def test_an_archive_that_climbs_out(archives: Archives, here: Path) -> None:
    path = archives.oci("climbs", inside="./")
    with tarfile.open(path, "a") as archive:
        archive.add(archives.folder / "climbs.layout" / "oci-layout", arcname="../../climbed")
    refused("damaged archive", path, here)


def test_none_of_ours(plain: Path, here: Path) -> None:
    error = refused("not an image of kimi-eagle", plain, here)
    assert error.fix == "--foreign"
    made = import_image(plain, foreign=True)
    assert pins.pinned("plain.sif").sha256 == made.sha256
    with pytest.raises(UsageError, match="not an image of kimi-eagle"):
        pins.verified("plain.sif")


def test_for_another_architecture(own: Path, here: Path) -> None:
    """Taken: the machine that runs it may be another one."""
    import_image(other_arch(own))
    with pytest.raises(UsageError, match="another architecture"):
        pins.verified("own.sif")


def test_nothing_is_replaced(small: Path, plain: Path, archives: Archives, here: Path) -> None:
    import_image(small, Path("a.sif"))
    before = (here / "images.lock.json").read_bytes()
    for source in (small, archives.docker("not to replace")):
        refused("there is a file already", source, here, out=here / "a.sif", replace=True)
    (here / "dangling.sif").symlink_to("nothing")
    refused("there is a file already", small, here, out=here / "dangling.sif")
    refused("it is here already", here / "a.sif", here)
    # The name is taken by other bytes: said before anything is built.
    refused("'a' is pinned", plain, here, out=here / "b.sif", name="a", foreign=True)
    refused("'a' is pinned", archives.sandbox, here, out=here / "b.sif", name="a")
    assert (here / "images.lock.json").read_bytes() == before
    import_image(plain, Path("b.sif"), name="a", foreign=True, replace=True)
    assert pins.pinned("b.sif").name == "a"


def test_somebody_else_was_first(small: Path, archives: Archives, here: Path) -> None:
    """Between the look and the new name."""
    for source in (small, archives.sandbox):
        with pytest.raises(UsageError, match="there is a file already"):
            import_image(source, Path("a.sif"), say=lambda text: Path("a.sif").write_text("mine"))
        assert [p.name for p in here.iterdir()] == ["a.sif"]
        assert (here / "a.sif").read_text() == "mine"
        (here / "a.sif").unlink()


def test_that_cannot_be_pinned(small: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is in no lock is none that one should find."""
    monkeypatch.setattr(turns, "TURN_SECONDS", 0)
    (here / ".images.lock.json.turn").write_text('{"host": "another", "pid": 1}')
    refused("another command is at work", small, here)


def test_no_such_folder(small: Path, here: Path) -> None:
    assert refused("no such folder", small, here, out=here / "a b" / "c.sif").fix.startswith(
        "mkdir -p '"
    )
    refused("no such folder|cannot be written", small, here, out=Path("/proc/1/c.sif"))


def test_a_disk_that_writes_other_bytes(
    small: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importing._copy

    def damaged(origin: Path, made: Path, progress: object) -> str:
        digest = real(origin, made, None)
        patch(made, made.stat().st_size - 100, b"\xee")
        return digest

    monkeypatch.setattr(importing, "_copy", damaged)
    refused("read back", small, here)


def test_full_disk(small: Path, archives: Archives, ground: Path) -> None:
    full = ground / "full-disk"
    full.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "none", str(full)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("cannot mount here")
    try:
        for source in (small, archives.docker("for a full disk"), archives.oci("for a full one")):
            refused("No space|no space", source, full, out=full / "a.sif")
    finally:
        subprocess.run(["umount", str(full)], check=True)


def test_source_that_grows(own: Path, here: Path) -> None:
    def append(count: int) -> None:
        with open(own, "ab") as file:
            file.write(bytes(count))

    refused("changed while it was read", own, here, progress=append)


def test_without_apptainer(
    small: Path, archives: Archives, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    refused("no program 'apptainer'", archives.sandbox, here)
    assert import_image(small).labels


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_stopped(number: int, archives: Archives, here: Path) -> None:
    """No file, nothing left over, and nothing that goes on working."""
    shutil.copytree(archives.sandbox, here / "big", symlinks=True)
    with open(here / "big" / "random", "wb") as file:
        for _ in range(60):
            file.write(os.urandom(1 << 20))
    code = (
        "import sys; from kimi_eagle.images.importing import import_image\n"
        "from pathlib import Path; import_image('big', Path('new.sif'))"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list(here.glob(".tmp-*/log")) and time.monotonic() < deadline:
        time.sleep(0.01)
    [log] = here.glob(".tmp-*/log")
    child.send_signal(number)
    assert child.wait(60) != 0
    assert [p.name for p in here.iterdir()] == ["big"]
    while working := [p for p in Path("/proc").glob("[0-9]*/cwd") if _leads(p, log.parent)]:
        assert time.monotonic() < deadline, working  # the killed ones are gone in no time


def _leads(link: Path, folder: Path) -> bool:
    try:
        return os.readlink(link).startswith(str(folder))
    except OSError:
        return False


def test_environment_changes_nothing(
    archives: Archives, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "APPTAINER_NOHTTPS": "1",
        "APPTAINER_FORCE": "1",
        "APPTAINER_CACHEDIR": "/proc/1",
        "APPTAINER_ENCRYPT": "1",
        "SINGULARITY_BIND": "/nothing",
        "APPTAINER_SANDBOX": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert Path(import_image(archives.sandbox, Path("a.sif")).path).is_file()
    assert json.loads((here / "images.lock.json").read_text())["images"].keys() == {"a"}
