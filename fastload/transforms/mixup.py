"""Transforms that mix each sample of a batch with the one before it: MixUp (Zhang et al., ICLR 2018) and CutMix (Yun
et al., ICCV 2019).

They work on whole batches, so their random numbers depend on the step and not on rows: `apply_batch(fields, draws)`
takes draws for one sample and draws one share for the batch, as torchvision does. The other samples are the batch
rolled by one, so the first is mixed with the last; mixing makes sense for shuffled batches only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.errors import OptionError, is_whole
from fastload.transforms.boxes_and_points import COORDINATE_FIELDS
from fastload.transforms.colour import sample_blocks
from fastload.transforms.draws import Draws
from fastload.transforms.engine.buffers import OutputPool, as_bits, empty_images
from fastload.transforms.spec import BaseTransform, ImageSpec, is_number, probability

# Shares are multiples of 2**-16: a product with a uint8 level is then exact in float32, so devices agree to the bit.
_SHARE_UNITS = 1 << 16

_CHANCE = 1 << 20  # a stream of draws that no other use reaches


class MixingTransform(BaseTransform):
    """A transform that mixes each sample of a batch with the one before it."""

    mixes = True

    def __init__(
        self, alpha: float = 1.0, num_classes: int | None = None, p: float = 1.0, field: str = "labels"
    ) -> None:
        super().__init__()
        self._name = name = type(self).__name__
        if not (is_number(alpha) and 0 < alpha < math.inf):
            raise OptionError(
                f"{name}(alpha={alpha!r}): Beta(alpha, alpha) needs an alpha above 0; 1 is even, 0.2 common."
            )
        if num_classes is not None and not (is_whole(num_classes) and num_classes > 0):
            raise OptionError(f"{name}(num_classes={num_classes!r}): give a whole number above 0, or None.")
        self.alpha, self.num_classes = float(alpha), None if num_classes is None else int(num_classes)
        self.p = probability(name, p)
        if not isinstance(field, str):
            raise OptionError(f"{name}(field={field!r}): give the name of the field with the labels.")
        self.field = field

    def output(self, spec: ImageSpec) -> ImageSpec:
        if spec.dtype not in (torch.uint8, torch.uint16) and not spec.dtype.is_floating_point:
            raise OptionError(f"{self._name}: images are {spec.dtype}, and it mixes uint8, uint16 or floats.")
        return spec

    def check_fields(self, names: Iterable[str]) -> None:
        """Raises OptionError for fields that cannot be mixed, and when there are no labels to blend."""
        names = list(names)
        coordinates = [name for name in names if name in COORDINATE_FIELDS]
        if coordinates:
            raise OptionError(
                f"{self._name}: an image mixed from two has the objects of both, which {' and '.join(coordinates)} "
                f"cannot hold. Leave {'them' if len(coordinates) > 1 else 'it'} out of fields, or leave {self._name} "
                f"out of transform."
            )
        self._labels_among(names)

    def _labels_among(self, names: Iterable[str]) -> str:
        """Returns the name of the field with the labels; keys of a dict are named by their place, too."""
        names = list(names)
        found = next((name for name in names if self.field in (name, name.partition(":")[2])), None)
        if found is None:
            raise OptionError(
                f"{self._name}: there is no field {self.field!r} among {', '.join(names)}, which says how images were "
                f"mixed. Add it to fields, name the field of classes, as in {self._name}(field='label'), or "
                f"leave {self._name} out of transform."
            )
        return found

    def _left(self, fields: dict[str, torch.Tensor], draws: Draws) -> dict[str, torch.Tensor] | None:
        """Returns a batch that is not drawn to be mixed: as it is, its labels as vectors; None: it is to be mixed."""
        if self.p == 1 or draws.stream(_CHANCE).uniform()[0] < self.p:
            return None
        labels = self._labels_among(fields)
        return {**fields, labels: self.blended_labels(fields[labels], 1, len(fields["images"]))}

    def share(self, draws: Draws) -> float:
        """Returns the part of each sample that is its own, drawn from Beta(alpha, alpha)."""
        return round(float(beta(self.alpha, draws.stream(0))[0]) * _SHARE_UNITS) / _SHARE_UNITS

    def blended_labels(self, labels: torch.Tensor, share: float, batch: int) -> torch.Tensor:
        """Returns labels blended, float32 (B, A), from class numbers (B,) or vectors (B, A)."""
        name, num_classes = self._name, self.num_classes
        if labels.ndim not in (1, 2) or len(labels) != batch:
            raise OptionError(
                f"{name}: labels {tuple(labels.shape)} for {batch} images. "
                f"They are class numbers (B,) or vectors (B, A)."
            )
        if labels.ndim == 2:
            if num_classes is not None and labels.shape[1] != num_classes:
                raise OptionError(
                    f"{name}(num_classes={num_classes}): labels are vectors of {labels.shape[1]}. "
                    f"Leave num_classes out: it is for labels that are class numbers."
                )
            vectors = labels.to(torch.float32)
        elif labels.dtype.is_floating_point:
            raise OptionError(f"{name}: labels (B,) are {labels.dtype}, not class numbers. Give integers, or (B, A).")
        elif num_classes is None:
            raise OptionError(f"{name}: labels are class numbers, and become vectors. Say how many: num_classes=...")
        else:
            labels = labels.to(torch.int64)
            # Only where looking at them waits for nothing; a device's scatter_ reports a number out of range itself.
            if labels.device.type == "cpu" and len(labels) and not 0 <= labels.min() <= labels.max() < num_classes:
                raise OptionError(
                    f"{name}(num_classes={num_classes}): labels go from {int(labels.min())} to {int(labels.max())}. "
                    f"Class numbers go from 0 to num_classes - 1, so give the dataset's number of classes."
                )
            vectors = torch.zeros((batch, num_classes), dtype=torch.float32, device=labels.device)
            vectors.scatter_(1, labels[:, None], 1.0)
        return vectors * share + vectors.roll(1, 0) * (1 - share)


class MixUp(MixingTransform):
    """Blends each image and label with the previous sample's: share * own + (1 - share) * the other's.

    Takes images (B, C, H, W) of uint8, uint16 or floats, and keeps size and dtype; it may stand before or after
    Normalize. Labels become float32 (B, num_classes).

    Args:
        alpha: the share is drawn from Beta(alpha, alpha), once a batch; with a small alpha most batches are hardly
            mixed.
        num_classes: number of classes, needed for labels that are class numbers (B,); None for vectors (B, A).
        p: probability that a batch is mixed; the labels of others become vectors, too.
        field: name of the field with the labels.

    Raises:
        OptionError: alpha is not above 0, or num_classes not a whole number above 0. A batch without labels, with
            masks, boxes or points is refused when the loader is made, or at `apply_batch`.
    """

    def check_fields(self, names: Iterable[str]) -> None:
        """Raises OptionError for fields that cannot be blended, and when there are no labels to blend."""
        names = list(names)
        super().check_fields(names)
        if "masks" in names:
            raise OptionError(
                "MixUp: masks hold class numbers, which cannot be blended as images are. "
                "Use CutMix, which cuts and pastes both alike, or leave masks out of fields."
            )

    def apply_batch(self, fields: dict[str, torch.Tensor], draws: Draws) -> dict[str, torch.Tensor]:
        """Returns the batch with "images" and labels blended, the other fields as given.

        Args:
            fields: "images" (B, C, H, W), uint8, uint16 or floats; labels: class numbers (B,), which become float32
                (B, num_classes), or vectors (B, A) of any kind, which become float32. None is written to.
            draws: for one sample, which stands for the batch.

        Returns:
            Images of the same dtype, integers rounded to nearest, in channels_last memory.
        """
        self.check_fields(fields)
        images = fields["images"]
        self.output(ImageSpec.of(images))
        if (as_it_is := self._left(fields, draws)) is not None:
            return as_it_is
        share = self.share(draws)
        labels = self._labels_among(fields)
        blended = self.blended_labels(fields[labels], share, len(images))
        output = empty_images(images, images.shape[1], self._pool)
        wide = torch.float64 if images.dtype == torch.float64 else torch.float32
        pixels, target = images.permute(0, 2, 3, 1), output.permute(0, 2, 3, 1)
        for part in sample_blocks(images):
            own = pixels[part].to(wide, copy=True).mul_(share)
            other = torch.empty_like(own)
            # The rolled batch without a copy of it: the sample before each of the block's.
            other[:1].copy_(pixels[part.start - 1] if part.start else pixels[-1])
            other[1:].copy_(pixels[part.start : part.stop - 1])
            own.add_(other.mul_(1 - share))
            target[part].copy_(own if images.dtype.is_floating_point else own.round_())
        return {**fields, "images": output, labels: blended}


class CutMix(MixingTransform):
    """Pastes a rectangle of the previous sample's image into each image, and blends labels by area.

    Takes images (B, C, H, W) of uint8, uint16 or floats, and keeps size and dtype; it may stand before or after
    Normalize. Masks (B, H, W) are pasted alike. Labels become float32 (B, num_classes).

    Args:
        alpha: the part of the area outside the rectangle is drawn from Beta(alpha, alpha), once a batch, before the
            rectangle is cut off at the borders.
        num_classes: number of classes, needed for labels that are class numbers (B,); None for vectors (B, A).
        p: probability that a batch is mixed; the labels of others become vectors, too.
        field: name of the field with the labels.

    Raises:
        OptionError: alpha is not above 0, or num_classes not a whole number above 0. A batch without labels, with
            boxes or points is refused when the loader is made, or at `apply_batch`.
    """

    def rectangle(self, spec: ImageSpec, draws: Draws) -> tuple[int, int, int, int]:
        """Returns the pasted rectangle, (top, left, bottom, right), bottom and right exclusive; it may be empty."""
        reach = 0.5 * math.sqrt(1 - self.share(draws))
        ends = []
        for stream, length in ((1, spec.height), (2, spec.width)):
            centre, half = int(draws.stream(stream).integers(0, length)[0]), int(reach * length)
            ends.append((max(centre - half, 0), min(centre + half, length)))
        (top, bottom), (left, right) = ends
        return top, left, bottom, right

    def apply_batch(self, fields: dict[str, torch.Tensor], draws: Draws) -> dict[str, torch.Tensor]:
        """Returns the batch with "images", labels and, where present, "masks" mixed, the other fields as given.

        Args:
            fields: "images" (B, C, H, W) of any dtype; "masks" (B, H, W); labels: class numbers (B,), which become
                float32 (B, num_classes), or vectors (B, A) of any kind, which become float32. None is written to.
            draws: for one sample, which stands for the batch.

        Returns:
            Images and masks of the same dtype, images in channels_last memory.
        """
        self.check_fields(fields)
        images = fields["images"]
        spec = self.output(ImageSpec.of(images))
        if (as_it_is := self._left(fields, draws)) is not None:
            return as_it_is
        top, left, bottom, right = rectangle = self.rectangle(spec, draws)
        share = 1 - (bottom - top) * (right - left) / (spec.height * spec.width)
        labels = self._labels_among(fields)
        blended = self.blended_labels(fields[labels], share, len(images))
        mixed = {**fields, "images": _pasted(images, rectangle, self._pool), labels: blended}
        if "masks" in fields:
            mixed["masks"] = _pasted(fields["masks"][:, None], rectangle, self._mask_pool)[:, 0]
        return mixed


def beta(alpha: float, draws: Draws) -> NDArray[np.float64]:
    """Returns numbers from Beta(alpha, alpha), float64 (B,), for any alpha above 0.

    They are G / (G + G') of two gamma variates, by their logarithms: with a small alpha both may be below the least
    float.
    """
    difference = _log_gamma_variates(alpha, draws.stream(1)) - _log_gamma_variates(alpha, draws.stream(0))
    return np.asarray(np.exp(-np.logaddexp(0, difference)))


def _log_gamma_variates(alpha: float, draws: Draws) -> NDArray[np.float64]:
    """Returns logarithms of numbers from Gamma(alpha, 1), (B,).

    By Marsaglia and Tsang, "A simple method", ACM TOMS 26(3), 2000. Where alpha is below 1, from Gamma(alpha + 1) times
    U**(1 / alpha), as they advise.
    """
    d = (alpha + 1 if alpha < 1 else alpha) - 1 / 3
    result = np.full(len(draws), np.nan)
    attempt = 1
    while np.isnan(result).any():  # each attempt succeeds with a probability above 0.95
        numbers = draws.stream(attempt)
        first, second, third = (1 - numbers.stream(i).uniform() for i in range(3))  # above 0, so each has a logarithm
        normal = np.sqrt(-2 * np.log(first)) * np.cos(2 * np.pi * second)
        root = np.maximum(1 + normal / np.sqrt(9 * d), 0)
        with np.errstate(divide="ignore"):
            log_cube = 3 * np.log(root)
        bound = 0.5 * normal**2 + d * (1 - root**3 + np.where(root > 0, log_cube, 0))
        accepted = np.isnan(result) & (root > 0) & (np.log(third) < bound)
        result[accepted] = np.log(d) + log_cube[accepted]
        attempt += 1
    if alpha < 1:
        # Below 1e-300 the quotient overflows, and shares have long been 0 and 1 only.
        result += np.log(1 - draws.stream(0).uniform()) / max(alpha, 1e-300)
    return result


def _pasted(images: torch.Tensor, rectangle: tuple[int, int, int, int], pool: OutputPool) -> torch.Tensor:
    top, left, bottom, right = rectangle
    output = empty_images(images, images.shape[1], pool)
    source, target = as_bits(images), as_bits(output)
    target.copy_(source)
    window = (slice(None), slice(None), slice(top, bottom), slice(left, right))
    target[1:][window] = source[:-1][window]
    target[:1][window] = source[-1:][window]
    return output
