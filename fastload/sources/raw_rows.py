"""Reads samples of one shape that lie in arrays. Each class is one way to fulfil the protocol `listing.Arrays`.

    RawRows       in a file, at a fixed distance: 60,000 x 784 bytes behind a header of 16; records of fixed length
    MemoryRows    in memory: arrays that had to be decompressed
    JoinedRows    several of these as one: five files of 10,000 rows

Whole batches are copied at once, with no Python loop over rows.
"""

from __future__ import annotations

import math
import mmap
import os
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tokenize import TokenError  # NumPy's reader of headers raises it
from typing import IO, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from fastload.errors import FileChangedError, SourceError
from fastload.sources.listing import Arrays
from fastload.sources.spans import Joined, ListedFile
from fastload.system.files import read_into

Axes = Literal["HWC", "CHW", "WHC"]
"""The order in which a sample's axes are stored. For masks, (H, W), it is "HWC", without the C."""

_ORDER: dict[Axes, tuple[int, int, int]] = {"HWC": (0, 1, 2), "CHW": (1, 2, 0), "WHC": (1, 0, 2)}

_MOST_AXES = 32  # of an array in NumPy 1

# Rows are transposed in blocks of so many bytes, which stay in the core's cache.
_BLOCK_BYTES = 512 * 2**10


@dataclass(frozen=True, eq=False)
class StoredRows:
    """Rows of one shape, whose axes are stored in any order."""

    rows: NDArray[np.int64]  # (N,), number of each row in what holds them
    stored_shape: tuple[int, ...]  # shape of a row as stored
    stored_dtype: np.dtype[Any]  # type of its elements as stored, with their byte order
    axes: Axes  # order of its axes as stored

    @property
    def shape(self) -> tuple[int, ...]:
        stored = self.stored_shape
        return stored if len(stored) == 2 else tuple(stored[axis] for axis in _ORDER[self.axes])

    @property
    def dtype(self) -> np.dtype[Any]:
        """uint8 or uint16, in native byte order."""
        return self.stored_dtype.newbyteorder("=")

    def take(self, indices: NDArray[np.integer[Any]]) -> Self:
        return replace(self, rows=self.rows[indices])

    def gather(self, source: NDArray[np.uint8], rows: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Copies rows of source, uint8 (rows, bytes of a row), to out, upright, with the byte order kept."""
        if self.axes == "HWC" and out.flags.c_contiguous:
            _copy(source, rows, out.reshape(-1).view(np.uint8).reshape(len(out), source.shape[1]))
            return
        step = max(1, _BLOCK_BYTES // source.shape[1])
        block = np.empty((min(step, len(rows)), source.shape[1]), np.uint8)
        for start in range(0, len(rows), step):
            some = rows[start : start + step]
            _copy(source, some, block[: len(some)])
            images = block[: len(some)].view(self.dtype).reshape(len(some), *self.stored_shape)
            target = out[start : start + step]
            if self.axes == "CHW":
                # One channel at a time takes a third of the time of one transposed copy.
                for channel in range(self.stored_shape[0]):
                    target[..., channel] = images[:, channel]
            else:
                target[...] = upright(images, self.axes)


@dataclass(frozen=True, eq=False)
class RawRows(StoredRows):
    """Rows in one file at a fixed distance, stored as in memory except for byte order and order of axes.

    Consecutive rows are read straight into the output, others are copied from a memory map. The file's size and time
    are compared before and after each read: reading a map of a file that was truncated kills the process.
    """

    file: ListedFile
    offset: int  # byte at which the first row begins
    stride: int  # bytes from the beginning of a row to the beginning of the next
    _mapped: list[NDArray[np.uint8]] = field(default_factory=list, repr=False)

    @classmethod
    def of(
        cls,
        path: str | Path,
        *,
        offset: int,
        num_rows: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any] | type[np.generic],
        stride: int | None = None,
        axes: Axes = "HWC",
    ) -> RawRows:
        """Returns the rows of a file that lie back to back, or at a stride in bytes.

        Raises:
            SourceError: the file cannot be read, or is shorter than the rows need.
        """
        dtype = np.dtype(dtype)
        row_bytes = math.prod(shape) * dtype.itemsize
        stride = row_bytes if stride is None else stride
        try:
            status = os.stat(path)
        except OSError as exc:
            raise SourceError(f"{path} cannot be read: {exc.strerror}. Make it readable for this user.") from exc
        end = offset + (num_rows - 1) * stride + row_bytes if num_rows else offset
        if offset < 0 or stride < row_bytes or end > status.st_size:
            raise SourceError(
                f"{path}: {num_rows} rows of {row_bytes} bytes reach to byte {end:,}, the file has "
                f"{status.st_size:,}. The copy was probably cut short; copy or download it again."
            )
        rows = np.arange(num_rows, dtype=np.int64)
        return cls(rows, shape, dtype, axes, ListedFile.of(path, status), offset, stride)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.stored_shape) * self.stored_dtype.itemsize

    def read_rows(self, indices: NDArray[np.int64], out: NDArray[Any]) -> None:
        rows = self.rows[indices]
        if len(rows) == 0:
            return
        self.file.require_unchanged()
        if self.axes == "HWC" and self.stride == self.row_bytes and out.flags.c_contiguous and _is_run(rows):
            view, at = out.reshape(-1).view(np.uint8).data, self.offset + int(rows[0]) * self.stride
            path = self.file.path
            try:
                with self.file.open() as fd:
                    done = read_into(fd, view, at)
            except OSError as exc:
                raise SourceError(f"{path} cannot be read: {exc.strerror}. Check the disk, and run again.") from exc
            if done < len(view):
                raise FileChangedError(f"{path}: it ends at byte {at + done:,}. Leave it alone, and run again.")
        else:
            self.gather(self._map(), rows, out)
        self.file.require_unchanged()
        if not self.stored_dtype.isnative:
            out.byteswap(inplace=True)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state without the memory map, which each process makes for itself."""
        return {**vars(self), "_mapped": []}

    def _map(self) -> NDArray[np.uint8]:
        """Returns the bytes of all rows of the file from a memory map, uint8 (rows in the file, row_bytes)."""
        if not self._mapped:
            try:
                with self.file.open() as fd:
                    mapping = mmap.mmap(fd, self.file.num_bytes, prot=mmap.PROT_READ)
            except (OSError, ValueError) as exc:
                raise SourceError(f"{self.file.path} cannot be mapped: {exc}. Run again.") from exc
            count = (self.file.num_bytes - self.offset - self.row_bytes) // self.stride + 1
            shape, strides = (count, self.row_bytes), (self.stride, 1)
            # As bytes, whatever the dtype: NumPy would copy the whole source if it is not aligned to its elements.
            self._mapped.append(np.ndarray(shape, np.uint8, mapping, self.offset, strides))
        return self._mapped[0]


@dataclass(frozen=True, eq=False)
class MemoryRows(StoredRows):
    """Rows of an array in memory, (rows, *stored shape), C-contiguous. Pickling copies the array."""

    values: NDArray[Any]

    @classmethod
    def of(cls, values: NDArray[Any], axes: Axes = "HWC") -> Self:
        """Returns all rows of an array of uint8 or uint16, which is copied if it is not C-contiguous."""
        values = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("="))
        return cls(np.arange(len(values), dtype=np.int64), values.shape[1:], values.dtype, axes, values)

    def read_rows(self, indices: NDArray[np.int64], out: NDArray[Any]) -> None:
        source = self.values.reshape(-1).view(np.uint8).reshape(len(self.values), -1)
        self.gather(source, self.rows[indices], out)

    def compact(self) -> Self:
        """Returns the same rows without the others of the array."""
        return replace(self, rows=np.arange(len(self.rows)), values=self.values[self.rows])


class JoinedRows(Joined[Arrays]):
    """Rows of several readers of equal shape as one sequence."""

    @classmethod
    def of(cls, parts: Sequence[tuple[Arrays, int]]) -> Self:
        """Returns the rows of all parts, one part behind the other; each is given with its number of rows.

        Raises:
            SourceError: their shapes or types differ.
        """
        kinds = {(rows.shape, rows.dtype) for rows, _ in parts}
        if len(kinds) > 1:
            shown = " and ".join(sorted(f"{dtype} {shape}" for shape, dtype in kinds))
            raise SourceError(f"Rows of different kinds cannot be one dataset: {shown}. Pack them one by one.")
        return super().of(parts)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.parts[0].shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.parts[0].dtype

    def read_rows(self, indices: NDArray[np.int64], out: NDArray[Any]) -> None:
        part, index = self.part[indices], self.index[indices]
        for number in np.unique(part).tolist():
            where = np.flatnonzero(part == number)
            if _is_run(where):
                self.parts[number].read_rows(index[where], out[where[0] : where[-1] + 1])
            else:
                mixed = np.empty((len(where), *self.shape), self.dtype)
                self.parts[number].read_rows(index[where], mixed)
                out[where] = mixed


def joined_rows(parts: Sequence[tuple[Arrays, int]]) -> Arrays:
    """Returns the rows of all parts, given with their numbers of rows, as one sequence; a lone part is itself."""
    return parts[0][0] if len(parts) == 1 else JoinedRows.of(parts)


def upright(values: NDArray[Any], axes: Axes) -> NDArray[Any]:
    """Returns a view of samples (n, ...) with their axes in the order H, W, C."""
    if values.ndim == 3:
        return values
    return values.transpose(0, *(axis + 1 for axis in _ORDER[axes]))


def _is_run(rows: NDArray[np.int64]) -> bool:
    """Whether rows are consecutive: first, first + 1, first + 2, ..."""
    return int(rows[-1] - rows[0]) == len(rows) - 1 and bool(np.all(np.diff(rows) == 1))


def _copy(source: NDArray[np.uint8], rows: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
    if source.flags.c_contiguous:
        # mode="raise" would copy through a buffer; all rows are known to exist, so "clip" changes nothing.
        np.take(source, rows, axis=0, out=out, mode="clip")
    else:
        # np.take would first make the whole source contiguous.
        out[...] = source[rows]


def npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Returns shape, Fortran order and dtype by the header of an .npy, in which only literals are evaluated.

    Raises:
        ValueError: there is no header that can be read.
    """
    try:
        with warnings.catch_warnings():
            # "... was created on Python 2": it is read all the same.
            warnings.simplefilter("ignore", UserWarning)
            version = np.lib.format.read_magic(file)
            if version not in ((1, 0), (2, 0)):
                raise ValueError(f"version {version}, for arrays of records")
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran, dtype = read(file)
    except (
        *(EOFError, SyntaxError, TokenError, TypeError, KeyError, AttributeError, OverflowError),
        *(MemoryError, RecursionError, zlib.error),
    ) as exc:
        raise ValueError(str(exc)) from exc
    # NumPy takes any whole numbers here, and fails later, where it makes the array.
    if len(shape) > _MOST_AXES or not all(0 <= n < 2**48 for n in shape):
        raise ValueError(f"shape {str(shape)[:80]}")
    return tuple(int(n) for n in shape), bool(fortran), dtype
