"""The bill of materials of an image, CycloneDX 1.6 JSON: `python -m kimi_eagle.images.sbom`.

Run inside while the image is built. Lists what Python's own metadata and Debian's package list say
is installed, with the licences they state. Written by hand because the format's libraries are not
in the lock and it takes a page (checked once with cyclonedx-python-lib's strict 1.6 validator);
what is not known (suppliers, hashes, dependencies between packages) is left out, not guessed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import uuid
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

import kimi_eagle


def python_components() -> list[dict[str, Any]]:
    """One component an installed distribution, by name."""
    found = {}
    for dist in metadata.distributions():
        name = re.sub(r"[-_.]+", "-", dist.metadata["Name"] or "").lower()
        if not name or name in found:  # the first one in sys.path is the one that is imported
            continue
        purl = f"pkg:pypi/{quote(name)}@{quote(dist.version)}"
        found[name] = {
            "type": "library",
            "bom-ref": purl,
            "name": name,
            "version": dist.version,
            "purl": purl,
            **_licences(dist.metadata),
        }
    return [found[name] for name in sorted(found)]


def _licences(about: Any) -> dict[str, Any]:
    if expression := about.get("License-Expression"):
        return {"licenses": [{"expression": expression}]}
    kinds = [c for c in about.get_all("Classifier") or [] if c.startswith("License ::")]
    names = [c.rpartition(" :: ")[2] for c in kinds] or [about.get("License") or ""]
    # Some put the whole text there; a name fits on a line.
    named = [{"license": {"name": n}} for n in names if n and "\n" not in n and len(n) < 100]
    return {"licenses": named} if named else {}


def debian_components() -> list[dict[str, Any]]:
    """One component an installed Debian or Ubuntu package; none where there is no dpkg."""
    try:
        release = Path("/etc/os-release").read_text()
        text = subprocess.run(
            ["dpkg-query", "-W", "-f", "${Package}\t${Version}\t${Architecture}\n"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    system = re.search(r'^ID="?(\w+)', release, re.MULTILINE)
    where = f"pkg:deb/{system[1] if system else 'debian'}"
    found = []
    for line in text.splitlines():
        name, version, arch = line.split("\t")
        purl = f"{where}/{quote(name)}@{quote(version)}?arch={arch}"
        parts = {"bom-ref": purl, "name": name, "version": version, "purl": purl}
        found.append({"type": "library", **parts})
    return found


def sbom() -> dict[str, Any]:
    """The whole document."""
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid4()}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
            "component": {
                "type": "container",
                "bom-ref": "image",
                "name": "kimi-eagle",
                "version": kimi_eagle.__version__,
            },
        },
        "components": python_components() + debian_components(),
    }


if __name__ == "__main__":
    json.dump(sbom(), sys.stdout, indent=1)
