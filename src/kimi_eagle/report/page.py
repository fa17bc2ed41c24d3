"""report.html: a run on one page, one file, no network, no script.

Reads what the caller gives (results.json's content, curves.jsonl, the lock, sums over records),
writes one HTML file atomically. Every part is optional: the report of a half-finished run shows
what there is, and names what there is not. Text and numbers go through `xml.etree`, which escapes
them; the parts are in the files beside this one (__init__.py).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, tostring

from kimi_eagle.files import write_atomic
from kimi_eagle.report import acceptance, breakdown, curves, measured, run, trained
from kimi_eagle.report.shown import Place
from kimi_eagle.report.svg import h
from kimi_eagle.report.tables import flat, section, table

EARLIER = "Figures of an earlier benchmark: for what the recipe says now the stage has not ended."


@dataclass
class ReportData:
    """What a report shows; anything may be missing.

    results: content of results.json. earlier: it was measured of a recipe or a draft before this.
    curves: path of curves.jsonl. stages: one dict a stage with stage, state, units, samples,
    tokens, rejected, bytes, freed_bytes, seconds (wall, load, work) and warning. sources: name ->
    rows, or name -> {what: rows}. counts: prepare's totals. vocab: coverage and others. lock:
    content of run.lock.json. provenance: shown where there is no lock (nested dicts flattened).
    keys: stage -> key of what is shown. links: text -> path or address relative to the report;
    None: the run's own files that lie beside it. use: what jobs used by stage (slurm/use.py).
    accepted: losses that a person accepted (accepted.py).
    """

    name: str
    results: Mapping[str, Any] | None = None
    earlier: bool = False
    curves: Path | None = None
    stages: Sequence[Mapping[str, Any]] = ()
    sources: Mapping[str, Any] = field(default_factory=dict)
    counts: Mapping[str, Any] = field(default_factory=dict)
    vocab: Mapping[str, Any] = field(default_factory=dict)
    lock: Mapping[str, Any] = field(default_factory=dict)
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
    results = Place(data.results)
    parts = (
        ("Benchmark", _benchmark(results, validation)),
        ("Training", _training(training, validation, results)),
        ("Run", _run(data)),
        ("Files", [_missing(data, results, training, validation), _links(data.links, folder)]),
    )
    there = [(title, found) for title, of in parts if (found := [e for e in of if e is not None])]
    body = h("main", h("header", h("h1", data.name), h("p", _subtitle(data), class_="quiet")))
    if results and data.earlier:
        body.append(h("p", EARLIER, class_="bad"))
    body.append(acceptance.headline(results))
    body.append(h("nav", *(h("a", title, href=f"#{title.lower()}") for title, _ in there)))
    for title, found in there:
        body.append(h("div", *found, id=title.lower()))
    return page(f"{data.name}: draft model report", body)


def _benchmark(results: Place, validation: Sequence[Any]) -> list[Element | None]:
    return [
        acceptance.notes(results),
        figures(
            acceptance.by_position(results, validation),
            acceptance.by_category(results),
            acceptance.by_batch(results),
            acceptance.by_draft(results),
            acceptance.by_k(results),
            acceptance.by_sampling(results),
            breakdown.breakdown_figure(results),
        ),
        measured.speed_table(results),
        measured.position_table(results),
        measured.group_tables(results),
        measured.draft_table(results),
        measured.loop_table(results),
        measured.duplicate_table(results),
        breakdown.breakdown_table(results),
        measured.latency_table(results),
        measured.floor_table(results),
        measured.count_table(results),
        measured.prompt_table(results),
        measured.engine_table(results),
    ]


def _training(
    training: Sequence[Any], validation: Sequence[Any], results: Place
) -> list[Element | None]:
    return [
        figures(
            trained.loss(training, validation),
            trained.accuracy(training, validation),
            trained.estimate(validation, results),
        ),
        figures(*trained.small(training), style="small"),
    ]


def _run(data: ReportData) -> list[Element | None]:
    return [
        figures(run.time_figure(data.stages)),
        run.stage_table(data.stages),
        run.storage_table(data.stages),
        run.use_table(data.use),
        run.accepted_table(data.accepted),
        run.data_tables(data.sources, data.counts, data.vocab),
        run.lock_part(data.lock, data.keys) if data.lock else _provenance(data),
    ]


def figures(*each: Element | None, style: str = "") -> Element | None:
    """Figures beside each other where the page is wide enough; None without any."""
    there = [one for one in each if one is not None]
    return h("div", *there, class_=f"figures {style}".strip()) if there else None


def page(title: str, body: Element) -> str:
    """A whole HTML document with this body."""
    head = h(
        "head",
        h("meta", charset="utf-8"),
        h("meta", name="viewport", content="width=device-width, initial-scale=1"),
        h("meta", name="color-scheme", content="light dark"),
        h("title", title),
        h("style", _CSS),
    )
    whole = h("html", head, h("body", body), lang="en")
    text = "<!doctype html>\n" + tostring(whole, encoding="unicode", method="html") + "\n"
    # Half a pair of surrogates is a name of a file in another encoding, and no UTF-8.
    return text.encode("utf-8", "replace").decode("utf-8")


def _subtitle(data: ReportData) -> str:
    done = sum(s.get("state") in ("done", "skipped") for s in data.stages)
    text = "EAGLE-3 draft model"
    if data.stages:
        whole = done == len(data.stages)
        text += ", all stages done" if whole else f", {done} of {len(data.stages)} stages done"
    return f"{text}; report of {time.strftime('%Y-%m-%d %H:%M', time.localtime())}"


def _provenance(data: ReportData) -> Element | None:
    rows = flat(data.provenance)
    rows += flat({f"{stage} key": key for stage, key in data.keys.items()})
    return section("Provenance", table(("", ""), rows, words=2)) if rows else None


def _missing(
    data: ReportData, results: Place, training: Sequence[Any], validation: Sequence[Any]
) -> Element | None:
    """What this page would show and cannot, each with the reason."""
    parts = [*acceptance.missing(results), *breakdown.missing(results)]
    parts += trained.missing(training, validation)
    parts += [
        (name, why)
        for name, there, why in (
            ("Stages, time", data.stages, "no records were given"),
            ("Storage", any(s.get("bytes") for s in data.stages), "no stage has counted bytes"),
            ("GPU hours", data.use, "none of the run's stages was a job"),
            ("What the run was made from", data.lock, "no run.lock.json that is whole"),
        )
        if not there
    ]
    if not parts:
        return None
    return section("Not in this report", table(("", ""), parts, words=2))


def _links(links: Mapping[str, str] | None, folder: Path) -> Element | None:
    if links is None:
        from kimi_eagle.rundir import RunDir

        run = RunDir(folder)
        own = (run.draft, run.bench / "results.json", run.rejects, run.path / "recipe.toml")
        names = [p.relative_to(folder).as_posix() for p in (*own, run.lock) if p.exists()]
        links = {name: name for name in names}
    if not links:
        return None
    items = [h("li", h("a", text, href=target)) for text, target in links.items()]
    return section("Files", h("ul", *items))


_CSS = (Path(__file__).with_name("report.css")).read_text(encoding="utf-8")
