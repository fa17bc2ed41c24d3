"""RUN/start.sh: `kimi-eagle` for the jobs of a run, in the image that the run is pinned to.

Every job, submitted or sent by hand, on one node or four, is `bash RUN/start.sh stage STAGE ...`.
So a job's file says nothing of an image, and a node needs nothing but bash and apptainer. Without
an image the script starts the Python that wrote it.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kimi_eagle import files
from kimi_eagle.containers.exec import ExecSettings, Mount, mount_text, node_script
from kimi_eagle.errors import UsageError
from kimi_eagle.provenance import image_digest
from kimi_eagle.recipe import Recipe, input_paths
from kimi_eagle.rundir import RunDir
from kimi_eagle.site import Site

if TYPE_CHECKING:
    from kimi_eagle.images.pins import Image

_PLAIN = """\
#!/usr/bin/env bash
# Starts kimi-eagle for the jobs of this run: bash FILE ARGUMENTS...
# Written by kimi-eagle; the run has no image.
export PYTHONSAFEPATH=1 PYTHONNOUSERSITE=1
exec {python} -m kimi_eagle "$@"
"""

_SIGNED = "# Of {path}, to the end.\n"
"""The last line: whole, and of this run."""

_MOST_LINKS = 40
"""Links behind links that Linux follows (path_resolution(7))."""


def write(run: RunDir, recipe: Recipe, site: Site | None, image: Image | None) -> None:
    """Write RUN/start.sh, whole or not at all: jobs may start at any moment."""
    if image is None:
        text = _PLAIN.format(python=shlex.quote(sys.executable))
    else:
        from kimi_eagle.images.pins import stat_line

        text = node_script(settings(run, recipe, site, image), ("kimi-eagle",))
        # Where the node sees the same file, it need not read 10 GB again.
        files.write_atomic(run.proven, f"{image.sha256} {stat_line(image.path)}\n")
    files.write_atomic(run.start, text + _SIGNED.format(path=shlex.quote(str(run.path))))


def enter(
    run: RunDir, words: list[str], see: Path | None = None, recipe: Recipe | None = None
) -> None:
    """Go on with `kimi-eagle WORDS` in the run's image; returns where it has none, or from within.

    For commands that look at keys: these hold the versions of what makes a unit, which are the
    image's and not this Python's. see: a further file that the command reads. recipe: what it says,
    for links and homes of the host mean nothing inside.
    """
    from kimi_eagle.lock.runlock import pinned

    if inside() or (image := pinned(run)) is None:
        return
    _check_script(run, image)
    env = os.environ | {"KIMI_EAGLE_SECRETS": "optional"}  # only jobs need them
    if see is not None and run.path not in see.parents:  # what is mounted cannot be replaced
        env["KIMI_EAGLE_MOUNT"] = mount_text(str(see), str(see), read_only=True)
    if recipe is not None:
        asked = recipe.model_dump(mode="json", exclude_none=True)
        env["KIMI_EAGLE_ASKED_RECIPE"] = files.to_json(asked)
    sys.stdout.flush()
    os.execvpe("bash", ["bash", str(run.start), *words], env)


def _check_script(run: RunDir, image: Image) -> None:
    """UsageError for a start.sh that is cut short, of another place or of another image."""
    text = run.start.read_text() if run.start.is_file() else ""
    own = _SIGNED.format(path=shlex.quote(str(run.path)))
    for sign, what in (
        (own, "is missing, cut short or of a moved run"),
        (image.sha256, "starts the image before the one that was accepted"),
    ):
        if sign not in text:
            raise UsageError(
                what, where=run.start, fix="submit again (or `run` with --image), which renews it"
            )


def inside() -> bool:
    """Whether this process runs in a pinned image."""
    return image_digest() is not None


def settings(run: RunDir, recipe: Recipe, site: Site | None, image: Image) -> ExecSettings:
    """How this run's jobs are started in this image; UsageError where that cannot be."""
    if missing := [name for name in recipe.container.secrets if name not in os.environ]:
        raise UsageError(
            f"{missing[0]} is not set",
            where=f"{recipe.name}: container.secrets",
            fix=f"export {missing[0]}=... in the shell that you submit from",
        )
    return ExecSettings(
        image=image.path,
        sha256=image.sha256,
        proven=str(run.proven),
        apptainer=(site and site.apptainer) or "apptainer",
        # --nv without a GPU only warns, and a CPU stage may share the script with others.
        gpus=recipe.slurm.gpus > 0,
        mounts=_mounts(run, recipe, site),
        allow=site.env if site else (),
        secrets=recipe.container.secrets,
        shm_bytes=int(recipe.container.shm_gib * 2**30),
    )


def _mounts(run: RunDir, recipe: Recipe, site: Site | None) -> tuple[Mount, ...]:
    """The run, its inputs read-only, and what the site adds; each at its own path."""
    found = {str(run.path): Mount(str(run.path), str(run.path), read_only=False)}
    for path in input_paths(recipe).values():
        for folder in (path, *_behind_links(Path(path))):
            found.setdefault(folder, Mount(folder, folder))
    for text in site.mounts if site else ():
        source, *rest = text.split(":")
        target = rest[0] if rest else source
        found.setdefault(target, Mount(source, target, read_only=rest[1:] == ["ro"]))
    return tuple(found.values())


def _behind_links(folder: Path) -> Iterator[str]:
    """Folders outside of an input that links in it lead to, as in a hub's cache of models."""
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        path = str(entry)
        for _ in range(_MOST_LINKS):
            if not os.path.islink(path):
                break
            path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path)))
            if os.path.isdir(path):
                yield path
            elif os.path.dirname(path) != str(folder):
                yield os.path.dirname(path)
