"""Annotations that lie beside images and are not read: said loudly, as whoever has them expects labels or boxes."""

from __future__ import annotations

import re

from fastload.errors import ImageError, SourceError
from fastload.sources.listing import first_few
from fastload.sources.table_columns import plain_name
from fastload.sources.table_files import IMAGE_COLUMNS, is_table
from fastload.sources.table_reader import read_rows
from fastload.sources.tree import Tree, key_of

_YOLO = re.compile(rb"\s*\d+(\s+-?[\d.eE+-]+){4,}\s*(\n|$)")
_HEAD = 2**14
_MOST_TABLES = 4
_BY_NAME = (
    (re.compile(r"_annotations\.coco\.json"), "Roboflow's COCO export"),
    (re.compile(r"captions_\w+\.json"), "COCO's captions"),
    (re.compile(r"(person_keypoints|panoptic|instances|stuff|image_info)_\w+\.json"), "COCO's annotations"),
    (re.compile(r"(image_class_labels|train_test_split|bounding_boxes)\.txt"), "CUB-200's tables"),
    (re.compile(r".+_gt(Fine|Coarse)_\w+\.(json|png)"), "Cityscapes' annotations"),
)
_BY_HEAD = ((b'"shapes"', "LabelMe's annotations"), (b'"annotations"', "annotations as COCO's"))


def unread_annotations(tree: Tree) -> list[str]:
    """A sentence for each form of annotations that a tree of images holds and that its layout does not read."""
    found: dict[str, list[str]] = {}
    texts: dict[str, list[int]] = {}
    for i, name in enumerate(tree.names):
        folder, _, base = name.rpartition("/")
        # By the last letter first: there may be a million images.
        if base[-1:] not in "tnlg":
            continue
        form = next((form for pattern, form in _BY_NAME if pattern.fullmatch(base)), "")
        if not form and base.endswith((".txt", ".json", ".xml")):
            seen = texts.setdefault(f"{folder}/{base[-5:]}", [])
            seen.append(i)
            form = _by_content(tree, i) if len(seen) <= 2 else ""
        if form:
            found.setdefault(form, []).append(key_of(name))
    notes = [
        f"NOT READ: {first_few(names, 2)} look{'s' if len(names) == 1 else ''} like {form}. The packed file has none "
        "of it; convert it to COCO's layout, or to a table that names the images (see `fastload layouts`)."
        for form, names in found.items()
    ]
    return notes + _unmatched_tables(tree)


def _by_content(tree: Tree, i: int) -> str:
    name = tree.names[i]
    try:
        head = tree.files.read_head(i, _HEAD)
    except ImageError:
        return ""
    if name.endswith(".txt"):
        return "YOLO's boxes" if _YOLO.match(head) else ""
    if name.endswith(".xml"):
        return "VOC's annotations" if b"<annotation" in head else ""
    return next((form for sign, form in _BY_HEAD if sign in head), "")


def _unmatched_tables(tree: Tree) -> list[str]:
    """Tables with a usual column of images, none of which is there."""
    notes = []
    tables = [i for i, name in enumerate(tree.names) if is_table(name) and name.count("/") <= 1]
    for i in tables[:_MOST_TABLES]:
        name = key_of(tree.names[i])
        try:
            head = tree.files.read_head(i, _HEAD)
            rows = read_rows(head, name, head=len(head) < int(tree.sizes[i]))
        except (SourceError, ImageError):
            continue
        columns = rows.columns
        names = rows.names or tuple(str(column[0]) for column in columns if column)
        named = [(at, one) for at, one in enumerate(names) if plain_name(one) in IMAGE_COLUMNS]
        if not named or len(names) < 2 or not rows.lines:
            continue
        at, column = named[0]
        cell = next((str(cell) for cell in columns[at][0 if rows.names else 1 :] if cell), "")
        images = [key_of(tree.names[k]) for k in tree.images()[:1].tolist()]
        notes.append(
            f"NOT READ: the table {name}. Its column {column!r} (e.g. {cell!r}) names none, or few, of the images, "
            f"which are called like {first_few(images)}. If it holds their labels, write their names as the files have "
            "them, and give the table itself."
        )
    return notes
