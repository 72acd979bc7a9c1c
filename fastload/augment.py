"""Transforms run by the threads that read, for batches on the CPU: from the mapped file straight into the slot.

A batch is then ready when it is asked for, augmented and, if the list says so, normalized. Images are taken from the
mapping where the first transforms need them, so a crop reads no more than its window.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.dataset import PackedDataset, as_handed_over
from fastload.device import fields_on_cpu
from fastload.plan import PlannedBatch
from fastload.ranges import span
from fastload.read import RowReader, image_axes
from fastload.serial_torch import compute_alone
from fastload.stopwatch import current
from fastload.transforms import Draws, apply_transforms
from fastload.transforms.coordinates import Coordinates
from fastload.transforms.rows import ImageRows


@dataclass(frozen=True)
class Augmentation:
    """What a loader's transforms draw from, and what they need to know of its data.

    Attributes:
        transforms: as checked.
        seed, rank: of the loader.
        ignore_index, coordinates: see `apply_transforms`.
        done: the first so many transforms are done already, when the batch was made of images of several sizes.
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
        """The fields of a batch, transformed; see `apply_transforms`."""
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
        """Whether threads may run all of them, several batches at a time and in any order."""
        return bool(self.transforms) and all(getattr(transform, "thread_safe", False) for transform in self.transforms)

    @property
    def mixes(self) -> bool:
        """Whether a batch's samples depend on one another."""
        return any(getattr(transform, "mixes", False) for transform in self.transforms)


class Augmenter:
    """Fills slots with augmented batches. Any thread may call it.

    Args:
        dataset: packed, without a Python transform, with images among its fields.
        reader: of its fields.
        augmentation: whose transforms are all thread-safe.

    Attributes:
        fields: what comes out of each field: shape and dtype of a sample, as it lies in a slot.
        views: fields whose dtype NumPy lacks, with it; their slots hold uint16.
    """

    def __init__(self, dataset: PackedDataset, reader: RowReader, augmentation: Augmentation) -> None:
        self._file = dataset.file
        self._layout = dataset.layout()
        self._reader = reader
        self._augmentation = augmentation
        self._source = self._mapped_images()
        # Learnt from a batch of one black image.
        arrays = {name: np.zeros((1, *shape), dtype) for name, shape, dtype in self._layout}
        planned = PlannedBatch(np.zeros(1, np.int64), np.ones(1, np.bool_), 1, 0)
        result = augmentation.apply(fields_on_cpu(as_handed_over(self._file, arrays)), planned, epoch=0)
        self.views = {name: tensor.dtype for name, tensor in result.items() if tensor.dtype == torch.bfloat16}
        self.fields = [(name, *in_slot(name, tensor)) for name, tensor in result.items()]

    def fill(self, epoch: int, planned: PlannedBatch, arrays: Mapping[str, NDArray[Any]]) -> int:
        """Reads and augments a batch of an epoch into a slot's arrays, (B, ...); returns the bytes of its rows."""
        compute_alone()
        count = len(planned.rows)
        slot = {name: array[:count] for name, array in arrays.items()}  # the last group may not fill its slot
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
        """The file's images, uint8 (N, H, W, C), or None where they cannot be looked at in place."""
        field = self._file.fields["images"]
        mapped = self._reader.mapped("images")
        if mapped is None or field.dtype != np.uint8 or image_axes(self._file) == "CHW":
            return None
        # torch warns of arrays that cannot be written to, as if somebody would.
        pixels = (ctypes.c_uint8 * mapped.nbytes).from_address(mapped.ctypes.data)
        shape = (len(mapped), *(field.shape if len(field.shape) == 3 else (*field.shape, 1)))
        return torch.from_numpy(np.ndarray(shape, np.uint8, buffer=memoryview(pixels)))


def in_slot(name: str, tensor: torch.Tensor) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype of a sample of a field in a slot."""
    stored = tensor.permute(0, 2, 3, 1) if name == "images" else tensor
    stored = stored.view(torch.uint16) if stored.dtype == torch.bfloat16 else stored
    return tuple(stored.shape[1:]), stored.numpy().dtype
