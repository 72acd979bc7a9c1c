"""Source images of different sizes placed in one call: against float64, and against the way without TorchScript."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from resize_cases import resize_matrix

from fastload.transforms.engine import cpu_program
from fastload.transforms.engine.cpu_program import place_varied_in_one_call

LEVELS = 1.02  # torch's uint8 resize rounds once after each axis


@st.composite
def batches(draw):
    """Shapes of images, and the rows of a `VariedPlacement.table` of one output size."""
    size = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    shapes, table = [], []
    for _ in range(draw(st.integers(1, 4))):
        height, width = draw(st.integers(1, 40)), draw(st.integers(1, 40))
        left = draw(st.sampled_from([0, 0, 1, 5]))
        top, beyond = draw(st.integers(0, 9)), draw(st.sampled_from([0, 0, 3]))
        down, across = draw(st.sampled_from([size, (size[0] + 4, size[1] + 7), (size[0], size[1] + 1)]))
        if draw(st.integers(0, 3)) == 0:
            height, width = down, across
        offset = draw(st.integers(0, down - size[0])), draw(st.integers(0, across - size[1]))
        shapes.append((top + height + beyond, left + width + beyond))
        table.append((top, left, height, width, *offset, draw(st.booleans()), draw(st.booleans()), down, across))
    return size, shapes, np.array(table, np.int64)


def reference(image: np.ndarray, numbers: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """One image (H, W, C) placed, as float64, before it is rounded."""
    top, left, height, width, y, x, mirrored, flipped, down, across = numbers
    window = image[top : top + height, left : left + width].astype(np.float64)
    resized = np.einsum("yh,hwc,xw->yxc", resize_matrix(height, down), window, resize_matrix(width, across))
    shown = resized[y : y + size[0], x : x + size[1]]
    shown = shown[:, ::-1] if mirrored else shown
    return shown[::-1] if flipped else shown


def in_memory(shapes, channels) -> tuple[list[np.ndarray], torch.Tensor, torch.Tensor]:
    """Images of random bytes; their memory, with a gap before each; and where each begins, with its size."""
    generator = np.random.default_rng(len(shapes))
    images = [generator.integers(0, 256, (*shape, channels), np.uint8) for shape in shapes]
    gap, sources, first = np.zeros(5, np.uint8), [], 0
    for image in images:
        sources.append((first + len(gap), *image.shape[:2]))
        first += len(gap) + image.size
    flat = np.concatenate([part for image in images for part in (gap, image.ravel())])
    return images, torch.from_numpy(flat), torch.tensor(sources)


def outputs(batch, channels, size, dtype=torch.uint8) -> torch.Tensor:
    return torch.empty((batch, *size, channels), dtype=dtype).permute(0, 3, 1, 2)


@given(case=batches(), channels=st.sampled_from([1, 3, 4]), cut_values=st.sampled_from([1, 200, 1 << 20]))
def test_images_are_within_a_level_of_the_exact_mean(case, channels, cut_values):
    size, shapes, table = case
    images, flat, sources = in_memory(shapes, channels)
    output = outputs(len(shapes), channels, size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_program, "_CUT_VALUES", cut_values)  # as if windows were large
        place_varied_in_one_call(flat, sources, torch.from_numpy(table), output)
    for image, numbers, pixels in zip(images, table, output.permute(0, 2, 3, 1).numpy(), strict=True):
        assert np.abs(pixels - reference(image, numbers, size)).max() <= LEVELS


@given(case=batches(), dtype=st.sampled_from([torch.float32, torch.float16]))
def test_the_way_without_torchscript_gives_the_same(case, dtype):
    size, shapes, table = case
    _, flat, sources = in_memory(shapes, 3)
    scale, shift = torch.tensor([0.5, 1.0, 0.25]), torch.tensor([1.0, -20.0, 3.0])
    for constants, kind, level in (((), torch.uint8, 1), ((scale, shift), dtype, 1.07)):
        fast, slow = outputs(len(shapes), 3, size, kind), outputs(len(shapes), 3, size, kind)
        place_varied_in_one_call(flat, sources, torch.from_numpy(table), fast, *constants)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cpu_program, "available", lambda: False)
            place_varied_in_one_call(flat, sources, torch.from_numpy(table), slow, *constants)
        assert (fast.float() - slow.float()).abs().max() <= level


COLUMN = """
import torch
from fastload.transforms.engine.cpu_program import place_varied_in_one_call, place_varied_one_by_one

table = torch.tensor([(0, 0, 3, 1, 0, 0, 0, 0, 2, 1)])
for channels in (1, 3):
    flat = torch.tensor([255, 228, 34], dtype=torch.uint8).repeat_interleave(channels)
    for place in (place_varied_in_one_call, place_varied_one_by_one):
        output = torch.empty((1, 2, 1, channels), dtype=torch.uint8).permute(0, 3, 1, 2)
        place(flat, torch.tensor([(0, 3, 1)]), table, output, None, None)
        print(output[0, :, :, 0].tolist())
"""


def test_a_column_of_pixels_is_resized_right_on_a_cpu_without_avx2():
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "default"}
    done = subprocess.run([sys.executable, "-c", COLUMN], env=environment, capture_output=True, text=True)
    assert done.stdout == "[[245, 107]]\n" * 2 + f"{[[245, 107]] * 3}\n" * 2, done.stderr


def test_pixels_are_normalized_on_their_way_into_the_output():
    table = torch.tensor([(2, 1, 20, 30, 0, 0, 1, 0, 12, 10), (0, 0, 12, 10, 0, 0, 0, 1, 12, 10)])
    _, flat, sources = in_memory([(25, 40), (12, 10)], 3)
    pixels, floats = outputs(2, 3, (12, 10)), outputs(2, 3, (12, 10), torch.float32)
    scale, shift = torch.tensor([0.01, 0.02, 0.03]), torch.tensor([-1.0, 0.5, 0.0])
    place_varied_in_one_call(flat, sources, table, pixels)
    place_varied_in_one_call(flat, sources, table, floats, scale, shift)
    exact = torch.addcmul(shift[:, None, None], pixels.float(), scale[:, None, None])
    assert torch.allclose(floats, exact, rtol=1e-6, atol=1e-6)


def test_no_samples_are_placed_nowhere():
    none = torch.zeros((0, 3), dtype=torch.int64), torch.zeros((0, 10), dtype=torch.int64)
    # Raises nothing; there is nothing to look at.
    place_varied_in_one_call(torch.zeros(0, dtype=torch.uint8), *none, outputs(0, 3, (4, 5)))
