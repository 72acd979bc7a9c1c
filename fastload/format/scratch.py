"""The memory in which HDF5 builds a file, whose bytes the packer then writes to the disk itself."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def scratch_file() -> Iterator[tuple[int, str]]:
    """Yields an empty sparse file, gone afterwards: its descriptor and a path to it. In memory, so that no disk fills.

    Where the system has no such files (macOS), it lies in the folder for temporary files.
    """
    fd = -1
    if hasattr(os, "memfd_create"):
        with suppress(OSError):
            fd = os.memfd_create("fastload")
    path = f"/proc/self/fd/{fd}"
    try:
        if os.path.exists(path):  # /proc may not be mounted.
            yield fd, path
            return
    finally:
        if fd >= 0:
            os.close(fd)
    with tempfile.NamedTemporaryFile(prefix="fastload-") as named:
        yield named.fileno(), named.name


def check_size_limit(num_bytes: int) -> None:
    """Raises OSError (EFBIG) where this process may not write so large a file (`ulimit -f`)."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit not in (resource.RLIM_INFINITY, -1) and num_bytes > limit:
        raise OSError(errno.EFBIG, f"the file needs up to {num_bytes:,} bytes, `ulimit -f` allows {limit:,}")


def forget(fd: int, start: int, stop: int) -> None:
    """Frees the memory of a part of a `scratch_file`, which then reads as zeros where whole pages lie in it."""
    stop = min(stop, os.fstat(fd).st_size)  # The last bytes may not have been written yet.
    first, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
    if first < end and hasattr(mmap, "MADV_REMOVE"):
        with suppress(OSError), mmap.mmap(fd, end - first, offset=first) as pages:
            pages.madvise(mmap.MADV_REMOVE)
