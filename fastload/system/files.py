"""Output files, checked before any work and written whole or not at all; and reads of any length."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from fastload.errors import OutputError

_MAX_READ_BYTES = 1 << 30


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
    """Fills memory with a file's bytes from `offset` on; returns how many were read, fewer at its end.

    Args:
        fd: file descriptor, open for reading.
        view: writable bytes, one dimension.
        offset: byte of the file.
    """
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
