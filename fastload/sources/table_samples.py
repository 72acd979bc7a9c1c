"""Which rows of a table make one sample, and its columns: one row, or as many as the image has boxes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.sources.listing import Column, OnError, first_few
from fastload.sources.options import SourceOptions
from fastload.sources.table_boxes import (
    box_columns,
    boxes_of,
    many_each,
    one_each,
    wrong_boxes,
)
from fastload.sources.table_columns import columns_of
from fastload.sources.table_rows import TableRows
from fastload.sources.table_values import Values
from fastload.sources.tree import key_of


def samples_of(
    positions: NDArray[np.int64],
    names: list[str],
    rows: TableRows,
    kept: NDArray[np.int64],
    left: dict[str, list[Any]],
    where: str,
    on_error: OnError,
    skipped: list[tuple[str, str]],
) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Which rows are samples. Several rows of an image are its boxes where the table has such columns, else an error.

    Returns:
        Without such boxes: int64 (R,), -1 where a row is left out; and None. With them: int64 (N,), the first row of
        each sample; and int64 (R,), the sample of each row.
    """
    unique, first, inverse, counts = np.unique(positions, return_index=True, return_inverse=True, return_counts=True)
    if len(unique) == len(positions):
        return np.arange(len(positions)), None
    if box_columns(left)[1]:
        order = np.argsort(first)
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        return first[order], rank[inverse]
    twice: list[tuple[str, str]] = []
    result = np.arange(len(positions))
    by_image = np.split(np.argsort(inverse, kind="stable"), np.cumsum(counts)[:-1])
    for k in np.flatnonzero(counts > 1).tolist():
        these = by_image[k]
        result[these] = -1
        places = " and ".join(rows.place(int(kept[row])) for row in these[:4])
        twice.append((key_of(names[kept[first[k]]]), f"has {counts[k]} rows: {places}"))
    if on_error == "fail":
        shown = first_few([f"{key} {reason}" for key, reason in twice])
        raise SourceError(
            f"{where}: images with more than one row ({len(twice)}): {shown}. Remove the wrong rows, or leave those "
            "images out with `--on-error skip`."
        )
    skipped += twice
    return result, None


def refuse_two_splits(
    split: list[str],
    kept: NDArray[np.int64],
    first: NDArray[np.int64],
    sample: NDArray[np.int64] | None,
    names: list[str],
    rows: TableRows,
    where: str,
) -> None:
    if sample is None:
        return
    for row, begin in zip(kept.tolist(), first[sample].tolist(), strict=True):
        if split[row] != split[begin]:
            raise SourceError(
                f"{where}: {key_of(names[row])} is in two splits: {split[begin]} ({rows.place(begin)}) and "
                f"{split[row]} ({rows.place(row)}). An image can be in one."
            )


def columns_with_boxes(
    table: dict[str, Values],
    sample: NDArray[np.int64] | None,
    split: NDArray[np.uint8],
    split_names: tuple[str, ...],
    options: SourceOptions,
    where: str,
    place: Callable[[int], str],
    on_error: OnError,
) -> tuple[dict[str, Column], dict[int, str], list[str]]:
    """All columns: boxes first, then what `columns_of` makes of the others.

    Raises:
        SourceError: a box is none (unless skipped).
    """
    moves, four = box_columns(table)
    boxes = boxes_of([table[name] for name in four]) if four else None
    if boxes is None and sample is not None:
        raise SourceError(
            f"{where}: images with more than one row, whose box columns {', '.join(four)} are no numbers."
        )
    if boxes is None:
        return columns_of(table, wanted=options.labels, split=split, split_names=split_names, where=where)
    wrong = wrong_boxes(boxes, moves)
    if wrong and on_error == "fail":
        shown = first_few([f"{place(row)} {why}" for row, why in wrong.items()])
        raise SourceError(
            f"{where}: boxes in {', '.join(four)} that cannot be ({len(wrong)}): {shown}. Mend the rows, or leave "
            "those images out with `--on-error skip`."
        )
    boxes[list(wrong)] = 0 if sample is None else np.nan
    rest = {name: values for name, values in table.items() if name not in four}
    said = f"Boxes by the columns {', '.join(four)}."
    if sample is None:
        if np.isnan(boxes).any():
            boxed = many_each(boxes, moves, np.arange(len(boxes)), len(boxes), None)
        else:
            boxed = one_each(boxes, moves)
        columns, bad, notes = columns_of(rest, wanted=options.labels, split=split, split_names=split_names, where=where)
        bad |= wrong
        return boxed | columns, bad, [said, *notes]
    count = len(split)
    every = np.zeros(len(sample), np.uint8)
    empty: NDArray[np.bool_] = np.asarray(np.isnan(boxes).any(axis=1))
    made, bad, notes = columns_of(rest, wanted=options.labels, split=every, split_names=("all",), where=where)
    labels = made.pop("labels", None)
    if labels is not None and labels.values.ndim > 1:
        made["labels"], labels = labels, None
    columns = many_each(boxes, moves, sample, count, labels)
    first = np.full(count, -1, np.int64)
    first[sample[::-1]] = np.arange(len(sample))[::-1]
    varying = []
    for name, column in made.items():
        if np.array_equal(column.values, column.values[first][sample]):
            columns[name] = Column(column.values[first], column.attrs)
        else:
            varying.append(name)
    notes = [said, "Several rows of an image are its boxes.", *notes]
    if varying:
        notes.append(f"Columns ignored, since they differ among the boxes of an image: {first_few(varying)}.")
    lost = {int(sample[row]): why for row, why in bad.items() if not empty[row]}
    lost |= {int(sample[row]): why for row, why in wrong.items()}
    return columns, lost, notes
