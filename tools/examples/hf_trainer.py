"""Hugging Face's Trainer on a packed file, on CPUs, with one process or several.

    python hf_trainer.py PACKED.h5
    torchrun --standalone --nproc-per-node 2 hf_trainer.py PACKED.h5

`get_train_dataloader` returns the loader as it is: `accelerator.prepare`, which shares out the batches of a DataLoader,
would cut it a second time. The loader may be made before the process group, and finds its rank at its first `iter()`.
To resume, the Trainer would read what it has seen once more and throw it away. Here the loader's own state is saved in
each checkpoint, and `ignore_data_skip` leaves the rest to it; steps of gradient accumulation have to divide an epoch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from fastload import FastLoader, PackedDataset


class AsDicts:
    """A loader whose batches are dicts: the arguments of the model's `forward`."""

    def __init__(self, loader: FastLoader) -> None:
        self.loader, self.dataset, self.set_epoch = loader, loader.dataset, loader.set_epoch
        self.seen: list[list[int]] = []

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        self.seen.append([])
        for batch in self.loader:
            images, labels = batch
            self.seen[-1] += batch.rows.tolist()
            yield {"pixel_values": images.float() / 255, "labels": labels}


class KeepsPosition(TrainerCallback):
    """Saves the loader's state in each checkpoint, and loads it from the one that training resumes from."""

    def __init__(self, loader: FastLoader, resume: str | None) -> None:
        self.loader, self.resume = loader, resume

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        if self.resume:  # not earlier: the Trainer counts the steps of whole epochs first
            self.loader.load_state_dict(json.loads(Path(self.resume, "loader.json").read_text()))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if state.is_world_process_zero:  # it is the same on every rank
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            (folder / "loader.json").write_text(json.dumps(self.loader.state_dict()))


class PackedTrainer(Trainer):
    def __init__(self, batches: AsDicts, resume: str | None, **options: object) -> None:
        super().__init__(train_dataset=batches.dataset, callbacks=[KeepsPosition(batches.loader, resume)], **options)
        self.batches = batches

    def get_train_dataloader(self) -> AsDicts:
        return self.batches


class Model(nn.Module):  # or one of transformers': AutoModelForImageClassification.from_pretrained(...)
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, classes))

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(pixel_values)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=8, help="of each process")
    parser.add_argument("--checkpoints", default="checkpoints", help="folder")
    parser.add_argument("--save-steps", type=int, default=500)
    parser.add_argument("--max-steps", type=int, default=-1, help="stop early")
    parser.add_argument("--resume", help="a checkpoint, such as checkpoints/checkpoint-500")
    parser.add_argument("--seen", help="write here, as SEEN.RANK, the rows that each rank saw: a JSON list an epoch")
    args = parser.parse_args()

    options = TrainingArguments(
        args.checkpoints, per_device_train_batch_size=args.batch_size, num_train_epochs=args.epochs, use_cpu=True,
        max_steps=args.max_steps, save_steps=args.save_steps, ignore_data_skip=True, report_to="none",
        disable_tqdm=True, remove_unused_columns=False, ddp_find_unused_parameters=False,
    )  # fmt: skip
    dataset = PackedDataset(args.file)
    batches = AsDicts(FastLoader(dataset, args.batch_size))
    trainer = PackedTrainer(batches, args.resume, model=Model(len(dataset.classes or ()) or 10), args=options)
    trainer.train(resume_from_checkpoint=args.resume)
    print(f"rank {options.process_index}: {[len(rows) for rows in batches.seen]} samples an epoch")
    if args.seen:
        Path(f"{args.seen}.{options.process_index}").write_text(json.dumps(batches.seen))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
