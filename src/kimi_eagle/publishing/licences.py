"""Which licence a model directory is under: its own words, never a guess.

Sources, in this order: the recipe's `[card] license`, `license` in the metadata of the verifier's
README.md (model cards of the Hugging Face hub), the title of its LICENSE file. A title that is not
exactly one of those below is quoted under `license: other`, as the hub wants it: Kimi-K2.5's is a
"Modified MIT License", which is not MIT.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

UNKNOWN = "unknown"
TELL = "unknown: say it in [card] license"
_TITLES = {
    "apache license version 2.0": "apache-2.0",
    "apache license version 2.0, january 2004": "apache-2.0",
    "mit license": "mit",
    "the mit license": "mit",
    "the mit license (mit)": "mit",
    "gnu affero general public license version 3, 19 november 2007": "agpl-3.0",
    "gnu general public license version 3, 29 june 2007": "gpl-3.0",
    "mozilla public license version 2.0": "mpl-2.0",
}
"""First line or two of a licence's text in lower case -> its name on the hub."""
_FILES = ("license", "licence", "copying", "notice", "third_party", "thirdparty")
_KEYS = ("license", "license_name", "license_link")


@dataclass(frozen=True)
class Licence:
    """name: as the hub names licences, `other` or `unknown`. title: of one that it does not name.
    source: where the name was found, in words; "" where it was not."""

    name: str
    title: str = ""
    source: str = ""

    @property
    def known(self) -> bool:
        return self.name != UNKNOWN


def of_model(folder: Path) -> Licence:
    """What a model directory says of itself."""
    told = readme_metadata(folder)
    if name := told.get("license"):
        return Licence(
            name, told.get("license_name", ""), "the metadata of the verifier's README.md"
        )
    for file in texts(folder):
        if file.name.lower().startswith(("notice", "third")):
            continue
        title = _title(file)
        if name := _TITLES.get(title.lower()):
            return Licence(name, "", f"the verifier's file {file.name}")
        if title:
            return Licence("other", title, f"the verifier's file {file.name}")
    return Licence(UNKNOWN)


def texts(folder: Path) -> list[Path]:
    """Files with licences and notices, LICENSE first."""
    try:
        found = [p for p in folder.iterdir() if p.is_file() and _is_text(p)]
    except OSError:
        return []
    order = {word: i for i, word in enumerate(_FILES)}
    return sorted(found, key=lambda p: (min(order[w] for w in _FILES if _starts(p, w)), p.name))


def _is_text(path: Path) -> bool:
    return path.suffix.lower() in ("", ".txt", ".md") and any(_starts(path, w) for w in _FILES)


def _starts(path: Path, word: str) -> bool:
    return path.name.lower().startswith(word)


def _title(file: Path) -> str:
    """The first line; with the one below it where that tells the version."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    first = [line.strip(" #*\t") for line in lines if line.strip(" #*\t")][:2]
    if len(first) == 2 and first[1].lower().startswith("version"):
        return " ".join(first)
    return first[0][:120] if first else ""


def readme_metadata(folder: Path) -> dict[str, str]:
    """license, license_name and license_link of the README's metadata, as plain text.

    Read line by line: these three are plain values at the left margin in every card of the hub.
    """
    try:
        lines = (folder / "README.md").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    found: dict[str, str] = {}
    if not lines or lines[0].strip() != "---":
        return found
    for line in lines[1:]:
        if line.strip() == "---":
            return found
        key, colon, value = line.partition(":")
        if colon and key in _KEYS and (text := value.strip().strip("\"'")):
            found[key] = text
    return {}  # without its end it is no metadata
