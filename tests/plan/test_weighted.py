"""Shuffles that draw rows: as often as their weights say, the same over ranks and resumes, never what cannot."""

from __future__ import annotations

import hashlib
import json
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.errors import OptionError, StateError
from fastload.plan import ClassBatches, EpochPlan, Weighted
from fastload.plan.cursor import DrawingDigest, EpochCursor, PlanState, drawn, state_from_dict, state_to_dict
from fastload.plan.weighted import minus_log

WEIGHTS = np.array([0, 5, 1, 0, 2.5, 1, 1, 0.25, 3, 0])
LABELS = np.array([0, 1, 2, 0, 1, -1, 2, 0, 1, 3, 3, 0, 2, 1])

weights_with_zeros = st.lists(st.one_of(st.just(0.0), st.floats(1e-9, 1e9)), min_size=1, max_size=60).filter(any)


def rows_of(plan):
    """The rows that count, of all ranks, each rank's behind one another."""
    return [
        int(row) for rank in range(plan.world_size) for batch in plan.batches(rank) for row in batch.rows[batch.valid]
    ]


def chi_square(found, expected):
    return float(((found - expected) ** 2 / expected).sum())


def far_above(freedom):
    """A chi-square that a right draw exceeds less than once in 10**8 runs; the seeds are fixed besides."""
    return freedom + 8 * math.sqrt(2 * freedom) + 30


def test_rows_come_as_often_as_their_weights_say():
    weights = np.random.default_rng(1).random(500) ** 3 + 0.01
    plan = EpochPlan(range(500), shuffle=Weighted(weights, num_samples=400_000), seed=5)
    found = np.bincount(plan.rows_at(0, np.arange(400_000)), minlength=500)
    assert chi_square(found, weights / weights.sum() * 400_000) < far_above(499)


@pytest.mark.parametrize("scale", [1, 1e300, 1e-320])
def test_without_replacement_rows_are_drawn_one_by_one_from_those_left(scale):
    weights, first, second = np.array([1, 2, 3, 4.0]), np.zeros(4), np.zeros((4, 4))
    for epoch in range(4000):
        plan = EpochPlan(range(4), shuffle=Weighted(weights * scale, 2, replacement=False), seed=3, epoch=epoch)
        one, two = plan.rows_at(0, np.arange(2)).tolist()
        first[one] += 1
        second[one, two] += 1
    chances = (weights * scale) / (weights * scale).sum()
    assert chi_square(first, chances * 4000) < far_above(3)
    for one in range(4):
        left = np.delete(chances, one)
        assert chi_square(np.delete(second[one], one), left / left.sum() * first[one]) < far_above(2)


@given(weights_with_zeros, st.integers(0, 99), st.booleans(), st.integers(0, 50))
def test_a_row_of_no_weight_never_comes(weights, seed, replacement, first):
    rows = range(first, first + len(weights))
    plan = EpochPlan(rows, shuffle=Weighted(weights, replacement=replacement), seed=seed, ends="exact")
    found = np.array(rows_of(plan))
    assert (np.array(weights)[found - first] > 0).all()
    assert len(found) == (len(weights) if replacement else np.count_nonzero(weights))
    if not replacement:
        assert len(set(found.tolist())) == len(found)


@given(
    weights_with_zeros, st.integers(1, 7), st.integers(1, 9), st.booleans(), st.sampled_from(["drop", "exact", "pad"])
)
def test_ranks_share_one_sequence(weights, world_size, batch_size, replacement, ends):
    shuffle = Weighted(weights, replacement=replacement)
    options = {"shuffle": shuffle, "seed": 4, "epoch": 2}
    whole = EpochPlan(range(len(weights)), ends="exact", **options)
    plan = EpochPlan(range(len(weights)), world_size=world_size, batch_size=batch_size, ends=ends, **options)
    assert {len(list(plan.batches(rank))) for rank in range(world_size)} == {plan.num_steps}
    if ends == "drop":
        at = 0
        sequence = rows_of(whole)
        for rank in range(world_size):
            own = [int(row) for batch in plan.batches(rank) for row in batch.rows]
            assert own == sequence[at : at + len(own)]
            at += len(sequence) // world_size + (rank < len(sequence) % world_size)
    else:
        assert rows_of(plan) == rows_of(whole)
        total = sum(plan.batch(0, step).global_valid for step in range(plan.num_steps))
        assert total == plan.num_positions


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(0, 2)), max_size=3),
    st.integers(1, 4), st.booleans(),
)  # fmt: skip
def test_a_rest_holds_what_was_not_read(parts, world_size, replacement):
    shuffle = Weighted(np.arange(1, 80.0), replacement=replacement)
    options = {"shuffle": shuffle, "seed": 1, "ends": "exact"}
    whole = sorted(pairs(EpochPlan(range(79), **options)))
    read, segments = [], ()
    for ranks, batch_size, steps in parts:
        plan = EpochPlan(range(79), world_size=ranks, batch_size=batch_size, segments=segments, **options)
        steps = min(steps, plan.num_steps)
        read += pairs(plan, steps)
        segments = plan.segments_after(steps)
    read += pairs(EpochPlan(range(79), world_size=world_size, batch_size=3, segments=segments, **options))
    assert sorted(read) == whole


def pairs(plan, steps=None):
    """Row and time of what counts, of all ranks."""
    found = []
    for rank in range(plan.world_size):
        for batch in plan.batches(rank, stop_step=steps):
            times = np.zeros(len(batch.rows), np.int64) if batch.times is None else batch.times
            found += [
                (int(row), int(time)) for row, time in zip(batch.rows[batch.valid], times[batch.valid], strict=True)
            ]
    return found


def test_every_draw_of_an_epoch_has_a_time_of_its_own():
    plan = EpochPlan(range(10), shuffle=Weighted(WEIGHTS, 41), world_size=2, batch_size=4, ends="pad")
    times = [time for rank in range(2) for batch in plan.batches(rank) for time in batch.times.tolist()]
    assert len(times) == 48 and len(set(times)) == 48
    assert sorted(time for _, time in pairs(plan)) == list(range(41))
    once = EpochPlan(range(10), shuffle=Weighted(WEIGHTS, replacement=False), batch_size=4)
    assert all(batch.times is None for batch in once.batches(0))


GOLDEN = [
    (range(10, 20), {"shuffle": Weighted(WEIGHTS), "batch_size": 3},
     [[[12, 11, 14], [14, 14, 12], [18, 14, 11], [11]]]),
    (range(10, 20), {"shuffle": Weighted(WEIGHTS), "batch_size": 3, "epoch": 1},
     [[[18, 11, 11], [18, 15, 17], [18, 12, 16], [12]]]),
    (range(10, 20), {"shuffle": Weighted(WEIGHTS, 6), "batch_size": 3, "seed": 9, "world_size": 2},
     [[[15, 14, 18]], [[11, 18, 11]]]),
    (range(10, 20), {"shuffle": Weighted(WEIGHTS, replacement=False), "batch_size": 3},
     [[[16, 14, 11], [18, 12, 15], [17]]]),
    (range(10, 20), {"shuffle": Weighted(WEIGHTS, 5, False), "batch_size": 3, "seed": 3},
     [[[17, 11, 18], [14, 16]]]),
    (range(3, 17), {"shuffle": ClassBatches(2, 2, LABELS), "batch_size": 4},
     [[[6, 3, 5, 15], [4, 11, 12, 13], [7, 16, 13, 12]]]),
    (range(3, 17),
     {"shuffle": ClassBatches(2, 2, LABELS), "batch_size": 4, "epoch": 1, "world_size": 2, "ends": "drop"},
     [[[13, 12, 3, 14]], [[16, 7, 13, 12]]]),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "options", "golden"), GOLDEN)
def test_short_epochs_hold_the_rows_they_always_held(rows, options, golden):
    plan = EpochPlan(rows, **{"ends": "exact"} | options)
    assert [[batch.rows.tolist() for batch in plan.batches(rank)] for rank in range(plan.world_size)] == golden


@pytest.mark.parametrize(
    ("shuffle", "golden"),
    [
        (lambda some: Weighted(some), "6d6cc08274764c88"),
        (lambda some: Weighted(some, replacement=False), "e9b17a8f5cd95092"),
        (lambda some: ClassBatches(8, 4, np.arange(100_003) ** 2 % 97), "381d0ad0280d04b0"),
    ],
)
def test_a_long_epoch_cut_anew_twice_holds_the_rows_it_always_held(shuffle, golden):
    plan = EpochPlan(
        range(1000, 101_003), shuffle=shuffle(np.arange(100_003) % 97 * 0.37), seed=11, epoch=4, world_size=3,
        batch_size=32, ends="pad", segments=((3, 32, 10), (2, 32, 7)),
    )  # fmt: skip
    digest = hashlib.sha256()
    for rank in range(3):
        for batch in plan.batches(rank):
            digest.update(batch.rows.astype("<i8").tobytes())
    assert digest.hexdigest()[:16] == golden


def test_digests_never_drift():
    shuffles = Weighted(WEIGHTS), Weighted(WEIGHTS, replacement=False), ClassBatches(2, 2, LABELS)
    assert [one.digest for one in shuffles] == ["2544e2c875377cc5", "356d932e9abcf94a", "dcbe8539ad776470"]


@given(st.floats(2.0**-53, 1, exclude_max=True))
def test_the_logarithm_is_one(value):
    assert minus_log(np.array([value]))[0] == pytest.approx(-math.log(value), rel=1e-15, abs=0)


@pytest.mark.parametrize(("power", "expected"), [(1, [1 / 3] * 3), (0, [0.1, 0.2, 0.7]), (0.5, None)])
def test_balanced_classes_come_as_often_as_the_power_says(power, expected):
    labels = np.random.default_rng(0).permutation(np.repeat([4, 7, 0], [100, 200, 700]))
    shuffle = Weighted.balanced(np.append(labels, [-1] * 50), power, num_samples=100_000)
    found = EpochPlan(range(1050), shuffle=shuffle).rows_at(0, np.arange(100_000))
    roots = np.sqrt([1, 2, 7])
    chances = roots / roots.sum() if expected is None else np.array(expected)
    counts = np.array([np.count_nonzero(labels[found] == label) for label in (4, 7, 0)])
    assert chi_square(counts, chances * 100_000) < far_above(2)


@st.composite
def classes_of_samples(draw):
    """(labels, classes, samples): a class has enough samples for a batch."""
    samples = draw(st.integers(1, 4))
    sizes = draw(st.lists(st.integers(samples, 15), min_size=1, max_size=9))
    labels = [label for label, size in enumerate(sizes) for _ in range(size)]
    labels += [-1] * draw(st.integers(0, 3))
    return np.array(draw(st.permutations(labels))), draw(st.integers(1, len(sizes))), samples


@given(classes_of_samples(), st.integers(1, 5), st.integers(0, 99), st.sampled_from(["drop", "pad"]))
def test_each_batch_of_each_rank_has_so_many_samples_of_so_many_classes(given_labels, world_size, epoch, ends):
    labels, classes, samples = given_labels
    size = classes * samples
    plan = EpochPlan(
        range(7, 7 + len(labels)), shuffle=ClassBatches(classes, samples, labels), batch_size=size,
        world_size=world_size, epoch=epoch, ends=ends,
    )  # fmt: skip
    seen = 0
    for rank in range(world_size):
        for batch in plan.batches(rank):
            assert len(set(batch.rows.tolist())) == size
            numbers, counts = np.unique(labels[batch.rows - 7], return_counts=True)
            assert len(numbers) == classes and set(counts.tolist()) == {samples} and numbers.min() >= 0
            assert batch.valid.all() or not batch.valid.any()
            seen += int(batch.valid.sum())
            assert batch.times is not None
    batches = np.count_nonzero(labels >= 0) // size
    assert seen == (batches if ends == "pad" else batches // world_size * world_size) * size
    assert sum(plan.batch(0, step).global_valid for step in range(plan.num_steps)) == seen


@given(classes_of_samples(), st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2)), max_size=3), st.integers(1, 4))
def test_batches_stay_whole_when_the_world_changes(given_labels, parts, world_size):
    labels, classes, samples = given_labels
    options = {"shuffle": ClassBatches(classes, samples, labels), "batch_size": classes * samples, "ends": "pad"}
    rows = range(len(labels))

    def batches(plan, steps=None):
        found = (batch for rank in range(plan.world_size) for batch in plan.batches(rank, stop_step=steps))
        return [(batch.rows.tolist(), batch.times.tolist()) for batch in found if batch.valid.all()]

    read, segments = [], ()
    for ranks, steps in parts:
        plan = EpochPlan(rows, world_size=ranks, segments=segments, **options)
        steps = min(steps, plan.num_steps)
        read += batches(plan, steps)
        segments = plan.segments_after(steps)
    read += batches(EpochPlan(rows, world_size=world_size, segments=segments, **options))
    assert sorted(read) == sorted(batches(EpochPlan(rows, **options)))


def test_samples_of_a_class_all_come_before_one_comes_again():
    labels = np.repeat(np.arange(6), 12)
    plan = EpochPlan(range(72), shuffle=ClassBatches(3, 4, labels), batch_size=12, ends="exact")
    assert sorted(rows_of(plan)) == list(range(72))
    following = rows_of(plan.following)
    assert sorted(following) == list(range(72)) and following != rows_of(plan)


def test_classes_and_samples_come_evenly_over_epochs():
    labels = np.repeat(np.arange(5), [4, 9, 9, 20, 8])
    found = np.zeros(50)
    for epoch in range(400):
        plan = EpochPlan(range(50), shuffle=ClassBatches(2, 3, labels), batch_size=6, epoch=epoch)
        np.add.at(found, rows_of(plan), 1)
    of_class = np.bincount(labels, found)
    assert chi_square(of_class, np.full(5, found.sum() / 5)) < far_above(4)
    for label in range(5):
        own = found[labels == label]
        assert chi_square(own, np.full(len(own), own.mean())) < far_above(len(own) - 1)


def test_a_state_of_other_weights_is_refused():
    def cursor(shuffle):
        return EpochCursor(EpochPlan(range(10), shuffle=shuffle, batch_size=2), lambda: "file", drawn)

    ours = cursor(Weighted(WEIGHTS))
    state = json.loads(json.dumps(ours.state(ours.coming())))
    assert state["shuffle"] == ["weighted", Weighted(WEIGHTS).digest]
    cursor(Weighted(WEIGHTS.tolist())).checked(state)
    others = Weighted(WEIGHTS + 1), Weighted(WEIGHTS, 9), Weighted(WEIGHTS, replacement=False), "full"
    for other in others:
        with pytest.raises(StateError, match=r"shuffle is .* here and Weighted\(weights and options of digest"):
            cursor(other).checked(state)


@pytest.mark.parametrize("kind", ["weighted", "classes"])
def test_states_come_back_and_damaged_ones_are_refused(kind):
    state = PlanState(header_digest="d", seed=1, epoch=2, shuffle=DrawingDigest(kind, "0123456789abcdef"), ends="pad")
    data = json.loads(json.dumps(state_to_dict(state)))
    assert state_from_dict(data) == state
    for bad in (
        [kind, "123"],
        [kind, 5],
        [kind, "x" * 16],
        ["shares", data["shuffle"]],
        ["pieces", [2, data["shuffle"]]],
    ):
        with pytest.raises(StateError, match="shuffle is"):
            state_from_dict(data | {"shuffle": bad})


def test_shuffles_are_equal_by_what_they_hold_and_can_be_pickled():
    for one, other in (
        (Weighted(WEIGHTS), Weighted(2 * WEIGHTS)),
        (Weighted.balanced("labels"), Weighted.balanced("labels", 0.5)),
        (ClassBatches(2, 2, LABELS), ClassBatches(2, 2, LABELS[::-1])),
        (ClassBatches(2, 2), ClassBatches(2, 3)),
    ):
        again = pickle.loads(pickle.dumps(one))
        assert again == one and hash(again) == hash(one) and one != other
    given_weights = WEIGHTS.copy()
    shuffle = Weighted(given_weights)
    given_weights[:] = 1
    assert shuffle == Weighted(WEIGHTS)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Weighted([1, -2]), r"weights=.*weight 1 is -2.0.*none negative"),
        (lambda: Weighted([1, np.nan]), "weight 1 is nan"),
        (lambda: Weighted([np.inf, 1]), "weight 0 is inf"),
        (lambda: Weighted([0, 0]), "all 2 weights are 0"),
        (lambda: Weighted([]), r"a number for each sample, \(N,\)"),
        (lambda: Weighted([[1.0]]), r"shape \(1, 1\)"),
        (lambda: Weighted("labels"), r"balanced|a number for each sample"),
        (lambda: Weighted([1], num_samples=0), "num_samples=0.*whole number of samples, 1 or more"),
        (lambda: Weighted([1], num_samples=1.5), "num_samples=1.5"),
        (lambda: Weighted([1, 0, 1], num_samples=3, replacement=False), "2 rows have a weight over 0"),
        (lambda: Weighted([1], replacement="no"), "replacement='no'"),
        (lambda: Weighted.balanced("labels", power=-1), "power=-1.*0 or more"),
        (lambda: Weighted.balanced("labels", power=math.nan), "power=nan"),
        (lambda: Weighted.balanced("labels", power=math.inf), "power=inf"),
        (lambda: Weighted.balanced("labels", power="1"), "power='1'"),
        (lambda: Weighted.balanced([0.5, 1]), "whole numbers"),
        (lambda: Weighted.balanced([-1, -1]), "no sample has a class"),
        (lambda: ClassBatches(0, 2), "classes=0"),
        (lambda: ClassBatches(2, 2.0), "samples=2.0"),
        (lambda: ClassBatches(5, 2, LABELS), r"classes=5.*of 4 classes"),
        (lambda: ClassBatches(2, 3, LABELS), r"samples=3.*class 3 has 2.*Ask for 2 samples at most"),
        (lambda: EpochPlan(range(3), shuffle=Weighted([1, 2])), "2 weights, and the dataset has 3 samples"),
        (lambda: EpochPlan(range(3), batch_size=4, shuffle=ClassBatches(2, 2, LABELS)),
         "14 samples, and the dataset has 3"),
        (lambda: EpochPlan(range(14), shuffle=ClassBatches(2, 2, LABELS), batch_size=8), "batch_size=8.*batch_size=4"),
        (lambda: EpochPlan(range(3), shuffle=Weighted.balanced("labels")), "names a field"),
        (lambda: EpochPlan(range(2), shuffle=Weighted([1, 2]), world_size=2, fixed_pieces=2), "fixed pieces"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(make, said):
    with pytest.raises(OptionError, match=f"(?s){said}"):
        make()


def test_batches_of_another_size_have_no_segment():
    with pytest.raises(StateError, match="batches of 4, and no others"):
        EpochPlan(range(14), shuffle=ClassBatches(2, 2, LABELS), batch_size=4, segments=((1, 8, 1),))


def test_where_chunks_are_needed_is_not_known():
    plan = EpochPlan(range(10), chunk_rows=2, shuffle=Weighted(WEIGHTS), batch_size=2)
    ranks, steps = plan.chunk_places(np.array([0, 9, 10]))
    assert ranks.tolist() == [-1, -1, -2] and steps.tolist() == [0, 0, 0]
    with pytest.raises(OptionError, match="no places of their own"):
        plan.places_of(np.array([1]))
