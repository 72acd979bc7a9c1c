"""WebDataset: tar shards in which the files that share a name up to its first dot are one sample.

    train-000000.tar     00000.jpg  00000.cls  00001.jpg  00001.cls  ...
    train-000001.tar     ...                  a folder of shards, or one shard

The part of the base name behind the first dot, in lower case, is the field: `jpg` or another image, `cls` and the like
(an integer as text), `json` (its numbers), `npy` (arrays of one shape), `seg.png` (a mask). Nothing is unpickled.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np

from fastload.errors import SourceError
from fastload.sources.assemble import Draft, Samples, Splits, fill_value
from fastload.sources.listing import Masks, SourceOptions, first_few, split_of_shard
from fastload.sources.tree import Tree, is_image, key_of
from fastload.sources.webdataset.fields import ARRAY, INTEGERS, JSON, PICKLES, collect_columns, kind_of
from fastload.sources.webdataset.samples import (
    GroupedSamples,
    Sample,
    choose_images,
    group_samples,
    is_mask,
    split_name,
)

# These fields mark a shard only without folders: class folders may hold them too.
_MARKING_IF_FLAT = frozenset(("txt", JSON, ARRAY))
_SEARCHED = 2**16  # members searched for two of one sample that are not adjacent


def webdataset_evidence(tree: Tree) -> list[str]:
    """Returns two members of the (first) tar that are fields of one sample; nothing if there are none.

    They are adjacent among its first members; or anywhere, if one is an image: then listing the shard reports that its
    fields are not adjacent, while as a folder of images it would lose its labels.
    """
    names, prefix = _first_names(tree)
    marking = _marking_fields(names)
    parts = [(name, *split) for name in names if (split := split_name(name))]
    for (one, key, field), (other, next_key, next_field) in pairwise(parts):
        if key == next_key and not marking.isdisjoint((kind_of(field), kind_of(next_field))):
            return [key_of(prefix + one), key_of(prefix + other)]
    if not any(map(is_image, names)) and not marking.intersection(kind_of(field) for _, _, field in parts):
        return []
    names, prefix = _first_names(tree, _SEARCHED)
    marking = _marking_fields(names) | PICKLES
    images = {split[0]: name for name in names if is_image(name) and (split := split_name(name))}
    for name in names:
        split = split_name(name)
        if split and split[0] in images and kind_of(split[1]) in marking:
            return [key_of(prefix + images[split[0]]), key_of(prefix + name)]
    return []


def _marking_fields(names: list[str]) -> frozenset[str]:
    """Returns the fields that mark a WebDataset shard; more if all members lie in one folder."""
    flat = len({name.rpartition("/")[0] for name in names}) == 1
    return INTEGERS | _MARKING_IF_FLAT if flat else INTEGERS


def _first_names(tree: Tree, count: int = 64) -> tuple[list[str], str]:
    """Returns the first members, in order, of a tar or of the first tar in a folder without images; their prefix."""
    from fastload.sources.archives.archive import tar_order
    from fastload.sources.archives.tar import first_names

    if tree.archive:
        return [tree.names[i] for i in tar_order(tree)[:count].tolist()], ""
    shards = [name for _, name in tree.not_images if name.lower().endswith(".tar")]
    if not shards or len(tree.images()):
        return [], ""
    return first_names(tree.path / Path(shards[0]), count), f"{shards[0]}/"


def list_webdataset(draft: Draft, tree: Tree, options: SourceOptions) -> Samples:
    """Returns the samples of a shard, or of all shards in a folder, in their order.

    Columns: `labels` int64 (N,) from `cls` (or `class`, or `label` in the json); other integer fields by their names;
    every number of the json; arrays of the npy. Keys are the members that hold the images, below their shard.

    Raises:
        SourceError: fields of a sample are not adjacent or occur twice, a sample lacks a field that most have, a field
            is a pickle or has a wrong value (these unless skipped); a sample has several images and no option says
            which to pack.
    """
    grouped = group_samples(draft, tree)
    samples = grouped.samples
    if not samples:
        raise SourceError(f"{tree.path} holds no sample: no member is named like 00000.jpg. Is it the right folder?")
    said = [f"{field} ({count})" for field, count in grouped.counts.most_common()]
    draft.notes.append(f"{len(samples)} samples in shards ({len(grouped.shards)}), fields: {first_few(said, 12)}.")
    images = choose_images(draft, grouped, options.image_column)
    columns = collect_columns(draft, grouped, options)
    masks = None if options.masks == "none" else _masks(draft, grouped)
    draft.leave_out_all(
        [(key_of(samples[i].name), why) for i, why in sorted(grouped.unusable.items())],
        "samples that are not as the others",
        "Fix the shards, or leave those samples out",
    )
    splits = _splits(draft, tree, grouped.shards, samples)
    keep = np.array([i for i in range(len(samples)) if i not in grouped.unusable], np.int64)
    present = np.unique(splits.index[keep])
    names = tuple(splits.names[i] for i in present.tolist())
    # The member whose size and time stand for the sample: its image, else any of its members.
    shown = np.where(images >= 0, images, [next(iter(sample.fields.values())) for sample in samples])
    named = [grouped.names[i] if i >= 0 else sample.name for i, sample in zip(images.tolist(), samples, strict=True)]
    return Samples(
        keys=list(map(key_of, named)),
        files=grouped.files.take(images) if (images >= 0).any() else None,
        sizes=grouped.sizes[shown],
        mtimes_ns=grouped.mtimes_ns[shown],
        splits=Splits(np.searchsorted(present, splits.index).astype(np.uint8), names),
        columns=columns,
        masks=masks,
        rows=keep[np.argsort(splits.index[keep], kind="stable")],
    )


def _masks(draft: Draft, grouped: GroupedSamples) -> Masks | None:
    """Returns the masks of all samples, in the field that most of them have; None if there are none."""
    found = Counter({field: count for field, count in grouped.counts.items() if is_mask(field)})
    if not found:
        return None
    (field, count), *others = found.most_common()
    draft.notes.append(f"Masks: {field} ({count} of {len(grouped.samples)} samples).")
    if others:
        draft.notes.append(f"Other masks are not packed: {first_few([name for name, _ in others])}.")
    at = np.array([sample.fields.get(field, -1) for sample in grouped.samples], np.int64)
    files, present = grouped.files.take(at), at >= 0
    return Masks(files, present, ignore_index=fill_value(draft, files, present))


def _splits(draft: Draft, tree: Tree, shards: list[str], samples: list[Sample]) -> Splits:
    """Returns the split of each sample, by names of shards and folders: train-000000.tar, val/000000.tar."""
    splits = [split_of_shard(shard or tree.path.name) for shard in shards]
    if all(splits):
        return Splits.of([splits[sample.shard] for sample in samples])
    if any(splits):
        draft.notes.append("Not every shard names its split: all are one split, `all`.")
    return Splits.one(len(samples))
