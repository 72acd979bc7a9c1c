"""Rows of a byte store: where they lie, their bytes where these are, and their pixels.

`StoredBytes` hands out bytes only, so that whoever decodes may choose how much of a row, and in which thread.
"""

from __future__ import annotations

import functools
import os
from contextlib import closing, suppress
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fastload.errors import FormatError, ImageError
from fastload.format import PackedFile
from fastload.stopwatch import current
from fastload.store import ENCODINGS, INDEX_DTYPES, Store, StoreIndex, index_names
from fastload.store_check import impossible_rows
from fastload.stored_rows import decode_mask_row, decode_row

from .chunked import ChunkedRows
from .identity import open_checked
from .mapped import MappedRows
from .pread import PreadRows


class StoredBytes:
    """The rows of one store as they are stored. Any thread may call it, also after a fork.

    Args:
        fd: of the file, open for reading as long as this lives.
        file: its header.
        name: of a field with a store.
        read: "map" hands out views of a mapping, "pread" memory of their own.
    """

    def __init__(self, fd: int, file: PackedFile, name: str, read: Literal["map", "pread"]) -> None:
        store = file.fields[name].store
        assert store is not None, f"{name} has no store"
        self._fd = fd
        self._file = file
        self._field = file.fields[name]
        self._store: Store = store
        # A mask has its image's size.
        self._parts = {part: f"{name}_{part}" for part in INDEX_DTYPES if f"{name}_{part}" in index_names(name)}
        if "shape" not in self._parts and "images_shape" in file.fields:
            self._parts["shape"] = "images_shape"
        datasets = tuple(self._parts.values())
        linear = tuple(data for data in datasets if file.fields[data].offset is not None)
        if linear != datasets:
            raise FormatError(f"{file.path}: what tells the rows of {name!r} does not lie in one piece. Pack it again.")
        self._layout: dict[str, tuple[np.dtype[Any], tuple[int, ...], int, int]] = {}
        for part, (dtype, shape) in INDEX_DTYPES.items():
            field = file.fields.get(self._parts.get(part, ""))
            self._layout[part] = np.dtype(dtype), shape, (field and field.offset) or 0, field.row_bytes if field else 0
        self._rows: MappedRows | PreadRows = (
            MappedRows(fd, file, linear) if read == "map" else PreadRows(fd, file, linear)
        )
        flat = self._rows.flat(store.base, store.num_bytes) if isinstance(self._rows, MappedRows) else None
        self._flat: NDArray[np.uint8] | None = flat
        # Slices of it are made without NumPy, in a quarter of the time.
        self._view = None if flat is None else flat.data
        self._packed: set[int] = set()  # rows that were in doubt, and have their digest

    @property
    def flat(self) -> NDArray[np.uint8] | None:
        """The whole store where it lies, uint8 (T,), read-only, valid until `close`; None where nothing is mapped."""
        return self._flat

    def index(self, rows: NDArray[np.int64]) -> StoreIndex:
        """Where these rows lie and what they are.

        Args:
            rows: int64 (n,), checked to be in range; any order, repeats allowed.

        Raises:
            FormatError: what the file says of a row cannot be; names the row.
        """
        index = self.look_up(rows)
        for at, reason in impossible_rows(index, self._field).items():
            raise FormatError(
                f"{self._file.path}: row {rows[at]} of {self._field.name!r} cannot be: {reason}. The file was changed "
                f"after packing; copy it again, or pack it again."
            )
        return index

    def look_up(self, rows: NDArray[np.int64]) -> StoreIndex:
        """What the file says of these rows, which may be anything where it is damaged; otherwise as `index`."""
        return StoreIndex(*(self.part(part, rows) for part in INDEX_DTYPES))

    def part(self, part: str, rows: NDArray[np.int64]) -> NDArray[Any]:
        """One of the arrays of `look_up`.

        Args:
            part: "offset", "bytes", "shape", "encoding" or "orientation".
            rows: as there.
        """
        dtype, shape, offset, row_bytes = self._layout[part]
        dataset = self._parts.get(part)
        if dataset is None:
            height, width = self._field.shape[:2]
            value = np.array([height, width, 1] if part == "shape" else 1, dtype)
            return np.broadcast_to(value, (len(rows), *shape))
        if len(rows) == 1 and self._view is None:
            # Setting up a request for `PreadRows` takes ten times as long.
            data = os.pread(self._fd, row_bytes, offset + int(rows[0]) * row_bytes)
            if len(data) == row_bytes:
                return np.frombuffer(data, dtype).reshape(1, *shape)
        found = np.empty((len(rows), *shape), dtype)
        self._rows.gather(rows, {dataset: found})
        return found

    def take(self, index: StoreIndex) -> list[memoryview]:
        """The bytes of rows as they are stored: views of the mapping, valid until `close`, or memory of their own.

        Raises:
            FileChangedError: the file ends before a row does.
        """
        starts, lengths = index.offset.tolist(), index.bytes.tolist()
        view = self._view
        if view is None:
            ends = np.cumsum(index.bytes)
            memory = np.empty(int(ends[-1]) if len(ends) else 0, np.uint8)
            starts = (ends - index.bytes).tolist()
            assert isinstance(self._rows, PreadRows), "without a mapping it is read"
            self._rows.read_ranges(self._field.name, self._store.base + index.offset, index.bytes, memory)
            view = memory.data
        return [view[start : start + length] for start, length in zip(starts, lengths, strict=True)]

    def require_packed(self, row: int) -> None:
        """Raise ImageError, the reason only, where a sample is no longer what was packed: for the rare one in doubt."""
        from fastload.stored_samples import StoredSamples  # it reads by this module

        if row in self._packed:
            return
        with closing(StoredSamples(self._file)) as samples:
            samples.encoded(row)
        self._packed.add(row)

    def row_error(self, row: int, encoding: int, error: Exception) -> FormatError:
        """The error to raise for a row that cannot be decoded."""
        why = str(error) if isinstance(error, ImageError) else "not enough memory"
        whose = "its mask's" if self._field.name == "masks" else "its"
        what = f"{whose} stored {_encoding(encoding)} cannot be decoded ({why})"
        if isinstance(error, ImageError):
            with suppress(ImageError):
                self.require_packed(row)
                return FormatError(
                    f"{sample_name(self._file, row)}: {what}, and was packed like that. Mend its file and pack again, "
                    f"or leave it out: `fastload repack {self._file.path} OUT.h5 --on-error skip`."
                )
        return sample_error(self._file, row, what)

    def close(self) -> None:
        """Lets the mapping go; the descriptor is the caller's."""
        self._flat = self._view = None
        self._rows.close()


def decode_rows(
    stored: StoredBytes, file: PackedFile, name: str, rows: NDArray[np.int64], outs: NDArray[Any] | None
) -> list[NDArray[Any]]:
    """The pixels of rows, upright, one after another in the calling thread.

    Args:
        stored: of this field of the file.
        rows: int64 (n,), checked to be in range.
        outs: (n, ...), filled in place; None makes an array of its own for each row.

    Raises:
        FormatError: a row cannot be decoded; names its sample.
    """
    index = stored.index(rows)
    data = stored.take(index)
    stopwatch = current()
    if stopwatch is not None:
        stopwatch.lap("reading")
    dtype = file.fields[name].dtype
    shapes, encodings, orientations = index.shape.tolist(), index.encoding.tolist(), index.orientation.tolist()
    decoded = []
    for place, (height, width, channels) in enumerate(shapes):
        try:
            if name == "masks":
                mask = np.empty((height, width), np.uint8) if outs is None else outs[place]
                decoded.append(decode_mask_row(data[place], encodings[place], (height, width), mask))
            else:
                shape = (height, width, channels)
                image = np.empty(shape, dtype.newbyteorder("=")) if outs is None else outs[place]
                doubt = functools.partial(stored.require_packed, int(rows[place]))
                decoded.append(
                    decode_row(data[place], encodings[place], shape, orientations[place], dtype, image, doubt)
                )
        except (ImageError, MemoryError) as error:
            raise stored.row_error(int(rows[place]), encodings[place], error) from error
    if stopwatch is not None:
        stopwatch.lap("decoding" if any(encodings) else "reading")
    return decoded


def sample_error(file: PackedFile, row: int, reason: str) -> FormatError:
    """The error to raise for a row that is damaged: it names the sample, and says the mend.

    Args:
        file: header.
        row: of the file.
        reason: what is wrong, such as "its stored JPEG cannot be decoded (...)".
    """
    return FormatError(
        f"{sample_name(file, row)}: {reason}. The file was damaged after packing: list all damage with "
        f"`fastload verify {file.path}`, then copy it again, or pack it again."
    )


def sample_name(file: PackedFile, row: int) -> str:
    """How messages call a sample: by file, key and row.

    Raises:
        MissingFileError, FileChangedError: the file is gone, or not the one whose header was read.
    """
    field = file.fields.get("key")
    if field is None or field.dtype.kind != "S":
        return f"{file.path}: row {row}"
    found = np.empty(1, field.dtype)
    if field.offset is None:
        keys = ChunkedRows(file, ["key"])
        keys.gather(np.array([row]), {"key": found})
        keys.close()
    else:
        fd = open_checked(file)
        try:
            PreadRows(fd, file, ["key"], use_aio=False).gather(np.array([row]), {"key": found})
        finally:
            os.close(fd)
    return f"{file.path}: sample {found[0].decode('utf-8', errors='backslashreplace')!r} (row {row})"


def _encoding(number: int) -> str:
    return {"jpeg": "JPEG", "raw": "raw pixels", "zstd": "zstd frame"}.get(
        ENCODINGS[number] if number < len(ENCODINGS) else "", f"encoding {number}"
    )
