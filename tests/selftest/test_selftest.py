"""The self-test's own promises: every part is told, a failing one hides none, exit codes.

The whole self-test takes a quarter of an hour and is `make campaign`'s; what its two runs do is
tested in tests/toy and tests/test_demo.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kimi_eagle import selftest
from kimi_eagle.errors import RunError
from kimi_eagle.selftest import Check, Part, machine, parts
from kimi_eagle.selftest.report import markdown


def fine(test, figures):
    figures |= {"speed": 12.345, "table": "a\nb", "by layer": {"2": 0.01}}
    yield Check("it holds", 1, "1", True)


def wrong(test, figures):
    yield Check("first", 1, "1", True)
    yield Check("second", 2, "at most 1", False)


def stops(test, figures):
    yield Check("before", 1, "1", True)
    raise RunError("the engine did not load", where="here", fix="look")


def breaks(test, figures):
    figures["kept"] = 3
    yield Check("before", 1, "1", True)
    raise ZeroDivisionError("unforeseen")


PARTS = (
    Part("fine", "holds", fine),
    Part("wrong", "does not hold", wrong),
    Part("stops", "an error of ours", stops),
    Part("breaks", "any other error", breaks),
    Part("stands", "on what failed", fine, after=("stops",)),
    Part("gpu", "for GPUs", fine, gpu_only=True),
    Part("last", "is still done", fine, after=("fine",)),
)


def of(out: Path, chosen) -> tuple[dict, list]:
    told: list = []
    test = selftest.Test(out, "cpu", 0, 1, lambda *_: None)
    return selftest.run(test, lambda *event: told.append(event), chosen), told


def test_one_failing_part_hides_no_other(tmp_path: Path) -> None:
    report, told = of(tmp_path, PARTS)
    states = {p["name"]: p["state"] for p in report["parts"]}
    assert states == {
        "fine": "ok",
        "wrong": "failed",
        "stops": "failed",
        "breaks": "failed",
        "stands": "skipped",
        "gpu": "skipped",
        "last": "ok",
    }
    assert report["ok"] is False and report == json.loads((tmp_path / "selftest.json").read_text())
    rows = {p["name"]: p for p in report["parts"]}
    assert [c["ok"] for c in rows["wrong"]["checks"]] == [True, False]
    assert rows["stops"]["error"] == "here: the engine did not load; fix: look"
    assert rows["breaks"]["error"] == "ZeroDivisionError: unforeseen"
    assert rows["breaks"]["figures"] == {"kept": 3} and "breaks" in rows["breaks"]["traceback"]
    assert rows["stands"]["error"] == "stands on stops"
    assert [t[:2] for t in told[:3]] == [("fine", "running"), ("fine", "ok"), ("wrong", "running")]


def test_the_report_reads_as_text(tmp_path: Path) -> None:
    report, _ = of(tmp_path, PARTS)
    text = (tmp_path / "selftest.md").read_text()
    assert text == markdown(report)
    for words in ("something failed", "| wrong", "FAILED", "at most 1", "speed: 12.3", "by layer"):
        assert words in text
    assert "all checks hold" in markdown(of(tmp_path, PARTS[:1])[0])


def test_a_lost_node_leaves_what_was_known(tmp_path: Path) -> None:
    def lost(test, figures):
        assert json.loads((tmp_path / "selftest.json").read_text())["parts"][0]["state"] == "ok"
        yield Check("read it", 1, "1", True)

    assert of(tmp_path, (PARTS[0], Part("lost", "", lost)))[0]["ok"]


def test_the_machine_and_nothing_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "hush")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    found = machine.facts()
    assert found["environment"]["NCCL_DEBUG"] == "WARN" and "hush" not in json.dumps(found)
    assert {"torch", "transformers", "speculators"} <= set(found["packages"])
    assert found["kernel"] and found["memory_gb"] > 1 and found["cpus"] >= 1
    assert "host" not in found


def test_disk_speed_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "DISK_BYTES", 32 << 20)
    found = machine.disk(tmp_path)
    assert found["write_mb_s"] > 0 and found["read_mb_s"] > 0 and found["free_gb"] > 0
    assert list(tmp_path.iterdir()) == []


def test_packed_recipes_and_steps_on_many_gpus(tmp_path: Path) -> None:
    for name in ("smollm2", "kimi-k2.5-toy"):
        recipe = parts.packed(name)
        eight = parts._here(selftest.Test(tmp_path, "cuda", 8, 8, print), recipe, tmp_path)
        assert eight.train.epochs == 8 * recipe.train.epochs
        assert eight.verifier.path == str(tmp_path)
        one = parts._here(selftest.Test(tmp_path, "cpu", 0, 1, print), recipe, tmp_path)
        assert one.train.epochs == recipe.train.epochs


def test_a_child_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="No module named kimi_eagle.nothing"):
        parts.child("kimi_eagle.nothing", log=tmp_path / "log")


def test_wrong_use(eagle, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    done = eagle("selftest", "--out", tmp_path)
    assert done.returncode == 2 and "not empty" in done.stderr
    from kimi_eagle.capture.settings import vllm_build

    if vllm_build()[1] == "cpu":
        done = eagle("selftest", "--gpu", "--out", tmp_path / "new")
        assert done.returncode == 2 and "no GPU" in done.stderr and "fix: " in done.stderr
        assert not (tmp_path / "new").exists()


@pytest.mark.campaign
def test_the_whole_of_it(eagle, tmp_path: Path) -> None:
    done = eagle("selftest", "--out", tmp_path / "out", "--json", timeout=1800)
    report = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert report["ok"] and report["seconds"] < 20 * 60
    states = {p["name"]: p["state"] for p in report["parts"]}
    assert states.pop("states-int4") in ("ok", "skipped")
    assert set(states.values()) == {"ok"}
