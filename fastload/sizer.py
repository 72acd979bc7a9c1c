"""Batches of images that lie in a byte store: decoded, cut and resized to one size by the threads that read.

    store --bytes of a row--> decode what the window shows --> scratch --one call for some images--> slot (B, h, w, C)

A batch's windows are drawn first, so that of a JPEG no more is decoded than they show, and no larger than needed. Raw
pixels in a mapping are resized where they lie.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.augment import Augmentation, in_slot
from fastload.dataset import PackedDataset, as_handed_over
from fastload.device import fields_on_cpu
from fastload.errors import ImageError
from fastload.plan import PlannedBatch
from fastload.ranges import span
from fastload.read import RowReader
from fastload.read.stored import sample_error
from fastload.stopwatch import current
from fastload.store import JPEG, RAW, StoreIndex
from fastload.stored_rows import FACTORS, decode_part, decode_row
from fastload.transforms import Draws, Normalize
from fastload.transforms.one_call import place_varied_in_one_call
from fastload.transforms.size_making import SizeMaking
from fastload.transforms.varied import VariedPlacement, place_varied_coordinates, place_varied_masks

# Decoded images that wait for their resize: few enough to stay in a core's cache, many enough for one call.
_SCRATCH_BYTES = 4 * 2**20


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
        self._others = [item for item in dataset.layout() if item[0] not in ("images", "masks")]
        self._has_masks = "masks" in dataset.fields
        field = self._file.fields["images"]
        self._channels, self._dtype = field.shape[2], field.dtype.newbyteorder("=")
        self._local = threading.local()
        self._constants: tuple[torch.Tensor, torch.Tensor] | None = None
        rest = augmentation.transforms[augmentation.done :]
        if self._complete and len(rest) == 1 and isinstance(rest[0], Normalize) and self._dtype == np.uint8:
            self._constants = rest[0].scale_and_shift(torch.uint8)
        # Learnt from a batch of one black image.
        height, width = sizing.size
        arrays: dict[str, NDArray[Any]] = {"images": np.zeros((1, height, width, self._channels), self._dtype)}
        if self._has_masks:
            arrays["masks"] = np.zeros((1, height, width), np.uint8)
        arrays |= {name: np.zeros((1, *shape), dtype) for name, shape, dtype in self._others}
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
        rows, count = planned.rows, len(planned.rows)
        slot = {name: array[:count] for name, array in arrays.items()}  # the last group may not fill its slot
        if "row" in slot:
            slot["row"][:], slot["valid"][:] = rows, planned.valid
        targets = fields_on_cpu({name: slot[name] for name, _, _ in self.fields}, self.views)
        stopwatch = current()
        read: dict[str, NDArray[Any]] = {name: np.empty((count, *shape), dtype) for name, shape, dtype in self._others}
        num_bytes = self._reader.gather(rows, read)  # which checks the rows, and that the file is the same
        index = self._reader.stored("images").index(rows)
        num_bytes += int(index.bytes.sum())
        if stopwatch is not None:
            stopwatch.lap("reading")
        draws = Draws(self._augmentation.seed, epoch, rows)
        with span("decode"):
            placement = self._sizing.placement(index.shape[:, :2], draws)
            fields = self._as_tensors(read)
            if placement is None:
                sized = self._one_by_one(rows, draws, fields)
            else:
                sized = self._at_once(rows, index, placement, fields, targets["images"])
        if stopwatch is not None:
            stopwatch.lap("decoding")
        with span("transform"):
            whole = sized["images"].data_ptr() == targets["images"].data_ptr()
            made = sized if whole else self._rest(sized, planned, epoch, targets["images"])
        for name, target in targets.items():
            if made[name].data_ptr() != target.data_ptr():
                target.copy_(made[name])
        if stopwatch is not None:
            stopwatch.lap("transform")
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
        placement = placement.snapped(_factors(index, placement))
        output = target
        if self._complete and self._constants is None:
            output = torch.empty((len(rows), *self._sizing.size, self._channels), dtype=torch.uint8).permute(0, 3, 1, 2)
        self._place(rows, index, placement, output)
        sized = {"images": output, **fields}
        if self._has_masks:
            sized["masks"] = place_varied_masks(self._reader.decoded("masks", rows), placement)
        return sized | place_varied_coordinates(fields, placement, self._augmentation.coordinates)

    def _one_by_one(
        self, rows: NDArray[np.int64], draws: Draws, fields: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """As `_at_once`, where the transforms are not one placement of each image: padding, two resizes, 16 bits."""
        coordinates = self._augmentation.coordinates
        moved: dict[str, Sequence[torch.Tensor] | torch.Tensor] = {name: fields[name] for name in coordinates}
        if self._has_masks:
            moved["masks"] = [torch.from_numpy(mask) for mask in self._reader.decoded("masks", rows)]
        return fields | self._sizing.apply_each(
            [torch.from_numpy(pixels).permute(2, 0, 1) for pixels in self._reader.decoded("images", rows)],
            moved,
            draws,
            ignore_index=self._augmentation.ignore_index,
            coordinates=coordinates,
        )

    def _place(
        self, rows: NDArray[np.int64], index: StoreIndex, placement: VariedPlacement, output: torch.Tensor
    ) -> None:
        """Fills the output (B, C, h, w) with the parts of a batch's images, normalized if that is all that is left."""
        store, table = self._reader.stored("images"), placement.table()
        flat = store.flat
        if flat is not None and (index.encoding == RAW).all():
            sources = np.stack([index.offset, index.shape[:, 0], index.shape[:, 1]], axis=1)
            self._run(_as_tensor(flat), sources, table, output)
            return
        data, factors = store.take(index), _factors(index, placement)
        memory, used, first = self._scratch(), 0, 0
        sources = np.empty((len(rows), 3), np.int64)
        for at in range(len(rows)):
            most = _most_bytes(index, at, table[at], int(factors[at]), self._channels)
            if used + most > len(memory):
                self._run(torch.from_numpy(memory), sources[first:at], table[first:at], output[first:at])
                memory, used, first = self._scratch(most), 0, at
            try:
                part = memory[used : used + most]
                pixels = _part(data[at], index, at, table[at], int(factors[at]), part)
            except ImageError as exc:
                reason = f"its stored image cannot be decoded ({exc})"
                raise sample_error(self._file, int(rows[at]), reason) from exc
            sources[at] = used + _address(pixels) - _address(part), pixels.shape[0], pixels.shape[1]
            used = int(sources[at, 0]) + pixels.nbytes
        self._run(torch.from_numpy(memory), sources[first:], table[first:], output[first:])

    def _run(
        self, memory: torch.Tensor, sources: NDArray[np.int64], table: NDArray[np.int64], output: torch.Tensor
    ) -> None:
        """Resizes images that lie in memory into the output."""
        place_varied_in_one_call(
            memory, torch.from_numpy(sources), torch.from_numpy(table), output, *(self._constants or ())
        )

    def _scratch(self, least: int = 0) -> NDArray[np.uint8]:
        """This thread's memory for decoded images, at least so many bytes of it."""
        memory: NDArray[np.uint8] | None = getattr(self._local, "memory", None)
        if memory is None or len(memory) < least:
            memory = self._local.memory = np.empty(max(least, _SCRATCH_BYTES), np.uint8)
        return memory

    def _as_tensors(self, arrays: dict[str, NDArray[Any]]) -> dict[str, torch.Tensor]:
        return fields_on_cpu(as_handed_over(self._file, arrays))

    def _rest(
        self, fields: dict[str, torch.Tensor], planned: PlannedBatch, epoch: int, output: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """The fields after the other transforms, where they are done here."""
        if not self._complete:
            return fields
        return self._augmentation.apply(fields, planned, epoch=epoch, output=output)


def _factors(index: StoreIndex, placement: VariedPlacement) -> NDArray[np.int64]:
    """By how much each image may be shrunk while it is decoded: what is left still covers the output; int64 (B,)."""
    factors = np.ones(len(index), np.int64)
    for factor in sorted(FACTORS):
        covers = (placement.height >= factor * placement.scaled_height) & (
            placement.width >= factor * placement.scaled_width
        )
        factors[covers & (index.encoding == JPEG)] = factor
    return factors


def _most_bytes(index: StoreIndex, at: int, numbers: NDArray[np.int64], factor: int, channels: int) -> int:
    """Bytes that the pixels decoded of an image take at most."""
    height, width = int(index.shape[at, 0]), int(index.shape[at, 1])
    rows = -(-height // factor) if index.encoding[at] == JPEG else int(numbers[2])
    return rows * -(-width // factor) * channels


def _part(
    data: Any, index: StoreIndex, at: int, numbers: NDArray[np.int64], factor: int, memory: NDArray[np.uint8]
) -> NDArray[np.uint8]:
    """What the window shows of an image, in `memory`: (h, w, C); the window's numbers become those in it."""
    top, left, height, width = numbers[:4].tolist()
    shape = tuple(index.shape[at].tolist())
    encoding, orientation = int(index.encoding[at]), int(index.orientation[at])
    if encoding == JPEG:
        least = height // factor, width // factor
        part = decode_part(data, shape, orientation, (top, left, height, width), least, memory)
        pixels, begins, factor = part.pixels, part.top, part.factor
    else:
        pixels = decode_row(data, encoding, shape, orientation, np.dtype(np.uint8))[top : top + height]
        begins = top
    if not 0 <= _address(pixels) - _address(memory) < len(memory):
        kept = memory[: pixels.size].reshape(pixels.shape)
        kept[...] = pixels
        pixels = kept
    numbers[:4] = (top - begins) // factor, left // factor, height // factor, width // factor
    return pixels


def _address(array: NDArray[np.uint8]) -> int:
    return int(array.__array_interface__["data"][0])


def _as_tensor(flat: NDArray[np.uint8]) -> torch.Tensor:
    """The bytes of a mapping, read-only in truth."""
    # torch warns of arrays that cannot be written to, as if somebody would.
    return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * flat.nbytes).from_address(flat.ctypes.data)))
