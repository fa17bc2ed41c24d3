"""Counts and mapping: equal to speculators' own, forced tokens, coverage, and what is refused."""

from __future__ import annotations

import json
import math
from collections import Counter

import numpy as np
import pytest
import torch
from speculators.train.vocab_mapping import (
    build_vocab_mappings_from_distribution,
    save_token_frequency_distribution,
)

from kimi_eagle import vocab
from kimi_eagle.data import samples
from kimi_eagle.errors import RunError, UsageError
from kimi_eagle.verifier import open_verifier

META = {"tokenizer": "t", "template": "p"}


def make_samples(seed=0, count=40, vocab_size=300):
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        n = int(rng.integers(2, 60))
        ids = np.minimum(rng.zipf(1.3, n), vocab_size) - 1
        mask = rng.random(n) < 0.6
        mask[-1] = True
        found.append(samples.make_sample(ids, mask))
    return found


@pytest.fixture
def parts(tmp_path):
    made = make_samples()
    for i in range(4):
        samples.write_part(tmp_path / f"{i}.parquet", made[i * 10 : i * 10 + 10], META)
    return [tmp_path / f"{i}.parquet" for i in range(4)], made


def theirs(counts, draft_size):
    """speculators' mapping of the ids that occur."""
    freq = {i: int(n) for i, n in enumerate(counts) if n}
    return build_vocab_mappings_from_distribution(freq, draft_size, len(counts))


def test_counts_are_those_of_speculators(parts, tmp_path):
    from datasets import Dataset

    paths, made = parts
    counts = vocab.count_tokens(paths, 300)
    rows = Dataset.from_list(
        [{"input_ids": s.input_ids, "loss_mask": s.loss_mask.astype(int)} for s in made]
    ).with_format("torch")
    save_token_frequency_distribution(rows, tmp_path / "freq.pt")
    freq = torch.load(tmp_path / "freq.pt", weights_only=True)
    assert {i: int(n) for i, n in enumerate(counts) if n} == freq
    assert counts.sum() == sum(s.n_loss for s in made) and counts.dtype == np.int64
    assert np.array_equal(vocab.as_counts(freq, 300), counts)


@pytest.mark.parametrize("draft_size", [2, 17, 60, 150, 299, 300])
def test_mapping_is_that_of_speculators(parts, draft_size):
    counts = vocab.count_tokens(parts[0], 300)
    assert 60 < (counts > 0).sum() < 299  # sizes on both sides of the fill rule
    mapping = vocab.build_mapping(counts, draft_size)
    d2t, t2d = theirs(counts, draft_size)
    assert np.array_equal(mapping.d2t, d2t.numpy()) and np.array_equal(mapping.t2d, t2d.numpy())
    assert mapping.d2t.dtype == np.int64 and mapping.t2d.dtype == bool
    assert mapping.t2d.sum() == draft_size and (np.diff(mapping.target_ids) > 0).all()


def test_many_ties(parts):
    counts = np.random.default_rng(1).integers(0, 3, 5000)
    for size in (10, 1000, 4000):
        mapping = vocab.build_mapping(counts, size)
        d2t, t2d = theirs(counts, size)
        assert np.array_equal(mapping.d2t, d2t.numpy())
        assert np.array_equal(mapping.t2d, t2d.numpy())


def test_forced_tokens_are_in_and_the_rest_by_count():
    counts = np.array([0, 5, 4, 3, 2, 1, 0, 0])
    mapping = vocab.build_mapping(counts, 4, forced=[7, 5, 7])
    assert mapping.target_ids.tolist() == [1, 2, 5, 7]
    assert mapping.coverage == pytest.approx(10 / 15)
    assert mapping.covered(np.array([1, 0, 0, 0, 0, 0, 0, 1])) == 0.5
    assert vocab.build_mapping(counts, 3, forced=[0, 6, 7]).target_ids.tolist() == [0, 6, 7]
    assert mapping.digest != vocab.build_mapping(counts, 4).digest


def test_special_ids_of_the_real_tokenizer(verifier_dir):
    verifier = open_verifier(verifier_dir)
    assert vocab.special_ids(verifier) == tuple(range(17))
    mapping = vocab.build_mapping(np.zeros(49152, np.int64), 32, vocab.special_ids(verifier))
    assert mapping.target_ids.tolist() == list(range(32)) and mapping.coverage == 1.0


@pytest.mark.parametrize(
    "form",
    [
        lambda c: torch.tensor(c),
        lambda c: torch.tensor(c, dtype=torch.float32),
        lambda c: np.array(c, np.int32),
        lambda c: {i: n for i, n in enumerate(c) if n},
        lambda c: Counter({i: n for i, n in enumerate(c) if n}),
        lambda c: json.loads(json.dumps({i: n for i, n in enumerate(c) if n})),
        lambda c: {torch.tensor(i): torch.tensor(n) for i, n in enumerate(c) if n},
    ],
)
def test_counts_in_every_form(form):
    counts = [0, 3, 0, 7, 1]
    found = vocab.as_counts(form(counts), 5)
    assert found.tolist() == counts and found.dtype == np.int64


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (torch.zeros(4), r"shape \[4\]; expected \[5\]"),
        (np.zeros((5, 1)), "shape"),
        ({5: 1}, "name id 5"),
        ({-1: 1}, "name id -1"),
        ({"a": 1}, "no {id: n}"),
        ({1: -2}, "below 0"),
        (np.array([0.5, 0, 0, 0, 0]), "no whole numbers"),
        ({1: 2.7}, "no {id: n}"),
        ({1: torch.tensor(2.7)}, "no {id: n}"),
        ({1: True}, "no {id: n}"),
        ({1: 10**30}, "below 2.63"),
        ({1: float("inf")}, "no {id: n}"),
        ({1: 2**62}, "too large"),
        ([10**30] * 5, "expected whole numbers below 2.63"),
        ([2.7] * 5, "no whole numbers"),
        ([float("nan")] * 5, "no whole numbers"),
        ([float("inf")] * 5, "too large"),
        ([2**61] * 5, "too large"),
        ([None] * 5, "object"),
        ([True] * 5, "bool"),
        (torch.ones(5).bfloat16(), "no row of whole numbers"),
    ],
)
def test_counts_that_are_none(counts, message):
    with pytest.raises(UsageError, match=message):
        vocab.as_counts(counts, 5)


def test_counts_from_files(tmp_path):
    counts = [0, 3, 0, 7, 1]
    np.save(tmp_path / "a.npy", np.array(counts))
    torch.save(torch.tensor(counts), tmp_path / "b.pt")
    torch.save({1: 3, 3: 7, 4: 1}, tmp_path / "c.pt")
    (tmp_path / "d.json").write_text(json.dumps(counts))
    (tmp_path / "e.json").write_text(json.dumps({"1": 3, "3": 7, "4": 1}))
    for path in sorted(tmp_path.iterdir()):
        assert vocab.as_counts(vocab.load_counts(path), 5).tolist() == counts, path
    (tmp_path / "f.pt").write_text("no")
    (tmp_path / "g.txt").write_text("no")
    for name, message in (
        ("f.pt", "not token counts"),
        ("g.txt", "unknown kind"),
        ("h.pt", "no such file"),
    ):
        with pytest.raises(UsageError, match=message):
            vocab.load_counts(tmp_path / name)


@pytest.mark.parametrize(
    ("size", "forced", "message"),
    [
        (9, (), "draft vocabulary of 9 is larger than the verifier's; expected at most 8"),
        (2, (1, 2, 3), "3 forced tokens do not fit; expected at least 3"),
        (2, (8,), "forced token id 8 outside"),
        (2, (-1,), "forced token id -1 outside"),
    ],
)
def test_mapping_that_cannot_be(size, forced, message):
    with pytest.raises(UsageError, match=message):
        vocab.build_mapping(np.zeros(8, np.int64), size, forced)


def test_id_outside_the_vocabulary(parts):
    with pytest.raises(RunError, match="token id .* outside the vocabulary"):
        vocab.count_tokens(parts[0], 20)


def test_save_and_load(parts, tmp_path):
    mapping = vocab.build_mapping(vocab.count_tokens(parts[0], 300), 50, [299])

    def place(folder):
        (tmp_path / folder).mkdir(exist_ok=True)
        return lambda name: tmp_path / folder / f"all.{name}"

    paths = vocab.save(mapping, place("a"))
    assert [p.name for p in paths] == [
        "all.d2t.npy",
        "all.t2d.npy",
        "all.d2t.pt",
        "all.t2d.pt",
        "all.mapping.json",
    ]
    again = [p.read_bytes() for p in vocab.save(mapping, place("b"))]
    assert again == [p.read_bytes() for p in paths]
    d2t = torch.load(paths[2], weights_only=True)
    assert d2t.dtype == torch.int64 and np.array_equal(d2t.numpy(), np.load(paths[0]))
    t2d = torch.load(paths[3], weights_only=True)
    assert t2d.dtype == torch.bool and np.array_equal(t2d.numpy(), mapping.t2d)
    loaded = vocab.load(paths[0], paths[1])
    assert loaded.digest == mapping.digest and loaded.coverage == mapping.coverage
    for path in (paths[0], paths[1], paths[4]):
        whole = path.read_bytes()
        for length in (0, 9, len(whole) - 5):
            path.write_bytes(whole[:length])
            with pytest.raises(RunError, match=f"{path.name}: .*cannot be read.*fix: again"):
                vocab.load(paths[0], paths[1], fix="again")
        path.write_bytes(whole)
    about = json.loads(paths[4].read_text())
    for other in (5, True, -0.1, "1.0", math.nan):
        paths[4].write_text(json.dumps(about | {"coverage": other}))
        with pytest.raises(RunError, match="damaged: coverage is"):
            vocab.load(paths[0], paths[1])
    for counted in ("", "x"):
        paths[4].write_text(json.dumps(about | {"coverage": 1.0, "counts_digest": counted}))
        with pytest.raises(RunError, match="coverage is 1.0, of no counts"):
            vocab.load(paths[0], paths[1])
    paths[4].write_text(json.dumps(about))
    np.save(paths[0], mapping.d2t.astype(np.float64))
    with pytest.raises(RunError, match=r"float64 \[50\]; expected a row of int64"):
        vocab.load(paths[0], paths[1])
    np.save(paths[0], mapping.target_ids)  # absolute ids instead of offsets
    with pytest.raises(RunError, match="damaged"):
        vocab.load(paths[0], paths[1])
    with pytest.raises(RunError, match="cannot be read"):
        vocab.load(tmp_path / "d2t.npy", tmp_path / "t2d.npy")
