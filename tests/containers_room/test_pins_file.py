"""images.lock.json: two writers at once, damage by hand and by merges, folders that are closed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small_image import as_nobody

from kimi_eagle import liveness, turns
from kimi_eagle.errors import KimiEagleError, RunError, UsageError
from kimi_eagle.images import lockfile, pins

pytestmark = pytest.mark.usefixtures("nobodys_home")

LOCK = "images.lock.json"


def entry(**changes: Any) -> dict[str, Any]:
    good = {"file": "a.sif", "sha256": "0" * 64, "bytes": 3, "sif_id": "i", "arch": "amd64"}
    return good | {"labels": {}, "locked": "2026-01-01T00:00:00+00:00"} | changes


def document(**changes: Any) -> str:
    return json.dumps({"format": "images/1", "images": {"a": entry(**changes)}})


def test_what_is_written(own: Path) -> None:
    first = pins.lock(own)
    pins.lock(own, name="b name")
    text = (own.parent / LOCK).read_text()
    data = json.loads(text)
    assert data["format"] == "images/1" and list(data["images"]) == ["b name", "own"]
    written = dict(data["images"]["own"])
    assert written.pop("locked").startswith("20")
    wanted = first.as_json() | {"file": "own.sif"}
    assert written == {k: v for k, v in wanted.items() if k not in ("path", "name")}
    assert text == json.dumps(data, indent=1, sort_keys=True) + "\n"  # git shows what changed
    assert sorted(p.name for p in own.parent.iterdir()) == ["home", LOCK, "own.sif"]


def test_what_this_version_does_not_know_stays(own: Path) -> None:
    lock = own.parent / LOCK
    data = {"format": "images/1", "note": [1], "images": {"a": entry(later=True)}}
    lock.write_text(json.dumps(data))
    pins.lock(own)
    after = json.loads(lock.read_text())
    assert after["note"] == [1] and after["images"]["a"] == entry(later=True)
    assert "own" in after["images"]


def test_who_could_read_it_still_can(own: Path) -> None:
    pins.lock(own)
    (own.parent / LOCK).chmod(0o664)
    before = os.umask(0o077)
    try:
        pins.lock(own, name="another")
    finally:
        os.umask(before)
    assert (own.parent / LOCK).stat().st_mode & 0o777 == 0o664


def test_locked_again_changes_nothing(own: Path) -> None:
    pins.lock(own)
    before = pins.stat_line(own.parent / LOCK)
    pins.lock(own)
    assert pins.stat_line(own.parent / LOCK) == before


def test_writers_at_once_lose_nothing(own: Path) -> None:
    code = (
        "import sys; from kimi_eagle.images import pins\n"
        "for i in range(5): pins.lock(sys.argv[1], name=f'{sys.argv[2]}-{i}')"
    )
    argv = [sys.executable, "-c", code, str(own)]
    writers = [subprocess.Popen([*argv, str(n)]) for n in range(8)]
    assert [writer.wait(60) for writer in writers] == [0] * 8
    images = json.loads((own.parent / LOCK).read_text())["images"]
    assert sorted(images) == sorted(f"{n}-{i}" for n in range(8) for i in range(5))
    assert sorted(p.name for p in own.parent.iterdir()) == ["home", LOCK, "own.sif"]


def test_a_writer_that_died(own: Path) -> None:
    child = subprocess.Popen(["sleep", "60"])
    who = liveness.identity() | {"pid": child.pid}
    who["pid_started"] = liveness.process_start(child.pid)
    child.kill()
    child.wait()
    (own.parent / f".{LOCK}.turn").write_text(json.dumps(who))
    pins.lock(own)
    assert not (own.parent / f".{LOCK}.turn").exists()


@pytest.mark.parametrize("who", ['{"host": "another", "pid": 7}', "", "{}", "[3]"])
def test_a_writer_that_cannot_be_seen(own: Path, who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "TURN_SECONDS", 0)
    turn = own.parent / f".{LOCK}.turn"
    turn.write_text(who)
    with pytest.raises(RunError, match="another command is at work.*remove this file"):
        pins.lock(own)
    assert turn.read_text() == who and not (own.parent / LOCK).exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        "[]",
        "3",
        "\udcff",
        "[" * 200_000,
        "{}",
        '{"images": {}}',
        '{"format": "images/2", "images": {}}',
        '{"format": "images/1", "images": []}',
        '{"format": "images/1", "images": {"a": 3}}',
        '{"format": "images/1", "images": {"a": {}}}',
        document().replace('"images": {', f'"images": {{"a": {json.dumps(entry())}, '),
        document(sha256="A" * 64),
        document(sha256="0" * 63),
        document(sha256=None),
        document(bytes="3"),
        document(bytes=-1),
        document(bytes=True),
        document(labels=[]),
        document(labels={"a": 1}),
        document(file=3),
        document(file="a\0b"),
        "<<<<<<< HEAD\n" + document() + "\n=======\n" + document() + "\n>>>>>>> other\n",
    ],
)
def test_damaged(own: Path, text: str) -> None:
    lock = own.parent / LOCK
    lock.write_bytes(text.encode("utf-8", "surrogateescape"))
    before = lock.read_bytes()
    for call in (pins.verified, pins.pinned, pins.lock):
        with pytest.raises(UsageError) as caught:
            call(own)
        assert caught.value.where == str(lock) and "image lock" in caught.value.fix
        assert "\n" not in caught.value.line()
    assert lock.read_bytes() == before


def test_damaged_anywhere_on_the_way(own: Path, nobodys_home: Path) -> None:
    """The file that cannot be read might be the one that says no."""
    pins.lock(own)
    last = nobodys_home / ".config" / "kimi-eagle" / LOCK
    last.parent.mkdir(parents=True)
    last.write_text("{")
    with pytest.raises(UsageError, match="damaged lock file"):
        pins.verified(own)


def test_not_a_file(own: Path) -> None:
    os.mkfifo(own.parent / LOCK)  # nobody waits for a writer
    with pytest.raises(UsageError, match="damaged lock file"):
        pins.verified(own)
    (own.parent / LOCK).unlink()
    (own.parent / LOCK).mkdir()
    with pytest.raises(UsageError, match="damaged lock file"):
        pins.lock(own)


def test_a_link_stays_a_link(own: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    lock = own.parent / LOCK
    lock.symlink_to("real/pins.json")
    pins.lock(own)
    assert lock.is_symlink() and pins.verified(own).name == "own"


def test_folders_that_cannot_be_written(small: Path, ground: Path, nobodys_home: Path) -> None:
    folder = ground / "shared"
    folder.mkdir(mode=0o755)
    shared = Path(shutil.copy(small, folder / "image.sif"))
    shared.chmod(0o644)
    os.environ["HOME"] = "/nonexistent"
    with as_nobody():
        with pytest.raises(UsageError, match="cannot be written: Permission denied.*--into"):
            pins.lock(shared)
        with pytest.raises(KimiEagleError, match="cannot be written"):
            pins.lock(shared, into=Path("/proc/1"))
    assert [p.name for p in folder.iterdir()] == ["image.sif"]
    pins.lock(shared)
    (folder / LOCK).chmod(0o600)
    with as_nobody(), pytest.raises(UsageError, match="lock file cannot be read: Permission"):
        pins.verified(shared)
    (folder / LOCK).chmod(0o644)
    with as_nobody():
        assert pins.verified(shared).name == "image"


def test_into_a_new_folder(own: Path, tmp_path: Path) -> None:
    pins.lock(own, into=tmp_path / "containers")
    assert lockfile.read(tmp_path / "containers" / LOCK)["own"].path == str(own)
    with pytest.raises(UsageError, match="cannot be written"):
        pins.lock(own, into=own)
