"""Cityscapes: frames of drives through cities, and their fine (else coarse) masks.

    leftImg8bit/train/aachen/aachen_000000_000019_leftImg8bit.png
    gtFine/train/aachen/aachen_000000_000019_gtFine_labelIds.png            0..33
    gtFine/train/aachen/aachen_000000_000019_gtFine_labelTrainIds.png       0..18, 255 is ignored; made by its scripts
    gtFine/train/aachen/aachen_000000_000019_gtFine_instanceIds.png         see `cityscapes_instances`
    gtCoarse/train_extra/...                                                likewise

Masks are packed with the 19 classes that count, whichever of the first two files are there; with masks="instance" the
third are packed. Those of the split test hold no
classes, and are not read.
"""

from __future__ import annotations

import re
from dataclasses import replace

from fastload.errors import SourceError
from fastload.sources.assemble import Draft, Pairs, Samples
from fastload.sources.cityscapes_instances import of_instances
from fastload.sources.listing import SPLITS, SourceOptions
from fastload.sources.mask_classes import Classes, MappedMasks
from fastload.sources.tree import Tree, key_of

LABEL_IDS = {
    7: "road", 8: "sidewalk", 11: "building", 12: "wall", 13: "fence", 17: "pole", 19: "traffic light",
    20: "traffic sign", 21: "vegetation", 22: "terrain", 23: "sky", 24: "person", 25: "rider", 26: "car", 27: "truck",
    28: "bus", 31: "train", 32: "motorcycle", 33: "bicycle",
}  # fmt: skip
"""The value in `labelIds` files of each class that counts, in the order of `labelTrainIds`."""

VOID = 255

_IMAGE = re.compile(r"(?:^|.*/)leftImg8bit/(?P<split>[^/]+)/[^/]+/(?P<stem>\w+_\d{6}_\d{6})_leftImg8bit\.\w+")
_MASK = re.compile(
    r"(?:^|.*/)gt(?P<kind>Fine|Coarse)/(?P<split>[^/]+)/[^/]+/"
    r"(?P<stem>\w+_\d{6}_\d{6})_gt(?:Fine|Coarse)_(?:label(?P<of>Ids|TrainIds)|instanceIds)\.png"
)


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
    draft.leave_out_broken(tree)
    images, splits = dict[str, int](), dict[str, str]()
    for i in tree.images().tolist():
        if match := _IMAGE.fullmatch(tree.names[i]):
            if (other := images.setdefault(match["stem"], i)) != i:
                raise SourceError(
                    f"{tree.given}: {key_of(tree.names[other])} and {key_of(tree.names[i])} have the same name. Keep "
                    f"one of them: a frame is known by its name."
                )
            splits[match["stem"]] = SPLITS.get(match["split"], key_of(match["split"]))
    if not images:
        raise SourceError(
            f"{tree.given}: there are no frames such as leftImg8bit/train/aachen/..._leftImg8bit.png. Give the folder "
            f"that holds leftImg8bit and gtFine."
        )
    instance = options.masks == "instance"
    masks, of = ({}, "") if options.masks == "none" else _find_masks(draft, tree, splits, instance=instance)
    if options.masks in ("semantic", "instance") and not masks:
        raise SourceError(f"{tree.given}: there are no masks in gtFine or gtCoarse. Unpack them next to leftImg8bit/.")
    pairs = Pairs(tree, images, masks, splits)
    for split in pairs.splits_without_masks() if masks else ():
        draft.notes.append(f"The split {split!r} has no masks: it is packed without.")
    stems = pairs.complete(draft)
    samples = pairs.samples(stems, masked=bool(masks), names=tuple(LABEL_IDS.values()), ignore_index=VOID)
    if instance:
        return of_instances(samples)
    if samples.masks is None or of == "TrainIds":
        return samples
    others = tuple(value for value in (*range(34), VOID) if value not in LABEL_IDS)
    classes = Classes(tuple(LABEL_IDS), tuple(LABEL_IDS.values()), others)
    files = MappedMasks(samples.masks.files, None, classes, None, VOID)
    return replace(samples, masks=replace(samples.masks, files=files))


def _find_masks(draft: Draft, tree: Tree, splits: dict[str, str], *, instance: bool) -> tuple[dict[str, int], str]:
    """Returns stem -> position of the masks, and which values they hold: "Ids", "TrainIds" or, of instances, ""."""
    found: dict[tuple[str, str], dict[str, int]] = {}
    for i, name in enumerate(tree.names):
        if "_gt" in name and (match := _MASK.fullmatch(name)) and match["split"] != "test":
            found.setdefault((match["kind"], match["of"] or ""), {})[match["stem"]] = i
    wanted = {stem for stem, split in splits.items() if split != "test"}
    # Fine ones before coarse ones; values as trained with, if each frame has them.
    for kind in ("Fine", "Coarse"):
        if instance and (masks := found.get((kind, ""))):
            draft.notes.append(f"Masks: gt{kind}, files instanceIds as they are: label, or 1000 * label + number.")
            return masks, ""
        if instance:
            continue
        trained, plain = (found.get((kind, of), {}) for of in ("TrainIds", "Ids"))
        covered = {splits[stem] for stem in (*trained, *plain) if stem in splits}
        needed = {stem for stem in wanted if splits[stem] in covered}
        for of, masks in (("TrainIds", trained), ("Ids", plain)):
            if masks and (of == "Ids" or needed <= masks.keys()):
                shown = "0..18 as they are" if of == "TrainIds" else "the 19 classes that count as 0..18"
                draft.notes.append(f"Masks: gt{kind}, files label{of}, {shown}, anything else is {VOID} and ignored.")
                return masks, of
    draft.notes.append("There are no masks: no folder gtFine or gtCoarse.")
    return {}, ""
