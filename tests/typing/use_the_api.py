"""A user's script, for `mypy --strict` only: the public API has the types that its documents promise."""

from __future__ import annotations

from pathlib import Path

import torch

import fastload
from fastload import FastLoader, PackedDataset, inspect_file, pack_images, verify_file
from fastload.transforms import CenterCrop, Normalize, RandomCrop, RandomHorizontalFlip

report = pack_images("photos", Path("out.h5"), size=(64, 48), fit="pad", on_error="skip")
count: int = report.num_samples
digest: str | None = inspect_file("out.h5").header_digest
sound: bool = verify_file("out.h5").ok

train = PackedDataset("out.h5", split="train", fields=("images", "labels"))
loader = FastLoader(
    train,
    batch_size=32,
    shuffle=fastload.ChunkWindow(8),
    ends="exact",
    share=(0, 2),
    transform=[RandomHorizontalFlip(), RandomCrop(48), CenterCrop(32), Normalize((0.5,), (0.2,), dtype=torch.bfloat16)],
    echo=2,
)
loader.set_epoch(1)
for batch in loader:
    images, labels = batch
    rows: torch.Tensor = batch.rows
    valid: torch.Tensor = batch.valid
    total: int = batch.global_valid
    loss = images.float().mean() + labels.sum() + rows[0] + valid.sum() / total
loader.load_state_dict(loader.state_dict())
stalled: float = loader.stats.stall_s
