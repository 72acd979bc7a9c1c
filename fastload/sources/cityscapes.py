"""Cityscapes: frames of drives through cities, and their fine (else coarse) masks.

    leftImg8bit/train/aachen/aachen_000000_000019_leftImg8bit.png
    gtFine/train/aachen/aachen_000000_000019_gtFine_labelIds.png            0..33
    gtFine/train/aachen/aachen_000000_000019_gtFine_labelTrainIds.png       0..18, 255 is ignored; made by its scripts
    gtFine/train/aachen/aachen_000000_000019_gtFine_instanceIds.png         label * 1,000 + number of the instance
    gtCoarse/train_extra/...                                                likewise

Masks are packed with the 19 classes that count, whichever of the first two files are there; with masks="instance" the
last are packed as they are. Masks of the split test hold no classes, and are not read.
"""

from __future__ import annotations

import re

import numpy as np

from fastload.sources.assemble import Draft, Samples
from fastload.sources.listing import SourceOptions
from fastload.sources.mask_classes import Classes
from fastload.sources.paired import MaskKind, Paired, list_paired
from fastload.sources.tree import Tree, key_of

LABELS = (
    "unlabeled", "ego vehicle", "rectification border", "out of roi", "static", "dynamic", "ground", "road", "sidewalk",
    "parking", "rail track", "building", "wall", "fence", "guard rail", "bridge", "tunnel", "pole", "polegroup",
    "traffic light", "traffic sign", "vegetation", "terrain", "sky", "person", "rider", "car", "truck", "bus",
    "caravan", "trailer", "train", "motorcycle", "bicycle",
)  # fmt: skip
"""The labels 0 to 33."""

LABEL_IDS = {i: LABELS[i] for i in (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)}
"""The value in `labelIds` files of each class that counts, in the order of `labelTrainIds`."""

VOID = 255
NO_INSTANCES = 65_535  # in masks of instances, for frames without one

_STEM = r"(?P<split>[^/]+)/[^/]+/(?P<key>\w+_\d{6}_\d{6})"
_IMAGE = re.compile(rf"(?:^|.*/)leftImg8bit/{_STEM}_leftImg8bit\.\w+")


def cityscapes_evidence(tree: Tree) -> list[str]:
    """Returns the first frame of a tree that is named as Cityscapes' are."""
    found = next((name for name in tree.names if "_leftImg8bit." in name and _IMAGE.fullmatch(name)), "")
    return [key_of(found)] if found else []


def list_cityscapes(draft: Draft, tree: Tree, options: SourceOptions) -> Samples:
    """Returns the frames, split by split, in the order of their names.

    Masks: 0..18 are the classes that count, 255 is `ignore_index`. Instance masks are uint16: below 1,000 the label
    of a region without single instances, stuff or a group of things; else label * 1,000 + number of the instance from
    0, so that the label is `value // 1000 if value >= 1000 else value` (attribute `label_divisor`); 65,535 is
    `ignore_index`. There are no columns.

    Raises:
        SourceError: there are no frames; in a split with masks, a frame without one; a mask without its frame (the
            latter two unless skipped); there are no masks, and they are asked for.
    """
    return list_paired(draft, tree, options, _CITYSCAPES)


def _path(folder: str, files: str) -> re.Pattern[str]:
    return re.compile(rf"(?:^|.*/){folder}/{_STEM}_gt(?:Fine|Coarse)_{files}\.png")


def _kind(folder: str, of: str) -> MaskKind:
    """Returns a kind of masks: fine or coarse ones, with the values of all labels or those that are trained with."""
    names, others = tuple(LABEL_IDS.values()), tuple(value for value in (*range(34), VOID) if value not in LABEL_IDS)
    shown = "0..18 as they are" if of == "TrainIds" else "the 19 classes that count as 0..18"
    return MaskKind(
        f"{folder}, files label{of}",
        _path(folder, f"label{of}"),
        of=folder,
        names=names,
        ignore_index=VOID,
        classes=None if of == "TrainIds" else Classes(tuple(LABEL_IDS), names, others),
        note=f"Masks: {folder}, files label{of}, {shown}, anything else is {VOID} and ignored.",
    )


def _instances(folder: str) -> MaskKind:
    return MaskKind(
        f"{folder}, files instanceIds",
        _path(folder, "instanceIds"),
        of=folder,
        names=LABELS,
        ignore_index=NO_INSTANCES,
        note=f"Masks: {folder}, files instanceIds as they are: label, or 1000 * label + number.",
        instances=True,
        attrs={"kind": "instance", "label_divisor": 1000},
        dtype=np.dtype(np.uint16),
    )


# Fine ones before coarse ones; values as trained with, if each frame has them.
_CITYSCAPES = Paired(
    image=_IMAGE,
    kinds=(
        *(_kind(folder, of) for folder in ("gtFine", "gtCoarse") for of in ("TrainIds", "Ids")),
        *map(_instances, ("gtFine", "gtCoarse")),
    ),
    absent="there are no frames such as leftImg8bit/train/aachen/..._leftImg8bit.png. Give the folder that holds "
    "leftImg8bit and gtFine.",
    where="gtFine or gtCoarse",
    without_masks=("test",),
)
