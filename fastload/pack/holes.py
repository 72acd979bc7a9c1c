"""Closing the holes that skipped samples leave, by arithmetic alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def close_holes(good: NDArray[np.bool_], split: NDArray[np.uint8], *, shuffled: bool) -> NDArray[np.int64]:
    """For each row of the finished file, the row at which its sample was packed.

    Rows only ever move forward in the file: result[i] >= i, and moving them in ascending order never overwrites a
    row that is still to be moved. With split 0 in rows 0..4, split 1 in rows 5..7 and a hole at row 1:
    shuffled gives 0 4 2 3 | 7 5 6, in order gives 0 2 3 4 | 5 6 7.

    Args:
        good: bool (N,), False where a sample was skipped.
        split: uint8 (N,), split of each row, ascending.
        shuffled: fill each hole with the last good rows of its split, so that few rows move; else keep the order.

    Returns:
        int64 (number of good rows,).
    """
    kept = np.flatnonzero(good)
    if not shuffled or len(kept) == len(good):
        return kept
    result = np.empty(len(kept), dtype=np.int64)
    start = 0
    for name in np.unique(split[kept]):
        rows = kept[split[kept] == name]
        stop = start + len(rows)
        staying = rows[(rows >= start) & (rows < stop)]
        places = np.setdiff1d(np.arange(start, stop), staying, assume_unique=True)
        result[staying] = staying
        # The last rows of the split, which lie behind its end in the finished file, fill its holes from the back.
        result[places] = rows[rows >= stop][::-1]
        start = stop
    return result
