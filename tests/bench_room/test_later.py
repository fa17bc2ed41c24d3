"""Second and third turns, after the verifier's own answers; the engine is a stand-in."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kimi_eagle.bench import engine as module
from kimi_eagle.bench import results
from kimi_eagle.bench.draftdir import DraftInfo
from kimi_eagle.bench.later import with_later_turns
from kimi_eagle.bench.measure import Case, Measurement, Run, Spec, asked_path, measure, todo
from kimi_eagle.bench.plan import Load
from kimi_eagle.bench.workload import Workload, make_workload
from kimi_eagle.data.template import ChatTemplate
from kimi_eagle.errors import RunError
from kimi_eagle.recipe import TemplateSection
from kimi_eagle.verifier import open_verifier

TALKS = (["What is rain?"], ["Name a sea.", "Is it deep?", "And salty?"], ["Say hi.", "Again."])


@pytest.fixture(scope="module")
def template(verifier_dir: Path) -> ChatTemplate:
    return ChatTemplate(open_verifier(verifier_dir), TemplateSection())


@pytest.fixture
def workload(template: ChatTemplate) -> Workload:
    said = [[{"role": "user", "content": turns[0]}] for turns in TALKS]
    return make_workload(
        ["a", "b", "c"],
        [template.prompt_ids(messages) for messages in said],
        8,
        3,
        categories=["x", "y", "z"],
        sources=["s", "s", "s"],
        later=[
            {"prompt": i, "messages": said[i], "tools": None, "turns": turns[1:]}
            for i, turns in enumerate(TALKS)
            if turns[1:]
        ],
        template=template.digest(),
    )


def answers(template: ChatTemplate, seen: list[int]):
    """Each prompt is answered by its length in words and the end of turn."""

    def answer(prompts: list) -> list[list[int]]:
        seen.append(len(prompts))
        end = template.tokenizer.eos_token_id
        return [[*template.tokenizer.encode(f"It has {len(p)}."), end] for p in prompts]

    return answer


def test_each_later_turn_follows_the_answers_to_those_before(
    template: ChatTemplate, workload: Workload
) -> None:
    seen: list[int] = []
    made = with_later_turns(workload, answers(template, seen), template, 256)
    assert seen == [2, 1]  # b and c, then b alone
    assert made.names == ("a", "b", "c", "b#2", "c#2", "b#3")
    assert made.categories == ("x", "y", "z", "y", "z", "y")
    assert made.prompts[:3] == workload.prompts and made.later == ()
    assert made.digest == workload.digest
    sizes = [len(made.prompts[i]) for i in (1, 3)]
    expected = template.prompt_ids(
        [
            {"role": "user", "content": "Name a sea."},
            {"role": "assistant", "content": f"It has {sizes[0]}."},
            {"role": "user", "content": "Is it deep?"},
            {"role": "assistant", "content": f"It has {sizes[1]}."},
            {"role": "user", "content": "And salty?"},
        ]
    )
    assert list(made.prompts[5]) == expected
    with pytest.raises(RunError, match="turn 2 has .* more than max_model_len 40"):
        with_later_turns(workload, answers(template, []), template, 40)


def spec_for(workload: Workload, verifier: Path) -> Spec:
    engine = {"device": "cpu", "dtype": "float32", "max_model_len": 256, "max_num_seqs": 2}
    section = TemplateSection().model_dump(mode="json")
    return Spec(str(verifier), "v", engine, {}, workload, (Case(2),), template=section)


def test_the_child_asks_on_and_the_next_one_takes_what_it_asked(
    tmp_path: Path, verifier_dir: Path, template: ChatTemplate, workload: Workload,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def answer(_llm: object, prompts: list, case: Case, most: int, _seed: int, label: str):
        assert case == Case(2) and most == 8
        labels.append(label)
        for i, ids in enumerate(answers(template, [])(list(prompts))):
            yield module.Answer(i, ids, "stop", [], 1.0, 0.5, None)

    labels: list[str] = []
    spec = spec_for(workload, verifier_dir)
    (tmp_path / "spec.json").write_text(json.dumps(asdict(spec)))
    monkeypatch.setattr(module, "_load", lambda *_: None)
    monkeypatch.setattr(module, "_counters", lambda _: dict.fromkeys(module._COUNTERS, 0))
    monkeypatch.setattr(module, "_end_with_parent", lambda: None)
    monkeypatch.setattr(module, "_threads", lambda: 2)
    monkeypatch.setattr(module, "_answers", answer)
    assert module.main([str(tmp_path / "spec.json"), str(tmp_path)]) == 0
    assert labels == ["earlier", "earlier", "warm-up", "measured"]
    asked, (found,) = measure(spec, tmp_path)  # no process is started: all is there
    assert found.reused and len(asked.workload.prompts) == len(found.run.tokens) == 6
    assert list(asked.workload.names[3:]) == ["b#2", "c#2", "b#3"]
    asked_path(spec, tmp_path).write_text("{")
    assert todo(spec, tmp_path) == (Case(2),)


def test_all_engines_are_asked_what_the_verifier_was(
    tmp_path: Path, template: ChatTemplate, workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = with_later_turns(workload, answers(template, []), template, 256)
    info = DraftInfo(tmp_path, {"method": "eagle3"}, "Eagle3DraftModel", 10, 4, 8)
    alone = spec_for(workload, tmp_path)
    draft = replace(alone, draft="/d", draft_digest="d", speculative={}, k=3)
    order: list[tuple[str, int]] = []

    def measured(spec: Spec, _folder: Path, _report: object):
        order.append((spec.kind, len(spec.workload.prompts)))
        spec = replace(spec, workload=made)
        run = Run(1.0, [[1]] * 6, ["stop"] * 6, {}, [[0, 1]] * 6, [1.0] * 6, [1.0] * 6, [None] * 6)
        return spec, [Measurement("x", spec.kind, Case(2), run, 1.0, 1, {}, 1)]

    monkeypatch.setattr(results, "open_drafts", lambda *_: {"draft": info})
    monkeypatch.setattr(results, "make_loads", lambda *_: [Load(None, alone), Load("draft", draft)])
    monkeypatch.setattr(results, "measure", measured)
    recipe = SimpleNamespace(benchmark=SimpleNamespace(profile=False))
    found = results.run_benchmark(recipe, None, tmp_path, tmp_path, workload=workload)
    assert order == [("baseline", 3), ("draft", 6)]
    assert found["details"]["later_turns"] == 3
    assert [p["name"] for p in found["details"]["prompts"]] == list(made.names)
    assert found["details"]["by_category"]["y"]["prompts"] == 3
    assert draft.digest(Case(2)) != replace(draft, workload=made).digest(Case(2))
