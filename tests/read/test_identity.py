from __future__ import annotations

import os
import shutil
import sys
import threading
import time
import warnings
from pathlib import Path

import h5py
import numpy as np
import pytest
from small_files import write_foreign

from fastload.errors import FileChangedError, ReadError
from fastload.format.header import read_header
from fastload.read.identity import WriteLease, check_open, check_path, open_checked
from fastload.system import syscalls

PACKED = {"rows": 20}


def _wait_for(condition) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.001)


@pytest.fixture
def held(packed_copy: Path):
    """An open file whose writers can be held off: header, descriptor, guard."""
    file = read_header(packed_copy)
    fd = open_checked(file)
    can = syscalls.hold_off_writers(fd)
    syscalls.let_writers(fd)
    try:
        if not can:
            pytest.skip(f"no leases here ({sys.platform})")
        yield file, fd, WriteLease(file, fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize("change", [lambda path: os.truncate(path, 100), lambda path: path.write_bytes(b"new")])
def test_who_truncates_the_file_waits_until_the_rows_are_copied(held, change) -> None:
    file, fd, guard = held
    writer = threading.Thread(target=change, args=(file.path,))
    with guard:
        with guard:  # entered again by the same thread
            writer.start()
            _wait_for(lambda: syscalls.writers_wait(fd))
        check_open(file, fd)  # nothing was changed so far
        assert writer.is_alive()
    with guard, pytest.raises(FileChangedError, match="it was truncated"):
        check_open(file, fd)
    writer.join()


def test_threads_that_copy_in_turn_do_not_hold_a_writer_off_for_ever(held) -> None:
    file, fd, guard = held
    entered, leave, seen = threading.Event(), threading.Event(), []

    def first() -> None:
        with guard:
            entered.set()
            leave.wait()

    def second() -> None:
        with guard:  # not before the writer
            try:
                check_open(file, fd)
                seen.append("the old file")
            except FileChangedError:
                seen.append("the change")

    writer = threading.Thread(target=os.truncate, args=(file.path, 100))
    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    entered.wait()
    writer.start()
    _wait_for(lambda: syscalls.writers_wait(fd))
    threads[1].start()
    time.sleep(0.05)  # no matter how long: it only gives a second thread that does not wait the time to fail
    leave.set()
    for thread in (*threads, writer):
        thread.join()
    assert seen == ["the change"]


def test_a_forked_child_does_not_end_the_lease_of_its_parent(held) -> None:
    file, fd, guard = held
    with guard, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of other tests; the child only calls the kernel
        child = os.fork()
        if not child:
            with guard:
                check_open(file, fd)
            guard.close()
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        writer = threading.Thread(target=os.truncate, args=(file.path, 100))
        writer.start()
        _wait_for(lambda: syscalls.writers_wait(fd))
        check_open(file, fd)
    writer.join()


@pytest.mark.parametrize("look", [check_path, open_checked])
def test_a_file_that_cannot_be_looked_at_any_more_is_named_with_the_reason(packed_copy: Path, look) -> None:
    (packed_copy.parent / "sub").mkdir()
    file = read_header(packed_copy.rename(packed_copy.parent / "sub" / "file.h5"))
    (packed_copy.parent / "sub").rename(packed_copy.parent / "moved")
    (packed_copy.parent / "sub").write_bytes(b"no folder")
    with pytest.raises(ReadError, match=r"sub/file.h5: cannot be opened any more \(Not a directory\)"):
        look(file)


def test_ctrl_c_while_a_copy_begins_leaves_nobody_waiting(held, monkeypatch: pytest.MonkeyPatch) -> None:
    _, fd, guard = held

    def interrupted(fd: int) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(syscalls, "hold_off_writers", interrupted)
        with guard:
            pass
    with guard:
        held_off = syscalls.hold_off_writers(fd)
    assert held_off and guard._users == 0 and syscalls.writers_wait(fd)  # nothing is held: F_GETLEASE gives F_UNLCK


def _copied_anew(path: Path) -> None:
    shutil.copy(path, path.with_name("copy"))
    os.replace(path.with_name("copy"), path)


@pytest.mark.parametrize("change", [lambda path: os.utime(path, ns=(1, 1)), _copied_anew])
def test_a_file_that_was_touched_or_copied_anew_is_read_on_with_one_warning(packed_copy: Path, change) -> None:
    file = read_header(packed_copy)
    fd = open_checked(file)
    change(packed_copy)
    with pytest.warns(UserWarning, match="equal, so reading goes on") as warned:
        check_path(file)
        check_path(file)
    assert len(warned) == 1
    check_open(file, fd)
    os.close(fd)
    os.close(open_checked(file))


def test_a_file_of_the_same_size_whose_header_differs_or_that_has_no_digests_is_another(packed_copy: Path) -> None:
    file = read_header(packed_copy)
    with h5py.File(packed_copy, "r+") as hdf5:
        hdf5["digest"][3] += 1
    os.utime(packed_copy, ns=(1, 1))
    assert packed_copy.stat().st_size == file.identity.size
    with pytest.raises(FileChangedError, match="changed while in use: it was written to"):
        check_path(file)
    other = packed_copy.with_name("foreign.h5")
    write_foreign(other, np.zeros((4, 6, 5, 3), np.uint8), chunk_rows=2)
    file = read_header(other)
    os.utime(other, ns=(1, 1))
    with pytest.raises(FileChangedError, match="it was written to"):
        check_path(file)
