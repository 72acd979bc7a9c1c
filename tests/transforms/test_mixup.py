from __future__ import annotations

import math
import pickle
from contextlib import closing

import numpy as np
import pytest
import torch
from batches import in_channels_last_memory
from hypothesis import given
from hypothesis import strategies as st

from fastload import FastLoader, PackedDataset
from fastload.errors import OptionError
from fastload.format.ragged import Column
from fastload.transforms import RandomChoice, colour
from fastload.transforms.draws import Draws
from fastload.transforms.mixup import CutMix, MixUp, beta
from fastload.transforms.spec import ImageSpec
from sample_files import write_packed

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


@pytest.mark.parametrize("kind", [MixUp, CutMix])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(
    size=st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 9), st.integers(1, 9)),
    step=st.integers(0, 999),
    block_values=st.sampled_from([1, 300, 1 << 18]),
    contiguous=st.booleans(),
)
def test_mixup_is_the_float64_blend_and_cutmix_pastes_and_weighs_labels_by_area(
    kind, dtype, size, step, block_values, contiguous
):
    images = batch_of(*size, dtype, step)
    images = images.contiguous() if contiguous else images
    generator, (batch, _, height, width) = np.random.default_rng(step), size
    labels = torch.from_numpy(generator.integers(0, 5, batch))
    fields = {"images": images, "labels": labels, "row": torch.arange(batch)}
    if kind is CutMix:
        fields["masks"] = torch.from_numpy(generator.integers(0, 9, (batch, height, width)).astype(np.uint8))
    before = {name: tensor.clone() for name, tensor in fields.items()}
    transform = kind(0.8, num_classes=5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(colour, "BLOCK_VALUES", block_values)
        mixed = transform.apply_batch(fields, draws_for_step(step))
    for name, tensor in fields.items():
        assert torch.equal(tensor, before[name])
    result, share = mixed["images"], transform.share(draws_for_step(step))
    assert share * 65536 == int(share * 65536)
    assert abs(share - beta(0.8, draws_for_step(step).stream(0))[0]) <= 2**-17
    own = images.to(torch.float64).numpy()
    other = np.roll(own, 1, axis=0)
    if kind is CutMix:
        top, left, bottom, right = transform.rectangle(ImageSpec.of(images), draws_for_step(step))
        pasted = np.zeros((height, width), dtype=bool)
        pasted[top:bottom, left:right] = True
        share, most = 1 - pasted.mean(), 0.0
        exact, masks = np.where(pasted, other, own), fields["masks"].numpy()
        assert np.array_equal(mixed["masks"].numpy(), np.where(pasted, np.roll(masks, 1, axis=0), masks))
    else:
        exact = share * own + (1 - share) * other
        exact = np.rint(exact) if dtype == torch.uint8 else exact
        # uint16 by float32: 2**-8 of a level a product.
        most = 4 * torch.finfo(dtype).eps if dtype.is_floating_point else 0.5 + 2**-6 if dtype == torch.uint16 else 0.0
    assert result.dtype == dtype and in_channels_last_memory(result) and result.data_ptr() != images.data_ptr()
    assert np.abs(result.to(torch.float64).numpy() - exact).max() <= most
    vectors = np.eye(5)[labels.numpy()]
    assert mixed["labels"].dtype == torch.float32
    assert np.abs(mixed["labels"].numpy() - (share * vectors + (1 - share) * np.roll(vectors, 1, axis=0))).max() < 1e-6
    assert mixed["row"] is fields["row"]


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
        (torch.arange(3), 2, "from 0 to 2.*the dataset's number of classes"),
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


class Keyed(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {"image": torch.full((3, 4, 4), index, dtype=torch.uint8), "label": index % 2, "color": index % 3}


@pytest.mark.parametrize("kind", [MixUp, CutMix])
@pytest.mark.parametrize("source", ["a file", "a dataset of dicts"])
def test_labels_of_any_field_are_blended(tmp_path, kind, source):
    colors = np.array([0, 2, 1, 0])
    columns = {"label": Column(np.arange(4) % 2), "color": Column(colors)}
    path = write_packed(tmp_path / "c.h5", np.zeros((4, 8, 8, 3), np.uint8), columns)
    data = PackedDataset(path, fields=("images", "label", "color")) if source == "a file" else Keyed()
    colors = colors if source == "a file" else np.arange(4) % 3

    def blended(**options):
        mix = RandomChoice([kind(num_classes=3, field="color", **options)])
        with closing(FastLoader(data, 4, shuffle=False, workers=1, transform=[mix])) as loader:
            batch = next(iter(loader))
        labels, others = (batch["label"], batch["color"]) if isinstance(batch, dict) else batch[1:]
        assert labels.tolist() == [0, 1, 0, 1], "the others stay"
        return others

    assert torch.equal(blended(p=0), torch.eye(3)[colors])
    mixed = blended()
    assert mixed.shape == (4, 3) and torch.allclose(mixed.sum(1), torch.ones(4))
    with pytest.raises(OptionError, match="no field 'size' among"):
        list(FastLoader(data, 4, transform=[kind(num_classes=3, field="size")]))
    with pytest.raises(OptionError, match=r"field=3\): give the name"):
        kind(field=3)


@pytest.mark.parametrize("transform", [MixUp(num_classes=2), CutMix(num_classes=2)], ids=repr)
def test_fields_and_dtypes_that_cannot_be_mixed_are_named(transform):
    transform.check_fields(["images", "labels", "row"])
    for names, named in (
        (["images", "labels", "bbox"], "bbox"),
        (["images", "labels", "bbox", "landmarks"], "bbox and landmarks"),
        (["images", "row"], r"no field 'labels' among images, row.*\(field='label'\)"),
    ):
        with pytest.raises(OptionError, match=named):
            transform.check_fields(names)
    fields = {"images": batch_of(2, 3, 4, 4), "labels": torch.arange(2), "bbox": torch.zeros(2, 4)}
    with pytest.raises(OptionError, match="bbox"):
        transform.apply_batch(fields, draws_for_step(0))
    for dtype in DTYPES:
        spec = ImageSpec(3, 4, 4, dtype)
        assert transform.output(spec) == spec
    with pytest.raises(OptionError, match="int32"):
        transform.output(ImageSpec(3, 4, 4, torch.int32))
    CutMix().check_fields(["images", "masks", "labels"])
    with pytest.raises(OptionError, match=r"MixUp: masks.*Use CutMix"):
        MixUp().check_fields(["images", "masks", "labels"])
