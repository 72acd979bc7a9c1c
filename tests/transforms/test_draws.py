from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fastload.system import native
from fastload.transforms import Draws
from fastload.transforms.draws import rectangle_sides

WORD = (1 << 64) - 1

GOLDEN_INTEGERS = [172, 70, 264, 389]
GOLDEN_STREAM = [5, 5, 1, -1]
GOLDEN_UNIFORM = [0.25335369810922415, 0.6535424789825925, 0.0426436337525582, 0.847230409668871]


def mix(word: int) -> int:
    word = (word + 0x9E3779B97F4A7C15) & WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & WORD
    return word ^ (word >> 31)


def bits_in_plain_python(seed, epoch, row, echo, streams):
    key = mix(mix(mix(mix(seed & WORD) ^ epoch) ^ row) ^ echo)
    for stream in streams:
        key = mix(key ^ stream)
    return mix(key ^ 0xD1B54A32D192ED03)


def test_golden_values_never_drift():
    draws = Draws(7, 3, np.array([0, 1, 2, 1_000_000_007]), 1)
    assert draws.integers(0, 1000).tolist() == GOLDEN_INTEGERS
    assert draws.stream(2).integers(-5, 6).tolist() == GOLDEN_STREAM
    assert draws.stream(0).stream(1).uniform().tolist() == GOLDEN_UNIFORM


@given(
    seed=st.integers(-(2**70), 2**70),
    epoch=st.integers(0, 2**40),
    rows=st.lists(st.integers(0, 2**62), min_size=1, max_size=5),
    echo=st.integers(0, 100),
    streams=st.lists(st.integers(0, 2**64 - 1), max_size=3),
    low=st.integers(-(2**40), 2**40),
    span=st.integers(1, 2**32 - 1),
)
def test_integers_are_exact_multiply_shift_of_a_splitmix_hash(seed, epoch, rows, echo, streams, low, span):
    draws = Draws(seed, epoch, np.array(rows, dtype=np.int64), echo)
    for stream in streams:
        draws = draws.stream(stream)
    expected = [bits_in_plain_python(seed, epoch, row, echo, streams) for row in rows]
    assert draws.integers(low, low + span).tolist() == [low + (bits * span >> 64) for bits in expected]
    assert draws.uniform().tolist() == [(bits >> 11) / 2**53 for bits in expected]


@pytest.mark.skipif(native.library() is None, reason="needs the compiled loops")
@given(
    count=st.sampled_from([0, 1, 7, 2 * native.HELD_SAMPLES]),
    seed=st.integers(-(2**70), 2**70),
    echo=st.integers(0, 9),
    echoes=st.integers(1, 3),
    stream=st.integers(0, 2**64 - 1),
    again=st.booleans(),
    step=st.sampled_from([1, 3, -1]),
)
def test_numbers_are_the_same_without_the_compiled_loops(count, seed, echo, echoes, stream, again, step):
    rows = np.random.default_rng(count).integers(0, 2**62, 2 * count)[::2]
    times = np.arange(count) % 4 if again else None

    def drawn() -> np.ndarray:
        draws = Draws(seed, 3, rows, echo, echoes=echoes, times=times)
        return draws.of_samples(slice(None, None, step)).stream(stream).uniform()

    compiled = drawn()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library", lambda: None)
        assert np.array_equal(compiled, drawn())


def test_bounds_may_differ_by_sample():
    low, high = np.arange(1000) - 500, np.arange(1000) * 3 - 499
    drawn = Draws(0, 0, np.arange(1000)).integers(low, high)
    assert drawn.dtype == np.int64
    assert ((low <= drawn) & (drawn < high)).all()


@pytest.mark.skipif(native.library() is None, reason="needs the compiled loops")
@given(
    seed=st.integers(0, 2**64 - 1),
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)) | st.tuples(st.integers(1, 4000), st.integers(1, 4000)),
    variable_size=st.booleans(),
    scale=st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted),
    ratio=st.tuples(st.floats(0.01, 100), st.floats(0.01, 100)).map(sorted),
    least=st.integers(0, 2),
)
@example(0, (5, 5), False, (0.25, 0.25), (1, 1), 0)  # sides of 2.5
@example(0, (6, 5), True, (0, 0), (1, 1), 0)
@example(0, (10, 10), False, (1, 1), (50, 50), 1)  # never fits
def test_rectangles_are_drawn_as_numpy_draws_them(seed, size, variable_size, scale, ratio, least):
    draws = Draws(seed, 0, np.arange(20)).stream(3)
    most = np.array(size) + np.arange(20)[:, None] if variable_size else np.array(size)
    area = most.prod(axis=-1)
    compiled = rectangle_sides(draws, area, scale, ratio, least=least, most=most)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library", lambda: None)
        expected = rectangle_sides(draws, area, scale, ratio, least=least, most=most)
    for one, other in zip(compiled, expected, strict=True):
        assert np.array_equal(one, other)
        assert one.dtype == other.dtype


def test_an_empty_range_is_a_bug_of_the_caller():
    with pytest.raises(AssertionError, match="empty"):
        Draws(0, 0, np.arange(3)).integers(5, 5)


# The bounds below are some six standard deviations wide: they hold for this hash, and would fail for a poor one.
COUNT = 100_000


def neighbours():
    """Pairs of draws that differ in one part by one: the inputs that a weak hash confuses."""
    rows = np.arange(COUNT)
    base = Draws(0, 0, rows, 0)
    return {
        "row": (base, Draws(0, 0, rows + 1, 0)),
        "seed": (base, Draws(1, 0, rows, 0)),
        "epoch": (base, Draws(0, 1, rows, 0)),
        "echo": (base, Draws(0, 0, rows, 1)),
        "stream": (base.stream(0), base.stream(1)),
        "stream and its own stream": (base.stream(0), base.stream(0).stream(0)),
        "epoch and echo": (Draws(0, 1, rows, 0), Draws(0, 0, rows, 1)),
    }


@pytest.mark.parametrize("part", neighbours())
def test_neighbours_are_uniform_and_independent(part):
    first, second = (draws.uniform() for draws in neighbours()[part])
    for drawn in (first, second):
        assert drawn.min() >= 0 and drawn.max() < 1
        assert abs(drawn.mean() - 0.5) < 6 * np.sqrt(1 / 12 / COUNT)
        counts = np.bincount((drawn * 64).astype(int), minlength=64)
        assert ((counts - COUNT / 64) ** 2 / (COUNT / 64)).sum() < 63 + 6 * np.sqrt(2 * 63)
    assert abs(np.corrcoef(first, second)[0, 1]) < 6 / np.sqrt(COUNT)
    pairs = np.bincount((first * 8).astype(int) * 8 + (second * 8).astype(int), minlength=64)
    assert ((pairs - COUNT / 64) ** 2 / (COUNT / 64)).sum() < 63 + 6 * np.sqrt(2 * 63)


def test_one_sample_draws_what_it_draws_among_others():
    draws = Draws(3, 1, np.array([8, 2, 40]), 2)
    for place in range(3):
        assert draws.of_samples(slice(place, place + 1)).stream(5).integers(0, 99).tolist() == [
            draws.stream(5).integers(0, 99)[place]
        ]
    assert len(draws) == 3
