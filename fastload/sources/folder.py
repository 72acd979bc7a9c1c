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
from fastload.format.column import Column
from fastload.sources.assemble import leave_out_broken
from fastload.sources.listing import SPLIT_ORDER, SPLITS, Listing, OnError, SourceOptions, first_few, require_unique
from fastload.sources.open_tree import open_tree
from fastload.sources.tree import IMAGE_SUFFIXES, Tree, is_image, key_of

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


def list_folder(
    source: str | Path | Tree, *, on_error: OnError = "fail", options: SourceOptions | None = None
) -> Listing:
    """Returns the listing of images in class folders, split by split, class by class, in sorted order.

    Column `labels`: int64 (N,), index into the sorted names of the classes of all splits; -1 in a split without class
    folders; no such column if no split has class folders.

    Raises:
        SourceError: there is no image; a class is empty; images lie next to class folders, or other folders with
            images next to splits.
    """
    tree = open_tree(source)
    skipped = leave_out_broken(tree, on_error)
    rows, notes = find_images(tree)
    names = [tree.names[i] for i in rows.tolist()]
    around = folder_around(names, tree.archive)
    inside = [name.removeprefix(around) for name in names]
    if around:
        notes.append(f"Everything lies in {key_of(around)}, which is no class.")
    split_folders = _split_folders(inside, tree, around, notes)
    if not split_folders:
        split_names: tuple[str, ...] = ("all",)
        split = np.zeros(len(names), np.uint8)
        labels, classes = _labels([inside], [around], tree, notes, ("all",))
    else:
        split_names = tuple(name for name in SPLIT_ORDER if name in split_folders)
        index = {split_folders[name]: i for i, name in enumerate(split_names)}
        split = np.array([index[name.partition("/")[0]] for name in inside], np.uint8)
        groups: list[list[str]] = [[] for _ in split_names]
        for name in inside:
            top, _, rest = name.partition("/")
            groups[index[top]].append(rest)
        prefixes = [f"{around}{split_folders[name]}/" for name in split_names]
        grouped, classes = _labels(groups, prefixes, tree, notes, split_names)
        labels = np.empty(len(names), np.int64)
        labels[np.argsort(split, kind="stable")] = grouped
    order = np.lexsort((labels, split))  # stable: within a class, the order of the tree remains
    keys = [key_of(names[i]) for i in order.tolist()]
    require_unique(keys, str(tree.path))
    notes.insert(0, _summary(split_names, split_folders, classes))
    rows = rows[order]
    return Listing(
        layout="folder",
        keys=tuple(keys),
        split=split[order],
        split_names=split_names,
        columns={"labels": Column(labels[order], {"names": tuple(map(key_of, classes))})} if classes else {},
        notes=(*notes, *tree.notes),
        sizes=tree.sizes[rows],
        mtimes_ns=tree.mtimes_ns[rows],
        files=tree.files.take(rows),
        skipped=skipped,
    )


def find_images(tree: Tree) -> tuple[NDArray[np.int64], list[str]]:
    """Returns the positions of the images in a tree, and a note about the other files, if there are any.

    Raises:
        SourceError: there is no image.
    """
    rows = tree.images()
    others = len(tree.names) - len(rows)
    if len(rows) == 0:
        raise SourceError(_no_image(tree))
    if others == 0:
        return rows, []
    names = [key_of(name) for name in tree.names if not is_image(name)]
    return rows, [f"Ignored, since they are no images by their suffix ({others}): {first_few(names)}."]


def _no_image(tree: Tree) -> str:
    looked = " ".join(IMAGE_SUFFIXES)
    if not tree.names:
        why = "it is empty"
        if tree.broken:
            why = f"{key_of(tree.broken[0][0])} {tree.broken[0][1]}, and there is nothing else"
        elif tree.folders:
            why = f"it is empty but for folders ({len(tree.folders)})"
        return f"{tree.path} holds no image: {why}. Give the folder or archive that holds the images ({looked})."
    found = Counter(Path(name).suffix.lower() or "no suffix" for name in tree.names)
    listed = first_few([f"{count} {suffix}" for suffix, count in found.most_common()])
    hint = " Is it the right folder?"
    packed = [key_of(name) for name in tree.names if name.lower().endswith((".zip", ".tar"))]
    if packed:
        hint = f" To pack an archive that lies in it, give the archive itself: {tree.path / packed[0]}."
    return f"{tree.path} holds no image: looked for {looked} (in any case), found only {listed}.{hint}"


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


def _split_folders(inside: list[str], tree: Tree, around: str, notes: list[str]) -> dict[str, str]:
    """Returns split -> its folder below `around`; empty if there are no splits.

    Raises:
        SourceError: two folders are the same split, or images lie outside the splits.
    """
    tops = sorted({name.partition("/")[0] for name in inside if "/" in name})
    found: dict[str, str] = {}
    where = tree.path / key_of(around) if not tree.archive else f"{tree.path}: {key_of(around)}"
    for top in tops:
        name = SPLITS.get(top.lower())
        if name in found:
            raise SourceError(
                f"{where}: the folders {found[name]} and {top} are both the split {name!r}. Merge them, or rename one."
            )
        if name is not None:
            found[name] = top
    outside = [key_of(top) for top in tops if top.lower() not in SPLITS]
    if found and outside:
        raise SourceError(
            f"{where}: the folders {first_few(sorted(found.values()))} look like splits, but there are images in "
            f"{first_few(outside)} too. Move those away; or, if all of them are classes, rename {min(found.values())} "
            "so that it is not taken for a split."
        )
    direct = [key_of(name) for name in inside if "/" not in name]
    below = [folder.removeprefix(around) for folder in tree.folders if folder.startswith(around)]
    empty = [key_of(name) for name in below if name.lower() in SPLITS and name not in tops]
    if found and empty:
        notes.append(f"Folders of splits without an image were ignored: {first_few(empty)}.")
    if found and direct:
        raise SourceError(
            f"{where}: images lie next to the splits {first_few(sorted(found.values()))} ({len(direct)}): "
            f"{first_few(direct)}. Move each into a split, or away."
        )
    return found


def _labels(
    groups: list[list[str]], prefixes: list[str], tree: Tree, notes: list[str], split_names: tuple[str, ...]
) -> tuple[NDArray[np.int64], list[str]]:
    """Returns the labels of all groups (splits), one behind the other, and the sorted class names.

    Args:
        groups: the images of each group, relative to its prefix.
        prefixes: the folder of each group.
        tree: what was given, for messages.
        notes: notes are appended.
        split_names: name of each group.

    Raises:
        SourceError: images lie next to class folders, or a class folder is empty.
    """
    flat, present = [], []
    for names, prefix in zip(groups, prefixes, strict=True):
        direct = [name for name in names if "/" not in name]
        if direct and len(direct) < len(names):
            where = f"{tree.path}{f': {key_of(prefix)}' if prefix else ''}"
            raise SourceError(
                f"{where}: images lie next to class folders ({len(direct)}): {first_few(list(map(key_of, direct)))}. "
                "Move each into its class, or away: their class is not known."
            )
        flat.append(bool(direct))
        present.append(set() if direct else {name.partition("/")[0] for name in names})
    classes = sorted(set().union(*present))
    if not classes:
        return np.full(sum(map(len, groups)), -1, np.int64), []
    annotation_folders = _refuse_empty_classes(classes, flat, prefixes, tree)
    if annotation_folders and len(classes) == 1 and classes[0].lower() in IMAGE_FOLDERS:
        notes.append(f"{key_of(classes[0])} is no class, as it lies next to {first_few(annotation_folders)}.")
        return np.full(sum(map(len, groups)), -1, np.int64), []
    index = {name: i for i, name in enumerate(classes)}
    for here, is_flat, split in zip(present, flat, split_names, strict=True):
        lacking = [key_of(name) for name in classes if name not in here]
        if is_flat:
            notes.append(f"The split {split!r} has no class folders: its labels are -1.")
        elif lacking:
            notes.append(f"Classes without an image in {split!r} ({len(lacking)}): {first_few(lacking)}.")
    labels = [
        -1 if is_flat else index[name.partition("/")[0]]
        for names, is_flat in zip(groups, flat, strict=True)
        for name in names
    ]
    return np.array(labels, np.int64), classes


def _refuse_empty_classes(classes: list[str], flat: list[bool], prefixes: list[str], tree: Tree) -> list[str]:
    """Returns the folders without images next to the class folders that are named like folders of annotations.

    Raises:
        SourceError: other folders next to the class folders have no images.
    """
    known = set(classes)
    annotation_folders: list[str] = []
    for prefix, is_flat in zip(prefixes, flat, strict=True):
        below = [folder[len(prefix) :] for folder in tree.folders if folder.startswith(prefix)]
        empty = [key_of(folder) for folder in below if folder and "/" not in folder and folder not in known]
        annotation_folders += [folder for folder in empty if folder.lower() in ANNOTATION_FOLDERS]
        empty = [folder for folder in empty if folder.lower() not in ANNOTATION_FOLDERS]
        if empty and not is_flat:
            where = f"{tree.path}{f': {key_of(prefix)}' if prefix else ''}"
            raise SourceError(
                f"{where}: class folders without an image ({len(empty)}): {first_few(empty)}. "
                "Remove them, or put their images back: a class that nothing belongs to cannot be learned."
            )
    return sorted(set(annotation_folders))


def _summary(split_names: tuple[str, ...], split_folders: dict[str, str], classes: list[str]) -> str:
    splits = ""
    if split_folders:
        named = [f"{name} (folder {key_of(split_folders[name])})" for name in split_names]
        splits = f" Splits: {', '.join(named)}."
    if not classes:
        return f"Layout folder: images without class folders, so without labels.{splits}"
    return f"Layout folder: classes by folder ({len(classes)}): {first_few(list(map(key_of, classes)))}.{splits}"
