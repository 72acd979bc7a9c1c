"""Faults injected on purpose: slow reads, a read that stalls now and then, a worker process that is killed.

    slow-disk=MS       every batch takes MS milliseconds longer to read
    stall=MS@EVERY     one batch of EVERY takes MS milliseconds longer
    kill-worker        a worker process is killed with SIGKILL in mid-epoch

The delay happens in the threads that read; the loader's options stay as they are.
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
from fastload.read.reader import Read, RowReader

KILL_WORKER = "kill-worker"


@dataclass(frozen=True)
class Fault:
    """One fault to inject.

    Attributes:
        text: of the option.
        delay_s: added to the read of a batch.
        every: one batch of this many is delayed; 0: none, a worker is killed instead.
    """

    text: str
    delay_s: float = 0.0
    every: int = 0


def parse_fault(text: str) -> Fault:
    """Returns the fault that `slow-disk=20`, `stall=300@50` or `kill-worker` asks for.

    Raises:
        OptionError: none of these.
    """
    words = text.strip()
    if words == KILL_WORKER:
        return Fault(words)
    found = re.fullmatch(r"(?:slow-disk=(\d+(?:\.\d+)?)|stall=(\d+(?:\.\d+)?)@(\d+))", words)
    if not found or (found[3] is not None and int(found[3]) < 1):
        raise OptionError(
            f"--inject {text}: choose slow-disk=MS (every batch takes MS milliseconds longer to read), "
            f"stall=MS@EVERY (one batch of EVERY does, such as stall=300@50) or {KILL_WORKER}."
        )
    delay_ms, every = float(found[1] or found[2]), int(found[3] or 1)
    return Fault(words, delay_ms / 1000, every)


class Delays:
    """Decides which reads are delayed, and counts them. Thread-safe.

    Attributes:
        count: delays so far.
        seconds: their sum.
    """

    def __init__(self, fault: Fault, batch_size: int) -> None:
        self._delay_s, self._period = fault.delay_s, fault.every * batch_size
        self._lock = threading.Lock()
        self._rows = self.count = 0
        self.seconds = 0.0

    def before(self, num_rows: int) -> None:
        """Sleeps if a batch that is to be delayed is among the next `num_rows` rows."""
        with self._lock:
            # Counted in rows, not in calls: several small batches are read at once, and an epoch's last may be short.
            first, self._rows = self._rows, self._rows + num_rows
            times = self._rows // self._period - first // self._period
            self.count += times
            self.seconds += times * self._delay_s
        if times:
            time.sleep(times * self._delay_s)


class DelayedReader(RowReader):
    """A `RowReader` that sleeps before it reads, as `delays` decides."""

    delays: Delays | None = None

    def gather(self, rows: NDArray[np.int64], outs: Mapping[str, NDArray[Any]]) -> int:
        """Sleeps if it is time to, then reads the rows."""
        if self.delays is not None:
            self.delays.before(len(rows))
        return super().gather(rows, outs)


class DelayedDataset(PackedDataset):
    """A `PackedDataset` whose reads are delayed, when threads of this process read it."""

    delays: Delays | None = None

    def open_reader(self, read: Read, *, cache_chunks: int, windows: bool) -> RowReader:
        """Opens a `DelayedReader` with the same options."""
        reader = DelayedReader(
            self.file, [name for name, _, _ in self.layout()], read, cache_chunks=cache_chunks, windows=windows
        )
        reader.delays = self.delays
        return reader


def signed(sample: tuple[Any, ...]) -> tuple[Any, ...]:
    """A transform that appends the id of its process to the sample."""
    return (*sample, os.getpid())
