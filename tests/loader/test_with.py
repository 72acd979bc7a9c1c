"""Changing a loader under way: arguments and transforms are fixed, and `with_` goes on with others."""

from __future__ import annotations

import copy
import inspect
import pickle
from contextlib import closing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_files import write_random
from torch.utils.data import Subset

from fastload import FastLoader, PackedDataset
from fastload.errors import OptionError
from fastload.transforms import MixUp, Normalize, RandomHorizontalFlip, RandomResizedCrop, Resize
from fastload.transforms.spec import BaseTransform

ROWS = 40
FIELDS = ("images", "labels", "row")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_random(tmp_path_factory.mktemp("with") / "a.h5", rows=ROWS, size=(16, 16, 3), classes="abc")


def rows_of(batches):
    return [row for batch in batches for row in batch.rows.tolist()]


@pytest.mark.parametrize("name", [*inspect.signature(FastLoader).parameters])
def test_no_argument_can_be_set_on_a_loader(path, name):
    with closing(FastLoader(path, 8, workers=1)) as loader:
        before = getattr(loader, name)
        with pytest.raises(OptionError, match=rf"loader.{name} cannot be set.*loader.with_\({name}=\.\.\.\)"):
            setattr(loader, name, 3)
        assert getattr(loader, name) is before
        loader.note = "of the user's own"
        assert loader.note == "of the user's own"
        with pytest.raises(AttributeError, match="no attribute 'sampler'"):
            _ = loader.sampler


@pytest.mark.parametrize("name", ["num_workers", "drop_last", "collate_fn", "transforms", "batchsize"])
def test_what_is_meant_as_an_argument_cannot_be_set(path, name):
    with closing(FastLoader(path, 8, workers=1)) as loader, pytest.raises(OptionError, match=rf"no argument {name}="):
        setattr(loader, name, 3)


def test_the_transforms_of_a_loader_are_no_list_to_append_to(path):
    with closing(FastLoader(path, 8, workers=1, transform=[RandomHorizontalFlip(1.0)])) as loader:
        assert isinstance(loader.transform, tuple) and len(loader.transform) == 1


@pytest.mark.parametrize("name", ["path", "split", "transform", "fields", "decode", "check", "read", "on_damage"])
def test_what_a_dataset_was_made_with_cannot_be_set(path, name):
    dataset, whole = PackedDataset(path), PackedDataset(path)
    dataset.transform = whole.transform = None  # nobody has read it yet
    for source in (dataset, Subset(whole, range(20))):
        with closing(FastLoader(source, 8, workers=1)) as loader:
            for one in (dataset if source is dataset else whole, loader.dataset):
                with pytest.raises(OptionError, match=rf"{name} cannot be set: .*PackedDataset\(\.\.\., {name}="):
                    setattr(one, name, None)
    with pytest.raises(OptionError, match=r"split cannot be set: what is read follows it"):
        PackedDataset(path).split = "val"


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ({}, 6),
        ({"seed": 3, "ends": "drop"}, 6),
        ({"shuffle": "auto", "batch": "stack"}, 6),
        ({"share": "auto"}, 6),
        ({"seed": 4}, 10),
        ({"shuffle": "full"}, 10),
        ({"share": "elastic"}, 10),
    ],
)
def test_an_epoch_begins_anew_only_where_the_order_is_another(path, changes, left, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with closing(FastLoader(path, 4, seed=3, workers=1)) as loader:
        batches = iter(loader)
        seen = [row for _ in range(4) for row in next(batches).rows.tolist()]
        with closing(loader.with_(**changes)) as rest:
            assert len(rest) == left and rest.epoch == 0
            rows = rows_of(rest)
            assert len(set(rows) | set(seen)) == ROWS and (left == 10 or not set(rows) & set(seen))


@pytest.mark.parametrize("changes", [{"seed": 4}, {"shuffle": "full"}, {"share": "elastic"}, {"batch_size": 2}])
@pytest.mark.parametrize("epoch", [0, 2])
def test_a_loader_that_was_never_iterated_may_be_changed(path, changes, epoch, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with closing(FastLoader(path, 4, workers=1)) as loader:
        loader.set_epoch(epoch)
        with closing(loader.with_(**changes)) as other:
            assert other.epoch == epoch and sorted(rows_of(other)) == list(range(ROWS))
            with closing(other.with_(seed=7)) as third:
                assert third.epoch == epoch + 1


@pytest.mark.parametrize(
    ("transform", "name"),
    [
        (RandomHorizontalFlip(), "p"),
        (RandomResizedCrop(8), "size"),
        (MixUp(num_classes=3), "alpha"),
        (Normalize((0.5,), (0.5,)), "mean"),
    ],
)
def test_no_option_can_be_set_on_a_transform(transform, name):
    shown = repr(transform)
    with pytest.raises(OptionError, match=rf"{type(transform).__name__}.{name} cannot be set.*loader.with_\(transform"):
        setattr(transform, name, 0.5)
    with pytest.raises(OptionError, match=rf"{type(transform).__name__}.{name} cannot be deleted"):
        delattr(transform, name)
    assert repr(transform) == shown


class Often(RandomHorizontalFlip):
    def __init__(self):
        super().__init__(p=0.1)
        self.p = 0.9


class OftenAndNoted(Often):
    def __init__(self, note):
        super().__init__()
        self.note, self.p = note, self.p / 2


class Unchanged(Often):
    pass


class WithoutInit(BaseTransform):
    geometric = False

    def apply(self, images, draws):
        return images


@pytest.mark.parametrize(("make", "p"), [(Often, 0.9), (lambda: OftenAndNoted("n"), 0.45), (Unchanged, 0.9)])
def test_a_derived_transform_sets_options_while_it_is_made_and_not_later(make, p):
    transform = make()
    for made in (transform, copy.deepcopy(transform), pickle.loads(pickle.dumps(transform))):
        assert made.p == p
        with pytest.raises(OptionError, match=f"{type(made).__name__}.p cannot be set"):
            made.p = 0.3
        with pytest.raises(OptionError, match=f"{type(made).__name__}.p cannot be deleted"):
            del made.p


def test_attributes_of_the_user_s_own_are_set_once_on_a_transform():
    transform = WithoutInit()
    transform.note = "mine"
    with pytest.raises(OptionError, match=r"WithoutInit.note cannot be set"):
        transform.note = "other"
    with pytest.raises(AttributeError):
        del RandomHorizontalFlip()._nothing


@settings(deadline=None, max_examples=25)
@given(steps=st.integers(0, 5), batch_size=st.integers(1, 20), ranks=st.integers(1, 3))
def test_the_rest_of_an_epoch_comes_with_other_batches_and_the_draws_of_that_epoch(path, steps, batch_size, ranks):
    options = {"shuffle": "full", "seed": 3, "ends": "exact", "workers": 1, "transform": [RandomResizedCrop(8)]}
    dataset, seen = PackedDataset(path, fields=FIELDS), {}
    with closing(FastLoader(dataset, 4, **options)) as whole:
        whole.set_epoch(2)
        expected = {int(row): image for images, _, rows in whole for image, row in zip(images, rows, strict=True)}
    for rank in range(ranks):
        with closing(FastLoader(dataset, 4, share=(rank, ranks), **options)) as loader:
            loader.set_epoch(2)
            batches = iter(loader)
            given = [next(batches) for _ in range(min(steps, len(loader)))]
            with closing(loader.with_(batch_size=batch_size)) as rest:
                assert rest.batch_size == batch_size and loader.batch_size == 4
                given += [] if len(given) == len(loader) else list(rest)
        for batch in given:
            for image, row, valid in zip(batch[0], batch.rows.tolist(), batch.valid.tolist(), strict=True):
                if valid:
                    assert row not in seen and torch.equal(image, expected[row])
                    seen[row] = image
    assert sorted(seen) == list(range(ROWS))


def test_sizes_grow_from_epoch_to_epoch_in_the_order_of_one_loader(path):
    options = {"shuffle": "chunk", "seed": 5, "workers": 1}
    with closing(FastLoader(path, 8, **options)) as plain:
        expected = [rows_of(plain) for _ in range(4)]
    loader, found = FastLoader(path, 8, transform=[Resize(4)], **options), []
    for size in (4, 8, 12, 16):
        if size > 4:
            loader = loader.with_(transform=[Resize(size)], echo=1)
        batches = list(loader)
        assert {batch[0].shape[-1] for batch in batches} == {size}
        found.append(rows_of(batches))
    loader.close()
    assert found == expected


def test_another_order_begins_the_epoch_anew(path):
    with closing(FastLoader(path, 8, shuffle="full", seed=1, workers=1)) as loader:
        loader.set_epoch(4)
        next(iter(loader))
        with closing(loader.with_(seed=2)) as other, closing(loader.with_(shuffle=False)) as in_order:
            assert other.epoch == 4 and sorted(rows_of(other)) == list(range(ROWS))
            assert rows_of(in_order) == list(range(ROWS))


def test_a_loader_goes_on_beside_the_one_made_of_it(path):
    with closing(FastLoader(path, 8, shuffle="full", workers=1)) as loader:
        batches = iter(loader)
        first = next(batches)
        with closing(loader.with_(batch_size=16)) as other:
            assert rows_of([first, *batches]) == rows_of([first, *other])
        assert other.dataset is loader.dataset, "the same open file"


def test_an_argument_that_there_is_not_is_an_error(path):
    with closing(FastLoader(path, 8, workers=1)) as loader:
        with pytest.raises(OptionError, match="batch_size"):
            loader.with_(batchsize=3)
        with pytest.raises(OptionError, match="batch_size"):
            loader.with_(batch_size=0)
