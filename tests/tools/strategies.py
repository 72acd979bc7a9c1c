"""Runs of tools/train.py on 1, 2 and 3 ranks, all in one go: `python strategies.py FOLDER`, reports in FOLDER.

Each run's losses stand in FOLDER/NAME-WORLD.jsonl, as train.py writes them; what else the ranks saw in report.RANK.pt.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # each process's first optimizer would, for a second or two
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import models
import ranks
import train
from fastload.format.ragged import Column
from sample_files import write_packed

# A rank that takes a step more than the others waits for them no longer than this; on a busy machine all wait long.
PATIENCE = timedelta(minutes=5)
ROWS, HELD_OUT = 37, 11
TRAINER = train.Trainer
# So large that the first steps overflow float16 and are left out.
SCALER = partial(torch.amp.GradScaler, init_scale=2.0**22)


@dataclass(frozen=True)
class Run:
    """One call of train.py on each of `worlds` ranks; 0 is one process without a process group."""

    name: str
    worlds: tuple[int, ...]
    words: str
    file: str = "photos.h5"
    killed_at: int | None = None
    """Step after which it dies, without a checkpoint of that step."""
    counted: bool = False
    """Its gradients are reduced by torch's hook, which is counted, and not by DDP itself."""

    def options(self, folder: Path, world: int) -> argparse.Namespace:
        """Its command line, read as train.py reads it; one that goes on has the files of the one before."""
        place = f"{folder}/{self.name.removesuffix('-again')}-{world}"
        files = f"--loss-log {place}.jsonl --picture {place}.png --width 4 --workers 1 --lr 0.01 --warmup-steps 2"
        if "--checkpoint-every" in self.words:
            files += f" --checkpoint {place}.pt"
        parallel = "" if "--parallel" in self.words or not world else "--parallel ddp"
        return train.parse_options([str(folder / self.file), *f"{self.words} {parallel} {files}".split()])


TEXT = "--task text --layers 1 --dropout 0"
CURVES = [
    Run("alone", (0, 1), "--task classify --batch-size 5 --ends exact --accumulate 3 --optimizer-fused"),
    Run("alone-dp", (0,), f"{TEXT} --parallel dp --batch-size 5 --ends exact --accumulate 3"),
    Run("alone-dp-loss", (0,), f"{TEXT} --parallel dp-loss --batch-size 5 --ends exact"),
    Run("classes", (2, 3), "--task classify --sync-bn --batch-size 4 --ends exact"),
    Run(
        "classes-static", (2,), "--task classify --sync-bn --batch-size 4 --ends exact --static-graph --accumulate 3",
        counted=True,
    ),
    Run(
        "attributes", (3,),
        "--task attributes --sync-bn --batch-size 2 --accumulate 5 --bucket-cap-mb 0.02 --no-channels-last",
        "attributes.h5", counted=True,
    ),
    Run("text", (2, 3), f"{TEXT} --batch-size 4 --ends exact --echo 2 --accumulate 3 --precision fp32", counted=True),
    Run("text-drop", (2, 3), f"{TEXT} --batch-size 2 --accumulate 4 --find-unused-parameters"),
    Run("pixels", (2,), "--task segment --sync-bn --dropout 0 --batch-size 4 --ends exact", "masks.h5"),
]  # fmt: skip
"""Each has, from the weights of each of its steps, the losses and gradients of one process that is fed all ranks' rows.

They run in float64. In float32 two ways to add the same numbers differ by 1e-7, and that grows beyond any bound worth
testing: a value near 0 passes a ReLU or does not, and AdamW divides a gradient that is only rounding by its own size.
Where that happens depends on the data and on the CPU's instructions. In float64 the two ways differ by 1e-16.
"""

UNEVEN = Run(
    "uneven", (2, 3), "--task text --layers 3 --layer-drop 0.5 --batch-size 4 --accumulate 2 --find-unused-parameters"
)
"""Ranks leave out other layers."""

RESUMED = [
    run
    for name, world, words, every, killed_at, file in (
        ("pixels-kept", 0, "--task segment --batch-size 6 --ends exact --echo 2 --accumulate 2", 5, 8, "masks.h5"),
        ("half-kept", 0, "--task text --dropout 0.3 --batch-size 5 --precision fp16", 7, 12, "photos.h5"),
        ("text-kept", 2, "--task text --dropout 0.3 --batch-size 3 --ends exact --accumulate 2", 3, 5, "photos.h5"),
    )
    for run in (
        Run(f"{name}-unbroken", (world,), words, file),
        Run(name, (world,), f"{words} --checkpoint-every {every}", file, killed_at),
        Run(f"{name}-again", (world,), f"{words} --checkpoint-every {every} --resume", file),
    )
]
"""Three runs each: one unbroken, one that dies, and one that goes on from the dead one's checkpoint.

Their epochs have 7, 7 and 4 steps: two die after the end of the first one was logged and before a checkpoint."""

RUNS = [*CURVES, UNEVEN, *RESUMED]

BATCHES = {2: (3, 1), 3: (2, 4, 1)}
"""Samples of each rank's batch in the runs of `sync_batch_norm`."""


def write_files(folder: Path) -> None:
    """Photos with classes and texts, photos with attributes, photos with masks that are 0 where they do not count."""
    rng = np.random.default_rng(0)
    photos = rng.integers(0, 256, (ROWS + HELD_OUT, 12, 12, 3), dtype=np.uint8)
    splits = {"train": ROWS, "val": HELD_OUT}
    mask = np.arange(7) < rng.integers(2, 8, (len(photos), 1))
    columns = {
        "labels": Column(rng.integers(0, 3, len(photos)), {"names": tuple("abc")}),
        "tokens": Column(rng.integers(1, 20, mask.shape) * mask),
        "attention_mask": Column(mask.astype(np.uint8)),
    }
    write_packed(folder / "photos.h5", photos, columns, chunk_rows=4, splits=splits)
    attributes = {"labels": Column(rng.integers(0, 2, (len(photos), 5), dtype=np.uint8))}
    write_packed(folder / "attributes.h5", photos, attributes, chunk_rows=4, splits=splits)
    masks = rng.integers(0, 4, (len(photos), 12, 12), dtype=np.uint8)
    write_packed(folder / "masks.h5", photos, masks=masks, ignore_index=0, chunk_rows=4, splits=splits)


def norm_and_batches(world: int) -> tuple[nn.Sequential, list[list[torch.Tensor]], list[list[torch.Tensor]]]:
    """A batch norm, its inputs (by step and rank), and what the loss multiplies the outputs by; far from zero."""
    torch.manual_seed(world)
    norm = nn.BatchNorm2d(3, eps=1e-3, momentum=0.3)
    nn.init.uniform_(norm.weight, 0.5, 2)
    nn.init.uniform_(norm.bias)
    sizes = BATCHES[world]
    offsets = torch.tensor([0.0, 50.0, -3.0])[:, None, None]
    inputs = [[torch.randn(size, 3, 4, 5) * (1 + rank) + offsets for rank, size in enumerate(sizes)] for _ in range(3)]
    return nn.Sequential(norm), inputs, [[torch.randn(size, 3, 4, 5) for size in sizes] for _ in range(3)]


def normalize(
    network: nn.Sequential, inputs: Iterable[torch.Tensor], directions: Iterable[torch.Tensor], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Outputs and gradients of some steps of training, what the norm keeps, and its output in evaluation."""
    inputs = [values.to(dtype).requires_grad_() for values in inputs]
    outputs = [network(values) for values in inputs]
    for output, direction in zip(outputs, directions, strict=True):
        (output * direction).sum().backward()
    network.eval()
    return {
        "output": torch.stack(outputs).detach(),
        "evaluated": network(inputs[0]).detach()[None],
        "gradient": torch.stack([values.grad for values in inputs]),
        "weight gradient": network[0].weight.grad,
        "bias gradient": network[0].bias.grad,
        **dict(network[0].named_buffers()),
    }


class Replicas(nn.Module):
    """`nn.DataParallel` for a CPU, which torch's leaves to the bare module: a part of the batch for each thread.

    Like torch's it makes fewer parts of a batch that is too small, and its threads know no autocast of the caller's.

    Attributes:
        gathered: numbers that were last put together on one device.
    """

    def __init__(self, module: nn.Module, output_device: int | None = None, parts: int = 3) -> None:
        super().__init__()
        self.module, self.parts, self.gathered = module, parts, 0

    def _scatter(self, values: Any) -> list[Any]:
        if isinstance(values, dict):
            parts = zip(*(self._scatter(value) for value in values.values()), strict=True)
            return [dict(zip(values, part, strict=True)) for part in parts]
        return list(values.chunk(self.parts))

    def forward(self, *inputs: Any) -> torch.Tensor:
        """What the module says of the parts, one after the other along dim 0."""
        parts = list(zip(*map(self._scatter, inputs), strict=True))
        with ThreadPoolExecutor(len(parts)) as threads:
            outputs = list(threads.map(lambda part: self.module(*part), parts))
        self.gathered = sum(output.numel() for output in outputs)
        return torch.cat(outputs)


class Killed(Exception):
    """Stands for whatever ends a process."""


def memory_format(values: torch.Tensor) -> str:
    """How a tensor (B, C, H, W) lies in memory; "either" where sizes of 1 leave that open."""
    formats = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
    found = [name for name, wanted in formats.items() if values.is_contiguous(memory_format=wanted)]
    return "either" if len(found) == 2 else "".join(found)


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """A copy of the numbers of all tensors, one after the other."""
    return torch.cat([values.detach().flatten() for values in tensors])


def in_default_dtype(values: torch.Tensor) -> torch.Tensor:
    """The values in the dtype of the network's parameters; whole numbers and masks as they are."""
    return values.to(torch.get_default_dtype()) if values.is_floating_point() else values


def counts_and_answers(
    counts: Callable[..., torch.Tensor], task: Any, answers: torch.Tensor, fields: Any, valid: torch.Tensor
) -> torch.Tensor:
    """A task's counts, and the answers' squares: so young a network may answer all with one class, whatever it does."""
    return torch.cat([counts(task, answers, fields, valid), answers[valid].double().square().sum()[None]])


def watch(report: dict[str, Any], run: Run) -> type[train.Trainer]:
    """train.py's Trainer, which also tells what it saw.

    Its report: rows that count, buckets reduced and layers used by batch; of each step the gradients, and of `CURVES`
    the weights before it; parameters; what became of options; of each evaluation the network before it, and the counts.
    """

    class Watched(TRAINER):
        def __init__(self, *words: Any) -> None:
            super().__init__(*words)
            report.update(rows=[], reduced=[], layers=[], weights=[], gradients=[], steps=0, images=set(), evaluated=[])
            report["parameters"] = list(self.network.parameters())
            self.optimizer.register_step_pre_hook(self._look)
            report["fused"] = [group["fused"] for group in self.optimizer.param_groups]
            report["formats"] = {memory_format(p) for p in self.network.parameters() if p.dim() == 4} - {"either"}
            self.network.register_forward_pre_hook(self._look_at_images)
            self.network.register_forward_pre_hook(lambda _, inputs: tuple(map(in_default_dtype, inputs)))
            for index, layer in enumerate(getattr(self.network, "layers", ())):
                layer.register_forward_hook(partial(self._look_at_layer, index))
            if isinstance(self.with_loss, DistributedDataParallel):
                report["static"] = self.with_loss.static_graph
                if run.counted:
                    self.with_loss.register_comm_hook(None, self._reduce)

        def _reduce(self, _, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are strings
            report["reduced"][-1] += 1
            return allreduce_hook(dist.group.WORLD, bucket)

        def _look_at_images(self, _: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            report["images"] |= {memory_format(values) for values in inputs if values.dim() == 4}

        def _look_at_layer(self, index: int, *_: Any) -> None:
            if self.network.training:
                report["layers"][-1].append(index)

        def _look(self, *_: Any) -> None:
            parameters = list(self.network.parameters())
            report["gradients"].append(flat(torch.zeros_like(p) if p.grad is None else p.grad for p in parameters))
            if run in CURVES:
                report["weights"].append(flat(parameters))

        def backward(self, batch: Any, *words: Any, **options: Any) -> torch.Tensor:
            report["rows"].append(batch.rows[batch.valid].tolist())
            report["reduced"].append(0)
            report["layers"].append([])
            summed = super().backward(batch, *words, **options)
            report["gathered"] = [part.gathered for part in self.with_loss.modules() if isinstance(part, Replicas)]
            return summed

        def update(self, *words: Any) -> None:
            super().update(*words)
            report["steps"] += 1
            if report["steps"] == run.killed_at:
                raise Killed

        def evaluate(self, *words: Any) -> torch.Tensor:
            network = {name: values.clone() for name, values in self.network.state_dict().items()}
            for buffer in self.network.buffers():
                if self.rank and buffer.is_floating_point():
                    buffer.copy_(torch.linspace(0.1, 9, len(buffer)).roll(self.rank))
            self.task.counts = partial(counts_and_answers, type(self.task).counts, self.task)
            counts = super().evaluate(*words)
            del self.task.counts
            report["evaluated"].append((network, counts))
            return counts[:-1]

    return Watched


@contextmanager
def group(folder: Path, rank: int, world: int) -> Iterator[None]:
    """A process group that ends when all ranks have come to the end of the block."""
    store = f"file://{folder}/store-{world}"
    with ranks.group(torch.device("cpu"), rank, world, init_method=store, timeout=PATIENCE):
        yield
        dist.barrier()


def train_all(planned: list[tuple[Run, int, argparse.Namespace]], rank: int, world: int) -> dict[str, Any]:
    """What this rank saw in the runs of one world."""
    reports = {}
    for run, size, options in planned:
        if size == world:
            report = reports[f"{run.name}-{world}"] = {}
            torch.set_default_dtype(torch.float64 if run in CURVES else torch.float32)
            train.Trainer = watch(report, run)
            # Read when a Trainer is made.
            train.data_parallel, torch.amp.GradScaler = lambda module, *_: Replicas(module), SCALER
            try:
                train.train(options, rank, max(1, world), torch.device("cpu"))
            except Killed:
                report["lines"] = options.loss_log.read_text().count("\n")
                if rank == 0:  # half a line, as a process leaves it that is killed meanwhile
                    with open(options.loss_log, "a") as out:
                        out.write('{"step": 9, "ep')
            report["parameters"] = flat(report["parameters"])
    torch.set_default_dtype(torch.float32)
    return reports


def normalize_all(rank: int, world: int) -> dict[str, Any]:
    """What `sync_batch_norm` makes of this rank's batches, by dtype."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        network, inputs, directions = norm_and_batches(world)
        network = models.sync_batch_norm(network, torch.device("cpu"))
        mine = ([of_step[rank] for of_step in values] for values in (inputs, directions))
        found[f"norm-{world}-{dtype}"] = normalize(network, *mine, dtype)
    return found


def run_rank(rank: int, folder: Path, planned: list[tuple[Run, int, argparse.Namespace]]) -> None:
    """All runs of a rank; two of three form a world while the third is one by itself."""
    torch.set_num_threads(1)
    if rank < 2:
        with group(folder, rank, 2):
            report = train_all(planned, rank, 2) | normalize_all(rank, 2)
    else:
        report = train_all(planned, 0, 0)
        with group(folder, 0, 1):
            report |= train_all(planned, 0, 1)
    with group(folder, rank, 3):
        report |= train_all(planned, rank, 3) | normalize_all(rank, 3)
    torch.save(report, folder / f"report.{rank}.pt")


def refuse(folder: Path) -> None:
    """`--spawn 2` for a file that is damaged; what is said goes to FOLDER/refused.txt."""
    said = os.open(folder / "refused.txt", os.O_CREAT | os.O_WRONLY)
    os.dup2(said, 1), os.dup2(said, 2)
    (folder / "damaged.h5").write_bytes((folder / "photos.h5").read_bytes()[:3000])
    # Forked, as the ranks above are.
    ranks.spawn = partial(torch.multiprocessing.start_processes, start_method="fork")
    options = train.parse_options([str(folder / "damaged.h5"), "--spawn", "2", "--device", "cpu"])
    ranks.launch(train.run, options, ranks=2)


def main(folder: Path) -> None:
    write_files(folder)
    # Before any rank writes a log: train.py refuses one that exists.
    planned = [(run, world, run.options(folder, world)) for run in RUNS for world in run.worlds]
    # Forked, since importing torch takes each process seconds; nothing has been computed before, so no thread runs.
    gc.freeze()  # as in tests/warm_python.py
    context = torch.multiprocessing.get_context("fork")
    processes = [context.Process(target=run_rank, args=(rank, folder, planned)) for rank in range(3)]
    processes.append(context.Process(target=refuse, args=(folder,)))
    for process in processes:
        process.start()
    waiting = processes
    while waiting:
        connection.wait([process.sentinel for process in waiting])
        waiting = [process for process in waiting if process.is_alive()]
        if any(process.exitcode for process in processes[:3]):  # the other ranks would wait for it
            for process in waiting:
                process.terminate()
    codes = [process.exitcode for process in processes]
    (folder / "codes.txt").write_text(" ".join(map(str, codes)))
    sys.exit(int(any(codes[:3])))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
