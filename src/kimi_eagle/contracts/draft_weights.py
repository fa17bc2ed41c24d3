"""The weights of a draft directory: names, shapes and type of its tensors, and its d2t.

Read without torch: the safetensors headers, and the numbers of d2t and t2d alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kimi_eagle.contracts import draft as drafts
from kimi_eagle.contracts.draft import FITS, draft_rule
from kimi_eagle.contracts.facts import Facts
from kimi_eagle.contracts.rule import NotConcerned, Note, Problem
from kimi_eagle.training.draftfiles import DraftFiles, tensor_shapes
from kimi_eagle.vocab import offset_fault

WEIGHTS = {"BF16": "bfloat16", "F32": "float32"}
OPTIONAL = ("t2d", "embed_tokens.weight")
FLAGS = ("BOOL", "U8", "I8", "I32", "I64")


def _opened(draft: DraftFiles) -> DraftFiles:
    if draft.pickled:
        raise NotConcerned("the weights are *.bin: not opened here")
    return draft


def ours(facts: Facts) -> DraftFiles:
    """A draft in speculators' format, with weights that can be read."""
    return _opened(drafts.ours(facts))


def known(facts: Facts) -> DraftFiles:
    """In speculators' format or in vLLM's own."""
    return _opened(drafts.known(facts))


def _plain(name: str) -> str:
    """A tensor's name of vLLM's own format as speculators would write it."""
    name = name.removeprefix("model.")
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


@draft_rule(
    "draft-tensors",
    what="The weights hold every tensor of the draft under the names that vLLM reads, no other.",
    why="vLLM 0.31.0 (llama_eagle3.py, load_weights) puts `model.` before each name but lm_head's, "
    "stops at a name it does not know, and says nothing of one that is missing: that part of the "
    "draft stays as it was made, unset.",
    how="Names in the safetensors headers against those that the config calls for.",
    fix="export again; names are fc.weight, norm.weight, lm_head.weight, layers.0.self_attn.q_proj"
    ".weight and so on, without a prefix",
    after=FITS,
)
def tensors(facts: Facts) -> Iterator[Problem]:
    draft = ours(facts)
    wanted = set(tensor_shapes(draft)) - {"d2t"}
    has = set(draft.tensors) - {"d2t"}
    missing, unknown = sorted(wanted - has), sorted(has - wanted - set(OPTIONAL))
    if missing or unknown:
        says = [f"no {missing[0]}"] if missing else []
        says += [f"{unknown[0]}, which nothing reads"] if unknown else []
        more = len(missing) + len(unknown) - len(says)
        yield Problem(
            " and ".join(says) + (f" (and {more} more)" if more else ""),
            where=str(draft.path),
            expected=missing[0] if missing else "the names of speculators 0.9.0",
        )


@draft_rule(
    "draft-tensor-shapes",
    what="Every tensor has the shape that the config says.",
    why="vLLM builds the draft from config.json. Another shape is an error in a weight loader "
    "after the verifier is loaded; in attention rows are left out without a word (0.31.0).",
    how="Shapes in the safetensors headers against heads, head_dim, widths and vocabularies.",
    fix="take config.json and weights of the same export",
    after=(*FITS, "draft-head-dim", "draft-tensors"),
)
def shapes(facts: Facts) -> Iterator[Problem]:
    draft = known(facts)
    shape = draft.shape()
    if not all(shape.get(k) for k in ("intermediate_size", "vocab_size", "num_hidden_layers")):
        raise NotConcerned("the config does not tell all sizes")
    wanted = tensor_shapes(draft) | {"t2d": [shape["vocab_size"]]}
    if not draft.flat:
        wanted["embed_tokens.weight"] = [shape["vocab_size"], shape["hidden_size"]]
    for name, entry in draft.tensors.items():
        should = wanted.get(_plain(name) if draft.flat else name)
        if should is not None and list(entry["shape"]) != should:
            yield Problem(
                f"{name} has shape {entry['shape']}", where=str(draft.path), expected=str(should)
            )
            return


@draft_rule(
    "draft-dtype",
    what="All weights are of one floating type, bfloat16 or float32, and the config names it.",
    why="The states that the draft reads reach 25,000 (SmolLM2): float16 ends at 65,504 and rounds "
    "them to 16. vLLM casts what it finds to the target's type without a word.",
    how="dtype in the safetensors headers and in config.json.",
    fix='export again with [train] export_dtype = "bfloat16" or "float32"',
    after=FITS,
)
def dtype(facts: Facts) -> Iterator[Problem]:
    draft = ours(facts)
    kinds = {e["dtype"]: n for n, e in draft.tensors.items() if n not in ("d2t", "t2d")}
    named = draft.config.get("dtype") or draft.config.get("torch_dtype")
    says = None
    named = named.removeprefix("torch.") if isinstance(named, str) else named
    if other := next((k for k in kinds if k not in WEIGHTS), None):
        says = f"{kinds[other]} is {other}"
    elif len(kinds) > 1:
        says = " and ".join(f"{n} {k}" for k, n in sorted(kinds.items()))
    elif named is not None and not drafts.is_start(facts) and named != WEIGHTS[next(iter(kinds))]:
        says = f"config.json says {named}, the weights are {WEIGHTS[next(iter(kinds))]}"
    if says:
        yield Problem(says, where=str(draft.path), expected="bfloat16 or float32, the same in all")


@draft_rule(
    "draft-d2t-present",
    what="A draft with a vocabulary of its own has d2t [D] int64 in its weights.",
    why="vLLM 0.31.0 (llama_eagle3.py) then keeps zeros: draft id i becomes token i.",
    how="d2t in the safetensors headers, and the type of t2d where there is one; a draft with the "
    "whole vocabulary needs none.",
    fix="export again from a checkpoint: speculators keeps d2t there",
    after=(*FITS, "draft-tensors"),
)
def d2t_present(facts: Facts) -> Iterator[Problem]:
    draft = known(facts)
    if draft.draft_vocab_size == draft.shape().get("vocab_size"):
        raise NotConcerned("the draft has the whole vocabulary")
    entry, flags = (draft.tensors.get(name) for name in ("d2t", "t2d"))
    if entry is None:
        yield Problem(
            "no d2t in the weights",
            where=str(draft.path),
            expected=f"d2t [{draft.draft_vocab_size}] int64",
        )
    elif entry["dtype"] not in (FLAGS if draft.flat else ("I64",)):
        yield Problem(f"d2t is {entry['dtype']}", where=str(draft.path), expected="I64")
    elif flags is not None and flags["dtype"] not in FLAGS:
        yield Problem(f"t2d is {flags['dtype']}", where=str(draft.path), expected="BOOL")


D2T = (*FITS, "draft-tensor-shapes", "draft-d2t-present")


def _d2t(facts: Facts) -> tuple[DraftFiles, Any]:
    draft = known(facts)
    d2t = draft.array("d2t")
    if d2t is None:
        raise NotConcerned("the draft has the whole vocabulary")
    return draft, d2t


@draft_rule(
    "draft-d2t-offsets",
    what="d2t in the weights holds offsets to ascending distinct tokens.",
    why="vLLM 0.31.0 (llama_eagle3.py, compute_logits) adds arange: absolute ids propose wrong "
    "tokens, acceptance is 1.0 and nothing says so; ids out of range are a device assert.",
    how="i + d2t[i] is computed; absolute ids are recognised by t2d, or by growing everywhere.",
    fix="subtract arange from d2t in the weights, or export again",
    after=D2T,
)
def d2t_offsets(facts: Facts) -> Iterator[Problem]:
    draft, d2t = _d2t(facts)
    if fault := offset_fault(d2t, draft.shape()["vocab_size"], draft.array("t2d")):
        yield Problem(fault, where=str(draft.path), expected="offsets: token = i + d2t[i]")


@draft_rule(
    "draft-d2t-plain-slice",
    what="d2t is a choice of tokens, not the first D ids.",
    why="Zeros are what a model has whose mappings were never loaded; vLLM proposes bytes and "
    "fragments, and acceptance is near 1.0.",
    how="d2t holds something else than zeros, unless the run's counts hold no others.",
    fix="train with a mapping made from counts",
    after=(*D2T, "draft-d2t-offsets", "mapping-readable"),
)
def d2t_plain_slice(facts: Facts) -> Iterator[Problem]:
    draft, d2t = _d2t(facts)
    run = facts.mapping
    if not d2t.any() and (run is None or run.d2t.any() or len(run.d2t) != len(d2t)):
        yield Problem(
            f"d2t is all zeros: the first {len(d2t):,} ids",
            where=str(draft.path),
            expected="tokens chosen by their counts",
        )


@draft_rule(
    "draft-t2d",
    what="t2d in the weights names the same tokens as d2t.",
    why="vLLM ignores t2d, but training goes on by it: speculators takes the verifier's output "
    "rows where t2d is true.",
    how="The true entries of t2d against i + d2t[i]; without t2d it is made from d2t here.",
    fix="export again",
    after=(*D2T, "draft-d2t-offsets"),
)
def t2d(facts: Facts) -> Iterator[Problem | Note]:
    draft, d2t = _d2t(facts)
    flags = draft.array("t2d")
    if flags is None:
        yield Note("no t2d in the weights: vLLM needs none, training further does")
        return
    chosen = [int(i) for i in flags.nonzero()[0]]
    if chosen != [int(i + k) for i, k in enumerate(d2t)]:
        yield Problem(
            f"t2d is true for {len(chosen):,} tokens, others than those of d2t",
            where=str(draft.path),
            expected="the same",
        )


@draft_rule(
    "draft-mapping-current",
    what="The draft's mapping is the run's.",
    why="After counts or size of the vocabulary changed, a draft of before still loads: its output "
    "rows mean the tokens of its own d2t, and a d2t copied over from the new mapping is noise.",
    how="Digest of d2t and vocabulary size against that of the run's mapping, or of the one that "
    "the recipe brings along.",
    fix="train again with the mapping as it is now, or go back to the one the draft was made with",
    after=(*D2T, "draft-d2t-plain-slice", "draft-t2d", "mapping-readable"),
)
def mapping_current(facts: Facts) -> Iterator[Problem]:
    draft, d2t = _d2t(facts)
    if draft.flat:
        raise NotConcerned("a draft that was trained elsewhere")
    if facts.mapping is None:
        raise NotConcerned("no mapping to compare with before the vocab stage")
    own = draft.mapping(draft.shape()["vocab_size"])
    if own.digest != facts.mapping.digest:
        yield Problem(
            f"d2t {own.digest[:8]} is not the run's mapping",
            where=str(draft.path),
            expected=facts.mapping.digest[:8],
        )
