"""Samples of a packed file with ragged fields, one at a time, checked: their encoded bytes, and their pixels.

For code that verifies, shows or copies rows; training reads them with `RowReader`. Rows are read with `pread`, so that
a read error of the disk is an error of that row alone.
"""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.errors import FileChangedError, FormatError, ImageError
from fastload.format.header import PIXEL_FIELDS, Field, PackedFile
from fastload.format.ragged import JPEG, RAW, ZSTD, EncodedRow
from fastload.images.decode_part import decode_mask_row, decode_row
from fastload.read.hdf5_chunks import ChunkedRows
from fastload.read.identity import check_open, open_checked
from fastload.read.pread import PreadRows
from fastload.read.ragged_rows import RaggedReader, impossible_rows
from fastload.system.files import read_bytes

CHANGED = "its pixels are not those that were packed (their digest differs)"

BEFORE = "was damaged before it was packed: its bytes are those that were packed"

_CACHE_CHUNKS = 32
_CHECKED_ROWS = 1 << 16


class DamagedBefore(ImageError):
    """A row cannot be decoded, although its bytes are those that were packed."""


@dataclass(frozen=True, eq=False)
class EncodedBytes:
    """One row as it lies in the file; shape (H, W, C) of its pixels, of a mask too, whose C means nothing."""

    data: bytes
    encoding: int
    shape: tuple[int, int, int]
    orientation: int


class CheckedSample(NamedTuple):
    """A sample known to be what was packed.

    Attributes:
        row: its encoded bytes.
        pixels: "images" (H, W, C) and, where there are masks, "masks" (H, W), in native byte order, maybe read-only;
            without "images" if that is a JPEG that was not to be decoded.
    """

    row: EncodedRow
    pixels: dict[str, NDArray[Any]]


def has_ragged(file: PackedFile) -> bool:
    """Whether images or masks are ragged: rows of varying length."""
    return any(file.fields[name].ragged is not None for name in PIXEL_FIELDS if name in file.fields)


class CheckedSamples:
    """Reads images and masks of a packed file with a ragged field. Threads may share it; it cannot be pickled.

    If only one of images and masks is ragged, rows of the other one count as encoded raw.

    Args:
        file: header, as `read_header` gave it; images or masks are ragged.

    Raises:
        MissingFileError, FileChangedError: the file is gone, or not the one whose header was read.
    """

    def __init__(self, file: PackedFile) -> None:
        self.file = file
        self.names = tuple(name for name in PIXEL_FIELDS if name in file.fields)
        self._fd = open_checked(file)
        self._dense: PreadRows | ChunkedRows | None = None
        try:
            ragged = [name for name in self.names if file.fields[name].ragged is not None]
            self._ragged = {name: RaggedReader(self._fd, file, name, "pread") for name in ragged}
            self._impossible = {name: self._impossible_rows(name) for name in ragged}
            self._digest = file.fields.get("digest")
            for name in self.names:
                if name not in ragged:
                    linear = file.fields[name].offset is not None
                    self._dense = (
                        PreadRows(self._fd, file, [name])
                        if linear
                        else ChunkedRows(file, [name], cache_chunks=_CACHE_CHUNKS)
                    )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the file; nothing may be reading."""
        if self._dense is not None:
            self._dense.close()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()

    def check_identity(self) -> None:
        """Raises FileChangedError if the file was written to since its header was read."""
        check_open(self.file, self._fd)

    def is_jpeg(self) -> NDArray[np.bool_]:
        """Returns, bool (N,), whether the image of each row is a JPEG."""
        rows = np.arange(self.file.num_rows)
        return self._ragged["images"].part("encoding", rows) == JPEG if "images" in self._ragged else rows < 0

    def stored_bytes(self, name: str) -> NDArray[np.int64]:
        """Returns the encoded bytes of each row of a field, int64 (N,)."""
        rows = np.arange(self.file.num_rows)
        if name in self._ragged:
            return self._ragged[name].part("bytes", rows)
        return np.full(len(rows), self.file.fields[name].row_bytes)

    def shape(self, row: int) -> tuple[int, int, int]:
        """Returns (H, W, C) of the decoded image of a row."""
        if "images" in self._ragged:
            height, width, channels = self._ragged["images"].part("shape", np.array([row]))[0].tolist()
            return height, width, channels
        height, width, *rest = self.file.fields["images"].shape
        return height, width, (rest or [1])[0]

    def encoded_bytes(self, name: str, row: int) -> EncodedBytes:
        """Returns a row of a field as it lies in the file.

        Raises:
            ImageError: its index entry is impossible, or it cannot be read; the reason only.
        """
        field = self.file.fields[name]
        if field.ragged is None:
            return self._dense_row(name, row)
        try:
            index = self._ragged[name].look_up(np.array([row]))
            if row in self._impossible[name]:
                raise ImageError(impossible_rows(index, field)[0])
            length = int(index.bytes[0])
            data = read_bytes(self._fd, length, field.ragged.base + int(index.offset[0]))
        except OSError as exc:
            raise ImageError(f"cannot be read: {exc.strerror or exc}") from exc
        if len(data) < length:
            raise ImageError("cannot be read: the file ends before this row")
        height, width, channels = index.shape[0].tolist()
        return EncodedBytes(data, int(index.encoding[0]), (height, width, channels), int(index.orientation[0]))

    def pixels(self, name: str, row: int) -> NDArray[Any]:
        """Returns the pixels of an image (H, W, C) or a mask (H, W); in native byte order, maybe read-only.

        Raises:
            ImageError: it cannot be read or decoded; the reason only.
        """
        return self._decoded(name, self.encoded_bytes(name, row))

    def encoded(self, row: int) -> EncodedRow:
        """Returns the encoded bytes of a sample, after checking that they are what was packed.

        Raises:
            ImageError: it cannot be read, or differs from what was packed; the reason only.
        """
        return self.checked(row, jpeg=False).row

    def checked(self, row: int, *, jpeg: bool = True) -> CheckedSample:
        """Returns a sample's encoded bytes and pixels, after checking that they are what was packed.

        Args:
            row: row of the file.
            jpeg: whether to decode a JPEG, too; its digest is that of its bytes.

        Raises:
            DamagedBefore: the packed JPEG cannot be decoded, and is what was packed.
            ImageError: as in `encoded`.
        """
        image = self.encoded_bytes("images", row)
        is_jpeg = image.encoding == JPEG
        pixels = {} if is_jpeg else {"images": self._decoded("images", image)}
        parts: list[bytes | NDArray[Any]] = [image.data if is_jpeg else _little_endian(pixels["images"])]
        mask = self.encoded_bytes("masks", row) if "masks" in self.names else None
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
        """Returns the rows with an impossible index entry; at once: one alone takes as long as reading it."""
        found: set[int] = set()
        for first in range(0, self.file.num_rows, _CHECKED_ROWS):
            rows = np.arange(first, min(first + _CHECKED_ROWS, self.file.num_rows))
            bad = impossible_rows(self._ragged[name].look_up(rows), self.file.fields[name])
            found.update(first + at for at in bad)
        return frozenset(found)

    def _decoded(self, name: str, row: EncodedBytes) -> NDArray[Any]:
        try:
            if name == "masks":
                return decode_mask_row(row.data, row.encoding, row.shape[:2])
            dtype = self.file.fields[name].dtype
            return decode_row(row.data, row.encoding, row.shape, row.orientation, dtype)
        except ImageError as exc:
            what = {JPEG: "its stored JPEG cannot be decoded", ZSTD: "its zstd bytes cannot be decompressed"}
            said = what.get(row.encoding, "its pixels cannot be read")
            raise ImageError(f"{said} ({exc})") from exc

    def _dense_row(self, name: str, row: int) -> EncodedBytes:
        """Returns a row of the field that is not ragged."""
        assert self._dense is not None, "opened with it"
        self.check_identity()
        field = self.file.fields[name]
        out = np.empty((1, *field.shape), field.dtype.newbyteorder("="))
        try:
            self._dense.gather(np.array([row]), {name: out})
        except FileChangedError:
            raise
        except (FormatError, OSError, RuntimeError) as exc:  # where a filter fails
            raise ImageError(f"cannot be read: {exc}") from exc
        return EncodedBytes(_little_endian(out[0]).tobytes(), RAW, self.shape(row), 1)


def require_packed(file: PackedFile, row: int) -> None:
    """Raises ImageError, the reason only, if a row of a file with ragged fields is not what was packed."""
    with closing(CheckedSamples(file)) as samples:
        samples.encoded(row)


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
