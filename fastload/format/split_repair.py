"""Finds bytes of `split` that rotted, when a file is opened: they decide which rows are a split's, before any is read.

A split is one run of rows. So whatever changed, the first and the last row of some run have changed values: those rows
are compared with their digests. Where a digest fits with another number of a split, that one was packed.
"""

from __future__ import annotations

from collections.abc import Mapping

import h5py
import numpy as np
from numpy.typing import NDArray

from fastload.format.digests import row_digests

_MOST_ROWS = 512  # that are compared; a file with more runs is more than damaged here and there
_MOST_ROW_BYTES = 2**20


def repaired(columns: Mapping[str, h5py.Dataset], digests: h5py.Dataset, num_splits: int) -> NDArray[np.uint8]:
    """Returns the number of each row's split, (N,), as it was packed.

    A row that does not fit its digest with any number is left as it is: another of its columns is damaged.

    Args:
        columns: what the digests are of, by name, `split` among them; (N, ...).
        digests: uint64 (N,); of another type they say nothing.
        num_splits: so many there are.
    """
    found: NDArray[np.uint8] = columns["split"][()]
    if found.dtype != np.uint8 or digests.dtype != np.uint64 or digests.ndim != 1:
        return found
    compared: set[int] = set()
    while rows := set(_ends_of_runs(found)) - compared:
        if len(compared) + len(rows) > _MOST_ROWS:
            return found
        compared |= rows
        for row in sorted(rows):
            cells = {name: column[row : row + 1] for name, column in columns.items()}
            if sum(cell.nbytes for cell in cells.values()) > _MOST_ROW_BYTES:
                return found
            for number in (int(found[row]), *range(num_splits)):
                cells["split"] = np.array([number], found.dtype)
                if row_digests(cells)[0] == digests[row]:
                    found[row] = number
                    break
    return found


def _ends_of_runs(values: NDArray[np.uint8]) -> list[int]:
    """Returns the first and the last row of each run of equal values, of the first runs of many."""
    changes = np.flatnonzero(values[1:] != values[:-1])[:_MOST_ROWS]
    return [0, *changes.tolist(), *(changes + 1).tolist(), len(values) - 1]
