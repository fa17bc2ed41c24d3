"""Second and third turns, after the verifier's own answers; the engine is a stand-in."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from kimi_eagle.bench import measure as module
from kimi_eagle.bench import results
from kimi_eagle.bench.draftdir import DraftInfo
from kimi_eagle.bench.later import with_later_turns
from kimi_eagle.bench.measure import Measurement, Run, Spec
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
    engine = {"device": "cpu", "dtype": "float32", "max_model_len": 256}
    section = TemplateSection().model_dump(mode="json")
    return Spec(str(verifier), "v", engine, {}, workload, (2,), template=section)


def test_the_child_asks_on_and_tells_what_it_asked(
    tmp_path: Path, verifier_dir: Path, template: ChatTemplate, workload: Workload,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def answer(_llm: object, prompts: list, size: int, most: int, _label: str):
        assert (size, most) == (2, 8) or most == 4
        for i, ids in enumerate(answers(template, [])(list(prompts))):
            yield i, ids, "stop", []

    spec = spec_for(workload, verifier_dir)
    (tmp_path / "spec.json").write_text(json.dumps(asdict(spec)))
    for name, fake in (("_load", lambda _: None), ("_counters", lambda _: {}),
                       ("_end_with_parent", lambda: None), ("_answers", answer)):  # fmt: skip
        monkeypatch.setattr(module, name, fake)
    assert module.main([str(tmp_path / "spec.json"), str(tmp_path / "out.json")]) == 0
    found = module.read(tmp_path / "out.json", spec.digest())
    assert found is not None and found.workload is not None
    assert len(found.workload.prompts) == len(found.runs[0].tokens) == 6
    assert found.workload.names[3:] == ["b#2", "c#2", "b#3"]


def test_both_engines_are_asked_what_the_verifier_was(
    tmp_path: Path, template: ChatTemplate, workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = with_later_turns(workload, answers(template, []), template, 256)
    info = DraftInfo(tmp_path, {"method": "eagle3"}, "Eagle3DraftModel", 10, 4, 8)
    alone = spec_for(workload, tmp_path)
    draft = Spec(**{**vars(alone), "draft": "/d", "draft_digest": "d", "speculative": {}})
    order: list[tuple[str, int]] = []

    def measured(spec: Spec, _out: Path, _report: object) -> Measurement:
        order.append((spec.kind, len(spec.workload.prompts)))
        accepted = {"num_drafts": 6, "num_draft_tokens": 18, "num_accepted_tokens": 6,
                    "num_accepted_tokens_per_pos": [6, 0, 0]}  # fmt: skip
        run = Run(2, 1.0, [[1]] * 6, ["stop"] * 6, accepted, [[0, 1]] * 6)
        asked = made if spec.kind == "baseline" else None
        return Measurement("x", spec.kind, 1.0, 1.0, 1, [run], {}, 1, asked)

    monkeypatch.setattr(results, "open_draft", lambda *_: info)
    monkeypatch.setattr(results, "make_specs", lambda *_: (draft, alone))
    monkeypatch.setattr(results, "measure", measured)
    verifier = type("V", (), {"path": tmp_path})
    found = results.run_benchmark(None, verifier, tmp_path, tmp_path, workload=workload)
    assert order == [("baseline", 3), ("draft", 6)]
    assert found["details"]["later_turns"] == 3
    assert [p["name"] for p in found["details"]["prompts"]] == list(made.names)
    assert found["details"]["by_category"]["y"]["prompts"] == 3
    assert draft.digest() != Spec(**{**vars(draft), "workload": made}).digest()
