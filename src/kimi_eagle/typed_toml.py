"""TOML files into typed, frozen objects, with errors of one line.

Used by recipes and site files. What is wrong is named with its file and key, what was expected,
and the nearest key that exists: a misspelt key never passes as a default.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from kimi_eagle.errors import UsageError


class Section(BaseModel):
    """Base of all sections: unknown keys refused, values frozen, no silent coercion."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        serialize_by_alias=True,  # `from` is no name in Python, but the key in every file
    )


Model = TypeVar("Model", bound=Section)


def read_toml(path: Path, kind: str, folder: Path) -> dict[str, Any]:
    """The data of a TOML file; UsageError where it is none.

    kind: what the file is, for messages (`recipe`). folder: where such files lie, for hints.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        hint = _nearby(path, kind, folder)
        raise UsageError(f"no such {kind}", where=path, fix=hint) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise UsageError(f"not TOML: {e}", where=path) from None
    except OSError as e:
        raise UsageError(f"cannot be read: {e.strerror}", where=path) from None


def validated(model: type[Model], data: dict[str, Any], where: object) -> Model:
    """The data as a `model`; UsageError for its first fault."""
    try:
        return model.model_validate(_tuples(data))
    except ValidationError as e:
        raise UsageError(_first_fault(model, e), where=where) from None


def _tuples(value: Any) -> Any:
    """TOML has lists, frozen sections want tuples."""
    if isinstance(value, dict):
        return {k: _tuples(v) for k, v in value.items()}
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def _first_fault(model: type[BaseModel], error: ValidationError) -> str:
    """One line for the first fault: key, what was expected, the nearest known key."""
    faults = error.errors(include_url=False)
    first = next((f for f in faults if f["type"] == "extra_forbidden"), faults[0])
    key = ".".join(f"[{p}]" if isinstance(p, int) else str(p) for p in first["loc"])
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    if first["type"] == "extra_forbidden":
        known = _known_keys(model, first["loc"][:-1])
        near = difflib.get_close_matches(str(first["loc"][-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(known)}"
        return f"unknown key {key!r}; {hint}{more}"
    if first["type"] == "missing":
        return f"missing key {key!r}; {_about(model, first['loc'])}{more}"
    if not key:
        return first["msg"].removeprefix("Value error, ") + more
    return f"key {key!r}: got {_shown(first['input'])}; {first['msg']}{more}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:80]}... ({len(text)} characters)"


def _section(root: type[BaseModel], loc: tuple[int | str, ...]) -> type[BaseModel] | None:
    model: Any = root
    for part in loc:
        if isinstance(part, int):
            continue
        model = model.model_fields[part].annotation if part in model.model_fields else None
        for inner in getattr(model, "__args__", ()):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                model = inner
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            return None
    return model


def _known_keys(model: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    section = _section(model, loc)
    fields = section.model_fields if section else {}
    return [field.alias or name for name, field in fields.items()]


def _about(model: type[BaseModel], loc: tuple[int | str, ...]) -> str:
    section = _section(model, loc[:-1])
    field = section.model_fields.get(str(loc[-1])) if section else None
    return f"expected {field.annotation}" if field else "expected a value"


def _nearby(path: Path, kind: str, folder: Path) -> str:
    beside = path.parent if path.parent.is_dir() else folder
    found = sorted(p.name for p in beside.glob("*.toml")) if beside.is_dir() else []
    near = difflib.get_close_matches(path.name, found, n=1, cutoff=0.4)
    return f"did you mean {beside / near[0]}?" if near else f"give the path of a {kind} file"


def absolute_path(text: str, base: Path) -> str:
    """The path that `text` names in a file of the folder `base`, links resolved."""
    try:
        path = base / Path(text).expanduser()
        whole = path.resolve()
        # Hubs keep files under names without an ending, behind links with one.
        same = whole.suffix == path.suffix or not whole.is_file()
        return str(whole if same else path.parent.resolve() / path.name)
    except (ValueError, RuntimeError, OSError) as e:
        raise UsageError(f"not a path: {text!r} ({e})", where=base) from None


def located(
    entries: Sequence[Model], full: Callable[[str], str], named: Callable[[str], str]
) -> tuple[Model, ...]:
    """Entries with a `path` and perhaps a `name`: the path as `full` makes it of theirs, and where
    they say no name that which `named` makes of it."""
    return tuple(
        e.model_copy(update={"path": full(e.path), "name": e.name or named(e.path)})
        for e in entries
    )


def stem(path: str) -> str:
    """The name of a file or folder without its ending."""
    return Path(path).stem
