"""The numbers of chunks, and where these lie: every byte of an object belongs to one of them, or to its header."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from remote_files import KINDS, write_kind

from fastload.format.header import Field, FileIdentity, PackedFile, RaggedField, open_hdf5, read_header, read_shard
from fastload.format.joined import as_index
from fastload.format.ragged import RaggedExtent
from fastload.format.shards import Shards
from fastload.remote.chunks import Chunk, ChunkTable, ShardLayout, joined_ranges, likely_header, without
from fastload.remote.headers import header_ranges


def index_of(rows: list[int], chunk_rows: list[int], fields: dict[str, Field]) -> PackedFile:
    """An index of shards of so many rows, whose images are in chunks of so many, -1: in none."""
    numbers: dict[str, Any] = {
        "num_rows": rows,
        "num_bytes": [10**9] * len(rows),
        "images_offset": [-1] * len(rows),
        "chunk_rows": chunk_rows,
        "shard": np.flatnonzero(rows),
        "first": np.zeros(np.count_nonzero(rows), np.int64),
        "rows": [number for number in rows if number],
    }
    names = tuple(f"{i}.h5" for i in range(len(rows)))
    shards = Shards(names, names, **{name: np.array(values, np.int64) for name, values in numbers.items()})
    identity = FileIdentity(0, 0, 0, 0, 0)
    return PackedFile(Path("x.h5"), 1, sum(rows), fields, {}, "", False, 0, identity, {}, shards)


def ragged_field(name: str, shard_bytes: list[int], chunk_bytes: int) -> Field:
    extent = RaggedExtent(0, sum(shard_bytes), chunk_bytes, 1)
    return RaggedField(name, np.dtype(np.uint8), (0, 0, 3), ragged=extent, shard_bytes=tuple(shard_bytes))


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=6).filter(lambda s: any(s[0])),
    st.booleans(),
    st.booleans(),
    st.integers(1, 50),
)
def test_numbers_of_chunks_agree_whichever_way_they_are_found(shards, masks, ragged, chunk_bytes):
    rows, chunk_rows = [n for n, _ in shards], [c for _, c in shards]
    fields = {"images": Field("images", np.dtype(np.uint8), (4, 4, 3)), "labels": Field("labels", np.dtype("i8"), ())}
    if masks:
        fields["depth"] = Field("depth", np.dtype(np.float32), (16, 16))
    lengths = [7 * n for n in rows]
    if ragged:
        fields["masks"] = ragged_field("masks", lengths, chunk_bytes)
    table = ChunkTable(index_of(rows, chunk_rows, fields))
    assert table.fields == tuple(name for name in fields if name != "labels")

    every = np.arange(table.num_chunks)
    shard, column, number = table.placed(every)
    chunks = [table.chunk(one) for one in every.tolist()]
    assert chunks == [Chunk(s, ("", *table.fields)[c], n) for s, c, n in zip(shard, column, number, strict=True)]
    assert len(set(chunks)) == table.num_chunks
    assert table.headers.tolist() == [chunks.index(Chunk(s, "", 0)) for s in range(len(rows))]
    for s in range(len(rows)):
        assert every[table.data_of(s)].tolist() == [i for i, one in enumerate(chunks) if one.shard == s and one.field]

    for name in table.rows:
        for s in range(len(rows)):
            there = np.arange(rows[s])
            found = table.of_rows(name, np.full(rows[s], s), there).tolist()
            assert all(row in table.rows_of(chunks[c]) for row, c in zip(there.tolist(), found, strict=True))
            mine = [one for one in chunks if one.shard == s and one.field == name]
            assert [row for one in mine for row in table.rows_of(one)] == there.tolist()
            assert {chunks[c] for c in found} == set(mine)
    if ragged:
        for s in range(len(rows)):
            offsets = 7 * np.arange(rows[s])
            mine = [i for i, one in enumerate(chunks) if one.shard == s and one.field == "masks"]
            assert len(mine) == -(-lengths[s] // chunk_bytes)
            for offset in offsets.tolist():
                asked = table.of_bytes("masks", s, np.array([offset]), np.array([7])).tolist()
                assert asked == [mine[i] for i in range(len(mine)) if i * chunk_bytes < offset + 7
                                 and (i + 1) * chunk_bytes > offset]  # fmt: skip
            if rows[s]:
                assert table.of_bytes("masks", s, offsets, np.full(rows[s], 7)).tolist() == mine


def opened_remotely(path: Path) -> PackedFile:
    """The header of a file as `open_remote` returns it, without a server."""
    file = read_header(path)
    return file if file.is_index else as_index(file)


def check_shard(path: Path, table: ChunkTable, shard: int) -> None:
    """Asserts that each byte of a shard's file belongs to one chunk, or else to its header."""
    size = path.stat().st_size
    header = header_ranges(path)
    times = np.zeros(size, np.int64)
    with open_hdf5(path) as hdf5:
        layout = ShardLayout(hdf5, table, shard)
        for number in range(table.num_chunks)[table.data_of(shard)]:
            for begin, stop in layout.ranges(table.chunk(number)):
                times[begin:stop] += 1
        assert times.max(initial=0) <= 1, f"{np.count_nonzero(times > 1)} bytes are part of several chunks"
        of_header = np.zeros(size, bool)
        for begin, stop in header:
            of_header[begin:stop] = True
        assert not (of_header & (times > 0)).any(), "bytes of the header are part of a chunk"
        large = np.zeros(size, bool)
        for name in table.fields:
            item = hdf5[name]
            if item.chunks is None:
                large[item.id.get_offset() :][: item.id.get_storage_size()] = True
                continue
            for i in range(item.id.get_num_chunks()):
                info = item.id.get_chunk_info(i)
                large[info.byte_offset : info.byte_offset + info.size] = True
    assert (large | of_header).all(), "bytes of neither"
    assert not (large & of_header).any()
    # HDF5 allocates whole chunks, also where the last one has fewer rows: what is behind these nobody fetches.
    missing = large & (times == 0)
    assert not missing.any() or not _holds_rows(path, table, missing)


def _holds_rows(path: Path, table: ChunkTable, missing: np.ndarray) -> bool:
    """Whether rows are others once these bytes are."""
    copy = path.with_suffix(".changed")
    shutil.copy(path, copy)
    try:
        data = np.memmap(copy, np.uint8, "r+")
        data[missing] = ~data[missing]
        data.flush()
        with h5py.File(path) as first, h5py.File(copy) as second:
            return any(not np.array_equal(first[name][()], second[name][()]) for name in table.fields)
    finally:
        copy.unlink()


@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_belongs_to_one_chunk_or_to_the_header(kind, tmp_path):
    path = write_kind(kind, tmp_path)
    file = opened_remotely(path)
    table = ChunkTable(file)
    assert table.num_chunks > 60
    for shard, name in enumerate(file.shards.names):
        check_shard(tmp_path / name, table, shard)


@pytest.mark.parametrize("kind", ["shards", "shards of jpeg", "linear", "jpeg"])
def test_the_index_says_where_the_header_of_plain_shards_lies(kind, tmp_path):
    path = write_kind(kind, tmp_path)
    file = opened_remotely(path)
    for shard, name in enumerate(file.shards.names):
        assert joined_ranges(likely_header(file, shard), 0) == header_ranges(tmp_path / name)


@given(
    st.integers(1, 40),
    st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)),
    st.tuples(*[st.sampled_from(["contiguous", "plain", "gzip"])] * 3),
    st.randoms(use_true_random=False),
)
def test_every_byte_of_a_file_of_another_program_belongs_to_one_chunk_or_the_header(
    tmp_path_factory, rows, chunk_rows, storage, random
):
    path = tmp_path_factory.getbasetemp() / "foreign.h5"
    shapes = {"images": (10, 10, 3), "masks": (10, 10), "depth": (40, 40)}
    rng = np.random.default_rng(rows)
    with h5py.File(path, "w") as file:
        items = []
        for (name, shape), size, how in zip(shapes.items(), chunk_rows, storage, strict=True):
            more: dict[str, Any] = {} if how == "contiguous" else {"chunks": (min(size, rows), *shape)}
            more |= {"compression": "gzip"} if how == "gzip" else {}
            items.append(file.create_dataset(name, (rows, *shape), np.uint8, **more))
        places = [(item, first) for item in items for first in range(0, rows, item.chunks[0] if item.chunks else 1)]
        random.shuffle(places)  # chunks of all fields lie among one another
        for item, first in places:
            some = slice(first, first + (item.chunks[0] if item.chunks else 1))
            item[some] = rng.integers(0, 256, item[some].shape, np.uint8)
        file["labels"] = np.arange(rows)
    file = opened_remotely(path)
    check_shard(path, ChunkTable(file), 0)


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6), st.lists(st.integers(0, 30), max_size=6)
)
def test_ranges_are_joined_and_taken_away_as_sets_of_bytes_are(pairs, cuts):
    ranges = [(min(pair), max(pair)) for pair in pairs]
    found = joined_ranges(ranges, 0)

    def bytes_of(some: list[tuple[int, int]]) -> set[int]:
        return {byte for begin, stop in some for byte in range(begin, stop)}

    assert bytes_of(found) == bytes_of(ranges)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(found))
    others = joined_ranges(list(zip(sorted(cuts)[::2], sorted(cuts)[1::2], strict=False)), 0)
    rest = without(found, others)
    assert bytes_of(rest) == bytes_of(found) - bytes_of(others)


def test_the_header_of_a_shard_is_read_from_its_header_alone(tmp_path):
    path = write_kind("shards", tmp_path / "whole")
    file = opened_remotely(path)
    (tmp_path / "sparse").mkdir()
    (tmp_path / "sparse" / "data.h5").write_bytes(path.read_bytes())
    for name in file.shards.names:
        whole = (path.parent / name).read_bytes()
        with open(tmp_path / "sparse" / name, "wb") as out:
            out.truncate(len(whole))
            for begin, stop in header_ranges(path.parent / name):
                out.seek(begin)
                out.write(whole[begin:stop])
    sparse = read_header(tmp_path / "sparse" / "data.h5")
    for number in range(len(file.shards.names)):
        assert read_shard(sparse, number).header_digest == file.shards.digests[number]
