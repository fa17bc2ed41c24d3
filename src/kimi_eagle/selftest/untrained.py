"""What a draft is worth before its training: `python -m kimi_eagle.selftest.untrained RUN OUT`.

Makes the run's own draft as training would start from it, exports it to OUT/draft and measures it
on the run's held-out prompts (OUT/results.json). The run's baseline is not measured again.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path


def main(run: Path, out: Path) -> None:
    """run: a finished run. out: a new folder."""
    from speculators.train.cli import set_seed

    from kimi_eagle.bench import run_benchmark
    from kimi_eagle.stages.context import open_context
    from kimi_eagle.training import loop, patches
    from kimi_eagle.training.export import export

    ctx = open_context(run)
    (mapping,) = ctx.gate("vocab")
    patches.apply("cpu")
    loop.attention.register()
    set_seed(ctx.recipe.seed)
    model = loop.build_model(
        ctx.recipe, ctx.verifier, mapping.path("d2t.npy"), mapping.path("t2d.npy"), device="cpu"
    )
    with tempfile.TemporaryDirectory() as checkpoint:
        model.save_pretrained(checkpoint)
        export(Path(checkpoint), out / "draft", ctx.verifier, ctx.recipe.train.export_dtype)
    (unit,) = ctx.plan("benchmark")
    measured = ctx.run.stage("benchmark").files / f"work-{unit.key}"
    run_benchmark(ctx.recipe, ctx.verifier, out / "draft", measured, results=out / "results.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
