"""What is announced to the kernel, and when."""

from __future__ import annotations

import mmap
import os
import threading
import time

import numpy as np
import pytest
from small_files import pages_in_memory

from fastload.format.header import Field, FileIdentity, PackedFile, read_header
from fastload.format.ragged import index_names
from fastload.format.shards import Shards
from fastload.read.readahead import FileReadAhead, KernelAdvice, RaggedExtents, ReadAhead, announced_ahead, sliced
from fastload.read.reader import open_rows
from fastload.system import syscalls
from fastload.system.files import drop
from sample_files import write_ragged

PAGE = mmap.PAGESIZE
ROW = 3 * PAGE
N = 4096
FIELD = Field("images", np.dtype(np.uint8), (3, PAGE), offset=PAGE, chunks=(4, 3, PAGE))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "data"
    with open(path, "wb") as opened:
        opened.truncate(PAGE + N * ROW)
    shards = Shards.of_file(path.name, "", N, PAGE + N * ROW, PAGE, 4)
    return PackedFile(path, None, N, {"images": FIELD}, {}, "", False, 0, FileIdentity.of(os.stat(path)), {}, shards)


class Recorder:
    """Stands for the kernel: notes the pages it is asked for."""

    def __init__(self):
        self.pages: list[int] = []
        self.called = threading.Event()

    def __call__(self, ranges):
        assert ranges.dtype == np.int64 and (ranges[:, 1] <= 128 * 1024).all() and (ranges % PAGE == 0).all()
        for offset, length in ranges.tolist():
            self.pages += range(offset // PAGE, (offset + length) // PAGE)
        self.called.set()

    def rows(self):
        assert all(page >= 1 for page in self.pages)
        return sorted({(page - 1) // 3 for page in self.pages})


@pytest.fixture
def announcer(file, monkeypatch):
    """Makes a `ReadAhead` with a kernel that says which bytes are in memory, and its recorder."""

    def make(resident=lambda offset: False, *, file=file, rows=range(N), **options):
        monkeypatch.setattr(syscalls, "is_resident", lambda fd, offset: resident(offset))
        ahead = FileReadAhead(file, ["images"], rows, **options)
        ahead._advise = Recorder()
        return ahead, ahead._advise

    return make


def finish(ahead):
    """Waits for what was announced, without ending it early as close() does."""
    ahead._orders.put(None)
    ahead._thread.join()


@pytest.mark.parametrize("said", [False, None])  # by the file system; None: it does not say
def test_exactly_the_rows_to_come_are_announced(announcer, said):
    ahead, recorder = announcer(lambda offset: said)
    ahead.announce(np.array([5, 9, 6, 4000, 5]))
    ahead.announce(np.array([100, 0]))
    for row in range(200, 300):
        ahead.announce(np.array([row]))
    finish(ahead)
    assert recorder.rows() == [0, 5, 6, 9, 100, *range(200, 300), 4000]
    assert len(recorder.pages) == len(set(recorder.pages)) == 106 * 3
    ranges = sliced(np.array([[10, 20], [PAGE, 300_000], [5 * PAGE - 1, 2]]))  # widened to pages, and cut
    assert ranges[0].tolist() == [0, PAGE] and ranges[-1].tolist() == [4 * PAGE, 2 * PAGE]
    middle = ranges[1:-1]
    assert middle[0, 0] == PAGE and (middle[1:, 0] == middle[:-1, 0] + middle[:-1, 1]).all()
    assert middle[:, 1].max() == 128 * 1024 and middle[-1].sum() >= PAGE + 300_000


def test_whole_chunks_of_a_window_are_announced_once_and_within_the_rows_that_are_read(announcer):
    ahead, recorder = announcer(chunk_rows=4, rows=range(3002, 3011))
    ahead.announce(np.array([3005, 3002]))
    ahead.announce(np.array([3006, 3010, 3003]))
    finish(ahead)
    assert recorder.rows() == list(range(3002, 3011))
    assert len(recorder.pages) == 9 * 3


def test_of_a_chunk_that_began_in_the_shard_before_only_the_rows_here_are_announced(announcer):
    ahead, recorder = announcer(chunk_rows=4, lead=3)  # row 0 is the last of its chunk
    ahead.announce(np.array([0, 6]))
    ahead.announce(np.array([7]))
    finish(ahead)
    assert recorder.rows() == [0, 5, 6, 7, 8]
    assert len(recorder.pages) == 5 * 3


def test_nothing_is_announced_and_no_thread_runs_while_all_is_in_memory(announcer, file):
    asked, cold = [], set()

    def resident(offset):
        asked.append(offset)
        return (offset - PAGE) // ROW not in cold

    one, recorder = announcer(resident)
    ahead = ReadAhead(file, ["images"], range(N))
    ahead.opened[0, 0] = one
    for first in range(0, 1600, 8):
        ahead.announce(np.arange(first, first + 8))
    assert one._thread is None and not recorder.pages
    assert len(asked) < 8 * 50  # asked less and less often
    cold.update(range(N))
    for first in range(2000, 2080, 8):
        ahead.announce(np.arange(first, first + 8))
    finish(one)
    assert 2079 in recorder.rows()


def test_close_leaves_no_thread_and_announces_no_more(announcer):
    ahead, recorder = announcer()
    ahead.announce(np.array([1]))
    assert recorder.called.wait(600)
    ahead.close()
    before = list(recorder.pages)
    ahead.announce(np.array([7]))
    assert recorder.pages == before
    assert not [thread for thread in threading.enumerate() if thread.name == "fastload-readahead"]


@pytest.mark.parametrize("vectored", [True, False])
def test_the_kernel_reads_what_it_is_advised_to(tmp_path, vectored):
    path = tmp_path / "cold"
    path.write_bytes(os.urandom(64 * PAGE))
    if drop(path) != 0:
        pytest.skip("this file system keeps its files in memory, or does not say")
    fd = os.open(path, os.O_RDONLY)
    advice = KernelAdvice(fd, 64 * PAGE)
    advice._vectored = advice._vectored and vectored
    advice(np.array([[40 * PAGE, 4 * PAGE]]))
    deadline = time.monotonic() + 120
    while not pages_in_memory(path)[40:44].all() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert pages_in_memory(path)[40:44].all()
    os.close(fd)


def test_items_are_announced_a_fixed_depth_before_they_are_given():
    said = []
    given = announced_ahead(iter(range(6)), said.append, 2)
    assert next(given) == 0 and said == [0, 1, 2]
    assert next(given) == 1 and said == [0, 1, 2, 3]
    assert list(given) == [2, 3, 4, 5] and said == [0, 1, 2, 3, 4, 5]
    at_once = announced_ahead(iter(range(6, 8)), said.append, 0)
    assert next(at_once) == 6 and said[-1] == 6


def test_the_first_items_are_given_at_once_where_announcements_get_ahead_gradually():
    said = []
    given = announced_ahead(iter(range(8)), said.append, 2, gradually=True)
    assert next(given) == 0 and said == [0]
    assert next(given) == 1 and said == [0, 1, 2]
    assert next(given) == 2 and said == [0, 1, 2, 3, 4]
    assert next(given) == 3 and said == [0, 1, 2, 3, 4, 5]
    assert list(given) == [4, 5, 6, 7] and said == [0, 1, 2, 3, 4, 5, 6, 7]


def test_rows_of_a_ragged_field_are_announced_by_their_bytes_unless_they_are_in_memory(tmp_path, announcer):
    images = [np.zeros((height, 1000, 3), np.uint8) for height in (1500, 2500, 2000)]
    file = read_header(write_ragged(tmp_path / "a.h5", images))
    ahead, recorder = announcer(file=file, rows=range(3))
    small = [extents.base // PAGE for extents in ahead._small]
    ahead.announce(np.array([2]))
    finish(ahead)
    ahead.close()
    reader = open_rows(file, ["images"])
    index = reader.within(np.array([2]), lambda: reader.encoded("images").index(np.array([2])))
    begin = file.fields["images"].ragged.base + int(index.offset[0])
    pages = list(range(begin // PAGE, -(-(begin + images[2].nbytes) // PAGE)))
    assert len(small) == len(index_names("images")) and set(small) <= set(recorder.pages), "the index, whole"
    assert recorder.pages[-len(pages) :] == pages
    reader.close()
    ahead, recorder = announcer(lambda offset: True, file=file, rows=range(3))
    if ahead._large[0].last_byte(0) is not None:  # None: this system does not say what is in memory
        ahead.announce(np.array([0]))
        assert ahead._thread is None and not recorder.pages
    ahead.close()


@pytest.mark.parametrize(
    ("height", "chunk_bytes", "first", "stop", "expected"),
    [
        (3, 2**16, [0, 3], [1, 5], [(0, 5)]),  # near rows are one range
        (64, 2**23, [0, 4], [2, 5], [(0, 2), (4, 5)]),  # rows far apart are two
    ],
)
def test_ranges_to_announce_are_the_bytes_of_rows(tmp_path, height, chunk_bytes, first, stop, expected):
    images = [np.zeros((height, 64, 3), np.uint8)] * 6
    file = read_header(write_ragged(tmp_path / "a.h5", images, chunk_bytes=chunk_bytes))
    ragged, row = file.fields["images"].ragged, images[0].nbytes
    with open(file.path, "rb") as opened:
        extents = RaggedExtents(opened.fileno(), file, file.ragged["images"])
        found = extents.ranges(np.array(first), np.array(stop))
        assert extents.last_byte(3) in (None, ragged.base + 4 * row - 1)
    assert found.tolist() == [[ragged.base + a * row, (b - a) * row] for a, b in expected]
    assert (extents.base, extents.num_bytes(5)) == (ragged.base, ragged.num_bytes)
