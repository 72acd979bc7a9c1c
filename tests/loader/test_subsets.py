"""Subsets and concatenations: those of a packed file are selections, and states know which rows they have."""

from __future__ import annotations

import warnings
from contextlib import closing

import numpy as np
import pytest
import torch
from small_files import write_random
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, StackDataset, Subset, random_split

from fastload import FastLoader, PackedDataset
from fastload.errors import OptionError, StateError
from fastload.transforms import RandomResizedCrop

ROWS = 40


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_random(
        tmp_path_factory.mktemp("subsets") / "a.h5",
        rows=ROWS,
        size=(8, 8, 3),
        classes="abc",
        splits={"train": 30, "val": 10},
    )


class Numbers(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, i):
        return torch.full((3, 4, 4), i, dtype=torch.uint8), i


class Doubled(Subset):
    """What a user may make of a subset."""

    def __getitem__(self, i):
        images, labels = super().__getitem__(i)
        return images, labels * 2

    def __getitems__(self, indices):
        return [self[i] for i in indices]


def split(dataset, seed):
    return random_split(dataset, [0.75, 0.25], torch.Generator().manual_seed(seed))[0]


def loader_of(dataset, **options):
    return FastLoader(dataset, 4, **{"shuffle": "full", "seed": 2, "workers": 1} | options)


def test_a_subset_of_a_packed_dataset_is_its_selection(path):
    whole = PackedDataset(path, split="train")
    part = split(whole, 1)
    nested = Subset(part, [5, 3, 3, np.int64(9), 0, 7, 8, 1])
    cases = [(part, part.indices), (nested, [part.indices[i] for i in nested.indices])]
    for subset, rows in cases:
        with closing(loader_of(subset, transform=[RandomResizedCrop(6)])) as loader:
            found = list(loader)
            assert "1 thread" in repr(loader) and loader._producer.pool.worker_info.by_threads
            assert isinstance(loader.dataset, PackedDataset) and len(loader.dataset) == len(subset)
        with closing(loader_of(whole.select(rows), transform=[RandomResizedCrop(6)])) as loader:
            expected = list(loader)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one[0], other[0]) and torch.equal(one.rows, other.rows)


def test_a_state_of_another_split_is_refused(path):
    for dataset in (PackedDataset(path), Numbers()):
        parts = [split(dataset, seed) for seed in (1, 1, 2)]
        with closing(loader_of(parts[0])) as loader:
            batches = iter(loader)
            seen = [next(batches).rows.tolist()]
            state = loader.state_dict()
        with closing(loader_of(parts[1])) as loader:
            loader.load_state_dict(state)
            seen += [batch.rows.tolist() for batch in loader]
        rows = [row for batch in seen for row in batch]
        assert len(rows) == len(set(rows)) == len(parts[0]) // 4 * 4
        with closing(loader_of(parts[2])) as loader, pytest.raises(StateError, match="belongs to other data"):
            loader.load_state_dict(state)


def test_a_state_of_other_parts_is_refused(path):
    one, other = (ConcatDataset([Subset(Numbers(), rows), Numbers()]) for rows in (range(8), range(8, 16)))
    with closing(loader_of(one)) as loader:
        state = loader.state_dict()
        loader.load_state_dict(state)
    with closing(loader_of(other)) as loader, pytest.raises(StateError, match="belongs to other data"):
        loader.load_state_dict(state)


class Wrapper(Dataset):
    """What a user may make around a dataset, under any name."""

    def __init__(self, inner):
        self.d = inner

    def __len__(self):
        return len(self.d)

    def __getitem__(self, i):
        return self.d[i]


@pytest.mark.parametrize("wrap", [Wrapper, StackDataset, lambda part: StackDataset(a=part, b=Numbers()),
                                  lambda part: Wrapper(ConcatDataset([part]))])  # fmt: skip
def test_a_state_of_other_rows_within_is_refused_whatever_is_around_them(path, wrap):
    with closing(loader_of(wrap(Subset(Numbers(), range(20))))) as loader:
        state = loader.state_dict()
        loader.load_state_dict(state)
    with closing(loader_of(wrap(Subset(Numbers(), [*range(19), 0])))) as loader, pytest.raises(StateError):
        loader.load_state_dict(state)


def test_a_state_knows_all_parts_of_many_and_datasets_that_know_each_other_or_have_no_length(path):
    one, other = (ConcatDataset([Subset(Numbers(), [0])] * 1500 + [Subset(Numbers(), [last])]) for last in (1, 2))
    with closing(loader_of(one)) as loader:
        state = loader.state_dict()
    with closing(loader_of(other)) as loader, pytest.raises(StateError):
        loader.load_state_dict(state)

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(())

    inner, outer = Wrapper(Numbers()), Wrapper(Numbers())
    inner.parent, outer.d, outer.stream = outer, inner, Stream()
    with closing(loader_of(outer)) as loader:
        loader.load_state_dict(loader.state_dict())


@pytest.mark.parametrize("mask", [np.arange(ROWS) % 2 == 0, torch.arange(ROWS) % 2 == 0, [True, False] * (ROWS // 2)])
def test_a_mask_in_a_subset_is_no_list_of_positions(path, mask):
    for dataset in (PackedDataset(path), Numbers()):
        with pytest.raises(OptionError, match=r"Subset.indices.*flatnonzero\(mask\)"):
            loader_of(Subset(dataset, mask)).state_dict()
    with pytest.raises(OptionError, match="whole numbers in one dimension"):
        loader_of(Subset(PackedDataset(path), [1.9, 2.9, 3.9, 4.9]))
    for index in (True, np.True_, torch.tensor(True)):
        with pytest.raises(OptionError, match="True and False"):
            PackedDataset(path)[index]


def test_a_selection_of_rows_has_no_chunks_to_shuffle(path):
    with pytest.raises(OptionError, match="a selection of rows has none"):
        loader_of(PackedDataset(path).select(range(20)), shuffle="chunk")


def test_what_wraps_a_packed_dataset_otherwise_says_that_python_runs(path):
    packed = PackedDataset(path)
    for dataset in (
        Doubled(packed, range(8)),
        ConcatDataset([packed, packed]),
        Subset(ConcatDataset([packed]), [1, 2, 3, 4]),
        ConcatDataset([Wrapper(packed)]),
        StackDataset(packed),
    ):
        with pytest.warns(UserWarning, match="holds a PackedDataset, but its samples come through Python code"):
            loader = loader_of(dataset, shuffle=False)
        with closing(loader):
            first = next(iter(loader))
            images = first[0][0] if type(dataset) is StackDataset else first[0]
            assert torch.equal(images[0], packed[1 if type(dataset) is Subset else 0][0])
            assert not loader._producer.pool.worker_info.by_threads
    with warnings.catch_warnings(), closing(loader_of(Numbers())):
        warnings.simplefilter("error")
