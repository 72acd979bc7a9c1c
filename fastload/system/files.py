"""Files: output checked before any work and written whole or not at all; reads of any length; the page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
import sys
import tempfile
from pathlib import Path

import numpy as np

from fastload.errors import OutputError
from fastload.system import syscalls

_MAX_READ_BYTES = 1 << 30
_CACHESTAT = 451  # its number on x86-64 and aarch64, from Linux 6.5 on
_RANGE, _COUNTS = struct.Struct("=QQ"), struct.Struct("=QQQQQ")
_PROBES = 256


def check_new_file(path: str | os.PathLike[str], *, force: bool = False, option: str = "--force") -> None:
    """Raises OutputError now, not after minutes of work, if no file could be written to `path`.

    That is where it exists (unless `force`; the message names the option that allows it), is a folder, or where its
    folder is missing or not writable.
    """
    path = Path(path)
    folder = path.absolute().parent
    if path.is_dir():
        raise OutputError(f"{path}: is a folder. Give the name of a file in it.")
    # lexists: a broken link exists, too.
    if os.path.lexists(path) and not force:
        raise OutputError(f"{path}: exists. Choose another name, or replace it with `{option}` (`force=True`).")
    if not folder.is_dir():
        raise OutputError(f"{path}: its folder {folder} does not exist. Make it first.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"{path}: no permission to make a file in {folder}. Choose another folder.")


def save_text(text: str, path: Path, *, force: bool) -> None:
    """Writes `text` as UTF-8 to `path`, otherwise like `save_bytes`."""
    # Surrogates stand for bytes of a file name that are not UTF-8; they are written out.
    save_bytes(text.encode("utf-8", errors="backslashreplace"), path, force=force)


def save_bytes(data: bytes, path: Path, *, force: bool) -> None:
    """Writes `data` to `path`, by way of a temporary file in the same folder: nobody sees half of it.

    Raises:
        OutputError: it cannot be written, or `force` is not set and the file was created meanwhile.
    """
    path = path.absolute()
    unfinished: Path | None = None
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name[:40]}.", suffix=".part", dir=path.parent)
        unfinished = Path(name)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files that only their owner can read; give this one the permissions of any new file.
        umask = os.umask(0)
        os.umask(umask)
        unfinished.chmod(0o666 & ~umask)
        if force:
            os.replace(unfinished, path)
        else:
            try:
                # Unlike a rename, a link fails when a file of that name was created meanwhile.
                os.link(unfinished, path)
            except FileExistsError:
                raise
            except OSError:  # no hard links on this file system (FAT, some network mounts)
                os.replace(unfinished, path)
    except FileExistsError as exc:
        raise OutputError(f"{path}: exists. Choose another name, or replace it with `--force`.") from exc
    except OSError as exc:
        raise OutputError(f"{path}: cannot be written ({exc.strerror or exc}).") from exc
    finally:
        if unfinished is not None:
            unfinished.unlink(missing_ok=True)


def read_bytes(fd: int, length: int, offset: int) -> bytes:
    """Returns `length` bytes of a file from `offset` on, fewer at its end.

    One `os.pread` gives at most 2 GiB, and may give less; this one reads on. It never allocates more than 1 GiB beyond
    what the file has, whatever length a damaged file claims.
    """
    parts, done = list[bytes](), 0
    while done < length and (part := os.pread(fd, min(length - done, _MAX_READ_BYTES), offset + done)):
        parts.append(part)
        done += len(part)
    return b"".join(parts)


def read_into(fd: int, view: memoryview, offset: int) -> int:
    """Fills bytes of memory, one dimension, with a file's from `offset` on; returns how many, fewer at its end."""
    total = 0
    while total < len(view) and (count := os.preadv(fd, [view[total:]], offset + total)):
        total += count
    return total


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Writes all bytes at the descriptor's position; one `os.write` may write fewer."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Writes all bytes at an offset of a file; one `os.pwrite` may write fewer."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def drop(path: Path) -> float | None:
    """Asks the kernel to drop a file's pages; returns the share of them that is still in memory, as `resident_share`.

    Pages that some process has mapped stay, and so do all pages on file systems in memory (tmpfs).
    """
    with open(path, "rb") as file:
        # A page that is not on the disk yet cannot be dropped.
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return resident_share(path)


def resident_share(path: Path) -> float | None:
    """Returns the share of a file that is in memory, 0 to 1; None if the file is empty or the system does not say."""
    size = path.stat().st_size
    if not size:
        return None
    with open(path, "rb") as file:
        if sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64"):
            counts = ctypes.create_string_buffer(_COUNTS.size)
            whole, pages = ctypes.create_string_buffer(_RANGE.pack(0, 0)), -(-size // mmap.PAGESIZE)
            cachestat = ctypes.c_long(_CACHESTAT)
            if ctypes.CDLL(None, use_errno=True).syscall(cachestat, file.fileno(), whole, counts, 0) == 0:
                return min(1.0, float(_COUNTS.unpack(counts.raw)[0]) / pages)
        # The kernel lacks it, or does not tell this user.
        return _probed(file.fileno(), size)


def _probed(fd: int, size: int) -> float | None:
    """Returns the share of some pages, evenly spread over the file, that are in memory."""
    if hasattr(os, "posix_fadvise"):
        # Otherwise probing a page that is not there would make the kernel read its neighbours as well.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    offsets = np.unique(np.linspace(0, size - 1, min(size, _PROBES)).astype(np.int64)).tolist()
    found = [syscalls.is_resident(fd, offset) for offset in offsets]
    known = [resident for resident in found if resident is not None]
    return sum(known) / len(known) if known else None
