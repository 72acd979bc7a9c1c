"""Rows of varying length: their index, their encoded bytes, and their pixels.

`EncodedRows` decodes in the calling thread: whole rows, or the parts of images that windows show.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fastload.errors import FormatError, ImageError, ReadError, typed
from fastload.format.header import Field, PackedFile
from fastload.format.ragged import ENCODINGS, INDEX_DTYPES, JPEG, MAX_ROW_BYTES, RAW, RaggedIndex
from fastload.images.decode_part import DecodedPart, OnSuspect, decode_part, decode_row, offset_in
from fastload.read.row_errors import cannot_be_decoded, read_error, sample_name
from fastload.read.row_table import LocatedIndex, index_columns, index_value
from fastload.read.store import Store
from fastload.system import native
from fastload.timing.stopwatch import lap

Decoded = TypeVar("Decoded")


class IndexedRows:
    """The index and the encoded bytes of one ragged field's rows. Any thread may call it, also after a fork.

    All but `part` is called within `Store.holding` the rows.
    """

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._file, self._field = store, store.file, store.file.ragged[name]
        self._columns = index_columns(self._file, name)
        self._shard_bytes = np.array(self._field.shard_bytes, np.int64)

    @property
    def flat(self) -> NDArray[np.uint8] | None:
        """All bytes of the field as one mapping, uint8 (T,), read-only, where offsets count; None if there is none."""
        return self._store.whole(self._field.name)

    def index(self, rows: NDArray[np.int64]) -> LocatedIndex:
        """Returns the index entries of rows, int64 (n,), in range; raises FormatError if one is impossible."""
        index = self.look_up(rows)
        for at, reason in self.impossible(index).items():
            raise FormatError(
                f"{self._file.name}: row {rows[at]} of {self._field.name!r} cannot be: {reason}. The file was changed "
                f"after packing; copy it again, or pack it again."
            )
        return index

    def look_up(self, rows: NDArray[np.int64]) -> LocatedIndex:
        """Returns the index entries of rows as the files have them, unchecked; otherwise like `index`."""
        located = self._store.table.locate(rows)
        found, read = self._arrays(INDEX_DTYPES, len(rows))
        for dataset, values in read.items():
            self._store.copy(dataset, located, values)
        return LocatedIndex(**found, shard=located.shard)

    def part(self, part: str, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Returns one array of `look_up`: "offset", "bytes", "shape", "encoding" or "orientation"; not to be held."""
        found, read = self._arrays([part], len(rows))
        self._store.columns(rows, read)
        return found[part]

    def _arrays(self, parts: Iterable[str], count: int) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
        """Returns an array for each part, and those among them to be read, by their datasets."""
        found: dict[str, NDArray[Any]] = {}  # made without their types: subscribing NDArray takes 2 us
        read: dict[str, NDArray[Any]] = {}
        for part in parts:
            dtype, shape = INDEX_DTYPES[part]
            if (dataset := self._columns.get(part)) is None:
                found[part] = np.broadcast_to(index_value(self._field, part), (count, *shape))
            else:
                found[part] = read[dataset] = np.empty((count, *shape), dtype)
        return found, read

    def impossible(self, index: LocatedIndex) -> dict[int, str]:
        """Returns the impossible entries of an index as the files have it: number of the entry -> reason."""
        return impossible_rows(index, self._field, self._shard_bytes[index.shard])

    def take(self, index: LocatedIndex, memory: NDArray[np.uint8] | None = None) -> list[memoryview]:
        """Returns the encoded bytes of rows: views of mappings, valid while they are held, or copies.

        Copies lie one after another in `memory`, if it is given, uint8 (all bytes,).
        Raises FileChangedError if a file ends before a row does.
        """
        store, name = self._store, self._field.name
        if memory is None and store.maps(name):
            # Slicing a memoryview takes a quarter of the time that slicing an array takes.
            files, numbers = store.files.opened, np.unique(index.shard).tolist()
            views = {number: flat.data for number in numbers if (flat := files[number].mapped(name)) is not None}
            entries = zip(index.shard.tolist(), index.offset.tolist(), index.bytes.tolist(), strict=True)
            return [views[shard][start : start + length] for shard, start, length in entries]
        addresses, memory = store.encoded(name, index, memory)
        assert memory is not None, "it is not mapped"
        view, starts = memory.data, addresses - memory.ctypes.data
        ends = (starts + index.bytes).tolist()
        return [view[start:end] for start, end in zip(starts.tolist(), ends, strict=True)]

    def located(self, index: LocatedIndex) -> tuple[NDArray[np.int64], NDArray[np.uint8] | None]:
        """Returns where the encoded bytes of rows begin in memory, int64 (n,), and an array that keeps it, if any."""
        return self._store.encoded(self._field.name, index)


class EncodedRows(IndexedRows):
    """Decodes the rows of one ragged field, or parts of them. Any thread may call it, also after a fork.

    Args:
        verify: called with the file and a row that libjpeg refuses or that cannot be decoded; raises ImageError, the
            reason only, if the row is not what was packed. None: such rows count as damaged after packing, if not even
            Pillow decodes them.
    """

    def __init__(self, store: Store, name: str, verify: Callable[[PackedFile, int], None] | None = None) -> None:
        super().__init__(store, name)
        self._verify = verify
        self._packed: set[int] = set()  # suspected rows that turned out to be what was packed

    def make_images(
        self,
        rows: NDArray[np.int64],
        index: LocatedIndex,
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
            addresses, memory = self.located(index)
        except ReadError as error:
            raise self._named(rows, index, error) from error
        lap("reading")
        kinds = np.where(plain, np.where(jpeg, factors, 0), -1)
        sources = np.stack(
            [addresses, index.bytes, index.shape[:, 0], index.shape[:, 1], kinds], axis=1, dtype=np.int64
        )
        made, decoding_s = native.make_images(None, sources, windows, output, constants)
        del memory  # until here
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
        index: LocatedIndex,
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
        self, rows: NDArray[np.int64], index: LocatedIndex, decode: Callable[[int, memoryview, OnSuspect], Decoded]
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
                raise self._store.damaged(row, what) from error
        lap("decoding" if index.encoding.any() else "reading")
        return found

    def _named(self, rows: NDArray[np.int64], index: LocatedIndex, error: ReadError) -> ReadError:
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


def impossible_rows(index: RaggedIndex, field: Field, end: NDArray[np.int64]) -> dict[int, str]:
    """Returns the impossible entries of an index: number of the entry -> reason; `end`: bytes of each one's file."""
    name = field.name
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
            found[at] = f"its extent in `{name}` {extent} lies outside of its {end[at]:,} bytes"
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
