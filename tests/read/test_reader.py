"""Every way of reading gives the file's rows, byte for byte."""

from __future__ import annotations

import gc
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastload.errors import DamagedRowError, FileChangedError, MissingFileError, OptionError
from fastload.format.header import read_header
from fastload.format.ragged import Column
from fastload.read.reader import Rows, image_axes, open_rows
from fastload.system import native
from sample_files import write_packed

N = 37


def images(count: int = N, shape: tuple[int, ...] = (9, 10, 3)) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (count, *shape), dtype=np.uint8)


def packed(folder: Path) -> Path:
    labels = Column(np.arange(N, dtype=np.int64) * 3)
    return write_packed(folder / "a.h5", images(), {"labels": labels}, masks=images(shape=(9, 10)), chunk_rows=8)


def foreign(folder: Path, name: str, data: np.ndarray, **options) -> Path:
    path = folder / f"{name}.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=data, **options)
        file.create_dataset("labels", data=np.arange(len(data), dtype=np.uint8))
    return path


def gathered(reader: Rows, rows: np.ndarray, *names: str) -> dict[str, np.ndarray]:
    fields = reader.file.fields
    outs = {n: np.empty((len(rows), *fields[n].shape), fields[n].dtype.newbyteorder("=")) for n in names}
    assert reader.gather(rows, outs) == sum(out.nbytes for out in outs.values())
    return outs


@pytest.fixture(params=["map", "pread"])
def reader(request, tmp_path):
    reader = open_rows(read_header(packed(tmp_path)), ["images", "masks", "labels"], request.param)
    yield reader
    reader.close()


def test_any_rows_come_back_as_they_were_written(reader):
    rows = np.tile(np.array([36, 0, 5, 5, 6, 7, 8, 2, 36], dtype=np.int64), 60)  # more than are copied at once
    outs = gathered(reader, rows, "images", "masks", "labels")
    assert np.array_equal(outs["images"], images()[rows])
    assert np.array_equal(outs["masks"], images(shape=(9, 10))[rows])
    assert np.array_equal(outs["labels"], rows * 3)
    for row in (-1, N):  # named, and not clipped
        with pytest.raises(IndexError, match=rf"row {row} is outside 0..{N - 1}"):
            gathered(reader, np.array([0, row]), "labels")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.integers(0, N - 1), max_size=60))
def test_order_repeats_and_neighbours_do_not_matter(reader, rows):
    rows = np.array(rows, dtype=np.int64)
    assert np.array_equal(gathered(reader, rows, "images")["images"], images()[rows])


def test_threads_and_a_forked_child_share_a_reader_which_cannot_be_pickled(reader):
    def read(seed):
        rows = np.random.default_rng(seed).integers(0, N, 50)
        return np.array_equal(gathered(reader, rows, "images")["images"], images()[rows])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(40)))
    pid = os.fork()
    if pid == 0:
        os._exit(0 if read(99) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    with pytest.raises(TypeError, match="PackedDataset"):
        pickle.dumps(reader)


def test_a_file_that_is_written_to_or_truncated_while_open_is_an_error_and_not_a_dead_process(reader):
    with open(reader.file.path, "r+b") as file:
        file.write(b"x")
    os.utime(reader.file.path, ns=(1, 1))
    with pytest.raises(FileChangedError, match="written to"):
        gathered(reader, np.array([0]), "images")
    os.truncate(reader.file.path, 5000)
    with pytest.raises(FileChangedError, match=r"truncated from [\d,]+ to 5,000 bytes"):
        gathered(reader, np.array([0]), "images")


def test_a_file_replaced_or_gone_since_its_header_was_read_is_an_error(tmp_path):
    header = read_header(packed(tmp_path))
    os.rename(header.path, tmp_path / "old.h5")
    with pytest.raises(MissingFileError, match="gone"):
        gathered(open_rows(header, ["images"]), np.array([0]), "images")
    write_packed(header.path, 255 - images(), masks=images(shape=(9, 10)), chunk_rows=8)
    with pytest.raises(FileChangedError, match="another file"):
        gathered(open_rows(header, ["images"]), np.array([0]), "images")


def test_unknown_fields_and_ways_to_read_are_refused_and_close_is_final_and_may_be_repeated(reader):
    with pytest.raises(OptionError, match=r"no field 'labelz'; it has images, masks, labels"):
        open_rows(reader.file, ["labelz"])
    with pytest.raises(OptionError, match='"map" or "pread"'):
        open_rows(reader.file, ["images"], "mmap")
    reader.close()
    reader.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        gathered(reader, np.array([0]), "images")


def test_a_reader_that_nobody_has_any_more_closes_its_files(tmp_path):
    path = packed(tmp_path)
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("this system does not say which files are open")
    gc.disable()
    try:
        reader = open_rows(read_header(path), ["images"])
        gathered(reader, np.array([0]), "images")
        fd = reader.store.files.opened[0].fd
        assert os.readlink(f"/proc/self/fd/{fd}") == str(path)
        del reader
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lzf", {"chunks": (6, 9, 10, 3), "compression": "lzf", "fletcher32": True}),
        ("cut", {"chunks": (10, 3, 5, 2)}),
        ("late", {"chunks": (8, 9, 10, 3), "maxshape": (None, 9, 10, 3)}),
        ("contiguous", {}),
        ("big chunks", {"chunks": (N, 9, 10, 3)}),
    ],
)
@pytest.mark.parametrize("read", ["map", "pread"])
def test_foreign_layouts_and_filters_are_read(tmp_path, name, options, read):
    reader = open_rows(read_header(foreign(tmp_path, name, images(), **options)), ["images", "labels"], read)
    rows = np.random.default_rng(0).integers(0, N, 100)
    outs = gathered(reader, rows, "images", "labels")
    assert np.array_equal(outs["images"], images()[rows])
    assert np.array_equal(outs["labels"], rows)
    reader.close()


def test_other_byte_orders_are_converted_and_unwritten_datasets_read_as_their_fill_value(tmp_path):
    wide = images().astype(np.uint16) * 257
    with h5py.File(tmp_path / "be.h5", "w") as file:
        file.create_dataset("images", data=wide.astype(">u2"))
        file.create_dataset("boxes", (N, 4), np.int32, fillvalue=7)
    reader = open_rows(read_header(tmp_path / "be.h5"), ["images", "boxes"])
    rows = np.array([5, 1, 30])
    outs = gathered(reader, rows, "images", "boxes")
    assert np.array_equal(outs["images"], wide[rows])
    assert (outs["boxes"] == 7).all()


def test_axes_of_foreign_images_follow_from_their_shape(tmp_path):
    axes = {(7, 5, 3): "HWC", (3, 7, 5): "CHW", (7, 5): "HW", (1, 7, 4): "HWC", (1, 28, 28): "CHW"}
    found = {shape: image_axes(read_header(foreign(tmp_path, "x", images(shape=shape)))) for shape in axes}
    assert found == axes


@pytest.mark.parametrize("compiled", [True, False])
def test_of_a_batch_some_of_whose_rows_were_compared_before_the_others_are(tmp_path, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(native, "library", lambda: None)
    data = np.random.default_rng(0).integers(0, 256, (8, 9, 10, 3), np.uint8)
    path = write_packed(tmp_path / "a.h5", data)
    with h5py.File(path, "r+") as file:
        file["images"][5, 0, 0, 0] ^= 1
    reader = open_rows(read_header(path), ["images"], check="first")
    out = {"images": np.empty((3, *data.shape[1:]), np.uint8)}
    for rows in ([0, 1, 1], [1, 2, 0], [2, 3, 3]):
        reader.gather(np.array(rows), out)
        assert np.array_equal(out["images"], data[rows])
    with pytest.raises(DamagedRowError, match="row 5"):
        reader.gather(np.array([1, 5, 2]), out)
    reader.close()
