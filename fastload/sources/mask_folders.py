"""Images and masks in sibling folders, or side by side in one folder, paired by the names of the files.

images/a.jpg, masks/a.png                        one split, `all`
images/train/a.jpg, masks/train/a.png            splits below
train/images/a.jpg, train/masks/a.png            splits above
train/a.jpg, train_masks/a_mask.gif              siblings named after the images' folder
a.jpg, a_mask.png                                in one folder

`pairing` finds out which files are masks, whatever their folders are called.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from fastload.errors import ImageError, OptionError, SourceError
from fastload.sources.assemble import Draft, Samples, fill_value, stem_of, values_in_masks
from fastload.sources.folder import folder_around, folders_in, split_word
from fastload.sources.listing import SourceOptions, first_few
from fastload.sources.mask_classes import COLOURS, Palette, parse_palette
from fastload.sources.paired import Found, MaskKind, Paired, add_file, list_paired
from fastload.sources.pairing import Pairing, files_of, find_pairs, pairs_of_photos, split_of_folder
from fastload.sources.signs import Sign, pack_command
from fastload.sources.tree import Tree, key_of
from fastload.sources.webdataset import webdataset_evidence
from fastload.system.advice import advice

_TABLES = (".csv", ".tsv", ".jsonl", ".parquet")


def mask_folders_evidence(tree: Tree) -> list[str]:
    """Returns an image of a tree and its mask, if it is certain which images are masks of which."""
    found = find_pairs(tree)
    if not found.pairs or found.doubts or found.unclear or _in_a_table(tree, found):
        return []
    return [key_of(tree.names[i]) for i in found.pairs[0].files[0]]


def doubtful_pairs(tree: Tree) -> list[Sign]:
    """Returns why it is likely, but not certain, that a tree holds images and masks; [] for neither.

    Nothing is said if masks are certain, or if a table names them. A sign against the layout `folder`, which would pack
    masks as photographs.
    """
    found = find_pairs(tree)
    if found.pairs and _in_a_table(tree, found):
        return []
    return [*found.unclear, *found.doubts] or pairs_of_photos(tree) or _splits_of_several(tree)


def _splits_of_several(tree: Tree) -> list[Sign]:
    """Returns the sign that folders are called by a split and something else, such as trainA, trainB, testA, testB."""
    folders = folders_in(tree, folder_around(tree))
    words = {folder: split_word(folder) for folder in folders}
    splits, rests = ({pair[at] for pair in words.values()} for at in (0, 1))
    if "" in splits | rests or not len(folders) == len(splits) * len(rests) == len(set(words.values())) > 3:
        return []
    if min(len(splits), len(rests)) < 2:
        return []
    shown, of = first_few(map(key_of, folders)), first_few(map(key_of, sorted(rests)))
    seen = f"{shown} are splits of {of}, and not each a class"
    one, split = key_of(min(rests)), "train" if "train" in splits else min(splits)
    return [
        Sign(
            seen,
            (
                f"for classes, folders {split}/{one}",
                f"for domains, {one}/{split}, and a file of each: {pack_command(tree.path / one)}",
            ),
        )
    ]


def _in_a_table(tree: Tree, found: Pairing) -> bool:
    """Whether a table names a mask, or samples of a WebDataset hold them: then these list the dataset."""
    tables = [i for i, name in tree.not_images if name.count("/") < 2 and name.lower().endswith(_TABLES)]
    mask = "/".join(tree.names[found.pairs[0].files[0][1]].split("/")[-2:]).encode("utf-8", "surrogateescape")
    # Parquet packs its cells; the names of its columns stand in it as they are.
    wanted = [b"mask" if tree.names[i].lower().endswith(".parquet") else mask for i in tables]
    return any(text in tree.files.read(i) for i, text in zip(tables, wanted, strict=True)) or (
        tree.archive and bool(webdataset_evidence(tree))
    )


def list_mask_folders(draft: Draft, tree: Tree, options: SourceOptions) -> Samples:
    """Returns images with their masks, split by split, in the order of their names.

    The meaning of the masks' values is unknown: classes have no names. There is an `ignore_index` only if a whole
    split has no masks: a value that no mask holds, mostly 255, fills its rows.

    Raises:
        SourceError: no image has a mask, or several; in a split with masks, an image without its mask; a mask without
            its image (the latter two unless skipped).
    """
    draft.leave_out_broken(tree)
    found = find_pairs(tree, options.mask_files)
    if options.masks != "none" and found.unclear:
        raise SourceError(f"{tree.given}: {found.unclear[0]}")
    draft.note(advice("mask files"), found.passed)
    fits = f"no mask fits `--mask-files {options.mask_files}`" if options.mask_files else "no image has a mask"
    doubts = "".join(f" {doubt}" for doubt in found.doubts)
    absent = (
        f"{fits} of the same name in a sibling folder, as images/a.jpg and masks/a.png, or next to it, as a.jpg and "
        f"a_mask.png. The names of masks may have one beginning or end in common.{doubts}"
    )
    palette = _palette(draft, tree) if found.colours and options.masks != "none" else ()
    files = _found(tree, found)
    tails = {match.mask.tail for match in found.pairs} - {""}
    _without_second_masks(draft, tree, files, tails, masked=options.masks != "none")
    folders = dict.fromkeys(folder for folder, _ in files.images)
    if len(inside := {_without_split(folder): folder for folder in folders}) > 1:
        draft.note("NOT READ: folders of images, as labels", [f"{key_of(folder)}/" for folder in inside.values()])
    spec = Paired((MaskKind(_MASKS, palette=palette),), absent, meaning=_meaning)
    return list_paired(draft, tree, options, spec, files)


def _without_split(folder: str) -> str:
    return "/".join(part for part in folder.split("/") if not split_of_folder(part))


_MASKS = "masks"
_LARGEST_PALETTE = 2**16  # bytes


def _meaning(draft: Draft, tree: Tree, kind: MaskKind, positions: list[int]) -> tuple[tuple[str, ...], int | None]:
    """Returns no names of classes, and the value for absent masks; notes values that masks hold."""
    at = np.array(positions, np.int64)
    fill = fill_value(draft, tree.files.take(np.maximum(at, 0)), at >= 0)
    if seen := [str(value) for value in values_in_masks(tree.files, at[at >= 0].tolist())]:
        draft.notes.append(f"Values in a sample of the masks: {first_few(seen, 24)}.")
    return (), fill


def _palette(draft: Draft, tree: Tree) -> Palette:
    """Returns the classes of a list of colours at the top, or one folder below, and notes it; () for none."""
    for i, name in tree.not_images:
        if name.count("/") < 2 and name.lower().endswith((".csv", ".txt")) and tree.sizes[i] < _LARGEST_PALETTE:
            with suppress(OptionError, ImageError):
                palette = parse_palette(tree.files.read(i), tree.where(i))
                known = {"count": len(palette), "file": key_of(name)}
                draft.notes.append(advice("other palette", colours=COLOURS, **known))
                return palette
    draft.notes.append(advice("palette", colours=COLOURS))
    return ()


def _found(tree: Tree, pairing: Pairing) -> Found:
    """Returns the images and masks of a pairing, by the images' folder and what their stems share."""
    found = Found({}, {}, {_MASKS: {}})
    for match in pairing.pairs:
        for place, i in files_of(tree, match.image):
            add_file(tree, found.images, (match.image.places[place], match.image_core(tree.names[i])), i)
        for place, i in files_of(tree, match.mask):
            folder = match.image.places.get(place, match.mask.places[place])
            add_file(tree, found.masks[_MASKS], (folder, match.mask_core(tree.names[i])), i)
    for group in pairing.without:
        for place, i in files_of(tree, group):
            add_file(tree, found.images, (group.places[place], stem_of(tree.names[i])), i)
    split_of = {folder: split_of_folder(folder) or "all" for folder in {folder for folder, _ in found.images}}
    found.splits.update({key: split_of[key[0]] for key in found.images})
    return found


def _without_second_masks(draft: Draft, tree: Tree, found: Found, tails: set[str], *, masked: bool) -> None:
    """Takes masks such as x_mask_1.png out of the images; if masks are packed, leaves out x.png, which has several."""
    for (folder, core), i in list(found.images.items()):
        for tail in tails:
            first = folder, core.partition(tail)[0]
            if tail not in core or first not in found.images:
                continue
            del found.images[folder, core]
            if masked:
                found.masks[_MASKS].pop(first, None)
                image = key_of(tree.names[found.images.pop(first)])
                draft.leave_out(image, f"has several masks, such as {key_of(tree.names[i])}: join them into one")
            break
