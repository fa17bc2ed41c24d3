"""States that others wrote: taken where their meaning is sure, else refused: what is missing."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from foreign_states import (  # noqa: E402
    DEPTH,
    HIDDEN,
    LAYERS,
    OLD_IDS,
    as_torch,
    dump_of,
    make,
    same,
    tree,
    write_dumps,
    write_speculators,
)
from kimi_eagle.conversion.opening import open_source  # noqa: E402
from kimi_eagle.conversion.to_shards import to_shards  # noqa: E402
from kimi_eagle.errors import RunError, UsageError  # noqa: E402
from kimi_eagle.shards import Shard  # noqa: E402
from kimi_eagle.shards.folder import open_folder  # noqa: E402

SAMPLES = make(8)


def dumps(path: Path, **more):
    return open_source(path, "pt", **{"num_layers": DEPTH, **more})


def prepared(path: Path, **more):
    return open_source(path, "speculators", **{"layers": LAYERS, **more})


def model(hidden: int = HIDDEN, depth: int = DEPTH) -> SimpleNamespace:
    """What the sources ask a verifier for."""
    weight = torch.linspace(0.5, 2, hidden)
    return SimpleNamespace(
        hidden_size=hidden,
        num_layers=depth,
        path="/models/m",
        id=lambda: "v7",
        final_norm=lambda: (weight, 1e-5),
    )


# -- dumps of speculators 0.3.0 and 0.4.0 ----------------------------------------------------------


@pytest.mark.parametrize("how", ["num_layers", "verifier", "model path"])
@pytest.mark.parametrize("version", ["0.3.0", "0.4.0"])
def test_dumps_become_shards_with_our_layer_ids(tmp_path, how, version):
    local = tmp_path / "model"
    local.mkdir()
    (local / "config.json").write_text(json.dumps({"num_hidden_layers": DEPTH}))
    where = {"target_model_path": str(local), "hidden_size": HIDDEN}
    path = write_dumps(tmp_path / "in", SAMPLES, speculators_version=version, model=where)
    untouched = tree(path)
    more = {
        "num_layers": {},
        "verifier": {"verifier": model(), "num_layers": None},
        "model path": {"num_layers": None},
    }[how]
    opened = dumps(path, **more)
    assert OLD_IDS == [2, 14, 26, 29] and opened.layers == (3, 15, 27, 30)
    assert opened.notes == []
    to_shards(opened, tmp_path / "out", codec="lossless", shard_tokens=60)
    same(tmp_path / "out", SAMPLES)
    shard = Shard(open_folder(tmp_path / "out")[0])
    assert shard.layers == (3, 15, 27, 30)
    assert shard.meta.get("verifier_id") == ("v7" if how == "verifier" else None)
    assert json.loads(shard.meta["engine"])["dumped_by"]["vllm"] == "0.11.0"
    assert tree(path) == untouched


def test_dumps_without_config_are_taken_on_the_users_word(tmp_path):
    path = write_dumps(tmp_path / "in", SAMPLES, config={})
    opened = dumps(path, layers=OLD_IDS)
    assert opened.layers == LAYERS and "no data_config.json" in opened.notes[0]
    to_shards(opened, tmp_path / "out")
    same(tmp_path / "out", SAMPLES)
    assert dumps(path, layers=OLD_IDS, verifier=model(), num_layers=None).notes == []


def test_states_lie_in_the_order_of_layers_whatever_was_asked_for(tmp_path):
    """0.3.0 keeps the ids it was given, but looks into a set while the layers run."""
    ids = {"layer_ids": [29, 2, 26, 14]}
    path = write_dumps(tmp_path / "in", SAMPLES, hidden_states=ids)
    assert dumps(path).layers == LAYERS


REFUSED = {
    "no ids": ({"config": {}}, {}, "the layer ids"),
    "no depth": ({}, {"num_layers": None}, "how many layers"),
    "nothing at all": ({"config": {}}, {"num_layers": None}, "the layer ids.*how many layers"),
    "ours instead of theirs": ({}, {"layers": list(LAYERS)}, r"expected \[2, 14, 26, 29\]"),
    "ours without config": ({"config": {}}, {"layers": list(LAYERS)}, "last layer dumped is 30"),
    "no last layer": ({}, {"num_layers": 31}, "last layer dumped is 29 of 0..30"),
    "another count": (
        {"hidden_states": {"layer_ids": [2, 14, 29]}}, {}, "states of 4 layers for 3 layer ids",
    ),
    "a build in between": ({"speculators_version": "0.3.0.dev17"}, {}, "of the last layer"),
    "no version": ({"speculators_version": ""}, {}, r"speculators \? took"),
    "another size": ({"model": {"hidden_size": 4096}}, {}, "states of hidden size 24.*4096"),
    "another model": ({}, {"verifier": model(hidden=48), "num_layers": None}, "expected 48"),
    "a deeper model": ({}, {"verifier": model(depth=40)}, "--num-layers 30.*expected 40"),
    "ids that are none": ({"hidden_states": {"layer_ids": ["a"]}}, {}, "cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_dumps_of_unsure_meaning_are_refused(tmp_path, case):
    changes, arguments, said = REFUSED[case]
    path = write_dumps(tmp_path / "in", SAMPLES[:2], **changes)
    with pytest.raises(UsageError, match=said):
        dumps(path, **arguments)


@pytest.mark.parametrize("plus_one", [False, True])
def test_a_last_state_taken_after_the_norm_is_refused(tmp_path, plus_one):
    """As builds between 0.2.0 and 0.3.0 did; the verifier's own norm shows it."""
    verifier = model()
    weight, eps = verifier.final_norm()
    normed = []
    for s in SAMPLES:
        states = as_torch(s.states)
        x = states[:, -1].float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        states[:, -1] = (x * (weight + plus_one)).bfloat16()
        bits = states.view(torch.int16).numpy().view(np.uint16)
        normed.append(type(s)(bits, s.ids, s.mask))
    path = write_dumps(tmp_path / "in", normed, speculators_version="0.3.0.dev17")
    with pytest.raises(UsageError, match="after the final norm"):
        dumps(path, verifier=verifier)
    honest = write_dumps(tmp_path / "honest", SAMPLES, speculators_version="0.3.0.dev17")
    assert dumps(honest, verifier=verifier).layers == LAYERS


def spoil(path: Path, **changes) -> None:
    torch.save({**dump_of(SAMPLES[0]), **changes}, path)


LONG = [torch.zeros(len(SAMPLES[0].ids), HIDDEN) for _ in LAYERS]
FORMS = {
    "float16": ({"hidden_states": [t.half() for t in LONG]}, "torch.float16"),
    "one tensor": ({"hidden_states": torch.stack(LONG)}, "not a list"),
    "before 0.3.0": ({"hidden_state": LONG[0], "target": LONG[0]}, "before 0.3.0"),
    "three dimensions": ({"hidden_states": [t.bfloat16()[None] for t in LONG]}, "expected .tokens"),
}  # fmt: skip


@pytest.mark.parametrize("case", FORMS)
def test_dumps_of_another_form_are_refused(tmp_path, case):
    changes, said = FORMS[case]
    path = write_dumps(tmp_path / "in", SAMPLES)
    spoil(path / "data_0.pt", **changes)
    with pytest.raises(UsageError, match=f"data_0.pt.*{said}"):
        dumps(path)
    spoil(path / "data_5.pt", **changes)
    (path / "data_0.pt").unlink()
    with pytest.raises(RunError, match=f"data_5.pt.*{said}"):
        to_shards(dumps(path), tmp_path / "out")


class _Evil:
    def __reduce__(self):
        return (open, (str(Path(__file__).with_name("owned")), "w"))


def flip(path: Path) -> None:
    """One bit, in the middle of the states."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


DAMAGED = {
    "one bit": flip,
    "cut": lambda p: p.write_bytes(p.read_bytes()[:-700]),
    "empty": lambda p: p.write_bytes(b""),
    "text": lambda p: p.write_text("<html>404</html>"),
    "code": lambda p: torch.save({"input_ids": _Evil()}, p),
    "plain pickle": lambda p: p.write_bytes(pickle.dumps({"input_ids": [1]})),
    "a list": lambda p: torch.save([1, 2], p),
    "no mask": lambda p: torch.save({"input_ids": SAMPLES[0].ids}, p),
    "nan": lambda p: spoil(p, hidden_states=[(t + float("nan")).bfloat16() for t in LONG]),
    "mask of 2": lambda p: spoil(p, loss_mask=torch.full((len(SAMPLES[0].ids),), 2)),
    "long mask": lambda p: spoil(p, loss_mask=torch.ones(len(SAMPLES[0].ids) + 1)),
    "big ids": lambda p: spoil(p, input_ids=torch.full((len(SAMPLES[0].ids),), 2**31)),
    "wide": lambda p: spoil(p, hidden_states=[t.repeat(1, 2).bfloat16() for t in LONG]),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_dumps_are_named(tmp_path, case):
    path = write_dumps(tmp_path / "in", SAMPLES)
    DAMAGED[case](path / "data_3.pt")
    with pytest.raises(RunError, match="data_3.pt: .*--skip-damaged"):
        to_shards(dumps(path), tmp_path / "out")
    found = to_shards(dumps(path), tmp_path / "out", skip_damaged=True)
    assert len(found.damaged) == 1 and "data_3.pt: " in found.damaged[0]
    same(tmp_path / "out", SAMPLES[:3] + SAMPLES[4:])
    assert not Path(__file__).with_name("owned").exists()


@pytest.mark.parametrize("version", ["0.3.0", "0.4.0"])
def test_a_short_sample_makes_a_dump_of_030_doubtful(tmp_path, version):
    """0.3.0 cuts a batch's states by lengths: what is short at its end is shifted before it."""
    path = write_dumps(tmp_path / "in", SAMPLES, speculators_version=version)
    dump = dump_of(SAMPLES[6])
    dump["hidden_states"] = [t[:-1].clone() for t in dump["hidden_states"]]
    torch.save(dump, path / "data_6.pt")
    if version == "0.3.0":
        with pytest.raises(RunError, match="data_6.pt.*shifted.*made again"):
            to_shards(dumps(path), tmp_path / "out", skip_damaged=True)
    else:  # cuts them by requests
        found = to_shards(dumps(path), tmp_path / "out", skip_damaged=True)
        assert len(found.damaged) == 1 and found.samples == 7


def test_numbers_that_are_missing_between_dumps(tmp_path):
    path = write_dumps(tmp_path / "in", SAMPLES)
    (path / "data_4.pt").unlink()
    found = to_shards(dumps(path), tmp_path / "out")
    assert len(found.missing) == 1 and "data_4.pt" in found.missing[0]
    same(tmp_path / "out", SAMPLES[:4] + SAMPLES[5:])
    (path / "data_4000000000.pt").write_bytes(b"")
    with pytest.raises(UsageError, match="4000000000"):
        dumps(path)


def test_dumps_come_in_the_order_of_their_numbers(tmp_path):
    many = make(12, seed=3)
    to_shards(dumps(write_dumps(tmp_path / "in", many)), tmp_path / "out")
    same(tmp_path / "out", many)  # data_10 after data_9


# -- speculators' dataset with hs_{i}.safetensors --------------------------------------------------


def test_layers_of_a_dataset_have_to_be_said(tmp_path):
    path = write_speculators(tmp_path / "in", SAMPLES)
    with pytest.raises(UsageError, match="--layers"):
        prepared(path, layers=None)
    with pytest.raises(UsageError, match="3 layer ids for states of 4"):
        prepared(path, layers=(2, 15, 30))
    with pytest.raises(UsageError, match="last layer id is 30; expected 32"):
        prepared(path).path and prepared(path, num_layers=32)
    with pytest.raises(UsageError, match="expected 30 and 48"):
        prepared(path, verifier=model(hidden=48))
    to_shards(prepared(path, verifier=model()), tmp_path / "out")
    assert Shard(open_folder(tmp_path / "out")[0]).meta["verifier_id"] == "v7"


def states_of(path: Path, i: int) -> Path:
    return path / f"hidden_states/hs_{i}.safetensors"


def rewrite(path: Path, i: int, **changes) -> None:
    s = SAMPLES[i]
    tensors = {"hidden_states": as_torch(s.states), "token_ids": torch.from_numpy(s.ids).long()}
    tensors |= changes
    save_file({k: v for k, v in tensors.items() if v is not None}, states_of(path, i))


def test_rows_without_their_states_are_left_out_by_name(tmp_path):
    path = write_speculators(tmp_path / "in", SAMPLES)
    states_of(path, 2).unlink()
    states_of(path, 4).replace(states_of(path, 5))  # as after a reshuffle: another row's states
    Path(f"{states_of(path, 6)}.lock").touch()
    found = to_shards(prepared(path), tmp_path / "out")
    rows = [text.split(", row ")[1] for text in found.missing]
    assert [r.split(":")[0] for r in rows] == ["2", "4", "5", "6"]
    assert "other token ids" in rows[2] and "still being written" in rows[3]
    same(tmp_path / "out", [SAMPLES[i] for i in (0, 1, 3, 7)])


HS_DAMAGE = {
    "cut": lambda p: states_of(p, 3).write_bytes(states_of(p, 3).read_bytes()[:-1]),
    "empty": lambda p: states_of(p, 3).write_bytes(b""),
    "no states": lambda p: rewrite(p, 3, hidden_states=None),
    "float32": lambda p: rewrite(p, 3, hidden_states=as_torch(SAMPLES[3].states).float()),
    "short": lambda p: rewrite(p, 3, hidden_states=as_torch(SAMPLES[3].states)[:-1].clone()),
    "inf": lambda p: rewrite(p, 3, hidden_states=as_torch(np.full_like(SAMPLES[3].states, 0x7F80))),
}


@pytest.mark.parametrize("case", HS_DAMAGE)
def test_damaged_files_of_states_are_named(tmp_path, case):
    path = write_speculators(tmp_path / "in", SAMPLES)
    HS_DAMAGE[case](path)
    with pytest.raises(RunError, match="row 3: hs_3.safetensors.*--skip-damaged"):
        to_shards(prepared(path), tmp_path / "out")
    found = to_shards(prepared(path), tmp_path / "out", skip_damaged=True)
    assert len(found.damaged) == 1 and found.missing == []
    same(tmp_path / "out", SAMPLES[:3] + SAMPLES[4:])


def test_bits_that_flipped_in_what_we_exported_are_found(tmp_path):
    from kimi_eagle.conversion.to_speculators import to_speculators

    path = write_speculators(tmp_path / "in", SAMPLES)
    to_speculators(prepared(path), tmp_path / "ours")
    file = states_of(tmp_path / "ours", 3)
    data = bytearray(file.read_bytes())
    data[-100] ^= 1  # in the states: token ids come first, or the mask of ids would tell
    file.write_bytes(data)
    with pytest.raises(RunError, match="row 3: hs_3.safetensors"):
        to_shards(open_source(tmp_path / "ours", "speculators"), tmp_path / "out")


def test_other_datasets_are_refused(tmp_path):
    from datasets import Dataset, DatasetDict

    path = write_speculators(tmp_path / "in", SAMPLES)
    for i in range(8):
        rewrite(path, i, hidden_states=as_torch(SAMPLES[i].states).float())
    with pytest.raises(UsageError, match="states F32"):
        prepared(path)
    for i in range(8):
        fp8 = as_torch(SAMPLES[i].states).to(torch.float8_e4m3fn)
        rewrite(path, i, hidden_states=fp8, hidden_states_scales=torch.ones(1))
    with pytest.raises(UsageError, match="fp8 backend"):
        prepared(path)
    Dataset.from_dict({"text": ["a"]}).save_to_disk(str(tmp_path / "text"))
    with pytest.raises(UsageError, match="no column input_ids"):
        prepared(tmp_path / "text")
    DatasetDict({"train": Dataset.from_dict({"text": ["a"]})}).save_to_disk(str(tmp_path / "both"))
    with pytest.raises(UsageError, match="DatasetDict"):
        prepared(tmp_path / "both")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="not a dataset"):
        prepared(tmp_path / "empty")
    (path / "hidden_states").rename(path / "elsewhere")
    with pytest.raises(RunError, match="no folder of states"):
        prepared(path)
