"""Threads that fill slots draw the transforms' numbers: the same ones, in one copy with the pixels, and none twice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from drawn_cases import CASES
from hypothesis import given, settings
from hypothesis import strategies as st
from late_backend import Device
from same_batches import assert_same, facts
from small_files import write_random

import fastload.transforms.engine.pipeline
from fastload.dataset import PackedDataset
from fastload.format.ragged import Column
from fastload.loader.loader import FastLoader
from fastload.plan import MixedEcho
from fastload.transforms import (
    CenterCrop,
    ColorJitter,
    Cutout,
    Draws,
    MixUp,
    Normalize,
    RandAugment,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
)
from fastload.transforms.engine.pipeline import Pipeline, drawn_now
from fastload.transforms.spec import ImageSpec
from sample_files import write_ragged

N, SHAPE = 44, (30, 26, 3)
PACKED = {
    "rows": N,
    "size": SHAPE,
    "seed": 5,
    "classes": "abcdefg",
    "columns": {
        "bbox": Column(np.tile(np.array([[3, 4, 10, 12]], np.int32), (N, 1)), {"names": ("x", "y", "width", "height")})
    },
    "masks": True,
    "chunk_rows": 8,
}
FIELDS = ("images", "masks", "bbox", "labels", "row", "valid")
NORMALIZE = Normalize([0.5, 0.4, 0.3], [0.2, 0.25, 0.3])
CROP, FLIP = RandomResizedCrop((20, 17)), RandomHorizontalFlip()
LISTS = {
    "imagenet": [CROP, FLIP, NORMALIZE],
    "colour": [CROP, ColorJitter(0.3, 0.3, 0.3, 0.1), RandomErasing(p=0.6), NORMALIZE],
    "two passes": [Resize(40), RandomResizedCrop(20), RandomVerticalFlip(), Cutout(5)],
    "padded": [RandomCrop(26, padding=4), FLIP, NORMALIZE],
    "policy": [FLIP, RandAugment(), CenterCrop(24), NORMALIZE],
    "a function": [CROP, lambda images: 255 - images, FLIP, NORMALIZE],
}
MIXED = [CROP, FLIP, NORMALIZE, MixUp(num_classes=7)]


@pytest.fixture
def not_at_the_hand_over(monkeypatch):
    def drawn_twice(*args):
        raise AssertionError("drawn in the training thread")

    monkeypatch.setattr(fastload.transforms.engine.pipeline, "drawn_now", drawn_twice)


@settings(max_examples=2 * settings.default.max_examples)
@given(
    transforms=st.sampled_from(list(LISTS.values())),
    seed=st.integers(0, 9),
    rows=st.lists(st.integers(0, 2**40), min_size=1, max_size=9),
    uses=st.integers(1, 4),
)
def test_the_words_of_all_uses_are_those_of_each_drawn_alone(transforms, seed, rows, uses):
    spec, rows = ImageSpec(3, *SHAPE[:2], torch.uint8), np.array(rows)
    pipeline, count = Pipeline(transforms, spec), len(rows)
    words = np.full(pipeline.num_words(count * uses), -1, np.int32)
    drawn = pipeline.draw(Draws(seed, 3, rows, echoes=uses), uses, words)
    assert (drawn.samples, drawn.uses) == (count, uses)
    begin, flat = 0, torch.from_numpy(words)
    for part, (placement, _) in zip(pipeline._passes, drawn.passes, strict=True):
        for use in range(uses):
            draws = Draws(seed, 3, rows, use)
            alone = torch.zeros(part.words.number(count), dtype=torch.int32)
            expected = part.draw(draws, alone.numpy())
            assert np.array_equal(placement.table()[use * count : (use + 1) * count], expected.table())
            one = part.words.tables(alone, slice(0, count), count)
            some = part.words.tables(flat, slice(use * count, (use + 1) * count), count * uses, begin)
            for name, table in vars(one).items():
                other = getattr(some, name)
                same = torch.equal(table, other) if isinstance(table, torch.Tensor) else table == other
                assert same, name
            assert torch.equal(one.windows, torch.from_numpy(expected.table()).to(torch.int32))
            if part.normalize:
                constants = part.normalize.scale_and_shift(torch.uint8)
                assert torch.equal(some.scale, constants[0]) and torch.equal(some.shift, constants[1])
        begin += part.words.number(count * uses)
    assert begin == len(words)


@pytest.mark.parametrize("cache", [None, "device", "host"])
@pytest.mark.parametrize("echo", [1, 3, MixedEcho(2)])
@pytest.mark.parametrize("name", LISTS)
def test_batches_are_those_of_numbers_drawn_at_the_hand_over(packed, not_at_the_hand_over, name, echo, cache):
    dataset = PackedDataset(packed, fields=FIELDS if name != "a function" else ("images", "labels"))
    options = {"transform": LISTS[name], "seed": 3, "ends": "exact", "echo": echo}
    with pytest.MonkeyPatch.context() as patch:  # on the CPU numbers are drawn where they are used
        patch.setattr(fastload.transforms.engine.pipeline, "drawn_now", drawn_now)
        expected = FastLoader(dataset, 8, **options)
        epochs = [[facts(batch) for batch in expected] for _ in range(2)]
    loader = FastLoader(dataset, 8, cache=cache, device=Device(), **options)
    for epoch in range(2):
        assert_same([facts(batch) for batch in loader], epochs[epoch])
    loader.set_epoch(1)
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    state = loader.state_dict()
    resumed = FastLoader(dataset, 8, cache=cache, device=Device(), **options)
    resumed.load_state_dict(state)
    assert_same([facts(batch) for batch in resumed], epochs[1][4:])


@pytest.mark.parametrize("cache", [None, "device"])
def test_mixed_batches_are_drawn_ahead_too(packed, not_at_the_hand_over, cache):
    options = {"transform": MIXED, "seed": 3, "echo": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fastload.transforms.engine.pipeline, "drawn_now", drawn_now)
        expected = [facts(batch) for batch in FastLoader(packed, 8, **options)]
    assert_same([facts(batch) for batch in FastLoader(packed, 8, cache=cache, device=Device(), **options)], expected)


def test_what_follows_a_size_head_is_drawn_ahead_for_images_of_its_size(tmp_path, not_at_the_hand_over):
    pixels = [np.random.default_rng(n).integers(0, 256, (24 + n, 40 - n, 3), np.uint8) for n in range(12)]
    path = write_ragged(tmp_path / "sizes.h5", pixels)
    options = {"transform": [CROP, ColorJitter(0.4), FLIP, NORMALIZE], "seed": 3, "echo": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fastload.transforms.engine.pipeline, "drawn_now", drawn_now)
        expected = [facts(batch) for batch in FastLoader(path, 4, **options)]
    assert_same([facts(batch) for batch in FastLoader(path, 4, device=Device(), **options)], expected)


@pytest.mark.parametrize("cache", [None, "device"])
def test_uses_that_nobody_knew_of_are_drawn_at_the_hand_over(packed, cache):
    options = {"transform": LISTS["colour"], "seed": 3, "cache": cache}
    expected = [facts(batch) for batch in FastLoader(packed, 8, device=Device(), echo=3, **options)]
    loader = FastLoader(packed, 8, device=Device(), echo="auto", **options)
    loader._echo.adopt(3)  # as after an epoch that waited
    assert_same([facts(batch) for batch in loader], expected)


@pytest.mark.parametrize("cache", [None, "device"])
@pytest.mark.parametrize("echo", [1, 2])
@pytest.mark.parametrize("transforms", [[], LISTS["imagenet"]])
def test_a_batch_is_one_copy_and_what_is_collected_keeps_no_images(packed, cache, echo, transforms):
    crossed = []

    class Counting(Device):
        def record(self, again=None):  # once for each batch that is brought there
            crossed.append(self.crossed)
            return super().record(again)

    dataset = PackedDataset(packed, fields=FIELDS)
    loader = FastLoader(dataset, 8, transform=transforms, cache=cache, device=Counting(), echo=echo)
    batches = iter(loader)
    loaded = len(crossed) if cache else 0
    first, batch = next(batches), None
    for number, batch in enumerate(batches, 2):  # noqa: B007
        pass
    brought = crossed[loaded:]
    assert len(brought) >= number // echo - 2 and np.diff(brought).tolist() == [1] * (len(brought) - 1)
    images, *others = batch
    whole = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in others}
    assert images.untyped_storage().data_ptr() not in whole
    # Masks and all that is smaller lie together at most: images alone are three times as large.
    assert all(num_bytes <= 8 * 30 * 26 + 4096 for num_bytes in whole.values())
    assert all(one.data_ptr() != other.data_ptr() for one, other in zip(first, batch, strict=True))
    before = others[1]._version
    others[2].add_(1)
    assert others[1]._version == before, "for autograd fields of one copy are no views of one another"


@pytest.mark.parametrize("transforms", [[], [NORMALIZE]])
def test_large_masks_keep_no_images_either(tmp_path, transforms):
    path = write_random(tmp_path / "large.h5", rows=8, size=(128, 128, 3), masks=True)
    dataset = PackedDataset(path, fields=["images", "masks"])
    (expected,) = FastLoader(dataset, 8, seed=1, transform=transforms)
    (batch,) = FastLoader(dataset, 8, seed=1, transform=transforms, device=Device())
    assert all(torch.equal(one, other) for one, other in zip(batch, expected, strict=True))
    assert batch[1].untyped_storage().nbytes() == batch[1].nbytes == 8 * 128 * 128


def test_the_kernel_reads_the_words_of_a_slot_in_the_interpreter(run_interpreted):
    pytest.importorskip("triton", reason="Triton is not installed")
    assert run_interpreted(Path(__file__).with_name("drawn_cases.py")).split("\n")[:-1] == list(CASES)
