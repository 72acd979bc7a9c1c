"""Which candidate is taken: laws of a pure function."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fastload.errors import OptionError
from fastload.options.measure import TuneOptions, parse_share
from fastload.plan import ChunkWindow
from fastload.profiling.tune.candidates import (
    FED,
    STAGES,
    TIE,
    WORSE_MIX,
    Candidate,
    DataTraits,
    Row,
    Trial,
    can_still_win,
    candidates_of,
    choose,
)

CANDIDATES = st.builds(
    Candidate,
    workers=st.integers(1, 16),
    shuffle=st.sampled_from(["full", False, ChunkWindow(1), ChunkWindow(4), ChunkWindow(16)]),
    read=st.sampled_from(["map", "pread"]),
)


def trials(stalls):
    return st.builds(
        Trial,
        samples_per_s=st.floats(1.0, 1e6),
        cpu_s_per_1000=st.floats(1e-4, 100.0),
        cpu_share=st.floats(0.01, 1.1),
        stall_share=stalls,
    )


NO_STEP, ANY_MIX, GOOD_MIX = st.none(), st.booleans(), st.just(False)


def rows(stalls=NO_STEP, mixes_worse=ANY_MIX):
    several = st.lists(trials(stalls), min_size=1, max_size=3).map(tuple)
    row = st.builds(Row, candidate=CANDIDATES, trials=several, mixes_worse=mixes_worse)
    return st.lists(row, min_size=1, max_size=6, unique_by=lambda row: row.candidate)


ANY = st.one_of(rows(), rows(st.floats(0.0, 1.0)))
BUDGETS = st.floats(0.01, 1.0)


@given(ANY, BUDGETS, st.randoms(use_true_random=False))
def test_never_over_budget_if_one_fits_whatever_the_order_of_the_rows_and_never_left_out(rows, budget, rng):
    chosen = choose(rows, cpu_budget=budget)
    assert choose(rng.sample(rows, len(rows)), cpu_budget=budget) == chosen
    assert chosen.row in can_still_win(rows, cpu_budget=budget)
    if budget == 1:
        assert "more than" not in chosen.reason
    elif any(row.cpu_share <= budget for row in rows):
        assert chosen.row.cpu_share <= budget
    else:
        least = min(row.cpu_s_per_1000 for row in rows)
        assert chosen.row.cpu_s_per_1000 * TIE <= least and "more than" in chosen.reason


@given(rows(mixes_worse=GOOD_MIX), BUDGETS, BUDGETS)
def test_a_larger_budget_gives_nothing_slower_than_a_tie(rows, one, other):
    low, high = sorted((one, other))
    assume(any(row.cpu_share <= low for row in rows))
    tight, ample = choose(rows, cpu_budget=low).row, choose(rows, cpu_budget=high).row
    assert ample.samples_per_s >= TIE * tight.samples_per_s


@given(rows(mixes_worse=GOOD_MIX))
def test_without_a_step_the_choice_is_as_good_as_the_fastest(rows):
    chosen = choose(rows, cpu_budget=1.0).row
    tied = [row for row in rows if row.samples_per_s >= TIE * max(row.samples_per_s for row in rows)]
    assert chosen in tied
    assert chosen.cpu_s_per_1000 * TIE <= min(row.cpu_s_per_1000 for row in tied)


@given(rows(st.floats(0.0, 0.02), mixes_worse=GOOD_MIX))
def test_with_a_step_the_cheapest_that_keeps_it_fed(rows):
    fed = [row for row in rows if row.stall_share < FED]
    assume(fed)
    chosen = choose(rows, cpu_budget=1.0).row
    assert chosen.fed and chosen.cpu_s_per_1000 * TIE <= min(row.cpu_s_per_1000 for row in fed)


@given(rows())
def test_an_order_that_mixes_worse_has_to_be_much_faster(rows):
    chosen = choose(rows, cpu_budget=1.0).row
    good = [row.samples_per_s for row in rows if not row.mixes_worse]
    if chosen.mixes_worse and good:
        assert chosen.samples_per_s >= WORSE_MIX * TIE * max(good)


def row(rate, cpu, workers=1, share=0.5, stall=None):
    return Row(Candidate(workers, "full"), (Trial(rate, cpu, share, stall),))


def test_of_equals_the_one_with_fewer_workers():
    chosen = choose([row(1000, 0.100, 4), row(990, 0.101, 2), row(980, 0.1, 8)], cpu_budget=1.0)
    assert chosen.row.candidate.workers == 2
    assert chosen.reason == "the cheapest of the 3 that are within 5% of the fastest"


def test_at_100_percent_there_is_no_limit_and_the_reason_says_when_the_step_still_waits():
    rows = [row(1000, 1.0, workers=1, share=1.02), row(2000, 1.0, workers=2, share=1.04)]
    chosen = choose(rows, cpu_budget=1.0)
    assert chosen.row.candidate.workers == 2 and chosen.reason == "the fastest of 2"
    assert chosen.row in can_still_win(rows, cpu_budget=1.0)
    assert choose(rows, cpu_budget=0.99).reason.startswith("all take more than 99% of the CPU, 102% and more")
    assert "the step waits 30% of the time" in choose([row(1000, 0.1, stall=0.3)], cpu_budget=1.0).reason


# What is tried

SOURCES = st.builds(
    DataTraits,
    processes=st.booleans(),
    linear=st.booleans(),
    num_chunks=st.integers(0, 100),
    cpus=st.integers(1, 128),
    chunks_kept=st.integers(0, 100),
    cold=st.booleans(),
)


@given(CANDIDATES, SOURCES)
def test_candidates_differ_from_the_best_in_one_argument(best, source):
    for stage, argument in STAGES.items():
        for candidate in candidates_of(stage, best, source):
            differing = [name for name in STAGES.values() if getattr(candidate, name) != getattr(best, name)]
            assert differing == [argument]


def test_what_was_measured_to_bring_nothing_is_not_tried_and_only_arguments_that_differ_are_to_be_pasted():
    def tried(stage, traits, **others):
        best = replace(Candidate(2, ChunkWindow(16)), **others)
        return [getattr(one, STAGES[stage]) for one in candidates_of(stage, best, traits)]

    packed = DataTraits(processes=False, linear=True, num_chunks=100, cpus=2)
    assert tried("windows", packed) == [] and tried("read", packed) == ["pread"]
    assert tried("windows", replace(packed, cold=True))[0] == ChunkWindow(1)
    assert tried("windows", replace(packed, cold=True), shuffle=False) == []
    assert tried("workers", replace(packed, cpus=64)) == [1, 4, 8, 16]
    compressed = DataTraits(processes=False, linear=False, num_chunks=100, cpus=64, chunks_kept=20)
    assert tried("workers", compressed) == [1] and tried("read", compressed) == []
    assert tried("windows", compressed, shuffle=ChunkWindow(1)) == [ChunkWindow(4), "full"]
    python = replace(packed, processes=True, cold=True)
    assert tried("windows", python) == tried("read", python) == [] and tried("workers", python) == [1, 4, 8, 16]
    default = Candidate(2, "full")
    assert default.arguments(default) == {}
    other = Candidate(1, ChunkWindow(4), "pread")
    assert other.arguments(default) == {"workers": "1", "shuffle": "ChunkWindow(4)", "read": '"pread"'}


# What is asked for


def test_a_share_is_a_percentage_or_a_part_and_options_without_a_meaning_are_refused():
    shares = {"40%": 0.4, "0.4": 0.4, " 100 % ": 1.0, "1": 1.0}
    assert {text: parse_share(text) for text in shares} == pytest.approx(shares)
    for text in ("0", "0%", "140%", "40", "-1%", "nan", "half", ""):
        with pytest.raises(OptionError, match=r"such as 40% or 0\.4"):
            parse_share(text)
    for options in ({"cpu_budget": 0}, {"cpu_budget": 1.5}, {"seconds": 0}, {"seconds": float("nan")}):
        with pytest.raises(OptionError):
            TuneOptions(**options)
