"""Compressed chunks decoded outside HDF5."""

from __future__ import annotations

import struct
import subprocess
import sys
import threading
import types
import zlib
from pathlib import Path

import h5py
import hdf5plugin
import numpy as np
import pytest
import zstandard

from fastload.errors import FileChangedError, FormatError
from fastload.format import chunk_filters
from fastload.format.header import PackedFile, read_header
from fastload.read.hdf5_chunks import ChunkedRows
from fastload.system.threads import in_threads

IMAGES = np.random.default_rng(2).integers(0, 7, (21, 6, 10, 3), dtype=np.uint8)


def write(path: Path, data: np.ndarray = IMAGES, name: str = "images", **options: object) -> PackedFile:
    with h5py.File(path, "w") as file:
        if name != "images":
            file["images"] = IMAGES
        file.create_dataset(name, data=data, **options)
    return read_header(path)


def read(file: PackedFile, rows: list[int], name: str = "images") -> np.ndarray:
    field = file.fields[name]
    out = np.full((len(rows), *field.shape), 99, field.dtype.newbyteorder("="))
    reader = ChunkedRows(file, [name], cache_chunks=2)
    reader.gather(np.array(rows), {name: out})
    reader.close()
    return out


@pytest.fixture
def no_hdf5(monkeypatch):
    """h5py may open files, and reads nothing."""
    monkeypatch.setattr(h5py.Dataset, "read_direct", None)


ROWS = [20, 3, 4, 3, 0, 11, 19]
ZSTD = hdf5plugin.Zstd(clevel=5)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"chunks": (4, 6, 10, 3), "compression": "gzip"}, ("deflate",)),
        ({"chunks": (4, 6, 10, 3), "compression": ZSTD}, ("zstd",)),
        ({"chunks": (1, 6, 10, 3), "compression": ZSTD}, ("zstd",)),
        ({"chunks": (1, 6, 10, 3), "compression": "gzip", "shuffle": True}, ("shuffle", "deflate")),
        ({"chunks": (5, 4, 10, 2), "compression": "gzip"}, ("deflate",)),
        ({"chunks": (1, 6, 7, 3), "compression": ZSTD, "maxshape": (None, 6, 10, 3)}, ("zstd",)),
        ({"chunks": (4, 6, 10, 3), "shuffle": True}, ("shuffle",)),
    ],
)
def test_rows_are_those_that_were_written_without_hdf5_reading_any(tmp_path, no_hdf5, options, names):
    file = write(tmp_path / "a.h5", **options)
    assert file.fields["images"].filters == names
    assert np.array_equal(read(file, ROWS), IMAGES[ROWS])


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "lzf", "shuffle": True},
        {"compression": "gzip", "fletcher32": True},
        {"compression": hdf5plugin.Blosc()},
        {"scaleoffset": 3},
    ],
)
def test_what_is_not_decoded_here_is_read_through_h5py(tmp_path, options):
    file = write(tmp_path / "a.h5", chunks=(4, 6, 10, 3), **options)
    assert np.array_equal(read(file, ROWS), IMAGES[ROWS])


@pytest.mark.parametrize("dtype", ["<u2", ">u2", ">f4", "<i8", "<f8", "?"])
@pytest.mark.parametrize("chunk_rows", [1, 4])
def test_other_numbers_come_in_native_order(tmp_path, dtype, chunk_rows):
    boxes = (IMAGES.reshape(21, -1)[:, :9] * 300.5).astype(dtype)
    for name, values in (("boxes", boxes), ("labels", boxes[:, 0].copy())):
        chunks = (chunk_rows, *values.shape[1:])
        file = write(tmp_path / f"{name}.h5", values, name, chunks=chunks, compression="gzip", shuffle=True)
        found = read(file, ROWS, name)
        assert found.dtype.isnative and np.array_equal(found, values[ROWS])


def test_chunks_never_written_or_left_as_they_were_are_read(tmp_path, no_hdf5):
    with h5py.File(tmp_path / "a.h5", "w", userblock_size=1024) as hdf5:
        options = {"chunks": (4, 6, 10, 3), "compression": "gzip", "shuffle": True, "fillvalue": 7}
        images = hdf5.create_dataset("images", (16, 6, 10, 3), np.uint8, **options)
        # Bit 1 of the mask: gzip was left out; shuffle changes nothing about single bytes.
        images.id.write_direct_chunk((4, 0, 0, 0), IMAGES[4:8].tobytes(), filter_mask=2)
        images.id.write_direct_chunk((8, 0, 0, 0), zlib.compress(IMAGES[8:12].tobytes()))
        images.id.write_direct_chunk((12, 0, 0, 0), IMAGES[12:16].tobytes(), filter_mask=3)  # both were left out
    found = read(read_header(tmp_path / "a.h5"), [11, 0, 5, 14])
    assert np.array_equal(found[[0, 2, 3]], IMAGES[[11, 5, 14]]) and (found[1] == 7).all()


FRAME = zstandard.compress(IMAGES[4:8].tobytes())


@pytest.mark.parametrize(
    ("codec", "stored", "reason"),
    [
        ("gzip", zlib.compress(IMAGES[4:8].tobytes())[:-9], "cut short"),
        ("gzip", zlib.compress(IMAGES[4:7].tobytes()), "540 bytes where 720 are expected"),
        ("gzip", zlib.compress(bytes(10**6)), "721 bytes where 720 are expected"),
        ("gzip", b"no stream", "Error -3"),
        (ZSTD, FRAME[:-5], "0 bytes|corrupt|[0-9]+ bytes where"),
        (ZSTD, zstandard.compress(IMAGES[4:7].tobytes()), "540 bytes where 720 are expected"),
        (ZSTD, zstandard.compress(bytes(10**6)), "more bytes where 720 are expected"),
        (ZSTD, zstandard.ZstdCompressor(write_content_size=False).compress(bytes(721)), "more bytes"),
        (ZSTD, b"no frame at all", "content size"),
    ],
)
@pytest.mark.parametrize("chunk_rows", [1, 4])
def test_a_damaged_chunk_is_named_and_the_others_are_read(tmp_path, codec, stored, reason, chunk_rows):
    data = IMAGES if chunk_rows == 4 else IMAGES.reshape(21, -1, 3, 3)[:, :20].repeat(4, axis=1)[:, :80]
    shape = (chunk_rows, *data.shape[1:])
    with h5py.File(tmp_path / "a.h5", "w") as hdf5:
        images = hdf5.create_dataset("images", data=data, chunks=shape, compression=codec)
        images.id.write_direct_chunk((4, 0, 0, 0), stored)
    file = read_header(tmp_path / "a.h5")
    which = "the chunk of rows 4 to 7" if chunk_rows == 4 else "row 4"
    with pytest.raises(FormatError, match=f"a.h5: {which} of `images` cannot be decoded .*({reason})"):
        read(file, [0, 4])
    assert np.array_equal(read(file, [0, 9, 20]), data[[0, 9, 20]])


@pytest.mark.parametrize(
    ("written", "damaged", "said"),
    [
        (struct.pack("<4Q", 21, 6, 10, 3), struct.pack("<4Q", 5, 6, 10, 3), "has a chunk outside its 5 rows"),
        (b"shuffle\0" + struct.pack("<I", 2), b"shuffle\0" + struct.pack("<I", 0), "shuffled by elements of no bytes"),
    ],
)
def test_chunks_that_cannot_be_are_refused(tmp_path, written, damaged, said):
    options = {"chunks": (4, 6, 10, 3), "compression": "gzip", "shuffle": True}
    path = write(tmp_path / "a.h5", IMAGES.astype(np.uint16), **options).path
    data = path.read_bytes()
    assert data.count(written) >= 1
    path.write_bytes(data.replace(written, damaged, 1))
    with pytest.raises(FormatError, match=f"a.h5: `images` {said}|a.h5: `images` is {said}"):
        read(read_header(path), [3])


def test_a_chunk_behind_the_end_of_the_file_is_said(tmp_path):
    file = write(tmp_path / "a.h5", chunks=(4, 6, 10, 3), compression="gzip")
    reader = ChunkedRows(file, ["images"])
    reader.gather(np.array([0]), {"images": np.empty((1, 6, 10, 3), np.uint8)})
    with open(tmp_path / "a.h5", "r+b") as cut:
        cut.truncate(file.identity.size - 100)
    with pytest.raises(FileChangedError, match="inside row 20 of `images`"):
        reader.gather(np.array([20]), {"images": np.empty((1, 6, 10, 3), np.uint8)})
    reader.close()


def test_threads_decode_different_chunks_at_once_and_each_one_once(tmp_path):
    file = write(tmp_path / "a.h5", chunks=(3, 6, 10, 3), compression="gzip")
    reader = ChunkedRows(file, ["images"], cache_chunks=8)
    outs = [np.empty_like(IMAGES), np.empty_like(IMAGES)]
    chunks = reader._chunks_of("images")
    (inflate,) = chunks._undo
    inside = threading.Barrier(2, timeout=600)
    decoded: list[int] = []

    def both_inside_at_first(data, out):
        decoded.append(threading.get_ident())
        if decoded.count(threading.get_ident()) == 1:
            inside.wait()  # broken, and then an error, if the other thread cannot come in
        inflate(data, out)

    chunks._undo = [both_inside_at_first]
    rows = np.arange(21)
    list(in_threads(lambda out: reader.gather(rows, {"images": out}), outs, 2))
    assert np.array_equal(outs[0], IMAGES) and np.array_equal(outs[1], IMAGES)
    assert len(decoded) == 7 and len(set(decoded)) == 2
    reader.close()


def test_a_failure_reaches_all_who_wait_and_is_not_kept(tmp_path):
    file = write(tmp_path / "a.h5", chunks=(21, 6, 10, 3), compression="gzip")
    reader = ChunkedRows(file, ["images"])
    chunks = reader._chunks_of("images")
    (inflate,) = chunks._undo
    begun, go_on = threading.Event(), threading.Event()
    failed = []

    def damaged(data, out):
        begun.set()
        go_on.wait(600)
        raise ValueError("for a while")

    def gather():
        try:
            reader.gather(np.array([1]), {"images": np.empty((1, 6, 10, 3), np.uint8)})
        except FormatError as exc:
            failed.append(str(exc))

    def second():
        begun.wait(600)
        go_on.set()
        gather()

    chunks._undo = [damaged]
    list(in_threads(lambda call: call(), [gather, second], 2))
    assert len(failed) == 2 and "for a while" in failed[1]
    chunks._undo = [inflate]
    gather()
    assert len(failed) == 2, "a failure is not kept"
    reader.close()


_WITHOUT = """
import sys
import numpy as np
from fastload.format.header import read_header
from fastload.inspection.info import inspect_file
from fastload.read.reader import open_rows

def read(path):
    file = read_header(path)
    out = np.empty((1, 6, 10, 3), np.uint8)
    try:
        open_rows(file, ["images"]).gather(np.array([9]), {"images": out})
        print(*file.fields["images"].filters, out.sum())
    except Exception as exc:
        print(type(exc).__name__, exc)

zstd, lz4 = sys.argv[1:]
sys.modules["hdf5plugin"] = None
read(zstd)
read(lz4)
print("MissingExtraError", *inspect_file(lz4).findings[:1])
sys.modules["zstandard"] = None
read(zstd)
del sys.modules["hdf5plugin"]
read(zstd)
"""


def test_what_is_not_installed_is_done_without_or_named(tmp_path):
    zstd = write(tmp_path / "zstd.h5", chunks=(4, 6, 10, 3), compression=ZSTD)
    lz4 = write(tmp_path / "lz4.h5", chunks=(4, 6, 10, 3), compression=hdf5plugin.LZ4())
    run = [sys.executable, "-c", _WITHOUT, str(zstd.path), str(lz4.path)]
    said = subprocess.run(run, capture_output=True, text=True, timeout=600, check=True).stdout.splitlines()
    right = f"zstd {IMAGES[9].sum()}"
    assert (said[0], said[4]) == (right, right), "one of both will do"
    assert "lz4.h5: `images` is compressed with lz4 (HDF5 filter 32004)" in said[1]
    assert "zstd.h5: `images` is compressed with zstd (HDF5 filter 32015)" in said[3]
    installs = "pip install zstandard hdf5plugin"
    assert all(line.startswith("MissingExtraError") and installs in line for line in (said[1], said[3]))
    assert said[2] == said[1], "what `fastload info` finds"


def test_zlib_ng_inflates_where_it_is_installed(monkeypatch):
    sizes = []

    def decompress(data, bufsize):
        sizes.append(bufsize)
        return zlib.decompress(data)

    fake = types.SimpleNamespace(decompress=decompress, decompressobj=zlib.decompressobj, error=zlib.error)
    monkeypatch.setitem(sys.modules, "zlib_ng", types.ModuleType("zlib_ng"))
    monkeypatch.setitem(sys.modules, "zlib_ng.zlib_ng", fake)
    chunk_filters._inflater.cache_clear()
    out = np.zeros(720, np.uint8)
    try:
        chunk_filters._inflate(zlib.compress(IMAGES[4:8].tobytes()), out)
    finally:
        chunk_filters._inflater.cache_clear()
    assert sizes == [721] and out.tobytes() == IMAGES[4:8].tobytes()
