"""The file in which a process records its events, one line of JSON each; `injected` lists the kinds."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from typing import Any

clock = time.perf_counter


class EventFile:
    """The file of this process; a forked child opens its own. Without a folder nothing is recorded."""

    def __init__(self) -> None:
        self.folder = os.environ.get("FASTLOAD_DOCTOR", "")
        self._fd = -1
        self._pid = 0
        self._file = (0, 0)

    def write(self, event: dict[str, Any] | str) -> None:
        """Appends an event, given as a dict or as its JSON. If that fails, the event is lost and the script goes on."""
        with suppress(OSError, ValueError, TypeError):  # the folder is gone, the disk is full
            if self.folder:
                self._append(event)

    def record_into(self, folder: str) -> str:
        """Records into this folder from now on, or stops with an empty name; returns the folder used until now."""
        if self._pid == os.getpid() and self._is_ours():
            os.close(self._fd)
        self._pid = 0
        before, self.folder = self.folder, folder
        return before

    def _append(self, event: dict[str, Any] | str) -> None:
        pid = os.getpid()
        if pid != self._pid or not self._is_ours():
            self._pid = pid
            path = os.path.join(self.folder, f"{pid}-{time.monotonic_ns()}.jsonl")
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            self._file = identity(self._fd)
            self._append({
                "e": "process",
                "pid": pid,
                "rank": os.environ.get("RANK", ""),
                "local_world": os.environ.get("LOCAL_WORLD_SIZE", ""),
                "cpus": available_cpus() or os.cpu_count() or 1,
                "python": ".".join(map(str, sys.version_info[:3])),
                "t": clock(),
            })  # fmt: skip
        # One write, so that a line is there as a whole or not at all.
        line = event if isinstance(event, str) else json.dumps(event, separators=(",", ":"))
        os.write(self._fd, (line + "\n").encode("utf-8", "backslashreplace"))

    def _is_ours(self) -> bool:
        """Whether the descriptor is still the one we opened: a daemon closes all its descriptors, and opens others."""
        try:
            return identity(self._fd) == self._file
        except OSError:
            return False


def identity(fd: int) -> tuple[int, int]:
    """Returns device and inode of an open file."""
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def available_cpus() -> int:
    """Returns the number of CPUs that this process may use; 0: not known."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0


events = EventFile()


def note_fault(where: str) -> None:
    """Records the exception that is being handled as a failure of this package."""
    kind, error, _ = sys.exc_info()
    events.write({"e": "fault", "what": f"{where}: {getattr(kind, '__name__', '')}: {str(error)[:300]}"})
