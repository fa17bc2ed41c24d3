"""Programs that do not outlive us, and what of the environment Apptainer is told."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from kimi_eagle import liveness
from kimi_eagle.images import children


def test_a_whole_family_ends(tmp_path: Path) -> None:
    script = "echo $$; sleep 1000 & echo $!; wait"

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, stop)
    log = tmp_path / "log"
    try:
        with pytest.raises(KeyboardInterrupt):
            while True:  # again, should the machine be so slow that nothing was said
                signal.setitimer(signal.ITIMER_REAL, 0.5)
                try:
                    children.run(["sh", "-c", script], tmp_path, os.environ)
                except KeyboardInterrupt:
                    if len(log.read_text().split()) == 2:
                        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    deadline = time.monotonic() + 30
    while alive := [pid for pid in log.read_text().split() if liveness.process_start(int(pid))]:
        assert time.monotonic() < deadline, alive


def test_nohup_stays() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with children.ends_like_ctrl_c():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        with pytest.raises(KeyboardInterrupt), children.ends_like_ctrl_c():
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_a_user_may_tell_apptainer(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"APPTAINER_DOCKER_USERNAME": "me", "SINGULARITY_CACHEDIR": "/c", "HTTPS_PROXY": "p"}
    odd = {"APPTAINER_BIND": "/x", "SINGULARITYENV_A": "b", "APPTAINER_NV": "1"}
    for name, value in (told | odd).items():
        monkeypatch.setenv(name, value)
    found = children.environment()
    assert found.items() >= told.items() and not odd.keys() & found.keys()
