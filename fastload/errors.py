"""Every error that fastload raises on purpose.

FastloadError
├── OptionError        (ValueError)    an argument has no meaning, or not with the others
├── SourceError        (ValueError)    the dataset given cannot be packed as it is
│   └── ImageError     (ValueError)    one image cannot be decoded
├── OutputError        (OSError)       the output cannot be written: it exists, no space, no folder
├── PackError          (RuntimeError)  packing stopped: a worker died, another process is packing
│   └── ResumeError    (RuntimeError)  what an earlier run left does not belong to this one
├── FormatError        (ValueError)    not a file fastload can read: damaged, foreign, newer
├── MissingFileError   (FileNotFoundError)  there is no such file
├── FileChangedError   (RuntimeError)  the file was replaced or truncated while it was open
├── StateError         (ValueError)    a saved loader state belongs to other data or options
├── ShareError         (RuntimeError)  rank and world size cannot be known, or contradict; a rank does not answer
├── WorkerError        (RuntimeError)  a worker process raised, or died; names the sample
├── CacheError         (MemoryError)   the rows to be kept in memory do not fit
├── SharedMemoryError  (OSError)       no memory for the batches that worker processes fill
└── MissingExtraError  (ImportError)   an optional package is absent; the message names its extra

A message says what, where, why, and the mend. `fastload` (the command) prints it as one line, exit code 1.
"""

from __future__ import annotations


class FastloadError(Exception):
    """Base of all errors that fastload raises on purpose."""


class OptionError(FastloadError, ValueError):
    """An argument has no meaning, or not together with the others."""


class SourceError(FastloadError, ValueError):
    """The dataset given cannot be packed as it is."""


class ImageError(SourceError):
    """One image cannot be decoded; the message gives the reason, whoever catches it adds the key."""


class OutputError(FastloadError, OSError):
    """The output cannot be written: it exists, the disk is full, the folder is missing or read-only."""


class PackError(FastloadError, RuntimeError):
    """Packing stopped before its end; what was done is kept for the same command to continue."""


class ResumeError(PackError):
    """What an earlier run left beside the output belongs to another source, option or release."""


class FormatError(FastloadError, ValueError):
    """A file cannot be read: it is damaged, not HDF5, not safe, or of a newer format."""


class MissingFileError(FastloadError, FileNotFoundError):
    """There is no file of that name."""


class FileChangedError(FastloadError, RuntimeError):
    """The file was replaced, truncated or written to while it was open."""


class StateError(FastloadError, ValueError):
    """A saved loader state belongs to another file, seed, shuffle or release."""


class ShareError(FastloadError, RuntimeError):
    """Rank and world size cannot be known, two sources of them disagree, or a rank does not answer the others."""


class WorkerError(FastloadError, RuntimeError):
    """A worker process raised, with the sample's name and the worker's traceback in the message; or it died."""


class CacheError(FastloadError, MemoryError):
    """The rows that a loader was asked to keep in memory do not fit; the message says by how much."""


class SharedMemoryError(FastloadError, OSError):
    """There is no memory, or not enough of it, for the batches that worker processes fill."""


class MissingExtraError(FastloadError, ImportError):
    """An optional package is absent; the message names the extra that installs it."""
