"""Files of a cache: whom they may belong to, and how they are opened, through no link.

A cache is its user's alone: whoever else could write there could change what is read from it, or have files of the user
written to through a link. Only where `Remote(shared=True)` agrees to that, others may.
"""

from __future__ import annotations

import errno
import os
import pwd
import stat
from contextlib import suppress
from pathlib import Path

from fastload.errors import CacheError
from fastload.system import syscalls

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def check_own(path: Path, *, is_root: bool) -> None:
    """Raises CacheError where somebody else could replace files in a folder.

    `is_root`: of the cache's own folder, in which others may not even make files; in the one above they may, if it is
    one as /tmp is.
    """
    status = os.stat(path)
    mode = stat.S_IMODE(status.st_mode)
    writers = 0o022 if is_root else 0o002 if not mode & stat.S_ISVTX else 0
    why = f"can be written to by others (mode {mode:o})" if mode & writers else ""
    if status.st_uid not in (os.geteuid(), 0):
        why = f"belongs to {_user(status.st_uid)}"
    if is_root and path.is_symlink():
        why = "is a link"
    if why:
        raise CacheError(
            f"{path}: the cache {why}: others could change what is read from it. Make it yours alone (`chmod -R "
            f"go-rwx {path}`, as its owner), or name another folder: Remote(cache=...), FASTLOAD_CACHE. Who trusts all "
            f"that write there: Remote(shared=True), with which each row is compared each time that it is read."
        )


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


class Folder:
    """A folder of a cache, open: its files are found in it, wherever its path leads meanwhile. Threads share it.

    Args:
        path: of the folder.
        shared: whether it and its files may belong to others; new files then get its permissions.

    Raises:
        FileNotFoundError: there is none.
        CacheError: it is a link, or belongs to somebody else.
    """

    def __init__(self, path: Path, *, shared: bool = False) -> None:
        self.path, self._shared, self._fd = path, shared, -1
        try:
            self._fd = os.open(path, _FOLDER)
        except OSError as exc:
            raise self._refused(path, exc) from exc
        self._check(self._fd, path)

    def open(self, name: str, flags: int) -> int:
        """Opens a file by its name, which may lead into folders below; with os.O_CREAT it and they are made.

        Raises:
            FileNotFoundError: it is not there; with os.O_CREAT: the folder was removed.
            CacheError: it is a link or lies behind one, is no file, or belongs to somebody else.
        """
        *above, last = name.split("/")
        at = self._fd
        try:
            for part in above:
                at, before = self._below(at, part, make=bool(flags & os.O_CREAT)), at
                if before != self._fd:
                    os.close(before)
            try:
                fd = os.open(last, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=at)
            except OSError as exc:
                raise self._refused(self.path / name, exc) from exc
        finally:
            if at != self._fd:
                os.close(at)
        self._check(fd, self.path / name)
        if self._shared and flags & os.O_CREAT:
            self._give_permissions(fd)
        return fd

    def _below(self, at: int, part: str, *, make: bool) -> int:
        try:
            return os.open(part, _FOLDER, dir_fd=at)
        except FileNotFoundError:
            if not make:
                raise
            with suppress(FileExistsError):  # another process was first
                os.mkdir(part, 0o700, dir_fd=at)
            fd = os.open(part, _FOLDER, dir_fd=at)
            if self._shared:
                self._give_permissions(fd)
            return fd
        except OSError as exc:
            raise self._refused(self.path / part, exc) from exc

    def _check(self, fd: int, path: Path) -> None:
        """Raises CacheError, and closes it, where it is neither a regular file nor a folder, or somebody else's."""
        status, why = syscalls.status_of(fd), ""
        if not stat.S_ISREG(status.mode) and not stat.S_ISDIR(status.mode):
            why = "is no file"
        elif not self._shared and status.owner not in (os.geteuid(), 0):
            why = f"belongs to {_user(status.owner)}"
        elif self._shared and stat.S_ISREG(status.mode) and status.links > 1:
            why = "has another name elsewhere (a hard link)"
        if why:
            os.close(fd)
            raise CacheError(f"{path}: {why}, and is not used as part of a cache. {_WAY_OUT}")

    def _refused(self, path: Path, exc: OSError) -> Exception:
        if exc.errno in (errno.ELOOP, errno.ENOTDIR):
            return CacheError(f"{path}: is a link, and nothing is read or written through one. {_WAY_OUT}")
        return exc

    def _give_permissions(self, fd: int) -> None:
        """Gives what was made the permissions of this folder, if it belongs to this user."""
        mode, status = os.fstat(self._fd).st_mode, os.fstat(fd)
        wanted = mode & (0o2777 if stat.S_ISDIR(status.st_mode) else 0o666)
        if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) != wanted:
            os.fchmod(fd, wanted)

    def rename(self, name: str, new: str) -> None:
        """Gives a file another name, replacing the file that has it."""
        os.replace(name, new, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


_WAY_OUT = "Remove it, or name another folder: Remote(cache=...), FASTLOAD_CACHE."
