from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch
from batches import in_channels_last_memory
from hypothesis import given
from hypothesis import strategies as st

from fastload.errors import OptionError
from fastload.transforms import colour
from fastload.transforms.draws import Draws
from fastload.transforms.mixup import CutMix, MixUp, beta
from fastload.transforms.spec import ImageSpec

DTYPES = (torch.uint8, torch.uint16, torch.float16, torch.bfloat16, torch.float32, torch.float64)


def batch_of(batch, channels, height, width, dtype=torch.uint8, seed=0) -> torch.Tensor:
    """Random images (B, C, H, W) in channels_last memory, floats about 0."""
    values = np.random.default_rng(seed).integers(0, 256, (batch, height, width, channels))
    images = torch.from_numpy(
        (values / 64 - 2) if dtype.is_floating_point else values * (257 if dtype.itemsize > 1 else 1)
    )
    return images.to(dtype).permute(0, 3, 1, 2)


def draws_for_step(step: int) -> Draws:
    return Draws(11, 2, np.array([step]))


def one_hot(labels: np.ndarray, num_classes: int) -> np.ndarray:
    return np.eye(num_classes)[labels]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(
    batch=st.integers(1, 6),
    channels=st.integers(1, 4),
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    step=st.integers(0, 999),
    block_values=st.sampled_from([1, 300, 1 << 18]),
    contiguous=st.booleans(),
)
def test_mixup_is_the_float64_blend(dtype, batch, channels, height, width, step, block_values, contiguous):
    images = batch_of(batch, channels, height, width, dtype, step)
    images = images.contiguous() if contiguous else images
    labels = torch.from_numpy(np.random.default_rng(step).integers(0, 5, batch))
    fields = {"images": images, "labels": labels, "row": torch.arange(batch)}
    before = {name: tensor.clone() for name, tensor in fields.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(colour, "BLOCK_VALUES", block_values)
        mixed = MixUp(0.8, num_classes=5).apply_batch(fields, draws_for_step(step))
    for name, tensor in fields.items():
        assert torch.equal(tensor, before[name])
    share = MixUp(0.8).share(draws_for_step(step))
    assert share * 65536 == int(share * 65536)
    assert abs(share - beta(0.8, draws_for_step(step).stream(0))[0]) <= 2**-17
    exact = images.to(torch.float64).numpy()
    exact = share * exact + (1 - share) * np.roll(exact, 1, axis=0)
    result = mixed["images"]
    assert result.dtype == dtype
    assert in_channels_last_memory(result)
    assert result.data_ptr() != images.data_ptr()
    if dtype == torch.uint8:
        assert np.array_equal(result.numpy(), np.rint(exact))
    elif dtype == torch.uint16:
        assert np.abs(result.numpy() - exact).max() <= 0.5 + 2**-6  # float32: 2**-8 of a level a product
    else:
        assert np.abs(result.to(torch.float64).numpy() - exact).max() <= 4 * torch.finfo(dtype).eps
    vectors = one_hot(labels.numpy(), 5)
    assert mixed["labels"].dtype == torch.float32
    assert np.abs(mixed["labels"].numpy() - (share * vectors + (1 - share) * np.roll(vectors, 1, axis=0))).max() < 1e-6
    assert mixed["row"] is fields["row"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(
    batch=st.integers(1, 5),
    channels=st.integers(1, 4),
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    step=st.integers(0, 999),
    contiguous=st.booleans(),
)
def test_cutmix_pastes_the_rectangle_and_weighs_labels_by_area(dtype, batch, channels, height, width, step, contiguous):
    images = batch_of(batch, channels, height, width, dtype, step)
    images = images.contiguous() if contiguous else images
    masks = torch.from_numpy(np.random.default_rng(step).integers(0, 9, (batch, height, width)).astype(np.uint8))
    labels = torch.arange(batch) % 3
    fields = {"images": images, "masks": masks, "labels": labels}
    before = {name: tensor.clone() for name, tensor in fields.items()}
    transform = CutMix(0.7, num_classes=3)
    mixed = transform.apply_batch(fields, draws_for_step(step))
    for name, tensor in fields.items():
        assert torch.equal(tensor, before[name])
    top, left, bottom, right = transform.rectangle(ImageSpec.of(images), draws_for_step(step))
    pasted = np.zeros((height, width), dtype=bool)
    pasted[top:bottom, left:right] = True
    as_bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    own = images.view(as_bits).numpy()
    assert mixed["images"].dtype == dtype
    assert in_channels_last_memory(mixed["images"]) and mixed["images"].data_ptr() != images.data_ptr()
    assert np.array_equal(mixed["images"].view(as_bits).numpy(), np.where(pasted, np.roll(own, 1, axis=0), own))
    assert mixed["masks"].dtype == masks.dtype
    assert np.array_equal(mixed["masks"].numpy(), np.where(pasted, np.roll(masks.numpy(), 1, axis=0), masks.numpy()))
    vectors = one_hot(labels.numpy(), 3)
    share = 1 - pasted.mean()
    assert np.abs(mixed["labels"].numpy() - (share * vectors + (1 - share) * np.roll(vectors, 1, axis=0))).max() < 1e-6


def test_rectangles_are_torchvisions_given_the_numbers_drawn():
    spec, transform = ImageSpec(3, 30, 50, torch.uint8), CutMix(1.0, 2)
    for step in range(300):
        draws = draws_for_step(step)
        reach = 0.5 * math.sqrt(1 - MixUp(1.0).share(draws))
        y, x = int(draws.stream(1).integers(0, 30)[0]), int(draws.stream(2).integers(0, 50)[0])
        half_height, half_width = int(reach * 30), int(reach * 50)
        expected = (max(y - half_height, 0), max(x - half_width, 0), min(y + half_height, 30), min(x + half_width, 50))
        assert transform.rectangle(spec, draws) == expected


# Mean 1/2 and variance 1 / (4 (2 alpha + 1)) of Beta(alpha, alpha), and its distribution function where it is simple.
@pytest.mark.parametrize("alpha", [1e-300, 1e-4, 0.05, 0.2, 0.5, 0.999, 1.0, 1.001, 2.0, 8.0, 1e3, 1e8])
def test_shares_have_the_mean_and_variance_of_beta(alpha):
    count = 40000
    numbers = beta(alpha, Draws(5, 1, np.arange(count)))
    assert numbers.shape == (count,)
    assert ((numbers >= 0) & (numbers <= 1)).all()
    variance = 1 / (4 * (2 * alpha + 1))
    assert abs(numbers.mean() - 0.5) < 5 * math.sqrt(variance / count)
    assert abs(numbers.var() / variance - 1) < 0.04


@pytest.mark.parametrize(
    ("alpha", "distribution"),
    [
        (0.5, lambda x: 2 / np.pi * np.arcsin(np.sqrt(x))),
        (1.0, lambda x: x),
        (2.0, lambda x: x**2 * (3 - 2 * x)),
        (3.0, lambda x: x**3 * (10 - 15 * x + 6 * x**2)),
    ],
)
def test_shares_have_the_distribution_of_beta(alpha, distribution):
    numbers = np.sort(beta(alpha, Draws(6, 0, np.arange(40000))))
    distance = np.abs(distribution(numbers) - (np.arange(40000) + 0.5) / 40000).max()
    assert distance < 1.95 / math.sqrt(40000)  # Kolmogorov and Smirnov, one in a thousand


def test_shares_are_a_function_of_the_step_and_of_nothing_else():
    numbers = beta(0.3, Draws(11, 2, np.arange(50)))
    assert np.array_equal(numbers, [beta(0.3, draws_for_step(step))[0] for step in range(50)])
    assert len(np.unique(numbers)) == 50


def test_vectors_of_any_kind_are_blended_as_float32():
    images = batch_of(2, 3, 4, 4)
    for labels in (
        torch.tensor([[1, 0, 0], [0, 1, 1]], dtype=torch.uint8),
        torch.tensor([[True, False, False], [False, True, True]]),
        torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64),
        torch.tensor([[3, 0, 0], [0, 7, 1]]),
    ):
        mixed = MixUp().apply_batch({"images": images, "labels": labels}, draws_for_step(4))["labels"]
        share = MixUp(1.0).share(draws_for_step(4))
        exact = labels.to(torch.float64)
        assert mixed.dtype == torch.float32
        assert torch.allclose(mixed.double(), share * exact + (1 - share) * exact.flip(0), atol=1e-6)


@pytest.mark.parametrize("count", [4, 0])
@pytest.mark.parametrize("transform", [MixUp(0.3, 5), CutMix(0.3, 5)], ids=repr)
def test_transforms_can_be_sent_to_workers_and_take_batches_without_samples(transform, count):
    fields = {"images": batch_of(count, 3, 6, 5), "labels": torch.arange(count)}
    copy = pickle.loads(pickle.dumps(transform))
    assert repr(copy) == repr(transform)
    assert transform.mixes
    one, other = (made.apply_batch(fields, draws_for_step(3)) for made in (transform, copy))
    assert torch.equal(one["images"], other["images"]) and one["images"].shape == (count, 3, 6, 5)
    assert one["labels"].shape == (count, 5)


@pytest.mark.parametrize("kind", [MixUp, CutMix])
@pytest.mark.parametrize(
    "option",
    [{"alpha": alpha} for alpha in (0, -1, float("nan"), float("inf"), "1", None, True)]
    + [{"num_classes": count} for count in (0, -1, 2.5, "10", True)],
    ids=str,
)
def test_options_without_a_meaning_are_named(kind, option):
    with pytest.raises(OptionError, match=rf"{kind.__name__}\({next(iter(option))}="):
        kind(**option)


@pytest.mark.parametrize("kind", [MixUp, CutMix])
@pytest.mark.parametrize(
    ("labels", "num_classes", "named"),
    [
        (torch.arange(3), None, "num_classes"),
        (torch.arange(3), 2, "from 0 to 2"),
        (torch.tensor([-1, 0, 1]), 2, "from -1 to 1"),
        (torch.zeros(3, 4), 5, "vectors of 4"),
        (torch.zeros(3), 5, "not class numbers"),
        (torch.zeros(2, 4), None, r"\(2, 4\) for 3 images"),
        (torch.zeros(3, 4, 1), None, r"\(3, 4, 1\) for 3 images"),
    ],
)
def test_labels_that_cannot_be_mixed_are_named(kind, labels, num_classes, named):
    with pytest.raises(OptionError, match=named):
        kind(num_classes=num_classes).apply_batch({"images": batch_of(3, 3, 4, 4), "labels": labels}, draws_for_step(0))


@pytest.mark.parametrize("transform", [MixUp(num_classes=2), CutMix(num_classes=2)], ids=repr)
def test_fields_that_cannot_be_mixed_are_named(transform):
    transform.check_fields(["images", "labels", "row"])
    for names, named in (
        (["images", "labels", "bbox"], "bbox"),
        (["images", "labels", "bbox", "landmarks"], "bbox and landmarks"),
        (["images", "row"], "no labels"),
    ):
        with pytest.raises(OptionError, match=named):
            transform.check_fields(names)
    fields = {"images": batch_of(2, 3, 4, 4), "labels": torch.arange(2), "bbox": torch.zeros(2, 4)}
    with pytest.raises(OptionError, match="bbox"):
        transform.apply_batch(fields, draws_for_step(0))
    CutMix().check_fields(["images", "masks", "labels"])
    with pytest.raises(OptionError, match=r"MixUp: masks.*Use CutMix"):
        MixUp().check_fields(["images", "masks", "labels"])


@pytest.mark.parametrize("transform", [MixUp(num_classes=2), CutMix(num_classes=2)], ids=repr)
def test_other_dtypes_are_refused(transform):
    for dtype in DTYPES:
        spec = ImageSpec(3, 4, 4, dtype)
        assert transform.output(spec) == spec
    with pytest.raises(OptionError, match="int32"):
        transform.output(ImageSpec(3, 4, 4, torch.int32))
