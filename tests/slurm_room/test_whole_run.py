"""The whole tiny run as 8-GPU jobs: the bytes of the local run, and what squeue shows meanwhile."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from campaign import Case, records  # noqa: E402
from places import IN_IMAGE  # noqa: E402

from kimi_eagle.recipe import STAGES  # noqa: E402
from kimi_eagle.slurm.names import SHORT  # noqa: E402


@pytest.mark.slow
@IN_IMAGE
def test_every_stage_as_jobs(case: Case) -> None:
    """4 workers a group (2 in the image), each held in its first unit until all have one."""
    count = 2 if case.place.image else 4
    case.configure(f"workers = {count}")
    entries = case.submit(hold=count)
    assert [(e["role"], e["tasks"]) for e in entries] == [
        ("canary", 1), ("workers", count - 1), ("canary", 1), ("workers", count - 1), ("single", 1)
    ]  # fmt: skip
    plain, full, gpus = set(), set(), set()
    deadline = time.monotonic() + 900
    while case.jobs():
        # As a user types it: the name is cut to 8 characters.
        for line in case.bed.run("squeue", "--noheader", check=False).splitlines():
            plain.add((line.split()[4], line.split()[2]))
        found = case.bed.run("squeue", "--noheader", "-r", "-o", "%t %j|%k|%b", check=False)
        for line in found.splitlines():
            name, comment, gres = line.split("|")
            full.add((*name.split(), comment))
            gpus.add(gres)
        assert time.monotonic() < deadline, case.logs()[-3000:]
        time.sleep(0.5)

    case.whole("regenerate", "prepare", "extract", "vocab")
    assert {s for s in STAGES if records(case.run, s)} == set(STAGES)
    results = json.loads((case.run / "bench/results.json").read_text())
    assert results["identical_outputs"] is True and results["acceptance_length"] >= 1
    assert "<svg" in (case.run / "report.html").read_text()

    # So many nodes at once, each with a unit of its own.
    made = records(case.run, "extract")
    workers = {r["worker"] for r in made}
    others = entries[3]["job_id"]
    tasks = [f"j{others}"] if count == 2 else [f"j{others}_{n}" for n in range(count - 1)]
    slots = {f"j{entries[2]['job_id']}", *tasks}
    assert {w.partition("-")[0] for w in workers} == slots
    started = [
        line.split()[2]
        for path in (case.run / "slurm/starts").glob("*.txt")
        for line in path.read_text().splitlines()
        if line.endswith(" extract")
    ]
    assert sorted(started) == [f"127.0.1.{n + 1}" for n in range(count)]
    assert gpus == {"gres:gpu:8"}

    # What squeue showed meanwhile: 8 characters tell all, and the suffix never changed.
    names = {(state, name) for state, name in plain if state in ("PD", "R")}
    waiting = {name for state, name in names if state == "PD"}
    assert waiting == {"reg-tiny", "ext-tiny", "trn-tiny"}
    running = {name for state, name in names if state == "R"}
    told = {name for name in running if re.fullmatch(r"[a-z]{3}-(\d\d%-|100%)", name)}
    assert {name[:3] for name in told} >= {SHORT[s] for s in ("regenerate", "extract", "train")}
    assert running - told <= waiting
    suffixes = {name.rpartition("-")[2] for _, name, _ in full}
    assert suffixes == {e["suffix"] for e in entries}
    comments = {comment for _, _, comment in full}
    assert any(re.fullmatch(r"\d+% \d+k? tok/s( ETA \d+:\d\d)?", c) for c in comments), comments


@pytest.mark.slow
@pytest.mark.parametrize("case", ["root"], indirect=True)
def test_every_stage_in_the_image_as_root(case: Case) -> None:
    """One worker a group: root's image is mounted by the kernel, a user's by squashfuse."""
    case.submit(hold=False)
    case.finish(900)
    case.whole("regenerate", "prepare", "extract", "vocab")
    made = [r for stage in STAGES for r in records(case.run, stage)]
    assert {r["provenance"]["image"] for r in made} == {pinned_digest(case)}
    results = json.loads((case.run / "bench/results.json").read_text())
    assert results["identical_outputs"] is True


def pinned_digest(case: Case) -> str:
    """`sha256:...` of the run's image, as its lock says."""
    lock = json.loads((case.run / "run.lock.json").read_text())
    return f"sha256:{lock['image']['sha256']}"
