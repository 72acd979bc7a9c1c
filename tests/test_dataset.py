"""PackedDataset: what an item is, and that it may be read from anywhere."""

from __future__ import annotations

import copy
import os
import pickle
import queue
import re
from concurrent.futures import ThreadPoolExecutor

import h5py
import numpy as np
import pytest
import torch
from small_files import write_foreign
from torch.utils._pytree import tree_map
from torch.utils.data import BatchSampler, DataLoader, default_collate
from torch.utils.data._utils.collate import collate
from torch.utils.data._utils.pin_memory import pin_memory

from fastload import FastLoader, inspect_file
from fastload.dataset import PackedDataset
from fastload.errors import DamagedRowError, FileChangedError, FormatError, MissingFileError, OptionError
from fastload.format.ragged import Column
from fastload.read import readahead
from sample_files import write_packed, write_ragged

PACKED = {
    "rows": 30,
    "size": (10, 8, 3),
    "seed": 5,
    "classes": ("cat", "dog"),
    "columns": {"bbox": Column(np.ones((30, 4), np.float32))},
    "masks": True,
    "chunk_rows": 4,
    "splits": {"train": 20, "val": 10},
}


def test_an_item_is_the_tuple_of_images_and_labels_or_of_the_fields_asked_for_or_what_a_transform_makes(packed, pixels):
    dataset = PackedDataset(packed)
    image, label = dataset[7]
    assert isinstance(dataset[7], tuple) and len(dataset) == 30 and dataset.classes == ("cat", "dog")
    assert image.shape == (3, 10, 8) and image.dtype == torch.uint8 and image.stride() == (1, 24, 3)
    assert torch.equal(image, torch.from_numpy(pixels[7]).permute(2, 0, 1)) and label == 1
    assert dataset.classes[label] == "dog"
    with ThreadPoolExecutor(8) as pool:  # threads share a dataset
        for index, (image, _) in zip(range(30), pool.map(dataset.__getitem__, range(30)), strict=True):
            assert torch.equal(image, torch.from_numpy(pixels[index]).permute(2, 0, 1))
    bbox, valid, mask = PackedDataset(packed, fields=["bbox", "valid", "masks"])[4]
    assert bbox.tolist() == [1, 1, 1, 1] and valid.item() is True
    assert torch.equal(mask, torch.from_numpy(pixels[4, ..., 0].copy()))
    dataset = PackedDataset(packed, transform=lambda sample: {"image": sample[0].float(), "label": sample[1]})
    assert dataset[0]["image"].dtype == torch.float32 and dataset.__getitems__([1, 2])[1]["label"] == 0


def test_indices_are_those_of_a_list(packed):
    dataset = PackedDataset(packed, split="val", fields=["row"])
    rows = list(range(20, 30))
    assert [dataset[i][0].item() for i in range(-10, 10)] == rows + rows
    assert [row.item() for (row,) in dataset] == rows
    for bad in (10, -11, 10**9):
        with pytest.raises(IndexError, match=str(bad)):
            dataset[bad]
    with pytest.raises(IndexError):
        dataset.__getitems__([0, 10])


def test_select_is_a_subset_in_its_own_order(packed):
    dataset = PackedDataset(packed, split="val", fields=["row"]).select([9, -10, 3, 3])
    assert [row.item() for (row,) in dataset] == [29, 20, 23, 23]
    assert [row.item() for (row,) in dataset.select(np.array([-1, 0]))] == [23, 29]
    assert len(dataset.select([])) == 0
    for bad in ([4], [[0]], [0.5]):
        with pytest.raises((IndexError, OptionError)):
            dataset.select(bad)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "test"}, "no split 'test'; it has 'train', 'val'. Leave split out for all rows"),
        ({"split": "valid"}, "it has 'train', 'val'. Did you mean 'val'?"),
        ({"split": "validation"}, "Did you mean 'val'?"),
        ({"split": "Training"}, "Did you mean 'train'?"),
        ({"split": ["train"]}, "no split ['train']"),
        ({"fields": ["image"]}, "'image' is not in the file; choose from images, masks, labels, bbox"),
        ({"fields": "images"}, "in a list"),
        ({"fields": []}, "one or more"),
        ({"fields": ["row", "row"]}, "each once"),
    ],
)
def test_unknown_splits_and_fields_are_refused_with_the_accepted(packed, options, message):
    with pytest.raises(OptionError, match=re.escape(message)):
        PackedDataset(packed, **options)


def test_a_file_without_splits_says_how_some_of_it_is_held_out(tmp_path, pixels):
    path = write_packed(tmp_path / "a.h5", pixels)
    with pytest.raises(
        OptionError, match=r"it has 'all'. Leave split out for all rows; `(.*)` holds some of"
    ) as raised:
        PackedDataset(path, split="train")
    said = re.search(r"`(.*?)`", str(raised.value))[1]
    train, val = eval(said, {"torch": torch, "dataset": PackedDataset(path)})
    assert (len(train), len(val)) == (27, 3)


def test_labels_of_another_program_that_cannot_be_handed_over_are_refused_and_not_left_out(tmp_path, pixels):
    path = write_foreign(tmp_path / "texts.h5", pixels[:4], chunk_rows=2)
    with h5py.File(path, "a") as file:
        file.create_dataset("labels", (4,), h5py.string_dtype())
        file.create_group("more")
    for fields in (None, ["images", "labels"]):
        with pytest.raises((FormatError, OptionError), match="texts of any length"):
            PackedDataset(path, fields=fields)
    assert len(PackedDataset(path, fields=["images"])) == 4
    assert "Not loaded, being no numbers by image: labels, more." in inspect_file(path).findings
    large = write_foreign(
        tmp_path / "large.h5", pixels[:4], chunk_rows=2, labels=np.array([0, 2**63 - 1, 2**63, 5], np.uint64)
    )
    assert PackedDataset(large)[1][1] == 2**63 - 1
    for read in (lambda: PackedDataset(large)[2], lambda: list(FastLoader(large, 2, shuffle=False))):
        with pytest.raises(FormatError, match="9,223,372,036,854,775,808, more than int64 holds"):
            read()


def test_a_pickle_is_small_and_knows_the_file_it_was_made_from(tmp_path, pixels):
    names = tuple(f"a class with a long name {i}" for i in range(5000))
    path = write_packed(tmp_path / "a.h5", pixels, {"labels": Column(np.zeros(30, np.int64), {"names": names})})
    dataset = PackedDataset(path)
    dataset[3]
    data = pickle.dumps(dataset)
    assert len(data) < 1000 + len(str(path))
    again = pickle.loads(data)
    assert torch.equal(again[3][0], dataset[3][0]) and again.classes == names
    stale = pickle.loads(data)
    write_packed(path, pixels[:5])
    with pytest.raises(FileChangedError, match="changed"):
        stale[0]
    with pytest.raises(FileChangedError, match="changed"):
        dataset[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_of_batches_reads_each_in_one_call(packed, pixels, workers):
    order, asked = [7, 2, -1, 29, 7, 0, 11], ("images", "masks", "labels", "key", "pixel_mask")
    dataset = PackedDataset(packed, fields=asked)
    loader = DataLoader(dataset, batch_size=None, sampler=BatchSampler(order, 3, False), num_workers=workers)
    batches = list(loader)
    assert [len(batch[0]) for batch in batches] == [3, 3, 1]
    images, masks, labels, keys, whole = ([one for batch in batches for one in batch[i]] for i in range(5))
    assert torch.equal(torch.stack(images), torch.from_numpy(pixels[order]).permute(0, 3, 1, 2))
    assert torch.equal(torch.stack(masks), torch.from_numpy(pixels[order][..., 0])) and torch.stack(whole).all()
    assert batches[0][2].dtype == torch.int64 and [int(label) % 2 for label in labels] == [
        row % 30 % 2 for row in order
    ]
    assert keys == [f"{row % 30:08d}" for row in order]
    plain, of_array = dataset[order], dataset[np.array(order)]
    assert isinstance(plain, tuple) and torch.equal(plain[0], torch.stack(images))
    assert torch.equal(of_array[2], plain[2]) and torch.equal(dataset[torch.tensor(order)][1], plain[1])


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_a_dataset_with_a_transform_are_its_samples_collated(packed, workers):
    dataset = PackedDataset(packed, transform=halved)
    loader = DataLoader(dataset, batch_size=None, sampler=BatchSampler(range(30), 8, False), num_workers=workers)
    for first, (images, labels) in zip(range(0, 30, 8), loader, strict=True):
        samples = [dataset[i] for i in range(first, min(30, first + 8))]
        assert torch.equal(images, torch.stack([image for image, _ in samples]))
        assert labels.tolist() == [label.item() for _, label in samples]


def halved(sample):
    return sample[0] // 2, sample[1]


def test_a_list_of_positions_that_makes_no_batch_is_refused(packed, varied):
    with pytest.raises(OptionError, match=r"images and masks differ in size.*RandomResizedCrop\(224\)"):
        PackedDataset(varied[0], fields=["images", "masks"])[[0, 1]]
    assert PackedDataset(varied[0], fields=["labels"])[[3, 1]][0].tolist() == [3, 1]
    dataset = PackedDataset(packed)
    with pytest.raises(OptionError, match=r"numpy.flatnonzero\(mask\)"):
        dataset[np.ones(30, bool)]
    with pytest.raises(IndexError, match="index 30"):
        dataset[[1, 30]]
    with pytest.raises(TypeError, match="not by slice"):
        dataset[2:4]
    assert dataset[[]][0].shape == (0, 3, 10, 8)


def double(sample):
    return tuple(sample), os.getpid()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_worker_processes_of_a_plain_data_loader_read_right_in_every_epoch(packed, pixels, method):
    dataset = PackedDataset(packed, fields=["images", "row"], transform=double)
    dataset[0]
    workers = 2 if method == "fork" else 1  # one where starting it imports torch anew
    options = {"num_workers": workers, "multiprocessing_context": method, "persistent_workers": True}
    loader, pids = DataLoader(dataset, batch_size=5, **options), set()
    for _ in range(2):
        rows = []
        for (images, row), pid in loader:
            assert torch.equal(images, torch.from_numpy(pixels[row]).permute(0, 3, 1, 2))
            pids |= set(pid.tolist())
            rows += row.tolist()
        assert rows == list(range(30))
    assert os.getpid() not in pids and len(pids) == workers
    assert torch.equal(dataset[3][0][0], torch.from_numpy(pixels[3]).permute(2, 0, 1))


@pytest.fixture(scope="module")
def varied(tmp_path_factory):
    """A file of images of several sizes with masks, and its pixels."""
    rng = np.random.default_rng(6)
    images = [rng.integers(0, 256, (5 + i % 4, 9 - i % 3, 3), dtype=np.uint8) for i in range(12)]
    labels = {"labels": Column(np.arange(12, dtype=np.int64))}
    path = tmp_path_factory.mktemp("varied") / "v.h5"
    return write_ragged(path, images, labels, masks=[image[..., 0] for image in images], chunk_bytes=400), images


def corner(sample):
    return (sample[0][:, :5, :7].float(), *sample[1:])


@pytest.mark.parametrize("read", ["map", "pread"])
def test_each_sample_has_its_own_size_where_they_vary(varied, read):
    path, images = varied
    dataset = PackedDataset(path, fields=["images", "masks", "labels", "row"]).reading(read)
    for i in (7, 0, -1):
        image, mask, label, row = dataset[i]
        assert torch.equal(image, torch.from_numpy(images[i]).permute(2, 0, 1))
        assert torch.equal(mask, torch.from_numpy(images[i][..., 0].copy())) and label == row == i % 12
    several = dataset.__getitems__([3, 3, 4])
    assert [tuple(sample[0].shape[1:]) for sample in several] == [images[i].shape[:2] for i in (3, 3, 4)]
    several[0][0].zero_()
    assert several[1][0].any() and dataset[3][0].any(), "each is memory of its own"
    assert pickle.loads(pickle.dumps(dataset))[5][0].shape == dataset[5][0].shape


def test_a_transform_that_makes_one_size_lets_a_plain_data_loader_batch_what_varies(varied):
    path, images = varied
    dataset = PackedDataset(path, transform=corner).select([11, 2, 5, 3])
    loader = DataLoader(dataset, batch_size=2, num_workers=1)
    batches = list(loader)
    assert torch.cat([labels for _, labels in batches]).tolist() == [11, 2, 5, 3]
    expected = torch.from_numpy(np.stack([images[i][:5, :7] for i in (11, 2, 5, 3)])).permute(0, 3, 1, 2)
    assert torch.equal(torch.cat([batch for batch, _ in batches]), expected.float())


def narrowed(sample):
    return {"image": sample[0][:, ::2], "label": sample[1]}


UNEVEN = (
    r"v\.h5: the samples of a batch differ: images \(3, 5, 9\) and \(3, 6, 8\)\. .*--size 256.*RandomResizedCrop\(224\)"
)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_loader_over_what_varies_says_what_brings_images_to_one_size(varied, workers):
    path, images = varied
    dataset = PackedDataset(path)
    for given, message in (
        (dataset, UNEVEN),
        (torch.utils.data.Subset(dataset, range(4)), UNEVEN),
        (PackedDataset(path, fields=["labels", "masks"]), r"differ: masks \(5, 9\) and \(6, 8\)\. .*--size"),
        (PackedDataset(path, transform=narrowed), r"differ: image \(3, 3, 9\) and \(3, 3, 8\)\. .*RandomResizedCrop"),
    ):
        with pytest.raises(OptionError, match=message):
            list(DataLoader(given, batch_size=4, num_workers=workers))
    # A collate_fn of the user's gets what it always got, and so does a batch that happens to be of one size.
    for batch in DataLoader(dataset, batch_size=4, num_workers=workers, collate_fn=list):
        assert all(isinstance(sample, tuple) for sample in batch)
        assert [tuple(image.shape[1:]) for image, _ in batch] == [images[label].shape[:2] for _, label in batch]
    (alike,) = DataLoader(dataset.select([1, 1]), batch_size=2, num_workers=workers)
    assert alike[0].shape == (2, 3, *images[1].shape[:2])


def fewer(sample):
    return [sample[0][:, :5, :7], sample[1].reshape(1).repeat(int(sample[1]) + 1)]


def test_other_parts_that_differ_in_shape_are_named_and_what_is_alike_is_collated(varied, packed):
    with pytest.raises(OptionError, match=r"differ: part 1 \(1,\) and \(2,\)\. Give the DataLoader a collate_fn"):
        list(DataLoader(PackedDataset(varied[0], transform=fewer), batch_size=4))
    with pytest.raises(OptionError, match=r"differ: image \(3, 3, 9\)"):
        dataset = PackedDataset(varied[0], transform=narrowed)
        dataset[[0, 1]]
    samples = PackedDataset(varied[0]).__getitems__([0, 1])
    again = pickle.loads(pickle.dumps(samples))
    assert type(again) is type(samples[:1]) is type(copy.copy(samples)) is list
    assert {type(sample) for sample in samples} == {tuple} and again[1][0].shape == samples[1][0].shape
    assert type(PackedDataset(packed).__getitems__([0, 1])) is list


def crops(given):
    """Crops the images of samples or of a batch, which are found as torchvision's v2 finds them."""
    return tree_map(lambda part: part[:, :5, :5] if part.ndim == 3 else part, given)


def cropped_each(samples):
    return default_collate([crops(sample) for sample in samples])


def cropped_in_place(samples):
    for number, sample in enumerate(samples):
        samples[number] = crops(sample)
    return default_collate(samples)


def cropped_together(samples):
    return default_collate(crops(samples))


def without_images(samples):
    for sample in samples:
        del sample["image"]
    return default_collate(samples)


def only_labels(samples):
    samples[:] = [sample[1:] for sample in samples]
    return default_collate(samples)


def as_a_list(values, *, collate_fn_map=None):
    return list(values)


def kept_apart(samples):
    return collate(samples, collate_fn_map={torch.Tensor: as_a_list})


def by_torch(samples):
    return default_collate(samples)


@pytest.mark.parametrize("method", ["", "fork", "spawn"])
def test_what_a_collate_fn_makes_of_samples_that_differ_is_its_own_affair(varied, method):
    path, images = varied
    dataset = PackedDataset(path)
    options = {"num_workers": 1, "multiprocessing_context": method} if method else {}

    def batch_of(collate_fn, source=dataset):
        (batch,) = DataLoader(torch.utils.data.Subset(source, range(3)), 3, collate_fn=collate_fn, **options)
        return batch

    expected = torch.stack([crops(torch.from_numpy(images[i]).permute(2, 0, 1)) for i in range(3)])
    if method == "spawn":  # the same by a dataset that was pickled; each worker imports torch
        assert torch.equal(batch_of(cropped_in_place)[0], expected)
        with pytest.raises(OptionError, match=UNEVEN):
            batch_of(by_torch)
        return
    samples = batch_of(list)
    assert {type(sample) for sample in samples} == {tuple} and len({image.shape for image, _ in samples}) == 3
    for collate_fn in (cropped_each, cropped_in_place, cropped_together):
        assert torch.equal(batch_of(collate_fn)[0], expected), collate_fn
    assert torch.equal(batch_of(only_labels)[0], torch.arange(3))
    assert torch.equal(batch_of(without_images, PackedDataset(path, transform=narrowed))["label"], torch.arange(3))
    assert [image.shape for image in batch_of(kept_apart)[0]] == [image.shape for image, _ in samples]
    with pytest.raises(OptionError, match=UNEVEN):
        batch_of(by_torch)


def test_samples_that_differ_in_size_are_pinned_as_ever(varied, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor, *device: tensor.clone())  # it takes a GPU
    samples = PackedDataset(varied[0]).__getitems__([0, 1])
    pinned = pin_memory(samples)
    assert type(pinned) is list and torch.equal(pinned[1][0], samples[1][0])


def test_rows_of_a_store_are_announced(varied, monkeypatch):
    monkeypatch.setattr(readahead, "_SMALL_FIELD_BYTES", 0)  # of a field as small nothing is announced row by row
    monkeypatch.setattr(readahead.syscalls, "is_resident", lambda fd, offset: False)
    dataset, announced = PackedDataset(varied[0], fields=["images"]), queue.SimpleQueue()
    monkeypatch.setattr(readahead, "KernelAdvice", lambda *_: announced.put)
    ahead = dataset.read_ahead()
    ahead.announce(np.array([3, 1]))
    ((begin, length),) = announced.get(timeout=60).tolist()
    assert begin <= dataset.file.fields["images"].ragged.base < begin + length
    ahead.close()


def test_a_dataset_says_what_it_holds_and_the_form_of_its_samples(packed, varied, tmp_path):
    whole = repr(PackedDataset(packed))
    assert whole == f"PackedDataset({packed.name}, 30 rows)\n  images uint8 (3, 10, 8), labels int64"
    part = PackedDataset(packed, "val", ["masks", "bbox", "row"], transform=double).select([3])
    assert repr(part) == (
        f"PackedDataset({packed.name}, split val, some of its rows, 1 row)\n"
        "  masks uint8 (10, 8), bbox float32 (4), row, transform double"
    )
    of_sizes = PackedDataset(varied[0], fields=["images", "masks"])
    assert repr(of_sizes) == "PackedDataset(v.h5, 12 rows)\n  images uint8 (3, H, W), masks uint8 (H, W)"
    assert repr(pickle.loads(pickle.dumps(of_sizes))).endswith("\n  images, masks"), "the file is not opened for it"
    foreign = PackedDataset(write_foreign(tmp_path / "<b>.h5", np.zeros((5, 6, 7), np.uint8), chunk_rows=5))
    assert repr(foreign).endswith("\n  images uint8 (1, 6, 7)")
    assert foreign._repr_html_().startswith("<table>") and "&lt;b&gt;.h5" in foreign._repr_html_()


@pytest.mark.filterwarnings("ignore:.*touched or copied anew")
def test_rows_are_compared_again_once_a_file_was_touched(tmp_path, pixels):
    path = write_packed(tmp_path / "a.h5", pixels)
    dataset = PackedDataset(path, fields=["images"])
    pickled = pickle.dumps(dataset)
    assert len(list(dataset)) == 30
    os.utime(path, ns=(1, 1))
    assert len(list(dataset)) == 30 and len(pickle.loads(pickled)) == 30
    with open(path, "r+b") as file:
        file.seek(4096 + 7 * pixels[0].nbytes)
        file.write(bytes(255 - pixels[7].ravel()[:9]))
    assert len(dataset[6]) == 1
    with pytest.raises(DamagedRowError, match="row 7"):
        dataset[7]


def test_a_relative_path_is_that_of_the_folder_in_which_the_dataset_was_made(tmp_path, pixels, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "other").mkdir()
    path = write_packed(tmp_path / "data" / "a.h5", pixels)
    monkeypatch.chdir(tmp_path)
    dataset = PackedDataset("data/a.h5", fields=["images"])
    loader = FastLoader("data/a.h5", 10, shuffle=False)
    monkeypatch.chdir(tmp_path / "other")
    assert torch.equal(dataset[3][0], torch.from_numpy(pixels[3]).permute(2, 0, 1)) and len(list(loader)) == 3
    again = pickle.loads(pickle.dumps(dataset))
    assert len(list(again)) == 30 and repr(again) == repr(dataset)
    with pytest.raises(IndexError, match=r"^data/a\.h5: index 30"):
        again[30]
    path.unlink()
    with pytest.raises(MissingFileError, match=r"^data/a\.h5: the file is gone"):
        dataset.check_unchanged()


def test_a_mask_of_rows_is_refused_with_the_call_that_makes_positions_of_it(packed):
    dataset = PackedDataset(packed, fields=["row"])
    with pytest.raises(OptionError, match=r"select\(\).*numpy.flatnonzero\(mask\)"):
        dataset.select(np.arange(30) > 20)
