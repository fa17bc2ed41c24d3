"""cancel, then submit at once: jobs that are leaving serve no more, others take their place."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from campaign import Case, records, wait  # noqa: E402


@pytest.mark.campaign
def test_leaving_after_the_unit(case: Case) -> None:
    """The one that leaves ends its unit; the new one starts beside it and does the others."""
    case.open(2, 6, 9)
    (first,) = case.extract()
    case.wait_claims(1)
    case.eagle("cancel", case.run, "--after-unit")
    (second,) = case.extract()
    assert second["job_id"] != first["job_id"]
    case.wait_claims(2)
    case.release()
    case.finish()
    case.whole()
    by = [r["worker"].split("-")[0] for r in records(case.run, "extract")]
    assert [by.count(f"j{e['job_id']}") for e in (first, second)] == [1, 2]


@pytest.mark.campaign
def test_cancelled_and_submitted_at_once(case: Case) -> None:
    case.open(2, 6)
    (first,) = case.extract()
    case.wait_claims(1)
    case.eagle("cancel", case.run)
    (second,) = case.extract()
    assert second["job_id"] != first["job_id"]
    wait(lambda: case.state(first["job_id"]) == "", 30)
    case.release()
    case.finish()
    case.whole()
