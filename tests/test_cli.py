"""The command line with wrong input: one line that says what, where, expected, fix; exit 2 or 1."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "tests/recipes/tiny.toml"


def recipe(path: Path, *changes: tuple[str, str]) -> Path:
    text = TINY.read_text().replace("../../", f"{ROOT}/")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return path


def error_of(done: subprocess.CompletedProcess[str], code: int) -> str:
    """The one line on standard error."""
    lines = [x for x in done.stderr.splitlines() if x.strip()]
    assert done.returncode == code, done.stderr + done.stdout
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    assert "Traceback" not in done.stderr
    return lines[0]


MODEL = "~/.cache/kimi-eagle/models/SmolLM2-135M-Instruct"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([("draft_vocab_size", "draft_vocabsize")], ["vocab.draft_vocabsize", "draft_vocab_size"]),
        ([("limit = 24", 'limit = "many"')], ["sources.[0].limit", "'many'"]),
        ([("ttt_steps = 2", "ttt_steps = 0")], ["train.ttt_steps", "greater than or equal to 1"]),
        ([("[verifier]", "[verifier")], ["not TOML", "tiny.toml"]),
        ([(MODEL, "/no/such/model")], ["/no/such/model"]),
        ([("prompts.jsonl", "prompt.jsonl")], ["prompt.jsonl"]),
        ([("layers = [2, 15, 27, 30]", "layers = [2, 15, 27, 31]")], ["31", "30"]),
        ([("draft_vocab_size = 1024", "draft_vocab_size = 50000")], ["50,000", "49,152"]),
    ],
)
def test_a_wrong_recipe_is_one_line(tmp_path: Path, eagle, verifier_dir, changes, words) -> None:
    run = tmp_path / "run"
    bad = recipe(tmp_path / "tiny.toml", *changes)
    line = error_of(eagle("run", bad, "--run", run, "--until", "regenerate"), 2)
    for word in words:
        assert word in line
    assert not list(run.glob("*/records/*"))


def test_missing_recipe_names_the_nearest(eagle) -> None:
    line = error_of(eagle("run", "jobs/smolm2.toml"), 2)
    assert "no such recipe" in line and "smollm2.toml" in line


def test_unknown_stage_command_and_run(tmp_path: Path, eagle) -> None:
    assert "regenerate" in error_of(eagle("run", TINY, "--until", "extrakt"), 2)
    assert "no run here" in error_of(eagle("stage", "extract", "--run", tmp_path), 2)
    done = eagle("stats")
    assert done.returncode == 2 and "status" in done.stderr
    (tmp_path / "run.json").write_text('{"format": "run/1", "recipe": {}}')
    assert "missing key" in error_of(eagle("stage", "extract", "--run", tmp_path), 2)


@contextlib.contextmanager
def small_disk(folder: Path, options: str) -> Iterator[list[str]]:
    """A prefix for commands that see a tmpfs on `folder`: in a mount namespace of their own."""
    folder.mkdir()
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    script = f'mount -t tmpfs -o "$1" tmpfs "$2" && shift 2 && exec "$@"'  # noqa: F541
    yield ["unshare", "--mount", *user, "sh", "-c", script, "sh", options, str(folder)]


def under(prefix: list[str], *args: object) -> subprocess.CompletedProcess[str]:
    command = [*prefix, sys.executable, "-m", "kimi_eagle", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)


def test_read_only_run_directory(tmp_path: Path) -> None:
    with small_disk(tmp_path / "ro", "size=4m,ro") as prefix:
        line = error_of(under(prefix, "run", TINY, "--run", tmp_path / "ro/run"), 2)
    assert "Read-only" in line and "--run" in line


def test_full_disk_says_so_and_leaves_nothing_half_written(tmp_path: Path, verifier_dir) -> None:
    with small_disk(tmp_path / "full", "size=256k") as prefix:
        script = (
            "import subprocess, sys\n"
            "done = subprocess.run([sys.executable, '-m', 'kimi_eagle', 'run', sys.argv[1],"
            " '--run', sys.argv[2], '--until', 'extract'])\n"
            "from pathlib import Path\n"
            "run = Path(sys.argv[2])\n"
            "names = [p.name for p in run.glob('extract/files/*')]\n"
            "print('FILES', names, 'RECORDS', len(list(run.glob('extract/records/*'))))\n"
            "sys.exit(done.returncode)\n"
        )
        command = [*prefix, sys.executable, "-c", script, str(TINY), str(tmp_path / "full/run")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert "No space left" in error_of(done, 1)
    assert "FILES [] RECORDS 0" in done.stdout


def test_status_and_explain_of_a_fresh_run(tmp_path: Path, eagle, verifier_dir) -> None:
    from kimi_eagle.recipe import load
    from kimi_eagle.rundir import create_run, follow

    follow(create_run(tmp_path / "run"), load(TINY), TINY)
    done = eagle("status", tmp_path / "run")
    assert done.returncode == 0 and "regenerate waiting" in done.stdout
    done = eagle("explain", tmp_path / "run")
    assert done.returncode == 0 and "never done" in done.stdout
    assert "waits for regenerate" in done.stdout


def test_a_folder_of_something_else_is_not_taken(tmp_path: Path, eagle) -> None:
    (tmp_path / "recipe.toml").write_text("mine")
    line = error_of(eagle("run", TINY, "--run", tmp_path), 2)
    assert "holds files but no run" in line
    assert [p.name for p in tmp_path.iterdir()] == ["recipe.toml"]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (("lr = 2e-3", "lr = inf"), "train.lr"),
        (("k = 2", "k = 2\nbatch_sizes = []"), "batch_sizes"),
        (("k = 2", "k = 2\nbatch_sizes = [0]"), "batch_sizes"),
        (("max_tokens = 48", "max_tokens = 300"), "regenerate.max_tokens 300"),
        (("layers = [2, 15, 27, 30]", "layers = [2, 15, 27, 29]"), "30"),
        (("[vocab]", "[vocab]\nforce_tokens = [99999]"), "99999"),
        ((MODEL, "~no_such_user/x"), "not a path"),
    ],
)
def test_what_cannot_be_is_refused_before_the_first_stage(
    tmp_path: Path, eagle, verifier_dir, change, word
) -> None:
    bad = recipe(tmp_path / "tiny.toml", change)
    assert word in error_of(eagle("run", bad, "--run", tmp_path / "run", "--until", "prepare"), 2)


def test_modules_in_the_working_directory_do_not_shadow_the_library(
    tmp_path: Path, eagle, verifier_dir
) -> None:
    (tmp_path / "grp.py").write_text("raise SystemExit('shadowed')")
    given = tmp_path / "given.jsonl"
    row = '{"conversations": [{"from": "human", "value": "a %d"}, {"from": "gpt", "value": "b"}]}'
    given.write_text("\n".join(row % i for i in range(20)))
    path = recipe(
        tmp_path / "tiny.toml",
        (f"{ROOT}/jobs/data/prompts.jsonl", str(given)),
        ("[regenerate]", "[regenerate]\nenabled = false"),
    )
    env = {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "kimi_eagle", "run", path, "--run", "r", "--until", "prepare"],
        cwd=tmp_path,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr + done.stdout


def test_an_empty_image_is_no_image(eagle, tmp_path: Path) -> None:
    """`--image "$IMG"` with the variable unset."""
    words = ("run", "jobs/smollm2.toml", "--run", tmp_path / "x", "--image", "")
    done = eagle(*words)
    assert done.returncode == 2 and "--image: an empty name" in done.stderr
    assert not (tmp_path / "x").exists()
