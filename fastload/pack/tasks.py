"""What the packer and its workers tell one another: blocks of headers, places in the file, chunks to do and done."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fastload.fitting import Target

HEADERS = np.dtype([("height", "<i4"), ("width", "<i4"), ("channels", "u1"), ("bits", "u1"), ("jpeg", "u1")])
"""What of a header decides about an image; jpeg as in `ImageHeader`."""


@dataclass(frozen=True)
class HeaderBlock:
    """Headers of a block of samples.

    Attributes:
        samples: int64 (n,), which samples of the listing.
        headers: HEADERS (n,); zero where a header could not be read.
        kinds: how many of each kind of image, for the report of conversions.
        reasons: sample -> why its header could not be read.
    """

    samples: NDArray[np.int64]
    headers: NDArray[np.void]
    kinds: Counter[str]
    reasons: dict[int, str]


@dataclass(frozen=True)
class Place:
    """Where the rows of one pixel dataset lie in the file being packed: row i at `base + i * row_bytes`."""

    base: int
    row_bytes: int

    def offset(self, row: int) -> int:
        """Byte at which a row begins."""
        return self.base + row * self.row_bytes


@dataclass(frozen=True)
class Places:
    """The places of the images and, where there are any, of the masks."""

    images: Place
    masks: Place | None = None

    @property
    def all(self) -> tuple[Place, ...]:
        """In the order in which a row's bytes are hashed."""
        return (self.images,) if self.masks is None else (self.images, self.masks)


@dataclass(frozen=True)
class ChunkTask:
    """A chunk's rows to decode or to check.

    Attributes:
        part: path of the file being packed.
        places: where its rows lie.
        rows: int64 (k,), the rows, consecutive.
        target: what each image becomes.
        samples: int64 (k,), the sample of the listing that each row holds; empty when only checked.
        digests: uint64 (k,), what is expected: always when checking, and where the listing knows it when decoding.
        headers: HEADERS (k,), what was found in each sample's header; empty where nothing depends on it.
    """

    part: str
    places: Places
    rows: NDArray[np.int64]
    target: Target
    samples: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    digests: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    headers: NDArray[np.void] = field(default_factory=lambda: np.zeros(0, HEADERS))


@dataclass(frozen=True)
class ChunkResult:
    """A chunk in its place: pixel digests uint64 (k,) of its rows, and row -> reason for those skipped."""

    rows: NDArray[np.int64]
    digests: NDArray[np.uint64]
    reasons: dict[int, str]
