"""The report for people: Markdown that reads as plain text, too."""

from __future__ import annotations

import time
from typing import Any

_SIGN = {"ok": "ok", "failed": "FAILED", "skipped": "skipped"}


def markdown(report: dict[str, Any]) -> str:
    """selftest.md from selftest.json's content."""
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(report["started"]))
    where = f"{report['gpus']} GPUs" if report["device"] == "cuda" else "CPU"
    verdict = "all checks hold" if report["ok"] else "something failed"
    lines = [
        "# kimi-eagle selftest",
        "",
        f"{verdict}; {where}, toy Kimi at TP {report['tp']}, {report['seconds']:.0f} s, {when}",
        "",
        *_table(
            ("part", "state", "s", "what"),
            [
                (p["name"], _SIGN[p["state"]], f"{p['seconds']:.0f}", p["what"])
                for p in report["parts"]
            ],
        ),
    ]
    for part in report["parts"]:
        if part["checks"] or part["figures"] or part.get("error"):
            lines += ["", f"## {part['name']}", "", *_part(part)]
    return "\n".join(lines) + "\n"


def _part(part: dict[str, Any]) -> list[str]:
    lines = [f"error: {part['error']}", ""] if part.get("error") else []
    if part["checks"]:
        rows = [
            ("ok" if c["ok"] else "FAILED", c["what"], _short(c["value"]), c["expected"])
            for c in part["checks"]
        ]
        lines += [*_table(("", "check", "found", "expected"), rows), ""]
    figures = dict(part["figures"])
    if stages := figures.pop("stages", None):
        names = list(dict.fromkeys(k for row in stages for k in row))
        lines += [*_table(names, [[_short(r.get(n, "")) for n in names] for r in stages]), ""]
    for name, value in figures.items():
        if isinstance(value, str) and "\n" in value:
            lines += [f"{name}:", "", *(f"    {x}" for x in value.splitlines()), ""]
        elif isinstance(value, dict):
            lines.append(f"- {name}: " + ", ".join(f"{k} {_short(v)}" for k, v in value.items()))
        else:
            lines.append(f"- {name}: {_short(value)}")
    if part.get("traceback"):
        lines += ["", *(f"    {x}" for x in part["traceback"].splitlines())]
    return lines


def _table(head: Any, rows: list[Any]) -> list[str]:
    """A Markdown table whose columns line up as text."""
    cells = [[str(x).replace("|", "/") for x in row] for row in (head, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]

    def line(row: list[str]) -> str:
        return "| " + " | ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)) + " |"

    return [line(cells[0]), "|" + "|".join("-" * (w + 2) for w in widths) + "|",
            *map(line, cells[1:])]  # fmt: skip


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 100 else f"{value:.0f}"
    if isinstance(value, dict):
        return ", ".join(f"{k} {_short(v)}" for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(map(_short, value))
    return str(value)
