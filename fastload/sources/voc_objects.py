"""The objects of Pascal VOC's annotation files: their classes and boxes."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from fastload.sources.listing import Column

BOX_NAMES = ("x", "y", "width", "height")


class Objects(NamedTuple):
    """What one annotation says, in its order."""

    names: tuple[str, ...]
    difficult: tuple[bool, ...]
    boxes: tuple[tuple[float, float, float, float], ...]
    """x, y, width, height from 0: the whole image is 0, 0, W, H."""


def parse_annotation(data: bytes) -> Objects:
    """The objects of one .xml file; the boxes of their parts are passed over.

    Raises:
        ValueError: it is not well formed, declares entities, or has an object without a name or with a box that is
            none; the message goes on where "an annotation that" ends.
    """
    # Imported here: nobody else needs an XML parser.
    from xml.etree import ElementTree

    # A document type is where entities are declared, which expand without limit or name other files; VOC has none.
    # Encodings in which it would not be seen here hold zero bytes.
    if b"<!DOCTYPE" in data or b"\0" in data:
        raise ValueError("declares a document type or is not in UTF-8: it is not read")
    try:
        root = ElementTree.fromstring(data)
    except (ElementTree.ParseError, LookupError, ValueError) as exc:
        raise ValueError(f"is not well formed: {exc}") from exc
    names, difficult, boxes = [], [], []
    for item in root.iter("object"):
        name = (item.findtext("name") or "").strip()
        if not name:
            raise ValueError("has an object without a name")
        names.append(name)
        difficult.append((item.findtext("difficult") or "0").strip() not in ("0", "false", "False"))
        try:
            corners = [float(item.findtext(f"bndbox/{part}") or "") for part in ("xmin", "ymin", "xmax", "ymax")]
        except ValueError:
            raise ValueError(f"has an object ({name}) without a box of four numbers") from None
        left, top, right, bottom = corners
        if not all(map(math.isfinite, corners)) or right < left or bottom < top:
            raise ValueError(f"has an object ({name}) with the box {left:g}, {top:g}, {right:g}, {bottom:g}")
        boxes.append((left - 1, top - 1, right - left + 1, bottom - top + 1))
    return Objects(tuple(names), tuple(difficult), tuple(boxes))


def box_columns(objects: list[Objects], classes: tuple[str, ...]) -> dict[str, Column]:
    """Columns boxes, box_labels, box_difficult and num_boxes, padded to the most boxes of any image (at least 1)."""
    counts = np.array([len(each.names) for each in objects], np.int64)
    most = max(1, int(counts.max(initial=0)))
    boxes = np.zeros((len(objects), most, 4), np.float32)
    labels = np.full((len(objects), most), -1, np.int64)
    difficult = np.zeros((len(objects), most), np.uint8)
    index = {name: i for i, name in enumerate(classes)}
    for row, each in enumerate(objects):
        if each.names:
            boxes[row, : len(each.names)] = each.boxes
            labels[row, : len(each.names)] = [index[name] for name in each.names]
            difficult[row, : len(each.names)] = each.difficult
    return {
        "boxes": Column(boxes, {"names": BOX_NAMES}, "xywh"),
        "box_labels": Column(labels, {"names": classes}),
        "box_difficult": Column(difficult),
        "num_boxes": Column(counts),
    }
