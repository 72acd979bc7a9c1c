"""Transforms of image batches, on whatever device the batch is, drawn anew for each sample, epoch and echo.

Adding one: a class with `apply` and `geometric` (see `spec.py`) in a module of its own, its mirrored test, and its name
here.
"""

from fastload.transforms.draws import Draws
from fastload.transforms.geometry import CenterCrop, RandomCrop, RandomHorizontalFlip
from fastload.transforms.normalize import Normalize
from fastload.transforms.pipeline import apply_transforms, check_pipeline
from fastload.transforms.spec import GeometricTransform, ImageSpec, Transform

__all__ = [
    "CenterCrop",
    "Draws",
    "GeometricTransform",
    "ImageSpec",
    "Normalize",
    "RandomCrop",
    "RandomHorizontalFlip",
    "Transform",
    "apply_transforms",
    "check_pipeline",
]
