"""Every error that fastload raises on purpose.

FastloadError
├── OptionError        (ValueError)    an argument is invalid, alone or with the others
├── SourceError        (ValueError)    the dataset given cannot be packed as it is
│   └── ImageError     (ValueError)    one image cannot be decoded
├── OutputError        (OSError)       the output cannot be written: file exists, disk full, no folder
├── PackError          (RuntimeError)  packing stopped: a worker died, another process is packing
│   └── ResumeError    (RuntimeError)  what an earlier run left belongs to another source or options
├── FormatError        (ValueError)    not a file fastload can read: damaged, foreign, newer
│   └── DamagedRowError (ValueError)   a row of a packed file is no longer what was packed
├── ReadError          (OSError)       the disk or network failed while a file was read
├── RemoteError        (OSError)       an object store or web server did not answer, or not as it should
│   ├── ObjectMissingError (MissingFileError)  there is no such object
│   ├── AccessError    (PermissionError)  credentials are missing, expired or not sufficient
│   ├── ReplacedError  (FileChangedError)  the object was replaced while it was in use
│   └── ObjectExistsError (FileExistsError)  there is an object of that name already
├── ForkError          (RuntimeError)  a client of an object store was used in a fork of the process that opened it
├── MissingFileError   (FileNotFoundError)  there is no such file
├── FileChangedError   (RuntimeError)  the file was replaced or truncated while it was open
├── StateError         (ValueError)    a saved loader state belongs to other data or options
├── ShareError         (RuntimeError)  rank or world size unknown, or contradictory; a rank does not answer
├── WorkerError        (RuntimeError)  a worker process raised or died; names the sample
│   └── WorkerTimeoutError (TimeoutError)  no batch came within FastLoader's timeout; says what hangs
├── CacheError         (MemoryError)   the rows to be cached in memory do not fit
├── SharedMemoryError  (OSError)       no memory for the batches that worker processes fill
└── MissingExtraError  (ImportError)   an optional package is missing; the message says which

A message says what is wrong, where, why, and how to fix it. The command `fastload` prints it as one line and exits
with code 1.
"""

from __future__ import annotations

import numbers
import os
import shlex
import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

_PACKAGE = os.path.join(os.path.dirname(__file__), "")


def typed(path: str | os.PathLike[str]) -> str:
    """Returns a path as it is typed in a shell, for the commands that messages give."""
    text = os.fspath(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


class FastloadError(Exception):
    """Base class of all errors that fastload raises on purpose."""


class OptionError(FastloadError, ValueError):
    """An argument is invalid, alone or together with the others."""


class SourceError(FastloadError, ValueError):
    """The dataset given cannot be packed as it is."""


class ImageError(SourceError):
    """One image cannot be decoded; the message gives the reason only, callers add the image's key."""


class OutputError(FastloadError, OSError):
    """The output cannot be written: the file exists, the disk is full, the folder is missing or read-only."""


class PackError(FastloadError, RuntimeError):
    """Packing stopped before its end; the same command continues with what was done."""


class ResumeError(PackError):
    """Unfinished work next to the output belongs to another source, other options or another release."""


class FormatError(FastloadError, ValueError):
    """A file cannot be read: it is damaged, not HDF5, unsafe, or of a newer format version."""


class ReadError(FastloadError, OSError):
    """The disk or the network failed while a packed file was read; names the file and, where known, row and key."""


class DamagedRowError(FormatError):
    """Rows of a packed file are no longer what was packed: their digests differ, or they cannot be decoded any more.

    `rows` are their numbers in the file; empty where the error came through the workers of torch's `DataLoader`.
    """

    def __init__(self, message: str, rows: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.rows = rows


class MissingFileError(FastloadError, FileNotFoundError):
    """There is no file of that name."""


class FileChangedError(FastloadError, RuntimeError):
    """The file was replaced, truncated or written to while it was open."""


class RemoteError(FastloadError, OSError):
    """An object store or web server did not answer, or not as it should; names the URL, without its query."""


class ObjectMissingError(RemoteError, MissingFileError):
    """There is no object of that name, or no such bucket."""


class AccessError(RemoteError, PermissionError):
    """The server refused the credentials: they are missing, expired, or do not suffice."""


class ReplacedError(RemoteError, FileChangedError):
    """The object was replaced while it was in use: its ETag is another one."""


class ObjectExistsError(RemoteError, FileExistsError):
    """There is an object of that name already, and writing was allowed only if there was none."""


class ForkError(FastloadError, RuntimeError):
    """A client of an object store was used in a fork of the process that opened it."""


class StateError(FastloadError, ValueError):
    """A saved loader state belongs to another file, seed, shuffle or release."""


class ShareError(FastloadError, RuntimeError):
    """Rank or world size are unknown, two sources of them disagree, or a rank does not answer the others."""


class WorkerError(FastloadError, RuntimeError):
    """A worker process raised or died; the message has the sample's name and the worker's traceback."""


class WorkerTimeoutError(WorkerError, TimeoutError):
    """No batch came within the loader's timeout; the message says which sample is being made, and by which code."""


class CacheError(FastloadError, MemoryError):
    """The rows that a loader was asked to cache in memory do not fit; the message says by how much."""


class SharedMemoryError(FastloadError, OSError):
    """There is not enough shared memory for the batches that worker processes fill."""


class MissingExtraError(FastloadError, ImportError):
    """An optional package is missing; the message says how to install it."""


def training_needs(exc: ModuleNotFoundError, what: str) -> ModuleNotFoundError | MissingExtraError:
    """Returns the error of `what`, where a package is missing that packing does without; of any other package `exc`."""
    if exc.name not in ("torch", "psutil"):
        return exc
    return MissingExtraError(
        f"{what} needs {exc.name}, which is not installed here. Packing does without; the rest needs: "
        "pip install torch psutil (of torch the build for this machine's CPU or CUDA)."
    )


def shortened(text: str, most: int = 10_000) -> str:
    """Returns a text with at most so many characters of its beginning and end, and how many were left out."""
    if len(text) <= most:
        return text
    part = most // 2
    return f"{text[:part]}\n... ({len(text) - 2 * part:,} characters left out) ...\n{text[-part:]}"


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is an int, Python's or NumPy's, and no bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_whole(name: str, value: object, *, least: int, others: str = "") -> None:
    """Raises OptionError unless the option `name` is a whole number of at least `least`.

    `others` tells the message of other accepted values, such as ' or None'.
    """
    if not is_whole(value) or value < least:
        raise OptionError(f"{name}={value!r}: give a whole number, {least} or more{others}")


def check_choice(name: str, value: object, accepted: Sequence[object]) -> None:
    """Raises OptionError for a value that is not one of those accepted."""
    if value not in accepted:
        raise OptionError(f"{name}={value!r} is not known; accepted: {', '.join(map(str, accepted))}.")


def level_of_the_user() -> int:
    """Returns the `stacklevel` by which a warning of the caller names the line that called this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    return level


def check_split(where: str, split: object, known: Collection[str], *, without: str = "") -> None:
    """Raises OptionError unless a file has a split of that name.

    Args:
        where: names the file.
        known: names of its splits; "all" alone, or none, where it was packed without splits.
        without: further advice for a file without splits, after the hint that all rows are read without a split.
    """
    if isinstance(split, str) and split in known:
        return
    names = ", ".join(map(repr, known)) or "none"
    if set(known) <= {"all"}:
        raise OptionError(f"{where}: no split {split!r}; it has {names}. Leave split out for all rows{without}.")
    from difflib import get_close_matches  # every command imports this module

    asked = str(split).lower()
    near = [name for name in known if asked.startswith(name.lower()) or (asked and name.lower().startswith(asked))]
    near = near or get_close_matches(asked, known, 1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    raise OptionError(f"{where}: no split {split!r}; it has {names}. {hint}Leave split out for all rows.")
