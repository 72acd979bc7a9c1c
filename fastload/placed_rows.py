"""Stored images of a batch, decoded as far as their windows need it and placed into one output, some at a time.

    bytes of a row --> decode what its window shows --> scratch --one call for some images--> output (B, C, h, w)

Raw pixels in a mapping are placed where they lie.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.errors import ImageError
from fastload.format import PackedFile
from fastload.read.stored import StoredBytes
from fastload.stopwatch import lap
from fastload.store import JPEG, RAW, StoreIndex
from fastload.stored_rows import FACTORS, Doubt, decode_part, decode_row
from fastload.transforms.one_call import place_varied_in_one_call
from fastload.transforms.varied import VariedPlacement

# Decoded images that wait for their resize: so few that they are still in the core's cache when it comes.
SCRATCH_BYTES = 3 * 2**19

Constants = tuple[torch.Tensor, torch.Tensor]
"""Scale and shift of a Normalize, float32 (C,) each."""


class RowPlacer:
    """Places images of one store. Any thread may call it, and has memory of its own for what it decodes.

    Args:
        file: header.
        constants: of a Normalize that is done in the same pass; None: pixels stay uint8.
    """

    def __init__(self, file: PackedFile, constants: Constants | None) -> None:
        self._constants = constants
        self._channels = file.fields["images"].shape[2]
        self._local = threading.local()

    def place(
        self,
        store: StoredBytes,
        rows: NDArray[np.int64],
        index: StoreIndex,
        placement: VariedPlacement,
        factors: NDArray[np.int64],
        output: torch.Tensor,
    ) -> None:
        """Fills the output (B, C, h, w), a view of dense (B, h, w, C) memory.

        Args:
            store: of uint8 images.
            rows: int64 (B,), which rows these are, for messages.
            index: of the rows.
            placement: snapped to the factors.
            factors: int64 (B,), by how much each image may be shrunk while it is decoded.

        Raises:
            FormatError: a row cannot be decoded; names its sample.
        """
        flat = store.flat
        if flat is not None and (index.encoding == RAW).all():
            sources = np.stack([index.offset, index.shape[:, 0], index.shape[:, 1]], axis=1)
            self._run(_as_tensor(flat), sources, placement.table(), output)
            return
        most = _most_bytes(index, placement, factors, self._channels)
        for some in groups(most):
            part, tops = index.part(some), np.zeros(some.stop - some.start, np.int64)
            shrunk = factors[some].copy()
            pixels = []
            memory, used = self._scratch(int(most[some].sum())), 0
            window = placement.part(some).table()[:, :4].tolist()
            taken = store.take(part)
            lap("reading")
            for at, data in enumerate(taken):
                row = int(rows[some.start + at])
                try:
                    doubt = functools.partial(store.require_packed, row)
                    found, tops[at], shrunk[at] = _decoded(
                        data, part, at, window[at], int(shrunk[at]), memory[used:], doubt
                    )
                except (ImageError, MemoryError) as exc:
                    raise store.row_error(row, int(part.encoding[at]), exc) from exc
                pixels.append(found)
                if _lies_in(found, memory):
                    used = _address(found) - _address(memory) + found.nbytes  # rows above it may have been left out
            lap("decoding" if part.encoding.any() else "reading")
            within = placement.part(some).in_parts(shrunk, tops).table()
            self._run_some(memory, pixels, within, output[some])

    def _run_some(
        self, memory: NDArray[np.uint8], pixels: list[NDArray[np.uint8]], table: NDArray[np.int64], output: torch.Tensor
    ) -> None:
        """Places images that lie in scratch memory, and those that found no room there."""
        begin = _address(memory)
        sources = np.array([(_address(one) - begin, *one.shape[:2]) for one in pixels], np.int64)
        inside = [_lies_in(one, memory) for one in pixels]
        if all(inside):
            self._run(torch.from_numpy(memory), sources, table, output)
            return
        for at, one in enumerate(pixels):
            # One that only Pillow decodes, at its full size.
            lies = memory if inside[at] else np.ascontiguousarray(one).reshape(-1)
            source = sources[at : at + 1] if inside[at] else np.array([[0, *one.shape[:2]]])
            self._run(torch.from_numpy(lies), source, table[at : at + 1], output[at : at + 1])

    def _run(
        self, memory: torch.Tensor, sources: NDArray[np.int64], table: NDArray[np.int64], output: torch.Tensor
    ) -> None:
        place_varied_in_one_call(
            memory, torch.from_numpy(sources), torch.from_numpy(table), output, *(self._constants or ())
        )
        lap("transform")

    def _scratch(self, least: int) -> NDArray[np.uint8]:
        """Memory for so many bytes, this thread's own where that suffices."""
        if least > SCRATCH_BYTES:
            return np.empty(least, np.uint8)
        memory: NDArray[np.uint8] | None = getattr(self._local, "memory", None)
        if memory is None:
            memory = self._local.memory = np.empty(SCRATCH_BYTES, np.uint8)
        return memory


def shrink_factors(index: StoreIndex, placement: VariedPlacement) -> NDArray[np.int64]:
    """By how much each image may be shrunk while it is decoded: what is left still covers the output; int64 (B,)."""
    factors = np.ones(len(index), np.int64)
    for factor in sorted(FACTORS):
        high = placement.height >= factor * placement.scaled_height
        wide = placement.width >= factor * placement.scaled_width
        factors[high & wide & (index.encoding == JPEG)] = factor
    return factors


def groups(sizes: NDArray[np.int64]) -> Iterator[slice]:
    """Runs of rows that together have at most SCRATCH_BYTES, or one row that has more.

    Args:
        sizes: int64 (B,), bytes of each.
    """
    first = total = 0
    for at, size in enumerate(sizes.tolist()):
        if at > first and total + size > SCRATCH_BYTES:
            yield slice(first, at)
            first, total = at, 0
        total += size
    if first < len(sizes):
        yield slice(first, len(sizes))


def _most_bytes(
    index: StoreIndex, placement: VariedPlacement, factors: NDArray[np.int64], channels: int
) -> NDArray[np.int64]:
    """Bytes that each image's decoded pixels take at most, int64 (B,)."""
    height, width = (index.shape[:, axis].astype(np.int64) for axis in (0, 1))
    rows: NDArray[np.int64] = np.where(index.encoding == JPEG, -(-height // factors), placement.height)
    most: NDArray[np.int64] = rows * -(-width // factors) * channels
    return most


def _decoded(
    data: Any, index: StoreIndex, at: int, window: list[int], factor: int, memory: NDArray[np.uint8], doubt: Doubt
) -> tuple[NDArray[np.uint8], int, int]:
    """What a window shows of an image, in memory if it has room: pixels, their first row, and their factor."""
    top, left, height, width = window
    shape = int(index.shape[at, 0]), int(index.shape[at, 1]), int(index.shape[at, 2])
    encoding, orientation = int(index.encoding[at]), int(index.orientation[at])
    if encoding == JPEG:
        # So few of them that the factor is the one chosen: windows are multiples of it, except at an image's edge.
        least = height // factor, width // factor
        part = decode_part(data, shape, orientation, (top, left, height, width), least, memory, doubt)
        return part.pixels, part.top, part.factor
    pixels = decode_row(data, encoding, shape, orientation, np.dtype(np.uint8))[top : top + height]
    kept = memory[: pixels.size].reshape(pixels.shape)
    kept[...] = pixels
    return kept, top, 1


def _address(array: NDArray[np.uint8]) -> int:
    return int(array.__array_interface__["data"][0])


def _lies_in(pixels: NDArray[np.uint8], memory: NDArray[np.uint8]) -> bool:
    return 0 <= _address(pixels) - _address(memory) < memory.nbytes


def _as_tensor(flat: NDArray[np.uint8]) -> torch.Tensor:
    """The bytes of a mapping, read-only in truth."""
    # torch warns of arrays that cannot be written to, as if somebody would.
    return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * flat.nbytes).from_address(flat.ctypes.data)))
