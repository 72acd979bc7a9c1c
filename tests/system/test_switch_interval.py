"""Python's switch interval is lowered while somebody decodes, and put back afterwards."""

from __future__ import annotations

import sys

import pytest

from fastload.system.threads import SWITCH_INTERVAL_S, ShortSwitchInterval


@pytest.fixture(autouse=True)
def interval_as_before():
    before_s = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before_s)


def test_the_interval_is_short_until_the_last_user_ends():
    sys.setswitchinterval(0.005)
    first, second = ShortSwitchInterval(), ShortSwitchInterval()
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
    first.end()
    first.end()  # a second time counts for nothing
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
    second.end()
    assert sys.getswitchinterval() == pytest.approx(0.005)


def test_an_interval_that_is_shorter_already_stays():
    sys.setswitchinterval(0.00002)
    short = ShortSwitchInterval()
    assert sys.getswitchinterval() == pytest.approx(0.00002)
    short.end()
    assert sys.getswitchinterval() == pytest.approx(0.00002)


def test_what_the_user_sets_meanwhile_is_not_undone():
    sys.setswitchinterval(0.005)
    short = ShortSwitchInterval()
    sys.setswitchinterval(0.01)
    short.end()
    assert sys.getswitchinterval() == pytest.approx(0.01)
