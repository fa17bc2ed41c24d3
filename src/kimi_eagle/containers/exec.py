"""The command line and the environment of a job inside an Apptainer image.

From typed settings to a shell script that a node without our Python runs: `node_script`. Every word
of it is an argument of its own, so that paths with blanks, commas or quotes arrive as they are, or
are refused with one line. Which image, and whether it is the right one, is decided elsewhere.

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
- The script becomes the apptainer process (exec): its process id, signals and exit code are the
  job's. That is why nobody is left to remove the folder: slurm/host.sh does, and each start removes
  what killed ones of the same user left on its node.
"""

from __future__ import annotations

import csv
import io
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

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
    "TERM": "what the terminal can show, for progress bars",
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

_SYSTEM_TARGETS = (
    *("/proc", "/sys", "/dev", "/.singularity.d", SCRATCH),
    *("/opt/kimi-eagle", "/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc"),  # the image's code
)
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
        hides = any(target == s or target.startswith(s + "/") for s in _SYSTEM_TARGETS)
        if hides or target in ("/", "/opt"):
            raise UsageError(
                f"mount target {self.target!r} would hide what a job needs",
                expected=f"another path than /, /opt and {', '.join(_SYSTEM_TARGETS)}",
            )


@dataclass(frozen=True)
class ExecSettings:
    """How a job's process is started in an image; refuses at once what can never work."""

    image: str
    """SIF file or sandbox folder, absolute."""
    sha256: str = ""
    """Digest that the image must have; empty: it is not looked at (a sandbox has none)."""
    proven: str = ""
    """File of lines `SHA256 SIZE MTIME CTIME INODE` of images whose digest was computed; absolute,
    and writable where jobs run."""
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
        if self.sha256:
            _path(self.proven, "list of proven images")
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


def exec_argv(settings: ExecSettings, scratch: str, command: Iterable[str]) -> list[str]:
    """The whole command line; holds no secret, so it may be shown and stored.

    scratch: folder on the node's own disk, this user's alone; seen inside as `SCRATCH`.
    """
    argv = [settings.apptainer, "-q", "exec", "--cleanenv", "--no-eval", "--no-home"]
    # `--no-home` still lets the folder in when the working directory is below it.
    argv += ["--no-mount", "home,cwd,hostfs", "--home", f"{SCRATCH}/home"]
    if settings.gpus:
        argv.append("--nv")
    argv += ["--mount", mount_text(scratch, SCRATCH, read_only=False)]
    # The outer folder first: mounted later it would hide the inner one.
    for mount in sorted(settings.mounts, key=lambda m: os.path.normpath(m.target).count("/")):
        argv += ["--mount", mount_text(mount.source, mount.target, mount.read_only)]
    return [*argv, "--pwd", settings.workdir, settings.image, *command]


_HERE = "{scratch of this job}"
"""Stands for the scratch folder until the script knows its name."""

_NODE_SCRIPT = """\
#!/usr/bin/env bash
# Starts a command in the image: bash FILE ARGUMENTS...
# Written by kimi-eagle; what it lets in and why is in its containers/exec.py.
set -u
unset -f $(compgen -A function) # exported by a login shell, they would stand for commands
unset "${{!LD_@}}"
ke_refuse() {{ echo "error: $1" >&2; exit "${{2:-2}}"; }} # 2: trying again would change nothing
ke_mount=${{KIMI_EAGLE_MOUNT:-}}
{checks}for ke_name in {secrets}; do
    [ -n "${{!ke_name+set}}" ] || [ "${{KIMI_EAGLE_SECRETS:-}}" = optional ] ||
        ke_refuse "secret not set: $ke_name; fix: export it before you submit"
done
ke_base=${{TMPDIR:-/tmp}}
[[ $ke_base == /* && $ke_base != *[\\"$'\\r']* && -d $ke_base && -w $ke_base ]] || ke_base=/tmp
# By its name a folder belongs to a process of one machine and namespace: ke_base may be shared.
ke_here=$(echo "$(uname -n) $(readlink /proc/self/ns/pid)" | cksum) && ke_here=${{ke_here%% *}}
for ke_old in "$ke_base/ke-$UID-"*"-$ke_here-"*; do # of killed jobs
    [ -O "$ke_old" ] && ! [ -e "/proc/${{ke_old##*-}}" ] || continue
    grep -qsF "${{ke_old##*/}} " /proc/[0-9]*/mountinfo || rm -rf "$ke_old" # a child may use it
done
ke_scratch=$ke_base/ke-$UID-${{KIMI_EAGLE_PAYLOAD:-}}-$ke_here-$$
rm -rf "$ke_scratch" && (umask 077 && mkdir "$ke_scratch" && cd "$ke_scratch" && mkdir {folders}) ||
    ke_refuse "no scratch folder in $ke_base; fix: set scratch in the site file" 1
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
# Apptainer would put signs of its own in the place of other bytes, silently.
ke_utf8() {{ printf '%s\\n' "$@" | iconv -f UTF-8 -t UTF-8 >/dev/null 2>&1; }}
for ke_i in "${{!ke_names[@]}}"; do
    export "APPTAINERENV_${{ke_names[ke_i]}}=${{ke_values[ke_i]}}"
done
if command -v iconv >/dev/null && ! ke_utf8 "${{ke_values[@]-}}"; then
    for ke_i in "${{!ke_names[@]}}"; do
        ke_utf8 "${{ke_values[ke_i]}}" ||
            ke_refuse "the value of ${{ke_names[ke_i]}} is not UTF-8; fix: unset or mend it"
    done
fi
export {fixed}
exec env ${{ke_odd[@]+"${{ke_odd[@]}}"}} {program} \\
    ${{ke_mount:+--mount "$ke_mount"}} {options} "$@"
"""

_CHECK_IMAGE = """\
ke_image={image} ke_sha256={sha256} ke_proven={proven}
ke_stat=$(LC_ALL=C stat -Lc '%s %.9Y %.9Z %i' "$ke_image" 2>/dev/null) ||
    ke_refuse "$ke_image: no such image on $(hostname)"
[ -n "$ke_stat" ] || ke_refuse "stat says nothing on $(hostname)" 1
grep -qsxF "$ke_sha256 $ke_stat" "$ke_proven" || {{
    ke_found=$(sha256sum <"$ke_image") || ke_refuse "$ke_image cannot be read on $(hostname)" 1
    [ "${{ke_found%% *}}" = "$ke_sha256" ] ||
        ke_refuse "$ke_image is not the run's image: sha256 $ke_found; expected $ke_sha256"
    echo "$ke_sha256 $ke_stat" >>"$ke_proven" || true
}}
export KIMI_EAGLE_IMAGE=sha256:$ke_sha256
"""

_CHECK_SHM = """\
ke_free=$(df -B1 --output=avail /dev/shm | tail -n 1)
[ "$ke_free" -ge {bytes} ] ||
    ke_refuse "/dev/shm on $(hostname): $ke_free bytes free; expected {bytes} (container.shm_gib)" 1
"""

_CHECK_PROGRAM = """\
ke_said=$({apptainer} --version 2>/dev/null) || ke_said="no program "{apptainer}
# Singularity reads no APPTAINERENV_*: jobs would run without any of their variables.
[[ $ke_said == "apptainer version"* ]] ||
    ke_refuse "not Apptainer on $(hostname): $ke_said; fix: preamble in the site file" 1
"""


def node_script(settings: ExecSettings, command: Iterable[str] = ()) -> str:
    """Shell text that starts `command` in the image, on a node that needs no Python of ours.

    `bash FILE ARGUMENTS...` becomes the apptainer process. The text holds names of secrets only.
    KIMI_EAGLE_MOUNT in its environment is one more `mount_text`; with KIMI_EAGLE_SECRETS=optional a
    secret may be missing.
    Exit 2: it will not work anywhere (another image, a secret not set); 1: not on this node.
    """

    def words(names: Iterable[str]) -> str:
        quoted = (shlex.quote(name) for name in names)
        # A brace makes shlex quote the word, so that the name stands between single quotes.
        return " ".join(quoted).replace(_HERE, "'\"$ke_scratch\"'")

    checks = _CHECK_PROGRAM.format(apptainer=shlex.quote(settings.apptainer))
    if settings.sha256:
        parts = {"image": settings.image, "sha256": settings.sha256, "proven": settings.proven}
        checks += _CHECK_IMAGE.format(**{k: shlex.quote(v) for k, v in parts.items()})
    if settings.shm_bytes:
        checks += _CHECK_SHM.format(bytes=settings.shm_bytes)
    argv = exec_argv(settings, _HERE, command)
    inside = {f"APPTAINERENV_{name}": value for name, value in FIXED.items()}
    # Where the apptainer process itself writes; it would make ~/.apptainer.
    aside = ("APPTAINER_CONFIGDIR", "APPTAINER_CACHEDIR", "APPTAINER_TMPDIR")
    inside |= {"HOME": _HERE} | dict.fromkeys(aside, f"{_HERE}/apptainer")
    return _NODE_SCRIPT.format(
        checks=checks,
        secrets=words(settings.secrets),
        never=" | ".join(NEVER),
        wanted=" | ".join((*ALLOWED, *settings.allow, *settings.secrets)),
        own=" | ".join(_OWN),
        fixed=words(f"{name}={value}" for name, value in inside.items()),
        folders=words(_FOLDERS),
        program=words(argv[:3]),
        options=words(argv[3:]),
    )


def check_program(name: str) -> str:
    """Where the program is; RunError where it is not there, or is no Apptainer."""
    program = shutil.which(name)
    if program is None:
        raise RunError(
            f"no program {name!r}", fix="sudo bash containers/install-apptainer.sh, or module load"
        )
    done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60)
    said = (done.stdout or done.stderr).strip()
    if done.returncode or not said.startswith("apptainer version"):
        raise RunError(f"this is not Apptainer: {said[:80]!r}", where=program, expected="Apptainer")
    return program


def _path(text: str, what: str) -> str:
    """The path without needless slashes; UsageError for one that would not arrive as it is."""
    if not text.startswith("/") or ".." in text.split("/"):
        raise UsageError(f"{what} {text!r}", expected="an absolute path without ..")
    if "\0" in text or "\r" in text or _HERE in text or not _is_utf8(text):
        # Apptainer turns \r\n into \n and other bytes into U+FFFD: it would take another folder.
        raise UsageError(f"{what} {text!r}", expected="a path in UTF-8 without carriage returns")
    return os.path.normpath("/" + text.lstrip("/"))


def mount_text(source: str, target: str, read_only: bool) -> str:
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
