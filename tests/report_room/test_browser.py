"""report.html in a real browser, as wide as a phone and as a desk: quiet, whole, and true.

Needs Debian's chromium, which browser.py installs where it may.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, browser
from made_results import made_results

from kimi_eagle.report.compared import Side, write_comparison
from kimi_eagle.report.page import ReportData, write_report

PHONE, DESK = 390, 1280

MARKED = """
[...document.querySelectorAll('[data-at]')].map(e => ({
    at: e.dataset.at, run: e.dataset.run ?? '', value: e.dataset.value ?? null,
    text: e.dataset.value === undefined ? e.textContent : null,
}))"""
"""Everything that says of itself where it lies in results.json."""

UNMARKED = r"""
[...document.querySelectorAll('#benchmark td.num, .tile .big, .notes li')].map(cell => {
    const copy = cell.cloneNode(true);
    copy.querySelectorAll('[data-at]').forEach(e => e.remove());
    return copy.textContent;
}).filter(text => /\d/.test(text.replace('95 %', '')))"""
"""Digits in the benchmark's figures that do not say where they come from."""

CUT_OFF = """
[...document.querySelectorAll('svg text')].filter(t => {
    const text = t.getBoundingClientRect(), card = t.closest('figure').getBoundingClientRect();
    return text.left < card.left || text.right > card.right || text.top < card.top
        || text.bottom > card.bottom;
}).concat([...document.querySelectorAll('th, td, p, li, h1, h2, h3, .tile > div')].filter(
    e => e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).display != 'inline'
)).map(e => e.textContent)"""
"""Words of a chart that lie outside its card, and of a cell or line that run over its edge."""

SMALLEST = """Math.min(...[...document.querySelectorAll('svg text')].map(
    t => parseFloat(getComputedStyle(t).fontSize) * t.getScreenCTM().a))"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("chromium")) as found:
        yield found


def whole(folder: Path, results: dict[str, Any] | None) -> ReportData:
    """A report that has something to say in every part."""
    lines: list[dict[str, Any]] = [
        {"step": i, "loss": 5 - i / 90, "accuracy": [i / 500, i / 900, i / 2000], "lr": 1e-3 / i,
         "tokens_per_s": 900.0 + i, "data_wait": 0.002, "grad_norm": 3.0}
        for i in range(1, 300)
    ]  # fmt: skip
    lines.append({"step": 299, "val_loss": 2.1, "val_accuracy": [0.55, 0.31, 0.12]})
    lines.append({"step": 299, "estimated_acceptance": 1.87, "estimated_rates": [0.5, 0.2]})
    (folder / "curves.jsonl").write_text("\n".join(map(json.dumps, lines)))
    stages = [
        {"stage": name, "state": "done", "units": 1234, "wall": 9e4, "load": 900.0, "work": 8e4,
         "tokens": 6_000_000_000, "bytes": 344_000_000_000_000, "rejected": 3, "peak_gib": 61.2}
        for name in ("regenerate", "prepare", "extract", "vocab", "train", "benchmark")
    ]  # fmt: skip
    use = {"gpu_hours": 1536.2, "waiting_s": 9000.0, "wall_s": 86400.0, "starts": 12}
    return ReportData(
        name="a-recipe-with-a-name-that-goes-on-and-on-without-a-place-to-break-it-anywhere",
        results=results,
        curves=folder / "curves.jsonl",
        stages=stages,
        sources={"prompts": {"read": 240, "taken": 200}},
        counts={"samples": 240},
        vocab={"coverage": 0.9861, "digest": "79b97c81ad1ade4b8a205e6446b49258"},
        lock={"image": {"sha256": "ab" * 32, "labels": {}}, "inputs": {"p": {"sha256": "cd" * 32}}},
        keys={"train": "feedbeef"},
        use={"train": use, "all": use},
        accepted=[{"stage": "extract", "share": 0.01, "reason": "one bad node", "time": 1.8e9}],
    )


def at(data: Any, pointer: str) -> Any:
    """The value that a JSON pointer (RFC 6901) names; KeyError or IndexError for none."""
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        data = data[int(key)] if isinstance(data, list) else data[key]
    return data


def told_wrong(marked: list[dict[str, Any]], results: dict[str, Any]) -> list[str]:
    """The marks of a page that do not say what results.json says."""
    wrong = []
    for mark in marked:
        value = at(results[mark["run"]], mark["at"])
        if mark["value"] is not None:
            same = float(mark["value"]) == value
        elif isinstance(value, bool) or not isinstance(value, int | float):
            same = mark["text"] == {True: "yes", False: "no"}.get(value, value)
        else:
            text = mark["text"].removesuffix("×").replace(",", "")
            shown = Decimal(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
            half = Decimal(10) ** Decimal(text.removesuffix("%")).as_tuple().exponent / 2
            half /= 100 if text.endswith("%") else 1
            same = abs(shown - Decimal(value)) <= half * Decimal("1.000001")
        if not same:
            wrong.append(f"{mark} is {value}")
    return wrong


def look(chromium: Browser, page: Path, width: int) -> list[str]:
    """Faults of a page that can be seen without knowing what it should say."""
    chromium.open(page, width)
    chromium.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    faults = [f"console: {line}" for line in chromium.console]
    faults += [f"asked for {url}" for url in chromium.requests if url != page.as_uri()]
    if (wide := chromium.run("document.documentElement.scrollWidth")) > width:
        faults.append(f"{wide} px wide on a screen of {width}")
    faults += [f"cut off: {text}" for text in chromium.run(CUT_OFF)]
    if (size := chromium.run(SMALLEST)) is not None and size < 9:
        faults.append(f"writes of {size} px in a chart")
    return faults


@pytest.mark.parametrize("width", [PHONE, DESK])
@pytest.mark.parametrize("kind", ["bfloat16", "float32", "none"])
def test_a_report_is_quiet_fits_and_says_what_the_results_say(
    chromium: Browser, tmp_path: Path, kind: str, width: int
) -> None:
    results = None if kind == "none" else made_results(kind, loops=(3, 8) * (kind != "float32"))
    page = tmp_path / "report.html"
    write_report(page, whole(tmp_path, results))
    assert look(chromium, page, width) == []
    marked = chromium.run(MARKED)
    assert told_wrong(marked, {"": json.loads(json.dumps(results))}) == []
    assert chromium.run(UNMARKED) == []
    shown = {mark["at"] for mark in marked}
    if results is None:
        assert not shown and "Not benchmarked yet" in chromium.run("document.body.textContent")
    else:
        # Each row's figures, each draft, each prompt: nothing that was measured is kept quiet.
        names = ("acceptance_length", "speedup", "intervals/acceptance_length/0", "left_out",
                 "tokens_per_second/draft", "time_to_first_token/draft/p90",
                 "drafts", "all_prompts/acceptance_length", "mean_in_flight/draft",
                 "warm_up/draft/tokens")  # fmt: skip
        rows = [f"/details/{part}/{i}" for part in ("batch_sizes", "sweeps")
                for i in range(len(results["details"][part]))]  # fmt: skip
        assert {f"{row}/{name}" for row in rows for name in names} <= shown
        prompts = range(len(results["details"]["prompts"]))
        assert {f"/details/prompts/{i}/acceptance_length" for i in prompts} <= shown
        assert {f"/acceptance_per_position/{i}" for i in range(3)} <= shown


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_runs_beside_each_other(chromium: Browser, tmp_path: Path, width: int) -> None:
    found = {"0": made_results("bfloat16"), "1": made_results("float32", ()), "2": None}
    sides = [
        Side(f"runs/{'long-' * 6}name-{i}", "/where/it/lies", results=results, bytes=10**14,
             fields={"train.lr": 0.001 * int(i), "seed": 3}, seconds=7e5, gpu_hours=1536.25)
        for i, results in found.items()
    ]  # fmt: skip
    page = tmp_path / "many.html"
    write_comparison(page, sides)
    assert look(chromium, page, width) == []
    marked = chromium.run(MARKED)
    assert told_wrong(marked, found) == []
    assert {m["run"] for m in marked} == {"0", "1"}
    text = chromium.run("document.body.innerText")
    assert "identical outputs\t—\tyes\t—" in text  # claimed in float32 alone
    assert "train.lr" in text and "Not measured alike: another dtype." in text


def test_the_looks_see_faults(chromium: Browser, tmp_path: Path) -> None:
    """What the tests above do not find is not there: each fault they look for, made on purpose."""
    results, page = made_results(), tmp_path / "report.html"
    write_report(page, whole(tmp_path, results))
    good = page.read_text()
    length = f"{results['acceptance_length']:.2f}"
    wide = '<p style="width: 700px">x</p>'
    for fault, told in (
        ('<script>console.error("oh")</script>', "console: error"),
        ("<script>nothing.at.all</script>", "console: "),
        ('<img src="http://127.0.0.1:9/x.png">', "asked for http://127.0.0.1:9/x.png"),
        (wide, "px wide on a screen of 390"),
        ('<p style="width: 9px; overflow-wrap: normal">overlong</p>', "cut off: overlong"),
        ('<figure><svg viewBox="0 0 9 9"><text x="-99" y="5">words</text></svg></figure>', "cut"),
    ):
        page.write_text(good.replace("</main>", f"{fault}</main>"))
        assert any(told in found for found in look(chromium, page, PHONE)), told
    page.write_text(good.replace(f">{length}<", f">{float(length) + 0.01:.2f}<", 1))
    chromium.open(page, PHONE)
    assert len(told_wrong(chromium.run(MARKED), {"": results})) == 1
    page.write_text(good.replace('data-at="/acceptance_length"', "", 1))
    chromium.open(page, PHONE)
    assert chromium.run(UNMARKED) == [length]
