"""Work that leaves the GIL, shared out among threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

TaskT = TypeVar("TaskT")
ResultT = TypeVar("ResultT")


def in_threads(work: Callable[[TaskT], ResultT], tasks: Iterable[TaskT], threads: int) -> Iterator[ResultT]:
    """Results in the order in which they are done; without threads, in the order of the tasks.

    Two tasks a thread are under way at most. What a task raises is raised here; those not begun are dropped then.
    """
    if threads == 0:
        yield from map(work, tasks)
        return
    with ThreadPoolExecutor(threads) as pool:
        pending: set[Future[ResultT]] = set()
        try:
            for task in tasks:
                pending.add(pool.submit(work, task))
                if len(pending) >= 2 * threads:
                    done, pending = wait(pending, return_when=FIRST_COMPLETED)
                    yield from (future.result() for future in done)
            while pending:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        finally:
            pool.shutdown(cancel_futures=True)


def in_order(work: Callable[[TaskT], ResultT], tasks: Iterable[TaskT], threads: int) -> Iterator[ResultT]:
    """Results in the order of the tasks; otherwise as `in_threads`."""
    if threads == 0:
        yield from map(work, tasks)
        return
    with ThreadPoolExecutor(threads) as pool:
        pending: deque[Future[ResultT]] = deque()
        try:
            for task in tasks:
                pending.append(pool.submit(work, task))
                if len(pending) >= 2 * threads:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
