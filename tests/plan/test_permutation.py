"""The keyed permutation: a bijection, its inverse, evenly spread, and the same for ever."""

from math import factorial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastload.errors import OptionError
from fastload.plan import permutation
from fastload.plan.permutation import MAX_POSITIONS, blockwise, derive_key, mix64, permute, subkeys, unpermute

# Numbers alone are quickly made: more examples than elsewhere.
EXAMPLES = settings().max_examples

KEYS = st.integers(0, 2**64 - 1)


@pytest.fixture(scope="module", params=["compiled", "NumPy"], autouse=True)
def _with_the_compiled_loops_and_without(request):
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "NumPy":
            patch.setattr(permutation.native, "library", lambda: None)
        elif permutation.native.library() is None:
            pytest.skip("needs the compiled loops")
        yield


@settings(max_examples=3 * EXAMPLES)
@given(data=st.data(), n=st.one_of(st.integers(1, 50), st.integers(1, 2**48)), key=KEYS)
def test_the_inverse_undoes_the_permutation(data, n, key):
    positions = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20)), dtype=np.int64)
    there = permute(positions, n, key)
    assert there.min() >= 0 and there.max() < n
    assert np.array_equal(unpermute(there, n, key), positions)


def test_large_ranges_up_to_the_limit_are_bijections_on_a_sample():
    for n in (10**9, 2**40 + 1, MAX_POSITIONS - 59, MAX_POSITIONS):
        positions = np.concatenate([np.arange(5000), np.arange(n - 5000, n)])
        there = permute(positions, n, 7)
        assert np.unique(there).size == positions.size
        assert np.array_equal(unpermute(there, n, 7), positions)
        assert abs(there.mean() / n - 0.5) < 0.02  # spread over the range: the standard error is 0.003


@settings(max_examples=4 * EXAMPLES)
@given(n=st.one_of(st.integers(1, 40), st.integers(1, 5000)), key=KEYS, cuts=st.lists(st.integers(0, 5000), max_size=5))
def test_every_position_is_hit_once_and_stands_alone(n, key, cuts):
    whole = permute(np.arange(n), n, key)
    assert np.array_equal(np.sort(whole), np.arange(n))
    parts = np.split(np.arange(n), sorted(min(cut, n) for cut in cuts))
    assert np.array_equal(np.concatenate([permute(part, n, key) for part in parts]), whole)
    assert np.array_equal(blockwise(lambda part: permute(part, n, key), np.arange(n)), whole)
    keys = np.full(n, key, dtype=np.uint64)
    assert np.array_equal(permute(np.arange(n), n, keys), whole)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_all_orders_of_few_positions_are_about_equally_frequent(n):
    trials = 60_000
    keys = subkeys(derive_key(11, n), np.arange(trials))
    code = np.zeros(trials, dtype=np.int64)
    for position in range(n):
        code = code * n + permute(np.full(trials, position), n, keys)
    counts = np.unique(code, return_counts=True)[1]
    expected = trials / factorial(n)
    assert counts.size == factorial(n)
    assert abs(counts - expected).max() < 0.2 * expected + 5 * expected**0.5


@pytest.mark.parametrize("n", [9, 36, 100, 1000, 1024, 1152])
def test_places_and_distances_of_neighbours_are_evenly_spread(n):
    trials = 100_000
    keys = subkeys(derive_key(12, n), np.arange(trials))
    first, second = (permute(np.full(trials, position), n, keys) for position in (0, 1))

    def chi_square_per_freedom(values, cells):
        counts = np.bincount(values, minlength=cells)[:cells]
        expected = trials / cells
        return ((counts - expected) ** 2 / expected).sum() / (cells - 1)

    # Both are 1 on average for true randomness; six standard deviations, and never tighter than 1.5.
    bound = max(1.5, 1 + 6 * (2 / (n - 1)) ** 0.5)
    assert chi_square_per_freedom(first, n) < bound
    assert chi_square_per_freedom((second - first) % n - 1, n - 1) < bound


def test_neighbouring_keys_give_unrelated_orders():
    n = 5000
    orders = [permute(np.arange(n), n, key) for key in range(8)]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert abs(np.corrcoef(one, other)[0, 1]) < 0.08  # 5.6 standard errors
            assert (one == other).sum() < 12  # 1 on average


def test_golden_orders_never_drift():
    assert permute(np.arange(12), 12, 0).tolist() == GOLDEN_12
    assert permute(np.arange(4), 10**9, derive_key(1, 2, 3)).tolist() == GOLDEN_BILLION
    assert permute(np.arange(4), 2**48, 2**64 - 1).tolist() == GOLDEN_LIMIT
    assert derive_key(1, 2, 3) == GOLDEN_KEY


def test_scalar_and_array_keys_agree():
    index = np.array([0, 1, 2**47], dtype=np.int64)
    for key in (0, 1, 2**64 - 1):
        assert subkeys(key, index).tolist() == [mix64(key + i) for i in index.tolist()]
    assert mix64(2**64 + 5) == mix64(5)
    assert derive_key(1, 2) != derive_key(2, 1)


@pytest.mark.parametrize("n", [0, -1, MAX_POSITIONS + 1])
def test_a_range_that_cannot_be_permuted_is_refused(n):
    with pytest.raises(OptionError, match=r"1 to 2\*\*48"):
        permute(np.arange(1), n, 0)


GOLDEN_12 = [0, 10, 5, 9, 1, 2, 6, 3, 7, 11, 8, 4]
GOLDEN_BILLION = [539467945, 522230164, 332794864, 600877435]
GOLDEN_LIMIT = [147968897067840, 73647983715331, 48073520500157, 54510588247001]
GOLDEN_KEY = 7702586659592502839
