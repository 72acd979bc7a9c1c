"""torchvision's ImageFolder in torch's DataLoader, as its documentation shows it: what most have today.

It reads the image files themselves also where others read stored pixels, since that is what its users have.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peers.adapters import _torch
from peers.work import MEAN, RATIO, SCALE, STD, Work

REQUIREMENTS = ("torchvision==0.28.0",)
PACKS = False
ANTIALIASED = True


def versions() -> dict[str, str]:
    """Versions of torchvision and Pillow."""
    return _torch.versions_of("torchvision", "pillow")


def supports(work: Work) -> str:
    """All, from image files."""
    return ""


def settings(work: Work) -> list[dict[str, Any]]:
    """Worker processes."""
    return _torch.worker_settings(2, 4, 1)


class Loader(_torch.DataLoaderEpochs):
    """ImageFolder with transforms on Pillow's images, and torch's own collation."""

    def __init__(self, work: Work, path: Path, settings: dict[str, Any], seed: int) -> None:
        import torch
        from torch.utils.data import default_collate

        _torch.import_torchvision()
        from torchvision.datasets import ImageFolder
        from torchvision.transforms import v2

        steps: list[Any] = []
        if work.crop is not None:
            steps.append(v2.RandomResizedCrop(work.crop, SCALE, RATIO))
        if work.transform == "random_resized_crop_flip_normalize":
            steps.append(v2.RandomHorizontalFlip())
        steps.append(v2.PILToTensor())
        if work.dtype == "float32":
            steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
        super().__init__(
            ImageFolder(str(work.data.folder), v2.Compose(steps)), work, settings, seed, collate=default_collate
        )
