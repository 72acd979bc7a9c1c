"""Reads through h5py."""

from __future__ import annotations

import os
import threading

import h5py
import numpy as np
import pytest

from fastload.errors import FileChangedError
from fastload.format import read_header
from fastload.read.chunked import ChunkedRows


@pytest.fixture
def compressed(tmp_path):
    data = np.random.default_rng(1).integers(0, 9, (64, 8, 8, 3), dtype=np.uint8)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("images", data=data, chunks=(8, 8, 8, 3), compression="gzip")
    return data, read_header(tmp_path / "a.h5")


def read(store, rows):
    out = np.empty((len(rows), 8, 8, 3), np.uint8)
    store.gather(np.asarray(rows, dtype=np.int64), {"images": out})
    return out


def test_a_chunk_is_decoded_once_while_it_is_in_use(compressed, monkeypatch):
    data, file = compressed
    store = ChunkedRows(file, ["images"], cache_chunks=2)
    decoded = []
    original = h5py.Dataset.read_direct
    monkeypatch.setattr(
        h5py.Dataset, "read_direct", lambda self, *args: (decoded.append(args[1]), original(self, *args))
    )
    rows = [0, 9, 1, 10, 2, 15]
    assert np.array_equal(read(store, rows), data[rows])
    assert np.array_equal(read(store, [3, 11]), data[[3, 11]])
    assert [part.start for part in decoded] == [0, 8]
    read(store, [20, 0])
    assert [part.start for part in decoded] == [0, 8, 0, 16][:2] + [part.start for part in decoded[2:]]
    assert len(store._cache) == 2
    store.close()


def test_the_cache_keeps_to_its_bytes(compressed):
    _, file = compressed
    chunk_bytes = 8 * 8 * 8 * 3
    store = ChunkedRows(file, ["images"], cache_chunks=8, cache_bytes=3 * chunk_bytes)
    read(store, range(64))
    assert store._cached_bytes == sum(chunk.nbytes for chunk in store._cache.values()) <= 3 * chunk_bytes
    tight = ChunkedRows(file, ["images"], cache_bytes=1)
    read(tight, range(64))
    assert len(tight._cache) == 1


def test_threads_and_a_forked_child_read_the_same(compressed):
    data, file = compressed
    store = ChunkedRows(file, ["images"], cache_chunks=2)
    wrong = []

    def work(seed):
        rows = np.random.default_rng(seed).integers(0, 64, 40)
        if not np.array_equal(read(store, rows), data[rows]):
            wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    pid = os.fork()
    if pid == 0:
        os._exit(0 if np.array_equal(read(store, [63, 1]), data[[63, 1]]) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_another_file_under_the_same_name_is_not_read(compressed):
    _, file = compressed
    store = ChunkedRows(file, ["images"])
    os.rename(file.path, f"{file.path}.old")
    with h5py.File(file.path, "w") as other:
        other["images"] = np.zeros((64, 8, 8, 3), np.uint8)
    with pytest.raises(FileChangedError, match="another file"):
        read(store, [0])
