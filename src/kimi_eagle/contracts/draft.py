"""A draft directory: the run's own when the benchmark opens, or `check --draft DIR`.

vLLM loads much that is wrong: most of these rules name a fault that costs acceptance and shows
nowhere. Judged from config.json and the safetensors headers; the numbers that no weight knows are
judged in draft_values.py, the weights in draft_weights.py. What the shape should be is what the
recipe and the verifier's config give, or the draft that training started from.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import Any

from kimi_eagle.contracts.draft_shape import (
    latent_traps,
    split_faults,
    text_of,
)
from kimi_eagle.contracts.facts import Facts
from kimi_eagle.contracts.rule import NotConcerned, Note, Problem, rule
from kimi_eagle.errors import KimiEagleError
from kimi_eagle.training import draftkind
from kimi_eagle.training.draftfiles import DraftFiles
from kimi_eagle.training.shape import decoder_shape, rope_parameters, text_config
from kimi_eagle.verifier import Verifier

OTHERS = {
    "peagle": "eagle3 drafting in parallel",
    "latent": "a draft of latent-attention kind: it can be benchmarked, not trained",
}


def draft_rule(id: str, *, after: tuple[str, ...] = (), **words: Any):  # noqa: A002
    """A rule on a draft directory."""
    after = ("verifier-directory", "verifier-config", "training-from-complete", *after)
    return rule(id, needs=("draft",), stages=("benchmark",), after=after, **words)


def ours(facts: Facts) -> DraftFiles:
    """The draft where it is in speculators' format with a decoder that we know."""
    draft = facts.draft_files
    if draft.kind != "eagle3" or not draft.known_decoder:
        raise NotConcerned(f"a draft of kind {draft.kind}: vLLM alone can judge it")
    return draft


def known(facts: Facts) -> DraftFiles:
    """The draft in speculators' format or in vLLM's own, with a decoder that we know."""
    return facts.draft_files if facts.draft_files.flat else ours(facts)


def at_start(facts: Facts) -> Facts:
    """The same facts, in which the draft is the one that training starts from."""
    facts.start, facts.verifier  # noqa: B018  opened once, for both
    view = copy(facts)
    view.__dict__["draft_files"] = facts.start
    return view


def is_start(facts: Facts) -> bool:
    """Whether these are facts of `at_start`."""
    return facts.recipe.train.from_ is not None and facts.draft_files is facts.start


def expected_shape(facts: Facts) -> dict[str, Any]:
    """What the decoder of this draft should be: of the recipe; of the draft that it started from;
    that one itself should have the verifier's positions."""
    told, text = facts.recipe.train.draft, text_of(facts)
    if facts.recipe.train.from_ is None:
        return decoder_shape(told, facts.verifier.config)
    if not is_start(facts):
        return facts.start.shape()
    rope = dict(told.rope) if told.rope is not None else rope_parameters(text)
    return facts.start.shape() | {"rope_parameters": rope}


def in_config(facts: Facts, what: str, expected: Any) -> Problem:
    return Problem(what, str(facts.draft_files.path / "config.json"), str(expected))


def differs(facts: Facts, what: str, expected: Any) -> Problem | Note:
    """A Problem, but for drafts in vLLM's own format: those were trained elsewhere, and what their
    config says may be what they were trained with."""
    if facts.draft_files.flat:
        return Note(f"{what}, the recipe gives {expected}: right if it was trained so")
    return in_config(facts, what, expected)


@draft_rule(
    "draft-complete",
    what="The draft directory has a config that can be read and whole weights.",
    why="A copy that was cut, a git-LFS pointer or a file that the index names and nobody copied "
    "stops vLLM after it has loaded the verifier, 600 GB for Kimi-K2.5.",
    how="config.json is parsed and its numbers are numbers; every safetensors header is read and "
    "compared with its file's size. *.bin alone, which vLLM loads, too, is not opened.",
    fix="copy the directory again, or export it again",
)
def complete(facts: Facts) -> Iterator[Problem]:
    draft = facts.draft_files
    draft.config  # noqa: B018  raises where it cannot be read
    if draft.pickled:
        yield Note("the weights are *.bin alone: they are not opened here")
    else:
        draft.tensors  # noqa: B018  raises


@draft_rule(
    "draft-kind",
    what="The draft is of a kind that vLLM serves beside this verifier: EAGLE-3, by its method "
    "eagle3, or another that the benchmark knows.",
    why="vLLM's method `eagle` (first generation) reads one state instead of three and knows no "
    "d2t. vLLM 0.31.0 takes the method from speculators_model_type (transformers_utils/configs/"
    "speculators/base.py) or the architecture's name; the verifier's own directory, or its layers "
    "of multi-token prediction, are no draft for any of them.",
    how="speculators_model_type, architectures and the decoder's model_type in config.json, by the "
    "benchmark's table (training/draftkind.py).",
    fix='give a draft directory: speculators_model_type "eagle3", or an architecture such as '
    "LlamaForCausalLMEagle3",
    after=("draft-complete",),
)
def kind(facts: Facts) -> Iterator[Problem | Note]:
    draft = facts.draft_files
    told = draftkind.speculative(draft.config)
    if told is None:
        yield in_config(facts, draftkind.in_words(draft.config), "an EAGLE-3 draft")
    elif draft.config.get("speculators_model_type") == "eagle3" and not draft.known_decoder:
        yield in_config(
            facts,
            f"an eagle3 draft with a {draft.layer_type} decoder",
            "llama: vLLM's eagle3_arch_map knows llama and qwen3",
        )
    elif draft.kind in OTHERS:
        yield Note(OTHERS[draft.kind])
    elif draft.flat:
        yield Note(f"{draft.kind}: vLLM's own format, judged as far as its config tells")
    elif draft.kind != "eagle3":
        yield Note(f"{draft.kind}: vLLM's method {told['method']}, only sizes are judged")


@draft_rule(
    "draft-fits-verifier",
    what="The draft was made for this verifier's hidden size and vocabulary.",
    why="vLLM builds the draft from its own config and fails in the middle of loading, or shares "
    "an embedding whose rows mean other tokens.",
    how="target_hidden_size, else hidden_size, and vocab_size of the draft's config against the "
    "verifier's.",
    fix="give the draft of this verifier",
    after=("draft-kind",),
)
def fits_verifier(facts: Facts) -> Iterator[Problem]:
    draft, text = facts.draft_files, text_of(facts)
    sizes = {"hidden_size": draft.target_hidden_size, "vocab_size": draft.shape().get("vocab_size")}
    for key, own in sizes.items():
        if own is not None and own != text.get(key):
            yield Problem(
                f"a draft for another verifier: {key} {own}",
                where=str(draft.path),
                expected=str(text.get(key)),
            )
            return


FITS = ("draft-complete", "draft-kind", "draft-fits-verifier")


@draft_rule(
    "draft-verifier-path",
    what="The draft names its verifier, by an absolute path.",
    why="`vllm serve DRAFT` opens what it names: a relative path counts from the working "
    "directory, and where nothing lies there it is taken for a name on the hub.",
    how="speculators_config.verifier.name_or_path; the config.json there against the verifier's.",
    fix="write the absolute path into config.json, or export again",
    after=FITS,
)
def verifier_path(facts: Facts) -> Iterator[Problem | Note]:
    named = ours(facts).named_verifier
    where = str(facts.draft_files.path / "config.json")
    if not named or not Path(named).is_absolute():
        yield Problem(
            f"verifier {named!r}", where=where, expected=str(facts.verifier.path.resolve())
        )
    elif not Path(named).is_dir():
        yield Note(f"its verifier {named} is not on this machine")
    elif Path(named).resolve() != facts.verifier.path.resolve():
        yield from _another(facts, Path(named))


SAME = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")


def _another(facts: Facts, named: Path) -> Iterator[Problem | Note]:
    """The draft names another directory than the recipe: a copy, another quantisation, or another
    model."""
    try:
        theirs = text_config(Verifier(named).config)
    except (KimiEagleError, OSError):
        yield Note(f"its verifier {named} cannot be read")
        return
    mine = text_of(facts)
    if differs := [key for key in SAME if theirs.get(key) != mine.get(key)]:
        key = differs[0]
        says = f"it names another verifier, {named}: {key} {theirs.get(key)}"
        yield in_config(facts, says, facts.verifier.path.resolve())
    else:
        yield Note(f"it names the verifier {named}, the recipe {facts.verifier.path}")


@draft_rule(
    "draft-layers",
    what="The draft reads the layers that it was trained on.",
    why="vLLM takes the states of eagle_aux_hidden_state_layer_ids; others have the same shape and "
    "load without a word. Without the key vLLM falls back to (2, L/2, L-3).",
    how="eagle_aux_hidden_state_layer_ids against extract.layers without the last one.",
    fix="correct the ids in config.json, or judge it with the recipe that it was trained by",
    after=FITS,
)
def layers(facts: Facts) -> Iterator[Problem]:
    own, wanted = ours(facts).aux_layers, list(facts.recipe.extract.layers[:-1])
    if own != wanted:
        yield in_config(facts, f"the draft reads layers {own}", wanted)


@draft_rule(
    "draft-head-dim",
    what="The head size of the draft is that of its shape, and no part of latent attention.",
    why="vLLM 0.31.0 loads a draft whose config.json has a smaller head size than its weights: it "
    "takes the first rows of each product without a word (seen). And a draft made with 64 "
    "(Kimi-K2.5's rotary part) or 112 (hidden / heads) instead of 128 has less attention than was "
    "meant.",
    how="head_dim against that of the recipe's shape and the traps of the verifier's config.",
    fix="correct config.json, or train again with head_dim left out",
    after=FITS,
)
def head_dim(facts: Facts) -> Iterator[Problem | Note]:
    own = known(facts).shape().get("head_dim")
    wanted = expected_shape(facts)["head_dim"]
    try:
        _, traps = latent_traps(text_of(facts))
    except NotConcerned:
        traps = set()
    if own in traps and own != wanted:
        yield differs(facts, f"head_dim {own}", wanted)
    elif own != wanted:
        yield Note(f"head_dim {own}, the recipe gives {wanted}")


@draft_rule(
    "draft-activation",
    what="The draft's activation is silu.",
    why="vLLM 0.31.0 (models/llama.py, LlamaMLP): `Only silu is supported for now`.",
    how="hidden_act of the decoder in config.json.",
    fix="train with hidden_act silu: another in the file alone would change what was trained",
    after=FITS,
)
def activation(facts: Facts) -> Iterator[Problem]:
    if (own := known(facts).shape()["hidden_act"]) != "silu":
        yield in_config(facts, f"hidden_act {own!r}", "silu")


@draft_rule(
    "draft-parallel",
    what="The draft divides among the GPUs of the benchmark.",
    why="vLLM runs it with the target's tensor parallel size: an AssertionError after the load.",
    how="Heads, key-value heads and feed-forward width by tp of [benchmark.engine].",
    fix="serve with a smaller tp, or train a draft whose heads divide",
    after=FITS,
)
def parallel(facts: Facts) -> Iterator[Problem]:
    tp = facts.recipe.engine_for("benchmark").tp
    shape = known(facts).shape()
    if not shape.get("intermediate_size"):
        raise NotConcerned("the config tells no intermediate_size")
    if faults := split_faults(shape, tp):
        yield in_config(facts, f"{', '.join(faults)} on {tp} GPUs", f"a multiple of tp = {tp}")


@draft_rule(
    "draft-full-attention",
    what="The draft attends to all of the text.",
    why="speculators 0.9.0's command line gives every draft a sliding window of 2,048 and vLLM "
    "0.31.0 obeys layer_types: beyond the window the draft sees less than the verifier.",
    how="layer_types of the decoder in config.json.",
    fix="train with full attention (here: always; speculators: --full-attention-indices 0)",
    after=FITS,
)
def full_attention(facts: Facts) -> Iterator[Problem | Note]:
    shape = ours(facts).shape()
    if "sliding_attention" not in (shape.get("layer_types") or ()):
        return
    says = f"a sliding window of {shape.get('sliding_window')} tokens"
    if facts.recipe.train.from_ is not None:
        yield Note(f"{says}, as the draft had that training started from")
    else:
        where = str(facts.draft_files.path / "config.json")
        yield Problem(says, where=where, expected="full attention")


@draft_rule(
    "draft-tokens",
    what="The draft's bos and eos are the verifier's.",
    why="llama's defaults are 1 and 2, other tokens in most vocabularies; tools that generate with "
    "the draft's config alone stop at the wrong token.",
    how="bos_token_id and eos_token_id against the recipe's shape.",
    fix="correct them in config.json",
    after=FITS,
)
def tokens(facts: Facts) -> Iterator[Problem]:
    own, wanted = ours(facts).shape(), expected_shape(facts)
    for key in ("bos_token_id", "eos_token_id"):
        if _ids(own[key]) != _ids(wanted[key]):
            yield in_config(facts, f"{key} {own[key]}", wanted[key])
            return


def _ids(value: Any) -> list[Any]:
    return sorted(value, key=str) if isinstance(value, list | tuple) else [value]
