"""Samples of packed files with byte stores, as a listing's pictures: copied as they are stored, decoded where asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fastload.cpus import available_cpus
from fastload.errors import ImageError
from fastload.format import PackedFile
from fastload.image_header import ImageHeader
from fastload.in_threads import in_threads
from fastload.open_readers import SAMPLES
from fastload.pack.options import Progress
from fastload.store import RAW, ZSTD, EncodedRow
from fastload.stored_samples import CheckedSample, DamagedBefore, StoredSamples


@dataclass(frozen=True, eq=False)
class KeptRows:
    """`images` or `masks` of files with stores, as `Pictures`; a pickle holds headers and numbers only.

    Beside a store of images, masks count as such too where they are rows of one size.

    Attributes:
        files: their headers.
        name: "images" or "masks".
        part: int32 (N,), the file of each sample.
        row: int64 (N,), its row there.
        plain: rows that zstd compresses are given decompressed.
    """

    files: tuple[PackedFile, ...]
    name: Literal["images", "masks"]
    part: NDArray[np.int32]
    row: NDArray[np.int64]
    plain: bool = False

    @classmethod
    def of(cls, file: PackedFile, name: Literal["images", "masks"]) -> KeptRows:
        """All rows of a file."""
        return cls((file,), name, np.zeros(file.num_rows, np.int32), np.arange(file.num_rows, dtype=np.int64))

    @property
    def kind(self) -> str:
        """What rows of one file must have in common, for messages."""
        field = self.files[0].fields[self.name]
        channels = f" with {field.shape[2]} channels" if self.name == "images" else ""
        return f"{field.dtype.name} in a byte store{channels}"

    def header(self, i: int) -> ImageHeader:
        """That of the decoded pixels."""
        samples, row = self._at(i)
        height, width, channels = samples.shape(row)
        channels = 1 if self.name == "masks" else channels
        bits = 8 * self.files[self.part[i]].fields[self.name].dtype.itemsize
        kind = {1: "L", 3: "RGB", 4: "RGBA"}[channels] if bits == 8 else {1: "I;16"}.get(channels, "RGB;16")
        return ImageHeader(height, width, channels, bits, kind, 1)

    def read(self, i: int) -> NDArray[Any]:
        """(H, W, C) of an image, (H, W) of a mask; see Pictures.

        Raises:
            ImageError: it cannot be read, decoded, or is not what was packed; the reason only.
        """
        return self.checked(i).pixels[self.name]

    def pixels(self, i: int) -> NDArray[Any]:
        """As `read`, but not compared with their digest."""
        samples, row = self._at(i)
        return samples.pixels(self.name, row)

    @property
    def is_jpeg(self) -> NDArray[np.bool_]:
        """bool (N,): whether the image of a sample is stored as JPEG."""
        found = np.zeros(len(self.row), bool)
        for number, file in enumerate(self.files):
            here = self.part == number
            found[here] = SAMPLES.of(file).is_jpeg()[self.row[here]]
        return found

    @property
    def stored_bytes(self) -> NDArray[np.int64]:
        """int64 (N,): bytes of each sample's row as it is stored."""
        found = np.zeros(len(self.row), np.int64)
        for number, file in enumerate(self.files):
            here = self.part == number
            found[here] = SAMPLES.of(file).stored_bytes(self.name)[self.row[here]]
        return found

    def encoded(self, i: int) -> EncodedRow:
        """The whole sample, image and mask, as it is stored, or decompressed.

        Raises:
            ImageError: it cannot be read, or is not what was packed; the reason only.
            FileChangedError: the file was written to since its header was read.
        """
        samples, row = self._at(i)
        found = samples.encoded(row)
        if not self.plain:
            return found
        if found.encoding == ZSTD:
            found = replace(found, image=_bytes_of(samples.pixels("images", row)), encoding=RAW)
        if found.mask_encoding == ZSTD:
            found = replace(found, mask=_bytes_of(samples.pixels("masks", row)), mask_encoding=RAW)
        return found

    def check(self, i: int) -> None:
        """Decode a sample that is what was packed.

        Raises:
            DamagedBefore: its JPEG cannot be decoded.
            ImageError: it cannot be read, or is not what was packed; the reason only.
        """
        samples, row = self._at(i)
        samples.checked(row)

    def checked(self, i: int, *, jpeg: bool = True) -> CheckedSample:
        """As `encoded`, with its pixels; see `StoredSamples.checked`."""
        samples, row = self._at(i)
        return samples.checked(row, jpeg=jpeg)

    def take(self, indices: NDArray[np.integer[Any]]) -> KeptRows:
        """Those of some samples, in the order of indices."""
        return replace(self, part=self.part[indices], row=self.row[indices])

    def _at(self, i: int) -> tuple[StoredSamples, int]:
        samples = SAMPLES.of(self.files[self.part[i]])
        samples.check_identity()
        return samples, int(self.row[i])


def undecodable(rows: KeptRows, threads: int | None, progress: Progress | None) -> dict[int, str]:
    """JPEGs that are what was packed and yet cannot be decoded: sample -> why.

    Args:
        threads: that decode, by default one per CPU.
        progress: called with ("decoding", done, total).
    """
    jpegs = np.flatnonzero(rows.is_jpeg).tolist()

    def tried(i: int) -> tuple[int, str]:
        try:
            rows.check(i)
        except DamagedBefore as exc:
            return i, str(exc)
        except ImageError:
            pass  # copying names it
        return i, ""

    found = {}
    for done, (i, reason) in enumerate(in_threads(tried, jpegs, available_cpus() if threads is None else threads)):
        if reason:
            found[i] = reason
        if progress:
            progress("decoding", done + 1, len(jpegs))
    return found


def _bytes_of(pixels: NDArray[Any]) -> memoryview:
    little = np.ascontiguousarray(pixels, dtype=pixels.dtype.newbyteorder("<"))
    return little.reshape(-1).view(np.uint8).data


def joined_rows(parts: Sequence[KeptRows]) -> KeptRows:
    """The rows of all, one after another."""
    firsts = np.cumsum([0, *(len(part.files) for part in parts)]).tolist()
    return KeptRows(
        files=tuple(file for part in parts for file in part.files),
        name=parts[0].name,
        part=np.concatenate([part.part + np.int32(first) for part, first in zip(parts, firsts[:-1], strict=True)]),
        row=np.concatenate([part.row for part in parts]),
    )
