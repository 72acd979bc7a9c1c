"""Images and masks of a file, checked: their bytes, their pixels, and which rows are no longer what was packed.

For code that verifies, shows or copies rows of any file. Rows are read without a mapping, so that a read error of the
disk is an error of that row alone.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Sequence
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastload.errors import DamagedRowError, FileChangedError, FormatError, ImageError
from fastload.format.digests import block_digests, pixel_digests, row_digest
from fastload.format.header import PIXEL_FIELDS, Field, PackedFile, read_shard
from fastload.format.ragged import JPEG, RAW, EncodedRow
from fastload.images.decode_part import decode_row
from fastload.read.reader import open_rows
from fastload.read.row_errors import cannot_be_decoded, unreadable
from fastload.read.row_table import index_value
from fastload.system.files import read_bytes

CHANGED = "its pixels changed since packing (their digest differs)"

_CACHE_CHUNKS = 32
_CHECKED_ROWS = 1 << 16


class DamagedBefore(ImageError):
    """A row cannot be decoded, although its bytes are those that were packed."""


class EncodedBytes(NamedTuple):
    """One row as it lies in the file; shape (H, W, C) of its pixels, (H, W) of a mask."""

    data: bytes
    encoding: int
    shape: tuple[int, ...]
    orientation: int


class CheckedSample(NamedTuple):
    """A sample known to be what was packed: its encoded bytes; its pixels, in native byte order, maybe read-only.

    They are "images" (H, W, C), unless that is a JPEG that was not to be decoded, and "masks" (H, W) if there are any.
    """

    row: EncodedRow
    pixels: dict[str, NDArray[Any]]


class CheckedSamples:
    """Reads images and masks of any dataset, without a mapping; must not cross a fork.

    Rows of a field that is not ragged count as encoded raw. A file that fastload did not write has no digests. A row
    behind a URL whose chunk cannot be fetched whole, because one of its rows is damaged, cannot be read.
    """

    def __init__(self, file: PackedFile) -> None:
        self.file, self.names = file, tuple(name for name in PIXEL_FIELDS if name in file.fields)
        digests = file.fields.get("digest")
        self._has_digests = file.version is not None and digests is not None and digests.dtype == np.uint64
        fields = [*self.names, *["digest"] * self._has_digests]
        self._rows = open_rows(file, fields, "pread", cache_chunks=_CACHE_CHUNKS)
        self._encoded = {name: self._rows.encoded(name) for name in file.ragged}
        self._local, self._lock = threading.local(), threading.Lock()
        self._shards: dict[int, _ShardFacts] = {}
        if file.holds_rows:
            self._shard(0)

    def part(self, name: str, part: str) -> NDArray[Any]:
        """Returns what the index says of each row of a field, (N,): its "bytes", "encoding" or "orientation"."""
        if name in self._encoded:
            return self._encoded[name].part(part, np.arange(self.file.num_rows))
        return np.broadcast_to(index_value(self.file.fields[name], part), self.file.num_rows)

    def shape(self, row: int) -> tuple[int, int, int]:
        """Returns (H, W, C) of the decoded image of a row of a packed file."""
        encoded, common = self._encoded.get("images"), self.file.fields["images"].shape
        height, width, channels = encoded.part("shape", np.array([row]))[0].tolist() if encoded else common
        return height, width, channels

    def read(self, name: str, rows: NDArray[np.int64], out: NDArray[Any]) -> dict[int, str]:
        """Copies rows of a field that is not ragged into an array (n, ...) of its dtype in native byte order.

        Returns number -> why that row cannot be read. FileChangedError: the file was written to or truncated.
        """
        failed = unreadable(self._rows.gather, name, rows, out)
        return {at: f"cannot be read: {why}" for at, why in failed.items()}

    def encoded_bytes(self, name: str, row: int) -> EncodedBytes:
        """Returns a row of a field as it lies in the file.

        ImageError, the reason only: its index entry is impossible, or it cannot be read.
        """
        if (field := self.file.ragged.get(name)) is None:
            pixels = self.pixels(name, row)
            return EncodedBytes(_little_endian(pixels).tobytes(), RAW, pixels.shape, 1)
        where = np.array([row])

        def read() -> EncodedBytes:
            try:
                index = self._encoded[name].look_up(where)
                number, offset, length = (int(one[0]) for one in (index.shard, index.offset, index.bytes))
                if row in self._shard(number).impossible[name] or not 0 <= length <= field.shard_bytes[number]:
                    raise ImageError(self._encoded[name].impossible(index).get(0, "its index entry was impossible"))
                one = self._rows.store.files.opened[number]
                data = read_bytes(one.fd, length, one.header.fields[name].base + offset)
            except OSError as exc:
                raise ImageError(f"cannot be read: {exc.strerror or exc}") from exc
            if len(data) < length:
                raise ImageError("cannot be read: the file ends before this row")
            shape = tuple(index.shape[0, : len(field.shape)].tolist())
            return EncodedBytes(data, int(index.encoding[0]), shape, int(index.orientation[0]))

        try:
            return self._rows.within(where, read)
        except DamagedRowError as exc:
            raise ImageError(f"cannot be fetched: {str(exc).rstrip('.')}") from exc

    def pixels(self, name: str, row: int) -> NDArray[Any]:
        """Returns the pixels of an image (H, W, C) or a mask (H, W); in native byte order, maybe read-only.

        If fastload did not write the file, the axes are as in the file. ImageError, the reason only: it cannot be read
        or decoded.
        """
        if name in self._encoded:
            return _decoded(self.file.fields[name], self.encoded_bytes(name, row))
        out = self.file.fields[name].empty(1)
        for reason in self.read(name, np.array([row]), out).values():
            raise ImageError(reason)
        pixels: NDArray[Any] = out[0]
        return pixels

    def checked(self, row: int, *, jpeg: bool = True) -> CheckedSample:
        """Returns a sample's encoded bytes and pixels, after checking that they are what was packed.

        A JPEG, whose digest is of its bytes, is decoded only if `jpeg` is set. ImageError, the reason only: it
        cannot be read, or differs from what was packed; DamagedBefore: it is what was packed, and cannot be decoded.
        """
        image, fields = self.encoded_bytes("images", row), self.file.fields
        is_jpeg = image.encoding == JPEG
        pixels = {} if is_jpeg else {"images": _decoded(fields["images"], image)}
        parts = [image.data if is_jpeg else _little_endian(pixels["images"])]
        mask = self.encoded_bytes("masks", row) if "masks" in self.names else None
        if mask is not None:
            pixels["masks"] = _decoded(fields["masks"], mask)
            parts.append(pixels["masks"])
        digest = row_digest(parts)
        if self._has_digests and digest != self._digests(np.array([row]))[0]:
            raise ImageError(CHANGED)
        if jpeg and is_jpeg:
            try:
                pixels["images"] = _decoded(fields["images"], image)
            except ImageError as exc:
                if not self._has_digests:
                    raise
                raise DamagedBefore(
                    f"{exc}; it was damaged before it was packed: its bytes are those that were packed"
                ) from exc
        (height, width, channels), orientation = image.shape, image.orientation
        of_mask = (mask.data, mask.encoding) if mask else ()
        encoded = EncodedRow(image.data, image.encoding, (height, width, channels), orientation, digest, *of_mask)
        return CheckedSample(encoded, pixels)

    def damaged(self, rows: Sequence[int]) -> list[tuple[int, str]]:
        """Returns (row, why) of rows that are not what was packed, `CHANGED`, or cannot be read or decoded.

        Rows that are not ragged are read and hashed all at once.
        """
        wrong = dict[int, str]()
        if not self._encoded:
            at, arrays = np.array(rows, np.int64), []
            memory: dict[str, NDArray[Any]] = self._local.__dict__  # that this thread's next call uses again
            for name in self.names:
                if name not in memory or len(memory[name]) < len(at):
                    memory[name] = self.file.fields[name].empty(len(at))
                arrays.append(memory[name][: len(at)])
                wrong = self.read(name, at, arrays[-1]) | wrong
            different = np.flatnonzero(pixel_digests(arrays) != self._digests(at)).tolist()
            return [(rows[i], wrong.get(i, CHANGED)) for i in sorted({*different, *wrong})]
        for row in rows:
            try:
                self.checked(row)
            except ImageError as exc:
                wrong[row] = str(exc)
        return list(wrong.items())

    def close(self) -> None:
        """Closes its files, and releases fetched chunks."""
        self._rows.close()

    def _digests(self, rows: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Returns the digests of rows, uint64 (n,): those that were compared with the header, if they were."""
        located = self._rows.store.table.locate(rows)
        found = np.empty(len(rows), np.uint64)
        for number, there, at in located.parts:
            found[at] = self._shard(number).digests[there]
        return found

    def _shard(self, number: int) -> _ShardFacts:
        """Returns what was read at once of a file, as one row alone takes as long."""
        with self._lock:
            if (known := self._shards.get(number)) is None:
                known = self._shards[number] = self._read_shard(number)
            return known

    def _read_shard(self, number: int) -> _ShardFacts:
        there, here = self.file.shards.rows_of(number)
        impossible = {name: set[int]() for name in self._encoded}
        for name, encoded in self._encoded.items():
            for first in range(0, len(here), _CHECKED_ROWS):
                some = here[first : first + _CHECKED_ROWS]
                with self._rows.store.holding(self._rows.store.table.locate(some), ()):
                    index = encoded.look_up(some)
                impossible[name].update(some[list(encoded.impossible(index))].tolist())
        digests = np.empty(len(here) if self._has_digests else 0, np.uint64)
        if self._has_digests:
            values = np.empty_like(digests)
            for reason in self.read("digest", here, values).values():
                raise FormatError(f"{self.file.name}: its digests cannot be read: {reason}. Copy the file again.")
            digests[there] = values
            known = read_shard(self.file, number).digests if not self.file.holds_rows else self.file.digests
            if known is not None and not np.array_equal(block_digests(digests), known["digest"]):
                raise FileChangedError(
                    f"{self.file.name}: its digests are others than when its header was read: it was written to. "
                    f"Write new files under a new name."
                )
        return _ShardFacts(impossible, digests)


def _decoded(field: Field, row: EncodedBytes) -> NDArray[Any]:
    """Returns the pixels of a row. ImageError, the reason only: it cannot be decoded."""
    try:
        return decode_row(*row, field.dtype)
    except (ImageError, MemoryError) as exc:
        raise ImageError(cannot_be_decoded(field.name, row.encoding, exc)) from exc


class _ShardFacts(NamedTuple):
    """What is known of a file: by field the dataset's rows with an impossible index entry; the digests of its rows."""

    impossible: dict[str, set[int]]
    digests: NDArray[np.uint64]


def require_packed(file: PackedFile, row: int) -> None:
    """Raises ImageError, the reason only, if a row of a file with ragged fields is not what was packed."""
    with closing(CheckedSamples(file)) as samples:
        samples.checked(row, jpeg=False)


def _little_endian(pixels: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(pixels, dtype=pixels.dtype.newbyteorder("<"))


def open_samples(file: PackedFile) -> CheckedSamples:
    """Returns a reader that stays open, shared by the threads of this process: one anew would lose decoded chunks."""
    return _opened(file, os.getpid())


@functools.lru_cache(maxsize=64)
def _opened(file: PackedFile, pid: int) -> CheckedSamples:  # by process: neither locks nor HDF5 handles cross a fork
    return CheckedSamples(file)


def close_readers() -> None:
    """Drops the readers that stay open; one still in use is closed after that."""
    _opened.cache_clear()
