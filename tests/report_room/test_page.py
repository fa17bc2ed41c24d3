"""report.html: one file without network or script that shows what there is and nothing else."""

from __future__ import annotations

import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree.ElementTree import fromstring

from made_results import made_results

from kimi_eagle.report import compared, curves
from kimi_eagle.report.page import ReportData, render, write_report
from kimi_eagle.report.shown import Place

# As format bench/2 was: older results show what they have.
RESULTS = {
    "acceptance_length": 1.523,
    "acceptance_per_position": [0.372, 0.113, 0.038],
    "identical_outputs": True,
    "tokens_per_second": {"draft": 25.0, "baseline": 20.0},
    "k": 3,
    "workload": "feedbeef",
    "details": {
        "identical_outputs_reason": "16 of 16 prompts, float32",
        "speedup": 1.25,
        "prompts": [
            {
                "name": "held:1",
                "tokens": {"draft": 64, "baseline": 64},
                "finish_reason": "length",
                "identical": True,
                "first_difference": None,
            }
        ],
    },
}
STAGES = [
    {"stage": "train", "state": "done", "units": 1, "wall": 100.0, "load": 10.0, "work": 80.0},
    {"stage": "benchmark", "state": "open", "units": 0},
]


class Page(HTMLParser):
    """Text, tags and addresses of a page; unbalanced tags are an error."""

    VOID = {"meta"}

    def __init__(self, html: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.pieces: list[str] = []
        self.feed(html)
        assert not self.open
        self.words = " ".join(self.pieces)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [v for k, v in attrs if k in ("href", "src")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.pieces += data.split()


def svgs(html: str) -> list:
    return [fromstring(text) for text in re.findall(r"<svg.*?</svg>", html, re.S)]


def test_a_whole_run(tmp_path: Path) -> None:
    lines = [
        {"step": i, "epoch": 0, "loss": 5.0 - i / 100, "accuracy": [0.1, 0.05], "lr": 1e-3}
        for i in range(1, 201)
    ] + [{"step": 200, "epoch": 0, "val_loss": 3.5, "val_accuracy": [0.36, 0.12, 0.04]}]
    (tmp_path / "curves.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 9')
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench/results.json").write_text("{}")
    data = ReportData(
        name="smollm2",
        results=RESULTS,
        curves=tmp_path / "curves.jsonl",
        stages=STAGES,
        sources={"prompts": 240},
        vocab={"coverage": 0.9861},
        provenance={"packages": {"torch": "2.13.0"}},
    )
    write_report(tmp_path / "report.html", data)
    html = (tmp_path / "report.html").read_text()
    page = Page(html)
    for shown in ("1.52", "1.25×", "yes", "16 of 16", "240", "0.9861", "2.13.0", "feedbeef"):
        assert shown in page.words
    acceptance, loss, accuracy, rate, spent = svgs(html)
    assert rate.get("aria-label") == "Lines: Learning rate"
    assert [float(e.get("data-value")) for e in acceptance.iter() if e.get("rx")] == [
        0.372,
        0.113,
        0.038,
    ]
    assert [float(e.get("data-value")) for e in loss.iter() if e.get("r")] == [3.5]
    assert sum(e.tag.endswith("polyline") for e in accuracy.iter()) == 3
    parts = [float(e.get("data-value")) for e in spent.iter() if e.get("data-value")]
    assert parts == [80.0, 10.0, 10.0]
    assert page.links == ["#benchmark", "#training", "#run", "#files", "bench/results.json"]
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert not re.findall(r"(?:https?:)?//(?!www\.w3\.org/2000/svg)", html.split("</style>")[1])
    assert "url(" not in html and "@import" not in html


def test_a_run_with_nothing_yet(tmp_path: Path) -> None:
    page = Page(render(ReportData("empty", curves=tmp_path / "absent"), tmp_path))
    assert "Not benchmarked yet" in page.words and "svg" not in page.tags
    assert "near-duplicates" not in page.words


def test_every_part_of_a_benchmark() -> None:
    """A pair: what stands in results.json of the newest format, and that it is told."""
    results = made_results()
    page = Page(render(ReportData("x", results=results), Path("/nowhere")))
    details = results["details"]
    for part in (
        f"{results['intervals']['acceptance_length'][0]:.2f} to",
        "10 of 12 prompts", "2 of 12 answers repeat themselves and are left out",
        f"alone they have an acceptance length of {details['loops']['acceptance_length']:.2f}",
        "1 of 12 prompts are near-duplicates", "4 of the prompts are later turns",
        "The verifier alone gives 12 of 12 answers unchanged at batch 16 instead of 1",
        "T 0.6, top-p 0.95", "published", "this draft, k = 4", "Speed-up against batch size",
        "Acceptance by k", "Acceptance by sampling", "Drafts compared", "mt-bench", "Latency",
        "verifier alone 51.5% 10.0% 27.0% 6.0% 5.5%", "Where a decode step goes",
    ):  # fmt: skip
        assert part in page.words, part
    charts = {svg.get("aria-label").partition(":")[0] for svg in svgs_of(results)}
    assert charts == {
        "Bar chart", "acceptance length", "Lines", "Shares of verifier alone, with the draft"
    }  # fmt: skip
    for absent in ("Speed-up against batch size", "Intervals", "Drafts compared"):
        assert f"{absent} [" not in page.words.partition("Not in this report")[2]


def svgs_of(results: dict) -> list:
    return svgs(render(ReportData("x", results=results), Path("/nowhere")))


def test_a_breakdown_that_failed_says_why() -> None:
    results = made_results()
    results["details"]["breakdown"]["draft"] = {"error": "the profiler left no trace"}
    results["details"]["breakdown"]["baseline"]["missing_ranks"] = 6
    words = Page(render(ReportData("x", results=results), Path("/nowhere"))).words
    assert "with the draft: not profiled: the profiler left no trace" in words
    assert "verifier alone 51.5%" in words
    assert "verifier alone: 6 ranks left no trace" in words


def test_what_was_not_measured_is_named() -> None:
    """Each part taken out of the results is missed by name, with what would measure it."""
    whole = made_results()
    for name, value, told in (
        ("sweeps", [], "[benchmark] against names no other draft"),
        ("sweeps", [], "[benchmark] sweep_k names no other k"),
        ("sweeps", [], "[benchmark] sampling is empty"),
        ("batch_sizes", whole["details"]["batch_sizes"][:1], "batch_sizes has one size"),
        ("by_category", {}, "the prompts have none"),
        ("near_duplicates", None, "near-duplicates are not known"),
        ("breakdown", None, "[benchmark] profile is off"),
    ):
        sweeps = [] if name == "batch_sizes" else whole["details"]["sweeps"]
        results = {**whole, "details": {**whole["details"], "sweeps": sweeps, name: value}}
        texts = [
            Page(render(ReportData("x", results=r), Path("/nowhere"))).words
            for r in (whole, results)
        ]
        assert [told in text for text in texts] == [False, True], told


def test_odd_results_do_not_break_the_page() -> None:
    """A value of another kind, at any place of the file, is shown as missing."""
    whole, nowhere = made_results(), Path("/nowhere")
    row = whole["details"]["batch_sizes"][0]
    for odd in (None, "?", [3], {"a": [3]}, float("nan"), True):
        details = {"batch_sizes": [dict.fromkeys(row, odd)], "sweeps": [odd]}
        assert render(ReportData("x", results={**whole, "details": details}), nowhere)
    for odd in (None, "?", [3], {"a": [3]}):
        results = {**dict.fromkeys(whole, odd), "details": whole["details"]}
        assert render(ReportData("x", results=results), nowhere)
        for name in ("batch_sizes", "sweeps", "drafts", "by_category", "prompts", "loops", "floor",
                     "near_duplicates", "engines", "versions", "breakdown"):  # fmt: skip
            details = {**whole["details"], name: odd}
            assert render(ReportData("x", results={**whole, "details": details}), nowhere)


def test_prompts_that_were_trained_on_are_shown(tmp_path: Path) -> None:
    example = {"prompt": "held:7", "trained": "chat: row 3", "words": "one two three"}
    for count, shown in ((1, True), (0, False)):
        near = {"prompts": count, "compared": 16, "not_compared": 0, "examples": [example] * count}
        results = {**RESULTS, "details": {**RESULTS["details"], "near_duplicates": near}}
        text = Page(render(ReportData("x", results=results), tmp_path)).words
        assert ("held:7" in text and "1 of 16 prompts" in text) is shown


def test_each_part_alone(tmp_path: Path) -> None:
    (tmp_path / "c").write_text('{"step": 1, "loss": 2.0}\n')
    for part in (
        {"results": {**RESULTS, "details": {}}},
        {"curves": tmp_path / "c"},
        {"stages": STAGES},
        {"sources": {"a": {"read": 3, "taken": 2}}},
        {"provenance": {"host": "x"}},
    ):
        Page(render(ReportData("part", **part), tmp_path))


def test_names_cannot_inject_markup(tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)>"
    results = json.loads(json.dumps(RESULTS))
    results["details"]["prompts"][0]["name"] = evil
    results["details"]["identical_outputs_reason"] = evil
    data = ReportData(
        evil, results=results, stages=[{"stage": evil, "wall": 1.0}], sources={evil: 1},
        provenance={evil: evil}, links={evil: "x"},
    )  # fmt: skip
    page = Page(render(data, tmp_path))
    assert "img" not in page.tags and page.words.count(evil) >= 7


def test_a_name_that_is_no_text_does_not_break_the_page(tmp_path: Path) -> None:
    results = json.loads(json.dumps(RESULTS))
    results["details"]["prompts"][0]["name"] = os.fsdecode(b"caf\xe9:1")
    write_report(tmp_path / "report.html", ReportData("x", results=results))
    assert "caf?:1" in (tmp_path / "report.html").read_text()


def test_odd_curves_do_not_break_the_page(tmp_path: Path) -> None:
    """Lines of another program, or of a disk that was full."""
    whole = {"step": 1, "loss": 2.0, "accuracy": [0.1, 0.2], "val_loss": 2.0, "lr": 0.1,
             "val_accuracy": [0.3], "estimated_acceptance": 1.5}  # fmt: skip
    lines = [{**whole, name: odd} for name in whole for odd in (None, "x", [None], {}, True, [[]])]
    training = [{k: v for k, v in line.items() if k != "val_loss"} for line in lines]
    (tmp_path / "c").write_text("\n".join(map(json.dumps, [*training, *lines, [3], 7, None])))
    words = Page(render(ReportData("x", curves=tmp_path / "c"), tmp_path)).words
    assert "Loss" in words and "Accuracy by draft token" in words and "Learning rate" in words


def test_storage_tells_what_lies_there_and_what_was_freed(tmp_path: Path) -> None:
    stages = [
        {"stage": "extract", "bytes": 4_616_000, "freed_bytes": 0, "tokens": 1000},
        {"stage": "train", "bytes": 1_384_000, "freed_bytes": 0, "tokens": 3000},
    ]
    words = Page(render(ReportData("x", stages=stages), tmp_path)).words
    assert "6 MB in the files" in words and "extract 4.62 MB 76.9% 4,616 train" in words
    stages[0]["freed_bytes"] = 4_616_000
    words = Page(render(ReportData("x", stages=stages), tmp_path)).words
    assert "4,616 4.62 MB train" in words


def test_runs_that_were_not_measured_alike_are_told() -> None:
    whole = made_results()
    for changes, told in (
        ({}, []),
        ({"workload": "other"}, ["other prompts"]),
        ({"workload": "other", "k": 5}, ["another number of draft tokens a step (k)"]),
        ({"details": {**whole["details"], "verifier_id": "x"}}, ["another verifier"]),
        (
            {"details": {**whole["details"], "batch_sizes": whole["details"]["batch_sizes"][1:]}},
            ["speed at another batch size"],
        ),
        ({"details": {**whole["details"], "machine": {"cpu": "x"}}}, ["speed on another machine"]),
        ({"details": {**whole["details"], "threads": 1}}, ["speed on another machine"]),
        (
            {"details": {**whole["details"], "engine": {"vllm": "0.30.0"}}},
            ["another version of vLLM"],
        ),
        (
            {"format": "bench/2"},
            ["another format of results, whose figures may mean something else"],
        ),
    ):
        found = compared.warnings([Place(whole), Place(None), Place({**whole, **changes})])
        assert found == [f"Not measured alike: {what}." for what in told]


def test_the_machine_of_the_figures_is_told() -> None:
    words = Page(render(ReportData("x", results=made_results()), Path("/nowhere"))).words
    assert "cpu a processor cores 16 gpus 8 × a GPU" in words


def test_not_claimed_and_not_identical_are_told_apart(tmp_path: Path) -> None:
    words = {
        same: Page(
            render(ReportData("x", results={**RESULTS, "identical_outputs": same}), tmp_path)
        ).words
        for same in (False, None)
    }
    told = {same: text.split("identical outputs ")[1].split()[0] for same, text in words.items()}
    assert told == {False: "no", None: "—"}


def test_long_curves_become_means_of_equal_parts() -> None:
    points = [(float(i), float(i % 2)) for i in range(10 * curves.POINTS)]
    found = curves.bins(points)
    assert len(found) == curves.POINTS
    assert all(y == 0.5 for _, y in found) and found[0][0] == 4.5
