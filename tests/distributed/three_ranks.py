"""Three processes that evaluate, train and resume as ranks of 2, then of 3, then of 2 again.

    python three_ranks.py FOLDER

FOLDER holds sizes.h5; what each rank saw goes to FOLDER/RESULT.RANK.pt. Rank 2 sits out the worlds of 2. The file, the
model and the loops are also those of the single process that the ranks are compared with.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # before the fork: the first optimizer or DDP imports it, for seconds
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fastload import ChunkWindow, FastLoader, PackedDataset
from fastload.format.ragged import Column
from sample_files import write_packed

# A rank that takes a step more than the others waits for them no longer than this.
PATIENCE = timedelta(minutes=5)

CLASSES = 5
SHAPE = (4, 3, 3)

SPLITS = {"even": 24, "odd": 23, "seven": 7, "two": 2, "one": 1}
"""Sizes that divide by 2, by 3, by neither; fewer than the ranks."""

EVALUATED = [("even", 4), ("odd", 4), ("odd", 1), ("seven", 2), ("seven", 8), ("two", 3), ("one", 1)]
"""(split, batch size)"""

TRAINED = [
    ("odd", 4, "full"),
    ("odd", 5, ChunkWindow(2)),
    ("even", 3, False),
    ("seven", 2, "full"),
    ("two", 2, "full"),
    ("one", 2, False),
]
"""(split, batch size, shuffle)"""


def write_file(path: Path) -> None:
    count = sum(SPLITS.values())
    rng = np.random.default_rng(8)
    pixels = rng.integers(0, 256, (count, *SHAPE), dtype=np.uint8)
    labels = {"labels": Column(rng.integers(0, CLASSES, count), {"names": tuple("abcde")})}
    write_packed(path, pixels, labels, chunk_rows=4, splits=SPLITS)


def make_loader(folder: Path, split: str, batch_size: int, **options) -> FastLoader:
    """Of all rows for "all"; the process group, if there is one, decides which of them."""
    dataset = PackedDataset(folder / "sizes.h5", split=None if split == "all" else split)
    return FastLoader(dataset, batch_size, seed=6, **options)


def make_model() -> nn.Module:
    torch.manual_seed(2)
    pixels = int(np.prod(SHAPE))
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()


def losses_of(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of each sample, float64 (B,)."""
    return nn.functional.cross_entropy(model(images.double() / 255), labels, reduction="none")


def metric_of(loader: FastLoader) -> tuple[torch.Tensor, int, int]:
    """Sums of this rank, float64 (4,): correct, counted, margins, cross entropies; its steps; rows without `valid`.

    Scores are whole numbers, pixels times whole weights, so sums of margins are exact in any order.
    """
    weights = torch.from_numpy(np.random.default_rng(1).integers(-9, 10, (int(np.prod(SHAPE)), CLASSES))).double()
    sums, steps, without_valid = torch.zeros(4, dtype=torch.float64), 0, 0
    for batch in loader:
        images, labels = batch
        scores = images.flatten(1).double() @ weights
        margins = scores.amax(1) - scores.gather(1, labels[:, None])[:, 0]
        correct = (scores.argmax(1) == labels).double()
        entropies = nn.functional.cross_entropy(scores / 1000, labels, reduction="none")
        of_each = torch.stack([correct, torch.ones_like(correct), margins, entropies])
        sums += (of_each * batch.valid).sum(1)
        without_valid += len(labels)
        steps += 1
    assert steps == len(loader)
    return sums, steps, without_valid


def train(model: nn.Module, loader: FastLoader, loss_of: Callable) -> list[dict]:
    """One epoch of plain SGD: of each step the rows, which of them count, and the gradient."""
    steps = []
    for batch in loader:
        loss_of(batch).backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        steps.append({
            "rows": batch.rows.clone(), "valid": batch.valid.clone(), "global_valid": batch.global_valid,
            "gradient": gradient,
        })  # fmt: skip
        descend(model)
    return steps


def descend(model: nn.Module) -> None:
    """One step of gradient descent."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.5 * parameter.grad
            parameter.grad = None


def evaluate(folder: Path) -> dict:
    """By name of the split: (correct, counted, sum of margins, sum of cross entropies) over all ranks, and steps."""
    found = {}
    for split, batch_size in EVALUATED:
        sums, steps, without_valid = metric_of(make_loader(folder, split, batch_size, shuffle=False))
        dist.all_reduce(sums)
        found[split, batch_size] = {"sums": sums, "steps": steps, "without_valid": without_valid}
    return found


def train_all(folder: Path) -> dict:
    found = {}
    for split, batch_size, shuffle in TRAINED:
        model = DistributedDataParallel(make_model())
        loader = make_loader(folder, split, batch_size, shuffle=shuffle, ends="exact")

        def loss_of(batch, model=model):
            of_each = losses_of(model, *batch)
            return (of_each * batch.valid).sum() * dist.get_world_size() / batch.global_valid

        found[split, batch_size, str(shuffle)] = train(model, loader, loss_of)
    return found


@contextmanager
def world(folder: Path, name: str, rank: int, size: int):
    """A process group for as long as the block lasts; processes that are no rank of it skip the block's work."""
    store = folder / f"store-{name}"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=PATIENCE)
    try:
        yield
        dist.barrier()
    finally:
        # DistributedDataParallel's reducer must be gone before the group it talks through.
        gc.collect()
        dist.destroy_process_group()


def resume(folder: Path, load: str | None, save: str, *, steps: int | None, batch_size: int, whole: bool) -> dict:
    """Reads on where the checkpoint stands, so many steps or all. `whole`: the loader is what is saved, not its state.

    Returns the rows that count, the steps, the samples that were read and the state.
    """
    loader = make_loader(folder, "all", batch_size, shuffle="chunk", ends="exact")
    if load is not None:
        if whole:
            dcp.load({"loader": loader}, checkpoint_id=folder / load)
        else:
            held = {"loader": loader.state_dict()}
            dcp.load(held, checkpoint_id=folder / load)
            loader.load_state_dict(held["loader"])
    rows, done = [], 0
    for batch in loader:
        rows += batch.rows[batch.valid].tolist()
        done += 1
        if done == steps:
            break
    fresh = loader.stats.fresh_samples
    dcp.save({"loader": loader if whole else loader.state_dict()}, checkpoint_id=folder / save)
    return {"rows": rows, "steps": done, "fresh": fresh, "state": loader.state_dict()}


def work(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    results: dict[str, dict] = {}
    if rank < 2:
        with world(folder, "a", rank, 2):
            results["evaluated on 2"] = evaluate(folder)
            results["trained on 2"] = train_all(folder)
            for whole in (False, True):
                name = f"saved-{whole}"
                results[f"first {whole}"] = resume(folder, None, f"{name}-1", steps=3, batch_size=4, whole=whole)
    with world(folder, "b", rank, 3):
        results["evaluated on 3"] = evaluate(folder)
        results["trained on 3"] = train_all(folder)
        for whole in (False, True):
            name = f"saved-{whole}"
            results[f"second {whole}"] = resume(folder, f"{name}-1", f"{name}-2", steps=2, batch_size=3, whole=whole)
    if rank < 2:
        with world(folder, "c", rank, 2):
            for whole in (False, True):
                name = f"saved-{whole}"
                results[f"third {whole}"] = resume(
                    folder, f"{name}-2", f"{name}-3", steps=None, batch_size=4, whole=whole
                )
    torch.save(results, folder / f"result.{rank}.pt")


if __name__ == "__main__":
    # Torch is imported once where a fork will do; it takes seconds.
    gc.freeze()  # as in tests/warm_python.py
    method = "fork" if sys.platform == "linux" else "spawn"
    mp.start_processes(work, (Path(sys.argv[1]),), nprocs=3, start_method=method)
