"""Does a network learn as well from pixels of several sizes, and from stored JPEGs, as from the folder itself?

    python benchmarks/bench_accuracy.py            about fifteen minutes on two cores, 0.7 GB of disk in .bench
    python benchmarks/bench_accuracy.py --quick    tiny sizes, to see that it runs; the figures mean nothing

The clothing photos of `--photos` (splits train and test, ten classes; ../shared/data/clothing/clothing.tar by default)
train the small residual network of tools/models.py: RandomResizedCrop(96) of at least a quarter of the area, a flip,
the same steps, learning rates and seeds for each source:

`folder`: JPEG files, decoded and cropped by Pillow in a plain DataLoader with two workers.
`raw`, `source`, `jpeg:90`: packed with that `--store`, by FastLoader.

The accuracy is that of the test split, Resize(110) and CenterCrop(96), from the very source.
"""

from __future__ import annotations

import math
import multiprocessing
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import DataLoader, Dataset

import fastload
import harness
from bench_augment import drawn_window
from fastload import FastLoader, PackedDataset
from fastload.transforms import CenterCrop, Normalize, RandomHorizontalFlip, RandomResizedCrop, Resize
from models import SmallResNet  # beside the scripts that users start from

SIDE, SCALE, BATCH_SIZE = 96, (0.25, 1.0), 64
NORMALIZE = Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
TRAINING = [RandomResizedCrop(SIDE, scale=SCALE), RandomHorizontalFlip(), NORMALIZE]
STEADY = [Resize(110), CenterCrop(SIDE), NORMALIZE]
SOURCES = ("folder", "raw", "source", "jpeg:90")
Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


class Folder(Dataset[tuple[torch.Tensor, int]]):
    """A split of the folder, as torchvision's ImageFolder and transforms would give it."""

    def __init__(self, folder: Path, *, training: bool) -> None:
        classes = sorted(path.name for path in folder.iterdir())
        self.files = [(path, classes.index(path.parent.name)) for path in sorted(folder.rglob("*.jpg"))]
        self.training = training

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.files[index]
        with Image.open(path) as file:
            photo = file.convert("RGB")
        if self.training:
            top, left, height, width = drawn_window(photo.height, photo.width, SCALE)
            photo = photo.crop((left, top, left + width, top + height)).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
            if random.random() < 0.5:
                photo = photo.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        else:
            factor = 110 / min(photo.size)
            photo = photo.resize((round(photo.width * factor), round(photo.height * factor)), Image.Resampling.BILINEAR)
            left, top = (photo.width - SIDE) // 2, (photo.height - SIDE) // 2
            photo = photo.crop((left, top, left + SIDE, top + SIDE))
        return torch.from_numpy(np.array(photo)).permute(2, 0, 1), label


class Source:
    """Batches of one of the sources, normalized float32 (B, 3, 96, 96) and labels."""

    def __init__(self, name: str, folder: Path, data: Path, seed: int) -> None:
        self.name = name
        if name == "folder":
            torch.manual_seed(seed)
            self.train = DataLoader(
                Folder(folder / "train", training=True), BATCH_SIZE, shuffle=True, num_workers=2, drop_last=True
            )
            self.test = DataLoader(Folder(folder / "test", training=False), BATCH_SIZE, num_workers=2)
        else:
            path = data / f"accuracy-{name.replace(':', '')}.h5"
            if not path.exists():
                fastload.pack_images(folder, path, store=name)
            self.fast = FastLoader(PackedDataset(path, "train"), BATCH_SIZE, seed=seed, transform=TRAINING)
            self.steady = FastLoader(
                PackedDataset(path, "test"), BATCH_SIZE, shuffle=False, ends="pad", transform=STEADY
            )

    @property
    def steps(self) -> int:
        """Batches of an epoch."""
        return len(self.train if self.name == "folder" else self.fast)

    def batches(self) -> Batches:
        """One epoch of training."""
        return self._normalized(self.train) if self.name == "folder" else iter(self.fast)  # type: ignore[return-value]

    def accuracy(self, model: torch.nn.Module) -> float:
        """Of the test split."""
        model.eval()
        right = number = 0
        with torch.no_grad():
            if self.name == "folder":
                for images, labels in self._normalized(self.test):
                    right += int((model(images).argmax(1) == labels).sum())
                    number += len(labels)
            else:
                for batch in self.steady:
                    right += int(((model(batch[0]).argmax(1) == batch[1]) & batch.valid).sum())
                    number += int(batch.valid.sum())
        model.train()
        return right / number

    def _normalized(self, loader: DataLoader[Any]) -> Batches:
        for images, labels in loader:
            mean, std = (torch.tensor(values).view(3, 1, 1) for values in (NORMALIZE.mean, NORMALIZE.std))
            yield (images.float() / 255 - mean) / std, labels


def learnt(source: Source, epochs: int, seed: int) -> float:
    """Accuracy after so many epochs from scratch."""
    torch.manual_seed(seed)
    random.seed(seed)
    model = SmallResNet(3, 10, 16).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.02)
    steps, step = epochs * source.steps, 0
    for _ in range(epochs):
        for images, labels in source.batches():
            rate = 3e-3 * min((step + 1) / (steps / 20), 0.5 * (1 + math.cos(math.pi * step / steps)))
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss = F.cross_entropy(model(images), labels, label_smoothing=0.05)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            step += 1
    return source.accuracy(model)


def main() -> None:
    """Train from each source with each seed."""
    parser = harness.command_line("Compare what is learnt from a folder and from packed files.", "accuracy")
    shared = harness.ROOT.parent / "shared" / "data" / "clothing" / "clothing.tar"
    parser.add_argument("--photos", type=Path, default=shared, help="folder or tar with the splits train and test")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    if options.quick:
        options.epochs, options.seeds = 1, 1
    multiprocessing.set_start_method("forkserver")
    folder = harness.unpacked_photos(options.photos, options.data)
    folder = next(path.parent for path in [folder / "train", *folder.glob("*/train")] if path.is_dir())
    journal = harness.begin(options, "epochs")
    found: dict[str, list[float]] = {name: [] for name in SOURCES}
    seconds: dict[str, list[float]] = {name: [] for name in SOURCES}
    for seed in range(options.seeds):
        for name in SOURCES:
            begun = time.perf_counter()
            found[name].append(learnt(Source(name, folder, options.data, seed), options.epochs, seed))
            seconds[name].append(time.perf_counter() - begun)
            print(f"seed {seed}, {name}: {found[name][-1]:.1%} in {seconds[name][-1]:.0f} s", flush=True)
    for name in SOURCES:
        journal.note(f"accuracy-{name}", accuracy=harness.spread(found[name]), seconds=harness.spread(seconds[name]))


if __name__ == "__main__":
    main()
