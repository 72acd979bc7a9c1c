"""Rows of varying length: their index, their encoded bytes, and their pixels.

`RaggedReader` decodes in the calling thread: whole rows, or the parts of images that windows show.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from fastload.errors import DamagedRowError, FormatError, ImageError, ReadError, typed
from fastload.format.header import Field, PackedFile
from fastload.format.ragged import ENCODINGS, INDEX_DTYPES, JPEG, MAX_ROW_BYTES, RAW, ZSTD, RaggedIndex, index_names
from fastload.images.decode_part import DecodedPart, OnSuspect, decode_part, decode_row, offset_in
from fastload.read.identity import read_error, sample_name
from fastload.read.linear import MappedRows, PreadRows
from fastload.system import native
from fastload.timing.stopwatch import lap

Decoded = TypeVar("Decoded")


class RaggedReader:
    """Reads the encoded rows of one ragged field. Any thread may call it, also after a fork.

    Args:
        fd: descriptor of the file, open for reading as long as this lives.
        read: "map" hands out views of a mapping of the file, "pread" copies.
        verify: called with the file and a row that libjpeg refuses or that cannot be decoded; raises ImageError, the
            reason only, if the row is not what was packed. None: such rows count as damaged after packing, if not even
            Pillow decodes them.
    """

    def __init__(
        self,
        fd: int,
        file: PackedFile,
        name: str,
        read: Literal["map", "pread"],
        verify: Callable[[PackedFile, int], None] | None = None,
    ) -> None:
        extent = file.fields[name].ragged
        assert extent is not None, f"{name} is not ragged"
        self._file = file
        self._field = file.fields[name]
        self._base = extent.base
        self._verify = verify
        # A mask has its image's size.
        self._parts = {part: f"{name}_{part}" for part in INDEX_DTYPES if f"{name}_{part}" in index_names(name)}
        if "shape" not in self._parts and "images_shape" in file.fields:
            self._parts["shape"] = "images_shape"
        datasets = tuple(self._parts.values())
        if any(file.fields[data].offset is None for data in datasets):
            raise FormatError(f"{file.path}: the index of {name!r} does not lie in one piece. Pack it again.")
        self._rows = MappedRows(fd, file, datasets) if read == "map" else PreadRows(fd, file, datasets)
        # All bytes of the field as mapped, uint8 (T,), read-only, valid until `close`; None if nothing is mapped.
        self.flat: NDArray[np.uint8] | None = None
        if isinstance(self._rows, MappedRows):
            self.flat = self._rows.flat(extent.base, extent.num_bytes)
        # Slicing a memoryview takes a quarter of the time that slicing an array takes.
        self._view = None if self.flat is None else self.flat.data
        self._packed: set[int] = set()  # suspected rows that turned out to be what was packed

    def index(self, rows: NDArray[np.int64]) -> RaggedIndex:
        """Returns the index entries of rows, int64 (n,), in range; raises FormatError if one is impossible."""
        index = self.look_up(rows)
        for at, reason in impossible_rows(index, self._field).items():
            raise FormatError(
                f"{self._file.name}: row {rows[at]} of {self._field.name!r} cannot be: {reason}. The file was changed "
                f"after packing; copy it again, or pack it again."
            )
        return index

    def look_up(self, rows: NDArray[np.int64]) -> RaggedIndex:
        """Returns the index entries of rows as the file has them, unchecked; otherwise like `index`."""
        return RaggedIndex(*(self.part(part, rows) for part in INDEX_DTYPES))

    def part(self, part: str, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Returns one array of `look_up`: "offset", "bytes", "shape", "encoding" or "orientation"."""
        dtype, shape = INDEX_DTYPES[part]
        dataset = self._parts.get(part)
        if dataset is None:
            value = np.array([*self._field.shape[:2], 1] if part == "shape" else 1, dtype)
            return np.broadcast_to(value, (len(rows), *shape))
        found = np.empty((len(rows), *shape), dtype)
        self._rows.gather(rows, {dataset: found})
        return found

    def take(self, index: RaggedIndex, memory: NDArray[np.uint8] | None = None) -> list[memoryview]:
        """Returns the encoded bytes of rows: views of the mapping, valid until `close`, or copies.

        Copies lie one after another in `memory`, if it is given, uint8 (all bytes,).
        Raises FileChangedError if the file ends before a row does.
        """
        found, starts, lengths = self.located(index, memory)
        view = found.data if self._view is None else self._view
        return [view[start : start + length] for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)]

    def located(
        self, index: RaggedIndex, memory: NDArray[np.uint8] | None = None
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
        """Returns memory, uint8 (T,), that has the encoded bytes of rows, where each begins in it, and its length.

        The memory is the mapping, or the one given, or new; see `take`.
        """
        if self.flat is not None:
            return self.flat, index.offset, index.bytes
        ends = np.cumsum(index.bytes)
        memory = np.empty(int(ends[-1]) if len(ends) else 0, np.uint8) if memory is None else memory
        assert isinstance(self._rows, PreadRows), "without a mapping it is read"
        self._rows.read_ranges(self._field.name, self._base + index.offset, index.bytes, memory)
        return memory, ends - index.bytes, index.bytes

    def make_images(
        self,
        rows: NDArray[np.int64],
        index: RaggedIndex,
        windows: NDArray[np.int64],
        factors: NDArray[np.int64],
        output: NDArray[Any],
        constants: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None,
    ) -> NDArray[np.bool_]:
        """Decodes, cuts, resizes and turns 8-bit images in one call of native code, as far as it can.

        Args:
            rows: int64 (n,), their numbers in the file.
            index: of these rows, from `index`.
            windows, output, constants: as in `native.make_images`; windows are in pixels shrunk by the factors.
            factors: int64 (n,), by how much a JPEG is decoded smaller.

        Returns:
            bool (n,), which images were made. Others are compressed otherwise or have an orientation, or libjpeg
            refuses or warns of them, or the native code was not built: `parts` decodes them.
        """
        none = np.zeros(len(rows), np.bool_)
        jpeg = index.encoding == JPEG
        plain = (index.encoding == RAW) | (jpeg & (index.orientation == 1) & native.decodes_jpeg())
        if not native.can_make(output.dtype) or not plain.any():
            return none
        try:
            memory, starts, lengths = self.located(index)
        except ReadError as error:
            raise self._named(rows, index, error) from error
        lap("reading")
        kinds = np.where(plain, np.where(jpeg, factors, 0), -1)
        sources = np.stack([starts, lengths, index.shape[:, 0], index.shape[:, 1], kinds], axis=1, dtype=np.int64)
        made, decoding_s = native.make_images(memory, sources, windows, output, constants)
        lap("transform", decoding_s=decoding_s)
        return made

    def decoded(
        self, rows: NDArray[np.int64], outs: NDArray[Any] | Sequence[NDArray[Any]] | None = None
    ) -> list[NDArray[Any]]:
        """Decodes whole rows, upright, one after another; returns an array for each: (H, W, C), masks (H, W).

        Args:
            rows: int64 (n,), checked to be in range.
            outs: (n, ...), or an array for each row, filled in place; None allocates them.

        Raises:
            FormatError: an entry is impossible, or a row cannot be decoded; names the row or its sample.
        """
        index = self.index(rows)
        dtype, rank = self._field.dtype, len(self._field.shape)
        if isinstance(outs, np.ndarray) and rank == 3 and dtype == np.uint8:
            size = index.shape[:, :2].astype(np.int64)
            zeros = np.zeros_like(size)
            windows = np.concatenate([zeros, size, size, zeros, zeros], axis=1)
            made = self.make_images(rows, index, windows, np.ones(len(rows), np.int64), outs)
            if made.any():
                rest = np.flatnonzero(~made)
                if len(rest):
                    self.decoded(rows[rest], [outs[at] for at in rest])
                return list(outs)
        shapes, encodings, orientations = index.shape.tolist(), index.encoding.tolist(), index.orientation.tolist()

        def whole(at: int, data: memoryview, on_suspect: OnSuspect) -> NDArray[Any]:
            shape = tuple(shapes[at][:rank])
            out = np.empty(shape, dtype.newbyteorder("=")) if outs is None else outs[at]
            return decode_row(data, encodings[at], shape, orientations[at], dtype, out, on_suspect)

        return self._each(rows, index, whole)

    def parts(
        self,
        rows: NDArray[np.int64],
        index: RaggedIndex,
        windows: NDArray[np.int64],
        factors: NDArray[np.int64],
        memory: NDArray[np.uint8],
    ) -> list[DecodedPart]:
        """Decodes of each 8-bit image at least the rows that a window shows.

        Args:
            rows: int64 (n,), their numbers in the file.
            index: of these rows, from `index`.
            windows: int64 (n, 4), top, left, height and width in upright pixels.
            factors: int64 (n,), by how much a JPEG is decoded smaller.
            memory: uint8 (bytes,), takes the pixels one after another, as far as they fit.

        Raises:
            FormatError: a row cannot be decoded; names its sample.
        """
        shapes, encodings, orientations = index.shape.tolist(), index.encoding.tolist(), index.orientation.tolist()
        shown, smaller, used = windows.tolist(), factors.tolist(), 0

        def part(at: int, data: memoryview, on_suspect: OnSuspect) -> DecodedPart:
            nonlocal used
            window, room = tuple(shown[at]), memory[used:]
            found = decode_part(
                data, encodings[at], tuple(shapes[at]), orientations[at], window, smaller[at], room, on_suspect
            )
            begin = offset_in(memory, found.pixels)
            used = used if begin < 0 else begin + found.pixels.nbytes  # rows above it may have been left out
            return found

        return self._each(rows, index, part)

    def _each(
        self, rows: NDArray[np.int64], index: RaggedIndex, decode: Callable[[int, memoryview, OnSuspect], Decoded]
    ) -> list[Decoded]:
        """Returns `decode(number, bytes, on_suspect)` of each row of a checked index, in order."""
        try:
            taken = self.take(index)
        except ReadError as error:
            raise self._named(rows, index, error) from error
        lap("reading")
        found = []
        for at, data in enumerate(taken):
            row = int(rows[at])
            try:
                found.append(decode(at, data, functools.partial(self._require_packed, row)))
            except (ImageError, MemoryError) as error:
                what = cannot_be_decoded(self._field.name, int(index.encoding[at]), error)
                if isinstance(error, ImageError) and self._verify is not None:
                    with suppress(ImageError):
                        self._require_packed(row)
                        raise FormatError(
                            f"{sample_name(self._file, row)}: {what}, and was packed like that. Fix its file and pack "
                            f"again, or leave it out: "
                            f"`fastload repack {typed(self._file.path)} OUT.h5 --on-error skip`."
                        ) from error
                raise sample_error(self._file, row, what) from error
        lap("decoding" if index.encoding.any() else "reading")
        return found

    def _named(self, rows: NDArray[np.int64], index: RaggedIndex, error: ReadError) -> ReadError:
        """Returns an error that names the first of these rows that the system cannot read."""
        for at, row in enumerate(rows.tolist()):
            try:
                self.take(index.part(slice(at, at + 1)))
            except ReadError as exc:
                if isinstance(exc.__cause__, OSError):
                    return read_error(self._file, self._field.name, row, exc.__cause__)
        return error

    def _require_packed(self, row: int) -> None:
        """Raises ImageError, the reason only, if a row is no longer what was packed. For suspects only: it is slow."""
        if self._verify is not None and row not in self._packed:
            self._verify(self._file, row)
            self._packed.add(row)

    def close(self) -> None:
        """Releases the mapping; the descriptor stays open."""
        self.flat = self._view = None
        self._rows.close()


def impossible_rows(index: RaggedIndex, field: Field) -> dict[int, str]:
    """Returns the impossible entries of an index as the file has it: number of the entry -> reason."""
    assert field.ragged is not None, "a ragged field"
    name, end = field.name, field.ragged.num_bytes
    outside = (index.offset < 0) | (index.bytes < 0) | (index.offset > end - index.bytes)
    kind = index.encoding >= len(ENCODINGS)
    if name == "masks":
        kind |= index.encoding == JPEG
    height, width = index.shape[:, 0].astype(np.int64), index.shape[:, 1].astype(np.int64)
    area = height * width  # of int32, so it does not overflow
    value_bytes = math.prod(field.shape[2:]) * field.dtype.itemsize
    size = (height < 1) | (width < 1) | (area > MAX_ROW_BYTES // max(1, value_bytes))
    shape = np.zeros_like(size)
    for axis, common in enumerate(field.shape):
        if common:
            shape |= index.shape[:, axis] != common
    # Of rows of another size or shape it means nothing.
    pixel_bytes = area * value_bytes
    length = (index.encoding == RAW) & (index.bytes != pixel_bytes)
    orientation = (index.orientation < 1) | (index.orientation > 8)
    found = {}
    for at in np.flatnonzero(outside | kind | size | shape | length | orientation).tolist():
        num_bytes = f"{index.bytes[at]:,} bytes"
        if outside[at]:
            extent = f"({num_bytes} from {index.offset[at]:,} on)"
            found[at] = f"its extent in `{name}` {extent} lies outside of its {end:,} bytes"
        elif kind[at]:
            found[at] = f"its encoding in `{name}` has the number {index.encoding[at]}, which means nothing"
        elif size[at]:
            found[at] = f"its size is {width[at]}x{height[at]} (width x height)"
        elif shape[at]:
            its_own = tuple(index.shape[at, : len(field.shape)].tolist())
            found[at] = f"its shape is {its_own} where rows of `{name}` have {field.shape}"
        elif length[at]:
            found[at] = f"it has {num_bytes} in `{name}`, its pixels need {pixel_bytes[at]:,}"
        else:
            found[at] = f"its EXIF orientation is {index.orientation[at]}, which means nothing"
    return found


def sample_error(file: PackedFile, row: int, reason: str) -> DamagedRowError:
    """Returns the error to raise for a damaged row: it names the sample, and says what to do."""
    if file.url:
        return DamagedRowError(
            f"{sample_name(file, row)}: {reason}. The object is damaged, or its copy in the cache "
            f"({file.path.parent}): have that fetched again (`fastload cache clear`), and if that does not help copy "
            f"the object there again.",
            (row,),
        )
    return DamagedRowError(
        f"{sample_name(file, row)}: {reason}. The file was damaged after packing: list all damage with "
        f"`fastload verify {typed(file.path)}`, then copy it again, or pack it again.",
        (row,),
    )


def cannot_be_decoded(name: str, encoding: int, error: Exception) -> str:
    """Returns the problem with a row of `images` or `masks` that raised ImageError or MemoryError."""
    whose = "its mask's" if name == "masks" else "its"
    stored = {RAW: "raw pixels", JPEG: "JPEG", ZSTD: "zstd frame"}.get(encoding, f"encoding {encoding}")
    why = error if isinstance(error, ImageError) else "not enough memory"
    return f"{whose} stored {stored} cannot be decoded ({why})"
