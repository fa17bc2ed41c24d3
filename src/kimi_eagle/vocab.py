"""The draft's reduced vocabulary: token counts, and the mapping between draft and target ids.

Reads tokens parts (or counts from elsewhere); writes d2t.npy and t2d.npy (for speculators), d2t.pt
and t2d.pt (for others) and mapping.json (sizes, coverage, digests) where the caller says. The rule
is speculators' `build_vocab_mappings_from_distribution` (0.9.0, speculators/train/vocab_mapping.py)
plus forced tokens: the same ids when nothing is forced.

d2t holds OFFSETS: target id = i + d2t[i]. vLLM adds arange to it; absolute ids load without a word
and give a useless draft. Counting runs over Arrow's buffers with numpy.bincount, no Python object
a token; the price is one int64 copy of a chunk of the ids. No torch at import.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kimi_eagle import tensorfiles
from kimi_eagle.errors import RunError, UsageError
from kimi_eagle.files import write_atomic

if TYPE_CHECKING:
    import pyarrow as pa

    from kimi_eagle.verifier import Verifier

FORMAT = "vocab/1"
FILES = ("d2t.npy", "t2d.npy", "d2t.pt", "t2d.pt", "mapping.json")
"""What a mapping is written to."""
MANY = 8
"""Draft tokens from which on offsets that grow at every step are no offsets."""


@dataclass(frozen=True, eq=False)
class VocabMapping:
    """d2t int64 [D], offsets; t2d bool [V] with exactly D true; coverage: share of the counted
    tokens whose id the draft can name; digest of the counts the choice was made by. Of a mapping
    from elsewhere the counts may be unknown: coverage nan, digest ""."""

    d2t: np.ndarray
    t2d: np.ndarray
    coverage: float
    counts_digest: str

    @property
    def target_ids(self) -> np.ndarray:
        """Target id of each draft id, strictly increasing, int64 [D]."""
        return self.d2t + np.arange(len(self.d2t))

    @property
    def digest(self) -> str:
        """blake2b-128 hex of the mapping itself: d2t as int64 little-endian and V."""
        h = hashlib.blake2b(np.ascontiguousarray(self.d2t, "<i8"), digest_size=16)
        h.update(str(len(self.t2d)).encode())
        return h.hexdigest()

    def covered(self, counts: np.ndarray) -> float:
        """Share of other counts (int64 [V]) that this mapping covers; 1.0 of none."""
        total = int(counts.sum())
        return float(counts[self.t2d].sum() / total) if total else 1.0


def count_tokens(parts: Iterable[Path], vocab_size: int) -> np.ndarray:
    """Occurrences of each id among the loss tokens of all parts, int64 [vocab_size].

    Parts are read one after the other. RunError: no tokens part, an id outside the vocabulary.
    """
    from kimi_eagle.data.samples import read_part

    counts = np.zeros(vocab_size, np.int64)
    for path in parts:
        table = read_part(Path(path), ["input_ids", "loss_mask"])
        counts += count_table(table, vocab_size, where=path)
    return counts


def count_table(table: pa.Table, vocab_size: int, *, where: object = "") -> np.ndarray:
    """The same for a table in memory with input_ids list<int32> and loss_mask list<bool>."""
    counts = np.zeros(vocab_size, np.int64)
    for batch in table.to_batches():
        ids, mask = batch.column("input_ids").flatten(), batch.column("loss_mask").flatten()
        if len(ids) != len(mask):
            raise RunError("input_ids and loss_mask differ in length", where=where)
        used = ids.filter(mask).to_numpy()  # twice as fast as unpacking the mask's bits for NumPy
        if not used.size:
            continue
        if used.min() < 0 or (top := int(used.max())) >= vocab_size:
            bad = int(used.min()) if used.min() < 0 else top
            raise RunError(
                f"token id {bad} outside the vocabulary",
                where=where,
                expected=f"0 to {vocab_size - 1}",
            )
        counts += np.bincount(used, minlength=vocab_size)
    return counts


def as_counts(counts: Any, vocab_size: int) -> np.ndarray:
    """Counts in any usual form as int64 [vocab_size].

    A dict {id: n} (speculators' token_freq.pt; keys may be text, as JSON makes them), or a tensor
    or array [vocab_size]. UsageError: another shape, an id outside the vocabulary, a count that is
    no whole number, below 0, or more than int64 holds, all of them together.
    """
    if isinstance(counts, Mapping):
        try:
            ids = np.fromiter(map(_whole, counts), np.int64, len(counts))
            values = np.fromiter(map(_whole, counts.values()), np.int64, len(counts))
        except (TypeError, ValueError, OverflowError):
            raise UsageError(
                "token counts are no {id: n}", expected="whole numbers below 2^63"
            ) from None
        if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
            bad = int(ids[(ids < 0) | (ids >= vocab_size)][0])
            raise UsageError(
                f"token counts name id {bad}",
                expected=f"ids from 0 to {vocab_size - 1}",
                fix="count with the verifier's own tokenizer",
            )
        result = np.zeros(vocab_size, np.int64)
        np.add.at(result, ids, values)
    else:
        try:
            array = np.asarray(counts.detach().cpu() if hasattr(counts, "detach") else counts)
        except (TypeError, ValueError, RuntimeError):  # ragged lists; bfloat16, which numpy lacks
            raise UsageError("token counts are no row of whole numbers") from None
        if array.shape != (vocab_size,):
            raise UsageError(
                f"token counts have shape {list(array.shape)}", expected=f"[{vocab_size}]"
            )
        if array.dtype.kind not in "iuf":
            fault = f"token counts are {array.dtype}"
            raise UsageError(fault, expected="whole numbers below 2^63")
        if not (np.trunc(array) == array).all():  # NaN, too; infinity is too large
            raise UsageError("token counts are no whole numbers")
        values = array
        result = np.where(np.abs(array) < 2.0**62, array, 0).astype(np.int64)
    if values.size and values.min() < 0:
        raise UsageError("a token count below 0")
    if float(values.sum(dtype=np.float64)) >= 2.0**62:
        raise UsageError("token counts are too large", expected="fewer than 2^62 tokens together")
    return result


def _whole(value: Any) -> int:
    """An id or a count: a number, a tensor of one, or digits. ValueError where it is not whole."""
    number = int(value)
    if not isinstance(value, str) and (isinstance(value, bool) or number != value):
        raise ValueError
    return number


def load_counts(path: Path) -> Any:
    """Counts from a file, for `as_counts`: .pt (tensor or dict), .npy, or .json (dict or list)."""
    found = tensorfiles.read(path, "token counts", (".pt", ".npy", ".json"))
    if not isinstance(found, list):
        return found
    try:
        return np.array(found)
    except ValueError:
        raise UsageError("not token counts: lists of different lengths", where=path) from None


def build_mapping(
    counts: np.ndarray, draft_vocab_size: int, forced: Iterable[int] = ()
) -> VocabMapping:
    """The draft_vocab_size ids that the draft can name.

    counts: int64 [V]. First the forced ids, then the most frequent ones (ties: the lower id), then,
    where fewer ids occur at all, the lowest ones. UsageError: draft vocabulary larger than the
    target's or smaller than the number of forced ids; a forced id out of range.
    """
    vocab_size = len(counts)
    where = "vocab.draft_vocab_size"
    if draft_vocab_size > vocab_size:
        raise UsageError(
            f"draft vocabulary of {draft_vocab_size} is larger than the verifier's",
            where=where,
            expected=f"at most {vocab_size}",
        )
    ids = np.unique(np.fromiter(forced, np.int64))
    if ids.size and (ids[0] < 0 or ids[-1] >= vocab_size):
        bad = int(ids[0] if ids[0] < 0 else ids[-1])
        raise UsageError(
            f"forced token id {bad} outside the vocabulary",
            where="vocab.force_tokens",
            expected=f"0 to {vocab_size - 1}",
        )
    if ids.size > draft_vocab_size:
        raise UsageError(
            f"{ids.size} forced tokens do not fit", where=where, expected=f"at least {ids.size}"
        )
    # A stable sort by falling count keeps lower ids first among equals, zeros included: the ids
    # that never occur follow in rising order, which is speculators' fill rule.
    t2d = np.zeros(vocab_size, bool)
    t2d[ids] = True
    order = np.argsort(-counts, kind="stable")
    if ids.size:
        order = order[~t2d[order]]
    t2d[order[: draft_vocab_size - ids.size]] = True
    chosen = np.flatnonzero(t2d)
    total = int(counts.sum())
    return VocabMapping(
        d2t=chosen - np.arange(draft_vocab_size),
        t2d=t2d,
        coverage=float(counts[t2d].sum() / total) if total else 1.0,
        counts_digest=counts_digest(counts),
    )


def from_offsets(d2t: np.ndarray, vocab_size: int, t2d: np.ndarray | None = None) -> VocabMapping:
    """A mapping from elsewhere, as it is: nothing is judged (contracts/mapping.py does).

    d2t: offsets [D]. t2d: [vocab_size]; made from d2t where there is none.
    """
    if t2d is None:
        targets = d2t + np.arange(len(d2t))
        t2d = np.zeros(vocab_size, bool)
        t2d[targets[(targets >= 0) & (targets < vocab_size)]] = True
    return VocabMapping(d2t.astype(np.int64), t2d.astype(bool), math.nan, "")


def offset_fault(d2t: np.ndarray, vocab_size: int, t2d: np.ndarray | None = None) -> str | None:
    """What keeps d2t from being offsets (target = i + d2t[i]) to ascending distinct tokens of the
    verifier, in words; None where nothing does.

    Absolute ids are recognised by t2d [vocab_size]. Without one: offsets stay equal where two
    tokens are neighbours, absolute ids grow everywhere, and among many tokens some are neighbours.
    """
    if d2t.ndim != 1 or not len(d2t) or d2t.dtype.kind not in "iu":
        return f"d2t is {d2t.dtype} {list(d2t.shape)}, not a row of whole numbers"
    d2t = d2t.astype(np.int64)
    targets = d2t + np.arange(len(d2t))
    if t2d is not None and len(d2t) > 1 and np.array_equal(np.flatnonzero(t2d), d2t):
        return "d2t holds absolute token ids, not offsets"
    if t2d is None and len(d2t) >= MANY and (np.diff(d2t) > 0).all():
        return "d2t holds absolute token ids, not offsets"
    if bad := targets[(targets < 0) | (targets >= vocab_size)].tolist():
        return f"d2t names token {bad[0]}, the verifier has {vocab_size}"
    if len(np.unique(targets)) < len(targets):
        values, counts = np.unique(targets, return_counts=True)
        return f"d2t names token {values[counts > 1][0]} twice"
    if (np.diff(targets) < 0).any():
        first, then = targets[int(np.flatnonzero(np.diff(targets) < 0)[0]) :][:2]
        return f"d2t is not in order: token {then} comes after token {first}"
    return None


def special_ids(verifier: Verifier) -> tuple[int, ...]:
    """Ids of all added tokens of the tokenizer (control, tool, thinking) and the model's eos ids.

    Reserved ones count too (Kimi-K2.5: about 250 of 32,000): which of them a later template uses is
    not known here.
    """
    tokenizer = verifier.tokenizer()
    ids = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids, *verifier.eos_ids}
    return tuple(sorted(i for i in ids if i < verifier.vocab_size))


def save(mapping: VocabMapping, path: Callable[[str], Path]) -> list[Path]:
    """Write the five files of a mapping, each atomically, and return their paths; the JSON last.

    path: from a file's name (d2t.npy, ..., mapping.json) to where it shall lie. Equal mappings give
    equal bytes.
    """
    import torch

    arrays = {"d2t": mapping.d2t.astype(np.int64), "t2d": mapping.t2d.astype(bool)}
    paths = []
    for kind in ("npy", "pt"):
        for name, array in arrays.items():
            buffer = io.BytesIO()
            if kind == "npy":
                np.save(buffer, array)
            else:
                torch.save(torch.from_numpy(array.copy()), buffer)
            paths.append(path(f"{name}.{kind}"))
            write_atomic(paths[-1], buffer.getvalue())
    about = {
        "format": FORMAT,
        "draft_vocab_size": len(mapping.d2t),
        "target_vocab_size": len(mapping.t2d),
        "coverage": None if math.isnan(mapping.coverage) else mapping.coverage,
        "counts_digest": mapping.counts_digest,
        "digest": mapping.digest,
    }
    paths.append(path("mapping.json"))
    write_atomic(paths[-1], json.dumps(about, indent=1) + "\n")
    return paths


def load(d2t: Path, t2d: Path, *, fix: str = "") -> VocabMapping:
    """Read what `save` wrote: the two .npy files and, by its name, mapping.json beside d2t.npy.

    fix: what the messages advise. RunError when one is missing, empty or cut, when they disagree
    (absolute ids in d2t, for one), or when mapping.json tells a coverage that is none.
    """
    about = d2t.with_name(d2t.name.removesuffix("d2t.npy") + "mapping.json")
    try:
        data = tensorfiles.read(about, "a mapping", (".json",))
        arrays = {p: tensorfiles.read(p, "a mapping", (".npy",)) for p in (d2t, t2d)}
    except UsageError as e:
        fault = f"vocabulary mapping cannot be read: {e.what}"
        raise RunError(fault, where=e.where, expected=e.expected, fix=fix) from None
    for path, dtype in ((d2t, np.int64), (t2d, bool)):
        if arrays[path].dtype != dtype or arrays[path].ndim != 1:
            raise RunError(
                f"vocabulary mapping cannot be read: {arrays[path].dtype} "
                f"{list(arrays[path].shape)}",
                where=path,
                expected=f"a row of {np.dtype(dtype)}",
                fix=fix,
            )
    if not isinstance(data, dict) or not {"coverage", "counts_digest", "digest"} <= data.keys():
        raise RunError(
            "vocabulary mapping cannot be read: not a mapping's own file",
            where=about,
            expected="coverage, counts_digest and digest",
            fix=fix,
        )
    share, counted = data["coverage"], str(data["counts_digest"])
    # A share without counts was not measured; it would excuse a plain slice.
    number = isinstance(share, int | float) and not isinstance(share, bool) and 0 <= share <= 1
    if share is not None and not (number and re.fullmatch("[0-9a-f]{32}", counted)):
        raise RunError(
            f"vocabulary mapping is damaged: coverage is {json.dumps(share)}"
            + (", of no counts" if number else ""),
            where=about,
            expected="a share from 0 to 1 of the tokens of counts_digest, or null",
            fix=fix,
        )
    mapping = VocabMapping(
        arrays[d2t], arrays[t2d], math.nan if share is None else float(share), counted
    )
    if data["digest"] != mapping.digest or not np.array_equal(
        np.flatnonzero(mapping.t2d), mapping.target_ids
    ):
        raise RunError(
            "vocabulary mapping is damaged: d2t, t2d and digest disagree", where=about, fix=fix
        )
    return mapping


def counts_digest(counts: np.ndarray) -> str:
    """blake2b-128 hex of counts, int64 [V]."""
    return hashlib.blake2b(np.ascontiguousarray(counts, "<i8"), digest_size=16).hexdigest()
