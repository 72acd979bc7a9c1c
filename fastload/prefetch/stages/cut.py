"""Ragged images, decoded and brought to one size: no more of each is decoded than its window shows.

    bytes of a row --> decode what its window shows --> scratch --resize, some images later--> output (B, C, h, w)

The windows of the first transforms are drawn before anything is decoded, so that no more of a JPEG is decoded than they
show, and no larger than needed; masks, boxes and points are cut and resized with their images.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.dataset import PackedDataset
from fastload.format.ragged import JPEG, RAW
from fastload.images.decode_part import FACTORS, offset_in
from fastload.prefetch.stages.gather import writable
from fastload.prefetch.stages.transform import Augmentation, named
from fastload.prefetch.work import Layout, Opened, Stage, Where, Work
from fastload.read.reader import Rows
from fastload.read.row_table import LocatedIndex
from fastload.timing.probe import span
from fastload.timing.stopwatch import lap
from fastload.transforms import Draws, Normalize
from fastload.transforms.engine.decode_time_resize import DecodeTimeResize
from fastload.transforms.engine.place import place_varied_coordinates, place_varied_masks
from fastload.transforms.engine.placement import Placement
from fastload.transforms.engine.resample import Constants, in_numpy, numpy_images, place_samples

# Decoded images that wait for their resize: so few that they are still in the core's cache when it comes.
SCRATCH_BYTES = 3 * 2**19


class _Scratch(threading.local):
    """Memory of each thread's own."""

    def __init__(self) -> None:
        self.memory = np.empty(SCRATCH_BYTES, np.uint8)


class PlacedRows:
    """Decodes what windows of ragged uint8 images show, and places it. Any thread may call it."""

    def __init__(self, reader: Rows) -> None:
        self._reader = reader
        self._scratch = _Scratch()

    @staticmethod
    def factors(placement: Placement, index: LocatedIndex) -> NDArray[np.int64]:
        """Returns by how much each image may be shrunk while it is decoded and still cover its output, int64 (B,)."""
        factors = np.ones(len(index), np.int64)
        for factor in sorted(FACTORS):
            large = (placement.window >= factor * placement.scaled).all(axis=1)
            factors[large & (index.encoding == JPEG)] = factor
        return factors

    def place(
        self,
        rows: NDArray[np.int64],
        index: LocatedIndex,
        placement: Placement,
        factors: NDArray[np.int64],
        output: torch.Tensor,
        constants: Constants | None = None,
    ) -> None:
        """Decodes and places images in the output, (B, C, h, w) over dense (B, h, w, C) memory.

        The placement's windows are snapped to the factors, by which each image may be shrunk while it is decoded. With
        constants, of a Normalize, the output is normalized.
        """
        reader = self._reader.encoded("images")
        target, made = numpy_images(output), np.zeros(len(rows), np.bool_)
        if target is not None:
            windows = placement.in_decoded(factors, np.zeros_like(factors)).table()
            made = reader.make_images(rows, index, windows, factors, target, in_numpy(constants))
            if made.all():
                return
        if (index.encoding == RAW).all() and (mapped := reader.flat) is not None:
            sources = np.stack([index.offset, index.shape[:, 1]], axis=1).astype(np.int64)
            place_samples(torch.from_numpy(writable(mapped)), sources, placement, output, constants)
            lap("transform")
            return
        # The most bytes that each image's decoded pixels take.
        height, width, channels = index.shape.astype(np.int64).T
        most = np.where(index.encoding == JPEG, -(-height // factors), placement.window[:, 0])
        most = most * -(-width // factors) * channels
        # Those that were not made yet, if some were: one by one.
        left = [slice(at, at + 1) for at in np.flatnonzero(~made).tolist()]
        for some in left if made.any() else runs(most):
            shown, out, least = placement.part(some), output[some], int(most[some].sum())
            memory = self._scratch.memory if least <= SCRATCH_BYTES else np.empty(least, np.uint8)
            windows = np.concatenate([shown.first, shown.window], axis=1)
            parts = reader.parts(rows[some], index.part(some), windows, factors[some], memory)
            shrunk, tops = (np.array([getattr(part, name) for part in parts], np.int64) for name in ("factor", "top"))
            shown = shown.in_decoded(shrunk, tops)
            begins = [offset_in(memory, part.pixels) for part in parts]
            if min(begins) < 0:
                # One that only Pillow decodes comes at its full size, and may have found no room.
                flat = [part.pixels.reshape(-1) for part in parts]
                memory, begins = np.concatenate(flat), np.cumsum([0, *map(len, flat[:-1])]).tolist()
            sources = np.array([begins, [part.pixels.shape[1] for part in parts]], np.int64).T
            place_samples(torch.from_numpy(memory), sources, shown, out, constants)
            lap("transform")


class CutRows(Stage):
    """Adds images of one size, made by the first transforms of the list, and masks, boxes and points like them.

    Args:
        dataset: packed, its images ragged.
        augmentation: the loader's; the head counts as done in it.
        head: the transforms that give images one size.
        rest: those that run behind it in the threads. Images lie in the slot if there are none; a Normalize that alone
            follows is done with the head.
    """

    where = Where.THREAD
    divisible = True

    def __init__(
        self, dataset: PackedDataset, augmentation: Augmentation, head: DecodeTimeResize, rest: tuple[Any, ...]
    ) -> None:
        self._file, self._augmentation, self._head, self._goes_on = dataset.file, augmentation, head, bool(rest)
        fields = dataset.file.fields
        self._mask_dtype = fields["masks"].dtype.newbyteorder("=") if "masks" in dataset.fields else None
        self._constants: Constants | None = None
        if len(rest) == 1 and isinstance(rest[0], Normalize) and head.spec.dtype == torch.uint8:
            self._constants = rest[0].scale_and_shift(torch.uint8)
        self.why = "images are decoded"
        if head.transforms:
            self.why = f"{named(head.transforms)}: no more of an image is decoded than is shown"

    def open(self, opened: Opened) -> None:
        """Takes the reader."""
        self._reader = opened.reader
        self._placed = PlacedRows(opened.reader)

    def output(self, given: Layout) -> Layout:
        """Adds images (and masks) of the head's size; what moves with them is float32."""
        size, channels = self._head.size, self._head.spec.channels
        made: Layout = {"images": ((*size, channels), self._file.fields["images"].dtype.newbyteorder("="))}
        if self._mask_dtype is not None:
            made["masks"] = (size, self._mask_dtype)
        moved = {
            name: (given[name][0], np.dtype(np.float32)) for name in self._augmentation.coordinates if name in given
        }
        return given | made | moved

    def run(self, work: Work) -> None:
        """Decodes and cuts.

        Raises:
            FormatError: a sample is damaged; names it.
            OptionError: an image is too small for its crop.
        """
        with span("decode"):
            self._cut(work)

    def _cut(self, work: Work) -> None:
        rows, fields = work.rows, work.fields
        index = self._reader.encoded("images").index(rows)
        draws = self._augmentation.draws(work.epoch, work.whole)
        placement = self._head.placement(index.shape[:, :2], draws)
        lap("transform")
        if self._goes_on and (placement is None or self._constants is None):
            shape = (len(rows), *self._head.size, self._head.spec.channels)
            output = torch.empty(shape, dtype=self._head.spec.dtype, device="cpu").permute(0, 3, 1, 2)
        else:
            output = work.targets["images"]
        if placement is None:
            self._one_by_one(rows, index, draws, fields, output)
        else:
            factors = self._placed.factors(placement, index)
            placement = placement.snapped(factors, index.shape)
            self._placed.place(rows, index, placement, factors, output, self._constants)
            if self._mask_dtype is not None:
                placed = torch.from_numpy(np.empty((len(rows), *placement.size), self._mask_dtype))
                for some in runs(index.shape[:, :2].prod(axis=1, dtype=np.int64)):
                    place_varied_masks(self._masks(rows, some, fields), placement.part(some), placed[some])
                    lap("transform")
                fields["masks"] = placed
            if self._augmentation.coordinates:
                fields |= place_varied_coordinates(fields, placement, self._augmentation.coordinates)
        fields["images"] = output
        work.copied.append(int(index.bytes.sum()))

    def _one_by_one(
        self,
        rows: NDArray[np.int64],
        index: LocatedIndex,
        draws: Draws,
        fields: dict[str, Any],
        output: torch.Tensor,
    ) -> None:
        """Runs a head that one placement cannot describe, image by image: padding, two resizes, 16 bits."""
        names = [*self._augmentation.coordinates, *(["masks"] if self._mask_dtype is not None else [])]
        made: dict[str, list[torch.Tensor]] = {name: [] for name in names}
        sizes = index.shape.prod(axis=1, dtype=np.int64) * output.dtype.itemsize
        for some in runs(sizes):
            moved: dict[str, Any] = {name: fields[name][some] for name in self._augmentation.coordinates}
            if self._mask_dtype is not None:
                moved["masks"] = [torch.from_numpy(mask) for mask in self._masks(rows, some, fields)]
            images = [torch.from_numpy(one).permute(2, 0, 1) for one in self._reader.decoded("images", rows[some])]
            done = self._head.apply_each(
                images,
                moved,
                draws.of_samples(some),
                ignore_index=self._augmentation.ignore_index,
                coordinates=self._augmentation.coordinates,
            )
            output[some].copy_(done.pop("images"))
            for name, values in done.items():
                made[name].append(values)
            lap("transform")
        fields |= {name: torch.cat(values) for name, values in made.items()}

    def _masks(self, rows: NDArray[np.int64], some: slice, fields: dict[str, Any]) -> list[NDArray[Any]]:
        """Returns the whole masks of some rows: of one size and read with the other fields, or decoded."""
        if "masks" in fields:
            return list(fields["masks"][some].numpy())
        return self._reader.decoded("masks", rows[some])


def runs(sizes: NDArray[np.int64]) -> Iterator[slice]:
    """Yields runs of rows that together have at most SCRATCH_BYTES, or one row that has more; `sizes` in bytes."""
    first = total = 0
    for at, size in enumerate(sizes.tolist()):
        if at > first and total + size > SCRATCH_BYTES:
            yield slice(first, at)
            first, total = at, 0
        total += size
    if first < len(sizes):
        yield slice(first, len(sizes))
