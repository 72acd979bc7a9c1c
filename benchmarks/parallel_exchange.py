"""The questions of bench_parallel.py about what ranks send each other; all of them run these functions together.

The network is that of `classify`, but of WIDTH channels, for 20 MB of gradients; on the CPU it sees few rows at a time,
or nothing but computation would show.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import harness
from parallel_comm import Group, TimedReduction, all_to_all_sum, reduce_then_broadcast, ring_all_reduce
from parallel_ranks import Ranks, Way, ratios
from parallel_sections import held_batch
from parallel_steps import Held, Task, Training

BUCKETS_MB = (0.25, 1.0, 4.0, 25.0)
MICRO_BATCHES = 4
WIDTH = 64
CPU_ROWS = 8  # on each rank
Sum = Callable[[Tensor, Group], object]
SUMS: dict[str, Sum] = {
    "ring": ring_all_reduce,
    "all_reduce": lambda tensor, group: dist.all_reduce(tensor, group=group),
    "reduce_broadcast": reduce_then_broadcast,
    "all_to_all": all_to_all_sum,
}


class Reducing:
    """Training under DDP whose buckets a TimedReduction reduces: the step, and its figures."""

    def __init__(
        self, ranks: Ranks, task: Task, batch: Held, group: Group, *, bucket_mb: float = 25, delayed: bool = False
    ) -> None:
        # None is torch's 25 with a first bucket of 1; a number is one for all.
        cap = None if bucket_mb == 25 else bucket_mb
        self.training = Training(task, "ddp", ranks.device, group=group, width=_width(ranks), bucket_cap_mb=cap)
        self.batch = batch._replace(global_valid=batch.global_valid * group.size())
        self.timed = TimedReduction(group, ranks.device, delayed=delayed)
        self.training.model.register_comm_hook(None, self.timed.hook)

    def step(self, *, sync: bool = True) -> None:
        """One step; without sync, every rank learns from its own gradients only."""
        self.training.optimizer.zero_grad(set_to_none=True)
        with nullcontext() if sync else self.training.model.no_sync():
            loss = self.training.loss(self.batch)
            self.timed.begin()
            loss.backward()
            self.timed.end()
        self.training.update()


def buckets(ranks: Ranks, data: dict[str, Path], world: int) -> None:
    """How much of DDP's step is reduction, hidden behind backward and exposed after it, by the buckets' size."""
    task, batch = _batch(ranks, data)
    trained: dict[str, Reducing] = {}

    def made(size: float) -> Callable[[], None]:
        run = trained[str(size)] = Reducing(ranks, task, batch, ranks.groups[world], bucket_mb=size)
        return run.step

    ways = {str(size): ranks.way(world, lambda size=size: made(size)) for size in BUCKETS_MB}
    seconds, figures = _timed_in_turn(ranks, ways, trained)
    if ranks.rank:
        return
    for name, run in trained.items():
        shares = [found["exposed"] / whole for found, whole in zip(figures[name], seconds[name], strict=True)]
        ranks.note(
            f"buckets-{name}-{world}",
            buckets=run.timed.buckets,
            step_s=harness.spread(seconds[name]),
            exposed_share=harness.spread(shares),
            **{f"{part}_s": harness.spread([found[part] for found in figures[name]]) for part in figures[name][0]},
            **_size(ranks, batch, run.training),
        )


def overlap(ranks: Ranks, data: dict[str, Path], world: int) -> None:
    """Reductions during backward against all of them after it, and backward's own time in each and in neither."""
    task, batch = _batch(ranks, data)
    trained: dict[str, Reducing] = {}

    def made(name: str) -> Callable[[], None]:
        group, delayed = ranks.groups[world], name == "delayed"
        run = trained[name] = Reducing(ranks, task, batch, group, bucket_mb=4, delayed=delayed)
        return lambda: run.step(sync=name != "no_sync")

    ways = {name: ranks.way(world, lambda name=name: made(name)) for name in ("overlap", "delayed", "no_sync")}
    equal = True
    if trained:
        for name in ("overlap", "delayed"):
            trained[name].step()
            trained[name].timed.take()
        one, other = (trained[name].training.gradients() for name in ("overlap", "delayed"))
        equal = _same(ranks, one, other)
    if not all(ranks.gathered(equal)):
        raise AssertionError("the delayed reduction gave other gradients than the overlapping one")
    seconds, figures = _timed_in_turn(ranks, ways, trained)
    if ranks.rank:
        return
    compute = {name: [found["compute"] for found in of_turns] for name, of_turns in figures.items()}
    ranks.note(
        f"overlap-{world}",
        ratio=ratios(seconds["overlap"], seconds["delayed"]),
        overlap_s=harness.spread(seconds["overlap"]),
        delayed_s=harness.spread(seconds["delayed"]),
        no_sync_s=harness.spread(seconds["no_sync"]),
        backward_slowed=ratios(compute["overlap"], compute["no_sync"]),
        backward_slowed_delayed=ratios(compute["delayed"], compute["no_sync"]),
        gradients_equal=equal,
        **_size(ranks, batch, trained["overlap"].training),
    )


def accumulation(ranks: Ranks, data: dict[str, Path], world: int) -> None:
    """Steps of several batches: reduced once (no_sync) over reduced after each."""
    task, batch = _batch(ranks, data)

    trained: list[Training] = []
    whole = batch._replace(global_valid=batch.global_valid * world)

    def made(*, sync_each: bool) -> Callable[[], None]:
        training = Training(task, "ddp", ranks.device, group=ranks.groups[world], width=_width(ranks))
        trained.append(training)

        def step() -> None:
            training.optimizer.zero_grad(set_to_none=True)
            for index in range(MICRO_BATCHES):
                last = index == MICRO_BATCHES - 1
                with nullcontext() if sync_each or last else training.model.no_sync():
                    training.loss(whole).backward()
            training.update()

        return step

    found = ranks.in_turn({
        "once": ranks.way(world, lambda: made(sync_each=False)),
        "each": ranks.way(world, lambda: made(sync_each=True)),
    })  # fmt: skip
    if ranks.rank == 0:
        ranks.note(
            f"accumulation-{world}",
            ratio=ratios(found["once"], found["each"]),
            once_s=harness.spread(found["once"]),
            each_s=harness.spread(found["each"]),
            micro_batches=MICRO_BATCHES,
            **_size(ranks, batch, trained[0]),
        )


def sums(ranks: Ranks, size: int, world: int) -> None:
    """Ways to add up a tensor of so many bytes of all ranks: the same bytes, the same result."""
    group = ranks.groups[world]

    def made(add: Sum) -> Callable[[], None]:
        torch.manual_seed(ranks.rank)
        own = torch.rand(size // 4, device=ranks.device)
        wanted, found = own.clone(), own.clone()
        dist.all_reduce(wanted, group=group)
        add(found, group)
        torch.testing.assert_close(found, wanted)
        work = torch.zeros_like(own)  # sums of zeros stay what they are, however often they are taken
        return lambda: add(work, group)

    ways = {name: ranks.way(world, lambda add=add: made(add)) for name, add in SUMS.items()}
    found = ranks.in_turn(ways, share=0.3)
    if ranks.rank == 0:
        ranks.note(
            f"sum-{size}-{world}",
            bytes=size,
            **{f"{name}_s": harness.spread(seconds) for name, seconds in found.items()},
            **{
                f"{name}_over_{base}": ratios(found[name], found[base])
                for base in ("all_reduce", "ring")
                for name in SUMS
                if name != base
            },
        )


def _batch(ranks: Ranks, data: dict[str, Path]) -> tuple[Task, Held]:
    return held_batch(ranks, data, "classify", rows=CPU_ROWS if ranks.device.type == "cpu" else None)


def _width(ranks: Ranks) -> int:
    return 16 if ranks.options.quick else WIDTH


def _size(ranks: Ranks, batch: Held, training: Training) -> dict[str, float]:
    """What was trained: rows on each rank, channels of the first stage, bytes of gradients."""
    numbers = sum(parameter.numel() for parameter in training.model.parameters())
    return {"batch_size": len(batch.valid), "width": _width(ranks), "parameters_mb": 4 * numbers / 2**20}


def _same(ranks: Ranks, one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether gradients of two backward passes agree: to the bit, but on CUDA, where max-pooling's are added anyhow."""
    if ranks.device.type == "cpu":
        return all(torch.equal(*both) for both in zip(one, other, strict=True))
    try:
        for found, wanted in zip(one, other, strict=True):
            # TF32 makes more of a last bit that differs; a bucket that was not averaged would be wrong by far more.
            room = max(1e-5, 1e-3 * float(wanted.abs().max()))
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=room)
    except AssertionError:
        return False
    return True


def _timed_in_turn(
    ranks: Ranks, ways: dict[str, Way], trained: dict[str, Reducing]
) -> tuple[dict[str, list[float]], dict[str, list[dict[str, float]]]]:
    """Seconds a step of each way, and what its TimedReduction saw, once a turn."""
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in ways}

    def taken(name: str) -> None:
        if name in trained:
            figures[name].append(trained[name].timed.take())

    seconds = ranks.in_turn(ways, taken)
    return seconds, {name: found[1:] for name, found in figures.items()}  # the first were of the warm-up
