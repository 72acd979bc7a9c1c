"""An antialiased bilinear resize in float64, and placements to try it on."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st

from fastload.transforms.engine.placement import Placement


def resize_matrix(window: int, scaled: int) -> np.ndarray:
    """The antialiased bilinear resize of one axis as a matrix (scaled, window), float64, tap by tap."""
    matrix = np.zeros((scaled, window))
    scale = window / scaled
    support = max(1.0, scale)
    for i in range(scaled):
        centre = (i + 0.5) * scale
        first, last = max(0, int(centre - support + 0.5)), min(window, int(centre + support + 0.5))
        for k in range(first, last):
            matrix[i, k] = max(0.0, 1 - abs(k - centre + 0.5) / support)
        matrix[i] /= matrix[i].sum()
    return matrix


def reference(image: np.ndarray, placement: Placement, sample: int) -> np.ndarray:
    """One image (H, W, C) placed, as float64, before it is rounded."""
    p, pixels = placement, image.astype(np.float64)
    for axis, size in enumerate(p.size):
        first, window, scaled, offset = (numbers[sample, axis] for numbers in (p.first, p.window, p.scaled, p.offset))
        pixels = pixels.take(range(first, first + window), axis)
        pixels = np.moveaxis(np.tensordot(resize_matrix(window, scaled), pixels, (1, axis)), 0, axis)
        pixels = pixels.take(range(offset, offset + size), axis)
        pixels = np.flip(pixels, axis) if p.turned[sample, axis] else pixels
    return pixels


def in_one_memory(images: list[np.ndarray]) -> tuple[torch.Tensor, np.ndarray]:
    """Images (H, W, C) one after the other behind a gap, and where each begins with its width."""
    begins = np.cumsum([7, *(image.size for image in images)])[:-1]
    flat = np.concatenate([np.zeros(7, np.uint8), *(image.reshape(-1) for image in images)])
    widths = np.array([image.shape[1] for image in images], np.int64)
    return torch.from_numpy(flat), np.stack([begins, widths], axis=1)


@st.composite
def varied(draw, batch=3, factors=(1,)):
    """The shapes of images, a placement of them, and a factor for each that is no larger than its window."""
    shapes, numbers, shrunk = [], [], []
    size = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    for _ in range(batch):
        factor = draw(st.sampled_from(factors))
        window = draw(st.integers(factor, 40)), draw(st.integers(factor, 40))
        first = draw(st.integers(0, 20)), draw(st.integers(0, 20))
        beyond = draw(st.integers(0, 9)), draw(st.integers(0, 9))
        scaled = draw(st.integers(size[0], 20)), draw(st.integers(size[1], 20))
        fits = window[0] >= size[0] and window[1] >= size[1]
        scaled = window if fits and draw(st.integers(0, 3)) == 0 else scaled
        offset = draw(st.integers(0, scaled[0] - size[0])), draw(st.integers(0, scaled[1] - size[1]))
        shapes.append([sum(side) for side in zip(first, window, beyond, strict=True)])
        numbers.append([*first, *window, *scaled, *offset])
        shrunk.append(factor)
    flags = np.array(draw(st.lists(st.booleans(), min_size=2 * batch, max_size=2 * batch)))
    columns = (np.array(numbers)[:, first : first + 2] for first in (0, 2, 4, 6))
    return np.array(shapes), Placement(*columns, np.array([size]), flags.reshape(batch, 2)), np.array(shrunk)
