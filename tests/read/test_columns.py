"""Columns of files and indexes, by `open_columns`, and what the index of rows says where there is none."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
from small_files import write_random

from fastload.errors import FileChangedError
from fastload.format.header import read_header
from fastload.format.joined import open_files
from fastload.format.ragged import RAW
from fastload.read.reader import open_columns
from fastload.read.row_table import index_part

ROWS = 24


@pytest.fixture
def files(tmp_path):
    """Two packed files, and the values of all of their columns one after another."""
    paths = [tmp_path / f"{name}.h5" for name in "ab"]
    for seed, path in enumerate(paths):
        write_random(path, rows=ROWS, size=(6, 5, 3), seed=seed, classes="abc")
    with h5py.File(paths[0]) as a, h5py.File(paths[1]) as b:
        names = [name for name in a if name not in ("images", "digest", "split")]
        return paths, {name: np.concatenate([a[name][()], b[name][()]]) for name in names}


@pytest.mark.parametrize(
    "key",
    [(), 5, 0, slice(None), slice(20, 30), slice(3, None, 7), np.array([1, 23, 24, 40]), (slice(2, 30, 5),)],
    ids=str,
)
def test_columns_are_indexed_as_those_of_h5py(files, key):
    paths, expected = files
    for file, some in ((read_header(paths[0]), slice(ROWS)), (open_files(paths), slice(None))):
        if file.num_rows == ROWS and isinstance(key, np.ndarray):
            key = key[key < ROWS]
        with open_columns(file) as columns:
            assert columns.keys() == file.fields.keys() - {"images"}
            for name, values in expected.items():
                np.testing.assert_array_equal(columns[name][key], values[some][key], err_msg=name)


def test_rows_outside_are_refused(files):
    with open_columns(open_files(files[0])) as columns:
        for key in (2 * ROWS, np.array([0, -1])):
            with pytest.raises(IndexError, match=r"outside 0\.\.47"):
                columns["labels"][key]


def test_a_file_that_was_replaced_is_an_error(files, tmp_path):
    paths, _ = files
    file = read_header(paths[0])
    paths[1].replace(paths[0])
    with pytest.raises(FileChangedError, match="replaced by another file"), open_columns(file) as columns:
        columns["labels"][()]


def test_the_index_of_rows_of_one_size_says_the_same_of_each(files):
    file = read_header(files[0][0])
    with open_columns(file) as columns:
        found = {
            part: index_part(columns, file, "images", part) for part in ("bytes", "shape", "encoding", "orientation")
        }
    assert found["bytes"].tolist() == [6 * 5 * 3] * ROWS and found["shape"].tolist() == [[6, 5, 3]] * ROWS
    assert (found["encoding"] == RAW).all() and (found["orientation"] == 1).all()
