"""Cityscapes: frames of drives through cities, and their fine (else coarse) masks.

    leftImg8bit/train/aachen/aachen_000000_000019_leftImg8bit.png
    gtFine/train/aachen/aachen_000000_000019_gtFine_labelIds.png            0..33
    gtFine/train/aachen/aachen_000000_000019_gtFine_labelTrainIds.png       0..18, 255 is ignored; made by its scripts
    gtCoarse/train_extra/...                                                likewise

Masks are packed with the 19 classes that count, whichever of the two files are there. Those of the split test hold no
classes, and are not read.
"""

from __future__ import annotations

import re

from fastload.sources.assemble import Draft, Samples
from fastload.sources.listing import SourceOptions
from fastload.sources.mask_classes import Classes
from fastload.sources.paired import MaskKind, Paired, list_paired
from fastload.sources.tree import Tree, key_of

LABEL_IDS = {
    7: "road", 8: "sidewalk", 11: "building", 12: "wall", 13: "fence", 17: "pole", 19: "traffic light",
    20: "traffic sign", 21: "vegetation", 22: "terrain", 23: "sky", 24: "person", 25: "rider", 26: "car", 27: "truck",
    28: "bus", 31: "train", 32: "motorcycle", 33: "bicycle",
}  # fmt: skip
"""The value in `labelIds` files of each class that counts, in the order of `labelTrainIds`."""

VOID = 255

_STEM = r"(?P<split>[^/]+)/[^/]+/(?P<key>\w+_\d{6}_\d{6})"
_IMAGE = re.compile(rf"(?:^|.*/)leftImg8bit/{_STEM}_leftImg8bit\.\w+")


def cityscapes_evidence(tree: Tree) -> list[str]:
    """Returns the first frame of a tree that is named as Cityscapes' are."""
    found = next((name for name in tree.names if "_leftImg8bit." in name and _IMAGE.fullmatch(name)), "")
    return [key_of(found)] if found else []


def list_cityscapes(draft: Draft, tree: Tree, options: SourceOptions) -> Samples:
    """Returns the frames, split by split, in the order of their names.

    Masks: 0..18 are the classes that count, 255 is `ignore_index`. There are no columns.

    Raises:
        SourceError: there are no frames; in a split with masks, a frame without one; a mask without its frame (the
            latter two unless skipped); there are no masks, and they are asked for.
    """
    return list_paired(draft, tree, options, _CITYSCAPES)


def _kind(folder: str, of: str) -> MaskKind:
    """Returns a kind of masks: fine or coarse ones, with the values of all labels or those that are trained with."""
    names, others = tuple(LABEL_IDS.values()), tuple(value for value in (*range(34), VOID) if value not in LABEL_IDS)
    shown = "0..18 as they are" if of == "TrainIds" else "the 19 classes that count as 0..18"
    return MaskKind(
        f"{folder}, files label{of}",
        re.compile(rf"(?:^|.*/){folder}/{_STEM}_gt(?:Fine|Coarse)_label{of}\.png"),
        of=folder,
        names=names,
        ignore_index=VOID,
        classes=None if of == "TrainIds" else Classes(tuple(LABEL_IDS), names, others),
        note=f"Masks: {folder}, files label{of}, {shown}, anything else is {VOID} and ignored.",
    )


# Fine ones before coarse ones; values as trained with, if each frame has them.
_CITYSCAPES = Paired(
    image=_IMAGE,
    kinds=tuple(_kind(folder, of) for folder in ("gtFine", "gtCoarse") for of in ("TrainIds", "Ids")),
    absent="there are no frames such as leftImg8bit/train/aachen/..._leftImg8bit.png. Give the folder that holds "
    "leftImg8bit and gtFine.",
    where="gtFine or gtCoarse",
    without_masks=("test",),
)
