"""The FastLoader that takes a DataLoader's place: its transforms, and what to type."""

from __future__ import annotations

from dataclasses import replace

import pytest

import fastload
from fastload.profiling.verdict.replacement import _OURS, PlainLoader, completed, to_type

FLOATS = "Normalize([0.0, 0.0, 0.0], [1.0, 1.0, 1.0])"
PLAIN = PlainLoader(
    root="my data/train", num_samples=1200, same_labels=True, batch_size=32, sampler="RandomSampler", drop_last=True,
    transforms=("RandomResizedCrop(224)", "ToTensor()", "Normalize([0.5], [0.2])"), lists_transforms=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("listed", "known", "added"),
    [
        ((), ("Resize((8, 6))", FLOATS), ("Resize((8, 6))", FLOATS)),
        (("ToTensor()",), ("Resize((8, 6))", "ToTensor()", FLOATS), ("Resize((8, 6))", FLOATS)),
        (
            ("Resize(9)", "CenterCrop(6)", "Normalize([0], [1])"),
            ("Resize(9)", "CenterCrop(6)", "Normalize([0], [1])"),
            (),
        ),
        (("Resize(6)", "Normalize()"), ("Resize((8, 6))", FLOATS), ()),  # of several shapes, as one number is not
        (("RandomCrop()", "ColorJitter()"), ("RandomCrop((8, 6))", "ColorJitter(0.4, 0.4, 0.4)", FLOATS), (FLOATS,)),
    ],
)
def test_what_a_batch_needs_is_added_to_what_the_dataset_lists(listed, known, added):
    found = completed(listed, channels=3, size=(8, 6), floating=True, resized=True)
    assert found == (known, added)


def test_only_what_the_batch_shows_is_added():
    found = {"channels": 3, "size": (8, 6), "floating": False, "resized": False}
    assert completed((), **found) == ((), ())
    found |= {"resized": True, "calls": ["PIL.Image.crop", "PIL.ImageOps.flip", "torch.add"]}
    crops = ("RandomResizedCrop((8, 6))", "RandomHorizontalFlip()")
    assert completed((), **found) == (crops, crops)


def test_lines_to_type_load_the_same_split_in_the_same_kind_of_order():
    assert to_type(PLAIN, keeps_transform=False).split("\n") == [
        "fastload pack 'my data/train' train.h5  # has to find the dataset's 1,200 images",
        "from fastload import FastLoader",
        "from fastload.transforms import Normalize, RandomResizedCrop",
        'loader = FastLoader("train.h5", batch_size=32, transform=[RandomResizedCrop(224), Normalize([0.5], [0.2])])',
    ]
    part = replace(PLAIN, root="", split="val", masks=True, sampler="SequentialSampler", drop_last=False, transforms=())
    assert to_type(part, keeps_transform=False).split("\n") == [
        "fastload pack FOLDER packed.h5",
        "from fastload import FastLoader, PackedDataset",
        'loader = FastLoader(PackedDataset("packed.h5", split="val", fields=("images", "masks")), batch_size=32, '
        "shuffle=False)",
        "# rows come in the file's order, which is shuffled unless it is packed with --no-shuffle",
    ]
    assert 'shuffle=False, ends="drop"' in to_type(replace(part, drop_last=True), keeps_transform=False)
    assert 'batch_size=32, ends="exact"' in to_type(replace(PLAIN, drop_last=False), keeps_transform=False)
    unknown = to_type(replace(PLAIN, drop_last=None, sampler="", batch_size=0, num_samples=0), keeps_transform=False)
    assert 'FastLoader("train.h5", transform=[' in unknown and "#" not in unknown


def test_what_the_lines_do_not_do_stands_below_them():
    some = to_type(replace(PLAIN, is_part=True, split="train"), keeps_transform=False)
    assert 'PackedDataset("train.h5").select(rows)' in some and "# rows: numbers of the rows of this" in some
    assert "has to find" not in some
    kept = replace(PLAIN, transforms=(*PLAIN.transforms, "RandomRotation()"))
    lines = to_type(kept, keeps_transform=True)
    assert 'PackedDataset("train.h5", transform=own)' in lines and "(RandomRotation and the like)" in lines
    assert "fastload.transforms" not in lines
    assert "# labels: as fastload pack finds them" in to_type(replace(PLAIN, same_labels=False), keeps_transform=False)
    drawn = to_type(replace(PLAIN, sampler="WeightedRandomSampler"), keeps_transform=False)
    assert "not that by WeightedRandomSampler" in drawn
    mine = to_type(replace(PLAIN, own_transforms=("RandomResizedCrop",)), keeps_transform=False)
    assert "# RandomResizedCrop: of the script itself, taken for fastload's" in mine
    own = replace(PLAIN, transforms=("Resize((8, 6))",), added=("Resize((8, 6))",))
    assert "# Resize((8, 6)): for batches of the same shape and type" in to_type(own, keeps_transform=False)


@pytest.mark.parametrize("name", sorted(_OURS))
def test_transforms_that_are_offered_exist(name):
    pytest.importorskip("torch")
    assert hasattr(fastload.transforms, name)
