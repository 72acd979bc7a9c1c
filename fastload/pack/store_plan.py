"""How rows are to be stored: what `--store`, `--max-size` and `--codec` come to for one dataset."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fastload.codecs import NONE, Codec
from fastload.errors import OptionError
from fastload.fitting import Target

StoreKind = Literal["raw", "jpeg", "source", "mixed", "keep"]
Form = Literal["rows", "store"]
"""Of a pixel dataset: rows of one size (N, H, W[, C]), or a byte store."""

JPEG_QUALITY = 90
"""Of JPEGs that are made without another wish, as FFCV's."""

MAX_JPEG_SIDE = 65_500
"""Of libjpeg; pixels of larger images are stored."""


@dataclass(frozen=True)
class StoreOption:
    """What `--store` said.

    Attributes:
        kind: "raw": pixels; "jpeg": encoded anew; "source": each file's own bytes where it is a JPEG that the loader
            can decode, else pixels (a JPEG that `--max-size` makes smaller is encoded anew, which loses a second time);
            "mixed": a fraction of the rows as JPEG (their own bytes where possible), the others as pixels; "keep": rows
            come encoded (`repack`).
        quality: 1 to 100, of JPEGs that are made.
        fraction: 0 to 1, for "mixed".
    """

    kind: StoreKind = "raw"
    quality: int = JPEG_QUALITY
    fraction: float = 0.0

    def __str__(self) -> str:
        extra = {"jpeg": f":{self.quality}", "mixed": f":{self.fraction:g}"}
        return self.kind + extra.get(self.kind, "")


def parse_store(text: str) -> StoreOption:
    """The option that "raw", "jpeg", "jpeg:QUALITY", "source" or "mixed:FRACTION" names.

    Raises:
        OptionError: it names none.
    """
    accepted = "accepted: raw, jpeg, jpeg:1 to jpeg:100, source, mixed:FRACTION with 0 < FRACTION < 1."
    if text in ("raw", "source"):
        return StoreOption("raw" if text == "raw" else "source")
    if found := re.fullmatch(r"jpeg(?::([0-9]{1,3}))?", text):
        quality = int(found[1] or JPEG_QUALITY)
        if 1 <= quality <= 100:
            return StoreOption("jpeg", quality)
    if (found := re.fullmatch(r"mixed:([0-9]*\.?[0-9]+)", text)) and 0 < float(found[1]) < 1:
        return StoreOption("mixed", fraction=float(found[1]))
    raise OptionError(f"store={text!r} is not known; {accepted}")


@dataclass(frozen=True)
class StorePlan:
    """How each row of a dataset is made, decided before the first one is; picklable, for the workers.

    Attributes:
        channels, dtype: of every image, decoded.
        option: see `StoreOption`.
        target: the size that all images get (`--size`, or the one they share); None where they keep their own.
        max_size: most pixels of an image's shorter side; larger ones are resized, antialiased; None: any.
        images, masks: the form of each; masks None where there are none.
        image_codec, mask_codec: in the form "rows" an HDF5 filter, in the form "store" the encoding "zstd" of rows that
            are not JPEG.
        chunk_bytes: at which chunks of linear datasets and stores aim.
    """

    channels: int
    dtype: np.dtype[Any]
    option: StoreOption
    target: Target | None
    max_size: int | None
    images: Form
    masks: Form | None
    image_codec: Codec = NONE
    mask_codec: Codec = NONE
    chunk_bytes: int = 8 * 2**20

    @property
    def special(self) -> bool:
        """Whether rows are anything but plain pixels of one size, which are packed in place."""
        return self.images == "store" or self.image_codec != NONE or self.mask_codec != NONE

    def row_size(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) of the row that an image of this size becomes."""
        if self.target is not None:
            return self.target.height, self.target.width
        return fitted_size(height, width, self.max_size)


def fitted_size(height: int, width: int, max_size: int | None) -> tuple[int, int]:
    """The size of an image once its shorter side is at most max_size; its aspect stays, to the nearest pixel."""
    short = min(height, width)
    if max_size is None or short <= max_size:
        return height, width
    return (2 * height * max_size + short) // (2 * short), (2 * width * max_size + short) // (2 * short)


def fitted_sizes(sizes: NDArray[np.int64], max_size: int | None) -> NDArray[np.int64]:
    """`fitted_size` of many images.

    Args:
        sizes: int64 (N, 2), heights and widths; 0 where not known, which stays.
    """
    short = sizes.min(axis=1, keepdims=True)
    if max_size is None or not (short > max_size).any():
        return sizes
    return np.where(short > max_size, (2 * sizes * max_size + short) // np.maximum(2 * short, 1), sizes)


def ways(plan: StorePlan, samples: Any, headers: Any) -> tuple[Any, Any]:
    """Which samples keep their file's own bytes, and which are encoded as JPEG; of all others pixels are stored.

    Args:
        samples: an int64 array (n,) of numbers in the listing, or one number.
        headers: HEADERS (n,), or one, also as a dict of plain numbers.

    Returns:
        Two bool arrays (n,), or two bools.
    """
    kind, height, width = plan.option.kind, headers["height"], headers["width"]
    nothing = height < 0
    if kind in ("raw", "keep"):
        return nothing, nothing
    # x ^ True, not ~x: of a plain bool, too, it is the opposite. Plain numbers take a tenth of the time of NumPy's.
    wanted = nothing ^ True
    if kind == "mixed":  # spread evenly over the listing, whatever order rows are packed in
        wanted = (samples + 1) * plan.option.fraction // 1 > samples * plan.option.fraction // 1
    own = nothing
    if kind != "jpeg":
        fits = (headers["channels"] == plan.channels) | ((headers["channels"] == 1) & (plan.channels == 3))
        possible = (headers["jpeg"] > 0) & fits
        own = wanted & possible & (_resized(plan, height, width) ^ True)
        if kind == "source":  # what is no JPEG stays lossless; a larger JPEG would grow as pixels
            wanted = possible
    return own, wanted & (own ^ True) & (height <= MAX_JPEG_SIDE) & (width <= MAX_JPEG_SIDE)


def _resized(plan: StorePlan, height: Any, width: Any) -> Any:
    if plan.target is not None:
        return (height != plan.target.height) | (width != plan.target.width)
    if plan.max_size is None:
        return height < 0
    return (height > plan.max_size) & (width > plan.max_size)
