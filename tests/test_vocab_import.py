"""Mappings of other programs: every form of the same one, what is told, what is refused."""

from __future__ import annotations

import json
import math
import pickle
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

from kimi_eagle import vocab, vocab_import
from kimi_eagle.contracts.mapping import refuse_broken
from kimi_eagle.errors import RunError, UsageError

V = 300
IDS = np.array([0, 3, 4, 5, 9, 17, 18, 40, 41, 99, 250, 299])
D2T = IDS - np.arange(len(IDS))
T2D = np.isin(np.arange(V), IDS)
COUNTS = np.where(T2D, 1000 - np.arange(V), 2)


@pytest.mark.parametrize("t2d", [bool, np.uint8, np.int32, np.int64, np.float32])
@pytest.mark.parametrize(
    ("d2t", "told"),
    [
        (D2T, "holds offsets"),
        (D2T.astype(np.int32), "holds offsets"),
        (IDS, "holds absolute token ids"),
        (IDS.astype(np.int32), "holds absolute token ids"),
    ],
)
def test_every_form_of_one_mapping(t2d, d2t, told):
    mapping, lines = vocab_import.take(T2D.astype(t2d), d2t)
    assert np.array_equal(mapping.d2t, D2T) and mapping.d2t.dtype == np.int64
    assert np.array_equal(mapping.t2d, T2D) and mapping.t2d.dtype == bool
    assert any(told in line for line in lines), lines
    assert any("t2d is" in line for line in lines) == (t2d is not bool)
    assert math.isnan(mapping.coverage) and mapping.counts_digest == ""
    refuse_broken(mapping, "d2t.pt")


@pytest.mark.parametrize(
    ("t2d", "d2t", "message"),
    [
        (np.roll(T2D, 1), D2T, "mapping-agrees: t2d has token"),
        (T2D, IDS[:-1], "mapping-offsets|mapping-agrees"),
        (
            T2D,
            IDS[::-1].copy(),
            "mapping-offsets: d2t is not in order: token 250 comes after token 299",
        ),
        (np.arange(V) < 12, np.zeros(12, np.int64), "mapping-plain-slice"),
        (np.arange(V) < 12, np.arange(12), "mapping-plain-slice"),
        (T2D, np.where(IDS == 4, 3, IDS) - np.arange(12), "names token 3 twice"),
    ],
)
def test_a_broken_mapping_is_refused_by_the_rule(t2d, d2t, message):
    mapping, _ = vocab_import.take(t2d, d2t)
    with pytest.raises(RunError, match=message):
        refuse_broken(mapping, "d2t.pt")


@pytest.mark.parametrize(
    ("t2d", "d2t", "message"),
    [
        (IDS, T2D.astype(int), "t2d holds 299.*swapped"),
        (np.full(V, 2), D2T, "t2d holds 2"),
        (T2D[None], D2T, "t2d has shape"),
        (T2D, D2T + 0.5, "no whole numbers"),
        (T2D, np.array(["a"] * 3), "d2t is <U1"),
    ],
)
def test_files_that_are_no_mapping(t2d, d2t, message):
    with pytest.raises(UsageError, match=message):
        vocab_import.take(t2d, d2t)


def test_files(tmp_path):
    np.save(tmp_path / "a.npy", D2T)
    torch.save(torch.tensor(D2T), tmp_path / "b.pt")
    for name in ("a.npy", "b.pt"):
        assert np.array_equal(vocab_import.read_array(tmp_path / name), D2T)
    torch.save({"d2t": torch.tensor(D2T)}, tmp_path / "c.pt")
    torch.save(Exception, tmp_path / "d.pt")  # needs code to open
    (tmp_path / "e.txt").write_text("no")
    for name, message in (
        ("c.pt", "holds a dict; expected a tensor"),
        ("d.pt", "not a tensor"),
        ("e.txt", "unknown kind"),
        ("f.pt", "no such file"),
    ):
        with pytest.raises(UsageError, match=message):
            vocab_import.read_array(tmp_path / name)


def npy(folder: Path, array: np.ndarray) -> bytes:
    np.save(folder / "whole.npy", array, allow_pickle=True)
    return (folder / "whole.npy").read_bytes()


def pt(folder: Path, value: object) -> bytes:
    torch.save(value, folder / "whole.pt")
    return (folder / "whole.pt").read_bytes()


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
LONG = np.arange(9_000)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.pt", lambda _: b"", "the file is empty; fix: copy"),
        ("a.pt", lambda _: LFS, "git-LFS pointer; fix: git lfs pull"),
        ("a.pt", lambda _: pickle.dumps(LONG, 4), "holds Python objects"),
        ("a.pt", lambda f: pt(f, Path("x")), "objects; .*; fix: open it where it was made"),
        ("a.pt", lambda f: pt(f, torch.tensor(LONG))[:9000], "cut short"),
        ("a.pt", lambda _: b"no", "another kind of file; expected a file that torch.save wrote"),
        ("a.pt", lambda f: pt(f, torch.ones(3).bfloat16()), "holds a tensor of torch.bfloat16"),
        ("a.npy", lambda _: b"", "the file is empty"),
        ("a.npy", lambda _: LFS, "git-LFS pointer"),
        ("a.npy", lambda f: npy(f, LONG)[:9000], "cut short"),
        ("a.npy", lambda f: npy(f, LONG)[:20], "cut short"),
        ("a.npy", lambda f: npy(f, np.array([None])), "holds Python objects"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content(tmp_path))
    with pytest.raises(UsageError, match=says) as caught:
        vocab_import.read_array(tmp_path / name)
    for advice in ("weights_only", "allow_pickle"):
        assert advice not in str(caught.value)


def test_the_command_writes_what_build_writes(eagle, tmp_path):
    torch.save(torch.tensor(T2D.astype(np.uint8)), tmp_path / "t2d.pt")
    torch.save(torch.tensor(IDS), tmp_path / "d2t.pt")
    torch.save({int(i): int(n) for i, n in enumerate(COUNTS)}, tmp_path / "freq.pt")
    files = [tmp_path / name for name in ("t2d.pt", "d2t.pt")]
    done = eagle(
        "vocab", "import", *files, "--counts", tmp_path / "freq.pt", "--out", tmp_path / "m"
    )
    assert done.returncode == 0, done.stderr
    assert "t2d is uint8: taken as bool" in done.stdout
    assert "d2t holds absolute token ids: turned into offsets" in done.stdout
    assert "it is the mapping that they give" in done.stdout
    assert "draft_vocab_size = 12" in done.stdout
    loaded = vocab.load(tmp_path / "m" / "d2t.npy", tmp_path / "m" / "t2d.npy")
    built = vocab.build_mapping(COUNTS, 12)
    assert loaded.digest == built.digest and loaded.counts_digest == built.counts_digest
    assert loaded.coverage == built.coverage
    vocab.save(built, lambda name: tmp_path / name)
    for name in ("d2t.npy", "t2d.npy", "d2t.pt", "t2d.pt", "mapping.json"):
        assert (tmp_path / "m" / name).read_bytes() == (tmp_path / name).read_bytes()

    done = eagle("vocab", "import", *files, "--out", tmp_path / "n", "--json")
    found = json.loads(done.stdout)
    assert found["coverage"] is None and found["digest"] == built.digest
    shown = eagle("vocab", "show", tmp_path / "n")
    assert "coverage           unknown" in shown.stdout


def test_the_command_refuses(eagle, tmp_path, verifier_dir):
    np.save(tmp_path / "t2d.npy", np.roll(T2D, 1))
    np.save(tmp_path / "d2t.npy", D2T)
    files = [tmp_path / name for name in ("t2d.npy", "d2t.npy")]
    done = eagle("vocab", "import", *files, "--out", tmp_path / "m")
    assert done.returncode == 1 and "mapping-agrees" in done.stderr
    assert "fix: take t2d and d2t from the same mapping" in done.stderr
    assert not (tmp_path / "m").exists()
    np.save(tmp_path / "t2d.npy", T2D)
    done = eagle("vocab", "import", *files, "--verifier", verifier_dir, "--out", tmp_path / "m")
    assert done.returncode == 2 and "expected 49152, the verifier's" in done.stderr


def three(folder: Path) -> list[Path]:
    """Inputs of another program: d2t.pt holds absolute ids."""
    folder.mkdir(exist_ok=True)
    torch.save(torch.tensor(T2D), folder / "t2d.pt")
    torch.save(torch.tensor(IDS), folder / "d2t.pt")
    return [folder / "t2d.pt", folder / "d2t.pt"]


def test_its_inputs_are_never_replaced(eagle, tmp_path):
    files = three(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    before = [path.read_bytes() for path in files]
    for out in (".", "link"):
        done = eagle("vocab", "import", *files, "--out", out, cwd=tmp_path)
        assert done.returncode == 2 and "--out would replace d2t.pt, which is read" in done.stderr
    assert [path.read_bytes() for path in files] == before
    assert not (tmp_path / "mapping.json").exists()


def test_files_of_others_are_not_replaced_and_its_own_are(eagle, tmp_path):
    files = three(tmp_path / "in")
    theirs = three(tmp_path / "out")
    done = eagle("vocab", "import", *files, "--out", tmp_path / "out")
    assert done.returncode == 2 and "which kimi-eagle did not write" in done.stderr
    assert torch.equal(torch.load(theirs[1], weights_only=True), torch.tensor(IDS))
    (tmp_path / "file").write_text("")
    done = eagle("vocab", "import", *files, "--out", tmp_path / "file")
    assert done.returncode == 2 and "--out cannot be made" in done.stderr
    for _ in range(2):
        done = eagle("vocab", "import", *files, "--out", 'm "ü"', cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    # What it prints for the recipe holds wherever the recipe lies.
    line = done.stdout.splitlines()[-1].partition("[vocab] ")[2].replace(", mapping", "\nmapping")
    found = tomllib.loads(line)
    assert found == {"draft_vocab_size": 12, "mapping": str(tmp_path / 'm "ü"')}


def test_the_command_names_the_file_of_counts(eagle, tmp_path):
    files = three(tmp_path)
    (tmp_path / "n.json").write_text('{"3": 2.7}')
    done = eagle(
        "vocab", "import", *files, "--counts", tmp_path / "n.json", "--out", tmp_path / "m"
    )
    assert done.returncode == 2 and "n.json: token counts are no {id: n}" in done.stderr
