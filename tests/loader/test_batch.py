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
from torch.utils.data import StackDataset, default_convert

from fastload import FastLoader, PackedDataset
from fastload.format.ragged import Column
from fastload.loader.batch import Batch, DictBatch
from sample_files import write_ragged


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


@pytest.fixture(scope="module")
def varied(tmp_path_factory):
    images = [np.full((4 + i, 9 - i, 3), i, np.uint8) for i in range(4)]
    return write_ragged(tmp_path_factory.mktemp("varied") / "v.h5", images, {"labels": Column(np.arange(4))})


@pytest.mark.parametrize("form", ["pad", "list"])
def test_sizes_and_pixel_mask_are_dropped_where_a_field_gets_another_shape(varied, form):
    with closing(FastLoader(varied, 4, shuffle=False, workers=1, batch=form)) as loader:
        [batch] = loader
    for pytree in registries():
        kept = pytree.tree_map(lambda tensor: tensor.double(), batch)
        assert torch.equal(kept.sizes, batch.sizes) and kept.rows.tolist() == list(range(4))
        assert form == "list" or torch.equal(kept.pixel_mask, batch.pixel_mask)
        smaller = pytree.tree_map(lambda tensor: tensor[..., ::2] if tensor.ndim > 1 else tensor, batch)
        assert smaller.rows.tolist() == list(range(4)), "other facts stay"
        for name in ("sizes", "pixel_mask"):
            with pytest.raises(AttributeError, match="until the fields get another shape"):
                getattr(smaller, name)


def test_a_batch_lists_its_attributes_for_completion(batch, dict_batch, varied):
    with closing(FastLoader(varied, 4, shuffle=False, workers=1, batch="pad")) as loader:
        [padded] = loader
    facts = {"rows", "valid", "global_valid", "names"}
    assert facts <= set(dir(batch)) and facts <= set(dir(dict_batch)) and "sizes" not in dir(batch)
    assert facts | {"sizes", "pixel_mask"} <= set(dir(padded))
    for one in (batch, dict_batch, padded):
        assert all(hasattr(one, name) for name in facts)
    assert not facts & set(dir(Batch([torch.zeros(2)])))


def test_the_tree_of_a_batch_is_saved_as_text(batch, dict_batch):
    for one in (batch, dict_batch, {"both": [batch, dict_batch]}):
        leaves, spec = python_pytree.tree_flatten(one)
        loaded = python_pytree.treespec_loads(python_pytree.treespec_dumps(spec))
        assert loaded == spec
        again = python_pytree.tree_unflatten(leaves, loaded)
        assert type(again) is type(one) and python_pytree.tree_flatten(again)[1] == spec
    numbered = DictBatch({0: torch.zeros(2), "b": torch.ones(2)})
    leaves, spec = python_pytree.tree_flatten(numbered)
    loaded = python_pytree.treespec_loads(python_pytree.treespec_dumps(spec))
    assert list(python_pytree.tree_unflatten(leaves, loaded)) == [0, "b"]


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
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
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


def test_masks_of_a_batch_follow_v2_as_tv_tensors_and_as_plain_tensors_do_not(path, torchvision_datasets):
    from torchvision import tv_tensors
    from torchvision.transforms import v2

    with closing(FastLoader(PackedDataset(path, fields=("images", "masks")), 4, shuffle=False, workers=1)) as loader:
        batch = next(iter(loader))
    flip = v2.RandomHorizontalFlip(p=1)
    images, masks = batch
    assert torch.equal(flip(batch)[0], images.flip(-1)) and torch.equal(flip(batch)[1], masks)
    moved = flip(tv_tensors.Image(images), tv_tensors.Mask(masks))  # as the docs say
    assert torch.equal(moved[0], images.flip(-1)) and torch.equal(moved[1], masks.flip(-1))


def test_names_are_what_the_file_calls_its_samples(path, batch, dict_batch):
    assert batch.names == tuple(f"cat/{i}.jpg" for i in range(6))
    assert dict_batch.names == tuple(f"Dicts[{i}]" for i in range(4))
    with closing(FastLoader(PackedDataset(path).select([7, 7, 3]), 3, shuffle=False, workers=1)) as loader:
        [chosen] = loader
    assert chosen.names == ("cat/7.jpg", "cat/7.jpg", "cat/3.jpg"), "also when the loader is closed"


def test_a_batch_says_what_it_holds_in_two_lines(batch, dict_batch):
    assert repr(batch) == "Batch of 6 samples:\n  uint8 (6, 3, 8, 8), int64 (6,)"
    assert repr(dict_batch) == "DictBatch of 4 samples:\n  'image': uint8 (4, 3, 4, 4), 'label': int64 (4,)"


def test_lists_and_dicts_within_a_batch_are_shown(path, varied):
    nested = StackDataset(PackedDataset(path), StackDataset(all=PackedDataset(path, fields=("labels",))))
    with pytest.warns(UserWarning, match="holds a PackedDataset"):
        loader = FastLoader(nested, 4, shuffle=False, workers=1)
    with closing(loader):
        text = repr(next(iter(loader)))
    assert text == "Batch of 4 samples:\n  [uint8 (4, 3, 8, 8), int64 (4,)], {'all': [int64 (4,)]}"
    with closing(FastLoader(varied, 4, shuffle=False, workers=1, batch="list")) as loader:
        text = repr(next(iter(loader)))
    assert text.endswith("\n  [uint8 (3, 4, 9), uint8 (3, 5, 8), uint8 (3, 6, 7), ... 4 in all], int64 (4,)")
    assert repr(Batch([["a", "b", "c", "d"]])) == "Batch:\n  [4 of str]"
