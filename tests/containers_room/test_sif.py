"""What is read from an image is what apptainer says of it; what is no whole image is refused."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from small_image import LABELS, as_nobody, descriptors, other_arch, patch

from kimi_eagle.errors import UsageError
from kimi_eagle.images import sif

pytestmark = pytest.mark.usefixtures("nobodys_home")


def said(*argv: object) -> str:
    done = subprocess.run(list(map(str, argv)), capture_output=True, text=True, check=True)
    return done.stdout


def test_header_and_labels_as_apptainer_shows_them(small: Path, image: Path) -> None:
    for path in (small, image):
        header = sif.read_header(path)
        lines = said("apptainer", "sif", "header", path).splitlines()
        shown = {key.strip(): value.strip() for key, _, value in (x.partition(":") for x in lines)}
        assert header.id == shown["ID"]
        assert header.arch == header.system_arch == shown["Primary Architecture"]
        created = said("date", "-u", "-d", f"@{header.created:.0f}", "+%Y-%m-%d %H:%M:%S")
        assert shown["Created At"].startswith(created.strip())
        assert header.size == path.stat().st_size
        inspected = json.loads(said("apptainer", "inspect", "--json", "--labels", path))
        assert sif.labels(path) == inspected["data"]["attributes"]["labels"]
    assert LABELS.items() <= sif.labels(small).items()


def test_needs_no_apptainer(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert LABELS.items() <= sif.labels(small).items()


def test_labels_that_only_the_root_folder_has(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [offset] = [offset for offset, _, name in descriptors(own) if name == sif.METADATA]
    patch(own, offset + 4, b"\0")  # not used
    assert LABELS.items() <= sif.labels(own).items()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError, match="only be read by apptainer"):
        sif.labels(own)


def test_truncated_anywhere(own: Path) -> None:
    whole = own.read_bytes()
    table, data = 4096, int.from_bytes(whole[112:120], "little")
    for length in (42, 100, 127, 128, table + 10, data - 1, data + 10, len(whole) - 1):
        own.write_bytes(whole[:length])
        with pytest.raises(UsageError, match=f"truncated: {length} bytes") as caught:
            sif.read_header(own)
        assert str(own) in str(caught.value) and "copy it again" in str(caught.value)
        with pytest.raises(UsageError, match="truncated"):
            sif.labels(own)
    for length, word in ((0, "empty file"), (41, "not a SIF")):
        own.write_bytes(whole[:length])
        with pytest.raises(UsageError, match=word):
            sif.read_header(own)


@pytest.mark.parametrize(
    ("offset", "data"),
    [
        (88, (2**62).to_bytes(8, "little")),  # descriptors
        (88, bytes(8)),
        (88, b"\xff" * 8),
        (96, b"\xff" * 8),  # their place
    ],
)
def test_impossible_header(own: Path, offset: int, data: bytes) -> None:
    patch(own, offset, data)
    with pytest.raises(UsageError) as caught:
        sif.read_header(own)
        sif.labels(own)
    assert str(own) in str(caught.value)


def test_object_at_an_impossible_place(own: Path) -> None:
    for offset, _, _ in list(descriptors(own)):
        before = own.read_bytes()
        for place, value in ((17, -1), (17, 2**63 - 1), (25, -5), (25, 2**63 - 1)):
            patch(own, offset + place, value.to_bytes(8, "little", signed=True))
            with pytest.raises(UsageError, match="damaged|truncated"):
                sif.read_header(own)
            own.write_bytes(before)


def test_no_root_folder_in_it(own: Path) -> None:
    [offset] = [offset for offset, kind, _ in descriptors(own) if kind == 0x4004]
    patch(own, offset + 4, b"\0")
    with pytest.raises(UsageError, match="no root file system"):
        sif.read_header(own)


@pytest.mark.parametrize("text", [b"{", b"[]", b'{"data": 3}', b"\xff", b"[" * 200_000])
def test_metadata_that_cannot_be_read(own: Path, text: bytes) -> None:
    [at] = [offset for offset, _, name in descriptors(own) if name == sif.METADATA]
    place = own.stat().st_size
    with open(own, "ab") as file:
        file.write(text)
    patch(own, at + 17, place.to_bytes(8, "little") + len(text).to_bytes(8, "little"))
    with pytest.raises(UsageError, match="damaged image"):
        sif.labels(own)


def test_what_is_no_image(own: Path, sandbox: Path, tmp_path: Path) -> None:
    text, pipe, loop = tmp_path / "text", tmp_path / "pipe", tmp_path / "loop"
    text.write_text("#!/bin/sh\n" * 100)
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    for path, word in [
        (text, "not a SIF image"),
        (pipe, "not a file"),  # and nobody waits for a writer
        (Path("/dev/zero"), "not a file"),
        (loop, "cannot be read"),
        (own / "x", "cannot be read"),
        (tmp_path / ("x" * 300), "cannot be read"),
        (tmp_path / "nothing", "no such image"),
        (tmp_path / "a\0b", "not a path"),
        (tmp_path, "a folder"),
        (sandbox, "a sandbox folder.*kimi-eagle image import"),
    ]:
        with pytest.raises(UsageError, match=word):
            sif.read_header(path)


def test_unreadable(small: Path, ground: Path) -> None:
    path = ground / "closed.sif"
    path.write_bytes(small.read_bytes())
    path.chmod(0o600)
    with as_nobody(), pytest.raises(UsageError, match="cannot be read: Permission denied"):
        sif.read_header(path)


def test_other_architecture(own: Path) -> None:
    header = sif.read_header(other_arch(own))
    assert (header.arch, header.system_arch) == ("arm64", "amd64")
    patch(own, 45, b"77")
    assert sif.read_header(own).arch == "unknown (77)"
