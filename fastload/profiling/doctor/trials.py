"""Trials on this machine, after a script has run: what its training step, or another loader, would take.

`Replay` plays the step again on the CPUs, during other work or in other formats. Other loaders make batches like the
script's, with made-up contents.
"""

from __future__ import annotations

import ast
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastload.errors import OptionError
from fastload.profiling.verdict.loop_model import FastLoaderCosts, FormatCosts, WorkerCosts
from fastload.system.machine import available_cpus
from fastload.timing.probe import Probe
from fastload.timing.results import WorkTime

if TYPE_CHECKING:  # torch takes seconds to import
    import torch

    from fastload.dataset import PackedDataset
    from fastload.loader.loader import FastLoader
    from fastload.transforms.spec import BaseTransform

_REPLAYS, _WARM_UP = 3, 1  # calls of which the shortest counts, and those before
_REPLAY_S = 2.0  # after which a shorter call is no longer waited for
_LONGEST_S = 3.0  # of a step that is played again
_SMALL = 32


@dataclass(frozen=True)
class Recorded:
    """A step, as `injected.step_operations` wrote it down.

    Attributes:
        tensors: shape, dtype and strides of each.
        operations: name, arguments by position and by name, and the tensors that it returned, None where a result is
            none.
        images: which of the tensors holds the batch's images.
        between_s: seconds of the step between its operations, without those in which its thread had no CPU.
        threads: that torch could use for an operation.
    """

    tensors: Sequence[tuple[Sequence[int], str, Sequence[int]]]
    operations: Sequence[tuple[str, Sequence[Any], Mapping[str, Any], Sequence[int | None]]]
    images: int
    between_s: float = 0.0
    threads: int = 1

    @property
    def batch_size(self) -> int:
        """Images in the batch."""
        return self.tensors[self.images][0][0]


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Lets torch use so many threads for a step, as the loop's does."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Replay:
    """A recorded step over tensors with random contents; call it to run all its operations.

    What an operation returned is given to those that took it, so that memory formats go through the step as they do in
    the script. An operation that does not exist here, or fails, is left out from then on, with random results.
    """

    def __init__(self, recorded: Recorded, *, channels_last: bool = False) -> None:
        import torch

        self._recorded = recorded
        images = self._made(recorded.images)
        if channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        self._given = {recorded.images: images}  # those that no operation returned
        uses = [[*_numbers_in([args, kwargs]), *returned] for _, args, kwargs, returned in recorded.operations]
        last_use = {number: position for position, numbers in enumerate(uses) for number in numbers}
        unused: list[list[int]] = [[] for _ in uses]  # from there on
        for number, position in last_use.items():
            if number is not None:
                unused[position].append(number)
        known = set(self._given)
        self._calls = []
        for (name, args, kwargs, returned), over in zip(recorded.operations, unused, strict=True):
            new = {*_numbers_in([args, kwargs])} - known
            self._given |= {number: self._made(number) for number in new}
            known |= {*new, *(number for number in returned if number is not None)}
            self._calls.append(_Call([*_functions(name)], args, kwargs, returned, over))
        self()

    @property
    def left_out(self) -> int:
        """Number of operations that are left out."""
        return sum(not call.functions for call in self._calls)

    def __call__(self) -> None:
        values = dict(self._given)
        for call in self._calls:
            call.run(values, self._made)
            for number in call.over:
                values.pop(number, None)

    def _made(self, number: int) -> torch.Tensor:
        """Returns a tensor with random numbers that neither grow nor vanish from layer to layer, or with zeros."""
        import torch

        shape, dtype, strides = self._recorded.tensors[number]
        made = torch.empty_strided(shape, strides, dtype=getattr(torch, dtype))
        if 0 in strides or not made.is_floating_point():
            return torch.zeros(tuple(shape), dtype=made.dtype)
        bound = math.sqrt(6 / max(1, math.prod(shape[1:]))) if len(shape) > 1 else 1.0
        return made.uniform_(-bound, bound)


@dataclass
class _Call:
    """One operation of a step."""

    functions: list[Callable[..., Any]]  # that may do it; those before the first that does not fail are removed
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    returned: Sequence[int | None]
    over: list[int]  # tensors that no later one needs
    made: dict[int, torch.Tensor] = field(default_factory=dict)  # results of one that failed

    def run(self, values: dict[int, torch.Tensor], make: Callable[[int], torch.Tensor]) -> None:
        """Runs it on some of the values, and adds its results to them."""
        while self.functions:
            try:
                result = self.functions[0](*_filled(self.args, values), **_filled(self.kwargs, values))
                results = result if isinstance(result, (list, tuple)) else [result]
                new = {number: one for number, one in zip(self.returned, results, strict=True) if number is not None}
            except Exception:  # noqa: BLE001  # whatever one of another version, or of such contents, does not take
                self.functions.pop(0)
            else:
                values.update(new)
                return
        self.made = self.made or {number: make(number) for number in self.returned if number is not None}
        values.update(self.made)


def _functions(name: str) -> Iterator[Callable[..., Any]]:
    """Yields the operation of a name such as `aten.add.Tensor`, then its equivalents for more memory formats."""
    import torch

    found: Any = torch.ops
    with suppress(AttributeError):
        for word in name.split("."):
            found = getattr(found, word)
        yield found
    if name.startswith(("aten.view.", "aten._unsafe_view.")):
        yield lambda images, size: torch.reshape(images, size)


def _numbers_in(value: Any) -> list[int]:
    if isinstance(value, Mapping):
        if "tensor" in value:
            return [value["tensor"]]
        value = list(value.values())
    return [number for one in value for number in _numbers_in(one)] if isinstance(value, (list, tuple)) else []


def _filled(value: Any, values: Mapping[int, torch.Tensor]) -> Any:
    """Returns an argument as the operation takes it."""
    if isinstance(value, Mapping):
        if "tensor" in value:
            return values[value["tensor"]]
        import torch

        for kind in ("dtype", "layout", "memory_format"):
            if kind in value and isinstance(value[kind], str):
                return getattr(torch, value[kind])
        if isinstance(value.get("device"), str):
            return torch.device(value["device"])
        return {name: _filled(one, values) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_filled(one, values) for one in value]
    return value


class TrialStep:
    """A training step that takes about so long after a pause: a recorded one, then steps of a small network.

    The pause is what the loop does meanwhile, and from which a step begins with cold caches and sleeping threads. Where
    none is recorded, or is a part of it, steps of a small network for such images take its place. `around_s` of it are
    arithmetic on a batch of floating-point images, as in a loader that normalizes another loader's images.
    """

    def __init__(
        self, recorded: Recorded | None, seconds: float, shape: tuple[int, int, int, int], pause_s: float = 0.0,
        around_s: float = 0.0,
    ) -> None:  # fmt: skip
        self._rounds, self._more = 1, 0
        self._before, seconds = _arithmetic(shape, around_s), seconds - around_s
        self._small_step = _step_of_vectors()
        if recorded is not None and seconds <= _LONGEST_S:
            self._step: Callable[[], None] = Replay(recorded)
            self._more = round(max(0.0, seconds - _least_s(self._step, pause_s)) / _least_s(self._small_step))
        else:
            self._step = _step_of_images(shape)
            self._rounds = max(1, round(seconds / _least_s(self._step, pause_s)))

    def __call__(self) -> None:
        self._before()
        for _ in range(self._rounds):
            self._step()
        for _ in range(self._more):
            self._small_step()


def _arithmetic(shape: tuple[int, int, int, int], seconds: float) -> Callable[[], None]:
    """Returns what takes about so long, image by image of such a batch."""
    import torch

    if seconds <= 0:
        return lambda: None
    images = torch.zeros(shape)
    count = round(seconds / _least_s(lambda: [image.add_(1.0) for image in images]) * len(images))

    def compute() -> None:
        for number in range(count):
            images[number % len(images)].add_(1.0)

    return compute


def _step_of_vectors() -> Callable[[], None]:
    """Returns a training step that one thread takes in less than a millisecond: much Python, little arithmetic."""
    import torch

    network = torch.nn.Sequential(torch.nn.Linear(_SMALL, _SMALL), torch.nn.ReLU(), torch.nn.Linear(_SMALL, _SMALL))
    return _training(network, torch.rand(_SMALL // 2, _SMALL))


def _step_of_images(shape: tuple[int, int, int, int]) -> Callable[[], None]:
    """Returns a training step of a small network for images (B, C, H, W)."""
    import torch
    from torch import nn

    stride = 4 if min(shape[2:]) > _SMALL else 1
    first, then = nn.Conv2d(shape[1], 8, 5, stride, 2), nn.Conv2d(8, 16, 3, 2, 1)
    return _training(nn.Sequential(first, nn.ReLU(), then, nn.AdaptiveAvgPool2d(1), nn.Flatten()), torch.rand(shape))


def _training(network: torch.nn.Module, samples: torch.Tensor) -> Callable[[], None]:
    import torch

    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9)
    labels = torch.zeros(len(samples), dtype=torch.long)

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(torch.nn.functional.cross_entropy(network(samples), labels))
        optimizer.step()

    return step


def measure_formats(recorded: Recorded, own_s: float) -> FormatCosts | None:
    """Returns what a recorded step of `own_s` costs by memory format of its images.

    None for one that takes too long to be played again.
    """
    import torch

    if own_s > _LONGEST_S:
        return None
    with torch_threads(recorded.threads):
        formats = [Replay(recorded, channels_last=last) for last in (False, True)]
        contiguous_s, channels_last_s = _least_of_each_s(formats)
        images = torch.rand(tuple(recorded.tensors[recorded.images][0]))
        convert_s = _least_s(lambda: images.contiguous(memory_format=torch.channels_last))
    left_out = max(one.left_out for one in formats)
    return FormatCosts(contiguous_s, channels_last_s, convert_s, recorded.between_s, left_out)


def _least_s(call: Callable[[], Any], pause_s: float = 0.0) -> float:
    """Returns the seconds of the shortest of a few calls, each after a pause; of long ones, of one after another."""
    return _least_of_each_s([call], pause_s)[0]


def _least_of_each_s(calls: Sequence[Callable[[], Any]], pause_s: float = 0.0) -> list[float]:
    """Returns each call's least time. Calls take turns, so that other work of the machine slows them equally."""
    taken_s: list[list[float]] = [[] for _ in calls]
    while len(taken_s[0]) < _WARM_UP + _REPLAYS and (len(taken_s[0]) <= _WARM_UP or sum(taken_s[0]) < _REPLAY_S):
        for call, seconds in zip(calls, taken_s, strict=True):
            begun_s = pause(pause_s)
            call()
            seconds.append(time.perf_counter() - begun_s)
    return [min(seconds[_WARM_UP:]) for seconds in taken_s]


def pause(seconds: float) -> float:
    """Keeps the calling thread busy for so long, and returns the time then."""
    end_s = time.perf_counter() + seconds
    while (now_s := time.perf_counter()) < end_s:
        pass
    return now_s


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
            costs = FastLoaderCosts(
                WorkTime(made_s), begin_s=_begin_s(dataset, min(batch_size, count), transform, usual_s)
            )
            if own_s:
                with torch_threads(recorded.threads if recorded is not None else max(1, round(own_cpus))):
                    shape = (batch_size, seen.channels, *seen.size)
                    step = TrialStep(recorded if share == 1 else None, own_s, shape, pause_s, around_s)
                    costs = _beside_steps(loader, costs, step, pause_s)
            return replace(costs, batch=WorkTime(made_s / share))


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
    return WorkerCosts(WorkTime(hand_s), receive_s, times * touched_s / count, times * unmapped_s / count, start_s)


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
