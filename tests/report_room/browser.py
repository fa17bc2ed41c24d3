"""A real Chromium without a window, driven over its DevTools protocol.

Over a pipe (--remote-debugging-pipe: file descriptors 3 and 4, JSON messages that end with a zero
byte), so that no port is opened and no library is needed. What a page did is kept: requests to the
network, lines on its console, exceptions.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SECONDS = 60
"""Until an answer; a busy machine takes its time."""

FLAGS = (
    "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run",
    "--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--disable-extensions", "--hide-scrollbars", "--force-color-profile=srgb",
)  # fmt: skip


PACKAGES = ("chromium", "fonts-dejavu-core")
"""Debian's names. Without a font of its own a small machine would draw boxes."""


def find_or_install() -> str:
    """The browser's program; installed with apt-get where there is none and we are root, as the
    tests of the Slurm room install theirs."""
    for found in (shutil.which("chromium"), shutil.which("chromium-browser")):
        if found:
            return found
    fix = f"no chromium here; fix: sudo apt-get install {' '.join(PACKAGES)}"
    assert shutil.which("apt-get") and os.getuid() == 0, fix
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES]
    for command in (["apt-get", "update", "-qq"], install):
        done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True)
    found = shutil.which("chromium")
    assert done.returncode == 0 and found, f"{fix}\n{done.stderr.decode(errors='replace')[-500:]}"
    return found


class Browser:
    """One Chromium with one page. requests, console: what the page did since `open`."""

    def __init__(self, folder: Path):
        program = find_or_install()
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        # High numbers: 3 and 4 themselves may be among the four.
        given = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (theirs_in, theirs_out)]
        os.close(theirs_in)
        os.close(theirs_out)
        script = f'exec "$@" 3<&{given[0]} 4>&{given[1]}'
        self._log = (folder / "chromium.log").open("wb")
        words = [program, *FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", script, "chromium", *words],
            pass_fds=given, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
        )  # fmt: skip
        for fd in given:
            os.close(fd)
        self._in, self._out = ours_in, ours_out
        self._rest, self._events, self._count = b"", [], 0
        self.page: str | None = None
        self.requests: list[str] = []
        self.console: list[str] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(t["targetId"] for t in targets if t["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page, flatten=True)
        self.page = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of one command; AssertionError with the browser's words where it fails."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self.page:
            message["sessionId"] = self.page
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._count:
            self._note(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def open(self, path: Path, width: int, height: int = 800) -> None:
        """Show a file in a window of this many CSS pixels, a phone's where it is narrow."""
        phone = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height,
            deviceScaleFactor=2 if phone else 1, mobile=phone,
        )  # fmt: skip
        self.requests, self.console, self._events = [], [], []
        self.call("Page.navigate", url=path.resolve().as_uri())
        while "Page.loadEventFired" not in self._events:
            self._note(self._read())
        # Two frames later everything is laid out and whatever a page starts at load has started.
        self.run("new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)))")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def picture(self, path: Path) -> None:
        """The whole page as PNG."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        self.page = None
        with contextlib.suppress(OSError, AssertionError):
            self.call("Browser.close")
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for end in (self._in, self._out):
            os.close(end)
        self._log.close()

    def _note(self, event: dict[str, Any]) -> None:
        """Remember what a test asks about."""
        method, told = event.get("method", ""), event.get("params", {})
        self._events.append(method)
        if method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif method == "Runtime.consoleAPICalled":
            self.console.append(f"{told['type']}: {told['args']}")
        elif method == "Runtime.exceptionThrown":
            self.console.append(str(told["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.console.append(f"{told['entry']['level']}: {told['entry']['text']}")

    def _read(self) -> dict[str, Any]:
        """The next message."""
        end = time.monotonic() + SECONDS
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            piece = os.read(self._in, 1 << 20) if ready else b""
            assert piece, f"chromium does not answer, see {self._log.name}"
            self._rest += piece
        text, _, self._rest = self._rest.partition(b"\0")
        return json.loads(text)


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser of one's own, ended at the end."""
    made = Browser(folder)
    try:
        yield made
    finally:
        made.close()
