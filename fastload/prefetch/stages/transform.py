"""A loader's transforms, and the stages that run them.

They run in the reading threads, straight into the slot, or when a batch is handed over, for each use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from fastload.plan import PlannedBatch
from fastload.prefetch.ring import SlotField
from fastload.prefetch.stages.gather import MappedImages
from fastload.prefetch.work import TRANSFORM_PARAMETERS, Layout, Stage, Where, Work
from fastload.timing.probe import span
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


class TransformInThread(Stage):
    """Runs the transforms that are left, and writes images straight into the slot.

    Raw pixels in a mapping are taken from where they lie, so a crop reads no more than its window.
    """

    where = Where.THREAD

    def __init__(self, augmentation: Augmentation, mapped: MappedImages | None) -> None:
        self._augmentation, self._mapped = augmentation, mapped
        self.alone = augmentation.mixes
        self.divisible = not augmentation.mixes
        self.why = f"{named(augmentation.left)}: on the CPU, used once, and safe in threads"

    def output(self, given: Layout) -> Layout:
        """Returns the form of its output, found with a batch of one black image."""
        if self._mapped is not None and self._mapped.rows is not None:
            given = given | {"images": (tuple(self._mapped.rows.shape[1:]), np.dtype(np.uint8))}
        black = {name: torch.from_numpy(np.zeros((1, *shape), dtype)) for name, (shape, dtype) in given.items()}
        black["images"] = black["images"].permute(0, 3, 1, 2)
        planned = PlannedBatch(np.zeros(1, np.int64), np.ones(1, np.bool_), 1, 0)
        made = self._augmentation.apply(black, planned, epoch=0)
        # Of fields whose dtype NumPy lacks; their slots hold uint16.
        self.views = {name: tensor.dtype for name, tensor in made.items() if tensor.dtype == torch.bfloat16}
        layout: Layout = {}
        for name, tensor in made.items():
            inside = tensor.permute(0, 2, 3, 1) if name == "images" else tensor
            inside = inside.view(torch.uint16) if inside.dtype == torch.bfloat16 else inside
            layout[name] = tuple(inside.shape[1:]), inside.numpy().dtype
        return layout

    def run(self, work: Work) -> None:
        """Transforms, unless that was done with the decoding."""
        images, output = work.fields.get("images"), work.targets["images"]
        if images is not None and images.data_ptr() == output.data_ptr():
            return
        with span("transform"):
            if self._mapped is not None and (mapped := self._mapped.rows) is not None:
                work.fields["images"] = ImageRows(mapped, torch.from_numpy(work.rows))
                work.copied.append(len(work.rows) * mapped[0].nbytes)
            work.fields = self._augmentation.apply(work.fields, work.whole, epoch=work.epoch, output=output)


class TransformBatch(Stage):
    """Runs the transforms that are left, and with them gathers cached rows, or cuts decoded images."""

    where = Where.USE

    def __init__(self, augmentation: Augmentation, why: str) -> None:
        self._augmentation, self.why = augmentation, why

    def run(self, work: Work) -> None:
        """Transforms the fields, if there are images among them."""
        if "images" not in work.fields:
            return
        drawn = work.drawn
        with span("transform"):
            work.fields = self._augmentation.apply(
                work.fields,
                work.whole,
                epoch=work.epoch,
                echo=work.echo,
                kept=not work.last,
                drawn=drawn,
                words=work.inner[TRANSFORM_PARAMETERS] if drawn is not None else None,
            )


class DrawNumbers(Stage):
    """Draws the transforms' numbers for all uses of a batch, before it goes to its device; see `Pipeline.draw`."""

    where = Where.THREAD

    def __init__(self, augmentation: Augmentation, uses: int, spec: ImageSpec | None) -> None:
        self._augmentation, self._uses, self.spec = augmentation, uses, spec
        self.why = "random numbers of the transforms, which cross the bus with the samples"

    @property
    def _pipeline(self) -> Pipeline:
        assert self.spec is not None, "it is known by now"
        return self._augmentation.pipeline(self.spec)

    def own_fields(self, batch_size: int) -> list[SlotField]:
        """Returns the field of the words; none if nothing is drawn."""
        words = self._pipeline.num_words(self._uses * batch_size) if self.spec is not None else 0
        return [SlotField(TRANSFORM_PARAMETERS, (words,), np.dtype(np.int32))] if words else []

    def run(self, work: Work) -> None:
        """Draws."""
        words = work.slot.arrays.get(TRANSFORM_PARAMETERS)
        if words is None:
            return
        with span("draw"):
            count = self._pipeline.num_words(self._uses * len(work.rows))
            draws = self._augmentation.draws(work.epoch, work.whole, echoes=self._uses)
            work.drawn = self._pipeline.draw(draws, self._uses, words[:count])
