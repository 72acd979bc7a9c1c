"""A batch under the tools that take trees of tensors: pytrees, pickle, torch.compile, frameworks' helpers."""

from __future__ import annotations

import copy
import io
import pickle
from contextlib import closing

import numpy as np
import pytest
import torch
import torch.utils._pytree as python_pytree
from small_files import write_random
from torch.utils.data import default_convert

from fastload import FastLoader, PackedDataset
from fastload.format.ragged import Column
from fastload.loader.batch import Batch, DictBatch


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    keys = Column(np.array([f"cat/{i}.jpg".encode() for i in range(20)]))
    return write_random(
        tmp_path_factory.mktemp("batch") / "a.h5", size=(8, 8, 3), classes="abc", masks=True, columns={"key": keys}
    )


class Dicts(torch.utils.data.Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, i):
        return {"image": torch.full((3, 4, 4), i, dtype=torch.uint8), "label": i % 3}


@pytest.fixture
def batch(path):
    with closing(FastLoader(PackedDataset(path, fields=("images", "labels")), 6, shuffle=False, workers=1)) as loader:
        yield next(iter(loader))


@pytest.fixture
def dict_batch():
    with closing(FastLoader(Dicts(), 4, shuffle=False, workers=1)) as loader:
        yield next(iter(loader))


def registries():
    yield python_pytree
    if python_pytree._cxx_pytree_exists:
        import torch.utils._cxx_pytree as cxx_pytree

        yield cxx_pytree


def test_a_batch_is_a_node_of_both_pytrees(batch, dict_batch):
    for pytree in registries():
        leaves, spec = pytree.tree_flatten(batch)
        assert len(leaves) == 2 and all(one is other for one, other in zip(leaves, batch, strict=True))
        again = pytree.tree_unflatten(leaves, spec)
        assert type(again) is Batch and again.rows.tolist() == list(range(6)) and again.global_valid == 6
        moved = pytree.tree_map(lambda tensor: tensor + 1, batch)
        assert type(moved) is Batch and torch.equal(moved[1], batch[1] + 1) and torch.equal(moved.rows, batch.rows)
        halves = pytree.tree_map(lambda tensor: tensor[:3], batch)
        assert type(halves) is Batch and len(halves[0]) == 3
        with pytest.raises(AttributeError, match="a framework built it anew"):
            _ = halves.rows
        both = pytree.tree_map(lambda one, other: one + other, batch, moved)
        assert torch.equal(both[1], 2 * batch[1] + 1)
        found = pytree.tree_map(lambda tensor: tensor.float(), dict_batch)
        assert type(found) is DictBatch and list(found) == ["image", "label"]
        assert found.rows.tolist() == [0, 1, 2, 3] and found["image"].dtype == torch.float32
    paths = [python_pytree.keystr(key) for key, _ in python_pytree.tree_flatten_with_path([batch, dict_batch])[0]]
    assert paths == ["[0][0]", "[0][1]", "[1]['image']", "[1]['label']"]


def test_a_batch_pickles_as_a_plain_tuple_and_copies_as_itself(batch, dict_batch):
    for one, plain in ((batch, tuple), (dict_batch, dict)):
        loaded = pickle.loads(pickle.dumps(one))
        assert type(loaded) is plain and len(loaded) == 2
        file = io.BytesIO()
        torch.save(one, file)
        file.seek(0)
        assert type(torch.load(file, weights_only=True)) is plain
        for made in (copy.copy(one), copy.deepcopy(one)):
            assert type(made) is type(one) and torch.equal(made.rows, one.rows)
    images, labels = pickle.loads(pickle.dumps(batch))
    assert torch.equal(images, batch[0]) and torch.equal(labels, batch[1])
    assert copy.deepcopy(batch)[0].data_ptr() != batch[0].data_ptr()


def test_helpers_of_torch_and_accelerate_take_a_batch(batch):
    assert [one.dtype for one in default_convert(batch)] == [torch.uint8, torch.int64]
    accelerate = pytest.importorskip("accelerate", reason="it is in the dependency group dev")
    moved = accelerate.utils.send_to_device(batch, torch.device("cpu"))
    assert isinstance(moved, tuple) and torch.equal(moved[0], batch[0])


def test_a_compiled_step_takes_a_batch_in_one_graph(batch):
    @torch.compile(backend="eager", fullgraph=True)
    def step(batch):
        images, labels = batch
        return images.float().mean() + labels.sum()

    expected = batch[0].float().mean() + batch[1].sum()
    torch.testing.assert_close(step(batch), expected)


def test_transforms_of_torchvision_see_its_fields(batch, torchvision_datasets):
    from torchvision.transforms import v2

    flipped = v2.RandomHorizontalFlip(p=1)(batch)
    assert torch.equal(flipped[0], batch[0].flip(-1)) and torch.equal(flipped.rows, batch.rows)
    mixed, labels = v2.CutMix(num_classes=3)(batch)
    assert mixed.shape == batch[0].shape and labels.shape == (6, 3)


def test_names_are_what_the_file_calls_its_samples(path, batch, dict_batch):
    assert batch.names == tuple(f"cat/{i}.jpg" for i in range(6))
    assert dict_batch.names == tuple(f"Dicts[{i}]" for i in range(4))
    with closing(FastLoader(PackedDataset(path).select([7, 7, 3]), 3, shuffle=False, workers=1)) as loader:
        [chosen] = loader
    assert chosen.names == ("cat/7.jpg", "cat/7.jpg", "cat/3.jpg"), "also when the loader is closed"


def test_a_batch_says_what_it_holds_in_two_lines(batch, dict_batch):
    assert repr(batch) == "Batch of 6 samples:\n  uint8 (6, 3, 8, 8), int64 (6,)"
    assert repr(dict_batch) == "DictBatch of 4 samples:\n  'image': uint8 (4, 3, 4, 4), 'label': int64 (4,)"
