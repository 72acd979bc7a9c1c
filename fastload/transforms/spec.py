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
class MovesCoordinates(Protocol):
    """A geometric transform that also moves places in the image; `spec` is that of the images before."""

    def move_points(self, points: torch.Tensor, spec: ImageSpec, draws: Draws) -> torch.Tensor:
        """Pixel positions, float32 (B, P, 2) as (x, y), in the transformed image."""
        ...

    def move_boxes(self, boxes: torch.Tensor, spec: ImageSpec, draws: Draws) -> torch.Tensor:
        """Boxes, float32 (B, 4) as x1, y1, x2, y2, in the transformed image; not clamped to it.

        (B, M, 4) for a field of several boxes an image.
        """
        ...


@runtime_checkable
class BatchTransform(Protocol):
    """A transform that mixes the samples of a batch, labels included."""

    @property
    def mixes(self) -> bool: ...

    def check_fields(self, names: list[str]) -> None:
        """Raises OptionError for fields that cannot be mixed."""
        ...

    def apply_batch(self, fields: dict[str, torch.Tensor], draws: Draws) -> dict[str, torch.Tensor]:
        """The fields, mixed; none is written to. `draws` is of the batch: one number a stream."""
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

# Below this many bytes a sample, a call per sample costs more than copying some pixels twice.
SMALL_SAMPLE_BYTES = 1 << 14

# A row of constants as long as this keeps vector loops busy and stays in L1.
_ROW_VALUES = 1 << 12

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same size, for code that only moves values.

    torch lacks uint16 in flip and index_copy (2.13), and NumPy lacks bfloat16: both move as int16.
    """
    return tensor.view(_SAME_SIZE[tensor.dtype.itemsize])


def row_values(channels: int, height: int, width: int) -> int:
    """Values in one row of a 2-D view of an image, for arithmetic: whole image rows, as many as fit and divide H."""
    fitting = (n for n in range(min(height, _ROW_VALUES // (width * channels)), 1, -1) if height % n == 0)
    return width * channels * next(fitting, 1)
