"""Skips that are failures: where a run says which tests may skip, another that does fails.

FASTLOAD_MAY_SKIP holds pieces of reasons, one a line, as .ci/run sets it. Without it, every test may skip that gives a
reason.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import TypeVar

import pytest

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


def failed_where_it_may_not_skip(report: Report) -> Report:
    allowed = os.environ.get("FASTLOAD_MAY_SKIP")
    if allowed is None or not report.skipped or hasattr(report, "wasxfail"):
        return report
    path, line, reason = report.longrepr  # type: ignore[misc]
    if not any(piece in reason for piece in allowed.splitlines() if piece):
        report.outcome = "failed"
        report.longrepr = (
            f"{path}:{line}: {reason}\nIt is meant to run here. Bring what it lacks, or add a piece of the reason to "
            "FASTLOAD_MAY_SKIP: see .ci/run."
        )
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return failed_where_it_may_not_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return failed_where_it_may_not_skip((yield))
