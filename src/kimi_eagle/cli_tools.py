"""Commands for the parts on their own: `kimi-eagle verifier ...`, `kimi-eagle vocab ...`."""

from __future__ import annotations

import sys

import click

from kimi_eagle.cli_options import PATH as _PATH
from kimi_eagle.cli_options import json_option, print_json


@click.group()
def verifier() -> None:
    """The verifier's directory."""


@verifier.command("hash")
@click.argument("path", type=_PATH)
@json_option
def verifier_hash(path: str, as_json: bool) -> None:
    """sha256 of every file of a verifier's directory, and its id."""
    from kimi_eagle.verifier import open_verifier

    opened = open_verifier(path)
    total = sum(p.stat().st_size for p in opened.path.iterdir() if p.is_file())
    with click.progressbar(length=total, label="hashing", file=sys.stderr, hidden=as_json) as bar:
        hashes = opened.content_hash(bar.update)
    if as_json:
        print_json({"id": opened.id(), "files": hashes})
        return
    click.echo(f"id {opened.id()}")
    for name, value in sorted(hashes.items()):
        click.echo(f"{value}  {name}")


@click.group()
def vocab() -> None:
    """The draft's reduced vocabulary."""


@vocab.command("build")
@click.argument("counts", type=_PATH)
@click.option("--verifier", "verifier_path", required=True, type=_PATH, help="Verifier directory.")
@click.option("--size", required=True, type=click.IntRange(min=2), help="Draft vocabulary size.")
@click.option("--out", required=True, type=_PATH, help="Folder for d2t/t2d (.npy and .pt).")
@click.option("--no-force-special", is_flag=True, help="Do not always include special tokens.")
def vocab_build(
    counts: str, verifier_path: str, size: int, out: str, no_force_special: bool
) -> None:
    """Build a mapping from token counts: a .pt or .npy tensor [V], or a .pt dict {id: n}."""
    from pathlib import Path

    from kimi_eagle import vocab as room
    from kimi_eagle.verifier import open_verifier

    opened = open_verifier(verifier_path)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    forced = () if no_force_special else room.special_ids(opened)
    counted = room.as_counts(room.load_counts(Path(counts)), opened.vocab_size)
    mapping = room.build_mapping(counted, size, sorted(forced))
    for path in room.save(mapping, lambda suffix: folder / suffix):
        click.echo(path)
    click.echo(f"coverage {mapping.coverage:.2%}")


@vocab.command("show")
@click.argument("path", type=_PATH)
@json_option
def vocab_show(path: str, as_json: bool) -> None:
    """Show a mapping: a run directory, or a folder with d2t and t2d."""
    from pathlib import Path

    from kimi_eagle import vocab as room
    from kimi_eagle.rundir import RunDir
    from kimi_eagle.stages.context import open_context
    from kimi_eagle.summary import record_of

    folder = Path(path)
    if RunDir(folder).spec.is_file():
        record = record_of(open_context(path), "vocab")
        mapping = room.load(record.path("d2t.npy"), record.path("t2d.npy")) if record else None
    else:
        mapping = room.load(folder / "d2t.npy", folder / "t2d.npy")
    if mapping is None:
        from kimi_eagle.errors import RunError

        raise RunError("vocab is not done in this run", where=path)
    shown = {
        "draft_vocab_size": len(mapping.d2t),
        "target_vocab_size": len(mapping.t2d),
        "coverage": mapping.coverage,
        "digest": mapping.digest,
    }
    if as_json:
        print_json(shown)
    else:
        for name, value in shown.items():
            click.echo(f"{name:<18} {value}")
