"""What a dataset says of its folder and its transforms."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from fastload.profiling.doctor.injected.dataset_facts import drops_last, facts_of, sampler_of


class Compose:
    def __init__(self, *transforms):
        self.transforms = list(transforms)

    def __call__(self, image):
        return image


class BatchSampler:
    def __init__(self, sampler, drop_last):
        self.sampler, self.drop_last = sampler, drop_last


class _InfiniteConstantSampler:
    pass


class RandomResizedCrop:
    def __init__(self, size, scale=(0.08, 1.0)):
        self.size, self.scale = size, scale


class Normalize:
    mean, std = [0.5, 0.5, 0.5], [0.25, 0.25, 0.25]


class ColorJitter:
    def __init__(self, **ranges):
        vars(self).update(ranges)


class ToTensor:
    pass


@pytest.fixture
def photos(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("cat/1.jpg", "dog/2.jpg", "dog/3.jpg"):
        os.makedirs(os.path.dirname(f"data/train/{name}"), exist_ok=True)
        open(f"data/train/{name}", "w").close()
    os.mkdir("logs")
    return sorted((tmp_path / "data" / "train").rglob("*.jpg"))


def test_the_folder_is_the_one_named_so_or_any_or_that_of_the_files(photos, monkeypatch):
    folder = SimpleNamespace(log_dir="logs", root="data/train", split="train")
    assert facts_of(folder)["root"] == "data/train"
    assert facts_of(SimpleNamespace(split="train", where="data/train"))["root"] == "data/train"
    parent = str(photos[0].parent.parent)
    assert facts_of(SimpleNamespace(files=photos))["root"] == parent
    assert facts_of(SimpleNamespace(samples=[(str(path), 0) for path in photos]))["root"] == parent
    assert facts_of(SimpleNamespace(dataset=SimpleNamespace(dataset=folder)))["root"] == "data/train", "of a Subset"
    beside = SimpleNamespace(images_dir="data/train/cat", mask_dir="data/train/dog", scale=0.5)
    assert facts_of(beside)["root"] == "data/train", "of images and masks"
    assert facts_of(SimpleNamespace(image_dir="data/train/cat/", mask_dir="data/train/dog"))["root"] == "data/train"
    monkeypatch.setenv("HOME", os.path.abspath("data"))
    os.mkdir("data/masks")
    assert facts_of(SimpleNamespace(mask_dir="data/masks", image_dir="data/train"))["root"] == "data/train", "not home"
    monkeypatch.setattr("tempfile.tempdir", os.path.abspath("logs"))
    assert facts_of(SimpleNamespace(_lock_root="logs", where="data/train"))["root"] == "data/train"
    assert facts_of(SimpleNamespace(_lock_root=os.path.abspath("logs")))["root"] == ""
    shards = [str(photos[0].parent.parent / name) for name in ("0.tar", "1.tar")]
    for name in shards:
        open(name, "w").close()
    stages = [SimpleNamespace(urls=shards), SimpleNamespace(args=())]
    assert facts_of(SimpleNamespace(pipeline=stages))["root"] == parent, "of a WebDataset"
    assert facts_of(SimpleNamespace(pipeline=[SimpleNamespace(urls=["pipe:cat 0.tar"])]))["root"] == ""
    for index, root in (('{"shards": []}', ""), ('{"chunks": []}', ""), ('{"cat": 0}', "data/train")):
        with open("data/train/index.json", "w") as file:
            file.write(index)
        assert facts_of(SimpleNamespace(local="data/train"))["root"] == root, index
    for nothing in (SimpleNamespace(root="absent", names=["a", "b"], table=[1, 2]), [1, 2], object(), None):
        assert facts_of(nothing)["root"] == ""


@pytest.mark.parametrize(
    ("jitter", "written"),
    [
        (ColorJitter(brightness=(0.6, 1.4), contrast=(0.6, 1.4), saturation=None, hue=None), "0.4, 0.4, 0, 0"),
        (ColorJitter(brightness=None, contrast=None, saturation=None, hue=(-0.1, 0.1)), "0, 0, 0, 0.1"),
        (ColorJitter(brightness=0.2, contrast=0.3, saturation=0.1, hue=0.0), "0.2, 0.3, 0.1, 0"),
        (
            ColorJitter(brightness=(0.5, 0.8), contrast=(0.9, 1.4), saturation=0, hue=None),
            "(0.5, 0.8), (0.9, 1.4), 0, 0",
        ),
        (ColorJitter(brightness=object(), contrast=0.1, saturation=0.1, hue=0.1), ""),
    ],
)
def test_a_jitter_is_written_with_its_strengths(jitter, written):
    assert facts_of(SimpleNamespace(transform=jitter))["transforms"] == [f"ColorJitter({written})"]


@pytest.mark.parametrize(
    ("held", "split"),
    [
        ({"train": True}, "train"),
        ({"train": False}, "test"),
        ({"image_set": "val"}, "val"),
        ({"split": 0.8}, ""),
        ({"split": "val", "root": "data"}, "val"),
        ({"split": "val", "root": "data/val"}, ""),  # packed, this folder has no such split
    ],
)
def test_the_part_of_its_files_that_a_dataset_takes(tmp_path, monkeypatch, held, split):
    (tmp_path / "data" / "val").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert facts_of(SimpleNamespace(**held))["split"] == split


def test_transforms_are_written_as_they_would_be_typed():
    crop, both = RandomResizedCrop((224, 224)), RandomResizedCrop([200, 100])
    dataset = SimpleNamespace(transform=Compose(crop, Compose(both, ToTensor()), Normalize()))
    assert facts_of(dataset)["own_transforms"] == ["RandomResizedCrop", "RandomResizedCrop", "ToTensor", "Normalize"]
    assert facts_of(dataset)["transforms"] == [
        "RandomResizedCrop(224)",
        "RandomResizedCrop((200, 100))",
        "ToTensor()",
        "Normalize([0.5, 0.5, 0.5], [0.25, 0.25, 0.25])",
    ]
    assert facts_of(SimpleNamespace(transform=RandomResizedCrop(64)))["transforms"] == ["RandomResizedCrop(64)"]
    larger = RandomResizedCrop(64, [0.5, 1.0])
    assert facts_of(SimpleNamespace(transform=larger))["transforms"] == ["RandomResizedCrop(64, scale=(0.5, 1))"]
    assert facts_of(SimpleNamespace(transform=None))["transforms"] == []


BLUR = Compose(RandomResizedCrop(32), ToTensor())


class Blurred:
    """A dataset whose transforms stand in its module."""

    def __getitem__(self, index):
        return BLUR(index)


def test_transforms_are_found_wherever_the_dataset_has_them():
    names = ["RandomResizedCrop(32)", "ToTensor()"]
    assert facts_of(SimpleNamespace(root="absent", augment=BLUR))["transforms"] == names
    assert facts_of(Blurred())["transforms"] == names
    assert facts_of(SimpleNamespace(transforms_seen=3, steps=[BLUR]))["transforms"] == []


def test_a_subset_is_a_part_and_a_dataset_around_another_one_is_none():
    whole = SimpleNamespace(root="data")
    for loaded, is_part in ((whole, False), (SimpleNamespace(dataset=whole), False), (Part(whole), True)):
        assert facts_of(loaded)["is_part"] == is_part
    assert facts_of(Part(SimpleNamespace(dataset=whole)))["is_part"]


class Part:
    def __init__(self, dataset):
        self.dataset, self.indices = dataset, [0]


def test_labels_are_those_of_folders_only_where_a_dataset_of_torchvision_gives_them_as_it_found_them():
    theirs = type("ImageFolder", (), {"__getitem__": lambda self, index: self.samples[index]})
    theirs.__getitem__.__module__ = "torchvision.datasets.folder"
    own = type("Photos", (), {"__getitem__": lambda self, index: self.samples[index]})
    samples = [("data/cat/0.jpg", 0), ("data/dog/0.jpg", 1)]

    def same(kind, **changed):
        dataset = kind()
        vars(dataset).update({"root": os.curdir, "class_to_idx": {"cat": 0, "dog": 1}, "samples": samples} | changed)
        vars(dataset)["samples"] = [(path.removeprefix("data/"), label) for path, label in dataset.samples]
        return facts_of(dataset)["same_labels"]

    assert same(theirs) and not same(own)
    assert not same(theirs, target_transform=str), "another label"
    assert not same(theirs, class_to_idx={"dog": 0, "cat": 1}), "another order"
    assert not same(theirs, samples=[("data/cat/0.jpg", 1)]), "changed by the script"
    assert same(theirs, class_to_idx=None), "such as MNIST"


@pytest.mark.parametrize(
    ("loader", "sampler", "drops"),
    [
        (SimpleNamespace(), "", None),
        (SimpleNamespace(batch_sampler=BatchSampler("abc", True)), "str", True),
        (SimpleNamespace(sampler=3, batch_sampler=SimpleNamespace(drop_last=False)), "SimpleNamespace", False),
        (SimpleNamespace(sampler=3, batch_sampler=None, drop_last=False), "int", False),
        (SimpleNamespace(sampler=_InfiniteConstantSampler(), drop_last=0), "", None),
    ],
)
def test_the_order_of_a_loader_and_its_last_batch(loader, sampler, drops):
    assert (sampler_of(loader), drops_last(loader)) == (sampler, drops)
