"""Faults put into a loader on purpose: slow reads, a read held up now and then, a worker process killed.

    slow-disk=MS       every batch takes MS milliseconds longer to read
    stall=MS@EVERY     one batch of EVERY takes MS milliseconds longer
    kill-worker        a worker process is killed with SIGKILL in mid-epoch

Reads are delayed where they happen, in the threads that read; the loader's options stay as they are.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.dataset import PackedDataset
from fastload.errors import OptionError
from fastload.read import Read, RowReader

KILL_WORKER = "kill-worker"


@dataclass(frozen=True)
class Fault:
    """One fault to inject.

    Attributes:
        text: as it was asked for.
        delay_s: by which a read of a batch is held up.
        every: batches of which one is held up; 0: no read is held up, a worker is killed.
    """

    text: str
    delay_s: float = 0.0
    every: int = 0


def parse_fault(text: str) -> Fault:
    """The fault that a text such as `slow-disk=20`, `stall=300@50` or `kill-worker` asks for.

    Raises:
        OptionError: none of these.
    """
    words = text.strip()
    if words == KILL_WORKER:
        return Fault(words)
    found = re.fullmatch(r"(?:slow-disk=(\d+(?:\.\d+)?)|stall=(\d+(?:\.\d+)?)@(\d+))", words)
    if not found or (found[3] is not None and int(found[3]) < 1):
        raise OptionError(
            f"--inject {text}: choose slow-disk=MS (every batch takes so many milliseconds longer to read), "
            f"stall=MS@EVERY (one batch of EVERY does, such as stall=300@50) or {KILL_WORKER}."
        )
    delay_ms, every = float(found[1] or found[2]), int(found[3] or 1)
    return Fault(words, delay_ms / 1000, every)


class Delays:
    """Which batches are held up, and what was held up; threads share it."""

    def __init__(self, fault: Fault, batch_size: int) -> None:
        self._fault = fault
        self._batch_size = batch_size
        self._lock = threading.Lock()
        self._rows = 0
        self.count = 0
        self.seconds = 0.0

    def before(self, num_rows: int) -> None:
        """Holds up the caller, who is about to read so many rows: several small batches are read at once."""
        fault = self._fault
        with self._lock:
            # Rounded, since the last batch of an epoch may be a short one.
            first, self._rows = self._rows, self._rows + num_rows
            period = fault.every * self._batch_size
            times = self._rows // period - first // period
            self.count += times
            self.seconds += times * fault.delay_s
        if times:
            time.sleep(times * fault.delay_s)


class DelayedReader(RowReader):
    """A `RowReader` that is held up before it reads."""

    delays: Delays | None = None

    def gather(self, rows: NDArray[np.int64], outs: Mapping[str, NDArray[Any]]) -> int:
        """See `RowReader.gather`."""
        if self.delays is not None:
            self.delays.before(len(rows))
        return super().gather(rows, outs)


class DelayedDataset(PackedDataset):
    """A `PackedDataset` whose reads are held up where threads of this process read it."""

    delays: Delays | None = None

    def open_reader(self, read: Read, *, cache_chunks: int, windows: bool) -> RowReader:
        """See `PackedDataset.open_reader`."""
        reader = DelayedReader(
            self.file, [name for name, _, _ in self.layout()], read, cache_chunks=cache_chunks, windows=windows
        )
        reader.delays = self.delays
        return reader


def signed(sample: tuple[Any, ...]) -> tuple[Any, ...]:
    """The sample with the number of the process that made it: a transform, and so run by worker processes."""
    return (*sample, os.getpid())
