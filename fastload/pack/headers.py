"""The headers of all samples, read by the workers before anything is decided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.pack.chunk_work import HEADERS, Worker, array_header
from fastload.pack.options import Progress
from fastload.pack.workers import WorkerPool
from fastload.sources.listing import Arrays, Listing

_HEADER_BLOCK = 512


def read_headers(
    listing: Listing, pool: WorkerPool, progress: Progress | None
) -> tuple[NDArray[np.void], Counter[str], dict[int, str]]:
    """HEADERS (N,) of all samples, how many there are of each kind, and sample -> why one could not be read."""
    total = len(listing.keys)
    headers = np.zeros(total, HEADERS)
    kinds: Counter[str] = Counter()
    reasons: dict[int, str] = {}
    if isinstance(listing.files, Arrays) and (listing.masks is None or isinstance(listing.masks.files, Arrays)):
        return _headers_of_arrays(listing, listing.files)
    done = 0
    for block in pool.run(Worker.probe, _blocks(total)):
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
    headers[:] = (header.height, header.width, header.channels, header.bits)
    return headers, Counter({header.kind: len(listing)}), {}


def _blocks(total: int) -> Iterator[NDArray[np.int64]]:
    for start in range(0, total, _HEADER_BLOCK):
        yield np.arange(start, min(total, start + _HEADER_BLOCK))
