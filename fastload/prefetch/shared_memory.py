"""Memory that the training process and its workers share, freed when the last of them ends. No torch here.

It is a file without a name (a memfd; where there are none, an unlinked temporary file): when the last process that has
it is gone, killed or not, so is the memory.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SharedMemoryError
from fastload.system.machine import available_memory


class SharedMemory:
    """One mapped file. It can be pickled only into a process that is being started, and is the same memory there."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self._fd = os.memfd_create("fastload-ring", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                self._fd = os.dup(file.fileno())
        self._num_bytes = 0
        self._whole: NDArray[np.uint8] | None = None

    def extend(self, num_bytes: int) -> int:
        """Adds bytes, and returns their offset; the pages are reserved when this returns, so that no write can fail.

        Raises SharedMemoryError if there is not enough memory, or a limit forbids it.
        """
        free = available_memory()
        if num_bytes > free:
            raise SharedMemoryError(
                f"the batches that worker processes fill need {num_bytes:,} bytes of shared memory, and {free:,} are "
                f"free. Choose a smaller batch_size or fewer workers."
            )
        try:
            if hasattr(os, "posix_fallocate"):
                # Without it, running out of memory is a SIGBUS at some write.
                os.posix_fallocate(self._fd, self._num_bytes, num_bytes)
            else:
                os.truncate(self._fd, self._num_bytes + num_bytes)
        except OSError as exc:
            raise SharedMemoryError(
                f"no {num_bytes:,} bytes of shared memory for the batches that worker processes fill: {exc.strerror}. "
                f"Choose a smaller batch_size or fewer workers, or raise the limit (`ulimit -f`, the container's "
                f"memory)."
            ) from exc
        offset, self._num_bytes = self._num_bytes, self._num_bytes + num_bytes
        return offset

    def view(self, offset: int, num_bytes: int) -> NDArray[np.uint8]:
        """Returns a part of the memory, uint8 (num_bytes,), mapped for as long as an array over it lives."""
        if self._whole is None or offset + num_bytes > len(self._whole):  # was added since
            size = os.fstat(self._fd).st_size
            self._whole = np.frombuffer(mmap.mmap(self._fd, size, flags=mmap.MAP_SHARED), np.uint8)
        return self._whole[offset : offset + num_bytes]

    def fileno(self) -> int:
        """Returns the descriptor of the file."""
        return self._fd

    def close(self) -> None:
        """Lets go of the file; views that are left keep their memory."""
        fd, self._fd, self._whole = self._fd, -1, None
        if fd >= 0:
            os.close(fd)

    def __getstate__(self) -> dict[str, Any]:
        return {"fd": reduction.DupFd(self._fd)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._fd = state["fd"].detach()
        self._whole = None

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if getattr(self, "_fd", -1) >= 0 and not _is_finalizing():
            self.close()
