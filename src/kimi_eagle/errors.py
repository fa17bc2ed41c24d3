"""The two ways this program says no.

`UsageError` (exit 2): the user asked for something that cannot be: a wrong key, a missing file.
`RunError` (exit 1): a check or a run failed. Both print as one line: what, where, expected, fix.
"""

from __future__ import annotations


class KimiEagleError(Exception):
    """An error meant for the user's eyes; `cli/app.py` prints it without a traceback.

    what: what is wrong. where: file, row, key. expected: what would have been right.
    fix: what to type or change. Empty parts are left out.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: object = "", expected: str = "", fix: str = ""):
        self.what, self.where, self.expected, self.fix = what, str(where), expected, fix
        super().__init__(self.line())

    def line(self) -> str:
        """The message on one line; newlines of quoted input are shown as `\\n`."""
        text = f"{self.where}: {self.what}" if self.where else self.what
        if self.expected:
            text += f"; expected {self.expected}"
        if self.fix:
            text += f"; fix: {self.fix}"
        return text.replace("\r", "\\r").replace("\n", "\\n")


class UsageError(KimiEagleError):
    """Wrong use: the recipe, the arguments or the input files cannot be right."""

    exit_code = 2


class RunError(KimiEagleError):
    """A check failed or a run could not go on."""

    exit_code = 1


class RowError(Exception):
    """One input row is bad; it goes to `rejects.jsonl` with this reason, the others go on.

    rule: short stable name such as `unknown-role`, counted by the reports.
    """

    def __init__(self, rule: str, detail: str):
        self.rule, self.detail = rule, detail
        super().__init__(f"{rule}: {detail}")
