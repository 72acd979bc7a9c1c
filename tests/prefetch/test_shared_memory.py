"""Memory shared with workers: the same there, bounded, and gone with the last who has it."""

from __future__ import annotations

import multiprocessing
import os

import pytest

from fastload.errors import SharedMemoryError
from fastload.prefetch.shared_memory import SharedMemory

PAGE = 4096


def add_one(memory, offset):
    view = memory.view(offset, PAGE)
    view += 1


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_process_writes_what_the_other_reads(method):
    memory = SharedMemory()
    first = memory.extend(2 * PAGE)
    second = memory.extend(PAGE)
    views = [memory.view(offset, PAGE) for offset in (first, first + PAGE, second)]
    for number, view in enumerate(views):
        view[:] = number
    process = multiprocessing.get_context(method).Process(target=add_one, args=(memory, first + PAGE))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert [int(view[0]) for view in views] == [0, 2, 2]


def test_views_stay_where_they_are_when_more_is_added_and_outlive_the_memory_whose_descriptor_does_not():
    def count():
        return len(os.listdir("/proc/self/fd"))

    before = count()
    memory = SharedMemory()
    memory.extend(PAGE)
    view = memory.view(0, PAGE)
    view[:] = 7
    added = memory.view(memory.extend(PAGE), PAGE)
    added[:] = 9
    assert (view == 7).all() and (memory.view(0, PAGE) == 7).all() and added.ctypes.data != view.ctypes.data
    memory.close()
    memory.close()
    view[:] = 3
    assert (view == 3).all() and (added == 9).all()
    del view, added
    assert count() == before


def test_more_than_there_is_is_refused_before_anything_is_taken():
    with pytest.raises(SharedMemoryError, match=r"need 10,000,000,000,000,000 bytes.*are free.*smaller batch_size"):
        SharedMemory().extend(10**16)
