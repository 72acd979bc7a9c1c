"""Space for the file that is to come: enough of it, and held before any work is done."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from fastload.errors import OutputError
from fastload.pack.survey import Survey, free_bytes

SMALLER = "`fastload pack` makes smaller files with `--size`, `--max-size` or `--store source`"


def check_space(output: Path, survey: Survey, beside: int = 0, done: float = 0) -> None:
    """Refuse what is larger than the disk's free space.

    Args:
        beside: more bytes that are needed until the file is finished.
        done: 0 to 1, what part of the rows lies there already.

    Raises:
        OutputError: it is.
    """
    free, needed = free_bytes(output), int(survey.bytes_needed * (1 - done)) + beside
    if needed > free:
        raise disk_full(
            f"{output}: needs {needed:,} bytes for {survey.num_samples:,} images, {free:,} are free. Free some, or "
            f"choose another disk; {SMALLER}."
        )


def disk_full(message: str) -> OutputError:
    """The error of a disk without room, its errno ENOSPC."""
    error = OutputError(message)
    error.errno = errno.ENOSPC
    return error


def reserve(part: Path, num_bytes: int, *, again: bool = False) -> None:
    """Create the file with all its space, so that a full disk is known before the first image is decoded.

    Args:
        again: it exists; what it holds stays.

    Raises:
        OutputError: it cannot be created, or the space is not there.
    """
    try:
        fd = os.open(part, os.O_RDWR | (0 if again else os.O_CREAT | os.O_EXCL), 0o666)
    except OSError as exc:
        raise OutputError(f"{part}: cannot be written ({exc.strerror}). Choose another folder.") from exc
    try:
        if _in_memory(fd):
            # tmpfs would hand out its pages here and now, 0.25 s per GB during which no worker decodes; its free
            # space has just been checked.
            os.ftruncate(fd, num_bytes)
        else:
            os.posix_fallocate(fd, 0, num_bytes)
    except OSError as exc:
        raise OutputError(
            f"{part}: {num_bytes:,} bytes cannot be reserved ({exc.strerror}). Free some space, or choose another "
            f"disk; {SMALLER}."
        ) from exc
    finally:
        os.close(fd)


def _in_memory(fd: int) -> bool:
    """Whether an open file lies on tmpfs, by the device number in the kernel's table of mounts."""
    device = os.fstat(fd).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return False
    return any(line.split()[2] == number and " - tmpfs " in line for line in mounts)
