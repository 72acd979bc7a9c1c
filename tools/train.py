"""Train a small network from a packed file, on one device or several: a complete script to start one's own from.

    python tools/train.py celeba.h5                                   one process, CPU or GPU
    torchrun --nproc-per-node 2 tools/train.py celeba.h5              DDP: nccl on GPUs, gloo on CPUs
    python tools/train.py celeba.h5 --spawn 2                         the same without torchrun
    python tools/train.py celeba.h5 --parallel dp-loss                one process, all its GPUs
    python tools/train.py celeba.h5 --checkpoint run.pt --resume      goes on from the last checkpoint
    python tools/train.py camvid.h5 --epochs 40                       masks: segmentation, mean IoU, a picture
    python tools/train.py coco.h5 --size 256                          boxes: detection, mean average precision
    python tools/train.py reviews.h5                                  tokens and no images: texts
    python tools/train.py photos.h5 --size 160                        images of several sizes, cut to 160x160

The file's fields decide the task: masks are segmented, boxes without labels of images found, images classified, token
arrays of a file without images read as text; `--task` says otherwise. Labels that are int64 numbers are classes, uint8
(N, A) are A yes-or-no attributes. Beside it stand the tasks (`tasks.py`, `detection.py`), their networks and
`LossInForward` (`models.py`), how ranks start (`ranks.py`), checkpoints (`run_files.py`) and the command line
(`options.py`).
On CPUs that others use too, set OMP_WAIT_POLICY=PASSIVE, or torch's threads spin and starve each other.
"""

from __future__ import annotations

import argparse
import math
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fastload import FastLoader, FastloadError, PackedDataset, StateError
from models import InPrecision, LossInForward, data_parallel, sync_batch_norm
from options import parse_options
from ranks import first_says, launch, peak_memory, process_group, reduced
from run_files import append_log, begin_log, free_name, load_checkpoint, save_checkpoint
from tasks import Fields, Task, open_splits, task_of

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def cosine_lr(step: int, steps: int, peak: float, warm_up: int) -> float:
    """Learning rate of one step: up in a line, then down along half a cosine."""
    if step < warm_up:
        return peak * (step + 1) / warm_up
    return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm_up) / max(1, steps - warm_up))))


class Trainer:
    """The network, spread over devices as `--parallel` says, and what improves it."""

    def __init__(
        self,
        task: Task,
        options: argparse.Namespace,
        rank: int,
        world_size: int,
        device: torch.device,
        state: dict[str, Any] | None = None,
    ) -> None:
        self.task, self.device, self.rank, self.world_size = task, device, rank, world_size
        self.in_order = torch.channels_last if options.channels_last else torch.contiguous_format
        torch.manual_seed(options.seed)
        self.network = task.network(options.width or task.width).to(device, memory_format=self.in_order)
        if options.sync_bn:
            self.network = sync_batch_norm(self.network, device)
        if options.compile:
            self.network.compile(backend=options.compile)
        torch.manual_seed(options.seed + rank)  # ranks drop other neurons, and so do the replicas of nn.DataParallel
        for index in range(torch.cuda.device_count() if device.type == "cuda" else 0):
            torch.cuda.default_generators[index].manual_seed(options.seed + rank + index)
        dtype = PRECISIONS[options.precision]
        self.optimizer = torch.optim.AdamW(
            self.network.parameters(), weight_decay=0.02, fused=options.optimizer_fused or None
        )
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)
        if state:  # DDP takes over what the network is now
            self._restore(state)
        # All strategies are the same three modules, in another order.
        self.answering: nn.Module = InPrecision(self.network, device.type, dtype)
        with_loss: nn.Module = LossInForward(self.answering, self._losses)
        if options.parallel == "ddp":
            with_loss = DistributedDataParallel(
                with_loss,
                bucket_cap_mb=options.bucket_cap_mb,
                static_graph=options.static_graph,
                find_unused_parameters=options.find_unused_parameters,
                gradient_as_bucket_view=True,
            )
        elif options.parallel != "none":
            answering = data_parallel(self.answering, device, options.output_device)
            if options.parallel == "dp":
                with_loss = LossInForward(answering, self._losses)
            else:
                with_loss = data_parallel(with_loss, device, options.output_device)
            self.answering = answering
        self.with_loss = with_loss

    def _losses(self, network: nn.Module, fields: Fields) -> Tensor:
        answers = self.task.answers(network, fields)
        return self.task.losses(answers, {name: values.to(answers.device) for name, values in fields.items()})

    def fields(self, batch: Any) -> Fields:
        """The tensors of a batch by name."""
        fields = dict(zip(self.task.fields, batch, strict=True))
        if self.in_order is torch.contiguous_format:  # the loader's images are channels_last
            fields = {name: values.contiguous() for name, values in fields.items()}
        return fields

    def backward(self, batch: Any, divisor: int, *, reduce: bool) -> Tensor:
        """Add a batch's gradients, of its loss divided by a number of rows; says the sum of its losses, float32 ().

        Without `reduce` DDP leaves them on their ranks, for a later batch to take along.
        """
        ddp = isinstance(self.with_loss, DistributedDataParallel)
        alone: AbstractContextManager[None] = self.with_loss.no_sync() if ddp and not reduce else nullcontext()
        with alone:
            summed = self.with_loss(self.fields(batch), batch.valid).sum()
            self.scaler.scale(summed * (self.world_size / divisor)).backward()  # DDP averages over ranks
        return summed.detach().to(self.device, torch.float32)

    def update(self, lr: float, share: float) -> None:
        """One step of the optimizer, by a share of the gradients; they are gone then."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if share != 1:
            for parameter in self.network.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(share)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def evaluate(self, loader: FastLoader) -> Tensor:
        """The task's counts over the split, on the CPU, each row counted once over all ranks."""
        for buffer in self.network.buffers():  # batch-norm statistics differ between ranks; evaluate rank 0's
            if dist.is_initialized():
                dist.broadcast(buffer, 0)
        self.network.eval()
        counts = torch.zeros((), device=self.device)
        for batch in loader:
            fields = self.fields(batch)
            answers = self.task.answers(self.answering, fields).to(self.device)
            counts = counts + self.task.counts(answers, fields, batch.valid)
        self.network.train()
        return reduced(counts).cpu()

    def _parts(self) -> dict[str, Any]:
        return {"model": self.network, "optimizer": self.optimizer, "scaler": self.scaler}

    def save(self, path: Path, **position: Any) -> None:
        """A checkpoint, whole or not at all. Every rank calls this, since each has random numbers of its own."""
        states = [torch.get_rng_state()]
        if self.device.type == "cuda":
            states += torch.cuda.get_rng_state_all()
        random: list[Any] = [states] * self.world_size
        if dist.is_initialized():
            dist.all_gather_object(random, states)
        if self.rank == 0:
            parts = {name: part.state_dict() for name, part in self._parts().items()}
            save_checkpoint(path, {**parts, **position, "random": random})

    def _restore(self, state: dict[str, Any]) -> None:
        """Go on from what `save` wrote; with more ranks than then, some draw the same random numbers."""
        try:
            for name, part in self._parts().items():
                part.load_state_dict(state[name])
        except (RuntimeError, ValueError, KeyError):
            raise SystemExit(
                "error: the checkpoint is of another network. Give the --task, --width, --layers and --precision of "
                "that run, or leave out --resume."
            ) from None
        cpu, *gpus = state["random"][self.rank % len(state["random"])]
        torch.set_rng_state(cpu)
        if self.device.type == "cuda":
            torch.cuda.set_rng_state_all(gpus[: torch.cuda.device_count()])


def flush(pending: list[tuple[dict[str, float], Tensor, int]], log: Path | None) -> list[float]:
    """Mean losses of the steps that are pending, over all ranks' valid rows; a JSON line each for the log.

    A step is (what else is logged, its sum of losses on this rank, its rows on all ranks). Every rank calls this after
    the same step, and seldom: until then nobody waits for the device.
    """
    if not pending:
        return []
    sums = reduced(torch.stack([summed for _, summed, _ in pending])).tolist()
    losses = [total / rows for total, (_, _, rows) in zip(sums, pending, strict=True)]
    if log:
        append_log(log, [{**said, "loss": loss} for loss, (said, _, _) in zip(losses, pending, strict=True)])
    pending.clear()
    return losses


def train(options: argparse.Namespace, rank: int, world_size: int, device: torch.device) -> None:
    """Train, evaluate after each epoch, and print one line about it."""
    torch.backends.cudnn.benchmark = options.cudnn_benchmark
    task = task_of(PackedDataset(options.data), options)
    rows, held_out_rows = open_splits(options.data, task.fields, options.seed)
    batch_size, peak_lr, every = options.batch_size or task.batch_size, options.lr or task.lr, options.accumulate
    on_gpu = device if device.type == "cuda" else None
    loader = FastLoader(
        rows, batch_size, ends=options.ends, seed=options.seed, workers=options.workers, device=on_gpu,
        transform=task.transforms, echo=options.echo, **task.loader_options,
    )  # fmt: skip
    held_out = FastLoader(
        held_out_rows, batch_size, shuffle=False, ends="exact", device=on_gpu, transform=task.steady,
        **task.loader_options,
    )  # fmt: skip
    of_epoch = math.ceil(len(loader) / every)
    there = rank == 0 and options.resume and options.checkpoint.exists()
    state = first_says(load_checkpoint(options.checkpoint) if there else None)
    step = first_epoch = 0
    if state:
        step, first_epoch = state["step"], state["epoch"]
        try:
            loader.load_state_dict(state["loader"])
        except StateError as error:
            raise SystemExit(f"error: {options.checkpoint} is of another file or --seed: {error}") from None
        loader.set_epoch(first_epoch)
    trainer = Trainer(task, options, rank, world_size, device, state)
    # With another number of ranks than before, the rest takes other steps than the beginning took.
    steps = step + math.ceil(len(loader) / every) + (options.epochs - 1 - first_epoch) * of_epoch
    warm_up = max(1, steps // 20) if options.warmup_steps is None else options.warmup_steps
    log = options.loss_log if rank == 0 else None
    if log:
        begin_log(log, step)
    if rank == 0:
        print(
            f"{len(rows)} {task.summary}, {len(held_out_rows)} held out ({held_out_rows.split or 'drawn'}); "
            f"{world_size} process(es) on {device.type}, parallel {options.parallel}, precision {options.precision}"
            + (f"; from step {step}" if step else "")
        )
        if options.parallel.startswith("dp") and device.type == "cpu":
            print(f"there is no GPU to make replicas on: --parallel {options.parallel} is as none here")
    if first_epoch >= options.epochs and rank == 0:
        print(f"nothing is left to do: the checkpoint is of epoch {first_epoch + 1}. Give more --epochs.")
    last_step = min(steps, step + options.max_steps) if options.max_steps else steps
    full = batch_size * world_size * every  # rows of a step, where none is missing
    pending: list[tuple[dict[str, float], Tensor, int]] = []
    for epoch in range(first_epoch, options.epochs):
        loader.set_epoch(epoch)
        to_come, losses = len(loader), list[float]()
        summed, counted = torch.zeros((), device=device), 0
        first_batch_s, begin = 0.0, time.perf_counter()
        for place, batch in enumerate(loader, 1):
            first_batch_s = first_batch_s or time.perf_counter() - begin
            complete = place % every == 0 or place == to_come
            # A static graph is learnt from the first batch, which DDP has to reduce then (an internal error otherwise).
            reduce = complete or (options.static_graph and place == 1)
            summed, counted = summed + trainer.backward(batch, full, reduce=reduce), counted + batch.global_valid
            if not complete:
                continue
            lr = cosine_lr(step, steps, peak_lr, warm_up)
            trainer.update(lr, full / counted)
            step += 1
            pending.append(({"step": step, "epoch": epoch, "lr": lr}, summed, counted))
            summed, counted = torch.zeros((), device=device), 0
            if step % options.checkpoint_every == 0 or step == last_step:
                losses += flush(pending, log)
                if options.checkpoint:
                    trainer.save(options.checkpoint, loader=loader.state_dict(), step=step, epoch=epoch)
            if step == last_step and step < steps:
                if rank == 0:
                    print(f"stopped after step {step} of {steps}, as --max-steps asks, at loss {losses[-1]:.3f}")
                return
        losses += flush(pending, log)
        counts = trainer.evaluate(held_out)
        stats, wide = loader.stats, {"dtype": torch.float64, "device": device}
        rates = reduced(torch.tensor([stats.fresh_samples_per_s, stats.consumed_samples_per_s], **wide)).tolist()
        waits = reduced(torch.tensor([stats.stall_share, first_batch_s], **wide), dist.ReduceOp.MAX).tolist()
        memory = peak_memory(device)
        if rank == 0:
            echoed = f" ({rates[1]:,.0f} with echoes)" if options.echo > 1 else ""
            loss = f"{sum(losses) / len(losses):.3f}" if losses else "none"
            print(
                f"epoch {epoch + 1}/{options.epochs}: {rates[0]:,.0f} samples/s{echoed}, stall {waits[0]:.1%}, first "
                f"batch {waits[1] * 1e3:,.0f} ms, loss {loss}, {task.score(counts)}{memory}",
                flush=True,
            )
    if rank == 0 and first_epoch < options.epochs:
        picture = options.picture or free_name(Path(f"{options.data.stem}-answers.png"))
        task.finish(counts, trainer.network, held_out_rows, picture)


def run(options: argparse.Namespace) -> None:
    """This process's part of the training."""
    try:
        with process_group(options.device, options.meet if options.parallel == "ddp" else None) as place:
            train(options, *place)
    except FastloadError as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    given = parse_options()
    launch(run, given, ranks=given.spawn or 1 if given.parallel == "ddp" else 0)
