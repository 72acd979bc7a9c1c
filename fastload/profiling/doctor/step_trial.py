"""Plays a script's training step again on this machine's CPUs, to try it during other work, or in other formats."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastload.profiling.verdict.loop_model import FormatCosts

if TYPE_CHECKING:  # torch takes seconds to import
    import torch

_ROUNDS, _WARM_UP = 3, 1  # calls of which the shortest counts, and those before
_SECONDS = 2.0  # after which a shorter one is no longer waited for
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
    while len(taken_s[0]) < _WARM_UP + _ROUNDS and (len(taken_s[0]) <= _WARM_UP or sum(taken_s[0]) < _SECONDS):
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
