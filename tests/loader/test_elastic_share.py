"""share="elastic": the same global batches for any number of ranks, resumed between them."""

from __future__ import annotations

import multiprocessing
import random
from contextlib import closing

import numpy as np
import pytest
import torch
from small_files import write_random

from fastload import FastLoader, PackedDataset
from fastload.errors import StateError
from fastload.transforms import RandomResizedCrop

ROWS, TAKEN = 100, 24


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_random(
        tmp_path_factory.mktemp("elastic") / "a.h5", rows=ROWS, size=(8, 8, 3), classes="abc", chunk_rows=8
    )


def loader_of(path, monkeypatch, rank, ranks, **options):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    options = {"shuffle": "chunk", "seed": 4, "workers": 1, "share": "elastic"} | options
    return FastLoader(PackedDataset(path), TAKEN // ranks, transform=[RandomResizedCrop(6)], **options)


def steps_of(path, monkeypatch, ranks, state=None, stop=None, **options):
    """The batches of each step, of all ranks one after another; and the state after `stop` of them, if it is given."""
    steps, states = [], []
    for rank in range(ranks):
        with closing(loader_of(path, monkeypatch, rank, ranks, **options)) as loader:
            if state is not None:
                loader.load_state_dict(state)
            batches = []
            for batch in loader:
                batches.append(batch)
                if len(batches) == stop:
                    break
            states.append(loader.state_dict())
            steps.append(batches)
    assert all(one == states[0] for one in states)
    return [torch.cat([batch[0] for batch in step]) for step in zip(*steps, strict=True)], states[0]


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is not initialized")


def test_global_batches_are_the_same_pictures_for_any_ranks(path, monkeypatch):
    alone, _ = steps_of(path, monkeypatch, 1)
    assert len(alone) == ROWS // TAKEN
    for ranks in (2, 3, 4, 8):
        found, _ = steps_of(path, monkeypatch, ranks)
        assert all(torch.equal(one, other) for one, other in zip(found, alone, strict=True))


def test_an_epoch_goes_on_with_other_ranks_at_the_very_next_batch(path, monkeypatch):
    alone, _ = steps_of(path, monkeypatch, 1)
    found, state = steps_of(path, monkeypatch, 3, stop=1)
    more, state = steps_of(path, monkeypatch, 8, state=state, stop=2)
    rest, state = steps_of(path, monkeypatch, 2, state=state)
    found += more + rest
    assert all(torch.equal(one, other) for one, other in zip(found, alone, strict=True))
    following, _ = steps_of(path, monkeypatch, 4, state=state)
    assert len(following) == ROWS // TAKEN and not torch.equal(following[0], alone[0])


def noisy(sample):
    """Returns an image that stays where it lies, and what was drawn from all three global random states."""
    image, label = sample
    return image, label + random.random(), torch.rand(2), np.random.random(2)  # noqa: NPY002


def noisy_image(sample):
    return (sample[0].float() * torch.rand(1), *noisy(sample)[1:])


class Foreign(torch.utils.data.Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return noisy((torch.full((3, 8, 8), index, dtype=torch.uint8), torch.tensor(index)))


class AtOnce(Foreign):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


SOURCES = {
    "samples that stay": lambda path: PackedDataset(path, transform=noisy),
    "new samples": lambda path: PackedDataset(path, transform=noisy_image),
    "rows that come again": lambda path: PackedDataset(path, transform=noisy).select([*range(50), *range(50)]),
    "a dataset": lambda path: Foreign(),
    "a subset": lambda path: torch.utils.data.Subset(Foreign(), range(ROWS)),
}


def drawn(source, monkeypatch, ranks, share="elastic"):
    """What each step holds, one row a sample: the batches of all ranks one after another."""
    steps = []
    for rank in range(ranks):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        with closing(FastLoader(source, TAKEN // ranks, shuffle="full", workers=1, share=share, echo=2)) as loader:
            batches = [torch.cat([part.double().flatten(1) for part in map(rows_of, batch)], 1) for batch in loader]
        assert all(torch.equal(first, again) for first, again in zip(batches[::2], batches[1::2], strict=True)), "echo"
        steps.append(batches[::2])
    return [torch.cat(parts) for parts in zip(*steps, strict=True)]


def rows_of(part):
    return part if part.ndim > 1 else part[:, None]


@pytest.mark.parametrize("source", SOURCES)
def test_python_code_draws_alike_for_each_sample_on_any_ranks(path, monkeypatch, source):
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none=False: "fork")
    data = SOURCES[source](path)
    alone = torch.cat(drawn(data, monkeypatch, 1))
    assert torch.equal(torch.cat(drawn(data, monkeypatch, 3)), alone)
    assert len(alone[:, -5:].unique(dim=0)) == len(alone), "each sample draws anew, also of a row that comes again"
    others = torch.cat(drawn(data, monkeypatch, 3, share="auto"))
    assert len(others) != len(alone) or not torch.equal(others, alone)


def test_samples_that_are_made_at_once_draw_anew_for_each_of_them(monkeypatch):
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none=False: "fork")
    found = torch.cat(drawn(AtOnce(), monkeypatch, 1))
    assert len(found[:, -5:].unique(dim=0)) == len(found)


def test_a_state_of_shares_is_not_one_of_elastic_steps(path, monkeypatch):
    _, state = steps_of(path, monkeypatch, 2, stop=1)
    with (
        closing(loader_of(path, monkeypatch, 0, 2, share="auto")) as loader,
        pytest.raises(StateError, match="share is"),
    ):
        loader.load_state_dict(state)
    with closing(loader_of(path, monkeypatch, 0, 2, share="auto")) as loader:
        state = loader.state_dict()
    with closing(loader_of(path, monkeypatch, 0, 2)) as loader, pytest.raises(StateError, match="share is 'elastic'"):
        loader.load_state_dict(state)
