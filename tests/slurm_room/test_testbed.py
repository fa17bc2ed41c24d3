"""The testbed is a real Slurm, is mended by `up` from any state, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

TESTBED = Path(__file__).resolve().parents[2] / "slurm/testbed/testbed.py"
# Ends only by SIGKILL, and has a child that left its session and its parent.
STUBBORN = "trap '' TERM; (setsid sleep 300 &) ; while :; do sleep 1; done"


def pids(bed: Any) -> dict[str, int]:
    return {name: daemon["pid"] for name, daemon in bed.status()["daemons"].items()}


def of_bed(bed: Any) -> list[str]:
    """Processes that carry the testbed's directory in their environment or hold its files."""
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            environment = (proc / "environ").read_bytes()
            files = [os.readlink(entry) for entry in os.scandir(proc / "fd")]
        except OSError:
            continue
        if f"{bed.dir}/".encode() in environment or any(f"{bed.dir}/" in file for file in files):
            found.append(f"{proc.name} {(proc / 'comm').read_text().strip()}")
    return found


def test_every_command_has_help() -> None:
    text = subprocess.run([TESTBED, "--help"], capture_output=True, text=True, check=True).stdout
    commands = re.findall(r"^    ([a-z-]+) ", text, re.M)
    assert {"up", "down", "status", "env", "wipe", "kill-node"} <= set(commands)
    for command in commands:
        subprocess.run([TESTBED, command, "--help"], check=True, stdout=subprocess.DEVNULL)


def test_up_again_changes_nothing(testbed: Any) -> None:
    before = testbed.status()
    assert before["ok"] and len(before["daemons"]) == 8
    testbed.up()
    assert testbed.status() == before
    assert testbed.testbed("env").stdout == f"export SLURM_CONF={testbed.dir}/etc/slurm.conf\n"


def test_four_nodes_of_eight_gpus(testbed: Any) -> None:
    nodes = testbed.run("sinfo", "-h", "-N", "-p", "all", "-o", "%N %G %t").splitlines()
    assert nodes == [f"127.0.1.{i} gpu:h200:8 idle" for i in (1, 2, 3, 4)]
    shown = testbed.run("srun", "-N4", "--gpus-per-node=8", "printenv", "CUDA_VISIBLE_DEVICES")
    assert shown.splitlines() == ["0,1,2,3,4,5,6,7"] * 4


@pytest.mark.parametrize("request_", ["--gres=gpu:2", "--gres=gpu:h200:2", "--gpus-per-node=2"])
def test_gpus_are_asked_for_in_all_ways(testbed: Any, request_: str) -> None:
    assert testbed.run("srun", request_, "printenv", "CUDA_VISIBLE_DEVICES") == "0,1"
    assert testbed.run("srun", "printenv", "HOSTNAME", "CUDA_VISIBLE_DEVICES", check=False) == ""


def test_jobs_are_in_accounting(testbed: Any) -> None:
    job = testbed.sbatch("exit 3", "--gpus-per-node=8")
    testbed.wait_state(job, "FAILED")
    look = ("sacct", "-n", "-P", "-X", "-j", job, "-o", "State,ExitCode,AllocTRES")
    testbed.wait(lambda: testbed.run(*look)[:11], "FAILED|3:0|", seconds=10)
    assert "gres/gpu=8" in testbed.run(*look)


def test_no_accounting(bare_testbed: Any) -> None:
    status = bare_testbed.status()
    assert status["ok"] and "slurmdbd" not in status["daemons"]
    bare_testbed.wait_state(bare_testbed.sbatch("true"), "COMPLETED")
    assert bare_testbed.run("sacct", "-n", check=False) == ""
    assert "no accounting" in bare_testbed.testbed("stop-dbd", check=False).stderr


def test_two_side_by_side(testbed: Any, bare_testbed: Any) -> None:
    one, other = testbed.status(), bare_testbed.status()
    assert one["ok"] and other["ok"]
    ports = [d["port"] for s in (one, other) for d in s["daemons"].values() if d["port"]]
    assert len(set(ports)) == len(ports) == 11
    job = bare_testbed.sbatch("sleep 30", "--job-name=other", "-N4", "--exclusive")
    bare_testbed.wait_state(job, "RUNNING")
    assert "other" not in testbed.run("squeue", "-h", "-o", "%j")
    assert testbed.run("srun", "-N4", "--exclusive", "echo", "free") == "\n".join(["free"] * 4)
    bare_testbed.clear()


def test_only_loopback(testbed: Any) -> None:
    if socket.gethostbyname(socket.gethostname()) != "127.0.0.1":
        pytest.skip("here Slurm's daemons listen on all addresses (README)")
    listening = Path("/proc/net/tcp").read_text().splitlines()[1:]
    addresses = {line.split()[1] for line in listening if line.split()[3] == "0A"}
    mine = [f"{d['port']:04X}" for d in testbed.status()["daemons"].values() if d["port"]]
    assert {a for a in addresses if a[9:] in mine} == {f"0100007F:{port}" for port in mine}


def test_a_killed_node_is_down_and_its_job_requeued(testbed: Any) -> None:
    job = testbed.sbatch(f"echo $SLURMD_NODENAME; {STUBBORN}", "--requeue", "--gpus-per-node=8")
    testbed.wait(lambda: testbed.output(job).split(), ["127.0.1.1"])
    testbed.kill_node(1, seen=True)
    assert not [p for p in of_bed(testbed) if "sleep" in p]
    status = testbed.status()
    assert not status["ok"] and status["nodes"]["127.0.1.1"].startswith("down")
    assert "does not run" in testbed.testbed("status", check=False).stdout
    # The file is written anew by the second start, on another node.
    testbed.wait_state(job, "PENDING")
    testbed.run("scontrol", "update", f"JobId={job}", "StartTime=now")
    testbed.wait(lambda: testbed.output(job).split(), ["127.0.1.2"])
    testbed.start_node(1)
    assert testbed.status()["ok"]
    testbed.clear()


def test_high_preempts_low(testbed: Any) -> None:
    whole = ("-N4", "--exclusive")
    low = testbed.sbatch("echo start; sleep 60", "-plow", "--requeue", "--open-mode=append", *whole)
    testbed.wait(lambda: testbed.output(low), "start\n")
    high = testbed.sbatch("sleep 1", "-phigh", *whole)
    testbed.wait_state(high, "COMPLETED")
    assert testbed.squeue(low) == "PENDING"
    testbed.run("scontrol", "update", f"JobId={low}", "StartTime=now")
    testbed.wait(lambda: testbed.output(low).count("start\n"), 2)
    testbed.clear()


def test_preemption_is_changed_on_the_running_testbed(testbed: Any) -> None:
    testbed.up("--grace-time", "60", "--preempt-signal")
    assert "GraceTime=60" in testbed.run("scontrol", "show", "partition", "low")
    assert "preempt_send_user_signal" in testbed.run("scontrol", "show", "config")
    whole = ("-N4", "--exclusive")
    low = testbed.sbatch(
        "trap 'echo USR2' USR2; echo start; while :; do sleep 0.1; done",
        "-plow", *whole, "--requeue", "--signal=B:USR2@30",
    )
    testbed.wait(lambda: testbed.output(low), "start\n")
    testbed.sbatch("true", "-phigh", *whole)
    testbed.wait(lambda: testbed.output(low), "start\nUSR2\n")
    assert testbed.squeue(low) == "RUNNING"
    testbed.up("--grace-time", "0", "--no-preempt-signal")
    assert "preempt_send_user_signal" not in testbed.run("scontrol", "show", "config")
    testbed.clear()


def test_mail_is_kept_in_a_file(bare_testbed: Any) -> None:
    job = bare_testbed.sbatch("true", "--mail-type=END", "--mail-user=me@example.org")
    file = bare_testbed.dir / "log/mail"
    bare_testbed.wait(lambda: file.exists() and f"Job_id={job} " in file.read_text(), True)


def test_what_no_partition_can_run_is_refused(testbed: Any) -> None:
    command = ["sbatch", "--test-only", "-pshort", "--time=3", "--wrap", "true"]
    done = subprocess.run(command, env=testbed.env, capture_output=True, text=True)
    assert done.returncode and "time limit is invalid" in done.stderr.lower()


def test_a_killed_slurmctld_comes_back_with_its_jobs(testbed: Any) -> None:
    job = testbed.sbatch("sleep 30")
    testbed.wait_state(job, "RUNNING")
    # slurmctld writes its state every 5 s; a job is lost that started since.
    state, now = testbed.dir / "state/job_state", time.time()
    testbed.wait(lambda: state.stat().st_mtime > now, True)
    testbed.testbed("kill-ctld")
    assert not testbed.status()["ok"]
    testbed.up()
    assert testbed.status()["ok"] and testbed.squeue(job) == "RUNNING"
    testbed.clear()


def test_jobs_run_without_slurmdbd_and_are_told_later(testbed: Any) -> None:
    testbed.testbed("stop-dbd")
    job = testbed.sbatch("true")
    testbed.wait_state(job, "COMPLETED")
    assert testbed.run("sacct", "-n", "-j", job, check=False) == ""
    testbed.testbed("start-dbd")
    look = ("sacct", "-n", "-P", "-X", "-j", job, "-o", "State")
    testbed.wait(lambda: testbed.run(*look, check=False), "COMPLETED", seconds=20)


def test_up_mends_a_reboot_and_an_up_that_was_cut_short(bare_testbed: Any) -> None:
    for pid in pids(bare_testbed).values():
        os.kill(pid, signal.SIGKILL)
    run = bare_testbed.dir / "run"
    (run / "munged").write_text(f"{os.getpid()} 1 another-boot\n")  # an id that is in use again
    bare_testbed.up()
    assert bare_testbed.status()["ok"]
    before = pids(bare_testbed)
    (run / "slurmctld").unlink()  # started, and not yet written down
    (run / "slurmd-127.0.1.2").write_text("")
    bare_testbed.up()
    assert pids(bare_testbed) == before
    assert bare_testbed.run("srun", "-N4", "echo", "well") == "\n".join(["well"] * 4)


def test_up_is_killed_and_repeated() -> None:
    at = ["--dir", f"/tmp/ke-test-{os.getpid()}-k"]
    for seconds in (0.1, 0.2, 0.3):
        with contextlib.suppress(subprocess.TimeoutExpired):  # run() kills it with SIGKILL
            subprocess.run([TESTBED, "up", "--no-accounting", *at], timeout=seconds)
        subprocess.run([TESTBED, "up", "--no-accounting", *at], check=True)
        subprocess.run([TESTBED, "status", *at], check=True, stdout=subprocess.DEVNULL)
        subprocess.run([TESTBED, "wipe", *at], check=True)


def test_down_leaves_no_process_and_ends_no_other(bare_testbed: Any) -> None:
    user = subprocess.Popen(["sleep", "60"], env=bare_testbed.env)  # a shell that uses it
    job = bare_testbed.sbatch(STUBBORN)
    bare_testbed.wait_state(job, "RUNNING")
    bare_testbed.wait(lambda: any("slurmstepd" in p for p in of_bed(bare_testbed)), True)
    os.kill(pids(bare_testbed)["slurmctld"], signal.SIGKILL)  # nobody is there to cancel the job
    bare_testbed.testbed("down")
    assert of_bed(bare_testbed) == [f"{user.pid} sleep"]
    user.kill()
    user.wait()
    assert bare_testbed.testbed("status", check=False).returncode == 1
    bare_testbed.testbed("down")
    bare_testbed.up()
    bare_testbed.clear()


@pytest.mark.parametrize(
    ("options", "exit_status", "message"),
    [
        (["up", "--dir", "/tmp/" + "x" * 80], 2, "too many"),
        (["up", "--dir", "/tmp/with space"], 2, "plainer"),
        (["up", "--dir", "/tmp/ke-none", "--nodes", "0"], 2, "a number from 1 to 40"),
        (["up", "--dir", "/proc/none"], 1, "/proc/none"),
        (["down", "--dir", "/etc"], 1, "no testbed"),
        (["wipe", "--dir", "/etc"], 1, "no testbed"),
        (["status", "--dir", "/tmp/ke-none"], 1, "up --dir /tmp/ke-none"),
        (["kill-node", "--dir", "/tmp/ke-none", "1"], 1, "up --dir /tmp/ke-none"),
    ],
)
def test_wrong_use_gets_one_line(options: list[str], exit_status: int, message: str) -> None:
    done = subprocess.run([TESTBED, *options], capture_output=True, text=True)
    assert done.returncode == exit_status and done.stderr.count("\n") == 1, done.stderr
    assert message in done.stderr and done.stderr.startswith("testbed: error: ")
    assert not Path("/tmp/with space").exists() and not Path("/etc/lock").exists()


def test_shape_holds_while_it_runs(bare_testbed: Any) -> None:
    done = bare_testbed.testbed("up", "--nodes", "2", check=False)
    assert done.returncode == 1 and "runs with nodes = 4; fix: " in done.stderr
    done = bare_testbed.testbed("kill-node", "9", check=False)
    assert done.returncode == 2 and "no node 127.0.1.9" in done.stderr


def test_a_taken_port_is_named(bare_testbed: Any, tmp_path: Path) -> None:
    port = bare_testbed.status()["daemons"]["slurmctld"]["port"]
    directory = f"/tmp/ke-test-{os.getpid()}-port"
    command = [TESTBED, "up", "--no-accounting", "--dir", directory, "--port", str(port)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and f"{port}" in done.stderr and "in use" in done.stderr
    subprocess.run([TESTBED, "wipe", "--dir", directory], check=True)


def test_a_user_gets_the_line_to_type(tmp_path: Path) -> None:
    code = (
        f"import os, sys; sys.path.insert(0, {str(TESTBED.parent)!r}); os.getuid = lambda: 1000\n"
        "import testbed; testbed.install(['slurmd', 'munge'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "fix: sudo apt-get install slurmd munge" in done.stderr


def test_as_an_ordinary_user() -> None:
    """With the system's Python: ours may lie where that user may not look."""
    name = f"ke-test-{os.getpid() % 10**6}"
    home = Path(f"/tmp/{name}")
    home.mkdir()
    shutil.copytree(TESTBED.parent, home / "code", ignore=shutil.ignore_patterns("__pycache__"))
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable
    testbed = [python, str(home / "code/testbed.py")]
    at = ["--dir", f"{home}/bed"]
    before: list[str] = []
    root = os.getuid() == 0
    if root:
        subprocess.run(["useradd", "--no-create-home", "--home-dir", home, name], check=True)
        shutil.chown(home, name)
        before = ["setpriv", f"--reuid={name}", f"--regid={name}", "--init-groups"]
    env = {"PATH": "/usr/bin:/bin", "HOME": str(home), "SLURM_CONF": f"{home}/bed/etc/slurm.conf"}

    def call(*command: str) -> str:
        done = subprocess.run(
            [*before, *command], env=env, cwd=home, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout.strip()

    try:
        call(*testbed, "up", *at)
        assert json.loads(call(*testbed, "status", "--json", *at))["ok"]
        job = call("sbatch", "--parsable", "--gpus-per-node=8", "--wrap", "id -un; env | grep CUDA")
        deadline = time.monotonic() + 20
        while call("sacct", "-n", "-X", "-P", "-j", job, "-o", "State") != "COMPLETED":
            assert time.monotonic() < deadline
            time.sleep(0.2)
        user = name if root else call("id", "-un")
        text = (home / f"slurm-{job}.out").read_text()
        assert text == f"{user}\nCUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7\n"
        call("sbatch", "--wrap", STUBBORN)
        time.sleep(0.5)
        call(*testbed, "down", *at)
        call(*testbed, "wipe", *at)
        assert not (home / "bed").exists()
        if root:
            left = subprocess.run(["ps", "-u", name, "-o", "stat=,args="], capture_output=True)
            lines = left.stdout.decode().splitlines()
            assert not [line for line in lines if not line.startswith("Z")]
    finally:
        if root:
            subprocess.run([*before, *testbed, "wipe", *at], env=env, stdin=subprocess.DEVNULL)
            subprocess.run(["userdel", "--force", name], check=True, capture_output=True)
        shutil.rmtree(home)
