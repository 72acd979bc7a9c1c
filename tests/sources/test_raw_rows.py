from __future__ import annotations

import os
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_trees import read

from fastload.errors import FileChangedError, SourceError
from fastload.sources.raw_rows import JoinedRows, MemoryRows, RawRows

SHAPES = {"HWC": (5, 4, 3), "CHW": (3, 5, 4), "WHC": (4, 5, 3)}
UPRIGHT = {"HWC": (0, 1, 2, 3), "CHW": (0, 2, 3, 1), "WHC": (0, 2, 1, 3)}


def random(shape, dtype, seed=0):
    return np.random.default_rng(seed).integers(0, np.iinfo(dtype).max + 1, shape).astype(dtype)


@pytest.mark.parametrize("axes", SHAPES)
@pytest.mark.parametrize("dtype", ["u1", "<u2", ">u2"])
@pytest.mark.parametrize(("offset", "gap"), [(0, 0), (7, 0), (3, 1)])
def test_rows_of_a_file_are_those_that_numpy_reads(tmp_path, axes, dtype, offset, gap):
    values = random((30, *SHAPES[axes]), dtype)
    path = tmp_path / "raw"
    path.write_bytes(bytes(offset) + b"".join(row.tobytes() + bytes(gap) for row in values) + b"tail")
    stride = values[0].nbytes + gap
    rows = RawRows.of(path, offset=offset, num_rows=30, shape=SHAPES[axes], dtype=dtype, stride=stride, axes=axes)
    expected = values.transpose(UPRIGHT[axes])
    assert rows.shape == (5, 4, 3) and rows.dtype.isnative and rows.dtype.itemsize == values.itemsize
    for indices in (range(30), range(4, 9), [29, 0, 3, 3, 17], [5], []):
        assert np.array_equal(read(rows, list(indices)), expected[list(indices)])
    taken = pickle.loads(pickle.dumps(rows)).take(np.array([9, 2, 21]))
    assert np.array_equal(read(taken, [2, 1]), expected[[21, 2]])
    memory = MemoryRows.of(values, axes)
    assert np.array_equal(read(memory, [4, 29, 0]), expected[[4, 29, 0]]) and memory.shape == (5, 4, 3)


def test_rows_in_memory_of_many_blocks_without_channels_or_in_fortran_order():
    values = random((60, 3, 70, 70), "u1")
    order = np.random.default_rng(1).permutation(60)
    assert np.array_equal(read(MemoryRows.of(values, "CHW"), order), values.transpose(0, 2, 3, 1)[order])
    masks = MemoryRows.of(np.asfortranarray(values[:, 0]))
    assert masks.shape == (70, 70) and masks.values.flags.c_contiguous


@given(
    counts=st.lists(st.integers(0, 7), min_size=1, max_size=4).filter(any),
    data=st.data(),
)
def test_joined_rows_are_the_concatenation(counts, data):
    parts = [random((count, 2, 3, 1), "u1", seed) for seed, count in enumerate(counts)]
    joined = JoinedRows.of([(MemoryRows.of(part), len(part)) for part in parts])
    total = sum(counts)
    indices = data.draw(st.lists(st.integers(0, total - 1), max_size=12))
    assert np.array_equal(read(joined, indices), np.concatenate(parts)[indices])
    order = np.array(data.draw(st.permutations(range(total))), np.int64)
    assert np.array_equal(read(joined.take(order), indices), np.concatenate(parts)[order][indices])


def test_rows_that_are_not_there_or_not_alike_are_refused_when_they_are_listed(tmp_path):
    (tmp_path / "raw").write_bytes(bytes(99))
    for name, reason in (("raw", "10 rows of 10 bytes reach to byte 100, the file has 99"), ("none", "No such file")):
        with pytest.raises(SourceError, match=reason):
            RawRows.of(tmp_path / name, offset=0, num_rows=10, shape=(5, 2, 1), dtype=np.uint8)
    parts = [(MemoryRows.of(np.zeros((1, *shape), np.uint8)), 1) for shape in ((2, 3, 1), (3, 2, 1))]
    with pytest.raises(SourceError, match=r"uint8 \(2, 3, 1\) and uint8 \(3, 2, 1\)"):
        JoinedRows.of(parts)


@pytest.mark.parametrize("indices", [[0, 1, 2], [5, 1]])
def test_a_file_cut_short_after_it_was_mapped_is_an_error_and_not_a_dead_process(tmp_path, indices):
    path = tmp_path / "raw"
    path.write_bytes(bytes(100_000))
    rows = RawRows.of(path, offset=0, num_rows=10, shape=(100, 100, 1), dtype=np.uint8)
    read(rows, [7, 3])
    os.truncate(path, 50_000)
    with pytest.raises(FileChangedError, match="written to or replaced"):
        read(rows, indices)
    path.unlink()
    with pytest.raises(FileChangedError, match="can no longer be opened"):
        read(rows, indices)


def test_threads_read_the_same_rows_also_into_a_part_of_a_larger_array(tmp_path):
    values = random((50, 6, 6, 3), "u1")
    (tmp_path / "raw").write_bytes(values.tobytes())
    rows = RawRows.of(tmp_path / "raw", offset=0, num_rows=50, shape=(6, 6, 3), dtype=np.uint8)
    for one in (rows, MemoryRows.of(values)):
        out = np.zeros((50, 6, 6, 4), np.uint8)
        one.read_rows(np.arange(50), out[..., :3])
        assert np.array_equal(out[..., :3], values) and not out[..., 3].any()

    def work(seed):
        order = np.random.default_rng(seed).permutation(50)
        return all(np.array_equal(read(rows, order), values[order]) for _ in range(20))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))
