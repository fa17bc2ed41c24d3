"""The extracted states are transformers' states on the same tokens, and the probe tells."""

from __future__ import annotations

import pytest

LAYERS = (2, 15, 27, 30)
LIMIT = 0.03


@pytest.fixture(scope="module")
def states(memory_run, written):
    """[sample] -> vLLM's states bfloat16 [T, 4, 576]."""
    from safetensors.torch import load_file

    whole = load_file(memory_run["folder"] / "memory.safetensors")["states"]
    return whole.split([len(ids) for ids in written["ids"]])


@pytest.fixture(scope="module")
def reference(verifier_dir, written):
    """The same from transformers in bfloat16; the last one by a hook before the final norm."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(verifier_dir, dtype=torch.bfloat16).eval()
    last = []
    handle = model.model.layers[-1].register_forward_hook(
        lambda _m, _a, out: last.append(out[0] if isinstance(out, tuple) else out)
    )
    found = []
    with torch.inference_mode():
        for ids in written["ids"]:
            out = model(torch.tensor([ids]), output_hidden_states=True)
            entering = [out.hidden_states[k][0] for k in LAYERS[:-1]]
            found.append(torch.stack([*entering, last.pop().reshape(len(ids), -1)], dim=1))
    handle.remove()
    return found


def error(got, want, layer: int) -> float:
    """Relative L2 over all tokens of all samples."""
    import torch

    a = torch.cat([x[:, layer] for x in got]).double()
    b = torch.cat([x[:, layer] for x in want]).double()
    return float((a - b).norm() / b.norm())


def test_states_agree_with_transformers(states, reference):
    tokens = sum(len(s) for s in states)
    errors = [error(states, reference, i) for i in range(len(LAYERS))]
    for layer, value in zip(LAYERS, errors, strict=True):
        print(f"layer {layer}: relative L2 {value:.4f} over {tokens} tokens")
    assert tokens > 400
    assert max(errors) <= LIMIT, errors


def test_a_neighbouring_layer_would_not_pass(states, reference):
    """The limit can tell layers apart: each state is far from every other layer's."""
    for i in range(len(LAYERS)):
        for j in range(len(LAYERS)):
            if i != j:
                moved = [s[:, [j] * len(LAYERS)] for s in states]
                assert error(moved, reference, i) > 5 * LIMIT


def test_probe_agrees_on_the_models_own_words(states, written, memory_run, verifier_dir):
    from kimi_eagle.capture.probe import Probe, probe
    from kimi_eagle.verifier import open_verifier

    verifier = open_verifier(verifier_dir)
    right, limited, wrong_layer = Probe(verifier), Probe(verifier), Probe(verifier)
    for state, ids, mask, seen in zip(
        states, written["ids"], written["masks"], memory_run["seen"], strict=True
    ):
        agreed, checked = right.add(state[:, -1], ids, mask, seen[3])
        assert checked == sum(mask) + 1 >= agreed
        limited.add(state[:, -1], ids, mask, seen[3], limit=4)
        wrong_layer.add(state[:, -2], ids, mask, seen[3])
    shifted = probe(verifier, states[0][:-1, -1], written["ids"][0][:-1])
    print(
        f"probe: {right.agreement:.4f} of {right.seen}; layer 27 {wrong_layer.agreement:.4f}; "
        f"shifted by one token {shifted:.4f}"
    )
    assert right.agreement >= 0.95
    assert limited.seen == 4 * len(states) and limited.agreement >= 0.85
    assert wrong_layer.agreement < 0.8 and shifted < 0.2


def test_probe_of_nothing(verifier_dir, states):
    from kimi_eagle.capture.probe import Probe, probe
    from kimi_eagle.verifier import open_verifier

    verifier = open_verifier(verifier_dir)
    assert Probe(verifier).agreement == 1.0
    assert probe(verifier, states[0][:0, -1], []) == 1.0


def test_the_engine_names_its_own_next_token(states, memory_run, verifier_dir):
    import torch

    from kimi_eagle.capture.probe import probe
    from kimi_eagle.verifier import open_verifier

    last = torch.stack([s[-1, -1] for s in states])
    following = [seen[3] for seen in memory_run["seen"]]
    assert probe(open_verifier(verifier_dir), last, following) >= 0.75
