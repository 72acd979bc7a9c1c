"""Images and masks in sibling folders, paired by the names of the files.

images/a.jpg, masks/a.png                        one split, `all`
images/train/a.jpg, masks/train/a.png            splits below
train/images/a.jpg, train/masks/a.png            splits above
train/a.jpg, train_masks/a_mask.gif              siblings named after the images' folder
"""

from __future__ import annotations

import re

import numpy as np

from fastload.errors import SourceError
from fastload.sources.assemble import Draft, Pairs, Samples, fill_value, split_path, stem_of, values_in_masks
from fastload.sources.folder import ANNOTATION_FOLDERS, IMAGE_FOLDERS
from fastload.sources.listing import SourceOptions, first_few, split_of_parts
from fastload.sources.tree import Tree, key_of

_ENDS = tuple("annot _annot _mask _masks _label _labels _gt".split())
_TABLES = (".csv", ".tsv", ".jsonl")
_BEHIND_FOLDER = re.compile(rf"(.+?)(?:{'|'.join(_ENDS)})")
_BEHIND_STEM = re.compile(r"_(?:mask|masks|label|labels|gt|seg|segmentation|annot)$", re.IGNORECASE)


def mask_folders_evidence(tree: Tree) -> list[str]:
    """Returns the first image of a tree that has a mask of the same name in a sibling folder, and that mask."""
    pairs, _ = _find_pairs(tree)
    for pair, image in pairs.images.items():
        if pair in pairs.masks:
            mask = tree.names[pairs.masks[pair]]
            # If a table at the top names the mask, the dataset is listed by the table.
            tables = [i for i, name in enumerate(tree.names) if name.lower().endswith(_TABLES) and "/" not in name]
            in_a_table = any(mask.encode("utf-8", "surrogateescape") in tree.files.read(i) for i in tables)
            return [] if in_a_table else [key_of(tree.names[image]), key_of(mask)]
    return []


def list_mask_folders(draft: Draft, tree: Tree, options: SourceOptions) -> Samples:
    """Returns images with their masks, split by split, in the order of their names.

    The meaning of the masks' values is unknown: classes have no names. There is an `ignore_index` only if a whole
    split has no masks: a value that no mask holds, mostly 255, fills its rows.

    Raises:
        SourceError: no image has a mask; in a split with masks, an image without its mask; a mask without its image
            (the latter two unless skipped).
    """
    evidence = mask_folders_evidence(tree)
    draft.leave_out_broken(tree)
    if not evidence:
        raise SourceError(
            f"{tree.given}: no image has a mask of the same name in a sibling folder, as images/a.jpg and masks/a.png. "
            f"Folders of masks are called {', '.join(sorted(ANNOTATION_FOLDERS))}, or as the folder of images with "
            "_mask or annot appended."
        )
    pairs, twice = _find_pairs(tree)
    if twice:
        raise SourceError(
            f"{tree.given}: files that differ only in their suffix, so that pairs are ambiguous ({len(twice)}): "
            f"{first_few(twice)}. Move one of each away."
        )
    kept = pairs.complete(draft)
    pairs.note_others(draft)
    masked, fill = options.masks != "none", None
    if masked:
        at = np.array([pairs.masks.get(key, -1) for key in kept], np.int64)
        if without := sorted(pairs.splits_without_masks()):
            draft.notes.append(f"Splits without masks: {', '.join(without)}.")
        fill = fill_value(draft, tree.files.take(np.maximum(at, 0)), at >= 0)
        if seen := [str(value) for value in values_in_masks(tree.files, at[at >= 0].tolist())]:
            draft.notes.append(f"Values in a sample of the masks: {first_few(seen, 24)}.")
    return pairs.samples(kept, masked=masked, ignore_index=fill)


def _find_pairs(tree: Tree) -> tuple[Pairs[tuple[str, ...]], list[str]]:
    """Returns the pairs by the parts of their path without suffix and without images/ or masks/, and what is ambiguous.

    The latter are files that have the path of another.
    """
    images: dict[tuple[str, ...], int] = {}
    masks: dict[tuple[str, ...], int] = {}
    twice: list[str] = []
    parts = {f"{folder}/": folder.split("/") for folder in tree.folders}
    parts_seen = {part for each in parts.values() for part in each}
    role_of = {folder: _role(each, parts_seen) for folder, each in parts.items()}
    if len({role[0] for role in role_of.values() if role}) < 2:
        return Pairs(tree, images, masks, {}), twice
    for i in tree.images().tolist():
        role = role_of.get(split_path(tree.names[i])[0])  # None for files at the top
        if role is None:
            continue
        (kind, above), stem = role, stem_of(tree.names[i])
        found, pair = (images, (*above, stem)) if kind == "image" else (masks, (*above, _BEHIND_STEM.sub("", stem)))
        if found.setdefault(pair, i) != i:
            twice.append(f"{key_of(tree.names[found[pair]])} and {key_of(tree.names[i])}")
    return Pairs(tree, images, masks, {pair: split_of_parts(pair[:-1]) or "all" for pair in images}), twice


def _role(parts: list[str], parts_seen: set[str]) -> tuple[str, tuple[str, ...]] | None:
    """Returns what a folder holds, "image" or "mask", and its path without the part that says so; None if neither."""
    for at, part in enumerate(parts):
        without = (*parts[:at], *parts[at + 1 :])
        behind = _BEHIND_FOLDER.fullmatch(part)
        if part.lower() in ANNOTATION_FOLDERS:
            return "mask", without
        if behind and behind[1] in parts_seen:
            return "mask", without if behind[1].lower() in IMAGE_FOLDERS else (*parts[:at], behind[1], *parts[at + 1 :])
        if part.lower() in IMAGE_FOLDERS:
            return "image", without
    if any(f"{part}{end}" in parts_seen for part in parts for end in _ENDS):
        return "image", tuple(parts)
    return None
