"""Settings that cannot work are refused with one line, before anything is started."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from kimi_eagle.containers.exec import (
    FIXED,
    NEVER,
    SCRATCH,
    ExecSettings,
    Mount,
    check_program,
    exec_argv,
    node_script,
)
from kimi_eagle.errors import RunError, UsageError


def settings(**fields: Any) -> ExecSettings:
    return ExecSettings(**{"image": "/images/x.sif"} | fields)


def test_golden_argv() -> None:
    made = settings(
        gpus=True,
        workdir="/runs/a",
        mounts=(Mount("/data/a,b", "/data/a,b"), Mount('/runs/"x"', "/runs/a", read_only=False)),
    )
    assert exec_argv(made, "/local/x", ["kimi-eagle", "stage", "extract"]) == [
        *("apptainer", "-q", "exec", "--cleanenv", "--no-eval", "--no-home"),
        *("--no-mount", "home,cwd,hostfs", "--home", "/eagle/home", "--nv"),
        *("--mount", '"type=bind","source=/local/x","destination=/eagle"'),
        *("--mount", '"type=bind","source=/data/a,b","destination=/data/a,b","ro"'),
        *("--mount", '"type=bind","source=/runs/""x""","destination=/runs/a"'),
        *("--pwd", "/runs/a", "/images/x.sif", "kimi-eagle", "stage", "extract"),
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image": "x.sif"}, "image 'x.sif'; expected an absolute path"),
        ({"image": "docker://vllm/vllm-openai"}, "expected an absolute path"),
        ({"image": "/a/../x.sif"}, "an absolute path without .."),
        ({"sha256": "0" * 64}, "list of proven images ''"),
        ({"workdir": ""}, "working directory ''"),
        ({"workdir": "/a\0b"}, "UTF-8 without carriage returns"),
        ({"apptainer": ""}, "not a program"),
        ({"apptainer": "--help"}, "not a program"),
        ({"allow": ("*",)}, "not a name of a variable: '*'"),
        ({"allow": ("A=B",)}, "not a name of a variable"),
        ({"allow": ("A*B",)}, "not a name of a variable"),
        ({"allow": ("a.b",)}, "not a name of a variable"),
        ({"allow": ("X\n",)}, "not a name of a variable"),
        ({"secrets": ("HF_*",)}, "not a name of a variable"),
        ({"secrets": ("x y",)}, "not a name of a variable"),
        ({"secrets": ("LD_PRELOAD",)}, "'LD_PRELOAD' never gets into a container"),
        ({"allow": ("PYTHONPATH",)}, "never gets into a container"),
        ({"allow": ("APPTAINER_*",)}, "never gets into a container"),
        ({"allow": ("HF_HOME",)}, "never gets into a container"),
        ({"mounts": (Mount("/a", "/x"), Mount("/b", "/x/"))}, "two mounts for '/x/'"),
    ],
    ids=lambda value: None if isinstance(value, dict) else "",
)
def test_refused_at_once(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        settings(**fields)
    assert message in refused.value.line() and "\n" not in refused.value.line()


@pytest.mark.parametrize(
    "target",
    [
        *("/", "//", "/proc", "/sys/x", "/dev/shm", SCRATCH, f"{SCRATCH}/tmp", "a", "/a/../proc"),
        *("/opt", "/opt/kimi-eagle", "/opt/kimi-eagle/lib", "/usr", "/usr/lib/x", "/etc", "/lib64"),
    ],
)
def test_refused_targets(target: str) -> None:
    with pytest.raises(UsageError):
        Mount("/data", target)


def test_frozen() -> None:
    with pytest.raises(AttributeError):
        settings().gpus = True  # type: ignore[misc]


def test_every_cache_is_below_scratch() -> None:
    switches = {"HF_HUB_OFFLINE", "PYTHONNOUSERSITE", "PYTHONSAFEPATH", "LANG"}
    for name in set(FIXED) - switches:
        assert FIXED[name].startswith(f"{SCRATCH}/") and len(FIXED[name]) < 30


def test_script_names_secrets_and_holds_none() -> None:
    os.environ["KE_SECRET_OF_A_TEST"] = "5ecret"
    try:
        text = node_script(settings(secrets=("KE_SECRET_OF_A_TEST",)))
    finally:
        del os.environ["KE_SECRET_OF_A_TEST"]
    assert "KE_SECRET_OF_A_TEST" in text and "5ecret" not in text
    assert all(name in text for name in NEVER)


def test_the_program_has_to_be_apptainer(apptainer: str) -> None:
    check_program(apptainer)
    with pytest.raises(RunError, match="no program 'no-such'; fix: .*install-apptainer.sh"):
        check_program("no-such")
    with pytest.raises(RunError, match="not Apptainer: 'Python"):
        check_program(sys.executable)
