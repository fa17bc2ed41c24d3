"""`kimi-eagle shards ...` as a user types it: results, one line an error, exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import hidden_run  # noqa: E402
from foreign_states import (  # noqa: E402
    LAYERS,
    contents,
    make,
    same,
    tree,
    write_dumps,
    write_shards,
    write_speculators,
)
from kimi_eagle import files  # noqa: E402
from kimi_eagle.cli import main  # noqa: E402
from kimi_eagle.images.pins import Image  # noqa: E402
from kimi_eagle.shards import ShardSet, ShardWriter  # noqa: E402
from kimi_eagle.shards.folder import open_folder  # noqa: E402

SAMPLES = make(23)


def values(bits: np.ndarray) -> np.ndarray:
    """float64 of bfloat16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def shards(*args: object) -> Result:
    return CliRunner().invoke(main, ["shards", *map(str, args)], catch_exceptions=False)


def told(*args: object) -> dict:
    done = shards(*args, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def error_of(done: Result, code: int) -> str:
    lines = [x for x in done.stderr.splitlines() if x.startswith(("error: ", "Error: "))]
    assert done.exit_code == code and len(lines) == 1 and "Traceback" not in done.output, (
        done.output
    )
    return lines[0]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose states are extracted (drawn by chance, under the real keys)."""
    ctx = hidden_run.started(tmp_path_factory.mktemp("run"))
    hidden_run.extract(ctx)
    return ctx


def test_a_run_becomes_a_folder_and_stays_as_it_is(run, tmp_path):
    before = tree(run.run.path)
    done = shards("convert", run.run.path, tmp_path / "out", "--codec", "lossless")
    assert done.exit_code == 0, done.output
    assert re.search(
        r"run .*: 12 samples, [\d,]+ tokens, 0\.\d+ GB, layers 2, 15, 27, 30", done.stderr
    )
    assert re.search(r"out: 12 samples, [\d,]+ tokens, 6 shards, 0\.\d+ GB\n", done.stdout)
    paths = [r.path(".safetensors") for r in run.ledger("extract").records(run.plan("extract"))]
    store, found = ShardSet(paths), ShardSet(open_folder(tmp_path / "out"))
    assert found.ids == store.ids
    for number in range(12):
        a, b = store.at(number), found.at(number)
        assert all(np.array_equal(a[k], b[k]) for k in a)
    assert tree(run.run.path) == before
    again = told("convert", run.run.path, tmp_path / "out", "--codec", "lossless")
    assert (again["kept"], again["samples"], again["shards"]) == (6, 12, 6)


def test_a_unit_made_again_with_equal_content_is_the_same_source(run, tmp_path):
    ctx = hidden_run.copied(run, tmp_path / "run")
    assert told("convert", ctx.run.path, tmp_path / "out")["kept"] == 0
    before = hidden_run.record_of(ctx, "00003").path(".safetensors")
    ctx.ledger("extract").set_aside(hidden_run.record_of(ctx, "00003"), "damaged")
    assert hidden_run.extract(ctx) == ["00003"]
    assert hidden_run.record_of(ctx, "00003").path(".safetensors") != before
    assert told("convert", ctx.run.path, tmp_path / "out")["kept"] == 6


def test_only_records_of_current_keys_count(run, tmp_path):
    ctx = hidden_run.copied(run, tmp_path / "run")
    stray = ctx.run.stage("extract").files / "00000.a9.safetensors"
    stray.write_bytes(hidden_run.record_of(ctx, "00000").path(".safetensors").read_bytes())
    ctx.ledger("extract").set_aside(hidden_run.record_of(ctx, "00003"), "damaged")
    line = error_of(shards("convert", tmp_path / "run", tmp_path / "out"), 1)
    assert "extract has 1 open units" in line and not (tmp_path / "out").exists()
    found = told("info", tmp_path / "run")
    assert (found["shards"], found["open_units"]) == (5, 1)
    shown = shards("info", tmp_path / "run")
    assert "1 units are not extracted yet" in shown.stdout
    line = error_of(shards("convert", tmp_path / "run", tmp_path / "x", "--layers", "1,30"), 2)
    assert "a run knows its layers" in line


def test_a_run_with_an_image_is_asked_through_it(run, tmp_path):
    """The keys are the image's: its kimi-eagle says which shards are current; here we convert."""
    ctx = hidden_run.copied(run, tmp_path / "run")
    (line,) = shards("of-run", ctx.run.path).stdout.splitlines()
    whole = json.loads(line)
    assert [Path(p).name for p, _ in whole] == [f"0000{k}.a1.safetensors" for k in range(6)]

    image = Image("/images/x.sif", "x", "ab" * 32, 1, "id", "amd64", {})
    files.write_atomic(ctx.run.image, files.to_json({"image": image.as_json()}))
    script = (
        "#!/usr/bin/env bash\n"
        f"# image {image.sha256}\n"
        'echo "$@" >> "$(dirname "$0")/asked"\n'
        "echo a line of the image\n"
        f"echo '{json.dumps(whole[:2])}'\n"
        f"# Of {ctx.run.path}, to the end.\n"
    )
    ctx.run.start.write_text(script)
    assert told("convert", ctx.run.path, tmp_path / "out")["shards"] == 2
    assert (ctx.run.path / "asked").read_text() == f"shards of-run {ctx.run.path}\n"
    ctx.run.start.write_text(script.replace("echo a line", "echo error: shut >&2; exit 1; echo"))
    line = error_of(shards("convert", ctx.run.path, tmp_path / "other"), 1)
    assert "the run's image says: shut" in line
    ctx.run.start.write_text(script.replace(image.sha256, "of another one"))
    line = error_of(shards("convert", ctx.run.path, tmp_path / "other"), 1)
    assert "starts the image before the one that was accepted" in line


def test_info_of_folder_shard_and_run(run, tmp_path):
    folder = write_shards(tmp_path / "in", SAMPLES, ["raw", "lossless", "fp8"])
    found = told("info", folder)
    lengths = sorted(len(s.ids) for s in SAMPLES)
    sizes = [p.stat().st_size for p in open_folder(folder)]
    assert (found["shards"], found["samples"], found["tokens"]) == (5, 23, sum(lengths))
    assert {k: v["shards"] for k, v in found["codecs"].items()} == {
        "raw": 2,
        "lossless": 2,
        "fp8": 1,
    }
    assert found["bytes"] == sum(sizes)
    assert found["bytes_per_token"] == round(sum(sizes) / sum(lengths), 1)
    raw = sum(lengths) * (4 * 24 * 2 + 5)
    assert found["share_of_raw"] == round(sum(sizes) / raw, 4)
    assert (found["layers"], found["hidden_size"]) == (list(LAYERS), 24)
    assert found["verifier_id"] == "v1" and "0.31.0" in found["engine"]
    assert found["lengths"]["min"] == lengths[0] and found["lengths"]["max"] == lengths[-1]
    assert found["lengths"]["p50"] == lengths[11]
    assert [e["layer"] for e in found["fp8_error"]] == list(LAYERS)
    before = np.concatenate([values(s.states) for s in SAMPLES[10:15]])
    store = ShardSet([folder / "u002.safetensors"])
    after = np.concatenate([values(store.at(k)["hidden_states"]) for k in range(5)])
    for k, entry in enumerate(found["fp8_error"]):
        error = before[:, k] - after[:, k]
        ratio = np.square(before[:, k]).sum() / np.square(error).sum()
        assert entry["sqnr_db"] == pytest.approx(10 * np.log10(ratio), abs=0.02)
        assert entry["max_error"] == np.abs(error).max()
        assert entry["zeros"] == np.mean((after[:, k] == 0) & (before[:, k] != 0))
    text = shards("info", folder).stdout
    for part in ("fp8 1, lossless 2, raw 2", "3, 15, 27, 30", "v1", "fp8 layer 27", " dB"):
        assert part in text
    one = told("info", folder / "u002.safetensors")
    assert (one["shards"], one["samples"]) == (1, 5)
    assert set(one["codecs"]) == {"fp8"}
    whole = told("info", run.run.path)
    assert (whole["shards"], whole["samples"], whole["open_units"]) == (6, 12, 0)
    assert whole["verifier_id"] == run.verifier.id() and whole["share_of_raw"] > 1


def test_fp8_error_of_many_shards_is_that_of_all_samples(tmp_path):
    many = write_shards(tmp_path / "many", SAMPLES, ["fp8"], each=1)
    one = write_shards(tmp_path / "one", SAMPLES, ["fp8"], each=23)
    assert told("info", many)["fp8_error"] == told("info", one)["fp8_error"]


def test_info_of_an_empty_shard_and_of_huge_values(tmp_path):
    for name in ("empty", "huge"):
        (tmp_path / name).mkdir()
    with ShardWriter(tmp_path / "empty", "u", LAYERS, 24, {}):
        pass
    found = told("info", tmp_path / "empty")
    assert (found["tokens"], found["share_of_raw"], found["bytes_per_token"]) == (0, None, None)
    assert "(0.00 GB, - a token, - of raw)" in shards("info", tmp_path / "empty").stdout

    huge = np.full((2, len(LAYERS), 24), 0x7F00, np.uint16)  # 1.7e38, and less beside it
    huge[..., 1:] = 0x7E95
    with ShardWriter(tmp_path / "huge", "u", LAYERS, 24, {}, codec="fp8") as writer:
        writer.add("0", huge, SAMPLES[0].ids[:2], SAMPLES[0].mask[:2])
    text = shards("info", tmp_path / "huge", "--json").stdout
    assert "Infinity" not in text and "NaN" not in text
    assert json.loads(text)["fp8_error"][0]["sqnr_db"] is None
    assert "SQNR - dB" in shards("info", tmp_path / "huge").stdout


def test_info_of_thousands_of_shards_is_quick(tmp_path):
    """Indexes alone: the states may even be gone. (10,000: tests/bench/.)"""
    writer = ShardWriter(tmp_path, "u", LAYERS, 24, {})
    writer.add("0", SAMPLES[0].states, SAMPLES[0].ids, SAMPLES[0].mask)
    shard, index = writer.close()
    for number in range(1000):
        (tmp_path / f"v{number:04d}.safetensors").hardlink_to(shard)
        (tmp_path / f"v{number:04d}.index.parquet").hardlink_to(index)
    start = time.process_time()
    found = told("info", tmp_path)
    seconds = time.process_time() - start
    assert (found["shards"], found["samples"], found["repeated"]) == (1001, 1, 1000)
    assert seconds < 2


def test_speculators_and_dumps_by_name(tmp_path):
    prepared = write_speculators(tmp_path / "prepared", SAMPLES)
    assert told("convert", prepared, tmp_path / "a", "--layers", "3,15,27,30")["samples"] == 23
    same(tmp_path / "a", SAMPLES)
    dumps = write_dumps(tmp_path / "dumps", SAMPLES)
    assert told("convert", dumps, tmp_path / "b", "--num-layers", 30)["shards"] == 1
    assert contents(tmp_path / "b") == contents(tmp_path / "a")
    found = told("convert", tmp_path / "b", tmp_path / "c", "--to", "speculators")
    assert found["samples"] == 23 and found["to"] == "speculators"
    told("convert", tmp_path / "c", tmp_path / "d", "--codec", "lossless", "--shard-tokens", 99)
    assert contents(tmp_path / "d") == contents(tmp_path / "a")


def test_missing_rows_are_named_counted_and_exit_1(tmp_path):
    prepared = write_speculators(tmp_path / "in", SAMPLES)
    (prepared / "hidden_states/hs_4.safetensors").unlink()
    more = ("--layers", "3 15 27 30")
    done = shards("convert", prepared, tmp_path / "out", *more)
    assert "1 rows without states" in error_of(done, 1)
    assert "left out (missing): " in done.stderr and "row 4: hs_4.safetensors" in done.stderr
    assert "22 samples" in done.stdout
    done = shards("convert", prepared, tmp_path / "out", *more, "--allow-missing")
    assert done.exit_code == 0 and "row 4: hs_4.safetensors" in done.stderr
    same(tmp_path / "out", SAMPLES[:4] + SAMPLES[5:])


WRONG = {
    "no such source": (["nowhere", "out"], 2, "no such file or folder"),
    "nothing in it": (["empty", "out"], 2, "no hidden states here; expected a run, a folder"),
    "a file": (["note.txt", "out"], 2, "not a shard"),
    "layers in words": (["prepared", "out", "--layers", "last"], 2, "ascending order"),
    "layers upside down": (["prepared", "out", "--layers", "30,3"], 2, "ascending order"),
    "no layers": (["prepared", "out"], 2, "--layers"),
    "codec": (["shards", "out", "--codec", "zip"], 2, "'zip' is not one of"),
    "layers of shards": (["shards", "out", "--layers", "1,30"], 2, "shards know their layers"),
    "fp8 for speculators": (["shards", "out", "--to", "speculators", "--codec", "fp8"], 2, "raw"),
    "two kinds": (["both", "out"], 2, "could be shards or pt; fix: give --from"),
    "said to be another": (
        ["shards", "out", "--from", "pt", "--num-layers", 3],
        1,
        "no dumps here",
    ),
    "said to be a run": (["shards", "out", "--from", "run"], 2, "no run here"),
    "no verifier": (["dumps", "out", "--verifier", "nowhere"], 2, "no such model directory"),
    "no depth": (["dumps", "out"], 2, "--num-layers N or --verifier DIR"),
    "no tokens": (["shards", "out", "--shard-tokens", 0], 2, "0 is not in the range"),
    "out is in": (["shards", "shards"], 2, "OUT lies in SRC"),
    "unfinished": (["unfinished", "out"], 1, "not finished"),
}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """One of each kind of source."""
    root = tmp_path_factory.mktemp("places")
    write_shards(root / "shards", SAMPLES[:4])
    write_shards(root / "both", SAMPLES[:4])
    (root / "both/data_0.pt").touch()
    write_speculators(root / "prepared", SAMPLES[:4])
    write_dumps(root / "dumps", SAMPLES[:4])
    (root / "empty").mkdir()
    (root / "note.txt").touch()
    assert shards("convert", root / "shards", root / "unfinished").exit_code == 0
    from kimi_eagle.shards import folder

    manifest = folder.read_manifest(root / "unfinished")
    folder.write_manifest(root / "unfinished", {**manifest, "complete": False})
    return root


@pytest.mark.parametrize("case", WRONG)
def test_wrong_use_is_one_line(places, case):
    (src, out, *more), code, said = WRONG[case]
    more = [places / m if m == "nowhere" else m for m in more]
    done = shards("convert", places / src, places / out, *more)
    assert said in error_of(done, code)
    assert not (places / "out").exists()


def test_info_of_what_are_no_shards(places):
    assert "shards convert" in error_of(shards("info", places / "prepared"), 2)
    assert "shards convert" in error_of(shards("info", places / "dumps"), 2)
    assert "no hidden states here" in error_of(shards("info", places / "empty"), 2)
    assert "no such file" in error_of(shards("info", places / "nowhere"), 2)
    assert told("info", places / "unfinished")["samples"] == 4


def test_a_shard_of_the_old_format_is_refused(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "u.safetensors").write_bytes(b"x")
    table = pa.table({"sample_id": ["a"]})
    table = table.replace_schema_metadata({"kimi_eagle.format": "shard-index/1"})
    pq.write_table(table, tmp_path / "u.index.parquet")
    assert "shard-index/1" in error_of(shards("info", tmp_path), 1)


@pytest.mark.campaign
def test_killed_command_goes_on(tmp_path):
    """The command line itself, killed while it converts."""
    src = write_shards(tmp_path / "in", make(60, hidden=64), each=1)
    command = [sys.executable, "-m", "kimi_eagle", "shards", "convert", str(src)]
    child = subprocess.Popen([*command, str(tmp_path / "out")], stderr=subprocess.DEVNULL)
    while child.poll() is None and len(list(tmp_path.glob("out/shard-*"))) < 8:
        time.sleep(0.001)
    assert child.poll() is None  # else it had been too quick to be killed
    child.send_signal(signal.SIGKILL)
    child.wait()
    done = subprocess.run([*command, str(tmp_path / "out")], capture_output=True, text=True)
    assert done.returncode == 0 and re.search(r"60 shards \(\d+ were there\)", done.stdout), done
    assert shards("convert", src, tmp_path / "whole").exit_code == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_help_names_examples_and_stays_light():
    code = (
        "import sys\nfrom kimi_eagle.cli import main\n"
        "try:\n    main(['shards', 'convert', '--help'], prog_name='kimi-eagle')\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'numpy', 'pyarrow', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ}
    )
    assert done.stdout.splitlines()[-1] == "[]"
    assert "kimi-eagle shards convert runs/smollm2" in done.stdout
