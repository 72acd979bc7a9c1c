"""The processes that `train.py` trains in: how they are started, how they find each other, what they add up."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import ProcessExitedException, spawn

Run = Callable[[argparse.Namespace], None]
T = TypeVar("T")


def launch(run: Run, options: argparse.Namespace, *, ranks: int) -> None:
    """Call `run` in so many new processes, in this one for 1; under torchrun, or for 0 (no DDP), just here."""
    if ranks == 0 or "RANK" in os.environ:
        run(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        meet = f"file://{folder}/ranks"
        if ranks == 1:
            _run_rank(0, run, options, 1, meet)
            return
        try:
            spawn(_run_rank, (run, options, ranks, meet), nprocs=ranks)
        except ProcessExitedException as failed:
            if failed.signal_name:  # one that ends by itself has said why
                print(f"error: rank {failed.error_index} was killed ({failed.signal_name})", file=sys.stderr)
            raise SystemExit(failed.exit_code if failed.exit_code > 0 else 1) from None
        except KeyboardInterrupt:
            raise SystemExit(130) from None


def _run_rank(rank: int, run: Run, options: argparse.Namespace, ranks: int, meet: str) -> None:
    """One of them, with what torchrun would tell it."""
    os.environ.update(dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)))
    os.environ.update(dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks)))
    options.meet = meet
    if "OMP_NUM_THREADS" not in os.environ:  # torchrun gives each rank one
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    run(options)


@contextmanager
def process_group(wanted: str | None, meet: str | None) -> Iterator[tuple[int, int, torch.device]]:
    """(rank, world size, device) in a group of ranks, or of one process alone; leaves the group at the end.

    Args:
        wanted: `cpu` or `cuda`; None: a GPU where there is one.
        meet: where the ranks find each other, as `init_process_group` takes it; None: no group.
    """
    cuda = torch.cuda.is_available() if wanted is None else wanted == "cuda"
    if cuda and not torch.cuda.is_available():
        raise SystemExit("error: --device cuda: torch sees no GPU here (torch.cuda.is_available() is False)")
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"])) if meet else 0
    if cuda and local_rank >= torch.cuda.device_count():
        raise SystemExit(
            f"error: rank {local_rank} has no GPU: this machine has {torch.cuda.device_count()}. Start fewer ranks, or "
            f"give --device cpu."
        )
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if not meet:
        yield 0, 1, device
        return
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with group(device, rank, world_size, init_method=meet):
        yield rank, world_size, device


@contextmanager
def group(device: torch.device, rank: int, world_size: int, **where: Any) -> Iterator[None]:
    """A process group for as long as the block lasts.

    Args:
        device: of this rank: gloo joins CPUs, nccl GPUs.
        where: how the ranks meet and how long they wait, as `init_process_group` takes it.
    """
    cuda = device.type == "cuda"
    dist.init_process_group("nccl" if cuda else "gloo", rank=rank, world_size=world_size, **where)
    failed = True
    try:
        yield
        failed = False
    finally:
        # The DDP model is garbage by now, but in a cycle, and keeps the group alive; gloo's threads, still running when
        # the interpreter ends, then abort the process (pytorch#190489; 3 runs in 8 with torch 2.13).
        gc.collect()
        if not (failed and cuda):  # nccl would wait for what the other ranks never send, and the error stay unsaid
            dist.destroy_process_group()


def reduced(values: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """The values of all ranks together."""
    if dist.is_initialized():
        dist.all_reduce(values, op)
    return values


def first_says(value: T) -> T:
    """What rank 0 says, on all ranks; it has to be picklable."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values, 0)
    return values[0]


def peak_memory(device: torch.device) -> str:
    """The most that was allocated on each GPU, rank by rank, for people; nothing on a CPU."""
    if device.type != "cuda":
        return ""
    names = range(torch.cuda.device_count())
    peaks = {f"cuda:{index}": torch.cuda.max_memory_allocated(index) / 2**20 for index in names}
    of_ranks = [peaks]
    if dist.is_initialized():
        of_ranks *= dist.get_world_size()
        dist.all_gather_object(of_ranks, {f"cuda:{device.index}": peaks[f"cuda:{device.index}"]})
    told = [f"{name} {peak:,.0f} MiB" for of_rank in of_ranks for name, peak in of_rank.items()]
    return f", peak memory {', '.join(told)}"
