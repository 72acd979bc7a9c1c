"""A training script of a common shape: `python script.py NUMBER --work FOLDER --out FILE [--change CHANGE]`.

Photos in a folder of classes, a Dataset with the usual augmentation, a DataLoader or a class derived from it, a network
trained on the CPU, often a validation after each epoch. What exactly, the number decides. FILE gets one JSON object:
the steps of the loop that trains in all epochs but the first, their seconds with the epochs' begins and ends, and the
quotient. A training has many epochs; in its first one, a FastLoader compares each row with its digest.

CHANGE is what somebody could do to it: `pack` (the photos packed, and loaded by FastLoader), `workers=N`, `persistent`,
`channels_last` (images brought into that memory format first in the loop).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

sys.path.append(str(Path(__file__).resolve().parents[1] / "planted"))
import files

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
NUM_PHOTOS = 96  # that differ; the folder has them again and again
CLASSES = "abcd"


@dataclass(frozen=True)
class Script:
    """What a number decides."""

    kind: str  # of loader: map, iterable, derived, together (samples of a batch asked for at once)
    validates: bool
    warms_up: bool  # a few steps over a loader of their own before
    two: bool  # a second loader in each step
    workers: int
    persistent: bool
    batch: int
    height: int
    width: int
    crop: int
    network: int  # width; 0: a light one
    steps: int
    epochs: int


def draw(number: int) -> Script:
    """Returns the script of a number."""
    rng = random.Random(f"script {number}")
    height = rng.choice([160, 240, 320, 480])
    return Script(
        kind=rng.choice(["map", "map", "iterable", "derived", "together"]),
        validates=rng.random() < 0.6,
        warms_up=rng.random() < 0.2,
        two=rng.random() < 0.2,
        workers=rng.choice([0, 1, 2, 2, 2, 4]),
        persistent=rng.random() < 0.3,
        batch=rng.choice([8, 16, 24, 32]),
        height=height,
        width=height * 4 // 3,
        crop=rng.choice([64, 96, 128, 160]),
        network=rng.choice([0, 0, 8, 16, 32]),
        steps=rng.choice([20, 30, 40]),
        epochs=rng.choice([2, 3]),
    )


class Photos(Dataset[tuple[torch.Tensor, int]]):
    """Photos, a random part of each, mirrored at random, normalized."""

    def __init__(self, root: Path, crop: int, *, train: bool = True) -> None:
        self.root, self.crop, self.train = str(root), crop, train
        self.paths = sorted(str(path) for path in root.glob("*/*.jpg"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path = self.paths[index]
        image = Image.open(path).convert("RGB")
        size = (self.crop, self.crop)
        if self.train:
            area = random.uniform(0.08, 1) * image.width * image.height
            ratio = random.uniform(3 / 4, 4 / 3)
            width = min(image.width, max(1, round((area * ratio) ** 0.5)))
            height = min(image.height, max(1, round((area / ratio) ** 0.5)))
            left, top = random.randint(0, image.width - width), random.randint(0, image.height - height)
            image = image.resize(size, Image.Resampling.BILINEAR, (left, top, left + width, top + height))
            if random.random() < 0.5:
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        else:
            image = image.resize(size, Image.Resampling.BILINEAR)
        values = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float().div(255)
        values = (values - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
        return values, CLASSES.index(Path(path).parent.name)


class Together(Photos):
    """The same, the samples of a batch asked for at once."""

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, int]]:
        return [self[index] for index in indices]


class Stream(IterableDataset[tuple[torch.Tensor, int]]):
    """The same, as a stream that workers divide."""

    def __init__(self, photos: Photos) -> None:
        self.photos = photos

    def __len__(self) -> int:
        return len(self.photos)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        info = get_worker_info()
        number, count = (info.id, info.num_workers) if info else (0, 1)
        for index in range(number, len(self.photos), count):
            yield self.photos[index]


class Counted(DataLoader[Any]):
    """A loader that somebody derived from torch's, to count its batches."""

    def __iter__(self) -> Any:
        for count, batch in enumerate(super().__iter__()):
            self.count = count
            yield batch


def folder_of(script: Script, work: Path, name: str, count: int) -> Path:
    """A folder of classes with that many photos, hard links to a few that differ."""
    paths = files.jpegs(work, NUM_PHOTOS, script.height, script.width)
    root = work / f"{name}-{count}-{script.height}"
    for number in range(count):
        link = root / CLASSES[number % len(CLASSES)] / f"{number:05d}.jpg"
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            os.link(paths[number % NUM_PHOTOS], link)
    return root


def loader_of(script: Script, root: Path, *, train: bool = True) -> Any:
    """The loader over a folder."""
    photos: Any = (Together if script.kind == "together" else Photos)(root, script.crop, train=train)
    stream = script.kind == "iterable"
    return (Counted if script.kind == "derived" else DataLoader)(
        Stream(photos) if stream else photos, batch_size=script.batch, shuffle=None if stream else train,
        num_workers=script.workers, persistent_workers=script.persistent and script.workers > 0, drop_last=train,
    )  # fmt: skip


def packed(script: Script, root: Path) -> Any:
    """A FastLoader over the same photos, packed."""
    from fastload import FastLoader, pack_images
    from fastload.transforms import Normalize, RandomHorizontalFlip, RandomResizedCrop

    path = root.with_suffix(".h5")
    if not path.exists():
        pack_images(root, path)
    transform = [RandomResizedCrop(script.crop), RandomHorizontalFlip(), Normalize(MEAN, STD)]
    return FastLoader(path, script.batch, transform=transform, ends="drop")


def network_of(width: int) -> nn.Module:
    """A convolutional network; 0: one that costs next to nothing."""
    if not width:
        return nn.Sequential(nn.AvgPool2d(16), nn.Flatten(), nn.LazyLinear(len(CLASSES)))
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 2, 1), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Conv2d(width, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, len(CLASSES)))


def run(script: Script, work: Path, change: str) -> dict[str, float]:
    """Trains, and tells how long the steps took."""
    root = folder_of(script, work, "train", script.steps * script.batch)
    train = packed(script, root) if change == "pack" else loader_of(script, root)
    checked = loader_of(script, folder_of(script, work, "val", 4 * script.batch), train=False)
    other = loader_of(script, folder_of(script, work, "other", script.steps * script.batch)) if script.two else None
    network = network_of(script.network)
    network(torch.zeros(2, 3, script.crop, script.crop))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        if change == "channels_last":
            images = images.contiguous(memory_format=torch.channels_last)
        loss = nn.functional.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    if script.warms_up:
        for images, labels in loader_of(script, folder_of(script, work, "val", 4 * script.batch)):
            step(images, labels)
    for epoch in range(script.epochs):
        if epoch < 2:
            steps, seconds = 0, 0.0  # of all epochs but the first
        if change == "pack":
            train.set_epoch(epoch)
        begin_s = time.perf_counter()
        more = iter(other) if other is not None else None
        for images, labels in train:
            step(images, labels)
            if more is not None and (batch := next(more, None)):
                step(*batch)
            steps += 1
        seconds += time.perf_counter() - begin_s
        if script.validates:
            network.eval()
            with torch.no_grad():
                right = sum(int((network(images).argmax(1) == labels).sum()) for images, labels in checked)
            network.train()
            torch.save({"network": network.state_dict(), "right": right}, work / f"saved-{os.getpid()}.pt")
    (work / f"saved-{os.getpid()}.pt").unlink(missing_ok=True)
    return {"steps": steps, "seconds": seconds, "step_s": seconds / steps}


def main() -> None:
    """Run the script that the command line names."""
    parser = argparse.ArgumentParser(description="A training script of a common shape.")
    parser.add_argument("number", type=int)
    parser.add_argument("--work", type=Path, required=True, help="folder for the files that it makes")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--change", default="", help="pack, workers=N, persistent or channels_last")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    script = draw(options.number)
    if options.change.startswith("workers="):
        script = Script(**{**vars(script), "workers": int(options.change.removeprefix("workers="))})
    elif options.change == "persistent":
        script = Script(**{**vars(script), "persistent": True})
    options.out.write_text(json.dumps(run(script, options.work, options.change)))


if __name__ == "__main__":
    main()
