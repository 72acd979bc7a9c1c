"""Whether a file is still the one whose header was read."""

from __future__ import annotations

import os

from fastload.errors import FileChangedError, MissingFileError
from fastload.format import FileIdentity, PackedFile


def open_checked(file: PackedFile) -> int:
    """A file descriptor, open for reading, of the very file whose header was read.

    Raises:
        MissingFileError, FileChangedError: it is gone, or another one.
    """
    try:
        fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as exc:
        raise MissingFileError(f"{file.path}: the file is gone since its header was read.") from exc
    try:
        compare_identity(file, os.fstat(fd))
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_path(file: PackedFile) -> None:
    """Raises MissingFileError or FileChangedError unless the path still leads to the file whose header was read."""
    try:
        stat = os.stat(file.path)
    except FileNotFoundError as exc:
        raise MissingFileError(f"{file.path}: the file is gone since its header was read.") from exc
    compare_identity(file, stat)


def compare_identity(file: PackedFile, stat: os.stat_result) -> None:
    """Raises FileChangedError, with what changed, unless the stat is of the file whose header was read, unwritten."""
    now, then = FileIdentity.of(stat), file.identity
    if now == then:
        return
    if (now.device, now.inode) != (then.device, then.inode):
        what = "another file stands in its place"
    elif now.size < then.size:
        what = f"it was truncated from {then.size:,} to {now.size:,} bytes"
    else:
        what = (
            f"it was written to: {then.size:,} bytes and mtime {then.mtime_ns} ns, now {now.size:,} and {now.mtime_ns}"
        )
    raise FileChangedError(
        f"{file.path}: changed while in use: {what}. Open it again to use the new content, and write new files under "
        f"a new name while training."
    )
