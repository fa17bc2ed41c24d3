"""What of the host's environment gets in, unchanged, and what does not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kimi_eagle.containers.exec import ALLOWED, FIXED, NEVER, SCRATCH

HOSTILE = {
    "quotes": "a\"b'c`d",
    "comma": "a,b,c=d",
    "equals": "=a==b=",
    "newline": "a\nb\n\n",
    "shell": "$HOME ${PATH} $$ $(id) `id` $((1+1))",
    "parentheses": "a(b){c}[d]",
    "backslash": "a\\b\\\\c\\n\\",
    "unicode": "é中🎉",
    "4KB": "x\n'\"" * 1024,
    "blanks": "  a  b\t ",
    "empty": "",
    "glob": "* ? [a] ~ ~root !x #y %z",
    "operators": "a;b|c&d>e<f",
    "control": "a\rb\x01\x1b[0m",
    "dashes": "--env X=1",
}
ALL = "answer = dict(os.environ)"


def test_hostile_values_arrive_intact(room: Any) -> None:
    host = {f"SLURM_{name}": value for name, value in HOSTILE.items()}
    host |= {"HF_TOKEN": "".join(HOSTILE.values()), "MINE_1": "a", "names": "x", "ke_names": "y"}
    settings = room.settings(allow=("MINE_*",), secrets=("HF_TOKEN",))
    inside = room.python(settings, ALL, host_env=host)
    assert {k: v for k, v in inside.items() if k in host} == {
        k: v for k, v in host.items() if k not in ("names", "ke_names")
    }


def poisoned(home: Path) -> dict[str, str]:
    """A login shell that would change what runs inside, with a marker in each value."""
    site = home / ".local/lib" / f"python3.{os.sys.version_info.minor}" / "site-packages"
    site.mkdir(parents=True, exist_ok=True)
    (site / "usercustomize.py").write_text("raise SystemExit('poison of ~/.local')")
    (home / "json.py").write_text("raise SystemExit('poison of the working directory')")
    names = (
        *("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "PYTHONUSERBASE", "PYTHONWARNINGS"),
        *("LD_PRELOAD", "LD_LIBRARY_PATH", "LD_AUDIT", "VIRTUAL_ENV", "CONDA_PREFIX", "BASH_ENV"),
        *("PIP_INDEX_URL", "PIP_TARGET", "CUDA_HOME", "CUDA_PATH", "CUDA_INJECTION64_PATH"),
        *("APPTAINERENV_X", "SINGULARITYENV_X", "APPTAINERENV_PATH", "SINGULARITYENV_PYTHONPATH"),
        *("SLURM_JWT", "XDG_RUNTIME_DIR", "AWS_SECRET_ACCESS_KEY", "VLLM_USE_V1", *FIXED),
    )
    return {name: f"{home}/poison" for name in names} | {
        "HOME": str(home),
        "APPTAINER_BIND": f"{home}:/poison",
        "SINGULARITY_BIND": f"{home}:/poison",
        "APPTAINER_BINDPATH": f"{home}:/poison",
        "APPTAINER_NO_EVAL": "",
        "APPTAINER_WORKDIR": str(home),
        "APPTAINER_NV": "1",
        "BASH_FUNC_apptainer%%": "() { echo poison; }",
        "APPTAINERENV_not.a.name": "poison",
        "SLURM_not.a.name": "fine",
        "CUDA_VISIBLE_DEVICES": "0,3",
    }


def test_nothing_of_a_poisoned_host_gets_in(room: Any) -> None:
    home = room.folder / "home"
    home.mkdir()
    host = poisoned(home)
    room.person.chown(room.folder)
    # These two would hit the bash of the script itself, which is still the host.
    host = {k: v for k, v in host.items() if k not in ("BASH_ENV", "LD_PRELOAD")}
    code = (
        "import site\n"
        "answer = dict(os.environ), sys.path, site.ENABLE_USER_SITE, os.path.exists('/poison')"
    )
    settings = room.settings()
    inside, path, user_site, bound = room.python(settings, code, host_env=host, cwd=home)
    shown = {k: v for k, v in inside.items() if "poison" in k + v}
    assert shown == {} and not any("poison" in p or str(home) in p for p in path)
    assert not user_site and not bound
    assert {k: inside[k] for k in FIXED} == FIXED
    assert inside["HOME"] == f"{SCRATCH}/home" and inside["CUDA_VISIBLE_DEVICES"] == "0,3"
    assert inside["OF_THE_IMAGE"] == "1"  # and ours won over the image's HF_HOME
    assert not (home / ".apptainer").exists()


def test_the_lists_hold(room: Any) -> None:
    """All that is allowed gets in, nothing of what is never let in, whatever the settings say."""
    host = {name.replace("*", "X"): "yes" for name in ALLOWED}
    shell = ("PATH", "ENV", "BASH_*")  # would hit the bash of the script itself
    host |= {name.replace("*", "X"): "no" for name in NEVER if name not in shell}
    host |= {"MINE": "1", "HF_TOKEN": "t", "VLLM_USE_V1": "1", "OTHER": "no"}
    settings = room.settings(allow=("MINE", "VLLM_*"), secrets=("HF_TOKEN",))
    inside = room.python(settings, ALL, host_env=host)
    assert {k for k, v in inside.items() if v == "yes"} >= {n for n in host if host[n] == "yes"}
    assert {"MINE", "HF_TOKEN", "VLLM_USE_V1"} < set(inside) and "no" not in inside.values()


def test_secrets_are_nowhere_but_in_the_environment(room: Any) -> None:
    settings = room.settings(secrets=("HF_TOKEN",))
    code = (
        "import glob\n"
        "lines = [open(p, 'rb').read().decode('latin-1') for p in glob.glob('/proc/[0-9]*/cmdline')"
        " if os.path.exists(p)]\n"
        "answer = os.environ['HF_TOKEN'], [x for x in lines if 'hf-' + '5ecret' in x]"
    )
    answer = room.python(settings, code, host_env={"HF_TOKEN": "hf-5ecret"})
    assert answer == ["hf-5ecret", []]
    written = [p for p in room.folder.rglob("*") if p.is_file() and b"5ecret" in p.read_bytes()]
    assert written == []


def refused(room: Any, settings: Any, host_env: dict[str, str]) -> tuple[int, str]:
    """Exit code and the last line of what the script says."""
    process = room.start(settings, ["/usr/bin/python3"], host_env)
    _, err = process.communicate(timeout=60)
    return process.returncode, err.strip().splitlines()[-1]


def test_a_secret_that_is_not_set_is_refused(room: Any) -> None:
    code, line = refused(room, room.settings(secrets=("HF_TOKEN",)), {})
    assert code == 2 and line.startswith("error: secret not set: HF_TOKEN; fix: export it")


def test_a_value_that_apptainer_would_change_is_refused(room: Any) -> None:
    code, line = refused(room, room.settings(), {"SLURM_X": os.fsdecode(b"5ecret\xff")})
    assert code == 2 and "the value of SLURM_X is not UTF-8" in line and "5ecret" not in line


def test_refusals_of_a_node(room: Any) -> None:
    for fields, code, words in (
        ({"shm_bytes": 2**60}, 1, "/dev/shm on "),
        ({"apptainer": "no-such-program"}, 1, "not Apptainer on "),
        ({"apptainer": "/usr/bin/python3"}, 1, "not Apptainer on "),
    ):
        found = refused(room, room.settings(**fields), {})
        assert found[0] == code and words in found[1]


def test_home_may_be_unwritable(room: Any) -> None:
    """Nothing of ours or of Apptainer's writes to the home."""
    before = sorted(os.listdir(room.person.home))
    host = {"HOME": "/proc/1", "PATH": os.environ["PATH"]}
    code = "os.makedirs(os.path.expanduser('~/x')); answer = os.path.expanduser('~')"
    assert room.python(room.settings(), code, host_env=host) == f"{SCRATCH}/home"
    assert sorted(os.listdir(room.person.home)) == before
