"""Images and their masks in two folders side by side, paired by the names of the files.

images/a.jpg, masks/a.png                        one split, `all`
images/train/a.jpg, masks/train/a.png            splits below
train/images/a.jpg, train/masks/a.png            splits above
train/a.jpg, train_masks/a_mask.gif              siblings named after the images' folder
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fastload.errors import OptionError, SourceError
from fastload.sources.absent_masks import fill_value
from fastload.sources.folder import ANNOTATIONS as MASKS
from fastload.sources.folder import IMAGES, SPLITS
from fastload.sources.listing import Listing, OnError, first_few
from fastload.sources.options import SourceOptions
from fastload.sources.paired import Contradictions, assemble, masks_at, split_path, stem_of, told_by, values_seen
from fastload.sources.tree import Tree, key_of, open_tree

_ENDS = tuple("annot _annot _mask _masks _label _labels _gt".split())
_TABLES = (".csv", ".tsv", ".jsonl")
_BEHIND_FOLDER = re.compile(rf"(.+?)(?:{'|'.join(_ENDS)})")
_BEHIND_STEM = re.compile(r"_(?:mask|masks|label|labels|gt|seg|segmentation|annot)$", re.IGNORECASE)


def mask_folders_evidence(tree: Tree) -> list[str]:
    """The first image of a tree that has a mask of its name in a sibling folder, and that mask."""
    pairs = _find_pairs(tree)
    for place, image in pairs.images.items():
        if place in pairs.masks:
            mask = tree.names[pairs.masks[place]]
            return [] if _in_a_table(tree, mask) else [key_of(tree.names[image]), key_of(mask)]
    return []


def _in_a_table(tree: Tree, mask: str) -> bool:
    """Whether a table beside the folders names the mask: then the table knows more than the folders do."""
    tables = [i for i, name in enumerate(tree.names) if name.lower().endswith(_TABLES) and "/" not in name]
    return any(mask.encode("utf-8", "surrogateescape") in tree.files.read(i) for i in tables)


def list_mask_folders(
    source: str | Path | Tree, *, on_error: OnError = "fail", options: SourceOptions | None = None
) -> Listing:
    """The listing of images with the masks of the same name, split by split, in the order of their names.

    What the values of the masks mean is not known: they have no names, and no `ignore_index` unless a split has no
    masks at all (then a value that no mask holds, mostly 255, which fills its rows).

    Raises:
        OptionError: instance masks are asked for: which kind they are is not known.
        SourceError: there are no such pairs; an image of a split with masks without its own, or a mask without its
            image (unless skipped).
    """
    options = options or SourceOptions()
    if options.masks == "instance":
        raise OptionError("Of masks in a folder it is not known of which kind they are. Accepted here: auto or none.")
    tree = open_tree(source)
    found = Contradictions(tree, on_error)
    evidence = mask_folders_evidence(tree)
    if not evidence:
        raise SourceError(
            f"{tree.given}: no image has a mask of the same name beside it, as images/a.jpg and masks/a.png. "
            f"Folders of masks are called {', '.join(sorted(MASKS))}, or as the images' with _mask or annot behind."
        )
    notes = [told_by("mask-folders", evidence)]
    pairs = _find_pairs(tree)
    images, masks = pairs.images, pairs.masks
    if pairs.twice:
        raise SourceError(
            f"{tree.given}: files that differ only in their suffix, so that it is not known which one is meant "
            f"({len(pairs.twice)}): {first_few(pairs.twice)}. Move one of each away."
        )
    split_of = {place: _split(place) for place in images}
    with_masks = {split_of[place] for place in images if place in masks}
    rows = []
    for place, position in images.items():
        if split_of[place] in with_masks and place not in masks:
            found.add(key_of(tree.names[position]), "has no mask")
        else:
            rows.append(place)
    for place, position in masks.items():
        if place not in images and place[-1] not in found.unreadable:
            found.add(key_of(tree.names[position]), "is a mask without its image")
    used = {*images.values(), *masks.values()}
    others = [key_of(tree.names[i]) for i in tree.images().tolist() if i not in used]
    if others:
        notes.append(f"Ignored images outside the pairs of folders ({len(others)}): {first_few(others)}.")
    mask_positions = [masks.get(place, -1) for place in rows]
    wanted = options.masks != "none"
    absent = sorted({split_of[place] for place in rows} - with_masks)
    fill = None
    if wanted:
        at = np.array(mask_positions, np.int64)
        fill, filled = fill_value(tree.files.take(np.maximum(at, 0)), at >= 0, str(tree.given))
        notes += [f"Splits without masks: {', '.join(absent)}.", *filled] if absent else []
        seen = [str(value) for value in values_seen(tree, [at for at in mask_positions if at >= 0])]
        if seen:
            notes.append(f"Values in a sample of the masks: {first_few(seen, 24)}. What they mean is not known.")
    return assemble(
        tree,
        "mask-folders",
        images=[images[place] for place in rows],
        splits=[split_of[place] for place in rows],
        columns={},
        notes=notes,
        skipped=found.settle(),
        masks=masks_at(tree, mask_positions, ignore_index=fill) if wanted else None,
        mask_positions=mask_positions if wanted else None,
    )


def _split(place: tuple[str, ...]) -> str:
    return next((SPLITS[part.lower()] for part in place[:-1] if part.lower() in SPLITS), "all")


@dataclass
class _Pairs:
    """Positions of images and masks by their place: the path without the part that tells the role, and the suffix."""

    images: dict[tuple[str, ...], int]
    masks: dict[tuple[str, ...], int]
    twice: list[str]


def _find_pairs(tree: Tree) -> _Pairs:
    pairs = _Pairs({}, {}, [])
    parts = {f"{folder}/": folder.split("/") for folder in tree.folders}
    parts_seen = {part for each in parts.values() for part in each}
    role_of = {folder: _role(each, parts_seen) for folder, each in parts.items()}
    if len({role[0] for role in role_of.values() if role}) < 2:
        return pairs
    positions = tree.images().tolist()
    folders = [split_path(tree.names[i])[0] for i in positions]
    for i, folder in zip(positions, folders, strict=True):
        role = role_of.get(folder)  # none for files that lie outside of any folder
        if role is None:
            continue
        kind, above = role
        stem = stem_of(tree.names[i])
        places = pairs.images if kind == "image" else pairs.masks
        place = (*above, stem if kind == "image" else _BEHIND_STEM.sub("", stem))
        if places.setdefault(place, i) != i:
            pairs.twice.append(f"{key_of(tree.names[places[place]])} and {key_of(tree.names[i])}")
    return pairs


def _role(parts: list[str], parts_seen: set[str]) -> tuple[str, tuple[str, ...]] | None:
    """What the files of a folder are, "image" or "mask", and the folder without the part that says so."""
    for at, part in enumerate(parts):
        without = (*parts[:at], *parts[at + 1 :])
        behind = _BEHIND_FOLDER.fullmatch(part)
        if part.lower() in MASKS:
            return "mask", without
        if behind and behind[1] in parts_seen:
            return "mask", without if behind[1].lower() in IMAGES else (*parts[:at], behind[1], *parts[at + 1 :])
        if part.lower() in IMAGES:
            return "image", without
    if any(f"{part}{end}" in parts_seen for part in parts for end in _ENDS):
        return "image", tuple(parts)
    return None
