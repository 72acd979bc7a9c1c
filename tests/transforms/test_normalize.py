from __future__ import annotations

import numpy as np
import pytest
import torch
from batches import LAYOUTS, in_channels_last_memory, some_images
from hypothesis import given, settings
from hypothesis import strategies as st

from fastload.errors import OptionError
from fastload.transforms import Normalize
from fastload.transforms.engine import resample
from fastload.transforms.normalize import normalize_at_once

MEAN, STD = (0.485, 0.456, 0.406, 0.5), (0.229, 0.224, 0.225, 0.01)
ROUNDING = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}  # half a unit in the last place


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
    channels=st.integers(1, 4),
    size=st.tuples(st.integers(1, 5), st.integers(1, 40), st.integers(1, 40)),
    dtype=st.sampled_from([np.uint8, np.uint16]),
    layout=st.sampled_from(LAYOUTS),
    output=st.sampled_from(list(ROUNDING)),
    block=st.sampled_from([1, 700, 1 << 15]),
)
def test_normalize_is_within_its_stated_error_on_the_cpu_and_by_the_way_for_devices(
    channels, size, dtype, layout, output, block
):
    images = some_images(*size, dtype, channels=channels, layout=layout)
    mean, std = MEAN[:channels], STD[:channels]
    normalize = Normalize(mean, std, dtype=output)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resample, "SERIAL_VALUES", block)
        result = normalize.apply(images)
    for made in (result, normalize_at_once(images, *normalize.scale_and_shift(images.dtype), output)):
        assert made.dtype == output and made.shape == images.shape
        assert in_channels_last_memory(made)
        assert_close(made, images, mean, std)


@settings(max_examples=2 * settings.default.max_examples)
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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Normalize([0.5, 0.5], [0.5]), "mean has 2 values and std 1"),
        (lambda: Normalize([0.5], [0.0]), "above 0"),
        (lambda: Normalize([0.5], [-1.0]), "above 0"),
        (
            lambda: Normalize((123.675, 116.28, 103.53), (58.395, 57.12, 57.375)),
            r"pixels from 0 to 255.*Normalize\(mean=\(0.485, 0.456, 0.406\), std=\(0.229, 0.224, 0.225\)\)",
        ),
        (lambda: Normalize([32767.5], [0.25]), r"from 0 to 65535.*Normalize\(mean=\(0.5\), std=\(0.25\)\)"),
        (lambda: Normalize([0] * 3, [255] * 3), r"0 to 255.*Normalize\(mean=\(0, 0, 0\), std=\(1, 1, 1\)\)"),
        (lambda: Normalize([0.5, 0.4], [0.2, 51]), r"0 to 255.*Normalize\(mean=\(0.5, 0.4\), std="),
        (lambda: Normalize([0], [65535]), r"0 to 65535.*Normalize\(mean=\(0\), std=\(1\)\)"),
        (lambda: Normalize([-1], [2]), r"0 to 255"),
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
