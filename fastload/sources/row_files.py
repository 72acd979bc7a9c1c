"""Datasets in files of images of one shape, one behind the other, as CIFAR's batches and MNIST's idx files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastload.format.column import Column
from fastload.sources.arrays.raw_rows import JoinedRows
from fastload.sources.assemble import Draft, Samples, Splits
from fastload.sources.listing import Arrays
from fastload.sources.tree import Tree, key_of


class RowFile(NamedTuple):
    """One file with images."""

    position: int  # in the tree
    split: str  # split of its images
    rows: Arrays  # reads them
    num_images: int
    columns: dict[str, NDArray[Any]]  # other fields of the images
    names: Sequence[str] = ()  # name of each image, if they have any

    def unique_names(self) -> list[str]:
        """Returns the names, of which those that are absent or repeated have the number of their image."""
        # "%05d" % takes half the time of an f-string each.
        names = list(self.names) or list(map("%05d".__mod__, range(self.num_images)))
        if len(set(names)) < len(names) or "" in names:
            seen: set[str] = set()
            for row, name in enumerate(names):
                if not name or name in seen:
                    names[row] = f"{name}#{row:05d}" if name else f"{row:05d}"
                seen.add(names[row])
        return names


def joined_samples(
    draft: Draft, tree: Tree, files: list[RowFile], attrs: dict[str, dict[str, Any]], used: Iterable[int]
) -> Samples:
    """Returns the images, file by file, with the columns in `attrs`; a key is that of the file and the name in it.

    `used` are the positions of all files that were read, also those without images.
    """
    draft.note("Ignored the other files", tree.others(used))
    counts = [file.num_images for file in files]
    shape, dtype = files[0].rows.shape, files[0].rows.dtype
    return Samples(
        keys=[f"{key_of(tree.names[file.position])}/{name}" for file in files for name in file.unique_names()],
        files=files[0].rows if len(files) == 1 else JoinedRows.of([(file.rows, file.num_images) for file in files]),
        sizes=np.full(sum(counts), math.prod(shape) * dtype.itemsize, np.int64),
        mtimes_ns=np.repeat(tree.mtimes_ns[[file.position for file in files]], counts),
        splits=Splits.of([split for file in files for split in [file.split] * file.num_images]),
        columns={
            name: Column(np.concatenate([file.columns[name] for file in files]), about) for name, about in attrs.items()
        },
    )
