"""Images and masks of a file, checked: their bytes, their pixels, and which rows are no longer what was packed.

For code that verifies, shows or copies rows of any file. Rows are read without a mapping, so that a read error of the
disk is an error of that row alone.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastload.errors import DamagedRowError, FileChangedError, FormatError, ImageError
from fastload.format.digests import block_digests, pixel_digests, row_digest
from fastload.format.header import PIXEL_FIELDS, FileIdentity, PackedFile, read_shard
from fastload.format.ragged import JPEG, RAW, EncodedRow
from fastload.images.decode_part import decode_row
from fastload.read.identity import unreadable
from fastload.read.ragged_rows import cannot_be_decoded, impossible_rows
from fastload.read.reader import RowReader
from fastload.system.files import read_bytes

if TYPE_CHECKING:
    from fastload.read.sharded import ShardedReader

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


def has_ragged(file: PackedFile) -> bool:
    """Whether images or masks are ragged: rows of varying length."""
    return any(file.fields[name].ragged is not None for name in PIXEL_FIELDS if name in file.fields)


class CheckedSamples(RowReader):
    """Reads images and masks of any file, without a mapping; must not cross a fork.

    Rows of a field that is not ragged count as encoded raw. A file that fastload did not write has no digests.
    """

    def __init__(self, file: PackedFile) -> None:
        self.names = tuple(name for name in PIXEL_FIELDS if name in file.fields)
        digests = file.fields.get("digest")
        has_digests = file.version is not None and digests is not None and digests.dtype == np.uint64
        super().__init__(file, [*self.names, *["digest"] * has_digests], "pread", cache_chunks=_CACHE_CHUNKS)
        self._digests = self._read_digests() if has_digests else None
        self._local = threading.local()
        # The rows with an impossible index entry; at once: one alone takes as long as reading it.
        self._impossible = {name: set[int]() for name in self._ragged}
        for name, reader in self._ragged.items():
            for first in range(0, file.num_rows, _CHECKED_ROWS):
                index = reader.look_up(np.arange(first, min(first + _CHECKED_ROWS, file.num_rows)))
                self._impossible[name].update(first + at for at in impossible_rows(index, file.fields[name]))

    def is_jpeg(self) -> NDArray[np.bool_]:
        """Returns, bool (N,), whether the image of each row is a JPEG."""
        rows = np.arange(self.file.num_rows)
        return self._ragged["images"].part("encoding", rows) == JPEG if "images" in self._ragged else rows < 0

    def is_turned(self) -> NDArray[np.bool_]:
        """Returns, bool (N,), whether an EXIF orientation is still to be applied to the JPEG of each row."""
        rows = np.arange(self.file.num_rows)
        return self._ragged["images"].part("orientation", rows) != 1 if "images" in self._ragged else rows < 0

    def stored_bytes(self, name: str) -> NDArray[np.int64]:
        """Returns the encoded bytes of each row of a field, int64 (N,)."""
        rows = np.arange(self.file.num_rows)
        if name in self._ragged:
            return self._ragged[name].part("bytes", rows)
        return np.full(len(rows), self.file.fields[name].row_bytes)

    def shape(self, row: int) -> tuple[int, int, int]:
        """Returns (H, W, C) of the decoded image of a row of a packed file."""
        ragged, common = self._ragged.get("images"), self.file.fields["images"].shape
        height, width, channels = ragged.part("shape", np.array([row]))[0].tolist() if ragged else common
        return height, width, channels

    def read(self, name: str, rows: NDArray[np.int64], out: NDArray[Any]) -> dict[int, str]:
        """Copies rows of a field that is not ragged into an array (n, ...) of its dtype in native byte order.

        Returns number -> why that row cannot be read. FileChangedError: the file was written to or truncated.
        """
        failed = unreadable(self.gather, name, rows, out)
        return {at: f"cannot be read: {why}" for at, why in failed.items()}

    def encoded_bytes(self, name: str, row: int) -> EncodedBytes:
        """Returns a row of a field as it lies in the file.

        ImageError, the reason only: its index entry is impossible, or it cannot be read.
        """
        field = self.file.fields[name]
        if field.ragged is None:
            pixels = self.pixels(name, row)
            return EncodedBytes(_little_endian(pixels).tobytes(), RAW, pixels.shape, 1)
        extent, where = field.ragged, np.array([row])

        def read() -> EncodedBytes:
            try:
                index = self._ragged[name].look_up(where)
                if row in self._impossible[name] or not 0 <= index.bytes[0] <= extent.num_bytes:
                    raise ImageError(impossible_rows(index, field).get(0, "its index entry was impossible"))
                length = int(index.bytes[0])
                data = read_bytes(self.fd, length, extent.base + int(index.offset[0]))
            except OSError as exc:
                raise ImageError(f"cannot be read: {exc.strerror or exc}") from exc
            if len(data) < length:
                raise ImageError("cannot be read: the file ends before this row")
            shape = tuple(index.shape[0, : len(field.shape)].tolist())
            return EncodedBytes(data, int(index.encoding[0]), shape, int(index.orientation[0]))

        return self.within(where, read)

    def pixels(self, name: str, row: int) -> NDArray[Any]:
        """Returns the pixels of an image (H, W, C) or a mask (H, W); in native byte order, maybe read-only.

        If fastload did not write the file, the axes are as in the file. ImageError, the reason only: it cannot be read
        or decoded.
        """
        if name in self._ragged:
            return self._decoded(name, self.encoded_bytes(name, row))
        out = self._empty(name, 1)
        for reason in self.read(name, np.array([row]), out).values():
            raise ImageError(reason)
        pixels: NDArray[Any] = out[0]
        return pixels

    def checked(self, row: int, *, jpeg: bool = True) -> CheckedSample:
        """Returns a sample's encoded bytes and pixels, after checking that they are what was packed.

        A JPEG, whose digest is of its bytes, is decoded only if `jpeg` is set. ImageError, the reason only: it
        cannot be read, or differs from what was packed; DamagedBefore: it is what was packed, and cannot be decoded.
        """
        image = self.encoded_bytes("images", row)
        is_jpeg = image.encoding == JPEG
        pixels = {} if is_jpeg else {"images": self._decoded("images", image)}
        parts = [image.data if is_jpeg else _little_endian(pixels["images"])]
        mask = self.encoded_bytes("masks", row) if "masks" in self.names else None
        if mask is not None:
            pixels["masks"] = self._decoded("masks", mask)
            parts.append(pixels["masks"])
        digest = row_digest(parts)
        if self._digests is not None and digest != self._digests[row]:
            raise ImageError(CHANGED)
        if jpeg and is_jpeg:
            try:
                pixels["images"] = self._decoded("images", image)
            except ImageError as exc:
                if self._digests is None:
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
        if not self._ragged:
            at, arrays = np.array(rows, np.int64), []
            memory: dict[str, NDArray[Any]] = self._local.__dict__  # that this thread's next call uses again
            for name in self.names:
                if name not in memory or len(memory[name]) < len(at):
                    memory[name] = self._empty(name, len(at))
                arrays.append(memory[name][: len(at)])
                wrong = self.read(name, at, arrays[-1]) | wrong
            assert self._digests is not None, "a packed file"
            different = np.flatnonzero(pixel_digests(arrays) != self._digests[at]).tolist()
            return [(rows[i], wrong.get(i, CHANGED)) for i in sorted({*different, *wrong})]
        for row in rows:
            try:
                self.checked(row)
            except ImageError as exc:
                wrong[row] = str(exc)
        return list(wrong.items())

    def _read_digests(self) -> NDArray[np.uint64]:
        """Returns the digests of all rows, uint64 (N,): those that were compared with the header, if they were."""
        digests = np.empty(self.file.num_rows, np.uint64)
        for reason in self.read("digest", np.arange(len(digests)), digests).values():
            raise FormatError(f"{self.file.name}: its digests cannot be read: {reason}. Copy the file again.")
        known = self.file.digests
        if known is not None and not np.array_equal(block_digests(digests), known["digest"]):
            raise FileChangedError(
                f"{self.file.name}: its digests are others than when its header was read: it was written to. Write new "
                f"files under a new name."
            )
        return digests

    def _empty(self, name: str, count: int) -> NDArray[Any]:
        field = self.file.fields[name]
        return np.empty((count, *field.shape), field.dtype.newbyteorder("="))

    def _decoded(self, name: str, row: EncodedBytes) -> NDArray[Any]:
        try:
            return decode_row(*row, self.file.fields[name].dtype)
        except (ImageError, MemoryError) as exc:
            raise ImageError(cannot_be_decoded(name, row.encoding, exc)) from exc


class ShardedSamples(CheckedSamples):
    """Reads images and masks of an index, as `CheckedSamples` does of a file; rows behind a URL through the cache.

    A row whose chunk cannot be fetched whole, because one of its rows is damaged, cannot be read.
    """

    def __init__(self, file: PackedFile) -> None:
        assert file.shards is not None, "an index"
        self.file, self.fd, self.held = file, -1, nullcontext()
        self.names = tuple(name for name in PIXEL_FIELDS if name in file.fields)
        self._shards, self._sources, self._ragged = file.shards, {}, {}
        self._local = threading.local()
        self._reader: ShardedReader | None = None  # keeps fetched chunks; None: nothing is fetched
        if file.remote is not None:
            from fastload.read.sharded import ShardedReader  # imports what files of this machine do not need

            self._reader = ShardedReader(file, self.names, "pread")

    @contextmanager
    def _of(self, row: int) -> Iterator[tuple[CheckedSamples, int]]:
        numbers, rows = self._shards.locate(np.array([row]))
        with self._opened(int(numbers[0]), rows) as samples:
            yield samples, int(rows[0])

    @contextmanager
    def _opened(self, number: int, there: NDArray[np.int64] | None = None) -> Iterator[CheckedSamples]:
        """Yields the reader of a shard; of one behind a URL, these rows can be read within, None: only columns.

        ImageError, the reason only: the rows cannot be fetched, since fetched bytes differ from what was packed.
        """
        with ExitStack() as held:
            if self._reader is not None:
                try:
                    rows = np.zeros(0, np.int64) if there is None else there
                    held.enter_context(self._reader.holding_of(number, rows))
                except DamagedRowError as exc:
                    raise ImageError(f"cannot be fetched: {str(exc).rstrip('.')}") from exc
            yield open_samples(read_shard(self.file, number))

    def _joined(self, values: Callable[[CheckedSamples], NDArray[Any]], dtype: Any) -> NDArray[Any]:
        """Returns what each shard says of its rows, in the order of the index, (N,)."""
        found = np.empty(self.file.num_rows, dtype)
        for number in range(len(self._shards.names)):
            there, here = self._shards.rows_of(number)
            with self._opened(number) as samples:
                found[here] = values(samples)[there]
        return found

    def is_jpeg(self) -> NDArray[np.bool_]:
        return self._joined(CheckedSamples.is_jpeg, np.bool_)

    def is_turned(self) -> NDArray[np.bool_]:
        return self._joined(CheckedSamples.is_turned, np.bool_)

    def stored_bytes(self, name: str) -> NDArray[np.int64]:
        return self._joined(lambda samples: samples.stored_bytes(name), np.int64)

    def shape(self, row: int) -> tuple[int, int, int]:
        numbers, there = self._shards.locate(np.array([row]))
        with self._opened(int(numbers[0])) as samples:
            return samples.shape(int(there[0]))

    def read(self, name: str, rows: NDArray[np.int64], out: NDArray[Any]) -> dict[int, str]:
        failed = dict[int, str]()
        numbers, there = self._shards.locate(rows)
        for number in np.unique(numbers).tolist():
            here = np.flatnonzero(numbers == number)
            values = np.empty((len(here), *out.shape[1:]), out.dtype)
            try:
                with self._opened(number, there[here]) as samples:
                    found = samples.read(name, there[here], values)
            except ImageError as exc:
                if len(here) > 1:  # one chunk of several
                    alone = (self.read(name, rows[at : at + 1], values[i : i + 1]) for i, at in enumerate(here))
                    found = {i: why[0] for i, why in enumerate(alone) if why}
                else:
                    found = {0: str(exc)}
            out[here] = values
            failed |= {int(here[at]): why for at, why in found.items()}
        return failed

    def encoded_bytes(self, name: str, row: int) -> EncodedBytes:
        with self._of(row) as (samples, there):
            return samples.encoded_bytes(name, there)

    def pixels(self, name: str, row: int) -> NDArray[Any]:
        with self._of(row) as (samples, there):
            return samples.pixels(name, there)

    def checked(self, row: int, *, jpeg: bool = True) -> CheckedSample:
        with self._of(row) as (samples, there):
            return samples.checked(there, jpeg=jpeg)

    def check_identity(self) -> FileIdentity:
        """Does nothing: each shard is compared with what the index says when it is opened."""
        return self.file.identity

    def close(self) -> None:
        """Releases fetched chunks; the readers of shards stay open until `close_readers`."""
        if self._reader is not None:
            self._reader.close()


def samples_of(file: PackedFile) -> CheckedSamples:
    """Returns a reader of a file, or of an index; the caller closes it."""
    return CheckedSamples(file) if file.shards is None else ShardedSamples(file)


def require_packed(file: PackedFile, row: int) -> None:
    """Raises ImageError, the reason only, if a row of a file with ragged fields is not what was packed."""
    with closing(samples_of(file)) as samples:
        samples.checked(row, jpeg=False)


def _little_endian(pixels: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(pixels, dtype=pixels.dtype.newbyteorder("<"))


def open_samples(file: PackedFile) -> CheckedSamples:
    """Returns a reader that stays open, shared by the threads of this process: one anew would lose decoded chunks."""
    return _opened(file, os.getpid())


@functools.lru_cache(maxsize=64)
def _opened(file: PackedFile, pid: int) -> CheckedSamples:  # by process: neither locks nor HDF5 handles cross a fork
    return samples_of(file)


def close_readers() -> None:
    """Drops the readers that stay open; one still in use is closed after that."""
    _opened.cache_clear()
