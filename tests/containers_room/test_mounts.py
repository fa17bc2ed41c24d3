"""What a job sees of the host: the folders it was given, whatever they are called, and no other."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kimi_eagle.containers.exec import SCRATCH, Mount

HOSTILE = [
    *("plain", "a b", " lead", "trail ", "a,b", "a:b", "a=b", "a;b", "a'b", 'a"b', '"all"', 'a""b'),
    *("a\\b", "\\", "a\\,b", "a\\:b", "a$HOME", "a`id`", "a$(id)", "a*b", "a?b", "a#b", "a%b"),
    *("a\nb", "a\tb", "a\x01b", "-x", "--bind", "ro", "source=x,destination=y", "é中🎉", "x" * 200),
]
"""Names of folders that pass intact."""

READ = """
answer = []
for folder in sys.argv[1:]:
    try:
        open(folder + "/new", "x").close()
        wrote = True
    except OSError:
        wrote = False
    answer.append([open(folder + "/name").read(), wrote])
"""


def test_hostile_names_pass_intact(room: Any) -> None:
    mounts, expected = [], []
    for number, name in enumerate(HOSTILE):
        source = room.folder / name
        source.mkdir()
        (source / "name").write_text(name)
        # Half of them at their own path, so that targets are as hostile as sources.
        target = f"/data/{number}" if number % 2 else str(source)
        mounts.append(Mount(str(source), target, read_only=number % 3 != 0))
        expected.append([name, number % 3 == 0])
    room.person.chown(room.folder)
    settings = room.settings(mounts=tuple(mounts))
    seen = room.python(settings, READ, *(m.target for m in mounts))
    assert seen == expected


@pytest.mark.parametrize(
    "bad", ["a\r\nb", "a\rb", os.fsdecode(b"\xff")], ids=["crlf", "cr", "bytes"]
)
def test_what_apptainer_would_change_is_refused(bad: str) -> None:
    with pytest.raises(Exception, match="UTF-8 without carriage returns") as refused:
        Mount(f"/data/{bad}", "/data")
    assert "\r" not in str(refused.value) and "\n" not in str(refused.value)
    with pytest.raises(Exception, match="UTF-8 without carriage returns"):
        Mount("/data", f"/data/{bad}")


def test_inner_mounts_are_not_hidden_by_outer_ones(room: Any) -> None:
    for name in ("outer/inner/deep", "inner", "deep"):
        folder = room.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "name").write_text(name)
    (room.folder / "outer" / "name").write_text("outer")
    room.person.chown(room.folder)
    mounts = (
        Mount(f"{room.folder}/deep", "/data/inner/deep/"),
        Mount(f"{room.folder}/inner", "/data/inner", read_only=False),
        Mount(f"{room.folder}/outer", "/data"),
    )
    (room.folder / "inner" / "deep").mkdir()
    room.person.chown(room.folder)
    seen = room.python(
        room.settings(mounts=mounts), READ, "/data", "/data/inner", "/data/inner/deep"
    )
    assert seen == [["outer", False], ["inner", True], ["deep", False]]


def test_hostile_image_workdir_and_scratch(room: Any) -> None:
    for name in ("a,b:c d", 'it\'s "x"\n$(id) \\', "é=%*"):
        folder = room.folder / name
        folder.mkdir()
        os.link(room.image, folder / "image.sif")
        room.person.chown(room.folder)
        os.chown(room.image, 0, 0) if os.geteuid() == 0 else None
        settings = room.settings(
            image=str(folder / "image.sif"),
            workdir=str(folder),
            mounts=(Mount(str(folder), str(folder), read_only=False),),
        )
        code = "open(os.environ['TMPDIR'] + '/file', 'x').close(); answer = os.getcwd()"
        assert room.python(settings, code, host_env={"TMPDIR": str(folder)}) == str(folder)
        # A quote could not be written into the mount from within the script: /tmp is taken.
        assert [p.name for p in folder.glob("ke-*/tmp/*")] == ["file"] * ('"' not in name)


def test_sandbox_folder(room: Any, sandbox: Path) -> None:
    """No squashfuse that a signal to the whole step could end."""
    settings = room.settings(image=str(sandbox))
    answer = room.python(settings, "answer = [sys.prefix, os.environ['APPTAINER_CONTAINER']]")
    assert answer == ["/usr", str(sandbox)]


def test_no_home_and_only_the_given_folders(room: Any) -> None:
    marker = room.person.home / ".marker-of-a-test"
    marker.touch()
    try:
        seen = room.python(
            room.settings(),
            "answer = [os.path.exists(sys.argv[1]), os.path.exists(sys.argv[2]), os.getcwd()]",
            str(marker),
            str(Path(__file__).resolve()),
            cwd=room.person.home,  # a working directory below the home would let it in
        )
        # /tmp stays the host's, and the temporary account (or the checkout) may lie below it.
        below = [path.startswith("/tmp/") for path in (str(marker), str(Path(__file__).resolve()))]
        assert seen == [*below, SCRATCH]
    finally:
        marker.unlink()


def test_sockets_however_long_the_scratch_path_is(room: Any) -> None:
    """sun_path holds 107 characters; outside, the folder's path alone is longer."""
    base = room.folder / ("long" * 40)
    base.mkdir()
    room.person.chown(base)
    answer = room.python(
        room.settings(),
        "import socket, tempfile\n"
        "path = os.path.join(tempfile.mkdtemp(), 'x' * 70)\n"
        "socket.socket(socket.AF_UNIX).bind(path)\n"
        "answer = path",
        host_env={"TMPDIR": str(base)},
    )
    assert answer.startswith(f"{SCRATCH}/tmp/") and len(str(base)) > 107
    assert next(base.glob("ke-*/tmp/*/x*")).is_socket()
