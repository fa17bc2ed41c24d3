"""Time limits of a site file, read as Slurm reads them."""

from __future__ import annotations

import pytest

from kimi_eagle.errors import UsageError
from kimi_eagle.site import minutes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", 1),
        ("90", 90),
        ("90:00", 90),
        ("90:01", 91),
        ("0:30", 1),
        ("1:00:00", 60),
        ("48:00:00", 2880),
        ("00:00:01", 1),
        ("1-0", 1440),
        ("1-12", 2160),
        ("1-12:30", 2190),
        ("0-00:00:30", 1),
        ("7-00:00:00", 10080),
        ("366-0", 527040),
    ],
)
def test_times_are_read_as_slurm_reads_them(text: str, expected: int) -> None:
    assert minutes(text) == expected


@pytest.mark.parametrize(
    "text",
    "0 00:00:00 0-0 -1 1- -1:00 1:2:3:4 1-2:3:4:5 1.5 1h INFINITE UNLIMITED 367-0 ١ 1;2".split()
    + ["", " 1", "1 ", "1\n", "9" * 4096],
)
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        minutes(text)
    assert len(caught.value.line()) < 300
