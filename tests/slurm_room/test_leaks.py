"""A poisoned shell and twenty secrets: nothing of it gets into the image or into any file."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from campaign import Case, records  # noqa: E402

from kimi_eagle.images import pins  # noqa: E402

NAMED = "HF_TOKEN"
"""The one secret that the recipe names."""
SECRETS = (
    *(NAMED, "HUGGING_FACE_HUB_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
    *("AWS_SESSION_TOKEN", "WANDB_API_KEY", "GITHUB_TOKEN", "GH_TOKEN", "OPENAI_API_KEY"),
    *("GOOGLE_API_KEY", "AZURE_CLIENT_SECRET", "NGC_API_KEY", "DOCKER_PASSWORD", "SSH_AUTH_SOCK"),
    *("MLFLOW_TRACKING_PASSWORD", "DATABASE_URL", "SECRET_KEY", "MY_PASSWORD", "SENTRY_DSN"),
    "VAULT_TOKEN",
)


@pytest.fixture
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """2 MiB that nobody may write, with modules that a user's site-packages would bring."""
    folder = Path(f"/tmp/ke-home-{os.getpid()}")
    folder.mkdir()
    small = ["mount", "-t", "tmpfs", "-o", "size=2m,mode=0555", "none", folder]
    mounted = subprocess.run(small, capture_output=True).returncode == 0
    try:
        for name in ("path", ".local/lib/python3.11/site-packages"):
            (folder / name).mkdir(parents=True)
            for module in ("torch", "vllm", "transformers", "usercustomize"):
                (folder / name / f"{module}.py").write_text("raise SystemExit('poisoned')\n")
        folder.chmod(0o555)
        yield folder
    finally:
        if mounted:
            subprocess.run(["umount", folder], check=True)
        else:
            subprocess.run(["rm", "-rf", folder / "path", folder / ".local"], check=True)
        folder.rmdir()


def poison(home: Path) -> dict[str, str]:
    """What a careless login shell may export."""
    return {
        "HOME": str(home),
        "PYTHONPATH": f"{home}/path",
        "PYTHONUSERBASE": f"{home}/.local",
        "LD_PRELOAD": f"{home}/poison.so",
        "HF_HOME": f"{home}/hf",
        "TMPDIR": f"{home}/tmp",
        "XDG_CACHE_HOME": f"{home}/cache",
        "PIP_INDEX_URL": "https://poison.invalid",
        "PIP_TARGET": f"{home}/pip",
        "APPTAINER_BIND": f"{home}:/poison",
        "APPTAINERENV_PYTHONPATH": f"{home}/path",
        "SINGULARITY_BIND": f"{home}:/poison",
        "SINGULARITYENV_LD_PRELOAD": f"{home}/poison.so",
        "VLLM_USE_PRECOMPILED": "poison",
    }


@pytest.mark.parametrize("case", ["user"], indirect=True)
def test_nothing_leaks(case: Case, home: Path) -> None:
    if os.geteuid():
        pytest.skip("needs root, to see another account's processes")
    values = {name: f"5ecret-{secrets.token_hex(12)}" for name in SECRETS}
    shell = poison(home) | values
    case.configure("", "[container]", f'secrets = ["{NAMED}"]')
    case.open(5)
    shown = case.eagle(
        *("submit", case.recipe, "--site", case.site, "--run", case.run, "--dry-run"), **shell
    )
    case.eagle(
        *("submit", case.recipe, "--site", case.site, "--run", case.run),
        *("--emit", case.folder / "jobs"),
        **shell,
    )
    case.extract(**shell)
    ((_, worker),) = case.wait_claims(1).items()

    inside = Path(f"/proc/{worker['pid']}/environ").read_text().split("\0")
    inside = dict(line.partition("=")[::2] for line in inside if line)
    assert inside[NAMED] == values[NAMED]
    assert not [n for n, v in values.items() if n != NAMED and v in inside.values()]
    assert not [n for n, v in inside.items() if str(home) in v or "poison" in v]
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            assert "5ecret-" not in path.read_text(errors="replace")

    case.release()
    case.finish()
    case.whole()
    (made,) = [r for r in records(case.run, "extract") if r["worker"] == worker["id"]]
    image = pins.verified(case.place.image)
    found, labels = made["provenance"], image.labels
    assert found["image"] == f"sha256:{image.sha256}"
    for name in ("torch", "transformers", "speculators"):
        assert found["packages"][name] == labels[f"ai.kimi-eagle.{name}"]
    assert found["commit"] == labels["org.opencontainers.image.revision"]

    assert "5ecret-" not in shown.stdout + shown.stderr
    written = [p for p in case.folder.rglob("*") if p.is_file() and not p.is_symlink()]
    assert len(written) > 100
    assert [p for p in written if b"5ecret-" in p.read_bytes()] == []
    assert json.loads((case.run / "run.lock.json").read_text())["image"]["sha256"] == image.sha256
    assert not list(Path("/tmp").glob(f"ke-*-{worker['job']}.*"))


@pytest.mark.parametrize("case", ["user"], indirect=True)
def test_a_secret_that_is_not_set_stops_the_submit(case: Case) -> None:
    case.configure("", "[container]", f'secrets = ["{NAMED}"]')
    command = ("submit", case.recipe, "--site", case.site, "--run", case.run)
    done = case.eagle(*command, check=False)
    assert done.returncode == 2 and f"{NAMED} is not set" in done.stderr
    assert case.jobs() == {} and not (case.run / "run.json").exists()
