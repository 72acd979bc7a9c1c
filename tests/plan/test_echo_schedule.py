"""The schedule of echoes: its laws, against lists written plainly; and what echo="auto" makes of an epoch's waits."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.errors import OptionError
from fastload.plan import EchoHistory, EchoSchedule, MixedEcho, Pace, Use, check_echo, choose_factor
from fastload.plan.echo_schedule import last_started_step

schedules = st.builds(EchoSchedule, st.integers(0, 30), st.integers(1, 6), st.integers(0, 9))
mixed = st.builds(EchoSchedule, st.integers(1, 30), st.integers(1, 6), st.integers(1, 9))


def plain(num_batches, factor, distance):
    """The definition, word for word."""
    if distance == 0:
        return [(batch, echo) for batch in range(num_batches) for echo in range(factor)]
    uses = []
    for time in range(num_batches + factor * distance):
        for echo in range(factor):
            if 0 <= time - echo * distance < num_batches:
                uses.append((time - echo * distance, echo))
    return uses


def test_the_order_is_the_one_drawn_in_the_docstring():
    assert list(EchoSchedule(3, 3, 1).uses()) == [
        (0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (0, 2), (2, 1), (1, 2), (2, 2),
    ]  # fmt: skip
    assert list(EchoSchedule(2, 2).uses()) == [(0, 0), (0, 1), (1, 0), (1, 1)]


@given(schedule=schedules, data=st.data())
def test_steps_are_those_of_the_definition_from_any_step_on(schedule, data):
    uses = plain(schedule.num_batches, schedule.factor, schedule.distance)
    assert len(uses) == schedule.num_steps
    step = data.draw(st.integers(0, schedule.num_steps))
    assert list(schedule.uses(step)) == uses[step:]


@given(schedule=mixed)
def test_no_two_steps_running_use_one_batch_unless_there_is_only_one(schedule):
    batches = [use.batch for use in schedule.uses()]
    running = [a == b for a, b in itertools.pairwise(batches)]
    assert not any(running) if schedule.num_batches > 1 else all(running)


@given(schedule=schedules)
def test_no_more_batches_are_in_use_than_promised_and_they_begin_and_end_in_order(schedule):
    uses, kept = list(schedule.uses()), []
    for step, use in enumerate(uses):
        if use.echo == 0:
            kept.append(use.batch)
        assert len(kept) <= (schedule.factor - 1) * schedule.distance + 1
        if use.echo == schedule.factor - 1:
            assert kept.pop(0) == use.batch
        assert schedule.begun(step + 1) == len({batch for batch, _ in uses[: step + 1]})
        assert schedule.finished(step + 1) == schedule.begun(step + 1) - len(kept)
    assert schedule.begun(0) == schedule.finished(0) == 0


@given(schedule=schedules, data=st.data())
def test_what_comes_does_not_depend_on_what_is_finished(schedule, data):
    # A state saves the steps of unfinished batches only, and this is why that is enough.
    step = data.draw(st.integers(0, schedule.num_steps))
    finished = schedule.finished(step)
    rest = EchoSchedule(schedule.num_batches - finished, schedule.factor, schedule.distance)
    begun = step - finished * schedule.factor
    expected = [Use(batch - finished, echo) for batch, echo in schedule.uses(step)]
    assert list(rest.uses(begun)) == expected
    assert rest.finished(begun) == 0 or not expected
    if expected:
        assert begun <= last_started_step(schedule.factor, schedule.distance)


@given(factor=st.integers(1, 6), distance=st.integers(0, 9))
def test_the_most_steps_before_the_first_batch_is_finished_are_reached(factor, distance):
    schedule = EchoSchedule(100, factor, distance)
    most = last_started_step(factor, distance)
    assert schedule.finished(most) == 0 and schedule.finished(most + 1) == 1


def test_a_step_far_into_a_long_epoch_is_found_without_walking_there():
    schedule = EchoSchedule(10**12, 4, 1000)
    step = 3 * 10**12
    assert next(schedule.uses(step)).batch == pytest.approx(step / 4, abs=4000)
    assert schedule.begun(step) - schedule.finished(step) in (3000, 3001)
    # Nor does a damaged state that says so keep anyone busy.
    assert EchoSchedule(10, 10**15, 10**3).finished(10**6) == 0


@pytest.mark.parametrize("arguments", [(0,), (2, 0), (1.5,), (True,), ("2",), (2, -1), (2, None)])
def test_mixed_echo_without_meaning_is_refused(arguments):
    with pytest.raises(OptionError, match=r"MixedEcho\((factor|distance)="):
        MixedEcho(*arguments)


def test_numbers_of_numpy_become_pythons():
    echo = MixedEcho(np.int64(2), np.int32(3))
    assert echo == MixedEcho(2, 3) and type(echo.factor) is type(echo.distance) is int
    assert type(check_echo(np.int64(2))) is int


# echo="auto"


def pace(source_s, step_s, factor, batches=100):
    """Of a source and steps that overlap, as they do."""
    return Pace(batches, batches * factor, batches * max(0.0, source_s - factor * step_s), batches * factor * step_s)


def epochs(source_s, count, step_s=1.0, factor=1, history=None):
    """The factors that follow one another when the source's time stays the same."""
    history, factors = history or EchoHistory(), []
    for _ in range(count):
        factor, _, history = choose_factor(pace(source_s, step_s, factor), factor, history)
        factors.append(factor)
    return factors, history


@pytest.mark.parametrize(
    ("source_s", "chosen"),
    [(0.5, 1), (1.0, 1), (1.5, 1), (1.81, 1), (1.83, 2), (2.7, 2), (2.8, 3), (3.7, 4), (4.5, 4), (100.0, 4)],
)
def test_the_largest_factor_that_makes_an_epoch_at_most_a_tenth_longer_is_chosen(source_s, chosen):
    assert choose_factor(pace(source_s, 1.0, 1), 1, EchoHistory()).factor == chosen
    assert choose_factor(pace(source_s * 1e-6, 1e-6, 1), 1, EchoHistory()).factor == chosen


@given(source_s=st.floats(0.01, 50), factor=st.integers(1, 6))
def test_the_factor_stays_within_its_bounds_and_a_wait_never_lowers_it(source_s, factor):
    chosen = choose_factor(pace(source_s, 1.0, factor), factor, EchoHistory()).factor
    assert 1 <= chosen <= max(4, factor - 1)
    if source_s > 1.05 * factor and factor <= 4:
        assert chosen >= factor
    if source_s <= factor:
        assert chosen == max(1, factor - 1)


def test_a_source_that_needs_it_keeps_its_factor_but_for_ever_rarer_trials():
    factors, _ = epochs(3.8, 60)
    assert factors[:8] == [4, 3, 4, 4, 3, 4, 4, 4]
    trials = [i for i, factor in enumerate(factors) if factor != 4]
    gaps = [b - a for a, b in itertools.pairwise(trials)]
    assert gaps[:4] == [3, 5, 9, 17] and set(factors) == {3, 4}
    assert epochs(3.8, 300)[0].count(3) / 300 < 0.1
    # No trials where 2 steps are over before the next batch comes, and 3 would make the epoch a fifth longer.
    assert set(epochs(2.5, 20)[0]) == {2}


def test_a_source_that_became_fast_is_noticed_and_echo_ends():
    _, history = epochs(3.8, 40)
    factors, history = epochs(0.2, 30, factor=4, history=history)
    assert factors[-3:] == [1, 1, 1] and factors == sorted(factors, reverse=True)
    # And when it becomes slow again nothing of that is held against it.
    assert epochs(3.8, 3, history=history)[0] == [4, 3, 4]


def test_too_few_batches_change_nothing_a_loop_without_work_takes_the_most_and_the_reason_names_what_was_measured():
    history = EchoHistory(calm=1, patience=4)
    for short in (Pace(), pace(4.0, 1.0, 2, batches=7)):
        assert choose_factor(short, 2, history)[::2] == (2, history)
    assert choose_factor(Pace(100, 100, 5.0, 0.0), 1, EchoHistory()).factor == 4
    assert choose_factor(Pace(100, 100, 0.0, 0.0), 1, EchoHistory()).factor == 1
    assert choose_factor(pace(0.04, 0.01, 1), 1, EchoHistory()).reason == "a fresh batch takes 40.0 ms, a step 10.0 ms"
    assert "one less is tried" in choose_factor(pace(0.01, 0.01, 3), 3, EchoHistory()).reason
