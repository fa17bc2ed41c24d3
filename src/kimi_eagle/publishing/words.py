"""What both cards are made of: metadata as YAML, tables, and paragraphs about sources and making.

Values are written as JSON, which YAML 1.2 reads as the same: no library, and a name such as `no`
or `1.0` stays text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kimi_eagle.publishing.facts import Facts
from kimi_eagle.publishing.licences import TELL, Licence, texts


def metadata(values: dict[str, Any]) -> list[str]:
    """The block at the head of a card of the Hugging Face hub."""
    lines = ["---"]
    for key, value in values.items():
        if isinstance(value, list):
            lines += [f"{key}:", *(f"- {_yaml(v)}" for v in value)]
        elif value is not None:
            lines.append(f"{key}: {_yaml(value)}")
    return [*lines, "---", ""]


def _yaml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def licence_keys(licence: Licence, link: str | None) -> dict[str, Any]:
    """license, and the name and text of one that the hub has no name for."""
    found: dict[str, Any] = {"license": licence.name}
    if licence.name == "other":
        slug = re.sub(r"[^a-z0-9.]+", "-", licence.title.lower()).strip("-")
        found |= {"license_name": slug or None, "license_link": link}
    return found


def licence_words(licence: Licence) -> str:
    if not licence.known:
        return TELL
    title = f" ({licence.title})" if licence.title else ""
    return f"{licence.name}{title}, from {licence.source}"


def table(titles: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """A Markdown table; cells hold no line breaks, and a bar in them is escaped."""
    lines = [titles, ["---"] * len(titles), *rows]
    return ["| " + " | ".join(_cell(c) for c in line) + " |" for line in lines]


def _cell(value: Any) -> str:
    text = f"{value:,}" if isinstance(value, int) else "" if value is None else str(value)
    return " ".join(text.split()).replace("|", "\\|")


def sources(facts: Facts) -> list[str]:
    """The sources of the recipe with their licences."""
    rows = [
        (s.name, s.licence or "unknown: say it with license in its [[sources]]", s.samples)
        for s in facts.sources
    ]
    answers = "The answers are the sources' own."
    if facts.recipe.regenerate.enabled:
        section = facts.recipe.regenerate
        how = "greedily" if section.temperature == 0 else f"at temperature {section.temperature:g}"
        answers = (
            f"The prompts are the sources'; {facts.verifier_name} wrote the answers, {how}, "
            f"at most {section.max_tokens:,} tokens each."
        )
    return [*table(("source", "licence", "samples"), rows), "", answers]


def made_with(facts: Facts) -> list[str]:
    """Versions, image and run, from run.lock.json."""
    lock = facts.lock
    if not lock:
        return ["run.lock.json could not be read: versions are unknown."]
    packages = (lock.get("environment") or {}).get("packages") or {}
    versions = [f"{n} {_either(v)}" for n, v in sorted(packages.items())]
    image = lock.get("image")
    digest = f"sha256:{image['sha256']}" if isinstance(image, dict) and "sha256" in image else None
    code = ((lock.get("code") or {}).get("ran") or [{}])[0]
    rows = [
        ("run", facts.recipe.name),
        ("kimi-eagle", f"{code.get('kimi_eagle', 'unknown')}, commit {code.get('commit')}"),
        ("packages", ", ".join(versions) or "unknown"),
        ("container image", digest or "none: the machine's own Python"),
        ("verifier", f"{facts.verifier_name}, id {(lock.get('verifier') or {}).get('id')}"),
        ("machines", "; ".join(machine(m) for m in lock.get("machines") or ()) or "unknown"),
        ("recipe digest", lock.get("recipe_digest")),
    ]
    return table(("", ""), rows)


def _either(value: Any) -> str:
    return value if isinstance(value, str) else " or ".join(map(str, value))


def machine(entry: dict[str, Any]) -> str:
    """Kind of the machine; its name is nobody's matter outside."""
    gpus = [f"{n} x {name}" for name, n in (entry.get("gpus") or {}).items()]
    return ", ".join([*gpus, f"{entry.get('cpus')} cores of {entry.get('cpu')}"])


def verifier_texts(facts: Facts) -> dict[str, Path]:
    """Name in the export -> the verifier's licence or notice."""
    return {f"verifier-{p.name}": p for p in texts(Path(facts.recipe.verifier.path))}
