"""Some samples of a dataset, spread evenly, made in every encoding that is compared."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import ImageError
from fastload.format.ragged import EncodedRow
from fastload.options.pack import EncodingOption, Progress
from fastload.pack.decisions import RaggedPlan
from fastload.pack.encode import RowEncoder
from fastload.sources.listing import Arrays, Files, Masks, Pictures
from fastload.system.threads import in_threads

SAMPLES = 64
MOST_BYTES = 256 * 2**20
"""Limit for the rows in memory, not counting those being made."""
MOST_THREADS = 8
"""Limit for threads that make rows: each may hold an image of half a gigabyte."""

_GOLDEN = (5**0.5 - 1) / 2


Encode = Callable[[int, EncodingOption], EncodedRow]
"""Makes the row of a sample in an encoding; raises ImageError or OSError if it cannot be read or decoded."""


def row_maker(
    images: Files | Pictures | Arrays, masks: Masks | None, headers: NDArray[np.void], plan: RaggedPlan
) -> Encode:
    """Returns an `Encode` that makes rows of a listing's samples as the packer does, in any encoding.

    Threads may share it: each gets encoders of its own. `headers` is HEADERS (N,) of all samples.
    """
    own = threading.local()

    def encode(sample: int, option: EncodingOption) -> EncodedRow:
        encoders: dict[str, RowEncoder] = own.__dict__
        name = str(option)
        if name not in encoders:
            encoders[name] = RowEncoder(images, masks, replace(plan, option=option))
        return encoders[name].encode(sample, headers[sample])

    return encode


@dataclass(frozen=True, eq=False)
class Sampled:
    """Some samples in every encoding."""

    samples: list[int]  # numbers of the samples
    rows: dict[EncodingOption, list[EncodedRow]]  # option -> a row of each sample
    failed: int  # number of samples that could not be read or decoded


def take_sample(
    encode: Encode,
    options: Sequence[EncodingOption],
    samples: NDArray[np.int64],
    *,
    threads: int,
    seconds: float,
    progress: Progress | None = None,
) -> Sampled:
    """Makes rows of SAMPLES samples, or of as many as time and MOST_BYTES allow, at least one for each thread.

    At most MOST_THREADS call `encode`. `samples` int64 (n,) are those to choose from; none is begun after `seconds`.
    """
    threads = min(threads, MOST_THREADS)
    total, num_bytes, failed = min(SAMPLES, len(samples)), 0, 0
    found: dict[int, list[EncodedRow]] = {}
    end = time.perf_counter() + seconds

    def chosen_samples() -> Iterator[int]:
        for begun, at in enumerate(spread(len(samples), total)):
            if begun >= threads and (time.perf_counter() > end or num_bytes > MOST_BYTES):
                return
            yield int(samples[at])

    def flat(row: EncodedRow) -> EncodedRow:
        """Returns the row with its bytes in one dimension, as they come from a file."""
        mask = None if row.mask is None else memoryview(row.mask).cast("B")
        return replace(row, image=memoryview(row.image).cast("B"), mask=mask)

    def work(sample: int) -> tuple[int, list[EncodedRow] | None]:
        try:
            return sample, [flat(encode(sample, option)) for option in options]
        except (ImageError, OSError):  # Packing names it, here it is only counted.
            return sample, None

    for sample, rows in in_threads(work, chosen_samples(), threads):
        if rows is None:
            failed += 1
        else:
            found[sample] = rows
            num_bytes += sum(map(row_bytes, rows))
        if progress:
            progress("measuring stores", len(found) + failed, total)
    chosen = sorted(found)
    return Sampled(chosen, {option: [found[i][at] for i in chosen] for at, option in enumerate(options)}, failed)


def row_bytes(row: EncodedRow) -> int:
    return len(row.image) + (0 if row.mask is None else len(row.mask))


def spread(count: int, wanted: int) -> list[int]:
    """Returns so many different numbers below count, in an order in which the first k are spread evenly for any k.

    Multiples of the golden ratio without their whole part: each falls into one of the largest gaps left.
    """
    fractions: Any = np.arange(1, 4 * wanted + 1) * _GOLDEN % 1
    return list(dict.fromkeys((fractions * count).astype(np.int64).tolist()))[:wanted]
