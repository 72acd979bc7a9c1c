"""A loader's transforms with the options that they run with, wherever they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from fastload.plan import PlannedBatch
from fastload.transforms import Draws, ImageSpec
from fastload.transforms.boxes_and_points import Coordinates
from fastload.transforms.engine.pipeline import Drawn, Pipeline, spec_of
from fastload.transforms.engine.placement import ImageRows, PlacedImages

# Specs that transforms are kept ready for; images of their own sizes have many.
_MOST_SPECS = 4096


@dataclass(frozen=True)
class Augmentation:
    """A loader's transforms with the options that they run with."""

    transforms: tuple[Any, ...]  # as checked
    seed: int  # of the loader, as is the rank; random numbers depend on both
    rank: int
    ignore_index: int  # as in `apply_transforms`
    coordinates: Mapping[str, Coordinates]  # as in `apply_transforms`
    done: int = 0  # how many of the first transforms have run when a batch is made: those that gave its images one size
    _ready: dict[ImageSpec, Pipeline] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def left(self) -> tuple[Any, ...]:
        """The transforms that are left when a batch is made."""
        return self.transforms[self.done :]

    def pipeline(self, spec: ImageSpec) -> Pipeline:
        """Returns the transforms that are left, ready for images of a spec; made once for each."""
        ready = self._ready.get(spec)
        if ready is None:
            if len(self._ready) >= _MOST_SPECS:
                self._ready.clear()
            self._ready[spec] = ready = Pipeline(
                self.transforms,
                spec,
                ignore_index=self.ignore_index,
                coordinates=self.coordinates,
                done=self.done,
            )
        return ready

    def apply(
        self,
        fields: Mapping[str, torch.Tensor | ImageRows | PlacedImages],
        planned: PlannedBatch,
        *,
        epoch: int,
        echo: int = 0,
        output: torch.Tensor | None = None,
        kept: bool = False,
        drawn: Drawn | None = None,
        words: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Returns the fields of a batch, transformed; images may be not gathered or made yet.

        Random numbers also depend on epoch and echo; the other arguments are as in `Pipeline.apply`. What was drawn
        beforehand counts for the uses that it is of.
        """
        if drawn is not None and echo >= drawn.uses:
            drawn = words = None
        return self.pipeline(spec_of(fields["images"])).apply(
            fields,
            self.draws(epoch, planned, echo),
            drawn=drawn,
            words=words,
            use=echo,
            batch_draws=Draws.of_batch(self.seed, epoch, planned.step, self.rank, echo) if self.mixes else None,
            output=output,
            kept=kept,
        )

    def draws(self, epoch: int, planned: PlannedBatch, echo: int = 0, *, echoes: int = 1) -> Draws:
        """Returns the random numbers of a batch's samples, for so many uses from `echo` on."""
        return Draws(self.seed, epoch, planned.rows, echo, echoes=echoes, times=planned.times)

    @property
    def in_threads(self) -> bool:
        """Whether threads may run the transforms, several batches at a time and in any order; False without any."""
        return bool(self.transforms) and all(getattr(transform, "thread_safe", False) for transform in self.transforms)

    @cached_property
    def mixes(self) -> bool:
        """Whether a batch's samples depend on one another."""
        return any(getattr(transform, "mixes", False) for transform in self.transforms)


def named(transforms: Sequence[Any]) -> str:
    """Returns the names of transforms, for a sentence."""
    return ", ".join(getattr(one, "__name__", type(one).__name__) for one in transforms)
