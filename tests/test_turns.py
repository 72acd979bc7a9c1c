"""Python's switch interval is lowered while somebody decodes, and put back afterwards."""

from __future__ import annotations

import sys

import pytest

from fastload.turns import TURN_S, ShortTurns


@pytest.fixture(autouse=True)
def interval_as_before():
    before_s = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before_s)


def test_turns_are_short_until_the_last_user_ends():
    sys.setswitchinterval(0.005)
    first, second = ShortTurns(), ShortTurns()
    assert sys.getswitchinterval() == pytest.approx(TURN_S)
    first.end()
    first.end()  # a second time counts for nothing
    assert sys.getswitchinterval() == pytest.approx(TURN_S)
    second.end()
    assert sys.getswitchinterval() == pytest.approx(0.005)


def test_turns_that_are_shorter_already_stay():
    sys.setswitchinterval(0.00002)
    turns = ShortTurns()
    assert sys.getswitchinterval() == pytest.approx(0.00002)
    turns.end()
    assert sys.getswitchinterval() == pytest.approx(0.00002)


def test_what_the_user_sets_meanwhile_is_not_undone():
    sys.setswitchinterval(0.005)
    turns = ShortTurns()
    sys.setswitchinterval(0.01)
    turns.end()
    assert sys.getswitchinterval() == pytest.approx(0.01)
