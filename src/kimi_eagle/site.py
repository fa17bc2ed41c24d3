"""The site file: where a run takes place, as one typed, frozen object read from one TOML file.

Reads `slurm/sites/*.toml`; writes nothing and asks Slurm nothing (`kimi-eagle site check` does).
What a run does is the recipe's matter. Every field has its meaning, unit and default here.

Values end up in `#SBATCH` lines, in argument lists and in paths. Each is held to the letters that
Slurm itself takes for it, so that nothing can add a directive or a command of its own; the price is
that names with blanks or letters beyond ASCII are refused. Only `preamble` is shell, on purpose.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from kimi_eagle.errors import UsageError
from kimi_eagle.recipe import STAGES
from kimi_eagle.typed_toml import Section, read_toml, validated

MAX_TEXT, MAX_LINE = 1_000, 4_000
"""Characters of a value, and of a line of `preamble`: more is a slip, not a setting."""

_OWN_KEYS = {
    "partition": "partition p",
    "account": "account A",
    "qos": "qos q",
    "reservation": "reservation",
    "constraint": "constraint C",
    "gpu_request and gpu_type": "gres gpus G gpus-per-node gpus-per-socket gpus-per-task"
    " tres-per-task tres-per-node tres-per-job tres-per-socket",
    "cpus": "cpus-per-task c cpus-per-gpu",
    "memory": "mem mem-per-cpu mem-per-gpu",
    "exclusive": "exclusive oversubscribe s share",
    "time or times": "time t time-min",
    "grace_seconds": "signal",
    "requeue": "requeue no-requeue",
    "max_array": "array a",
    "apptainer": "container",
    "preamble": "export export-file",
}
_OTHER_OWN = {
    "[slurm] nodes in the recipe": "nodes N nodefile F",
    "[notify] in the recipe": "mail-type mail-user",
    "nothing: the launcher sets it": "job-name J output o error e open-mode comment dependency d"
    " kill-on-invalid-dep ntasks n ntasks-per-node ntasks-per-core ntasks-per-gpu"
    " ntasks-per-socket ntasks-per-tres tasks tasks-per-node wrap",
    "nothing: the launcher reads what sbatch prints": "parsable quiet Q verbose v test-only wait W"
    " help h usage version V clusters M cluster",
}
OWN = {
    name: f"use {instead}" if instead.startswith(("[", "nothing")) else f"use the key {instead}"
    for instead, names in (_OWN_KEYS | _OTHER_OWN).items()
    for name in names.split()
}
"""sbatch options (long names and letters) that `extra` may not hold, and what to use instead."""


def _refuse(expected: str) -> PydanticCustomError:
    return PydanticCustomError("site_value", "{words}", {"words": f"expected {expected}"})


def _text(pattern: str, expected: str) -> Any:
    """Text that matches the whole pattern; `expected` says in words what that is."""
    compiled = re.compile(pattern)

    def check(value: str) -> str:
        # fullmatch: "$" would let a newline at the end pass.
        if not compiled.fullmatch(value):
            raise _refuse(expected)
        return value

    return Annotated[str, AfterValidator(check)]


_WORD = r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,127}"
Name = _text(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "letters, digits, dots, dashes; 64 at most")
Names = _text(rf"{_WORD}(,{_WORD}){{0,31}}", "a name, or names with commas and no blanks between")
Account = _text(r"[A-Za-z0-9_][A-Za-z0-9_.@:/+-]{0,127}", "one account as sacctmgr shows it")
Memory = _text(r"0|[1-9][0-9]{0,11}[KMGTkmgt]?", 'Slurm\'s form: "900G", "512000M", or "0" for all')
Interfaces = _text(
    r"[A-Za-z0-9][A-Za-z0-9_.:@-]{0,31}(,[A-Za-z0-9][A-Za-z0-9_.:@-]{0,31}){0,15}",
    'names as `ip link` shows them, with commas between: "ib0"',
)
Variable = _text(r"[A-Za-z_][A-Za-z0-9_]{0,99}\*?", "NAME or PREFIX*")
GpuType = _text(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}", 'a type as sinfo shows it: "h200"')


def _constraint(value: str) -> str:
    words = "features with & | *N between, at most one pair of [ ], ( ) around groups, no blanks"
    if not re.fullmatch(r"[A-Za-z0-9_(\[][A-Za-z0-9_.,:=+&|()\[\]*/-]{0,499}", value):
        raise _refuse(words)
    # A bracket left open makes Slurm read on.
    bare = re.sub(r"[^()\[\]]", "", value)
    while bare != (bare := bare.replace("()", "").replace("[]", "")):
        pass
    if bare or value.count("[") > 1:
        raise _refuse(words)
    return value


def minutes(text: str) -> int:
    """Minutes of a Slurm time text, rounded up as Slurm does.

    MM, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS. UsageError for anything else, for no limit
    (`0`, `UNLIMITED`: a job must know when to leave) and for more than a year.
    """
    found = re.fullmatch(r"(?:(\d{1,5})-)?(\d{1,7})(?::(\d{1,5}))?(?::(\d{1,5}))?", text, re.ASCII)
    if found is None:
        raise UsageError(f"not a time: {text[:80]!r}", expected=_TIME_WORDS)
    days, *rest = found.groups()
    parts = [int(p) for p in rest if p is not None]
    if days is not None:
        hours, mins, secs = (parts + [0, 0])[:3]
        total = ((int(days) * 24 + hours) * 60 + mins) * 60 + secs
    elif len(parts) == 3:
        total = (parts[0] * 60 + parts[1]) * 60 + parts[2]
    else:
        total = parts[0] * 60 + (parts[1] if len(parts) == 2 else 0)
    if not 0 < total <= 366 * 86_400:
        raise UsageError(f"time {text!r} is out of range", expected="more than 0, at most a year")
    return -(-total // 60)


_TIME_WORDS = "MM, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS"


def _time(value: str) -> str:
    try:
        minutes(value)
    except UsageError as e:
        raise _refuse(e.expected) from None
    return value


def _path(value: str) -> str:
    # Refused is what ends a mount or a quotation and what a shell would expand. Blanks and letters
    # of any script are paths: they pass intact.
    value = os.path.expanduser(value) if value.startswith("~/") else value
    if not (value.isprintable() and re.fullmatch(r"/[^,:\"'`$\\*?]*", value)):
        raise _refuse(
            "an absolute path without quotes, commas, colons, $, \\, *, ? or control signs"
        )
    return value


def _program(value: str) -> str:
    return value if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,63}", value) else _path(value)


def _mount(value: str) -> str:
    source, *rest = value.split(":")
    mode = rest.pop() if len(rest) == 2 else "rw"
    if len(rest) > 1 or mode not in ("ro", "rw"):
        raise _refuse("SRC, SRC:DST or SRC:DST:ro (or rw)")
    return ":".join([_path(source), *map(_path, rest), *value.split(":")[2:]])


def _shell_line(value: str) -> str:
    if not value.replace("\t", " ").isprintable():
        raise _refuse("one line of shell an item: no line ends or control characters")
    if (len(value) - len(value.rstrip("\\"))) % 2:
        raise _refuse("no backslash at the end: it would swallow the line that follows")
    # sbatch reads directives until the first line that is no comment: such a line would be one.
    if re.match(r"\s*#\s*(SBATCH|PBS|BSUB)", value, re.IGNORECASE):
        raise _refuse("shell, not a directive: directives belong into extra")
    return value


def _extra(value: str) -> str:
    short = re.match(r"-([A-Za-z])(?![A-Za-z0-9_-])", value) or re.match(r"-([A-Za-z])", value)
    if short:
        raise _refuse(f"--key=value or --flag; {OWN.get(short[1], 'write the long name')}")
    found = re.match(r"--([A-Za-z][A-Za-z0-9_-]*)", value)
    # `_` counts as `-`, and sbatch takes any beginning of a name that fits only one option.
    name = found[1].replace("_", "-") if found else ""
    ours = next((own for own in OWN if len(own) > 1 and own.startswith(name)), None)
    if found and ours:
        what = f"--{ours} is" if name == ours else f"--{name} may be read as --{ours}, which is"
        raise _refuse(f"none of our own directives: {what} set by kimi-eagle; {OWN[ours]}")
    if not re.fullmatch(r"--[A-Za-z][\w-]{0,63}(=[\w.,:@%+=/&|!()\[\]*-]+)?", value, re.ASCII):
        raise _refuse("--key=value or --flag, without blanks, quotes or shell characters")
    return value


Time = Annotated[str, AfterValidator(_time)]
Path_ = Annotated[str, AfterValidator(_path)]


class CpuSection(Section):
    """What differs for jobs of stages without GPUs (`[slurm] cpu_stages` of the recipe).

    The site's constraint and reservation are about GPU nodes and are left out of these jobs.
    """

    partition: Names | None = None
    """Partition of these jobs; unset: the site's."""
    account: Account | None = None
    """Account of these jobs; unset: the site's."""
    qos: Names | None = None
    """QOS of these jobs; unset: the site's."""
    cpus: int | None = Field(default=None, ge=1, le=65_535)
    """CPUs of a node; unset: what Slurm gives."""
    memory: Memory | None = None
    """Memory of a node; unset: the partition's default."""
    exclusive: bool = False
    """Take the whole node."""


class Site(Section):
    """A whole site file; `load_site` reads one."""

    name: Name
    """What the site is called in messages and in the book of jobs; default the file's name."""
    partition: Names | None = None
    """Partition, or several with commas (the first that can start takes it); unset: the default."""
    account: Account | None = None
    """Account that is charged; unset: the user's default."""
    qos: Names | None = None
    """Quality of service; unset: the default."""
    reservation: Names | None = None
    """Reservation to run in."""
    constraint: Annotated[str, AfterValidator(_constraint)] | None = None
    """Node features as `--constraint` takes them, such as `h200&ib`."""
    gpu_request: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    """How GPUs are asked for: `--gpus-per-node=8`, `--gres=gpu:8`, or not at all (whole nodes)."""
    gpu_type: GpuType | None = None
    """Type in the request (`gpu:h200:8`, `h200:8`); unset: any."""
    gpu_memory_gib: float | None = Field(default=None, gt=0, le=10_000)
    """Memory of one GPU, GiB, as nvidia-smi shows it (MiB / 1024), for `kimi-eagle check`; unset:
    what is known of gpu_type, if anything."""
    load_gib_per_second: float | None = Field(default=None, gt=0, le=10_000)
    """GiB a second that a node reads of the verifier's file system, for `kimi-eagle check`; unset:
    [slurm] engine_load_minutes of the recipe alone tells how long a load takes."""
    cpus: int | None = Field(default=None, ge=1, le=65_535)
    """CPUs of each node of a job; unset: what Slurm gives, often a single one."""
    memory: Memory | None = None
    """Memory of each node: `900G`, or `0` for all of it; unset: the partition's default."""
    exclusive: bool = False
    """Take whole nodes: nobody else's jobs beside ours."""
    time: Time = "24:00:00"
    """Time limit of a job. Work goes on in the next job: shorter limits often start sooner."""
    times: dict[str, Time] = {}
    """Time limits of single stages; a job of several stages takes the longest."""
    grace_seconds: int = Field(default=300, ge=1, le=65_535)
    """Seconds before the time limit at which a job is told to commit its unit and leave; a quarter
    of the limit where that is less."""
    mounts: tuple[Annotated[str, AfterValidator(_mount)], ...] = ()
    """Folders that jobs see in the container: `SRC`, `SRC:DST`, `SRC:DST:ro`. Not looked up here:
    they may be on compute nodes only."""
    preamble: tuple[Annotated[str, AfterValidator(_shell_line)], ...] = ()
    """Lines of shell that run in each job before anything else (`module load ...`): shell on
    purpose, so only from people you trust; readable in the run, so no secrets."""
    scratch: Path_ | None = None
    """Folder on the node's own disk for what need not outlive a job; unset: TMPDIR."""
    network_interface: Interfaces | None = None
    """Interface for traffic between nodes (NCCL, gloo), such as `ib0`; unset: they choose."""
    image: Path_ | None = None
    """SIF file that jobs run in, pinned by `kimi-eagle image lock`; unset: the Python that submits,
    which then has to be on every node."""
    apptainer: Annotated[str, AfterValidator(_program)] | None = None
    """Path or name of apptainer (not singularity); unset: the one in PATH."""
    env: tuple[Variable, ...] = ()
    """Further variables of your shell that jobs see in the image: `NAME` or `PREFIX*`."""
    max_array: int | None = Field(default=None, ge=1, le=4_000_000)
    """Slurm's MaxArraySize: arrays stay below it, larger ones are split. Unset: 1001, as Slurm."""
    max_jobs: int | None = Field(default=None, ge=1, le=4_000_000)
    """Jobs, array tasks included, that one user may have in the queue; unset: no limit known."""
    requeue: bool = True
    """A job at its time limit puts itself back into the queue. False where that is forbidden."""
    chain: int = Field(default=0, ge=0, le=1_000)
    """Follow-up jobs a worker, submitted with it, where requeue or scontrol is not to be had."""
    squeue_updates: bool = True
    """Show progress in the job's name and comment; false where users may not change these."""
    extra: tuple[Annotated[str, AfterValidator(_extra)], ...] = ()
    """Further sbatch options, `--key=value` or `--flag`; none that kimi-eagle sets itself."""
    cpu: CpuSection = CpuSection()

    @model_validator(mode="before")
    @classmethod
    def _short(cls, data: Any) -> Any:
        """Refuse what is far too long before any message quotes it."""

        def walk(value: Any, key: str) -> None:
            if isinstance(value, dict):
                for k, v in value.items():
                    if len(k) > MAX_TEXT:
                        raise ValueError(f"key {k[:40]!r}... has {len(k)} characters")
                    walk(v, f"{key}.{k}" if key else k)
            elif isinstance(value, tuple):
                for i, v in enumerate(value):
                    walk(v, f"{key}.[{i}]")
            elif isinstance(value, str):
                most = MAX_LINE if key.startswith("preamble") else MAX_TEXT
                if len(value) > most:
                    raise ValueError(f"{key}: {len(value)} characters, at most {most} expected")

        walk(data, "")
        return data

    @model_validator(mode="after")
    def _agree(self) -> Site:
        if unknown := sorted(set(self.times) - set(STAGES)):
            raise ValueError(f"times: unknown stage {unknown[0]!r}; expected {', '.join(STAGES)}")
        if self.gpu_type and self.gpu_request == "none":
            raise ValueError('gpu_type: nothing asks for it while gpu_request is "none"')
        return self


def site_folders() -> list[Path]:
    """Where sites are looked up by name, the first one first."""
    here = Path(__file__).resolve().parent
    packed = here / "_slurm" / "sites"
    shipped = packed if packed.is_dir() else here.parents[1] / "slurm" / "sites"
    own = Path(os.path.expanduser("~/.config/kimi-eagle/sites"))
    return [Path("slurm/sites"), shipped, own]


def known_sites() -> dict[str, Path]:
    """Every site that a name finds, with its file."""
    found: dict[str, Path] = {}
    for folder in site_folders():
        for path in sorted(folder.glob("*.toml")) if folder.is_dir() else ():
            found.setdefault(path.stem, path)
    return found


def load_site(name_or_path: str | Path) -> Site:
    """Read and check a site file, named (`mycluster`) or as a path (with `/` or `.toml`).

    Raises UsageError naming file, key, what was expected and the nearest known key or site.
    """
    text = str(name_or_path)
    if "\0" in text or len(text) > MAX_TEXT:
        raise UsageError(f"not a site: {text[:80]!r}", expected="a name or the path of a file")
    if "/" in text or text.endswith(".toml"):
        path = Path(text).expanduser()
    else:
        known = known_sites()
        if text not in known:
            import difflib

            near = difflib.get_close_matches(text, known, n=1, cutoff=0.4)
            raise UsageError(
                f"no site {text!r}",
                expected=f"one of {', '.join(sorted(known))}, or the path of a site file",
                fix=f"did you mean {near[0]!r}?" if near else "kimi-eagle site init writes one",
            )
        path = known[text]
    data = read_toml(path, "site", Path("slurm/sites"))
    return validated(Site, {"name": path.stem, **data}, path)
