"""A draft directory: the run's own when the benchmark opens, or `check --draft DIR`.

vLLM loads much that is wrong: most of these rules name a fault that costs acceptance and shows
nowhere. Judged from config.json and the safetensors headers; what the weights hold is judged in
draft_weights.py. What the shape should be is what the recipe and the verifier's config give, or
the draft that training started from.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kimi_eagle.contracts.draft_shape import (
    YARN,
    latent_traps,
    longest,
    split_faults,
    text_of,
)
from kimi_eagle.contracts.facts import Facts
from kimi_eagle.contracts.rule import NotConcerned, Note, Problem, rule
from kimi_eagle.training.draftfiles import DraftFiles
from kimi_eagle.training.shape import decoder_shape, rope_parameters

METHODS = {
    "eagle3": "eagle3",
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
    if draft.kind != "eagle3" or draft.layer_type not in ("llama", "qwen3"):
        raise NotConcerned(f"a draft of kind {draft.kind}: vLLM alone can judge it")
    return draft


def expected_shape(facts: Facts) -> dict[str, Any]:
    """What the decoder of this draft should be: of the recipe, or of the draft it started from."""
    if facts.recipe.train.from_ is not None:
        return facts.start.shape()
    return decoder_shape(facts.recipe.train.draft, facts.verifier.config)


def _in_config(facts: Facts, what: str, expected: Any) -> Problem:
    return Problem(what, str(facts.draft_files.path / "config.json"), str(expected))


@draft_rule(
    "draft-complete",
    what="The draft directory has a config and whole safetensors weights.",
    why="A copy that was cut, a git-LFS pointer or a file that the index names and nobody copied "
    "stops vLLM after it has loaded the verifier, 600 GB for Kimi-K2.5.",
    how="config.json is parsed, every header read and compared with its file's size.",
    fix="copy the directory again, or export it again",
)
def complete(facts: Facts) -> Iterator[Problem]:
    draft = facts.draft_files
    draft.config, draft.tensors  # noqa: B018  raise where they cannot be read
    yield from ()


@draft_rule(
    "draft-kind",
    what="The draft is an EAGLE-3 draft: vLLM's method for it is eagle3.",
    why="vLLM's method `eagle` (first generation) reads one state instead of three and knows no "
    "d2t. vLLM 0.31.0 takes the method from speculators_model_type (transformers_utils/configs/"
    "speculators/base.py) or the architecture's name.",
    how="speculators_model_type and architectures in config.json.",
    fix='speculators_model_type must be "eagle3"; start vLLM with "method": "eagle3"',
    after=("draft-complete",),
)
def kind(facts: Facts) -> Iterator[Problem | Note]:
    draft = facts.draft_files
    if draft.kind in METHODS:
        if draft.kind != "eagle3":
            yield Note(METHODS[draft.kind])
        elif draft.layer_type not in ("llama", "qwen3"):
            yield _in_config(
                facts,
                f"an eagle3 draft with a {draft.layer_type} decoder",
                "llama: vLLM's eagle3_arch_map knows llama and qwen3",
            )
    elif not draft.config.get("speculators_model_type") and "eagle3" in draft.kind.lower():
        yield Note(f"{draft.kind}: not speculators' format, only sizes are judged")
    else:
        yield _in_config(facts, f"a draft of kind {draft.kind}", "eagle3")


@draft_rule(
    "draft-fits-verifier",
    what="The draft was made for this verifier's hidden size and vocabulary.",
    why="vLLM builds the draft from its own config and fails in the middle of loading, or shares "
    "an embedding whose rows mean other tokens.",
    how="hidden_size and vocab_size of the draft's config against the verifier's.",
    fix="give the draft of this verifier",
    after=("draft-kind",),
)
def fits_verifier(facts: Facts) -> Iterator[Problem]:
    own, text = facts.draft_files.shape(), text_of(facts)
    for key in ("hidden_size", "vocab_size"):
        if own.get(key) is not None and own[key] != text.get(key):
            yield Problem(
                f"a draft for another verifier: {key} {own[key]}",
                where=str(facts.draft_files.path),
                expected=str(text.get(key)),
            )
            return


FITS = ("draft-complete", "draft-kind", "draft-fits-verifier")


@draft_rule(
    "draft-verifier-path",
    what="The draft names its verifier by an absolute path.",
    why="`vllm serve DRAFT` opens what it names: a relative path counts from the working "
    "directory, and where nothing lies there it is taken for a name on the hub.",
    how="speculators_config.verifier.name_or_path.",
    fix="write the absolute path into config.json, or export again",
    after=FITS,
)
def verifier_path(facts: Facts) -> Iterator[Problem | Note]:
    section = ours(facts).config.get("speculators_config")
    verifier = section.get("verifier") if isinstance(section, dict) else None
    named = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    where = str(facts.draft_files.path / "config.json")
    if not named or not Path(named).is_absolute():
        yield Problem(
            f"verifier {named!r}", where=where, expected=str(facts.verifier.path.resolve())
        )
    elif not Path(named).is_dir():
        yield Note(f"its verifier {named} is not on this machine")


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
        yield _in_config(facts, f"the draft reads layers {own}", wanted)


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
    own = ours(facts).shape().get("head_dim")
    wanted = expected_shape(facts)["head_dim"]
    try:
        _, traps = latent_traps(text_of(facts))
    except NotConcerned:
        traps = set()
    if own in traps and own != wanted:
        yield _in_config(facts, f"head_dim {own}", wanted)
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
    if (own := ours(facts).shape()["hidden_act"]) != "silu":
        yield _in_config(facts, f"hidden_act {own!r}", "silu")


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
    if faults := split_faults(ours(facts).shape(), tp):
        yield _in_config(facts, f"{', '.join(faults)} on {tp} GPUs", f"a multiple of tp = {tp}")


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


def _rope(facts: Facts) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rotary parameters of the draft and those that it should have, in one form."""
    return rope_parameters(ours(facts).layer), rope_parameters(expected_shape(facts))


@draft_rule(
    "draft-rope-theta",
    what="The draft's rotary base is the one that it was trained with.",
    why="It is in config.json alone, no weight knows it: 10,000 (llama's default, where the key is "
    "lost) instead of Kimi-K2.5's 50,000 loads, and acceptance falls with the length of the text.",
    how="rope_theta, in both layouts, against the recipe's shape.",
    fix="correct rope_parameters in config.json",
    after=FITS,
)
def rope_theta(facts: Facts) -> Iterator[Problem]:
    own, wanted = (rope["rope_theta"] for rope in _rope(facts))
    if own != wanted:
        yield _in_config(facts, f"rope_theta {own}", wanted)


@draft_rule(
    "draft-yarn",
    what="The draft stretches positions as in training: YaRN with the same numbers, or none.",
    why="vLLM computes the rotary table from the draft's config. Without YaRN, or without its "
    "mscale (vLLM below 0.30 ignored it in a llama), the draft is wrong beyond the original "
    "positions (4,096 of Kimi-K2.5's 262,144) and loads all the same.",
    how="rope_parameters or rope_scaling, key by key with the libraries' defaults, against the "
    "recipe's shape.",
    fix="correct rope_parameters in config.json",
    after=FITS,
)
def yarn(facts: Facts) -> Iterator[Problem]:
    own, wanted = _rope(facts)
    if "yarn" not in (own["rope_type"], wanted["rope_type"]):
        raise NotConcerned("no YaRN in this draft")
    for key, default in YARN.items():
        have, want = own.get(key, default), wanted.get(key, default)
        if have != want:
            yield _in_config(facts, f"YaRN: {key} {have}", str(want))
            return


@draft_rule(
    "draft-positions",
    what="The draft has the positions of its shape.",
    why="max_position_embeddings sizes vLLM's rotary table and caps drafting: below the verifier's "
    "length the draft is not asked, or older versions read past the table's end.",
    how="max_position_embeddings against the recipe's shape and the lengths that the recipe uses.",
    fix="correct max_position_embeddings in config.json",
    after=FITS,
)
def positions(facts: Facts) -> Iterator[Problem | Note]:
    own = ours(facts).shape()["max_position_embeddings"]
    wanted = expected_shape(facts)["max_position_embeddings"]
    if own < max(wanted, longest(facts)):
        yield _in_config(facts, f"max_position_embeddings {own:,}", f"{wanted:,}")


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
        if own[key] != wanted[key]:
            yield _in_config(facts, f"{key} {own[key]}", wanted[key])
            return
