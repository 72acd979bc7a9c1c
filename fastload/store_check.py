"""Whether what stands beside a byte store can be: of a damaged file, nothing is read by it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fastload.format import Field
from fastload.image_header import MAX_PIXELS
from fastload.store import ENCODINGS, JPEG, RAW, StoreIndex


def impossible_rows(index: StoreIndex, field: Field) -> dict[int, str]:
    """Which of the rows of an index cannot be, and why: place in the index -> reason, of the whole file none.

    Args:
        index: as the datasets beside the store have it.
        field: `images` or `masks`, with a store.
    """
    assert field.store is not None, "a store"
    shape = index.shape.astype(np.int64)[:, : len(field.shape)]
    height, width = shape[:, 0], shape[:, 1]
    end = field.store.num_bytes
    # The sides first, so that their product can be computed.
    sides = (shape.min(axis=1) < 1) | (shape.max(axis=1) > MAX_PIXELS)
    size = sides | (height * width > MAX_PIXELS)
    pixel_bytes = np.where(size, 0, shape.prod(axis=1)) * field.dtype.itemsize
    kinds = index.encoding >= len(ENCODINGS)
    if field.name == "masks":
        kinds |= index.encoding == JPEG
    common = np.array(field.shape)
    rules: list[tuple[NDArray[np.bool_], Callable[[int], str]]] = [
        (
            (index.offset < 0) | (index.bytes < 0) | (index.offset > end - index.bytes),
            lambda at: (
                f"its place in `{field.name}` ({index.bytes[at]:,} bytes from {index.offset[at]:,} on) lies outside "
                f"of its {end:,} bytes"
            ),
        ),
        (kinds, lambda at: f"its encoding in `{field.name}` has the number {index.encoding[at]}, which means nothing"),
        (size, lambda at: f"its size is {width[at]}x{height[at]} (width x height)"),
        (
            ((shape != common) & (common > 0)).any(axis=1),
            lambda at: f"its shape is {tuple(shape[at].tolist())} where rows of `{field.name}` have {field.shape}",
        ),
        (
            (index.encoding == RAW) & (index.bytes != pixel_bytes),
            lambda at: f"it has {index.bytes[at]:,} bytes in `{field.name}`, its pixels need {pixel_bytes[at]:,}",
        ),
        (
            (index.orientation < 1) | (index.orientation > 8),
            lambda at: f"its EXIF orientation is {index.orientation[at]}, which means nothing",
        ),
    ]
    bad = np.flatnonzero(np.logical_or.reduce([rule for rule, _ in rules]))
    return {at: next(said(at) for rule, said in rules if rule[at]) for at in bad.tolist()}
