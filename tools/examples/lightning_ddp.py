"""Lightning's Trainer with two processes on a packed file, on CPUs.

    python lightning_ddp.py PACKED.h5

Lightning puts its own sampler in place of any that is not a torch `DistributedSampler`, and so keeps
`DistributedChunkSampler`: it calls `set_epoch` on it, and no `use_distributed_sampler=False` is needed.

With `--fastloader` a `FastLoader` is given to the Trainer instead. It is made before there is a process group, and
finds its rank when it is asked for its length or its first batch.
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader

from fastload import DistributedChunkSampler, FastLoader, PackedDataset

FIELDS = ["images", "labels", "row"]


class PackedData(lightning.LightningDataModule):
    def __init__(self, path: str, batch_size: int) -> None:
        super().__init__()
        self.path, self.batch_size = path, batch_size

    def train_dataloader(self) -> DataLoader:
        # Called when the process group is there, so that the sampler finds its rank.
        dataset = PackedDataset(self.path, fields=FIELDS)
        return DataLoader(dataset, self.batch_size, sampler=DistributedChunkSampler(dataset))


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 10))
        self.seen: list[list[int]] = []

    def on_train_epoch_start(self) -> None:
        self.seen.append([])
        loader = self.trainer.train_dataloader
        if not isinstance(loader, FastLoader):
            assert isinstance(loader.sampler, DistributedChunkSampler), (
                f"Lightning replaced it by {type(loader.sampler)}"
            )

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        images, labels, rows = batch
        self.seen[-1] += rows.tolist()
        return nn.functional.cross_entropy(self.layers(images.float() / 255), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--fastloader", action="store_true", help="with a FastLoader, made before the Trainer")
    parser.add_argument("--seen", help="write here, as SEEN.RANK, the rows that each rank saw: a JSON list an epoch")
    args = parser.parse_args()
    # Lightning advises many workers whatever the dataset; this one takes microseconds a sample. And its own use of
    # torch's pytrees is deprecated by newer releases of torch.
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)

    model = Model()
    loader = FastLoader(PackedDataset(args.file, fields=FIELDS), args.batch_size) if args.fastloader else None
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=args.epochs, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data = {"datamodule": PackedData(args.file, args.batch_size)} if loader is None else {"train_dataloaders": loader}
    trainer.fit(model, **data)
    print(f"rank {trainer.global_rank}: {[len(rows) for rows in model.seen]} samples an epoch")
    if args.seen:
        with open(f"{args.seen}.{trainer.global_rank}", "w") as file:
            json.dump(model.seen, file)


if __name__ == "__main__":
    main()
