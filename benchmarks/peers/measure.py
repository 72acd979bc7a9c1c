"""One measurement of one loader in its own environment: reads a request as JSON, writes what it found as JSON.

    PYTHON measure.py REQUEST.json OUT.json

`run.py` starts it. All loaders are measured by this code alone. In every timed part the main thread takes a batch and
reads each of its bytes once, in memory order. Parts:

    cold      the files' pages are dropped from the page cache first: first batch, and one epoch
    first     a new Loader, imports done and page cache warm: from its construction to the first batch, and to its last
    alone     whole epochs for some seconds: images/s, CPU seconds of the process with all its children, and the wait
              for the first batch of each
    step      the same where each batch is followed by a step on another device: until 10 ms after the batch came
    train     the same where the main thread trains a small torch net for about 10 ms after each batch
    python    the same with about 10 ms of pure Python
    memory    an epoch more, with the highest anonymous and shared memory of all its processes
    verify    an epoch more, whose images and labels are summed up
    resume    an epoch left at its half with `state`, and what a new Loader makes of that

Each timed part says how many CPUs others used meanwhile.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import json
import os
import pickle
import statistics
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from peers.work import Epoch, Work, consume, from_json, in_memory_order

STEP_S = 0.010
ROUNDS = 5  # of epochs beside a step
LONG_S = 30  # a first epoch after which no other is waited for
PR_SET_CHILD_SUBREAPER = 36
After = Callable[[NDArray[Any]], object]


def tree() -> list[psutil.Process]:
    """This process and all its descendants."""
    me = psutil.Process()
    return [me, *me.children(recursive=True)]


def tree_cpu_s() -> float:
    """CPU seconds of this process, of its descendants, and of those of them that have ended."""
    total = 0.0
    for process in tree():
        with suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def machine_cpu_s() -> float:
    """CPU seconds that the machine was busy, also for other machines in the same hardware."""
    times = psutil.cpu_times()
    return sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))


@contextmanager
def clock() -> Iterator[dict[str, float]]:
    """Measures seconds, CPU seconds and the CPUs that others used; filled in at the end of the block."""
    found: dict[str, float] = {}
    cpu_s, machine_s, begin = tree_cpu_s(), machine_cpu_s(), time.perf_counter()
    yield found
    seconds = time.perf_counter() - begin
    cpu_s, machine_s = tree_cpu_s() - cpu_s, machine_cpu_s() - machine_s
    found |= {"seconds": seconds, "cpu_s": cpu_s, "other_cpus": max(0.0, machine_s - cpu_s) / seconds}


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Samples anonymous and shared memory of all processes, as benchmarks/harness.py does: pages of files apart."""
    peak, stop = [0], threading.Event()

    def sample() -> None:
        while not stop.wait(0.03):
            total = 0
            for process in tree():
                with suppress(OSError, psutil.Error):
                    for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
                        if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                            total += 1024 * int(line.split()[1])
            peak[0] = max(peak[0], total)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()


def files_under(*paths: Path) -> Iterator[Path]:
    """The files at these paths and in these folders."""
    for path in paths:
        yield from (file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def drop_pages(paths: list[Path]) -> None:
    """Takes files out of the page cache: their pages by posix_fadvise, and, as root, all that is clean."""
    os.sync()
    for path in files_under(*paths):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    with suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("3\n")


def read_in(paths: list[Path]) -> None:
    """Puts files into the page cache."""
    buffer = bytearray(1 << 20)
    for path in files_under(*paths):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def train_step() -> Callable[[], None]:
    """A step of a small net in eager mode, a third of a millisecond: the net of benchmarks/harness.py."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 16, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 49, 10)
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    images, labels, loss_of = torch.rand(16, 3, 32, 32), torch.randint(0, 10, (16,)), nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        loss_of(net(images), labels).backward()
        optimizer.step()

    return step


def python_step() -> None:
    """About a millisecond of pure Python."""
    total = 0
    for number in range(20_000):
        total += number * number


def device_step(images: NDArray[Any]) -> None:
    """A step of 10 ms on another device, while whose first part the batch is read."""
    until = time.perf_counter() + STEP_S
    consume(images)
    if (left := until - time.perf_counter()) > 0:
        time.sleep(left)


class Busy:
    """So many steps on the main thread after each batch that they take 10 ms when nothing runs beside them."""

    def __init__(self, step: Callable[[], None]) -> None:
        for _ in range(5):
            step()
        begin = time.perf_counter()
        for _ in range(20):
            step()
        self.step, self.count = step, max(1, round(STEP_S / ((time.perf_counter() - begin) / 20)))

    def __call__(self, images: NDArray[Any]) -> None:
        consume(images)
        for _ in range(self.count):
            self.step()


class Measurement:
    """The parts, each a method that returns its figures."""

    def __init__(self, adapter: Any, work: Work, request: dict[str, Any]) -> None:
        self.adapter, self.work, self.request = adapter, work, request
        self.settings, self.seed, self.seconds = request["settings"], request["seed"], request["seconds"]
        self.path = Path(request["path"])
        self.files = [self.path] if adapter.PACKS else [self.path, work.data.folder]
        self.numbers = itertools.count()
        self.loader: Any = None

    def open(self, settings: dict[str, Any]) -> Any:
        """A new Loader, whose epochs count from 0."""
        self.close()
        self.numbers = itertools.count()
        self.loader = self.adapter.Loader(self.work, self.path, settings, self.seed)
        return self.loader

    def close(self) -> None:
        """Ends the Loader in use."""
        if self.loader is not None:
            self.loader.close()
            self.loader = None

    def epochs(self, seconds: float, after: After = consume) -> dict[str, Any]:
        """Whole epochs until so many seconds have passed."""
        count = batches = 0
        firsts: list[float] = []
        with clock() as found:
            begin = time.perf_counter()
            while not firsts or time.perf_counter() - begin < seconds:
                asked = time.perf_counter()
                for at, (images, _labels) in enumerate(self.loader.epoch(next(self.numbers))):
                    if at == 0:
                        firsts.append(time.perf_counter() - asked)
                    after(images)
                    count, batches = count + len(images), batches + 1
                if not count:
                    raise RuntimeError("an epoch without a batch")
        return {
            **found,
            "images_per_s": count / found["seconds"],
            "cpu_s_per_1000": 1000 * found["cpu_s"] / count,
            "first_batch_s": statistics.median(firsts),
            "epochs": len(firsts),
            "batches": batches,
        }

    def from_nothing(self) -> dict[str, Any]:
        """A new Loader's first epoch, from its construction on."""
        self.close()
        begin = time.perf_counter()
        self.open(self.settings)
        made_s = time.perf_counter() - begin
        found = self.epochs(0.0)
        return {
            "first_batch_s": made_s + found["first_batch_s"],
            "epoch_s": made_s + found["seconds"],
            "images_per_s": found["batches"] * self.work.batch_size / (made_s + found["seconds"]),
            "other_cpus": found["other_cpus"],
        }

    def cold(self) -> dict[str, Any]:
        drop_pages(self.files)
        found = self.from_nothing()
        self.close()
        read_in(self.files)
        return found

    def first(self) -> dict[str, Any]:
        return self.from_nothing()

    def alone(self) -> dict[str, Any]:
        return self.epochs(self.seconds)

    def step(self) -> dict[str, Any]:
        return self.beside(device_step)

    def train(self) -> dict[str, Any]:
        import torch

        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the trained net must not occupy the core that reads
        try:
            return self.beside(Busy(train_step()))
        finally:
            torch.set_num_threads(threads)

    def python(self) -> dict[str, Any]:
        return self.beside(Busy(python_step))

    def beside(self, after: After) -> dict[str, Any]:
        """Rounds of epochs beside steps, whose own time is taken just before, while the loader has read ahead.

        The figures are of the round with the median share.
        """
        ready, rounds = np.ones(self.work.batch_shape, self.work.dtype), []
        for _ in range(ROUNDS):
            time.sleep(0.2)
            alone = []
            for _ in range(9):
                begin = time.perf_counter()
                after(ready)
                alone.append(time.perf_counter() - begin)
            alone_s, found = statistics.median(alone), self.epochs(self.seconds, after)
            rounds.append({**found, "share": alone_s * found["batches"] / found["seconds"], "alone_s": alone_s})
        shares = sorted(found["share"] for found in rounds)
        return {**min(rounds, key=lambda found: abs(found["share"] - statistics.median(shares))), "shares": shares}

    def memory(self) -> dict[str, Any]:
        with peak_memory() as peak:
            self.epochs(min(self.seconds, 0.6))
        return {"bytes": peak[0], "processes": len(tree())}

    def verify(self) -> dict[str, Any]:
        sums = Epoch(self.work)
        for images, labels in self.loader.epoch(next(self.numbers)):
            sums.add(images, labels)
        return sums.found()

    def resume(self) -> dict[str, Any]:
        """Three loaders of one seed: a whole epoch 1, one up to its half, and one that goes on from there."""
        if not hasattr(self.adapter.Loader, "state"):
            return {"how": "none"}
        half = self.work.batches // 2

        def sums(epoch: Iterator[tuple[NDArray[Any], NDArray[Any]]]) -> Iterator[int]:
            for images, labels in epoch:
                yield zlib.crc32(in_memory_order(images).reshape(-1).data, zlib.crc32(np.asarray(labels).tobytes()))

        self.open(self.settings)
        for _ in self.loader.epoch(next(self.numbers)):
            pass
        whole = list(sums(self.loader.epoch(next(self.numbers))))
        self.open(self.settings)
        for _ in self.loader.epoch(next(self.numbers)):
            pass
        running = self.loader.epoch(next(self.numbers))
        begun = list(itertools.islice(sums(running), half))
        state = self.loader.state()
        if state is None:
            return {"how": "none"}
        saved = pickle.dumps(state)
        self.open(self.settings)
        begin = time.perf_counter()
        self.loader.load_state(pickle.loads(saved))
        rest, first_s = [], 0.0
        for number in sums(self.loader.epoch(1)):
            first_s = first_s or time.perf_counter() - begin
            rest.append(number)
        return {
            "how": "state",
            "first_batch_s": first_s,
            "state_bytes": len(saved),
            "same_first_half": begun == whole[:half],
            "same_rest": rest == whole[half:],
            "batches": [len(begun), len(rest), len(whole)],
        }


def search(measurement: Measurement) -> list[dict[str, Any]]:
    """The rate of each candidate, in a first epoch and then whole ones for the seconds asked for."""
    found = []
    for settings in measurement.adapter.settings(measurement.work):
        try:
            measurement.open(settings)
            rates = measurement.epochs(0.0)
            if rates["seconds"] < LONG_S:  # else it says enough, whatever is compiled within
                rates = measurement.epochs(measurement.seconds)
            found.append({"settings": settings, **{key: rates[key] for key in ("images_per_s", "other_cpus")}})
        except Exception as error:  # noqa: BLE001  # another candidate may work
            found.append({"settings": settings, "failed": f"{type(error).__name__}: {error}"[:300]})
    measurement.close()
    return found


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """What was asked for, or why it was not done."""
    adapter = importlib.import_module(f"peers.adapters.{request['peer']}")
    work = from_json(request["work"])
    if why := adapter.supports(work):
        return {"unsupported": why}
    if request["parts"] == ["pack"]:
        adapter.pack(work.data, Path(request["path"]), encoding=work.encoding, workers=request["workers"])
        return {}
    import torch  # in every environment, so that memory compares

    found: dict[str, Any] = {"versions": adapter.versions(), "torch_threads": torch.get_num_threads()}
    measurement = Measurement(adapter, work, request)
    measurement.open(measurement.settings or adapter.settings(work)[0])  # whose imports are no part of what is measured
    measurement.close()
    read_in(measurement.files)
    if request["parts"] == ["search"]:
        return {**found, "candidates": search(measurement)}
    for part in request["parts"]:
        try:
            if measurement.loader is None and part not in ("cold", "first"):
                measurement.open(measurement.settings)
                measurement.epochs(0.0)
            found[part] = getattr(measurement, part)()
        except Exception as error:  # noqa: BLE001  # told in the record; the other parts are measured
            found[part] = {"failed": f"{type(error).__name__}: {error}"[:300]}
            with suppress(Exception):
                measurement.close()
            measurement.loader = None
    measurement.close()
    if work.transform is not None:
        found["antialiased"] = getattr(adapter, "ANTIALIASED", None)
    return found


def main() -> None:
    """Answer the request of the command line."""
    # A child whose parent ends comes to this process, not to init, so that its CPU seconds and memory stay counted.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    asked, out = map(Path, sys.argv[1:])
    request = json.loads(asked.read_text())
    try:
        found = answer(request)
    except Exception as error:  # noqa: BLE001  # whatever it is, it is this loader's answer
        found = {"failed": f"{type(error).__name__}: {error}"[:500]}
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
