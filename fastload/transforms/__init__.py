"""Transforms of image batches, on the CPU or a GPU, drawn anew for each sample, epoch and echo.

Input: the fields of a batch, images (B, C, H, W) in channels_last memory, and `Draws`. Output: new tensors; masks,
boxes and points follow the images.

Read first: `spec` (the protocols), then `draws` (random numbers that depend on the sample and not on its batch) and any
module of transforms, such as `geometry`; `engine` runs lists of them.

Adding one: a class with `apply` and `geometric` (see `spec`) in a module of its own, its mirrored test, and its name
here. Imports `errors`, `system` and `images`; nothing of files, loaders or threads.
"""

from fastload.transforms.colour import ColorJitter, Grayscale, RandomGrayscale
from fastload.transforms.draws import Draws
from fastload.transforms.engine.pipeline import apply_transforms, check_pipeline
from fastload.transforms.erasing import Cutout, RandomErasing
from fastload.transforms.geometry import (
    CenterCrop,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
)
from fastload.transforms.mixup import CutMix, MixUp
from fastload.transforms.normalize import Normalize
from fastload.transforms.policy import RandAugment, RandomApply, RandomChoice
from fastload.transforms.spec import BatchTransform, GeometricTransform, ImageSpec, Transform

__all__ = [
    "BatchTransform",
    "CenterCrop",
    "ColorJitter",
    "CutMix",
    "Cutout",
    "Draws",
    "GeometricTransform",
    "Grayscale",
    "ImageSpec",
    "MixUp",
    "Normalize",
    "RandAugment",
    "RandomApply",
    "RandomChoice",
    "RandomCrop",
    "RandomErasing",
    "RandomGrayscale",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "RandomVerticalFlip",
    "Resize",
    "Transform",
    "apply_transforms",
    "check_pipeline",
]


def __dir__() -> list[str]:
    return sorted(__all__)
