"""Reads COCO's instances_*.json into flat arrays, one annotation at a time.

The file of train2017 is 450 MB of text, and would take several times as much as Python objects.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.sources.coco.masks import Regions, is_int, is_number, parse_region

_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, eq=False)
class Instances:
    """The content of one file: N images, categories by ascending id, and A annotations in the order of the file.

    Attributes:
        names: file_name of each image.
        image_ids: int64 (N,), id of each image.
        heights: int64 (N,), height of each image; 0 if unknown.
        widths: int64 (N,), width of each image; 0 if unknown.
        category_ids: ids of the categories, ascending.
        category_names: names of the categories.
        image: int64 (A,), index in `names` of each annotation's image.
        category: int64 (A,), index in `category_ids` of each annotation's category.
        boxes: float64 (A, 4), x, y, width, height.
        areas: float64 (A,), area of each annotation; that of its box if the file gives none.
        crowd: uint8 (A,), 1 for a crowd.
        regions: polygons and run lengths; None if not asked for.
        good: bool (A,), False if the image or category is not listed, or the run lengths are of another size than the
            image.
        bad: (index of the image or -1, reason) of annotations that are not good, and of those left out of the arrays.
    """

    names: list[str]
    image_ids: NDArray[np.int64]
    heights: NDArray[np.int64]
    widths: NDArray[np.int64]
    category_ids: tuple[int, ...]
    category_names: tuple[str, ...]
    image: NDArray[np.int64]
    category: NDArray[np.int64]
    boxes: NDArray[np.float64]
    areas: NDArray[np.float64]
    crowd: NDArray[np.uint8]
    regions: Regions | None
    good: NDArray[np.bool_]
    bad: list[tuple[int, str]]


def read_instances(data: bytes, where: str, with_regions: bool) -> Instances:
    """Returns the images, categories and annotations of a file; `where` is its path.

    Raises:
        SourceError: the file is not JSON, or no instances file; an image or category lacks a field, or occurs twice.
    """
    content = _Content(where, with_regions)
    add = {"images": content.add_image, "annotations": content.add_annotation, "categories": content.add_category}
    seen = set()
    try:
        text = data.decode("utf-8-sig")
        del data
        for name, number, item in _walk(text):
            seen.add(name)
            if number < 0 or name not in add:
                continue
            if not isinstance(item, dict):
                raise SourceError(f"{where}: {name}[{number}] is {item!r:.60}, expected an object. Fetch it again.")
            add[name](number, item)
    except SourceError:
        raise
    except (ValueError, RecursionError) as exc:
        raise SourceError(f"{where} is not well-formed JSON: {exc}. Fetch it again.") from exc
    lacking = [name for name in add if name not in seen]
    if lacking:
        raise SourceError(
            f"{where} has no {' and no '.join(lacking)}, so it is no instances file of COCO. Fetch it again, or move "
            "it away."
        )
    return content.resolve()


def join_instances(files: list[Instances], kept: list[NDArray[np.bool_]]) -> Instances:
    """Returns the content of several files with the same categories as one, file by file.

    These are the images `kept`, bool (N,) for each file, and all annotations; `image` is -1 for those that are bad or
    of other images.
    """
    starts = np.cumsum([0, *(keep.sum() for keep in kept[:-1])])
    numbers = [np.where(keep, np.cumsum(keep) - 1 + start, -1) for keep, start in zip(kept, starts, strict=True)]
    image = [np.where(file.good, number[file.image], -1) for file, number in zip(files, numbers, strict=True)]
    regions = [file.regions for file in files if file.regions is not None]

    def joined(name: str, *, of_images: bool = False) -> NDArray[Any]:
        parts = [getattr(file, name) for file in files]
        return np.concatenate([part[keep] for part, keep in zip(parts, kept, strict=True)] if of_images else parts)

    return replace(
        files[0],
        names=[file.names[i] for file, keep in zip(files, kept, strict=True) for i in np.flatnonzero(keep).tolist()],
        image_ids=joined("image_ids", of_images=True),
        heights=joined("heights", of_images=True),
        widths=joined("widths", of_images=True),
        image=np.concatenate(image),
        category=joined("category"),
        boxes=joined("boxes"),
        areas=joined("areas"),
        crowd=joined("crowd"),
        regions=Regions.joined(regions) if regions else None,
        good=joined("good"),
        bad=[],
    )


def _walk(text: str) -> Iterator[tuple[str, int, Any]]:
    """Yields (name, number, element) of the lists in a JSON object, and first (name, -1, None) for each name.

    Raises:
        ValueError: the text is not well formed, or goes on behind the object.
    """

    def skip(at: int, wanted: str) -> tuple[str, int]:
        at = _SPACE.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing at all too
        if at >= len(text) or text[at] not in wanted:
            raise ValueError(f"it is cut short at character {at}" if at >= len(text) else f"damaged at character {at}")
        return text[at], at + 1

    _, at = skip(0, "{")
    mark, at = skip(at, '"}')
    while mark != "}":
        name, at = _DECODER.raw_decode(text, at - 1)
        yield name, -1, None
        _, at = skip(at, ":")
        at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
        if text[at : at + 1] == "[":
            number, mark = 0, ","
            at = _SPACE.match(text, at + 1).end()  # type: ignore[union-attr]
            if text[at : at + 1] == "]":
                mark, at = "]", at + 1
            while mark == ",":
                at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
                item, at = _DECODER.raw_decode(text, at)
                yield name, number, item
                number += 1
                mark, at = skip(at, ",]")
        else:
            _, at = _DECODER.raw_decode(text, at)
        mark, at = skip(at, ",}")
        if mark == ",":
            _, at = skip(at, '"')
    if text[at:].strip():
        raise ValueError(f"there is more behind its end at character {at}")


def _sound(name: str) -> str:
    """Returns a name as text that UTF-8 can hold: JSON can contain half a surrogate pair."""
    return name.encode("utf-8", "backslashreplace").decode()


class _Content:
    """A file as it is read. Ids are resolved at the end: in COCO's files categories follow the annotations."""

    def __init__(self, where: str, with_regions: bool) -> None:
        self._where, self._with_regions = where, with_regions
        self._names: list[str] = []
        self._heights, self._widths = array("q"), array("q")
        self._index: dict[int, int] = {}  # id -> number of an image
        self._categories: dict[int, str] = {}
        self._ids: list[str] = []
        self._image, self._category = array("q"), array("q")
        self._boxes, self._areas, self._crowd = array("d"), array("d"), array("B")
        self._ends, self._ring_ends, self._points = array("q"), array("q"), array("f")
        self._run_ends, self._lengths, self._run_size = array("q"), array("I"), array("q")
        self._bad: list[tuple[Any, str]] = []

    def add_image(self, at: int, item: dict[str, Any]) -> None:
        where, number, name = f"{self._where}: images[{at}]", item.get("id"), item.get("file_name")
        if not is_int(number) or not isinstance(name, str):
            raise SourceError(f"{where} has id {number!r} and file_name {name!r}. Fix the file.")
        if number in self._index:
            raise SourceError(f"{where}: image id {number} occurs a second time, for {name}. Fix the file.")
        size = item.get("height", 0), item.get("width", 0)
        if not all(is_int(side) and 0 <= side < 2**31 for side in size):
            raise SourceError(f"{where} ({name}) has the height {size[0]!r} and width {size[1]!r}. Fix the file.")
        self._index[number] = len(self._names)
        self._names.append(_sound(name))
        self._heights.append(size[0])
        self._widths.append(size[1])

    def add_category(self, at: int, item: dict[str, Any]) -> None:
        where, number, name = f"{self._where}: categories[{at}]", item.get("id"), item.get("name")
        if not is_int(number) or not isinstance(name, str):
            raise SourceError(f"{where} has id {number!r} and name {name!r}. Fix the file.")
        if number in self._categories:
            raise SourceError(f"{where}: category id {number} occurs a second time, for {name}. Fix the file.")
        self._categories[number] = _sound(name)

    def add_annotation(self, number: int, item: dict[str, Any]) -> None:
        name = f"annotation {item.get('id', f'number {number}')}"
        image = item.get("image_id")
        try:
            if not is_int(image):
                raise ValueError(f"has image id {image!r}")
            if not is_int(item.get("category_id")):
                raise ValueError(f"has category id {item.get('category_id')!r}")
            box = item.get("bbox")
            if not isinstance(box, list) or len(box) != 4 or not all(map(is_number, box)) or min(box[2:]) < 0:
                raise ValueError(f"has the box {box!r:.80}")
            area = item.get("area", 0)
            if not is_number(area):
                raise ValueError(f"has the area {area!r:.80}")
            crowd = item.get("iscrowd", 0)
            if crowd not in (0, 1):
                raise ValueError(f"has iscrowd {crowd!r:.80}, expected 0 or 1")
            rings, lengths, size = parse_region(item.get("segmentation")) if self._with_regions else ([], [], (0, 0))
        except ValueError as exc:
            self._bad.append((image, f"{name} {exc}"))
            return
        self._ids.append(name)
        self._image.append(image)
        self._category.append(item["category_id"])
        self._boxes.extend(box)
        self._areas.append(item.get("area", box[2] * box[3]))
        self._crowd.append(int(crowd))
        for ring in rings:
            self._points.extend(ring)
            self._ring_ends.append(len(self._points))
        self._lengths.extend(lengths)
        self._ends.append(len(self._ring_ends))
        self._run_ends.append(len(self._lengths))
        self._run_size.extend(size)

    def resolve(self) -> Instances:
        categories = dict(sorted(self._categories.items()))
        index = {number: i for i, number in enumerate(categories)}
        image = np.array([self._index.get(number, -1) for number in self._image], np.int64)
        category = np.array([index.get(number, -1) for number in self._category], np.int64)
        heights, widths = np.array(self._heights, np.int64), np.array(self._widths, np.int64)
        bad = [(self._index.get(at, -1) if is_int(at) else -1, reason) for at, reason in self._bad]
        good = (image >= 0) & (category >= 0)
        run_size = np.array(self._run_size, np.int64).reshape(-1, 2)
        for row in np.flatnonzero(run_size[:, 0] > 0).tolist():
            at, said = image[row], tuple(run_size[row].tolist())
            if at >= 0 and said != (size := (int(heights[at]), int(widths[at]))):
                why = f"has runs of {said[1]}x{said[0]} for an image of {size[1]}x{size[0]} (width x height)"
                bad.append((int(at), f"{self._ids[row]} {why}"))
                good[row] = False
        for row in np.flatnonzero((image < 0) | (category < 0)).tolist():
            which, number = ("image", self._image[row]) if image[row] < 0 else ("category", self._category[row])
            bad.append((int(image[row]), f"{self._ids[row]} has {which} id {number}, which is not listed"))
        regions = None
        if self._with_regions:
            regions = Regions(
                ends=np.array(self._ends, np.int64),
                ring_ends=np.array(self._ring_ends, np.int64),
                points=np.array(self._points, np.float32),
                run_ends=np.array(self._run_ends, np.int64),
                lengths=np.array(self._lengths, np.uint32),
            )
        return Instances(
            names=self._names,
            image_ids=np.array(list(self._index), np.int64),
            heights=heights,
            widths=widths,
            category_ids=tuple(categories),
            category_names=tuple(categories.values()),
            image=image,
            category=category,
            boxes=np.array(self._boxes, np.float64).reshape(-1, 4),
            areas=np.array(self._areas, np.float64),
            crowd=np.array(self._crowd, np.uint8),
            regions=regions,
            bad=bad,
            good=good,
        )
