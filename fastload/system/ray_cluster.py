"""Runs tasks on a Ray cluster, each on one CPU, where nodes may be lost and a task may run twice.

A task is a function that can be imported, and its arguments; its result must not depend on where, or how
often, it runs. One that fails by its input is not tried again; one whose node, worker process or storage failed is, a
few times; and one that takes far longer than the others gets a second copy, of which the first to end counts.
"""

from __future__ import annotations

import builtins
import logging
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from fastload.errors import MissingExtraError, OutputError, PackError, ReadError

Report = Callable[[int], None]
"""Called in a task with how many samples it has done."""

_MOST_FAILURES = 3
_PAUSE_S = 1.0
"""After the first failure of a task, and so much longer after each further one."""
_SLOW = 3.0
"""Times the median of the others' time after which a task gets a second copy, if it took `_SLOW_S` at least."""
_SLOW_S = 2.0
_FEWEST_DONE = 3
_POLL_S = 0.5
_NO_NODE_S = 60.0
_ANSWER_S = 60.0
_AHEAD = 2
"""Tasks submitted for each CPU: some wait, so that a cluster that grows by demand sees it."""


@dataclass(eq=False)
class _Attempt:
    number: int
    key: str  # under which the board knows it


@dataclass(eq=False)
class _Left:
    """The state of a task that is not done."""

    task: Any
    failures: list[str] = field(default_factory=list)
    copies: int = 0  # that run now
    begun: int = 0  # copies so far


def _check_reachable(address: str) -> None:
    """Raises OSError where nothing answers at HOST:PORT, which Ray itself tries for minutes."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()


class RayCluster:
    """A connection to a cluster; leaving the `with` block ends what still runs, and the connection if it was made here.

    MissingExtraError: Ray is not installed. PackError: there is no cluster at this address.
    """

    def __init__(self, address: str | None = None) -> None:
        try:
            import ray
        except ImportError as exc:
            raise MissingExtraError(
                "Packing on Ray needs the package ray, on all nodes. Install it with: pip install 'fastload-hdf5[ray]'."
            ) from exc
        self.ray: Any = ray
        self._own, self._print = not ray.is_initialized(), builtins.print
        if self._own:
            try:
                _check_reachable(address or "auto")
                ray.init(address=address or "auto", log_to_driver=False, logging_level=logging.ERROR)
            except (OSError, ValueError, RuntimeError) as exc:
                raise PackError(
                    f"no Ray cluster can be reached at {address or 'auto'} ({exc}). Start one with `ray start --head`, "
                    f"name another with `--address`, or say `--address local` for one on this machine alone."
                ) from exc

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._own:
            self.ray.shutdown()
            builtins.print = self._print  # Ray puts its own in the place of it

    def _nodes(self) -> dict[str, str]:
        """Returns the nodes that have CPUs: id -> name for messages."""
        return {
            node["NodeID"]: f"{node['NodeManagerHostname']} ({node['NodeID'][:8]})"
            for node in self.ray.nodes()
            if node["Alive"] and node["Resources"].get("CPU")
        }

    def ask_nodes(self, question: Callable[[Any], Any], about: Any) -> tuple[dict[str, Any], dict[str, str]]:
        """Calls a function on each node.

        Returns answers by the node's name; and by it why there is none.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        asked = {}
        for node, name in self._nodes().items():
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            remote = self.ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(question)
            asked[remote.remote(about)] = name
        if not asked:
            raise PackError("the Ray cluster has no node with a CPU. Add one, such as by `ray start --address=...`.")
        done, _ = self.ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_S)
        answers, failures = {}, dict.fromkeys(asked.values(), f"does not answer within {_ANSWER_S:.0f} s")
        for each in done:
            try:
                answers[asked[each]] = self.ray.get(each)
            except self.ray.exceptions.RayError as exc:
                failures[asked[each]] = _last_line(exc)
        alive = set(self._nodes().values())  # one that was lost meanwhile does no harm
        return answers, {name: why for name, why in failures.items() if name not in answers and name in alive}

    def run(
        self,
        work: Callable[[Any, Report], Any],
        tasks: Iterable[Any],
        *,
        name: str = "task",
        on_done: Callable[[int], None] | None = None,
        typical: Callable[[Any], bool] = lambda result: True,
    ) -> Iterator[tuple[int, Any]]:
        """Yields (number of the task, result) of all tasks as they are done.

        Args:
            work: called with a task and a `Report`; importable on the nodes.
            tasks: any number of them; few are taken ahead.
            name: what a task is called in messages, before its number.
            on_done: called with the samples done so far on all nodes, a few times a second.
            typical: whether the time that a result took says how long others take.

        Raises:
            PackError: a task failed too often, by its node or storage; or no node is left.
            FastloadError: a task failed by its input: what it raised.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        ray = self.ray
        # On this node, which is lost only with this process.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        board = ray.remote(num_cpus=0, max_restarts=-1, scheduling_strategy=here)(_Board).remote()
        remote = ray.remote(num_cpus=1, max_retries=0, scheduling_strategy="SPREAD")(_run)
        coming, left, running = enumerate(tasks), dict[int, _Left](), dict[Any, _Attempt]()
        later: list[tuple[float, int]] = []  # when to try a task again
        times: list[float] = []
        seen_nodes = time.monotonic()

        def begin(number: int) -> None:
            one = left[number]
            one.copies, one.begun = one.copies + 1, one.begun + 1
            attempt = _Attempt(number, f"{number}.{one.begun}")
            running[remote.remote(work, one.task, board, attempt.key)] = attempt

        try:
            while True:
                now = time.monotonic()
                for at, number in [each for each in later if each[0] <= now]:
                    later.remove((at, number))
                    begin(number)
                most = _AHEAD * max(1, int(ray.cluster_resources().get("CPU", 0)))
                while len(running) < most and (found := next(coming, None)) is not None:
                    left[found[0]] = _Left(found[1])
                    begin(found[0])
                if not left:
                    return
                done: list[Any] = []
                if running:
                    done, _ = ray.wait(list(running), timeout=_POLL_S)
                else:  # all that is left is tried again later
                    time.sleep(_POLL_S)
                for each in done:
                    if each not in running:  # another copy was done before it
                        continue
                    attempt = running.pop(each)
                    one = left[attempt.number]
                    one.copies -= 1
                    try:
                        seconds, result, error = ray.get(each)
                    except ray.exceptions.RayError as exc:
                        seconds, result, error = 0.0, None, PackError(_last_line(exc))
                    if error is None:
                        del left[attempt.number]
                        self._end(running, attempt.number)
                        times += [seconds] if typical(result) else []
                        yield attempt.number, result
                    elif not isinstance(error, (OutputError, ReadError, PackError, OSError)):
                        raise error
                    else:
                        one.failures.append(str(error))
                        if len(one.failures) >= _MOST_FAILURES:
                            raise PackError(
                                f"{name} {attempt.number} failed {len(one.failures)} times, at last: {one.failures[-1]}"
                            ) from error
                        if not one.copies:
                            later.append((time.monotonic() + _PAUSE_S * len(one.failures), attempt.number))
                state = self._state(board)
                if state is not None and on_done is not None:
                    on_done(state.done)
                if state is not None and len(times) >= _FEWEST_DONE:
                    slow = max(_SLOW_S, _SLOW * statistics.median(times))
                    for attempt in list(running.values()):
                        if state.seconds.get(attempt.key, 0.0) > slow and left[attempt.number].copies == 1:
                            begin(attempt.number)
                if self._nodes():
                    seen_nodes = time.monotonic()
                elif time.monotonic() - seen_nodes > _NO_NODE_S:
                    raise PackError(f"the Ray cluster has had no node with a CPU for {_NO_NODE_S:.0f} s.")
        finally:
            for number in {attempt.number for attempt in running.values()}:
                self._end(running, number)
            with suppress(ray.exceptions.RayError):
                ray.kill(board)

    def _end(self, running: dict[Any, _Attempt], number: int) -> None:
        """Ends the copies of a task that run."""
        for each in [each for each, attempt in running.items() if attempt.number == number]:
            del running[each]
            with suppress(self.ray.exceptions.RayError, ValueError):
                self.ray.cancel(each, force=True)

    def _state(self, board: Any) -> _State | None:
        """Returns what the board says; None while it cannot be asked, as when its node was lost."""
        try:
            state: _State = self.ray.get(board.state.remote(), timeout=_POLL_S)
        except self.ray.exceptions.RayError:
            return None
        return state


@dataclass
class _State:
    done: int  # samples of all tasks
    seconds: dict[str, float]  # since each attempt began, of those that run


class _Board:
    """An actor that tasks tell what they have done."""

    def __init__(self) -> None:
        self._begun: dict[str, float] = {}
        self._done: Counter[str] = Counter()

    def begin(self, key: str) -> None:
        self._begun[key] = time.monotonic()

    def add(self, key: str, count: int) -> None:
        self._done[key] = count

    def end(self, key: str) -> None:
        self._begun.pop(key, None)

    def state(self) -> _State:
        now, most = time.monotonic(), Counter[str]()
        for key, count in self._done.items():
            number = key.partition(".")[0]
            most[number] = max(most[number], count)
        return _State(most.total(), {key: now - begun for key, begun in self._begun.items()})


def _run(work: Callable[[Any, Report], Any], task: Any, board: Any, key: str) -> tuple[float, Any, Exception | None]:
    """Runs a task on its node; returns its seconds and its result, or what it raised."""
    begun = said = time.monotonic()
    last = 0
    board.begin.remote(key)

    def report(count: int) -> None:
        nonlocal said, last
        last = count
        if time.monotonic() - said >= _POLL_S:
            said = time.monotonic()
            board.add.remote(key, count)

    try:
        result, error = work(task, report), None
    except Exception as exc:  # noqa: BLE001 - whatever it is, it is raised where the tasks come from
        result, error = None, exc
    board.add.remote(key, last)
    board.end.remote(key)
    return time.monotonic() - begun, result, error


def _last_line(error: Exception) -> str:
    """Returns the line of an error of Ray that says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
