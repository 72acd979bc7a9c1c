"""Reads and writes of any length, and how much of a file is in memory."""

from __future__ import annotations

import mmap
import os
import signal
import sys
import threading

import pytest

from fastload.errors import OutputError
from fastload.system.files import (
    _probed,
    drop,
    mode_for,
    open_output,
    read_bytes,
    read_into,
    resident_share,
    save_bytes,
    write_all,
    write_at,
)


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Ten bytes, of which a call brings three at most."""
    pread, preadv = os.pread, os.preadv
    monkeypatch.setattr(os, "pread", lambda fd, length, at: pread(fd, min(length, 3), at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:3]], at))
    (tmp_path / "a").write_bytes(b"0123456789")
    with open(tmp_path / "a", "rb") as opened:
        yield opened.fileno()


@pytest.mark.parametrize(("length", "offset"), [(0, 0), (2, 1), (8, 1), (9, 1), (10, 1), (5, 10), (5, 12)])
def test_all_that_is_there_is_read(file, length, offset):
    expected = b"0123456789"[offset : offset + length]
    memory = bytearray(length)
    assert read_bytes(file, length, offset) == expected
    assert read_into(file, memoryview(memory), offset) == len(expected)
    assert memory == expected.ljust(length, b"\0")


def test_all_that_is_given_is_written(tmp_path, monkeypatch):
    write, pwrite = os.write, os.pwrite
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:3]))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:3], at))
    with open(tmp_path / "a", "wb") as file:
        write_all(file.fileno(), b"0123456789")
        write_at(file.fileno(), memoryview(b"abcdefg"), 2)
        write_all(file.fileno(), b"")
    assert (tmp_path / "a").read_bytes() == b"01abcdefg9"


def test_what_was_dropped_comes_back_when_it_is_read_and_an_empty_file_has_no_share(tmp_path):
    path, empty = tmp_path / "data.bin", tmp_path / "empty"
    path.write_bytes(os.urandom(1 << 20))
    if resident_share(path) is None:
        pytest.skip("this system does not say which pages are in memory")

    def probed_share():
        with open(path, "rb") as opened:
            return _probed(opened.fileno(), path.stat().st_size)

    assert resident_share(path) == probed_share() == 1
    empty.touch()
    assert drop(empty) is None
    left = drop(path)
    if left == 1:
        pytest.skip("this file system keeps its pages, as tmpfs does")
    assert left == resident_share(path) == 0 and probed_share() < 1  # what it asks for may come meanwhile
    path.read_bytes()
    assert resident_share(path) == 1
    drop(path)
    with open(path, "rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[::4096]) >= 0  # touches each page
        assert drop(path) == 1  # mapped pages stay


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY | os.O_CREAT, os.O_RDWR | os.O_CREAT])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_pipe_or_folder_where_an_output_belongs_is_refused_and_not_waited_for(tmp_path, flags, make):
    make(tmp_path / "o")
    said = []

    def refused():
        with pytest.raises(OutputError, match=r"o: is a folder, device or pipe"):
            open_output(tmp_path / "o", flags)
        said.append(True)

    waits = threading.Thread(target=refused, daemon=True)
    waits.start()
    waits.join(60)
    assert said


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has files without a name")
@pytest.mark.parametrize("event", ["open", "os.link"])
def test_who_is_killed_while_a_new_file_is_saved_leaves_nothing(tmp_path, event):
    if (child := os.fork()) == 0:
        sys.addaudithook(lambda name, args: os.kill(os.getpid(), signal.SIGKILL) if name == event else None)
        save_bytes(b"whole", tmp_path / "a.h5", force=False)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not list(tmp_path.iterdir())
    save_bytes(b"whole", tmp_path / "a.h5", force=False)
    assert (tmp_path / "a.h5").stat().st_mode & 0o777 == mode_for(tmp_path / "none")
    with pytest.raises(OutputError, match="exists"):
        save_bytes(b"other", tmp_path / "a.h5", force=False)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"whole"]
