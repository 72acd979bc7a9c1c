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
from fastload.sources.assemble import Draft, Samples, split_path, values_in_masks
from fastload.sources.listing import SourceOptions, first_few
from fastload.sources.paired import Found, Key, MaskKind, Paired, list_paired
from fastload.sources.tree import Line, Tree, key_of

OBJECTS, SCENES = "objectInfo150.txt", "sceneCategories.txt"
NUM_CLASSES = 150

CALLED_CORRUPTED = tuple(f"ADE_train_{n:08}" for n in (3020, 1701, 13508, 8455))
"""Training images that the converter of MosaicML Streaming leaves out as corrupted."""

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
    return list_paired(draft, tree, options, _ADE20K)


def _meaning(draft: Draft, tree: Tree, kind: MaskKind, at: list[int]) -> tuple[tuple[str, ...], int]:
    """Returns the names of the values in masks, and the ignored value: the values show how they are numbered."""
    original = kind.name == "annotations"
    seen = values_in_masks(tree.files, [i for i in at if i >= 0]).tolist()
    where, labelled = f"{tree.given}: {kind.name}/", [value for value in seen if value != 255]
    if beyond := [str(value) for value in labelled if value > NUM_CLASSES]:
        raise SourceError(
            f"{where}: masks hold {first_few(beyond)}, expected 0..{NUM_CLASSES}, or 255 where they are shifted. "
            "These are not the masks of SceneParsing (the full ADE20K has masks of colours); fetch "
            "ADEChallengeData2016, or pack without with `--masks none`."
        )
    if NUM_CLASSES in seen and 255 in seen:
        raise SourceError(
            f"{where}: masks hold both 150, which only the original numbering has, and 255, which only the shifted one "
            "has. Make them again from one source."
        )
    # The original masks never hold 255; shifted ones hold it where nothing is labelled.
    shifted = not original if not seen else seen[-1] == 255 or (not original and seen[-1] < NUM_CLASSES)
    if seen:
        span = f"{seen[0]}..{(labelled or seen)[-1]}{', 255' if seen[-1] == 255 else ''}"
        shown = "0..149 with 255 = ignore, shifted as for detectron2" if shifted else "0 = other and ignored, 1..150"
        draft.notes.append(
            f"Masks in {kind.name}: {shown}, by their values ({span} in a sample of them); kept as they are."
        )
    names = _class_names(draft, tree)
    return names if shifted or not names else ("other", *names), 255 if shifted else 0


def _read_text(draft: Draft, tree: Tree, base: str, without: str) -> list[Line]:
    """Returns the lines of a text file that lies next to the images, else of the first found elsewhere; [] for none."""
    found = [i for i, name in tree.not_images if split_path(name)[1] == base]
    lines = (
        tree.lines(max(found, key=lambda i: f"{split_path(tree.names[i])[0]}images" in tree.folders)) if found else []
    )
    if not lines:
        draft.notes.append(f"There is no {base}{', or it is empty' * bool(found)}: {without}.")
    return lines


def _class_names(draft: Draft, tree: Tree) -> tuple[str, ...]:
    """Returns the names of classes 1..150; () without their file."""
    names: dict[int, str] = {}
    lines = _read_text(draft, tree, OBJECTS, "the classes have no names")
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


def _scenes(draft: Draft, tree: Tree, found: Found, kept: list[Key]) -> dict[str, Column]:
    """Returns the column of the images' scenes; {} without their file."""
    images, stems = {key[-1] for key in found.images}, [key[-1] for key in kept]
    if listed := [stem for stem in CALLED_CORRUPTED if stem in images]:
        draft.notes.append(
            f"Kept, though the converter of MosaicML Streaming calls them corrupted: {', '.join(listed)}."
        )
    scene_of: dict[str, str] = {}
    for line in _read_text(draft, tree, SCENES, "no labels"):
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


def _path(folder: str) -> re.Pattern[str]:
    return re.compile(rf"(?:{folder})/(?P<split>[^/]+)/(?P<key>[^/]+)\.[^/.]+", re.DOTALL)


_ADE20K = Paired(
    image=_path("(?P<root>(?:.*/)?)images|(?:.*/)?release_test"),
    kinds=tuple(MaskKind(folder, _path(f"(?:.*/)?{folder}")) for folder in ("annotations", "annotations_detectron2")),
    absent="there are no images in images/training, images/validation or release_test/testing. Give the folder "
    "ADEChallengeData2016, with its images, or its archive.",
    where="annotations",
    only_splits=True,
    meaning=_meaning,
    columns=_scenes,
)
