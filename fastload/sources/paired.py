"""Datasets of images and masks in files of the same name: each is a `Paired` value, which `list_paired` lists."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np

from fastload.errors import SourceError
from fastload.format.ragged import Column
from fastload.sources.assemble import Draft, Pairs, Samples
from fastload.sources.listing import SPLITS, SourceOptions, first_few
from fastload.sources.mask_classes import Classes, MappedMasks, Palette
from fastload.sources.tree import Tree, key_of

Key = tuple[str, ...]
"""The key that an image and its mask share: a stem, behind the folder where that counts."""


@dataclass(frozen=True)
class MaskKind:
    """One kind of masks that a dataset may have."""

    name: str  # of the folder or files, for notes
    pattern: re.Pattern[str] | None = None  # of their paths, with the images' groups; None: found otherwise
    of: str = ""  # kinds of one `of` show the same, and the first that all images have is taken; "": any is
    names: tuple[str, ...] = ()  # of the classes
    ignore_index: int | None = None
    classes: Classes | None = None  # what stands for each class, if it is not its number
    palette: Palette = ()  # colours of classes that lie next to the masks, if these are colours
    note: str = ""  # sentence on the values
    instances: bool = False  # whether they are of instances, which are packed only if these are asked for
    attrs: dict[str, Any] = field(default_factory=dict)  # further HDF5 attributes
    dtype: np.dtype[Any] | None = None  # as in `Masks`


@dataclass(frozen=True, eq=False)
class Found:
    """The images and masks of a tree."""

    images: dict[Key, int]  # key -> position
    splits: dict[Key, str]  # key -> split, of images
    masks: Mapping[str, dict[Key, int]]  # name of a kind -> key -> position


Meaning = Callable[[Draft, Tree, MaskKind, list[int]], tuple[tuple[str, ...], int | None]]
"""Returns names of classes and `ignore_index`, given the positions of the masks to pack, -1 where there is none."""


@dataclass(frozen=True)
class Paired:
    """A dataset of images and masks."""

    kinds: tuple[MaskKind, ...]  # in the order in which they are preferred
    absent: str  # message where there are no images: what is missing, and what to give
    where: str = "a folder of masks"  # lie
    # Path of an image, with a group `key`; maybe `split`, and `place`, the folder that counts. None: found otherwise.
    image: re.Pattern[str] | None = None
    # A group `root` of it must be the same for all images; where it is none, any is.
    only_splits: bool = False  # whether images in folders that are called like no split are none of the dataset
    without_masks: tuple[str, ...] = ()  # splits whose masks hold no classes, and are not read
    every_split: bool = False  # whether images without masks are an error, though the whole split has none
    meaning: Meaning | None = None  # None: as the kind of masks says
    # Checks the keys to list against lists of the dataset, and returns those that stay.
    check: Callable[[Draft, Tree, Found, list[Key]], list[Key]] | None = None
    columns: Callable[[Draft, Tree, Found, list[Key]], dict[str, Column]] | None = None


def list_paired(draft: Draft, tree: Tree, options: SourceOptions, spec: Paired, found: Found | None = None) -> Samples:
    """Returns the images of a dataset with their masks, split by split, in the order of their names.

    Args:
        found: its images and masks, if they are not found by patterns of paths.

    Raises:
        SourceError: there are no images; two have one name; in a split with masks, an image without its mask; a mask
            without its image (the latter two unless skipped); there are no masks, and they are asked for.
    """
    if found is None:
        draft.leave_out_broken(tree)
        found = _find(tree, spec)
    if not found.images:
        raise SourceError(f"{tree.given}: {spec.absent}")
    masked = options.masks != "none"
    kind = _chosen(draft, found, spec, instances=options.masks == "instance") if masked else None
    if kind is None and options.masks in ("semantic", "instance"):
        of = " of instances" if options.masks == "instance" else ""
        raise SourceError(f"{tree.given}: there is no mask{of} in {spec.where}. Unpack them next to the images.")
    pairs = Pairs(tree, found.images, found.masks[kind.name] if kind else {}, found.splits)
    kept = pairs.complete(draft, every_split=spec.every_split) if masked else list(found.images)
    if kind:
        draft.further = "; `--masks none` packs all images without masks"
    if kind and not spec.every_split and (without := sorted(pairs.splits_without_masks())):
        draft.notes.append(f"Splits without masks: {', '.join(without)}; they are packed without.")
    for at in (found.images, *found.masks.values()):
        tree.known[list(at.values())] = True
    if spec.check:
        kept = spec.check(draft, tree, found, kept)
    columns = spec.columns(draft, tree, found, kept) if spec.columns else None
    names, ignore = (kind.names, kind.ignore_index) if kind else ((), None)
    if kind and spec.meaning:
        names, ignore = spec.meaning(draft, tree, kind, [pairs.masks.get(key, -1) for key in kept])
    samples = pairs.samples(kept, columns, masked=kind is not None, names=names, ignore_index=ignore)
    if kind is None or samples.masks is None:
        return samples
    files = samples.masks.files
    files = files if kind.classes is None else MappedMasks(files, None, kind.classes, None, ignore)
    masks = replace(samples.masks, files=files, palette=kind.palette, attrs=kind.attrs, dtype=kind.dtype)
    return replace(samples, masks=masks)


def add_file(tree: Tree, to: dict[Key, int], key: Key, i: int) -> None:
    """Adds file i to those with a key; two with the same are refused."""
    if (other := to.setdefault(key, i)) != i:
        raise SourceError(
            f"{tree.given}: {key_of(tree.names[other])} and {key_of(tree.names[i])} have the same name. Keep one of "
            "them, or move one away: an image and its mask are known by their name."
        )


def _find(tree: Tree, spec: Paired) -> Found:
    """Returns the images and masks whose paths fit the patterns of a dataset."""
    found, roots = Found({}, {}, {kind.name: {} for kind in spec.kinds}), set[str]()
    for i in tree.images().tolist():
        for kind in spec.kinds:
            match = kind.pattern.fullmatch(tree.names[i]) if kind.pattern else None
            if match and _split(match, spec) not in (None, *spec.without_masks):
                add_file(tree, found.masks[kind.name], _key(match), i)
            if match:
                break
        else:
            match = spec.image.fullmatch(tree.names[i]) if spec.image else None
            split = _split(match, spec) if match else None
            if match and split is not None:
                add_file(tree, found.images, _key(match), i)
                found.splits[_key(match)] = split
                roots |= {root for root in (match.groupdict().get("root"),) if root is not None}
    if len(roots) > 1:
        shown = first_few(sorted(key_of(root) or "." for root in roots))
        raise SourceError(f"{tree.given}: images lie in several places, {shown}. Give the one to pack.")
    if not spec.every_split:
        return found
    # Only folders that have a folder of masks are of the dataset.
    paired = {key[0] for masks in found.masks.values() for key in masks} & {key[0] for key in found.images}
    images = {key: at for key, at in found.images.items() if key[0] in paired}
    masks = {name: {key: at for key, at in of.items() if key[0] in paired} for name, of in found.masks.items()}
    folder_of: dict[str, str] = {}
    for folder, split in sorted({(key[0], found.splits[key]) for key in images}):
        if (other := folder_of.setdefault(split, folder)) != folder:
            raise SourceError(
                f"{tree.given}: {key_of(other)}/ and {key_of(folder)}/ are both the split {split!r}. Give one."
            )
    return Found(images, found.splits, masks)


def _key(match: re.Match[str]) -> Key:
    groups = match.groupdict()
    return (groups["place"], groups["key"]) if "place" in groups else (groups["key"],)


def _split(match: re.Match[str], spec: Paired) -> str | None:
    """Returns the split of a path; None if it is of none, and the dataset has no other images."""
    name = match.groupdict().get("split") or ""
    return SPLITS.get(name.lower(), None if spec.only_splits else key_of(name))


def _chosen(draft: Draft, found: Found, spec: Paired, *, instances: bool) -> MaskKind | None:
    """Returns the kind of masks to pack, of instances or not; None if there are no such masks."""
    there = [kind for kind in spec.kinds if found.masks[kind.name] and kind.instances == instances]
    if not there:
        draft.notes.append(f"There are no masks: no folder {spec.where}.")
        return None
    alike = list(next(kinds for _, kinds in groupby(there, key=lambda kind: kind.of or kind.name)))
    covered = {found.splits[key] for kind in alike for key in found.masks[kind.name] if key in found.splits}
    needed = {key for key, split in found.splits.items() if split in covered}
    chosen = next((kind for kind in alike if needed <= found.masks[kind.name].keys()), alike[-1])
    if others := [kind.name for kind in there if kind is not chosen]:
        draft.notes.append(f"Read the masks in {chosen.name}, not those in {first_few(others)}.")
    if chosen.note:
        draft.notes.append(chosen.note)
    return chosen
