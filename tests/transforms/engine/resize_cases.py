"""What an antialiased bilinear resize is, in float64."""

from __future__ import annotations

import numpy as np


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
