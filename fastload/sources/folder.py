"""Folders of images: a folder a class, with or without train, val and test above them; or images alone.

    photos/cat/1.jpg                labels by folder, one split "all"
    photos/train/cat/1.jpg          labels and splits
    photos/test/1.jpg               a split without labels: -1 where other splits have them
    photos/1.jpg                    no labels at all

The same inside a .zip or .tar, where a single folder around everything is looked through.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.sources.listing import Column, Listing, OnError, first_few, require_unique
from fastload.sources.options import SourceOptions
from fastload.sources.tree import IMAGE_SUFFIXES, Tree, is_image, key_of, open_tree

SPLITS = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
    "testing": "test",
}
"""Names of folders, in any case, that are splits and not classes."""

ORDER = ("train", "val", "test")

IMAGES = frozenset("image images img imgs input inputs jpegimages".split())
"""What folders of all images are called, where others beside them hold their annotations."""

ANNOTATIONS = frozenset(
    "mask masks label labels annotation annotations annot gt groundtruth ground_truth segmentation segmentations "
    "segmentationclass seg target targets".split()
)
"""What those others are called."""


def folder_evidence(tree: Tree) -> list[str]:
    """The first images of a tree: it is a folder of images whatever else it is."""
    return [key_of(tree.names[i]) for i in tree.images()[:3].tolist()]


def list_folder(
    source: str | Path | Tree, *, on_error: OnError = "fail", options: SourceOptions | None = None
) -> Listing:
    """The listing of images in class folders, split by split, class by class, in sorted order.

    Column `labels`: int64 (N,), index into the sorted names of the classes of all splits, -1 where a split has no
    class folders; absent when no split has any.

    Raises:
        SourceError: no image, an empty class, images beside class folders, splits beside other folders.
    """
    tree = open_tree(source)
    skipped = leave_out_broken(tree, on_error)
    rows, notes = find_images(tree)
    names = [tree.names[i] for i in rows.tolist()]
    around = folder_around(names, tree.archive)
    inside = [name.removeprefix(around) for name in names]
    if around:
        notes.append(f"Everything lies in {key_of(around)}, which was looked through.")
    split_folders = _split_folders(inside, tree, around, notes)
    if not split_folders:
        split_names: tuple[str, ...] = ("all",)
        split = np.zeros(len(names), np.uint8)
        labels, classes = _labels([inside], [around], tree, notes, ("all",))
    else:
        split_names = tuple(name for name in ORDER if name in split_folders)
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
    order = np.lexsort((labels, split))  # stable: within a class the walk's order stays
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
    """Positions of the images in a tree, and the sentence about the files that are none.

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


def leave_out_broken(tree: Tree, on_error: OnError) -> tuple[tuple[str, str], ...]:
    """(key, reason) of the images that cannot be read at all, when they may be skipped.

    Raises:
        SourceError: they may not.
    """
    broken = tuple((key_of(name), reason) for name, reason in tree.broken)
    if broken and on_error == "fail":
        shown = first_few([f"{key} {reason}" for key, reason in broken])
        raise SourceError(
            f"{tree.path}: images that cannot be read ({len(broken)}): {shown}. "
            "Mend or remove them, or leave them out with `--on-error skip`."
        )
    return broken


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
    """The path, ending in `/`, of a folder that holds everything and is neither a split nor a class; else empty."""
    around = ""
    while True:
        tops = {name[len(around) :].partition("/")[0] for name in names}
        top = next(iter(tops))
        below = f"{around}{top}/"
        if len(tops) > 1 or top.lower() in SPLITS or not all(name.startswith(below) for name in names):
            return around
        # An archive's outermost folder is its wrapping. Any other is one only if it holds folders and no images;
        # with images in it, it is a single class, as for torchvision.
        if not (archive and not around) and any("/" not in name[len(below) :] for name in names):
            return around
        around = below


def _split_folders(inside: list[str], tree: Tree, around: str, notes: list[str]) -> dict[str, str]:
    """Name of the split -> its folder below `around`; empty when there are no splits.

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
            f"{where}: images lie beside the splits {first_few(sorted(found.values()))} ({len(direct)}): "
            f"{first_few(direct)}. Move each into a split, or away."
        )
    return found


def _labels(
    groups: list[list[str]], prefixes: list[str], tree: Tree, notes: list[str], split_names: tuple[str, ...]
) -> tuple[NDArray[np.int64], list[str]]:
    """Labels of the groups, one behind the other, and the class names; paths are relative to their group's prefix."""
    flat, present = [], []
    for names, prefix in zip(groups, prefixes, strict=True):
        direct = [name for name in names if "/" not in name]
        if direct and len(direct) < len(names):
            where = f"{tree.path}{f': {key_of(prefix)}' if prefix else ''}"
            raise SourceError(
                f"{where}: images lie beside class folders ({len(direct)}): {first_few(list(map(key_of, direct)))}. "
                "Move each into its class, or away: their class is not known."
            )
        flat.append(bool(direct))
        present.append(set() if direct else {name.partition("/")[0] for name in names})
    classes = sorted(set().union(*present))
    if not classes:
        return np.full(sum(map(len, groups)), -1, np.int64), []
    beside = _refuse_empty_classes(classes, flat, prefixes, tree)
    if beside and len(classes) == 1 and classes[0].lower() in IMAGES:
        notes.append(f"{key_of(classes[0])} is taken for no class, as it lies beside {first_few(beside)}.")
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
    """The folders without an image that lie beside those of the classes and are called like annotations.

    Raises:
        SourceError: there are others without an image.
    """
    known = set(classes)
    beside: list[str] = []
    for prefix, is_flat in zip(prefixes, flat, strict=True):
        below = [folder[len(prefix) :] for folder in tree.folders if folder.startswith(prefix)]
        empty = [key_of(folder) for folder in below if folder and "/" not in folder and folder not in known]
        beside += [folder for folder in empty if folder.lower() in ANNOTATIONS]
        empty = [folder for folder in empty if folder.lower() not in ANNOTATIONS]
        if empty and not is_flat:
            where = f"{tree.path}{f': {key_of(prefix)}' if prefix else ''}"
            raise SourceError(
                f"{where}: class folders without an image ({len(empty)}): {first_few(empty)}. "
                "Remove them, or put their images back: a class that nothing belongs to cannot be learned."
            )
    return sorted(set(beside))


def _summary(split_names: tuple[str, ...], split_folders: dict[str, str], classes: list[str]) -> str:
    splits = ""
    if split_folders:
        named = [f"{name} (folder {key_of(split_folders[name])})" for name in split_names]
        splits = f" Splits: {', '.join(named)}."
    if not classes:
        return f"Layout folder: images without class folders, so without labels.{splits}"
    return f"Layout folder: classes by folder ({len(classes)}): {first_few(list(map(key_of, classes)))}.{splits}"
