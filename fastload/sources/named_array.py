"""An array that is known by its name, wherever it is stored: what its header says, and how to read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.memory import available_memory
from fastload.sources.listing import Arrays, first_few
from fastload.sources.rows import Axes, MemoryRows


@dataclass(frozen=True, eq=False)
class NamedArray:
    """An array as its header describes it.

    Attributes:
        name: as its file has it.
        where: path of the file, and of the array inside it, for messages.
        shape: of all of it, (N, ...).
        dtype: as stored.
        values: reads all of it.
        rows: reads it by rows of a shape, with the axes in an order.
        mtime_ns: time of modification of its file.
        names: names of its classes, where they are stored beside it.
        split: as its file or folder says; "" when it does not.
    """

    name: str
    where: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    values: Callable[[], NDArray[Any]]
    rows: Callable[[tuple[int, ...], Axes], Arrays]
    mtime_ns: int
    names: tuple[str, ...] = ()
    split: str = ""

    @property
    def num_bytes(self) -> int:
        """Its bytes in memory."""
        return int(np.prod(self.shape, dtype=np.float64)) * self.dtype.itemsize

    @property
    def is_text(self) -> bool:
        """Whether its elements are texts."""
        return self.dtype.kind in "SU"

    def texts(self) -> list[str]:
        """Its elements, when they are texts."""
        return [
            item.decode("utf-8", "backslashreplace")
            if isinstance(item, bytes)
            else item.encode("utf-8", "backslashreplace").decode()
            for item in self.values().reshape(-1).tolist()
        ]


def image_axes_of(shape: tuple[int, ...]) -> tuple[Axes | None, tuple[int, ...]]:
    """The order of the axes of an array (N, ...) of images, None if it is none, and the shape of one with its C."""
    if len(shape) == 3:
        return "HWC", (*shape[1:], 1)
    if len(shape) == 4 and shape[3] in (1, 3, 4):
        return "HWC", shape[1:]
    if len(shape) == 4 and shape[1] in (1, 3, 4):
        return "CHW", shape[1:]
    return None, ()


def why_no_images(array: NamedArray, shape_fits: bool) -> str:
    """The message about an array that by its name holds images."""
    found = f"{array.where}: the images are {array.dtype} {array.shape}; expected uint8 or uint16"
    if not shape_fits:
        return f"{found} (N, H, W), (N, H, W, C) or (N, C, H, W) with 1, 3 or 4 channels. Reshape or rename the array."
    if array.dtype.kind == "f":
        return (
            f"{found}. Convert them, for example `(images * 255).round().astype('uint8')` where they lie in 0 to 1: "
            "what they stand for is not for packing to guess. Normalizing comes later, on the device."
        )
    return f"{found}. Convert them with `images.astype('uint8')`, if their values lie in 0 to 255."


def label_numbers(array: NamedArray) -> NDArray[Any]:
    """Labels as int64 (n,) or (n, A); float (n, ...) where some are no whole numbers."""
    values = array.values()
    if values.dtype.kind not in "biuf":
        raise SourceError(f"{array.where}: the labels are {values.dtype}; expected integers or texts. Convert them.")
    if values.ndim > 1 and set(values.shape[1:]) == {1}:
        values = values.reshape(-1)
    if values.dtype.kind == "f":
        rows = np.flatnonzero(~np.isfinite(values.reshape(len(values), -1)).all(axis=1))
        if len(rows):
            shown = first_few([str(row) for row in rows.tolist()])
            raise SourceError(
                f"{array.where}: labels that are NaN or infinite ({len(rows)}), in the rows {shown}. "
                "Give them a class, -1 for none, or remove those rows."
            )
        if np.any(values != np.round(values)) or np.abs(values).max(initial=0) >= 2**53:
            return native(values)
    if values.dtype == np.uint64 and values.max(initial=0) >= 2**63:
        raise SourceError(f"{array.where}: labels beyond what int64 holds. Number the classes from 0.")
    return values.astype(np.int64)


def native(values: NDArray[Any]) -> NDArray[Any]:
    """An array in native byte order and C order, truth values as 0 and 1."""
    dtype = np.dtype(np.uint8) if values.dtype == np.bool_ else values.dtype.newbyteorder("=")
    return np.ascontiguousarray(values, dtype=dtype)


def mask_shapes(size: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
    """What one mask may be stored as, of images of this height and width."""
    return size, (*size, 1), (1, *size)


def mask_rows(masks: NamedArray, size: tuple[int, int]) -> Arrays:
    """Masks as uint8: where they lie, or a copy of those that are stored in wider numbers.

    Raises:
        SourceError: another size than the images', or values beyond 0 to 255.
    """
    height, width = size
    wanted = f"integers from 0 to 255, (N, {height}, {width})"
    if masks.shape[1:] not in mask_shapes(size):
        raise SourceError(
            f"{masks.where}: the masks are {masks.dtype} {masks.shape}, the images {height}x{width}; expected {wanted}."
        )
    if masks.dtype == np.uint8:
        return masks.rows(size, "HWC")
    if masks.num_bytes > available_memory():
        raise SourceError(
            f"{masks.where}: {masks.num_bytes:,} bytes do not fit into memory, where masks of {masks.dtype} "
            "are made uint8. Save them as uint8."
        )
    values = masks.values()
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > 255:
        raise SourceError(
            f"{masks.where}: the masks hold {low} to {high}; expected {wanted}. Number the classes "
            "from 0, with 255 for none."
        )
    return MemoryRows.of(values.reshape(len(values), height, width).astype(np.uint8))
