"""Pascal VOC: `VOCdevkit/VOC2012`, or the folder of the year itself, for segmentation, detection and classification.

    JPEGImages/2007_000032.jpg
    SegmentationClass/, SegmentationObject/       palette masks: the index is kept, 255 is the border
    ImageSets/Segmentation/{train,val}.txt        the images that have masks
    ImageSets/Main/{train,val,test}.txt           all images; Main/cat_train.txt: rows `id -1|0|1`
    Annotations/2007_000032.xml                   boxes

By default the images with masks are listed, if there are any; with masks="none" all images, with their classes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fastload.errors import SourceError
from fastload.format.ragged import Column
from fastload.options.pack import SourceOptions
from fastload.sources.assemble import Draft, Samples, children, split_path
from fastload.sources.boxes import CORNERS, BoxSlots, declared_size
from fastload.sources.listing import SPLIT_ORDER, first_few
from fastload.sources.paired import Found, Key, MaskKind, Paired, list_paired
from fastload.sources.tree import Tree, key_of
from fastload.system.advice import advice
from fastload.system.machine import available_memory

CLASSES = tuple(
    "aeroplane bicycle bird boat bottle bus car cat chair cow diningtable dog horse motorbike person pottedplant sheep "
    "sofa train tvmonitor".split()
)

VOID = 255

_PARTS = ("Annotations", "ImageSets", "JPEGImages", "SegmentationClass", "SegmentationClassAug", "SegmentationObject")
_LISTS = (*SPLIT_ORDER, "trainval")


def voc_evidence(tree: Tree) -> list[str]:
    """Returns the folders of a tree that are VOC's, if at least two of them lie side by side."""
    return [key_of(folder) for parts in _years(tree).values() for folder in parts]


_KINDS = tuple(
    MaskKind(
        folder,
        names=("background", *CLASSES) if of == "semantic" else (),
        ignore_index=VOID,
        note=f"Masks in {folder}: palette indices, {VOID} = border and ignored. {advice('masks of VOC')}",
        instances=of == "instance",
        attrs={"kind": of},
    )
    for folder, of in zip(_PARTS[3:], ("semantic", "semantic", "instance"), strict=True)
)


def list_voc(draft: Draft, tree: Tree, options: SourceOptions) -> Samples:
    """Returns VOC's images, split by split, in the order of their names.

    With masks, the images that ImageSets/Segmentation lists:
      "auto", "semantic": 0 = background, 1..20 = classes.
      "instance": the objects, numbered from 1 as in the annotation.
      In both, 255 is the border, which is `ignore_index`.
    With masks="none", or without a folder of masks, the images that ImageSets/Main lists, with `labels` uint8 (N, 20),
    1 for the classes in the image, and `difficult` uint8 (N, 20), 1 for the classes of which there are only difficult
    objects (their label is 0): a loss or score should pass over those.

    Columns, if there are Annotations: `boxes` float32 (N, M, 4) as x, y, width, height from 0 (VOC counts pixels from 1
    and includes the last: x = xmin - 1, width = xmax - xmin + 1), `box_labels` int64 (N, M), `box_difficult` uint8
    (N, M), `num_boxes` int64 (N,).
    """
    draft.leave_out_broken(tree)
    root, instances = _one_year(tree), options.masks == "instance"
    images = children(tree, f"{root}JPEGImages/")
    absent = f"there are no images in {key_of(root)}JPEGImages. Unpack them there, or give the folder that holds them."
    if not images:
        raise SourceError(f"{tree.given}: {absent}")
    read = [kind.name for kind in _KINDS if kind.instances == instances and options.masks != "none"]
    masks = {kind.name: children(tree, f"{root}{kind.name}/") if kind.name in read else {} for kind in _KINDS}
    used = next((name for name, of in masks.items() if of), "")
    split_of = _read_lists(draft, tree, root, [stem for stem in images if not used or stem in masks[used]], used)
    listed: dict[Key, int] = {(stem,): images[stem] for stem in split_of if stem in images}
    for stem in [stem for stem in split_of if stem not in images]:
        key = f"{key_of(root)}JPEGImages/{key_of(stem)}.jpg"
        draft.leave_out(key, f"is listed in {split_of[stem]}.txt, but has no file")
    if not listed:
        draft.refuse_left_out(0)
    of_listed: dict[str, dict[Key, int]]
    of_listed = {name: {(stem,): i for stem, i in of.items() if (stem,) in listed} for name, of in masks.items()}
    found = Found(listed, {key: split_of[key[0]] for key in listed}, of_listed)
    found_objects, stems = list[dict[str, Annotation]](), list[str]()

    def annotated(draft: Draft, tree: Tree, found: Found, kept: list[Key]) -> list[Key]:
        """Returns the images that have an annotation; all if there are none at all."""
        objects = _read_objects(draft, tree, root, found, kept)
        found_objects.extend([] if objects is None else [objects])
        kept = [key for key in kept if objects is None or key[0] in objects]
        stems.extend(key[0] for key in kept)
        return kept

    where = f"{key_of(root)}{'SegmentationObject' if instances else 'SegmentationClass'}"
    samples = list_paired(draft, tree, options, Paired(_KINDS, absent, where, check=annotated), found)
    objects = found_objects[0] if found_objects else None
    marks = {} if used else _read_main(tree, root, split_of)
    names = {item.name for found in (objects or {}).values() for item in found.items} | {name for _, name in marks}
    others = sorted(names - set(CLASSES))
    classes = tuple(sorted(names)) if others else CLASSES
    draft.note("Classes other than VOC's twenty are there, so that the names are those that occur", others)
    columns = {} if used else _labels(draft, stems, classes, marks, objects)
    if objects is not None:
        items = [(row, item) for row, of in enumerate(objects.values()) for item in of.items]
        slots = BoxSlots.of(np.array([row for row, _ in items], np.int64), len(objects), draft.where)
        boxes = np.array([item.box for _, item in items], np.float32).reshape(-1, 4)
        number = {name: i for i, name in enumerate(classes)}
        labels = Column(np.array([number[item.name] for _, item in items], np.int64), {"names": classes})
        difficult = np.array([item.difficult for _, item in items], np.uint8)
        columns |= slots.columns(boxes, labels, box_difficult=difficult)
        draft.notes.append("Boxes are x, y, width, height from 0: xmin - 1, ymin - 1, and so on.")
        sizes = np.array([of.size for of in objects.values()], np.int64).reshape(-1, 2)
        samples = replace(samples, declared=sizes)
    if unused := len(images) - len(listed):
        draft.notes.append(f"Images that the lists used do not name were left ({unused}).")
    if samples.masks and others:
        samples = replace(samples, masks=replace(samples.masks, names=()))
    return replace(samples, columns=columns)


def _years(tree: Tree) -> dict[str, list[str]]:
    """Returns folder (ending in `/`, or "") -> VOC's own folders in it, if there are two or more."""
    there = set(tree.folders)
    above = dict.fromkeys(at for at, base in map(split_path, tree.folders) if base in _PARTS)
    # ImageNet has folders Annotations and ImageSets too, but none of the others.
    own = ("ImageSets/Main", *_PARTS[2:])
    # Masks in Annotations come from DAVIS and the like, SegmentationClassPNG from labelme: not VOC's.
    masks = {f"{at}{part}" for at in above for part in ("Annotations", "SegmentationClassPNG")} & there
    if masks:
        holding = {split_path(tree.names[i])[0] for i in tree.images.tolist()}
        masks = {part for part in masks if any(folder.startswith(f"{part}/") for folder in holding)}
        above = dict.fromkeys(at for at in above if not any(split_path(part)[0] == at for part in masks))
    found = {at: [f"{at}{part}/" for part in _PARTS if at + part in there] for at in above}
    return {at: parts for at, parts in found.items() if len(parts) > 1 and any(at + part in there for part in own)}


def _one_year(tree: Tree) -> str:
    years = sorted(_years(tree))
    if not years:
        raise SourceError(
            f"{tree.given}: there is no folder with VOC's JPEGImages, Annotations and ImageSets in it. "
            "Give VOCdevkit/VOC2012, or what holds it."
        )
    if len(years) > 1:
        shown, one = first_few([key_of(year) or "." for year in years]), key_of(years[-1])
        how = f"unpack it and give one, such as {one}" if tree.archive else f"give one, such as {tree.path}/{one}"
        fix = f"Pack each by itself ({how}) and join the packed files with `fastload merge`."
        raise SourceError(f"{tree.given}: there are several years of VOC: {shown}. {fix}")
    return years[0]


def _read_lists(draft: Draft, tree: Tree, root: str, stems: list[str], kind: str) -> dict[str, str]:
    """Returns stem -> split of the images to list: by the lists in ImageSets; without any they are one split."""
    folder = f"{root}ImageSets/{'Segmentation' if kind else 'Main'}/"
    texts = children(tree, folder, ".txt")
    if kind == "SegmentationClassAug" and (augmented := texts.get("train_aug", texts.get("trainaug"))) is not None:
        texts["train"] = augmented
    lists = _LISTS[:3] if {"train", "val"} & set(texts) else _LISTS
    used = {split: texts[split] for split in lists if split in texts}
    if not used and any(name.startswith(f"{root}ImageSets/") for name in tree.names):
        raise SourceError(
            f"{tree.given}: there is none of {', '.join(f'{name}.txt' for name in _LISTS)} in {key_of(folder)}. "
            "Put the lists back, or remove ImageSets to pack all images as one split."
        )
    if not used:
        draft.notes.append(f"There is no ImageSets: all images{' with masks' * bool(kind)} are one split, `all`.")
        return dict.fromkeys(stems, "all")
    split_of: dict[str, str] = {}
    for split, position in used.items():
        lines = tree.lines(position)
        if not lines:
            raise SourceError(f"{tree.where(position)} is empty. Fetch it again, or remove it to pack without.")
        for line in lines:
            if len(line.text.split()) != 1:
                raise line.error(f"{line.text!r}, expected the name of one image. Fix the line.")
            if line.text in split_of:
                raise line.error(
                    f"{key_of(line.text)} is listed a second time (first in {split_of[line.text]}.txt). "
                    "Remove one of the lines: an image belongs to one split."
                )
            split_of[line.text] = split
    draft.notes.append(f"Splits by {', '.join(key_of(tree.names[i]) for i in used.values())}.")
    return split_of


def _read_main(tree: Tree, root: str, split_of: dict[str, str]) -> dict[tuple[str, str], int]:
    """Returns (stem, class) -> -1 (absent), 0 (difficult) or 1 (present), by ImageSets/Main/<class>_<split>.txt."""
    marks: dict[tuple[str, str], int] = {}
    splits = set(split_of.values())
    for text, position in children(tree, f"{root}ImageSets/Main/", ".txt").items():
        name, _, split = text.rpartition("_")
        for line in tree.lines(position) if name and split in splits else ():
            stem, *value = line.text.split()
            if value not in (["-1"], ["0"], ["1"]):
                raise line.error(f"{line.text!r}, expected an image and -1, 0 or 1. Fix the line.")
            if split_of.get(stem) != split:
                raise line.error(f"{key_of(stem)} is not in {split}.txt. Remove the line.")
            marks[stem, key_of(name)] = int(value[0])
    return marks


def _read_objects(draft: Draft, tree: Tree, root: str, found: Found, keys: list[Key]) -> dict[str, Annotation] | None:
    """Returns the annotation of each image that is listed; None if there are no annotations at all."""
    annotations = children(tree, f"{root}Annotations/", ".xml")
    annotated = {found.splits[key] for key in keys if key[0] in annotations}
    if not annotated:
        draft.notes.append("There are no annotations (.xml) of these images: no boxes.")
        return None
    for split in sorted({found.splits[key] for key in keys} - annotated):
        draft.notes.append(f"The split {split!r} has no annotations: its num_boxes is 0.")
    objects: dict[str, Annotation] = {}
    for key in keys:
        name, position = key_of(tree.names[found.images[key]]), annotations.get(key[0])
        if position is None and found.splits[key] in annotated:
            draft.leave_out(name, f"has no annotation in {key_of(root)}Annotations")
            continue
        try:
            objects[key[0]] = Annotation((0, 0), []) if position is None else parse_annotation(tree.read_text(position))
        except ValueError as exc:
            draft.leave_out(name, f"has an annotation, {key_of(tree.names[annotations[key[0]]])}, that {exc}")
    return objects


def _labels(
    draft: Draft, stems: list[str], classes: tuple[str, ...], marks: dict[tuple[str, str], int],
    objects: dict[str, Annotation] | None,
) -> dict[str, Column]:  # fmt: skip
    """Returns the columns of the classes in each image: by ImageSets/Main, else by the annotations."""
    if marks:
        draft.notes.append("Labels by ImageSets/Main: 0 there means difficult, which is label 0 and difficult 1.")
    elif objects is not None:
        draft.notes.append("Labels by the annotations, as ImageSets/Main has no lists of classes.")
        items = [(stem, item) for stem, found in objects.items() for item in found.items]
        marks = {(stem, item.name): 0 for stem, item in items}
        marks |= {(stem, item.name): 1 for stem, item in items if not item.difficult}
    else:
        draft.notes.append("There are neither lists of classes in ImageSets/Main nor annotations: no labels.")
        return {}
    if len(stems) * len(classes) > available_memory() // 8:
        raise SourceError(
            f"{draft.where}: {len(classes)} classes in {len(stems)} images, too many for a vector of labels each. Do "
            "the annotations name classes?"
        )
    row, number = ({name: i for i, name in enumerate(one)} for one in (stems, classes))
    found = np.full((len(stems), len(classes)), -1, np.int8)
    for (stem, name), mark in marks.items():
        if stem in row:
            found[row[stem], number[name]] = mark
    return {
        "labels": Column((found == 1).astype(np.uint8), {"names": classes}),
        "difficult": Column((found == 0).astype(np.uint8), {"names": classes}),
    }


class Annotation(NamedTuple):
    """The content of one file: the size of the image, and its objects, in its order."""

    size: tuple[int, int]  # height, width; 0, 0 if unknown
    items: list[Item]


class Item(NamedTuple):
    """One object in an annotation; its box is x, y, width, height from 0: the whole image is 0, 0, W, H."""

    name: str
    difficult: bool
    box: tuple[float, float, float, float]


def parse_annotation(data: bytes) -> Annotation:
    """Returns the content of one .xml file, without the parts of objects (heads, hands, ...).

    ValueError says what is wrong; the message continues "an annotation that ...".
    """
    # Imported here: no other layout needs an XML parser.
    from xml.etree import ElementTree

    # A document type can declare entities, which expand without limit or name other files; VOC has none. Encodings
    # that would hide it here contain zero bytes.
    if b"<!DOCTYPE" in data or b"\0" in data:
        raise ValueError("declares a document type or is not in UTF-8: it is not read")
    try:
        root = ElementTree.fromstring(data)
    except (ElementTree.ParseError, LookupError, ValueError) as exc:
        raise ValueError(f"is not well formed: {exc}") from exc
    items = []
    for item in root.iter("object"):
        name = (item.findtext("name") or "").strip()
        if not name:
            raise ValueError("has an object without a name")
        difficult = (item.findtext("difficult") or "0").strip() not in ("0", "false", "False")
        try:
            box = item.find("bndbox")
            corners = [float(box.findtext(part) or "" if box is not None else "") for part in CORNERS]
        except ValueError:
            raise ValueError(f"has an object ({name[:80]}) without a box of four numbers") from None
        left, top, right, bottom = corners
        if not all(abs(corner) < 1e9 for corner in corners) or right < left or bottom < top:
            raise ValueError(f"has an object ({name[:80]}) with the box {left:g}, {top:g}, {right:g}, {bottom:g}")
        items.append(Item(name, difficult, (left - 1, top - 1, right - left + 1, bottom - top + 1)))
    size = root.find("size")
    declared = declared_size(size.findtext("height"), size.findtext("width")) if size is not None else (0, 0)
    return Annotation(declared, items)
