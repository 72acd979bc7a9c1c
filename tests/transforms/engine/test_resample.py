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
from placement_strategies import varied
from resize_cases import in_one_memory, reference

from fastload.system import native
from fastload.transforms import Normalize
from fastload.transforms.engine import resample
from fastload.transforms.engine.buffers import without_gil
from fastload.transforms.engine.placement import resized
from fastload.transforms.engine.resample import place_batch, place_samples

COMPILED = [torch.uint8, torch.float32, torch.bfloat16]
LEVELS = 1.02  # torch's uint8 resize rounds once after each axis, with 8-bit fractions at least


def images_of(shapes, channels) -> list[np.ndarray]:
    generator = np.random.default_rng(len(shapes))
    return [generator.integers(0, 256, (*shape, channels), np.uint8) for shape in shapes]


def placed(images, placement, channels, constants=None, dtype=torch.uint8, compiled=False) -> torch.Tensor:
    """By TorchScript, or by native.c where it was built and `compiled` is set."""
    flat, sources = in_one_memory(images)
    before = flat.clone()
    output = torch.empty((len(placement), *placement.size, channels), dtype=dtype).permute(0, 3, 1, 2)
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(native, "can_make", lambda dtype: False)
        place_samples(flat, sources, placement, output, constants)
    assert torch.equal(flat, before)
    return output


@given(
    case=varied(),
    channels=st.sampled_from([1, 2, 3, 4, 5]),
    block_values=st.sampled_from([1, 200, 1 << 20]),
    compiled=st.booleans(),
)
def test_images_are_within_a_level_of_the_exact_mean(case, channels, block_values, compiled):
    shapes, placement, _ = case
    images = images_of(shapes, channels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resample, "_BLOCK_VALUES", block_values)  # as if windows were large
        patch.setattr(resample, "SERIAL_VALUES", block_values)
        output = placed(images, placement, channels, compiled=compiled)
    for sample, (image, pixels) in enumerate(zip(images, output.permute(0, 2, 3, 1).numpy(), strict=True)):
        assert np.abs(pixels - reference(image, placement, sample)).max() <= LEVELS


@given(
    case=varied(),
    channels=st.sampled_from([1, 3, 4]),
    dtype=st.sampled_from([torch.uint8, torch.float32, torch.bfloat16]),
)
@pytest.mark.parametrize("streamed_bytes", [0, 1 << 62])
def test_compiled_code_and_torchscript_make_the_same_images(streamed_bytes, case, channels, dtype):
    if native.library() is None:
        pytest.skip("needs the compiled loops")
    shapes, placement, _ = case
    scale = [0.2, 0.25, 0.3, 0.4][:channels]
    constants = None if dtype == torch.uint8 else Normalize(scale, scale).scale_and_shift(torch.uint8)
    images = images_of(shapes, channels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "STREAMED_BYTES", streamed_bytes)
        compiled = placed(images, placement, channels, constants, dtype, compiled=True)
    by_torch = placed(images, placement, channels, constants, dtype)
    # torch's loop for another CPU may round otherwise: by a level, of which 0.2 is the largest step apart from 1/255.
    step = 1 if dtype == torch.uint8 else 1.02 * max(1 / (255 * value) for value in scale)
    torch.testing.assert_close(compiled.float(), by_torch.float(), rtol=0.01, atol=step)


@given(case=varied(), dtype=st.sampled_from([torch.uint8, torch.float32, torch.bfloat16]))
def test_without_torchscript_the_same_program_runs_in_python(case, dtype):
    shapes, placement, _ = case
    constants = None if dtype == torch.uint8 else Normalize([0.5], [0.2]).scale_and_shift(torch.uint8)
    images = images_of(shapes, 1)
    assert without_gil(*resample._PROGRAM) is not resample._place
    compiled = placed(images, placement, 1, constants, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(torch.jit, "CompilationUnit")
        patch.setattr(resample, "without_gil", without_gil.__wrapped__)
        assert resample.without_gil(*resample._PROGRAM) is resample._place
        assert torch.equal(placed(images, placement, 1, constants, dtype), compiled)


@pytest.mark.parametrize("rows", [None, np.array([3, 0, 3])])
def test_a_batch_is_placed_from_any_memory(rows):
    images = torch.from_numpy(np.stack(images_of([(6, 9)] * 4, 3)))
    count = 4 if rows is None else 3
    first, window = np.ones((count, 2), np.int64), np.full((count, 2), 5)
    placement = resized(first, window, np.array([[3, 4]]))
    results = []
    for given_images in (images, images.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)):
        output = torch.empty((count, 3, 4, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
        place_batch(given_images, rows, placement, output)
        results.append(output)
    picked = images.numpy() if rows is None else images.numpy()[rows]
    expected = placed(list(picked), placement, 3, compiled=True)
    assert all(torch.equal(result, expected) for result in results)
    none = np.zeros((0, 2), np.int64)
    assert placed([], resized(none, none, np.array([[4, 5]])), 3).shape == (0, 3, 4, 5)


@given(case=varied(), dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]), compiled=st.booleans())
def test_pixels_are_normalized_on_their_way_into_the_output(case, dtype, compiled):
    shapes, placement, _ = case
    images, normalize = images_of(shapes, 3), Normalize([0.5, 0.4, 0.3], [0.2, 0.25, 0.3], dtype)
    floats = placed(images, placement, 3, normalize.scale_and_shift(torch.uint8), dtype, compiled=compiled)
    # A fused product and sum is rounded once, others twice.
    rounding = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    expected = normalize.apply(placed(images, placement, 3, compiled=compiled))
    torch.testing.assert_close(floats, expected, rtol=rounding, atol=rounding)


COLUMN = """
import numpy as np
import torch
from fastload.transforms.engine.placement import resized
from fastload.transforms.engine.resample import place_samples

placement = resized(np.zeros((1, 2), np.int64), np.array([[3, 1]]), np.array([[2, 1]]))
for channels in (1, 3):
    image = np.array([255, 228, 34], np.uint8).repeat(channels).reshape(3, 1, channels)
    output = torch.empty((1, 2, 1, channels), dtype=torch.uint8).permute(0, 3, 1, 2)
    place_samples(torch.from_numpy(image).view(-1), np.array([[0, 1]]), placement, output)
    print(output[0, :, :, 0].tolist())
"""


def test_a_column_of_pixels_is_resized_right_on_a_cpu_without_avx2():
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "default"}
    done = subprocess.run([sys.executable, "-c", COLUMN], env=environment, capture_output=True, text=True)
    assert done.stdout == f"[[245, 107]]\n{[[245, 107]] * 3}\n", done.stderr
