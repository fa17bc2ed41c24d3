"""Settings that cannot work are refused with one line, before anything is started."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from kimi_eagle.containers.exec import (
    FIXED,
    NEVER,
    SCRATCH,
    ExecSettings,
    Mount,
    check_usable,
    exec_argv,
    make_scratch,
    node_script,
)
from kimi_eagle.errors import KimiEagleError, RunError, UsageError


def settings(**fields: Any) -> ExecSettings:
    return ExecSettings(**{"image": "/images/x.sif", "scratch": "/local/x"} | fields)


def test_golden_argv() -> None:
    made = settings(
        gpus=True,
        workdir="/runs/a",
        mounts=(Mount("/data/a,b", "/data/a,b"), Mount('/runs/"x"', "/runs/a", read_only=False)),
    )
    assert exec_argv(made, ["kimi-eagle", "stage", "extract"]) == [
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
        ({"scratch": "local"}, "scratch 'local'"),
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
    ["/", "//", "/proc", "/sys/x", "/dev/shm", SCRATCH, f"{SCRATCH}/tmp", "a", "/a/../proc"],
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


def refused(made: ExecSettings) -> KimiEagleError:
    with pytest.raises(KimiEagleError) as error:
        check_usable(made)
    assert "\n" not in error.value.line()
    return error.value


def test_usable(room: Any, sandbox: Path) -> None:
    check_usable(room.settings(mounts=(Mount(str(room.folder), "/data"),), shm_bytes=1))
    check_usable(room.settings(image=str(sandbox)))


def test_refused_on_the_machine(room: Any) -> None:
    folder = room.folder
    (folder / "text.sif").write_text("not an image" * 10)
    (folder / "empty.sif").touch()
    (folder / "root" / "bin").mkdir(parents=True)
    for name, message in {
        "none.sif": "no such image",
        "text.sif": "not an image",
        "empty.sif": "not an image",
        "root": "not a sandbox: it has no .singularity.d",
        "text.sif/x": "image cannot be read: Not a directory",
    }.items():
        assert message in refused(room.settings(image=f"{folder}/{name}")).line()
    mount = Mount(f"{folder}/gone\n", "/data")
    assert "mount source does not exist" in refused(room.settings(mounts=(mount,))).line()

    error = refused(room.settings(shm_bytes=2**60))
    assert isinstance(error, RunError) and "/dev/shm" in error.line() and "wanted" in error.line()
    assert "install-apptainer.sh" in refused(room.settings(apptainer="no-such-program")).line()
    assert "not Apptainer: 'Python" in refused(room.settings(apptainer=sys.executable)).line()


def test_scratch_that_cannot_be_made(room: Any) -> None:
    (room.folder / "file").touch()
    with pytest.raises(RunError, match="scratch cannot be used: Not a directory"):
        make_scratch(room.settings(scratch=f"{room.folder}/file/scratch"))
