"""One of three processes that evaluate, train and resume as ranks of 2, then of 3, then of 2 again.

    python three_ranks.py RANK FOLDER

FOLDER holds sizes.h5; what each rank saw goes to FOLDER/RESULT.RANK.pt. Rank 2 sits out the worlds of 2.
"""

from __future__ import annotations

import gc
import sys
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from exact_ends import EVALUATED, TRAINED, losses_of, make_loader, make_model, metric_of, read_on, train
from torch.nn.parallel import DistributedDataParallel

# A rank that takes a step more than the others waits for them no longer than this.
PATIENCE = timedelta(minutes=5)


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
    """Reads on where the checkpoint stands. `whole`: the loader itself is what is saved, not its state."""
    loader = make_loader(folder, "all", batch_size, shuffle="chunk", ends="exact")
    if load is not None:
        if whole:
            dcp.load({"loader": loader}, checkpoint_id=folder / load)
        else:
            held = {"loader": loader.state_dict()}
            dcp.load(held, checkpoint_id=folder / load)
            loader.load_state_dict(held["loader"])
    result = read_on(loader, steps)
    dcp.save({"loader": loader if whole else loader.state_dict()}, checkpoint_id=folder / save)
    return result | {"state": loader.state_dict()}


def main() -> None:
    torch.set_num_threads(1)
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
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
    main()
