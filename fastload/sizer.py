"""Batches of images that lie in a byte store: brought to one size by the threads that read, masks and boxes with them.

A batch's windows are drawn first, so that of a JPEG no more is decoded than they show, and no larger than needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.augment import Augmentation, in_slot
from fastload.dataset import PackedDataset, as_handed_over
from fastload.device import fields_on_cpu
from fastload.placed_rows import RowPlacer, groups, shrink_factors
from fastload.plan import PlannedBatch
from fastload.ranges import span
from fastload.read import RowReader
from fastload.serial_torch import compute_alone
from fastload.stopwatch import lap
from fastload.store import StoreIndex
from fastload.transforms import Draws, Normalize
from fastload.transforms.size_making import SizeMaking
from fastload.transforms.varied import VariedPlacement, place_varied_coordinates, place_varied_masks


class Sizer:
    """Fills slots with batches of one size. Any thread may call it.

    Args:
        dataset: packed, without a Python transform, with images in a store among its fields.
        reader: of its fields.
        sizing: the transforms that make one size of all.
        augmentation: of the loader; the transforms of `sizing` count as done in it.
        complete: the other transforms are done here too, and all are thread-safe; else they are left to others.

    Attributes:
        fields: what comes out of each field: name, shape and dtype of a sample as it lies in a slot.
        views: fields whose dtype NumPy lacks, with it; their slots hold uint16.
    """

    def __init__(
        self,
        dataset: PackedDataset,
        reader: RowReader,
        sizing: SizeMaking,
        augmentation: Augmentation,
        *,
        complete: bool,
    ) -> None:
        self._file = dataset.file
        self._reader = reader
        self._sizing = sizing
        self._augmentation = augmentation
        self._complete = complete and len(augmentation.transforms) > augmentation.done
        stored = {name for name in ("images", "masks") if name in self._file.fields}
        stored = {name for name in stored if self._file.fields[name].store is not None}
        self._others = [item for item in dataset.layout() if item[0] not in stored]
        self._has_masks = "masks" in dataset.fields
        field = self._file.fields["images"]
        self._channels, self._dtype = field.shape[2], field.dtype.newbyteorder("=")
        rest = augmentation.transforms[augmentation.done :]
        self._normalizes = self._complete and len(rest) == 1 and isinstance(rest[0], Normalize)
        constants = rest[0].scale_and_shift(torch.uint8) if self._normalizes and self._dtype == np.uint8 else None
        self._placer = RowPlacer(self._file, constants)
        # Learnt from a batch of one black image.
        height, width = sizing.size
        arrays: dict[str, NDArray[Any]] = {"images": np.zeros((1, height, width, self._channels), self._dtype)}
        arrays |= {name: np.zeros((1, *shape), dtype) for name, shape, dtype in self._others}
        if self._has_masks:
            arrays["masks"] = np.zeros((1, height, width), np.uint8)
        fields = self._as_tensors(arrays)
        fields |= {name: fields[name].to(torch.float32) for name in augmentation.coordinates if name in fields}
        made = self._rest(fields, PlannedBatch(np.zeros(1, np.int64), np.ones(1, np.bool_), 1, 0), 0)
        self.views = {name: tensor.dtype for name, tensor in made.items() if tensor.dtype == torch.bfloat16}
        self.fields = [(name, *in_slot(name, tensor)) for name, tensor in made.items()]

    def fill(self, epoch: int, planned: PlannedBatch, arrays: Mapping[str, NDArray[Any]]) -> int:
        """Reads a batch of an epoch into a slot's arrays, (B, ...); returns the bytes of its rows.

        Raises:
            FormatError: a sample is damaged; it names it.
            OptionError: an image is too small for its crop.
        """
        compute_alone()
        rows, count = planned.rows, len(planned.rows)
        slot = {name: array[:count] for name, array in arrays.items()}  # the last group may not fill its slot
        if "row" in slot:
            slot["row"][:], slot["valid"][:] = rows, planned.valid
        targets = fields_on_cpu({name: slot[name] for name, _, _ in self.fields}, self.views)
        read: dict[str, NDArray[Any]] = {name: np.empty((count, *shape), dtype) for name, shape, dtype in self._others}
        num_bytes = self._reader.gather(rows, read)  # which checks the rows, and that the file is the same
        index = self._reader.stored("images").index(rows)
        num_bytes += int(index.bytes.sum())
        lap("reading")
        with span("decode"):
            placement = self._sizing.placement(index.shape[:, :2], Draws(self._augmentation.seed, epoch, rows))
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
        index: StoreIndex,
        placement: VariedPlacement,
        fields: dict[str, torch.Tensor],
        target: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """The fields of a batch behind the transforms that make one size, images in the target where that is all."""
        factors = shrink_factors(index, placement)
        placement = placement.snapped(factors, index.shape)
        output = target
        if self._complete and not self._normalizes:
            output = torch.empty((len(rows), *self._sizing.size, self._channels), dtype=torch.uint8).permute(0, 3, 1, 2)
        self._placer.place(self._reader.stored("images"), rows, index, placement, factors, output)
        sized = {**fields, "images": output}
        if self._has_masks:
            sized["masks"] = torch.empty((len(rows), *self._sizing.size), dtype=torch.uint8)
            for some, masks in self._masks(rows, index, fields):
                place_varied_masks(masks, placement.part(some), sized["masks"][some])
                lap("transform")
        return sized | place_varied_coordinates(fields, placement, self._augmentation.coordinates)

    def _one_by_one(
        self,
        rows: NDArray[np.int64],
        index: StoreIndex,
        epoch: int,
        fields: dict[str, torch.Tensor],
        target: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """As `_at_once`, where the transforms are not one placement of each image: padding, two resizes, 16 bits."""
        coordinates = self._augmentation.coordinates
        names = [*coordinates, *(["masks"] if self._has_masks else [])]
        made: dict[str, list[torch.Tensor]] = {name: [] for name in names}
        output = target
        if self._complete:
            dtype = torch.from_numpy(np.empty(0, self._dtype)).dtype
            output = torch.empty((len(rows), *self._sizing.size, self._channels), dtype=dtype).permute(0, 3, 1, 2)
        sizes = index.shape.prod(axis=1, dtype=np.int64) * self._dtype.itemsize
        for some in groups(sizes):
            moved: dict[str, Sequence[torch.Tensor] | torch.Tensor] = {name: fields[name][some] for name in coordinates}
            if self._has_masks:
                (_, masks), *_ = self._masks(
                    rows[some], None, {"masks": fields["masks"][some]} if "masks" in fields else {}
                )
                moved["masks"] = [torch.from_numpy(mask) for mask in masks]
            images = [
                torch.from_numpy(pixels).permute(2, 0, 1) for pixels in self._reader.decoded("images", rows[some])
            ]
            done = self._sizing.apply_each(
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
        self, rows: NDArray[np.int64], index: StoreIndex | None, fields: dict[str, torch.Tensor]
    ) -> Iterator[tuple[slice, list[NDArray[Any]]]]:
        """The masks of rows, whole, some at a time; all at once without an index."""
        if "masks" in fields:  # of one size, and read with the other fields
            yield slice(0, len(rows)), list(fields["masks"].numpy())
            return
        sizes = np.zeros(len(rows), np.int64) if index is None else index.shape[:, :2].prod(axis=1, dtype=np.int64)
        for some in groups(sizes):
            yield some, self._reader.decoded("masks", rows[some])

    def _as_tensors(self, arrays: dict[str, NDArray[Any]]) -> dict[str, torch.Tensor]:
        return fields_on_cpu(as_handed_over(self._file, arrays))

    def _rest(
        self, fields: dict[str, torch.Tensor], planned: PlannedBatch, epoch: int, output: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """The fields after the other transforms, where they are done here."""
        if not self._complete:
            return fields
        return self._augmentation.apply(fields, planned, epoch=epoch, output=output)
