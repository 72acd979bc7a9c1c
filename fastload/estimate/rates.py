"""Measured rates: pixels a second when rows are in memory, and bytes a second from this disk.

Rows in memory are copied or decoded by as many threads as there are CPUs. The disk is read from a file that is written
for it and dropped from memory, in random order, in pieces of 1 MiB, several at once: like the loader, which shuffles
and has the next rows read ahead. One virtual disk gave twice as much in order.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastload.format.ragged import RAW, EncodedRow
from fastload.images.decode_part import decode_row
from fastload.system.files import drop

PASSES = 32
"""Limit for passes over rows that are decoded: small ones are done long before the time is over."""
COPY_PASSES = 4
"""The same for rows of one size that are only copied, each of which is there many times already."""

# Copied rows take more memory than the CPU's caches have, as a file does.
_MORE_THAN_CACHE_BYTES, _MOST_COPIES = 64 * 2**20, 4096
_SLOTS_BYTES = 4 * 2**20
_BATCH = 256
_MOST_SLOTS_BYTES = 2 * 2**30
"""Limit for all threads together; fewer of very large images are decoded at once."""


LEAST_BYTES, MOST_BYTES = 16 * 2**20, 256 * 2**20

_PIECE_BYTES = 2**20
_BLOCK_BYTES = 16 * 2**20
_THREADS = 8
_UINT8 = np.dtype(np.uint8)
_MOST_LEFT = 0.1
"""Fraction of the file that may stay in memory when it is dropped."""

Step = Callable[[int], int]
"""`step(number) -> pixels` (or images): does one part of the work."""


def pixel_rate(
    rows: Sequence[EncodedRow],
    dtype: np.dtype[Any],
    mask_dtype: np.dtype[Any] = _UINT8,
    *,
    threads: int,
    seconds: float = 0.25,
) -> float:
    """Returns the pixels of images (with masks) that so many threads decode in a second; all rows can be decoded."""
    if all(row.encoding == RAW and row.mask_encoding == RAW and row.shape == rows[0].shape for row in rows):
        return per_second(*_copying(rows), threads, seconds)
    if all(row.encoding == RAW for row in rows):
        # Pixels, which are only copied, are repeated in other memory until caches cannot hold them.
        total = sum(len(row.image) for row in rows)
        times = max(1, min(_MORE_THAN_CACHE_BYTES // total, _MOST_COPIES // len(rows)))
        rows = [replace(row, image=memoryview(bytearray(row.image))) for _ in range(times) for row in rows]
    largest = max(row.shape[0] * row.shape[1] * (row.shape[2] * dtype.itemsize + mask_dtype.itemsize) for row in rows)
    slots_bytes = max(largest, _SLOTS_BYTES)
    threads = max(1, min(threads, _MOST_SLOTS_BYTES // slots_bytes))
    return per_second(lambda: _decoding(rows, dtype, mask_dtype, slots_bytes), PASSES * len(rows), threads, seconds)


def per_second(make: Callable[[], Step], steps: int, threads: int, seconds: float) -> float:
    """Returns what so many steps do in a second, or those done within the time: at least one for each thread.

    Each thread makes a step with memory of its own.
    """
    numbers, steps = itertools.count(), max(steps, threads)
    made = [make() for _ in range(threads)]
    made[0](0)  # Warms up.
    started = time.perf_counter()

    def work(step: Step) -> int:
        done = 0
        while (number := next(numbers)) < steps and (number < threads or time.perf_counter() - started < seconds):
            done += step(number)
        return done

    with ThreadPoolExecutor(threads) as pool:
        done = sum(pool.map(work, made))
    return done / (time.perf_counter() - started)


def _copying(rows: Sequence[EncodedRow]) -> tuple[Callable[[], Step], int]:
    """Returns a maker of steps that copy rows of one size into batches, as the loader does, and the number of steps."""
    in_memory = np.stack([np.frombuffer(bytes(row.image) + bytes(row.mask or b""), np.uint8) for row in rows])
    in_memory = np.tile(in_memory, (max(1, _MORE_THAN_CACHE_BYTES // in_memory.nbytes), 1))
    batch = max(1, min(_BATCH, _SLOTS_BYTES // in_memory.shape[1]))
    order = np.random.default_rng(0).permutation(len(in_memory))
    pixels = rows[0].shape[0] * rows[0].shape[1]

    def make() -> Step:
        out = np.zeros((batch, in_memory.shape[1]), np.uint8)

        def step(number: int) -> int:
            first = number * batch % len(order)
            chosen = order[first : first + batch]
            np.take(in_memory, chosen, axis=0, out=out[: len(chosen)], mode="clip")
            return len(chosen) * pixels

        return step

    return make, COPY_PASSES * -(-len(order) // batch)


def _decoding(rows: Sequence[EncodedRow], dtype: np.dtype[Any], mask_dtype: np.dtype[Any], slots_bytes: int) -> Step:
    """Returns a step that decodes one row, into the next part of its own memory."""
    slots, at = np.zeros(slots_bytes, np.uint8), 0

    def step(number: int) -> int:
        nonlocal at
        row = rows[number % len(rows)]
        height, width, channels = row.shape
        image_bytes, mask_bytes = height * width * channels * dtype.itemsize, height * width * mask_dtype.itemsize
        if at + image_bytes + mask_bytes > len(slots):
            at = 0
        out: NDArray[Any] = slots[at : at + image_bytes].view(dtype).reshape(row.shape)
        decode_row(row.image, row.encoding, row.shape, row.orientation, dtype, out)
        if row.mask is not None:
            mask = slots[at + image_bytes : at + image_bytes + mask_bytes].view(mask_dtype).reshape(height, width)
            decode_row(row.mask, row.mask_encoding, (height, width), 1, mask_dtype, mask)
        at += -(-(image_bytes + mask_bytes) // 64) * 64
        return height * width

    return step


class DiskRate(NamedTuple):
    """The rate at which a disk is read."""

    bytes_per_s: float | None  # None if it cannot be measured
    note: str  # how it was measured, or why it cannot be


def measure_disk(folder: Path, num_bytes: int, *, seconds: float = 1.4) -> DiskRate:
    """Returns how fast files in a folder are read while they are not in memory.

    The file for it has no name (O_TMPFILE) if the system supports that, so that nothing is left even after a kill. It
    has `num_bytes`, clipped to LEAST_BYTES and MOST_BYTES and to a tenth of the free space; half of the seconds are for
    writing it.
    """
    try:
        room = shutil.disk_usage(folder).free // 10
        num_bytes = min(max(num_bytes, LEAST_BYTES), MOST_BYTES, room)
        if num_bytes < LEAST_BYTES:
            return DiskRate(None, "cannot be measured: too little room for a file to be read")
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            # Random bytes: some disks and file systems compress.
            block = os.urandom(_PIECE_BYTES) * (_BLOCK_BYTES // _PIECE_BYTES)
            written, end = 0, time.perf_counter() + seconds / 2
            while written + _BLOCK_BYTES <= num_bytes and (not written or time.perf_counter() < end):
                written += os.pwrite(file.fileno(), block, written)
                # Synced one by one: at the end, a slow disk would take a minute for all.
                os.fsync(file.fileno())
            opened = Path(f"/proc/self/fd/{file.fileno()}")
            left = drop(opened) if opened.exists() else None
            if left is None:
                return DiskRate(None, "cannot be measured: this system does not say what is in memory")
            if left > _MOST_LEFT:
                return DiskRate(None, "cannot be measured: its files stay in memory (as on tmpfs)")
            return _read(file.fileno(), written, seconds / 2)
    except OSError as exc:
        return DiskRate(None, f"cannot be measured: {exc.strerror or exc}")


def _read(fd: int, num_bytes: int, seconds: float) -> DiskRate:
    pieces = list(range(0, num_bytes, _PIECE_BYTES))
    random.Random(0).shuffle(pieces)
    remaining = iter(pieces)
    started = time.perf_counter()

    def read_some(_: int) -> int:
        buffer, count = bytearray(_PIECE_BYTES), 0
        for offset in remaining:
            count += os.preadv(fd, [buffer], offset)
            if time.perf_counter() - started > seconds:
                break
        return count

    with ThreadPoolExecutor(_THREADS) as pool:
        count = sum(pool.map(read_some, range(_THREADS)))
    rate = count / (time.perf_counter() - started)
    return DiskRate(rate, f"measured with {count / 2**20:,.0f} MiB in random order, not in memory before")
