"""Ray Train on a packed file, on the CPUs or the GPUs of a cluster.

    ray start --head                                         # or RAY_ADDRESS=HOST:PORT names a cluster
    python ray_train.py PACKED.h5 --ranks 2 --results FOLDER

All nodes see PACKED.h5, and FOLDER, under the same path, which is made absolute here, as ranks run in a folder of
Ray's. The loader finds its rank in the process group that Ray makes. It does not go through
`ray.train.torch.prepare_data_loader`, which would give a DataLoader a sampler of its own.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import ray.train
import ray.train.torch
import torch
from torch import nn

from fastload import FastLoader, PackedDataset


def train(config: dict[str, Any]) -> None:
    """Runs on each rank."""
    rank, device = ray.train.get_context().get_world_rank(), ray.train.torch.get_device()
    loader = FastLoader(PackedDataset(config["file"]), config["batch_size"], device=device)
    layers = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 10))
    model = ray.train.torch.prepare_model(layers)  # DistributedDataParallel, on this rank's device
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen: list[list[int]] = []
    for epoch in range(config["epochs"]):
        loader.set_epoch(epoch)
        seen.append([])
        for batch in loader:
            images, labels = batch
            loss = nn.functional.cross_entropy(model(images.float() / 255), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen[-1] += batch.rows.tolist()
        print(f"epoch {epoch}, rank {rank}: {len(seen[-1])} samples, last loss {loss.item():.3f}")
    if config["seen"]:
        with open(f"{config['seen']}.{rank}", "w") as file:
            json.dump(seen, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=os.path.abspath)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="a GPU for each rank")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=8, help="of each rank")
    parser.add_argument(
        "--results", type=os.path.abspath, help="what Ray Train writes goes here, not to ray_results at home"
    )
    parser.add_argument(
        "--seen",
        type=os.path.abspath,
        help="write here, as SEEN.RANK, the rows that each rank saw: a JSON list an epoch",
    )
    args = parser.parse_args()
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config=vars(args),
        scaling_config=ray.train.ScalingConfig(num_workers=args.ranks, use_gpu=args.gpu),
        run_config=ray.train.RunConfig(storage_path=args.results),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
