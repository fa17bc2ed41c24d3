"""The draft's vocabulary: which tokens of the verifier it can name, and how that is written down.

The same rules judge the mapping of a run, one that the recipe brings along (`[vocab] mapping`, the
own one of a draft in `train.from`) and one that `kimi-eagle vocab import` reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np

from kimi_eagle.contracts.facts import Facts
from kimi_eagle.contracts.rule import RULES, NotConcerned, Note, Problem, rule
from kimi_eagle.contracts.tokenizer import added_tokens
from kimi_eagle.errors import RunError
from kimi_eagle.vocab import VocabMapping, offset_fault

LEAST_COVERAGE = 0.5
"""A mapping from the right tokenizer's counts covers 0.95 and more (SmolLM2: 4,096 of 49,152
tokens cover 0.986); below this it is another tokenizer's."""
IMPORT = (
    "take t2d and d2t of one mapping; kimi-eagle vocab import T2D D2T reads offsets and absolute "
    "ids and writes the right form"
)


@rule(
    "mapping-size",
    what="The draft's vocabulary is not larger than the verifier's, and its forced tokens fit.",
    why="Known only when the vocab stage counts, after regenerate and prepare. speculators 0.9.0 "
    "(train/vocab_mapping.py) fills up with ids that do not exist: an IndexError of t2d.",
    how="vocab.draft_vocab_size and vocab.force_tokens against vocab_size of config.json. All of "
    "the verifier's vocabulary is allowed: no mapping is needed then.",
    fix="set [vocab] draft_vocab_size (32,000 of 163,840 for Kimi-K2.5)",
    stages=("vocab", "train"),
    after=("verifier-config",),
)
def size(facts: Facts) -> Iterator[Problem | Note]:
    section, whole = facts.recipe.vocab, facts.verifier.vocab_size
    if section.draft_vocab_size > whole:
        yield Problem(
            f"draft vocabulary of {section.draft_vocab_size:,} is larger than the verifier's",
            where="vocab.draft_vocab_size",
            expected=f"at most {whole:,}",
        )
    elif (forced := len(set(section.force_tokens))) > section.draft_vocab_size:
        yield Problem(
            f"{forced:,} forced tokens do not fit into {section.draft_vocab_size:,}",
            where="vocab.draft_vocab_size",
            expected=f"at least {forced:,}",
        )
    elif section.draft_vocab_size == whole:
        yield Note("the whole vocabulary: no mapping, an output matrix as large as the target's")


@rule(
    "mapping-forced-ids",
    what="Forced tokens are tokens of the verifier.",
    why="An id that does not exist stops the vocab stage, after regenerate and prepare.",
    how="vocab.force_tokens against vocab_size of config.json.",
    fix="correct [vocab] force_tokens",
    stages=("vocab",),
    after=("verifier-config",),
)
def forced_ids(facts: Facts) -> Iterator[Problem]:
    whole = facts.verifier.vocab_size
    if bad := [t for t in facts.recipe.vocab.force_tokens if not 0 <= t < whole]:
        yield Problem(
            f"vocab.force_tokens holds {bad[0]}",
            where="vocab.force_tokens",
            expected=f"ids from 0 to {whole - 1}",
        )


@rule(
    "mapping-special-fit",
    what="The tokens that are always in the draft's vocabulary, forced and special ones, fit.",
    why="The vocab stage, after regenerate and prepare, refuses a draft_vocab_size below their "
    "number (Kimi-K2.5: about 250 control, tool, thinking and reserved tokens).",
    how="vocab.force_tokens, the ids that end an answer and the added tokens: those in the "
    "tokenizer's files, and where transformers may be imported all that the opened tokenizer has.",
    fix="raise [vocab] draft_vocab_size, or set force_special = false",
    stages=("regenerate", "prepare", "vocab"),
    after=("mapping-size", "mapping-forced-ids", "tokenizer-ids-in-range", "tokenizer-opens"),
)
def special_fit(facts: Facts) -> Iterator[Problem]:
    from kimi_eagle.vocab import special_ids

    section, verifier = facts.recipe.vocab, facts.verifier
    if not section.force_special:
        raise NotConcerned("vocab.force_special is false")
    if section.mapping or facts.recipe.train.from_:
        raise NotConcerned("the recipe brings a mapping along")
    if facts.lacks("transformers"):
        told = {*added_tokens(verifier).values(), *verifier.eos_ids}
        special = {i for i in told if i < verifier.vocab_size}
    else:
        special = set(special_ids(verifier))
    always = special | set(section.force_tokens)
    if len(always) > section.draft_vocab_size:
        yield Problem(
            f"{len(always):,} forced and special tokens do not fit into "
            f"{section.draft_vocab_size:,}",
            where="vocab.draft_vocab_size",
            expected=f"at least {len(always):,}",
        )


@rule(
    "mapping-readable",
    what="The mapping that the recipe brings along, or that the run made, can be read whole.",
    why="A folder without mapping.json, files that are empty or cut, or of two mappings in one "
    "folder, would give a draft whose output rows mean other tokens.",
    how="d2t.npy, t2d.npy and mapping.json are read; digest, d2t and t2d must agree, and a "
    "coverage is a share of counts that are named.",
    fix="make it again: kimi-eagle vocab import (or vocab build) writes all five files",
    needs=("mapping",),
    stages=("vocab", "train"),
    after=("verifier-config",),
)
def readable(facts: Facts) -> Iterator[Problem | Note]:
    if folder := facts.recipe.vocab.mapping:
        yield Note(f"taken from {folder}")
    elif start := facts.recipe.train.from_:
        yield Note(f"taken from the draft {start}")


def _rule(id: str, *, what: str, why: str, how: str, fix: str, after: tuple[str, ...] = ()):  # noqa: A002
    """A rule on a mapping as such."""
    after = ("mapping-readable", *after)
    stages = ("vocab", "train")
    return rule(
        id, what=what, why=why, how=how, fix=fix, needs=("mapping",), stages=stages, after=after
    )


@_rule(
    "mapping-offsets",
    what="d2t holds offsets: draft id i is token i + d2t[i], ascending, each once, all in range.",
    why="vLLM 0.31.0 (llama_eagle3.py, compute_logits) adds arange to d2t. Absolute ids load "
    "without a word and propose wrong tokens: acceptance 1.0, a training run lost. speculators "
    "trains row i of the output matrix for the i-th true entry of t2d, so order counts as well.",
    how="i + d2t[i] is computed; absolute ids are recognised by t2d.",
    fix=IMPORT,
)
def offsets(facts: Facts) -> Iterator[Problem]:
    mapping = facts.mapping
    if fault := offset_fault(mapping.d2t, len(mapping.t2d), mapping.t2d):
        yield Problem(fault, where="d2t", expected="i + d2t[i] ascending")


@_rule(
    "mapping-agrees",
    what="t2d is true for exactly the tokens that d2t names.",
    why="speculators 0.9.0 (model.py, load_vocab_mappings) looks at the number of true entries "
    "alone: the output rows then start from other tokens' rows, and the loss compares with them.",
    how="The true entries of t2d against i + d2t[i].",
    fix="take t2d and d2t from the same mapping",
    after=("mapping-offsets",),
)
def agrees(facts: Facts) -> Iterator[Problem]:
    mapping = facts.mapping
    chosen = np.flatnonzero(mapping.t2d)
    if len(chosen) != len(mapping.d2t):
        yield Problem(
            f"t2d is true for {len(chosen):,} tokens",
            where="t2d",
            expected=f"{len(mapping.d2t):,}, the length of d2t",
        )
    elif (other := chosen != mapping.target_ids).any():
        at = int(np.flatnonzero(other)[0])
        yield Problem(
            f"t2d has token {chosen[at]} where d2t names {mapping.target_ids[at]}",
            where="t2d",
            expected="the same tokens",
        )


@_rule(
    "mapping-plain-slice",
    what="The mapping is a choice of tokens, not the ids 0 to D-1.",
    why="Zeros (a buffer that was never filled, as speculators' Eagle3DraftModel has it until "
    "load_vocab_mappings) read as the first D tokens. It loads everywhere; low ids are bytes and "
    "fragments, so that the draft cannot name most words.",
    how="d2t holds something else than zeros, unless the draft has the whole vocabulary, or the "
    "first D ids are all that the counts hold (a few samples of plain text).",
    fix="build the mapping from counts: kimi-eagle vocab build, or leave [vocab] mapping out",
    after=("mapping-offsets",),
)
def plain_slice(facts: Facts) -> Iterator[Problem | Note]:
    mapping = facts.mapping
    if len(mapping.d2t) == len(mapping.t2d):
        raise NotConcerned("the draft has the whole vocabulary")
    if mapping.d2t.any():
        return
    if mapping.coverage == 1.0:
        yield Note("d2t is all zeros, and the first ids are all that occur in the counts")
    else:
        yield Problem(
            f"d2t is all zeros: the first {len(mapping.d2t):,} ids of the vocabulary",
            where="d2t",
            expected="tokens chosen by their counts",
        )


ARRAY_RULES = {
    "mapping-offsets": offsets,
    "mapping-agrees": agrees,
    "mapping-plain-slice": plain_slice,
}
"""Those that look at a mapping alone, each standing on the one before."""


def refuse_broken(mapping: VocabMapping, where: object) -> None:
    """RunError for the first of them that a mapping breaks: `vocab import` has no recipe."""
    for name, check in ARRAY_RULES.items():
        try:
            found = list(check(SimpleNamespace(mapping=mapping)))
        except NotConcerned:
            continue
        if found and isinstance(found[0], Problem):
            raise RunError(
                f"{name}: {found[0].what}",
                where=where,
                expected=found[0].expected,
                fix=RULES[name].fix,
            )


@_rule(
    "mapping-fits",
    what="The mapping is one of this verifier's vocabulary, in the size that the recipe names.",
    why="speculators 0.9.0 refuses other sizes when training starts (model.py, load_vocab_mappings)"
    ", after regenerate and extract.",
    how="Lengths of t2d and d2t against vocab_size and vocab.draft_vocab_size.",
    fix="set [vocab] draft_vocab_size to the mapping's, or take one made for this tokenizer",
)
def fits(facts: Facts) -> Iterator[Problem]:
    mapping, wanted = facts.mapping, facts.recipe.vocab.draft_vocab_size
    if len(mapping.t2d) != (whole := facts.verifier.vocab_size):
        yield Problem(
            f"t2d is for a vocabulary of {len(mapping.t2d):,}",
            where="t2d",
            expected=f"{whole:,}, the verifier's",
        )
    elif len(mapping.d2t) != wanted:
        yield Problem(
            f"d2t has {len(mapping.d2t):,} tokens",
            where="d2t",
            expected=f"vocab.draft_vocab_size = {wanted:,}",
        )


def _missing(mapping: VocabMapping, wanted: tuple[int, ...], what: str) -> Iterator[Problem]:
    """One problem if tokens of `wanted` cannot be named."""
    if missing := [t for t in wanted if 0 <= t < len(mapping.t2d) and not mapping.t2d[t]]:
        named = ", ".join(map(str, missing[:5])) + ("..." if len(missing) > 5 else "")
        yield Problem(
            f"{len(missing)} of {len(wanted)} {what} are not in the mapping: {named}",
            where="t2d",
            expected="all of them",
        )


@_rule(
    "mapping-forced-tokens",
    what="The tokens of vocab.force_tokens are in the mapping.",
    why="A mapping that was made elsewhere knows nothing of the recipe; the draft can never "
    "propose a token that is not in it.",
    how="t2d at each of them.",
    fix="build the mapping from its counts with these tokens, or take them out of force_tokens",
    after=("mapping-agrees", "mapping-fits"),
)
def forced_tokens(facts: Facts) -> Iterator[Problem]:
    yield from _missing(facts.mapping, facts.recipe.vocab.force_tokens, "forced tokens")


@rule(
    "mapping-special-tokens",
    what="Control, tool and thinking tokens and the end of an answer are in the mapping.",
    why="Counts of another data set may hold no tool call and no thinking; where the draft cannot "
    "name `</think>` or the end of a turn, every one of them ends a run of accepted tokens.",
    how="t2d at all added tokens of the tokenizer and all ids that end an answer.",
    fix="build the mapping from its counts: kimi-eagle vocab build COUNTS puts them in; or set "
    "[vocab] force_special = false to train without them",
    needs=("mapping", "transformers"),
    stages=("vocab", "train"),
    after=("mapping-readable", "mapping-agrees", "mapping-fits", "tokenizer-opens"),
)
def special_tokens(facts: Facts) -> Iterator[Problem]:
    from kimi_eagle.vocab import special_ids

    if not facts.recipe.vocab.force_special:
        raise NotConcerned("vocab.force_special is false")
    yield from _missing(facts.mapping, special_ids(facts.verifier), "special tokens")


@_rule(
    "mapping-covers",
    what="The draft can name at least half of the tokens that its counts hold.",
    why="The loss is taken over the draft's vocabulary alone, so that training looks well under "
    "any mapping; what it cannot name is never accepted. Half is no aim but the sign of a mapping "
    "made for other data or another tokenizer: 4,096 of SmolLM2's 49,152 tokens cover 0.986.",
    how="Share of the counted tokens; of a run the counts are those of its own answers.",
    fix="a larger draft_vocab_size, or a mapping built from this data",
    after=("mapping-agrees", "mapping-fits"),
)
def covers(facts: Facts) -> Iterator[Problem | Note]:
    coverage = facts.mapping.coverage
    if math.isnan(coverage):
        yield Note("coverage unknown: no counts; the vocab stage counts the run's own tokens")
        return
    if coverage < LEAST_COVERAGE:
        yield Problem(
            f"the mapping covers {coverage:.1%} of the tokens",
            where="mapping.json",
            expected=f"at least {LEAST_COVERAGE:.0%}",
        )
    for record in facts.records("vocab"):
        distinct, own = record.counts.get("distinct"), len(facts.mapping.d2t)
        if distinct is not None and distinct < own:
            yield Note(
                f"only {distinct:,} distinct tokens occur: {own - distinct:,} of {own:,} are fill"
            )
    yield Note(f"covers {coverage:.2%} of the tokens")


@rule(
    "mapping-own-counts",
    what="The run's mapping was made from the samples that the run has now.",
    why="Counts of earlier samples give a mapping that loads and trains; only its coverage is "
    "lower. Here the vocab stage makes it again, under a key that holds the samples' digests.",
    how="Digest of the samples in the record of vocab against those in the record of prepare.",
    fix="run the recipe again: vocab and train are made again",
    needs=("run", "mapping"),
    after=("mapping-readable",),
)
def own_counts(facts: Facts) -> Iterator[Problem]:
    from kimi_eagle.files import digest

    prepared, made = facts.records("prepare"), facts.records("vocab")
    if not prepared or not made:
        raise NotConcerned("the run has no samples or no mapping yet")
    now = digest([part["digest"] for record in prepared for part in record.info.get("parts", ())])
    if made[0].data["parts"].get("samples") != now:
        yield Problem("the mapping was made from other samples", where=str(facts.run.path))
