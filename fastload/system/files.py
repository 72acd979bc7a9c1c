"""Files: output checked before any work and written whole or not at all; reads of any length; the page cache.

Nothing is written through a symbolic link that lies where an unfinished file belongs (`open_output`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import stat
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fastload.errors import FastloadError, OutputError
from fastload.system import syscalls

_MAX_READ_BYTES = 1 << 30
_SYNC_FILE_RANGE_WRITE = 2
_CACHESTAT = 451  # its number on x86-64 and aarch64, from Linux 6.5 on
_RANGE, _COUNTS = struct.Struct("=QQ"), struct.Struct("=QQQQQ")
_PROBES = 256


def check_new_file(path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Raises OutputError now, not after minutes of work, if no file could be written to `path`.

    That is where it exists (unless `force`), is a folder, or where its folder is missing or not writable.
    """
    path = Path(path)
    folder = path.absolute().parent
    if path.is_dir():
        raise OutputError(f"{path}: is a folder. Give the name of a file in it.")
    # lexists: a broken link exists, too.
    if os.path.lexists(path) and not force:
        raise OutputError(f"{path}: exists. Choose another name, or replace it with `--overwrite` (`force=True`).")
    if not folder.is_dir():
        raise OutputError(f"{path}: its folder {folder} does not exist. Make it first.")
    if not os.access(folder, os.W_OK | os.X_OK):
        why = "no permission to make a file in it, or a read-only disk"
        raise OutputError(f"{path}: in {folder} no file can be made ({why}). Choose another folder.")


def save_text(text: str, path: Path, *, force: bool) -> None:
    """Writes `text` as UTF-8 to `path`, otherwise like `save_bytes`."""
    # Surrogates stand for bytes of a file name that are not UTF-8; they are written out.
    save_bytes(text.encode("utf-8", errors="backslashreplace"), path, force=force)


def save_bytes(data: bytes, path: Path, *, force: bool) -> None:
    """Writes `data` to `path`, by way of a temporary file in the same folder: nobody sees half of it.

    Where the system can, a new file has no name until it is whole, so that who is killed leaves nothing.

    Raises:
        OutputError: it cannot be written, or `force` is not set and the file was created meanwhile.
    """
    path = path.absolute()
    unfinished: Path | None = None
    try:
        if not force and _save_unnamed(data, path):
            return
        handle, name = tempfile.mkstemp(prefix=f".{path.name[:40]}.", suffix=".part", dir=path.parent)
        unfinished = Path(name)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files that only their owner can read.
        unfinished.chmod(mode_for(path))
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
        raise OutputError(f"{path}: exists. Choose another name, or replace it with `--overwrite`.") from exc
    except OSError as exc:
        raise OutputError(f"{path}: cannot be written ({exc.strerror or exc}).") from exc
    finally:
        if unfinished is not None:
            unfinished.unlink(missing_ok=True)


def _save_unnamed(data: bytes, path: Path) -> bool:
    """Writes a new file that gets its name when it is whole; returns False where the system has no such files.

    FileExistsError: there is a file of that name; OSError: as on a full disk.
    """
    try:
        fd = os.open(path.parent, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except (AttributeError, OSError):  # not Linux; a file system without them
        return False
    with os.fdopen(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(fd)
        os.fchmod(fd, mode_for(path))
        try:
            # As open(2) advises. With a descriptor, which counts for nothing here, Python lets the link be followed.
            os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd)
        except FileExistsError:
            raise
        except OSError:  # no /proc, or no hard links
            return False
    return True


def is_below(path: Path, folder: Path) -> bool:
    """Whether a path lies in a folder or below, or is the folder, links followed."""
    # Path.resolve raises RuntimeError for links that lead back to themselves.
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def mode_for(path: Path) -> int:
    """Returns the permissions of a new file at `path`: the replaced file's, or what the umask leaves."""
    with contextlib.suppress(OSError):
        return stat.S_IMODE(os.stat(path).st_mode) & 0o777
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask


def open_output(path: Path, flags: int, mode: int = 0o666) -> int:
    """Opens a file that belongs to an output, as `os.open`; never through a symbolic link, where the system can tell.

    OutputError: a link or something else that is no file lies there; OSError: as `os.open`.
    """
    try:
        # Without waiting for somebody at the other end of a pipe.
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0), mode)
    except OSError as exc:
        if path.is_symlink():
            raise OutputError(
                f"{path}: is a symbolic link. It is not followed, since what it leads to would be overwritten. Remove "
                f"the link, or choose another output."
            ) from exc
        if exc.errno not in (errno.ENXIO, errno.EISDIR):  # a pipe that nobody reads, a folder
            raise
        fd = -1
    if fd < 0 or not stat.S_ISREG(os.fstat(fd).st_mode):
        if fd >= 0:
            os.close(fd)
        raise OutputError(f"{path}: is a folder, device or pipe. This name is needed for a file; remove it.")
    return fd


@contextlib.contextmanager
def output_errors(message: str) -> Iterator[None]:
    """Turns an OSError into an OutputError of the same errno; the last `{}` in the message becomes the reason."""
    try:
        yield
    except FastloadError:
        raise
    except OSError as exc:
        what, _, advice = message.rpartition("{}")
        error = OutputError(f"{what}{exc.strerror or exc}{advice}")
        error.errno = exc.errno
        raise error from exc


def sync(fd: int) -> None:
    """Waits until a file is on the disk, as fsync; where that fails, the file is read from the disk from then on."""
    try:
        os.fsync(fd)
    except OSError:
        # Pages that could not be written count as clean then, and would be taken for what the disk holds (fsync(2)).
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        raise


def start_writing(fd: int, offset: int, num_bytes: int) -> None:
    """Has the kernel begin to write a part of a file to the disk, so that `sync` has less to wait for; where it can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(num_bytes), _SYNC_FILE_RANGE_WRITE)


def sync_folder(folder: Path) -> None:
    """Waits until the names of files in a folder are on the disk, as fsync does for their content."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as exc:
        if exc.errno not in (errno.EINVAL, errno.ENOTSUP):  # Some network mounts have no such thing.
            raise
    finally:
        os.close(fd)


def sync_files_below(folder: Path) -> None:
    """Waits until all files below a folder are on the disk: by one call for its file system, where there is one."""
    with contextlib.suppress(AttributeError):
        syncfs = ctypes.CDLL(None, use_errno=True).syncfs  # Linux
        fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if syncfs(fd) != 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(folder))
            return
        finally:
            os.close(fd)
    for above, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(above, name), "rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(above))


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
