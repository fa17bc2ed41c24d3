"""Small real images with our labels, 0.7 s each, and archives as other tools write them."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kimi_eagle.images import sif
from kimi_eagle.images.build import FAST
from kimi_eagle.images.pins import REQUIRED_LABELS

LABELS = {name: f'of a "test", {name[-4:]}=1' for name in REQUIRED_LABELS}
LABELS |= {"ai.kimi-eagle.flavour": "cpu", "ai.kimi-eagle.cuda-arch": "sm_90 sm_100"}

WITH_SHELL = """\
Bootstrap: scratch

%setup
    cd "$APPTAINER_ROOTFS"
    mkdir -p bin dev etc home lib lib64 proc root run sys tmp usr/bin usr/lib var/tmp
    cp /bin/dash bin/sh
    cp -L --parents $(ldd /bin/dash | grep -o '/[^ )]*') .
"""
WITH_PYTHON = f"""\
{WITH_SHELL}
    touch etc/passwd etc/group
    python=$(readlink -f /usr/bin/python3)
    lib=/usr/lib/$(basename "$python")
    cp "$python" usr/bin/python3
    cp -r "$lib" usr/lib/
    cp -L --parents $(ldd "$python" "$lib"/lib-dynload/*.so |
        grep -o '/[^ )]*' | grep -v ':$' | sort -u) .
"""
"""Of this machine."""


def make(out: Path, definition: str) -> Path:
    """A SIF file of a definition."""
    file = out.with_suffix(".def")
    file.write_text(definition)
    argv = ["apptainer", "-q", "build", "--mksquashfs-args", FAST, str(out), str(file)]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out


def build(out: Path, labels: dict[str, str]) -> Path:
    """A SIF file whose root folder has a shell only."""
    lines = "".join(f"    {name} {value}\n" for name, value in labels.items())
    return make(out, f"{WITH_SHELL}\n%labels\n{lines}")


def patch(path: Path, offset: int, data: bytes) -> None:
    """Change bytes in place; the size stays."""
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def descriptors(path: Path) -> Iterator[tuple[int, int, str]]:
    """Offset, kind and name of each used descriptor, found without the code under test's help."""
    data = path.read_bytes()
    table, count = (int.from_bytes(data[i : i + 8], "little") for i in (96, 88))
    for offset in range(table, table + count * 585, 585):
        if data[offset + 4]:
            name = data[offset + 73 : offset + 201].split(b"\0")[0].decode()
            yield offset, int.from_bytes(data[offset : offset + 4], "little"), name


def other_arch(path: Path) -> Path:
    """The header says arm64, as in an image from another machine."""
    patch(path, 45, b"04")
    assert sif.read_header(path).arch == "arm64"
    return path


class Archives:
    """One image with our labels, as docker save and OCI tools write it, by hand."""

    def __init__(self, folder: Path, image: Path):
        self.folder = folder
        self.sandbox = folder / "sandbox"
        argv = ["apptainer", "-q", "build", "--sandbox", str(self.sandbox), str(image)]
        subprocess.run(argv, check=True, capture_output=True)
        self._layer = self._tar_of_root()
        diff = f"sha256:{hashlib.sha256(self._layer).hexdigest()}"
        config = {"architecture": "amd64", "os": "linux", "config": {"Labels": LABELS}}
        config |= {"rootfs": {"type": "layers", "diff_ids": [diff]}}
        self._config = json.dumps(config).encode()

    def _tar_of_root(self) -> bytes:
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as archive:
            for name in ("bin", "dev", "etc", "lib", "lib64", "proc", "sys", "tmp", "usr", "var"):
                archive.add(self.sandbox / name, arcname=name)
        return data.getvalue()

    def docker(self, name: str) -> Path:
        path = self.folder / name
        manifest = [{"Config": "c.json", "RepoTags": ["a:1"], "Layers": ["l/layer.tar"]}]
        files = {"l/layer.tar": self._layer, "c.json": self._config}
        files["manifest.json"] = json.dumps(manifest).encode()
        with tarfile.open(path, "w") as archive:
            for file, data in files.items():
                info = tarfile.TarInfo(file)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
        return path

    def layout(self, name: str) -> Path:
        path = self.folder / name
        blobs = path / "blobs" / "sha256"
        blobs.mkdir(parents=True)

        def blob(kind: str, data: bytes) -> dict[str, Any]:
            digest = hashlib.sha256(data).hexdigest()
            (blobs / digest).write_bytes(data)
            media = f"application/vnd.oci.image.{kind}"
            return {"mediaType": media, "digest": f"sha256:{digest}", "size": len(data)}

        config = blob("config.v1+json", self._config)
        layer = blob("layer.v1.tar", self._layer)
        manifest = json.dumps({"schemaVersion": 2, "config": config, "layers": [layer]}).encode()
        index = {"schemaVersion": 2, "manifests": [blob("manifest.v1+json", manifest)]}
        (path / "index.json").write_text(json.dumps(index))
        (path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        return path

    def oci(self, name: str, *, inside: str = "") -> Path:
        """inside: what stands before the names in the archive, such as `./`."""
        path, layout = self.folder / name, self.layout(f"{name}.layout")
        with tarfile.open(path, "w") as archive:
            for entry in sorted(layout.rglob("*")):
                archive.add(entry, arcname=f"{inside}{entry.relative_to(layout)}", recursive=False)
        return path


def gzipped(path: Path) -> Path:
    """The same, compressed, under a name that does not tell."""
    packed = path.with_name(f"{path.name}-packed")
    packed.write_bytes(gzip.compress(path.read_bytes(), 1))
    return packed


def bytes_read() -> int:
    """What this process has read so far, by the kernel's count, from files and memory alike."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


class as_nobody:  # noqa: N801
    """This process without root's rights for a while; skips where it is not root's."""

    def __enter__(self) -> None:
        if os.geteuid():
            pytest.skip("needs root to become somebody else")
        os.seteuid(65534)

    def __exit__(self, *exc: object) -> None:
        os.seteuid(0)
