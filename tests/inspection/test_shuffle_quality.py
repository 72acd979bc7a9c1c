"""Order quality: each measure has its two ends, and full shuffle is told from everything else."""

from __future__ import annotations

import json

import h5py
import numpy as np
import pytest

from fastload.errors import FormatError, OptionError
from fastload.format.ragged import Column
from fastload.inspection import shuffle_quality
from fastload.inspection.shuffle_quality import measure_shuffles
from sample_files import write_packed

NUM_ROWS, NUM_CLASSES, CHUNK_ROWS, BATCH = 2000, 10, 8, 50
SORTED_LABELS = np.arange(NUM_ROWS) // (NUM_ROWS // NUM_CLASSES)
MIXED_LABELS = np.random.default_rng(3).permutation(SORTED_LABELS)


def write(path, labels, *, num_rows=NUM_ROWS, pixel=0, **options):
    columns = {} if labels is None else {"labels": Column(labels)}
    images = np.full((num_rows, 2, 2, 1), pixel, np.uint8)
    return write_packed(path, images, columns, chunk_rows=CHUNK_ROWS, **options)


@pytest.fixture(scope="module")
def on_sorted(tmp_path_factory):
    path = write(tmp_path_factory.mktemp("files") / "sorted.h5", SORTED_LABELS, shuffled=False)
    return measure_shuffles(path, batch_size=BATCH)


@pytest.fixture(scope="module")
def on_mixed(tmp_path_factory):
    return measure_shuffles(write(tmp_path_factory.mktemp("files") / "mixed.h5", MIXED_LABELS), batch_size=BATCH)


def test_full_shuffle_is_as_good_as_random_permutations_on_any_file(on_sorted, on_mixed):
    for found in (on_sorted, on_mixed):
        full = found.orders[0]
        assert full.as_good and full.verdict == "as good as full shuffle by every measure"
        assert full.measures["label_mix"].value == pytest.approx(1, abs=0.1)
        assert full.measures["epoch_distance"].value == pytest.approx(1, abs=0.03)
        assert full.measures["file_order"].value < 0.05


def test_on_a_class_sorted_file_larger_windows_mix_labels_better_and_no_shuffle_is_at_the_worst_end(on_sorted):
    order = on_sorted.orders[-1]
    values = {name: measure.value for name, measure in order.measures.items()}
    # Each batch is of one class: the largest chi-square there is with classes of one size.
    assert values["label_mix"] == pytest.approx(BATCH * (NUM_ROWS - 1) / (NUM_ROWS - BATCH))
    assert values["file_order"] == pytest.approx(1)
    assert values["epoch_distance"] == 0 and values["mates_again"] == 1
    assert not any(measure.as_good for measure in order.measures.values())
    assert "100 % of batch-mates meet again" in order.verdict
    mixes = [order.measures["label_mix"] for order in on_sorted.orders]
    assert on_sorted.default == "full"  # since the file was not shuffled
    assert [order.window_chunks for order in on_sorted.orders] == [None, 64, 16, 4, 1, None]
    assert [mix.value for mix in mixes] == sorted(mix.value for mix in mixes)
    assert [mix.as_good for mix in mixes] == [True] + [False] * 5, "none mixes as well as full shuffle"
    assert "the labels of batches differ" in on_sorted.orders[2].verdict


def test_on_a_shuffled_file_the_default_window_mixes_labels_like_full_and_says_what_it_does_not(on_mixed):
    order = on_mixed.orders[2]
    assert order.shuffle == on_mixed.default == "ChunkWindow(16)" and order.window_rows == 16 * CHUNK_ROWS
    assert order.measures["label_mix"].as_good and "labels mix as under full shuffle" in order.verdict
    # What stays in one chunk stays in one window: up to (1 / 16) * (50 / 128) more than full shuffle's, and here about
    # half of it, since batches straddle windows and a sample is not its own mate.
    again = order.measures["mates_again"]
    assert 0.4 < (again.value - again.full) / (BATCH / 128 / 16) < 0.8
    assert not again.as_good and "batch-mates meet again in the next epoch (2.4" in order.verdict
    value = json.loads(json.dumps(on_mixed.to_dict()))["orders"][2]
    assert value["shuffle"] == "ChunkWindow(16)" and value["as_good"] is False and value["verdict"] == order.verdict
    assert set(value["measures"]) == set(shuffle_quality.MEASURES)
    assert set(value["measures"]["label_mix"]) == {"value", "full", "spread", "as_good"}


def test_the_measures_depend_on_order_and_labels_alone(tmp_path, on_mixed):
    renamed = (np.int64(7) - MIXED_LABELS) * 10**15  # other numbers, the same classes
    again = measure_shuffles(write(tmp_path / "a.h5", renamed, pixel=200), batch_size=BATCH)
    for one, other in zip(again.orders, on_mixed.orders, strict=True):
        for name, measure in one.measures.items():
            assert measure.value == pytest.approx(other.measures[name].value), (one.shuffle, name)
    other_seed = measure_shuffles(tmp_path / "a.h5", batch_size=BATCH, seed=1)
    assert other_seed.orders[0].measures["mates_again"] != again.orders[0].measures["mates_again"]


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        (None, "the file has no labels"),
        (np.zeros(NUM_ROWS, np.int64), "all samples are of one class"),
        (np.ones((NUM_ROWS, 3), np.uint8), "the same attributes"),
        (np.ones(NUM_ROWS, np.float32), "labels are float32"),
        (np.ones((NUM_ROWS, 2, 2), np.int64), "neither classes nor attributes"),
    ],
)
def test_without_labels_that_differ_the_other_measures_are_still_given(tmp_path, labels, reason):
    found = measure_shuffles(write(tmp_path / "a.h5", labels), batch_size=BATCH)
    assert found.labels is None and any(reason in note for note in found.notes)
    for order in found.orders:
        assert order.measures["label_mix"] is None
        assert all(measure for name, measure in order.measures.items() if name != "label_mix")
    assert found.orders[0].as_good and not found.orders[-1].as_good


@pytest.mark.parametrize(
    "labels",
    [
        np.where(np.arange(NUM_ROWS) % 3 == 0, -1, SORTED_LABELS),
        (SORTED_LABELS > 4),
        SORTED_LABELS.astype(np.uint64) + np.uint64(2**63),
        SORTED_LABELS.astype(">i4"),
        SORTED_LABELS[:, None],
        np.arange(NUM_ROWS),
        np.stack([SORTED_LABELS > 4, MIXED_LABELS > 4], axis=1).astype(np.uint8),
    ],
    ids=["none", "bool", "uint64", "big-endian", "column", "hardly repeat", "attributes"],
)
def test_labels_of_any_whole_numbers_are_classes_and_attribute_vectors_are_measured(tmp_path, labels):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["images"] = np.zeros((NUM_ROWS, 2, 2, 1), np.uint8)
        file["labels"] = labels
    found = measure_shuffles(tmp_path / "a.h5", batch_size=BATCH)
    unshuffled = found.orders[-1].measures["label_mix"].value
    assert found.labels == ("attributes" if labels.shape[1:] == (2,) else "classes")
    if found.labels == "attributes":  # one is sorted (the worst there is), the other mixed
        assert unshuffled == pytest.approx((BATCH * 1.025 + 1) / 2, rel=0.03)
    elif np.unique(labels).size < NUM_ROWS:
        assert unshuffled > 5
    else:
        assert any("label_mix says little: 2,000 classes" in note for note in found.notes)
        assert all(order.measures["label_mix"].value == pytest.approx(1) for order in found.orders)


def test_a_foreign_file_is_measured_by_its_chunks_and_has_no_windows_without(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("images", (300, 2, 2, 3), "u1", chunks=(25, 2, 2, 3), compression="gzip")
        file.create_dataset("labels", data=np.arange(300) // 30, compression="gzip")
    found = measure_shuffles(tmp_path / "a.h5", batch_size=20)
    assert found.chunk_rows == 25
    assert [order.window_rows for order in found.orders] == [300, 300, 300, 100, 25, 1]
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["images"] = np.zeros((300, 2, 2), np.uint8)
    found = measure_shuffles(tmp_path / "b.h5", batch_size=20)
    assert [order.shuffle for order in found.orders] == ["full", "False"] and found.default == "full"
    assert found.chunk_rows == 0 and any("without chunks" in note for note in found.notes)


def test_the_split_train_is_measured_if_there_is_one(tmp_path):
    # Sorted within train; val is of other classes, which must not count.
    labels = np.concatenate([np.arange(400) // 40, np.full(77, 50)])
    path = write(tmp_path / "a.h5", labels, num_rows=477, splits={"val": 77, "train": 400})
    assert (measure_shuffles(path, batch_size=20).split, measure_shuffles(path).num_rows) == ("train", 400)
    path = write(tmp_path / "b.h5", labels, num_rows=477, splits={"one": 77, "other": 400})
    assert (measure_shuffles(path).split, measure_shuffles(path).num_rows) == (None, 477)


def test_a_small_file_gets_smaller_batches_and_a_tiny_one_an_error(tmp_path):
    found = measure_shuffles(write(tmp_path / "a.h5", np.arange(8) % 2, num_rows=8))
    assert found.batch_size == 2 and "Batches of 2, a quarter of the 8 rows." in found.notes
    with pytest.raises(OptionError, match="7 rows are too few"):
        measure_shuffles(write(tmp_path / "b.h5", np.arange(7) % 2, num_rows=7))
    with pytest.raises(OptionError, match="batch_size=1"):
        measure_shuffles(tmp_path / "a.h5", batch_size=1)
    with h5py.File(tmp_path / "c.h5", "w") as file:
        file["numbers"] = np.zeros(40)
    with pytest.raises(FormatError, match="no dataset `images`"):
        measure_shuffles(tmp_path / "c.h5")


def test_a_large_file_is_sampled_says_so_and_comes_to_the_same(tmp_path, on_sorted, monkeypatch):
    monkeypatch.setattr(shuffle_quality, "SAMPLED_ROWS", 600)
    monkeypatch.setattr(shuffle_quality, "SCANNED_ROWS", 1200)
    path = write(tmp_path / "sorted.h5", SORTED_LABELS, shuffled=False)
    found = measure_shuffles(path, batch_size=BATCH)
    assert found.sampled_rows == 600
    assert any("Sampled: 600 of 2,000" in note for note in found.notes)
    assert any("the first 1,200 rows" in note for note in found.notes)
    for part, whole in zip(found.orders, on_sorted.orders, strict=True):
        assert part.measures["label_mix"].value == pytest.approx(whole.measures["label_mix"].value, rel=0.15)
        assert part.measures["mates_again"].value == pytest.approx(whole.measures["mates_again"].value, abs=0.05)
    assert found.orders[0].as_good
    assert found.orders[0].measures["epoch_distance"].value == pytest.approx(1, abs=0.1)
    assert found.orders[-1].measures["epoch_distance"].value == 0
