"""Samples of a packed file with byte stores, one at a time: as they are stored, as pixels, and whether both are right.

For whatever checks, shows or copies rows; training reads them by `fastload.read`. Rows are read with `pread`, so that
what a failing disk cannot deliver is an error of that row.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.errors import FileChangedError, FormatError, ImageError
from fastload.format import PIXEL_FIELDS, Field, PackedFile
from fastload.long_reads import read_bytes
from fastload.read import RowReader
from fastload.read.identity import check_open, open_checked
from fastload.read.stored import StoredBytes
from fastload.store import JPEG, RAW, ZSTD, EncodedRow
from fastload.store_check import impossible_rows
from fastload.stored_rows import decode_mask_row, decode_row

CHANGED = "its pixels are not those that were packed (their digest differs)"

BEFORE = "was damaged before it was packed: its bytes are those that were packed"

_CACHE_CHUNKS = 32
_CHECKED_ROWS = 1 << 16


class DamagedBefore(ImageError):
    """A row is what was packed, which cannot be decoded."""


@dataclass(frozen=True, eq=False)
class StoredRow:
    """Bytes of one row of a store, and what they are; shape (H, W, C), also of a mask, whose C means nothing."""

    data: bytes
    encoding: int
    shape: tuple[int, int, int]
    orientation: int


class CheckedSample(NamedTuple):
    """A sample that is what was packed.

    Attributes:
        row: as it is stored.
        pixels: of "images" (H, W, C) and, where there are masks, of "masks" (H, W), in native byte order, maybe
            read-only; without "images" where it is a JPEG that was not to be decoded.
    """

    row: EncodedRow
    pixels: dict[str, NDArray[Any]]


def has_stores(file: PackedFile) -> bool:
    """Whether rows of images or masks have lengths of their own."""
    return any(file.fields[name].store is not None for name in PIXEL_FIELDS if name in file.fields)


class StoredSamples:
    """Images and masks of a packed file, some of which lie in stores. Threads may share it; it is not pickled.

    Masks of a file with stores may also lie in rows of one size, and images beside a store of masks: these are taken
    for rows that are stored raw.

    Args:
        file: header, as `read_header` gave it; it has stores.

    Raises:
        MissingFileError, FileChangedError: the file is gone, or not the one whose header was read.
    """

    def __init__(self, file: PackedFile) -> None:
        self.file = file
        self.names = tuple(name for name in PIXEL_FIELDS if name in file.fields)
        self._fd = open_checked(file)
        self._plain: RowReader | None = None
        try:
            stored = [name for name in self.names if file.fields[name].store is not None]
            self._stores = {name: StoredBytes(self._fd, file, name, "pread") for name in stored}
            self._impossible = {name: self._impossible_rows(name) for name in stored}
            self._digest = file.fields.get("digest")
            plain = [name for name in self.names if name not in stored]
            if plain:
                self._plain = RowReader(file, plain, read="pread", cache_chunks=_CACHE_CHUNKS)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file; nothing may be reading."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        if self._plain is not None:
            self._plain.close()

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()

    def check_identity(self) -> None:
        """Raises FileChangedError if the file was written to since its header was read."""
        check_open(self.file, self._fd)

    def is_jpeg(self) -> NDArray[np.bool_]:
        """bool (N,): whether the image of a row is stored as JPEG."""
        rows = np.arange(self.file.num_rows)
        return self._stores["images"].part("encoding", rows) == JPEG if "images" in self._stores else rows < 0

    def stored_bytes(self, name: str) -> NDArray[np.int64]:
        """int64 (N,): bytes of each row of a field, as it is stored."""
        rows = np.arange(self.file.num_rows)
        if name in self._stores:
            return self._stores[name].part("bytes", rows)
        return np.full(len(rows), self.file.fields[name].row_bytes)

    def shape(self, row: int) -> tuple[int, int, int]:
        """(H, W, C) of the image of a row, decoded."""
        if "images" in self._stores:
            height, width, channels = self._stores["images"].part("shape", np.array([row]))[0].tolist()
            return height, width, channels
        height, width, *rest = self.file.fields["images"].shape
        return height, width, (rest or [1])[0]

    def stored(self, name: str, row: int) -> StoredRow:
        """A row as it is stored.

        Raises:
            ImageError: where it should lie cannot be, or cannot be read; the reason only.
        """
        field = self.file.fields[name]
        if field.store is None:
            return self._plain_row(name, row)
        try:
            index = self._stores[name].look_up(np.array([row]))
            if row in self._impossible[name]:
                raise ImageError(impossible_rows(index, field)[0])
            length = int(index.bytes[0])
            data = read_bytes(self._fd, length, field.store.base + int(index.offset[0]))
        except OSError as exc:
            raise ImageError(f"cannot be read: {exc.strerror or exc}") from exc
        if len(data) < length:
            raise ImageError("cannot be read: the file ends before this row")
        height, width, channels = index.shape[0].tolist()
        return StoredRow(data, int(index.encoding[0]), (height, width, channels), int(index.orientation[0]))

    def pixels(self, name: str, row: int) -> NDArray[Any]:
        """(H, W, C) of an image, (H, W) of a mask; in native byte order, maybe read-only.

        Raises:
            ImageError: it cannot be read or decoded; the reason only.
        """
        return self._decoded(name, self.stored(name, row))

    def encoded(self, row: int) -> EncodedRow:
        """A sample as it is stored, known to be what was packed.

        Raises:
            ImageError: it cannot be read, or is another one now; the reason only.
        """
        return self.checked(row, jpeg=False).row

    def checked(self, row: int, *, jpeg: bool = True) -> CheckedSample:
        """As `encoded`, and its pixels.

        Args:
            row: of the file.
            jpeg: decode a JPEG, too, which its digest can do without.

        Raises:
            DamagedBefore: what was packed is a JPEG that cannot be decoded.
            ImageError: as there.
        """
        image = self.stored("images", row)
        is_jpeg = image.encoding == JPEG
        pixels = {} if is_jpeg else {"images": self._decoded("images", image)}
        parts: list[bytes | NDArray[Any]] = [image.data if is_jpeg else _little_endian(pixels["images"])]
        mask = self.stored("masks", row) if "masks" in self.names else None
        if mask is not None:
            pixels["masks"] = self._decoded("masks", mask)
            parts.append(pixels["masks"])
        digest = _digest(parts)
        if self._digest is not None and digest != self._digest_of(self._digest, row):
            raise ImageError(CHANGED)
        if jpeg and is_jpeg:
            try:
                pixels["images"] = self._decoded("images", image)
            except ImageError as exc:
                if self._digest is None:
                    raise
                raise DamagedBefore(f"{exc}; it {BEFORE}") from exc
        encoded = EncodedRow(
            image=image.data,
            encoding=image.encoding,
            shape=image.shape,
            orientation=image.orientation,
            digest=digest,
            mask=mask.data if mask is not None else None,
            mask_encoding=mask.encoding if mask is not None else RAW,
        )
        return CheckedSample(encoded, pixels)

    def _digest_of(self, field: Field, row: int) -> int:
        if field.offset is None:
            raise ImageError("its digest does not lie where fastload writes it")
        data = os.pread(self._fd, field.row_bytes, field.offset + row * field.row_bytes)
        if len(data) < field.row_bytes:
            raise ImageError("cannot be read: the file ends before its digest")
        return int.from_bytes(data, "little")

    def _impossible_rows(self, name: str) -> frozenset[int]:
        """Those of a store that cannot be, found at once: row by row it takes as long as reading one."""
        found: set[int] = set()
        for first in range(0, self.file.num_rows, _CHECKED_ROWS):
            rows = np.arange(first, min(first + _CHECKED_ROWS, self.file.num_rows))
            bad = impossible_rows(self._stores[name].look_up(rows), self.file.fields[name])
            found.update(first + at for at in bad)
        return frozenset(found)

    def _decoded(self, name: str, row: StoredRow) -> NDArray[Any]:
        try:
            if name == "masks":
                return decode_mask_row(row.data, row.encoding, row.shape[:2])
            dtype = self.file.fields[name].dtype
            return decode_row(row.data, row.encoding, row.shape, row.orientation, dtype)
        except ImageError as exc:
            what = {JPEG: "its stored JPEG cannot be decoded", ZSTD: "its zstd bytes cannot be decompressed"}
            said = what.get(row.encoding, "its pixels cannot be read")
            raise ImageError(f"{said} ({exc})") from exc

    def _plain_row(self, name: str, row: int) -> StoredRow:
        """A row of a dataset that is no store."""
        assert self._plain is not None, "opened with it"
        field = self.file.fields[name]
        out = np.empty((1, *field.shape), field.dtype.newbyteorder("="))
        try:
            self._plain.gather(np.array([row]), {name: out})
        except FileChangedError:
            raise
        except (FormatError, OSError, RuntimeError) as exc:  # where a filter fails
            raise ImageError(f"cannot be read: {exc}") from exc
        return StoredRow(_little_endian(out[0]).tobytes(), RAW, self.shape(row), 1)


def _little_endian(pixels: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(pixels, dtype=pixels.dtype.newbyteorder("<"))


def _digest(parts: list[bytes | NDArray[Any]]) -> int:
    digest = xxhash.xxh3_64()
    for part in parts:
        if isinstance(part, bytes):
            digest.update(part)
        else:
            digest.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
    return int(digest.intdigest())
