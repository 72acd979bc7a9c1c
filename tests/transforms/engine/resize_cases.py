"""An antialiased bilinear resize in float64, and images to try it on."""

from __future__ import annotations

import numpy as np
import torch

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
