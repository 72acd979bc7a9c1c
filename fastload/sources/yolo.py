"""YOLO: images below `images/`, and below `labels/` a text file for each, a line for each object in it.

    images/train/a.jpg, labels/train/a.txt        as Ultralytics has it
    train/images/a.jpg, train/labels/a.txt        as Roboflow exports it
    data.yaml (or any other .yaml), classes.txt   names of the classes

A line is a class and a box (`0 0.5 0.4 0.2 0.1`: middle, width and height as parts of the image's), or a class and the
corners of a polygon, whose bounds are the box then. An image without a file, or with an empty one, has no object.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastload.errors import ImageError, MissingExtraError, SourceError
from fastload.images.image_header import probe_image
from fastload.sources.assemble import Draft, Samples, Splits, split_path, stem_of
from fastload.sources.box_forms import BoxSlots
from fastload.sources.listing import SourceOptions, first_few, split_of_parts
from fastload.sources.tree import Line, Tree, is_image, key_of

_LINE = re.compile(r"\d{1,9}(\s+[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?){4,}")
_HEAD = 2**12
_LOOKED_AT = 16  # files of labels, to see whether they are YOLO's
_TOLERANCE = 1e-3  # parts of an image by which boxes may leave it, since they are written with few digits


class _Objects(NamedTuple):
    """The objects of one image."""

    labels: list[int]
    boxes: NDArray[np.float64]  # (n, 4), x, y, width, height as parts of the image


def yolo_evidence(tree: Tree) -> list[str]:
    """Returns an image of a tree and its file of labels, if that is YOLO's; other layouts have text files, too."""
    texts = _label_files(tree)
    if not texts:
        return []
    looked_at = 0
    for i in tree.images().tolist():
        at = texts.get(_key(tree.names[i], "images"))
        if at is None or not tree.sizes[at]:
            continue
        try:
            head = tree.files.read_head(at, _HEAD).decode("ascii")
        except (ImageError, UnicodeDecodeError):
            return []
        lines = [line.strip() for line in head.splitlines() if line.strip()][: -1 if len(head) == _HEAD else None]
        if any(not _LINE.fullmatch(line) for line in lines):
            return []
        if lines:
            return [key_of(tree.names[i]), key_of(tree.names[at])]
        looked_at += 1
        if looked_at == _LOOKED_AT:
            break
    return []


def list_yolo(draft: Draft, tree: Tree, options: SourceOptions) -> Samples:
    """Returns the images below images/ with their boxes, split by split, in the order of their names.

    Columns: `boxes` float32 (N, M, 4) as x, y, width, height in pixels of the upright image, `box_labels` int64 (N, M),
    -1 behind the last, `num_boxes` int64 (N,).

    Raises:
        SourceError: there are no images; a line is no object; a class has no name; a box lies outside of its image; a
            file of labels has no image (these leave out the image if skipped); the names cannot be read.
        MissingExtraError: there is a data.yaml, and PyYAML is not installed.
    """
    draft.leave_out_broken(tree)
    texts = _label_files(tree)
    images = [i for i in tree.images().tolist() if _key(tree.names[i], "images")]
    if not images:
        raise SourceError(f"{tree.given}: there are no images in a folder `images`. Give the folder that holds it.")
    names, keypoints = _class_names(draft, tree)
    found, kept, polygons = list[_Objects](), list[int](), 0
    for i in images:
        at = texts.pop(_key(tree.names[i], "images"), None)
        lines = tree.lines(at) if at is not None else []
        try:
            objects = [_object(line, names, keypoints=keypoints) for line in lines]
            header = probe_image(_reading(tree, i)) if objects else None
        except (ValueError, ImageError) as error:
            draft.leave_out(key_of(tree.names[i]), str(error))
            continue
        polygons += sum(is_polygon for _, _, is_polygon in objects)
        boxes = np.array([box for _, box, _ in objects], np.float64).reshape(-1, 4)
        if header is not None:
            boxes *= [header.width, header.height] * 2
        found.append(_Objects([label for label, _, _ in objects], boxes))
        kept.append(i)
    for at in texts.values():
        if split_path(tree.names[at])[1] != "classes.txt" and stem_of(tree.names[at]) not in draft.unreadable:
            draft.leave_out(key_of(tree.names[at]), "has labels, but no image of its name")
    draft.note("Ignored images outside of folders `images`", _others(tree, images))
    if polygons:
        draft.notes.append(f"Objects given by polygons ({polygons}): packed as the boxes around them.")
    if keypoints:
        draft.notes.append("NOT READ: keypoints. Boxes and classes of the objects are packed.")
    labels = np.array([label for one in found for label in one.labels], np.int64)
    sample = np.repeat(np.arange(len(found)), [len(one.labels) for one in found])
    slots = BoxSlots.of(sample, len(found), draft.where)
    boxes = np.concatenate([one.boxes for one in found]) if found else np.zeros((0, 4))
    about = {"names": names} if names else {}
    columns = slots.columns(boxes.astype(np.float32), labels, about)
    if without := int((slots.counts == 0).sum()):
        draft.notes.append(f"Images without an object were kept ({without}).")
    splits = Splits.of([split_of_parts(tree.names[i].split("/")[:-1]) for i in kept])
    return Samples.in_tree(tree, kept, splits, columns, by_name=True)


def _reading(tree: Tree, i: int) -> Callable[[int], bytes]:
    return lambda size: tree.files.read_head(i, size)


def _key(name: str, folder: str) -> tuple[str, ...]:
    """Returns the parts of a path without suffix and without its last folder of that name; () if it lies in none."""
    *above, base = name.split("/")
    if folder not in above:
        return ()
    at = len(above) - 1 - above[::-1].index(folder)
    return (*above[:at], *above[at + 1 :], base.rpartition(".")[0] or base)


def _label_files(tree: Tree) -> dict[tuple[str, ...], int]:
    """Returns the text files below folders `labels`, by the key of their image."""
    if not any(folder.rpartition("/")[2] == "labels" for folder in tree.folders):
        return {}
    return {key: i for i, name in tree.not_images if name.endswith(".txt") and (key := _key(name, "labels"))}


def _others(tree: Tree, images: list[int]) -> list[str]:
    return [name for name in tree.others(images) if is_image(name)]


def _object(line: Line, names: tuple[str, ...], *, keypoints: bool) -> tuple[int, list[float], bool]:
    """Returns class, box (x, y, width, height as parts of the image) and whether it was a polygon; else ValueError."""
    if not _LINE.fullmatch(line.text):
        raise ValueError(f"line {line.number} of its labels is no object: {line.text[:60]!r}")
    label, *numbers = line.text.split()
    values = np.array(numbers, np.float64)
    if names and int(label) >= len(names):
        raise ValueError(f"line {line.number} of its labels has class {label}, and only {len(names)} have names")
    polygon = len(values) > 4 and not keypoints
    if polygon and len(values) % 2:
        raise ValueError(
            f"line {line.number} of its labels has {len(values)} numbers behind the class: neither a box nor the "
            f"corners of a polygon"
        )
    if polygon:
        low, high = values.reshape(-1, 2).min(axis=0), values.reshape(-1, 2).max(axis=0)
    else:
        low, high = values[:2] - values[2:4] / 2, values[:2] + values[2:4] / 2
    if (low < -_TOLERANCE).any() or (high > 1 + _TOLERANCE).any() or (high < low).any():
        said = " ".join(numbers[:4])
        what = "polygon" if polygon else "box"
        raise ValueError(
            f"line {line.number} of its labels has a {what} outside of the image, or of negative size: {said}"
        )
    low, high = np.clip(low, 0, 1), np.clip(high, 0, 1)
    return int(label), [*low.tolist(), *(high - low).tolist()], polygon


def _class_names(draft: Draft, tree: Tree) -> tuple[tuple[str, ...], bool]:
    """Returns the names of the classes, () if no file says them; and whether objects have keypoints."""
    at_top = min((name.count("/") for name in tree.names), default=0) + 1
    yamls = [i for i, name in tree.not_images if name.endswith((".yaml", ".yml")) and name.count("/") <= at_top]
    for i in yamls:
        content = _read_yaml(tree, i)
        names = content.get("names")
        if names is None:
            continue
        listed = dict(enumerate(names)) if isinstance(names, list) else names
        if not isinstance(listed, dict) or sorted(map(str, listed)) != sorted(map(str, range(len(listed)))):
            raise SourceError(
                f"{tree.where(i)}: `names` is no list of the classes 0, 1, ...: {str(names)[:80]}. Fix it."
            )
        draft.notes.append(f"Classes by {key_of(tree.names[i])} ({len(listed)}).")
        by_number = {int(number): str(name) for number, name in listed.items()}
        if content.get("nc", len(listed)) != len(listed):
            raise SourceError(
                f"{tree.where(i)}: `nc` is {content['nc']}, and {len(listed)} classes have names. Fix it."
            )
        draft.notes += _splits_not_followed(tree, content, key_of(tree.names[i]))
        return tuple(by_number[number] for number in range(len(by_number))), "kpt_shape" in content
    for i, name in enumerate(tree.names):
        if split_path(name)[1] == "classes.txt":
            found = tuple(key_of(line.text) for line in tree.lines(i))
            draft.notes.append(f"Classes by {key_of(name)} ({len(found)}).")
            return found, False
    looked = first_few([key_of(tree.names[i]) for i in yamls]) or "no .yaml, no classes.txt"
    draft.notes.append(f"The classes have no names ({looked}).")
    return (), False


def _splits_not_followed(tree: Tree, content: dict[str, Any], name: str) -> list[str]:
    """Returns a note if a data.yaml gives its splits other images than the folders of their names."""
    others = []
    for split in ("train", "val", "test"):
        given = content.get(split)
        for entry in given if isinstance(given, list) else [given] if given else []:
            parts = [part for part in str(entry).split("/") if part not in ("", ".", "..")]
            there = any(f"/{folder}".endswith("/" + "/".join(parts)) for folder in tree.folders)
            if split_of_parts(parts) != split or not there:
                others.append(f"{split}: {entry}")
    if not others:
        return []
    return [f"NOT READ: {first_few(others)} in {name}. Splits are those of the folders' names; all images are packed."]


def _read_yaml(tree: Tree, i: int) -> dict[str, Any]:
    try:
        import yaml
    except ImportError as error:
        raise MissingExtraError(
            f"{tree.where(i)}: PyYAML reads this file, which names the classes, and is not installed. Install it with "
            f"`pip install pyyaml`."
        ) from error
    try:
        text = tree.read_text(i)
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
            # A few lines of aliases of aliases can stand for more than any memory holds.
            raise SourceError(
                f"{tree.where(i)}: has YAML aliases (*name), which are not read. Write out what they mean."
            )
        content = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SourceError(f"{tree.where(i)}: is no YAML ({' '.join(str(error).split())[:120]}). Fix it.") from error
    return content if isinstance(content, dict) else {}
