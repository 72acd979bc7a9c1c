"""The headers of all samples, read by the workers before anything is decided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.pack.chunk_work import Worker, array_header
from fastload.pack.options import Progress
from fastload.pack.tasks import HEADERS
from fastload.pack.workers import WorkerPool
from fastload.sources.listing import Arrays, Listing

_HEADER_BLOCK = 512


def read_headers(
    listing: Listing, pool: WorkerPool, progress: Progress | None, samples: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.void], Counter[str], dict[int, str]]:
    """HEADERS (N,), how many images there are of each kind, and sample -> why its header could not be read.

    Args:
        samples: int64, the samples whose headers are read, those of others stay zero; by default all.
    """
    samples = np.arange(len(listing)) if samples is None else samples
    total = len(samples)
    headers = np.zeros(len(listing), HEADERS)
    kinds: Counter[str] = Counter()
    reasons: dict[int, str] = {}
    if isinstance(listing.files, Arrays) and (listing.masks is None or isinstance(listing.masks.files, Arrays)):
        return _headers_of_arrays(listing, listing.files)
    done = 0
    for block in pool.run(Worker.probe, _blocks(samples)):
        headers[block.samples] = block.headers
        kinds.update(block.kinds)
        reasons.update(block.reasons)
        done += len(block.samples)
        if progress:
            progress("reading headers", done, total)
    return headers, kinds, reasons


def _headers_of_arrays(listing: Listing, images: Arrays) -> tuple[NDArray[np.void], Counter[str], dict[int, str]]:
    header = array_header(images)
    if (
        listing.masks is not None
        and isinstance(listing.masks.files, Arrays)
        and listing.masks.files.shape != images.shape[:2]
    ):
        raise SourceError(
            f"its masks are arrays of {listing.masks.files.shape}, its images of {images.shape}: height and width must "
            f"be the same."
        )
    headers = np.zeros(len(listing), HEADERS)
    headers[:] = (header.height, header.width, header.channels, header.bits, 0)
    return headers, Counter({header.kind: len(listing)}), {}


def _blocks(samples: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    for start in range(0, len(samples), _HEADER_BLOCK):
        yield samples[start : start + _HEADER_BLOCK]
