"""Texts in a packed file, UTF-8 of a fixed length: one a row (`key`), or up to M a row with their number (`caption`).

`fastload.format` says why they have a fixed length, and what that costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

CAPTION = "caption"


def count_name(name: str) -> str:
    """Returns the dataset with the number of texts in each row of a field that holds several."""
    return f"num_{name}s"


def is_text(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bool:
    """Whether a dataset of this type and shape of a row holds one text a row, or a list of them."""
    return dtype.kind == "S" and len(shape) <= 1 and dtype.itemsize > 0


def text_lists(values: NDArray[Any], counts: NDArray[Any] | None = None) -> list[Any]:
    """Returns the texts of B rows: a str each for values (B,), a list of str for (B, M).

    `counts`, (B,), says how many each row has; without it every row has M. Bytes that are no UTF-8 become escapes.
    """
    rows: list[Any] = values.tolist()  # which drops the zero bytes behind each text
    if values.ndim == 1:
        return [text.decode(errors="backslashreplace") for text in rows]
    if counts is not None:
        rows = [row[:count] for row, count in zip(rows, counts.tolist(), strict=True)]
    return [[text.decode(errors="backslashreplace") for text in row] for row in rows]


def captions_of_row(columns: Mapping[str, Any], row: int) -> list[str]:
    """Returns the captions of a row, given the datasets of its file by name; none where these hold no captions."""
    values = columns.get(CAPTION)
    if values is None or len(values.shape) > 2 or not is_text(values.dtype, values.shape[1:]):
        return []
    said = np.asarray(values[row])
    count = int(columns[count_name(CAPTION)][row]) if count_name(CAPTION) in columns else said.size
    texts: list[str] = text_lists(said.reshape(-1))[:count]
    return texts


def text_arrays(rows: Sequence[Sequence[bytes]]) -> tuple[NDArray[np.bytes_], NDArray[np.int64]]:
    """Returns texts of N rows as S (N, M), with empty ones behind the last of each, and their numbers, int64 (N,)."""
    counts = np.fromiter(map(len, rows), np.int64, len(rows))
    most = max(1, int(counts.max(initial=0)))
    longest = max((len(text) for row in rows for text in row), default=0)
    values = np.zeros((len(rows), most), f"S{max(1, longest)}")
    for at in range(most):
        having = np.flatnonzero(counts > at)
        values[having, at] = [rows[row][at] for row in having.tolist()]
    return values, counts
