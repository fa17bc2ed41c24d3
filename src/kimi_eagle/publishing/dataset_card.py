"""README.md of exported token samples: sources, counts, what was left out, template, licences.

The parts hold token ids, loss mask and source of each sample (data/samples.py), no hidden states.
"""

from __future__ import annotations

from typing import Any

from kimi_eagle.publishing import words
from kimi_eagle.publishing.facts import Facts
from kimi_eagle.record import Record


def text(facts: Facts, prepared: Record, parts: list[str], licences: list[str]) -> str:
    """The card. parts: names of the Parquet files; licences: of the verifier's licence texts."""
    samples, tokens = prepared.counts.get("samples", 0), prepared.counts.get("tokens", 0)
    named = sorted({s.licence for s in facts.sources if s.licence})
    whole = len(named) == 1 and all(s.licence for s in facts.sources)
    head: dict[str, Any] = {
        "license": named[0] if whole else "unknown" if not named else "other",
        "license_name": "see-the-table-of-sources" if named and not whole else None,
        "pretty_name": f"Token samples of {facts.recipe.name}",
        "size_categories": [_size(samples)],
        "task_categories": ["text-generation"],
        "tags": ["speculative-decoding", "eagle3", "tokenised", "kimi-eagle"],
    }
    section = facts.recipe.prepare
    lines = [
        *words.metadata({k: v for k, v in head.items() if v is not None}),
        f"# Token samples of {facts.recipe.name}",
        "",
        f"Conversations as token ids of {facts.verifier_name}, for the training of a draft model.",
        "",
        "## Counts",
        "",
        *words.table(("", ""), _counts(prepared, len(parts))),
        "",
        f"Samples longer than {section.max_length:,} tokens were "
        f"{'cut' if section.long_samples == 'truncate' else 'rejected'}. Columns: input_ids and "
        f"loss_mask (true where the token belongs to an answer), source, finish_reason. "
        f"{tokens / max(1, samples):,.0f} tokens a sample on average.",
        "",
        "## Sources",
        "",
        *words.sources(facts),
        "",
        "## Left out",
        "",
        *_rejects(prepared),
        "",
        "## Template",
        "",
        *words.table(("", ""), _template(facts, prepared)),
        "",
        "## Licence",
        "",
        "Each source keeps its own (see above)."
        + (
            f" The answers are output of {facts.verifier_name}: "
            f"{words.licence_words(facts.verifier)}"
            + (f", text in {', '.join(licences)}." if licences else ".")
            if facts.recipe.regenerate.enabled
            else ""
        ),
        "",
        "## Made with",
        "",
        *words.made_with(facts),
    ]
    return "\n".join(lines) + "\n"


def _size(samples: int) -> str:
    """The hub's classes of sizes."""
    for limit, name in ((10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K")):
        if samples < limit:
            return name
    for limit, name in ((10**6, "100K<n<1M"), (10**7, "1M<n<10M"), (10**8, "10M<n<100M")):
        if samples < limit:
            return name
    return "100M<n<1B"


def _counts(prepared: Record, parts: int) -> list[tuple[str, Any]]:
    counts = prepared.counts
    return [
        ("samples", counts.get("samples")),
        ("tokens", counts.get("tokens")),
        ("tokens of answers (loss)", counts.get("loss_tokens")),
        ("answers cut off at max_tokens", counts.get("truncated")),
        ("rows rejected", counts.get("rejected_rows")),
        ("files", parts),
    ]


def _rejects(prepared: Record) -> list[str]:
    rejects = prepared.info.get("rejects") or {}
    if not rejects:
        return ["No row was rejected."]
    return words.table(("rule", "rows"), sorted(rejects.items()))


def _template(facts: Facts, prepared: Record) -> list[tuple[str, Any]]:
    template, parts = facts.recipe.template, prepared.data.get("parts") or {}
    own = "the recipe's own" if template.chat_template else f"that of {facts.verifier_name}"
    thinking = "the template's default" if template.thinking is None else str(template.thinking)
    rows = [
        ("chat template", own),
        (f"thinking (argument {template.thinking_argument})", thinking),
        ("tools", "passed on" if template.tools else "none"),
        *((f"argument {k}", str(v)) for k, v in sorted(template.arguments.items())),
        ("template digest", parts.get("template")),
        ("tokenizer digest", parts.get("tokenizer")),
    ]
    return rows
