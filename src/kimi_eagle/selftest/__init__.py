"""`selftest`: one node, under 20 minutes, everything that a real run needs, at small size.

`run` does the parts one after the other (`parts.py`), each on its own: what one breaks, the others
still tell. Writes OUT/selftest.json and OUT/selftest.md after every part, so that a node that is
lost half-way leaves what was known; runs, logs and models lie beside them.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from kimi_eagle import files
from kimi_eagle.errors import KimiEagleError
from kimi_eagle.selftest.parts import PARTS, Check, Part, Test
from kimi_eagle.selftest.report import markdown

__all__ = ["FORMAT", "Check", "Part", "Test", "run"]

FORMAT = "selftest/1"

Told = Callable[[str, str, float], None]
"""Called with a part's name, its state (`running`, `ok`, `failed`, `skipped`) and seconds."""


def run(test: Test, on_part: Told, parts: Sequence[Part] = PARTS) -> dict[str, Any]:
    """Do all parts; returns the report, which is on disk too.

    state of a part: ok, failed (an error, or a check that does not hold) or skipped (a part that it
    stands on failed, or it concerns another machine). The report's own `ok`: no part failed.
    """
    started = time.time()
    report: dict[str, Any] = {
        "format": FORMAT,
        "device": test.device,
        "gpus": test.gpus,
        "tp": test.tp,
        "started": round(started, 1),
        "parts": [],
    }
    for part in parts:
        on_part(part.name, "running", 0.0)
        row = _one(part, test, {r["name"]: r["state"] for r in report["parts"]})
        report["parts"].append(row)
        report["seconds"] = round(time.time() - started, 1)
        report["ok"] = all(r["state"] != "failed" for r in report["parts"])
        files.write_atomic(test.out / "selftest.json", files.to_json(report))
        files.write_atomic(test.out / "selftest.md", markdown(report))
        on_part(part.name, row["state"], row["seconds"])
    return report


def _one(part: Part, test: Test, before: dict[str, str]) -> dict[str, Any]:
    """One part's row: name, what, state, seconds, figures, checks, error."""
    row: dict[str, Any] = {"name": part.name, "what": part.what, "figures": {}, "checks": []}
    begun = time.monotonic()
    stands = [name for name in part.after if before.get(name) in ("failed", "skipped")]
    try:
        if part.gpu_only and test.device != "cuda":
            row |= {"state": "skipped", "error": "for GPUs"}
        elif stands:
            row |= {"state": "skipped", "error": f"stands on {', '.join(stands)}"}
        else:
            for found in part.do(test, row["figures"]):
                row["checks"].append(found.row())
            row["state"] = "ok" if all(c["ok"] for c in row["checks"]) else "failed"
    except KimiEagleError as e:
        row |= {"state": "failed", "error": e.line()}
    except Exception as e:  # whatever one part meets, the others and the report go on
        where = "".join(traceback.format_exception(e)[-3:]).strip()
        row |= {"state": "failed", "error": f"{type(e).__name__}: {e}", "traceback": where}
    row["seconds"] = round(time.monotonic() - begun, 1)
    return row
