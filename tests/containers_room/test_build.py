"""Images as they are built: the CUDA definition on a tiny base, failures, an interruption.

The tiny base holds this machine's Python and a few programs. What stands in for the real thing is
said where it is: the base, its minor version of Python, a lock of a few light packages.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from small_image import WITH_PYTHON, make

from kimi_eagle.errors import RunError, UsageError
from kimi_eagle.images import build as builder
from kimi_eagle.images import inside, sif, wheels

ROOT = Path(__file__).resolve().parents[2]
DEFINITIONS = ("kimi-eagle.def", "kimi-eagle-cpu.def")
LIGHT = (
    *("annotated-types", "click", "cloudpickle", "markdown-it-py", "mdurl", "numpy", "pydantic"),
    *("pydantic-core", "pygments", "rich", "submitit", "typing-extensions", "typing-inspection"),
    *("xxhash", "safetensors"),
)
"""What the command line imports before a stage does."""

TINY_BASE = f"""\
{WITH_PYTHON}
    mkdir mnt opt srv
    programs="/bin/cat /bin/chmod /bin/cp /bin/grep /bin/mkdir /bin/rm /bin/sed /usr/bin/cmp"
    cp $programs usr/bin/
    cp -L --parents $(ldd $programs | grep -o '/[^ )]*' | grep -v ':$' | sort -u) .
    # What wheels find on every Linux.
    cp -L --parents $(/sbin/ldconfig -p | grep -F x86-64 |
        grep -oE '/[^ ]*/lib(gcc_s|stdc\\+\\+|m|dl|rt|pthread|util)[.]so[.][0-9]+$') .
"""


@pytest.fixture(scope="module")
def tiny_base(apptainer: str, ground: Path) -> Path:
    return make(_open_folder(ground) / "tiny.sif", TINY_BASE)


def _open_folder(ground: Path, name: str = "") -> Path:
    """A new one each time: the order of tests may come back to this module."""
    folder = Path(tempfile.mkdtemp(prefix=name, dir=ground))
    folder.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def light_lock(ground: Path) -> Path:
    """The lines of cpu.lock for the light packages, hashes and all."""
    blocks = re.split(r"(?m)^(?=[A-Za-z0-9])", (ROOT / "containers" / "cpu.lock").read_text())
    chosen = [b for b in blocks if b.partition("==")[0] in LIGHT]
    assert len(chosen) == len(LIGHT)
    lock = ground / "light.lock"
    lock.write_text("".join(chosen))
    return lock


def tiny_build(out: Path, base: Path, lock: Path, **args: str) -> builder.BuildReport:
    """The CUDA definition on the tiny base, with what it lacks taken out of %test."""
    args = {"PYTHON_VERSION": _host_minor(), "IMPORTS": "kimi_eagle pydantic"} | args
    return builder.build("cuda", out, base=("localimage", str(base)), build_args=args, lock=lock)


def _host_minor() -> str:
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    return subprocess.run(
        ["/usr/bin/python3", "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.fixture(scope="module")
def tiny(tiny_base: Path, light_lock: Path, ground: Path) -> Iterator[builder.BuildReport]:
    if _host_minor() != wheels.PYTHON["cpu"]:
        pytest.skip(f"the light lock's wheels are for CPython 3.11, the host has {_host_minor()}")
    with pytest.MonkeyPatch.context() as patch:  # the wheels fetched have to fit the tiny base
        patch.setitem(wheels.PYTHON, "cuda", wheels.PYTHON["cpu"])
        folder = _open_folder(ground, "a folder ")
        yield tiny_build(folder / "tiny image.sif", tiny_base, light_lock)


def test_every_argument_has_a_default_and_both_do_the_same() -> None:
    post = set()
    for name in DEFINITIONS:
        text = (ROOT / "containers" / name).read_text()
        defaults = re.search(r"(?ms)^%arguments\n(.*?)^%", text)
        assert defaults
        declared = set(re.findall(r"^ +([A-Z_]+)=", defaults[1], re.MULTILINE))
        assert set(re.findall(r"\{\{ (\w+) \}\}", text)) == declared
        sections = re.findall(r"(?ms)^%(post|environment|runscript|test)\n(.*?)(?=^%|\Z)", text)
        assert [s for s, _ in sections] == ["post", "environment", "runscript", "test"]
        post.add(re.sub(r"\b(cpu|cuda)\b", "FLAVOUR", str(sections)))
        assert not re.search(r"apt-get|curl|wget|pip install|%files|%setup", text)
    assert len(post) == 1


def test_cuda_base_is_the_pinned_one() -> None:
    text = (ROOT / "containers" / "kimi-eagle.def").read_text()
    base = re.search(r"^ +BASE=(\S+)$", text, re.MULTILINE)
    assert base and re.fullmatch(r"vllm/vllm-openai:v0\.31\.0@sha256:[0-9a-f]{64}", base[1])
    assert base[1] in (ROOT / "containers" / "README.md").read_text()


def test_cuda_definition_on_a_local_base(tiny: builder.BuildReport, light_lock: Path) -> None:
    assert list(tiny.seconds) == ["wheels", "own wheel", "image", "bill of materials"]
    assert tiny.bytes == tiny.path.stat().st_size
    assert tiny.path.stat().st_mode & 0o777 == 0o644
    labels = sif.labels(tiny.path)
    assert labels["org.opencontainers.image.title"] == "kimi-eagle"
    assert re.fullmatch(r"[0-9a-f]{40}(\+dirty)?", labels["org.opencontainers.image.revision"])
    assert labels["ai.kimi-eagle.flavour"] == "cuda"
    assert labels["ai.kimi-eagle.torch"] == labels["ai.kimi-eagle.cuda"] == "none"
    digest = hashlib.sha256(light_lock.read_bytes()).hexdigest()
    assert labels["ai.kimi-eagle.lock-sha256"] == digest
    assert str(tiny.path.parent) not in json.dumps(labels)
    left = {p.name for p in tiny.path.parent.iterdir()}
    assert left == {"tiny image.sif", "tiny image.sbom.cdx.json"}


def test_image_holds_the_wheel_that_was_built(tmp_path: Path) -> None:
    wheel = wheels.own_wheel(tmp_path)
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    package = tmp_path / "installed" / "kimi_eagle"
    said = wheels.source_digest(wheel)
    assert inside.source_digest(package) == said
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "cli.pyc").write_text("")
    assert inside.source_digest(package) == said
    (package / "more.py").write_text("pass\n")
    assert inside.source_digest(package) != said
    with pytest.raises(SystemExit, match="not those of the wheel"):
        inside.labels("cpu", {"ai.kimi-eagle.source-sha256": said}, package)


def test_on_an_image_of_ours_only_the_wheel_is_new(
    tiny: builder.BuildReport, light_lock: Path, tmp_path: Path
) -> None:
    lines: list[str] = []
    again = builder.build(
        "cuda", tmp_path / "again.sif", base=("localimage", str(tiny.path)), lock=light_lock,
        build_args={"PYTHON_VERSION": _host_minor(), "IMPORTS": "kimi_eagle"}, say=lines.append,
    )  # fmt: skip
    old, new = sif.labels(tiny.path), sif.labels(again.path)
    created = "org.opencontainers.image.created"
    assert new[created] > old[created]
    assert lines[-1].startswith(str(again.path))


def test_bill_of_materials_lists_what_is_installed(tiny: builder.BuildReport) -> None:
    bill = json.loads(builder.sbom_path(tiny.path).read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    found = {c["name"]: c["version"] for c in bill["components"]}
    lock = (ROOT / "containers" / "cpu.lock").read_text()
    locked = inside.lock_versions(lock)
    assert {n: found[n] for n in LIGHT} == {n: locked[n] for n in LIGHT}
    assert found.keys() == {*LIGHT, "kimi-eagle"}
    assert all(c["purl"].startswith("pkg:pypi/") for c in bill["components"])


def test_runs_read_only_as_anybody(tiny: builder.BuildReport, person, ground: Path) -> None:
    def run(*command: str) -> str:
        argv = ["apptainer", "-q", "exec", "--cleanenv", "--no-home", "--no-mount", "cwd"]
        env = {"PATH": os.environ["PATH"], "HOME": str(ground)}
        done = subprocess.run(
            [*argv, str(tiny.path), *command],
            capture_output=True, text=True, env=env, cwd="/", **person.ids,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("kimi-eagle", "--version").startswith("kimi-eagle")
    assert "STAGE" in run("kimi-eagle", "stage", "--help")
    said = sif.labels(tiny.path)["org.opencontainers.image.revision"]
    assert run("cat", "/opt/kimi-eagle/revision").strip() == said
    code = "import sys; print(sys.prefix, sys.flags.no_user_site)"
    assert run("python", "-c", code).split() == ["/opt/kimi-eagle", "1"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"IMPORTS": "kimi_eagle no_such_module"}, "no_such_module cannot be imported"),
        ({"PYTHON_VERSION": "3.9"}, "the lock is for 3.9"),
        ({"PYTHON": "python9"}, "the base image has no python9"),
    ],
)
def test_failed_build_says_why_and_leaves_nothing(
    args: dict[str, str], words: str, tiny: builder.BuildReport, light_lock: Path, tmp_path: Path
) -> None:
    with pytest.raises(RunError, match=words):
        tiny_build(tmp_path / "x.sif", tiny.path, light_lock, **args)
    assert not list(tmp_path.iterdir())


def test_check_finds_a_version_that_is_not_the_lock_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(inside, "HOME", tmp_path)
    (tmp_path / "lock").write_text("click==0.0.1 \\\n    --hash=sha256:00\nno-such-thing==1\n")
    assert inside.main(["check", "json"]) == 1
    said = capsys.readouterr().err
    assert "the lock says 0.0.1" in said and "no-such-thing is missing" in said
    (tmp_path / "lock").write_text("")
    assert inside.main(["check", "json"]) == 0


@dataclass(frozen=True)
class Builder:
    """Somebody who builds, with the Python and the folder to do it."""

    argv: list[str]
    env: dict[str, str]
    ids: dict[str, Any]
    folder: Path

    def start(self, out: Path, base: Path, lock: Path) -> subprocess.Popen[bytes]:
        code = (
            "import sys; from pathlib import Path\n"
            "from kimi_eagle.images import build, wheels\n"
            "wheels.PYTHON['cuda'] = wheels.PYTHON['cpu']\n"
            "out, base, lock, minor = sys.argv[1:]\n"
            "args = {'PYTHON_VERSION': minor, 'IMPORTS': 'kimi_eagle'}\n"
            "build.build('cuda', Path(out), base=('localimage', base), build_args=args,"
            " lock=Path(lock))\n"
        )
        argv = [*self.argv, "-c", code, str(out), str(base), str(lock), _host_minor()]
        return subprocess.Popen(argv, env=self.env, cwd=self.folder, **self.ids)


def builder_for(person: Any, light_lock: Path, ground: Path) -> Builder:
    """root; or a user with the system's Python, which can be started by all."""
    folder = Path(tempfile.mkdtemp(dir=ground))
    if not person.ids:
        return Builder([sys.executable], dict(os.environ), {}, folder)
    cache = folder / "cache"
    for lock in (light_lock, ROOT / "containers" / "pip.lock"):  # not fetched once more
        kept = wheels.wheels("cpu", lock=lock)
        shutil.copytree(kept, cache / "wheels" / kept.name)
    person.chown(folder)
    paths = [str(ROOT / "src"), sysconfig.get_path("purelib")]
    env = {
        **{"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": ":".join(paths)},
        "KIMI_EAGLE_CACHE": str(cache),
    }
    argv = ["/usr/bin/python3"]
    tried = [*argv, "-c", "import kimi_eagle.images.build, pip"]
    if subprocess.run(tried, env=env, cwd=folder, capture_output=True, **person.ids).returncode:
        pytest.skip("the user cannot read this checkout, or its Python is another")
    return Builder(argv, env, person.ids, folder)


def test_a_user_can_build(
    ordinary_user: Any, tiny_base: Path, light_lock: Path, tiny: builder.BuildReport, ground: Path
) -> None:
    anybody = builder_for(ordinary_user, light_lock, ground)
    out = anybody.folder / "out" / "x.sif"
    out.parent.mkdir()
    shutil.chown(out.parent, anybody.ids.get("user", os.getuid()))
    assert anybody.start(out, tiny_base, light_lock).wait(120) == 0
    labels = sif.labels(out)
    changing = ("created", "revision", "source-sha256", "build-date", "deffile.from")
    same = {k: v for k, v in sif.labels(tiny.path).items() if not k.endswith(changing)}
    assert labels.items() >= same.items()
    assert {p.name for p in out.parent.iterdir()} == {"x.sif", "x.sbom.cdx.json"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_interrupted_build_leaves_nothing(
    number: signal.Signals,
    person: Any,
    tiny: builder.BuildReport,
    tiny_base: Path,
    light_lock: Path,
    ground: Path,
) -> None:
    anybody = builder_for(person, light_lock, ground)
    out = anybody.folder / "out" / "x.sif"
    out.parent.mkdir()
    shutil.chown(out.parent, anybody.ids.get("user", os.getuid()))
    process = anybody.start(out, tiny_base, light_lock)
    try:
        # Inside %post: the install script has started its work in the unpacked tree.
        while not list(out.parent.glob(".kimi-eagle-build-*/tmp/*/rootfs/opt/kimi-eagle")):
            assert process.poll() is None
            time.sleep(0.01)
        work = next(out.parent.glob(".kimi-eagle-build-*"))
        process.send_signal(number)
        assert process.wait(60) != 0
    finally:
        process.kill()
    assert not list(out.parent.iterdir())
    assert not _processes_of(work)


def _processes_of(folder: Path) -> list[str]:
    """Command lines of living processes that were started for this folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def test_nothing_is_replaced_unasked(tmp_path: Path) -> None:
    (tmp_path / "x.sif").write_text("")
    with pytest.raises(UsageError, match="there is something of this name"):
        builder.build("cpu", tmp_path / "x.sif")
    with pytest.raises(UsageError, match="no flavour 'gpu'"):
        builder.build("gpu", tmp_path / "y.sif")
    with pytest.raises(UsageError, match="mkdir -p"):
        builder.build("cpu", tmp_path / "none" / "x.sif")
    for sign in ",$":  # with the one it fails, with the other the labels are lost
        folder = tmp_path / f"a{sign}b"
        folder.mkdir()
        with pytest.raises(UsageError, match=f"folder with '[{sign}]'"):
            builder.build("cpu", folder / "x.sif", base=("localimage", "none"))


def test_no_registry_is_said_with_the_way_round(
    tmp_path: Path, light_lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(builder.ROOM, "cuda", 0)
    nowhere = ("docker", "127.0.0.1:9/vllm/vllm-openai")
    with pytest.raises(RunError, match="conveyor failed.*fix: .*--base docker-archive:FILE"):
        builder.build("cuda", tmp_path / "x.sif", base=nowhere, lock=light_lock)
    assert not list(tmp_path.iterdir())


def test_wheels_are_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIMI_EAGLE_CACHE", str(tmp_path))
    lock = tmp_path / "wrong.lock"
    lock.write_text(f"click==8.3.1 --hash=sha256:{'0' * 64}\n")
    with pytest.raises(RunError, match="could not fetch"):
        wheels.wheels("cpu", lock=lock)
    assert [p.suffix for p in (tmp_path / "wheels").iterdir()] == [".busy"]


@pytest.mark.campaign
def test_every_wheel_of_the_cuda_lock_can_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For CPython 3.12 and the base image's libc, with the lock's hashes; 144 MB."""
    monkeypatch.setenv("KIMI_EAGLE_CACHE", str(tmp_path))
    found = {p.name.split("-")[0].replace("_", "-") for p in wheels.wheels("cuda").iterdir()}
    locked = inside.lock_versions((ROOT / "containers" / "cuda.lock").read_text())
    assert {n.lower().replace(".", "-") for n in found} == {n.replace(".", "-") for n in locked}
