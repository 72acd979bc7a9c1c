"""A user's script, for `mypy --strict` only: the public API has the types that its documents promise."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.utils.data import DataLoader, DistributedSampler, Sampler

import fastload
from fastload import (
    ChunkBatchSampler,
    ChunkSampler,
    DistributedChunkSampler,
    FastLoader,
    PackedDataset,
    inspect_file,
    pack_images,
    verify_file,
    write_report,
)
from fastload.transforms import (
    CenterCrop,
    ColorJitter,
    CutMix,
    MixUp,
    Normalize,
    RandAugment,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
)

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
described: str = loader.describe()
kept = FastLoader(
    "out.h5",
    256,
    share="node",
    device="cuda",
    cache="auto",
    transform=(
        RandomResizedCrop(224, scale=(0.2, 1)),
        RandAugment(num_ops=2, magnitude=9),
        ColorJitter(brightness=0.4, hue=(-0.1, 0.1)),
        RandomErasing(value="random"),
        Resize((64, 48), max_size=None),
        Normalize([0.5], [0.2], torch.float16),
        MixUp(alpha=0.2, num_classes=10),
        CutMix(num_classes=10),
    ),
)
stalled: float = loader.stats.stall_s
diagnosis = fastload.diagnose(loader, lambda batch: None, seconds=1.0)
print(diagnosis.verdict.cause, diagnosis.measured.samples_per_s, diagnosis)
write_report(fastload.Meter().measured(title="mine"), "report.html", force=True)

everything: Sampler[int] = ChunkSampler(train, shuffle="full", seed=1)
share: DistributedSampler[int] = DistributedChunkSampler(train, 2, 0, True, 1, drop_last=True)
share.set_epoch(2)
for position in ChunkSampler(train):
    sample = train[position]
mixed = FastLoader(train, 32, echo=fastload.MixedEcho(2, distance=4))
automatic = FastLoader(train, 32, echo="auto")
factor: int = automatic.stats.echo
adapting = FastLoader(train, 32, workers="auto")
patient = FastLoader(train, 32, workers=fastload.Workers("auto", timeout=30))
padded = FastLoader(train, 32, batch=fastload.Pad(multiple=32, group_by="aspect"))
listed = FastLoader(fastload.PackedDataset("out.h5", read="pread", check="always", on_damage="skip"), 32, batch="list")
unpacked: PackedDataset = PackedDataset.from_folder("photos", cache_dir=Path("packed"), on_damage="skip")
balanced = FastLoader(train, 32, shuffle=fastload.Weighted.balanced("labels", 0.5, num_samples=1000))
weighted: Sampler[int] = ChunkSampler(train, fastload.Weighted([1.0, 2.0], replacement=False))
compared: Sampler[list[int]] = ChunkBatchSampler(
    train, 32, num_workers=4, shuffle=fastload.ClassBatches(classes=8, samples=4, field="labels")
)
in_turns: Sampler[list[int]] = ChunkBatchSampler(train, 32, num_workers=4, shuffle=fastload.ChunkWindow(8))
plain = DataLoader(train, batch_size=32, sampler=everything, num_workers=4)
by_batches = DataLoader(train, batch_sampler=ChunkBatchSampler(train, 32, num_workers=4), num_workers=4)
with fastload.Meter(device="cpu", sample_every_s=0.5, ranges=True) as meter:
    meter.record("run.jsonl")
    for one in meter.watch(loader):
        rate: float = meter.headspace(lambda batch: None, one)
waited: float = meter.totals.wait_s
sentence: str = meter.verdict.sentence
meter.write_csv(Path("steps.csv"), force=True)
found: dict[str, object] = meter.measured("training").to_dict()
resumed = ChunkBatchSampler(train, 32, num_workers=4)
resumed.load_state_dict(resumed.state_dict(batches_done=0))
