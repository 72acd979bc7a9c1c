"""Transforms of image batches, on whatever device the batch is, drawn anew for each sample, epoch and echo.

Adding one: a class with `apply` and `geometric` (see `spec.py`) in a module of its own, its mirrored test, and its name
here.
"""

from fastload.transforms.colour import ColorJitter, Grayscale, RandomGrayscale
from fastload.transforms.draws import Draws
from fastload.transforms.erasing import Cutout, RandomErasing
from fastload.transforms.geometry import CenterCrop, RandomCrop, RandomHorizontalFlip, RandomVerticalFlip
from fastload.transforms.mixing import CutMix, MixUp
from fastload.transforms.normalize import Normalize
from fastload.transforms.pipeline import apply_transforms, check_pipeline
from fastload.transforms.policy import RandAugment
from fastload.transforms.resized import RandomResizedCrop, Resize
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
