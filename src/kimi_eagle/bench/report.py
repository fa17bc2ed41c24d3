"""report.html: a run on one page, one file, no network, no script.

Reads what the caller gives (results.json's content, curves.jsonl, sums over records), writes one
HTML file atomically. Every part is optional: the report of a half-finished run shows what there
is. Text and numbers go through `xml.etree`, which escapes them; figures are in `svg.py`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, tostring

from kimi_eagle.bench import curves
from kimi_eagle.bench.svg import Bar, Series, columns, h, lines, number, stacked
from kimi_eagle.bench.tables import (
    duplicate_note,
    flat,
    group_tables,
    plain,
    prompt_table,
    section,
    speed_table,
    table,
)
from kimi_eagle.files import write_atomic

PHASES = ("work", "load")
"""Phases of a stage with a colour of their own; the rest of its wall time is `other`."""


@dataclass
class ReportData:
    """What a report shows; anything may be missing.

    results: content of results.json. curves: path of curves.jsonl. stages: one dict a stage with
    stage, state, units, samples, tokens, rejected, bytes, seconds (wall, load, work) and warning.
    sources: name -> rows, or name -> {what: rows}. counts: prepare's totals. vocab: coverage and
    others. provenance, keys: shown as they are (nested dicts flattened). links: text -> path or
    address relative to the report; None: the run's own files that lie beside it. use: what jobs
    used by stage (slurm/use.py). accepted: losses that a person accepted (accepted.py).
    """

    name: str
    results: Mapping[str, Any] | None = None
    curves: Path | None = None
    stages: Sequence[Mapping[str, Any]] = ()
    sources: Mapping[str, Any] = field(default_factory=dict)
    counts: Mapping[str, Any] = field(default_factory=dict)
    vocab: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[str, str] | None = None
    use: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    accepted: Sequence[Mapping[str, Any]] = ()


def write_report(path: Path, data: ReportData) -> None:
    """Write the report of `data` to `path`, whole or not at all."""
    write_atomic(path, render(data, path.parent))


def render(data: ReportData, folder: Path) -> str:
    """The page as text; `folder` is where it will lie (for the links)."""
    training, validation = curves.read(data.curves)
    body = h(
        "main",
        h("header", h("h1", data.name), h("p", _subtitle(data), class_="quiet")),
        _headline(data.results),
        h(
            "div",
            _acceptance(data.results, validation),
            _loss(training, validation),
            _accuracy(training, validation),
            _time(data.stages),
            class_="figures",
        ),
        _stage_table(data.stages),
        _use_table(data.use),
        _accepted(data.accepted),
        speed_table(data.results),
        group_tables(data.results),
        duplicate_note(data.results),
        prompt_table(data.results),
        _data_tables(data),
        _provenance(data),
        _links(data.links, folder),
    )
    head = h(
        "head",
        h("meta", charset="utf-8"),
        h("meta", name="viewport", content="width=device-width, initial-scale=1"),
        h("meta", name="color-scheme", content="light dark"),
        h("title", f"{data.name}: draft model report"),
        h("style", _CSS),
    )
    page = h("html", head, h("body", body), lang="en")
    return "<!doctype html>\n" + tostring(page, encoding="unicode", method="html") + "\n"


def _subtitle(data: ReportData) -> str:
    done = sum(s.get("state") in ("done", "skipped") for s in data.stages)
    text = "EAGLE-3 draft model"
    if data.stages:
        whole = done == len(data.stages)
        text += ", all stages done" if whole else f", {done} of {len(data.stages)} stages done"
    return f"{text}; report of {time.strftime('%Y-%m-%d %H:%M', time.localtime())}"


# ---------------------------------------------------------------------------- headline, figures


def _headline(results: Mapping[str, Any] | None) -> Element:
    if not results:
        return h("p", "Not benchmarked yet.", class_="quiet")
    details, speed = results.get("details") or {}, results["tokens_per_second"]
    same = results["identical_outputs"]
    batch = (details.get("batch_sizes") or [{}])[0].get("batch_size")
    return h(
        "div",
        _tile(
            f"{results['acceptance_length']:.2f}",
            "acceptance length",
            f"tokens a verifier step, k = {results['k']}",
        ),
        _tile(
            f"{speed['draft'] / speed['baseline']:.2f}×",
            "speed with the draft",
            f"{number(speed['baseline'])} → {number(speed['draft'])} tokens/s"
            + (f", batch {batch}" if batch else ""),
        ),
        _tile(
            {True: "yes", False: "no"}.get(same, "—"),
            "identical outputs",
            str(details.get("identical_outputs_reason") or ""),
            "good" if same else "bad" if same is False else "",
        ),
        class_="tiles",
    )


def _tile(value: str, name: str, more: str, style: str = "") -> Element:
    return h(
        "div",
        h("div", name, class_="quiet"),
        h("div", value, class_=f"big {style}".strip()),
        h("div", more, class_="quiet"),
        class_="tile",
    )


def _acceptance(
    results: Mapping[str, Any] | None, validation: Sequence[Mapping[str, Any]]
) -> Element | None:
    if not results:
        return None
    served = results["acceptance_per_position"]
    trained = (validation[-1].get("val_accuracy") if validation else None) or []
    markers = [*trained, *[None] * len(served)]
    bars = [
        Bar(f"position {i + 1}" if len(served) < 6 else str(i + 1), value, markers[i])
        for i, value in enumerate(served)
    ]
    # A rounded top: drafts of a small model rarely reach half of 1.
    top = math.ceil(4 * max([0.01, *served, *trained])) / 4
    note = "Share of drafts whose tokens were accepted up to this position"
    if trained:
        note += "; the line across is the accuracy in validation"
    return _figure("Acceptance by position", note, columns(bars, top, "validation"))


def _loss(
    training: Sequence[Mapping[str, Any]], validation: Sequence[Mapping[str, Any]]
) -> Element | None:
    series = [
        Series(
            "training", curves.bins([(t["step"], t["loss"]) for t in training if _has(t, "loss")])
        ),
        Series(
            "validation",
            [(v["step"], v["val_loss"]) for v in validation if _has(v, "val_loss")],
            "s2",
            dots=True,
        ),
    ]
    series = [s for s in series if s.points]
    if not series:
        return None
    return _figure("Loss", curves.bin_note(training), lines(series, "step"))


def _accuracy(
    training: Sequence[Mapping[str, Any]], validation: Sequence[Mapping[str, Any]]
) -> Element | None:
    series = []
    depth = max((len(t.get("accuracy") or ()) for t in training), default=0)
    for i in range(depth):
        found = [(t["step"], t["accuracy"][i]) for t in training if len(t["accuracy"]) > i]
        series.append(Series(f"token {i + 1}", curves.bins(found), f"p{min(i, 3)}"))
    tested = [(v["step"], v["val_accuracy"][0]) for v in validation if v.get("val_accuracy")]
    if tested:
        series.append(Series("1, valid.", tested, "s2", dots=True))
    if not series:
        return None
    note = "Share of draft tokens right, with all before them. " + curves.bin_note(training)
    return _figure("Accuracy by draft token", note, lines(series, "step", zero=True))


def _time(stages: Sequence[Mapping[str, Any]]) -> Element | None:
    rows = [(str(s.get("stage", "?")), _phases(s)) for s in stages if s.get("wall")]
    if not rows:
        return None
    total = sum(sum(v for _, v in parts) for _, parts in rows)
    legend = h("p", class_="legend quiet")
    for i, name in enumerate((*PHASES, "other")):
        legend.append(h("span", h("i", class_=f"key s{i}"), name))
    return _figure(
        "Where the time went", f"{_duration(total)} of worker time in all", stacked(rows, "s"),
        legend,
    )  # fmt: skip


def _phases(stage: Mapping[str, Any]) -> list[tuple[str, float]]:
    known = [(name, float(stage.get(name) or 0.0)) for name in PHASES]
    other = float(stage["wall"]) - sum(v for _, v in known)
    return [*known, ("other", max(0.0, other))]


def _figure(title: str, note: str, *content: Element | None) -> Element:
    return h("figure", h("figcaption", h("h2", title), h("p", note, class_="quiet")), *content)


# ------------------------------------------------------------------------------------- tables


def _stage_table(stages: Sequence[Mapping[str, Any]]) -> Element | None:
    if not stages:
        return None
    rows = []
    for s in stages:
        tokens, work = s.get("tokens") or 0, s.get("work") or 0.0
        cells = [s.get("stage", "?"), s.get("state", ""), s.get("units") or 0]
        cells += [number(float(s[name])) if s.get(name) else "" for name in ("wall", *PHASES)]
        cells += [f"{tokens:,}" if tokens else "", number(tokens / work) if tokens and work else ""]
        cells += [s.get("rejected") or "", f"{s['peak_gib']:.1f}" if s.get("peak_gib") else ""]
        rows.append(cells)
    titles = (
        "stage", "state", "units", "wall s", "work s", "load s", "tokens", "tokens/s", "rejected",
        "peak GiB",
    )  # fmt: skip
    warnings = [f"{s['stage']}: {s['warning']}" for s in stages if s.get("warning")]
    notes = [h("p", text, class_="bad") for text in warnings]
    return section("Stages", table(titles, rows, words=2), *notes)


def _use_table(use: Mapping[str, Mapping[str, float]]) -> Element | None:
    if not use:
        return None
    rows = [
        [stage, f"{u['gpu_hours']:,.2f}", *(_duration(u[k]) for k in ("waiting_s", "wall_s")),
         int(u["starts"]), f"{u['cpu_seconds'] / 3600:,.2f}", f"{u['peak_gib']:.1f}"]
        for stage, u in use.items()
    ]  # fmt: skip
    titles = ("stage", "GPU hours", "waiting", "wall", "starts", "CPU hours", "peak GiB")
    return section("Jobs", table(titles, rows, words=1))


def _accepted(accepted: Sequence[Mapping[str, Any]]) -> Element | None:
    if not accepted:
        return None
    rows = [
        [a.get("stage", ""), a.get("reason", ""), f"{a.get('user', '')} on {a.get('host', '')}",
         time.strftime("%Y-%m-%d %H:%M", time.localtime(a.get("time", 0))), f"{a['share']:g}"]
        for a in accepted
    ]  # fmt: skip
    titles = ("gate after", "reason", "by", "when", "share of samples")
    return section("Accepted losses", table(titles, rows, words=4))


def _data_tables(data: ReportData) -> Element | None:
    parts: list[Element] = []
    if data.sources:
        nested = {
            k: v if isinstance(v, Mapping) else {"samples": v} for k, v in data.sources.items()
        }
        titles = list(dict.fromkeys(what for v in nested.values() for what in v))
        rows = [[name, *(plain(v.get(t, "")) for t in titles)] for name, v in nested.items()]
        parts.append(table(("source", *titles), rows, words=1))
    facts = {**data.counts, **{f"vocabulary {k}": v for k, v in data.vocab.items()}}
    if facts:
        parts.append(table(("", ""), flat(facts), words=1))
    return section("Data and vocabulary", *parts) if parts else None


def _provenance(data: ReportData) -> Element | None:
    details = dict((data.results or {}).get("details") or {})
    shown = ("dtype", "threads", "versions", "verifier", "verifier_id", "draft", "draft_digest")
    rows = flat(data.provenance)
    rows += flat({f"{stage} key": key for stage, key in data.keys.items()})
    rows += flat({f"benchmark {k}": details[k] for k in shown if k in details})
    if data.results:
        rows += flat({"benchmark workload": data.results["workload"]})
    return section("Provenance", table(("", ""), rows, words=2)) if rows else None


def _links(links: Mapping[str, str] | None, folder: Path) -> Element | None:
    if links is None:
        from kimi_eagle.rundir import RunDir

        run = RunDir(folder)
        own = (run.draft, run.bench / "results.json", run.rejects, run.path / "recipe.toml")
        names = [p.relative_to(folder).as_posix() for p in own if p.exists()]
        links = {name: name for name in names}
    if not links:
        return None
    items = [h("li", h("a", text, href=target)) for text, target in links.items()]
    return section("Files", h("ul", *items))


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _has(line: Mapping[str, Any], name: str) -> bool:
    return isinstance(line.get(name), int | float)


_CSS = (Path(__file__).with_name("report.css")).read_text(encoding="utf-8")
