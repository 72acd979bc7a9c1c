from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastload.errors import OptionError
from fastload.transforms import ImageSpec, Normalize
from fastload.transforms.engine import resample
from fastload.transforms.normalize import normalize_at_once

MEAN, STD = (0.485, 0.456, 0.406, 0.5), (0.229, 0.224, 0.225, 0.01)
ROUNDING = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}  # half a unit in the last place


def batch_of(shape, dtype, memory="nhwc") -> torch.Tensor:
    batch, channels, height, width = shape
    largest = np.iinfo(dtype).max
    values = np.random.default_rng(0).integers(0, largest, (batch, height, width, channels), dtype, endpoint=True)
    images = torch.from_numpy(values).permute(0, 3, 1, 2)
    if memory == "nchw":
        return torch.from_numpy(np.ascontiguousarray(images.numpy()))
    return images


def exact(images: torch.Tensor, mean, std) -> np.ndarray:
    largest = np.iinfo(images.numpy().dtype).max
    columns = [np.array(values)[:, None, None] for values in (mean, std)]
    return (images.numpy().astype(np.float64) / largest - columns[0]) / columns[1]


def assert_close(result: torch.Tensor, images: torch.Tensor, mean, std):
    expected = exact(images, mean, std)
    bound = 4 * 2.0**-24 * (1 + np.abs(np.array(mean)))[:, None, None] / np.array(std)[:, None, None]
    rounding = ROUNDING[result.dtype] * np.abs(expected) + (2.0**-24 if result.dtype == torch.float16 else 0)
    error = np.abs(result.to(torch.float64).numpy() - expected)
    assert (error <= bound * (1 + ROUNDING[result.dtype]) + rounding).all()


@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 40), st.integers(1, 40)),
    dtype=st.sampled_from([np.uint8, np.uint16]),
    memory=st.sampled_from(["nhwc", "nchw"]),
    output=st.sampled_from(list(ROUNDING)),
    block=st.sampled_from([1, 700, 1 << 15]),
)
def test_normalize_is_within_its_stated_error(shape, dtype, memory, output, block):
    images = batch_of(shape, dtype, memory)
    before = images.numpy().copy()
    mean, std = MEAN[: shape[1]], STD[: shape[1]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resample, "SERIAL_VALUES", block)
        result = Normalize(mean, std, dtype=output).apply(images)
    assert result.dtype == output and result.shape == shape
    assert result.permute(0, 2, 3, 1).is_contiguous()
    assert_close(result, images, mean, std)
    assert np.array_equal(images.numpy(), before)


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 9), st.integers(1, 9)),
    dtype=st.sampled_from([np.uint8, np.uint16]),
    memory=st.sampled_from(["nhwc", "nchw"]),
    output=st.sampled_from(list(ROUNDING)),
)
def test_the_way_for_devices_keeps_the_same_bound(shape, dtype, memory, output):
    images = batch_of(shape, dtype, memory)
    mean, std = MEAN[: shape[1]], STD[: shape[1]]
    scale, shift = Normalize(mean, std).scale_and_shift(images.dtype)
    result = normalize_at_once(images, scale, shift, output)
    assert result.dtype == output
    assert result.permute(0, 2, 3, 1).is_contiguous()
    assert_close(result, images, mean, std)


def test_float32_agrees_with_torchvisions_formula():
    images = batch_of((4, 3, 21, 17), np.uint8)
    mean, std = (torch.tensor(values[:3])[:, None, None] for values in (MEAN, STD))
    theirs = (images.to(torch.float32) / 255 - mean) / std
    assert torch.allclose(Normalize(MEAN[:3], STD[:3]).apply(images), theirs, rtol=0, atol=2e-6)


@settings(max_examples=50)
@given(channels=st.integers(1, 4), height=st.integers(1, 300), width=st.integers(1, 3000))
def test_rows_of_constants_are_whole_image_rows(channels, height, width):
    row = resample.row_values(channels, height, width)
    assert row % (width * channels) == 0 and height % (row // (width * channels)) == 0
    assert row == width * channels or row <= resample._ROW_VALUES


def test_memory_of_a_batch_let_go_is_used_again():
    normalize = Normalize([0.5], [0.5], dtype=torch.bfloat16)
    images = torch.zeros((2, 1, 4, 4), dtype=torch.uint8)
    addresses = {normalize.apply(images).data_ptr() for _ in range(10)}
    assert len(addresses) == 1


def test_output_tells_the_dtype_without_running():
    spec = ImageSpec(3, 10, 12, torch.uint8)
    assert Normalize(MEAN[:3], STD[:3], dtype=torch.float16).output(spec) == spec._replace(dtype=torch.float16)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Normalize([0.5, 0.5], [0.5]), "mean has 2 values and std 1"),
        (lambda: Normalize([0.5], [0.0]), "above 0"),
        (lambda: Normalize([0.5], [-1.0]), "above 0"),
        (lambda: Normalize([], []), "one finite number per channel"),
        (lambda: Normalize(0.5, 0.5), "as a list"),
        (lambda: Normalize(["a"], [1]), "one number per channel"),
        (lambda: Normalize([float("nan")], [1]), "finite"),
        (lambda: Normalize([0.5], [1], dtype=torch.float64), "torch.float32, torch.float16, torch.bfloat16"),
        (lambda: Normalize([0.5], [1], dtype="float16"), "torch.float32, torch.float16, torch.bfloat16"),
        (lambda: Normalize([0.5], [1e-6], dtype=torch.float16), "more than torch.float16 can hold"),
    ],
)
def test_options_without_meaning_are_refused_at_once(make, message):
    with pytest.raises(OptionError, match=message):
        make()


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros((2, 3, 4, 4)), "torch.float32, and it divides uint8"),
        (torch.zeros((2, 1, 4, 4), dtype=torch.uint8), "3 values, the images 1 channels"),
        (torch.zeros((3, 4, 4), dtype=torch.uint8), "shape"),
    ],
)
def test_images_that_do_not_fit_are_refused(images, message):
    with pytest.raises(OptionError, match=message):
        Normalize(MEAN[:3], STD[:3]).apply(images)
