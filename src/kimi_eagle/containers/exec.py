"""The command line and the environment of a job inside an Apptainer image.

From typed settings to an argument list, never through a shell line: paths with blanks, commas or
quotes arrive as they are, or are refused with one line. Reads nothing but what `check_usable` looks
at, writes nothing but the folders of `make_scratch`. Which image, and whether it is the right one,
is decided elsewhere.

The choices, each seen with Apptainer 1.4.5 (tests/containers_room holds the tables):

- `--cleanenv` and an allow-list (`ALLOWED`): what a login shell exports must not change results.
- Variables travel as APPTAINERENV_NAME in the environment of the apptainer process. `--env` breaks
  at commas, quotes and equals signs, and shows secrets in the list of processes.
- `--no-eval`: without it Apptainer runs `$(...)` in values and eats backslashes.
- `--mount` with every field quoted: `--bind` breaks at commas, colons and backslashes.
- No home, no working directory of the host. ~/.local would be found through any of the two.
- Host's /dev, /dev/shm, /tmp and process ids stay. NCCL and vLLM want the shared memory and the
  network devices; claims name process ids that other workers of the same node look up. This is why
  it is not `--containall`.
- All that programs cache or write aside goes to one folder of the node, seen inside as `SCRATCH`:
  a short path whatever it is called outside, because a socket's path has 107 characters at most.
"""

from __future__ import annotations

import csv
import io
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from kimi_eagle.errors import RunError, UsageError

SCRATCH = "/eagle"
"""Where the job's scratch folder is seen inside."""

ALLOWED = {
    "SLURM_*": "the job, its nodes and ranks",
    "SLURMD_NODENAME": "this node's name, by which the others reach it",
    "CUDA_*": "which GPUs this job was given (CUDA_VISIBLE_DEVICES) and how CUDA numbers them",
    "GPU_DEVICE_ORDINAL": "the same, as Slurm sets it for OpenCL",
    "NCCL_*": "interfaces and transports between GPUs, set by the site",
    "TORCH_NCCL_*": "torch's time limits and traces of NCCL",
    "GLOO_*": "gloo's interface, set by the site",
    "UCX_*": "the same for UCX",
    "FI_*": "the same for libfabric",
    "MASTER_ADDR": "torchrun's meeting point, where a site sets it",
    "MASTER_PORT": "its port",
    "OMP_*": "threads and their places (OMP_NUM_THREADS, OMP_PROC_BIND)",
    "MKL_NUM_THREADS": "threads of MKL",
    "KIMI_EAGLE_*": "what host.sh tells the stage: stop file, beacon, role, job",
    "TZ": "the time zone of logs",
}
"""Variables of the host that get in, with the reason; `*` at the end stands for any rest."""

NEVER = (
    *("PYTHON*", "LD_*", "PIP_*", "CONDA_*", "VIRTUAL_ENV"),  # another Python's modules
    *("APPTAINER*", "SINGULARITY*"),  # would change what Apptainer does
    *("HOME", "PATH", "APPEND_PATH", "PREPEND_PATH", "USER_PATH", "BASH_*", "ENV", "IFS"),
    # The host's CUDA, which is not in the image, and libraries that CUDA would load by path.
    *("CUDA_HOME", "CUDA_PATH*", "CUDA_ROOT", "CUDA_BIN_PATH", "CUDA_INC_PATH", "CUDA_LIB_PATH"),
    *("CUDA_TOOLKIT*", "CUDA_INJECTION*"),
    "SLURM_JWT",  # a key to the cluster; nothing in a container talks to Slurm
)
"""Variables that no list lets in, whatever else says so."""

FIXED = {
    "TMPDIR": f"{SCRATCH}/tmp",
    "XDG_CACHE_HOME": f"{SCRATCH}/cache",
    "XDG_CONFIG_HOME": f"{SCRATCH}/config",
    "HF_HOME": f"{SCRATCH}/cache/hf",
    "HF_HUB_CACHE": f"{SCRATCH}/cache/hf/hub",
    "TRITON_CACHE_DIR": f"{SCRATCH}/cache/triton",
    "TORCHINDUCTOR_CACHE_DIR": f"{SCRATCH}/cache/inductor",
    "VLLM_CACHE_ROOT": f"{SCRATCH}/cache/vllm",
    "VLLM_CONFIG_ROOT": f"{SCRATCH}/config/vllm",
    "FLASHINFER_WORKSPACE_BASE": f"{SCRATCH}/cache",  # it adds .cache/flashinfer itself
    "NUMBA_CACHE_DIR": f"{SCRATCH}/cache/numba",
    "MPLCONFIGDIR": f"{SCRATCH}/cache/matplotlib",
    "CUDA_CACHE_PATH": f"{SCRATCH}/cache/cuda",
    "HF_HUB_OFFLINE": "1",
    "PYTHONNOUSERSITE": "1",
    "PYTHONSAFEPATH": "1",  # a file torch.py in the working directory is not torch
    "LANG": "C.UTF-8",
}
"""Variables that each job has inside, whatever host and image say."""

_OWN = ("PATH", "USER", "LOGNAME", "KIMI_EAGLE_PAYLOAD")
"""What the apptainer process itself keeps; by KIMI_EAGLE_PAYLOAD host.sh ends what is left of a
stage. Not so squashfuse, which serves a user's image from a process of its own, without any of our
variables: a killed apptainer or payload leaves it until the end of the Slurm job."""

_FOLDERS = ("home", "tmp", "apptainer")
"""Folders of the scratch folder that have to be there beforehand; programs make the others."""

_SYSTEM_TARGETS = ("/proc", "/sys", "/dev", "/.singularity.d", SCRATCH)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Mount:
    """A folder or file of the host that a job sees inside."""

    source: str
    target: str
    read_only: bool = True

    def __post_init__(self) -> None:
        _path(self.source, "mount source")
        target = _path(self.target, "mount target")
        if target == "/" or any(target == s or target.startswith(s + "/") for s in _SYSTEM_TARGETS):
            raise UsageError(
                f"mount target {self.target!r} would hide what a job needs",
                expected=f"another path than / and none in {', '.join(_SYSTEM_TARGETS)}",
            )


@dataclass(frozen=True)
class ExecSettings:
    """How a job's process is started in an image; refuses at once what can never work."""

    image: str
    """SIF file or sandbox folder, absolute."""
    scratch: str
    """Folder on the node's own disk, this user's alone; seen inside as `SCRATCH`."""
    apptainer: str = "apptainer"
    """Name or path of the program."""
    gpus: bool = False
    """Bring the host's NVIDIA driver in (`--nv`)."""
    mounts: tuple[Mount, ...] = ()
    """What is seen of the host; nothing else is, but the system's own folders and /tmp."""
    workdir: str = SCRATCH
    """Working directory inside; has to exist there."""
    allow: tuple[str, ...] = ()
    """Further variables of the host to let in, besides `ALLOWED`: `NAME` or `PREFIX*`."""
    secrets: tuple[str, ...] = ()
    """Names of variables that have to get in and are shown nowhere."""
    shm_bytes: int = 0
    """What the job wants in /dev/shm."""

    def __post_init__(self) -> None:
        _path(self.image, "image")
        _path(self.scratch, "scratch")
        _path(self.workdir, "working directory")
        if not self.apptainer or self.apptainer.startswith("-"):
            raise UsageError(f"not a program: {self.apptainer!r}", expected="apptainer or its path")
        seen: set[str] = set()
        for mount in self.mounts:
            if (target := os.path.normpath(mount.target)) in seen:
                raise UsageError(f"two mounts for {mount.target!r}", expected="one a target")
            seen.add(target)
        for name in (*self.allow, *self.secrets):
            if not _NAME.fullmatch(name if name in self.secrets else name.removesuffix("*")):
                raise UsageError(f"not a name of a variable: {name!r}", expected="NAME or PREFIX*")
            if _matches(name, (*NEVER, *FIXED)):
                raise UsageError(
                    f"the variable {name!r} never gets into a container",
                    expected="none that changes Python, its libraries, Apptainer or our caches",
                )


def exec_argv(settings: ExecSettings, command: Iterable[str]) -> list[str]:
    """The whole command line; holds no secret, so it may be shown and stored."""
    argv = [settings.apptainer, "-q", "exec", "--cleanenv", "--no-eval", "--no-home"]
    # `--no-home` still lets the folder in when the working directory is below it.
    argv += ["--no-mount", "home,cwd,hostfs", "--home", f"{SCRATCH}/home"]
    if settings.gpus:
        argv.append("--nv")
    argv += ["--mount", _mount_text(settings.scratch, SCRATCH, read_only=False)]
    # The outer folder first: mounted later it would hide the inner one.
    for mount in sorted(settings.mounts, key=lambda m: os.path.normpath(m.target).count("/")):
        argv += ["--mount", _mount_text(mount.source, mount.target, mount.read_only)]
    return [*argv, "--pwd", settings.workdir, settings.image, *command]


def environment(settings: ExecSettings, host_env: Mapping[str, str]) -> dict[str, str]:
    """The environment of the apptainer process, which decides the one inside.

    host_env: where the job runs, with the secrets. RunError where a named secret is not in it.
    """
    if missing := [name for name in settings.secrets if name not in host_env]:
        raise RunError(
            f"secret not set: {', '.join(missing)}", fix=f"export {missing[0]} before you submit"
        )
    wanted = (*ALLOWED, *settings.allow, *settings.secrets)
    inside = {
        name: value
        for name, value in host_env.items()
        # One odd name, such as a.b, and Apptainer lets no variable in at all, without a word.
        if _NAME.fullmatch(name) and _matches(name, wanted) and not _matches(name, NEVER)
    } | FIXED
    for name, value in inside.items():
        if not _is_utf8(value):  # Apptainer would put signs of its own in their place, silently
            raise RunError(f"the value of {name} is not UTF-8", fix=f"unset or mend {name}")
    own = {name: host_env[name] for name in _OWN if name in host_env}
    own = {"PATH": os.defpath} | own | _aside(settings)
    return own | {f"APPTAINERENV_{name}": value for name, value in inside.items()}


def _aside(settings: ExecSettings) -> dict[str, str]:
    """Where the apptainer process writes; it would make ~/.apptainer."""
    folder = f"{settings.scratch}/apptainer"
    names = ("APPTAINER_CONFIGDIR", "APPTAINER_CACHEDIR", "APPTAINER_TMPDIR")
    return {"HOME": settings.scratch} | dict.fromkeys(names, folder)


_NODE_SCRIPT = """\
#!/usr/bin/env bash
# Starts a command in the image: bash FILE COMMAND...
# Written by kimi-eagle; what it lets in and why is in its containers/exec.py.
set -u
for ke_name in {secrets}; do
    [ -n "${{!ke_name+set}}" ] && continue
    echo "secret not set: $ke_name; fix: export it before you submit" >&2
    exit 2
done
unset ke_names ke_values ke_odd # ours, whatever the host calls its own
while IFS= read -rd '' ke_line; do
    ke_name=${{ke_line%%=*}}
    [[ $ke_name =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] || {{ ke_odd+=(-u "$ke_name"); continue; }}
    case $ke_name in
        {never}) ;;
        {wanted}) ke_names+=("$ke_name") ke_values+=("${{ke_line#*=}}") ;;
    esac
    case $ke_name in {own} | ke_*) ;; *) unset "$ke_name" 2>/dev/null ;; esac
done < <(env -0)
for ke_i in "${{!ke_names[@]}}"; do
    export "APPTAINERENV_${{ke_names[ke_i]}}=${{ke_values[ke_i]}}"
done
export {fixed}
(umask 077 && mkdir -p {folders}) || exit 1
exec env "${{ke_odd[@]}}" {argv} "$@"
"""


def node_script(settings: ExecSettings) -> str:
    """Shell text that does on a node without our Python what the other functions do.

    `bash FILE COMMAND...` becomes the apptainer process: its process id, signals and exit code are
    the script's. The text holds names of secrets only. Exit 2: a secret is not set.
    """

    def words(names: Iterable[str]) -> str:
        return " ".join(map(shlex.quote, names))

    inside = {f"APPTAINERENV_{name}": value for name, value in FIXED.items()}
    return _NODE_SCRIPT.format(
        secrets=words(settings.secrets),
        never=" | ".join(NEVER),
        wanted=" | ".join((*ALLOWED, *settings.allow, *settings.secrets)),
        own=" | ".join(_OWN),
        fixed=words(f"{name}={value}" for name, value in (inside | _aside(settings)).items()),
        folders=words(f"{settings.scratch}/{name}" for name in _FOLDERS),
        argv=words(exec_argv(settings, ())),
    )


def make_scratch(settings: ExecSettings) -> None:
    """The scratch folder, with what has to be there before a job starts."""
    try:
        for name in ("", *_FOLDERS):
            Path(settings.scratch, name).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as e:
        raise RunError(f"scratch cannot be used: {e.strerror}", where=settings.scratch) from None


def check_usable(settings: ExecSettings) -> None:
    """Refuse, on the machine where the job is to run, what would fail there; starts no container.

    UsageError for settings that are wrong, RunError for a machine that lacks something.
    """
    _check_program(settings.apptainer)
    _check_image(Path(settings.image))
    for mount in settings.mounts:
        if not os.path.exists(mount.source):
            raise UsageError("mount source does not exist", where=repr(mount.source))
        if not os.access(mount.source, os.R_OK):
            raise UsageError("mount source cannot be read", where=repr(mount.source))
    if settings.shm_bytes:
        shm = os.statvfs("/dev/shm")
        if (free := shm.f_bavail * shm.f_frsize) < settings.shm_bytes:
            raise RunError(
                f"{free / 1e9:.1f} GB free, {settings.shm_bytes / 1e9:.1f} GB wanted",
                where="/dev/shm",
                fix="ask the site for a larger /dev/shm, or remove what earlier jobs left there",
            )


def _check_program(name: str) -> None:
    program = shutil.which(name)
    if program is None:
        raise RunError(
            f"no program {name!r}", fix="sudo bash containers/install-apptainer.sh, or module load"
        )
    done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60)
    said = (done.stdout or done.stderr).strip()
    # Singularity reads no APPTAINERENV_*: jobs would run without any of their variables.
    if done.returncode or not said.startswith("apptainer version"):
        raise RunError(f"this is not Apptainer: {said[:80]!r}", where=program, expected="Apptainer")


def _check_image(image: Path) -> None:
    if image.is_dir():
        if not (image / ".singularity.d").is_dir():
            raise UsageError(
                "not a sandbox: it has no .singularity.d",
                where=image,
                fix=f"apptainer build --sandbox NEW {image}",
            )
        return
    try:
        with image.open("rb") as file:
            head = file.read(48)
    except FileNotFoundError:
        raise UsageError("no such image", where=image) from None
    except OSError as e:
        raise UsageError(f"image cannot be read: {e.strerror}", where=image) from None
    if head[32:41] != b"SIF_MAGIC":
        raise UsageError(
            "not an image", where=image, expected="a SIF file or a sandbox of apptainer build"
        )


def _path(text: str, what: str) -> str:
    """The path without needless slashes; UsageError for one that would not arrive as it is."""
    if not text.startswith("/") or ".." in text.split("/"):
        raise UsageError(f"{what} {text!r}", expected="an absolute path without ..")
    if "\0" in text or "\r" in text or not _is_utf8(text):
        # Apptainer turns \r\n into \n and other bytes into U+FFFD: it would take another folder.
        raise UsageError(f"{what} {text!r}", expected="a path in UTF-8 without carriage returns")
    return os.path.normpath("/" + text.lstrip("/"))


def _mount_text(source: str, target: str, read_only: bool) -> str:
    """One value of `--mount`: a line of CSV, which Apptainer reads with Go's encoding/csv."""
    line = io.StringIO()
    fields = ["type=bind", f"source={source}", f"destination={target}"]
    fields += ["ro"] if read_only else []
    csv.writer(line, quoting=csv.QUOTE_ALL, lineterminator="").writerow(fields)
    return line.getvalue()


def _matches(name: str, patterns: Iterable[str]) -> bool:
    """Patterns have no signs that fnmatch knows but the `*` at the end."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
