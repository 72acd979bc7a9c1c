"""Some samples of a dataset, spread evenly, each in every store that is compared."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fastload.errors import ImageError
from fastload.in_threads import in_threads
from fastload.pack.encode import RowEncoder
from fastload.pack.options import Progress
from fastload.pack.store_plan import StoreOption, StorePlan
from fastload.sources.listing import Arrays, Files, Masks, Pictures
from fastload.store import EncodedRow

SAMPLES = 64
MOST_BYTES = 256 * 2**20
"""Of rows held at once, apart from those that are being made."""
MOST_THREADS = 8
"""That make them: each may hold an image of half a gigabyte."""

_GOLDEN = (5**0.5 - 1) / 2


class Encode(Protocol):
    """Makes the row of a sample."""

    def __call__(self, sample: int, option: StoreOption) -> EncodedRow:
        """As this store would hold it.

        Raises:
            ImageError, OSError: it cannot be read, or not be decoded.
        """
        ...


class Encoders:
    """Rows of a source as the packer makes them. Threads may share it: each gets encoders of its own.

    Args:
        images, masks: of the listing.
        headers: HEADERS (N,) of all its samples.
        plan: how rows are made, apart from its option.
    """

    def __init__(
        self, images: Files | Pictures | Arrays, masks: Masks | None, headers: NDArray[np.void], plan: StorePlan
    ) -> None:
        self._images, self._masks, self._headers, self._plan = images, masks, headers, plan
        self._own = threading.local()

    def __call__(self, sample: int, option: StoreOption) -> EncodedRow:
        """See `Encode`."""
        encoders: dict[str, RowEncoder] = self._own.__dict__
        name = str(option)
        if name not in encoders:
            encoders[name] = RowEncoder(self._images, self._masks, replace(self._plan, option=option))
        return encoders[name].encode(sample, self._headers[sample])


@dataclass(frozen=True, eq=False)
class Sampled:
    """Samples in every store.

    Attributes:
        samples: their numbers.
        rows: option -> a row of each of them.
        failed: how many more could not be read or decoded.
    """

    samples: list[int]
    rows: dict[StoreOption, list[EncodedRow]]
    failed: int


def take_sample(
    encode: Encode,
    options: Sequence[StoreOption],
    samples: NDArray[np.int64],
    *,
    threads: int,
    seconds: float,
    progress: Progress | None = None,
) -> Sampled:
    """SAMPLES of the samples, or as many as the time and MOST_BYTES suffice for, at least one a thread.

    Args:
        encode: makes rows; several threads call it.
        options: the stores.
        samples: int64 (n,), those to choose from.
        threads: that work at once, up to MOST_THREADS.
        seconds: after which no further sample is begun.
        progress: called with ("measuring stores", done, total).
    """
    threads = min(threads, MOST_THREADS)
    total, held, failed = min(SAMPLES, len(samples)), 0, 0
    found: dict[int, list[EncodedRow]] = {}
    end = time.perf_counter() + seconds

    def some() -> Iterator[int]:
        for begun, at in enumerate(spread(len(samples), total)):
            if begun >= threads and (time.perf_counter() > end or held > MOST_BYTES):
                return
            yield int(samples[at])

    def work(sample: int) -> tuple[int, list[EncodedRow] | None]:
        try:
            return sample, [_flat(encode(sample, option)) for option in options]
        except (ImageError, OSError):  # packing names it, here it only does not count
            return sample, None

    for sample, rows in in_threads(work, some(), threads):
        if rows is None:
            failed += 1
        else:
            found[sample] = rows
            held += sum(map(row_bytes, rows))
        if progress:
            progress("measuring stores", len(found) + failed, total)
    chosen = sorted(found)
    return Sampled(chosen, {option: [found[i][at] for i in chosen] for at, option in enumerate(options)}, failed)


def row_bytes(row: EncodedRow) -> int:
    """Bytes that a sample, flat, takes in its stores."""
    return image_bytes(row) + (0 if row.mask is None else len(row.mask))


def image_bytes(row: EncodedRow) -> int:
    """Bytes that the image of a sample, flat, takes in its store."""
    return len(row.image)


def _flat(row: EncodedRow) -> EncodedRow:
    """The row with its bytes in one dimension, as they come from a file."""
    mask = None if row.mask is None else memoryview(row.mask).cast("B")
    return replace(row, image=memoryview(row.image).cast("B"), mask=mask)


def spread(count: int, wanted: int) -> list[int]:
    """So many different numbers below count, in an order in which every beginning is spread evenly.

    Multiples of the golden ratio, without their whole part: each falls into one of the largest gaps left.
    """
    turns: Any = np.arange(1, 4 * wanted + 1) * _GOLDEN % 1
    return list(dict.fromkeys((turns * count).astype(np.int64).tolist()))[:wanted]
