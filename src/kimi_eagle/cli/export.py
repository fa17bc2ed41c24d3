"""`export`: what leaves the house, with its card."""

from __future__ import annotations

import click

from kimi_eagle.cli.options import PATH, json_option, print_json


@click.command()
@click.argument("run_path", metavar="RUN", type=PATH)
@click.argument("out", metavar="OUT", type=PATH)
@click.option(
    "--for",
    "server",
    type=click.Choice(["vllm", "sglang"]),
    help="Server that will load it [default: vllm].",
)
@click.option("--without-embedding", is_flag=True, help="Leave the verifier's embedding out.")
@click.option("--dataset", is_flag=True, help="The token samples instead of the draft.")
@click.option("--recipe", type=PATH, help="Recipe whose [card] and licences count [default: own].")
@json_option
def export(
    run_path: str,
    out: str,
    server: str | None,
    without_embedding: bool,
    dataset: bool,
    recipe: str | None,
    as_json: bool,
) -> None:
    """Copy a run's draft to a folder to hand on, with model card and licence texts.

    OUT gets weights, config.json, README.md with metadata as the Hugging Face hub reads it, and the
    verifier's licence. Figures are those of the run's own benchmark. Licences are taken from the
    recipe ([card] license, license in [[sources]]) and from the verifier's directory, never
    guessed; what is unknown is said. An OUT that holds anything else is refused.

    --without-embedding: vLLM (one pipeline stage) and SGLang take the verifier's in its place.
    --for sglang: names, layer ids and config as SGLang's EAGLE-3 reader takes them; drafts that it
    would compute in another way are refused, those with norm_before_fc among them: [train.draft]
    says how one is trained that both servers take.

    \b
    Examples:
      kimi-eagle export runs/smollm2 out/smollm2-eagle3
      kimi-eagle export runs/kimi-k2.5 out/kimi-eagle3 --without-embedding
      kimi-eagle export runs/kimi-k2.5 out/kimi-data --dataset
      kimi-eagle export runs/from-specforge out/sglang --for sglang
    """
    import sys
    from pathlib import Path

    from kimi_eagle.errors import UsageError
    from kimi_eagle.publishing import export as room
    from kimi_eagle.publishing import facts, folder
    from kimi_eagle.rundir import open_run

    for option, value in (("OUT", out), ("--recipe", recipe)):
        if value == "":
            raise UsageError("an empty name (an unset variable?)", where=option)
    if dataset and (server or without_embedding):
        raise UsageError(
            "--dataset has no weights",
            expected="--dataset alone, or --for and --without-embedding",
        )
    run, target = open_run(run_path), Path(out).absolute()
    if run.path == target.resolve() or run.path in target.resolve().parents:
        raise UsageError("OUT lies in the run itself", where=out, fix="choose a folder elsewhere")
    folder.writable(target)
    found = facts.look(run, recipe)
    if dataset:
        plan = room.dataset(found)
    else:
        plan = room.draft(found, server or "vllm", embedding=not without_embedding)
    with click.progressbar(
        length=plan.bytes, label="copying", file=sys.stderr, hidden=as_json
    ) as bar:
        room.write(plan, target, bar.update)
    for text in plan.warnings:
        click.echo(f"warning: {text}", err=True)
    names = sorted(p.name for p in target.iterdir())
    if as_json:
        size = sum(p.stat().st_size for p in target.iterdir())
        print_json(
            {
                "out": str(target),
                "kind": plan.kind,
                "files": names,
                "bytes": size,
                "licence": found.licence.name,
                "warnings": plan.warnings,
            }
        )
    else:
        click.echo(f"{target}: {plan.kind}, {', '.join(names)}")
