"""How ranks add up their gradients: three ways to sum a tensor, and a hook that reduces DDP's buckets and keeps time.

Groups here are the first so many ranks of the world, so that a rank of the group has the same number in the world.
"""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with types, not with their names.
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup
Stamp = Any
"""A moment: seconds of `time.perf_counter` on the CPU, an event in the current stream on CUDA."""


def ring_all_reduce(tensor: Tensor, group: Group) -> None:
    """Sums a tensor (N,) of all ranks in place; each rank talks to its two neighbours only.

    The tensor is cut into as many parts as there are ranks, W. In the first W - 1 steps each part goes around once and
    grows by every rank that it meets; in the next W - 1 its sum goes around (Patarasuk and Yuan, 2009). Each rank sends
    2 (W - 1) / W of the bytes, the least that will do, however many ranks there are.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    parts = tensor.tensor_split(size)
    room = torch.empty_like(parts[0])  # the first part is never smaller than another
    for step in range(2 * (size - 1)):
        sent, got = parts[(rank - step) % size], parts[(rank - step - 1) % size]
        adding = step < size - 1
        arriving = room[: len(got)] if adding else got
        both = [
            dist.P2POp(dist.isend, sent, (rank + 1) % size, group),
            dist.P2POp(dist.irecv, arriving, (rank - 1) % size, group),
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        if adding:
            got += arriving


def reduce_then_broadcast(tensor: Tensor, group: Group) -> None:
    """Sums a tensor of all ranks in place: on rank 0, which then sends the sum to all."""
    dist.reduce(tensor, 0, group=group)
    dist.broadcast(tensor, 0, group=group)


def all_to_all_sum(tensor: Tensor, group: Group) -> None:
    """Sums a tensor (N,) of all ranks in place: rank r gets everybody's r-th part, adds them, and sends all the sum.

    As many bytes as around a ring, but in two steps, each with every other rank at once.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    lengths = [len(part) for part in tensor.tensor_split(size)]
    own = lengths[rank]
    collected = tensor.new_empty(size * own)
    dist.all_to_all_single(collected, tensor, [own] * size, lengths, group=group)
    # Not all_gather: gloo's takes three times as long for 64 MiB, and parts of one length only.
    summed = collected.view(size, own).sum(0)
    dist.all_to_all_single(tensor, summed.repeat(size), lengths, [own] * size, group=group)


def breakdown(launched: list[float], left: list[float], backward: float) -> dict[str, float]:
    """What a backward pass spent its time on, see `TimedReduction.take`.

    Args:
        launched: seconds after its beginning when each bucket's reduction started, the last gradient's at the end.
        left: when each was done.
        backward: when all was done.
    """
    if not launched:  # under no_sync
        return {"compute": backward, "backward": backward}
    compute, reducing, until = launched[-1], 0.0, 0.0
    for start, stop in zip(launched, left, strict=True):
        reducing += max(0.0, stop - max(start, until))
        until = max(until, stop)
    exposed = until - compute
    return {
        "compute": compute, "backward": backward, "reducing": reducing, "hidden": max(0.0, reducing - exposed),
        "exposed": exposed, "last": left[-1] - compute,
    }  # fmt: skip


class TimedReduction:
    """A hook for DDP that averages each bucket over the ranks and notes when it was ready and when reduced.

    Overlapping, as DDP does by itself, a bucket's reduction starts when the last of its gradients is there; delayed,
    all of them start after the last gradient of all. Call `begin` before a backward pass and `end` after it.

    Args:
        group: ranks to average over.
        device: of the gradients.
        delayed: whether the reductions wait for the end of the backward pass.
    """

    def __init__(self, group: Group, device: torch.device, *, delayed: bool = False) -> None:
        self.group, self.device, self.delayed = group, device, delayed
        self.buckets = 0
        self._begun: Stamp = None
        self._ready: list[Stamp] = []
        self._done: dict[int, Stamp] = {}
        self._waiting: list[tuple[int, Tensor, torch.futures.Future[Tensor]]] = []
        self._passes: list[tuple[Stamp, list[Stamp], dict[int, Stamp], Stamp]] = []

    def begin(self) -> None:
        """A backward pass begins."""
        self._begun, self._ready, self._done = self._now(), [], {}

    def end(self) -> None:
        """It has ended: the gradients are averaged, or the work of averaging them is queued on the device."""
        self._passes.append((self._begun, self._ready, self._done, self._now()))

    def hook(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """The bucket's gradients, averaged; for `register_comm_hook`."""
        index, gradients = len(self._ready), bucket.buffer().div_(dist.get_world_size(self.group))
        self._ready.append(self._now())
        if not self.delayed:
            return self._reduce(index, gradients)
        on_cuda = {"devices": [self.device]} if self.device.type == "cuda" else {}
        promised: torch.futures.Future[Tensor] = torch.futures.Future(**on_cuda)
        self._waiting.append((index, gradients, promised))
        if bucket.is_last():  # buckets come in order
            waiting, self._waiting = self._waiting, []
            for place, tensor, promise in waiting:
                self._reduce(place, tensor, promise)
        return promised

    def _reduce(
        self, index: int, gradients: Tensor, promise: torch.futures.Future[Tensor] | None = None
    ) -> torch.futures.Future[Tensor]:
        def reduced(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            self._done[index] = self._now()
            if promise is not None:
                promise.set_result(gradients)
            return gradients

        work = dist.all_reduce(gradients, group=self.group, async_op=True)
        return work.get_future().then(reduced)

    def take(self) -> dict[str, float]:
        """Medians over the passes since the last call, in seconds.

        `compute`: from the beginning to the last gradient. `backward`: until the gradients are averaged. `reducing`:
        while a reduction was under way; `hidden` of it before the last gradient was there, `exposed` after. `last`:
        from the last gradient until its bucket was reduced.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        figures = [self._figures(*found) for found in self._passes]
        self.buckets = len(self._passes[-1][1])
        self._passes = []
        return {name: statistics.median(values[name] for values in figures) for name in figures[0]}

    def _figures(self, begun: Stamp, ready: list[Stamp], done: dict[int, Stamp], ended: Stamp) -> dict[str, float]:
        arrived = [self._seconds(begun, stamp) for stamp in ready]
        left = [self._seconds(begun, done[index]) for index in range(len(ready))]
        launched = [arrived[-1]] * len(arrived) if self.delayed and arrived else arrived
        return breakdown(launched, left, self._seconds(begun, ended))

    def _now(self) -> Stamp:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, start: Stamp, stop: Stamp) -> float:
        return float(start.elapsed_time(stop) / 1e3 if self.device.type == "cuda" else stop - start)
