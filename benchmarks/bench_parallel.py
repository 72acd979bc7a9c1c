"""Which parallel strategy, and where does its time go? Steps, memory, messages and loading, of one rank and several.

    python benchmarks/bench_parallel.py            everything: about nine minutes on two cores, 0.5 GB in .bench
    python benchmarks/bench_parallel.py --quick    tiny, to see that it runs; the figures mean nothing
    python benchmarks/plot_parallel.py             draws results/parallel.png

On the CPU the ranks are processes with one torch thread each that talk through gloo; where there are GPUs, all of it
is done again there, a rank a GPU, with nccl. The ways of a figure are taken in turn (A B C, C B A, ...), about a second
each; ratios are of one turn. The networks and tasks are those of tools/train.py, on files made up on the spot.
`scaling` and `fed` take two turns more than --pairs, each cut in four (A B B A A B B A): a few hundredths matter there.
Names of figures end in the number of ranks (or torch threads) and the device:

`step-STRATEGY-RANKS`: a training step (classify only) on a held batch; `over_none` is its time over that of the plain
    model. On the CPU nn.DataParallel has no devices, and dp is the bare module.
`memory-STRATEGY-RANKS`: the most memory (segment only) of each device, or what the process of each rank grew by at most
    from before the network was made, in a process of its own: one run, without a range.
`gathered-TASK`: bytes that nn.DataParallel brings to one device from the others, answers against losses, by the number
    of replicas: one of them is on that device already and is not counted.
Of messages, on the network of classify with 64 channels in its first stage, which has 20 MB of gradients (train.py's 16
channels: 1.6), and on the CPU with 8 rows on each rank (train.py: 64; so it is on GPUs), or there would be hardly
anything to see beside the computation: shares of a step are of that step, not of train.py's. Each record has its
`batch_size` (rows on each rank), `width` and `parameters_mb`.
`buckets-MB-RANKS`: seconds of DDP's reductions in a backward pass: `reducing`, of it `hidden` behind the computation
    of gradients and `exposed` after it; `last`, from the last gradient until its bucket is reduced.
    Waiting for a rank that is late counts as reduction, as it does in training. All times are rank 0's.
`overlap-RANKS`: step time with reductions during backward over all after it; `backward_slowed` is the time until the
    last gradient over that under no_sync, `backward_slowed_delayed` the same where no reduction runs meanwhile.
`accumulation-RANKS`: a step of four batches reduced once over one reduced after each batch.
`sum-BYTES-RANKS`: torch's all-reduce, reduce + broadcast, all-to-all there and back, and a ring all-reduce in Python,
    not pipelined; times over torch's (`over_all_reduce`) and over the ring's (`over_ring`).
`scaling-TASK-RANKS`: samples a second of DDP over one rank alone, fed by FastLoader; `apart`: of as many ranks that
    train models of their own and exchange nothing. `one-rank-TASK`: step time of DDP on one rank over the plain model.
`fed-TASK-THREADS`: step time fed by FastLoader over the step on a batch that is held, with so many torch threads.
    `ratio_of_sums` is of all turns together, and so has the beginnings of epochs, which few turns have.
`precision-KIND`: step time under bf16 or fp16, or without channels last, over float32 with it.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

import harness
import parallel_exchange as exchange
import parallel_sections as sections
from parallel_data import TASKS, packed_tasks
from parallel_ranks import Ranks, start

SUM_BYTES = [2**16, 2**18, 2**20, 2**22, 2**24, 2**26]
EXCHANGES = {"buckets": exchange.buckets, "overlap": exchange.overlap, "accumulation": exchange.accumulation}
QUESTIONS = ("step", "memory", "gathered", *EXCHANGES, "sum", "scaling", "fed", "precision")


def questions(ranks: Ranks, data: dict[str, Path]) -> None:
    """All that are asked for, each answered before the next."""
    asked, quick = ranks.options.only, ranks.options.quick
    if "step" in asked:
        sections.strategies(ranks, data)
    if "gathered" in asked:
        for task in ("classify", "attributes", "segment"):
            sections.gathered(ranks, data, task)
    for world in ranks.worlds:
        if world > 1:
            for name, section in EXCHANGES.items():
                if name in asked:
                    section(ranks, data, world)
            for size in (SUM_BYTES[:1] if quick else SUM_BYTES) if "sum" in asked else ():
                exchange.sums(ranks, size, world)
    if "scaling" in asked:
        for task in TASKS:
            sections.scaling(ranks, data, task)
    if "fed" in asked:
        for threads in sorted({ranks.threads, 1 if quick else harness.machine()["cores"]}):
            for task in TASKS:
                sections.fed(ranks, data, task, threads)
    if "precision" in asked:
        sections.precision(ranks, data)
    if quick:  # processes of its own take seconds
        sections.memory(ranks, data, "ddp")


def memories(options: argparse.Namespace, kind: str) -> list[tuple[str, int]]:
    """Strategies and world sizes whose memory is measured in new processes."""
    if options.quick or "memory" not in options.only:
        return []
    return [(name, 1) for name in ("none", "dp", "dp-loss")] + [("ddp", world) for world in options.worlds[kind]]


def main(words: list[str] | None = None) -> None:
    """Parse and run; the command line's words where none are given."""
    parser = harness.command_line(__doc__, "parallel", pairs=5)
    parser.add_argument("--seconds", type=float, default=1.2, help="about, of each turn (default: 1.2)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks on the CPU (1 2)")
    parser.add_argument(
        "--devices", nargs="+", choices=["cpu", "cuda"], help="default: cpu, and cuda where there is any"
    )
    parser.add_argument("--rows", type=int, help="of a batch on each rank (default: as tools/train.py)")
    parser.add_argument("--only", nargs="+", choices=QUESTIONS, default=QUESTIONS, help="questions (default: all)")
    options = parser.parse_args(words)
    if options.quick:
        options.pairs, options.seconds, options.rows = 1, 0.0, 4
    # Threads that spin while they wait would take the cores of the loader's and of the other ranks.
    options.waiting = os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    gpus = torch.cuda.device_count()
    worlds = {"cpu": sorted({*options.ranks}), "cuda": sorted({1, min(2, gpus), gpus})}
    kinds = options.devices or (["cpu", "cuda"] if gpus else ["cpu"])
    if "cuda" in kinds and not gpus:
        raise SystemExit("error: --devices cuda: torch sees no GPU here")
    options.worlds = {kind: worlds[kind] for kind in kinds}
    data = packed_tasks(options.data, quick=options.quick)
    for kind, worlds in options.worlds.items():
        start(questions, max(worlds), kind, options, data)
        for strategy, world in memories(options, kind):
            start(sections.memory, world, kind, options, data, strategy)


if __name__ == "__main__":
    main()
