"""Colour steps in float64, hue by the standard library's colorsys."""

from __future__ import annotations

import colorsys

import numpy as np

from fastload.transforms.colour import BRIGHTNESS, CONTRAST, HUE, IDENTITY, SATURATION


def exact_step(image: np.ndarray, op: int, factor: float, largest: int) -> np.ndarray:
    """One step on an image (C, H, W) of whole numbers in float64: the exact result before it is made whole."""
    if len(image) == 1 and op in (SATURATION, HUE):
        return image
    if op == HUE:
        return hue_by_colorsys(image, factor, largest)
    gray = np.floor(0.2989 * image[0] + 0.587 * image[1] + 0.114 * image[2]) if len(image) == 3 else image[0]
    other = {IDENTITY: image, BRIGHTNESS: 0.0, CONTRAST: gray.mean(), SATURATION: gray}[op]
    return np.clip(factor * image + (1 - factor) * other, 0, largest)


def hue_by_colorsys(image: np.ndarray, factor: float, largest: int) -> np.ndarray:
    turned = np.empty(image.shape)
    for row, column in np.ndindex(image.shape[1:]):
        h, s, v = colorsys.rgb_to_hsv(*(image[:, row, column] / largest))
        turned[:, row, column] = colorsys.hsv_to_rgb((h + factor) % 1, s, v)
    return turned * 255.999 if largest == 255 else turned * largest + 0.5


def exact_steps(image: np.ndarray, ops, factors, largest: int) -> np.ndarray:
    for op, factor in zip(ops.tolist(), factors.astype(np.float64).tolist(), strict=True):
        image = np.clip(np.floor(exact_step(image, op, factor, largest) + 1e-9), 0, largest)
    return image
