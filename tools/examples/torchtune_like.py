"""A recipe as torchtune's are, on a packed file: it needs torch alone. With torchrun on several processes, else on one.

    python torchtune_like.py PACKED.h5 --checkpoint run.pt
    torchrun --standalone --nproc-per-node 2 torchtune_like.py PACKED.h5 --checkpoint run.pt
    python torchtune_like.py PACKED.h5 --checkpoint run.pt --resume         # also on another number of processes

The loader has `state_dict` and `load_state_dict` as torchdata's StatefulDataLoader: its state goes into the checkpoint.
Here it is the same on every rank, so that rank 0 saves it with the rest.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fastload import FastLoader, PackedDataset


class Recipe:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.distributed = "RANK" in os.environ  # torchrun
        if self.distributed:
            dist.init_process_group("gloo")
        self.rank = dist.get_rank() if self.distributed else 0
        self.epochs_run = self.steps_run = 0
        self.seen: dict[int, list[int]] = {}

    def setup(self) -> None:
        torch.manual_seed(0)
        dataset = PackedDataset(self.args.file)
        classes = len(dataset.classes or ()) or 10
        self.model: nn.Module = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, classes))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.loader = FastLoader(dataset, self.args.batch_size, seed=7)
        if self.args.resume:
            self.load_checkpoint()
        if self.distributed:
            self.model = nn.parallel.DistributedDataParallel(self.model)

    def load_checkpoint(self) -> None:
        saved = torch.load(self.args.checkpoint, weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.loader.load_state_dict(saved["dataloader"])
        self.epochs_run, self.steps_run = saved["epochs_run"], saved["steps_run"]

    def save_checkpoint(self) -> None:
        """Taken between two steps of the optimizer, so that no gradient is lost."""
        state = self.loader.state_dict()
        if self.rank == 0 and self.args.checkpoint:
            model = self.model.module if self.distributed else self.model
            saved = {"model": model.state_dict(), "optimizer": self.optimizer.state_dict(), "dataloader": state}
            torch.save(saved | {"epochs_run": self.epochs_run, "steps_run": self.steps_run}, self.args.checkpoint)

    def train(self) -> None:
        accumulate = self.args.gradient_accumulation_steps
        for epoch in range(self.epochs_run, self.args.epochs):
            self.loader.set_epoch(epoch)  # the rest of it, where a state of it was loaded
            rows = self.seen[epoch] = []
            for number, batch in enumerate(self.loader, 1):
                images, labels = batch
                loss = nn.functional.cross_entropy(self.model(images.float() / 255), labels) / accumulate
                loss.backward()
                rows += batch.rows.tolist()
                if number % accumulate:
                    continue
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
                self.steps_run += 1
                if self.steps_run == self.args.max_steps:
                    return self.save_checkpoint()
            self.optimizer.zero_grad(set_to_none=True)  # of batches at the end that make no whole step
            self.epochs_run = epoch + 1
            self.save_checkpoint()
            print(f"epoch {epoch}, rank {self.rank}: {len(rows)} samples, last loss {loss.item() * accumulate:.3f}")

    def cleanup(self) -> None:
        if self.args.seen:
            Path(f"{self.args.seen}.{self.rank}").write_text(json.dumps(list(self.seen.values())))
        if self.distributed:
            # First: else the model keeps the group, whose end waits for gloo's threads while they may wait for the GIL.
            del self.model, self.optimizer
            dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=8, help="of each process")
    parser.add_argument("--gradient-accumulation-steps", type=int, default=2)
    parser.add_argument("--max-steps", type=int, default=0, help="save a checkpoint and stop after so many; 0: never")
    parser.add_argument("--checkpoint", help="file, written after each epoch")
    parser.add_argument("--resume", action="store_true", help="from the checkpoint")
    parser.add_argument("--seen", help="write here, as SEEN.RANK, the rows that each rank saw: a JSON list an epoch")
    recipe = Recipe(parser.parse_args())
    recipe.setup()
    recipe.train()
    recipe.cleanup()


if __name__ == "__main__":
    main()
