"""Accelerate with two processes on a packed file, on CPUs.

    torchrun --standalone --nproc-per-node 2 accelerate_ddp.py PACKED.h5

`prepare` shares out the batches of whatever sampler it finds, so it gets `ChunkSampler`, which knows of no ranks: a
`DistributedChunkSampler` would be cut a second time, and most samples never seen. The evaluation reads by a
`FastLoader`, which shares out the rows by itself and is not prepared; it counts each row once over all ranks.
"""

from __future__ import annotations

import argparse
import json

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from fastload import ChunkSampler, FastLoader, PackedDataset


def evaluate(model: nn.Module, loader: FastLoader, accelerator: Accelerator) -> tuple[int, int]:
    """Returns how many rows are right, and how many there are, over all ranks."""
    right = total = 0
    with torch.no_grad():
        for batch in loader:
            images, labels, _ = batch
            hits = model(images.float() / 255).argmax(1) == labels
            # Ranks gather tensors of one shape, so ends="pad"; what is valid counts.
            hits, valid = accelerator.gather((hits, batch.valid))
            right += int((hits & valid).sum())
            total += int(valid.sum())
    return right, total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=8, help="of each process")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--seen", help="write here, as SEEN.RANK, the rows that each rank saw: a JSON list an epoch")
    args = parser.parse_args()

    accelerator = Accelerator(cpu=True)
    dataset = PackedDataset(args.file, fields=["images", "labels", "row"])
    loader = DataLoader(dataset, args.batch_size, sampler=ChunkSampler(dataset), num_workers=args.workers)
    model = nn.Sequential(nn.Flatten(), nn.Linear(dataset[0][0].numel(), 10))
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)

    judged = FastLoader(dataset, args.batch_size, shuffle=False, ends="pad")

    seen: list[list[int]] = []
    for epoch in range(args.epochs):
        loader.set_epoch(epoch)
        seen.append([])
        for images, labels, rows in loader:
            loss = nn.functional.cross_entropy(model(images.float() / 255), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            seen[-1] += rows.tolist()
        right, total = evaluate(model, judged, accelerator)
        print(
            f"epoch {epoch}, rank {accelerator.process_index}: {len(seen[-1])} samples, last loss {loss.item():.3f}, "
            f"{right} of {total} right"
        )
    judged.close()
    if args.seen:
        with open(f"{args.seen}.{accelerator.process_index}", "w") as file:
            json.dump(seen, file)
    accelerator.free_memory()
    accelerator.end_training()


if __name__ == "__main__":
    main()
