"""Fixtures of the data room: the small model's tokenizer, its template, and files of rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kimi_eagle.data.template import ChatTemplate
from kimi_eagle.recipe import TemplateSection
from kimi_eagle.verifier import open_verifier


@pytest.fixture(scope="session")
def verifier(verifier_dir):
    return open_verifier(verifier_dir)


@pytest.fixture(scope="session")
def template(verifier):
    return ChatTemplate(verifier, TemplateSection())


@pytest.fixture
def jinja(verifier, tmp_path):
    """Make a ChatTemplate of a Jinja text."""

    def make(text: str, **section):
        path = tmp_path / "template.jinja"
        path.write_text(text)
        return ChatTemplate(verifier, TemplateSection(chat_template=str(path), **section))

    return make


@pytest.fixture
def rows(tmp_path):
    """Write rows to a JSONL file; a row given as bytes or text is written as it stands."""

    def write(*rows, name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        lines = [
            r if isinstance(r, bytes) else (r if isinstance(r, str) else json.dumps(r)).encode()
            for r in rows
        ]
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        return path

    return write
