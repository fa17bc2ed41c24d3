"""Commands for image files: `kimi-eagle image build|import|lock|verify|show`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from kimi_eagle.cli.options import PATH as _PATH
from kimi_eagle.cli.options import json_option, print_json

if TYPE_CHECKING:
    from pathlib import Path

    from kimi_eagle.images.lockfile import Entry
    from kimi_eagle.images.pins import Image

BAR_BYTES = 1_000_000_000
"""From here on reading a file takes long enough to show a bar."""


@click.group()
def image() -> None:
    """Image files: what jobs run in, pinned by their sha256."""


def _lock_options(command: Any) -> Any:
    """The options of all commands that write an entry of a lock file."""
    for option in (
        click.option("--replace", is_flag=True, help="The name may mean another image so far."),
        click.option("--into", type=_PATH, help="Folder of the lock file [default: the image's]."),
        click.option("--name", help="Name of the entry [default: the file's, without its ending]."),
    ):
        command = option(command)
    return command


@image.command("build")
@click.option(
    "--flavour", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True,
    help="What the image computes with.",
)  # fmt: skip
@click.option("-o", "--out", type=_PATH, help="File to write [default: kimi-eagle-FLAVOUR.sif].")
@click.option("--site", "site_name", help="Build as a Slurm job of this site, not here.")
@click.option("--base", help="BOOTSTRAP:FROM to build on, such as localimage:base.sif.")
@click.option(
    "--build-arg", "build_args", multiple=True, metavar="NAME=VALUE",
    help="An argument of the definition, such as a mirror.",
)  # fmt: skip
@click.option("--workdir", type=_PATH, help="Folder with room to unpack [default: beside --out].")
@_lock_options
@json_option
def image_build(
    flavour: str,
    out: str | None,
    site_name: str | None,
    base: str | None,
    build_args: tuple[str, ...],
    workdir: str | None,
    name: str | None,
    into: str | None,
    replace: bool,
    as_json: bool,
) -> None:
    """Build an image of this version and pin it.

    \b
    Examples:
      kimi-eagle image build
      kimi-eagle image build --flavour cuda --site mycluster -o /shared/images/kimi-eagle.sif
      kimi-eagle image build --flavour cuda --base localimage:/shared/images/vllm.sif
    """
    from kimi_eagle.images import build as room
    from kimi_eagle.images import lockfile, pins

    if base is not None and not all(base.partition(":")):
        raise click.BadParameter("expected BOOTSTRAP:FROM", param_hint="--base")
    if odd := [text for text in build_args if not text.partition("=")[1]]:
        raise click.BadParameter(f"expected NAME=VALUE, not {odd[0]!r}", param_hint="--build-arg")
    target = (_path(out) or _default_folder() / f"kimi-eagle-{flavour}.sif").absolute()
    if not replace:  # before minutes of work; no two builds are equal
        lock = (_path(into) or target.parent) / lockfile.NAME
        lockfile.refuse_other(lock, pins.entry_name(target, name), None)
    if site_name:
        if base or build_args or workdir or name or into or replace:
            raise click.UsageError("with --site only --flavour and -o")
        from kimi_eagle.site import load_site
        from kimi_eagle.slurm import imagejob

        job = imagejob.submit(load_site(site_name), flavour, target)
        if as_json:
            print_json({"job": job, "file": target})
        else:
            click.echo(f"job {job} builds {_shown(target)}")
        return
    said = contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()
    with said:
        bootstrap, _, origin = (base or "").partition(":")
        report = room.build(
            flavour,
            target,
            base=(bootstrap, origin) if base else None,
            build_args=dict(text.split("=", 1) for text in build_args),
            workdir=_path(workdir),
            replace=replace,
        )
        made = pins.lock(report.path, name=name, into=_path(into), replace=replace)
    _tell_locked(made, into, as_json, seconds=report.seconds)


@image.command("import")
@click.argument("source", type=_PATH)
@click.option("-o", "--out", type=_PATH, help="File to write [default: named after SOURCE].")
@click.option("--foreign", is_flag=True, help="Take an image that is none of kimi-eagle's, too.")
@_lock_options
@json_option
def image_import(
    source: str,
    out: str | None,
    foreign: bool,
    name: str | None,
    into: str | None,
    replace: bool,
    as_json: bool,
) -> None:
    """Make a pinned image of a SIF file, an archive, an OCI layout or a sandbox; no network.

    What SOURCE is, is seen from its content. It is left as it is, and no file is ever replaced.
    An image that --foreign lets in may be built on; jobs refuse it.

    \b
    Examples:
      kimi-eagle image import /media/usb/kimi-eagle-cuda.sif -o /shared/images/
      docker save kimi-eagle > image.tar; kimi-eagle image import image.tar
      kimi-eagle image import ./sandbox -o changed.sif --name try1
    """
    from pathlib import Path

    from kimi_eagle.errors import UsageError
    from kimi_eagle.images.importing import import_image

    if out and out.endswith("/") and not Path(out).expanduser().is_dir():
        raise UsageError("no such folder", where=out, fix="mkdir -p it, or name a file")
    with _bar("read", None if as_json else 0) as progress:
        made = import_image(
            source,
            _path(out) or _default_folder(),
            foreign=foreign,
            name=name,
            into=_path(into),
            replace=replace,
            say=lambda text: click.echo(_shown(text), err=True),
            progress=progress,
        )
    _tell_locked(made, into, as_json)


@image.command("lock")
@click.argument("file", type=_PATH)
@_lock_options
@json_option
def image_lock(file: str, name: str | None, into: str | None, replace: bool, as_json: bool) -> None:
    """Pin an image file: from now on its name stands for these bytes.

    \b
    Examples:
      kimi-eagle image lock /shared/images/kimi-eagle.sif
      kimi-eagle image lock /shared/images/kimi-eagle.sif --into containers --replace
    """
    from kimi_eagle.images import pins

    _, seen = pins.look(file)
    with _bar("read", None if as_json else seen.bytes) as progress:
        made = pins.lock(file, name=name, into=_path(into), replace=replace, progress=progress)
    _tell_locked(made, into, as_json)


@image.command("verify")
@click.argument("files", nargs=-1, metavar="[FILE]...", type=_PATH)
@json_option
def image_verify(files: tuple[str, ...], as_json: bool) -> None:
    """Read image files and compare them with the lock; without FILE all that are pinned.

    Pins are looked up beside the image, in ./containers, in the checkout's containers and in
    ~/.config/kimi-eagle. Exit code 1 where a file is missing, damaged, another one or not pinned.

    \b
    Examples:
      kimi-eagle image verify
      kimi-eagle image verify /shared/images/kimi-eagle.sif
    """
    from kimi_eagle.errors import UsageError
    from kimi_eagle.images import pins

    if files:
        rows = [_verify_file(file, as_json) for file in files]
    else:
        entries = pins.all_entries()
        if not entries:
            places = ", ".join(map(str, pins.common_lock_files()))
            fix = "kimi-eagle image lock FILE"
            raise UsageError("no image is pinned", where=places, fix=fix)
        rows = [_verify_entry(entry, as_json) for entry in entries]
    ok = all(row["state"] in ("ok", "unfit") for row in rows)
    if as_json:
        print_json({"ok": ok, "images": rows})
    else:
        _print_table(rows)
    sys.exit(0 if ok else 1)


@image.command("show")
@click.argument("image_name", metavar="FILE|NAME", type=_PATH)
@json_option
def image_show(image_name: str, as_json: bool) -> None:
    """What an image file is: header, labels, digest, where it is pinned, whether jobs take it.

    \b
    Examples:
      kimi-eagle image show /shared/images/kimi-eagle.sif
      kimi-eagle image show kimi-eagle
    """
    import os
    import time

    from kimi_eagle.errors import UsageError
    from kimi_eagle.images import hashcache, pins, sif

    path = image_name
    if not os.path.lexists(path):
        named = [e for e in pins.all_entries() if e.name == image_name]
        if not named:
            where = ", ".join(str(p) for p in pins.common_lock_files())
            raise UsageError(f"neither a file nor a name in a lock file: {path!r}", where=where)
        path = named[0].path
    seen, found = pins.look(path)
    header = sif.read_header(found.path)
    with _bar("read", None if as_json else found.bytes) as progress:
        digest = hashcache.sha256(found.path, seen, progress=progress)
    try:
        pins.verified(path)
        jobs = "ok"
    except UsageError as e:
        jobs = e.what
    try:
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(header.created))
    except (OverflowError, ValueError, OSError):
        created = f"{header.created:.0f} s after 1970"  # no date: made by a machine or a joker
    shown = {
        "file": found.path,
        "bytes": found.bytes,
        "sha256": digest,
        "sif_id": found.sif_id,
        "arch": found.arch,
        "created": created,
        "labels": found.labels,
        "pinned": [
            {"lock": str(e.lock), "name": e.name}
            for e in pins.locked_at(digest, pins.lock_files(path))
        ],
        "jobs": jobs,
    }
    if as_json:
        print_json(shown)
        return
    pinned = [f"{_shown(p['name'])} in {_shown(p['lock'])}" for p in shown["pinned"]]
    lines = {k: v for k, v in shown.items() if k not in ("labels", "pinned", "jobs")}
    lines |= {"pinned": ", ".join(pinned) or "no", "jobs": "take it" if jobs == "ok" else jobs}
    for key, value in lines.items():
        click.echo(f"{key:<8} {_shown(value)}")
    for key, value in sorted(found.labels.items()):
        click.echo(f"  {_shown(key)}: {_shown(value)}")


def _verify_file(file: str, as_json: bool) -> dict[str, Any]:
    from kimi_eagle.errors import UsageError
    from kimi_eagle.images import pins

    row = {"file": file, "name": "", "sha256": "", "state": "problem", "why": ""}
    try:
        _, seen = pins.look(file)
        with _bar(file, None if as_json else seen.bytes) as progress:
            found = pins.pinned(file, progress=progress)
    except UsageError as e:
        return row | {"why": e.line()}
    return row | {"name": found.name, "sha256": found.sha256} | _fitness(found)


def _verify_entry(entry: Entry, as_json: bool) -> dict[str, Any]:
    import dataclasses
    import os

    from kimi_eagle.errors import UsageError
    from kimi_eagle.images import hashcache, pins

    row = {"file": entry.path, "name": entry.name, "lock": str(entry.lock), "sha256": ""}
    if not os.path.lexists(entry.path):
        return row | {"state": "missing", "why": "no such file"}
    try:
        seen, found = pins.look(entry.path)
        with _bar(entry.name, None if as_json else seen.st_size) as progress:
            digest = hashcache.sha256(found.path, seen, fresh=True, progress=progress)
    except UsageError as e:
        return row | {"state": "problem", "why": e.line()}
    row["sha256"] = digest
    if digest != entry.sha256:
        why = f"sha256:{digest}, {found.bytes} bytes; pinned sha256:{entry.sha256}, {entry.bytes}"
        return row | {"state": "problem", "why": why}
    return row | _fitness(dataclasses.replace(found, name=entry.name, sha256=digest))


def _fitness(found: Image) -> dict[str, str]:
    """The right bytes; jobs on this machine may refuse them all the same."""
    from kimi_eagle.images import pins

    why = pins.unfit(found)
    return {"state": "unfit", "why": f"jobs refuse it: {why.what}"} if why else {"state": "ok"}


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"ok": "green", "unfit": "yellow", "missing": "bold red", "problem": "bold red"}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("", "name", "file", "what was found"):
        table.add_column(title, overflow="fold")
    for row in rows:
        what = row.get("why") or f"sha256:{row['sha256']}"
        cells = [Text(_shown(text)) for text in (row["name"], row["file"], what)]
        table.add_row(Text(row["state"], style=colours[row["state"]]), *cells)
    Console().print(table)


def _tell_locked(made: Image, into: str | None, as_json: bool, **more: Any) -> None:
    from pathlib import Path

    from kimi_eagle.images import lockfile, pins

    lock = (_path(into) or Path(made.path).parent) / lockfile.NAME
    why = pins.unfit(made)
    if as_json:
        print_json({**made.as_json(), "lock": str(lock), "unfit": why.what if why else "", **more})
        return
    click.echo(
        f"{_shown(made.path)}\nsha256:{made.sha256}\npinned as {made.name} in {_shown(lock)}"
    )
    if lock.resolve() not in [path.resolve() for path in pins.lock_files(made.path)]:
        click.echo("note: jobs do not look for pins in that folder")
    if why:
        click.echo(f"note: jobs refuse it here: {_shown(why.what)}")


@contextlib.contextmanager
def _bar(title: object, size: int | None) -> Iterator[Callable[[int], None] | None]:
    """A progress bar on standard error for large files. size: 0 not known, None never a bar."""
    if size is None or 0 < size < BAR_BYTES or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn())
    console = Console(stderr=True)
    with Progress(*columns, DownloadColumn(), TransferSpeedColumn(), console=console) as bars:
        task = bars.add_task(_shown(title), total=size or None)
        yield lambda count: bars.advance(task, count)


def _path(text: str | None) -> Path | None:
    from pathlib import Path

    return Path(text).expanduser() if text else None


def _default_folder() -> Path:
    """Where new images go: containers/ where there is one, else here."""
    from pathlib import Path

    folder = Path("containers").absolute()
    return folder if folder.is_dir() else Path.cwd()


def _shown(value: object) -> str:
    """Text that stays on its line, whatever a file is called."""
    text = str(value)
    return text if text.isprintable() else repr(text)
