"""Memory for the output batches of transforms: reused on the CPU, seen as plain integers where values only move.

A batch of 256 normalized float32 images of 218x178x3 takes 119 MB. The kernel hands out memory that large anew each
time, and filling fresh pages took 4.5 times as long as filling pages in use (8,500 against 38,000 images/s).
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_log = logging.getLogger("fastload")

SMALL_SAMPLE_BYTES = 1 << 14
"""Below this many bytes a sample, one call per sample costs more than copying some pixels twice."""

SERIAL_VALUES = (1 << 15) - 1
"""Most values of an operation that torch runs in the calling thread (at::internal::GRAIN_SIZE is 32768).

Work is cut so small where a team of threads would lose: see `normalize.py`."""

_ALIGNMENT = 64  # bytes: a cache line, and the widest vector register

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class OutputPool:
    """Hands out uninitialised CPU tensors and takes their memory back when the last reference to them is gone.

    Views, storages and arrays from `.numpy()` count as references, so what a user keeps is never overwritten: with
    `limit` tensors in use at once, further ones are ordinary allocations. Thread-safe. A copy or a pickle of a pool is
    an empty pool.

    Args:
        limit: most tensors whose memory the pool keeps. Three: the batch being made, the one the loop body works on,
            and one of slack.
    """

    def __init__(self, limit: int = 3) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._kept = 0
        # SimpleQueue.put is reentrant: a finalizer may run inside any allocation, also one made under the lock.
        self._free: queue.SimpleQueue[NDArray[np.uint8]] = queue.SimpleQueue()

    def __reduce__(self) -> tuple[Any, ...]:
        return OutputPool, (self.limit,)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns an uninitialised, contiguous CPU tensor, over memory of an earlier one of like size if it is free."""
        num_bytes = math.prod(shape) * dtype.itemsize
        buffer = self._buffer(num_bytes)
        if buffer is None or num_bytes == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        lent = buffer[:num_bytes]
        # torch.from_numpy keeps `lent` (this very object) alive as long as the storage lives, so its end is the end
        # of the last reference.
        weakref.finalize(lent, self._free.put, buffer).atexit = False
        return torch.from_numpy(lent).view(dtype).view(shape)

    def _buffer(self, num_bytes: int) -> NDArray[np.uint8] | None:
        with self._lock:
            while not self._free.empty():  # nobody else takes any out
                buffer = self._free.get_nowait()
                if num_bytes <= buffer.nbytes <= 2 * num_bytes:
                    return buffer
                self._kept -= 1  # of another batch size: given back to the system
            if self._kept == self.limit:
                return None
            self._kept += 1
        raw = np.empty(num_bytes + _ALIGNMENT, dtype=np.uint8)
        start = -raw.ctypes.data % _ALIGNMENT
        return raw[start : start + num_bytes]


def empty_images(images: torch.Tensor, channels: int, pool: OutputPool | None) -> torch.Tensor:
    """Returns an uninitialised channels_last batch (B, channels, H, W) of the images' size, dtype and device.

    On the CPU its memory comes from the pool, if there is one.
    """
    shape = (len(images), *images.shape[2:], channels)
    if pool is not None and images.device.type == "cpu":
        return pool.empty(shape, images.dtype).permute(0, 3, 1, 2)
    return torch.empty(shape, dtype=images.dtype, device=images.device).permute(0, 3, 1, 2)


def sent(values: NDArray[np.generic] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns host values on a device, without waiting; on the CPU the same memory.

    All that transforms send goes this way. From memory that is not pinned, the copy may wait until the stream has done
    all work that it was given. torch keeps pinned memory until the stream has read it, and then uses it again.
    """
    host = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same memory as integers of the same size, for code that only moves values.

    torch lacks uint16 in flip and index_copy (2.13), and NumPy lacks bfloat16: both move as int16.
    """
    return tensor.view(_SAME_SIZE[tensor.dtype.itemsize])


@functools.cache
def without_gil(*functions: Callable[..., None]) -> Callable[..., None]:
    """Returns the last function, compiled with the others as a TorchScript program, which runs without the GIL.

    torch's C++ front end compiles it: `torch.jit.script`, the Python one, is deprecated. One day this may go as well:
    where torch compiles nothing, the function is returned as the Python that it is.

    Args:
        functions: with the names and annotations that TorchScript knows; they use one another and `torch` alone.
    """
    name = functions[-1].__name__
    try:
        program = torch.jit.CompilationUnit("\n".join(inspect.getsource(function) for function in functions))
        return getattr(program, name)  # type: ignore[no-any-return]
    except (AttributeError, OSError, RuntimeError) as exc:
        _log.info("torch %s compiles no TorchScript (%s): %s runs as Python", torch.__version__, exc, name)
        return functions[-1]
