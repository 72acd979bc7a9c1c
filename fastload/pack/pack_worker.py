"""The work of a packing process: reads headers, decodes chunks into the file, and checks chunks that are there already.

No pixel crosses a process border: a worker writes a chunk's rows where they belong in the file and returns digests.
"""

from __future__ import annotations

import fcntl
import math
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import ImageError, OutputError
from fastload.images.fit import Target
from fastload.images.image_header import ImageHeader
from fastload.pack.encode import RowEncoder
from fastload.pack.fill import (
    HEADERS,
    header_reader,
    image_filler,
    mask_filler,
    must_convert,
    reason_of,
    reason_of_mask,
    row_digests_of,
)
from fastload.sources.listing import Arrays, Files, Masks, Pictures
from fastload.system.files import read_into, write_at

_CACHE_BYTES = 512 * 2**10
_COPY_BYTES = 2 * 2**20
_NO_HEADERS = np.zeros(0, HEADERS)


@dataclass(frozen=True)
class HeaderBlock:
    """The headers of some samples.

    Attributes:
        samples: int64 (n,), the samples of the listing.
        headers: HEADERS (n,); zero where a header could not be read.
        kinds: number of images of each kind, for the report of conversions.
        reasons: sample -> why its header could not be read.
    """

    samples: NDArray[np.int64]
    headers: NDArray[np.void]
    kinds: Counter[str]
    reasons: dict[int, str]


@dataclass(frozen=True)
class Extent:
    """Where the rows of one pixel dataset lie in the file being packed: row i at `base + i * row_bytes`."""

    base: int
    row_bytes: int

    def offset(self, row: int) -> int:
        """Returns the byte at which a row begins."""
        return self.base + row * self.row_bytes


@dataclass(frozen=True)
class Extents:
    """The extents of the images and, where there are any, of the masks."""

    images: Extent
    masks: Extent | None = None

    @property
    def all(self) -> tuple[Extent, ...]:
        """Both, in the order in which a row's bytes are hashed."""
        return (self.images,) if self.masks is None else (self.images, self.masks)


@dataclass(frozen=True)
class ChunkTask:
    """The rows of a chunk, or of several that follow one another, to decode or to check.

    Attributes:
        part: path of the file being packed.
        extents: where its rows lie.
        rows: int64 (k,), consecutive.
        target: the size, channels and dtype of each row.
        samples: int64 (k,), the sample of the listing for each row; empty when rows are only checked.
        digests: uint64 (k,), the expected digests: always when checking, when decoding if the listing knows them.
        headers: HEADERS (k,) of the samples; empty where nothing depends on them.
    """

    part: str
    extents: Extents
    rows: NDArray[np.int64]
    target: Target
    samples: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    digests: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    headers: NDArray[np.void] = field(default_factory=lambda: np.zeros(0, HEADERS))


@dataclass(frozen=True)
class ChunkResult:
    """A task that is written: the pixel digests uint64 (k,) of its rows, and row -> reason for those skipped."""

    rows: NDArray[np.int64]
    digests: NDArray[np.uint64]
    reasons: dict[int, str]


class Worker:
    """The tools of one process or thread: the samples' images and masks, buffers, and the open output file.

    Methods that take a task are sent to worker processes by name (`PackPool.run`).
    """

    def __init__(self, images: Files | Pictures | Arrays, masks: Masks | None = None) -> None:
        self.images = images
        self.masks = masks
        self._fill = [image_filler(images), *([] if masks is None else [mask_filler(masks)])]
        self._copies = isinstance(images, Arrays)
        self._memory = [np.zeros(0, np.uint8), np.zeros(0, np.uint8)]
        self._outputs: dict[str, int] = {}
        self.encoder: RowEncoder | None = None
        """Made with the first task that has a `RaggedPlan`, which all tasks share."""
        self.unwritten: dict[int, Any] = {}
        """Task number -> encoded rows that wait for their offsets (`PackPool.run_in_order`)."""

    def close(self) -> None:
        """Closes the output files."""
        for fd in self._outputs.values():
            os.close(fd)
        self._outputs = {}

    def probe(self, samples: NDArray[np.int64]) -> HeaderBlock:
        """Reads the headers of samples; one whose mask has another size counts as unreadable."""
        block = HeaderBlock(samples, np.zeros(len(samples), HEADERS), Counter(), {})
        image_header = header_reader(self.images)
        own = isinstance(self.images, Files)  # Pictures have no file bytes that could be kept.
        mask_header = header_reader(self.masks.files) if self.masks is not None else None
        for at, sample in enumerate(samples.tolist()):
            try:
                header = image_header(sample)
                if mask_header is not None and self.masks is not None and self.masks.present[sample]:
                    _check_same_size(header, sample, mask_header)
            except (ImageError, OSError) as exc:
                block.reasons[sample] = reason_of(exc)
                continue
            block.headers[at] = (header.height, header.width, header.channels, header.bits, header.jpeg * own)
            block.kinds[header.kind] += 1
            block.kinds["frames"] += header.frames > 1
            block.kinds["turned"] += header.turned
        return block

    def pack(self, task: ChunkTask) -> ChunkResult:
        """Decodes a task's rows and writes them to the file; rows that cannot be decoded are written as zeros."""
        digests = np.zeros(len(task.rows), np.uint64)
        reasons: dict[int, str] = {}
        # A few images at a time, so that they are hashed and written while they are still in the core's cache. Copied
        # rows are so quick that calls count more: 0.7 s a GB of 116 kB rows in steps of 2 MiB, 1.0 s of 512 KiB.
        step_bytes = _COPY_BYTES if self._copies else _CACHE_BYTES
        row_bytes = sum(extent.row_bytes for extent in task.extents.all)
        step = max(1, step_bytes // (row_bytes + self._source_row_bytes(task.target)))
        for start in range(0, len(task.rows), step):
            stop = min(start + step, len(task.rows))
            arrays, found = self.decode(task.samples[start:stop], task.target, task.headers[start:stop])
            digests[start:stop] = row_digests_of(arrays)
            if len(task.digests):
                for at in np.flatnonzero(digests[start:stop] != task.digests[start:stop]).tolist():
                    found.setdefault(at, "its pixels are not those that were packed (their digest differs)")
            for at, reason in found.items():
                for array in arrays:
                    array[at] = 0
                reasons[int(task.rows[start + at])] = reason
            for array, extent in zip(arrays, task.extents.all, strict=True):
                self._write(task.part, array, extent.offset(int(task.rows[start])))
        return ChunkResult(task.rows, digests, reasons)

    def _source_row_bytes(self, target: Target) -> int:
        """Returns the bytes of a row of the source where rows are read together and then converted, else 0."""
        if not isinstance(self.images, Arrays) or not must_convert(self.images, target):
            return 0
        return math.prod(self.images.shape) * self.images.dtype.itemsize

    def decode(
        self, samples: NDArray[np.int64], target: Target, headers: NDArray[np.void] = _NO_HEADERS
    ) -> tuple[list[NDArray[Any]], dict[int, str]]:
        """Decodes samples into rows: images (n, H, W, C) and, where there are any, masks (n, H, W).

        Args:
            headers: HEADERS (n,): a sample of another size now counts as not decodable; empty: any size is taken.

        Returns:
            The arrays, valid until the next call, and index -> why a sample could not be decoded.
        """
        shape = (len(samples), target.height, target.width)
        images = self._buffer(0, (*shape, target.channels), target.dtype)
        reasons = self._fill[0](samples, target, images, headers)
        if self.masks is None:
            return [images], reasons
        masks = self._buffer(1, shape, np.dtype(np.uint8))
        for at, reason in self._fill[1](samples, target, masks, headers).items():
            reasons.setdefault(at, reason_of_mask(reason))
        return [images, masks], reasons

    def check(self, task: ChunkTask) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Returns a task's rows, and for each whether its bytes on disk have the expected digest."""
        arrays = []
        for at, extent in enumerate(task.extents.all):
            array = self._buffer(at, (len(task.rows), extent.row_bytes), np.dtype(np.uint8))
            flat = array.reshape(-1)
            flat[read_into(self.open(task.part), flat.data, extent.offset(int(task.rows[0]))) :] = 0
            arrays.append(array)
        return task.rows, row_digests_of(arrays) == task.digests

    def _buffer(self, which: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Returns memory of that shape, the same for every call."""
        num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if len(self._memory[which]) < num_bytes:
            self._memory[which] = np.zeros(num_bytes, np.uint8)
        return self._memory[which][:num_bytes].view(dtype).reshape(shape)

    def _write(self, part: str, array: NDArray[Any], offset: int) -> None:
        try:
            write_at(self.open(part), array.reshape(-1).view(np.uint8).data, offset)
        except OSError as exc:
            raise write_failed(part, exc) from exc

    def open(self, part: str) -> int:
        """Returns a descriptor of a file being packed, which stays open until `close`."""
        if part not in self._outputs:
            fd = os.open(part, os.O_RDWR | os.O_CLOEXEC)
            # A shared lock held while this process lives: after a kill of the packer, the next one waits for it
            # before it touches the file, so that no orphan writes behind its back.
            fcntl.flock(fd, fcntl.LOCK_SH)
            self._outputs[part] = fd
        return self._outputs[part]


def _check_same_size(image: ImageHeader, sample: int, mask_header: Callable[[int], ImageHeader]) -> None:
    try:
        mask = mask_header(sample)
    except ImageError as exc:
        raise ImageError(reason_of_mask(str(exc))) from exc
    if (mask.height, mask.width) != (image.height, image.width):
        raise ImageError(
            f"its mask is {mask.width}x{mask.height}, the image {image.width}x{image.height} (width x height): they "
            f"cannot belong together"
        )


def write_failed(part: str, exc: OSError) -> OutputError:
    """Returns the error that a file being packed cannot be written."""
    return OutputError(
        f"{part}: cannot be written ({exc.strerror}). What was packed is kept: make room, then run the same command "
        f"again."
    )
