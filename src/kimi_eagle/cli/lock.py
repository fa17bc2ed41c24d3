"""Commands about what a run was made from: `diff`, `reproduce`."""

from __future__ import annotations

import click

from kimi_eagle.cli.options import PATH, json_option, print_json


@click.command()
@click.argument("run_a", metavar="RUN", type=PATH)
@click.argument("run_b", metavar="RUN", type=PATH)
@click.option("--all", "every", is_flag=True, help="Also what is the same.")
@json_option
def diff(run_a: str, run_b: str, every: bool, as_json: bool) -> None:
    """What two runs were made from and what came out, side by side; only what differs.

    Each RUN is a run directory or a copy of its run.lock.json. Paths are compared by what lies
    there. Ends like diff: 0 nothing differs, 1 something does, 2 wrong use. Machines, tokens per
    second and how jobs are made are shown, marked ~, and do not count: they change no result.

    \b
    Examples:
      kimi-eagle diff runs/try1 runs/try2
      kimi-eagle diff runs/try1 archive/last-year.lock.json --all
    """
    from kimi_eagle.lock import rundiff

    rows = rundiff.compare(rundiff.side(run_a), rundiff.side(run_b))
    same = rundiff.equal(rows)
    if as_json:
        print_json(rundiff.as_json(rows))
    else:
        for line in rundiff.lines(rows, every=every):
            click.echo(line)
        if same:
            click.echo("equal in all that counts")
    click.get_current_context().exit(0 if same else 1)


@click.command()
@click.argument("run_path", metavar="RUN", type=PATH)
@click.option("--run", "new_path", type=PATH, help="The new run [default: RUN-reproduced].")
@click.option("--site", "site_name", help="Submit it to this site [default: run on this machine].")
@click.option("--check", "only_check", is_flag=True, help="Only compare; make nothing.")
@click.option("--image", "image_file", type=PATH, help="Where the run's image lies now.")
@click.option("--at", "places", multiple=True, metavar="KEY=PATH", help="Where an input lies now.")
@click.option("--allow", multiple=True, metavar="WHAT", help="Go on although this differs.")
@json_option
def reproduce(
    run_path: str,
    new_path: str | None,
    site_name: str | None,
    only_check: bool,
    image_file: str | None,
    places: tuple[str, ...],
    allow: tuple[str, ...],
    as_json: bool,
) -> None:
    """Make a run again from its lock, and say whether the same came out.

    RUN is a run directory or a copy of its run.lock.json: the lock alone is enough. First what is
    here is compared with it: image (or code and packages), verifier, every input, recipe. Anything
    missing or different is listed and refused, unless --allow names it. Then a new run follows the
    recorded recipe as far as the first one went. Ends with 0 when all results have equal digests.

    \b
    Examples:
      kimi-eagle reproduce runs/try1 --check
      kimi-eagle reproduce archive/try1.lock.json --image /shared/images/2026.sif --run runs/again
      kimi-eagle reproduce runs/kimi-k2.5 --site mycluster
      kimi-eagle reproduce runs/try1 --at verifier.path=/models/SmolLM2 --allow code
    """
    from pathlib import Path

    from kimi_eagle.errors import RunError, UsageError
    from kimi_eagle.lock import checking, runlock
    from kimi_eagle.lock import reproduce as again
    from kimi_eagle.recipe import STAGES
    from kimi_eagle.site import load_site

    for option, value in (("--run", new_path), ("--site", site_name), ("--image", image_file)):
        if value == "":
            raise UsageError("an empty name (an unset variable?)", where=option)
    at = {}
    for text in places:
        key, equals, path = text.partition("=")
        if not (key and equals and path):
            raise UsageError(f"--at {text}", expected="KEY=PATH, such as verifier.path=/models/k2")
        at[key] = path
    lock = runlock.read(run_path)
    site = load_site(site_name) if site_name else None
    found = checking.look(
        lock, image_file=image_file, at=at, on_nodes=site.name if site else None
    )
    refused = found.refused(allow)
    result = {"checks": found.as_json(), "refused": [c.what for c in refused]}
    until = again.last_stage(lock)
    if not as_json:
        _tell(found.checks)
    if refused or only_check:
        if as_json:
            print_json(result)
        if refused:
            words = sorted({c.allow for c in refused if c.allow})
            fix = f"to go on all the same: {' '.join(f'--allow {w}' for w in words)}"
            raise RunError(
                "missing or different: " + ", ".join(f"{c.what} ({c.verdict})" for c in refused),
                where=run_path,
                fix=fix if words and all(c.allow for c in refused) else "see the notes above",
            )
        return
    if until is None:
        raise RunError("the run finished no stage: there is nothing to compare", where=run_path)
    assert found.recipe is not None  # without one `recipe` is refused
    place = again.new_place(Path(run_path), lock, new_path)
    recipe_path = again.make(place, lock, found.recipe, found.image)
    if site_name:
        jobs = again.submit_to(recipe_path, found.recipe, site_name, found.image)
        for warning in jobs["warnings"]:
            click.echo(f"warning: {warning}", err=True)
        if as_json:
            print_json({**result, "run": str(recipe_path.parent), **jobs})
        else:
            click.echo(f"{len(jobs['submitted'])} jobs submitted for {place}")
            if until != STAGES[-1]:
                click.echo(f"they do all stages; the first run has results up to {until}")
            click.echo(f"when they are done: kimi-eagle diff {run_path} {place}")
        return
    if not as_json:
        click.echo(f"-> {place}, up to {until}")
    run = again.run_here(recipe_path, until, quiet=as_json)
    verdicts = again.verdicts(lock, runlock.compose(run), until)
    same = all(v.same for v in verdicts)
    if as_json:
        stages = [{"stage": v.stage, "same": v.same, "detail": v.detail} for v in verdicts]
        print_json({**result, "run": str(run.path), "stages": stages, "equal": same})
    else:
        for v in verdicts:
            word = {True: "byte-equal", False: "differs", None: "not known"}[v.same]
            click.echo(f"{v.stage:<{max(map(len, STAGES))}}  {word:<10}  {v.detail}")
        if not same:
            click.echo(f"more: kimi-eagle diff {run_path} {place}")
    click.get_current_context().exit(0 if same else 1)


def _tell(checks: list) -> None:
    """The table: what, then, now, verdict."""
    rows = [("", "then", "now", ""), *((c.what, c.then, c.now, c.verdict) for c in checks)]
    widths = [min(40, max(len(row[i]) for row in rows)) for i in range(4)]
    notes = ["", *(c.note for c in checks)]
    for row, note in zip(rows, notes, strict=True):
        cells = "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        click.echo(f"{cells}  {note}".rstrip())
