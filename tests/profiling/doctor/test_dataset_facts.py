"""What a dataset says of its folder and its transforms."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from fastload.profiling.doctor.injected.dataset_facts import facts_of


class Compose:
    def __init__(self, *transforms):
        self.transforms = list(transforms)


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
