"""A run: batches of one epoch after another, made ahead by a pool. And what a pool is."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from fastload.prefetch.auto_workers import WatchedPass
from fastload.prefetch.lookahead import Planned
from fastload.prefetch.ring import Slot
from fastload.prefetch.waiting import Patience
from fastload.prefetch.work import Epochs, Orders, Work
from fastload.read.fetch_ahead import FetchAhead
from fastload.timing.probe import WorkerInfo


class Coming(Iterator[Planned]):
    """Planned batches, some of which can be put back. One thread asks at a time."""

    def __init__(self, source: Iterator[Planned]) -> None:
        self._source, self._again = source, deque[Planned]()

    def __next__(self) -> Planned:
        return self._again.popleft() if self._again else next(self._source)

    def put_back(self, item: Planned) -> None:
        """Lets it come next, again."""
        self._again.append(item)


@dataclass(eq=False)
class Run:
    """Batches that a pool makes, until it is left."""

    number: int  # runs of a pool count up
    coming: Coming
    orders: Orders
    patience: Patience
    timed: bool = False  # whether works say what they cost
    parts: int = 1  # in which the next work is made
    ahead: FetchAhead | None = None  # fetches for worker processes, which do not
    resources: ExitStack = field(default_factory=ExitStack)  # closed with it
    under_way: deque[Work] = field(default_factory=deque)  # in order; the first is handed over next
    closed: bool = False
    loop_waits: bool = True  # whether who waits for works is the loop, whose waits have a limit
    pid: int = field(default_factory=os.getpid)

    def end_waits(self) -> None:
        """Ends the waits for its works, in whatever thread: it is over."""
        self.closed = True
        self.orders.done_one.put(None)


class Pool(Protocol):
    """Threads, or worker processes, that make works in slots; kept from one epoch and run to the next.

    Attributes:
        number: of threads or processes.
        short_switches: whether threads decode, compute or compare rows, so that they need a `ShortSwitchInterval`.
        by_threads: whether threads fill the slots, and any thread may take works.
        watched_pass: measurements of the pass, to choose the number of workers; None: nobody asks.
    """

    number: int
    by_threads: ClassVar[bool]
    watched_pass: WatchedPass | None

    @property
    def usable(self) -> bool:
        """Whether another run can begin: no thread hangs, no process died."""

    @property
    def short_switches(self) -> bool:
        """See above; it changes as rows have been compared."""

    @property
    def worker_info(self) -> WorkerInfo:
        """The workers, and the batches that they have to do."""

    def begin(self, epochs: Epochs, *, timed: bool) -> Run:
        """Begins a run, and ends the one before it."""

    def begin_pass(self) -> None:
        """Begins the measurements of a pass."""

    def ask(self, run: Run) -> None:
        """Has batches made in all slots that are free."""

    def first(self, run: Run) -> Work | None:
        """Waits for the next work, in order; None: there are no more. Raises what came instead, with its traceback."""

    def hand_over(self, run: Run, work: Work) -> list[Work]:
        """Returns the batches of a work: on the CPU as its user gets them, else to be copied."""

    def release(self, slot: Slot) -> None:
        """Makes a slot free that was copied to a device."""

    def depth(self, run: Run) -> int:
        """Returns how many batches `first` would give without waiting, and without an error."""

    def leave(self, run: Run) -> None:
        """Ends a run: when this returns nothing writes to its slots any longer, or nobody looks at them."""

    def describe(self, run: Run) -> str:
        """Returns sentences on what the next work waits for."""

    def leave_behind(self) -> None:
        """Notes that a thread hangs, which uses slots: they are not used again."""

    def fail(self, run: Run, error: BaseException) -> None:
        """Ends a run after an error."""

    def close(self) -> None:
        """Ends the workers, and closes the file. Batches handed over stay valid."""
