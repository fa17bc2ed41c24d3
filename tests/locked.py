"""What the tests of lock, diff and reproduce share: copies of one real run, pieces of it changed.

The run goes up to vocab and is the one of the Slurm tests (made once a session). Train and
benchmark are added to copies as records with files of the real shape; real ones are in the campaign
tests.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/slurm_room"))
from campaign import TINY, digests, eagle, reference  # noqa: E402

from kimi_eagle import files  # noqa: E402
from kimi_eagle.cli import main  # noqa: E402
from kimi_eagle.ledger import Ledger, Unit  # noqa: E402
from kimi_eagle.recipe import load  # noqa: E402
from kimi_eagle.rundir import RunDir, follow, open_run  # noqa: E402
from kimi_eagle.stages.context import recipe_digest  # noqa: E402

__all__ = ["TINY", "digests", "eagle", "origin", "tiny"]


@pytest.fixture(scope="session")
def origin(verifier_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real run. Not to be changed by a test."""
    return reference(tmp_path_factory.getbasetemp())


@pytest.fixture
def tiny(origin: Path, tmp_path: Path) -> RunDir:
    """A copy for this test."""
    return copy(origin, tmp_path / "tiny")


def copy(run: Path, to: Path) -> RunDir:
    shutil.copytree(run, to, symlinks=True)
    (to / "run.lock.json").unlink(missing_ok=True)
    return open_run(to)


def cli(*args: object) -> Result:
    """`kimi-eagle ARGS` in this process."""
    return CliRunner().invoke(main, [str(a) for a in args])


def recipe_file(path: Path, *changes: tuple[str, str]) -> Path:
    """The tiny recipe with words replaced, its paths made absolute."""
    text = TINY.read_text().replace("../../", f"{ROOT}/")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return path


def change(run: RunDir, *changes: tuple[str, str]) -> None:
    """Let the run follow a changed recipe, its upstream stages planned by it."""
    path = recipe_file(run.path.parent / f"{run.path.name}.toml", *changes)
    follow(run, load(path), path)
    for plan in run.path.glob("*/plan.json"):
        plan.write_text(files.to_json(files.read_json(plan) | {"recipe": digest_of(run)}))


def digest_of(run: RunDir) -> str:
    return recipe_digest(run.recipe())


def finish(run: RunDir, *, acceptance: float, val_loss: float, weights: bytes) -> None:
    """Records of train and benchmark as a finished run has them."""
    curves = [{"step": 10, "loss": 9.0}, {"step": 20, "epoch": 1, "val_loss": val_loss}]
    text = "".join(json.dumps(line) + "\n" for line in curves)
    lr = run.recipe().train.lr
    made = {"draft/model.safetensors": weights, "draft/config.json": b"{}", "curves.jsonl": text}
    record(run, "train", Unit("all", {"lr": lr}), made)
    results = {
        "acceptance_length": acceptance,
        "acceptance_per_position": [acceptance - 1, 0.0],
        "identical_outputs": True,
        "k": 2,
        "workload": "w",
        "tokens_per_second": {"draft": 30.0 + val_loss, "baseline": 35.0},
        "details": {"batch_sizes": [{"batch_size": 1, "drafts": 86, "seconds": val_loss}]},
    }
    record(run, "benchmark", Unit("all", {"lr": lr}), {"results.json": json.dumps(results)})


def record(
    run: RunDir, stage: str, unit: Unit, made: dict[str, bytes | str], attempt: int = 1
) -> None:
    """One finished unit of a stage: its files, its record and the plan."""
    folder = run.stage(stage).make()
    ledger, entries = Ledger(folder, digest_of(run)), []
    for kind, data in made.items():
        path = folder.files / f"{unit.name}.a{attempt}.{kind}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        name = str(path.relative_to(folder.files))
        size = path.stat().st_size
        entries.append({"name": name, "bytes": size, "xxh3": files.file_digest(path)})
    about = {"unit": unit.name, "key": unit.key, "state": "done", "files": entries}
    about |= {"attempt": attempt, "started": 1.0, "ended": 2.0}
    ledger.write_plan([unit])
    assert ledger.create_record(unit, about)
