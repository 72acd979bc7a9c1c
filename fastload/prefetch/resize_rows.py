"""Batches of images that are stored in different sizes: resized to one size by the threads that read.

    bytes of a row --> decode what its window shows --> scratch --one call for some images--> output (B, C, h, w)

A batch's windows are drawn first, so that no more of a JPEG is decoded than they show, and no larger than needed. Raw
pixels in a mapping are resized where they lie. Masks, boxes and points are cut and resized with their images.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.dataset import PackedDataset, as_handed_over
from fastload.device.copy import fields_on_cpu
from fastload.format.header import PackedFile
from fastload.format.ragged import JPEG, RAW, RaggedIndex
from fastload.images.decode_part import FACTORS, offset_in
from fastload.plan import PlannedBatch
from fastload.prefetch.augment import Augmentation, in_slot
from fastload.read.ragged_rows import RaggedReader
from fastload.read.reader import RowReader
from fastload.timing.ranges import span
from fastload.timing.stopwatch import lap
from fastload.transforms import Draws, Normalize
from fastload.transforms.engine.cpu_program import place_varied_in_one_call
from fastload.transforms.engine.place import place_varied_coordinates, place_varied_masks
from fastload.transforms.engine.placement import VariedPlacement
from fastload.transforms.engine.size_head import SizeHead

# Decoded images that wait for their resize: so few that they are still in the core's cache when it comes.
SCRATCH_BYTES = 3 * 2**19

Constants = tuple[torch.Tensor, torch.Tensor]
"""Scale and shift of a Normalize, float32 (C,) each."""


class RaggedAugmenter:
    """Fills slots with batches of one size from images that differ in size. Any thread may call it.

    Args:
        dataset: packed, without a Python transform, with ragged images among its fields.
        reader: of its fields.
        head: the transforms that give all images one size.
        augmentation: of the loader; the transforms of `head` count as done in it.
        complete: whether the other transforms, all of them thread-safe, are done here too; else they are left to the
            stages after this one.

    Attributes:
        fields: name, shape and dtype of each field of a sample, as it lies in a slot.
        views: the torch dtype of fields whose dtype NumPy lacks; their slots hold uint16.
    """

    def __init__(
        self,
        dataset: PackedDataset,
        reader: RowReader,
        head: SizeHead,
        augmentation: Augmentation,
        *,
        complete: bool,
    ) -> None:
        self._file = dataset.file
        self._reader = reader
        self._head = head
        self._augmentation = augmentation
        self._complete = complete and len(augmentation.transforms) > augmentation.done
        ragged = {name for name in ("images", "masks") if name in self._file.fields}
        ragged = {name for name in ragged if self._file.fields[name].ragged is not None}
        self._others = [item for item in dataset.layout() if item[0] not in ragged]
        self._has_masks = "masks" in dataset.fields
        field = self._file.fields["images"]
        self._channels, self._dtype = field.shape[2], field.dtype.newbyteorder("=")
        rest = augmentation.transforms[augmentation.done :]
        self._normalizes = self._complete and len(rest) == 1 and isinstance(rest[0], Normalize)
        constants = rest[0].scale_and_shift(torch.uint8) if self._normalizes and self._dtype == np.uint8 else None
        self._resizer = _ImageResizer(self._file, constants)
        # What comes out is learnt from a batch of one black image.
        height, width = head.size
        arrays: dict[str, NDArray[Any]] = {"images": np.zeros((1, height, width, self._channels), self._dtype)}
        arrays |= {name: np.zeros((1, *shape), dtype) for name, shape, dtype in self._others}
        if self._has_masks:
            arrays["masks"] = np.zeros((1, height, width), np.uint8)
        fields = self._as_tensors(arrays)
        fields |= {name: fields[name].to(torch.float32) for name in augmentation.coordinates if name in fields}
        made = self._rest(fields, PlannedBatch(np.zeros(1, np.int64), np.ones(1, np.bool_), 1, 0), 0)
        self.views = {name: tensor.dtype for name, tensor in made.items() if tensor.dtype == torch.bfloat16}
        self.fields = [(name, *in_slot(name, tensor)) for name, tensor in made.items()]

    def fill(self, epoch: int, planned: PlannedBatch, slot: Mapping[str, NDArray[Any]]) -> int:
        """Reads a batch of an epoch into a slot's arrays, (B, ...); returns the bytes of its rows.

        Raises:
            FormatError: a sample is damaged; names it.
            OptionError: an image is too small for its crop.
        """
        rows, count = planned.rows, len(planned.rows)
        targets = fields_on_cpu({name: slot[name] for name, _, _ in self.fields}, self.views)
        read: dict[str, NDArray[Any]] = {name: np.empty((count, *shape), dtype) for name, shape, dtype in self._others}
        num_bytes = self._reader.gather(rows, read)  # which checks the rows, and that the file is the same
        index = self._reader.ragged("images").index(rows)
        num_bytes += int(index.bytes.sum())
        lap("reading")
        with span("decode"):
            placement = self._head.placement(index.shape[:, :2], Draws(self._augmentation.seed, epoch, rows))
            fields = self._as_tensors(read)
            lap("transform")
            if placement is None:
                sized = self._one_by_one(rows, index, epoch, fields, targets["images"])
            else:
                sized = self._at_once(rows, index, placement, fields, targets["images"])
        with span("transform"):
            whole = sized["images"].data_ptr() == targets["images"].data_ptr()
            made = sized if whole else self._rest(sized, planned, epoch, targets["images"])
        for name, target in targets.items():
            if made[name].data_ptr() != target.data_ptr():
                target.copy_(made[name])
        lap("transform")
        return num_bytes

    def _at_once(
        self,
        rows: NDArray[np.int64],
        index: RaggedIndex,
        placement: VariedPlacement,
        fields: dict[str, torch.Tensor],
        target: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """Returns the fields after the head of the list; images in the target if no transform follows."""
        factors = shrink_factors(index, placement)
        placement = placement.snapped(factors, index.shape)
        output = target
        if self._complete and not self._normalizes:
            output = torch.empty((len(rows), *self._head.size, self._channels), dtype=torch.uint8).permute(0, 3, 1, 2)
        self._resizer.resize(self._reader.ragged("images"), rows, index, placement, factors, output)
        sized = {**fields, "images": output}
        if self._has_masks:
            sized["masks"] = torch.empty((len(rows), *self._head.size), dtype=torch.uint8)
            for some, masks in self._masks(rows, index, fields):
                place_varied_masks(masks, placement.part(some), sized["masks"][some])
                lap("transform")
        if self._augmentation.coordinates:
            sized |= place_varied_coordinates(fields, placement, self._augmentation.coordinates)
        return sized

    def _one_by_one(
        self,
        rows: NDArray[np.int64],
        index: RaggedIndex,
        epoch: int,
        fields: dict[str, torch.Tensor],
        target: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """Does what `_at_once` does where one placement cannot describe the head: padding, two resizes, 16 bits."""
        coordinates = self._augmentation.coordinates
        names = [*coordinates, *(["masks"] if self._has_masks else [])]
        made: dict[str, list[torch.Tensor]] = {name: [] for name in names}
        output = target
        if self._complete:
            dtype = torch.from_numpy(np.empty(0, self._dtype)).dtype
            output = torch.empty((len(rows), *self._head.size, self._channels), dtype=dtype).permute(0, 3, 1, 2)
        sizes = index.shape.prod(axis=1, dtype=np.int64) * self._dtype.itemsize
        for some in runs(sizes):
            moved: dict[str, Sequence[torch.Tensor] | torch.Tensor] = {name: fields[name][some] for name in coordinates}
            if self._has_masks:
                (_, masks), *_ = self._masks(
                    rows[some], None, {"masks": fields["masks"][some]} if "masks" in fields else {}
                )
                moved["masks"] = [torch.from_numpy(mask) for mask in masks]
            images = [
                torch.from_numpy(pixels).permute(2, 0, 1) for pixels in self._reader.decoded("images", rows[some])
            ]
            done = self._head.apply_each(
                images,
                moved,
                Draws(self._augmentation.seed, epoch, rows[some]),
                ignore_index=self._augmentation.ignore_index,
                coordinates=coordinates,
            )
            output[some].copy_(done.pop("images"))
            for name, values in done.items():
                made[name].append(values)
            lap("transform")
        return fields | {"images": output} | {name: torch.cat(values) for name, values in made.items()}

    def _masks(
        self, rows: NDArray[np.int64], index: RaggedIndex | None, fields: dict[str, torch.Tensor]
    ) -> Iterator[tuple[slice, list[NDArray[Any]]]]:
        """Yields the whole masks of rows, some at a time; without an index all at once."""
        if "masks" in fields:  # of one size, and read with the other fields
            yield slice(0, len(rows)), list(fields["masks"].numpy())
            return
        sizes = np.zeros(len(rows), np.int64) if index is None else index.shape[:, :2].prod(axis=1, dtype=np.int64)
        for some in runs(sizes):
            yield some, self._reader.decoded("masks", rows[some])

    def _as_tensors(self, arrays: dict[str, NDArray[Any]]) -> dict[str, torch.Tensor]:
        return fields_on_cpu(as_handed_over(self._file, arrays))

    def _rest(
        self, fields: dict[str, torch.Tensor], planned: PlannedBatch, epoch: int, output: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Returns the fields after the transforms that follow the head, if they are done here."""
        if not self._complete:
            return fields
        return self._augmentation.apply(fields, planned, epoch=epoch, output=output)


class _ImageResizer:
    """Decodes and resizes ragged images into one output. Any thread may call it, and decodes into memory of its own.

    Args:
        file: header of the packed file.
        constants: of a Normalize that is done in the same pass; None: pixels stay uint8.
    """

    def __init__(self, file: PackedFile, constants: Constants | None) -> None:
        self._constants = constants
        self._channels = file.fields["images"].shape[2]
        self._local = threading.local()

    def resize(
        self,
        reader: RaggedReader,
        rows: NDArray[np.int64],
        index: RaggedIndex,
        placement: VariedPlacement,
        factors: NDArray[np.int64],
        output: torch.Tensor,
    ) -> None:
        """Fills the output (B, C, h, w), a view of dense (B, h, w, C) memory.

        Args:
            reader: of uint8 images.
            rows: int64 (B,), their numbers in the file, for messages.
            index: of the rows.
            placement: with windows snapped to the factors.
            factors: int64 (B,), by how much each image may be shrunk while it is decoded.

        Raises:
            FormatError: a row cannot be decoded; names its sample.
        """
        flat = reader.flat
        if flat is not None and (index.encoding == RAW).all():
            sources = np.stack([index.offset, index.shape[:, 0], index.shape[:, 1]], axis=1)
            self._run(_as_tensor(flat), sources, placement.table(), output)
            return
        most = _most_bytes(index, placement, factors, self._channels)
        for some in runs(most):
            shown, memory = placement.part(some), self._scratch(int(most[some].sum()))
            parts = reader.parts(rows[some], index.part(some), shown.table()[:, :4], factors[some], memory)
            shrunk, tops = (np.array([getattr(part, name) for part in parts], np.int64) for name in ("factor", "top"))
            within = shown.in_decoded(shrunk, tops).table()
            self._place(memory, [part.pixels for part in parts], within, output[some])

    def _place(
        self, memory: NDArray[np.uint8], pixels: list[NDArray[np.uint8]], table: NDArray[np.int64], output: torch.Tensor
    ) -> None:
        """Resizes decoded images, those in scratch memory and those that found no room there."""
        sources = np.array([(offset_in(memory, one), *one.shape[:2]) for one in pixels], np.int64)
        inside = sources[:, 0] >= 0
        if inside.all():
            self._run(torch.from_numpy(memory), sources, table, output)
            return
        for at, one in enumerate(pixels):
            # One that only Pillow decodes comes at its full size.
            source_bytes = memory if inside[at] else np.ascontiguousarray(one).reshape(-1)
            source = sources[at : at + 1] if inside[at] else np.array([[0, *one.shape[:2]]])
            self._run(torch.from_numpy(source_bytes), source, table[at : at + 1], output[at : at + 1])

    def _run(
        self, memory: torch.Tensor, sources: NDArray[np.int64], table: NDArray[np.int64], output: torch.Tensor
    ) -> None:
        place_varied_in_one_call(
            memory, torch.from_numpy(sources), torch.from_numpy(table), output, *(self._constants or ())
        )
        lap("transform")

    def _scratch(self, least: int) -> NDArray[np.uint8]:
        """Returns memory for so many bytes, this thread's own where that suffices."""
        if least > SCRATCH_BYTES:
            return np.empty(least, np.uint8)
        memory: NDArray[np.uint8] | None = getattr(self._local, "memory", None)
        if memory is None:
            memory = self._local.memory = np.empty(SCRATCH_BYTES, np.uint8)
        return memory


def shrink_factors(index: RaggedIndex, placement: VariedPlacement) -> NDArray[np.int64]:
    """Returns by how much each image may be shrunk while it is decoded and still cover the output, int64 (B,)."""
    factors = np.ones(len(index), np.int64)
    for factor in sorted(FACTORS):
        high = placement.height >= factor * placement.scaled_height
        wide = placement.width >= factor * placement.scaled_width
        factors[high & wide & (index.encoding == JPEG)] = factor
    return factors


def runs(sizes: NDArray[np.int64]) -> Iterator[slice]:
    """Yields runs of rows that together have at most SCRATCH_BYTES, or one row that has more.

    Args:
        sizes: int64 (B,), bytes of each row.
    """
    first = total = 0
    for at, size in enumerate(sizes.tolist()):
        if at > first and total + size > SCRATCH_BYTES:
            yield slice(first, at)
            first, total = at, 0
        total += size
    if first < len(sizes):
        yield slice(first, len(sizes))


def _most_bytes(
    index: RaggedIndex, placement: VariedPlacement, factors: NDArray[np.int64], channels: int
) -> NDArray[np.int64]:
    """Returns the most bytes that each image's decoded pixels take, int64 (B,)."""
    height, width = (index.shape[:, axis].astype(np.int64) for axis in (0, 1))
    rows: NDArray[np.int64] = np.where(index.encoding == JPEG, -(-height // factors), placement.height)
    most: NDArray[np.int64] = rows * -(-width // factors) * channels
    return most


def _as_tensor(flat: NDArray[np.uint8]) -> torch.Tensor:
    """Returns the bytes of a read-only mapping as a tensor, which must not be written to."""
    # torch warns of arrays that cannot be written to, as if somebody would.
    return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * flat.nbytes).from_address(flat.ctypes.data)))
