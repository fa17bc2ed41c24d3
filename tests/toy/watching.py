"""A connector that says who was called and who wrote, for the test of tensor parallelism."""

from __future__ import annotations

import os
from pathlib import Path

from kimi_eagle.capture.connector import FileConnector


class WatchingConnector(FileConnector):
    """Appends `called` and `wrote` to $KIMI_EAGLE_WATCH/PID, each as it happens."""

    def _say(self, what: str) -> None:
        with (Path(os.environ["KIMI_EAGLE_WATCH"]) / str(os.getpid())).open("a") as log:
            log.write(what + "\n")

    def _submit_async_write(self, pending) -> None:
        self._say("called")
        super()._submit_async_write(pending)

    def _deliver(self, pending, states) -> None:
        self._say("wrote")
        super()._deliver(pending, states)
