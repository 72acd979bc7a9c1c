"""Checks that a file is still the one whose header was read."""

from __future__ import annotations

import os

from fastload.errors import FileChangedError, MissingFileError
from fastload.format.header import FileIdentity, PackedFile
from fastload.system import syscalls


def open_checked(file: PackedFile) -> int:
    """Opens the file whose header was read, or raises MissingFileError or FileChangedError."""
    try:
        fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as exc:
        raise MissingFileError(f"{file.path}: the file is gone since its header was read.") from exc
    try:
        check_open(file, fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_path(file: PackedFile) -> None:
    """Raises MissingFileError or FileChangedError unless the path still leads to the file whose header was read.

    One call of the system, since it is done between two epochs. What other machines write to a network file system it
    sees when their client does: as late as the pages it keeps, a minute by default for NFS.
    """
    try:
        found = os.stat(file.path)
    except FileNotFoundError as exc:
        raise MissingFileError(f"{file.path}: the file is gone since its header was read.") from exc
    _check(file, FileIdentity.of(found))


def check_open(file: PackedFile, fd: int) -> None:
    """Raises FileChangedError unless an open file is the one whose header was read, and was not written to since."""
    _check(file, syscalls.identity_of(fd))


def _check(file: PackedFile, found: tuple[int, int, int, int]) -> None:
    then = file.identity
    if found == then:
        return
    now = FileIdentity(*found)
    if now[:2] != then[:2]:
        what = "it was replaced by another file"
    elif now.size < then.size:
        what = f"it was truncated from {then.size:,} to {now.size:,} bytes"
    else:
        before = f"{then.size:,} bytes and mtime {then.mtime_ns} ns"
        what = f"it was written to: {before}, now {now.size:,} and {now.mtime_ns}"
    raise FileChangedError(
        f"{file.path}: changed while in use: {what}. Make a new PackedDataset or FastLoader of it to use the new "
        f"content, and write new files under a new name while training."
    )
