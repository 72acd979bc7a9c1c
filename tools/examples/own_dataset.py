"""Trains a small network from a Dataset of one's own in FastLoader; README.md shows what differs from a DataLoader.

    python tools/examples/own_dataset.py photos/

The classes are the names of the folders in photos/train/, or where that is not there in photos/.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

from fastload import FastLoader


class Photos(Dataset[tuple[Tensor, int]]):
    """Images of 128x128, uint8 (3, 128, 128), and the number of their class, by the folder that each is in."""

    def __init__(self, folder: Path) -> None:
        self.classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
        self.files = [path for name in self.classes for path in sorted(Path(folder, name).iterdir())]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = Image.open(self.files[index]).convert("RGB").resize((128, 128))
        return torch.from_numpy(np.array(image)).permute(2, 0, 1), self.classes.index(self.files[index].parent.name)


def main(folder: Path) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dataset = Photos(folder / "train" if Path(folder, "train").is_dir() else folder)
    loader = FastLoader(dataset, batch_size=32, workers=2, device=device)

    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, len(dataset.classes))]
    model = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.ReLU(), *pool).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images / 255), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
