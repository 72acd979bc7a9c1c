"""What the tests of transforms share: draws, and checks of memory and of waiting."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from fastload.transforms import Draws


def draws_for(batch: int, epoch: int = 0) -> Draws:
    return Draws(3, epoch, np.arange(batch) * 7 + 1)


def in_channels_last_memory(images: torch.Tensor) -> bool:
    return images.permute(0, 2, 3, 1).is_contiguous()


def on_cuda(test):
    needs_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    return pytest.mark.gpu(needs_device(test))


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Within, whatever waits for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
