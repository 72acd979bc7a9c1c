"""Datasets of images and masks in files of the same name: each is a `Paired` value, which `list_paired` lists.

CamVid as in the SegNet tutorial: driving frames in a folder, their masks in a sibling folder, and lists that may be
absent; one that is there must agree with the folders, by the last folder and the name in its paths.

    train/0001TP_006690.png, trainannot/0001TP_006690.png       also val, valannot, test, testannot
    train.txt                                                    rows `/SegNet/CamVid/train/x.png .../trainannot/x.png`

Cityscapes: frames of drives through cities, and their fine (else coarse) masks, packed with the 19 classes that count.
Masks of the split test hold no classes, and are not read.

    leftImg8bit/train/aachen/aachen_000000_000019_leftImg8bit.png
    gtFine/train/aachen/aachen_000000_000019_gtFine_labelIds.png            0..33
    gtFine/train/aachen/aachen_000000_000019_gtFine_labelTrainIds.png       0..18, 255 is ignored; made by its scripts
    gtFine/train/aachen/aachen_000000_000019_gtFine_instanceIds.png         label * 1,000 + number of the instance
    gtCoarse/train_extra/...                                                likewise

ADE20K SceneParsing (ADEChallengeData2016): scenes with masks of 150 classes, packed as they are. The values show which
of two numberings they have: `annotations_detectron2` (0..149, 255 = ignore) is read if there is no other.

    images/{training,validation}/ADE_train_00000001.jpg
    annotations/{training,validation}/ADE_train_00000001.png     0 = other, 1..150
    objectInfo150.txt, sceneCategories.txt                       names of the classes, the scene of each image
    release_test/testing/ADE_test_00000001.jpg                   images without masks
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np

from fastload.errors import SourceError
from fastload.format.ragged import Column
from fastload.options.masks import Classes, Palette
from fastload.options.pack import SourceOptions
from fastload.sources.assemble import Draft, MaskFiles, Samples, Splits, split_path, stem_of, values_in_masks
from fastload.sources.listing import SPLITS, first_few
from fastload.sources.mask_classes import MappedMasks
from fastload.sources.tree import Line, Tree, is_image, key_of

Key = tuple[str, ...]
"""The key that an image and its mask share: a stem, behind the folder where that counts."""


@dataclass(frozen=True)
class MaskKind:
    """One kind of masks that a dataset may have."""

    name: str  # of the folder or files, for notes
    pattern: re.Pattern[str] | None = None  # of their paths, with the images' groups; None: found otherwise
    of: str = ""  # kinds of one `of` show the same, and the first that all images have is taken; "": any is
    names: tuple[str, ...] = ()  # of the classes
    ignore_index: int | None = None
    classes: Classes | None = None  # what stands for each class, if it is not its number
    palette: Palette = ()  # colours of classes that lie next to the masks, if these are colours
    note: str = ""  # sentence on the values
    instances: bool = False  # whether they are of instances, which are packed only if these are asked for
    attrs: dict[str, Any] = field(default_factory=dict)  # further HDF5 attributes
    dtype: np.dtype[Any] | None = None  # as in `Masks`


@dataclass(frozen=True, eq=False)
class Found:
    """The images and masks of a tree."""

    images: dict[Key, int]  # key -> position
    splits: dict[Key, str]  # key -> split, of images
    masks: Mapping[str, dict[Key, int]]  # name of a kind -> key -> position


Meaning = Callable[[Draft, Tree, MaskKind, list[int]], tuple[tuple[str, ...], int | None]]
"""Returns names of classes and `ignore_index`, given the positions of the masks to pack, -1 where there is none."""


@dataclass(frozen=True)
class Paired:
    """A dataset of images and masks."""

    kinds: tuple[MaskKind, ...]  # in the order in which they are preferred
    absent: str  # message where there are no images: what is missing, and what to give
    where: str = "a folder of masks"  # lie
    # Path of an image, with a group `key`; maybe `split`, and `place`, the folder that counts. None: found otherwise.
    image: re.Pattern[str] | None = None
    # A group `root` of it must be the same for all images; where it is none, any is.
    only_splits: bool = False  # whether images in folders that are called like no split are none of the dataset
    without_masks: tuple[str, ...] = ()  # splits whose masks hold no classes, and are not read
    every_split: bool = False  # whether images without masks are an error, though the whole split has none
    meaning: Meaning | None = None  # None: as the kind of masks says
    # Checks the keys to list against lists of the dataset, and returns those that stay.
    check: Callable[[Draft, Tree, Found, list[Key]], list[Key]] | None = None
    columns: Callable[[Draft, Tree, Found, list[Key]], dict[str, Column]] | None = None


def list_paired(draft: Draft, tree: Tree, options: SourceOptions, spec: Paired, found: Found | None = None) -> Samples:
    """Returns the images of a dataset with their masks, split by split, in the order of their names.

    Args:
        found: its images and masks, if they are not found by patterns of paths.

    Raises:
        SourceError: there are no images; two have one name; in a split with masks, an image without its mask; a mask
            without its image (the latter two unless skipped); there are no masks, and they are asked for.
    """
    if found is None:
        draft.leave_out_broken(tree)
        found = _find(tree, spec)
    if not found.images:
        raise SourceError(f"{tree.given}: {spec.absent}")
    masked = options.masks != "none"
    kind = _chosen(draft, found, spec, instances=options.masks == "instance") if masked else None
    if kind is None and options.masks in ("semantic", "instance"):
        of = " of instances" if options.masks == "instance" else ""
        raise SourceError(f"{tree.given}: there is no mask{of} in {spec.where}. Unpack them next to the images.")
    masks = found.masks[kind.name] if kind else {}
    having = {split for key, split in found.splits.items() if key in masks}
    without = [] if spec.every_split else sorted(set(found.splits.values()) - having)
    kept = [key for key in found.images if not masked or key in masks or found.splits[key] in without]
    for key in sorted(found.images.keys() - kept):
        draft.leave_out(key_of(tree.names[found.images[key]]), "has no mask")
    for key, at in masks.items():
        if key not in found.images and key[-1] not in draft.unreadable:
            draft.leave_out(key_of(tree.names[at]), "is a mask without its image")
    if kind:
        draft.further = "; `--masks none` packs all images without masks"
    if kind and without:
        draft.notes.append(f"Splits without masks: {', '.join(without)}; they are packed without.")
    for of_kind in (found.images, *found.masks.values()):
        tree.known[list(of_kind.values())] = True
    if spec.check:
        kept = spec.check(draft, tree, found, kept)
    columns = spec.columns(draft, tree, found, kept) if spec.columns else None
    positions, splits = [found.images[key] for key in kept], Splits.of([found.splits[key] for key in kept])
    if kind is None:
        return Samples.in_tree(tree, positions, splits, columns, by_name=True)
    mask_at = [masks.get(key, -1) for key in kept]
    names, ignore = spec.meaning(draft, tree, kind, mask_at) if spec.meaning else (kind.names, kind.ignore_index)
    mask_files = MaskFiles(mask_at, names, ignore, kind.attrs, kind.dtype)
    samples = Samples.in_tree(tree, positions, splits, columns, mask_files, by_name=True)
    assert samples.masks is not None, "there are mask files"
    files = samples.masks.files
    files = files if kind.classes is None else MappedMasks(files, None, kind.classes, None, ignore)
    return replace(samples, masks=replace(samples.masks, files=files, palette=kind.palette))


def add_file(tree: Tree, to: dict[Key, int], key: Key, i: int) -> None:
    """Adds file i to those with a key; two with the same are refused."""
    if (other := to.setdefault(key, i)) != i:
        raise SourceError(
            f"{tree.given}: {key_of(tree.names[other])} and {key_of(tree.names[i])} have the same name. Keep one of "
            "them, or move one away: an image and its mask are known by their name."
        )


def _find(tree: Tree, spec: Paired) -> Found:
    """Returns the images and masks whose paths fit the patterns of a dataset."""
    found, roots = Found({}, {}, {kind.name: {} for kind in spec.kinds}), set[str]()
    for i in tree.images.tolist():
        for kind in spec.kinds:
            match = kind.pattern.fullmatch(tree.names[i]) if kind.pattern else None
            if match and _split(match, spec) not in (None, *spec.without_masks):
                add_file(tree, found.masks[kind.name], _key(match), i)
            if match:
                break
        else:
            match = spec.image.fullmatch(tree.names[i]) if spec.image else None
            split = _split(match, spec) if match else None
            if match and split is not None:
                add_file(tree, found.images, _key(match), i)
                found.splits[_key(match)] = split
                roots |= {root for root in (match.groupdict().get("root"),) if root is not None}
    if len(roots) > 1:
        shown = first_few(sorted(key_of(root) or "." for root in roots))
        raise SourceError(f"{tree.given}: images lie in several places, {shown}. Give the one to pack.")
    if not spec.every_split:
        return found
    # Only folders that have a folder of masks are of the dataset.
    paired = {key[0] for masks in found.masks.values() for key in masks} & {key[0] for key in found.images}
    images = {key: at for key, at in found.images.items() if key[0] in paired}
    masks = {name: {key: at for key, at in of.items() if key[0] in paired} for name, of in found.masks.items()}
    folder_of: dict[str, str] = {}
    for folder, split in sorted({(key[0], found.splits[key]) for key in images}):
        if (other := folder_of.setdefault(split, folder)) != folder:
            raise SourceError(f"{tree.given}: {key_of(other)}/ and {key_of(folder)}/ are both {split!r}. Give one.")
    return Found(images, found.splits, masks)


def _key(match: re.Match[str]) -> Key:
    groups = match.groupdict()
    return (groups["place"], groups["key"]) if "place" in groups else (groups["key"],)


def _split(match: re.Match[str], spec: Paired) -> str | None:
    """Returns the split of a path; None if it is of none, and the dataset has no other images."""
    name = match.groupdict().get("split") or ""
    return SPLITS.get(name.lower(), None if spec.only_splits else key_of(name))


def _chosen(draft: Draft, found: Found, spec: Paired, *, instances: bool) -> MaskKind | None:
    """Returns the kind of masks to pack, of instances or not; None if there are no such masks."""
    there = [kind for kind in spec.kinds if found.masks[kind.name] and kind.instances == instances]
    if not there:
        draft.notes.append(f"There are no masks: no folder {spec.where}.")
        return None
    alike = list(next(kinds for _, kinds in groupby(there, key=lambda kind: kind.of or kind.name)))
    covered = {found.splits[key] for kind in alike for key in found.masks[kind.name] if key in found.splits}
    needed = {key for key, split in found.splits.items() if split in covered}
    chosen = next((kind for kind in alike if needed <= found.masks[kind.name].keys()), alike[-1])
    if others := [kind.name for kind in there if kind is not chosen]:
        draft.notes.append(f"Read the masks in {chosen.name}, not those in {first_few(others)}.")
    if chosen.note:
        draft.notes.append(chosen.note)
    return chosen


_CAMVID_CLASSES = tuple("Sky Building Pole Road Pavement Tree SignSymbol Fence Car Pedestrian Bicyclist Void".split())

_FRAME = re.compile(r"(?:^|/)(\w+)annot/(?:0001TP|0006R0|0016E5|Seq05VD)_\w+\.png$")


def camvid_evidence(tree: Tree) -> list[str]:
    """Returns the folders of masks (`trainannot/`) of a tree that hold files named as CamVid's frames."""
    found = dict.fromkeys(split_path(name)[0] for name in tree.names if "annot/" in name and _FRAME.search(name))
    return [key_of(folder) for folder in found]


def _listed(draft: Draft, tree: Tree, found: Found, kept: list[Key]) -> list[Key]:
    """Returns the frames that the lists of their splits name, if there are lists."""
    for folder in sorted({folder for folder, _ in found.images}):
        listed = _read_list(tree, f"{folder}/", draft)
        if listed is None:
            continue
        name = f"{key_of(folder)}.txt"
        unlisted = {key for key in kept if key[0] == folder and key[1] not in listed}
        for key in sorted(unlisted):
            draft.leave_out(key_of(tree.names[found.images[key]]), f"is not listed in {name}")
        kept = [key for key in kept if key not in unlisted]
        for stem, frame in listed.items():
            if (folder, stem) not in found.images and stem not in draft.unreadable:
                draft.leave_out(frame, f"is listed in {name}, but has no file")
    return kept


def _read_list(tree: Tree, folder: str, draft: Draft) -> dict[str, str] | None:
    """Returns stem -> key of the frames that a split's list names; None if there is no list."""
    name = f"{folder[:-1]}.txt"
    if name not in tree.names:
        return None
    listed: dict[str, str] = {}
    for line in tree.lines(tree.names.index(name)):
        frame, *mask = line.text.split()
        if not all(map(is_image, (frame, *mask))) or len(mask) > 1:
            raise line.error(f"{line.text!r}, expected an image and its mask. Fix the line, or remove the list.")
        stem = stem_of(frame)
        if mask and stem_of(mask[0]) != stem:
            fix = "Fix the line, or remove the list to pair by name."
            raise line.error(f"{key_of(frame)} is listed with the mask of another frame, {key_of(mask[0])}. {fix}")
        if stem in listed:
            raise line.error(f"{key_of(frame)} is listed twice. Remove one of the lines.")
        listed[stem] = key_of(folder + split_path(frame)[1])
    draft.notes.append(f"Checked against {key_of(name)} ({len(listed)} rows).")
    return listed


_FILE = r"/(?P<key>[^/]+)\.[^/.]+"
# Masks are 8-bit: 0..10 are classes, 11 is void and `ignore_index`. There are no columns.
CAMVID = Paired(
    image=re.compile(rf"(?P<place>(?:.*/)?(?P<split>[^/]+)){_FILE}", re.DOTALL),
    kinds=(
        MaskKind(
            "annot", re.compile(rf"(?P<place>(?:.*/)?(?P<split>[^/]+))annot{_FILE}", re.DOTALL), names=_CAMVID_CLASSES,
            ignore_index=11, note=f"Masks: {len(_CAMVID_CLASSES) - 1} classes, 11 = void and ignored.",
        ),
    ),
    absent="there is no folder of frames with a sibling of masks (train/ and trainannot/). Give the folder or archive "
    "that holds both.",
    every_split=True,
    check=_listed,
)  # fmt: skip


LABELS = (
    "unlabeled", "ego vehicle", "rectification border", "out of roi", "static", "dynamic", "ground", "road", "sidewalk",
    "parking", "rail track", "building", "wall", "fence", "guard rail", "bridge", "tunnel", "pole", "polegroup",
    "traffic light", "traffic sign", "vegetation", "terrain", "sky", "person", "rider", "car", "truck", "bus",
    "caravan", "trailer", "train", "motorcycle", "bicycle",
)  # fmt: skip
"""The labels 0 to 33."""

LABEL_IDS = {i: LABELS[i] for i in (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)}
"""The value in `labelIds` files of each class that counts, in the order of `labelTrainIds`."""

_VOID = 255
NO_INSTANCES = 65_535  # in masks of instances, for frames without one

_STEM = r"(?P<split>[^/]+)/[^/]+/(?P<key>\w+_\d{6}_\d{6})"
_LEFT_IMAGE = re.compile(rf"(?:^|.*/)leftImg8bit/{_STEM}_leftImg8bit\.\w+")


def cityscapes_evidence(tree: Tree) -> list[str]:
    """Returns the first frame of a tree that is named as Cityscapes' are."""
    found = next((name for name in tree.names if "_leftImg8bit." in name and _LEFT_IMAGE.fullmatch(name)), "")
    return [key_of(found)] if found else []


def _mask_path(folder: str, files: str) -> re.Pattern[str]:
    return re.compile(rf"(?:^|.*/){folder}/{_STEM}_gt(?:Fine|Coarse)_{files}\.png")


def _kind(folder: str, of: str) -> MaskKind:
    """Returns a kind of masks: fine or coarse ones, with the values of all labels or those that are trained with."""
    names, others = (tuple(LABEL_IDS.values()), tuple(value for value in (*range(34), _VOID) if value not in LABEL_IDS))
    shown = "0..18 as they are" if of == "TrainIds" else "the 19 classes that count as 0..18"
    return MaskKind(
        f"{folder}, files label{of}",
        _mask_path(folder, f"label{of}"),
        of=folder,
        names=names,
        ignore_index=_VOID,
        classes=None if of == "TrainIds" else Classes(tuple(LABEL_IDS), names, others),
        note=f"Masks: {folder}, files label{of}, {shown}, anything else is {_VOID} and ignored.",
    )


def _instances(folder: str) -> MaskKind:
    return MaskKind(
        f"{folder}, files instanceIds",
        _mask_path(folder, "instanceIds"),
        of=folder,
        names=LABELS,
        ignore_index=NO_INSTANCES,
        note=f"Masks: {folder}, files instanceIds as they are: label, or 1000 * label + number.",
        instances=True,
        attrs={"kind": "instance", "label_divisor": 1000},
        dtype=np.dtype(np.uint16),
    )


# Fine masks before coarse ones; values as trained with, if each frame has them: 0..18, 255 is `ignore_index`. Masks of
# instances are uint16: below 1,000 the label of a region without single instances, stuff or a group of things; else
# label * 1,000 + number of the instance from 0 (attribute `label_divisor`). There are no columns.
CITYSCAPES = Paired(
    image=_LEFT_IMAGE,
    kinds=(
        *(_kind(folder, of) for folder in ("gtFine", "gtCoarse") for of in ("TrainIds", "Ids")),
        *map(_instances, ("gtFine", "gtCoarse")),
    ),
    absent="there are no frames such as leftImg8bit/train/aachen/..._leftImg8bit.png. Give the folder that holds "
    "leftImg8bit and gtFine.",
    where="gtFine or gtCoarse",
    without_masks=("test",),
)


OBJECTS, SCENES = "objectInfo150.txt", "sceneCategories.txt"
NUM_CLASSES = 150

CALLED_CORRUPTED = tuple(f"ADE_train_{n:08}" for n in (3020, 1701, 13508, 8455))
"""Training images that the converter of MosaicML Streaming leaves out as corrupted."""

_SCENE = re.compile(r"(?:^|/)ADE_(train|val|test)_\d{8}\.jpe?g$", re.IGNORECASE)


def ade20k_evidence(tree: Tree) -> list[str]:
    """Returns the first image of a tree that is named as SceneParsing's are, and its two text files."""
    image = next((name for name in tree.names if "ADE_" in name and _SCENE.search(name)), None)
    texts = [name for _, name in tree.not_images if name.endswith((OBJECTS, SCENES))]
    return [key_of(name) for name in ([image] if image else []) + texts]


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
        draft.notes.append(f"Masks in {kind.name}: {shown}, by their values ({span} in a sample); kept as they are.")
    names = _class_names(draft, tree)
    return names if shifted or not names else ("other", *names), 255 if shifted else 0


def _read_text(draft: Draft, tree: Tree, base: str, without: str) -> list[Line]:
    """Returns the lines of a text file that lies next to the images, else of the first found elsewhere; [] for none."""
    found = [i for i, name in tree.not_images if split_path(name)[1] == base]
    nearest = max(found, key=lambda i: f"{split_path(tree.names[i])[0]}images" in tree.folders, default=-1)
    lines = tree.lines(nearest) if found else []
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
            fix = "Fetch the file again, or remove it to pack without names."
            raise line.error(f"{line.text[:200]!r}, expected Idx, Ratio, Train, Val and Name between tabs. {fix}")
        names[int(number)] = key_of(cells[-1])
    if lines and sorted(names) != list(range(1, NUM_CLASSES + 1)):
        fix = "Fetch the file again, or remove it to pack without names."
        raise SourceError(f"{lines[0].where}: it names {len(names)} classes, expected 1..{NUM_CLASSES}. {fix}")
    return tuple(names[i] for i in sorted(names))


def _scenes(draft: Draft, tree: Tree, found: Found, kept: list[Key]) -> dict[str, Column]:
    """Returns the column of the images' scenes; {} without their file."""
    images, stems = {key[-1] for key in found.images}, [key[-1] for key in kept]
    if listed := [stem for stem in CALLED_CORRUPTED if stem in images]:
        draft.notes.append(f"Kept, though MosaicML Streaming's converter calls them corrupted: {', '.join(listed)}.")
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


def _scene_path(folder: str) -> re.Pattern[str]:
    return re.compile(rf"(?:{folder})/(?P<split>[^/]+)/(?P<key>[^/]+)\.[^/.]+", re.DOTALL)


# Masks: 0 = other, which is `ignore_index`, and 1..150, named by objectInfo150.txt (with all synonyms); or detectron2's
# 0..149 with `ignore_index` 255. Column `labels`: int64 (N,), index into the sorted names of the scenes, -1 for images
# that sceneCategories.txt does not list; absent without that file.
ADE20K = Paired(
    image=_scene_path("(?P<root>(?:.*/)?)images|(?:.*/)?release_test"),
    kinds=tuple(
        MaskKind(folder, _scene_path(f"(?:.*/)?{folder}")) for folder in ("annotations", "annotations_detectron2")
    ),
    absent="there are no images in images/training, images/validation or release_test/testing. Give the folder "
    "ADEChallengeData2016, with its images, or its archive.",
    where="annotations",
    only_splits=True,
    meaning=_meaning,
    columns=_scenes,
)
