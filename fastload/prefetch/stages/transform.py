"""Transforms of a batch: in the reading threads, straight into the slot, or when it is handed over, for each use."""

from __future__ import annotations

import numpy as np
import torch

from fastload.plan import PlannedBatch
from fastload.prefetch.augmentation import Augmentation, named
from fastload.prefetch.ring import SlotField
from fastload.prefetch.stage import Layout, Stage, Where
from fastload.prefetch.stages.rows import MappedImages
from fastload.prefetch.work import TRANSFORM_PARAMETERS, Work
from fastload.timing.probe import span
from fastload.transforms import ImageSpec
from fastload.transforms.engine.pipeline import Pipeline
from fastload.transforms.engine.placement import ImageRows


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

    def beside(self, batch_size: int) -> list[SlotField]:
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
