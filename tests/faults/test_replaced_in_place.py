"""Another whole file is written in place over one that is read, with the same size and time of modification.

Nothing that is compared by name, size and mtime sees it. No row of the other file is delivered as valid, whatever reads
the file, and whenever that happens. Each moment once; more of them, at random, by FASTLOAD_REPLACED=25.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flipped_files import rows_of
from ragged_cases import varied_file
from small_files import labels_in_turn, random_pixels

from fastload import FastLoader, PackedDataset, index_files
from fastload.errors import DamagedRowError, FileChangedError
from fastload.format.ragged import Column
from fastload.transforms import RandomResizedCrop
from sample_files import write_packed

ROWS, BATCH, SHARDS = 240, 8, 3
MORE = int(os.environ.get("FASTLOAD_REPLACED", "0"))

Moments = Callable[[str], None]
"""Called with the names of moments, in order."""


def inverted(sample: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """A transform in Python, for worker processes."""
    return (255 - sample[0], *sample[1:])


WAYS: dict[str, dict[str, Any]] = {
    "mapped": {"read": "map", "workers": 1},
    "pread": {"read": "pread", "workers": 1},
    "threads": {"workers": 3, "transform": [RandomResizedCrop(8)]},
    "processes": {"workers": 2},
}
MOMENTS = ["when it was opened", "after some batches", "after an epoch"]


def one(path: Path, *, other: bool, ragged: bool = False, rows: int = ROWS, first: int = 0) -> Path:
    """A file of images and labels; the other one has others, and the same size."""
    if ragged:
        images = [random_pixels(1, (9 + i % 5, 20 - i % 7, 3), seed=i + first + 1000 * other)[0] for i in range(rows)]
        return varied_file(path, images)
    pixels = random_pixels(rows, (12, 10, 3), seed=first + 1000 * other)
    labels = labels_in_turn(rows, "abc")
    return write_packed(path, pixels, {"labels": Column((labels.values + other) % 3, labels.attrs)}, chunk_rows=5)


def made(folder: Path, *, sharded: bool, **form: Any) -> tuple[Path, list[tuple[Path, bytes]]]:
    """A file, or an index of shards, and of each file that has rows what is to be written over it."""
    if not sharded:
        path = one(folder / "a.h5", other=False, **form)
        return path, [(path, one(folder / "b.h5", other=True, **form).read_bytes())]
    each = ROWS // SHARDS
    shards = [one(folder / f"{i}.h5", other=False, rows=each, first=i, **form) for i in range(SHARDS)]
    index_files(shards, folder / "a.h5")
    others = [one(folder / "b.h5", other=True, rows=each, first=i, **form).read_bytes() for i in range(SHARDS)]
    return folder / "a.h5", list(zip(shards, others, strict=True))


def write_over(files: list[tuple[Path, bytes]]) -> None:
    for path, data in files:
        before = path.stat()
        assert before.st_size == len(data)
        with open(path, "r+b") as file:
            file.write(data)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert path.stat().st_mtime_ns == before.st_mtime_ns


def batches(path: Path, way: str, moment: Moments) -> Iterator[tuple[torch.Tensor, ...]]:
    """Three epochs of a file, read in one way."""
    dataset = PackedDataset(path, fields=["images", "labels", "row", "valid"])
    dataset.transform = inverted if way == "processes" else None
    options = dict(WAYS[way])
    if dataset.file.fields["images"].varied:
        options["transform"] = [RandomResizedCrop(8)]
    with closing(FastLoader(dataset, BATCH, share=None, ends="exact", seed=4, **options)) as loader:
        moment("when it was opened")
        for epoch in range(3):
            for number, batch in enumerate(loader):
                yield tuple(field.clone() for field in batch)
                if number + 1 == BATCH * (epoch == 0):
                    moment("after some batches")
                moment("after a batch")
            if epoch == 0:
                moment("after an epoch")


def wrong_rows(path: Path, way: str, files: list[tuple[Path, bytes]], when: Moments | str) -> tuple[int, str]:
    """How many rows of another file were delivered as valid, and how that ended, if files were written over `when`."""
    names, whole = ["images", "labels", "row", "valid"], path.with_name("whole")
    shutil.copytree(path.parent, whole)
    expected = list(batches(whole / path.name, way, lambda _: None))

    def moment(name: str) -> None:
        if callable(when):
            when(name)
        elif name == when:
            write_over(files)

    wrong, ended = 0, "whole"
    found = batches(path, way, moment)
    try:
        for then, now in zip(expected, found, strict=True):
            good, got = rows_of(names, [then]), rows_of(names, [now])
            wrong += sum(good.get(row) != values for row, values in got.items())
    except (FileChangedError, DamagedRowError) as error:
        ended = type(error).__name__
    found.close()
    return wrong, ended


def cases() -> list[tuple[str, bool, bool, str]]:
    """Way, whether in shards, whether of several sizes, moment."""
    every = [(way, sharded, moment) for way in WAYS for sharded in (False, True) for moment in MOMENTS]
    # Processes take a second to start.
    some = [case for case in every if MORE or case[0] != "processes" or case[2] == MOMENTS[case[1] + 1]]
    return [(way, sharded, sharded and way == "threads", moment) for way, sharded, moment in some]


@pytest.mark.parametrize(("way", "sharded", "ragged", "moment"), cases())
def test_no_row_of_a_file_that_was_written_over_is_delivered(tmp_path, way, sharded, ragged, moment) -> None:
    path, files = made(tmp_path, sharded=sharded, ragged=ragged)
    wrong, ended = wrong_rows(path, way, files, moment)
    # Whoever has a batch that was made before gets it; whoever opens or reads the file then does not.
    assert wrong == 0 and ended != "whole"


@pytest.mark.parametrize("way", [*WAYS] * bool(MORE))
@pytest.mark.parametrize("trial", range(MORE))
def test_at_random_moments_neither(tmp_path, way, trial) -> None:
    rng = np.random.default_rng(trial)
    path, files = made(tmp_path, sharded=trial % 2 == 1, ragged=trial % 4 > 1)
    left = int(rng.integers(0, 2 * ROWS // BATCH))

    def moment(name: str) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            write_over(files)

    wrong, ended = wrong_rows(path, way, files, moment)
    print(f"{way}, {'shards' if trial % 2 else 'a file'}: {wrong} wrong rows, {ended}")
    assert wrong == 0
