"""WebDataset: tar shards in which files that share a name up to its first dot are one sample.

    train-000000.tar     00000.jpg  00000.cls  00001.jpg  00001.cls  ...
    train-000001.tar     ...                  a folder of shards, or one shard

What follows the first dot of the base name, in lower case, is the field: `jpg` or another image, `cls` and its like
(an integer as text), `json` (its numbers), `npy` (arrays of one shape), `seg.png` (a mask). Nothing is unpickled.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.sources.absent_masks import fill_value
from fastload.sources.folder import ORDER, SPLITS
from fastload.sources.listing import Listing, Masks, OnError, first_few
from fastload.sources.options import SourceOptions
from fastload.sources.tree import Tree, is_image, key_of, open_tree
from fastload.sources.webdataset_fields import ARRAY, INTEGERS, JSON, PICKLES, collect_columns, kind_of
from fastload.sources.webdataset_samples import (
    Members,
    Sample,
    choose_images,
    group_samples,
    is_mask,
    open_shards,
    split_name,
)

_BESIDE_IMAGES = frozenset(("txt", JSON, ARRAY))  # tell only in a flat tar: in class folders too, they lie by images
_SEARCHED = 2**16  # members looked at for two of one sample that are not side by side


def webdataset_evidence(tree: Tree) -> list[str]:
    """Two members of the (first) tar that are fields of one sample; empty when none are.

    They lie side by side among its first members; or anywhere, where one is an image: then the listing says what is
    wrong with the shard, instead of images that lose their labels.
    """
    names, prefix = _first_names(tree)
    told = _told(names)
    parts = [(name, *split) for name in names if (split := split_name(name))]
    for (one, key, field), (other, next_key, next_field) in pairwise(parts):
        if key == next_key and not told.isdisjoint((kind_of(field), kind_of(next_field))):
            return [key_of(prefix + one), key_of(prefix + other)]
    if not any(map(is_image, names)) and not told.intersection(kind_of(field) for _, _, field in parts):
        return []
    names, prefix = _first_names(tree, _SEARCHED)
    told = _told(names) | PICKLES
    images = {split[0]: name for name in names if is_image(name) and (split := split_name(name))}
    for name in names:
        split = split_name(name)
        if split and split[0] in images and kind_of(split[1]) in told:
            return [key_of(prefix + images[split[0]]), key_of(prefix + name)]
    return []


def _told(names: list[str]) -> frozenset[str]:
    """The fields that tell: more where all members lie in one folder."""
    flat = len({name.rpartition("/")[0] for name in names}) == 1
    return INTEGERS | _BESIDE_IMAGES if flat else INTEGERS


def _first_names(tree: Tree, count: int = 64) -> tuple[list[str], str]:
    """The first members of a tar, or of the first tar in a folder without images, in its order; and their prefix."""
    from fastload.sources.archives import tar_order
    from fastload.sources.tars import first_names

    if tree.archive:
        return [tree.names[i] for i in tar_order(tree)[:count].tolist()], ""
    shards = [name for name in tree.names if name.lower().endswith(".tar")]
    if not shards or any(map(is_image, tree.names)):
        return [], ""
    return first_names(tree.path / Path(shards[0]), count), f"{shards[0]}/"


def list_webdataset(
    source: str | Path | Tree, *, on_error: OnError = "fail", options: SourceOptions | None = None
) -> Listing:
    """The listing of a shard's samples, or of all shards in a folder, in the order of the shards and in theirs.

    Columns: `labels` int64 (N,) of `cls` (or `class`, or a `label` in the json), others of the same kind by their
    names; every number of the json; arrays of the npy. Keys are the members that hold the images, below their shard.

    Raises:
        SourceError: fields of a sample that are not adjacent or there twice, a sample without a field that the others
            have, a pickle, a value that is none; several images in a sample and no word on which is the one.
    """
    tree = open_tree(source)
    options = options or SourceOptions()
    evidence = webdataset_evidence(tree)
    notes = [f"Layout webdataset, told by {first_few(evidence)}." if evidence else "Layout webdataset, as asked for."]
    members, skipped = open_shards(tree, on_error, notes)
    if lacking := _missing_shards(members.shards):
        notes.append(f"Shards are missing by the numbers of the others ({len(lacking)}): {first_few(lacking)}.")
    left: dict[int, str] = {}
    samples = group_samples(members, left, notes)
    if not samples:
        raise SourceError(f"{tree.path} holds no sample: no member is named like 00000.jpg. Is it the right folder?")
    counts = Counter(field for sample in samples for field in sample.fields)
    said = [f"{field} ({count})" for field, count in counts.most_common()]
    notes.append(f"{len(samples)} samples in shards ({len(members.shards)}), fields: {first_few(said, 12)}.")
    images = choose_images(tree, samples, counts, options.image_column, left, notes)
    columns = collect_columns(tree, members, samples, options.labels, on_error, left, notes)
    masks = None if options.masks == "none" else _choose_masks(samples, notes)
    packed = None if masks is None else _masks(members, masks, str(tree.given), notes)
    reasons = [(key_of(samples[i].name), why) for i, why in sorted(left.items())]
    if reasons and on_error == "fail":
        raise SourceError(
            f"{tree.path}: samples that are not as the others ({len(reasons)}): "
            f"{first_few([f'{key} {why}' for key, why in reasons], 3)}. Mend the shards, or leave those samples out "
            "with `--on-error skip`."
        )
    keep = np.array([i for i in range(len(samples)) if i not in left], np.int64)
    if len(keep) == 0:
        raise SourceError(f"{tree.path}: not one of the {len(samples)} samples can be packed: {reasons[0][1]}.")
    # What stands for a sample whose size and time are asked for: its image, else any of its members.
    shown = np.where(images >= 0, images, [next(iter(sample.fields.values())) for sample in samples])
    split, split_names = _splits(tree, members.shards, samples, notes)
    listing = Listing(
        layout="webdataset",
        keys=tuple(
            key_of(members.names[i] if i >= 0 else sample.name)
            for i, sample in zip(images.tolist(), samples, strict=True)
        ),
        split=split,
        split_names=split_names,
        columns=columns,
        notes=(*notes, *members.notes),
        sizes=members.sizes[shown],
        mtimes_ns=members.mtimes_ns[shown],
        files=members.files.take(images) if (images >= 0).any() else None,
        skipped=(*skipped, *reasons),
        masks=packed,
    )
    return _without_empty_splits(listing.take(keep[np.argsort(split[keep], kind="stable")]))


def _missing_shards(shards: list[str]) -> list[str]:
    """The shards between the first number and the last that are not there."""
    there: dict[tuple[str, int, str], set[int]] = {}
    for shard in shards:
        if found := re.fullmatch(r"(.*?)(\d+)(\D*)", shard, re.DOTALL):
            before, number, after = found.groups()
            there.setdefault((before, len(number), after), set()).add(int(number))
    lacking: list[str] = []
    for (before, width, after), numbers in there.items():
        if max(numbers) < 10 * len(numbers) + 10:  # else they are no numbers of shards but dates, say
            gaps = sorted(set(range(max(numbers))) - numbers) if min(numbers) <= 1 else []
            lacking += [key_of(f"{before}{number:0{width}d}{after.rstrip('/')}") for number in gaps if number]
    return lacking


def _choose_masks(samples: list[Sample], notes: list[str]) -> NDArray[np.int64] | None:
    """The member that is the mask of each sample, -1 where it has none; None when none has."""
    found = Counter(field for sample in samples for field in sample.fields if is_mask(field))
    if not found:
        return None
    (field, count), *others = found.most_common()
    notes.append(f"Masks: {field} ({count} of {len(samples)} samples).")
    if others:
        notes.append(f"Other masks are not packed: {first_few([name for name, _ in others])}.")
    return np.array([sample.fields.get(field, -1) for sample in samples], np.int64)


def _masks(members: Members, masks: NDArray[np.int64], where: str, notes: list[str]) -> Masks:
    files, present = members.files.take(masks), masks >= 0
    fill, filled = fill_value(files, present, where)
    notes += filled
    return Masks(files, present, ignore_index=fill)


def _splits(
    tree: Tree, shards: list[str], samples: list[Sample], notes: list[str]
) -> tuple[NDArray[np.uint8], tuple[str, ...]]:
    """The split of each sample, told by the names of folders and shards: train-000000.tar, val/000000.tar."""
    told = [_split_of(shard or tree.path.name) for shard in shards]
    if not all(told):
        if any(told):
            notes.append("Not every shard tells its split by its name: all are one split, `all`.")
        return np.zeros(len(samples), np.uint8), ("all",)
    names = tuple(name for name in ORDER if name in told)
    index = [names.index(name) for name in told]
    return np.array([index[sample.shard] for sample in samples], np.uint8), names


def _split_of(shard: str) -> str:
    return next((SPLITS[word] for word in re.findall("[a-z]+", shard.lower()) if word in SPLITS), "")


def _without_empty_splits(listing: Listing) -> Listing:
    present = np.unique(listing.split)
    return replace(
        listing,
        split=np.searchsorted(present, listing.split).astype(np.uint8),
        split_names=tuple(listing.split_names[i] for i in present.tolist()),
    )
