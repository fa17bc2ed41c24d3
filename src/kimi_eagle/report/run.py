"""The report's parts on the run: its stages, time, storage, GPU hours, data, and what it was made
from (run.lock.json). What the run's draft is worth is told by acceptance.py."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from xml.etree.ElementTree import Element

from kimi_eagle.report.svg import h, number, stacked
from kimi_eagle.report.tables import figure, flat, plain, quiet, section, table

PHASES = ("work", "load")
"""Phases of a stage with a colour of their own; the rest of its wall time is `other`."""
IMAGE_LABELS = ("ai.kimi-eagle.", "org.opencontainers.image.")
"""Labels that say what an image holds; Apptainer adds others of its own."""

KEEPING = ("regenerate", "prepare", "extract")
"""Stages whose files grow with their tokens."""
STATES = 3
"""Of the code that are shown: a run that was worked on while it ran has many."""


def time_figure(stages: Sequence[Mapping[str, Any]]) -> Element | None:
    """Wall time of the workers by stage, split by phase."""
    rows = [(str(s.get("stage", "?")), _phases(s)) for s in stages if s.get("wall")]
    if not rows:
        return None
    total = sum(sum(v for _, v in parts) for _, parts in rows)
    legend = h("p", class_="legend quiet")
    for i, name in enumerate((*PHASES, "other")):
        legend.append(h("span", h("i", class_=f"key s{i}"), name))
    return figure(
        "Where the time went", f"{duration(total)} of worker time in all", stacked(rows, "s"),
        legend,
    )  # fmt: skip


def _phases(stage: Mapping[str, Any]) -> list[tuple[str, float]]:
    known = [(name, float(stage.get(name) or 0.0)) for name in PHASES]
    other = float(stage["wall"]) - sum(v for _, v in known)
    return [*known, ("other", max(0.0, other))]


def stage_table(stages: Sequence[Mapping[str, Any]]) -> Element | None:
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


def storage_table(stages: Sequence[Mapping[str, Any]]) -> Element | None:
    """Bytes that the records of each stage name; the extracted states are nearly all of it."""
    sized = [s for s in stages if s.get("bytes")]
    if not sized:
        return None
    total = sum(s["bytes"] for s in sized)
    rows = [
        [s.get("stage", "?"), size(s["bytes"]), f"{s['bytes'] / total:.1%}",
         number(s["bytes"] / s["tokens"]) if s.get("tokens") and s["stage"] in KEEPING else "",
         size(s["freed_bytes"]) if s.get("freed_bytes") else ""]
        for s in sized
    ]  # fmt: skip
    note = quiet(f"{size(total)} in the files of this recipe's units; checkpoints not counted.")
    titles = ("stage", "size", "share", "bytes a token", "freed since")
    return section("Storage", note, table(titles, rows, words=1))


def use_table(use: Mapping[str, Mapping[str, float]]) -> Element | None:
    """What jobs took of the cluster, as slurm/use.py adds it up."""
    if not use:
        return None
    rows = [
        [stage, f"{u.get('gpu_hours', 0):,.2f}",
         *(duration(u.get(k, 0)) for k in ("waiting_s", "wall_s")), int(u.get("starts", 0)),
         f"{u.get('cpu_seconds', 0) / 3600:,.2f}", f"{u.get('peak_gib', 0):.1f}"]
        for stage, u in use.items()
    ]  # fmt: skip
    titles = ("stage", "GPU hours", "waiting", "wall", "starts", "CPU hours", "peak GiB")
    return section("Jobs", table(titles, rows, words=1))


def accepted_table(accepted: Sequence[Mapping[str, Any]]) -> Element | None:
    """Losses that a person let pass, with the reason."""
    if not accepted:
        return None
    rows = [
        [a.get("stage", ""), a.get("reason", ""), f"{a.get('user', '')} on {a.get('host', '')}",
         time.strftime("%Y-%m-%d %H:%M", time.localtime(a.get("time", 0))), f"{a['share']:g}"]
        for a in accepted
    ]  # fmt: skip
    titles = ("gate after", "reason", "by", "when", "share of samples")
    return section("Accepted losses", table(titles, rows, words=4))


def data_tables(
    sources: Mapping[str, Any], counts: Mapping[str, Any], vocab: Mapping[str, Any]
) -> Element | None:
    """Rows by source, prepare's totals, and what the draft vocabulary covers."""
    parts: list[Element] = []
    if sources:
        nested = {k: v if isinstance(v, Mapping) else {"samples": v} for k, v in sources.items()}
        titles = list(dict.fromkeys(what for v in nested.values() for what in v))
        rows = [[name, *(plain(v.get(t, "")) for t in titles)] for name, v in nested.items()]
        parts.append(table(("source", *titles), rows, words=1))
    facts = {**counts, **{f"vocabulary {k}": v for k, v in vocab.items()}}
    if facts:
        parts.append(table(("", ""), flat(facts), words=2))
    return section("Data and vocabulary", *parts) if parts else None


def lock_part(lock: Mapping[str, Any], keys: Mapping[str, str]) -> Element | None:
    """What the run was made from; the words of the lock, shortened nowhere.

    lock: content of run.lock.json. keys: stage -> key of what this report shows.
    """
    if not lock:
        return None
    rows = [["image", image] for image in _image(lock.get("image"))]
    rows += [["code", line] for line in _code(lock.get("code"))]
    packages = _of(_of(lock, "environment"), "packages")
    rows += [[name, plain_list(version)] for name, version in packages.items()]
    locks = _of(lock, "environment").get("locks")
    rows += [["lock file", f"sha256:{d}"] for d in (locks if isinstance(locks, list) else ())]
    verifier = _of(lock, "verifier")
    rows += [["verifier id", verifier["id"]]] if verifier.get("id") else []
    if digest := verifier.get("tokenizer_digest"):
        rows.append(["tokenizer", digest])
    for name, entry in _of(lock, "inputs").items():
        found = entry if isinstance(entry, Mapping) else {}
        known = f"sha256:{found['sha256']}" if found.get("sha256") else found.get("reason")
        rows.append([name, known or "not known"])
    rows += [["machine", line] for line in _machines(lock.get("machines"))]
    if lock.get("recipe_digest"):
        rows.append(["recipe", lock["recipe_digest"]])
    rows += [[f"{stage} key", key] for stage, key in keys.items()]
    return section("Made from", table(("", ""), rows, words=2))


def _of(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = value.get(name)
    return found if isinstance(found, Mapping) else {}


def _image(image: Any) -> Iterable[str]:
    if not isinstance(image, Mapping):
        return ["none: the host's own Python"]
    if image.get("unknown"):
        return [f"not known: {image['unknown']}"]
    labels = _of(image, "labels")
    told = [f"{k}={v}" for k, v in labels.items() if k.startswith(IMAGE_LABELS)]
    return [f"sha256:{image.get('sha256', '?')}", *told]


def _code(code: Any) -> Iterable[str]:
    """One line a state of the code that units were made by, most units first."""
    ran = code.get("ran") if isinstance(code, Mapping) else None
    ran = ran if isinstance(ran, list) else []
    for entry in ran[:STATES]:
        units = entry.get("units", 0)
        words = [f"kimi-eagle {entry.get('kimi_eagle') or '?'}"]
        words += [f"commit {entry['commit']}"] if entry.get("commit") else []
        words += [f"source {entry['source']}"] if entry.get("source") else []
        words += [f"Python {entry['python']}"] if entry.get("python") else []
        yield f"{', '.join(words)}: {units} unit{'s'[: units != 1]}"
    if len(ran) > STATES:
        yield f"and {len(ran) - STATES} other states of the code: run.lock.json has them"


def _machines(machines: Any) -> Iterable[str]:
    for m in machines if isinstance(machines, list) else ():
        gpus = ", ".join(f"{n} × {name}" for name, n in (m.get("gpus") or {}).items())
        words = [gpus, str(m.get("cpu") or ""), f"{m['cpus']} CPUs" if m.get("cpus") else ""]
        words += [f"driver {m['driver']}" if m.get("driver") else ""]
        yield f"{', '.join(filter(None, words)) or '?'}: {m.get('units', 0)} units"


def plain_list(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else plain(value)


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def size(count: float) -> str:
    """Bytes for people: 71.6 MB, 344 TB (decimal, as disks are sold and quotas are told)."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.3g} {unit}" if count < 1000 else f"{count:,.0f} {unit}"
        count /= 1000
    raise AssertionError("TB ends the loop")
