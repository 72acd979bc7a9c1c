"""The questions of bench_parallel.py about training steps; each is a function that all ranks run together."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed import ProcessGroup

import harness
from parallel_ranks import Ranks, Way, ratios
from parallel_steps import Feed, Held, Task, Training

PARALLEL = ("dp", "dp-loss")
MORE_PAIRS = 2
VISITS = 2
BARE = "one device: nn.DataParallel is the module itself here, and what it would gather is in gathered-*"
Data = dict[str, Path]
Found = dict[str, list[float]]


def strategies(ranks: Ranks, data: Data) -> None:
    """Step time and images a second of each strategy and world size, on a batch that is held."""
    task, batch = held_batch(ranks, data, "classify")
    rows = {"none": batch.global_valid}
    ways = {"none": ranks.way(1, lambda: _steps(Training(task, "none", ranks.device), batch))}
    for name in ("dp", "dp-loss"):
        wide = batch.times(_devices(ranks, name))
        rows[name] = wide.global_valid
        ways[name] = ranks.way(1, lambda name=name, wide=wide: _steps(Training(task, name, ranks.device), wide))
    for world, group in ranks.groups.items():
        whole = batch._replace(global_valid=batch.global_valid * world)
        rows[f"ddp-{world}"] = whole.global_valid
        ways[f"ddp-{world}"] = ranks.way(
            world, lambda group=group, whole=whole: _steps(Training(task, "ddp", ranks.device, group=group), whole)
        )
    found = ranks.in_turn(ways)
    for name, seconds in found.items() if ranks.rank == 0 else ():
        ranks.note(
            f"step-{name}" if name.startswith("ddp") else f"step-{name}-1",
            step_s=harness.spread(seconds),
            images_per_s=harness.spread([rows[name] / each for each in seconds]),
            over_none=ratios(seconds, found["none"]),
            batch_size=rows[name],
            told=_told(ranks, name),
        )


def memory(ranks: Ranks, data: Data, strategy: str) -> None:
    """The most memory that training took: of each device, or of each rank's process where there is none."""
    task, batch = held_batch(ranks, data, "segment")
    batch = batch.times(_devices(ranks, strategy))
    group = ranks.groups[ranks.size] if strategy == "ddp" else None
    used: list[int] = []
    if ranks.device.type == "cuda":
        used = list(range(_devices(ranks, strategy))) if strategy in PARALLEL else [ranks.rank]
    for device in used:  # the highest so far may be of how the batch was made
        torch.cuda.reset_peak_memory_stats(device)
    before = harness.process_memory(os.getpid())
    with harness.peak_memory(os.getpid(), period_s=0.01) as peak:
        training = Training(task, strategy, ranks.device, group=group)
        for _ in range(1 if ranks.options.quick else 8):
            training(batch)
    peaks = ranks.gathered(peak[0] - before)
    if used:
        each = ranks.gathered([torch.cuda.max_memory_allocated(device) for device in used])
        peaks = [most for of_rank in each for most in of_rank]
    rows = batch.global_valid * ranks.size
    ranks.note(f"memory-{strategy}-{ranks.size}", peak_bytes=peaks, batch_size=rows, told=_told(ranks, strategy))


def gathered(ranks: Ranks, data: Data, name: str) -> None:
    """Bytes that `nn.DataParallel` brings to one device in a step: answers (dp) or losses (dp-loss).

    The batch is cut for so many replicas, each part but the first goes through the network, and the outputs are
    counted: the first part's are on that device already.
    """
    if ranks.rank:
        return
    task, batch = held_batch(ranks, data, name)
    module = Training(task, "none", ranks.device).model  # of each replica of dp-loss
    dp_bytes, dp_loss_bytes = [], []
    replicas = [2, 4, 8]
    for number in replicas:
        parts = batch.parts(number)[1:]
        with torch.no_grad():
            dp_bytes.append(sum(_size(task.answers(module.network, part.fields)) for part in parts))
            dp_loss_bytes.append(sum(_size(module(part.fields, part.valid)) for part in parts))
    ranks.note(
        f"gathered-{name}",
        replicas=replicas,
        dp_bytes=dp_bytes,
        dp_loss_bytes=dp_loss_bytes,
        batch_size=batch.global_valid,
    )


def scaling(ranks: Ranks, data: Data, task: str) -> None:
    """Samples a second of DDP over one rank alone, and DDP on one rank over the plain model; all by FastLoader.

    `apart` is the same ranks, each training a model of its own: what the machine gives to so many at once.
    """
    feeds: list[Feed] = []

    def made(world: int, group: ProcessGroup | None = None) -> Callable[[], None]:
        feed = Feed(data[task], ranks.device, batch_size=ranks.options.rows, share=(ranks.rank, world))
        feeds.append(feed)
        return _fed_steps(Training(feed.task, "ddp" if group else "none", ranks.device, group=group), feed)

    ways = {"alone": ranks.way(1, lambda: made(1))}
    for world, group in ranks.groups.items():
        ways[f"ddp-{world}"] = ranks.way(world, lambda world=world, group=group: made(world, group))
        if world > 1:
            ways[f"apart-{world}"] = ranks.way(world, lambda world=world: made(world))
    found = _finely_in_turn(ranks, ways)
    for feed in feeds:
        feed.close()
    if ranks.rank:
        return
    rates = {
        name: [way.ranks * feed.batch_size / seconds for seconds in found[name]]
        for (name, way), feed in zip(ways.items(), feeds, strict=True)
    }
    ranks.note(
        f"one-rank-{task}",
        ratio=ratios(found["ddp-1"], found["alone"]),
        ddp_s=harness.spread(found["ddp-1"]),
        plain_s=harness.spread(found["alone"]),
    )
    for world in ranks.worlds:
        if world > 1:
            ranks.note(
                f"scaling-{task}-{world}",
                target=">= 1.6" if world == 2 else "",
                ratio=ratios(rates[f"ddp-{world}"], rates["alone"]),
                apart=ratios(rates[f"apart-{world}"], rates["alone"]),
                way=harness.spread(rates[f"ddp-{world}"]),
                base=harness.spread(rates["alone"]),
                batch_size=feeds[0].batch_size,
            )


def fed(ranks: Ranks, data: Data, task: str, threads: int) -> None:
    """A step fed by FastLoader over the same step on a batch that is held, on rank 0, with so many torch threads."""
    if ranks.rank:
        _finely_in_turn(ranks, {name: ranks.way(1, dict) for name in ("held", "fed")})  # nothing is made here
        return
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    feed = Feed(data[task], ranks.device, batch_size=ranks.options.rows, share=(0, 1))
    training, held = Training(feed.task, "none", ranks.device), feed.held()
    ways = {"held": Way(1, _steps(training, held)), "fed": Way(1, _fed_steps(training, feed))}
    found = _finely_in_turn(ranks, ways)
    torch.set_num_threads(before)
    feed.close()
    ranks.note(
        f"fed-{task}-{threads}",
        target="<= 1.03" if ranks.device.type == "cpu" else "",
        ratio=ratios(found["fed"], found["held"]),
        ratio_of_sums=sum(found["fed"]) / sum(found["held"]),
        fed_s=harness.spread(found["fed"]),
        held_s=harness.spread(found["held"]),
        batch_size=feed.batch_size,
        threads=threads,
    )


def precision(ranks: Ranks, data: Data) -> None:
    """Step time under autocast, and with memory laid out plainly, over float32 with channels last."""
    # Few rows on the CPU, where torch 2.13 takes ten times as long for fp16.
    rows = 8 if ranks.device.type == "cpu" else None
    task, batch = held_batch(ranks, data, "attributes", rows=rows)
    plain = batch._replace(fields={name: values.contiguous() for name, values in batch.fields.items()})

    def trained(precision: str, channels_last: bool = True) -> Callable[[], None]:
        training = Training(task, "none", ranks.device, precision=precision, channels_last=channels_last)
        return _steps(training, batch if channels_last else plain)

    ways = {name: ranks.way(1, lambda name=name: trained(name)) for name in ("fp32", "bf16", "fp16")}
    ways["contiguous"] = ranks.way(1, lambda: trained("fp32", channels_last=False))
    found = ranks.in_turn(ways)
    for name in ("bf16", "fp16", "contiguous"):
        if ranks.rank == 0:
            ranks.note(
                f"precision-{name}",
                ratio=ratios(found[name], found["fp32"]),
                step_s=harness.spread(found[name]),
                fp32_s=harness.spread(found["fp32"]),
                batch_size=batch.global_valid,
            )


def held_batch(ranks: Ranks, data: Data, name: str, rows: int | None = None) -> tuple[Task, Held]:
    """A task, and a batch of its file with all that the loader does to it."""
    feed = Feed(data[name], ranks.device, batch_size=ranks.options.rows or rows, share=(0, 1))
    batch = feed.held()
    feed.close()
    return feed.task, batch


def _finely_in_turn(ranks: Ranks, ways: dict[str, Way]) -> Found:
    """Seconds a step of each way, once a turn; for ratios of which a few hundredths matter.

    Two cores of a shared machine change their speed from second to second: parts of a turn that alternate mostly gave
    narrower quartiles than whole turns, of the same length or of 5 s (tried on a busy machine).
    """
    pairs = ranks.options.pairs + (0 if ranks.options.quick else MORE_PAIRS)
    return ranks.in_turn(ways, pairs=pairs, visits=1 if ranks.options.quick else VISITS, fed=not ranks.options.quick)


def _steps(training: Training, batch: Held) -> Callable[[], None]:
    return lambda: training(batch)


def _fed_steps(training: Training, feed: Feed) -> Callable[[], None]:
    return lambda: training(feed.next())


def _devices(ranks: Ranks, strategy: str) -> int:
    """Devices that one process trains on."""
    return max(1, torch.cuda.device_count()) if strategy in PARALLEL and ranks.device.type == "cuda" else 1


def _told(ranks: Ranks, strategy: str) -> str:
    return BARE if strategy in PARALLEL and _devices(ranks, strategy) == 1 else ""


def _size(output: torch.Tensor) -> int:
    return output.numel() * output.element_size()
