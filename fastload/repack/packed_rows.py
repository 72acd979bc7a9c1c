"""The images and masks of a packed file (or another HDF5 file) as the images and masks of a listing.

`rows_of` chooses: rows that lie back to back are read from the file itself (`RawRows`), compressed or scattered ones
through HDF5 (`Hdf5Rows`), rows of varying length as they are stored (`RaggedRows`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fastload.errors import FormatError, ImageError, SourceError, typed
from fastload.format.header import PackedFile
from fastload.format.ragged import JPEG, RAW, ZSTD, EncodedRow
from fastload.images.image_header import ImageHeader, header_of_pixels
from fastload.options.pack import Progress
from fastload.pack.encode import bytes_of
from fastload.read.checked import CheckedSample, CheckedSamples, DamagedBefore, open_samples
from fastload.read.reader import image_axes
from fastload.sources.listing import Arrays, Files, Pictures, first_few
from fastload.sources.raw_rows import JoinedRows, RawRows, StoredRows
from fastload.system.machine import worker_count
from fastload.system.threads import in_threads

_LOOKED_AT_BYTES = 2**24  # of masks at a time


def rows_of(file: PackedFile, name: Literal["images", "masks"]) -> Arrays | RaggedRows:
    """Returns every row of a pixel dataset; masks are uint8 or uint16 (H, W), whatever integers the file holds.

    FormatError: the masks are not integers, or have several numbers for a pixel.
    """
    field, axes = file.fields[name], image_axes(file) if name == "images" else "HWC"
    if name == "masks" and (field.dtype.kind not in "biu" or field.shape[2:] not in ((), (1,))):
        raise FormatError(
            f"{file.path}: `masks` is {field.dtype} {(file.num_rows, *field.shape)}; expected one class number a "
            f"pixel, uint8 or uint16 (N, H, W). Convert them."
        )
    if file.ragged:
        return RaggedRows((file,), name, np.zeros(file.num_rows, np.int32), np.arange(file.num_rows))
    shape, dtype = (*field.shape, 1) if axes == "HW" else field.shape, field.dtype
    if name == "masks":
        shape, dtype = field.shape[:2], _mask_dtype(file)
    order: Literal["CHW", "HWC"] = "CHW" if axes == "CHW" else "HWC"
    if field.offset is None or field.dtype != dtype:
        return Hdf5Rows(np.arange(file.num_rows), shape, dtype, order, file, name)
    return RawRows.of(
        file.path, offset=field.offset, num_rows=file.num_rows, shape=shape, dtype=dtype, axes=order
    )  # fmt: skip


def _mask_dtype(file: PackedFile) -> np.dtype[Any]:
    """Returns the type of a file's masks in a packed file; of wider integers of another program by their values."""
    field = file.fields["masks"]
    if file.version is not None or field.dtype.itemsize == 1:
        return np.dtype(np.uint8 if field.dtype.itemsize == 1 else np.uint16)
    step = max(1, _LOOKED_AT_BYTES // field.row_bytes)
    for first in range(0, file.num_rows, step):
        rows = np.arange(first, min(first + step, file.num_rows))
        values = np.zeros((len(rows), *field.shape), field.dtype.newbyteorder("="))
        open_samples(file).read("masks", rows, values)  # copying them reports those that cannot be read
        if int(values.max(initial=0)) > 255:
            return np.dtype(np.uint16)
    return np.dtype(np.uint8)


@dataclass(frozen=True, eq=False)
class Hdf5Rows(StoredRows):
    """Rows that do not lie back to back as they are needed: compressed or scattered, or of other integers.

    Each process opens the file for itself, at its first read; a pickle holds the header only.
    """

    file: PackedFile
    name: str

    def read_rows(self, indices: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Fills out with these rows; SourceError names those that cannot be read, or hold masks beyond uint16."""
        rows = np.ascontiguousarray(self.rows[indices], dtype=np.int64)
        if len(rows) == 0:
            return
        field = self.file.fields[self.name]
        values = field.empty(len(rows))
        if reasons := open_samples(self.file).read(self.name, rows, values):  # As a rule of one damaged chunk.
            reason = ImageError(f"`{self.name}` {next(iter(reasons.values()))}")
            path = typed(self.file.path)
            raise SourceError(
                f"{self.file.path}: {reason} (rows {first_few([str(rows[at]) for at in reasons])}). List all damage "
                f"with `fastload verify {path}`; leave it out with `fastload repack {path} OUT.h5 --on-error skip`."
            ) from reason
        outside = (values < 0) | (values > np.iinfo(out.dtype).max) if self.name == "masks" else np.zeros(1, np.bool_)
        if outside.any():
            bad = list(map(str, rows[outside.reshape(len(rows), -1).any(axis=1)].tolist()))
            raise SourceError(
                f"{self.file.path}: `masks` holds {values[outside][0]} (rows {first_few(bad)}); a "
                f"packed mask holds 0 to 65535. Give what is no class a value in there, such as 255, and say so in its "
                f"attribute ignore_index."
            )
        out[:] = np.moveaxis(values, 1, -1) if self.axes == "CHW" else values.reshape(out.shape)


@dataclass(frozen=True, eq=False)
class RowByRow:
    """Rows of `Arrays` as `Pictures`: a row that cannot be read has its own error, and its neighbours are packed."""

    rows: Arrays

    @staticmethod
    def of(files: Files | Pictures | Arrays) -> Files | Pictures | Arrays:
        """Returns rows one by one if reading one can fail; rows that lie back to back stay, digests check those."""
        parts = files.parts if isinstance(files, JoinedRows) else (files,)
        can_fail = any(isinstance(part, Hdf5Rows) for part in parts)
        return RowByRow(files) if can_fail and isinstance(files, Arrays) else files

    def header(self, i: int) -> ImageHeader:
        return header_of_pixels(self.rows.shape, self.rows.dtype)

    def read(self, i: int) -> NDArray[Any]:
        """Returns (H, W, C) of an image, (H, W) of a mask; raises ImageError if it cannot be read."""
        out = np.empty((1, *self.rows.shape), self.rows.dtype)
        try:
            self.rows.read_rows(np.array([i]), out)
        except SourceError as exc:
            raise ImageError(str(exc.__cause__ if isinstance(exc.__cause__, ImageError) else exc)) from exc
        row: NDArray[Any] = out[0]
        return row

    def take(self, indices: NDArray[np.integer[Any]]) -> RowByRow:
        return RowByRow(self.rows.take(indices))


@dataclass(frozen=True, eq=False)
class RaggedRows:
    """Images or masks of files with rows of varying length, as `Pictures`: copied as stored, decoded on request.

    Sample i is row `row[i]` of the file `files[part[i]]`; a pickle holds headers and numbers only. If `plain`,
    `encoded` decompresses rows that are compressed with zstd. Where images are ragged, masks of one size are read
    in this way, too. An ImageError of these methods is about a row that cannot be read, or is not what was packed;
    its message is the reason only.
    """

    files: tuple[PackedFile, ...]
    name: Literal["images", "masks"]
    part: NDArray[np.int32]
    row: NDArray[np.int64]
    plain: bool = False

    def header(self, i: int) -> ImageHeader:
        samples, row = self._at(i)
        shape = samples.shape(row)
        return header_of_pixels(
            shape[:2] if self.name == "masks" else shape, self.files[self.part[i]].fields[self.name].dtype
        )

    def read(self, i: int) -> NDArray[Any]:
        """Returns (H, W, C) of an image, (H, W) of a mask."""
        return self.checked(i).pixels[self.name]

    @property
    def is_jpeg(self) -> NDArray[np.bool_]:
        """bool (N,): whether the image of a sample is stored as JPEG."""
        found: NDArray[np.bool_] = self._of_each("images", "encoding") == JPEG
        return found

    @property
    def is_turned(self) -> NDArray[np.bool_]:
        """bool (N,): whether an EXIF orientation is still to be applied to the JPEG of a sample."""
        found: NDArray[np.bool_] = self._of_each("images", "orientation") != 1
        return found

    @property
    def stored_bytes(self) -> NDArray[np.int64]:
        """int64 (N,): bytes of each sample's row as it is stored."""
        return self._of_each(self.name, "bytes")

    def _of_each(self, name: str, part: str) -> NDArray[Any]:
        """Returns what the index says of each sample, picked from what it says of all rows of its file."""
        found = np.concatenate([open_samples(file).part(name, part) for file in self.files])
        firsts = np.cumsum([0, *(file.num_rows for file in self.files)])
        picked: NDArray[Any] = found[firsts[self.part] + self.row]
        return picked

    def encoded(self, i: int) -> EncodedRow:
        """Returns the whole sample, image and mask, as it is stored, or decompressed."""
        samples, row = self._at(i)
        found = samples.checked(row, jpeg=False).row
        if not self.plain:
            return found
        if found.encoding == ZSTD:
            found = replace(found, image=bytes_of(samples.pixels("images", row)), encoding=RAW)
        if found.mask_encoding == ZSTD:
            found = replace(found, mask=bytes_of(samples.pixels("masks", row)), mask_encoding=RAW)
        return found

    def checked(self, i: int, *, jpeg: bool = True) -> CheckedSample:
        """Returns a sample as it is stored with its pixels, a JPEG's only if `jpeg` is set.

        DamagedBefore: it is what was packed, and its JPEG cannot be decoded.
        """
        samples, row = self._at(i)
        return samples.checked(row, jpeg=jpeg)

    def take(self, indices: NDArray[np.integer[Any]]) -> RaggedRows:
        return replace(self, part=self.part[indices], row=self.row[indices])

    def _at(self, i: int) -> tuple[CheckedSamples, int]:
        return open_samples(self.files[self.part[i]]), int(self.row[i])


def joined_rows(parts: Sequence[RaggedRows]) -> RaggedRows:
    """Returns the rows of all parts, one after another."""
    firsts = np.cumsum([0, *(len(part.files) for part in parts)]).tolist()
    return RaggedRows(
        files=tuple(file for part in parts for file in part.files),
        name=parts[0].name,
        part=np.concatenate([part.part + np.int32(first) for part, first in zip(parts, firsts[:-1], strict=True)]),
        row=np.concatenate([part.row for part in parts]),
    )


def undecodable(rows: RaggedRows, threads: int | None, progress: Progress | None) -> dict[int, str]:
    """Returns {sample: reason} of JPEGs that are what was packed and yet cannot be decoded, by so many threads."""
    jpegs = np.flatnonzero(rows.is_jpeg).tolist()

    def reason(i: int) -> tuple[int, str]:
        try:
            rows.checked(i)
        except DamagedBefore as exc:
            return i, str(exc)
        except ImageError:
            pass  # Copying reports it.
        return i, ""

    found = {}
    for done, (i, why) in enumerate(in_threads(reason, jpegs, worker_count(threads))):
        if why:
            found[i] = why
        if progress:
            progress("decoding", done + 1, len(jpegs))
    return found
