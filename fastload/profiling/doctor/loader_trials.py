"""Measures on this machine what other loaders would take for batches like a loader's, with made-up contents."""

from __future__ import annotations

import ast
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.errors import OptionError
from fastload.profiling.doctor.step_trial import Recorded, TrialStep, pause, torch_threads
from fastload.profiling.verdict.loop_model import FastLoaderCosts, WorkerCosts
from fastload.system.machine import available_cpus
from fastload.timing.probe import Probe
from fastload.timing.results import Work

if TYPE_CHECKING:  # torch takes seconds to import
    from fastload.dataset import PackedDataset
    from fastload.loader.loader import FastLoader
    from fastload.transforms.spec import BaseTransform

_SECONDS = 0.6
# Other programs come and go: of a few turns the median, as far as these take no longer.
_ROUNDS, _MOST_SECONDS = 4, 10.0
_LOOK_S, _IDLE = 0.02, 0.1  # part of a look in which no thread of an idle process runs
_MOST_BYTES, _MOST_BATCHES = 128 * 2**20, 64
_MOST_HANDED = 8 * 2**20  # bytes; /dev/shm of a container holds 64 MiB, and three batches lie in it
_LEAST_IMAGES = 16
_FEW = 4  # batches of an epoch
_PAGE = 4096  # bytes


@dataclass(frozen=True)
class ImagesSeen:
    """The batches that a loader makes of its images.

    Attributes:
        batch: shape (B, C, H, W) of its batches; the last two may be the first two of others: (B, H, W, C).
        transforms: by which a FastLoader makes them, such as `Resize(64)`; those that fastload has not are left out.
        decoded: mean height and width of those that it decodes; (0, 0): it decodes none.
    """

    batch: tuple[int, ...]
    transforms: tuple[str, ...] = ()
    decoded: tuple[int, int] = (0, 0)

    @property
    def stored(self) -> tuple[int, int]:
        """Height and width of an image in a packed file."""
        return self.decoded if any(self.decoded) else self.size

    @property
    def channels(self) -> int:
        """Number of channels."""
        return self.batch[1] if self.batch[1] in (1, 3, 4) else self.batch[3]

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in a batch."""
        first = self.batch[1] in (1, 3, 4)
        return (self.batch[2], self.batch[3]) if first else (self.batch[1], self.batch[2])


def measure_fastloader(
    seen: ImagesSeen,
    own_s: float,
    own_cpus: float,
    *,
    transforms: bool,
    recorded: Recorded | None = None,
    pause_s: float = 0.0,
    around_s: float = 0.0,
) -> FastLoaderCosts:
    """Returns what a `FastLoader` takes for a batch, and how far it slows down steps that take `own_s` alone.

    These steps, which have so many CPUs, are a recorded one played again, or of a small network if there is none; 0:
    they are a device's, and none is tried. `around_s` of them another loader works on the batch. Before each of them
    the loop is busy for `pause_s`, with making the batch itself.
    Random images of the stored size are packed without compression, and read; with `transforms`, also transformed.
    """
    from fastload.dataset import PackedDataset
    from fastload.loader.loader import FastLoader
    from fastload.pack import pack_images

    height, width = seen.stored
    # Of large batches a part is tried, and its time multiplied.
    largest = max(seen.channels * height * width, 4 * seen.channels * math.prod(seen.size))
    batch_size = max(1, min(seen.batch[0], _MOST_BYTES // largest))
    share = batch_size / seen.batch[0]
    seen, own_s, around_s = replace(seen, batch=(batch_size, *seen.batch[1:])), share * own_s, share * around_s
    size = batch_size * seen.channels * height * width
    most = max(2, min(_MOST_BATCHES, _MOST_BYTES // size))
    count = max(_LEAST_IMAGES, most * batch_size) if share == 1 else most * batch_size
    transform = _transforms(seen) if transforms else []
    with tempfile.TemporaryDirectory(prefix="fastload-doctor-") as folder:
        source, packed = Path(folder, "images.npz"), Path(folder, "images.h5")
        images = np.random.default_rng(0).integers(0, 256, (count, height, width, seen.channels), np.uint8)
        np.savez(source, images=images, labels=np.arange(count) % 10)
        pack_images(source, packed)
        # The begin of an epoch costs as much as several batches of small images: a training has more in each.
        dataset = PackedDataset(packed, check=None).select(np.tile(np.arange(count), -(-_MOST_BATCHES // most)))
        with closing(FastLoader(dataset, min(batch_size, count), transform=transform)) as loader:
            with closing(_endless(loader)) as batches:
                for _ in range(most):  # its threads start, its memory is mapped
                    next(batches)
                begin_s, running_s, samples = time.perf_counter(), time.process_time(), 0
                while time.perf_counter() - begin_s < _SECONDS:
                    samples += len(next(batches)[0])
            made_s = (time.process_time() - running_s) / samples * batch_size
            usual_s = (time.perf_counter() - begin_s) / samples * batch_size
            costs = FastLoaderCosts(Work(made_s), begin_s=_begin_s(dataset, min(batch_size, count), transform, usual_s))
            if own_s:
                with torch_threads(recorded.threads if recorded is not None else max(1, round(own_cpus))):
                    shape = (batch_size, seen.channels, *seen.size)
                    step = TrialStep(recorded if share == 1 else None, own_s, shape, pause_s, around_s)
                    costs = _beside_steps(loader, costs, step, pause_s)
            return replace(costs, batch=Work(made_s / share))


def _begin_s(dataset: PackedDataset, batch_size: int, transform: list[BaseTransform], usual_s: float) -> float:
    """Returns what the begin of an epoch takes beyond its batches, from epochs of a few of them, one after another."""
    from fastload.loader.loader import FastLoader

    rows = np.arange(min(len(dataset), _FEW * batch_size))
    with closing(FastLoader(dataset.select(rows), batch_size, transform=transform)) as loader:
        count = sum(1 for _ in loader)
        begin_s, epochs = time.perf_counter(), 0
        while time.perf_counter() - begin_s < _SECONDS / 2:
            for _ in loader:
                pass
            epochs += 1
        return max(0.0, (time.perf_counter() - begin_s) / epochs - count * usual_s)


def _beside_steps(
    loader: FastLoader, costs: FastLoaderCosts, step: Callable[[], None], pause_s: float
) -> FastLoaderCosts:
    """Returns the costs with how far steps are slowed down, from steps with and without the loader, in turn."""
    cpus, probe = available_cpus(), Probe(time.perf_counter)
    next(loader.iterate(probe))
    batches = _endless(loader)
    alone_s, slower, own_cpus = list[float](), list[float](), list[float]()
    end_s = time.perf_counter() + _MOST_SECONDS
    while not slower or (len(slower) < _ROUNDS and time.perf_counter() < end_s):
        _until_idle()  # it has read ahead
        step_s, running_s = _mean_step_s(step, itertools.repeat(None), _SECONDS / 4, pause_s)
        alone_s.append(step_s)
        own_cpus.append(running_s / step_s)
        for _ in range(probe.worker_info.ahead):  # these cost nothing now
            next(batches)
        slower.append(_mean_step_s(step, batches, _SECONDS / 2)[0] / step_s)
    usual_s = statistics.median(alone_s)
    cpus_used = min(float(cpus), statistics.median(own_cpus))
    return costs.fitted(statistics.median(slower) * usual_s, usual_s, cpus_used, cpus)


def _until_idle() -> None:
    """Returns when no thread of this process runs, within a second."""
    end_s = time.perf_counter() + 1.0
    while time.perf_counter() < end_s:
        running_s = time.process_time()
        time.sleep(_LOOK_S)
        if time.process_time() - running_s < _IDLE * _LOOK_S:
            return


def _endless(loader: Iterable[Any]) -> Generator[Any, None, None]:
    while True:
        yield from loader


def _mean_step_s(
    step: Callable[[], None], batches: Iterator[Any], seconds: float, pause_s: float = 0.0
) -> tuple[float, float]:
    """Returns the mean seconds of a step with its batch, without the pauses before, and its CPU seconds."""
    end_s, count, taken_s, running_s = time.perf_counter() + seconds, 0, 0.0, 0.0
    while time.perf_counter() < end_s or not count:
        begun_s, used_s = pause(pause_s), time.process_time()
        next(batches)
        step()
        taken_s += time.perf_counter() - begun_s
        running_s += time.process_time() - used_s
        count += 1
    return taken_s / count, running_s / count


def _transforms(seen: ImagesSeen) -> list[BaseTransform]:
    """Returns the transforms that fastload has, too."""
    from fastload import transforms

    found = []
    for one in seen.transforms:
        name = one.partition("(")[0]
        if one_like_it := getattr(transforms, name, None):
            with suppress(OptionError, TypeError, ValueError, SyntaxError):  # it needs arguments that are not known
                call = ast.parse(one, mode="eval").body
                assert isinstance(call, ast.Call)
                arguments = [ast.literal_eval(word) for word in call.args]
                named = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
                found.append(one_like_it(*arguments, **named))
    return found


def measure_worker(sizes: Sequence[int], *, as_one: bool = False) -> WorkerCosts:
    """Returns what a worker process of a `DataLoader` costs, for batches of tensors of so many bytes.

    With `as_one` it first copies them into one tensor, which is then handed over.
    Of large batches a part is handed over, since several at once have to find room in /dev/shm; the time is multiplied.
    """
    from torch.utils.data import DataLoader

    times = max(1.0, sum(sizes) / _MOST_HANDED)
    sizes = [round(size / times) for size in sizes]
    loader: DataLoader[Any] = DataLoader(_Ready(sizes, as_one), batch_size=None, num_workers=1)  # type: ignore[arg-type]
    begun_s = time.perf_counter()
    batches = iter(loader)
    next(batches)
    start_s, running_s = time.perf_counter() - begun_s, time.thread_time()
    begun_s, touched_s, unmapped_s, count = time.perf_counter(), 0.0, 0.0, 0
    for tensors in batches:
        touched_s -= time.thread_time()
        for tensor in tensors:
            tensor[::_PAGE].max()
        touched_s += time.thread_time()
        unmapped_s -= time.thread_time()
        del tensor, tensors
        unmapped_s += time.thread_time()
        count += 1
        if time.perf_counter() - begun_s > _SECONDS / 2:
            break
    receive_s = times * (time.thread_time() - running_s - touched_s - unmapped_s) / count
    hand_s = times * (time.perf_counter() - begun_s) / count
    return WorkerCosts(Work(hand_s), receive_s, times * touched_s / count, times * unmapped_s / count, start_s)


class _Ready:
    """Batches that lie ready, or whose tensors do, which are copied `as_one`."""

    def __init__(self, sizes: Sequence[int], as_one: bool) -> None:
        import torch

        self._sizes = sizes
        self._parts = [torch.ones(max(1, size), dtype=torch.uint8) for size in sizes] if as_one else []

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> list[Any]:
        import torch

        if self._parts:
            return [torch.cat(self._parts)]
        return [torch.zeros(max(1, size), dtype=torch.uint8) for size in self._sizes]
