"""The protocols of transforms, the description of a batch they are checked against, and checks of their options.

A transform maps an image batch (B, C, H, W) to a batch and takes its random numbers as an argument:

    class Invert:
        geometric = False                       # True: moves pixels, so it must also move masks (`apply_masks`)

        def apply(self, images, draws):
            return 255 - images

It returns a new tensor: the next echo may use the batch it is given again.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.errors import OptionError, is_whole
from fastload.transforms.draws import Draws
from fastload.transforms.engine.buffers import OutputPool


class ImageSpec(NamedTuple):
    """The shape and dtype of one image in a batch."""

    channels: int
    height: int
    width: int
    dtype: torch.dtype

    @classmethod
    def of(cls, images: torch.Tensor) -> ImageSpec:
        """Returns the spec of a batch (B, C, H, W). Raises OptionError if the tensor has not four dimensions."""
        if images.ndim != 4:
            raise OptionError(
                f"images: a batch has the shape (B, C, H, W), this tensor has {tuple(images.shape)}. "
                f"Add the missing dimension, for one image with images[None]."
            )
        return cls(images.shape[1], images.shape[2], images.shape[3], images.dtype)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Height and width, int64 (1, 2), as transforms that place pixels take the sizes of images."""
        return np.array([[self.height, self.width]], np.int64)


@runtime_checkable
class Transform(Protocol):
    """A transform of image batches; `geometric` says whether it moves pixels."""

    @property
    def geometric(self) -> bool: ...

    def apply(self, images: torch.Tensor, draws: Draws) -> torch.Tensor:
        """Returns the transformed batch, (B, C, H', W'), on the device of `images`; does not write to them."""
        ...


@runtime_checkable
class GeometricTransform(Transform, Protocol):
    """A transform that moves pixels, and moves masks alike when given the same draws."""

    def apply_masks(self, masks: torch.Tensor, draws: Draws, fill: int) -> torch.Tensor:
        """Returns masks (B, H, W) moved as `apply` moves images, values never mixed, `fill` where no image was."""
        ...


@runtime_checkable
class MovesCoordinates(Protocol):
    """A geometric transform that also moves points and boxes; `spec` describes the images it is given."""

    def move_points(self, points: torch.Tensor, spec: ImageSpec, draws: Draws) -> torch.Tensor:
        """Returns points, float32 (B, P, 2) as (x, y) in pixels, as they lie in the transformed image."""
        ...

    def move_boxes(self, boxes: torch.Tensor, spec: ImageSpec, draws: Draws) -> torch.Tensor:
        """Returns boxes, float32 (B, 4) as x1, y1, x2, y2, as they lie in the transformed image; not clamped to it.

        (B, M, 4) for a field of several boxes per image.
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
        """Returns the fields, mixed, and writes to none; `draws` are for the whole batch: one number per stream."""
        ...


@runtime_checkable
class CheckedTransform(Protocol):
    """A transform that knows its output's spec without running, so that mistakes show when a loader is made."""

    def output(self, spec: ImageSpec) -> ImageSpec:
        """Returns the spec of the output images. Raises OptionError when such images cannot be transformed."""
        ...


def _freezing(init: Callable[..., None]) -> Callable[..., None]:
    """Returns an `__init__` after which attributes cannot be set, unless a derived class's own goes on."""

    @functools.wraps(init)
    def made(self: BaseTransform, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        if type(self).__init__ is made:
            self._frozen = True

    return made


class BaseTransform:
    """Base of fastload's own transforms: safe in any thread, and shown as the call that makes them.

    An option is kept in the attribute of its name, which nothing changes later; another attribute is left out of
    what `repr` shows.
    """

    thread_safe = True
    dtypes: tuple[torch.dtype, ...] = (torch.uint8, torch.uint16)
    """Of images that it takes, if `wrong_dtype` is given."""
    wrong_dtype = ""
    """Says of others why not, and what to do; {} is their dtype. Empty: it takes every dtype."""
    wrong_channels = ""
    """Says what needs one channel or three; empty: nothing."""
    _frozen = False  # whether it is made, by the `__init__` of its own class

    @_freezing
    def __init__(self) -> None:
        self._pool, self._mask_pool = OutputPool(), OutputPool()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in cls.__dict__:
            cls.__init__ = _freezing(cls.__init__)  # type: ignore[method-assign]  # the same, and one step more

    def __setattr__(self, name: str, value: object) -> None:
        if name in self.__dict__:
            self._refuse_change(name, "set")
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        self._refuse_change(name, "deleted")
        object.__delattr__(self, name)

    def _refuse_change(self, name: str, change: str) -> None:
        if self._frozen and not name.startswith("_"):
            raise OptionError(
                f"{type(self).__name__}.{name} cannot be {change}: batches are drawn ahead with what the transform was "
                f"made with. Make another one, and give it to `loader.with_(transform=[...])`."
            )

    def output(self, spec: ImageSpec) -> ImageSpec:
        """Returns the spec of the output. Raises OptionError for images that cannot be transformed."""
        name = type(self).__name__
        if self.wrong_dtype and spec.dtype not in self.dtypes:
            raise OptionError(f"{name}: images are {spec.dtype}, and {self.wrong_dtype.format(spec.dtype)}")
        if self.wrong_channels and spec.channels not in (1, 3):
            raise OptionError(
                f"{name}: images have {spec.channels} channels, and {self.wrong_channels} 1 (gray) or 3 (red, green, "
                f"blue). Pack the images with --mode rgb or --mode gray, or leave {name} out of transform."
            )
        return spec

    def __repr__(self) -> str:
        options = (name for name in inspect.signature(type(self)).parameters if hasattr(self, name))
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in options)})"


def probability(name: str, p: object) -> float:
    """Returns p as a float. Raises OptionError if it is not a number from 0 to 1."""
    if not is_number(p) or not 0 <= p <= 1:  # type: ignore[operator]  # is_number has just said that it compares
        raise OptionError(f"{name}(p={p!r}): p is a probability, so give a number from 0 to 1.")
    return float(p)  # type: ignore[arg-type]


def window_size(name: str, size: int | Sequence[int]) -> tuple[int, int]:
    """Returns (height, width) of a size that is given as such, or as one number for a square; else OptionError."""
    expected = "a size is a positive whole number of pixels, or (height, width) of them."
    height, width = whole_sides(f"{name}(size", size, (1, 2), expected, least=1)
    return height, width


def whole_sides(where: str, sides: Any, counts: tuple[int, ...], expected: str, *, least: int) -> tuple[int, ...]:
    """Returns as many numbers as the last of the counts says, given as such or fewer, which are then repeated.

    Raises OptionError, naming `where` and what is expected, unless they are whole and not below `least`.
    """
    sides = as_plain(sides)
    numbers = tuple(sides) if isinstance(sides, Sequence) else (sides,)
    if len(numbers) not in counts or not all(is_whole(number) and number >= least for number in numbers):
        raise OptionError(f"{where}={sides!r}): {expected}")
    return tuple(int(number) for number in numbers * (counts[-1] // len(numbers)))


def ordered_pair(
    name: str, option: str, values: Any, *, least: float, most: float = math.inf, closed: bool = False
) -> tuple[float, float]:
    """Returns two numbers as floats: above `least` (or, if closed, that), at most `most`, the smaller first."""
    bounds = f"from {least:g} to {most:g}" if math.isfinite(most) else f"above {least:g}"
    values = as_plain(values)
    pair = isinstance(values, Sequence) and len(values) == 2 and all(is_number(value) for value in values)
    if not pair or not all(math.isfinite(value) for value in values):
        raise OptionError(f"{name}({option}={values!r}): give (smallest, largest), two numbers {bounds}.")
    low, high = (float(value) for value in values)
    if not low <= high:
        raise OptionError(f"{name}({option}={values!r}): the larger number comes first. Write {option}={(high, low)}.")
    if not (least <= low if closed else least < low) or not high <= most:
        included = "" if closed else f", {least:g} not included"
        raise OptionError(f"{name}({option}={values!r}): both are numbers {bounds}{included}.")
    return low, high


def as_values(where: str, values: Any) -> tuple[float, ...]:
    """Returns one number, or one per channel, as floats. Raises OptionError for anything else, naming `where`."""
    values = as_plain(values)
    numbers = tuple(values) if isinstance(values, Sequence) and not isinstance(values, str) else (values,)
    if not numbers or not all(is_number(number) and math.isfinite(number) for number in numbers):
        raise OptionError(f"{where}={values!r}): give one number, or one per channel.")
    return tuple(float(number) for number in numbers)


def check_values(where: str, values: tuple[float, ...], spec: ImageSpec) -> None:
    """Raises OptionError, its message beginning with `where`, unless pixels of such images can hold the values."""
    if len(values) not in (1, spec.channels):
        raise OptionError(
            f"{where}={values}): {len(values)} values for images of {spec.channels} channels. "
            f"Give one value, or one per channel."
        )
    if spec.dtype.is_floating_point:
        return
    limits = torch.iinfo(spec.dtype)
    if any(not limits.min <= value <= limits.max or value != int(value) for value in values):
        raise OptionError(
            f"{where}={values}): the images are {spec.dtype}, so it is a whole number from {limits.min} to "
            f"{limits.max}. Give it in the images' units, for example 255 * mean."
        )


def as_plain(values: Any) -> Any:
    """Returns NumPy's and torch's arrays as numbers and lists, anything else as it is."""
    return values.tolist() if isinstance(values, (np.ndarray, np.generic, torch.Tensor)) else values


def is_number(value: object) -> bool:
    """Whether the value is a number; True and False are not."""
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
