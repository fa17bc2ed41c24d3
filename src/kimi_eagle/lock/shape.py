"""The shape of run.lock.json, format lock/1: what a reader may rely on.

A lock lies in archives and passes through hands, so it is checked as a whole before anything is
read from it. Further keys are no fault: a later version may note more. What could not be known when
the lock was written is null, or {"unknown": why}.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

FORMAT = "lock/1"


class _Piece(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class Unknown(_Piece):
    """A piece that could not be read, with the reason."""

    unknown: str


class InputFile(_Piece):
    name: str
    """Relative to the folder that the recipe names."""
    bytes: int
    mtime_ns: int
    sha256: str | None


class Input(_Piece):
    """A file or folder that the recipe names."""

    sha256: str | None
    """Of a folder: of the files' sha256, a line each, in the order in which they are read."""
    bytes: int | None = None
    files: list[InputFile] | None = None
    seen: str | None = None
    reason: str | None = None


class Verifier(_Piece):
    id: str | None = None
    tokenizer_digest: str | None = None
    seen: str | None = None
    reason: str | None = None


class Code(_Piece):
    """One state of code and environment."""

    kimi_eagle: str | None = None
    commit: str | None = None
    """With `+dirty` where tracked files differed; `dirty` is then the sha256 of `git diff HEAD`."""
    dirty: str | None = None
    source: str | None = None
    """sha256 over the package's own files."""
    image: str | None = None
    python: str | None = None
    packages: dict[str, str] = {}
    lock: str | None = None
    """sha256 of the lock file that the environment was installed from."""
    units: int = 0


class Machine(_Piece):
    """Equal machines."""

    cpu: str | None = None
    cpus: int | None = None
    gpus: dict[str, int] | None = None
    driver: str | None = None
    partition: str | None = None
    units: int
    hosts: int | None = None
    names: list[str] = []


class Benchmark(_Piece):
    figures: dict[str, Any]
    speed: dict[str, Any]


class Stage(_Piece):
    state: Literal["not started", "open", "part", "done", "skipped", "unknown"]
    current: bool | None = None
    """Whether the units were planned by the recipe of this lock."""
    units: int | None = None
    done: int | None = None
    failed: int | None = None
    samples: int | None = None
    tokens: int | None = None
    rejected: int | None = None
    keys: list[str] | None = None
    """`UNIT.KEY`, where they are few."""
    keys_digest: str | None = None
    files: dict[str, str] | None = None
    """`UNIT/KIND` -> xxh3-128, where they are few."""
    result_digest: str | None = None
    damaged: list[str] | None = None
    validation: dict[str, Any] | None = None
    benchmark: Benchmark | None = None
    started: float | None = None
    ended: float | None = None
    code: list[Code] = []
    machines: list[Machine] = []
    seen: str | None = None
    reason: str | None = None


class Image(_Piece):
    sha256: str
    labels: dict[str, str] = {}


class WhichCode(_Piece):
    command_line: Code
    ran: list[Code]


class Environment(_Piece):
    packages: dict[str, str | list[str]] = {}
    locks: list[str] = []
    python: list[str] = []


class Paths(_Piece):
    run: str
    image: str | None = None
    recipe: str | None = None
    inputs: dict[str, str] = {}


class Lock(_Piece):
    """The whole file."""

    format: Literal["lock/1"]
    written: float
    name: str | None
    recipe: dict[str, Any]
    """Resolved, with every default; or {"unknown": why}."""
    recipe_digest: str | None
    stages: dict[str, Stage]
    image: Unknown | Image | None
    accepted: list[dict[str, Any]] | Unknown
    code: WhichCode
    environment: Environment
    site: dict[str, Any] | None
    machines: list[Machine]
    inputs: dict[str, Input]
    verifier: Verifier
    paths: Paths


def fault(data: Any) -> str | None:
    """What is wrong with a lock (`stages.extract.units: ...`), None where it is whole."""
    try:
        Lock.model_validate(data)
    except ValidationError as e:
        first = e.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        return f"{place}: {first['msg']}" if place else first["msg"]
    return None
