"""Each measure against what can be counted by hand, or by its definition."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.plan.randomness import attribute_mix, batchmate_reuse, class_mix, epoch_distance, file_order


def test_the_same_order_its_reverse_and_a_random_one_are_told_and_mates_again_counts_pairs():
    positions = np.arange(9000)
    assert file_order(positions, positions) == pytest.approx(1)
    assert file_order(positions, positions[::-1]) == pytest.approx(-1)
    assert epoch_distance(positions, positions, 9000) == 0
    moved = np.random.default_rng(0).permutation(9000)
    assert epoch_distance(positions, moved, 9000) == pytest.approx(1, abs=0.03)
    # Batches of 4 over 12 rows. First batch: three meet again and one is gone; second: two and two.
    next_positions = np.array([[0, 3, 9, 1], [4, 8, 5, 11]])
    assert batchmate_reuse(next_positions, 4) == pytest.approx((3 / 6 + 2 / 6) / 2)


@given(
    classes=st.lists(st.integers(0, 6), min_size=12, max_size=60),
    batch_size=st.integers(2, 6),
    seed=st.integers(0, 2**32),
)
def test_label_mix_is_pearsons_chi_square_over_its_expectation(classes, batch_size, seed):
    classes = np.array(classes)
    mix = class_mix(classes, batch_size)
    if len(set(classes.tolist())) == 1:
        assert mix is None
        return
    batches = np.random.default_rng(seed).permutation(len(classes))[: batch_size * 2].reshape(2, batch_size)
    present = np.unique(classes)
    expected = batch_size * np.array([(classes == c).mean() for c in present])
    chi_squares = [
        (((np.array([(classes[b] == c).sum() for c in present]) - expected) ** 2) / expected).sum() for b in batches
    ]
    factor = (len(present) - 1) * (len(classes) - batch_size) / (len(classes) - 1)
    assert mix(batches) == pytest.approx(np.mean(chi_squares) / factor, abs=1e-9)


def test_label_mix_of_all_batches_there_are_is_1_on_average():
    """The expectation is exact: every set of 3 rows of 7, as often as any other."""
    batches = np.array(list(combinations(range(7), 3)))
    assert class_mix(np.array([0, 0, 0, 1, 1, 2, 5]), 3)(batches) == pytest.approx(1)
    attributes = np.array([[1, 0, 1], [1, 0, 0], [1, 1, 0], [1, 1, 0], [1, 0, 0], [1, 0, 0], [1, 1, 0]], bool)
    assert attribute_mix(attributes, 3)(batches) == pytest.approx(1)


def test_an_attribute_counts_as_two_classes_and_a_constant_one_not_at_all():
    rng = np.random.default_rng(1)
    one = rng.integers(0, 2, 60)
    batches = rng.permutation(60).reshape(6, 10)
    columns = np.stack([one, np.ones(60), 1 - one], axis=1).astype(bool)
    assert attribute_mix(columns, 10)(batches) == pytest.approx(class_mix(one, 10)(batches))
    assert attribute_mix(columns[:, 1:2], 10) is None
    assert class_mix(one * 2**62 - 5, 10)(batches) == class_mix(one, 10)(batches)
