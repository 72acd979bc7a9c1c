"""Packing on the nodes of a Ray cluster: each is asked whether it can, they read the headers, and pack the shards.

The dataset is listed here. Nodes get samples as bytes (`plain`) to read headers, and the path of a plan file to pack.
A task runs on one CPU, and its result does not depend on where, or how often, it runs. Ray runs one again whose node,
worker process or storage failed, a few times; one that fails by its input is not tried again.
"""

from __future__ import annotations

import builtins
import itertools
import logging
import os
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import (
    FastloadError,
    FormatError,
    MissingExtraError,
    MissingFileError,
    OutputError,
    PackError,
    ReadError,
)
from fastload.format.writer import writer_name
from fastload.images.decode import decoder_versions
from fastload.options.pack import PackOptions, Progress
from fastload.pack.encode import HEADERS, Headers, announce_samples, headers_of
from fastload.pack.finish import PackReport
from fastload.pack.output_url import found_object, probe_of, remove_output
from fastload.pack.pack_options import PackJob
from fastload.pack.plain import from_bytes, to_bytes
from fastload.pack.plan import PackPlan, PlanFile, SharedPlan, plan_path, write_plan
from fastload.pack.pool import PackPool
from fastload.pack.run import Here
from fastload.pack.survey import Survey
from fastload.pack.target import remove_attempts
from fastload.remote.urls import ObjectPath, Remote, path_of, remote_in_force, requests_as
from fastload.sources.listing import Arrays, Listing, only_arrays
from fastload.system.files import output_errors

Report = Callable[[int], None]
"""Called in a task with how many samples it has done."""

_MOST_FAILURES = 3
_PAUSE_S = 1.0
"""For which a node waits after its storage failed, before the task is tried again."""
_TRIED_AGAIN = OutputError, ReadError, PackError, OSError
_POLL_S = 0.5
_NO_NODE_S = 60.0
_ANSWER_S = 60.0
_AHEAD = 2
"""Tasks submitted for each CPU: some wait, so that a cluster that grows by demand sees it."""
_BLOCK = 4096  # samples whose headers are read by one task
_TRIED = 3  # samples that each node reads before anything is packed


class OnRay:
    """Packs the shards of plans on a cluster; lists here, with so many workers. Errors are those of `RayCluster`."""

    def __init__(self, address: str | None, workers: int | None) -> None:
        self._here, self._cluster = Here(workers), RayCluster(address)

    def __enter__(self) -> OnRay:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._here.__exit__(kind, error, tb)
        self._cluster.__exit__(kind, error, tb)

    def pool(self, options: PackOptions, processes: int) -> PackPool:
        """Returns the workers of this machine that help to list a source."""
        return self._here.pool(options, processes)

    def survey(self, job: PackJob) -> Survey:
        """Has the nodes read every header of a listing, and decides what each image becomes.

        PackError: nodes differ from this machine in what packing needs.
        """
        _check_nodes(job, self._cluster)
        return self._here.survey(job, _headers_on(self._cluster, job.listing, job.on_progress))

    def __call__(self, plan: PackPlan, numbers: Iterable[int]) -> list[PackReport]:
        """Packs these shards, by a plan file that all nodes see."""
        on_progress, overwrite, remote = plan.whole.on_progress, plan.whole.overwrite, remote_in_force()
        numbers = list(numbers)
        with _plan_file_of(plan) as file:

            def on_done(count: int) -> None:
                if on_progress:
                    on_progress("packing", min(count, file.num_samples), file.num_samples)

            tasks = ((str(file.path.absolute()), number, overwrite, remote) for number in numbers)
            found = dict(self._cluster.run(pack_shard_there, tasks, name="shard", on_done=on_done))
            on_done(file.num_samples)
            if not isinstance(file.path, ObjectPath):
                remove_attempts([file.shard(number) for number in numbers])
        return [found[at] for at in range(len(numbers))]


@contextmanager
def _plan_file_of(plan: PackPlan) -> Iterator[PlanFile]:
    """Gives the plan's file, the same one if it is there; one that is for this call alone is removed at its end."""
    found: PlanFile | None = None
    with suppress(MissingFileError, FormatError):
        found = PlanFile.read(plan_path(plan.whole.output))
    if found is None or plan.cut is None or found.identities != plan.cut.identities:
        found = write_plan(plan, temporary=True)
    yield found
    if found.temporary:
        remove_output(found.path)


def pack_shard_there(task: tuple[str, int, bool, Remote], report: Report) -> PackReport:
    """Packs a shard, on a node; the task is (plan, number, overwrite, remote)."""
    path, number, overwrite, remote = task

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "packing":
            report(done)

    with requests_as(remote), Here(0) as here:
        found = here(SharedPlan(PlanFile.read(path_of(path)), overwrite, progress), [number])[0]
    report(found.num_samples)
    return found


def _check_nodes(job: PackJob, cluster: RayCluster) -> None:
    """Raises PackError if nodes differ from this machine in what packing needs; it names what differs on which."""
    folder, listing = job.output.absolute().parent, job.listing
    sample = np.unique(np.arange(_TRIED) * (len(listing) - 1) // max(1, _TRIED - 1))
    with _probe(job.output, folder) as probe:
        about = probe, _samples(listing, sample), remote_in_force()
        here = look_around(about)
        answers, failures = cluster.ask_nodes(look_around, about)
    differ = [f"{node}: {why}" for node, why in failures.items()]
    for node, found in answers.items():
        differ += [f"{node}: {found[what] or here[what]}" for what in here if found[what] != here[what]]
    differ = [one.removesuffix(".") for one in differ]
    if differ:
        raise PackError(
            f"{job.output}: cannot be packed on this cluster, as nodes differ from this machine, which has "
            f"{here['release']} with {here['decoder']}: {'; '.join(differ)}. Install the same everywhere, and put "
            f"source and output on storage that all nodes see under the same path."
        )


@contextmanager
def _probe(output: Path, folder: Path) -> Iterator[str]:
    """Gives the path or URL of a small file in the output's folder, which is there within the block."""
    if isinstance(output, ObjectPath):
        with probe_of(output) as url:
            yield str(url)
        return
    with output_errors(f"{output}: its folder cannot be written to ({{}}). Choose another one."):
        handle, probe = tempfile.mkstemp(prefix=f".{output.name[:40]}.", suffix=".probe", dir=folder)
    os.close(handle)
    try:
        yield probe
    finally:
        Path(probe).unlink(missing_ok=True)


def look_around(about: tuple[str, bytes, Remote]) -> dict[str, str]:
    """Returns what a machine has, and what it does not see, in words; "" where nothing is amiss."""
    probe, samples, remote = about
    with requests_as(remote):
        return _look_around(path_of(probe), samples)


def _look_around(probe: Path, samples: bytes) -> dict[str, str]:
    found = {"release": writer_name(), "decoder": decoder_versions(), "source": "", "output": ""}
    files, masks, count = from_bytes(samples)
    if files is not None:
        try:
            if isinstance(files, Arrays):
                files.read_rows(np.arange(count), np.empty((count, *files.shape), files.dtype))
            reasons = list(headers_of(files, masks, np.arange(count)).reasons.values())
        except FastloadError as exc:
            reasons = [str(exc)]
        if reasons:
            found["source"] = f"does not see the source: {reasons[0]}"
    if isinstance(probe, ObjectPath):
        try:
            if found_object(probe) is None:
                found["output"] = f"does not see what lies at {probe.parent}, or another store"
            with probe_of(probe):
                pass
        except FastloadError as exc:
            found["output"] = f"cannot write to the output's folder: {exc}"
        return found
    folder = os.path.dirname(probe)
    if not os.path.exists(probe):
        found["output"] = f"does not see the output's folder {folder}, or another one of that name"
        return found
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as exc:
        found["output"] = f"cannot write to the output's folder {folder} ({exc.strerror})"
    return found


def _samples(listing: Listing, samples: NDArray[np.int64]) -> bytes:
    files, masks = listing.files, listing.masks
    return to_bytes((files and files.take(samples), masks and masks.take(samples), len(samples)))


def _headers_on(cluster: RayCluster, listing: Listing, progress: Progress | None) -> Headers | None:
    """Returns the headers of all samples, read by the nodes; None where there is nothing to be read."""
    if listing.files is None or only_arrays(listing):
        return None
    table, kinds, reasons = np.zeros(len(listing), HEADERS), Counter[str](), dict[int, str]()
    starts = range(0, len(listing), _BLOCK)
    blocks = (_samples(listing, np.arange(start, min(start + _BLOCK, len(listing)))) for start in starts)
    done = 0
    for number, found in cluster.run(read_headers, blocks, name="block of headers"):
        first = starts[number]
        table[first : first + len(found.table)] = found.table
        kinds.update(found.kinds)
        reasons.update({first + sample: reason for sample, reason in found.reasons.items()})
        done += len(found.table)
        if progress:
            progress("reading headers", done, len(listing))
    return Headers(table, kinds, reasons)


def read_headers(samples: bytes, report: Report) -> Headers:
    """Returns the headers of samples, on a node."""
    files, masks, count = from_bytes(samples)
    report(count)
    announce_samples(files, masks, np.arange(count), heads=True)
    return headers_of(files, masks, np.arange(count))


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
    ) -> Iterator[tuple[int, Any]]:
        """Yields (number of the task, result) of all tasks as they are done.

        Args:
            work: called with a task and a `Report`; importable on the nodes.
            tasks: any number of them; few are taken ahead.
            name: what a task is called in messages, before its number.
            on_done: called with the samples done so far on all nodes, a few times a second.

        Raises:
            PackError: a task failed too often, by its node or storage; or no node is left.
            FastloadError: a task failed by its input: what it raised.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        ray = self.ray
        # On this node, which is lost only with this process.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        board = ray.remote(num_cpus=0, max_restarts=-1, scheduling_strategy=here)(_Board).remote()
        remote = ray.remote(
            num_cpus=1,
            max_retries=_MOST_FAILURES - 1,
            retry_exceptions=list(_TRIED_AGAIN),
            scheduling_strategy="SPREAD",
        )(_run)
        coming, running = enumerate(tasks), dict[Any, int]()
        seen_nodes = time.monotonic()
        try:
            while True:
                most = _AHEAD * max(1, int(ray.cluster_resources().get("CPU", 0)))
                for number, task in itertools.islice(coming, max(0, most - len(running))):
                    running[remote.remote(work, task, board, number)] = number
                if not running:
                    return
                for each in ray.wait(list(running), timeout=_POLL_S)[0]:
                    number = running.pop(each)
                    yield number, self._result(each, f"{name} {number}")
                if on_done is not None:
                    with suppress(ray.exceptions.RayError):  # as when the board's node was lost
                        on_done(ray.get(board.done.remote(), timeout=_POLL_S))
                if self._nodes():
                    seen_nodes = time.monotonic()
                elif time.monotonic() - seen_nodes > _NO_NODE_S:
                    raise PackError(f"the Ray cluster has had no node with a CPU for {_NO_NODE_S:.0f} s.")
        finally:
            for each in running:
                with suppress(ray.exceptions.RayError, ValueError):
                    ray.cancel(each, force=True)
            with suppress(ray.exceptions.RayError):
                ray.kill(board)

    def _result(self, task: Any, name: str) -> Any:
        """Returns the result of a task that has ended, or raises why there is none."""
        try:
            result, error = self.ray.get(task)
        except self.ray.exceptions.RayError as exc:
            why = getattr(exc, "cause", None) or _last_line(exc)
            raise PackError(f"{name} failed {_MOST_FAILURES} times, at last: {why}") from exc
        if error is not None:
            raise error
        return result


class _Board:
    """An actor that tasks tell how many samples they have done; of one that runs again the most counts."""

    def __init__(self) -> None:
        self._done: Counter[int] = Counter()

    def add(self, number: int, count: int) -> None:
        self._done[number] = max(self._done[number], count)

    def done(self) -> int:
        return self._done.total()


def _run(work: Callable[[Any, Report], Any], task: Any, board: Any, number: int) -> tuple[Any, Exception | None]:
    """Runs a task on its node; returns its result, or what it raised that would be raised again."""
    said, last = time.monotonic(), 0

    def report(count: int) -> None:
        nonlocal said, last
        last = count
        if time.monotonic() - said >= _POLL_S:
            said = time.monotonic()
            board.add.remote(number, count)

    try:
        result, error = work(task, report), None
    except _TRIED_AGAIN:
        time.sleep(_PAUSE_S)
        raise
    except Exception as exc:  # noqa: BLE001 - whatever it is, it is raised where the tasks come from
        result, error = None, exc
    board.add.remote(number, last)
    return result, error


def _last_line(error: Exception) -> str:
    """Returns the line of an error of Ray that says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
