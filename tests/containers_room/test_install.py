"""install.sh on a small bundle of real parts: what it makes, mends and refuses."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from bundles import install, rewrite, small_bundle, unpack

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture(scope="module")
def archive() -> Path:
    return small_bundle()


@pytest.fixture(scope="module")
def bundle(archive: Path, ground: Path) -> Iterator[Path]:
    folder = unpack(archive, ground / "a bundle")
    yield folder
    shutil.rmtree(folder.parent)


@pytest.fixture
def copy(bundle: Path, ground: Path) -> Iterator[Path]:
    """A bundle to spoil; its files are hard links."""
    folder = ground / "copy"
    shutil.copytree(bundle, folder, copy_function=os.link)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def prefix(bundle: Path, ground: Path, ordinary_user) -> Path:
    """An installation by a user without network, below a folder with a blank in its name."""
    folder = ground / "a prefix" / "kimi eagle"
    folder.parent.mkdir()
    ordinary_user.chown(folder.parent)
    via = ["unshare", "--user", "--map-root-user", "--net"]
    done = install(bundle, folder, via=via, **ordinary_user.ids)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def run(prefix: Path, *args: str, **more) -> subprocess.CompletedProcess[str]:
    argv = [str(prefix / "bin/kimi-eagle"), *args]
    return subprocess.run(argv, capture_output=True, text=True, **more)


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    found = {p: p.lstat() for p in folder.rglob("*")}
    return {str(p.relative_to(folder)): (s.st_mtime_ns, s.st_size) for p, s in found.items()}


def refused(done: subprocess.CompletedProcess[str], *words: str, code: int = 1) -> None:
    """One line that says what; nothing more."""
    assert done.returncode == code, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("install: error: ") and all(w in line for w in words), line


def test_installed_for_all_users_from_any_directory(prefix: Path, tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise SystemExit('the working directory got in')")
    poison = {
        "PYTHONPATH": str(tmp_path),
        "PYTHONHOME": str(tmp_path),
        "PYTHONSTARTUP": str(tmp_path / "click.py"),
        "LD_LIBRARY_PATH": str(tmp_path),
        "CDPATH": "/",
        "HOME": "/dev/null/home",
        "PATH": os.environ["PATH"],
    }
    before = listing(prefix)
    for env in (poison, {}):
        done = run(prefix, "--version", cwd=tmp_path, env=env)
        assert (done.returncode, done.stdout) == (0, "kimi-eagle, version 0.1.0\n"), done.stderr
    assert run(prefix, "--help").stdout.startswith("Usage: kimi-eagle ")
    link = tmp_path / "eagle"
    link.symlink_to(os.path.relpath(prefix / "bin/kimi-eagle", tmp_path.resolve()))
    assert subprocess.run([link, "--version"], capture_output=True).returncode == 0
    assert listing(prefix) == before
    for path in prefix.rglob("*"):
        assert path.is_symlink() or path.stat().st_mode & 0o044 == 0o044, path
    for name in ("jobs/smollm2.toml", "sites/example.toml", "containers/locks/cpu.lock"):
        assert (prefix / "share/kimi-eagle" / name).is_file()


def test_moved_it_still_works(prefix: Path, ground: Path) -> None:
    moved = ground / "moved"
    prefix.rename(moved)
    try:
        assert run(moved, "--version", cwd="/").returncode == 0
        done = subprocess.run(["bin/kimi-eagle", "--version"], cwd=moved)
        assert done.returncode == 0
    finally:
        moved.rename(prefix)


def test_again_changes_nothing_and_mends_damage(prefix: Path, bundle: Path) -> None:
    versions = prefix / "lib/kimi-eagle"
    before = listing(versions / "current")
    assert "is there already" in install(bundle, prefix).stdout
    assert listing(versions / "current") == before
    (damaged,) = (versions / "current").resolve().glob("**/*-packages/click")
    shutil.rmtree(damaged)
    assert run(prefix, "--version").returncode != 0
    done = install(bundle, prefix)
    assert done.returncode == 0 and "installing" in done.stdout, done.stderr
    assert run(prefix, "--version").returncode == 0
    assert sorted(os.listdir(versions)) == sorted(["current", os.readlink(versions / "current")])


def test_killed_and_typed_again_then_upgraded(
    archive: Path, bundle: Path, copy: Path, ground: Path
) -> None:
    """The first time from an archive with a script beside it; then from another bundle."""
    place = ground / "killed"
    argv = ["bash", str(bundle / "install.sh"), "--offline", "--prefix", str(place)]
    victim = subprocess.Popen(argv, start_new_session=True, stdout=subprocess.DEVNULL)
    limit = time.monotonic() + 120
    while not list(place.glob("lib/kimi-eagle/.new-*/tree/bin/python3*")):
        assert time.monotonic() < limit and victim.poll() is None
        time.sleep(0.01)
    os.killpg(victim.pid, signal.SIGKILL)
    victim.wait()
    assert not (place / "bin/kimi-eagle").exists()
    shutil.copy(bundle / "install.sh", archive.parent)
    done = install(archive.parent, place)
    assert done.returncode == 0, done.stderr
    (first,) = {x.name for x in (place / "lib/kimi-eagle").iterdir()} - {"current"}

    text = (copy / "BUNDLE").read_text()
    new = f"{first}b"
    rewrite(copy / "BUNDLE", text.replace(f"id={first}\n", f"id={new}\n").encode())
    seal(copy)
    assert "--prune" in install(copy, place).stdout
    assert os.readlink(place / "lib/kimi-eagle/current") == new
    assert "removed" in install(copy, place, "--prune").stdout
    assert sorted(os.listdir(place / "lib/kimi-eagle")) == sorted([new, "current"])
    assert run(place, "--version").returncode == 0


def seal(folder: Path) -> None:
    """MANIFEST as the bundle's files now are."""
    names = [line[66:] for line in (folder / "MANIFEST").read_text().splitlines()]
    done = subprocess.run(["sha256sum", *names], cwd=folder, capture_output=True, check=True)
    rewrite(folder / "MANIFEST", done.stdout)


def test_damage_is_refused(copy: Path, ground: Path) -> None:
    """A flipped byte, a short file, none, a shorter MANIFEST, none, another BUNDLE."""
    place = ground / "never"
    (wheel,) = (copy / "wheels").glob("click-*.whl")
    manifest = (copy / "MANIFEST").read_bytes()
    flipped = bytearray(wheel.read_bytes())
    flipped[1000] ^= 1
    faults = {
        wheel: [bytes(flipped), wheel.read_bytes()[:-1], None],
        copy / "MANIFEST": [manifest.split(b"\n", 3)[3], manifest + b"so\n", b"", None],
        copy / "BUNDLE": [(copy / "BUNDLE").read_bytes().replace(b"2.31", b"2.17")],
    }
    for file, contents in faults.items():
        good = file.read_bytes()
        for content in contents:
            if content is None:
                file.unlink()
            else:
                rewrite(file, content)
            refused(install(copy, place), file.name if file == wheel else "MANIFEST")
            if content is not None:
                rewrite(file, good)
        file.write_bytes(good)
    assert not place.exists()


def test_a_cut_archive_is_refused(archive: Path, bundle: Path, ground: Path) -> None:
    short = ground / "short.tar"
    short.write_bytes(archive.read_bytes()[: archive.stat().st_size // 2])
    done = install(bundle, ground / "cut", "--bundle", str(short))
    refused(done, "short.tar: could not be unpacked")
    assert not list((ground / "cut").glob("**/*kimi-eagle*/*"))


def test_other_machines_are_refused(bundle: Path, copy: Path, ground: Path) -> None:
    place = ground / "never"
    refused(install(bundle, place, via=["setarch", "i686"]), "i686", "expected Linux x86_64")
    text = (copy / "BUNDLE").read_text().replace("glibc=2.31", "glibc=2.999")
    rewrite(copy / "BUNDLE", text.encode())
    seal(copy)
    refused(install(copy, place), "glibc here is 2.", "expected 2.999 or newer", "fix: ")
    assert not place.exists()


def test_what_cannot_be_written_is_refused(bundle: Path, ground: Path, ordinary_user) -> None:
    closed = ground / "closed"
    closed.mkdir(mode=0o555)
    done = install(bundle, closed / "x", **ordinary_user.ids)
    refused(done, str(closed / "x"), "Permission denied", "fix: another --prefix")
    refused(install(bundle, bundle / "BUNDLE"), "is no folder", code=2)
    (ground / "taken/bin").mkdir(parents=True)
    (ground / "taken/bin/kimi-eagle").write_text("#!/bin/sh\n")
    refused(install(bundle, ground / "taken"), "bin/kimi-eagle: is there and not ours")
    assert (ground / "taken/bin/kimi-eagle").read_text() == "#!/bin/sh\n"


@pytest.mark.parametrize("said", [True, False], ids=["foreseen", "on the way"])
@root_only
def test_a_full_disk_is_refused(bundle: Path, copy: Path, ground: Path, said: bool) -> None:
    """64 MB of room; once the bundle says beforehand that it wants more, once it finds out."""
    if not said:
        lines = (copy / "BUNDLE").read_text().splitlines()
        lines = [x if not x.startswith("room_mb=") else "room_mb=1" for x in lines]
        rewrite(copy / "BUNDLE", ("\n".join(lines) + "\n").encode())
        seal(copy)
    place = ground / "small disk"
    place.mkdir()
    script = f'mount -t tmpfs -o size=40m none {shlex.quote(str(place))} && "$@"; code=$?; '
    script += f"find {shlex.quote(str(place))} -type f; exit $code"
    done = install(copy, place, via=["unshare", "--mount", "bash", "-c", script, "bash"])
    place.rmdir()
    refused(done, "free; expected" if said else "is full; fix: free some")
    assert str(place) not in done.stdout.replace(f"into {place}", "")


@pytest.mark.parametrize(
    "options, word",
    [
        (["--prefix", ""], "no --prefix"),
        (["--prefix", "/a:b"], "colon"),
        (["--what"], "unknown argument '--what'"),
        (["--bundle"], "wants a value"),
        (["--bundle", "/etc"], "not a bundle"),
        (["--bundle", "/dev/null/x"], "no such bundle"),
    ],
)
def test_wrong_use(bundle: Path, ground: Path, options: list[str], word: str) -> None:
    refused(install(bundle, ground / "never", *options), word, code=2)
    assert not (ground / "never").exists()


def test_half_a_script_does_nothing(copy: Path, ground: Path) -> None:
    text = (copy / "install.sh").read_bytes()
    for share in range(1, 10):
        rewrite(copy / "install.sh", text[: len(text) * share // 10])
        install(copy, ground / "never")
        assert not (ground / "never").exists()
