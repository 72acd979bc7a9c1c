"""Reads chunk by chunk."""

from __future__ import annotations

import os

import h5py
import numpy as np
import pytest
from small_files import random_pixels, write_foreign

from fastload.errors import FileChangedError
from fastload.format.chunk_filters import FilteredChunks
from fastload.format.header import read_header
from fastload.plan import ChunkWindow, EpochPlan
from fastload.read.hdf5_chunks import ChunkedRows
from fastload.read.reader import open_rows
from fastload.system.threads import in_threads


@pytest.fixture
def gzipped(tmp_path):
    data = random_pixels(64, (8, 8, 3), below=9)
    return data, read_header(write_foreign(tmp_path / "a.h5", data, chunk_rows=8))


def read(reader, rows):
    out = np.empty((len(rows), 8, 8, 3), np.uint8)
    reader.gather(np.asarray(rows, dtype=np.int64), {"images": out})
    return out


@pytest.fixture
def decoded(monkeypatch):
    """The rows that are decoded here, or read through h5py, in order."""
    parts = []
    through_hdf5, here = h5py.Dataset.read_direct, FilteredChunks.rows

    def rows(self, fd, number):
        chunk = here(self, fd, number)
        parts.append(slice(number * self._chunks[0], number * self._chunks[0] + len(chunk)))
        return chunk

    monkeypatch.setattr(FilteredChunks, "rows", rows)
    monkeypatch.setattr(
        h5py.Dataset, "read_direct", lambda self, *args: (parts.append(args[1]), through_hdf5(self, *args))
    )
    return parts


def test_a_chunk_is_decoded_once_while_it_is_in_use(gzipped, decoded):
    data, file = gzipped
    reader = ChunkedRows(file, ["images"], cache_chunks=2)
    rows = [0, 9, 1, 10, 2, 15]
    assert np.array_equal(read(reader, rows), data[rows])
    assert np.array_equal(read(reader, [3, 11]), data[[3, 11]])
    assert [part.start for part in decoded] == [0, 8]
    read(reader, [20, 0])
    assert [part.start for part in decoded] == [0, 8, 16, 0], "the first chunk made room for the third"
    assert len(reader._cache.units) == 2
    reader.close()


def test_the_cache_keeps_to_its_bytes_and_warns_once_of_a_chunk_larger_than_that(gzipped):
    _, file = gzipped
    chunk_bytes = 8 * 8 * 8 * 3
    reader = ChunkedRows(file, ["images"], cache_chunks=6, cache_bytes=3 * chunk_bytes)
    read(reader, range(64))
    held = sum(chunk.result().nbytes for chunk in reader._cache.units.values())
    assert reader._cache.num_bytes == held == 3 * chunk_bytes
    with pytest.warns(UserWarning) as seen:
        tight = ChunkedRows(file, ["images"], cache_bytes=1000)
        read(tight, range(64))
    assert len(tight._cache.units) == len(seen) == 1
    message = str(seen[0].message)
    assert "one chunk of images is 1.5 KiB" in message and "the cache of 1000 B" in message
    assert "fastload info" in message and str(file.path) in message


def test_threads_and_a_forked_child_read_the_same_and_another_file_of_that_name_is_not_read(gzipped):
    data, file = gzipped
    reader = ChunkedRows(file, ["images"], cache_chunks=2)

    def work(seed):
        rows = np.random.default_rng(seed).integers(0, 64, 40)
        return np.array_equal(read(reader, rows), data[rows])

    assert all(in_threads(work, range(6), 6))
    pid = os.fork()
    if pid == 0:
        os._exit(0 if np.array_equal(read(reader, [63, 1]), data[[63, 1]]) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.rename(file.path, f"{file.path}.old")
    write_foreign(file.path, data, chunk_rows=8)
    with pytest.raises(FileChangedError, match="another file"):
        read(ChunkedRows(file, ["images"]), [0])


@pytest.mark.parametrize(("window", "batch_size"), [(1, 5), (3, 7), (3, 64), (16, 10)])
def test_an_epoch_in_windows_decodes_each_chunk_once(tmp_path, decoded, window, batch_size):
    data = np.arange(300 * 4 * 4 * 3, dtype=np.uint16).reshape(300, 4, 4, 3)
    with h5py.File(tmp_path / "a.h5", "w") as hdf5:
        hdf5.create_dataset("images", data=data, chunks=(8, 4, 4, 3), compression="gzip")
        hdf5.create_dataset("masks", data=data[..., 0], chunks=(3, 4, 4), compression="gzip")
    file = read_header(tmp_path / "a.h5")
    reader = open_rows(file, ["images", "masks"], cache_chunks=2 * window)
    plan = EpochPlan(range(300), chunk_rows=8, shuffle=ChunkWindow(window), batch_size=batch_size, ends="drop")
    touched = set()
    for batch in plan.batches(0):
        touched |= set((batch.rows // 8).tolist())
        outs = {"images": np.empty((batch_size, 4, 4, 3), np.uint16), "masks": np.empty((batch_size, 4, 4), np.uint16)}
        reader.gather(batch.rows, outs)
        assert np.array_equal(outs["images"], data[batch.rows])
        assert np.array_equal(outs["masks"], data[batch.rows, ..., 0])
    reader.close()
    images = [part.start for part in decoded if part.stop - part.start > 3]
    assert sorted(images) == [8 * chunk for chunk in sorted(touched)] and len(touched) > 30
    # Chunks of 3 masks lie across those of 8 images: the one on a border belongs to two windows.
    masks = len(decoded) - len(images)
    assert masks <= 100 + 38


def test_a_window_larger_than_the_cache_warns_once_and_names_one_that_fits(gzipped, decoded):
    _, file = gzipped
    chunk_bytes = 8 * 8 * 8 * 3
    with pytest.warns(UserWarning, match=r"a window of 4 chunks .* does not fit .*ChunkWindow\(3\) or less") as seen:
        ChunkedRows(file, ["images"], cache_chunks=8, windows=True, cache_bytes=3 * chunk_bytes)
    assert len(seen) == 1
    # The suite makes warnings errors: the window that it names is silent, and so is whoever asked for none.
    ChunkedRows(file, ["images"], cache_chunks=6, windows=True, cache_bytes=3 * chunk_bytes)
    ChunkedRows(file, ["images"], cache_chunks=8, cache_bytes=3 * chunk_bytes)


@pytest.fixture
def scattered(tmp_path):
    """Two unfiltered chunks of 20 rows of 128 KiB, the second one first in the file."""
    data = np.random.default_rng(3).integers(0, 256, (40, 256, 128, 4), dtype=np.uint8)
    with h5py.File(tmp_path / "a.h5", "w") as hdf5:
        images = hdf5.create_dataset("images", shape=data.shape, chunks=(20, 256, 128, 4), dtype=np.uint8)
        images[20:] = data[20:]
        images[:20] = data[:20]
    file = read_header(tmp_path / "a.h5")
    assert file.fields["images"].offset is None and not file.fields["images"].filters
    return data, file


@pytest.mark.parametrize(("windows", "cache_bytes"), [(False, 2**29), (True, 2**29), (True, 2**20)])
def test_unfiltered_chunks_are_read_whole_in_windows_that_fit_the_cache_and_else_in_pieces(
    scattered, decoded, windows, cache_bytes
):
    data, file = scattered
    reader = ChunkedRows(file, ["images"], cache_chunks=2, windows=windows, cache_bytes=cache_bytes)
    out = np.empty((2, 256, 128, 4), np.uint8)
    for rows in ([25, 3], [38, 19]):
        reader.gather(np.array(rows), {"images": out})
        assert np.array_equal(out, data[rows])
    whole = windows and cache_bytes > 2**20
    assert [part.stop - part.start for part in decoded] == ([20, 20] if whole else [2, 2, 2, 2])
    # HDF5's own cache would hold a second copy, or fetch whole chunks where pieces are asked for.
    assert reader._datasets["images"].id.get_access_plist().get_chunk_cache()[1] == 0
    reader.close()
