"""Runs a loader's transforms in the threads that read, for batches on the CPU: from the mapping into the slot.

A batch is then ready when it is asked for, augmented and, if the list says so, normalized. Images are taken from the
mapping where the first transforms need them, so a crop reads no more than its window. `resize_rows.py` does the same
for images that differ in size.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.dataset import PackedDataset, as_handed_over
from fastload.device.copy import fields_on_cpu
from fastload.plan import PlannedBatch
from fastload.read.reader import RowReader, image_axes
from fastload.timing.ranges import span
from fastload.timing.stopwatch import current
from fastload.transforms import Draws, apply_transforms
from fastload.transforms.boxes_and_points import Coordinates
from fastload.transforms.engine.placement import ImageRows


@dataclass(frozen=True)
class Augmentation:
    """A loader's transforms with the options that they run with.

    Attributes:
        transforms: as checked.
        seed, rank: of the loader; random numbers depend on them.
        ignore_index, coordinates: as in `apply_transforms`.
        done: how many of the first transforms have run when a batch is made: those that gave its images one size.
    """

    transforms: tuple[Any, ...]
    seed: int
    rank: int
    ignore_index: int
    coordinates: Mapping[str, Coordinates]
    done: int = 0

    def apply(
        self,
        fields: Mapping[str, torch.Tensor | ImageRows],
        planned: PlannedBatch,
        *,
        epoch: int,
        echo: int = 0,
        output: torch.Tensor | None = None,
        kept: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Returns the fields of a batch, transformed.

        Args:
            fields: by name; images may be rows that are not gathered yet.
            planned: the batch.
            epoch, echo: further random numbers depend on them.
            output, kept: as in `apply_transforms`.
        """
        return apply_transforms(
            self.transforms,
            fields,
            Draws(self.seed, epoch, planned.rows, echo),
            ignore_index=self.ignore_index,
            batch_draws=Draws.of_batch(self.seed, epoch, planned.step, self.rank, echo),
            coordinates=self.coordinates,
            output=output,
            kept=kept,
            done=self.done,
        )

    @property
    def in_threads(self) -> bool:
        """Whether threads may run the transforms, several batches at a time and in any order; False without any."""
        return bool(self.transforms) and all(getattr(transform, "thread_safe", False) for transform in self.transforms)

    @property
    def mixes(self) -> bool:
        """Whether a batch's samples depend on one another."""
        return any(getattr(transform, "mixes", False) for transform in self.transforms)


class Augmenter:
    """Fills slots with augmented batches, from images of one size. Any thread may call it.

    Args:
        dataset: packed, without a Python transform, with images among its fields.
        reader: of its fields.
        augmentation: whose transforms are all thread-safe.

    Attributes:
        fields: name, shape and dtype of each field of a sample, as it lies in a slot.
        views: the torch dtype of fields whose dtype NumPy lacks; their slots hold uint16.
    """

    def __init__(self, dataset: PackedDataset, reader: RowReader, augmentation: Augmentation) -> None:
        self._file = dataset.file
        self._layout = dataset.layout()
        self._reader = reader
        self._augmentation = augmentation
        self._source = self._mapped_images()
        # What comes out is learnt from a batch of one black image.
        arrays = {name: np.zeros((1, *shape), dtype) for name, shape, dtype in self._layout}
        planned = PlannedBatch(np.zeros(1, np.int64), np.ones(1, np.bool_), 1, 0)
        result = augmentation.apply(fields_on_cpu(as_handed_over(self._file, arrays)), planned, epoch=0)
        self.views = {name: tensor.dtype for name, tensor in result.items() if tensor.dtype == torch.bfloat16}
        self.fields = [(name, *in_slot(name, tensor)) for name, tensor in result.items()]

    def fill(self, epoch: int, planned: PlannedBatch, slot: Mapping[str, NDArray[Any]]) -> int:
        """Reads and augments a batch of an epoch into a slot's arrays, (B, ...); returns the bytes of its rows."""
        count = len(planned.rows)
        read = {
            name: np.empty((count, *shape), dtype)
            for name, shape, dtype in self._layout
            if name != "images" or self._source is None
        }
        num_bytes = self._reader.gather(planned.rows, read)
        stopwatch = current()
        if stopwatch is not None:
            stopwatch.lap("reading")
        fields: dict[str, torch.Tensor | ImageRows] = dict(fields_on_cpu(as_handed_over(self._file, read)))
        if self._source is not None:
            fields["images"] = ImageRows(self._source, torch.from_numpy(planned.rows))
            num_bytes += count * self._file.fields["images"].row_bytes
        targets = fields_on_cpu(slot, self.views)
        with span("transform"):
            result = self._augmentation.apply(fields, planned, epoch=epoch, output=targets["images"])
        for name, target in targets.items():
            if result[name].data_ptr() != target.data_ptr():
                target.copy_(result[name])
        if stopwatch is not None:
            stopwatch.lap("transform")
        return num_bytes

    def _mapped_images(self) -> torch.Tensor | None:
        """Returns the file's images, uint8 (N, H, W, C), or None where they are not mapped as such."""
        field = self._file.fields["images"]
        mapped = self._reader.mapped("images")
        if mapped is None or field.dtype != np.uint8 or image_axes(self._file) == "CHW":
            return None
        # Not from the read-only array itself: torch warns that somebody might write to it.
        pixels = (ctypes.c_uint8 * mapped.nbytes).from_address(mapped.ctypes.data)
        shape = (len(mapped), *(field.shape if len(field.shape) == 3 else (*field.shape, 1)))
        return torch.from_numpy(np.ndarray(shape, np.uint8, buffer=memoryview(pixels)))


def in_slot(name: str, tensor: torch.Tensor) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Returns shape and dtype of a sample of a field as it lies in a slot: (H, W, C), bfloat16 as uint16."""
    inside = tensor.permute(0, 2, 3, 1) if name == "images" else tensor
    inside = inside.view(torch.uint16) if inside.dtype == torch.bfloat16 else inside
    return tuple(inside.shape[1:]), inside.numpy().dtype


def use_one_torch_thread() -> None:
    """Lets torch's kernels run in the calling thread alone from now on; other threads keep their number.

    There are as many reading threads as CPUs, and a team of OpenMP for each of them fights with the model's for the
    cores.
    """
    before = torch.get_num_threads()
    if before == 1:
        return
    torch.set_num_threads(1)
    # torch also gives the number to threads that begin later; a thread that ends at once puts it back.
    helper = threading.Thread(target=torch.set_num_threads, args=(before,))
    helper.start()
    helper.join()
