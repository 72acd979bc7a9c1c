"""What a transform is: the protocols of this package, and the description of a batch they check themselves against.

A transform maps an image batch (B, C, H, W) to a batch and takes its random numbers as an argument:

    class Invert:
        geometric = False                       # True: moves pixels, so it must also move masks (`apply_masks`)

        def apply(self, images, draws):
            return 255 - images

Its result is a new tensor: the batch it is given may be used again by the next echo.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import torch

from fastload.errors import OptionError
from fastload.transforms.draws import Draws


class ImageSpec(NamedTuple):
    """Shape and dtype of one image in a batch."""

    channels: int
    height: int
    width: int
    dtype: torch.dtype

    @classmethod
    def of(cls, images: torch.Tensor) -> ImageSpec:
        """The spec of a batch (B, C, H, W).

        Raises:
            OptionError: not four dimensions.
        """
        if images.ndim != 4:
            raise OptionError(
                f"images: a batch has the shape (B, C, H, W), this tensor has {tuple(images.shape)}. "
                f"Add the missing dimension, for one image with images[None]."
            )
        return cls(images.shape[1], images.shape[2], images.shape[3], images.dtype)


@runtime_checkable
class Transform(Protocol):
    """What the pipeline hands random numbers to; `geometric` says whether pixels move."""

    @property
    def geometric(self) -> bool: ...

    def apply(self, images: torch.Tensor, draws: Draws) -> torch.Tensor:
        """The transformed batch, (B, C, H', W'), on the device of `images`, which stays as it was."""
        ...


@runtime_checkable
class GeometricTransform(Transform, Protocol):
    """A transform that moves pixels, and moves masks alike when given the same draws."""

    def apply_masks(self, masks: torch.Tensor, draws: Draws, fill: int) -> torch.Tensor:
        """Masks (B, H, W) moved as `apply` moves images; values are never mixed. `fill` goes where no image was."""
        ...


@runtime_checkable
class CheckedTransform(Protocol):
    """A transform that can tell its output from its input without running, so that mistakes show at construction."""

    def output(self, spec: ImageSpec) -> ImageSpec:
        """The spec of the output images. Raises OptionError when such images cannot be transformed."""
        ...


# torch runs an operation on fewer values than this in the calling thread (at::internal::GRAIN_SIZE is 32768). Work is
# cut so small where a team of threads would lose: see `normalize.py`.
SERIAL_VALUES = (1 << 15) - 1

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same size, for code that only moves values.

    torch lacks uint16 in flip and index_copy (2.13), and NumPy lacks bfloat16: both move as int16.
    """
    return tensor.view(_SAME_SIZE[tensor.dtype.itemsize])
