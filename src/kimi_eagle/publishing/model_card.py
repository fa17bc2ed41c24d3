"""README.md of an exported draft: what it is, how good, of what, and what may be done with it.

Metadata as the Hugging Face hub reads it. `base_model` is written only where `[card] base_model`
names one (a path of this machine is none), and no `base_model_relation`: the hub knows finetune,
adapter, merge and quantized, and a draft is none of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kimi_eagle.publishing import sglang, words
from kimi_eagle.publishing.facts import Facts
from kimi_eagle.training.draftfiles import DraftFiles

WITHOUT = {
    "vllm": "vLLM 0.31.0 takes the verifier's then (model_executor/models/llama_eagle3.py, "
    "load_weights; v1/spec_decode/llm_base_proposer.py), with one pipeline stage only: with more "
    "it has none. speculators 0.9.0 loads it from the verifier that config.json names "
    "(models/eagle3/core.py, model.py).",
    "sglang": "SGLang takes the verifier's in any case (speculative/eagle_worker.py, set_embed).",
}


@dataclass(frozen=True)
class Form:
    """server: vllm or sglang. embedding: carried along; own: it is not the verifier's."""

    server: str
    embedding: bool
    own: bool


def text(facts: Facts, draft: DraftFiles, form: Form, licences: list[str]) -> str:
    """The card. licences: names of the verifier's licence texts in the export."""
    name = facts.verifier_name
    head = {
        **words.licence_keys(facts.licence, licences[0] if licences else None),
        "base_model": [facts.card.base_model] if facts.card.base_model else None,
        "library_name": "speculators" if form.server == "vllm" else "sglang",
        "pipeline_tag": "text-generation",
        "tags": ["eagle3", "speculative-decoding", "draft-model", form.server, "kimi-eagle"],
    }
    lines = [
        *words.metadata({k: v for k, v in head.items() if v is not None}),
        f"# EAGLE-3 draft for {name}",
        "",
        f"A draft model for speculative decoding of {name}. It answers nothing on its own: it "
        f"proposes tokens, which {name} accepts or not.",
        "",
        "## Use",
        "",
        *_use(facts, form),
        "",
        "## How well it drafts",
        "",
        *_figures(facts),
        "",
        "## Shape",
        "",
        *_shape(draft, form),
        "",
        "## Embedding",
        "",
        _embedding(facts, form),
        "",
        "## Training data",
        "",
        *words.sources(facts),
        "",
        "## Licence",
        "",
        f"Draft: {words.licence_words(facts.licence)}. "
        f"Verifier: {words.licence_words(facts.verifier)}.",
        "",
        "The draft was trained on the verifier's hidden states and output; its licence text: "
        + (", ".join(licences) if licences else "none was found in its directory")
        + ".",
        "",
        "## Made with",
        "",
        *words.made_with(facts),
    ]
    return "\n".join(lines) + "\n"


def _use(facts: Facts, form: Form) -> list[str]:
    k = (facts.results or {}).get("k", facts.recipe.benchmark.k)
    verifier = facts.card.base_model or "VERIFIER"
    if form.server == "vllm":
        setting = f'{{"method": "eagle3", "model": "DRAFT", "num_speculative_tokens": {k}}}'
        lines = ["```", f"vllm serve {verifier} --speculative-config '{setting}'", "```"]
    else:
        lines = [
            "```",
            f"python -m sglang.launch_server --model-path {verifier} "
            "--speculative-algorithm EAGLE3 --speculative-draft-model-path DRAFT "
            f"--speculative-num-steps {k} --speculative-eagle-topk 1 "
            f"--speculative-num-draft-tokens {k + 1}",
            "```",
            "",
            "Names, ids and config follow SGLang's source (python/sglang/srt/models/"
            "llama_eagle3.py); SGLang itself was not run with this draft.",
        ]
    where = "VERIFIER is its directory or name, DRAFT" if verifier == "VERIFIER" else "DRAFT"
    return [*lines, "", f"{where} is this directory."]


def _figures(facts: Facts) -> list[str]:
    if facts.results is None:
        return ["Not measured: the run has no benchmark of this draft."]
    results, details = facts.results, facts.results.get("details") or {}
    rows = []
    for row in details.get("batch_sizes") or ():
        rates = row.get("tokens_per_second") or {}
        cells = [_round(row.get("acceptance_length"), 3)]
        cells += [_round(rates.get(name), 1) for name in ("baseline", "draft")]
        rows.append([row.get("batch_size"), *cells, _round(row.get("speedup"), 2)])
    positions = ", ".join(f"{x:.3f}" for x in results["acceptance_per_position"])
    same = results.get("identical_outputs")
    claim = {True: "identical", False: "not identical"}.get(same, "not claimed")
    interval = (results.get("intervals") or {}).get("acceptance_length")
    spread = "; 95 % interval over prompts {:.3f} to {:.3f}".format(*interval) if interval else ""
    return [
        f"Acceptance length {results['acceptance_length']:.3f} at k = {results['k']} (tokens a "
        f"verifier step yields{spread}). Share of drafts accepted at least up to each position: "
        f"{positions}.",
        "",
        *words.table(
            ("batch", "acceptance length", "tokens/s without", "tokens/s with", "speed-up"), rows
        ),
        "",
        f"Outputs with and without the draft: {claim} "
        f"({details.get('identical_outputs_reason', '')}).",
        "",
        " ".join([_measured(facts, details), *_loops(details), *_duplicates(details)]),
    ]


def _loops(details: dict[str, Any]) -> list[str]:
    """What the report says beside its headline, for these figures are the same."""
    loops = details.get("loops") or {}
    if not loops.get("prompts"):
        return []
    out = "left out of acceptance and of the rates at batch 1" if loops.get("left_out") else "in it"
    return [
        f"{loops['prompts']} of {loops['of']} answers repeat themselves and are {out}: alone they "
        f"have an acceptance length of {_round(loops.get('acceptance_length'), 3)}, all prompts "
        f"together {_round(loops.get('acceptance_length_all'), 3)}."
    ]


def _duplicates(details: dict[str, Any]) -> list[str]:
    near = details.get("near_duplicates") or {}
    if "prompts" not in near:
        return ["Whether prompts are near-duplicates of training data is unknown."]
    return [
        f"{near['prompts'] or 'None'} of {near['compared']} prompts compared with the training "
        "data share a run of words with it."
    ]


def _round(value: Any, digits: int) -> str:
    return f"{value:.{digits}f}" if isinstance(value, int | float) else "unknown"


def _measured(facts: Facts, details: dict[str, Any]) -> str:
    engine = details.get("engine") or {}
    versions = ", ".join(f"{n} {v}" for n, v in sorted((details.get("versions") or {}).items()))
    device = engine.get("device", "unknown")
    threads = f", {details['threads']} threads" if device == "cpu" and "threads" in details else ""
    machines = "; ".join(
        words.machine(m)
        for m in ((facts.lock.get("stages") or {}).get("benchmark") or {}).get("machines") or ()
    )
    return (
        f"Measured on {len(details.get('prompts') or ())} held-out prompts of the recipe, greedy, "
        f"at most {details.get('max_tokens')} tokens an answer, {details.get('dtype')}, device "
        f"{device}{threads}, tp {engine.get('tp')}, pp {engine.get('pp')}, {versions}; "
        f"{machines or 'machine unknown'}. Rates include prefill. Another workload gives other "
        f"figures; workload digest {facts.results['workload']}."
    )


def _shape(draft: DraftFiles, form: Form) -> list[str]:
    shape = draft.shape()
    layers = f"{draft.aux_layers} (id k: the state that enters layer k, as vLLM counts)"
    if form.server == "sglang":
        own = sglang.sglang_ids(draft.aux_layers)
        layers = f"{own} (as SGLang counts: the layer that a state leaves)"
    rows = [
        ("decoder layers", shape["num_hidden_layers"]),
        ("hidden size", shape["hidden_size"]),
        ("draft vocabulary", draft.draft_vocab_size),
        ("verifier's vocabulary", shape["vocab_size"]),
        ("states that feed it", layers),
    ]
    lines = words.table(("", ""), rows)
    if form.server == "sglang" and (newer := sglang.needs_newer(draft)):
        lines += ["", f"{' and '.join(newer)} need SGLang with {sglang.PULL_REQUEST}."]
    return lines


def _embedding(facts: Facts, form: Form) -> str:
    whose = "its own embedding" if form.own else f"the embedding of {facts.verifier_name}"
    if not form.embedding:
        return f"embed_tokens.weight is left out. {WITHOUT[form.server]}"
    licence = "" if form.own else ": weights of the verifier, under the verifier's licence"
    return f"model.safetensors carries {whose} (embed_tokens.weight){licence}."
