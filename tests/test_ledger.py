"""Records, claims and attempts: the first record wins, whoever dies."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kimi_eagle import files, liveness
from kimi_eagle.errors import RunError, UsageError
from kimi_eagle.ledger import Ledger, Unit
from kimi_eagle.rundir import StageDir
from kimi_eagle.worker import Stopped, Worker


def units(count: int, **parts: object) -> list[Unit]:
    return [Unit(f"{i:05d}", {"format": "x/1", "i": i, **parts}, tokens=10) for i in range(count)]


@pytest.fixture
def stage_dir(tmp_path: Path) -> StageDir:
    return StageDir(tmp_path / "extract").make()


def do(worker: Worker, todo: list[Unit], text: str = "data", **kwargs: int) -> list[str]:
    done = []
    for attempt in worker.attempts(todo, **kwargs):
        with attempt:
            path = attempt.path("txt")
            path.write_text(text)
            attempt.commit([path], counts={"samples": 1})
            done.append(attempt.unit.name)
    return done


def test_done_units_are_not_done_again(stage_dir: StageDir) -> None:
    with Worker(stage_dir) as worker:
        assert do(worker, units(3)) == ["00000", "00001", "00002"]
    with Worker(stage_dir) as worker:
        assert do(worker, units(4)) == ["00003"]
    record = Ledger(stage_dir).record(units(3)[2])
    assert record.path("txt").read_text() == "data"
    assert record.files_whole() is None
    record.path("txt").write_text("dat")
    assert "3 bytes, recorded 4" in record.files_whole()


def test_a_changed_key_is_not_done_and_the_old_record_stays(stage_dir: StageDir) -> None:
    with Worker(stage_dir) as worker:
        do(worker, units(2))
        assert do(worker, units(2, layers=[1])) == ["00000", "00001"]
    ledger = Ledger(stage_dir)
    assert ledger.open_units(units(2)) == []
    assert ledger.open_units(units(2, layers=[1])) == []
    assert len(ledger.records_of("00000")) == 2


def test_first_record_wins_and_the_loser_deletes_its_files(stage_dir: StageDir) -> None:
    unit = units(1)
    with Worker(stage_dir) as first, Worker(stage_dir) as second:
        (one,) = [next(first.attempts(unit))]
        Ledger(stage_dir).release(unit[0].name, first.id)  # as if its claim had been broken
        (two,) = [next(second.attempts(unit))]
        with one, two:
            for attempt, text in ((two, "second"), (one, "first")):
                path = attempt.path("txt")
                path.write_text(text)
                won = attempt.commit([path])
                assert won == (attempt is two)
    assert Ledger(stage_dir).record(unit[0]).path("txt").read_text() == "second"
    assert [p.read_text() for p in stage_dir.files.iterdir()] == ["second"]


def test_many_racing_creators_leave_one_winner(tmp_path: Path) -> None:
    wins: list[int] = []
    start = threading.Barrier(8)

    def create(number: int) -> None:
        start.wait()
        if files.create_exclusive(tmp_path / "record", str(number)):
            wins.append(number)

    threads = [threading.Thread(target=create, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wins) == 1 and (tmp_path / "record").read_text() == str(wins[0])
    assert [p.name for p in tmp_path.iterdir()] == ["record"]


def test_a_unit_that_fails_three_times_is_given_up_and_the_others_go_on(
    stage_dir: StageDir, capsys: pytest.CaptureFixture[str]
) -> None:
    tried = []
    with Worker(stage_dir) as worker:
        for attempt in worker.attempts(units(2)):
            with attempt:
                tried.append(attempt.unit.name)
                path = attempt.path("txt")
                path.write_text("half")
                if attempt.unit.name == "00000":
                    raise ValueError("no good")
                attempt.commit([path])
    assert tried == ["00000", "00000", "00000", "00001"]
    ledger = Ledger(stage_dir)
    record = ledger.record(units(2)[0])
    assert record.state == "failed" and record.info["reasons"] == ["ValueError: no good"] * 3
    assert [p.name for p in stage_dir.files.iterdir()] == ["00001.a1.txt"]
    assert "no good" in capsys.readouterr().err


@pytest.mark.parametrize(
    "fault",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        UsageError("wrong recipe"),
        MemoryError(),
        KeyboardInterrupt(),
    ],
)
def test_a_broken_machine_stops_the_worker_and_leaves_no_failure(
    stage_dir: StageDir, fault: BaseException
) -> None:
    with pytest.raises(type(fault)):
        with Worker(stage_dir) as worker:
            for attempt in worker.attempts(units(2)):
                with attempt:
                    attempt.path("txt").write_text("half")
                    raise fault
    ledger = Ledger(stage_dir)
    assert ledger.record(units(1)[0]) is None
    assert list(stage_dir.files.iterdir()) == []
    assert list(stage_dir.claims.iterdir()) == []
    if not isinstance(fault, UsageError):
        assert ledger.failures(units(1)[0]) == []


def test_a_full_disk_behind_another_error_is_still_a_full_disk(stage_dir: StageDir) -> None:
    with pytest.raises(RunError):
        with Worker(stage_dir) as worker:
            for attempt in worker.attempts(units(1)):
                with attempt:
                    raise RunError("disk") from OSError(errno.ENOSPC, "full")
    assert Ledger(stage_dir).failures(units(1)[0]) == []


def test_max_failures_of_one_hands_the_fault_to_the_caller(stage_dir: StageDir) -> None:
    with pytest.raises(RunError, match="bad data"):
        with Worker(stage_dir) as worker:
            for attempt in worker.attempts(units(1), max_failures=1):
                with attempt:
                    raise RunError("bad data")
    assert Ledger(stage_dir).record(units(1)[0]) is None
    assert Ledger(stage_dir).failures(units(1)[0]) == ["bad data"]


def test_a_stop_file_ends_the_worker_after_its_unit(stage_dir: StageDir) -> None:
    done = []
    with pytest.raises(Stopped):
        with Worker(stage_dir) as worker:
            for attempt in worker.attempts(units(3)):
                with attempt:
                    path = attempt.path("txt")
                    path.write_text("x")
                    stage_dir.stop.touch()
                    attempt.commit([path])
                    done.append(attempt.unit.name)
    assert done == ["00000"]


def reject(worker: Worker, todo: list[Unit], count: int) -> None:
    for attempt in worker.attempts(todo):
        with attempt:
            attempt.commit([], counts={"samples": 9, "rejected": count})


def test_rejected_samples_are_counted_without_opening_the_records(
    stage_dir: StageDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Worker(stage_dir) as worker:
        reject(worker, units(2), 3)
        do(worker, units(3))
    monkeypatch.setattr(files, "read_json", None)
    tally = Ledger(stage_dir).tally()
    first, second, third = (f"{u.name}.{u.key}" for u in units(3))
    assert tally.inodes.keys() == {first, second, third} and not tally.failed
    assert tally.rejected == {first: 3, second: 3}


def test_marks_of_tries_that_lost_are_not_believed(stage_dir: StageDir) -> None:
    ledger, unit = Ledger(stage_dir), units(1)[0]
    name = f"{unit.name}.{unit.key}"
    with Worker(stage_dir) as worker:
        reject(worker, [unit], 3)
    lost = {"unit": unit.name, "key": unit.key, "state": "done", "files": []}
    assert not ledger.create_record(unit, {**lost, "counts": {"rejected": 3}})
    assert not ledger.create_record(unit, {**lost, "counts": {"rejected": 5}})
    assert not ledger.create_record(unit, {**lost, "state": "failed"})
    assert ledger.tally().rejected == {name: 3} and not ledger.tally().failed
    # Killed between the mark and the record, then won by another count, or by none.
    ledger.set_aside(ledger.record(unit), "test")
    files.create_exclusive(ledger.dir.rejected / f"{name}.7", "{}")
    assert not ledger.tally().rejected
    with Worker(stage_dir) as worker:
        reject(worker, [unit], 7)
    assert ledger.tally().rejected == {name: 7}
    ledger.set_aside(ledger.record(unit), "again")
    with Worker(stage_dir) as worker:
        do(worker, [unit])
    assert ledger.tally().rejected == {name: 0}


HOLDER = """
import sys, time
from pathlib import Path
from kimi_eagle.ledger import Unit
from kimi_eagle.rundir import StageDir
from kimi_eagle.worker import Worker

with Worker(StageDir(Path(sys.argv[1]))) as worker:
    unit = Unit("00000", {"format": "x/1", "i": 0}, tokens=10)
    for attempt in worker.attempts([unit]):
        with attempt:
            attempt.path("txt").write_text("half")
            print("claimed", flush=True)
            time.sleep(600)
"""


def hold(stage_dir: StageDir) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(stage_dir.path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "claimed\n"
    return process


def test_a_live_claim_is_respected_a_dead_one_taken_over(stage_dir: StageDir) -> None:
    holder = hold(stage_dir)
    try:
        with Worker(stage_dir) as worker:
            assert do(worker, units(1)) == []  # held by a live worker: leave, free the GPUs
            os.kill(holder.pid, signal.SIGKILL)
            holder.wait()
            assert do(worker, units(1)) == ["00000"]
    finally:
        holder.kill()
        holder.wait()
    record = Ledger(stage_dir).record(units(1)[0])
    assert record.path("txt").read_text() == "data" and record.data["attempt"] == 2


def test_sigterm_drops_the_unit_and_its_files(stage_dir: StageDir) -> None:
    holder = hold(stage_dir)
    holder.terminate()
    assert holder.wait(timeout=20) != 0
    assert list(stage_dir.files.iterdir()) == []
    assert list(stage_dir.claims.iterdir()) == []


def test_another_machine_is_dead_after_three_silent_beats(
    stage_dir: StageDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    who = {**liveness.identity(), "host": "elsewhere", "beat": 7, "beat_seconds": 0.05}
    watch = liveness.Watch()
    assert watch.alive("w", who) is None
    who["beat"] = 8
    assert watch.alive("w", who) is True
    time.sleep(0.2)
    assert watch.alive("w", who) is False
    assert watch.alive("w", {**who, "ended": 1.0}) is False


def test_a_reused_pid_is_not_the_old_worker() -> None:
    me = liveness.identity()
    assert liveness.is_alive_here(me) is True
    assert liveness.is_alive_here({**me, "pid_started": "1"}) is False
    assert liveness.is_alive_here({**me, "boot": "another"}) is False
    zombie = subprocess.Popen(["true"])
    time.sleep(0.2)
    assert liveness.process_start(zombie.pid) is None
    zombie.wait()


def test_atomic_write_leaves_the_old_content_when_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "a"
    files.write_atomic(path, "old")
    with pytest.raises(TypeError):
        files.write_atomic(path, 5)  # type: ignore[arg-type]
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["a"]
