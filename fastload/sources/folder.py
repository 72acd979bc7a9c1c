"""Folders of images: one folder for each class, with or without train, val and test above; or images alone.

    photos/cat/1.jpg                labels by folder, one split "all"
    photos/train/cat/1.jpg          labels and splits
    photos/test/1.jpg               a split without labels: -1, if other splits have them
    photos/1.jpg                    no labels at all

The same in a .zip or .tar; a single folder that holds everything is skipped there.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.format.ragged import Column
from fastload.sources.assemble import Draft, Samples, Splits
from fastload.sources.foreign import foreign_format
from fastload.sources.listing import SPLIT_ORDER, SPLITS, SourceOptions, first_few
from fastload.sources.tree import IMAGE_SUFFIXES, Tree, key_of

IMAGE_FOLDERS = frozenset("image images img imgs input inputs jpegimages".split())
"""Names, in lower case, of a folder that holds all images while its siblings hold annotations."""

ANNOTATION_FOLDERS = frozenset(
    "mask masks label labels annotation annotations annot gt groundtruth ground_truth segmentation segmentations "
    "segmentationclass seg target targets".split()
)
"""Names, in lower case, of such siblings."""


def folder_evidence(tree: Tree) -> list[str]:
    """Returns the first images of a tree: any tree with images is a folder of images."""
    return [key_of(tree.names[i]) for i in tree.images()[:3].tolist()]


def list_folder(draft: Draft, tree: Tree, options: SourceOptions) -> Samples:
    """Returns images in class folders, split by split, class by class, in sorted order.

    Column `labels`: int64 (N,), index into the sorted names of the classes of all splits; -1 in a split without class
    folders; no such column if no split has class folders.

    Raises:
        SourceError: there is no image; a class is empty; images lie next to class folders, or other folders with
            images next to splits.
    """
    draft.leave_out_broken(tree)
    rows = find_images(tree)
    if len(rows) < len(tree.names):
        draft.note("Ignored, since they are no images by their suffix", tree.others(rows.tolist()))
    names = [tree.names[i] for i in rows.tolist()]
    around = folder_around(names, tree.archive)
    if around:
        draft.notes.append(f"Everything lies in {key_of(around)}, which is no class.")
    inside = [name.removeprefix(around) for name in names]
    folders = _split_folders(draft, tree, around, inside)
    splits, prefixes = ["all"] * len(names), {"all": around}
    if folders:
        split_of = {folder: split for split, folder in folders.items()}
        splits = [split_of[name.partition("/")[0]] for name in inside]
        inside = [name.partition("/")[2] for name in inside]
        prefixes = {split: f"{around}{folder}/" for split, folder in folders.items()}
    split = Splits.of(splits)
    number: dict[str, int] = {}  # of each folder, in the order in which they come; "" for none
    parts = (name.partition("/") for name in inside)
    numbers = np.array([number.setdefault(top if rest else "", len(number)) for top, _, rest in parts], np.int64)
    tops = np.array(list(number), object)
    present = {name: set(tops[np.unique(numbers[split.index == i])]) for i, name in enumerate(split.names)}
    for name, here in present.items():
        if "" in here and len(here) > 1:
            images = zip(inside, splits, strict=True)
            direct = [key_of(image) for image, of in images if of == name and "/" not in image]
            raise SourceError(
                f"{_place(tree, prefixes[name])}: images lie next to class folders ({len(direct)}): "
                f"{first_few(direct)}. Move each into its class, or away: their class is not known."
            )
    classes = _classes(draft, tree, prefixes, {name: here - {""} for name, here in present.items()})
    index = {name: i for i, name in enumerate(classes)}
    labels = np.array([index.get(top, -1) for top in number], np.int64)[numbers]
    order = np.lexsort((labels, split.index))  # stable: within a class, the order of the tree remains
    shown = tuple(map(key_of, classes))
    said = f"classes by folder ({len(shown)}): {first_few(shown)}."
    if not shown:
        said = "images without class folders, so without labels."
    if folders:
        said += f" Splits: {', '.join(f'{split} (folder {key_of(folder)})' for split, folder in folders.items())}."
    draft.title = f"Layout folder: {said}"
    columns = {"labels": Column(labels[order], {"names": shown})} if classes else {}
    return Samples.in_tree(tree, rows[order], Splits(split.index[order], split.names), columns)


def find_images(tree: Tree) -> NDArray[np.int64]:
    """Returns the positions of the images in a tree, at least one; SourceError says what is there instead."""
    rows = tree.images()
    if len(rows):
        return rows
    looked = " ".join(IMAGE_SUFFIXES)
    if not tree.names:
        why = f"it is empty but for folders ({len(tree.folders)})" if tree.folders else "it is empty"
        if tree.broken:
            why = f"{key_of(tree.broken[0][0])} {tree.broken[0][1]}, and there is nothing else"
        raise SourceError(
            f"{tree.path} holds no image: {why}. Give the folder or archive that holds the images ({looked})."
        )
    if refused := foreign_format(tree):
        raise SourceError(refused)
    found = Counter(Path(name).suffix.lower() or "no suffix" for name in tree.names)
    listed = first_few([f"{count} {suffix}" for suffix, count in found.most_common()])
    hint = "Is it the right folder?"
    if packed := [key_of(name) for name in tree.names if name.lower().endswith((".zip", ".tar"))]:
        hint = f"To pack an archive that lies in it, give the archive itself: {tree.path / packed[0]}."
        if tree.archive:
            hint = f"To pack the archive that lies in it ({packed[0]}), unpack {tree.path} first."
    raise SourceError(f"{tree.path} holds no image: looked for {looked} (in any case), found only {listed}. {hint}")


def folder_around(names: list[str], archive: bool) -> str:
    """Returns the innermost folder (ending in `/`) that holds everything and is neither split nor class; "" if none."""
    around = ""
    while True:
        tops = {name[len(around) :].partition("/")[0] for name in names}
        top = next(iter(tops))
        below = f"{around}{top}/"
        if len(tops) > 1 or top.lower() in SPLITS or not all(name.startswith(below) for name in names):
            return around
        # The outermost folder of an archive only wraps it. Any other counts only if it holds folders and no images:
        # with images in it, it is a single class, as for torchvision.
        if not (archive and not around) and any("/" not in name[len(below) :] for name in names):
            return around
        around = below


def _split_folders(draft: Draft, tree: Tree, around: str, inside: list[str]) -> dict[str, str]:
    """Returns split -> its folder below `around`; empty if there are no splits."""
    tops = sorted({name.partition("/")[0] for name in inside if "/" in name})
    found: dict[str, str] = {}
    where = _place(tree, around)
    for top in tops:
        if (name := SPLITS.get(top.lower())) and found.setdefault(name, top) != top:
            raise SourceError(
                f"{where}: the folders {found[name]} and {top} are both the split {name!r}. Merge them, or rename one."
            )
    if not found:
        return found
    shown = first_few(sorted(found.values()))
    if outside := [key_of(top) for top in tops if top.lower() not in SPLITS]:
        raise SourceError(
            f"{where}: the folders {shown} look like splits, but there are images in {first_few(outside)} too. Move "
            f"those away; or, if all of them are classes, rename {min(found.values())} so that it is not taken for a "
            "split."
        )
    if direct := [key_of(name) for name in inside if "/" not in name]:
        raise SourceError(
            f"{where}: images lie next to the splits {shown} ({len(direct)}): {first_few(direct)}. Move each into a "
            "split, or away."
        )
    below = [folder.removeprefix(around) for folder in tree.folders if folder.startswith(around)]
    empty = [key_of(name) for name in below if name.lower() in SPLITS and name not in tops]
    draft.note("Folders of splits without an image were ignored", empty)
    return {split: found[split] for split in SPLIT_ORDER if split in found}


def _classes(draft: Draft, tree: Tree, folders: dict[str, str], present: dict[str, set[str]]) -> list[str]:
    """Returns the sorted names of the class folders of all splits; [] for none.

    `folders` maps split -> its folder, `present` split -> names of the folders in it that hold images.
    """
    classes = sorted(set().union(*present.values()))
    if not classes:
        return []
    known, annotations = set(classes), set[str]()
    for split, folder in folders.items():
        below = [name.removeprefix(folder) for name in tree.folders if name.startswith(folder)]
        empty = [key_of(name) for name in below if name and "/" not in name and name not in known]
        annotations |= {name for name in empty if name.lower() in ANNOTATION_FOLDERS}
        empty = [name for name in empty if name not in annotations]
        if empty and present[split]:
            raise SourceError(
                f"{_place(tree, folder)}: class folders without an image ({len(empty)}): {first_few(empty)}. Remove "
                "them, or put their images back: a class that nothing belongs to cannot be learned."
            )
    if annotations and len(classes) == 1 and classes[0].lower() in IMAGE_FOLDERS:
        beside = first_few(sorted(annotations))
        draft.notes.append(f"{key_of(classes[0])} is no class, as it lies next to {beside}.")
        return []
    for split, here in present.items():
        if here:
            draft.note(f"Classes without an image in {split!r}", [key_of(name) for name in classes if name not in here])
        else:
            draft.notes.append(f"The split {split!r} has no class folders: its labels are -1.")
    return classes


def _place(tree: Tree, folder: str) -> str:
    return f"{tree.path}: {key_of(folder)}" if folder else str(tree.path)
