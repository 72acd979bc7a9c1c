"""A thread that computes alone, and others that go on as before."""

from __future__ import annotations

import threading

import pytest
import torch

from fastload.prefetch.row_transformer import use_one_torch_thread


@pytest.fixture(autouse=True)
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def in_thread(work) -> list[int]:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.extend(work()))
    thread.start()
    thread.join()
    return found


def alone() -> list[int]:
    use_one_torch_thread()
    use_one_torch_thread()
    return [torch.get_num_threads()]


def test_one_thread_is_alone_and_all_others_keep_their_number():
    assert in_thread(alone) == [1]
    assert torch.get_num_threads() == 3
    assert in_thread(lambda: [torch.get_num_threads()]) == [3]
