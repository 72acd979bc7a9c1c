"""Encoded images that lie at known places of one file: of an Arrow table, or of what a table was unpacked to."""

from __future__ import annotations

import os
import tempfile
import weakref
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import FileChangedError, ImageError, SourceError


@dataclass(frozen=True, eq=False)
class FileSpans:
    """Pieces of one file, which is opened anew for each read.

    Attributes:
        path: absolute path of the file.
        file_size: its bytes when it was listed.
        file_mtime_ns: its time of modification then.
        offsets: int64 (F,), where each piece begins.
        sizes: int64 (F,), its bytes.
        owner: what keeps the file alive in the process that made it; left behind when pickled.
    """

    path: str
    file_size: int
    file_mtime_ns: int
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    owner: object = field(default=None, repr=False)

    def read(self, i: int) -> bytes:
        """The whole piece i."""
        return self._read(i, int(self.sizes[i]))

    def read_head(self, i: int, size: int) -> bytes:
        """The first bytes of piece i."""
        return self._read(i, min(size, int(self.sizes[i])))

    def take(self, indices: NDArray[np.integer[Any]]) -> FileSpans:
        """Some of the pieces, in the order of indices."""
        return replace(self, offsets=self.offsets[indices], sizes=self.sizes[indices])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "owner": None}

    def _read(self, i: int, size: int) -> bytes:
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as exc:
            raise FileChangedError(
                f"{self.path}: can no longer be opened: {exc.strerror}. Put it back, or list the dataset again."
            ) from exc
        try:
            status = os.fstat(fd)
            if (status.st_size, status.st_mtime_ns) != (self.file_size, self.file_mtime_ns):
                raise FileChangedError(
                    f"{self.path}: was written to or replaced since it was listed. Leave it alone while it is read."
                )
            data = os.pread(fd, size, int(self.offsets[i]))
        except OSError as exc:
            raise ImageError(f"cannot be read from {self.path}: {exc.strerror}") from exc
        finally:
            os.close(fd)
        if len(data) != size:
            raise ImageError(f"reaches beyond the end of {self.path}")
        return data


class Spill:
    """A temporary file without a name, gone with the process whatever ends it; other processes open it through /proc.

    Where there is no /proc it has a name, and goes when this object does.
    """

    def __init__(self, num_bytes: int, beside: Path) -> None:
        """Open it where there is room.

        Args:
            num_bytes: what it will hold at most.
            beside: a folder that is tried when those for temporary files are too small.

        Raises:
            SourceError: there is no room anywhere.
        """
        folders = [os.environ.get("TMPDIR", ""), "/var/tmp", tempfile.gettempdir(), str(beside)]
        folder = next((folder for folder in folders if folder and _has_room(folder, num_bytes)), None)
        if folder is None:
            raise SourceError(
                f"{beside}: its images are unpacked to a temporary file of {num_bytes / 1e9:.2f} GB first, for which "
                f"there is no room in {', '.join(dict.fromkeys(filter(None, folders)))}. Name a folder with room in "
                "the environment variable TMPDIR."
            )
        self._fd, name = tempfile.mkstemp(prefix="fastload-", dir=folder)
        self._end = 0
        if os.path.isdir("/proc/self/fd"):
            os.unlink(name)
            self._path, name = f"/proc/{os.getpid()}/fd/{self._fd}", ""
        else:
            self._path = name
        weakref.finalize(self, _let_go, self._fd, name, os.getpid())

    def write(self, data: memoryview) -> int:
        """Append; returns where it begins.

        Raises:
            SourceError: the disk is full.
        """
        start, done = self._end, 0
        try:
            while done < len(data):
                done += os.write(self._fd, data[done:])
        except OSError as exc:
            raise SourceError(
                f"the temporary file for its images cannot be written: {exc.strerror}. Name a folder with room in the "
                "environment variable TMPDIR."
            ) from exc
        self._end += len(data)
        return start

    def spans(self, offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> FileSpans:
        """What was written, in pieces. Nothing may be written afterwards."""
        status = os.fstat(self._fd)
        return FileSpans(self._path, status.st_size, status.st_mtime_ns, offsets, sizes, self)


def _let_go(fd: int, name: str, pid: int) -> None:
    os.close(fd)
    if name and os.getpid() == pid:  # not in a child that was forked
        os.unlink(name)


def _has_room(folder: str, num_bytes: int) -> bool:
    try:
        status = os.statvfs(folder)
        return os.access(folder, os.W_OK) and status.f_bavail * status.f_frsize > num_bytes + 2**26
    except OSError:
        return False
