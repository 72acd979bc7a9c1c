"""One of the ranks that add up tensors and average gradients in every way of benchmarks/parallel_comm.py.

`python summing_ranks.py FOLDER`: starts two of them; what each found goes to FOLDER/summed.RANK.pt.
"""

import gc
import sys
from pathlib import Path

import torch
import torch._dynamo  # before the fork: the first optimizer or DDP imports it, for seconds
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from parallel_comm import TimedReduction, all_to_all_sum, breakdown, reduce_then_broadcast, ring_all_reduce
from ranks import group

__all__ = ["LENGTHS", "SIZE", "breakdown"]  # for the test

SIZE = 2
LENGTHS = (1, 2, 7, 4096)  # not every one is the same on both ranks, nor has something for both


def sums(rank: int, group: dist.ProcessGroup) -> dict[str, list[torch.Tensor]]:
    found = {}
    for add in (ring_all_reduce, reduce_then_broadcast, all_to_all_sum):
        found[add.__name__] = []
        for length in LENGTHS:
            tensor = torch.arange(length, dtype=torch.float32) * (rank + 1) + rank
            add(tensor, group)
            found[add.__name__].append(tensor)
    return found


def gradients(rank: int, group: dist.ProcessGroup, hook: TimedReduction | None) -> list[torch.Tensor]:
    """Of a network in several buckets, after a few passes: DDP makes its buckets anew after the first."""
    torch.manual_seed(0)
    network = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    model = DistributedDataParallel(network, process_group=group, bucket_cap_mb=0.03)
    if hook is not None:
        model.register_comm_hook(None, hook.hook)
    for turn in range(3):
        torch.manual_seed(10 * turn + rank)
        network.zero_grad()
        loss = model(torch.rand(8, 64)).square().sum()
        if hook is not None:
            hook.begin()
        loss.backward()
        if hook is not None:
            hook.end()
    return [parameter.grad for parameter in network.parameters()]


def work(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    with group(cpu, rank, SIZE, init_method=f"file://{folder}/store"):
        world = dist.group.WORLD
        hooks = {
            "ddp": None,
            "overlap": TimedReduction(world, cpu),
            "delayed": TimedReduction(world, cpu, delayed=True),
        }
        result = {"sums": sums(rank, world)}
        result["gradients"] = {name: gradients(rank, world, hook) for name, hook in hooks.items()}
        figures = {name: hook.take() for name, hook in hooks.items() if hook}
        result["buckets"] = {name: hooks[name].buckets for name in figures}
        torch.save(result, folder / f"summed.{rank}.pt")


if __name__ == "__main__":
    # Torch is imported once where a fork will do; it takes seconds.
    gc.freeze()  # as in tests/warm_python.py
    method = "fork" if sys.platform == "linux" else "spawn"
    mp.start_processes(work, (Path(sys.argv[1]),), nprocs=SIZE, start_method=method)
