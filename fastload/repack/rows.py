"""Pixels of an HDF5 file, whatever its storage, as a listing's `Arrays`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fastload.errors import FileChangedError, FormatError, ImageError, SourceError
from fastload.format import PackedFile
from fastload.image_header import ImageHeader
from fastload.open_readers import READERS
from fastload.pack.chunk_work import array_header
from fastload.read import image_axes
from fastload.repack.stored import KeptRows
from fastload.sources.listing import Arrays, Files, Pictures, first_few
from fastload.sources.rows import JoinedRows, RawRows
from fastload.stored_samples import has_stores


def rows_of(file: PackedFile, name: Literal["images", "masks"]) -> Arrays | KeptRows:
    """Every row of a pixel dataset: linear ones are read from the file itself, all others but stores chunk by chunk."""
    field = file.fields[name]
    if has_stores(file):
        return KeptRows.of(file, name)
    shape, axes = field.shape, image_axes(file) if name == "images" else "HWC"
    if field.offset is None:
        return Hdf5Rows(file, name, np.arange(file.num_rows))
    return RawRows.of(
        file.path,
        offset=field.offset,
        num_rows=file.num_rows,
        shape=(*shape, 1) if axes == "HW" else shape,
        dtype=field.dtype,
        axes="CHW" if axes == "CHW" else "HWC",
    )


def mask_rows_of(file: PackedFile) -> Arrays | KeptRows:
    """Every row of `masks` as uint8 (H, W), whatever integers the file holds.

    Raises:
        FormatError: they are no integers, or no single number a pixel.
    """
    field = file.fields["masks"]
    single = len(field.shape) == 2 or (len(field.shape) == 3 and field.shape[2] == 1)
    if field.dtype.kind not in "biu" or not single:
        raise FormatError(
            f"{file.path}: `masks` is {field.dtype} {(file.num_rows, *field.shape)}; expected one class number a "
            f"pixel, uint8 (N, H, W). Convert them."
        )
    rows = rows_of(file, "masks")
    plain = field.dtype == np.uint8 and len(field.shape) == 2
    return rows if plain or isinstance(rows, KeptRows) else MaskRows(rows, file.path, np.arange(file.num_rows))


@dataclass(frozen=True, eq=False)
class MaskRows:
    """Masks of other integers as uint8, each value checked to be 0 to 255.

    Attributes:
        stored: what holds them.
        path: the file, for messages.
        rows: int64 (N,), the row of the file that each sample is, for messages.
    """

    stored: Arrays
    path: Path
    rows: NDArray[np.int64]

    @property
    def shape(self) -> tuple[int, ...]:
        """(H, W)."""
        return self.stored.shape[:2]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Uint8."""
        return np.dtype(np.uint8)

    def read_rows(self, indices: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Fill out with these rows; see Arrays.

        Raises:
            SourceError: a value is no class number that a mask can hold.
        """
        found = np.empty((len(indices), *self.stored.shape), self.stored.dtype)
        self.stored.read_rows(indices, found)
        found = found.reshape(out.shape)
        outside = (found < 0) | (found > 255)
        if outside.any():
            bad = np.flatnonzero(outside.reshape(len(found), -1).any(axis=1))
            raise SourceError(
                f"{self.path}: `masks` holds {found[outside][0]} (rows "
                f"{first_few([str(row) for row in self.rows[indices[bad]].tolist()])}); a packed mask holds 0 to 255. "
                f"Give what is no class a value in there, such as 255, and say so in its attribute ignore_index."
            )
        out[:] = found

    def take(self, indices: NDArray[np.integer[Any]]) -> MaskRows:
        """Some of the rows, in the order of indices."""
        return MaskRows(self.stored.take(indices), self.path, self.rows[indices])


@dataclass(frozen=True, eq=False)
class Hdf5Rows:
    """Rows that only HDF5 can deliver: compressed, or chunks that do not lie back to back.

    Each process opens the file for itself, at its first read; a pickle holds the header only.

    Attributes:
        file: its header.
        name: of the dataset.
        rows: int64 (N,), the row of the file that each sample is.
    """

    file: PackedFile
    name: str
    rows: NDArray[np.int64]

    @property
    def shape(self) -> tuple[int, ...]:
        """(H, W, C) of images, whichever way the file stores them; (H, W) of masks."""
        stored, axes = self.file.fields[self.name].shape, self._axes
        if axes == "CHW":
            return (*stored[1:], stored[0])
        return (*stored, 1) if axes == "HW" else stored

    @property
    def dtype(self) -> np.dtype[Any]:
        """Uint8 or uint16, in native byte order."""
        return self.file.fields[self.name].dtype.newbyteorder("=")

    def read_rows(self, indices: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Fill out with these rows; see Arrays."""
        rows = np.ascontiguousarray(self.rows[indices], dtype=np.int64)
        if len(rows) == 0:
            return
        stored = np.empty((len(rows), *self.file.fields[self.name].shape), self.dtype)
        try:
            self._gather(rows, stored)
        except ImageError as exc:
            bad = self._unreadable(rows) or rows.tolist()
            raise SourceError(
                f"{self.file.path}: {exc} (rows {first_few(list(map(str, bad)))}). List all damage with `fastload "
                f"verify {self.file.path}`; leave it out with `fastload repack --on-error skip`."
            ) from exc
        out[:] = np.moveaxis(stored, 1, -1) if self._axes == "CHW" else stored.reshape(out.shape)

    def take(self, indices: NDArray[np.integer[Any]]) -> Hdf5Rows:
        """Some of the rows, in the order of indices."""
        return Hdf5Rows(self.file, self.name, self.rows[indices])

    def _gather(self, rows: NDArray[np.int64], stored: NDArray[Any]) -> None:
        try:
            READERS.of(self.file, self.name).gather(rows, {self.name: stored})
        except FileChangedError:
            raise
        except FormatError as exc:  # what is decoded without h5py: its cause is the reason alone
            raise ImageError(f"`{self.name}` cannot be read: {exc.__cause__ or exc}") from exc
        except (OSError, RuntimeError) as exc:  # h5py, where a filter fails
            raise ImageError(f"`{self.name}` cannot be read: {exc}") from exc

    def _unreadable(self, rows: NDArray[np.int64]) -> list[int]:
        """Which of these rows cannot be read: as a rule those of one damaged chunk."""
        bad = []
        one = np.empty((1, *self.file.fields[self.name].shape), self.dtype)
        for row in rows.tolist():
            try:
                self._gather(np.array([row]), one)
            except ImageError:
                bad.append(row)
        return bad

    @property
    def _axes(self) -> str:
        return image_axes(self.file) if self.name == "images" else "HWC"


@dataclass(frozen=True, eq=False)
class RowByRow:
    """Rows as `Pictures`: one that cannot be read has a reason of its own, and its neighbours are packed.

    Attributes:
        rows: what holds them.
    """

    rows: Arrays

    @staticmethod
    def of(files: Files | Pictures | Arrays) -> Files | Pictures | Arrays:
        """The same pixels, row by row where reading one can fail: linear rows are bytes, which only digests doubt."""
        parts = files.parts if isinstance(files, JoinedRows) else (files,)
        return (
            RowByRow(files)
            if isinstance(files, Arrays) and any(isinstance(p, (Hdf5Rows, MaskRows)) for p in parts)
            else files
        )

    def header(self, i: int) -> ImageHeader:
        """That of every row."""
        return array_header(self.rows)

    def read(self, i: int) -> NDArray[Any]:
        """(H, W, C) of an image, (H, W) of a mask.

        Raises:
            ImageError: it cannot be read.
        """
        out = np.empty((1, *self.rows.shape), self.rows.dtype)
        try:
            self.rows.read_rows(np.array([i]), out)
        except SourceError as exc:
            raise ImageError(str(exc.__cause__ if isinstance(exc.__cause__, ImageError) else exc)) from exc
        row: NDArray[Any] = out[0]
        return row

    def take(self, indices: NDArray[np.integer[Any]]) -> RowByRow:
        """Some of the rows, in the order of indices."""
        return RowByRow(self.rows.take(indices))
