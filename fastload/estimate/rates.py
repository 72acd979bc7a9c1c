"""How fast rows come out of a store that is in memory: copied or decoded, in as many threads as there are CPUs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.store import RAW, EncodedRow
from fastload.stored_rows import decode_mask_row, decode_row

PASSES = 32
"""Over the rows that are decoded at most: small ones are done long before the time is out."""
COPY_PASSES = 4
"""Over rows of one size that are only copied, each of which is there many times already."""

# What is copied lies in more memory than the CPU's caches hold, as a file does.
_MORE_THAN_CACHE_BYTES, _MOST_COPIES = 64 * 2**20, 4096
_SLOTS_BYTES = 4 * 2**20
_BATCH = 256
_MOST_SLOTS_BYTES = 2 * 2**30
"""Of all threads together; of images so large that this is little, fewer are decoded at once."""

Step = Callable[[int], int]
"""Does a part of the work, by its number, and returns the pixels done."""


def pixel_rate(rows: Sequence[EncodedRow], dtype: np.dtype[Any], *, threads: int, seconds: float = 0.25) -> float:
    """Pixels (of images; masks come along) that become ready for the transforms in a second.

    Args:
        rows: at least one, each of which can be decoded.
        dtype: of the images' pixels.
        threads: that decode at once.
        seconds: of measuring, unless the passes are over before.
    """
    if all(row.encoding == RAW and row.mask_encoding == RAW and row.shape == rows[0].shape for row in rows):
        return _timed(*_copying(rows), threads, seconds)
    rows = _beyond_cache(rows)
    largest = max(row.shape[0] * row.shape[1] * (row.shape[2] * dtype.itemsize + 1) for row in rows)
    slots_bytes = max(largest, _SLOTS_BYTES)
    threads = max(1, min(threads, _MOST_SLOTS_BYTES // slots_bytes))
    return _timed(lambda: _decoding(rows, dtype, slots_bytes), PASSES * len(rows), threads, seconds)


def _timed(make: Callable[[], Step], steps: int, threads: int, seconds: float) -> float:
    """Pixels a second of so many steps, or of what is done when the time is out: at least one step a thread.

    Args:
        make: makes a step with memory of its own, once a thread.
    """
    turns, steps = itertools.count(), max(steps, threads)
    made = [make() for _ in range(threads)]
    made[0](0)  # what only the first one needs
    started = time.perf_counter()

    def work(step: Step) -> int:
        pixels = 0
        while (turn := next(turns)) < steps and (turn < threads or time.perf_counter() - started < seconds):
            pixels += step(turn)
        return pixels

    with ThreadPoolExecutor(threads) as pool:
        pixels = sum(pool.map(work, made))
    return pixels / (time.perf_counter() - started)


def _copying(rows: Sequence[EncodedRow]) -> tuple[Callable[[], Step], int]:
    """What copies rows of one size batch by batch, as the loader does, and steps for COPY_PASSES."""
    stored = np.stack([np.frombuffer(bytes(row.image) + bytes(row.mask or b""), np.uint8) for row in rows])
    stored = np.tile(stored, (max(1, _MORE_THAN_CACHE_BYTES // stored.nbytes), 1))
    batch = max(1, min(_BATCH, _SLOTS_BYTES // stored.shape[1]))
    order = np.random.default_rng(0).permutation(len(stored))
    pixels = rows[0].shape[0] * rows[0].shape[1]

    def make() -> Step:
        out = np.zeros((batch, stored.shape[1]), np.uint8)

        def step(turn: int) -> int:
            first = turn * batch % len(order)
            chosen = order[first : first + batch]
            np.take(stored, chosen, axis=0, out=out[: len(chosen)], mode="clip")
            return len(chosen) * pixels

        return step

    return make, COPY_PASSES * -(-len(order) // batch)


def _decoding(rows: Sequence[EncodedRow], dtype: np.dtype[Any], slots_bytes: int) -> Step:
    """What decodes a row into memory of its own, one slot after another."""
    slots, at = np.zeros(slots_bytes, np.uint8), 0

    def step(turn: int) -> int:
        nonlocal at
        row = rows[turn % len(rows)]
        height, width, channels = row.shape
        image_bytes, mask_bytes = height * width * channels * dtype.itemsize, height * width
        if at + image_bytes + mask_bytes > len(slots):
            at = 0
        out: NDArray[Any] = slots[at : at + image_bytes].view(dtype).reshape(row.shape)
        decode_row(row.image, row.encoding, row.shape, row.orientation, dtype, out)
        if row.mask is not None:
            mask = slots[at + image_bytes : at + image_bytes + mask_bytes].reshape(height, width)
            decode_mask_row(row.mask, row.mask_encoding, (height, width), mask)
        at += -(-(image_bytes + mask_bytes) // 64) * 64
        return height * width

    return step


def _beyond_cache(rows: Sequence[EncodedRow]) -> Sequence[EncodedRow]:
    """The rows; pixels, which are only copied, several times over, each time in other memory."""
    total = sum(len(row.image) for row in rows)
    if any(row.encoding != RAW for row in rows):
        return rows
    times = max(1, min(_MORE_THAN_CACHE_BYTES // total, _MOST_COPIES // len(rows)))
    return [replace(row, image=memoryview(bytearray(row.image))) for _ in range(times) for row in rows]
