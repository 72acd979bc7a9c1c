"""Where the time of a run went."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.profiling.doctor.loader_records import AFTER, BEFORE, BETWEEN, Interval, lanes_of, timeline
from fastload.timing.results import Lane

times = st.floats(0, 100)


@given(
    begin=times,
    loops=st.lists(st.lists(st.tuples(times, times), max_size=4), max_size=3),
    after=times,
    calls=st.lists(st.tuples(times, times), max_size=3),
)
def test_all_of_the_time_is_somewhere_once_and_calls_take_no_more_than_what_they_lie_in(begin, loops, after, calls):
    def spans(pairs):
        return [Interval(begin + min(pair), begin + max(pair)) for pair in pairs]

    passes = [spans(pairs) for pairs in loops]
    end = max([begin, *(span.end_s for one in passes for span in one)]) + after
    found = timeline(Interval(begin, end), passes, [("save", span) for span in spans(calls)])
    assert found.total_s == pytest.approx(end - begin, abs=1e-6)
    assert all(seconds >= 0 for seconds in (*found.loops, *found.outside.values()))
    for where, seconds in found.outside.items():
        assert found.calls[where].get("save", 0.0) <= len(calls) * seconds + 1e-6


def test_a_loop_within_another_one_has_its_own_time_and_calls_are_named_where_they_lie():
    train, check = [Interval(10, 40), Interval(50, 80)], [Interval(20, 25), Interval(82, 90)]
    found = timeline(
        Interval(0, 100), [train, check], [("torch.save", Interval(42, 46)), ("torch.save", Interval(92, 93))]
    )
    assert found.loops == [30 - 5 + 30, 5 + 8]
    assert found.outside == {BEFORE: 10, BETWEEN: 10 + 2, AFTER: 10}
    assert found.calls[BETWEEN] == {"torch.save": 4} and found.calls[AFTER] == {"torch.save": 1}
    assert found.described() == [
        "10% of the run, 10.0 s, were before its first loop",
        "12% of the run, 12.0 s, were between its loops (torch.save 4.0 s)",
        "10% of the run, 10.0 s, were after its last loop (torch.save 1.0 s)",
    ]
    nothing = timeline(Interval(0, 5), [])
    assert nothing.outside[BEFORE] == 5 and nothing.loops == []


def test_loops_and_long_calls_are_drawn_each_in_a_lane_and_passes_that_touch_are_one():
    passes = [Interval(110, 140), Interval(140.01, 150), Interval(180, 190)]
    calls = [
        ("torch.save", Interval(150, 152)),
        ("torch.save", Interval(190, 193)),
        ("torch.load", Interval(100, 100.5)),
    ]
    lanes = lanes_of(Interval(100, 200), [("train", passes), ("check", [Interval(152, 160)])], calls)
    assert lanes == [
        Lane("train", pytest.approx(49.99), ((10, 50), (80, 90))),
        Lane("check", 8, ((52, 60),)),
        Lane("torch.save", 5, ((50, 52), (90, 93))),
    ]
