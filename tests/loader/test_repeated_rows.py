"""A row that comes several times in an epoch is another picture each time; one that comes once stays what it was."""

from __future__ import annotations

import hashlib
from contextlib import closing

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from late_backend import Device
from ragged_cases import varied_file
from small_files import write_random

from fastload import FastLoader, PackedDataset
from fastload.plan import EpochPlan
from fastload.prefetch.inputs import mentions_of
from fastload.transforms import (
    ColorJitter,
    Draws,
    RandAugment,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
)

CONTINUOUS = {
    "resized crop": [RandomResizedCrop(12)],
    "padded crop": [RandomCrop(20, padding=10)],
    "jitter": [ColorJitter(0.5, 0.5, 0.5)],
    "erasing": [RandomErasing(p=1)],
    "policy": [RandAugment(num_ops=3)],
    "two passes": [RandomResizedCrop(14), ColorJitter(0.5), Resize(10), RandomErasing(p=1)],
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_random(tmp_path_factory.mktemp("repeats") / "a.h5", rows=12, size=(32, 28, 3), classes="abc")


def pictures(source, **options):
    with closing(FastLoader(source, 16, shuffle="full", seed=2, ends="exact", workers=1, **options)) as loader:
        return {hashlib.sha256(np.ascontiguousarray(image)).digest() for images, *_ in loader for image in images}


@pytest.mark.parametrize("name", CONTINUOUS)
@pytest.mark.parametrize("way", ["rows", "device", "list", "cache"])
def test_a_row_that_is_selected_forty_times_is_forty_pictures(path, name, way):
    options = {"rows": {}, "device": {"device": Device()}, "list": {"batch": "list"},
               "cache": {"device": Device(), "cache": "device"}}[way]  # fmt: skip
    found = pictures(PackedDataset(path).select([3] * 40), transform=CONTINUOUS[name], **options)
    assert len(found) >= (36 if name in ("policy", "padded crop") else 40)  # these have some hundred outcomes


def test_a_flip_turns_some_of_them(path):
    assert len(pictures(PackedDataset(path).select([3] * 40), transform=[RandomHorizontalFlip()])) == 2


def test_stored_images_of_several_sizes_are_cut_anew_each_time(tmp_path):
    path = tmp_path / "a.h5"
    varied_file(path)
    assert len(pictures(PackedDataset(path).select([1] * 40), transform=[RandomResizedCrop(24)])) == 40


def test_rows_that_are_selected_once_are_what_they_are_in_the_whole_file(path):
    options = {"transform": [RandomResizedCrop(12), RandomErasing()], "shuffle": False, "seed": 5, "workers": 1}
    made = {}
    for name, rows in (("whole", range(12)), ("some", [4, 7, 4, 1, 4, 7])):
        with closing(FastLoader(PackedDataset(path).select(rows), 4, **options)) as loader:
            made[name] = torch.cat([images for images, _ in loader])
    for at, (row, again) in enumerate([(4, 0), (7, 0), (4, 1), (1, 0), (4, 2), (7, 1)]):
        assert torch.equal(made["some"][at], made["whole"][row]) == (again == 0)


def test_rows_that_fill_a_batch_up_are_other_pictures(path):
    dataset = PackedDataset(path).select(range(5))
    with closing(
        FastLoader(dataset, 16, shuffle=False, ends="pad", workers=1, transform=[RandomResizedCrop(12)])
    ) as loader:
        [batch] = loader
    assert batch.rows.tolist() == [*range(5)] * 3 + [0] and int(batch.valid.sum()) == 5
    assert len({image.numpy().tobytes() for image in batch[0]}) == 16


def test_repeated_augmentation_is_a_selection(path):
    """Three pictures of each image in an epoch, dealt out over ranks, as DeiT's sampler does."""
    dataset = PackedDataset(path, fields=("images", "row")).select(np.repeat(np.arange(12), 3))
    seen = []
    for rank in range(2):
        options = {"shuffle": "full", "share": (rank, 2), "transform": [RandomResizedCrop(12)]}
        with closing(FastLoader(dataset, 6, workers=1, **options)) as loader:
            pairs = [pair for images, rows in loader for pair in zip(images, rows, strict=True)]
        seen += [(int(row), image.numpy().tobytes()) for image, row in pairs]
    assert sorted(row for row, _ in seen) == sorted([*range(12)] * 3) and len(set(seen)) == 36


@given(st.lists(st.integers(0, 9), max_size=60))
def test_mentions_count_each_row_from_its_first(rows):
    mentions = mentions_of(np.array(rows, np.int64))
    expected = [rows[:at].count(row) for at, row in enumerate(rows)]
    assert expected == ([0] * len(rows) if mentions is None else mentions.tolist())
    assert (mentions is None) == (len(set(rows)) == len(rows))


@given(st.integers(1, 30), st.integers(1, 12), st.integers(1, 4))
def test_planned_repeats_are_numbered(rows, batch_size, ranks):
    plan = EpochPlan(range(rows), batch_size=batch_size, world_size=ranks, shuffle="full", ends="pad")
    for rank in range(ranks):
        pairs = [
            (row, time)
            for batch in plan.batches(rank)
            for row, time in zip(
                batch.rows.tolist(), [0] * batch_size if batch.times is None else batch.times.tolist(), strict=True
            )
        ]
        assert len(set(pairs)) == len(pairs) or rows < ranks  # a rank without rows of its own repeats those of others


def test_times_are_other_draws_than_echoes_and_none_leaves_them_alone():
    rows = np.arange(50)
    plain = Draws(1, 2, rows).uniform()
    assert np.array_equal(Draws(1, 2, rows, times=np.zeros(50, np.int64)).uniform(), plain)
    found = [plain, *(Draws(1, 2, rows, times=np.full(50, time)).uniform() for time in (1, 2, 3))]
    found += [Draws(1, 2, rows, echo).uniform() for echo in (1, 2, 3)]
    assert len(set(np.concatenate(found).tolist())) == 7 * 50
