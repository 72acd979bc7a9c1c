"""Passes over a source of batches for some time: images a second, and what they cost."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fastload.meter import family

_PAGE = 4096


@dataclass(frozen=True)
class Pass:
    """What one pass did.

    Attributes:
        samples: handed over after the clock began.
        seconds: from the first batch in hand to the last.
        cpu_s: that this process and its children were on a CPU meanwhile.
    """

    samples: int
    seconds: float
    cpu_s: float

    @property
    def samples_per_s(self) -> float:
        """Over the time of the pass."""
        return self.samples / self.seconds if self.seconds else 0.0


class Epochs(Protocol):
    """What can be iterated again and again: a loader."""

    def __iter__(self) -> Iterator[Any]: ...

    def __len__(self) -> int: ...


def endless(loader: Epochs, *, epochs: int | None = None, same: Callable[[], object] | None = None) -> Iterator[Any]:
    """A loader's batches, epoch after epoch.

    Args:
        epochs: after which it ends; None: never.
        same: called before each epoch, such as `lambda: loader.set_epoch(0)`.
    """
    done = 0
    while epochs is None or done < epochs:
        if same is not None:
            same()
        yield from loader
        done += 1


def run_for(
    batches: Iterable[Any],
    seconds: float,
    work: Callable[[Any], int],
    *,
    discard: int = 1,
    at_least: int = 2,
    settle: Callable[[], object] | None = None,
) -> Pass:
    """Takes batches for so many seconds.

    The clock begins when the first ones are in hand, so that a way that takes long to begin is not blamed for that.

    Args:
        work: done with each batch; returns its samples.
        discard: batches before the clock begins.
        at_least: batches counted, however long they take, if there are so many.
        settle: waits until all is done that the batches began, before the clock begins and before it ends.
    """
    iterator = iter(batches)
    for _ in range(discard):
        batch = next(iterator, None)
        if batch is not None:
            work(batch)
            del batch  # a loader may have its memory again
    if settle is not None:
        settle()
    cpu_s, begin = cpu_seconds(), time.perf_counter()
    samples = 0
    for count, batch in enumerate(iterator, 1):
        samples += work(batch)
        del batch
        if count >= at_least and time.perf_counter() - begin >= seconds:
            break
    if settle is not None:
        settle()
    return Pass(samples, time.perf_counter() - begin, cpu_seconds() - cpu_s)


def cpu_seconds() -> float:
    """Seconds that this process and its children, those that live, were on a CPU so far."""
    own = os.getpid()
    others = [pid for pid in family.family_of(own) if pid != own]
    return time.process_time() + sum(family.cpu_seconds(others).values())


def touch(pixels: NDArray[Any]) -> int:
    """Reads one byte of each page of a C-contiguous array, in memory order: 0.06 ms for 30 MB."""
    return int(pixels.reshape(-1).view(np.uint8)[::_PAGE].max())


def touched(batch: Any) -> int:
    """The work of a pass that only looks: one byte of each page of a batch's images, which come first; its samples."""
    images = batch[0]
    if images.device.type == "cpu":
        # Not torch's permute: it gives up the GIL, and beside pure Python waits 5 ms for it.
        array = images.numpy()
        touch(array if array.flags.c_contiguous else array.transpose(0, 2, 3, 1))
    return len(images)
