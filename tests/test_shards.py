"""An index of shards reads as one file of the same rows would, and says what is wrong with a shard."""

from __future__ import annotations

import itertools
import os
import pickle
import resource
import shutil
import signal
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged_cases import varied_file, varied_rows
from small_files import write_random
from torch.utils.data import DataLoader

from fastload import ChunkSampler, FastLoader, PackedDataset
from fastload.errors import (
    FileChangedError,
    FormatError,
    MissingFileError,
    OptionError,
    OutputError,
    SourceError,
    StateError,
)
from fastload.estimate import estimate_file
from fastload.export import export_file
from fastload.format.header import PackedFile, read_header, read_shard
from fastload.format.ragged import Column
from fastload.format.shards import Shards
from fastload.inspection.info import inspect_file
from fastload.inspection.preview import make_preview
from fastload.inspection.shuffle_quality import measure_shuffles
from fastload.inspection.verify import verify_file
from fastload.pack import pack_images
from fastload.pack.index import index_files
from fastload.pack.plan import whole_pages
from fastload.plan import ChunkWindow, EpochPlan
from fastload.prefetch.inputs import PackedInput, shuffle_of
from fastload.read import store as store_module
from fastload.read.linear import MappedShards
from fastload.read.reader import open_columns, open_rows
from fastload.repack import append_images, merge_files, repack_file
from fastload.system import native
from fastload.transforms import RandomHorizontalFlip, RandomResizedCrop

SIZE = (16, 12, 3)
PAGES = (64, 64, 1)  # a row is one page


def shard(path: Path, rows: int, *, seed: int, splits: dict[str, int] | None = None, **options: object) -> Path:
    """Writes a shard whose keys begin with its name."""
    keys = Column(np.array([f"{path.stem}/{i:03}".encode() for i in range(rows)]))
    options = {"size": SIZE, "classes": "abc", "chunk_rows": 4, "columns": {"key": keys}} | options
    return write_random(path, rows=rows, seed=seed, **({"splits": splits} if splits else {}), **options)  # type: ignore[arg-type]


def gathered(file: Path, rows: np.ndarray, **options: object) -> dict[str, np.ndarray]:
    """What a `Rows` gives of an index."""
    header = read_header(file)
    names = [name for name, field in header.fields.items() if name != "key" and field.ragged is None]
    outs = {name: np.empty((len(rows), *header.fields[name].shape), header.fields[name].dtype) for name in names}
    reader = open_rows(header, names, **options)  # type: ignore[arg-type]
    reader.gather(rows, outs)
    reader.close()
    return outs


def of_one_file(file: Path, rows: np.ndarray) -> dict[str, np.ndarray]:
    with h5py.File(file) as hdf5:
        return {name: hdf5[name][()][rows] for name in hdf5}


@pytest.mark.parametrize("read", ["map", "pread"])
@pytest.mark.parametrize("size", [SIZE, PAGES])
@pytest.mark.parametrize("check", ["first", "always", None])
def test_rows_are_those_of_the_files_merged(tmp_path, read, size, check):
    counts = [7, 1, 12, 5]
    files = [shard(tmp_path / f"s{i}.h5", n, seed=i, size=size) for i, n in enumerate(counts)]
    index_files(files, tmp_path / "out.h5")
    merge_files(files, tmp_path / "one.h5")
    rows = np.random.default_rng(1).permutation(np.repeat(np.arange(25), 2))
    found, expected = (
        gathered(tmp_path / "out.h5", rows, read=read, check=check),
        of_one_file(tmp_path / "one.h5", rows),
    )
    assert found.keys() == expected.keys() - {"key"}
    for name, values in found.items():
        if name != "digest_fields":  # the packer merges other keys
            np.testing.assert_array_equal(values, expected[name], err_msg=name)
    joined = MappedShards.of(read_header(tmp_path / "out.h5")) is not None
    assert joined == (size == PAGES)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(any), min_size=1, max_size=5), st.integers(0, 99)
)
def test_splits_are_joined_by_name(tmp_path_factory, counts, seed):
    folder = tmp_path_factory.mktemp("shards")
    files = []
    for i, (train, val) in enumerate(counts):
        splits = {name: n for name, n in (("train", train), ("val", val)) if n}
        files.append(shard(folder / f"s{i}.h5", train + val, seed=i, splits=splits))
    report = index_files(files, folder / "out.h5")
    header = read_header(folder / "out.h5")
    assert {name: len(rows) for name, rows in header.splits.items()} == report.splits
    rows = np.random.default_rng(seed).integers(0, header.num_rows, 20)
    found = gathered(folder / "out.h5", rows)
    with h5py.File(folder / "out.h5") as virtual:  # as other programs see it
        for name, values in found.items():
            np.testing.assert_array_equal(values, virtual[name][()][rows], err_msg=name)
        names = virtual["split"].attrs["names"].tolist()
        every = virtual["split"][()]
    for name, run in header.splits.items():
        assert (every[run.start : run.stop] == names.index(name.encode())).all()
    shutil.rmtree(folder)


def test_a_shard_that_is_not_the_one_is_an_error_before_its_first_row(tmp_path):
    files = [shard(tmp_path / f"s{i}.h5", 6, seed=i) for i in range(3)]
    index_files(files, tmp_path / "out.h5")
    good = files[1].read_bytes()
    header = read_header(tmp_path / "out.h5")
    out = {"images": np.empty((2, *SIZE), np.uint8)}

    def read(rows: list[int]) -> None:
        reader = open_rows(header, ["images"], check="first")
        try:
            reader.gather(np.array(rows), out)
        finally:
            reader.close()

    files[1].unlink()
    read([0, 17])
    with pytest.raises(MissingFileError, match=r"out.h5: its shard s1.h5 is missing"):
        read([0, 6])
    shard(files[1], 6, seed=9)
    with pytest.raises(FileChangedError, match=r"shard s1.h5 is not the file that"):
        read([0, 6])
    files[1].write_bytes(good[:-100])
    with pytest.raises((FileChangedError, FormatError), match=r"s1.h5"):
        read([0, 6])
    outside = tmp_path.parent / f"{tmp_path.name}-outside.h5"
    outside.write_bytes(good)
    files[1].unlink()
    files[1].symlink_to(outside)
    with pytest.raises(FormatError, match="a link that leaves the folder"):
        read([0, 6])
    files[1].unlink()
    files[1].write_bytes(good)
    read([0, 6])


def test_a_shard_that_is_truncated_in_use_is_an_error_and_not_the_end_of_the_process(tmp_path):
    files = [shard(tmp_path / f"s{i}.h5", 6, seed=i, size=PAGES) for i in range(3)]
    index_files(files, tmp_path / "out.h5")
    reader = open_rows(read_header(tmp_path / "out.h5"), ["images"])
    out = {"images": np.empty((18, *PAGES), np.uint8)}
    reader.gather(np.arange(18), out)
    os.truncate(files[2], 5000)
    with pytest.raises(FileChangedError, match=r"s2.h5"):
        reader.gather(np.arange(18), out)
    reader.gather(np.arange(12), {"images": out["images"][:12]})
    reader.close()


def test_few_files_are_open_at_a_time(tmp_path, monkeypatch):
    files = [shard(tmp_path / f"s{i}.h5", 2, seed=i) for i in range(12)]
    index_files(files, tmp_path / "out.h5")
    monkeypatch.setattr(resource, "getrlimit", lambda what: (40, 40))
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    reader = open_rows(read_header(tmp_path / "out.h5"), ["images", "labels"], check="first")
    out = {"images": np.empty((1, *SIZE), np.uint8), "labels": np.empty(1, np.int64)}
    for row in [*range(24), *range(24)]:
        reader.gather(np.array([row]), out)
        assert len(reader.store.files.opened) <= 5
    every = {"images": np.empty((24, *SIZE), np.uint8), "labels": np.empty(24, np.int64)}
    order = np.random.default_rng(0).permutation(24)
    reader.gather(order, every)  # of more shards than may be open
    assert len(reader.store.files.opened) <= 5
    expected = gathered(tmp_path / "out.h5", order)
    assert all((values == expected[name]).all() for name, values in every.items())
    assert not reader.compares, "what was compared is remembered of closed shards, too"
    if before:
        assert len(os.listdir("/proc/self/fd")) <= before + 2 * 5 + 1
    reader.close()


def test_a_fork_while_a_thread_opens_a_shard_reads_all_of_them(tmp_path, monkeypatch):
    files = [shard(tmp_path / f"s{i}.h5", 6, seed=i) for i in range(3)]
    index_files(files, tmp_path / "out.h5")
    reader = open_rows(read_header(tmp_path / "out.h5"), ["images"])
    out = {"images": np.empty((18, *SIZE), np.uint8)}
    expected = np.concatenate([of_one_file(file, np.arange(6))["images"] for file in files])
    opening, go_on = threading.Event(), threading.Event()

    def slow(*words: object) -> PackedFile:
        opening.set()
        go_on.wait()
        return read_shard(*words)

    monkeypatch.setattr(store_module, "read_shard", slow)
    thread = threading.Thread(target=reader.gather, args=(np.array([0]), {"images": np.empty((1, *SIZE), np.uint8)}))
    thread.start()
    opening.wait()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(60)  # instead of waiting for ever
            monkeypatch.undo()
            reader.gather(np.arange(18), out)
            os._exit(0 if (out["images"] == expected).all() else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    go_on.set()
    thread.join()
    reader.close()


def test_what_is_damaged_has_the_number_that_it_has_in_the_index(tmp_path):
    files = [shard(tmp_path / f"s{i}.h5", 6, seed=i) for i in range(3)]
    index_files(files, tmp_path / "out.h5")
    assert verify_file(tmp_path / "out.h5").ok
    offset = read_header(files[2]).fields["images"].offset
    with open(files[2], "r+b") as file:
        file.seek((offset or 0) + 3 * 16 * 12 * 3)
        file.write(b"\x00\xff\x00\xff")
    report = verify_file(tmp_path / "out.h5")
    assert [row.row for row in report.damaged] == [15] and not report.ok
    assert verify_file(tmp_path / "out.h5", shard=1).ok and not verify_file(tmp_path / "out.h5", shard=2).ok
    with pytest.raises(OptionError, match="no shard 3"):
        verify_file(tmp_path / "out.h5", shard=3)
    reader = open_rows(read_header(tmp_path / "out.h5"), ["images"], check="first")
    with pytest.raises(FormatError, match=r"s2.h5: sample 's2/003' \(row 3\)") as caught:
        reader.gather(np.array([0, 15]), {"images": np.empty((2, *SIZE), np.uint8)})
    assert caught.value.rows == (15,)  # type: ignore[attr-defined]
    reader.close()


@pytest.mark.parametrize("group", ["shards/num_rows", "pieces/first", "shards/name", "shards/fields"])
def test_an_index_that_was_changed_is_refused(tmp_path, group):
    files = [shard(tmp_path / f"s{i}.h5", 6, seed=i) for i in range(2)]
    index_files(files, tmp_path / "out.h5")
    with h5py.File(tmp_path / "out.h5", "r+") as file:
        values = file[group][()]
        values[0] = b"../s" if values.dtype.kind == "S" else values[0] + 1
        file[group][()] = values
    with pytest.raises(FormatError, match="not as it was written"):
        read_header(tmp_path / "out.h5")


def test_virtual_datasets_that_say_something_else_are_found(tmp_path):
    files = [shard(tmp_path / f"s{i}.h5", 6, seed=i) for i in range(2)]
    index_files(files, tmp_path / "out.h5")
    assert inspect_file(tmp_path / "out.h5").num_shards == 2
    with h5py.File(tmp_path / "out.h5", "r+") as file:
        layout = h5py.VirtualLayout((12, *SIZE), np.uint8)
        for at, name in ((0, "s1.h5"), (6, "s0.h5")):
            layout[at : at + 6] = h5py.VirtualSource(name, "images", (6, *SIZE), np.uint8)
        del file["images"]
        file.create_virtual_dataset("images", layout)
    for check in (inspect_file, verify_file):
        with pytest.raises(FormatError, match="`images` leads other programs to other rows"):
            check(tmp_path / "out.h5")


def test_files_that_cannot_be_shards_of_one_dataset_are_named(tmp_path):
    one = shard(tmp_path / "one.h5", 5, seed=0)
    with pytest.raises(SourceError, match=r"two.h5: holds the same as .*one.h5"):
        shutil.copy(one, tmp_path / "two.h5")
        index_files([one, tmp_path / "two.h5"], tmp_path / "out.h5")
    other = shard(tmp_path / "other.h5", 5, seed=1, classes="abd")
    with pytest.raises(SourceError, match=r"`labels`: .*a, b, c in .*one.h5, .*a, b, d in .*other.h5"):
        index_files([one, other], tmp_path / "out.h5")
    small = shard(tmp_path / "small.h5", 5, seed=1, size=(8, 12, 3))
    with pytest.raises(SourceError, match=r"`images`: rows of uint8 \(16, 12, 3\) in .*small.h5"):
        index_files([one, small], tmp_path / "out.h5")
    (tmp_path / "sub").mkdir()
    with pytest.raises(OptionError, match=r"one.h5: lies outside of .*sub"):
        index_files([one], tmp_path / "sub/out.h5")
    index_files([one], tmp_path / "out.h5")
    with pytest.raises(SourceError, match="is an index itself"):
        index_files([tmp_path / "out.h5"], tmp_path / "more.h5")
    assert not (tmp_path / "more.h5").exists()


@pytest.fixture
def of_varied(tmp_path):
    """An index of three files of rows of varying length with masks, and one file of the same rows."""
    rows = varied_rows()
    files = [
        varied_file(tmp_path / f"s{i}.h5", rows[first:stop], masks=True, prefix=f"{i}-", splits={"all": stop - first})
        for i, (first, stop) in enumerate(itertools.pairwise([0, 5, 6, len(rows)]))
    ]
    index_files(files, tmp_path / "out.h5")
    merge_files(files, tmp_path / "one.h5")
    return tmp_path / "out.h5", tmp_path / "one.h5"


def test_sizes_and_keys_of_more_files_than_may_be_open_are_those_of_one_file(tmp_path, monkeypatch):
    rows = varied_rows()
    files = [
        varied_file(tmp_path / f"s{i:02}.h5", [row], masks=True, prefix=f"{i}-", splits={"all": 1})
        for i, row in enumerate(rows)
    ]
    index_files(files, tmp_path / "out.h5")
    merge_files(files, tmp_path / "one.h5")
    monkeypatch.setattr(resource, "getrlimit", lambda what: (40, 40))  # four files
    every = np.random.default_rng(0).permutation(len(rows))
    index, one = (PackedDataset(tmp_path / name) for name in ("out.h5", "one.h5"))
    assert (PackedInput(index).sizes() == PackedInput(one).sizes()).all()
    assert index.keys_of(every) == one.keys_of(every)
    with closing(open_rows(index.file, ["images"])) as reader:
        reader.encoded("images").part("bytes", every)
        assert len(reader.store.files.opened) <= 4


def test_an_index_that_names_itself_is_refused(tmp_path):
    files = [shard(tmp_path / f"s{i}.h5", 6, seed=i) for i in range(2)]
    index_files(files, tmp_path / "out.h5")
    os.rename(tmp_path / "out.h5", tmp_path / "s1.h5")
    with pytest.raises(FormatError, match=r"s1.h5: names itself as a shard\. Make the index again"):
        read_header(tmp_path / "s1.h5")


def test_samples_of_varying_size_are_those_of_one_file(of_varied):
    index, one = (PackedDataset(path, fields=("images", "masks", "labels", "row")) for path in of_varied)
    for mine, theirs in zip(index, one, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert torch.equal(a, b)
    with h5py.File(of_varied[0]) as virtual, h5py.File(of_varied[1]) as file:
        for row in range(len(one)):
            at, length = int(virtual["images_offset"][row]), int(virtual["images_bytes"][row])
            first = int(file["images_offset"][row])
            assert (virtual["images"][at : at + length] == file["images"][first : first + length]).all()


@pytest.mark.parametrize("read", ["map", "pread"])
@pytest.mark.parametrize("native_code", [True, False])
def test_crops_of_varying_sizes_are_those_of_one_file(of_varied, read, native_code, monkeypatch):
    if not native_code:
        monkeypatch.setattr(native, "library", lambda: None)
        monkeypatch.setattr(native, "can_make", lambda dtype: False)
    made = []
    for path in of_varied:
        dataset = PackedDataset(path, fields=("images", "masks", "labels"), read=read)
        transform = [RandomResizedCrop(8), RandomHorizontalFlip()]
        with closing(FastLoader(dataset, 4, shuffle="full", seed=2, transform=transform)) as loader:
            made.append([tuple(one.clone() for one in batch) for _ in range(2) for batch in loader])
    for mine, theirs in zip(*made, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def cut_up(one: Path, cuts: list[int], chunk_rows: int, *, codec: str = "keep") -> Path:
    """Writes the rows of a file as shards, with chunks of that many rows, and returns their index."""
    files = [one.with_name(f"s{number}.h5") for number in range(len(cuts) - 1)]
    chunk_bytes = chunk_rows * read_header(one).fields["images"].row_bytes
    for file, (first, stop) in zip(files, itertools.pairwise(cuts), strict=True):
        np.save(one.with_name("rows.npy"), np.arange(first, stop))
        choice = {"rows": one.with_name("rows.npy")}
        repack_file(one, file, **choice, chunk_bytes=chunk_bytes, codec=codec)
    index_files(files, one.with_name("out.h5"))
    return one.with_name("out.h5")


@pytest.mark.parametrize("shuffle", ["chunk", "full", False])
@pytest.mark.parametrize("size", [SIZE, PAGES])
def test_batches_are_those_of_one_file(tmp_path, shuffle, size):
    shard(tmp_path / "one.h5", 22, seed=0, size=size, splits={"train": 15, "val": 7})
    cut_up(tmp_path / "one.h5", [0, 8, 13, 22], 4)
    made = []
    for name in ("one.h5", "out.h5"):
        dataset = PackedDataset(tmp_path / name, "train", fields=("images", "labels", "split", "row"))
        with closing(FastLoader(dataset, 3, shuffle=shuffle, seed=4, ends="exact")) as loader:
            made.append([tuple(one.clone() for one in batch) for _ in range(2) for batch in loader])
    for mine, theirs in zip(*made, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@given(data=st.data())
def test_an_index_has_the_order_of_one_file_whatever_its_shards_ranks_and_ends(tmp_path_factory, data):
    """Rows of every rank, batch by batch, in two epochs, and when other ranks go on from a state within one."""
    folder = tmp_path_factory.mktemp("order")
    counts = data.draw(st.lists(st.integers(1, 25), min_size=2, max_size=4))
    rows, chunk_rows = sum(counts), data.draw(st.integers(1, 9))
    val = data.draw(st.integers(0, rows - 1))
    splits = {"train": rows - val, **({"val": val} if val else {})}
    shard(folder / "one.h5", rows, seed=0, chunk_rows=chunk_rows, splits=splits)
    codec = data.draw(st.sampled_from(["keep", "gzip"]))
    index = cut_up(folder / "one.h5", [0, *itertools.accumulate(counts)], chunk_rows, codec=codec)
    shuffles = [True, False, "full", ChunkWindow(1), ChunkWindow(2), ChunkWindow(3)]
    options = {
        "shuffle": data.draw(st.sampled_from(shuffles)),
        "ends": data.draw(st.sampled_from(["pad", "exact"])),
        "seed": data.draw(st.integers(0, 9)),
    }
    world_size, batch_size, then = (data.draw(st.integers(1, 4)) for _ in range(3))
    split = data.draw(st.sampled_from([None, "train"]))

    def plans(path: Path, **more: object) -> list[list[list[tuple[list[int], list[bool]]]]]:
        source = PackedInput(PackedDataset(path, split, check=None))
        plan = EpochPlan(
            source.plan_rows, chunk_rows=source.chunk_rows, world_size=world_size, batch_size=batch_size,
            **{**options, "shuffle": shuffle_of(source, options["shuffle"], cached=True)},
        )  # fmt: skip
        half = plan.segments_after(plan.num_steps // 2)
        return [
            [[(batch.rows.tolist(), batch.valid.tolist()) for batch in one.batches(rank)]]
            for one in (plan, replace(plan, epoch=1), replace(plan, segments=half, world_size=then))
            for rank in range(one.world_size)
        ]

    assert plans(index) == plans(folder / "one.h5")
    assert read_header(index).fields["images"].chunk_rows == read_header(folder / "one.h5").fields["images"].chunk_rows
    shutil.rmtree(folder)


@pytest.mark.parametrize("options", [{"size": 16}, {"store": "source"}, {"size": 16, "codec": "gzip"}])
@pytest.mark.parametrize("shards", [3, 17])
def test_packed_in_shards_or_in_one_file_batches_are_the_same(photos, tmp_path, options, shards):
    options = {"workers": 0, "chunk_bytes": 5000, **options}
    pack_images(photos, tmp_path / "one.h5", **options)
    pack_images(photos, tmp_path / "out.h5", shards=shards, **options)
    for share in ((0, 1), (1, 3)):
        found, expected = (
            [batch.rows.tolist() for batch in FastLoader(tmp_path / name, 4, seed=3, share=share, batch="list")]
            for name in ("out.h5", "one.h5")
        )
        assert found == expected


def test_a_state_of_an_index_is_refused_by_a_file_of_the_same_rows(tmp_path):
    shard(tmp_path / "one.h5", 22, seed=0)
    cut_up(tmp_path / "one.h5", [0, 8, 22], 4)
    with closing(FastLoader(tmp_path / "out.h5", 4)) as loader:
        state = loader.state_dict()
    with closing(FastLoader(tmp_path / "one.h5", 4)) as loader, pytest.raises(StateError, match="other data"):
        loader.load_state_dict(state)


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), min_size=1, max_size=5),
    st.integers(1, 12),
)
def test_chunks_of_shards_that_hold_a_chunk_of_the_plan_are_counted(counts, chunk_rows):
    rows, sizes = np.array(counts).T
    every = np.zeros(len(rows), np.int64)
    numbers = {"num_rows": rows, "chunk_rows": sizes, "rows": rows}
    numbers |= dict.fromkeys(("num_bytes", "images_offset", "first"), every)
    names = tuple(map(str, range(len(rows))))
    shards = Shards(names, names, shard=np.arange(len(rows)), **numbers)
    shard, there = shards.locate(np.arange(rows.sum()))
    chunks = list(zip(shard.tolist(), (there // sizes[shard]).tolist(), strict=True))
    most = max(len(set(chunks[at : at + chunk_rows])) for at in range(0, len(chunks), chunk_rows))
    assert shards.chunks_of(chunk_rows) == most


def test_batches_of_several_splits_are_those_of_one_file(photos, tmp_path):
    for i, image in enumerate(sorted(photos.rglob("*.jpg"))):
        image.rename(photos / f"{'train' if i % 3 else 'val'}-{image.parent.name}-{image.name}")
    for image in list(photos.glob("*.jpg")):
        split, label, name = image.name.split("-")
        (photos / split / label).mkdir(parents=True, exist_ok=True)
        image.rename(photos / split / label / name)
    options = {"workers": 0, "size": 16, "chunk_bytes": 16 * 16 * 3 * 4}
    pack_images(photos, tmp_path / "one.h5", **options)
    assert len(pack_images(photos, tmp_path / "out.h5", shards=3, **options).splits) == 2
    for shuffle in (True, "full"):
        found, expected = (
            [batch.rows.tolist() for batch in FastLoader(PackedDataset(tmp_path / name), 8, shuffle=shuffle, seed=3)]
            for name in ("out.h5", "one.h5")
        )
        assert found == expected


def test_a_percent_sign_in_names_leads_other_programs_to_the_rows(photos, tmp_path):
    for name in ("c%.h5", "p%%q.h5", "a%d.h5"):
        pack_images(photos, tmp_path / name, workers=0, size=16, shards=2)
        with h5py.File(tmp_path / name) as file:
            assert file["images"][()].any(axis=(1, 2, 3)).all()
        assert verify_file(tmp_path / name, workers=0).ok


def test_worker_processes_read_an_index_whichever_way_they_start(tmp_path):
    files = [shard(tmp_path / f"s{i}.h5", 6, seed=i) for i in range(3)]
    index_files(files, tmp_path / "out.h5")
    dataset = PackedDataset(tmp_path / "out.h5")
    expected = [dataset[row][0] for row in range(18)]
    for method in ("fork", "forkserver"):
        loader = DataLoader(dataset, 3, sampler=ChunkSampler(dataset), num_workers=2, multiprocessing_context=method)
        seen = torch.cat([images for images, _ in loader])
        assert sorted(image.sum().item() for image in seen) == sorted(image.sum().item() for image in expected)
    assert pickle.loads(pickle.dumps(dataset))[17][0].equal(expected[17])


def test_an_index_is_copied_and_exported_like_a_file(of_varied, tmp_path):
    index, one = of_varied
    repack_file(index, tmp_path / "again.h5")
    for mine, theirs in zip(PackedDataset(tmp_path / "again.h5"), PackedDataset(one), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    report = export_file(index, tmp_path / "images")
    assert report.num_images == read_header(one).num_rows
    make_preview(index, tmp_path / "index.png")
    make_preview(one, tmp_path / "one.png")
    measure_shuffles(index, batch_size=2)


def test_shards_whose_splits_have_other_numbers_are_copied(tmp_path):
    """What the index says of a split is not what the shard's digests are of."""
    shard(tmp_path / "a.h5", 5, seed=0, splits={"train": 3, "val": 2})
    shard(tmp_path / "long name.h5", 4, seed=1, splits={"val": 4})
    index_files([tmp_path / "a.h5", tmp_path / "long name.h5"], tmp_path / "out.h5")
    merge_files([tmp_path / "a.h5", tmp_path / "long name.h5"], tmp_path / "one.h5")
    repack_file(tmp_path / "out.h5", tmp_path / "again.h5")
    packed_alike(tmp_path / "one.h5", tmp_path / "again.h5")
    with h5py.File(tmp_path / "long name.h5", "r+") as file:
        file["labels"][1] = 2
    with pytest.raises(SourceError, match=r"values of 1 rows .*: row 6 \(long name/001\)"):
        repack_file(tmp_path / "out.h5", tmp_path / "never.h5")
    with pytest.raises(OptionError, match="is an index, whose shards stay as they are"):
        append_images(tmp_path / "out.h5", tmp_path)


@pytest.fixture
def photos(image_folder):
    """A folder of images of one size, two classes, in two splits."""
    image_folder(per_class=12, name="photos/train")
    return image_folder(per_class=5, name="photos/val", seed=1).parent


def packed_alike(one: Path, index: Path) -> None:
    """Asserts that an index holds the rows of a file, in its order."""
    a, b = read_header(one), read_header(index)
    assert (a.num_rows, a.splits, list(a.fields)) == (b.num_rows, b.splits, list(b.fields))
    with open_columns(a) as mine, open_columns(b) as theirs:
        # Offsets are of all shards' bytes, and so is the digest of a row that has one.
        differ = {"images", "images_offset", *(["digest_fields"] if "images_offset" in a.fields else [])}
        for name in a.fields.keys() - differ:
            np.testing.assert_array_equal(mine[name][()], theirs[name][()], err_msg=name)
    for x, y in zip(PackedDataset(one), PackedDataset(index), strict=True):
        assert torch.equal(x[0], y[0])


@pytest.mark.parametrize(
    "options",
    [{"size": 16}, {"size": (9, 7), "chunk_bytes": 700}, {"store": "source"}, {"size": 16, "codec": "gzip"},
     {"size": 16, "shuffle": False}, {"max_size": 12, "store": "jpeg:80"}],
)  # fmt: skip
def test_shards_hold_what_one_file_holds(photos, tmp_path, options):
    whole = pack_images(photos, tmp_path / "one.h5", workers=0, **options)
    report = pack_images(photos, tmp_path / "out.h5", workers=0, shards=5, spread=2, **options)
    packed_alike(tmp_path / "one.h5", tmp_path / "out.h5")
    names = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("0*/*.h5"))
    assert names == sorted(f"{i % 2:02}/out-{i:05}-of-00005.h5" for i in range(5))
    for name in ("num_samples", "image_shape", "dtype", "fields", "splits", "converted", "encodings", "pixel_bytes"):
        assert getattr(report, name) == getattr(whole, name), name
    assert report.num_shards == 5 and whole.num_shards is None
    assert verify_file(tmp_path / "out.h5", source=photos, workers=0).ok
    before = {path: path.read_bytes() for path in tmp_path.glob("0*/*.h5")}
    pack_images(photos, tmp_path / "out.h5", workers=0, shards=5, spread=2, overwrite=True, **options)
    assert before == {path: path.read_bytes() for path in before}, "shards are the same bytes each time"


def test_sizes_are_estimated_of_shards_that_are_compressed(photos, tmp_path):
    pack_images(photos, tmp_path / "out.h5", workers=0, size=16, codec="gzip", shards=3)
    kept = 0
    for shard in tmp_path.glob("out-*.h5"):
        with h5py.File(shard) as file:
            kept += file["images"].id.get_storage_size()
    found = estimate_file(tmp_path / "out.h5")
    assert found is not None and found.stores[0].store == "as it is" and found.stores[0].bytes == kept


def test_pixels_of_shards_fill_whole_pages_where_they_can():
    assert whole_pages(72, 218 * 178 * 3, 10**6) == (72, 9216)
    rows, step = whole_pages(2730, 32 * 32 * 3, 10**5)
    assert rows == 2730 and step * 3072 % 4096 == 0 == step % rows
    rows, step = whole_pages(73, 218 * 178 * 3, 10_000)  # else a shard would have 74,752 rows
    assert rows == 72 and step == 9216


def test_what_is_packed_of_shards_is_kept(photos, tmp_path):
    options = {"workers": 0, "size": 16, "chunk_bytes": 16 * 16 * 3 * 4, "shards": 4}
    pack_images(photos, tmp_path / "out.h5", **options)
    shards = sorted(tmp_path.glob("out-*.h5"))
    kept = {path: path.stat().st_mtime_ns for path in shards if path != shards[2]}
    lost = shards[2].read_bytes()
    (tmp_path / "out.h5").unlink()
    shards[2].unlink()
    report = pack_images(photos, tmp_path / "out.h5", **options)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept and shards[2].read_bytes() == lost
    assert 0 < report.chunks_decoded < report.chunks and report.chunks_kept == report.chunks - report.chunks_decoded
    (tmp_path / "out.h5").unlink()
    with pytest.raises(OutputError, match=r"out-00000-of-00004.h5: exists"):
        pack_images(photos, tmp_path / "out.h5", **{**options, "size": 17})
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    for wrong in ({"shards": 1000}, {"shards": 0}, {"shard_bytes": 10**6}, {"shards": None, "spread": 2}):
        with pytest.raises(OptionError):
            pack_images(photos, tmp_path / "more.h5", **{**options, **wrong})
    pack_images(photos, tmp_path / "few.h5", **{**options, "shards": None, "shard_bytes": 20 * 16 * 16 * 3})
    assert inspect_file(tmp_path / "few.h5").num_shards == 2


def test_a_shard_is_kept_whatever_changes_in_the_others(photos, tmp_path):
    options = {"workers": 0, "size": 16, "chunk_bytes": 16 * 16 * 3 * 4, "shards": 4}
    pack_images(photos, tmp_path / "out.h5", **options)
    os.utime(next(photos.rglob("*.jpg")), (1, 1))
    (tmp_path / "out.h5").unlink()
    with pytest.raises(OutputError, match=r"out-0000\d-of-00004.h5: exists"):
        pack_images(photos, tmp_path / "out.h5", **options)
    report = pack_images(photos, tmp_path / "out.h5", **options, overwrite=True)
    assert 0 < report.chunks_decoded < report.chunks / 2, "one shard of four"


def test_a_sample_that_cannot_be_read_is_left_out_of_its_shard(photos, tmp_path):
    bad = sorted(photos.rglob("*.jpg"))[5]
    bad.write_bytes(bad.read_bytes()[:-200])
    options = {"workers": 0, "size": 16, "on_error": "skip"}
    whole = pack_images(photos, tmp_path / "one.h5", **options)
    report = pack_images(photos, tmp_path / "out.h5", shards=3, **options)
    assert [key for key, _ in report.skipped] == [key for key, _ in whole.skipped] and len(report.skipped) == 1
    packed_alike(tmp_path / "one.h5", tmp_path / "out.h5")
