"""Shows what goes wrong in training, above all on several GPUs, and the same training cured.

    python tools/symptoms.py first-gpu-full          the first GPU is full, the others have room
    python tools/symptoms.py busy-but-slow           the device never waits, and training is slow
    python tools/symptoms.py epoch-start             every epoch begins with a wait
    python tools/symptoms.py unused-parameters       DDP ends with an error in the second step
    python tools/symptoms.py uneven-ends             a rank waits for another that has finished
    python tools/symptoms.py uneven-ends --cure      the same training without it

Nothing is played: each makes a small packed file in a temporary folder, trains on it for some seconds, and prints what
it measured or what torch raised. Any machine will do: ranks are processes on the CPU, over gloo, also where there are
GPUs. docs/several-gpus.md says why it is so, and what to change in one's own script.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

from fastload import FastLoader, Meter, PackedDataset
from fastload.format.ragged import Column
from fastload.transforms import Normalize
from models import LossInForward, SmallDeepLab, SmallResNet
from ranks import group
from sample_files import write_packed

RANKS, CLASSES = 2, 10
PATIENCE_S = 5.0  # in the symptom that hangs; torch's own patience is 30 minutes, 10 with NCCL
LIMIT_S = 120.0  # ranks that have not ended by then are killed
NORMALIZE = Normalize((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))


def make_file(folder: Path, rows: int, side: int) -> Path:
    """A packed file of noise."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (rows, side, side, 3), dtype=np.uint8)
    return write_packed(folder / "noise.h5", images, {"labels": Column(rng.integers(0, CLASSES, rows))})


# Ranks: processes that end, whatever happens ----------------------------------------------------------------------


Job = tuple[Callable[..., dict[str, Any]], float, tuple[Any, ...]]
"""A function of (rank, *arguments), the patience of its process group in seconds, and the arguments."""


def on_ranks(folder: Path, *jobs: Job) -> list[list[dict[str, Any]]]:
    """What each job returned on each rank; one after another in the same processes, each in a group of its own.

    All ranks are on the CPU. With NCCL one that waits in vain raises nothing: DDP waits for a future, which only queues
    the wait on the GPU, so `backward` returns, also with TORCH_NCCL_BLOCKING_WAIT, and a later step hangs.
    """
    if torch.cuda.is_available():
        print("(the ranks are on the CPU, over gloo, where a wait in vain ends as an error)", flush=True)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # or warnings about the failure that is to be shown hide it
    os.environ.setdefault("TORCH_DISTRIBUTED_DEBUG", "INFO")  # DDP then names the parameters it speaks of
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when a rank starts
    ranks = torch.multiprocessing.spawn(_run_rank, (folder, jobs), nprocs=RANKS, join=False, daemon=True)
    end_s = time.monotonic() + LIMIT_S
    try:
        while not ranks.join(timeout=1):
            if time.monotonic() > end_s:
                raise SystemExit(f"error: the ranks have not ended after {LIMIT_S:.0f} s, and are killed")
    finally:
        for process in ranks.processes:
            process.kill()  # nothing to those that have ended
            process.join()
    found = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    return [list(of_ranks) for of_ranks in zip(*found, strict=True)]


def _run_rank(rank: int, folder: Path, jobs: tuple[Job, ...]) -> None:
    found = []
    for number, (job, patience_s, arguments) in enumerate(jobs):
        store = dist.FileStore(str(folder / f"store{number}"), RANKS)
        _meet(store, "up", rank)  # Python may start slowly: patience is for what comes then
        patience = timedelta(seconds=patience_s)
        with group(torch.device("cpu"), rank, RANKS, store=store, timeout=patience):
            found.append(job(rank, *arguments))
            _meet(store, "down", rank)  # a rank that leaves breaks the connection, which is another error
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


def _meet(store: dist.Store, where: str, rank: int) -> None:
    """Wait until all ranks are here, without a collective."""
    store.set(f"{where}{rank}", "here")
    store.wait([f"{where}{other}" for other in range(RANKS)], timedelta(seconds=LIMIT_S))


def small_network() -> nn.Module:
    """Of images of 8 x 8."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(8 * 8 * 3, 32), nn.ReLU(), nn.Linear(32, CLASSES))


# First GPU full ---------------------------------------------------------------------------------------------------


def pixel_losses(network: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy of each image, (B,), as if all its pixels were of class 0."""
    answers = network(batch["images"])
    truth = torch.zeros_like(answers[:, 0], dtype=torch.int64)
    return cross_entropy(answers, truth, reduction="none").mean((1, 2))


def first_gpu_full(cure: bool, folder: Path) -> None:
    """nn.DataParallel brings every answer to the first GPU, unless the loss is taken where the answers are."""
    gpus = torch.cuda.device_count()
    replicas = gpus if gpus > 1 else 4
    loader = FastLoader(make_file(folder, 8 * replicas, 128), 8 * replicas, transform=[NORMALIZE])
    images, valid = next(iter(loader))[0], torch.ones(8 * replicas, dtype=torch.bool)
    network = SmallDeepLab(3, CLASSES, 16)
    model = LossInForward(network, pixel_losses) if cure else network
    if gpus > 1:
        print(f"nn.DataParallel takes all {gpus} GPUs that CUDA_VISIBLE_DEVICES leaves, 8 images of 128 x 128 each")
        parallel = nn.DataParallel(model.cuda())
        batch = {"images": images.cuda()}
        for _ in range(3):
            losses = parallel(batch, valid.cuda()) if cure else pixel_losses(parallel, batch)
            losses.sum().backward()
        peaks = [torch.cuda.max_memory_allocated(gpu) / 1e6 for gpu in range(gpus)]
        print(f"most memory in use, GPU by GPU: {', '.join(f'{peak:,.0f}' for peak in peaks)} MB")
        return
    # DataParallel does nothing on a CPU: its replicas' shares of the batch go through the network one after another,
    # and what it would gather from those that are not on the first GPU is counted.
    shares = list(zip(images.chunk(replicas), valid.chunk(replicas), strict=True))[1:]
    gathered = [model({"images": share}, counted) if cure else model(share) for share, counted in shares]
    what = "the sums of their losses" if cure else "their answers"
    print(f"(fewer than two GPUs here: of {replicas}, with 8 images of 128 x 128 each, the bytes are counted)")
    print(f"{replicas - 1} GPUs send {what} to the first one: {sum(part.nbytes for part in gathered):,} bytes a step")


# Busy but slow ----------------------------------------------------------------------------------------------------


def busy_but_slow(cure: bool, folder: Path) -> None:
    """A device that is given one small thing after another never waits, and gets little done."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    path = make_file(folder, 1024, 64)
    if device.type == "cpu":
        torch.set_num_threads(1)  # several would wait for each other, wherever others use the machine too
    print(f"a small ResNet on {'a GPU' if device.type == 'cuda' else 'one CPU core'}")
    ways = [(2, False, False), (64, False, False), (64, True, False), (64, True, True)]
    for batch_size, channels_last, bfloat16 in ways if cure else ways[:1]:
        loader = FastLoader(path, batch_size, device=device, transform=[NORMALIZE])
        layout = torch.channels_last if channels_last else torch.contiguous_format
        network = SmallResNet(3, CLASSES, 16).to(device, memory_format=layout)
        optimizer = torch.optim.AdamW(network.parameters())
        for seconds in (1, 3):  # once for the choice of kernels
            end_s = time.monotonic() + seconds
            with Meter() as meter:
                while time.monotonic() < end_s:
                    for images, labels in meter.watch(loader):
                        with torch.autocast(device.type, torch.bfloat16, enabled=bfloat16):
                            answers = network(images.contiguous(memory_format=layout))
                        optimizer.zero_grad()
                        cross_entropy(answers.float(), labels).backward()
                        optimizer.step()
                        if time.monotonic() > end_s:
                            if device.type == "cuda":
                                torch.cuda.synchronize()  # steps that are only queued do not count as done
                            break
        totals = meter.totals
        # The first that there is: CUDA_VISIBLE_DEVICES may leave another one than the machine's GPU 0.
        read = [[said for name, said in one.items() if name.endswith(".utilization_percent")] for one in meter.readings]
        busy = [percents[0] for percents in read if percents]
        utilization = f"GPU utilization {statistics.mean(busy):.0f} %, " if busy else ""
        print(
            f"batches of {batch_size}{', channels_last' * channels_last}{', bfloat16' * bfloat16}: {utilization}"
            f"{1 - totals.stall_share:.0%} of the time in the step, {totals.samples / totals.duration_s:,.0f} images/s",
            flush=True,
        )


# Epoch start ------------------------------------------------------------------------------------------------------


def as_floats(sample: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """A transform in Python."""
    image, label = sample
    return image.float() / 255, label


def epoch_start(cure: bool, folder: Path) -> None:
    """A plain DataLoader starts its workers anew in each epoch."""
    dataset = PackedDataset(make_file(folder, 640, 64), transform=as_floats)
    plain = {"batch_size": 32, "shuffle": True, "num_workers": 2}
    loaders: dict[str, Any] = {"DataLoader": DataLoader(dataset, **plain)}
    if cure:
        loaders["DataLoader(persistent_workers=True)"] = DataLoader(dataset, **plain, persistent_workers=True)
        loaders["FastLoader"] = FastLoader(dataset, 32, workers=2)
    first_s: dict[str, list[float]] = {name: [] for name in loaders}
    other_s: dict[str, list[float]] = {name: [] for name in loaders}
    for epoch in range(9):
        for name, loader in loaders.items():
            asked_s = time.perf_counter()
            for number, _ in enumerate(loader):
                waited_s = time.perf_counter() - asked_s
                if epoch:  # the first one has to start them
                    (other_s if number else first_s)[name].append(waited_s)
                time.sleep(0.01)  # the step, on an accelerator: the CPU is free
                asked_s = time.perf_counter()
    start = torch.multiprocessing.get_start_method()
    for name in loaders:
        first_ms, other_ms = (statistics.median(waits[name]) * 1e3 for waits in (first_s, other_s))
        print(f"{name}, workers by {start}: {first_ms:.1f} ms for an epoch's first batch, {other_ms:.1f} for another")


# Unused parameters ------------------------------------------------------------------------------------------------


# The second where it is the same parameters in every step.
UNUSED_CURES = [{"find_unused_parameters": True}, {"static_graph": True}]


class TwoHeads(nn.Module):
    """Has a second head, that no loss is taken of."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.second = small_network(), nn.Linear(8 * 8 * 3, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, CLASSES), of the first head."""
        return self.network(images)  # type: ignore[no-any-return]


def unused_rank(_: int, path: Path, options: dict[str, bool]) -> dict[str, Any]:
    """Steps that were taken, and what ended them."""
    model = DistributedDataParallel(TwoHeads(), **options)
    done = 0
    try:
        for images, labels in FastLoader(path, 4, transform=[NORMALIZE]):
            cross_entropy(model(images), labels).backward()
            done += 1
    except RuntimeError as error:
        lines = str(error).splitlines()
        named = next((line for line in lines if line.startswith("Parameters which")), "")
        return {"steps": done, "error": f"{lines[0].partition('. ')[0]}. {named}"}
    return {"steps": done, "error": None}


def unused_parameters(cure: bool, folder: Path) -> None:
    """DDP waits for a gradient of each parameter, and in the next step finds that one has not come."""
    path = make_file(folder, 40, 8)
    ways = UNUSED_CURES if cure else [{}]
    for options, found in zip(ways, on_ranks(folder, *((unused_rank, 60.0, (path, way)) for way in ways)), strict=True):
        given = "".join(f", {name}=True" for name in options)
        ended = f"then: {found[0]['error']}" if found[0]["error"] else "the whole epoch"
        print(f"DistributedDataParallel(model{given}): {found[0]['steps']} step(s), {ended}")


# Uneven ends ------------------------------------------------------------------------------------------------------


def uneven_rank(rank: int, path: Path, ends: str | None) -> dict[str, Any]:
    """Batches, steps and rows that count of one epoch on this rank, and how long it waited for nothing.

    Args:
        ends: of FastLoader; None: rows dealt out to plain DataLoaders, one to each rank in turn.
    """
    dataset = PackedDataset(path)
    loader: Any
    if ends is None:
        loader = DataLoader(Subset(dataset, range(rank, len(dataset), RANKS)), batch_size=4)
    else:
        loader = FastLoader(dataset, 4, ends=ends)
    model = DistributedDataParallel(small_network())
    done = rows = 0
    for batch in loader:
        images, labels = batch
        losses = cross_entropy(model(images.float() / 255), labels, reduction="none")
        # Where DDP averages over ranks, this is the mean over all rows that count, on any rank.
        loss = losses.mean() if ends is None else (losses * batch.valid).sum() * RANKS / batch.global_valid
        began_s = time.monotonic()
        try:
            loss.backward()
        except RuntimeError as error:
            said = " ".join(str(error).split("] ")[-1].split())
            return {"batches": len(loader), "steps": done, "waited_s": time.monotonic() - began_s, "error": said}
        done += 1
        rows += len(images) if ends is None else int(batch.valid.sum())
    return {"batches": len(loader), "steps": done, "rows": rows, "error": None}


def uneven_ends(cure: bool, folder: Path) -> None:
    """A rank that has a batch more than the others waits in its all-reduce for theirs."""
    path = make_file(folder, 41, 8)
    if not cure:
        (found,) = on_ranks(folder, (uneven_rank, PATIENCE_S, (path, None)))
        print(f"41 rows dealt out to 2 ranks, in batches of 4: {found[0]['batches']} and {found[1]['batches']} batches")
        print(
            f"rank 1 has finished; rank 0 waited {found[0]['waited_s']:.1f} s for it after step {found[0]['steps']}: "
            f"{found[0]['error']}"
        )
        return
    ways = ("drop", "pad", "exact")
    for ends, found in zip(ways, on_ranks(folder, *((uneven_rank, 60.0, (path, way)) for way in ways)), strict=True):
        steps, rows = [of_rank["steps"] for of_rank in found], sum(of_rank["rows"] for of_rank in found)
        print(f"FastLoader(ends={ends!r}): {steps[0]} and {steps[1]} steps, {rows} rows in the loss")


SYMPTOMS: dict[str, Callable[[bool, Path], None]] = {
    "first-gpu-full": first_gpu_full,
    "busy-but-slow": busy_but_slow,
    "epoch-start": epoch_start,
    "unused-parameters": unused_parameters,
    "uneven-ends": uneven_ends,
}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("symptom", choices=SYMPTOMS)
    parser.add_argument("--cure", action="store_true", help="train without it")
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # the ranks and the folder go, too
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as folder:
        SYMPTOMS[options.symptom](options.cure, Path(folder))


if __name__ == "__main__":
    main()
