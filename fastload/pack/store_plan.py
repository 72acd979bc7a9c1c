"""How rows are to be stored: what `--store`, `--max-size` and `--codec` come to for one dataset."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fastload.codecs import NONE, Codec
from fastload.errors import OptionError
from fastload.fitting import Target

StoreKind = Literal["raw", "jpeg", "source", "mixed", "keep"]
Form = Literal["rows", "store"]
"""Of a pixel dataset: rows of one size (N, H, W[, C]), or a byte store."""

JPEG_QUALITY = 90
"""Of JPEGs that are made without another wish, as FFCV's."""


@dataclass(frozen=True)
class StoreOption:
    """What `--store` said.

    Attributes:
        kind: "raw": pixels; "jpeg": encoded anew; "source": each file's own bytes where it is a JPEG that the loader
            can decode, else pixels; "mixed": a fraction of the rows as JPEG (their own bytes where possible), the
            others as pixels; "keep": rows come encoded (`repack`).
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
