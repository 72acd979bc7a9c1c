"""Loaders and samplers that draw by weight or class: what comes, where it goes on, and what they refuse."""

from __future__ import annotations

import hashlib
from collections import Counter
from contextlib import closing

import h5py
import numpy as np
import pytest
import torch
from check_resume import check_resume
from late_backend import Device
from small_files import labels_in_turn, write_foreign, write_random
from small_loaders import loader_of
from torch.utils.data import DataLoader, TensorDataset

from fastload import (
    ChunkBatchSampler,
    ChunkSampler,
    ClassBatches,
    DistributedChunkSampler,
    EpochPlan,
    FastLoader,
    List,
    PackedDataset,
    Weighted,
)
from fastload.errors import OptionError, StateError
from fastload.format.writer import Column
from fastload.loader.loader_options import check_drawing
from fastload.transforms import RandomCrop, RandomResizedCrop

N = 40
LABELS = np.array([0] * 24 + [1] * 10 + [2] * 5 + [-1])[np.random.default_rng(3).permutation(N)]
WEIGHTS = np.arange(N) % 4 * 1.0


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    columns = {
        "labels": Column(LABELS, {"names": ("cat", "dog", "owl")}),
        "place": labels_in_turn(N, "xy"),
        "age": Column(np.arange(N, dtype=np.int32)),
    }
    folder = tmp_path_factory.mktemp("weighted")
    return write_random(folder / "a.h5", rows=N, size=(32, 28, 3), chunk_rows=4, columns=columns,
                        splits={"train": 30, "val": 10})  # fmt: skip


def rows_of(loader, epochs=1):
    with closing(loader):
        return [row for _ in range(epochs) for batch in loader for row in batch.rows[batch.valid].tolist()]


SHUFFLES = {
    "weighted": (lambda: Weighted(WEIGHTS), 7),
    "fewer": (lambda: Weighted(WEIGHTS, 21), 4),
    "once": (lambda: Weighted(WEIGHTS, replacement=False), 7),
    "balanced": (lambda: Weighted.balanced("labels"), 7),
    "classes": (lambda: ClassBatches(2, 3), 6),
}
each_shuffle = pytest.mark.parametrize("name", SHUFFLES)


@each_shuffle
@pytest.mark.parametrize("way", ["rows", "python", "cache", "echo", "last of 2"])
def test_a_loader_goes_on_where_it_stood(path, name, way):
    make, batch_size = SHUFFLES[name]
    dataset = PackedDataset(path, transform=as_floats if way == "python" else None)
    options = {
        "rows": {"transform": [RandomResizedCrop(12)]}, "python": {"workers": 1},
        "cache": {"device": Device(), "cache": "device"}, "echo": {"echo": 2}, "last of 2": {"share": (1, 2)},
    }[way]  # fmt: skip
    check_resume(lambda: FastLoader(dataset, batch_size, shuffle=make(), seed=4, **options))


def as_floats(sample):
    return sample[0].float(), sample[1]


@each_shuffle
def test_workers_caches_and_reading_change_nothing(path, name):
    make, batch_size = SHUFFLES[name]
    ways = {"workers": 3}, {"read": "pread"}, {"device": Device(), "cache": "host"}, {"batch": "list"}
    first, *others = (rows_of(loader_of(path, batch_size, shuffle=make(), **way), epochs=2) for way in ways)
    assert all(other == first for other in others) and len(set(first)) > 10


@pytest.mark.parametrize("power", [1.0, 0.0])
def test_classes_are_balanced(path, power):
    loader = FastLoader(path, 50, shuffle=Weighted.balanced("labels", power, num_samples=30_000), workers=1)
    with closing(loader):
        counts = Counter(int(label) for _, labels in loader for label in labels)
    expected = np.array([10_000] * 3) if power else np.array([24, 10, 5]) / 39 * 30_000
    found = np.array([counts[label] for label in range(3)])
    assert counts.total() == 30_000 == found.sum() and ((found - expected) ** 2 / expected).sum() < 50


def test_weights_are_those_of_the_split_or_selection(path):
    val = PackedDataset(path, split="val")
    assert set(rows_of(FastLoader(val, 5, shuffle=Weighted(np.arange(10) == 3)))) == {33}
    some = PackedDataset(path).select([8, 30, 8, 2])
    assert set(rows_of(FastLoader(some, 2, shuffle=Weighted([0, 1, 0, 1], 60)))) == {30, 2}
    with pytest.raises(OptionError, match="10 weights, and the dataset has 4 samples"):
        FastLoader(some, 2, shuffle=Weighted(np.ones(10)))
    few = np.flatnonzero(LABELS == 2)[:2].tolist() + np.flatnonzero(LABELS == 0)[:9].tolist()
    with closing(
        FastLoader(PackedDataset(path).select(few), 10, shuffle=Weighted.balanced("labels", num_samples=4000))
    ) as loader:
        rare = sum(int((labels == 2).sum()) for _, labels in loader)
    assert 1800 < rare < 2200


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_batch_has_so_many_classes_and_samples(path, ranks):
    for rank in range(ranks):
        with closing(FastLoader(path, 6, shuffle=ClassBatches(2, 3), share=(rank, ranks))) as loader:
            batches = [(batch.rows.tolist(), Counter(batch[1].tolist())) for _ in range(3) for batch in loader]
        assert len(batches) == 3 * (6 // ranks)
        for rows, counts in batches:
            assert len(set(rows)) == 6 and list(counts.values()) == [3, 3] and -1 not in counts


def test_a_dataset_tells_the_classes_of_its_samples(path):
    dataset = PackedDataset(path, fields=["images"])
    assert dataset.class_numbers().tolist() == LABELS.tolist()
    chosen = PackedDataset(path, split="val", check="always").select([3, 0, 3])
    assert chosen.class_numbers("place").tolist() == [1, 0, 1] and chosen.class_numbers().dtype == np.int64


def test_a_field_of_classes_may_have_any_name(path):
    with closing(FastLoader(path, 8, shuffle=ClassBatches(2, 4, field="place"))) as loader:
        for batch in loader:
            assert Counter((batch.rows % 2).tolist()) == {0: 4, 1: 4}


def test_a_row_that_is_drawn_forty_times_is_forty_pictures(path):
    for options in ({}, {"device": Device()}, {"device": Device(), "cache": "device"}, {"batch": "list"}):
        shuffle = Weighted(np.arange(N) == 3, num_samples=40)
        with closing(FastLoader(path, 8, shuffle=shuffle, transform=[RandomResizedCrop(12)], **options)) as loader:
            images = [image for batch in loader for image in batch[0]]
        assert len({hashlib.sha256(np.ascontiguousarray(image)).digest() for image in images}) == 40


def test_pictures_do_not_depend_on_the_number_of_ranks(path):
    def pictures(ranks):
        found = []
        for rank in range(ranks):
            options = {"share": (rank, ranks), "transform": [RandomCrop(12, padding=6)], "workers": 1}
            with closing(FastLoader(path, 4, shuffle=Weighted(WEIGHTS), **options)) as loader:
                found += [image.numpy().tobytes() for batch in loader for image in batch[0]]
        return found

    assert sorted(pictures(1)) == sorted(pictures(2))


@pytest.mark.parametrize("name", ["weighted", "fewer", "once", "balanced"])
def test_samplers_draw_what_a_loader_gives(path, name):
    make, _ = SHUFFLES[name]
    dataset = PackedDataset(path, split="train")
    shuffle = Weighted(WEIGHTS[:30], make().num_samples, make().replacement) if name != "balanced" else make()
    sampler, loader = ChunkSampler(dataset, shuffle, seed=5), FastLoader(dataset, 1, shuffle=shuffle, seed=5)
    with closing(loader):
        for _ in range(2):
            assert list(sampler) == [int(row) for batch in loader for row in batch.rows]
    for rank in range(2):
        sampler = DistributedChunkSampler(dataset, 2, rank, shuffle, 5, drop_last=True)
        loader = FastLoader(dataset, 1, shuffle=shuffle, seed=5, share=(rank, 2))
        assert list(sampler) == rows_of(loader) and len(sampler) == sampler.num_samples


@each_shuffle
def test_samplers_go_on_where_they_stood(path, name):
    make, batch_size = SHUFFLES[name]
    dataset = PackedDataset(path)
    check_resume(lambda: ChunkBatchSampler(dataset, batch_size, num_workers=2, shuffle=make()))
    if name != "classes":
        check_resume(lambda: ChunkSampler(dataset, make()))


@pytest.mark.parametrize(("workers", "ranks", "drop_last"), [(0, 1, False), (2, 1, False), (3, 1, True), (2, 2, False)])
def test_batch_samplers_keep_batches_of_classes_whole(path, workers, ranks, drop_last):
    for rank in range(ranks):
        sampler = ChunkBatchSampler(
            PackedDataset(path), 6, num_workers=workers, shuffle=ClassBatches(2, 3), drop_last=drop_last,
            num_replicas=ranks, rank=rank,
        )  # fmt: skip
        batches = list(sampler)
        assert batches and len(batches) == len(sampler)
        assert all(list(Counter(LABELS[batch].tolist()).values()) == [3, 3] for batch in batches)
    loaded = DataLoader(PackedDataset(path), batch_sampler=sampler)
    assert all(len(labels) == 6 for _, labels in loaded)


def test_a_sampler_that_cannot_carry_batches_says_which_can(path):
    for make in (ChunkSampler, lambda dataset, shuffle: DistributedChunkSampler(dataset, 2, 0, shuffle)):
        with pytest.raises(OptionError, match="ChunkBatchSampler and FastLoader take it"):
            make(PackedDataset(path), shuffle=ClassBatches(2, 3))


def test_a_state_of_other_weights_is_refused(path):
    with closing(FastLoader(path, 7, shuffle=Weighted(WEIGHTS))) as loader:
        next(iter(loader))
        state = loader.state_dict()
    for other in (Weighted(WEIGHTS + 1), "full", Weighted.balanced("labels")):
        with pytest.raises(StateError, match=r"shuffle is .* here and Weighted\(weights and options of digest"):
            FastLoader(path, 7, shuffle=other).load_state_dict(state)
    with closing(FastLoader(path, 6, shuffle=ClassBatches(2, 3))) as loader:
        state = loader.state_dict()
    with pytest.raises(StateError, match=r"here and ClassBatches\(classes and options of digest"):
        FastLoader(path, 6, shuffle=ClassBatches(3, 2)).load_state_dict(state)


def test_another_batch_size_goes_on_within_the_epoch(path):
    plan = EpochPlan(range(N), shuffle=Weighted(WEIGHTS), seed=2)
    with closing(FastLoader(path, 4, shuffle=Weighted(WEIGHTS), seed=2)) as loader:
        first = next(iter(loader)).rows.tolist()
        rest = rows_of(loader.with_(batch_size=6))
    assert first + rest == plan.rows_at(0, np.arange(N)).tolist()


def test_any_dataset_takes_weights_and_classes_as_numbers():
    data = TensorDataset(torch.arange(12))
    with closing(FastLoader(data, 4, shuffle=Weighted(np.arange(12) < 2), workers=1)) as loader:
        assert {int(value) for (values,) in loader for value in values} == {0, 1}
    with closing(FastLoader(data, 4, shuffle=ClassBatches(2, 2, np.arange(12) // 4), workers=1)) as loader:
        assert all(len({int(value) // 4 for value in values}) == 2 for (values,) in loader)
    with pytest.raises(OptionError, match=r"TensorDataset has no fields by name.*whole numbers, \(12,\)"):
        FastLoader(data, 4, shuffle=Weighted.balanced("labels"))


def test_a_foreign_file_has_classes_in_labels(tmp_path):
    images = np.zeros((12, 4, 4, 3), np.uint8)
    path = write_foreign(tmp_path / "f.h5", images, chunk_rows=3, labels=np.array([5] * 9 + [7] * 3))
    with closing(FastLoader(path, 6, shuffle=ClassBatches(2, 3))) as loader:
        assert all(Counter(batch[1].tolist()) == {5: 3, 7: 3} for batch in loader)
    with h5py.File(path, "a") as file:
        del file["labels"]
    with pytest.raises(OptionError, match=r"'labels' is not in the file.*it has none"):
        FastLoader(path, 6, shuffle=ClassBatches(2, 3))


@pytest.mark.parametrize(
    ("shuffle", "options", "said"),
    [
        (Weighted.balanced("kind"), {}, "'kind' is not in the file.*it has 'labels', 'age', 'place'"),
        (Weighted.balanced("images"), {}, "'images' holds"),
        (Weighted(WEIGHTS, 3), {}, "3 samples do not make one batch of 6.*num_samples"),
        (ClassBatches(2, 6), {"batch_size": 12}, "'owl' has 5.*Ask for 5 samples at most"),
        (ClassBatches(4, 2), {"batch_size": 8}, "classes=4.*of 3 classes"),
        (ClassBatches(2, 3), {"batch_size": 5}, r"batch_size=5.*batch_size=6"),
        (ClassBatches(2, 3), {"share": (0, 7)}, "over 7 ranks.*fewer ranks"),
        (ClassBatches(2, 3), {"batch": List(group_by="aspect")}, "group_by"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_the_way_out(path, shuffle, options, said):
    with pytest.raises(OptionError, match=f"(?s){said}"):
        FastLoader(path, **{"batch_size": 6, "shuffle": shuffle} | options)


def test_fixed_shares_and_nodes_are_refused(path):
    device = Device(free=80_000, total=80_000)
    with pytest.raises(OptionError, match=r'(?s)cache="device".*Weighted.*Give cache="host"'):
        FastLoader(path, 4, shuffle=Weighted(WEIGHTS), share=(0, 2), device=device, cache="device")
    with pytest.raises(OptionError, match=r'share="node".*Leave share out'):
        check_drawing(Weighted(WEIGHTS), 2, fixed_shares=False)


def test_images_of_like_shape_are_drawn_together(path):
    with closing(FastLoader(path, 4, shuffle=Weighted(WEIGHTS, 30), batch=List(group_by="aspect"))) as loader:
        rows = [row for batch in loader for row in batch.rows.tolist()]
    assert len(rows) == 28 and (WEIGHTS[rows] > 0).all()


def test_the_loader_says_how_it_draws(path):
    assert "Weighted(40 weights, num_samples=21)" in repr(FastLoader(path, 4, shuffle=Weighted(WEIGHTS, 21)))
    assert "ClassBatches(classes=2, samples=3" in repr(FastLoader(path, 6, shuffle=ClassBatches(2, 3)))
