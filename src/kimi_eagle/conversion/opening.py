"""Which kind of thing a path is, and the source that `convert` reads from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kimi_eagle.conversion.sources import Source, StoreSource
from kimi_eagle.errors import UsageError
from kimi_eagle.shards import folder
from kimi_eagle.shards.layout import index_path

KINDS = ("run", "shards", "speculators", "pt")


def kind_of_path(path: Path) -> str:
    """One of KINDS; UsageError where it is none or could be several."""
    if path.is_file():
        if path.name.endswith(".safetensors") and index_path(path).exists():
            return "shards"
        raise UsageError("not a shard (no index beside it)", where=path, expected=_EXPECTED)
    if not path.is_dir():
        raise UsageError("no such file or folder", where=path)
    if (path / "run.json").is_file():
        return "run"
    signs = {
        "shards": (path / folder.MANIFEST).exists() or any(path.glob("*.index.parquet")),
        "speculators": (path / "dataset_info.json").exists() or (path / "hidden_states").is_dir(),
        "pt": any(path.glob("data_*.pt")),
    }
    found = [kind for kind, is_there in signs.items() if is_there]
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"could be {' or '.join(found)}", where=path, fix="give --from")
    raise UsageError("no hidden states here", where=path, expected=_EXPECTED)


_EXPECTED = (
    "a run, a folder of shards, a dataset of speculators' with hidden_states/hs_0.safetensors, "
    "or dumps data_0.pt"
)


def shards_of(path: Path, *, whole: bool = True) -> list[tuple[Path, str | None]]:
    """The shards of a folder, or the one that a path is; see `folder.listed`."""
    if path.is_file():
        kind_of_path(path)
        return [(path, None)]
    return folder.listed(path, whole=whole)


def open_source(
    path: Path,
    kind: str,
    *,
    layers: Sequence[int] | None = None,
    num_layers: int | None = None,
    verifier: Any = None,
) -> Source:
    """A source of shards, a dataset of speculators' or dumps. UsageError and RunError say what is
    missing or wrong, before anything is written.

    verifier: an open Verifier; layer ids and sizes must fit it, and its id goes into the shards.
    """
    if kind == "shards":
        if layers is not None or num_layers is not None or verifier is not None:
            raise UsageError(
                "shards know their layers and their verifier",
                where=path,
                fix="leave out --layers, --num-layers and --verifier",
            )
        return StoreSource(path, shards_of(path))
    meta = {"verifier_id": verifier.id()} if verifier is not None else {}
    if kind == "pt":
        from kimi_eagle.conversion.dumps import DumpSource

        return DumpSource(path, layers, num_layers, verifier, meta)
    from kimi_eagle.conversion.speculators_files import SpeculatorsSource

    source = SpeculatorsSource(path, layers, meta)
    if verifier is not None:
        num_layers = verifier.num_layers if num_layers is None else num_layers
        if num_layers != verifier.num_layers or source.hidden_size != verifier.hidden_size:
            raise UsageError(
                f"{num_layers} layers, states of hidden size {source.hidden_size}",
                where=path,
                expected=f"{verifier.num_layers} and {verifier.hidden_size} of {verifier.path}",
            )
    if num_layers is not None and source.layers[-1] != num_layers:
        raise UsageError(
            f"the last layer id is {source.layers[-1]}",
            where=path,
            expected=f"{num_layers}: the state after the last layer is what a draft learns",
        )
    return source
