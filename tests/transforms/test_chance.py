from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
import torch
from late_backend import Device
from small_files import write_random

from fastload import FastLoader
from fastload.errors import OptionError
from fastload.transforms import (
    ColorJitter,
    CutMix,
    Draws,
    Grayscale,
    MixUp,
    RandomApply,
    RandomChoice,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomResizedCrop,
)
from fastload.transforms.engine.pipeline import FusedPass, passes_of
from fastload.transforms.spec import ImageSpec

JITTER = ColorJitter(0.5, 0.5, 0.5, 0.1)


def images_of(count: int = 400) -> torch.Tensor:
    values = np.random.default_rng(0).integers(0, 256, (count, 6, 5, 3), dtype=np.uint8)
    return torch.from_numpy(values).permute(0, 3, 1, 2)


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_colours_change_for_a_part_of_the_images(p):
    images, draws = images_of(), Draws(3, 1, np.arange(400))
    found = RandomApply([JITTER], p).apply(images, draws)
    always = RandomApply([JITTER], 1).apply(images, draws)
    changed = (found != images).flatten(1).any(1)
    assert abs(float(changed.float().mean()) - p) < 0.12
    assert torch.equal(found[changed], always[changed]) and torch.equal(found[~changed], images[~changed])


def test_several_colour_transforms_run_one_after_the_other():
    images, draws = images_of(40), Draws(3, 1, np.arange(40))
    found = RandomApply([JITTER, Grayscale(3)], 1).apply(images, draws)
    expected = Grayscale(3).apply(JITTER.apply(images, draws.stream(0)), draws.stream(1))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("transforms", [[JITTER], [JITTER, RandomGrayscale(0.5)], [JITTER, ColorJitter(contrast=0.3)]])
def test_a_fused_pass_and_a_device_give_the_same(tmp_path, transforms):
    path = write_random(tmp_path / "a.h5", rows=32, size=(9, 8, 3), classes="ab")
    made = []
    for options in ({}, {"device": Device()}):
        listed = [RandomResizedCrop(6), RandomApply(transforms, 0.5)]
        with closing(FastLoader(path, 8, workers=1, seed=2, transform=listed, **options)) as loader:
            made.append(torch.cat([images.clone() for images, _ in loader]))
    assert torch.equal(*made)
    one_pass = len(passes_of([RandomApply(transforms)], ImageSpec(3, 8, 8, torch.uint8)))
    fused = isinstance(passes_of([RandomApply(transforms)], ImageSpec(3, 8, 8, torch.uint8))[0], FusedPass)
    assert one_pass == 1 and fused == (sum(isinstance(one, ColorJitter) for one in transforms) == 1)


@pytest.mark.parametrize("kind", [MixUp, CutMix])
def test_a_batch_is_mixed_by_chance_and_its_labels_are_vectors_anyway(kind):
    images, labels = images_of(6), torch.arange(6) % 3
    fields, mixed = {"images": images, "labels": labels}, 0
    for step in range(300):
        draws = Draws.of_batch(1, 0, step, 0)
        found = kind(num_classes=3, p=0.4).apply_batch(fields, draws)
        if torch.equal(found["labels"], torch.nn.functional.one_hot(labels, 3).float()):
            assert torch.equal(found["images"], images)
        else:
            mixed += 1
            always = kind(num_classes=3).apply_batch(fields, draws)
            assert all(torch.equal(found[name], always[name]) for name in fields)
    assert 70 < mixed < 170
    assert torch.equal(kind(num_classes=3, p=0).apply_batch(fields, draws)["images"], images)


def test_a_choice_runs_each_as_often_as_it_is_likely():
    choice = RandomChoice([MixUp(0.2, 3), CutMix(1.0, 3)], p=[0.25, 0.75])
    fields, counts = {"images": images_of(6), "labels": torch.arange(6) % 3}, [0, 0]
    for step in range(400):
        draws = Draws.of_batch(1, 0, step, 0)
        found = choice.apply_batch(fields, draws)
        each = [one.apply_batch(fields, draws.stream(i)) for i, one in enumerate(choice.transforms)]
        fits = [all(torch.equal(found[name], one[name]) for name in fields) for one in each]
        assert any(fits)
        counts[fits.index(True)] += 1
    assert 60 < counts[0] < 140


def test_a_loader_takes_a_choice_and_refuses_what_it_cannot_mix(tmp_path):
    path = write_random(tmp_path / "a.h5", rows=32, size=(9, 8, 3), classes="abc", masks=True)
    choice = RandomChoice([MixUp(num_classes=3), CutMix(num_classes=3)])
    with closing(FastLoader(path, 8, workers=1, transform=[RandomHorizontalFlip(), choice])) as loader:
        images, labels = next(iter(loader))
    assert images.shape == (8, 3, 9, 8) and labels.shape == (8, 3) and torch.allclose(labels.sum(1), torch.ones(8))
    from fastload import PackedDataset

    with pytest.raises(OptionError, match="MixUp: masks hold class numbers"):
        FastLoader(PackedDataset(path, fields=("images", "masks", "labels")), 8, transform=[choice])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RandomApply([RandomHorizontalFlip()]), "RandomHorizontalFlip is no transform of colours"),
        (lambda: RandomApply([]), "give a list of transforms"),
        (lambda: RandomApply([JITTER], 1.5), r"RandomApply\(p=1.5\)"),
        (lambda: RandomApply([Grayscale(1)]).output(ImageSpec(3, 8, 8, torch.uint8)), "Use RandomGrayscale"),
        (lambda: RandomChoice([RandomHorizontalFlip()]), "does not mix samples"),
        (lambda: RandomChoice([MixUp(num_classes=3), CutMix(num_classes=4)]), "num_classes differ"),
        (lambda: RandomChoice([MixUp(), CutMix()], p=[0.5]), "a probability for each of 2"),
        (lambda: RandomChoice([MixUp(), CutMix()], p=[0.7, 0.7]), "add up to 1"),
        (lambda: MixUp(p=-1), r"MixUp\(p=-1\)"),
    ],
)
def test_what_has_no_meaning_is_an_error(make, message):
    with pytest.raises(OptionError, match=message):
        make()
