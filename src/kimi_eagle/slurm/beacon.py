"""What a worker says to its supervisor: four short lines that a shell can read.

host.sh shows the first two in squeue (name and comment) and takes the third, the number of units
this process committed, as the sign that the engine works.
"""

from __future__ import annotations

from pathlib import Path

from kimi_eagle import files
from kimi_eagle.rundir import RunDir
from kimi_eagle.slurm.names import SHORT
from kimi_eagle.survey import rate_and_eta, view
from kimi_eagle.worker import Worker


def write(path: Path, run: RunDir, worker: Worker) -> None:
    """Write the four lines: short name, comment, units of this process, units of the stage."""
    stage = worker.dir.path.name
    seen = view(run, stage)
    share = seen.tokens_done / seen.tokens_total if seen.tokens_total else 0.0
    percent = int(100 * min(share, 1.0))
    rate, eta = rate_and_eta(seen)
    comment = f"{percent}%" + (f" {_short(rate)} tok/s" if rate else "")
    if eta is not None:
        comment += f" ETA {int(eta) // 3600}:{int(eta) % 3600 // 60:02d}"
    lines = [f"{SHORT[stage]}-{percent:02d}%", comment, str(worker.committed)]
    lines.append(f"{seen.done}/{seen.units}")
    files.write_atomic(path, "\n".join(lines) + "\n", sync=False)


def _short(rate: float) -> str:
    return f"{rate / 1000:.0f}k" if rate >= 10_000 else f"{rate:.0f}"
