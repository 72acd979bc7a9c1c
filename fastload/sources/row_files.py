"""Datasets in files of images of one shape, one behind the other, as CIFAR's batches and MNIST's idx files."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastload.format.column import Column
from fastload.sources.arrays.raw_rows import JoinedRows
from fastload.sources.assemble import Draft, Samples, Splits
from fastload.sources.listing import Arrays, first_few
from fastload.sources.tree import Tree, key_of


class RowFile(NamedTuple):
    """One file with images.

    Attributes:
        position: position of the file in the tree.
        split: split of its images.
        rows: reads them.
        names: name of each image, unique in the file.
        columns: other fields of the images.
    """

    position: int
    split: str
    rows: Arrays
    names: list[str]
    columns: dict[str, NDArray[Any]]


def joined_samples(
    draft: Draft, tree: Tree, files: list[RowFile], attrs: dict[str, dict[str, Any]], used: Iterable[int]
) -> Samples:
    """Returns the images, file by file; a key is that of the file and the name in it.

    Args:
        draft: what was noted and left out.
        tree: holds the files.
        files: the files in order.
        attrs: name -> attributes of the columns to list.
        used: positions of all files that were read, also those without images.
    """
    if others := tree.others(used):
        draft.notes.append(f"Ignored the other files ({len(others)}): {first_few(others)}.")
    counts = [len(file.names) for file in files]
    shape, dtype = files[0].rows.shape, files[0].rows.dtype
    rows = [(file.rows, count) for file, count in zip(files, counts, strict=True)]
    return Samples(
        keys=[f"{key}/{name}" for file in files for key in [key_of(tree.names[file.position])] for name in file.names],
        files=rows[0][0] if len(rows) == 1 else JoinedRows.of(rows),
        sizes=np.full(sum(counts), math.prod(shape) * dtype.itemsize, np.int64),
        mtimes_ns=np.repeat(tree.mtimes_ns[[file.position for file in files]], counts),
        splits=Splits.of([split for file in files for split in [file.split] * len(file.names)]),
        columns={
            name: Column(np.concatenate([file.columns[name] for file in files]), about) for name, about in attrs.items()
        },
    )
