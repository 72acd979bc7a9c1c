"""Trains a small network from a packed file in a plain DataLoader; README.md shows what differs from an ImageFolder.

    fastload pack photos/ photos.h5
    python tools/examples/dataloader.py photos.h5

The classes are the names of the folders. Where there are the splits train and val, it trains on train.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fastload import ChunkSampler, PackedDataset


def augment(image: Tensor) -> Tensor:
    """A random square of an image, uint8 (3, H, W), as float32 (3, 128, 128)."""
    side = min(image.shape[1:])
    top, left = (int(torch.randint(length - side + 1, ())) for length in image.shape[1:])
    square = image[None, :, top : top + side, left : left + side] / 255
    return nn.functional.interpolate(square, (128, 128), mode="bilinear", antialias=True)[0]


def augmented(sample: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    image, label = sample
    return augment(image), label


def main(source: str) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dataset = PackedDataset(source, transform=augmented)
    if "train" in dataset.file.splits:
        dataset = PackedDataset(source, split="train", transform=augmented)
    loader = DataLoader(dataset, batch_size=32, sampler=ChunkSampler(dataset), num_workers=2)

    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, len(dataset.classes))]
    model = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.ReLU(), *pool).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main(sys.argv[1])
