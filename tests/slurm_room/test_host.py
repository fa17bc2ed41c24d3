"""host.sh by itself, around a small shell command instead of a stage: what each end means.

What Slurm does to it is tested with real jobs (test_faults_*); here are its exit codes, its files
and its words, which need no Slurm.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

HOST = Path(__file__).resolve().parents[2] / "slurm/host.sh"
CLEAN = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "KIMI_EAGLE"))}


class Host:
    """host.sh with a shell script as COMMAND; each start of it adds a line to `starts`."""

    def __init__(self, folder: Path) -> None:
        self.run = folder
        self.starts = folder / "starts"

    def argv(self, script: str, *options: object, stages: str = "extract") -> list[str]:
        words = ["bash", HOST, "--run", self.run, "--suffix", "s", "--stages", stages, *options]
        body = f'echo "$1" >>"{self.starts}"; {script}'
        return [str(w) for w in (*words, "--", "bash", "-c", body, "stage", "@STAGE@")]

    def __call__(self, script: str, *options: object, stages: str = "extract"):
        self.run.mkdir(exist_ok=True)
        return subprocess.run(
            self.argv(script, *options, stages=stages),
            env=CLEAN, capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    def started(self) -> list[str]:
        return self.starts.read_text().split() if self.starts.exists() else []

    def use(self, stage: str = "extract") -> dict[str, str]:
        text = (self.run / f"slurm/use/s.0.0.{stage}.txt").read_text()
        return dict(word.split("=", 1) for word in text.split())


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path / "run")


@pytest.mark.parametrize(
    ("code", "exit_code", "why", "starts"),
    [
        (0, 0, "done", 1),
        (75, 0, "stopped", 1),
        (76, 75, "waiting", 1),
        (2, 1, "refused", 1),
        (78, 1, "refused", 1),
        (1, 1, "held", 3),
        (137, 1, "held", 3),
    ],
)
def test_what_an_exit_code_means(host: Host, code: int, exit_code: int, why: str, starts: int):
    done = host(f"exit {code}")
    assert (done.returncode, host.use()["why"]) == (exit_code, why), done.stdout
    assert len(host.started()) == starts


def test_stages_one_after_the_other(host: Host):
    assert host("true", stages="extract,vocab").returncode == 0
    assert host.started() == ["extract", "vocab"]
    assert host.use("vocab")["why"] == "done"


def test_next_stage_waits_for_others_of_the_group(host: Host):
    """Others still work on extract: this worker frees its GPUs and is not requeued."""
    done = host('[ "$1" = extract ] || exit 76', "--requeue", stages="extract,vocab")
    assert done.returncode == 0 and "others of this group go on" in done.stdout


def test_three_deaths_before_a_unit_hold_the_stage(host: Host):
    done = host("echo the engine says no >&2; exit 3")
    held = (host.run / "extract/held").read_text()
    assert "3 times before any unit" in held and "the engine says no" in held
    assert done.returncode == 1 and "the engine says no" in done.stdout
    again = host("true")
    assert again.returncode == 1 and len(host.started()) == 3


def test_deaths_after_units_go_on(host: Host):
    """A worker that commits before it dies is not broken: the fourth start ends well."""
    script = 'printf "n\\nc\\n1\\n1/9\\n" >"$KIMI_EAGLE_BEACON"; '
    script += f'[ "$(wc -l <"{host.starts}")" -ge 4 ] || exit 1'
    assert host(script).returncode == 0
    assert len(host.started()) == 4


def test_death_in_a_unit_counts_against_the_unit(host: Host):
    """The claim is dropped, and one line says in which unit the worker died."""
    script = 'echo "j$KIMI_EAGLE_JOB-x" >"' + str(host.run) + '/extract/claims/00007"; '
    script += f'[ "$(wc -l <"{host.starts}")" -ge 5 ] || kill -9 $$'
    assert host(script).returncode == 0
    assert len((host.run / "extract/attempts/00007.died").read_text().splitlines()) == 4


def test_claims_of_others_stay(host: Host):
    (host.run / "extract/claims").mkdir(parents=True)
    (host.run / "extract/claims/00001").write_text("j99-n1-1-aa\n")
    host("exit 9")
    assert (host.run / "extract/claims/00001").exists()
    assert not list((host.run / "extract/attempts").glob("*.died"))


def test_starts_are_bounded(host: Host):
    script = 'printf "n\\nc\\n1\\n1/9\\n" >"$KIMI_EAGLE_BEACON"; exit 1'
    assert host(script, "--attempts", 5).returncode == 1
    assert len(host.started()) == 5 and "5 times" in (host.run / "extract/held").read_text()


def test_waiting_is_hardly_a_start(host: Host):
    """Workers that come again every two minutes for a slow canary are not broken: 20 for one."""
    starts = host.run / "slurm/starts"
    starts.mkdir(parents=True)
    (starts / "s.0.txt").write_text("1 0 n1 5 extract waiting\n" * 60)
    assert host("exit 76", "--attempts", 5).returncode == 75
    assert (starts / "s.0.txt").read_text().splitlines()[-1].endswith(" extract waiting")
    (starts / "s.0.txt").write_text("1 0 n1 5 extract waiting\n" * 100)
    assert host("exit 76", "--attempts", 5).returncode == 1
    assert "5 times" in (host.run / "extract/held").read_text()


def test_spent_gpu_hours_start_nothing(host: Host):
    use = host.run / "slurm/use"
    use.mkdir(parents=True)
    (use / "old.0.0.regenerate.txt").write_text("start=0 now=3600 end=3600 gpus=3\n\n")
    assert host("true", "--hours", 3).returncode == 1
    assert host.started() == [] and (host.run / "held").exists()


def test_the_end_is_told_once(host: Host):
    """Follow-up jobs find nothing to do, one after the other."""
    notify = ["--notify", "echo", "--notify", "told:", "--events", "end", "--final"]
    outputs = [host("true", *notify).stdout for _ in range(2)]
    assert ["told: end" in text for text in outputs] == [True, False]


def test_jobs_submitted_by_hand_are_known_by_their_name(host: Host):
    host.run.mkdir()
    argv = [str(w) for w in ("bash", HOST, "--run", host.run, "--stages", "vocab", "--", "true")]
    for name, slot in (("voc-tiny-0123456789", "0123456789.0"), ("mine", "h77.0")):
        env = {**CLEAN, "SLURM_JOB_NAME": name, "SLURM_JOB_ID": "77"}
        assert subprocess.run(argv, env=env, capture_output=True, timeout=60).returncode == 0
        assert (host.run / f"slurm/use/{slot}.0.vocab.txt").exists()


def test_gpu_hours_end_the_run(host: Host):
    """An earlier job used 3 of 3 hours; this one is asked to leave and the run is held."""
    use = host.run / "slurm/use"
    use.mkdir(parents=True)
    (use / "old.0.0.regenerate.txt").write_text("start=0 now=5400 end=5400 gpus=2 why=done\n")
    script = 'printf "n\\nc\\n0\\n0/9\\n" >"$KIMI_EAGLE_BEACON"\n'
    script += 'for i in $(seq 300); do [ -e "$KIMI_EAGLE_STOP" ] && exit 75; sleep 0.1; done'
    done = host(script, "--hours", 3, "--gpus", 8)
    assert done.returncode == 1 and "max_gpu_hours = 3" in (host.run / "held").read_text()
    assert host.use()["gpus"] == "8" and host.use()["why"] == "held"


def test_orphans_of_a_dead_process_are_ended(host: Host, tmp_path: Path):
    """A killed parent leaves a child that would hold the GPUs while the next one loads."""
    script = f'(sleep 300 & echo $! >>"{tmp_path}/orphans"); exit 1'
    host(script)
    for pid in (tmp_path / "orphans").read_text().split():
        path = Path(f"/proc/{pid}/stat")
        assert not path.exists() or path.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_signals(host: Host, number: signal.Signals):
    """USR2: the stop file, and time to end the unit. TERM: passed on at once."""
    host.run.mkdir()
    script = 'trap "exit 143" TERM; for i in $(seq 300); do sleep 0.1; '
    script += '[ -e "$KIMI_EAGLE_STOP" ] && exit 75; done'
    process = subprocess.Popen(host.argv(script, "--grace", 40), env=CLEAN)
    while not host.started():
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(30) == {signal.SIGUSR2: 75, signal.SIGTERM: 143}[number]
    assert host.use()["why"] == {signal.SIGUSR2: "limit", signal.SIGTERM: "term"}[number]


def test_unit_is_dropped_when_the_grace_time_ends(host: Host):
    """Asked by USR2 with 4 s of grace, it gets TERM after 3 and leaves."""
    host.run.mkdir()
    script = 'trap "exit 143" TERM; for i in $(seq 600); do sleep 0.1; done'
    process = subprocess.Popen(host.argv(script, "--grace", 4), env=CLEAN)
    while not host.started():
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR2)
    start = time.monotonic()
    assert process.wait(30) == 75
    assert time.monotonic() - start < 15


HOSTILE = ["a b", "a'b", 'a"b', "$(touch x)", "`touch x`", "a\nb", "ünï", "-dash", "a,b", "a:b",
           "a=b", "a;touch x", "@STAGE@", "x" * 4000, "*", "\\"]  # fmt: skip


@pytest.mark.parametrize("word", HOSTILE)
def test_hostile_words_pass_intact(tmp_path: Path, word: str):
    """Run directory, notice command and COMMAND: words stay words and nothing is executed."""
    run = tmp_path / (word[:200] if word != "@STAGE@" else "STAGE@@STAGE@")
    told = tmp_path / "told"
    notify = ["bash", "-c", 'printf "%s\\0" "$@" >>"$0"', told, word]
    argv: list[object] = ["bash", HOST, "--run", run, "--stages", "vocab", "--final"]
    for part in notify:
        argv += ["--notify", part]
    argv += ["--events", "end", "--", "bash", "-c", 'printf "%s\\0" "$@" >"$0"', tmp_path / "got"]
    argv += [word, f"<{word}>"]
    done = subprocess.run(list(map(str, argv)), env=CLEAN, cwd=tmp_path, timeout=60)
    assert done.returncode == 0
    got = (tmp_path / "got").read_text().split("\0")[:-1]
    assert got == ["vocab" if word == "@STAGE@" else word, f"<{word}>"]
    assert told.read_text().split("\0")[:-1] == [word, "end", str(run), "the run is finished"]
    assert (run / "vocab/log").is_dir() and not (tmp_path / "x").exists()


def test_notices(host: Host, tmp_path: Path):
    """hold and failure of one end; a notice command that fails harms nothing."""
    command = f'echo "$1" >>{tmp_path}/told; exit 7'
    notify = ["--notify", "bash", "--notify", "-c", "--notify", command, "--notify", "tell"]
    done = host("exit 5", *notify, "--events", "hold,failure")
    assert done.returncode == 1
    assert (tmp_path / "told").read_text().split() == ["hold", "failure"]
    assert "the notice command failed (7)" in done.stdout


def test_wrong_use(host: Host):
    for argv in (["--what"], ["--run", "/x", "--stages", "vocab"], ["--", "true"]):
        done = subprocess.run(["bash", HOST, *argv], env=CLEAN, capture_output=True, text=True)
        assert done.returncode == 2 and "host.sh" in done.stderr
