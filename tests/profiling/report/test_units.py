"""Numbers in words."""

from __future__ import annotations

import math

import pytest

from fastload.profiling.verdict.sentences import number_text, seconds_text, share_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"), (8.3e-4, "830 µs"), (0.01234, "12.3 ms"), (0.9996, "1.00 s"), (4.2, "4.20 s"), (200, "3 min 20 s"),
        (7500, "2 h 5 min"), (math.nan, "not known"),
    ],
)  # fmt: skip
def test_seconds(seconds, text):
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (12345.6, "12,346"), (99.97, "100"), (12.34, "12.3"), (1.234, "1.23"), (-3, "-3.00")]
)
def test_numbers(value, text):
    assert number_text(value) == text


def test_shares():
    assert [share_text(share) for share in (0, 0.004, 0.0949, 0.62, 1, math.inf)] == [
        "0 %", "0.4 %", "9.5 %", "62 %", "100 %", "not known",
    ]  # fmt: skip
