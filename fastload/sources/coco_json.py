"""COCO's instances_*.json, read once, an annotation at a time, into flat arrays.

The file of train2017 has 450 MB of text; all of it as Python objects would take several times that.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError

_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, eq=False)
class Regions:
    """What each annotation covers, all of them one after another: polygons, or runs down the columns.

    Attributes:
        ends: int64 (A,), where the rings of each annotation end in `ring_ends`.
        ring_ends: int64, where the numbers of each ring end in `points`.
        points: float32, x, y, x, y, ...
        run_ends: int64 (A,), where the runs of each annotation end in `lengths`.
        lengths: uint32, of background and region in turn.
    """

    ends: NDArray[np.int64]
    ring_ends: NDArray[np.int64]
    points: NDArray[np.float32]
    run_ends: NDArray[np.int64]
    lengths: NDArray[np.uint32]

    def empty(self) -> NDArray[np.bool_]:
        """Whether an annotation has neither polygon nor runs, bool (A,)."""
        without: NDArray[np.bool_] = np.diff(self.ends, prepend=0) + np.diff(self.run_ends, prepend=0) == 0
        return without


@dataclass(frozen=True, eq=False)
class Instances:
    """One file: its images, its categories by ascending id, and its annotations in the order of the file.

    Attributes:
        names: file_name of each image.
        image_ids: int64 (N,).
        heights: int64 (N,), 0 where it is not said; widths likewise.
        category_ids: ascending.
        category_names: theirs.
        image: int64 (A,), the image of each annotation, by its place in `names`.
        category: int64 (A,), by its place in `category_ids`.
        boxes: float64 (A, 4), x, y, width, height.
        areas: float64 (A,); the box's where none is said.
        crowd: uint8 (A,).
        regions: what they cover; None when not asked for.
        good: bool (A,), False for those that name an image or a category that is not listed, or whose runs are of
            another size than their image.
        bad: (image or -1, reason) of those, and of the annotations that could not be taken among the others at all.
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
    """The images, categories and annotations of a file.

    Args:
        data: its content.
        where: its path, for messages.
        with_regions: whether the segmentations are kept.

    Raises:
        SourceError: it is not JSON, or no instances file; an image or a category without its fields, or twice.
    """
    images, categories, seen = _Images(), dict[int, str](), set[str]()
    annotations = _Annotations(with_regions)
    try:
        text = data.decode("utf-8-sig")
        del data
        for name, number, item in _walk(text):
            seen.add(name)
            if number < 0 or name not in ("images", "annotations", "categories"):
                continue
            if not isinstance(item, dict):
                raise SourceError(f"{where}: {name}[{number}] is {item!r:.60}, expected an object. Fetch it again.")
            if name == "annotations":
                annotations.add(number, item)
            elif name == "images":
                images.add(item, f"{where}: images[{number}]")
            else:
                _add_category(categories, item, f"{where}: categories[{number}]")
    except SourceError:
        raise
    except (ValueError, RecursionError) as exc:
        raise SourceError(f"{where} is not well-formed JSON: {exc}. Fetch it again.") from exc
    lacking = [name for name in ("images", "annotations", "categories") if name not in seen]
    if lacking:
        raise SourceError(
            f"{where} has no {' and no '.join(lacking)}, so it is no instances file of COCO. Fetch it again, or move "
            "it away."
        )
    return annotations.resolve(images, dict(sorted(categories.items())))


def decode_counts(counts: str) -> list[int]:
    """The lengths of the runs in COCO's compressed string.

    Each character holds 5 bits, the low ones first, and whether more follow; from the third length on it is the
    difference to the one two before it (as defined by cocoapi's maskApi.c).

    Raises:
        ValueError: it is no such string.
    """
    lengths: list[int] = []
    value = shift = 0
    for code in counts.encode("ascii", "replace"):
        bits = code - 48
        if not 0 <= bits < 64 or shift > 35:
            raise ValueError("has runs in a string that is not COCO's")
        value |= (bits & 0x1F) << shift
        shift += 5
        if bits & 0x20:
            continue
        if bits & 0x10:
            value -= 1 << shift
        lengths.append(value + (lengths[-2] if len(lengths) > 2 else 0))
        value = shift = 0
    if shift:
        raise ValueError("has runs in a string that is cut short")
    return lengths


def _walk(text: str) -> Iterator[tuple[str, int, Any]]:
    """(name, number, element) of the lists in the object that a text is; (name, -1, None) for each name first.

    Raises:
        ValueError: it is not well formed, or holds more behind its end.
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


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _is_number(value: Any) -> bool:
    # No pixel lies further out; the comparison is False for NaN, and safe for integers beyond any float.
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e9 < value < 1e9


def _are_numbers(ring: list[Any]) -> bool:
    # Some 40 million numbers in train2017: the sum tells NaN and what is no number, the ends what is too far out.
    try:
        return not ring or (isfinite(sum(ring)) and min(ring) > -1e9 and max(ring) < 1e9)
    except (TypeError, OverflowError):
        return False


class _Images:
    def __init__(self) -> None:
        self.names: list[str] = []
        self.heights, self.widths = array("q"), array("q")
        self.index: dict[int, int] = {}

    def add(self, item: dict[str, Any], where: str) -> None:
        number, name = item.get("id"), item.get("file_name")
        if not _is_int(number) or not isinstance(name, str):
            raise SourceError(f"{where} has id {number!r} and file_name {name!r}. Mend the file.")
        if number in self.index:
            raise SourceError(f"{where}: image id {number} occurs a second time, for {name}. Mend the file.")
        size = item.get("height", 0), item.get("width", 0)
        if not all(_is_int(side) and 0 <= side < 2**31 for side in size):
            raise SourceError(f"{where} ({name}) has the height {size[0]!r} and width {size[1]!r}. Mend the file.")
        self.index[number] = len(self.names)
        self.names.append(name)
        self.heights.append(size[0])
        self.widths.append(size[1])


def _add_category(categories: dict[int, str], item: dict[str, Any], where: str) -> None:
    number, name = item.get("id"), item.get("name")
    if not _is_int(number) or not isinstance(name, str):
        raise SourceError(f"{where} has id {number!r} and name {name!r}. Mend the file.")
    if number in categories:
        raise SourceError(f"{where}: category id {number} occurs a second time, for {name}. Mend the file.")
    categories[number] = name


class _Annotations:
    """Annotations as they come; their ids are resolved at the end, since categories stand behind them in COCO."""

    def __init__(self, with_regions: bool) -> None:
        self._with_regions = with_regions
        self._ids: list[str] = []
        self._image, self._category = array("q"), array("q")
        self._boxes, self._areas, self._crowd = array("d"), array("d"), array("B")
        self._ends, self._ring_ends, self._points = array("q"), array("q"), array("f")
        self._run_ends, self._lengths, self._run_size = array("q"), array("I"), array("q")
        self._bad: list[tuple[Any, str]] = []

    def add(self, number: int, item: dict[str, Any]) -> None:
        name = f"annotation {item.get('id', f'number {number}')}"
        image = item.get("image_id")
        try:
            if not _is_int(image):
                raise ValueError(f"has image id {image!r}")
            if not _is_int(item.get("category_id")):
                raise ValueError(f"has category id {item.get('category_id')!r}")
            box = item.get("bbox")
            if not isinstance(box, list) or len(box) != 4 or not all(map(_is_number, box)) or min(box[2:]) < 0:
                raise ValueError(f"has the box {box!r:.80}")
            area = item.get("area", 0)
            if not _is_number(area):
                raise ValueError(f"has the area {area!r:.80}")
            crowd = item.get("iscrowd", 0)
            if crowd not in (0, 1):
                raise ValueError(f"has iscrowd {crowd!r:.80}, expected 0 or 1")
            rings, lengths, size = _region(item.get("segmentation")) if self._with_regions else ([], [], (0, 0))
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

    def resolve(self, images: _Images, categories: dict[int, str]) -> Instances:
        place = {number: i for i, number in enumerate(categories)}
        image = np.array([images.index.get(number, -1) for number in self._image], np.int64)
        category = np.array([place.get(number, -1) for number in self._category], np.int64)
        heights, widths = np.array(images.heights, np.int64), np.array(images.widths, np.int64)
        bad = [(images.index.get(at, -1) if _is_int(at) else -1, reason) for at, reason in self._bad]
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
            names=images.names,
            image_ids=np.array(list(images.index), np.int64),
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


def _region(value: Any) -> tuple[list[list[float]], list[int], tuple[int, int]]:
    """Polygons, or the lengths of runs and their height and width (0, 0 without); all empty when there is no region.

    Raises:
        ValueError: it is none.
    """
    if isinstance(value, dict):
        size, counts = value.get("size"), value.get("counts")
        if not isinstance(size, list) or len(size) != 2 or not all(_is_int(side) and 0 < side < 2**31 for side in size):
            raise ValueError(f"has runs of size {size!r:.80}")
        if isinstance(counts, str):
            counts = decode_counts(counts)
        if not isinstance(counts, list) or not all(_is_int(length) and 0 <= length < 2**32 for length in counts):
            raise ValueError("has runs with lengths that are none")
        if sum(counts) != size[0] * size[1]:
            raise ValueError(f"has runs of {sum(counts)} pixels for a size of {size[1]}x{size[0]}")
        return [], counts, (size[0], size[1])
    if not isinstance(value, list | None):
        raise ValueError(f"has the region {value!r:.60}")
    for ring in value or []:
        if not isinstance(ring, list) or len(ring) % 2 or not _are_numbers(ring):
            raise ValueError(f"has the polygon {ring!r:.60}")
    return value or [], [], (0, 0)
