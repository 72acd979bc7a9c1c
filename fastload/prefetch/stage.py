"""A stage of the data path: where it runs, what it makes of the fields of a sample, and what it does to a batch.

The list of a loader's stages is its recipe (`recipe.py`). A new encoding, device or view is another stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from fastload.device import Pins
from fastload.prefetch.loader_plan import LoaderPlan
from fastload.prefetch.ring import SlotField
from fastload.prefetch.row_cache import RowCache
from fastload.prefetch.work import Work
from fastload.read.reader import Rows

Layout = dict[str, tuple[tuple[int, ...], np.dtype[Any]]]
"""Shape and dtype of the fields of a sample, by name, as they lie in a slot: images (H, W, C)."""


class Where(Enum):
    """Where a stage runs."""

    THREAD = "reading thread"
    PROCESS = "worker process"
    SIDE_STREAM = "side stream of the device"
    USE = "next(), once for each use"


class Opened:
    """What the stages of a pool share while it is open.

    Attributes:
        pins: pins memory for a device; None: batches stay on the CPU.
        cache: rows that are in memory; None: all are read from the file.
    """

    def __init__(self, options: LoaderPlan, workers: int, cache: RowCache | None = None) -> None:
        self.options, self.cache = options, cache
        self.pins = Pins(options.backend) if options.backend is not None else None
        self._workers = workers

    @cached_property
    def reader(self) -> Rows:
        """Reads the dataset's fields; opened for the first stage that asks."""
        window = self.options.window
        # A window's chunks, and the next window's, which is read ahead. Neighbouring batches share a chunk.
        chunks = 2 * window.chunks if window is not None else self._workers + 1
        packed = self.options.packed
        return packed.dataset.open_reader(packed.read_mode, cache_chunks=chunks, windows=window is not None)

    def close(self) -> None:
        """Closes the file, and unpins memory when the device has done with it."""
        if "reader" in self.__dict__:
            self.reader.close()
        if self.pins is not None:
            self.pins.close()
        if self.cache is not None and self.cache.pins is not None:
            self.cache.pins.close()
        self.cache = None


class Stage:
    """A step on a batch's way. Any thread may run it, on several works at a time.

    Attributes:
        where: it runs.
        why: it is there, for `describe`.
        divisible: whether several threads may make parts of a batch at a time.
        views: torch dtype of fields that a slot holds as another dtype of the same size; known after `output`.
        alone: whether it makes one batch at a time, never several small ones in one slot.
    """

    where: Where
    why: str = ""
    views: Mapping[str, torch.dtype] = MappingProxyType({})
    divisible: bool = False
    alone: bool = False

    def open(self, opened: Opened) -> None:
        """Takes what it needs of an open file and its device; called once before it runs."""

    def output(self, given: Layout) -> Layout:
        """Returns the fields of a slot after it, given those before it."""
        return given

    def beside(self, batch_size: int) -> list[SlotField]:
        """Returns fields of a slot that it writes beside those of the samples."""
        return []

    def run(self, work: Work) -> None:
        """Does its part of a batch, in place."""
        raise NotImplementedError

    def close(self) -> None:
        """Lets go of what it took."""

    def steps(self) -> Sequence[Stage]:
        """Returns the stages that it consists of, for `describe`: itself."""
        return [self]
