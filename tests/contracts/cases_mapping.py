"""Mappings with one fault each, and recipes that name what they cannot have."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from cases_drift import begun
from drafts import D2T, T2D, TOKENS, D, mapping
from place import VOCAB, Case, Place

from kimi_eagle import vocab
from kimi_eagle.ledger import Ledger, Unit
from kimi_eagle.vocab import VocabMapping


def recipe(**values: Any) -> Callable[[Place], None]:
    """Keys of [vocab]."""
    return lambda place: place.recipe["vocab"].update(values)


def having(found: VocabMapping, **values: Any) -> Callable[[Place], None]:
    """The run's mapping, and keys of [vocab]."""

    def apply(place: Place) -> None:
        place.given["mapping"] = found
        recipe(**values)(place)

    return apply


def offsets(ids: np.ndarray) -> np.ndarray:
    return ids - np.arange(len(ids))


def folder(place: Place) -> None:
    """A mapping in a folder, which the recipe names."""
    (place.path / "words").mkdir()
    counted = replace(mapping(), coverage=0.9, counts_digest=DIGEST)
    vocab.save(counted, lambda name: place.path / "words" / name)
    recipe(mapping="words")(place)


def folder_of_two(place: Place) -> None:
    """d2t of another mapping than t2d and mapping.json."""
    folder(place)
    np.save(place.path / "words" / "d2t.npy", offsets(TOKENS + 1))


def folder_torn(place: Place) -> None:
    folder(place)
    (place.path / "words" / "mapping.json").unlink()


def folder_cut(name: str, length: int) -> Callable[[Place], None]:
    """One of its files with its first bytes alone."""

    def apply(place: Place) -> None:
        folder(place)
        file = place.path / "words" / name
        file.write_bytes(file.read_bytes()[:length])

    return apply


def folder_telling(**values: Any) -> Callable[[Place], None]:
    """Keys of mapping.json."""

    def apply(place: Place) -> None:
        folder(place)
        file = place.path / "words" / "mapping.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return apply


def folder_of_slice(place: Place) -> None:
    """A plain slice whose mapping.json praises it, of no counts."""
    (place.path / "words").mkdir()
    vocab.save(SLICE, lambda name: place.path / "words" / name)
    file = place.path / "words" / "mapping.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"coverage": 1.0}))
    recipe(mapping="words")(place)


def twice() -> np.ndarray:
    return offsets(np.where(TOKENS == 7, 8, TOKENS))


def without(token: int) -> VocabMapping:
    """One token less, another one more."""
    ids = np.sort(np.append(TOKENS[TOKENS != token], 2))
    return mapping(offsets(ids), np.isin(np.arange(VOCAB), ids))


def counted(samples: str) -> Callable[[Place], None]:
    """A run whose vocab stage read `samples`, a digest; those of its prepare are none."""

    def apply(place: Place) -> None:
        begun(place)
        run = place.given["run"]
        prepared = json.loads(next(run.stage("prepare").records.glob("*.json")).read_text())
        assert prepared["info"]["parts"] == []
        parts = {"vocab": None, "samples": samples}
        unit, ledger = Unit(name="all", parts=parts), Ledger(run.stage("vocab").make())
        number = ledger.start_attempt(unit, {})
        data = {"unit": "all", "key": unit.key, "state": "done", "parts": parts, "counts": {}}
        assert ledger.create_record(unit, data | {"attempt": number, "files": [], "info": {}})
        place.given["mapping"] = mapping()

    return apply


def _of_no_samples() -> str:
    from kimi_eagle.files import digest

    return digest([])


DIGEST = "0" * 32
GOOD = having(mapping())
SLICE = mapping(np.zeros(D, np.int64), np.arange(VOCAB) < D)
WHOLE = mapping(np.zeros(VOCAB, np.int64), np.ones(VOCAB, bool))


def torn_in_a_run(place: Place) -> None:
    """A run whose own d2t.npy was cut to nothing."""
    own_mapping(place)
    next(place.path.glob("run/**/*d2t.npy")).write_bytes(b"")


def own_mapping(place: Place) -> None:
    """A run whose vocab stage made its mapping by this recipe."""
    begun(place)
    run, facts = place.given["run"], place.facts()
    section = facts.recipe.vocab.model_dump(mode="json", exclude={"mapping"})
    unit = Unit(name="all", parts={"vocab": section, "samples": _of_no_samples()})
    ledger = Ledger(run.stage("vocab").make())
    number = ledger.start_attempt(unit, {})
    made = replace(mapping(), coverage=0.9, counts_digest=DIGEST)
    files = vocab.save(made, lambda name: run.stage("vocab").files / f"all.{unit.key}.{name}")
    entries = [{"name": p.name, "bytes": p.stat().st_size} for p in files]
    data = {"unit": "all", "key": unit.key, "state": "done", "parts": unit.parts, "counts": {}}
    assert ledger.create_record(unit, data | {"attempt": number, "files": entries, "info": {}})


def one_more_special(place: Place) -> None:
    """A special token that only the opened tokenizer knows."""
    file = place.model / "tokenizer_config.json"
    told = json.loads(file.read_text()) | {"additional_special_tokens": ["<|late|>"]}
    file.write_text(json.dumps(told))
    recipe(draft_vocab_size=7)(place)


CASES = [
    Case("mapping-size", recipe(draft_vocab_size=385), "385 is larger than the verifier's"),
    Case(
        "mapping-size",
        recipe(draft_vocab_size=2, force_tokens=[1, 2, 3]),
        "3 forced tokens do not fit into 2",
        recipe(draft_vocab_size=384),
    ),
    Case("mapping-forced-ids", recipe(force_tokens=[384]), "vocab.force_tokens holds 384"),
    Case(
        "mapping-special-fit",
        recipe(draft_vocab_size=8, force_tokens=[1, 2]),
        "9 forced and special tokens do not fit into 8; expected at least 9",
        recipe(draft_vocab_size=8, force_tokens=[1, 258]),
    ),
    Case(
        "mapping-special-fit",
        one_more_special,
        "8 forced and special tokens do not fit into 7",
        recipe(draft_vocab_size=7),
        heavy=True,
    ),
    Case("mapping-readable", torn_in_a_run, "--deep, then kimi-eagle retry ", own_mapping),
    Case("mapping-readable", folder_of_two, "disagree", folder),
    Case("mapping-readable", folder_torn, "cannot be read", folder),
    Case("mapping-readable", folder_cut("mapping.json", 0), "the file is empty", folder),
    Case("mapping-readable", folder_cut("mapping.json", 40), "no JSON", folder),
    Case("mapping-readable", folder_cut("d2t.npy", 0), "d2t.npy: mapping-readable: ", folder),
    Case("mapping-readable", folder_cut("d2t.npy", 300), "cut short", folder),
    Case("mapping-readable", folder_cut("t2d.npy", 7), "cut short", folder),
    Case("mapping-readable", folder_telling(coverage=5), "coverage is 5", folder),
    Case("mapping-readable", folder_telling(coverage=True), "coverage is true", folder),
    Case("mapping-readable", folder_of_slice, "coverage is 1.0, of no counts", folder),
    Case("mapping-offsets", having(mapping(TOKENS)), "absolute token ids", GOOD),
    Case("mapping-offsets", having(mapping(twice())), "names token 8 twice", GOOD),
    Case("mapping-offsets", having(mapping(D2T[::-1] + 0)), "d2t", GOOD),
    Case("mapping-offsets", having(mapping(D2T + 300)), "the verifier has 384", GOOD),
    Case("mapping-agrees", having(mapping(D2T, np.roll(T2D, 1))), "where d2t names 3", GOOD),
    Case("mapping-agrees", having(mapping(D2T, T2D | (np.arange(VOCAB) == 0))), "129", GOOD),
    Case("mapping-plain-slice", having(SLICE), "the first 128 ids", GOOD),
    Case(
        "mapping-plain-slice",
        having(replace(SLICE, coverage=0.99)),
        "the first 128 ids",
        having(replace(SLICE, coverage=1.0)),
    ),
    Case("mapping-fits", having(mapping(), draft_vocab_size=127), "d2t has 128 tokens", GOOD),
    Case("mapping-fits", having(mapping(D2T, None, 400)), "vocabulary of 400", GOOD),
    Case(
        "mapping-forced-tokens",
        having(mapping(), force_tokens=[4, 300]),
        "1 of 2 forced tokens are not in the mapping: 300",
        having(mapping(), force_tokens=[4, 5]),
    ),
    Case(
        "mapping-special-tokens",
        having(without(261)),
        "1 of 7 special tokens are not in the mapping: 261",
        GOOD,
        heavy=True,
    ),
    Case(
        "mapping-covers",
        having(replace(mapping(), coverage=0.31)),
        "covers 31.0% of the tokens",
        having(replace(mapping(), coverage=0.97)),
    ),
    Case("mapping-own-counts", counted("0" * 32), "other samples", counted(_of_no_samples())),
    Case(
        "mapping-covers",
        having(replace(WHOLE, coverage=0.1), draft_vocab_size=VOCAB),
        "covers 10.0%",
        having(replace(WHOLE, coverage=1.0), draft_vocab_size=VOCAB),
    ),
]
