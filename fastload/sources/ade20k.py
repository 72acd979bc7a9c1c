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

import numpy as np

from fastload.errors import SourceError
from fastload.format.ragged import Column
from fastload.sources.assemble import Draft, Pairs, Samples, children, split_path, stem_of, values_in_masks
from fastload.sources.listing import SPLITS, SourceOptions, first_few
from fastload.sources.tree import Line, Tree, key_of

OBJECTS, SCENES = "objectInfo150.txt", "sceneCategories.txt"
NUM_CLASSES = 150

CALLED_CORRUPTED = tuple(f"ADE_train_{n:08}" for n in (3020, 1701, 13508, 8455))
"""Training images that the converter of MosaicML Streaming leaves out as corrupted."""

_PLACE = re.compile(r"(?P<root>(?:.*/)?)(?P<of>images|release_test)/(?P<split>[^/]+)/[^/]+", re.DOTALL)
_IMAGE = re.compile(r"(?:^|/)ADE_(train|val|test)_\d{8}\.jpe?g$", re.IGNORECASE)


def ade20k_evidence(tree: Tree) -> list[str]:
    """Returns the first image of a tree that is named as SceneParsing's are, and its two text files."""
    image = next((name for name in tree.names if "ADE_" in name and _IMAGE.search(name)), None)
    texts = [name for _, name in tree.not_images if name.endswith((OBJECTS, SCENES))]
    return [key_of(name) for name in ([image] if image else []) + texts]


def list_ade20k(draft: Draft, tree: Tree, options: SourceOptions) -> Samples:
    """Returns SceneParsing's images, split by split, in the order of their names.

    Masks: 0 = other, which is `ignore_index`, and 1..150, named by objectInfo150.txt (a name is the whole cell with all
    synonyms); or 0..149 with `ignore_index` 255 if the masks are detectron2's. Column `labels`: int64 (N,), index into
    the sorted names of the scenes, -1 for images that sceneCategories.txt does not list; absent without that file.

    Raises:
        SourceError: there are no images; in a split with masks, an image without its mask; a mask or a scene without
            its image (unless skipped); masks hold values of neither numbering.
    """
    draft.leave_out_broken(tree)
    root, images, splits = _find_images(tree)
    masks, shifted = ({}, False) if options.masks == "none" else _find_masks(draft, tree, root)
    if options.masks == "semantic" and not masks:
        raise SourceError(f"{tree.given}: there is no mask in {root}annotations. Unpack them next to images/.")
    pairs = Pairs(tree, images, masks, splits)
    for split in pairs.splits_without_masks() if masks else ():
        draft.notes.append(f"The split {split!r} has no masks: it is packed without.")
    stems = pairs.complete(draft)
    if listed := [stem for stem in CALLED_CORRUPTED if stem in images]:
        draft.notes.append(
            f"Kept, though the converter of MosaicML Streaming calls them corrupted: {', '.join(listed)}."
        )
    columns = _scenes(draft, tree, root, images, stems)
    classes = _class_names(draft, tree, root)
    names = classes if shifted or not classes else ("other", *classes)
    return pairs.samples(stems, columns, masked=bool(masks), names=names, ignore_index=255 if shifted else 0)


def _find_images(tree: Tree) -> tuple[str, dict[str, int], dict[str, str]]:
    """Returns the top folder (ending in `/`, or ""), and stem -> position and stem -> split of the images."""
    images: dict[str, int] = {}
    splits: dict[str, str] = {}
    roots = set()
    for i in tree.images().tolist():
        place = _PLACE.fullmatch(tree.names[i])
        if not place or place["split"].lower() not in SPLITS:
            continue
        stem = stem_of(tree.names[i])
        if stem in images:
            raise SourceError(
                f"{tree.given}: {key_of(tree.names[images[stem]])} and {key_of(tree.names[i])} have the same name. "
                "Keep one of them: an image is known by its name."
            )
        images[stem], splits[stem] = i, SPLITS[place["split"].lower()]
        if place["of"] == "images":
            roots.add(place["root"])
    if not images:
        raise SourceError(
            f"{tree.given}: there are no images in images/training, images/validation or release_test/testing. "
            "Give the folder ADEChallengeData2016, with its images, or its archive."
        )
    if len(roots) > 1:
        raise SourceError(
            f"{tree.given}: there is more than one folder images: below {first_few(sorted(map(key_of, roots)))}. "
            "Give the one to pack."
        )
    return next(iter(roots), ""), images, splits


def _find_masks(draft: Draft, tree: Tree, root: str) -> tuple[dict[str, int], bool]:
    """Returns stem -> position of the masks, and whether they are numbered as for detectron2."""
    original, detectron2 = (
        {stem: i for name in SPLITS for stem, i in children(tree, f"{root}{folder}/{name}/").items()}
        for folder in ("annotations", "annotations_detectron2")
    )
    if original and detectron2:
        draft.notes.append("Read the masks in annotations, not those in annotations_detectron2.")
    masks, used = (original, "annotations") if original else (detectron2, "annotations_detectron2")
    if not masks:
        draft.notes.append("There are no masks: no folder annotations.")
    seen = values_in_masks(tree.files, list(masks.values())).tolist()
    if not seen:
        return masks, not original
    where, labelled = f"{tree.given}: {key_of(root)}{used}/", [value for value in seen if value < 255]
    if beyond := [str(value) for value in labelled if value > NUM_CLASSES]:
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
    # The original masks never hold 255; shifted ones hold it where nothing is labelled.
    shifted = seen[-1] == 255 or (not original and seen[-1] < NUM_CLASSES)
    span = f"{seen[0]}..{(labelled or seen)[-1]}{', 255' if seen[-1] == 255 else ''}"
    shown = "0..149 with 255 = ignore, shifted as for detectron2" if shifted else "0 = other and ignored, 1..150"
    draft.notes.append(f"Masks in {used}: {shown}, by their values ({span} in a sample of them); kept as they are.")
    return masks, shifted


def _read_text(draft: Draft, tree: Tree, root: str, base: str, without: str) -> list[Line]:
    """Returns the lines of a text file in the top folder, else of the first found elsewhere; [] for none."""
    found = [i for i, name in enumerate(tree.names) if split_path(name)[1] == base]
    lines = tree.lines(max(found, key=lambda i: tree.names[i] == root + base)) if found else []
    if not lines:
        draft.notes.append(f"There is no {base}{', or it is empty' * bool(found)}: {without}.")
    return lines


def _class_names(draft: Draft, tree: Tree, root: str) -> tuple[str, ...]:
    """Returns the names of classes 1..150; () without their file."""
    names: dict[int, str] = {}
    lines = _read_text(draft, tree, root, OBJECTS, "the classes have no names")
    for line in lines:
        number, *cells = map(str.strip, line.text.split("\t"))
        if number == "Idx":
            continue
        if len(cells) < 4 or len(number) > 9 or not number.isascii() or not number.isdigit() or not cells[-1]:
            raise line.error(
                f"{line.text[:200]!r}, expected Idx, Ratio, Train, Val and Name between tabs. "
                "Fetch the file again, or remove it to pack without names."
            )
        names[int(number)] = key_of(cells[-1])
    if lines and sorted(names) != list(range(1, NUM_CLASSES + 1)):
        raise SourceError(
            f"{lines[0].where}: it names {len(names)} classes, expected 1..{NUM_CLASSES}. "
            "Fetch the file again, or remove it to pack without names."
        )
    return tuple(names[i] for i in sorted(names))


def _scenes(draft: Draft, tree: Tree, root: str, images: dict[str, int], stems: list[str]) -> dict[str, Column]:
    """Returns the column of the images' scenes; {} without their file."""
    scene_of: dict[str, str] = {}
    for line in _read_text(draft, tree, root, SCENES, "no labels"):
        stem, _, scene = line.text.partition(" ")
        stem, scene = stem.removesuffix(".jpg"), key_of(scene.strip())
        if not scene:
            raise line.error(f"{line.text!r}, expected an image and its scene. Fix the line.")
        if scene_of.setdefault(stem, scene) != scene:
            raise line.error(f"{key_of(stem)} has a second scene. Remove the wrong line.")
    if not scene_of:
        return {}
    kinds = {stem.rpartition("_")[0] for stem in images}  # ADE_train, ADE_val
    for stem in scene_of:
        # The file lists train and val; a dataset may have only one of them.
        if stem.rpartition("_")[0] in kinds and stem not in images and stem not in draft.unreadable:
            draft.leave_out(key_of(stem), f"is listed in {SCENES}, but has no image")
    names = tuple(sorted(set(scene_of.values())))
    index = {name: i for i, name in enumerate(names)}
    labels = np.array([index.get(scene_of.get(stem, ""), -1) for stem in stems], np.int64)
    if (labels < 0).any():
        draft.notes.append(f"Images without a scene in {SCENES} ({(labels < 0).sum()}): their labels are -1.")
    return {"labels": Column(labels, {"names": names})}
