"""States that `clean --hidden` deleted on purpose are no fault; those that are lost are one."""

from __future__ import annotations

import json

from cases_layers import with_states
from place import Place

from kimi_eagle.contracts import judge, rules
from kimi_eagle.rundir import RunDir

READERS = {
    "layers-states-whole",
    "layers-states",
    "layers-before-the-norm",
    "engine-prefix-caching",
}


def remove(place: Place) -> None:
    for file in place.path.glob("00000.1.*"):
        file.unlink()


def test_freed_states_concern_nobody(place: Place):
    with_states(place)
    remove(place)
    del place.given["freed"]  # as the run's own file says
    place.given["run"] = RunDir(place.path / "run")
    freed = place.given["run"].stage("extract").freed
    freed.parent.mkdir(parents=True)
    freed.write_text(json.dumps({"units": ["00000.0123.a1"]}))
    verdicts = {v.rule.id: v for v in judge(place.facts(), rules().values())}
    assert {(verdicts[i].state, verdicts[i].text) for i in READERS} == {
        ("not concerned", "the states were freed")
    }
    freed.write_text(json.dumps({"units": ["00000.0123.a0"]}))  # another attempt's
    verdicts = judge(place.facts(), rules().values())
    assert [v.rule.id for v in verdicts if v.state == "problem"] == ["layers-states-whole"]


def test_what_this_machine_may_not_read_is_not_made_again(place: Place, monkeypatch):
    from kimi_eagle import record

    with_states(place)
    monkeypatch.setattr(record, "size_fault", lambda path, size: "cannot be read (Stale handle)")
    found = {v.rule.id: v for v in judge(place.facts(), rules().values()) if v.problems}
    (problem,) = found["layers-states-whole"].problems
    assert set(found) == {"layers-states-whole"} and "retry" not in problem.fix
