"""Threads that read also compute, and there are as many of them as CPUs: torch starts no further ones for them."""

from __future__ import annotations

import threading

import torch

_own = threading.local()


def compute_alone() -> None:
    """From now on torch's kernels run in the calling thread alone; other threads keep what they have.

    A team of OpenMP for each reading thread fights with the model's for the cores.
    """
    if getattr(_own, "alone", False):
        return
    _own.alone = True
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    # torch also gives the number to threads that begin later; put back by a thread that ends with it.
    helper = threading.Thread(target=torch.set_num_threads, args=(before,))
    helper.start()
    helper.join()
