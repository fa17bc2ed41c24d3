"""What `convert` goes on with is proven: to be whole, and of the very source that is given now."""

from __future__ import annotations

import os
import sys
import threading
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from foreign_states import (  # noqa: E402
    DEPTH,
    LAYERS,
    as_torch,
    dump_of,
    make,
    same,
    tree,
    write_dumps,
    write_shards,
    write_speculators,
)
from kimi_eagle.cli.shards import shards as command  # noqa: E402
from kimi_eagle.conversion import dumps as dumps_room  # noqa: E402
from kimi_eagle.conversion import to_shards as room  # noqa: E402
from kimi_eagle.conversion import to_speculators as spec_room  # noqa: E402
from kimi_eagle.conversion.opening import open_source  # noqa: E402
from kimi_eagle.conversion.to_shards import to_shards  # noqa: E402
from kimi_eagle.conversion.to_speculators import to_speculators  # noqa: E402
from kimi_eagle.errors import RunError, UsageError  # noqa: E402
from kimi_eagle.shards.folder import open_folder, read_manifest  # noqa: E402

SAMPLES = make(8)
REMADE = [type(s)(s.states ^ np.uint16(0x8000), s.ids, s.mask) for s in SAMPLES]
"""Other states of equal tokens, in files of equal sizes."""
WRITE = {"pt": write_dumps, "speculators": write_speculators}


def opened(path: Path, kind: str):
    more = {"pt": {"num_layers": DEPTH}, "speculators": {"layers": LAYERS}, "shards": {}}[kind]
    return open_source(path, kind, **more)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


class Stop(Exception):
    pass


def stop_after(monkeypatch, owner, name: str, calls: int) -> None:
    """The next call of owner.name after so many ends the conversion, as a kill would."""
    honest, done = getattr(owner, name), []

    def stopping(*args):
        done.append(1)
        if len(done) > calls:
            raise Stop
        return honest(*args)

    monkeypatch.setattr(owner, name, stopping)


# -- another source --------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["raw", "lossless", "fp8"])
@pytest.mark.parametrize("kind", WRITE)
def test_a_source_that_was_remade_is_never_mixed_with(tmp_path, monkeypatch, kind, codec):
    how = {"codec": codec, "shard_tokens": 60}
    WRITE[kind](tmp_path / "in", SAMPLES)
    to_shards(opened(tmp_path / "in", kind), tmp_path / "whole", **how)
    stop_after(monkeypatch, room._Made, "shard", 2)
    with pytest.raises(Stop):
        to_shards(opened(tmp_path / "in", kind), tmp_path / "out", **how)
    monkeypatch.undo()
    part = tree(tmp_path / "out")

    WRITE[kind](tmp_path / "new", REMADE)
    sizes = [{p.name: p.stat().st_size for p in (tmp_path / d).rglob("*_*")} for d in ("in", "new")]
    assert sizes[0] == sizes[1]
    with pytest.raises(UsageError, match="another source .*is not what shard-00000"):
        to_shards(opened(tmp_path / "new", kind), tmp_path / "out", **how)
    assert tree(tmp_path / "out") == part

    found = to_shards(opened(tmp_path / "in", kind), tmp_path / "out", **how)
    assert (found.kept, found.remade) == (2, [])
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


@pytest.mark.parametrize("kind", WRITE)
def test_an_export_of_a_remade_source_is_refused(tmp_path, monkeypatch, kind):
    WRITE[kind](tmp_path / "in", SAMPLES)
    WRITE[kind](tmp_path / "new", REMADE)
    stop_after(monkeypatch, spec_room._Export, "_write", 3)
    with pytest.raises(Stop):
        to_speculators(opened(tmp_path / "in", kind), tmp_path / "out")
    monkeypatch.undo()
    with pytest.raises(UsageError, match="another source .*is not what hs_0"):
        to_speculators(opened(tmp_path / "new", kind), tmp_path / "out")
    assert to_speculators(opened(tmp_path / "in", kind), tmp_path / "out").kept == 3


def test_rows_left_out_are_compared_too(tmp_path):
    path = write_dumps(tmp_path / "in", SAMPLES)
    honest = (path / "data_3.pt").read_bytes()
    flip(path / "data_3.pt", len(honest) // 2)
    to_shards(opened(path, "pt"), tmp_path / "out", skip_damaged=True)
    assert to_shards(opened(path, "pt"), tmp_path / "out", skip_damaged=True).kept == 1
    (path / "data_3.pt").write_bytes(honest)
    with pytest.raises(UsageError, match="another source"):
        to_shards(opened(path, "pt"), tmp_path / "out")


# -- two at once -----------------------------------------------------------------------------------


def at_once(*calls) -> list[Exception]:
    """Run the calls side by side; -> what they raised."""
    wait, raised = threading.Barrier(len(calls)), []

    def run(call):
        wait.wait()
        try:
            call()
        except Exception as e:
            raised.append(e)

    threads = [threading.Thread(target=run, args=[c]) for c in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def meet(monkeypatch, owner, name: str) -> None:
    """Both processes have looked at OUT, and found nothing, before either writes there."""
    honest, wait = getattr(owner, name), threading.Barrier(2)

    def meeting(*args):
        wait.wait(30)
        return honest(*args)

    monkeypatch.setattr(owner, name, meeting)


def test_two_with_other_arguments_at_once(tmp_path, monkeypatch):
    src, out = write_shards(tmp_path / "in", SAMPLES, each=2), tmp_path / "out"
    meet(monkeypatch, room, "check_room")
    raised = at_once(
        lambda: to_shards(opened(src, "shards"), out),
        lambda: to_shards(opened(src, "shards"), out, codec="fp8"),
    )
    assert [type(e) for e in raised] == [UsageError] and "was made with codec" in str(raised[0])
    monkeypatch.undo()
    codec = read_manifest(out)["codec"]
    to_shards(opened(src, "shards"), tmp_path / "alone" / codec, codec=codec)
    assert tree(out) == tree(tmp_path / "alone" / codec)


def test_two_with_equal_arguments_at_once(tmp_path, monkeypatch):
    src, out = write_shards(tmp_path / "in", SAMPLES, each=2), tmp_path / "out"
    meet(monkeypatch, room, "check_room")
    call = [lambda: to_shards(opened(src, "shards"), out)] * 2
    assert at_once(*call) == []
    same(out, SAMPLES)
    assert read_manifest(out)["complete"]


def test_two_exports_of_two_sources_at_once(tmp_path, monkeypatch):
    a, b = write_shards(tmp_path / "a", SAMPLES), write_shards(tmp_path / "b", REMADE)
    meet(monkeypatch, spec_room, "check_room")
    raised = at_once(
        lambda: to_speculators(opened(a, "shards"), tmp_path / "out"),
        lambda: to_speculators(opened(b, "shards"), tmp_path / "out"),
    )
    assert [type(e) for e in raised] == [UsageError] and "another source" in str(raised[0])


# -- damage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["raw", "lossless", "fp8"])
def test_a_shard_damaged_since_is_made_again_and_said(tmp_path, codec):
    src, out = write_shards(tmp_path / "in", SAMPLES, each=2), tmp_path / "out"
    to_shards(opened(src, "shards"), out, codec=codec)
    whole, path = tree(out), open_folder(out)[1]
    flip(path, path.stat().st_size * 3 // 4)
    told = CliRunner().invoke(command, ["convert", str(src), str(out), "--codec", codec])
    assert told.exit_code == 0 and tree(out) == whole
    assert "(3 were there, 1 damaged ones made again)" in told.stdout
    assert f"made again: {path.name}: the bytes are not those" in told.stderr
    found = to_shards(opened(src, "shards"), out, codec=codec)
    assert (found.kept, found.remade) == (4, [])


@pytest.mark.parametrize("kind", ["shards", "pt"])
def test_a_file_of_an_export_damaged_since_is_made_again(tmp_path, kind):
    src = {"shards": write_shards, "pt": write_dumps}[kind](tmp_path / "in", SAMPLES)
    to_speculators(opened(src, kind), tmp_path / "out")
    whole = tree(tmp_path / "out")
    flip(tmp_path / "out/hidden_states/hs_3.safetensors", -100)
    found = to_speculators(opened(src, kind), tmp_path / "out")
    assert found.kept == 7 and found.remade[0].startswith("hs_3.safetensors: the bytes")
    assert tree(tmp_path / "out") == whole


def test_tokens_of_a_damaged_source_never_get_into_an_export(tmp_path):
    src = write_shards(tmp_path / "in", SAMPLES)
    to_speculators(opened(src, "shards"), tmp_path / "out")
    whole = tree(tmp_path / "out")
    flip(src / "u000.safetensors", -1)  # the mask of its last sample
    with pytest.raises(RunError, match="u000.safetensors, sample .*bytes are not those"):
        to_speculators(opened(src, "shards"), tmp_path / "out")
    assert tree(tmp_path / "out") == whole


def test_every_bit_of_a_kept_token_id_counts(tmp_path):
    src = write_shards(tmp_path / "in", SAMPLES)
    to_speculators(opened(src, "shards"), tmp_path / "out")
    path, ids = tmp_path / "out/hidden_states/hs_3.safetensors", SAMPLES[3].ids.astype(np.int64)
    flip(path, path.read_bytes().index(ids.tobytes()) + 7)  # above what int32 holds
    assert len(to_speculators(opened(src, "shards"), tmp_path / "out").remade) == 1


def _spoil(path: Path, **changes) -> None:
    torch.save({**dump_of(SAMPLES[3]), **changes}, path)


def _bad_deflate(path: Path) -> None:
    """Stored bytes that the zip's directory calls deflated: torch does not look, zipfile does."""
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as file:
        name = next(i.filename for i in file.infolist() if i.filename.endswith("/data/1"))
    entry = data.rindex(b"PK\x01\x02", 0, data.rindex(name.encode()))
    data[entry + 10] = zipfile.ZIP_DEFLATED
    path.write_bytes(data)
    with zipfile.ZipFile(path) as file, pytest.raises(zlib.error):
        file.testzip()


N = len(SAMPLES[3].ids)
UNREADABLE = {
    "zlib": _bad_deflate,
    "float ids": lambda p: _spoil(p, input_ids=torch.from_numpy(SAMPLES[3].ids).float()),
    "bf16 ids": lambda p: _spoil(p, input_ids=torch.ones(N, dtype=torch.bfloat16)),
    "nan mask": lambda p: _spoil(p, loss_mask=torch.full((N,), float("nan"))),
    "float mask": lambda p: _spoil(p, loss_mask=torch.ones(N)),
    "text ids": lambda p: _spoil(p, input_ids="abc"),
    "ragged ids": lambda p: _spoil(p, input_ids=[[1], [2, 3]]),
    "meta ids": lambda p: _spoil(p, input_ids=torch.ones(N, dtype=torch.int64, device="meta")),
    "2-D ids": lambda p: _spoil(p, input_ids=torch.ones(N, 1, dtype=torch.int64)),
    "sparse ids": lambda p: _spoil(p, input_ids=torch.ones(N, dtype=torch.int64).to_sparse()),
    "meta states": lambda p: _spoil(
        p, hidden_states=[t.to("meta") for t in dump_of(SAMPLES[3])["hidden_states"]]
    ),
    "odd keys": lambda p: torch.save({1: 2, (3,): [4]}, p),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_one_dump_that_cannot_be_read_is_that_dumps_fault(tmp_path, case):
    path = write_dumps(tmp_path / "in", SAMPLES)
    UNREADABLE[case](path / "data_3.pt")
    with pytest.raises(RunError, match="data_3.pt: .*--skip-damaged"):
        to_shards(opened(path, "pt"), tmp_path / "out")
    found = to_shards(opened(path, "pt"), tmp_path / "out", skip_damaged=True)
    assert len(found.damaged) == 1 and "data_3.pt: " in found.damaged[0]
    same(tmp_path / "out", SAMPLES[:3] + SAMPLES[4:])


FAULTS = [zlib.error("x"), ValueError(), KeyError("k"), TypeError("t"), RuntimeError("a\nb")]
FAULTS += [UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), OSError(5, "Input/output error")]


@pytest.mark.parametrize("kind", WRITE)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda e: type(e).__name__)
def test_whatever_a_reader_raises_is_one_samples_fault(tmp_path, monkeypatch, kind, fault):
    src = opened(WRITE[kind](tmp_path / "in", SAMPLES), kind)
    honest = dumps_room.finite

    def failing(states):
        if len(states) == N:
            raise fault
        return honest(states)

    monkeypatch.setattr(sys.modules[type(src).__module__], "finite", failing)
    hit = [i for i, s in enumerate(SAMPLES) if len(s.ids) == N]
    found = to_shards(src, tmp_path / "out", skip_damaged=True)
    assert len(found.damaged) == len(hit) and type(fault).__name__ in found.damaged[0]


def test_a_full_disk_is_not_a_samples_fault(tmp_path, monkeypatch):
    src = opened(write_dumps(tmp_path / "in", SAMPLES), "pt")

    def full(states):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(dumps_room, "finite", full)
    with pytest.raises(RunError, match="data_0.pt: cannot be read: No space left"):
        to_shards(src, tmp_path / "out", skip_damaged=True)


def test_token_ids_of_files_of_states_are_never_cast(tmp_path):
    from safetensors.torch import save_file

    path = write_speculators(tmp_path / "in", SAMPLES)
    for i, ids in enumerate((torch.bfloat16, torch.float32, torch.float8_e4m3fn)):
        tensors = {
            "hidden_states": as_torch(SAMPLES[i].states),
            "token_ids": torch.from_numpy(SAMPLES[i].ids).to(ids),
        }
        save_file(tensors, path / f"hidden_states/hs_{i}.safetensors")
    found = to_shards(opened(path, "speculators"), tmp_path / "out", skip_damaged=True)
    assert len(found.damaged) == 3
    assert all(f"hs_{i}.safetensors: token_ids" in t for i, t in enumerate(found.damaged))


def test_columns_that_are_no_lists_of_whole_numbers(tmp_path):
    from datasets import Dataset

    path = write_speculators(tmp_path / "in", SAMPLES[:2])
    odd = {"floats": [[1.0], [2.0]], "texts": ["a", "b"], "nested": [[[1]], [[2]]], "one": [1, 2]}
    for name, ids in odd.items():
        data = Dataset.from_dict({"input_ids": ids, "loss_mask": [[1], [1]]})
        data.save_to_disk(str(tmp_path / name))
        (tmp_path / name / "hidden_states").symlink_to(path / "hidden_states")
        with pytest.raises(UsageError, match="column input_ids is .*; expected a list of whole"):
            opened(tmp_path / name, "speculators")
    holes = Dataset.from_dict({"input_ids": [None, [1, None]], "loss_mask": [[1], [1, 1]]})
    holes.save_to_disk(str(tmp_path / "holes"))
    (tmp_path / "holes/hidden_states").symlink_to(path / "hidden_states")
    with pytest.raises(RunError, match="no sample could be converted"):
        to_shards(opened(tmp_path / "holes", "speculators"), tmp_path / "out", skip_damaged=True)


CONFIGS = [
    "[]", "7", "null", "{", '{"hidden_states": []}', '{"hidden_states": null}', '{"model": 3}',
    '{"reproducibility": "x"}', '{"hidden_states": {"layer_ids": []}}',
    '{"hidden_states": {"layer_ids": {"a": 1}}}', '{"hidden_states": {"layer_ids": [true]}}',
    '{"hidden_states": {"layer_ids": [-1, 29]}}', "\ufffd",
]  # fmt: skip
SIGNS = [
    "[]", "7", "{", '"x"', '{"format": "states/1"}', '{"format": "states/1", "layers": "abcd"}',
    '{"format": "states/1", "layers": [1.5]}', '{"format": "states/1", "layers": []}',
    '{"format": "states/1", "layers": [3, 15, 27, 30], "meta": [1]}',
    '{"format": "states/1", "layers": [3, 15, 27, 30], "meta": {"a": {}}}',
]  # fmt: skip


def test_json_of_a_wrong_shape_is_one_clear_error(tmp_path):
    dumps = write_dumps(tmp_path / "pt", SAMPLES[:2])
    for text in CONFIGS:
        (dumps / "data_config.json").write_text(text)
        with pytest.raises(UsageError, match="data_config.json: .*cannot be read"):
            opened(dumps, "pt")
    data = write_speculators(tmp_path / "hs", SAMPLES[:2])
    for text in SIGNS:
        (data / "states.json").write_text(text)
        with pytest.raises(UsageError, match="states.json: .*cannot be read"):
            opened(data, "speculators")
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out/states.json").write_text(text)
        with pytest.raises(UsageError, match=r"out.*(cannot be read|another source)"):
            to_speculators(opened(dumps_again(tmp_path), "pt"), tmp_path / "out")


def dumps_again(folder: Path) -> Path:
    path = folder / "good"
    return path if path.exists() else write_dumps(path, SAMPLES[:2])
