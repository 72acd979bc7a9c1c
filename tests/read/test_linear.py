"""Reads without a mapping."""

from __future__ import annotations

import os

import numpy as np
import pytest

from fastload.errors import FileChangedError
from fastload.format.header import read_header
from fastload.read.linear import PreadRows
from fastload.system import native
from sample_files import write_packed


@pytest.fixture(params=["compiled", "preadv"])
def rows_of(request, tmp_path, monkeypatch):
    if request.param == "preadv":
        monkeypatch.setattr(native, "library", lambda: None)
    data = np.random.default_rng(1).integers(0, 256, (3000, 4, 4, 3), dtype=np.uint8)
    file = read_header(write_packed(tmp_path / "a.h5", data, chunk_rows=50))
    fd = os.open(file.path, os.O_RDONLY)
    reader = PreadRows(fd, file, ["images"])
    yield data, reader, file.path
    reader.close()
    os.close(fd)


@pytest.mark.parametrize(
    "rows",
    [np.random.default_rng(0).integers(0, 3000, 2500), np.r_[100:2900, 7, 8, 9, 2999], np.arange(5, 905)],
    ids=["more than a thousand reads", "a run longer than one request", "one run"],
)
@pytest.mark.parametrize("request_bytes", [1 << 20, 1000, 1])
def test_rows_in_runs_of_any_length_are_read(rows_of, rows, request_bytes, monkeypatch):
    monkeypatch.setattr("fastload.read.linear._MAX_REQUEST_BYTES", request_bytes)
    data, reader, _ = rows_of
    out = np.empty((len(rows), 4, 4, 3), np.uint8)
    reader.gather(rows, {"images": out})
    assert np.array_equal(out, data[rows])


def test_a_file_that_ends_too_early_names_the_row(rows_of):
    _, reader, path = rows_of
    os.truncate(path, 4096 + 48 * 100 + 10)
    out = np.empty((2, 4, 4, 3), np.uint8)
    reader.gather(np.array([0, 99]), {"images": out})
    with pytest.raises(FileChangedError, match="inside row 100 of images"):
        reader.gather(np.array([0, 100]), {"images": out})
