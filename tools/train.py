"""Train a small network from a packed file: a complete script to start one's own from.

    python tools/train.py celeba.h5                                   one process, CPU or GPU
    torchrun --nproc-per-node 2 tools/train.py celeba.h5              DDP: nccl on GPUs, gloo on CPUs
    python tools/train.py celeba.h5 --checkpoint run.pt --resume      goes on where it stopped, mid-epoch too
    python tools/train.py camvid.h5 --epochs 40                       masks: segmentation, mean IoU, a picture
    python tools/train.py reviews.h5                                  tokens and no images: texts
    python tools/train.py photos.h5 --size 160                        images of several sizes, cut to 160x160

The file's fields decide the task: masks are segmented, images classified, token arrays of a file without images read as
text; `--task` says otherwise. Labels that are int64 numbers are classes, uint8 (N, A) are A yes-or-no attributes.
The tasks stand in `tasks.py`, their networks in `networks.py`.
On CPUs that others use too, set OMP_WAIT_POLICY=PASSIVE, or torch's threads spin and starve each other.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tasks import Task, task_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fastload import FastLoader, FastloadError, PackedDataset, inspect_file


@contextmanager
def process_group() -> Iterator[tuple[int, int, torch.device]]:
    """(rank, world size, device) as torchrun says, or of one process alone; leaves the group at the end."""
    cuda = torch.cuda.is_available()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        yield 0, 1, device
        return
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        yield dist.get_rank(), dist.get_world_size(), device
    finally:
        # The DDP model is garbage by now, but in a cycle, and keeps the group alive; gloo's threads, still running when
        # the interpreter ends, then abort the process (pytorch#190489; 3 runs in 8 with torch 2.13).
        gc.collect()
        dist.destroy_process_group()


def reduced(values: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """The values of all ranks together."""
    if dist.is_initialized():
        dist.all_reduce(values, op)
    return values


def open_splits(path: Path, fields: tuple[str, ...], seed: int) -> tuple[PackedDataset, PackedDataset]:
    """Training and validation rows: the file's own splits, or a fixed tenth held out where it has none."""
    names = list(inspect_file(path).splits)
    if "train" in names and len(names) > 1:
        held_out = next((name for name in ("valid", "val", "validation", "test") if name in names), names[-1])
        return PackedDataset(path, "train", fields), PackedDataset(path, held_out, fields)
    whole = PackedDataset(path, fields=fields)
    order = np.random.default_rng(seed).permutation(len(whole))
    tenth = max(1, len(whole) // 10)
    return whole.select(np.sort(order[tenth:])), whole.select(np.sort(order[:tenth]))


@torch.no_grad()
def evaluate(task: Task, model: nn.Module, loader: FastLoader, autocast: torch.autocast) -> Tensor:
    """The task's counts over the split, on the CPU, each row counted once over all ranks."""
    for buffer in model.buffers():  # batch-norm statistics differ between ranks; evaluate one model, rank 0's
        if dist.is_initialized():
            dist.broadcast(buffer, 0)
    model.eval()
    counts: Tensor | None = None
    for batch in loader:
        fields = dict(zip(task.fields, batch, strict=True))
        with autocast:
            answers = task.answers(model, fields)
        found = task.counts(answers, fields, batch.valid)
        counts = found if counts is None else counts + found
    model.train()
    if counts is None:
        raise SystemExit("the validation split holds no sample")
    return reduced(counts).cpu()


def cosine_lr(step: int, steps: int, peak: float) -> float:
    """Learning rate of one step: a twentieth of the steps up, then half a cosine down."""
    warm_up = max(1, steps // 20)
    if step < warm_up:
        return peak * (step + 1) / warm_up
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


def random_states(device: torch.device) -> list[list[Tensor]]:
    """What dropout draws from, of every rank: the CPU's generator, then that of its GPU."""
    state = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    if not dist.is_initialized():
        return [state]
    states: list[list[Tensor]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(states, state)
    return states


def set_random_state(states: list[list[Tensor]], rank: int, device: torch.device) -> None:
    """Go on with the draws of a rank; more ranks than there were share them."""
    cpu, *gpu = states[rank % len(states)]
    torch.set_rng_state(cpu.cpu())
    if gpu and device.type == "cuda":
        torch.cuda.set_rng_state(gpu[0].cpu(), device)


def load_checkpoint(path: Path, device: torch.device) -> dict[str, Any]:
    """What `save_checkpoint` wrote; ends the script where it is something else."""
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


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """The checkpoint under its name, whole or not at all."""
    part = path.with_name(path.name + ".part")
    torch.save(state, part)
    part.replace(path)


def train(options: argparse.Namespace, rank: int, world_size: int, device: torch.device) -> None:
    """Train, evaluate after each epoch, and print one line about it."""
    torch.manual_seed(options.seed)
    task = task_of(PackedDataset(options.data), options)
    train_rows, held_out_rows = open_splits(options.data, task.fields, options.seed)
    batch_size, peak_lr = options.batch_size or task.batch_size, options.lr or task.lr

    amp_dtype = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}[options.amp]
    autocast = torch.autocast(device.type, dtype=amp_dtype, enabled=amp_dtype is not None)
    scaler = torch.amp.GradScaler(device.type, enabled=amp_dtype is torch.float16)
    on_gpu = device if device.type == "cuda" else None
    loader = FastLoader(
        train_rows,
        batch_size,
        seed=options.seed,
        workers=options.workers,
        device=on_gpu,
        transform=task.transforms,
        echo=options.echo,
    )
    held_out = FastLoader(held_out_rows, batch_size, shuffle=False, ends="exact", device=on_gpu, transform=task.steady)

    model: nn.Module = task.network(options.width or task.width).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, weight_decay=0.02)
    steps_per_epoch = len(loader)
    if steps_per_epoch == 0:
        raise SystemExit(f"{len(train_rows)} training samples do not fill one batch of {batch_size} per rank")
    steps = options.epochs * steps_per_epoch
    step = first_epoch = 0
    if options.resume and options.checkpoint.exists():
        state = load_checkpoint(options.checkpoint, device)
        loader.load_state_dict(state["loader"])  # another file is told here
        try:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            scaler.load_state_dict(state["scaler"])
        except (RuntimeError, ValueError, KeyError):
            raise SystemExit(
                f"error: {options.checkpoint}: is of another network. Give the --task, --width and --layers of that "
                f"run, or leave out --resume."
            ) from None
        set_random_state(state["random"], rank, device)
        step, first_epoch = state["step"], state["epoch"]
    parallel = DistributedDataParallel(model) if dist.is_initialized() else model

    def checkpoint(epoch: int) -> None:
        if not options.checkpoint:
            return
        random = random_states(device)
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
            where = {"loader": loader.state_dict(), "random": random, "step": step, "epoch": epoch}
            save_checkpoint(options.checkpoint, state | where)

    if rank == 0:
        print(
            f"{len(train_rows)} {task.summary}, {len(held_out_rows)} held out; {world_size} process(es) on "
            f"{device.type}, amp {options.amp}"
        )
        if step:
            print(f"resumed at step {step} of {steps}")
    last_step = min(steps, step + options.max_steps) if options.max_steps else steps
    for epoch in range(first_epoch, options.epochs):
        loader.set_epoch(epoch)
        loss_sum = torch.zeros(2, device=device)
        for batch in loader:
            fields = dict(zip(task.fields, batch, strict=True))
            for group in optimizer.param_groups:
                group["lr"] = cosine_lr(step, steps, peak_lr)
            with autocast:
                answers = task.answers(parallel, fields)
            # Right for any batch, a short last one too: DDP averages over ranks, so undo that and divide by all rows.
            loss = (task.losses(answers, fields) * batch.valid).sum() * world_size / batch.global_valid
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            step += 1
            loss_sum += torch.stack([loss.detach().float(), loss.new_ones((), dtype=torch.float32)])
            if step % options.checkpoint_every == 0 or step == last_step:
                checkpoint(epoch)
            if step == last_step and step < steps:
                if rank == 0:
                    print(f"stopped after step {step} of {steps}, as --max-steps asks")
                return
        counts = evaluate(task, model, held_out, autocast)
        stats = loader.stats
        fast = torch.tensor(
            [stats.fresh_samples_per_s, stats.consumed_samples_per_s], dtype=torch.float64, device=device
        )
        stall = torch.tensor(stats.stall_share, dtype=torch.float64, device=device)
        fresh, consumed = reduced(fast).tolist()
        stalled = float(reduced(stall, dist.ReduceOp.MAX))
        mean_loss, batches = reduced(loss_sum).tolist()
        if rank == 0:
            echoed = f" ({consumed:,.0f} with echoes)" if options.echo > 1 else ""
            print(
                f"epoch {epoch + 1}/{options.epochs}: {fresh:,.0f} samples/s{echoed}, stall {stalled:.1%}, "
                f"loss {mean_loss / max(1, batches):.3f}, {task.score(counts)}",
                flush=True,
            )
    if rank == 0 and first_epoch < options.epochs:
        task.finish(counts, model, held_out_rows, options.picture or Path(f"{options.data.stem}-answers.png"))


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a small network from a packed file.")
    parser.add_argument("data", type=Path, help="file written by `fastload pack`")
    tasks = ["classify", "attributes", "segmentation", "text"]
    parser.add_argument("--task", choices=tasks, help="default: what the file's fields and labels suggest")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, help="samples a step and process (64; texts 128, masks 8)")
    parser.add_argument("--lr", type=float, help="peak learning rate (0.003; texts 0.002, masks 0.004)")
    parser.add_argument("--width", type=int, help="channels of the first stage (16; texts 64, masks 24)")
    parser.add_argument("--size", type=int, default=128, help="side that images of several sizes are cut to (128)")
    parser.add_argument("--layers", type=int, default=2, help="of attention, for texts (2); 0: a bag of words")
    parser.add_argument("--picture", type=Path, help="where the answers for masks are drawn (DATA-answers.png)")
    parser.add_argument("--amp", choices=["off", "bf16", "fp16"], default="off", help="autocast (default: off)")
    parser.add_argument("--echo", type=int, default=1, help="times each batch is used (default: 1)")
    parser.add_argument("--workers", type=int, help="default: the loader's own choice")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, help="file to keep the state of the run in")
    parser.add_argument("--checkpoint-every", type=int, default=200, help="steps between checkpoints (default: 200)")
    parser.add_argument("--resume", action="store_true", help="go on from --checkpoint where it exists")
    parser.add_argument("--max-steps", type=int, help="stop after that many steps of this run, with a checkpoint")
    options = parser.parse_args()
    if options.resume and not options.checkpoint:
        parser.error("--resume needs --checkpoint FILE")
    for name in ("epochs", "batch_size", "echo", "width", "size", "checkpoint_every"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return options


def main() -> None:
    """Train as the command line says."""
    options = parse_options()
    if options.checkpoint is not None and not Path(options.checkpoint).absolute().parent.is_dir():
        raise SystemExit(f"error: {options.checkpoint}: its folder does not exist. Make it first.")
    with process_group() as (rank, world_size, device):
        train(options, rank, world_size, device)


if __name__ == "__main__":
    try:
        main()
    except FastloadError as error:
        raise SystemExit(f"error: {error}") from None
