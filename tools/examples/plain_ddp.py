"""DistributedDataParallel with a plain DataLoader on a packed file, on CPUs.

    torchrun --standalone --nproc-per-node 2 plain_ddp.py PACKED.h5

Against a script for any other dataset two lines differ: they are marked.
"""

from __future__ import annotations

import argparse
import gc
import json

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from fastload import DistributedChunkSampler, PackedDataset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--seen", help="write here, as SEEN.RANK, the rows that each rank saw: a JSON list an epoch")
    args = parser.parse_args()
    dist.init_process_group("gloo")

    dataset = PackedDataset(args.file, fields=["images", "labels", "row"])  # this line
    sampler = DistributedChunkSampler(dataset)  # and this one
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, num_workers=args.workers)

    images, labels, _ = next(iter(loader))
    model = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(images[0].numel(), 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen: list[list[int]] = []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        seen.append([])
        for images, labels, rows in loader:
            loss = nn.functional.cross_entropy(model(images.float() / 255), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen[-1] += rows.tolist()
        print(f"epoch {epoch}, rank {dist.get_rank()}: {len(seen[-1])} samples, last loss {loss.item():.3f}")
    if args.seen:
        with open(f"{args.seen}.{dist.get_rank()}", "w") as file:
            json.dump(seen, file)
    # DDP's own threads end with the model, and should before the process group does.
    del model, optimizer, loss
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
