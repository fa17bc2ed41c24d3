"""`selftest`: a user's first contact with a machine, instead of a 600 GB load."""

from __future__ import annotations

import sys

import click

from kimi_eagle.cli.options import PATH, json_option, print_json


@click.command()
@click.option("--gpu", is_flag=True, help="Insist on GPUs [default: where there are some].")
@click.option("--out", type=PATH, default="selftest", show_default=True, help="A new folder.")
@json_option
def selftest(gpu: bool, out: str, as_json: bool) -> None:
    """Try this machine: everything that a real run needs, at small size, in one report.

    The small model through all stages on one rank, then Kimi-K2.5's architecture at toy size on as
    many GPUs as there are; states beside transformers', acceptance with and without training,
    speeds, versions, disk. Under 20 minutes. Send back OUT/selftest.json. Exit code 1 where a
    check failed; one failing part does not stop the others.

    \b
    Examples:
      kimi-eagle selftest
      srun --gpus-per-node=8 kimi-eagle selftest --gpu --out /shared/me/selftest
    """
    from pathlib import Path

    from rich.console import Console

    from kimi_eagle import display
    from kimi_eagle import selftest as room
    from kimi_eagle.capture.settings import vllm_build
    from kimi_eagle.errors import UsageError
    from kimi_eagle.selftest import machine

    device = vllm_build()[1]
    gpus = len(machine.torch_sees()) if device == "cuda" else 0
    if (gpu or device == "cuda") and not gpus:
        raise UsageError(
            "no GPU that this installation can use",
            where="--gpu" if gpu else "",
            expected="vLLM's CUDA build and a GPU that torch sees",
            fix="install kimi-eagle[gpu] or run in the CUDA image, on a node with GPUs",
        )
    folder = Path(out).resolve()
    if folder.is_dir() and any(folder.iterdir()):
        raise UsageError("not empty", where=folder, fix="give another --out, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    ranks = max(n for n in (1, 2, 4, 8) if n <= max(1, gpus))
    console = Console(stderr=as_json)
    with display.Bars(console, quiet=False) as bars:

        def told(name: str, state: str, seconds: float) -> None:
            tail = "" if state == "running" else f"  {seconds:.0f} s"
            console.print(f"{name:<12} {state}{tail}", highlight=False, soft_wrap=True)

        report = room.run(room.Test(folder, device, gpus, ranks, bars), told)
    if as_json:
        print_json(report)
    else:
        for part in report["parts"]:
            if part["state"] == "failed":
                wrong = [f"{c['what']}: {c['value']}" for c in part["checks"] if not c["ok"]]
                console.print(f"{part['name']}: {part.get('error') or '; '.join(wrong)}",
                              highlight=False, soft_wrap=True)  # fmt: skip
        verdict = "all checks hold" if report["ok"] else "something failed"
        console.print(f"{verdict}; {report['seconds']:.0f} s; {folder / 'selftest.md'}",
                      highlight=False, soft_wrap=True)  # fmt: skip
    sys.exit(0 if report["ok"] else 1)
