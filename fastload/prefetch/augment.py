"""A loader's transforms with their options, run by the threads that read (`row_transformer.py`) or at the hand-over."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fastload.plan import PlannedBatch
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
