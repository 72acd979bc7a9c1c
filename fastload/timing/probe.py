"""Reports of a `FastLoader`: by batch to a `Meter` (`Probe`), as totals (`LoaderStats`), as ranges to profilers.

Ranges of profilers are named `fastload.wait`, `fastload.read`, `fastload.copy`, ...

Off, a range costs 0.2 us. Ranges are on while `torch.profiler` records, and while a `Meter(ranges=True)` runs, which
also sends them to NVTX where CUDA is in use. Torch's profiler sees only the ranges of its own thread unless it records
all threads; NVTX sees all. No torch here, unless it is imported already.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastload.timing.results import BatchWork, NetworkUse


class WorkerInfo(NamedTuple):
    """The workers that make batches."""

    workers: int  # threads or processes
    ahead: int  # batches that may be in progress or ready at once
    by_threads: bool  # whether they are threads
    # Bytes of the pixels over bytes of the encoded images that a packed file holds; 0 where it holds pixels, so that
    # nothing is decoded.
    compression_ratio: float = 0.0


class Probe:
    """A record of the batch that is being asked for. Only the thread of the training loop writes it; no lock.

    `mark` returns the current time as a mark of the meter's `Clock`.
    """

    def __init__(self, mark: Callable[[], Any]) -> None:
        self._mark = mark
        self.in_copy = 0  # batches that are being copied to the device ahead of their use
        self.worker_info = WorkerInfo(0, 0, by_threads=False)  # set once
        # What came over the network since the pass began, also after its end; None: the dataset is on this machine.
        self.network: Callable[[], NetworkUse] | None = None  # set once
        self.clear()

    def clear(self, *, looked_at: bool = False) -> None:
        """Begins the record of the next batch, which is now asked for."""
        self.looked_at = looked_at  # whether CPU times are wanted, too
        self.ready: Any = None  # mark of the moment at which it was read and, where workers do it, transformed
        self.ready_running_s: float | None = None  # `time.thread_time()` at that moment, if CPU times are wanted
        self.copied: Any = None  # mark of the moment at which it was on the device
        self.samples = 0
        self.queue_depth: int | None = None  # batches that were ready when it was asked for
        self.work: BatchWork | None = None  # cost of making it; None: not known, or an echo, which costs nothing

    def note_depth(self, in_host_memory: int | None) -> None:
        """Records how many batches are ready: these, and those that are being copied to the device."""
        self.queue_depth = None if in_host_memory is None else in_host_memory + self.in_copy

    def note_work(self, work: BatchWork | None) -> None:
        """Adds the cost of a batch received from the workers. With `MixedEcho` the first steps receive several."""
        self.work = work if self.work is None or work is None else self.work + work

    def note_ready(self) -> None:
        """Marks the batch as ready; only the first call counts."""
        if self.ready is None:
            self.ready = self._mark()
            if self.looked_at:
                self.ready_running_s = time.thread_time()

    def note_copied(self) -> None:
        """Marks the batch as copied to the device."""
        self.copied = self._mark()


def is_probed(loader: object) -> bool:
    """Whether a loader reports to probes: the class that defines its `__iter__` also defines `iterate(probe)`."""
    names = {"__iter__", "iterate"}
    kind = next((kind for kind in type(loader).__mro__ if names & vars(kind).keys()), object)
    return names <= vars(kind).keys()


MOST_DAMAGED_ROWS = 1000
"""Numbers of damaged rows that `LoaderStats` holds; more are only counted."""


@dataclass(frozen=True)
class LoaderStats:
    """The counts of one epoch of a loader, so far.

    Attributes:
        fresh_samples: samples read from the file.
        consumed_samples: samples handed over, echoes included.
        steps: batches handed over, echoes included.
        elapsed_s: from the beginning of the epoch to the last batch handed over, or to its end; by the host's clock.
        stall_s: part of it in which training waited for a batch. On the CPU by the host's clock: time in `next()`,
            transforms there included. On a device by its own clock: time in which the stream that was current at
            `next()` was idle because the batch had not come, without transforms. Time in `next()` while the device
            still works is no stall.
        bytes_read: bytes copied from the file, for the fresh samples.
        echo: times each batch is used in this epoch.
        blocked_s: part of elapsed_s that the host spent in `next()` until it had a batch, without transforms: waiting
            for it to be read, for memory to read into, or for a device that has enough batches to go on with.
        read: how rows of a packed file are read, "map" or "pread", also where the dataset's `read` is "auto"; "" for
            another dataset.
        damaged_samples: damaged rows of the file that were replaced by other rows (on_damage="skip").
        damaged_rows: their numbers, the first `MOST_DAMAGED_ROWS` of them.
        fetched_bytes, fetched_chunks: of a dataset behind a URL, fetched over the network in this process meanwhile,
            for this epoch and the beginning of the next one; 0 for local files, like all of the following.
        cache_hits: chunks that were needed, or coming up, and lay in the cache, except those still held from before.
        requests, retries: requests that were sent, and how many of them repeated a failed one.
        network_wait_s: time for which threads waited for chunks, summed over all threads.
    """

    fresh_samples: int = 0
    consumed_samples: int = 0
    steps: int = 0
    elapsed_s: float = 0.0
    stall_s: float = 0.0
    bytes_read: int = 0
    echo: int = 1
    blocked_s: float = 0.0
    read: str = ""
    damaged_samples: int = 0
    damaged_rows: tuple[int, ...] = ()
    fetched_bytes: int = 0
    fetched_chunks: int = 0
    cache_hits: int = 0
    requests: int = 0
    retries: int = 0
    network_wait_s: float = 0.0

    def __repr__(self) -> str:
        what = [f"steps={self.steps:,}", f"fresh_samples={self.fresh_samples:,}"]
        what += [f"consumed_samples={self.consumed_samples:,}", f"echo={self.echo}"] if self.echo > 1 else []
        how = [f"{self.elapsed_s:.3g} s", f"{self.consumed_samples_per_s:,.0f} samples/s"]
        how += [f"stalled {self.stall_share:.1%} of the time", f"{self.bytes_read:,} bytes read"]
        how += [f"{self.damaged_samples:,} damaged samples replaced"] if self.damaged_samples else []
        how += [f"{self.fetched_bytes:,} bytes fetched"] if self.requests else []
        return f"LoaderStats({', '.join(what)})\n  {', '.join(how)}"

    @property
    def fresh_samples_per_s(self) -> float:
        """Samples read per second: the rate of the disk and of this loader."""
        return self.fresh_samples / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def consumed_samples_per_s(self) -> float:
        """Samples trained on per second; with echoes more than were read."""
        return self.consumed_samples / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def stall_share(self) -> float:
        """Part of the time that training waited for batches, 0 to 1: `stall_s` of `elapsed_s`."""
        return min(1.0, self.stall_s / self.elapsed_s) if self.elapsed_s else 0.0


_OFF = nullcontext()
_asked = [0]  # Meters that want ranges; one number for the process, as the profiler's own switch is


def ask_for_ranges(count: int) -> None:
    """Adds `count`, maybe negative, to the number of meters that want ranges in this process."""
    _asked[0] += count


def span(name: str) -> AbstractContextManager[Any]:
    """Returns a context manager: the range `fastload.NAME`, or one that does nothing if nobody records."""
    if not _asked[0]:
        profiler = sys.modules.get("torch.autograd.profiler")
        if not getattr(profiler, "_is_profiler_enabled", False):
            return _OFF
    return _recorded(f"fastload.{name}") if "torch" in sys.modules else _OFF


@contextmanager
def _recorded(name: str) -> Iterator[None]:
    torch: Any = sys.modules["torch"]
    nvtx = torch.cuda.nvtx.range(name) if _asked[0] and torch.cuda.is_initialized() else _OFF
    with nvtx, torch.profiler.record_function(name):
        yield
