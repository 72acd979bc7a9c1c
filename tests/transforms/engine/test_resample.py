"""Samples placed one after the other: against float64, and normalized on their way."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from resize_cases import reference, varied

from fastload.transforms import Normalize
from fastload.transforms.engine import resample
from fastload.transforms.engine.placement import resized
from fastload.transforms.engine.resample import place_samples

LEVELS = 1.02  # torch's uint8 resize rounds once after each axis, with 8-bit fractions at least


def images_of(shapes, channels, memory="nhwc") -> list[np.ndarray]:
    generator = np.random.default_rng(len(shapes))
    images = [generator.integers(0, 256, (*shape, channels), np.uint8) for shape in shapes]
    if memory == "nchw":
        return [np.ascontiguousarray(image.transpose(2, 0, 1)).transpose(1, 2, 0) for image in images]
    return images


def placed(images, placement, channels, constants=None, dtype=torch.uint8) -> torch.Tensor:
    output = torch.empty((len(placement), *placement.size, channels), dtype=dtype).permute(0, 3, 1, 2)
    place_samples(images, placement, output, constants)
    return output


@given(
    case=varied(),
    channels=st.sampled_from([1, 2, 3, 4, 5]),
    memory=st.sampled_from(["nhwc", "nchw"]),
    block_values=st.sampled_from([1, 200, 1 << 20]),
    threads=st.sampled_from([1, 2]),
)
def test_images_are_within_a_level_of_the_exact_mean(case, channels, memory, block_values, threads):
    shapes, placement, _ = case
    images = images_of(shapes, channels, memory)
    before = [image.copy() for image in images]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resample, "_BLOCK_VALUES", block_values)  # as if windows were large
        patch.setattr(resample, "SERIAL_VALUES", block_values)
        patch.setattr(torch, "get_num_threads", lambda: threads)
        output = placed(images, placement, channels).permute(0, 2, 3, 1).numpy()
    for sample, (image, pixels) in enumerate(zip(images, output, strict=True)):
        assert np.abs(pixels - reference(image, placement, sample)).max() <= LEVELS
        assert np.array_equal(image, before[sample])


@given(case=varied(), dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
def test_pixels_are_normalized_on_their_way_into_the_output(case, dtype):
    shapes, placement, _ = case
    images, normalize = images_of(shapes, 3), Normalize([0.5, 0.4, 0.3], [0.2, 0.25, 0.3], dtype)
    floats = placed(images, placement, 3, normalize.scale_and_shift(torch.uint8), dtype)
    assert torch.equal(floats, normalize.apply(placed(images, placement, 3)))


COLUMN = """
import numpy as np
import torch
from fastload.transforms.engine.placement import resized
from fastload.transforms.engine.resample import place_samples

placement = resized(np.zeros((1, 2), np.int64), np.array([[3, 1]]), np.array([[2, 1]]))
for channels in (1, 3):
    image = np.array([255, 228, 34], np.uint8).repeat(channels).reshape(3, 1, channels)
    output = torch.empty((1, 2, 1, channels), dtype=torch.uint8).permute(0, 3, 1, 2)
    place_samples([image], placement, output)
    print(output[0, :, :, 0].tolist())
"""


def test_a_column_of_pixels_is_resized_right_on_a_cpu_without_avx2():
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "default"}
    done = subprocess.run([sys.executable, "-c", COLUMN], env=environment, capture_output=True, text=True)
    assert done.stdout == f"[[245, 107]]\n{[[245, 107]] * 3}\n", done.stderr


def test_no_samples_are_placed_nowhere():
    none = np.zeros((0, 2), np.int64)
    assert placed([], resized(none, none, np.array([[4, 5]])), 3).shape == (0, 3, 4, 5)
