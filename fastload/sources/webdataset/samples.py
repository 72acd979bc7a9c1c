"""Groups the members of WebDataset shards to samples, and chooses the file of each sample that is its image."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastload.errors import OptionError, SourceError
from fastload.sources.assemble import Draft
from fastload.sources.listing import Files, first_few
from fastload.sources.spans import JoinedFiles
from fastload.sources.tree import Tree, is_image, key_of

MASK_WORDS = frozenset("seg mask masks segmentation semantic semseg annotation".split())
"""Words before the suffix of an image that make it a mask: seg.png."""

_KEY = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)
_META = re.compile(r"__[^/]*__")


class Sample(NamedTuple):
    """One sample: its name (shard and key), its shard, and field -> member."""

    name: str
    shard: int
    fields: dict[str, int]


@dataclass(frozen=True, eq=False)
class GroupedSamples:
    """All samples of the shards, and their F members, one shard behind the other, each in its archive's order."""

    shards: list[str]  # prefix of the names of each shard; "" if the shard itself was given
    names: list[str]  # path of each member relative to what was given: shard.tar/member
    files: JoinedFiles  # reads the members
    sizes: NDArray[np.int64]  # (F,), bytes of each member
    mtimes_ns: NDArray[np.int64]  # (F,), time of modification of its shard
    samples: list[Sample]  # in the order of the shards
    counts: Counter[str]  # field -> number of samples that have it
    unusable: dict[int, str]  # index of a sample -> why it cannot be packed, the first reason; added to


def split_name(name: str) -> tuple[str, str] | None:
    """Returns the key (with folder) and the field (in lower case) of a member; None if it belongs to no sample."""
    match = _KEY.fullmatch(name)
    return (match[1], match[2].lower()) if match and not _META.fullmatch(name) else None


def is_picture(field: str) -> bool:
    """Whether a field is an image or mask, by its suffix."""
    return is_image(f".{field}")


def is_mask(field: str) -> bool:
    """Whether a field is a mask: seg.png."""
    return is_picture(field) and not MASK_WORDS.isdisjoint(field.split(".")[:-1])


def _open_shards(draft: Draft, tree: Tree) -> list[tuple[str, Tree]]:
    """Returns the shard given, or all shards in a folder, by the prefix of their members' names."""
    from fastload.sources.archives.archive import list_archive

    shards = [("", tree)]
    tree.known[:] = tree.archive
    if not tree.archive:
        positions = [i for i, name in tree.not_images if name.lower().endswith(".tar")]
        if not positions:
            packed = [name for name in tree.names if name.lower().endswith((".tar.gz", ".tgz"))]
            fix = f"Unpack them first (`gunzip {key_of(packed[0])}`)." if packed else "Is it the right folder?"
            raise SourceError(f"{tree.path} holds no shard: no .tar. {fix}")
        tree.known[positions] = True
        found = [tree.names[i] for i in positions]
        # By number, so that 9 precedes 10 even without leading zeros.
        found.sort(key=lambda name: [int(word) if word.isdecimal() else word for word in re.split(r"(\d+)", name)])
        shards = [(f"{name}/", list_archive(tree.path / Path(name))) for name in found]
    for prefix, shard in shards:
        draft.leave_out_broken(shard, key_of(prefix))
    draft.trees += [shard for _, shard in shards]
    there: dict[tuple[str, int, str], set[int]] = {}
    for prefix, _ in shards:
        if match := re.fullmatch(r"(.*?)(\d+)(\D*)", prefix, re.DOTALL):
            before, digits, after = match.groups()
            there.setdefault((before, len(digits), after), set()).add(int(digits))
    lacking: list[str] = []  # between the first and the last number
    for (before, width, after), numbers in there.items():
        if min(numbers) <= 1 and max(numbers) < 10 * len(numbers) + 10:  # else the numbers are dates or the like
            gaps = sorted(set(range(1, max(numbers))) - numbers)
            lacking += [key_of(f"{before}{number:0{width}d}{after.rstrip('/')}") for number in gaps]
    draft.note("Shards are missing by the numbers of the others", lacking)
    return shards


def group_samples(draft: Draft, tree: Tree) -> GroupedSamples:
    """Returns the samples of the shard given, or of all shards in a folder; raises as `_open_shards` does."""
    from fastload.sources.archives.archive import tar_order

    shards = _open_shards(draft, tree)
    names: list[str] = []
    parts: list[tuple[Files, int]] = []
    sizes, mtimes_ns = [], []
    samples: list[Sample] = []
    unusable: dict[int, str] = {}
    known: dict[str, int] = {}
    others: list[str] = []
    for number, (prefix, shard) in enumerate(shards):
        order = tar_order(shard)
        if not tree.archive and len(order) < len(shard.names):
            raise SourceError(f"{tree.path}: a shard is not a tar but a zip named so. Move it away.")
        parts.append((shard.files.take(order), len(order)))
        sizes.append(shard.sizes[order])
        mtimes_ns.append(shard.mtimes_ns[order])
        for i in order.tolist():
            name, split = prefix + shard.names[i], split_name(shard.names[i])
            names.append(name)
            if split is None:
                others.append(key_of(name))
                continue
            whole, field = prefix + split[0], split[1]
            if not samples or samples[-1].name != whole:
                if whole in known:
                    why = f"has fields that are not adjacent in the shard: {key_of(name)} is elsewhere"
                    unusable[known[whole]] = why
                    continue
                known[whole] = len(samples)
                samples.append(Sample(whole, number, {}))
            if samples[-1].fields.setdefault(field, len(names) - 1) != len(names) - 1:
                unusable[len(samples) - 1] = f"has the field {field!r} twice"
    draft.note("Members that are no fields of a sample were ignored", others)
    return GroupedSamples(
        shards=[prefix for prefix, _ in shards],
        names=names,
        files=JoinedFiles.of(parts),
        sizes=np.concatenate(sizes),
        mtimes_ns=np.concatenate(mtimes_ns),
        samples=samples,
        counts=Counter(field for sample in samples for field in sample.fields),
        unusable=unusable,
    )


def choose_images(draft: Draft, grouped: GroupedSamples, wanted: str) -> NDArray[np.int64]:
    """Returns the member that is the image of each sample, -1 for a sample without one.

    `wanted` is the field that the user names as the image; "" to find it.

    Raises:
        OptionError: no sample has the field wanted.
        SourceError: a sample has several images.
    """
    samples, counts = grouped.samples, grouped.counts
    pictures = [field for field in counts if is_picture(field) and not is_mask(field)]
    if wanted:
        if wanted.lower() not in counts:
            there = first_few(sorted(counts))
            raise OptionError(f"{draft.where}: no sample has the field --image-column {wanted!r}; there are {there}.")
        pictures = [wanted.lower()]
    else:
        _leave_out_dotted(grouped)
    images = np.full(len(samples), -1, np.int64)
    passed: Counter[str] = Counter()
    for i, sample in enumerate(samples):
        here = [field for field in pictures if field in sample.fields]
        plain = [field for field in here if "." not in field]
        if len(here) > 1 and len(plain) == 1:  # 0.jpg and 0.thumb.jpg
            passed.update(set(here) - {plain[0]})
            here = plain
        if len(here) > 1 and i not in grouped.unusable:
            said = ", ".join(f"{field} ({counts[field]})" for field in sorted(pictures))
            raise SourceError(
                f"{draft.where}: the sample {key_of(sample.name)} has {len(here)} images; its shards have the fields "
                f"{said}. Say which one to pack: `--image-column {here[0]}`."
            )
        if here:
            images[i] = sample.fields[here[0]]
    if passed:
        draft.notes.append(f"Further images of samples were not packed: {first_few(sorted(passed))}.")
    if (images >= 0).any():
        for i in np.flatnonzero(images < 0).tolist():
            grouped.unusable.setdefault(i, f"has no image, only {first_few(sorted(samples[i].fields))}")
    return images


def _leave_out_dotted(grouped: GroupedSamples) -> None:
    """Notes samples cut at a dot in the stem of their files as unusable: a_0.5.jpg is the field 5.jpg of a_0."""
    samples, counts = grouped.samples, grouped.counts
    rare = {field for field, count in counts.items() if 2 * count < len(samples) and is_picture(field)}
    dotted = {field for field in counts if "." in field}
    odd = {field for field in dotted if field[0].isdecimal() or (field in rare and not is_mask(field))}
    why = (
        "its files have a dot before their suffix, and the key ends at the first one (rename the files, or say which "
        "field is the image with `--image-column`)"
    )
    for i, sample in enumerate(samples) if odd else ():
        if found := sorted(odd.intersection(sample.fields)):
            grouped.unusable.setdefault(i, f"has the field {found[0]!r}: {why}")
