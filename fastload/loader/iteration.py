"""One pass of a loader over the rest of an epoch, and the batches that it hands over.

planned batches -> producer (read, or made by workers; on the device) -> stages of each use -> `Batch`
"""

from __future__ import annotations

import copy
import functools
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from fastload.errors import OptionError, typed
from fastload.loader.batch import Batch, DictBatch
from fastload.plan import Ends, Pace, PlannedBatch, Use
from fastload.plan.cursor import Position
from fastload.prefetch.inputs import Input
from fastload.prefetch.loader_plan import LoaderPlan
from fastload.prefetch.producer import Producer
from fastload.prefetch.work import Stage, Work
from fastload.timing.clocks import InFlight, StreamWaits
from fastload.timing.probe import MOST_DAMAGED_ROWS, LoaderStats, Probe, span
from fastload.timing.results import NetworkUse

_log = logging.getLogger("fastload")


@dataclass
class PassCounter:
    """The numbers behind `LoaderStats`, counted while a pass runs; times in seconds, by the clock or the device's."""

    clock: Callable[[], float] = time.perf_counter
    echo: int = 1
    batches: int = 0  # batches read; echoes do not count
    asked: int = 0  # times a batch was asked for
    # When the first batch was handed over, and how long it was waited for: no step runs before it.
    first_s: float = 0.0
    first_waited_s: float = 0.0
    fresh: int = 0
    consumed: int = 0
    steps: int = 0
    # Seconds that the loop waited for batches; `waited_s` without augmenting at the hand-over.
    stall_s: float = 0.0
    waited_s: float = 0.0
    bytes_read: int = 0
    damaged: int = 0  # samples left out because their rows are damaged
    damaged_rows: dict[int, None] = field(default_factory=dict)  # the first ones of these rows
    begun_s: float = 0.0  # when the pass began
    last_s: float = 0.0  # when a batch was last handed over
    in_flight: InFlight | None = None  # the loader's batches on a device, and the waits of its stream; None: the CPU
    on_stream: StreamWaits = field(default_factory=StreamWaits)  # of this pass
    ended: bool = False  # whether the pass is over
    read: str = ""  # how rows of a packed file are read
    used: Callable[[], NetworkUse] | None = None  # what came over the network so far; None: the data are here
    used_before: NetworkUse = field(default_factory=NetworkUse)  # when the pass began
    used_after: NetworkUse | None = None  # when it ended

    def network(self) -> NetworkUse:
        """Returns what came over the network since the pass began, up to its end."""
        if self.used_after is not None:
            return self.used_after
        if self.used is None:
            return NetworkUse()
        return replace(self.used() - self.used_before, elapsed_s=self.clock() - self.begun_s)

    def snapshot(self) -> LoaderStats:
        """Returns the numbers so far; once the pass has ended, waits until the device has come to its last batch."""
        stall_s = self.stall_s
        if self.in_flight is not None:
            self.in_flight.read(wait=self.ended)
            stall_s = self.on_stream.stall_s
        came = self.network()
        return LoaderStats(
            self.fresh, self.consumed, self.steps, self.last_s - self.begun_s, stall_s, self.bytes_read, self.echo,
            self.waited_s, self.read, self.damaged, tuple(self.damaged_rows), came.bytes, came.chunks, came.hits,
            came.requests, came.retries, came.waited_s,
        )  # fmt: skip

    def pace(self) -> Pace:
        """Returns the time of the user's steps, and of the waits for batches after the first one. Never waits.

        On a device, up to the last batch that it has come to.
        """
        if self.in_flight is not None:
            self.in_flight.read()
            waits = self.on_stream
            return Pace(max(0, waits.batches - 1), waits.steps, waits.stall_s - waits.first_s, waits.work_s)
        if not self.steps:
            return Pace()
        # Only the source's part of a stall: augmenting at the hand-over takes longer the more often a batch is used.
        waited_s = self.waited_s - self.first_waited_s
        return Pace(self.batches - 1, self.asked - 1, waited_s, self.last_s - self.first_s - waited_s)


class Iteration(Iterator[Batch | DictBatch]):
    """An iterator over the batches from a position on.

    Args:
        producer: of its batches, begun from the position on; the pass ends with the iteration.
        at_use: the stages of the recipe that run for each use of a batch.
        position: moved on as batches are handed over; its schedule is decided.
        on_end: called with the pace once, when the pass is over, in the process that began it; never waits.
        probe: takes note of each batch; None: nobody measures.
    """

    _is_finalizing = staticmethod(sys.is_finalizing)  # found here when the globals are gone

    def __init__(
        self,
        options: LoaderPlan,
        producer: Producer,
        at_use: Sequence[Stage],
        position: Position,
        counter: PassCounter,
        on_end: Callable[[Pace], None] = lambda _: None,
        probe: Probe | None = None,
    ) -> None:
        self._options = options
        self._producer, self._at_use = producer, at_use
        self._position = position
        self._uses = position.uses.uses(position.steps)
        self._kept: dict[int, Work] = {}  # by number, batches that will be used
        self._counter = counter
        self._on_end: Callable[[Pace], None] | None = on_end
        self._probe = probe
        # Two threads may ask the same iteration, and a new iter() in one may end it while another waits in it.
        self._lock = threading.RLock()
        self._displaced = False
        self._failure = ""  # the name of the error that ended the pass
        self._pid = os.getpid()
        self.running = True
        counter.echo = position.uses.factor
        counter.begun_s = counter.last_s = counter.clock()

    def __next__(self) -> Batch | DictBatch:
        with self._lock:
            if not self.running or self._pid != os.getpid():
                raise self._why_ended()
            counter, probe = self._counter, self._probe
            asked_s = counter.clock()
            try:
                counter.asked += 1
                if probe is not None:
                    probe.note_depth(self._producer.depth())
                use = next(self._uses, None)
                in_flight, asked = counter.in_flight, None
                with span("wait"):
                    if in_flight is not None and use is not None:
                        asked = in_flight.ask(fresh=use.batch >= counter.batches)
                    while use is None or use.batch >= counter.batches:
                        if not self._read():
                            counter.last_s = counter.clock()  # the last step is over too
                            self.close()
                            raise StopIteration
                    if in_flight is not None:
                        in_flight.add(counter.on_stream, counter.asked, asked)
                counter.waited_s += counter.clock() - asked_s
                if probe is not None:
                    probe.note_ready()
                try:
                    return self._hand_over(use)
                except StopIteration as error:
                    # It would end the loop as if the epoch were over.
                    raise RuntimeError("a transform raised StopIteration") from error
            except BaseException as error:
                if self.running:
                    self._failure = type(error).__name__
                    self.close()
                raise
            finally:
                counter.last_s = counter.clock()
                counter.stall_s += counter.last_s - asked_s
                if counter.asked == 1:
                    counter.first_s, counter.first_waited_s = counter.last_s, counter.waited_s

    def displace(self) -> None:
        """Ends the pass because the loader begins another one; asking for more batches is an error from now on."""
        with self._alone():
            self._displaced = self.running
            self.close()

    def _alone(self) -> AbstractContextManager[object]:
        # In a forked process, a thread that it does not have may hold the lock.
        return self._lock if self._pid == os.getpid() else nullcontext()

    def _why_ended(self) -> Exception:
        """Returns the exception to raise after a pass has ended: StopIteration, or an error that says how to go on."""
        if self._displaced:
            return OptionError(
                "this iteration was ended by a newer iter() of the same FastLoader, its load_state_dict() or its "
                "close(): a loader has one epoch under way. To look at a batch within the loop, or to iterate twice at "
                "once, make another FastLoader of the same file."
            )
        if self._pid != os.getpid():
            return OptionError(
                f"this iteration was begun in process {self._pid}, and its threads and workers are not in a fork. "
                f"Call iter() of the loader here, in process {os.getpid()}; better start the process by spawn or "
                f"forkserver, since torch itself may hang in one that was forked after it ran."
            )
        if self._failure:
            return OptionError(
                f"this iteration was ended by {self._failure} before the end of its epoch. "
                f"loader.load_state_dict(loader.state_dict()) makes the next iter() go on with the batch that was next."
            )
        return StopIteration()

    def end_measuring(self) -> None:
        """Reports the pace so far as the pass's: the user left it although it could go on."""
        if self._pid != os.getpid():
            return  # a thread that a forked process does not have may hold the lock
        with self._lock:
            on_end, self._on_end = self._on_end, None
            if on_end is not None:
                on_end(self._counter.pace())

    def close(self) -> None:
        """Ends the pass. Batches handed over stay as they are.

        While the interpreter ends, as when a generator with `yield from loader` is still there then, nothing is done:
        daemon threads are frozen and cannot be waited for, globals are gone, and worker processes end by themselves.
        """
        if not self.running or self._is_finalizing():
            return
        with self._alone():
            if self.running:
                self.running, self._counter.ended = False, True
                self._counter.used_after = self._counter.network()
                self.end_measuring()
                self._kept.clear()
                self._producer.end()

    def __del__(self) -> None:
        if getattr(self, "running", False):
            self.close()

    def _read(self) -> bool:
        """Takes one more batch from the stages below; False when the epoch has no more."""
        counter = self._counter
        if counter.batches == self._position.plan.num_steps:
            return False
        work = next(self._producer)
        planned = work.whole
        self._kept[counter.batches] = work
        if self._probe is not None:
            self._probe.note_work(work.cost)
        counter.batches += 1
        if planned.damaged:
            _note_damaged(counter, self._options.data, planned)
        elif self._position.plan.ends == "exact" and not planned.valid.all():
            rank, world_size = self._options.share
            warnings.warn(
                f"rank {rank} of {world_size} has no row left in the last step, and gets one again, with `valid` "
                f"False, so that all ranks take as many steps. Count what is valid: `right += ((output.argmax(1) == "
                f"labels) & batch.valid).sum()` and `seen += batch.valid.sum()`.",
                stacklevel=3,
            )
        counter.fresh += _count_valid(planned, self._position.plan.ends)
        counter.bytes_read += work.bytes_read
        return True

    def _hand_over(self, use: Use) -> Batch | DictBatch:
        """Returns a batch for one of its uses, augmented and put together for the user."""
        options, position, counter = self._options, self._position, self._counter
        last = use.echo + 1 == counter.echo
        work = self._kept.pop(use.batch) if last else self._kept[use.batch]
        if options.backend is not None and use.echo:
            # The user may have gone on to another stream.
            options.backend.hand_over(work.event, work.memory)
        work = work.for_use(use.echo, last=last)
        planned, form = work.whole, work.form
        if options.backend is None and form is None:
            for name, fact in (("row", planned.rows), ("valid", planned.valid)):
                if name in (options.data.fields or ()):
                    work.fields[name] = torch.from_numpy(fact)
        lasting = () if last else tuple(work.fields.values())
        for stage in self._at_use:
            stage.run(work)
        result, extra, facts = work.fields, work.extra, work.facts
        if "pixel_mask" in facts and "pixel_mask" in (options.data.fields or ()):
            result["pixel_mask"] = facts["pixel_mask"]()
        # On the CPU the facts are the plan's arrays, and so keep no slot.
        rows, valid = planned.rows, planned.valid
        if not last:
            # The user may write to what is returned, and the next use must not see that.
            result = _copied_from(result, lasting)
            rows, valid, extra = rows.copy(), valid.copy(), copy.deepcopy(extra)
        named = functools.partial(options.data.names_of, planned.rows)
        facts |= {"rows": rows, "valid": valid, "global_valid": planned.global_valid, "names": named}
        if options.backend is not None:
            facts |= {"rows": result["row"], "valid": result["valid"]}
        num_valid = _count_valid(planned, position.plan.ends)
        if self._probe is not None:
            self._probe.samples = num_valid
        position.steps += 1
        counter.consumed += num_valid
        counter.steps += 1
        if form is None:
            result |= work.texts if last else copy.deepcopy(work.texts)
            return Batch([result[name] for name in options.data.fields or ()])._with_facts(facts)
        values = [result[name] if name in result else extra[name] for name in form.names]
        if form.keys is not None:
            return DictBatch(zip(form.keys, values, strict=True))._with_facts(facts)
        return Batch(values)._with_facts(facts)


def _note_damaged(counter: PassCounter, data: Input, planned: PlannedBatch) -> None:
    """Counts the damaged rows that a batch was made without, and logs the first ones of the pass."""
    if not counter.damaged:
        _log.warning(
            f"{data.name_of(planned.damaged[0])}: damaged after packing; other rows of its batch take the place of "
            f"such rows, and are not valid. stats.damaged_rows has their numbers; "
            f"`fastload verify {typed(data.name)}` lists all of them."
        )
    counter.damaged += len(planned.damaged)
    for row in planned.damaged:
        if len(counter.damaged_rows) < MOST_DAMAGED_ROWS:
            counter.damaged_rows[row] = None


def _count_valid(planned: PlannedBatch, ends: Ends | None) -> int:
    all_valid = ends == "drop" and not planned.damaged
    return len(planned.rows) if all_valid else int(np.count_nonzero(planned.valid))


def _copied_from(fields: Mapping[str, Any], lasting: Iterable[torch.Tensor]) -> dict[str, Any]:
    """Returns the fields, with copies of those that lie in the memory of others; lists have memory of their own."""
    memory = {tensor.untyped_storage()._cdata for tensor in lasting}
    return {
        name: value.clone() if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata in memory else value
        for name, value in fields.items()
    }
