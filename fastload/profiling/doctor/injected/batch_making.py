"""The side that makes batches: times what a fetcher does for each, in a worker or in the loop's own process."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from .code_lines import OUTWARD, place_of
from .event_file import clock, events, note_fault
from .timed_calls import COLLATE, DECODING, REST, WAITING, OpenFetch, Span, metering, thread, timed, waited_s
from .worker_trial import turns, worker_id

_MAX_TOP = 16  # slowest samples of a batch that are written down one by one
_LOOK_EVERY_S = 0.05
_MOST_SEEN = 24  # lines and calls that are written down


class _Detail:
    """In which batches of one dataset each call is timed: the first ones, then as many as cost little time.

    Timing many short calls would slow down the loop. Of the other batches the time of each sample and of each wait is
    known; the rest is taken to have the shares of the last one with timed calls.
    """

    _cpu_only = frozenset({DECODING, COLLATE, REST})  # parts
    _first = 4
    _call_s, _sample_s = 4e-6, 1.2e-5  # that they take longer for being timed, on a slow machine
    _share, _most = 0.01, 32  # of the time of making batches, that this may take; one of how many is timed at least

    def __init__(self) -> None:
        self._made, self._every = 0, 1
        self._last = OpenFetch()
        self._wall = self._cpu = 1.0

    def due(self) -> bool:
        """Whether calls are timed in the batch that begins."""
        self._made += 1
        return self._made <= self._first or self._made % self._every == 0

    def learn(self, fetch: OpenFetch, others: dict[str, Any], taken: tuple[float, float, float]) -> None:
        """Takes a batch with timed calls; calls are timed in each one if any waits, or other threads work for it."""
        cost = self._call_s * fetch.calls + self._sample_s * len(fetch.samples)
        is_simple = fetch.count and not others and self._cpu_only.issuperset(fetch.parts)
        self._every = max(1, min(self._most, int(cost / (self._share * taken[0])))) if is_simple else 1
        self._last, (self._wall, self._cpu, _) = fetch, taken

    def divide(self, fetch: OpenFetch, taken: tuple[float, float, float]) -> None:
        """Gives a batch without timed calls its parts; one that waited will be followed by one with timed calls."""
        waited = fetch.parts.get(WAITING, (0.0, 0.0))
        walls, cpus = (taken[0] - waited[0]) / max(self._wall, 1e-9), (taken[1] - waited[1]) / max(self._cpu, 1e-9)
        parts = {part: [wall * walls, cpu * cpus] for part, (wall, cpu) in self._last.parts.items()}
        fetch.parts = {**parts, **fetch.parts}
        self._every = 1 if WAITING in fetch.parts else self._every
        count = fetch.count / max(1, self._last.count)
        fetch.decoded = [round(number * count) for number in self._last.decoded]


_details: dict[int, _Detail] = {}  # by id() of the dataset


class TimedDataset:
    """A map-style dataset for a fetcher: each sample is timed."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        fetch = thread.fetch
        if fetch is None:
            return self._dataset[index]
        if fetch.whole:
            begin = clock()
            sample = self._dataset[index]
            fetch.samples.append(clock() - begin)
            return sample
        begin, delay = clock(), waited_s()
        try:
            return self._dataset[index]
        finally:
            fetch.samples.append(clock() - begin - (waited_s() - delay))

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._dataset, name)  # __getitems__ is there if the dataset has it
        return functools.partial(self._at_once, found) if name == "__getitems__" and found else found

    def _at_once(self, get: Callable[[Any], Any], indices: Any) -> Any:
        """Asks for the samples of a batch at once, as `Subset` does; then only their time together is known."""
        fetch, begin, delay = thread.fetch, clock(), waited_s()
        try:
            return get(indices)
        finally:
            if fetch is not None:
                fetch.at_once = len(indices), clock() - begin - (waited_s() - delay)


def fetching(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `fetch` of a fetcher, which makes one batch."""

    @functools.wraps(original)
    def fetch(self: Any, possibly_batched_index: Any) -> Any:
        if thread.fetch is not None or not events.folder:
            return original(self, possibly_batched_index)
        metering.active = True
        turn = turns.wait(self)
        dataset = getattr(self, "dataset", None)
        source = getattr(dataset, "_dataset", dataset) if type(dataset) is TimedDataset else dataset
        detail = _details.setdefault(id(source), _Detail())
        mine = thread.fetch = OpenFetch(whole=not detail.due())
        stack, thread.stack = thread.stack, [[0.0, 0.0]]
        with metering.guard:
            metering.h5_threads.clear()
            before = {part: tuple(value) for part, value in metering.parts.items()}
        span = Span()
        looker.begin()
        try:
            if type(self).__name__ == "_MapDatasetFetcher" and type(dataset) is not TimedDataset:
                self.dataset = dataset = TimedDataset(dataset)
            if not hasattr(self.collate_fn, "__fastload__"):
                self.collate_fn = timed(self.collate_fn, COLLATE)
            return original(self, possibly_batched_index)
        finally:
            taken = span.taken()
            looker.ident = 0
            turns.done(turn)
            inner = thread.stack[0]
            thread.fetch, thread.stack = None, stack
            try:
                if mine.whole:
                    detail.divide(mine, taken)
                else:
                    mine.add(REST, taken[0] - inner[0], taken[1] - inner[1])
                event = _event(mine, before, span.begin, taken)
                events.write(event)
                if not mine.whole:
                    detail.learn(mine, event["others"], taken)
            except Exception:  # noqa: BLE001  # the batch is whole, and the script must get it
                note_fault("fetch")

    return fetch


def _event(fetch: OpenFetch, before: dict[str, Any], begin: float, taken: tuple[float, float, float]) -> dict[str, Any]:
    """Returns the event of a batch: its own parts, and what other threads did meanwhile."""
    wall, _, delay = taken
    with metering.guard:
        others = {
            part: [value - earlier for value, earlier in zip(values, before.get(part, (0.0, 0.0)))]
            for part, values in metering.parts.items()
        }
        num_h5_threads = len(metering.h5_threads)
        # A batch is pickled and sent while the next one is made, or while the worker waits to be asked for that.
        handed_over = metering.parts.get("out", [0.0, 0.0])[1] if worker_id() >= 0 else 0.0
        since, metering.handed_over = metering.handed_over, handed_over
    others.pop("into", None)
    out, h5 = others.pop("out", [0.0, 0.0]), others.pop("inside h5py", [0.0, 0.0])
    event: dict[str, Any] = {
        "e": "fetch",
        "id": thread.asked.id if thread.asked is not None else 0,
        "t": begin,
        "wall": wall,
        "delay": delay,
        "parts": fetch.parts,
        "others": {part: value for part, value in others.items() if value[0] > 0},
        "out": [out[1], handed_over - since],
        "h5": [*h5, num_h5_threads],
        "decoded": fetch.decoded,
    }
    if fetch.waits:
        event["waits"], event["first_wait"] = fetch.waits, fetch.first_wait
    durations = sorted(fetch.samples)
    count, together = fetch.at_once
    if count:
        event["samples"] = [count, together, together / count]
    elif durations:
        middle = durations[len(durations) // 2]
        # Samples timed by one clock: waits for a CPU fall into a few of them, most of the time.
        unseen = max(0.0, min(delay, sum(durations) - (wall - delay)))
        for number in range(len(durations) - 1, len(durations) // 2, -1):
            taken_s = min(unseen, durations[number] - middle)
            durations[number] -= taken_s
            unseen -= taken_s
        durations.sort()
        event["samples"] = [len(durations), sum(durations), middle]
        event["slow"] = [value for value in durations[-_MAX_TOP:] if value > 3 * middle]
    return event


class _Looker:
    """A thread that looks every 50 ms where in the code a worker process is, while it makes a batch.

    Only in workers: an extra thread in the main process would be noticed by a script that forks.
    """

    def __init__(self) -> None:
        self.ident = 0  # the thread that makes a batch; 0: none does
        self._pid = 0

    def begin(self) -> None:
        """Notes that the calling thread makes a batch."""
        self.ident = threading.get_ident()
        if self._pid != os.getpid():
            self._pid = os.getpid()
            if worker_id() >= 0:
                threading.Thread(target=self._run, name="fastload-doctor", daemon=True).start()

    def _run(self) -> None:
        seen: Counter[tuple[str, ...]] = Counter()
        never = threading.Event()  # a wait for it does not look like work from outside, as a sleep does
        while not never.wait(_LOOK_EVERY_S):
            frame = sys._current_frames().get(self.ident)
            if frame is None:
                continue
            try:
                line, part, call = place_of(frame)
            except Exception:  # noqa: BLE001  # whatever the script has made of its frames' variables
                continue
            finally:
                del frame
            waits_in = _waits_in() if part == "transform" else b""
            if any(name in waits_in for name in OUTWARD):
                part = WAITING  # in a call that is not timed
                seen["wait", line] += 1
            if line:
                seen["line", line] += 1
            seen["call", part, call] += 1
            seen[("look",)] += 1
            if seen[("look",)] % 20 == 0:
                events.write({"e": "line", "seen": seen.most_common(_MOST_SEEN)})


def _waits_in() -> bytes:
    """Returns the kernel function in which the first thread waits, that which makes batches; empty: not known."""
    try:
        with open("/proc/self/wchan", "rb") as file:
            return file.read()
    except OSError:
        return b""


looker = _Looker()
