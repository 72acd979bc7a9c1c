"""Transforms that run others by chance: RandomApply colour transforms, RandomChoice transforms that mix a batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from fastload.errors import OptionError
from fastload.transforms.colour import IDENTITY, ColourSteps, ColourTransform
from fastload.transforms.draws import Draws
from fastload.transforms.mixup import CutMix, MixingTransform, MixUp
from fastload.transforms.spec import BaseTransform, ImageSpec, as_plain, is_number, probability

_CHANCE = 1 << 20  # a stream that no index of the transforms within reaches


class RandomApply(ColourTransform):
    """Runs colour transforms, one after the other, on each image with probability p; the others stay as they are.

    Takes images (B, C, H, W), uint8 or uint16, of one or three channels, and keeps size and dtype.

    Args:
        transforms: ColorJitter, RandomGrayscale, Grayscale(3).
        p: probability, 0 to 1.

    Raises:
        OptionError: p is not within [0, 1]; there is no transform, or one that is no colour transform.
    """

    def __init__(self, transforms: Sequence[ColourTransform], p: float = 0.5) -> None:
        super().__init__()
        self.transforms = _listed("RandomApply", transforms)
        self.p = probability("RandomApply", p)
        for one in self.transforms:
            if not isinstance(one, ColourTransform):
                raise OptionError(
                    f"RandomApply: {type(one).__name__} is no transform of colours, as ColorJitter is. Those that move "
                    f"pixels, erase or mix have p of their own."
                )

    def output(self, spec: ImageSpec) -> ImageSpec:
        for one in self.transforms:
            if one.output(spec) != spec:
                raise OptionError(
                    f"RandomApply: {one!r} changes the number of channels, which a batch has in common. Use "
                    f"RandomGrayscale."
                )
        return super().output(spec)

    def steps(self, draws: Draws) -> ColourSteps:
        """Returns the steps of the transforms for the samples drawn, none for the others."""
        drawn = [one.steps(draws.stream(i)) for i, one in enumerate(self.transforms)]
        chosen = (draws.stream(_CHANCE).uniform() < self.p)[:, None]
        ops, factors = (
            np.concatenate(parts, axis=1) for parts in zip(*((s.ops, s.factors) for s in drawn), strict=True)
        )
        return ColourSteps(np.where(chosen, ops, IDENTITY).astype(np.int32), factors)


class RandomChoice(BaseTransform):
    """Mixes each batch by one of several transforms, drawn once a batch.

    Args:
        transforms: MixUp and CutMix, with one num_classes.
        p: probability of each, which add up to 1; None: all are as likely.

    Raises:
        OptionError: there is no transform, or one that does not mix; numbers of classes differ; probabilities are not
            as many, negative, or do not add up to 1.
    """

    mixes = True

    def __init__(self, transforms: Sequence[MixUp | CutMix], p: Sequence[float] | None = None) -> None:
        super().__init__()
        self.transforms = _listed("RandomChoice", transforms)
        for one in self.transforms:
            if not isinstance(one, MixingTransform):
                raise OptionError(
                    f"RandomChoice: {type(one).__name__} does not mix samples; MixUp and CutMix do. Transforms of "
                    f"single images are drawn for each: they have p of their own, and RandomApply gives it to colours."
                )
        if len({one.num_classes for one in self.transforms}) > 1:
            raise OptionError(f"RandomChoice: num_classes differ in {', '.join(map(repr, self.transforms))}")
        count = len(self.transforms)
        given = [1 / count] * count if p is None else as_plain(p)
        numbers = (
            isinstance(given, Sequence) and len(given) == count and all(is_number(one) and one >= 0 for one in given)
        )
        if not numbers or abs(sum(given) - 1) > 1e-6:
            raise OptionError(
                f"RandomChoice(p={p!r}): give a probability for each of {count} transforms; they add up to 1."
            )
        self.p = tuple(float(one) for one in given)

    def output(self, spec: ImageSpec) -> ImageSpec:
        for one in self.transforms:
            one.output(spec)
        return spec

    def check_fields(self, names: Iterable[str]) -> None:
        """Raises OptionError for fields that one of the transforms cannot mix."""
        names = list(names)
        for one in self.transforms:
            one.check_fields(names)

    def apply_batch(self, fields: dict[str, torch.Tensor], draws: Draws) -> dict[str, torch.Tensor]:
        """Returns the batch mixed by one of the transforms, as its `apply_batch` does; draws are for one sample."""
        ends = np.cumsum(self.p[:-1])
        chosen = int(np.searchsorted(ends, draws.stream(_CHANCE).uniform()[0], side="right"))
        transform: MixUp | CutMix = self.transforms[chosen]
        return transform.apply_batch(fields, draws.stream(chosen))


def _listed(name: str, transforms: Any) -> tuple[Any, ...]:
    if not isinstance(transforms, Sequence) or isinstance(transforms, str) or not transforms:
        raise OptionError(f"{name}(transforms={transforms!r}): give a list of transforms")
    return tuple(transforms)
