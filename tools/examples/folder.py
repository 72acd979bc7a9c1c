"""Trains a small network on a folder of images that was packed; README.md shows what differs from an ImageFolder.

    fastload pack photos/ photos.h5
    python tools/examples/folder.py photos.h5

The classes are the names of the folders. Where there are the splits train and val, it trains on train.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

from fastload import FastLoader, PackedDataset
from fastload.transforms import Normalize, RandomHorizontalFlip, RandomResizedCrop

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def main(source: str) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dataset = PackedDataset(source)
    if "train" in dataset.file.splits:
        dataset = PackedDataset(source, split="train")
    augment = [RandomResizedCrop(128), RandomHorizontalFlip(), Normalize(MEAN, STD)]
    train = FastLoader(dataset, batch_size=32, device=device, transform=augment)

    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, len(dataset.classes))]
    model = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.ReLU(), *pool).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        for images, labels in train:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}")
        print(f"  {train.stats.fresh_samples_per_s:,.0f} images/s, stalled {train.stats.stall_share:.0%} of the time")


if __name__ == "__main__":
    main(sys.argv[1])
