"""A real Apptainer, a real image and a real second user.

Root installs Apptainer with our own script; others need one that works and skip without it. The
image holds this machine's Python and little else, and is built in about two seconds.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kimi_eagle.containers.exec import ExecSettings, node_script

sys.path.insert(0, str(Path(__file__).parent))  # for the helpers beside the tests
from small_image import LABELS, WITH_PYTHON, build, make  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
INSTALLER = ROOT / "containers" / "install-apptainer.sh"

DEFINITION = f"""\
{WITH_PYTHON}
%environment
    export HF_HOME=/of/the/image PYTHONNOUSERSITE=0 OF_THE_IMAGE=1
"""


@dataclass(frozen=True)
class Person:
    """Who starts the job."""

    name: str
    home: Path
    ids: dict[str, Any]
    """Arguments for subprocess to become this person."""

    def chown(self, path: Path) -> None:
        if self.ids:
            subprocess.run(["chown", "-R", self.name, str(path)], check=True)


@dataclass(frozen=True)
class Room:
    """Starts things in containers as a person."""

    person: Person
    folder: Path
    """Where this person may write; scratch folders lie in it."""
    image: Path

    def squashfuses(self) -> list[int]:
        """Processes that serve the image to a user."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                serves = os.readlink(folder / "fd" / "3").removesuffix(" (deleted)")
                if serves == str(self.image) and b"squashfuse" in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                continue
        return found

    def settings(self, **fields: Any) -> ExecSettings:
        return ExecSettings(**{"image": str(self.image)} | fields)

    def start(
        self,
        settings: ExecSettings,
        command: Sequence[str],
        host_env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[str]:
        """Through the script, with scratch folders in `folder` unless host_env says another."""
        file = self.folder / "start.sh"
        file.write_text(node_script(settings))
        env = {"PATH": os.environ["PATH"], "TMPDIR": str(self.folder), **(host_env or {})}
        return subprocess.Popen(
            ["bash", str(file), *command],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=options.pop("cwd", "/"),
            **self.person.ids,
            **options,
        )

    def python(
        self,
        settings: ExecSettings,
        code: str,
        *args: str,
        host_env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Any:
        """What Python code inside assigns to `answer`, from JSON."""
        code = f"import json, os, sys\n{code}\nprint(json.dumps(answer))"
        command = ["/usr/bin/python3", "-c", code, *args]
        process = self.start(settings, command, host_env, **options)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        return json.loads(out)


@pytest.fixture(scope="session")
def apptainer() -> str:
    """The program, installed by our script where we may."""
    arguments = [] if os.geteuid() == 0 else ["--check"]
    done = subprocess.run(["bash", INSTALLER, *arguments], capture_output=True, text=True)
    if done.returncode and os.geteuid():
        pytest.skip(f"no usable Apptainer: {done.stdout.strip()}")
    assert done.returncode == 0, done.stdout + done.stderr
    return "apptainer"


@pytest.fixture(scope="session")
def ground() -> Iterator[Path]:
    """A folder with a short name that other users can reach; pytest's own they cannot."""
    folder = Path(tempfile.mkdtemp(prefix="ke-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def image(apptainer: str, ground: Path) -> Path:
    return make(ground / "python.sif", DEFINITION)


@pytest.fixture(scope="session")
def small(apptainer: str, ground: Path) -> Path:
    """An image of ours with a shell only. Not to be changed by a test."""
    return build(ground / "small.sif", LABELS)


@pytest.fixture(scope="session")
def plain(apptainer: str, ground: Path) -> Path:
    """Without our labels. Not to be changed by a test."""
    return build(ground / "plain.sif", {"title": "something else"})


@pytest.fixture
def own(small: Path, tmp_path: Path) -> Path:
    """A copy for this test."""
    return Path(shutil.copy(small, tmp_path / "own.sif"))


@pytest.fixture
def nobodys_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No lock file or cache of this machine's user gets into a test."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    return home


@pytest.fixture(scope="session")
def sandbox(apptainer: str, image: Path, ground: Path) -> Path:
    """The same image as a folder."""
    folder = ground / "sandbox"
    subprocess.run(
        [apptainer, "-q", "build", "--sandbox", str(folder), str(image)],
        check=True,
        capture_output=True,
    )
    folder.chmod(0o755)
    return folder


@pytest.fixture(scope="session")
def ordinary_user(ground: Path) -> Iterator[Person]:
    """An account for this session only; whoever runs the tests where that is no root."""
    if os.geteuid():
        me = pwd.getpwuid(os.getuid())
        yield Person(me.pw_name, Path(me.pw_dir), {})
        return
    name, home = f"ke{os.getpid()}", ground / "home of a user"
    subprocess.run(["useradd", "-m", "-d", home, name], check=True, capture_output=True)
    try:
        yield Person(name, home, {"user": name, "group": name, "extra_groups": []})
    finally:
        subprocess.run(["userdel", name], check=True, capture_output=True)


@pytest.fixture(scope="session", params=["user", "root"])
def person(request: pytest.FixtureRequest, ordinary_user: Person) -> Person:
    if request.param == "user":
        return ordinary_user
    if os.geteuid():
        pytest.skip("needs root")
    return Person("root", Path("/root"), {})


@pytest.fixture
def room(person: Person, image: Path, ground: Path) -> Iterator[Room]:
    folder = Path(tempfile.mkdtemp(dir=ground))
    person.chown(folder)
    made = Room(person, folder, image)
    yield made
    for pid in made.squashfuses():  # of killed ones
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder)
