"""ADE20K SceneParsing (ADEChallengeData2016): scenes with masks of 150 classes.

    images/{training,validation}/ADE_train_00000001.jpg
    annotations/{training,validation}/ADE_train_00000001.png     0 = other, 1..150
    objectInfo150.txt, sceneCategories.txt                       names of the classes, the scene of each image
    release_test/testing/ADE_test_00000001.jpg                   images without masks

Masks are packed as they are, never shifted. `annotations_detectron2` (0..149, 255 = ignore) is read only if
`annotations` is absent. The values in the masks show which of the two numberings they have.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fastload.errors import OptionError, SourceError
from fastload.format.column import Column
from fastload.sources.assemble import (
    Draft,
    MaskFiles,
    Samples,
    Splits,
    assemble,
    children,
    split_path,
    stem_of,
    text_lines,
    values_in_masks,
)
from fastload.sources.listing import SPLITS, Listing, OnError, SourceOptions, first_few
from fastload.sources.open_tree import open_tree
from fastload.sources.tree import Tree, key_of

OBJECTS, SCENES = "objectInfo150.txt", "sceneCategories.txt"
NUM_CLASSES = 150

CALLED_CORRUPTED = tuple(f"ADE_train_{n:08}" for n in (3020, 1701, 13508, 8455))
"""Training images that the converter of MosaicML Streaming leaves out as corrupted."""

_IMAGE = re.compile(r"(?:^|/)ADE_(train|val|test)_\d{8}\.jpe?g$", re.IGNORECASE)
_ANNOTATIONS = ("annotations/", "annotations_detectron2/")


def ade20k_evidence(tree: Tree) -> list[str]:
    """Returns the first image of a tree that is named as SceneParsing's are, and its two text files."""
    image = next((name for name in tree.names if "ADE_" in name and _IMAGE.search(name)), None)
    texts = [name for name in tree.names if name.endswith((OBJECTS, SCENES))]
    return [key_of(name) for name in ([image] if image else []) + texts]


def list_ade20k(
    source: str | Path | Tree, *, on_error: OnError = "fail", options: SourceOptions | None = None
) -> Listing:
    """Returns the listing of SceneParsing's images, split by split, in the order of their names.

    Masks: 0 = other, which is `ignore_index`, and 1..150, named by objectInfo150.txt (a name is the whole cell with all
    synonyms); or 0..149 with `ignore_index` 255 if the masks are detectron2's. Column `labels`: int64 (N,), index into
    the sorted names of the scenes, -1 for images that sceneCategories.txt does not list; absent without that file.

    Raises:
        OptionError: instance masks are asked for, which SceneParsing does not have.
        SourceError: there are no images; in a split with masks, an image without its mask; a mask or a scene without
            its image (unless skipped); masks hold values of neither numbering.
    """
    options = options or SourceOptions()
    if options.masks == "instance":
        raise OptionError("ADE20K SceneParsing has no instance masks. Accepted here: masks auto, semantic or none.")
    tree = open_tree(source)
    found = Draft("ade20k", tree, on_error, evidence=ade20k_evidence(tree))
    found.leave_out_broken(tree)
    notes = found.notes
    root, images = _find_images(tree)
    masks: dict[str, int] = {}
    numbering = ""
    if options.masks != "none":
        masks, numbering = _find_masks(tree, root, notes, required=options.masks == "semantic")
    with_masks = {split for stem, (_, split) in images.items() if stem in masks}
    for split in dict.fromkeys(split for _, split in images.values()):
        if masks and split not in with_masks:
            notes.append(f"The split {split!r} has no masks: it is packed without.")
    stems = []
    for stem, (position, split) in images.items():
        if split in with_masks and stem not in masks:
            found.leave_out(key_of(tree.names[position]), "has no mask")
        else:
            stems.append(stem)
    for stem, position in masks.items():
        if stem not in images and stem not in found.unreadable:
            found.leave_out(key_of(tree.names[position]), "is a mask without its image")
    scenes = _read_scenes(tree, root, notes)
    kinds = {stem.rpartition("_")[0] for stem in images}  # ADE_train, ADE_val
    for stem in scenes:
        # The file lists train and val; a dataset may have only one of them.
        if stem.rpartition("_")[0] in kinds and stem not in images and stem not in found.unreadable:
            found.leave_out(key_of(stem), f"is listed in {SCENES}, but has no image")
    listed = [stem for stem in CALLED_CORRUPTED if stem in images]
    if listed:
        notes.append(f"Kept, though the converter of MosaicML Streaming calls them corrupted: {', '.join(listed)}.")
    columns = {}
    if scenes:
        names = tuple(sorted(set(scenes.values())))
        index = {name: i for i, name in enumerate(names)}
        labels = np.array([index.get(scenes.get(stem, ""), -1) for stem in stems], np.int64)
        columns["labels"] = Column(labels, {"names": names})
        if (labels < 0).any():
            notes.append(f"Images without a scene in {SCENES} ({(labels < 0).sum()}): their labels are -1.")
    mask_positions = [masks.get(stem, -1) for stem in stems]
    classes = _class_names(tree, root, notes)
    shifted = numbering == "shifted"
    names = classes if shifted or not classes else ("other", *classes)
    packed = MaskFiles(mask_positions, names, ignore_index=255 if shifted else 0) if masks else None
    positions, splits = [images[stem][0] for stem in stems], Splits.of([images[stem][1] for stem in stems])
    return assemble(found, Samples.in_tree(tree, positions, splits, columns, packed, by_name=True))


def _find_images(tree: Tree) -> tuple[str, dict[str, tuple[int, str]]]:
    """Returns the dataset's top folder (ending in `/`, or ""), and stem -> (position, split) of each image."""
    found: dict[str, tuple[int, str]] = {}
    roots = set()
    for i in tree.images().tolist():
        folder, base = split_path(tree.names[i])
        parts = folder.rstrip("/").split("/")
        split = SPLITS.get(parts[-1].lower(), "")
        if not split or (not (is_test := parts[-2:-1] == ["release_test"]) and parts[-2:-1] != ["images"]):
            continue
        stem = stem_of(base)
        if stem in found:
            raise SourceError(
                f"{tree.given}: {key_of(tree.names[found[stem][0]])} and {key_of(tree.names[i])} have the same name. "
                "Keep one of them: an image is known by its name."
            )
        found[stem] = i, split
        if not is_test:
            roots.add("".join(f"{part}/" for part in parts[:-2]))
    if not found:
        raise SourceError(
            f"{tree.given}: there are no images in images/training, images/validation or release_test/testing. "
            "Give the folder ADEChallengeData2016, with its images, or its archive."
        )
    if len(roots) > 1:
        raise SourceError(
            f"{tree.given}: there is more than one folder images: below {first_few(sorted(map(key_of, roots)))}. "
            "Give the one to pack."
        )
    return next(iter(roots), ""), found


def _find_masks(tree: Tree, root: str, notes: list[str], required: bool) -> tuple[dict[str, int], str]:
    """Returns stem -> position of the masks, and their numbering: "original" or "shifted"."""
    there: dict[str, dict[str, int]] = {}
    for folder in _ANNOTATIONS:
        for name in SPLITS:
            there.setdefault(folder, {}).update(children(tree, f"{root}{folder}{name}/"))
    used = next((folder for folder in _ANNOTATIONS if there[folder]), "")
    if not used:
        if required:
            raise SourceError(f"{tree.given}: there is no mask in {root}annotations. Unpack them next to images/.")
        notes.append("There are no masks: no folder annotations.")
        return {}, ""
    if used == _ANNOTATIONS[0] and there[_ANNOTATIONS[1]]:
        notes.append("Read the masks in annotations, not those in annotations_detectron2.")
    masks = there[used]
    seen = values_in_masks(tree.files, list(masks.values()))
    where = f"{tree.given}: {key_of(root)}{used}"
    _refuse_values(where, seen.tolist())
    if not len(seen):
        return masks, "shifted" if used == _ANNOTATIONS[1] else "original"
    # The original masks never hold 255; shifted ones hold it where nothing is labelled.
    shifted = seen[-1] == 255 or (used == _ANNOTATIONS[1] and seen[-1] < NUM_CLASSES)
    span = f"{seen[0]}..{seen[seen < 255][-1] if (seen < 255).any() else 255}{', 255' if seen[-1] == 255 else ''}"
    shown = "0..149 with 255 = ignore, shifted as for detectron2" if shifted else "0 = other and ignored, 1..150"
    notes.append(f"Masks in {used[:-1]}: {shown}, by their values ({span} in a sample of them); kept as they are.")
    return masks, "shifted" if shifted else "original"


def _refuse_values(where: str, seen: Sequence[int]) -> None:
    beyond = [str(value) for value in seen if NUM_CLASSES < value < 255]
    if beyond:
        raise SourceError(
            f"{where}: masks hold {first_few(beyond)}, expected 0..{NUM_CLASSES}, or 255 where they are shifted. "
            "These are not the masks of SceneParsing (those of the full ADE20K are colours); fetch "
            "ADEChallengeData2016, or pack without with `--masks none`."
        )
    if NUM_CLASSES in seen and 255 in seen:
        raise SourceError(
            f"{where}: masks hold both 150, which only the original numbering has, and 255, which only the shifted one "
            "has. Make them again from one source."
        )


def _only(tree: Tree, root: str, base: str) -> int | None:
    """Returns the position of a text file: the one in the top folder, else the first found elsewhere; None for none."""
    positions = [i for i, name in enumerate(tree.names) if split_path(name)[1] == base]
    inside = [i for i in positions if tree.names[i] == root + base]
    return next(iter(inside or positions), None)


def _class_names(tree: Tree, root: str, notes: list[str]) -> tuple[str, ...]:
    """Returns the names of classes 1..150; () without their file."""
    position = _only(tree, root, OBJECTS)
    if position is None:
        notes.append(f"There is no {OBJECTS}: the classes have no names.")
        return ()
    where = f"{tree.path / key_of(tree.names[position])}"
    names: dict[int, str] = {}
    for number, line in text_lines(tree, position):
        cells = [cell.strip() for cell in line.split("\t")]
        if cells[0] == "Idx":
            continue
        if len(cells) < 5 or not cells[0].isascii() or not cells[0].isdigit() or not cells[-1]:
            raise SourceError(
                f"{where}, line {number}: {line!r}, expected Idx, Ratio, Train, Val and Name between tabs. "
                "Fetch the file again, or remove it to pack without names."
            )
        names[int(cells[0])] = key_of(cells[-1])
    if sorted(names) != list(range(1, NUM_CLASSES + 1)):
        raise SourceError(
            f"{where}: it names {len(names)} classes, expected 1..{NUM_CLASSES}. "
            "Fetch the file again, or remove it to pack without names."
        )
    return tuple(names[i] for i in range(1, NUM_CLASSES + 1))


def _read_scenes(tree: Tree, root: str, notes: list[str]) -> dict[str, str]:
    """Returns stem of each listed image -> its scene; empty without the file."""
    position = _only(tree, root, SCENES)
    if position is None:
        notes.append(f"There is no {SCENES}: no labels.")
        return {}
    where = f"{tree.path / key_of(tree.names[position])}"
    scenes: dict[str, str] = {}
    for number, line in text_lines(tree, position):
        stem, _, scene = line.partition(" ")
        stem = stem.removesuffix(".jpg")
        if not scene.strip():
            raise SourceError(f"{where}, line {number}: {line!r}, expected an image and its scene. Fix the line.")
        if scenes.setdefault(stem, key_of(scene.strip())) != key_of(scene.strip()):
            raise SourceError(f"{where}, line {number}: {key_of(stem)} has a second scene. Remove the wrong line.")
    return scenes
