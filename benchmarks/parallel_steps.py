"""What the ranks of bench_parallel.py train: a task's network under a strategy, and the batches for it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from fastload import FastLoader, PackedDataset
from fastload.loader.iteration import Batch
from models import InPrecision, LossInForward, data_parallel
from tasks import Fields, Task, task_of
from train import PRECISIONS


class Held(NamedTuple):
    """A batch by the names of its fields, with the rows that count on this rank and on all."""

    fields: Fields
    valid: Tensor
    global_valid: int

    def parts(self, replicas: int) -> list[Held]:
        """The parts into which `nn.DataParallel` cuts a batch: fewer than replicas where the rows are few."""
        cut = {name: values.chunk(replicas) for name, values in self.fields.items()}
        valid = self.valid.chunk(replicas)
        return [
            Held({name: values[index] for name, values in cut.items()}, part, self.global_valid)
            for index, part in enumerate(valid)
        ]

    def times(self, number: int) -> Held:
        """The batch as often as there are devices to share it."""
        fields = {name: torch.cat([values] * number) for name, values in self.fields.items()}
        return Held(fields, self.valid.repeat(number), self.global_valid * number)


class Feed:
    """Batches of a packed file without end, by FastLoader.

    Args:
        path: packed file of one task.
        device: where the batches go.
        batch_size: rows on each rank; the task's own by default.
        share: (rank, world size) that the loader reads for.
    """

    def __init__(
        self, path: Path, device: torch.device, *, batch_size: int | None = None, share: tuple[int, int]
    ) -> None:
        # What tools/train.py has by default; the file's fields name the task.
        options = argparse.Namespace(task=None, size=128, layers=2, dropout=0.1, layer_drop=0.0)
        self.task: Task = task_of(PackedDataset(path), options)
        rows = PackedDataset(path, fields=self.task.fields)
        self.batch_size = min(batch_size or self.task.batch_size, len(rows) // share[1])
        self.loader = FastLoader(
            rows, self.batch_size, share=share, transform=self.task.transforms,
            device=device if device.type == "cuda" else None,
        )  # fmt: skip
        self.device, self._batches = device, self._forever(share[1])

    def _forever(self, ranks: int) -> Iterator[Any]:
        while True:
            # When an epoch begins, the loader takes the cores of one rank of so many; torchrun tells it in this way.
            os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
            yield from self.loader

    def next(self) -> Held:
        """The next batch."""
        batch: Batch = next(self._batches)
        return Held(dict(zip(self.task.fields, batch, strict=True)), batch.valid.to(self.device), batch.global_valid)

    def held(self) -> Held:
        """The next batch, in memory of its own."""
        fields, valid, total = self.next()
        return Held({name: values.clone() for name, values in fields.items()}, valid.clone(), total)

    def close(self) -> None:
        """Ends the loader's threads and processes."""
        self._batches = iter(())
        self.loader.close()


class Training:
    """A task's network under a strategy; called with a batch, it takes one optimizer step.

    Args:
        task: what is learnt.
        strategy: none, dp, dp-loss or ddp.
        device: of the network; the strategies dp take all GPUs, and on the CPU are the module itself.
        group: for ddp, the ranks that train together.
        width: channels of the first stage; the task's own by default.
        precision: a key of train.PRECISIONS.
        channels_last: the layout of weights in memory.
        bucket_cap_mb: for ddp.
    """

    def __init__(
        self,
        task: Task,
        strategy: str,
        device: torch.device,
        *,
        group: ProcessGroup | None = None,
        width: int | None = None,
        precision: str = "fp32",
        channels_last: bool = True,
        bucket_cap_mb: float | None = None,
    ) -> None:
        torch.manual_seed(0)
        layout = torch.channels_last if channels_last else torch.contiguous_format
        network = task.network(width or task.width).to(device, memory_format=layout)
        self.ranks = 1 if group is None else group.size()
        # As in tools/train.py.
        answering: nn.Module = InPrecision(network, device.type, PRECISIONS[precision])
        if strategy == "dp":
            answering = data_parallel(answering, device)
        model: nn.Module = LossInForward(answering, lambda net, batch: task.losses(task.answers(net, batch), batch))
        if strategy == "dp-loss":
            model = data_parallel(model, device)
        elif strategy == "ddp":
            model = DistributedDataParallel(
                model, process_group=group, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=True
            )
        self.model = model
        self.optimizer = torch.optim.AdamW(network.parameters(), 1e-3)
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")

    def loss(self, batch: Held) -> Tensor:
        """Mean over the rows of all ranks, times their number where DDP will divide by it."""
        return self.model(batch.fields, batch.valid).sum() * self.ranks / batch.global_valid  # type: ignore[no-any-return]

    def __call__(self, batch: Held) -> None:
        """One step."""
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(self.loss(batch)).backward()
        self.update()

    def update(self) -> None:
        """The optimizer's part of a step."""
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def gradients(self) -> list[Tensor]:
        """A copy of each parameter's gradient."""
        return [parameter.grad.clone() for parameter in self.model.parameters() if parameter.grad is not None]
