"""Tasks done by worker processes in two steps, the second of which waits for the first of all tasks before."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

from fastload.pack.chunk_work import Worker
from fastload.pack.messages import receive, send

TaskT = TypeVar("TaskT")
SummaryT = TypeVar("SummaryT")
PlacedT = TypeVar("PlacedT")
HeldT = TypeVar("HeldT")
ResultT = TypeVar("ResultT")

_AHEAD = 3
"""Tasks that a worker has encoded and not written at most: a slow task elsewhere does not stop it, and memory is
bounded."""


class TwoSteps(Generic[TaskT, SummaryT, PlacedT, HeldT, ResultT]):
    """One run of tasks over worker processes; see `WorkerPool.run_in_order`."""

    def __init__(
        self,
        workers: list[Connection],
        encode: Callable[[Worker, TaskT], tuple[SummaryT, HeldT]],
        place: Callable[[SummaryT], PlacedT],
        write: Callable[[Worker, PlacedT, HeldT], ResultT],
    ) -> None:
        self._encode, self._place, self._write = encode, place, write
        self._idle = list(workers)
        self._unwritten = dict.fromkeys(workers, 0)
        self._to_write: dict[Connection, deque[tuple[int, PlacedT]]] = {worker: deque() for worker in workers}
        self._encoded: dict[int, tuple[Connection, SummaryT]] = {}
        self._turn = 0
        self._error: Exception | None = None

    def run(self, tasks: Iterable[TaskT]) -> Iterator[ResultT]:
        """Results in the order in which tasks are done."""
        coming = enumerate(tasks)
        busy = self._give_out(coming, set())
        # The first task that has no place yet is always with a worker, so somebody is busy until all are done.
        while busy:
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                answer, error = receive(ready)
                if error is not None:
                    raise error
                busy.remove(ready)
                self._idle.append(ready)
                number, written, value = answer
                if written:
                    self._unwritten[ready] -= 1
                    yield value
                else:
                    self._encoded[number] = ready, value
                    self._place_in_turn()
            busy = self._give_out(coming, busy)
        if self._error is not None:
            raise self._error

    def _give_out(self, coming: Iterator[tuple[int, TaskT]], busy: set[Connection]) -> set[Connection]:
        """The busy workers, after idle ones were given what there is to do."""
        waiting = []
        for worker in self._idle:
            message: Any = None
            if self._to_write[worker]:
                message = _write_held, (self._write, *self._to_write[worker].popleft())
            elif self._error is None and self._unwritten[worker] < _AHEAD and (task := next(coming, None)) is not None:
                self._unwritten[worker] += 1
                message = _encode_and_hold, (self._encode, *task)
            if message is None:
                waiting.append(worker)
            else:
                send(worker, pickle.dumps(message))
                busy.add(worker)
        self._idle = waiting
        return busy

    def _place_in_turn(self) -> None:
        while self._error is None and self._turn in self._encoded:
            worker, summary = self._encoded.pop(self._turn)
            try:
                self._to_write[worker].append((self._turn, self._place(summary)))
            except Exception as exc:  # noqa: BLE001 - whatever it is, it is raised when all before it is written
                self._error = exc
            self._turn += 1


def _encode_and_hold(worker: Worker, message: tuple[Callable[..., Any], int, Any]) -> tuple[int, bool, Any]:
    encode, number, task = message
    summary, worker.held[number] = encode(worker, task)
    return number, False, summary


def _write_held(worker: Worker, message: tuple[Callable[..., Any], int, Any]) -> tuple[int, bool, Any]:
    write, number, placed = message
    return number, True, write(worker, placed, worker.held.pop(number))
