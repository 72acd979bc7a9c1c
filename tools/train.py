"""Train a small network from a packed file, on one device or several: a complete script to start one's own from.

    python tools/train.py celeba.h5                                   one process, CPU or GPU
    torchrun --nproc-per-node 2 tools/train.py celeba.h5              DDP: nccl on GPUs, gloo on CPUs
    python tools/train.py celeba.h5 --spawn 2                         the same without torchrun
    python tools/train.py celeba.h5 --parallel dp-loss                one process, all its GPUs
    python tools/train.py celeba.h5 --checkpoint run.pt --resume      goes on where it stopped, mid-epoch too
    python tools/train.py camvid.h5 --epochs 40                       masks: segmentation, mean IoU, a picture
    python tools/train.py reviews.h5                                  tokens and no images: texts
    python tools/train.py photos.h5 --size 160                        images of several sizes, cut to 160x160

The file's fields decide the task: masks are segmented, images classified, token arrays of a file without images read as
text; `--task` says otherwise. Labels that are int64 numbers are classes, uint8 (N, A) are A yes-or-no attributes.
The tasks stand in `tasks.py`, their networks and `LossInForward` in `models.py`, how ranks start in `ranks.py`.
On CPUs that others use too, set OMP_WAIT_POLICY=PASSIVE, or torch's threads spin and starve each other.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from models import InPrecision, LossInForward, sync_batch_norm
from ranks import launch, peak_memory, process_group, reduced
from tasks import Fields, Task, open_splits, task_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fastload import FastLoader, FastloadError, PackedDataset

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def cosine_lr(step: int, steps: int, peak: float, warm_up: int) -> float:
    """Learning rate of one step: up in a line, then down along half a cosine."""
    if step < warm_up:
        return peak * (step + 1) / warm_up
    return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm_up) / max(1, steps - warm_up))))


class Trainer:
    """The network, spread over devices as `--parallel` says, and what improves it."""

    def __init__(
        self, task: Task, options: argparse.Namespace, rank: int, world_size: int, device: torch.device
    ) -> None:
        self.task, self.device, self.rank, self.world_size = task, device, rank, world_size
        self.in_order = torch.channels_last if options.channels_last else torch.contiguous_format
        torch.manual_seed(options.seed)
        self.network = task.network(options.width or task.width).to(device, memory_format=self.in_order)
        if options.sync_bn:
            self.network = sync_batch_norm(self.network, device)
        if options.compile:
            self.network.compile(backend=options.compile)
        torch.manual_seed(options.seed + rank)  # ranks drop other neurons
        dtype = PRECISIONS[options.precision]
        self.optimizer = torch.optim.AdamW(
            self.network.parameters(), weight_decay=0.02, fused=options.optimizer_fused or None
        )
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)
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
            answering = nn.DataParallel(self.answering, output_device=options.output_device)
            if options.parallel == "dp":
                with_loss = LossInForward(answering, self._losses)
            else:
                with_loss = nn.DataParallel(with_loss, output_device=options.output_device)
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
        states = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if self.device.type == "cuda" else [])]
        random: list[Any] = [None] * self.world_size
        if dist.is_initialized():
            dist.all_gather_object(random, states)
        else:
            random = [states]
        if self.rank == 0:
            parts = {name: part.state_dict() for name, part in self._parts().items()}
            part = path.with_name(path.name + ".part")
            torch.save({**parts, **position, "random": random}, part)
            part.replace(path)

    def restore(self, path: Path, state: dict[str, Any]) -> None:
        """Go on from what `save` wrote; with more ranks than then, some draw the same random numbers."""
        try:
            for name, part in self._parts().items():
                part.load_state_dict(state[name])
        except (RuntimeError, ValueError, KeyError):
            raise SystemExit(
                f"error: {path}: is of another network. Give the --task, --width and --layers of that run, or leave "
                f"out --resume."
            ) from None
        cpu, *gpu = state["random"][self.rank % len(state["random"])]
        torch.set_rng_state(cpu.cpu())
        if gpu and self.device.type == "cuda":
            torch.cuda.set_rng_state(gpu[0].cpu())


def load_checkpoint(path: Path, device: torch.device) -> dict[str, Any]:
    """What `Trainer.save` wrote; ends the script where it is something else."""
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, UnpicklingError):
        # What torch says advises to load it without care.
        raise SystemExit(f"error: {path}: damaged, or no checkpoint of this script. Give another file.") from None
    wanted = ("model", "optimizer", "scaler", "loader", "random", "step", "epoch")
    absent = [name for name in wanted if not isinstance(state, dict) or name not in state]
    if absent:
        raise SystemExit(
            f"error: {path}: no checkpoint of this script, or of an older one (it lacks {', '.join(absent)}). Leave "
            f"out --resume, or give another file."
        )
    return state  # type: ignore[no-any-return]


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
        with open(log, "a") as out:
            for loss, (said, _, _) in zip(losses, pending, strict=True):
                out.write(json.dumps({**said, "loss": loss}) + "\n")
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
        transform=task.transforms, echo=options.echo,
    )  # fmt: skip
    held_out = FastLoader(held_out_rows, batch_size, shuffle=False, ends="exact", device=on_gpu, transform=task.steady)
    of_epoch = math.ceil(len(loader) / every)
    trainer = Trainer(task, options, rank, world_size, device)
    step = first_epoch = 0
    if options.resume and options.checkpoint.exists():
        state = load_checkpoint(options.checkpoint, device)
        loader.load_state_dict(state["loader"])  # another file is told here
        trainer.restore(options.checkpoint, state)
        step, first_epoch = state["step"], state["epoch"]
        loader.set_epoch(first_epoch)
    # With another number of ranks than before, the rest takes other steps than the beginning took.
    steps = step + math.ceil(len(loader) / every) + (options.epochs - 1 - first_epoch) * of_epoch
    warm_up = max(1, steps // 20) if options.warmup_steps is None else options.warmup_steps
    log = options.loss_log if rank == 0 else None
    if log and log.exists():  # what was logged after the checkpoint will come again; the last line may lack its end
        lines = [line for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
        log.write_text("".join(line for line in lines if json.loads(line)["step"] <= step))
    if rank == 0:
        print(
            f"{len(rows)} {task.summary}, {len(held_out_rows)} held out; {world_size} process(es) on {device.type}, "
            f"parallel {options.parallel}, precision {options.precision}" + (f"; from step {step}" if step else "")
        )
        if options.parallel.startswith("dp") and device.type == "cpu":
            print(f"there is no GPU to make replicas on: --parallel {options.parallel} is as none here")
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
                    print(f"stopped after step {step} of {steps}, as --max-steps asks")
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
        picture = options.picture or Path(f"{options.data.stem}-answers.png")
        task.finish(counts, trainer.network, held_out_rows, picture)


def parse_options(words: list[str] | None = None) -> argparse.Namespace:
    """The command line, or the words of another one."""
    parser = argparse.ArgumentParser(description="Train a small network from a packed file.")
    add = parser.add_argument
    add("data", type=Path, help="file written by `fastload pack`")
    tasks = ["classify", "attributes", "segment", "text"]
    add("--task", choices=tasks, help="default: what the file's fields and labels suggest")
    add("--epochs", type=int, default=2)
    add("--batch-size", type=int, help="samples a batch and process (64; texts 128, masks 8)")
    add("--lr", type=float, help="peak learning rate (0.003; texts 0.002, masks 0.004)")
    add("--warmup-steps", type=int, help="steps up to it (a twentieth of all); then down along half a cosine")
    add("--width", type=int, help="channels of the first stage (16; texts 64, masks 24)")
    add("--size", type=int, default=128, help="side that images of several sizes are cut to (128)")
    add("--layers", type=int, default=2, help="of attention, for texts (2); 0: a bag of words")
    add("--dropout", type=float, default=0.1, help="for texts and masks (0.1)")
    add("--layer-drop", type=float, default=0.0, help="share of the steps that a text layer is left out of (0)")
    add("--picture", type=Path, help="where the answers for masks are drawn (DATA-answers.png)")
    strategies = ["none", "dp", "dp-loss", "ddp"]
    add("--parallel", choices=strategies, help="default: ddp under torchrun or with --spawn, else none")
    add("--spawn", type=int, metavar="N", help="start N ranks of ddp here, without torchrun")
    add("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    add("--output-device", type=int, help="dp, dp-loss: the GPU that gathers (0)")
    add("--bucket-cap-mb", type=float, help="ddp: gradients reduced at once (25)")
    add("--static-graph", action="store_true", help="ddp: the same parameters are used in each step")
    add("--find-unused-parameters", action="store_true", help="ddp: each step may leave others unused")
    add("--accumulate", type=int, default=1, help="batches a step (1); ddp reduces after the last")
    add("--sync-bn", action="store_true", help="ddp: batch norms see the batches of all ranks")
    add("--precision", choices=list(PRECISIONS), default="fp32", help="of the forward pass (fp32)")
    add("--compile", nargs="?", const="inductor", metavar="BACKEND", help="torch.compile (inductor)")
    add("--channels-last", action=argparse.BooleanOptionalAction, default=True, help="memory order of images (on)")
    add("--optimizer-fused", action="store_true", help="AdamW as one kernel")
    add("--cudnn-benchmark", action="store_true", help="let cuDNN try which kernels are fastest")
    add("--ends", choices=["drop", "pad", "exact"], default="drop", help="of an epoch, as FastLoader has them (drop)")
    add("--echo", type=int, default=1, help="times each batch is used (1)")
    add("--workers", type=int, help="default: the loader's own choice")
    add("--seed", type=int, default=0)
    add("--checkpoint", type=Path, help="file to keep the state of the run in")
    add("--checkpoint-every", type=int, default=200, help="steps between checkpoints (200)")
    add("--resume", action="store_true", help="go on from --checkpoint where it exists")
    add("--max-steps", type=int, help="stop after that many steps of this run, with a checkpoint")
    # Not --log, which torchrun takes for an option of its own.
    add("--loss-log", type=Path, help="file for the loss of each step, JSON lines")
    parser.set_defaults(meet="env://")  # where ranks find each other
    options = parser.parse_args(words)
    ranks = int(os.environ.get("WORLD_SIZE", options.spawn or 1))
    options.parallel = options.parallel or ("ddp" if "RANK" in os.environ or options.spawn else "none")
    if options.parallel != "ddp":
        for name in ("spawn", "bucket_cap_mb", "static_graph", "find_unused_parameters", "sync_bn"):
            if getattr(options, name):
                parser.error(f"--{name.replace('_', '-')} is for --parallel ddp, not {options.parallel}")
        if ranks > 1:
            parser.error(f"--parallel {options.parallel} is one process, and {ranks} were started")
    if options.static_graph and options.find_unused_parameters:
        parser.error("--static-graph finds unused parameters itself: leave out --find-unused-parameters")
    if options.output_device is not None and not options.parallel.startswith("dp"):
        parser.error(f"--output-device is for --parallel dp and dp-loss, not {options.parallel}")
    if options.compile and options.parallel.startswith("dp"):
        parser.error("--compile does not work with nn.DataParallel, whose replicas are new modules in each step")
    counted = ("epochs", "batch_size", "echo", "width", "size", "checkpoint_every", "max_steps", "accumulate", "spawn")
    for name in counted:
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if options.resume and not options.checkpoint:
        parser.error("--resume needs --checkpoint FILE")
    for path in (options.checkpoint, options.loss_log, options.picture):
        if path and not path.absolute().parent.is_dir():
            parser.error(f"{path}: its folder does not exist. Make it first.")
        if path and path.exists() and not options.resume and path != options.picture:
            parser.error(f"{path} exists. Give another name, or go on from a checkpoint with --resume.")
    return options


def run(options: argparse.Namespace) -> None:
    """This process's part of the training."""
    try:
        with process_group(options.device, options.meet if options.parallel == "ddp" else None) as place:
            train(options, *place)
    except FastloadError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    given = parse_options()
    launch(run, given, ranks=given.spawn or 1 if given.parallel == "ddp" else 0)
