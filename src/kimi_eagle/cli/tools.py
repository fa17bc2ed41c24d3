"""Commands for the parts on their own: `kimi-eagle verifier ...`, `kimi-eagle vocab ...`."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click

from kimi_eagle.cli.options import PATH as _PATH
from kimi_eagle.cli.options import json_option, print_json

if TYPE_CHECKING:
    import numpy as np

    from kimi_eagle.vocab import VocabMapping


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
    from kimi_eagle import vocab as room
    from kimi_eagle.verifier import open_verifier
    from kimi_eagle.vocab_import import folder_for

    opened = open_verifier(verifier_path)
    forced = () if no_force_special else room.special_ids(opened)
    counted = _counts(counts, opened.vocab_size)
    mapping = room.build_mapping(counted, size, sorted(forced))
    folder = folder_for(out, [counts])
    for path in room.save(mapping, lambda suffix: folder / suffix):
        click.echo(path)
    click.echo(f"coverage {mapping.coverage:.2%}")


@vocab.command("import")
@click.argument("t2d", type=_PATH)
@click.argument("d2t", type=_PATH)
@click.option("--counts", type=_PATH, help="Token counts (.pt, .npy, .json): coverage and digest.")
@click.option("--verifier", "verifier_path", type=_PATH, help="Check against its vocabulary.")
@click.option("--out", default="mapping", show_default=True, type=_PATH, help="Folder to write.")
@json_option
def vocab_import(
    t2d: str, d2t: str, counts: str | None, verifier_path: str | None, out: str, as_json: bool
) -> None:
    """Take over a mapping made by another program, for `[vocab] mapping` in a recipe.

    T2D and D2T are .pt or .npy files: t2d as bool, int or uint8 [V], d2t as offsets or as absolute
    token ids [D]. What was found is said, what is wrong is refused, and --out gets the five files
    that `vocab build` writes. Files of other programs are never replaced.

    \b
    Examples:
      kimi-eagle vocab import t2d.pt d2t.pt --out mapping
      kimi-eagle vocab import t2d.npy d2t.npy --counts token_freq.pt --verifier /shared/kimi-k2.5
    """
    from pathlib import Path

    from kimi_eagle import vocab as room
    from kimi_eagle import vocab_import as imports
    from kimi_eagle.contracts.mapping import refuse_broken
    from kimi_eagle.errors import UsageError

    mapping, told = imports.take(imports.read_array(Path(t2d)), imports.read_array(Path(d2t)))
    size, whole = len(mapping.d2t), len(mapping.t2d)
    counted = _counts(counts, whole) if counts else None
    if counted is not None:
        mapping = imports.with_counts(mapping, counted)
    refuse_broken(mapping, d2t)
    if verifier_path:
        from kimi_eagle.verifier import open_verifier

        if (own := open_verifier(verifier_path).vocab_size) != whole:
            raise UsageError(
                f"t2d is for a vocabulary of {whole}", where=t2d, expected=f"{own}, the verifier's"
            )
    if counted is not None:
        told.append(imports.beside_counts(mapping, counted))
    folder = imports.folder_for(out, [t2d, d2t, *([counts] if counts else [])])
    written = [str(path) for path in room.save(mapping, lambda name: folder / name)]
    if as_json:
        print_json({"told": told, "files": written, **_shown(mapping)})
        return
    for line in [*told, *written]:
        click.echo(line)
    # Absolute: a recipe counts relative paths from its own folder. JSON's text is TOML's here.
    path = json.dumps(str(folder), ensure_ascii=False)
    click.echo(f"in the recipe: [vocab] draft_vocab_size = {size}, mapping = {path}")


def _counts(path: str, vocab_size: int) -> np.ndarray:
    """Token counts from a file, int64 [vocab_size]; UsageError with the file's name."""
    from pathlib import Path

    from kimi_eagle import vocab as room
    from kimi_eagle.errors import UsageError

    found = room.load_counts(Path(path))
    try:
        return room.as_counts(found, vocab_size)
    except UsageError as e:
        raise UsageError(e.what, where=path, expected=e.expected, fix=e.fix) from None


def _shown(mapping: VocabMapping) -> dict[str, object]:
    """What there is to say of a mapping; an unknown coverage is null in JSON."""
    return {
        "draft_vocab_size": len(mapping.d2t),
        "target_vocab_size": len(mapping.t2d),
        "coverage": None if mapping.coverage != mapping.coverage else mapping.coverage,
        "digest": mapping.digest,
    }


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
        again = f"kimi-eagle verify {path} --deep, then kimi-eagle retry {path}"
        mapping = record and room.load(record.path("d2t.npy"), record.path("t2d.npy"), fix=again)
    else:
        mapping = room.load(folder / "d2t.npy", folder / "t2d.npy")
    if mapping is None:
        from kimi_eagle.errors import RunError

        raise RunError("vocab is not done in this run", where=path)
    shown = _shown(mapping)
    if as_json:
        print_json(shown)
    else:
        for name, value in shown.items():
            click.echo(f"{name:<18} {'unknown' if value is None else value}")
