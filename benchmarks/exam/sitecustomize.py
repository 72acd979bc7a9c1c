"""Applies a change to the loaders of a script of the exam, and measures its loops. Python imports it at its start.

EXAM_CHANGE: `workers=N`, `persistent`, `cheaper` (some samples, made before, are handed out again and again, after as
much CPU time as it took Pillow to decode them), `one tensor` (workers hand each batch over as one tensor, which the
loop takes apart), `channels_last` (images that a network gets are brought into FastLoader's memory format), `pack` (the
loaders for which EXAM_PACK, a file that defines `replace(arguments)`, returns another one), or empty.
EXAM_OUT gets one JSON object a loop: the dataset, its backward passes, passes and steps; and seconds, from the loader's
`iter()` to the end of the pass, without those of loops within its steps, nor of a loop's first steps, as the doctor
leaves out warm-up.
"""

from __future__ import annotations

import atexit
import importlib.util
import inspect
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MOST_KEPT = 2048
MOST_KEPT_BYTES = 64 * 2**20  # of 1.8 GB, forked workers handed batches over three times as slowly
ALIGNED = 16  # bytes
WARM_UP = 2  # steps


def install(change: str, pack: str, out: str) -> None:
    """Changes torch's DataLoader and our FastLoader."""
    import torch
    from torch.utils.data import DataLoader

    loops: dict[int, dict[str, Any]] = {}
    open_loops: list[dict[str, Any]] = []
    kept: list[Any] = []  # objects whose id() is a key
    owner = os.getpid()
    spent = [0.0]  # seconds of all loops together

    def measured(loader: Any, batches: Iterator[Any], since_s: float, spent_s: float) -> Iterator[Any]:
        if os.getpid() != owner:
            yield from batches
            return
        if id(loader) not in loops:
            kept.append(loader)
            dataset = type(getattr(loader, "dataset", loader)).__name__
            counts = {"passes": 0, "steps": 0, "timed_steps": 0, "seconds": 0.0, "backward": 0}
            loops[id(loader)] = {"dataset": dataset} | counts
        loop = loops[id(loader)]
        loop["passes"] += 1
        open_loops.append(loop)
        try:
            for batch in batches:
                if isinstance(batch, OneTensor):
                    batch = batch.apart()
                yield batch
                # A pass that nobody asks for more ends with its last whole step.
                loop["steps"] += 1
                is_timed = loop["steps"] > WARM_UP
                loop["timed_steps"] += is_timed
                since_s, spent_s = counted(loop, since_s, spent_s, is_timed)
            counted(loop, since_s, spent_s, is_timed=loop["steps"] > WARM_UP)
        finally:
            open_loops.remove(loop)

    def counted(loop: dict[str, Any], since_s: float, spent_s: float, is_timed: bool) -> tuple[float, float]:
        now_s = time.perf_counter()
        own_s = now_s - since_s - (spent[0] - spent_s)  # without the loops within its step
        loop["seconds"] += own_s * is_timed
        spent[0] += own_s
        return now_s, spent[0]

    plain_iter = DataLoader.__iter__

    def timed_iter(loader: Any) -> Any:
        begun = time.perf_counter(), spent[0]
        batches = plain_iter(loader)
        return Timed(measured(loader, batches, *begun), batches)

    class Timed:
        """An iterator that is timed, and otherwise the one that it stands for."""

        def __init__(self, timed: Iterator[Any], batches: Any) -> None:
            self._timed, self._batches = timed, batches

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> Any:
            return next(self._timed)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._batches, name)

    plain_init, plain_new = DataLoader.__init__, DataLoader.__new__
    replace = None
    if change == "pack":
        spec = importlib.util.spec_from_file_location("exam_pack", pack)
        assert spec is not None and spec.loader is not None
        sys.path.append(os.path.dirname(pack))
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        replace = module.replace

    signature = inspect.signature(plain_init)
    replacing: list[int] = []

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if replace is not None and not replacing:
            given = dict(signature.bind_partial(None, *args, **kwargs).arguments)
            given.pop("self", None)
            replacing.append(1)
            try:
                other = replace(given)
            finally:
                replacing.pop()
            if other is not None:
                return other
        return plain_new(cls)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        name, _, value = change.partition("=")
        if name == "cheaper":
            if args:
                args = (Kept(args[0]), *args[1:])
            else:
                kwargs["dataset"] = Kept(kwargs["dataset"])
        if name == "workers":
            kwargs["num_workers"] = int(value)
        elif name == "persistent":
            given = signature.bind_partial(self, *args, **kwargs).arguments
            kwargs["persistent_workers"] = bool(given.get("num_workers"))
        plain_init(self, *args, **kwargs)
        if change == "one tensor" and self.num_workers:
            self.collate_fn = AsOneTensor(self.collate_fn)

    DataLoader.__new__ = new
    DataLoader.__init__ = init
    DataLoader.__iter__ = timed_iter
    if change == "pack":
        from fastload import FastLoader

        fast_iter = FastLoader.__iter__

        def timed_fast_iter(loader: Any) -> Any:
            begun = time.perf_counter(), spent[0]
            return measured(loader, fast_iter(loader), *begun)

        FastLoader.__iter__ = timed_fast_iter

    if change == "channels_last":  # a loader around the one that is timed may put batches together anew
        torch.nn.modules.module.register_module_forward_pre_hook(with_channels_last)

    plain_backward = torch.Tensor.backward

    def backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        for loop in open_loops:
            loop["backward"] += 1
        return plain_backward(self, *args, **kwargs)

    torch.Tensor.backward = backward

    def write() -> None:
        if os.getpid() == owner and loops:
            with open(out, "a") as file:
                for loop in loops.values():
                    file.write(json.dumps(loop) + "\n")

    atexit.register(write)


class Kept:
    """Some samples of a dataset, from all over it, again and again; each takes the CPU time that decoding it took."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._samples: list[tuple[Any, float]] = []
        decoding = Decoding()
        first = dataset[0]
        most = min(len(dataset), MOST_KEPT, max(1, MOST_KEPT_BYTES // max(1, nbytes(first))))
        for number in range(most):
            decoding.seconds = 0.0
            sample = dataset[number * len(dataset) // most]
            self._samples.append((sample, decoding.seconds))
        decoding.over()

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        sample, seconds = self._samples[index % len(self._samples)]
        if seconds:
            end_s = time.thread_time() + seconds
            while time.thread_time() < end_s:
                pass
        return sample

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._dataset, name)


class Decoding:
    """Adds up the CPU time that Pillow takes to decode images, until it is `over`."""

    def __init__(self) -> None:
        from PIL import Image, ImageFile

        self.seconds = 0.0
        self._depth = 0
        self._patched = [(ImageFile.ImageFile, "load"), (Image.Image, "convert"), (Image, "open")]
        self._before = [getattr(owner, name) for owner, name in self._patched]
        for (owner, name), call in zip(self._patched, self._before, strict=True):
            setattr(owner, name, self._timed(call))

    def _timed(self, call: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun_s = time.thread_time()
            self._depth += 1
            try:
                return call(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.thread_time() - begun_s

        return timed

    def over(self) -> None:
        """Puts everything back."""
        for (owner, name), call in zip(self._patched, self._before, strict=True):
            setattr(owner, name, call)


def nbytes(thing: Any) -> int:
    """Returns the bytes of all tensors and arrays in a sample."""
    if isinstance(thing, dict):
        thing = list(thing.values())
    if isinstance(thing, (list, tuple)):
        return sum(map(nbytes, thing))
    return int(getattr(thing, "nbytes", 0))


class AsOneTensor:
    """A `collate_fn` whose batches are one tensor each."""

    def __init__(self, collate: Any) -> None:
        self._collate = collate

    def __call__(self, samples: Any) -> Any:
        return OneTensor(self._collate(samples))


class OneTensor:
    """The tensors of a batch in one tensor, and all else that it has."""

    def __init__(self, batch: Any) -> None:
        import torch

        self._size, tensors = 0, []  # each with its first byte

        def placed(tensor: Any) -> Place:
            tensors.append((self._size, tensor))
            place = Place(self._size, tuple(tensor.shape), tensor.dtype)
            self._size += -(-tensor.nbytes // ALIGNED) * ALIGNED
            return place

        self._rest = mapped(placed, torch.Tensor, batch)
        self._bytes = torch.empty(self._size, dtype=torch.uint8)
        for begin, tensor in tensors:
            self._bytes[begin : begin + tensor.nbytes] = tensor.reshape(-1).view(torch.uint8)

    def apart(self) -> Any:
        """Returns the batch, whose tensors lie in the one."""
        return mapped(self._found, Place, self._rest)

    def _found(self, place: Place) -> Any:
        size = place.dtype.itemsize * math.prod(place.shape)
        return self._bytes[place.begin : place.begin + size].view(place.dtype).view(place.shape)


def with_channels_last(_: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns a module's inputs with images (B, C, H, W) in channels_last memory; modules within it find them so."""
    import torch

    def brought(tensor: Any) -> Any:
        is_images = tensor.ndim == 4 and tensor.shape[1] in (1, 3, 4)
        return tensor.contiguous(memory_format=torch.channels_last) if is_images else tensor

    return tuple(mapped(brought, torch.Tensor, one) for one in inputs)


@dataclass(frozen=True)
class Place:
    """Where a tensor lies."""

    begin: int
    shape: tuple[int, ...]
    dtype: Any


def mapped(function: Any, kind: type, thing: Any) -> Any:
    """Returns dicts, lists and tuples with the function's result for each object of a kind."""
    if isinstance(thing, kind):
        return function(thing)
    if isinstance(thing, dict):
        return {name: mapped(function, kind, one) for name, one in thing.items()}
    if isinstance(thing, (list, tuple)):
        return type(thing)([mapped(function, kind, one) for one in thing])
    return thing


def is_script() -> bool:
    """Whether this is the Python that trains, and not a worker or a helper that it starts."""
    return "EXAM_OUT" in os.environ and os.environ.setdefault("EXAM_PID", str(os.getpid())) == str(os.getpid())


if is_script():
    try:
        install(os.environ.get("EXAM_CHANGE", ""), os.environ.get("EXAM_PACK", ""), os.environ["EXAM_OUT"])
    except Exception as error:  # site would print it, and go on without the change
        raise SystemExit(f"the change cannot be made: {error!r}") from error
