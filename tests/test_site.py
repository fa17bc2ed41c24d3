"""Site files: every shipped one loads; a wrong or hostile one gets one line and runs nothing."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from kimi_eagle import site as sites
from kimi_eagle.errors import UsageError
from kimi_eagle.site import Site, load_site, minutes
from kimi_eagle.typed_toml import validated

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = sorted(ROOT.glob("slurm/sites/*.toml"))


def make(**keys: Any) -> Site:
    return validated(Site, {"name": "here", **keys}, "here.toml")


def refused(**keys: Any) -> str:
    """The one line that a site with these keys gets."""
    with pytest.raises(UsageError) as caught:
        make(**keys)
    line = caught.value.line()
    assert line.startswith("here.toml: ") and "\n" not in line and len(line) < 500, line
    assert caught.value.exit_code == 2
    return line


# -- shipped sites -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.name)
def test_shipped_site_loads(path: Path) -> None:
    site = load_site(path)
    assert site.name == path.stem
    assert minutes(site.time) * 60 > site.grace_seconds


def test_shipped_sites_are_all_found() -> None:
    names = {p.stem for p in SHIPPED}
    assert names >= {"example", "gres-typed", "gpus-per-node", "exclusive", "testbed"}
    assert load_site("gres-typed").gpu_type == "h200"
    assert load_site("exclusive").constraint == "h200&ib"


def test_the_example_shows_every_key_and_its_default(tmp_path: Path) -> None:
    text = (ROOT / "slurm/sites/example.toml").read_text()
    assert load_site(ROOT / "slurm/sites/example.toml") == make(name="example")
    everything = re.sub(r"^# (?=[a-z_]+ = )", "", text, flags=re.MULTILINE)
    path = tmp_path / "all.toml"
    path.write_text(everything)
    site = load_site(path)
    assert site.model_fields_set == set(Site.model_fields)
    assert site.cpu.model_fields_set == set(sites.CpuSection.model_fields)


def test_every_key_says_what_it_means() -> None:
    source = (ROOT / "src/kimi_eagle/site.py").read_text()
    for key in [*Site.model_fields, *sites.CpuSection.model_fields]:
        if key != "cpu":
            assert re.search(rf'^    {key}: .*\n    """', source, re.MULTILINE), key


# -- found by name -------------------------------------------------------------------------------


def test_a_name_is_looked_up_here_then_packed_then_at_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    monkeypatch.setenv("HOME", str(home))
    (home / ".config/kimi-eagle/sites").mkdir(parents=True)
    (home / ".config/kimi-eagle/sites/mine.toml").write_text('partition = "home"\n')
    (home / ".config/kimi-eagle/sites/testbed.toml").write_text('partition = "home"\n')
    here.mkdir()
    monkeypatch.chdir(here)
    assert load_site("mine").partition == "home"
    assert load_site("testbed").partition == "all"  # the shipped one is found before home's
    (here / "slurm/sites").mkdir(parents=True)
    (here / "slurm/sites/testbed.toml").write_text('partition = "here"\n')
    assert load_site("testbed").partition == "here"
    (here / "x.toml").write_text('partition = "file"\n')
    assert load_site("x.toml").partition == "file"
    assert load_site(here / "x.toml").name == "x"
    assert set(sites.known_sites()) >= {"mine", "testbed", "example"}


def test_an_unknown_name_gets_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no site 'testbeds'.*did you mean 'testbed'"):
        load_site("testbeds")
    with pytest.raises(UsageError, match="site init"):
        load_site("qqqqqqqqqqq")
    shutil.copy(ROOT / "slurm/sites/testbed.toml", tmp_path / "mine.toml")
    with pytest.raises(UsageError, match="did you mean .*mine.toml"):
        load_site(tmp_path / "nine.toml")


@pytest.mark.parametrize(
    "name", ["", "a\0b", "$(id)", "..", "-x", "x" * 4096, "../testbed", "a b", "a\nb", "~/x.toml"]
)
def test_a_hostile_name_finds_nothing(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_site(name)
    assert "\n" not in caught.value.line() and len(caught.value.line()) < 500


def test_a_name_that_no_job_could_show_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "my cluster.toml").write_text("")
    with pytest.raises(UsageError, match="key 'name': got 'my cluster'"):
        load_site(tmp_path / "my cluster.toml")
    (tmp_path / "my cluster.toml").write_text('name = "mine"')
    assert load_site(tmp_path / "my cluster.toml").name == "mine"


# -- keys and plain values -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"partitions": "a"}, ["partitions", "did you mean 'partition'"]),
        ({"cpu": {"partion": "a"}}, ["cpu.partion", "did you mean 'partition'"]),
        ({"gpu_request": "gpus"}, ["gpu_request", "gpus-per-node", "gres", "none"]),
        ({"gpu_request": "none", "gpu_type": "h200"}, ["gpu_type", "gpu_request"]),
        ({"cpus": "96"}, ["cpus", "'96'", "integer"]),
        ({"cpus": 0}, ["cpus", "greater than or equal to 1"]),
        ({"gpu_memory_gib": "80G"}, ["gpu_memory_gib", "'80G'", "number"]),
        ({"gpu_memory_gib": 0}, ["gpu_memory_gib", "greater than 0"]),
        ({"load_gib_per_second": -1.5}, ["load_gib_per_second", "greater than 0"]),
        ({"load_gib_per_s": 1.5}, ["did you mean 'load_gib_per_second'"]),
        ({"memory": 900}, ["memory", "900", "string"]),
        ({"memory": "lots"}, ["memory", "'lots'", "900G"]),
        ({"memory": "-1G"}, ["memory", "'-1G'"]),
        ({"time": "1h"}, ["time", "'1h'", "D-HH"]),
        ({"time": "UNLIMITED"}, ["time", "UNLIMITED"]),
        ({"time": "0"}, ["time", "more than 0"]),
        ({"times": {"train": "4h"}}, ["times.train", "'4h'", "D-HH"]),
        ({"times": {"trane": "1:00:00"}}, ["trane", "train"]),
        ({"grace_seconds": 0}, ["grace_seconds"]),
        ({"grace_seconds": 70_000}, ["grace_seconds", "65535"]),
        ({"mounts": "a"}, ["mounts", "tuple"]),
        ({"mounts": ["data"]}, ["mounts.[0]", "absolute path"]),
        ({"mounts": ["/a:/b:rx"]}, ["mounts.[0]", "SRC:DST:ro"]),
        ({"mounts": ["/a:/b:ro:x"]}, ["mounts.[0]", "SRC:DST:ro"]),
        ({"mounts": ["/a::ro"]}, ["mounts.[0]", "absolute path"]),
        ({"constraint": "[a|b"}, ["constraint", "[ ]"]),
        ({"constraint": "a)"}, ["constraint", "( )"]),
        ({"constraint": "[a*2]&[b*2]"}, ["constraint", "one pair"]),
        ({"max_array": 0}, ["max_array"]),
        ({"chain": -1}, ["chain"]),
        ({"preamble": ["#SBATCH --partition=x"]}, ["preamble.[0]", "extra"]),
        ({"preamble": ["  # sbatch -p x"]}, ["preamble.[0]", "extra"]),
        ({"preamble": ["export A=\\"]}, ["preamble.[0]", "backslash"]),
    ],
)
def test_a_wrong_value_gets_one_line(keys: dict[str, Any], words: list[str]) -> None:
    line = refused(**keys)
    for word in words:
        assert word in line, line


def test_usual_values_pass_intact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    keys = {
        "partition": "gpu,gpu_long-2,1080ti",
        "account": "abc@v100",
        "qos": "normal,high",
        "reservation": "school_2026",
        "constraint": "[(knl&quad)*2|rack-1.2*4]",
        "memory": "1500000M",
        "scratch": "/local/données d'été".replace("'", " "),
        "network_interface": "ib0,ib1",
        "apptainer": "apptainer-1.4",
        "mounts": ("/a", "/a:/b", "/a b/ü:/c (d)&e:ro", "/a:/b:rw"),
        "preamble": ("module load apptainer", "export A=\"$(date) 'x'\"\t# why", "echo \\\\"),
        "extra": ("--exclude=node[01-03,7]", "--switches=1@2:00:00", "--contiguous"),
        "times": {"train": "2-00"},
    }
    site = make(**keys)
    assert site.model_dump(include=set(keys)) == keys
    assert make(mounts=["~/data:/data:ro"]).mounts == ("/home/me/data:/data:ro",)
    assert make(apptainer="~/bin/apptainer").apptainer == "/home/me/bin/apptainer"


HOSTILE = {
    "space": "a b",
    "leading space": " a",
    "single quote": "a'b",
    "double quote": 'a"b',
    "command": "$(touch pwned)",
    "variable": "$HOME",
    "backtick": "`touch pwned`",
    "newline": "a\n#SBATCH --partition=evil",
    "last newline": "a\n",
    "carriage return": "a\rb",
    "nul": "a\0b",
    "escape": "a\x1b[2Jb",
    "unicode": "pärtition",
    "line separator": "a\u2028b",
    "right to left": "a\u202eb",
    "leading dash": "-x",
    "option": "--wrap=id",
    "semicolon": "a;id",
    "pipe": "a >b",
    "backslash": "a\\",
    "hash": "a#b",
    "comma first": ",a",
    "4 KB": "a" * 4096,
    "empty": "",
}
PLAIN = (
    "name partition account qos reservation constraint gpu_request gpu_type memory time"
    " network_interface apptainer scratch image"
).split()
FIELDS: dict[str, Any] = {key: (lambda v, key=key: {key: v}) for key in PLAIN} | {
    "times": lambda v: {"times": {"train": v}},
    "times key": lambda v: {"times": {v: "1:00:00"}},
    "mounts": lambda v: {"mounts": [v]},
    "env": lambda v: {"env": [v]},
    "extra": lambda v: {"extra": [v]},
    "extra value": lambda v: {"extra": [f"--licenses={v}"]},
    "cpu.partition": lambda v: {"cpu": {"partition": v}},
    "cpu.account": lambda v: {"cpu": {"account": v}},
    "cpu.qos": lambda v: {"cpu": {"qos": v}},
    "cpu.memory": lambda v: {"cpu": {"memory": v}},
    "key": lambda v: {v: "x"},
}
HARMLESS = {("extra value", k) for k in ("leading dash", "option", "comma first")}
"""Part of the value of another option: `--licenses=-x` stays one argument."""


def test_the_table_has_every_text_field() -> None:
    texts = {k for k, f in Site.model_fields.items() if "str" in str(f.annotation)}
    texts |= {"gpu_request", "scratch"}
    missing = {k for k in texts if not any(k == f.split(" ")[0] for f in FIELDS)}
    assert missing <= {"preamble", "cpu"}, missing


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_value_is_refused(field: str, kind: str) -> None:
    keys = FIELDS[field](HOSTILE[kind])
    if (field, kind) in HARMLESS:
        assert make(**keys).extra == (keys["extra"][0],)
    else:
        refused(**keys)


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("field", ["scratch", "apptainer", "mounts"])
def test_a_hostile_path_is_refused_or_stays_one_path(field: str, kind: str) -> None:
    value = f"/data/{HOSTILE[kind]}"
    keys = FIELDS[field](value)
    harmless = {"space", "leading space", "unicode", "leading dash", "option", "semicolon"}
    if kind in harmless | {"pipe", "hash", "empty"}:
        assert make(**keys).model_dump()[field] in (value, (value,))
    else:
        refused(**keys)


@pytest.mark.parametrize("kind", ["newline", "last newline", "carriage return", "nul", "escape"])
def test_a_preamble_item_is_one_line(kind: str) -> None:
    assert "preamble" in refused(preamble=["true", HOSTILE[kind]])


# -- extra ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "key"),
    [
        ("--partition=x", "partition"),
        ("--part=x", "partition"),
        ("--pa=x", "partition"),
        ("-p x", "partition"),
        ("-px", "partition"),
        ("--partition x", "partition"),
        ("--account=x", "account"),
        ("--acco=x", "account"),
        ("-A x", "account"),
        ("--gres=gpu:1", "gpu_request"),
        ("--gpus=8", "gpu_request"),
        ("--gpus-per-t=8", "gpu_request"),
        ("-G8", "gpu_request"),
        ("--tres-per-task=gres/gpu:1", "gpu_request"),
        ("--mem=1", "memory"),
        ("--mem_per_cpu=1", "memory"),
        ("--cpus-per-task=1", "cpus"),
        ("-c1", "cpus"),
        ("--exclusive", "exclusive"),
        ("--exclusive=user", "exclusive"),
        ("--exclu", "exclusive"),
        ("--oversubscribe", "exclusive"),
        ("--time=1", "time or times"),
        ("--time-min=1", "time or times"),
        ("--tim=1", "time or times"),
        ("--no-requeue", "requeue"),
        ("--no_requeue", "requeue"),
        ("--req", "requeue"),
        ("--signal=USR1", "grace_seconds"),
        ("--array=1-3", "max_array"),
        ("--nodes=2", "[slurm] nodes"),
        ("-N2", "[slurm] nodes"),
        ("--mail-user=x", "[notify]"),
        ("--mail-t=ALL", "[notify]"),
        ("--export=NONE", "preamble"),
        ("--container=x", "apptainer"),
        ("--job-name=x", "the launcher sets it"),
        ("--tasks-per-node=2", "the launcher sets it"),
        ("--ntasks=2", "the launcher sets it"),
        ("--depend=afterok:1", "the launcher sets it"),
        ("--output=x", "the launcher sets it"),
        ("--err=x", "the launcher sets it"),
        ("--open-mode=append", "the launcher sets it"),
        ("--comment=x", "the launcher sets it"),
        ("--wrap=id", "the launcher sets it"),
        ("--kill-on-invalid-dep=no", "the launcher sets it"),
        ("--test-only", "what sbatch prints"),
        ("--parsable", "what sbatch prints"),
        ("--p", "partition"),
        ("--", "--key=value"),
        ("partition=x", "--key=value"),
        ("--licenses=a --partition=x", "without blanks"),
        ("--licenses='a", "without blanks"),
        ("--licenses=a#b", "without blanks"),
        ("--1=2", "--key=value"),
    ],
)
def test_extra_never_overrides_ours(option: str, key: str) -> None:
    line = refused(extra=[option])
    assert "extra.[0]" in line and key in line, line


def test_no_beginning_of_our_options_slips_through() -> None:
    for own in (name for name in sites.OWN if len(name) > 1):
        for end in range(1, len(own) + 1):
            refused(extra=[f"--{own[:end]}=1"])
            refused(extra=[f"--{own[:end].replace('-', '_')}"])


@pytest.mark.parametrize(
    "option",
    [
        "--exclude=n[1-3]",
        "--nodelist=n1",
        "--licenses=a@db:2,b",
        "--gres-flags=enforce-binding",
        "--gpu-bind=none",
        "--mem-bind=local",
        "--hint=nomultithread",
        "--switches=1",
        "--wait-all-nodes=1",
        "--nice=100",
        "--container-image=/x.sqsh",
        "--get-user-env",
    ],
)
def test_other_options_pass(option: str) -> None:
    assert make(extra=[option]).extra == (option,)


# -- times ---------------------------------------------------------------------------------------
