"""The benchmark: measurements with and without drafts, compared, as `results.json`.

Reads draft directories and a verifier; writes `measurements/*.json` (kept, so that a killed
benchmark does only the rest) and `results.json` (atomically), format bench/3. Figures are not
rounded; one that does not exist is null. At the top stands the headline: the run's own draft at
the recipe's k and first batch size, greedy, without the answers that are loops.

    format                   "bench/3"
    acceptance_length        tokens a verifier step yields: 1 + accepted / drafts, as vLLM counts
                             them: also what its last step accepts past an answer's end
    acceptance_per_position  [k] share of drafts accepted at least up to that position
    identical_outputs        all prompts, with and without: true or false in float32, else null
    tokens_per_second        {draft, baseline}
    k, workload              draft tokens a step; digest of what was asked
    intervals                of these figures: see a row's
    details
      batch_sizes            [row] the run's own draft at k, greedy; the first is the headline's
      sweeps                 [row] all else: other k, sampling, the drafts of `against`
      drafts                 {name: {path, digest, architecture, by_category, by_source}}, the own
                             first (named "draft"); the groups at k, first batch size, greedy
      conditional_acceptance, speedup          the headline row's
      by_category, by_source {group: {prompts, left_out, drafts, output_tokens, acceptance_length,
                             acceptance_per_position, identical_prompts}} of the own draft
      prompts                [{name, category, source, tokens {draft, baseline}, seconds {...},
                             finish_reason, identical, first_difference, drafts, acceptance_length,
                             loop: null or {period, start, tokens}}] of the headline's measurement
      loops                  {prompts, of, names, rule, left_out (whether), acceptance_length (of
                             them alone), acceptance_length_all (with them)}
      identical_outputs_reason, identical_prompts
      floor                  [{batch_size, than, identical_prompts, prompts, share,
                             first_difference}] the verifier alone at another batch size than the
                             first: what differs there, no draft is to blame for
      near_duplicates, later_turns             what overlap.py found; prompts that are later turns
      breakdown              {baseline, draft}: see breakdown.combined, each may be {error}; null
                             where the recipe does not ask for it ([benchmark] profile)
      plan                   {engine_loads, measurements}
      engines                [{draft (null: alone), k, load_seconds, measure_seconds,
                             peak_memory_bytes, measurements: [digest]}] in order of the loads
      max_tokens, dtype, engine, versions, threads, verifier, verifier_id, draft, draft_digest,
      draft_architecture
      machine                {cpu, cores, gpus} on which all was measured, as far as known

A row (its sampling is the baseline's too; times in seconds):

    draft, k, batch_size, temperature (0: greedy), top_p
    prompts, left_out        that make the figures; with loops for answers
    acceptance_length, acceptance_per_position
    conditional_acceptance   [k] share accepted where all positions before were; null where that
                             never was
    tokens_per_second        {draft, baseline} generated, prefill included. At batch 1 over the
                             row's prompts; else over all, for they share the engine's steps
    speedup                  their ratio
    time_to_first_token, time_per_output_token (after the first)   {draft, baseline: {median, p90}}
                             over prompts; the first waits for its batch's other prompts too
    intervals                {acceptance_length, acceptance_per_position, conditional_acceptance,
                             tokens_per_second {draft, baseline}, speedup: [low, high]}, 95% over
                             prompts (intervals.py); the last two at batch 1 alone
    identical_prompts        of all, null where sampled
    identity                 {identical_prompts, prompts, share, first_difference: null or {least,
                             median}}: null where sampled
    all_prompts              {acceptance_length, tokens_per_second, speedup} with the loops
    drafts, draft_tokens, accepted_tokens    vLLM's counters over all prompts
    output_tokens, seconds   {draft, baseline} over all prompts
    mean_in_flight           {draft, baseline} requests in flight on average: less than batch_size
                             while the last answers end
    warm_up                  {draft, baseline: {prompts, tokens, seconds}}: counted nowhere

Equality of the greedy outputs is claimed in float32 only: in bfloat16 the verifier itself answers
differently when it checks k + 1 tokens in one step instead of one, with or without a good draft.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_eagle.bench import breakdown, loops
from kimi_eagle.bench.draftdir import DraftInfo
from kimi_eagle.bench.groups import accepted_lengths, by_group
from kimi_eagle.bench.measure import Measurement, Run, Spec, measure
from kimi_eagle.bench.plan import Load, make_loads, open_drafts, told
from kimi_eagle.bench.rows import acceptance, first_difference, identity, kept_prompts, make_row
from kimi_eagle.bench.workload import Workload, load_workload
from kimi_eagle.errors import UsageError
from kimi_eagle.files import write_atomic
from kimi_eagle.recipe import Recipe

if TYPE_CHECKING:
    from kimi_eagle.verifier import Verifier

FORMAT = "bench/3"


def run_benchmark(
    recipe: Recipe,
    verifier: Verifier,
    draft: str | Path,
    out_dir: Path,
    *,
    workload: Workload | None = None,
    results: Path | None = None,
    duplicates: dict[str, Any] | None = None,
    on_plan: Callable[[list[str]], None] | None = None,
    on_progress: Callable[[float, int], None] | None = None,
) -> dict[str, Any]:
    """Measure with and without the drafts; write and return results.json's content.

    draft: any draft directory that vLLM loads; the recipe's `against` come beside it. workload:
    default the recipe's held-out prompts. results: the file to write, default out_dir/results.json;
    measurements lie in out_dir. duplicates: what overlap.py found; None where the training data are
    not known. on_plan: gets the lines of plan.told before the first engine starts.
    on_progress(share done 0..1, tokens generated so far). Raises UsageError for a directory that is
    no draft for this verifier or a bad prompts file, RunError where an engine fails; finished
    measurements are kept either way.
    """
    drafts = open_drafts(recipe, verifier, draft)
    if workload is None:
        from kimi_eagle.data.template import ChatTemplate

        workload = load_workload(recipe, ChatTemplate(verifier, recipe.template))
    results = results or out_dir / "results.json"
    folder = out_dir / "measurements"
    for place in (folder, results.parent):
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise UsageError(f"cannot be written: {e.strerror}", where=place) from None
    loads = make_loads(recipe, verifier, drafts, workload)
    if on_plan:
        on_plan(told(loads, folder))
    done: list[Load] = []
    found: list[list[Measurement]] = []
    for load in loads:
        made = sum(m.run.output_tokens for one in found for m in one)

        def report(event: dict[str, Any], number: int = len(done), before: int = made) -> None:
            if on_progress and "share" in event:  # the load counts as a fifth
                share = (number + 0.2 + 0.8 * event["share"]) / len(loads)
                on_progress(share, before + event["tokens"])

        # The verifier alone went first: later turns stand on its answers.
        asked = replace(load.spec, workload=done[0].spec.workload) if done else load.spec
        spec, measured = measure(asked, folder, report)
        done.append(replace(load, spec=spec))
        found.append(measured)
    data = compare(done, found, drafts)
    data["details"]["later_turns"] = sum(len(c["turns"]) for c in workload.later)
    data["details"]["near_duplicates"] = duplicates
    shares = {load.spec.kind: breakdown.found(load.spec, folder) for load in done[:2]}
    data["details"]["breakdown"] = shares if recipe.benchmark.profile else None
    write_atomic(results, json.dumps(data, indent=1))
    return data


def compare(
    loads: Sequence[Load], found: Sequence[Sequence[Measurement]], drafts: dict[str, DraftInfo]
) -> dict[str, Any]:
    """What the measurements say (the module's docstring), without what is known before them.

    loads: the verifier alone, the run's own draft, the others. found: one measurement a case, in
    the same order.
    """
    alone = dict(zip(loads[0].spec.cases, found[0], strict=True))
    spec, own, seed = loads[1].spec, found[1][0], int(loads[0].spec.engine.get("seed", 0))
    first, baseline = own.case, alone[own.case].run
    rows = [
        [
            make_row(str(load.draft), int(load.spec.k or 0), m.case, m.run, alone[m.case].run, seed)
            for m in measured
        ]
        for load, measured in zip(loads[1:], found[1:], strict=True)
    ]
    greedy = [row for row in rows[0] if not row["temperature"]]
    rest = [row for part in rows for row in part if row not in greedy]
    head, workload = greedy[0], spec.workload
    groups = {
        load.draft: _groups(load.spec, measured[0].run, baseline)
        for load, measured in zip(loads[1:], found[1:], strict=True)
        if load.spec.k == spec.k
    }
    same, reason = _claim(spec.engine["dtype"], head["identity"])
    return {
        "format": FORMAT,
        "acceptance_length": head["acceptance_length"],
        "acceptance_per_position": head["acceptance_per_position"],
        "identical_outputs": same,
        "tokens_per_second": head["tokens_per_second"],
        "k": head["k"],
        "workload": workload.digest,
        "intervals": head["intervals"],
        "details": {
            "identical_outputs_reason": reason,
            "identical_prompts": head["identical_prompts"],
            "conditional_acceptance": head["conditional_acceptance"],
            "speedup": head["speedup"],
            "batch_sizes": greedy,
            "sweeps": rest,
            "drafts": {
                load.draft: _about(load.spec, drafts[str(load.draft)]) | groups[load.draft]
                for load in loads[1:]
                if load.spec.k == spec.k
            },
            **groups[loads[1].draft],
            "prompts": _prompts(workload, head["k"], own.run, baseline),
            "loops": _loops(workload, head["k"], own.run, baseline),
            "floor": [
                {"batch_size": case.batch_size, "than": first.batch_size}
                | identity(m.run, baseline)
                for case, m in alone.items()
                if case.greedy and case != first
            ],
            "plan": {"engine_loads": len(loads), "measurements": sum(map(len, found))},
            "engines": [_engine(load, each) for load, each in zip(loads, found, strict=True)],
            "max_tokens": workload.max_tokens,
            "dtype": spec.engine["dtype"],
            "engine": spec.engine,
            "versions": own.versions,
            "threads": own.threads,
            "machine": spec.machine,
            "verifier": spec.verifier,
            "verifier_id": spec.verifier_id,
            "draft": spec.draft,
            "draft_digest": spec.draft_digest,
            "draft_architecture": drafts[str(loads[1].draft)].architecture,
        },
    }


def _claim(dtype: str, found: dict[str, Any]) -> tuple[bool | None, str]:
    """(claim, why); the claim is None where equality cannot be expected."""
    same, prompts = found["identical_prompts"], found["prompts"]
    if dtype != "float32":
        return None, f"claimed in float32 only, this was {dtype}: {same} of {prompts} prompts"
    return same == prompts, f"{same} of {prompts} prompts, float32"


def _groups(spec: Spec, draft: Run, baseline: Run) -> dict[str, Any]:
    kept, workload, k = kept_prompts(draft, baseline), spec.workload, int(spec.k or 0)
    return {
        "by_category": by_group(workload.categories, k, draft, baseline, kept),
        "by_source": by_group(workload.sources, k, draft, baseline, kept),
    }


def _prompts(workload: Workload, k: int, draft: Run, baseline: Run) -> list[dict[str, Any]]:
    lengths = accepted_lengths(workload, k, draft)
    return [
        {
            "name": name,
            "tokens": {"draft": len(draft.tokens[i]), "baseline": len(baseline.tokens[i])},
            "seconds": {"draft": draft.each_seconds[i], "baseline": baseline.each_seconds[i]},
            "finish_reason": draft.finish_reasons[i],
            "identical": draft.tokens[i] == baseline.tokens[i],
            "first_difference": first_difference(draft.tokens[i], baseline.tokens[i]),
            "loop": draft.loops[i] or baseline.loops[i],
            **lengths[i],
        }
        for i, name in enumerate(workload.names)
    ]


def _loops(workload: Workload, k: int, draft: Run, baseline: Run) -> dict[str, Any]:
    found = [bool(a or b) for a, b in zip(draft.loops, baseline.loops, strict=True)]
    theirs = [h for h, loop in zip(draft.histograms or [], found, strict=True) if loop]
    return loops.told(found, workload.names) | {
        "left_out": any(found) and len(kept_prompts(draft, baseline)) < len(found),
        "acceptance_length": acceptance(theirs, k)["acceptance_length"],
        "acceptance_length_all": acceptance(draft.histograms or [], k)["acceptance_length"],
    }


def _about(spec: Spec, info: DraftInfo) -> dict[str, Any]:
    return {"path": spec.draft, "digest": spec.draft_digest, "architecture": info.architecture}


def _engine(load: Load, measured: Sequence[Measurement]) -> dict[str, Any]:
    """load_seconds: of its longest load, where several processes did its measurements."""
    return {
        "draft": load.draft,
        "k": load.spec.k,
        "load_seconds": round(max(m.load_seconds for m in measured), 2),
        "measure_seconds": round(sum(m.run.seconds for m in measured), 2),
        "peak_memory_bytes": max(m.peak_memory_bytes for m in measured),
        "measurements": [m.digest for m in measured],
    }
