"""Samples of a packed file with byte stores, one at a time: as they are stored, as pixels, and whether both are right.

For whatever checks, shows or copies rows; training reads them by `fastload.read`. Rows are read with `pread`, so that
what a failing disk cannot deliver is an error of that row.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.errors import FileChangedError, FormatError, ImageError
from fastload.format import PIXEL_FIELDS, Field, PackedFile, open_hdf5
from fastload.read import RowReader
from fastload.read.identity import check_open, open_checked
from fastload.store import ENCODINGS, JPEG, RAW, ZSTD, EncodedRow, StoreIndex, index_names
from fastload.stored_rows import decode_mask_row, decode_row

CHANGED = "its pixels are not those that were packed (their digest differs)"

BEFORE = "was damaged before it was packed: its bytes are those that were packed"

_CACHE_CHUNKS = 32


class DamagedBefore(ImageError):
    """A row is what was packed, which cannot be decoded."""


@dataclass(frozen=True, eq=False)
class StoredRow:
    """Bytes of one row of a store, and what they are; shape (H, W, C), also of a mask, whose C means nothing."""

    data: bytes
    encoding: int
    shape: tuple[int, int, int]
    orientation: int


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
            with open_hdf5(file.path) as hdf5:
                columns = {index: hdf5[index][()] for name in stored for index in index_names(name)}
                self._digests: NDArray[np.uint64] | None = hdf5["digest"][()] if "digest" in file.fields else None
            self.index = {name: index_of(columns, name, file) for name in stored}
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

    def shape(self, row: int) -> tuple[int, int, int]:
        """(H, W, C) of the image of a row, decoded."""
        if "images" in self.index:
            height, width, channels = self.index["images"].shape[row].tolist()
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
        index = self.index[name]
        offset, length, encoding = int(index.offset[row]), int(index.bytes[row]), int(index.encoding[row])
        shape = self.shape(row)
        orientation = int(index.orientation[row])
        reason = _impossible(field, offset, length, encoding, shape)
        if reason or not 1 <= orientation <= 8:
            raise ImageError(reason or f"its EXIF orientation is {orientation}, which means nothing")
        try:
            data = _read(self._fd, length, field.store.base + offset)
        except OSError as exc:
            raise ImageError(f"cannot be read: {exc.strerror or exc}") from exc
        return StoredRow(data, encoding, shape, orientation)

    def pixels(self, name: str, row: int) -> NDArray[Any]:
        """(H, W, C) of an image, (H, W) of a mask; in native byte order, maybe read-only.

        Raises:
            ImageError: it cannot be read or decoded; the reason only.
        """
        return self._decoded(name, self.stored(name, row))

    def encoded(self, row: int, *, decode: bool = False) -> EncodedRow:
        """A sample as it is stored, known to be what was packed.

        Args:
            decode: decode also what its digest can do without: a JPEG.

        Raises:
            DamagedBefore: what was packed is a JPEG that cannot be decoded.
            ImageError: it cannot be read, or is another one now; the reason only.
        """
        image = self.stored("images", row)
        is_jpeg = image.encoding == JPEG
        parts: list[bytes | NDArray[Any]] = [image.data if is_jpeg else _little_endian(self._decoded("images", image))]
        mask = self.stored("masks", row) if "masks" in self.names else None
        if mask is not None:
            parts.append(self._decoded("masks", mask))
        digest = _digest(parts)
        if self._digests is not None and digest != self._digests[row]:
            raise ImageError(CHANGED)
        if decode and is_jpeg:
            try:
                self._decoded("images", image)
            except ImageError as exc:
                if self._digests is None:
                    raise
                raise DamagedBefore(f"{exc}; it {BEFORE}") from exc
        return EncodedRow(
            image=image.data,
            encoding=image.encoding,
            shape=image.shape,
            orientation=image.orientation,
            digest=digest,
            mask=mask.data if mask is not None else None,
            mask_encoding=mask.encoding if mask is not None else RAW,
        )

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


def index_of(columns: dict[str, Any], name: str, file: PackedFile) -> StoreIndex:
    """Where all rows of a store lie, from the datasets beside it; a mask has its image's size."""
    shape = columns.get("images_shape")
    if shape is None:
        shape = np.tile(np.array([*file.fields["images"].shape, 1][:3], np.int32), (file.num_rows, 1))
    return StoreIndex(
        offset=columns[f"{name}_offset"],
        bytes=columns[f"{name}_bytes"],
        shape=shape,
        encoding=columns[f"{name}_encoding"],
        orientation=columns.get(f"{name}_orientation", np.ones(file.num_rows, np.uint8)),
    )


def _impossible(field: Field, offset: int, length: int, encoding: int, shape: tuple[int, int, int]) -> str:
    """Why no row can lie there; "" when one can."""
    assert field.store is not None, "a store"
    kinds = (RAW, ZSTD) if field.name == "masks" else range(len(ENCODINGS))
    if offset < 0 or length < 0 or offset + length > field.store.num_bytes:
        return f"its place in `{field.name}` (bytes {offset:,} to {offset + length:,}) lies outside of it"
    if encoding not in kinds:
        return f"its encoding in `{field.name}` has the number {encoding}, which means nothing"
    if min(shape) < 1:
        return f"its size is {shape[1]}x{shape[0]} (width x height)"
    rank = 2 if field.name == "masks" else 3
    whole = math.prod(shape[:rank]) * field.dtype.itemsize
    if encoding == RAW and length != whole:
        return f"it has {length:,} bytes in `{field.name}`, its pixels need {whole:,}"
    return ""


def _read(fd: int, length: int, at: int) -> bytes:
    """All these bytes of the file; one pread takes 2 GiB at most."""
    data = os.pread(fd, length, at)
    while len(data) < length:
        more = os.pread(fd, length - len(data), at + len(data))
        if not more:
            raise OSError("the file ends before this row")
        data += more
    return data


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
