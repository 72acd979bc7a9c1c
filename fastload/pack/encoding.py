"""The encoding of rows: what `--store`, `--max-size` and `--codec` mean for one dataset, decided before packing begins.

`EncodingOption` is what the user asked for, `RaggedPlan` what the rows of one dataset become.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fastload.errors import OptionError
from fastload.format.codecs import NONE, Codec
from fastload.images.fit import Target

EncodingKind = Literal["raw", "jpeg", "source", "mixed", "keep"]
Form = Literal["rows", "ragged"]
"""The form of a pixel dataset: rows of one size (N, H, W[, C]), or rows of varying length in one array of bytes."""

JPEG_QUALITY = 90
"""The default quality of JPEGs made here, the same as FFCV's."""

MAX_JPEG_SIDE = 65_500
"""The limit of libjpeg; larger images are stored as pixels."""


@dataclass(frozen=True)
class EncodingOption:
    """The encoding that `--store` asks for.

    Attributes:
        kind: "raw": pixels; "jpeg": every image encoded as JPEG; "source": the file's own bytes if it is a JPEG that
            the loader can decode, else pixels (a JPEG that `--max-size` makes smaller is encoded again, which loses a
            second time); "mixed": a fraction of the rows as JPEG (their own bytes where possible), the others as
            pixels; "keep": as a packed file holds them (`repack`), encoded or as pixels to be compressed.
        quality: 1 to 100, of JPEGs made here.
        fraction: 0 to 1, for "mixed".
    """

    kind: EncodingKind = "raw"
    quality: int = JPEG_QUALITY
    fraction: float = 0.0

    def __str__(self) -> str:
        extra = {"jpeg": f":{self.quality}", "mixed": f":{self.fraction:g}"}
        return self.kind + extra.get(self.kind, "")


def parse_encoding(text: str) -> EncodingOption:
    """Returns the option named by "raw", "jpeg", "jpeg:QUALITY", "source" or "mixed:FRACTION".

    Raises:
        OptionError: the text is none of these.
    """
    accepted = "accepted: raw, jpeg, jpeg:1 to jpeg:100, source, mixed:FRACTION with 0 < FRACTION < 1."
    if text in ("raw", "source"):
        return EncodingOption("raw" if text == "raw" else "source")
    if found := re.fullmatch(r"jpeg(?::([0-9]{1,3}))?", text):
        quality = int(found[1] or JPEG_QUALITY)
        if 1 <= quality <= 100:
            return EncodingOption("jpeg", quality)
    if (found := re.fullmatch(r"mixed:([0-9]*\.?[0-9]+)", text)) and 0 < float(found[1]) < 1:
        return EncodingOption("mixed", fraction=float(found[1]))
    raise OptionError(f"store={text!r} is not known; {accepted}")


@dataclass(frozen=True)
class RaggedPlan:
    """How each row of a dataset is made; decided before packing begins, and picklable for the workers.

    Attributes:
        channels, dtype: of every decoded image.
        option: the encoding asked for.
        target: the size of all images (`--size`, or the one they share); None where they keep their own.
        max_size: limit for an image's shorter side in pixels; larger images are resized, antialiased; None: no limit.
        images, masks: the form of each dataset; masks None where there are none.
        image_codec, mask_codec: in the form "rows" an HDF5 filter, in the form "ragged" zstd for each row that is not
            JPEG.
        chunk_bytes: the size that chunks should have.
    """

    channels: int
    dtype: np.dtype[Any]
    option: EncodingOption
    target: Target | None
    max_size: int | None
    images: Form
    masks: Form | None
    image_codec: Codec = NONE
    mask_codec: Codec = NONE
    chunk_bytes: int = 8 * 2**20

    @property
    def keeps(self) -> bool:
        """Whether rows are copied as a packed file holds them."""
        return self.option.kind == "keep"

    @property
    def special(self) -> bool:
        """Whether rows are anything but uncompressed pixels of one size."""
        return self.images == "ragged" or self.image_codec != NONE or self.mask_codec != NONE

    def row_size(self, height: int, width: int) -> tuple[int, int]:
        """Returns (height, width) of the row for an image of this size."""
        if self.target is not None:
            return self.target.height, self.target.width
        return fitted_size(height, width, self.max_size)


def fitted_size(height: int, width: int, max_size: int | None) -> tuple[int, int]:
    """Returns (height, width) with the shorter side at most max_size; the aspect ratio stays, to the nearest pixel."""
    short = min(height, width)
    if max_size is None or short <= max_size:
        return height, width
    return (2 * height * max_size + short) // (2 * short), (2 * width * max_size + short) // (2 * short)


def fitted_sizes(sizes: NDArray[np.int64], max_size: int | None) -> NDArray[np.int64]:
    """Returns `fitted_size` of many images, int64 (N, 2).

    Args:
        sizes: int64 (N, 2), heights and widths; 0 where not known, which stays 0.
    """
    short = sizes.min(axis=1, keepdims=True)
    if max_size is None or not (short > max_size).any():
        return sizes
    return np.where(short > max_size, (2 * sizes * max_size + short) // np.maximum(2 * short, 1), sizes)


def jpegs_kept_and_made(plan: RaggedPlan, samples: Any, headers: Any) -> tuple[Any, Any]:
    """Returns which samples keep the bytes of their JPEG file, and which are encoded as JPEG; the others become pixels.

    Args:
        samples: int64 (n,), numbers in the listing; or one number.
        headers: HEADERS (n,) of these samples; or one of them, also as a dict of plain numbers.

    Returns:
        Two bool arrays (n,), or two bools.
    """
    kind, height, width = plan.option.kind, headers["height"], headers["width"]
    nothing = height < 0
    if kind in ("raw", "keep"):
        return nothing, nothing
    # x ^ True negates NumPy's bools and Python's alike, ~x does not; Python's numbers take a tenth of the time.
    wanted = nothing ^ True
    if kind == "mixed":  # Spread evenly over the listing, so that the order of packing does not matter.
        wanted = (samples + 1) * plan.option.fraction // 1 > samples * plan.option.fraction // 1
    own = nothing
    if kind != "jpeg":
        fits = (headers["channels"] == plan.channels) | ((headers["channels"] == 1) & (plan.channels == 3))
        possible = (headers["jpeg"] > 0) & fits
        own = wanted & possible & (_resized(plan, height, width) ^ True)
        if kind == "source":  # Other files stay lossless; a JPEG to be resized would grow as pixels.
            wanted = possible
    return own, wanted & (own ^ True) & (height <= MAX_JPEG_SIDE) & (width <= MAX_JPEG_SIDE)


def _resized(plan: RaggedPlan, height: Any, width: Any) -> Any:
    if plan.target is not None:
        return (height != plan.target.height) | (width != plan.target.width)
    if plan.max_size is None:
        return height < 0
    return (height > plan.max_size) & (width > plan.max_size)
