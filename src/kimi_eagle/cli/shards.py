"""Commands for hidden states on their own: `kimi-eagle shards ...`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from kimi_eagle.cli.options import PATH as _PATH
from kimi_eagle.cli.options import json_option, print_json

if TYPE_CHECKING:
    from pathlib import Path

SHOWN = 20
"""Samples left out, or shards made again, that are named on the screen."""


@click.group()
def shards() -> None:
    """Hidden states: what is there, and from one format to another.

    \b
    Examples:
      kimi-eagle shards info runs/smollm2
      kimi-eagle shards convert runs/smollm2 states-small --codec lossless
      kimi-eagle shards convert runs/smollm2 for-speculators --to speculators
      kimi-eagle shards convert old-dumps states --verifier /models/llama
    """


class _Layers(click.ParamType):
    name = "ids"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        try:
            ids = tuple(int(part) for part in str(value).replace(",", " ").split())
        except ValueError:
            ids = ()
        if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0:
            self.fail(f"{value!r}: expected ids in ascending order, such as 2,15,27,30")
        return ids


@shards.command()
@click.argument("src", type=_PATH)
@click.argument("out", type=_PATH)
@click.option("--codec", type=click.Choice(["raw", "lossless", "fp8"]), help="[default: raw]")
@click.option("--to", "target", type=click.Choice(["shards", "speculators"]), default="shards")
@click.option(
    "--from",
    "kind",
    type=click.Choice(["auto", "run", "shards", "speculators", "pt"]),
    default="auto",
    help="What SRC is [default: looked at].",
)
@click.option(
    "--shard-tokens",
    type=click.IntRange(min=1),
    help="Tokens a shard [default: as SRC is cut, else a million].",
)
@click.option("--layers", type=_Layers(), help="Layer ids of the states, as SRC's writer had them.")
@click.option("--num-layers", type=click.IntRange(min=1), help="Layers of the model.")
@click.option("--verifier", type=_PATH, help="The model's directory: more is checked with it.")
@click.option(
    "--allow-missing", is_flag=True, help="Exit 0 though rows without states are left out."
)
@click.option("--skip-damaged", is_flag=True, help="Leave damaged samples out instead of stopping.")
@json_option
def convert(
    src: str,
    out: str,
    codec: str | None,
    target: str,
    kind: str,
    shard_tokens: int | None,
    layers: tuple[int, ...] | None,
    num_layers: int | None,
    verifier: str | None,
    allow_missing: bool,
    skip_damaged: bool,
    as_json: bool,
) -> None:
    """Convert hidden states; type it again to go on after any interruption.

    SRC: a run, a folder of shards, a dataset of speculators' with hidden_states/hs_{i}.safetensors,
    or dumps of speculators 0.3.0 and 0.4.0 (data_{i}.pt). It is never written to. OUT gets shards
    and shards.json, or with --to speculators an arrow dataset and hs_{i}.safetensors.

    --layers: of a dataset of speculators' the ids that the server was given (state entering layer
    k; the number of layers for the last state); of dumps the ids that they were made with (their id
    i is what leaves layer i, here i + 1), where data_config.json is not there to say it.

    \b
    Examples:
      kimi-eagle shards convert runs/smollm2 states-small --codec lossless
      kimi-eagle shards convert states-small for-speculators --to speculators
      kimi-eagle shards convert prepared states --layers 2,15,27,30
      kimi-eagle shards convert old-dumps states --verifier /models/llama
    """
    from pathlib import Path

    from kimi_eagle.conversion import to_shards as room
    from kimi_eagle.conversion.opening import kind_of_path
    from kimi_eagle.errors import UsageError

    if target == "speculators" and (codec not in (None, "raw") or shard_tokens is not None):
        raise UsageError(
            "speculators reads one raw file a sample",
            where="--codec, --shard-tokens",
            fix="leave them out, or --to shards",
        )
    path = Path(src)
    kind = kind_of_path(path) if kind == "auto" else kind
    source = _source(path, kind, layers, num_layers, verifier)
    codec = codec or "raw"
    _say_size(source, codec, Path(out), target, quiet=as_json)
    steps = {"skip_damaged": skip_damaged}
    with click.progressbar(
        length=int(source.weights.sum()), label="converting", file=sys.stderr, hidden=as_json
    ) as bar:
        steps |= {"on_progress": bar.update}
        if target == "speculators":
            from kimi_eagle.conversion.to_speculators import to_speculators

            found = to_speculators(source, Path(out), **steps)
        else:
            found = room.to_shards(
                source, Path(out), codec=codec, shard_tokens=shard_tokens, **steps
            )
    for name in ("missing", "damaged"):
        _name(f"left out ({name})", getattr(found, name))
    _name("made again", found.remade)
    if as_json:
        print_json({**found.as_json(), "codec": codec, "to": target, "notes": list(source.notes)})
    else:
        made = f"{found.shards:,} shards" if target == "shards" else f"{found.samples:,} files"
        kept = f" ({found.kept:,} were there" if found.kept or found.remade else ""
        kept += f", {len(found.remade):,} damaged ones made again" if found.remade else ""
        kept += ")" if kept else ""
        twice = f", {found.repeated:,} repeated samples left out" if found.repeated else ""
        click.echo(
            f"{out}: {found.samples:,} samples, {found.tokens:,} tokens, {made}{kept}, "
            f"{found.bytes / 1e9:,.3f} GB{twice}"
        )
    if found.missing and not allow_missing:
        click.echo(
            f"error: {len(found.missing):,} rows without states were left out; "
            "--allow-missing if that is as it should be",
            err=True,
        )
        sys.exit(1)


@shards.command()
@click.argument("path", type=_PATH)
@json_option
def info(path: str, as_json: bool) -> None:
    """What a shard, a folder of shards or a run holds, by the indexes alone.

    \b
    Examples:
      kimi-eagle shards info runs/smollm2
      kimi-eagle shards info states-small --json
    """
    from pathlib import Path

    from kimi_eagle.conversion.opening import kind_of_path, shards_of
    from kimi_eagle.errors import UsageError
    from kimi_eagle.shards import info as room

    where = Path(path)
    kind = kind_of_path(where)
    open_units = 0
    if kind == "run":
        from kimi_eagle.containers.start import enter
        from kimi_eagle.stages.context import open_context

        ctx = open_context(path)
        enter(ctx.run, ["shards", "info", str(ctx.run.path), *(["--json"] if as_json else [])])
        units = ctx.plan("extract")
        open_units = len(ctx.ledger("extract").open_units(units))
        found = _files(ctx.ledger("extract").records(units))
    elif kind == "shards":
        found = shards_of(where, whole=False)
    else:
        raise UsageError(
            f"not shards: {'dumps of' if kind == 'pt' else 'a dataset of'} speculators'",
            where=path,
            fix=f"kimi-eagle shards convert {path} OUT makes shards of it",
        )
    if not found:
        from kimi_eagle.errors import RunError

        raise RunError("no shards yet", where=path)
    shown = room.describe(found)
    if kind == "run":
        shown["open_units"] = open_units
    if as_json:
        print_json(shown)
        return
    for line in room.lines(shown):
        click.echo(line)
    if open_units:
        click.echo(f"{'open':<13} {open_units:,} units are not extracted yet")


@shards.command("of-run", hidden=True)
@click.argument("run_path", metavar="RUN", type=_PATH)
def of_run(run_path: str) -> None:
    """The shards of a run's current keys, as JSON: what `convert` asks the run's image for."""
    import json

    from kimi_eagle.containers.start import enter
    from kimi_eagle.stages.context import open_context

    ctx = open_context(run_path)
    enter(ctx.run, ["shards", "of-run", str(ctx.run.path)])
    click.echo(json.dumps([[str(p), d] for p, d in _of_run(ctx)]))


def _source(
    path: Path,
    kind: str,
    layers: tuple[int, ...] | None,
    num_layers: int | None,
    verifier: str | None,
) -> Any:
    from kimi_eagle.conversion.opening import open_source
    from kimi_eagle.conversion.sources import StoreSource
    from kimi_eagle.errors import UsageError

    if kind != "run":
        opened = None
        if verifier is not None:
            from kimi_eagle.verifier import open_verifier

            opened = open_verifier(verifier)
        return open_source(path, kind, layers=layers, num_layers=num_layers, verifier=opened)
    if layers is not None or num_layers is not None or verifier is not None:
        raise UsageError(
            "a run knows its layers and its verifier",
            where=path,
            fix="leave out --layers, --num-layers and --verifier",
        )
    return StoreSource(path, _shards_of_run(str(path)), "run")


def _shards_of_run(path: str) -> list[tuple[Path, str | None]]:
    """The shards under a run's current keys.

    Keys hold the versions of what made them, which are those of the run's image. So the image is
    asked for the names; the converting itself needs no image, and OUT no mount in it.
    """
    import json
    import subprocess
    from pathlib import Path

    from kimi_eagle.containers.start import inside
    from kimi_eagle.errors import RunError
    from kimi_eagle.lock.runlock import pinned
    from kimi_eagle.stages.context import open_context

    ctx = open_context(path)
    if inside() or pinned(ctx.run) is None:
        return _of_run(ctx)
    asked = [sys.executable, "-m", "kimi_eagle", "shards", "of-run", str(ctx.run.path)]
    done = subprocess.run(asked, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip() or "no answer").splitlines()[-1]
        raise RunError(f"the run's image says: {last.removeprefix('error: ')}", where=path)
    return [(Path(p), d) for p, d in json.loads(done.stdout.strip().splitlines()[-1])]


def _of_run(ctx: Any) -> list[tuple[Path, str | None]]:
    """Shards of all units of extract; RunError where some are open, or too much was lost."""
    return _files(ctx.gate("extract"))


def _files(records: list[Any]) -> list[tuple[Path, str | None]]:
    """[(shard, digest of its index)] of records that are done."""
    found = []
    for record in records:
        if record.state != "done":
            continue
        digests = {e["name"]: e.get("xxh3") for e in record.data["files"]}
        index = record.path(".index.parquet")
        found.append((record.path(".safetensors"), digests[index.name]))
    return found


def _say_size(source: Any, codec: str, out: Path, target: str, *, quiet: bool) -> None:
    from kimi_eagle.conversion.to_shards import need

    notes = list(source.notes)
    if "fp8" in getattr(source, "codecs", ()) and codec != "fp8":
        notes.append("some of it is fp8: what that lost stays lost")
    for note in notes:
        click.echo(f"note: {note}", err=True)
    if quiet:
        return
    tokens = f", {source.tokens:,} tokens" if source.tokens is not None else ""
    click.echo(
        f"{source.kind} {source.path}: {len(source):,} samples{tokens}, "
        f"{source.bytes / 1e9:,.3f} GB, layers {', '.join(map(str, source.layers))}; at least "
        f"{need(source, codec) / 1e9:,.3f} GB of {target if target == 'speculators' else codec} "
        f"to {out}",
        err=True,
    )


def _name(what: str, names: list[str]) -> None:
    for name in names[:SHOWN]:
        click.echo(f"{what}: {name}", err=True)
    if len(names) > SHOWN:
        click.echo(f"{what}: {len(names) - SHOWN:,} more", err=True)
