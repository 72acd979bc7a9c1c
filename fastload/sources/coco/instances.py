"""Reads COCO's instances_*.json into flat arrays, one annotation at a time.

The file of train2017 is 450 MB of text, and would take several times as much as Python objects.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.sources.box_forms import CORNERS, SIZED, declared_size, reaches_out, sized_boxes
from fastload.sources.listing import BoxForm
from fastload.system.text import text_of

INSTANCES = re.compile(
    r"(?:^|/)(?:(?:instances|(?P<keypoints>person_keypoints))_([^/]+)\.json|(?:([^/]+)/)?_annotations\.coco\.json)$"
)
"""Names of the files, with the split in the name or in the folder."""
PANOPTIC = re.compile(r"(?:^|/)panoptic_([^/]+)\.json$")
"""Names of panoptic files."""

_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()
# The arrays of Instances that hold annotations, one behind the other; but for `image`, whose numbers count images.
_ARRAYS = ("category", "crowd", "boxes", "areas", "rings", "ring_sizes", "points", "runs", "lengths")


@dataclass(frozen=True, eq=False)
class Instances:
    """The content of one file: N images, categories by ascending id, and A annotations in the order of the file."""

    names: list[str]  # file_name of each image
    image_ids: NDArray[np.int64]  # (N,), id of each image
    sizes: NDArray[np.int64]  # (N, 2), height and width of each image; 0 if unknown
    category_ids: tuple[int, ...]  # ascending
    category_names: tuple[str, ...]
    bad: list[tuple[int, str]]  # (index of the image or -1, reason) of annotations that are wrong
    image: NDArray[np.int64]  # (A,), index in `names` of each annotation's image; -1 if the annotation is bad
    category: NDArray[np.int64]  # (A,), index in `category_ids` of each annotation's category
    crowd: NDArray[np.uint8]  # (A,), 1 for a crowd
    boxes: NDArray[np.float64]  # (A, 4), x, y, width, height
    areas: NDArray[np.float64]  # (A,), area of each annotation; of its box if the file gives none
    rings: NDArray[np.int64]  # (A,), number of polygons; 0 throughout if regions are not asked for
    ring_sizes: NDArray[np.int64]  # how many numbers of `points` each polygon has
    points: NDArray[np.float32]  # x, y, x, y, ...
    runs: NDArray[np.int64]  # (A,), how many of `lengths` each has; 0 throughout if regions are not asked for
    lengths: NDArray[np.uint32]  # pixels of background and region in turn, down the columns
    keypoints: NDArray[np.float32]  # (A, K, 3), x, y, visibility; K is the most of any annotation, 0 without any
    # Names and skeleton (pairs of their numbers, from 0) of each kind of keypoints among the categories
    kinds_of_keypoints: tuple[tuple[tuple[str, ...], tuple[tuple[int, int], ...]], ...] = ()
    made_boxes: int = 0  # how many annotations have no box but a region, whose bounds are taken
    outside: dict[int, str] = field(default_factory=dict)  # index of an image -> its first box that reaches out of it

    @property
    def categories(self) -> tuple[Any, ...]:
        """All that the file says of its categories."""
        return self.category_ids, self.category_names, self.kinds_of_keypoints


def read_instances(data: bytes, where: str, with_regions: bool, boxes: BoxForm = "auto") -> Instances:
    """Returns the images, categories and annotations of a file; `where` is its path, which SourceError names.

    `boxes` is the form of its boxes, x, y, width and height by default.
    """
    content = Content(where, with_regions, boxes)
    content.read(data)
    return content.resolve()


def join_instances(files: list[Instances], kept: list[NDArray[np.bool_]]) -> Instances:
    """Returns the content of several files with the same categories as one, file by file.

    It has the images `kept`, bool (N,) for each file, and all annotations; other images' have -1 as `image`.
    """
    every = np.concatenate(kept)
    number = np.where(every, np.cumsum(every) - 1, -1)
    parts = np.split(number, np.cumsum([len(keep) for keep in kept])[:-1])
    most = max(file.keypoints.shape[1] for file in files)
    joined: dict[str, Any] = {name: np.concatenate([getattr(file, name) for file in files]) for name in _ARRAYS}
    return replace(
        files[0],
        **joined,
        keypoints=np.concatenate([with_room(file.keypoints, most) for file in files]),
        made_boxes=sum(file.made_boxes for file in files),
        names=[file.names[i] for file, keep in zip(files, kept, strict=True) for i in np.flatnonzero(keep).tolist()],
        image_ids=np.concatenate([file.image_ids for file in files])[every],
        sizes=np.concatenate([file.sizes for file in files])[every],
        image=np.concatenate([np.append(part, -1)[file.image] for file, part in zip(files, parts, strict=True)]),
        bad=[],
    )


def with_room(keypoints: NDArray[np.float32], most: int) -> NDArray[np.float32]:
    """Returns keypoints, (A, K, 3), as (A, most, 3)."""
    return np.pad(keypoints, ((0, 0), (0, most - keypoints.shape[1]), (0, 0)))


def walk_json(text: str) -> Iterator[tuple[str, int, Any]]:
    """Yields (name, number, element) of the lists in a JSON object, and first (name, -1, None) for each name.

    ValueError names the malformed part.
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


class Content:
    """A file as it is read. Ids are resolved at the end: in COCO's files categories follow the annotations."""

    def __init__(self, where: str, with_regions: bool, boxes: BoxForm = "auto") -> None:
        self._where, self._with_regions, self._box_form = where, with_regions, boxes
        self._names: list[str] = []
        self._sizes = array("q")
        self._index: dict[int, int] = {}  # id -> number of an image
        self._categories: dict[int, str] = {}
        self._ids: list[str] = []
        self._made_boxes = 0
        self._keypoints = array("f")  # x, y, visibility, x, ...
        self._with_keypoints: list[tuple[int, int]] = []  # number of an annotation, and of its keypoints
        self._kinds: dict[int, tuple[tuple[str, ...], tuple[tuple[int, int], ...]]] = {}  # names, skeleton, by category
        # By annotation: image, category, crowd, rings, runs, and height and width of its runs; box and area
        self._integers, self._floats = array("q"), array("d")
        self._ring_sizes, self._points, self._lengths = array("q"), array("f"), array("I")
        self._bad: list[tuple[Any, str]] = []

    def read(self, data: bytes) -> None:
        """Adds a file's content; SourceError says what is wrong with it as a whole."""
        where = self._where
        add = {"images": self.add_image, "annotations": self.add_annotation, "categories": self.add_category}
        seen = set()
        try:
            text = data.decode("utf-8-sig")
            del data
            for name, number, item in walk_json(text):
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
        if lacking := [name for name in add if name not in seen]:
            raise SourceError(
                f"{where} has no {' and no '.join(lacking)}, so it is no annotations file of COCO. Fetch it again, or "
                "move it away."
            )

    def _named(self, item: dict[str, Any], where: str, name: str, known: Collection[int], kind: str) -> tuple[int, str]:
        """Returns id and name of an image or category; the name is text that UTF-8 can hold, unlike JSON's."""
        number, value = item.get("id"), item.get(name)
        if not is_int(number) or not isinstance(value, str):
            why = "" if is_int(number) else f"; {_whole_ids(number)}"
            raise SourceError(f"{where} has id {number!r:.80} and {name} {value!r:.80}{why}. Fix the file.")
        if number in known:
            raise SourceError(f"{where}: {kind} id {number} occurs a second time, for {value}. Fix the file.")
        return number, text_of(value)

    def add_image(self, at: int, item: dict[str, Any]) -> None:
        where = f"{self._where}: images[{at}]"
        number, name = self._named(item, where, "file_name", self._index, "image")
        given = item.get("height") or 0, item.get("width") or 0
        size = declared_size(*given)
        if given != (0, 0) and size == (0, 0):
            raise SourceError(
                f"{where} ({name:.200}) has the height {given[0]!r:.40} and width {given[1]!r:.40}. Fix the file."
            )
        self._index[number] = len(self._names)
        self._names.append(name)
        self._sizes.extend(size)

    def add_category(self, at: int, item: dict[str, Any]) -> None:
        number, name = self._named(item, f"{self._where}: categories[{at}]", "name", self._categories, "category")
        self._categories[number] = name
        if points := item.get("keypoints"):
            if not isinstance(points, list) or not all(isinstance(point, str) for point in points):
                raise SourceError(f"{self._where}: categories[{at}] has keypoints that are no names. Fix the file.")
            bones = item.get("skeleton") or []
            if not isinstance(bones, list) or not all(_is_bone(bone, len(points)) for bone in bones):
                raise SourceError(
                    f"{self._where}: categories[{at}] has a skeleton that is no list of pairs of its {len(points)} "
                    "keypoints, counted from 1. Fix the file."
                )
            self._kinds[number] = tuple(map(text_of, points)), tuple((a - 1, b - 1) for a, b in bones)

    def add_annotation(self, number: int, item: dict[str, Any]) -> None:
        name = f"annotation {str(item.get('id', f'number {number}'))[:40]}"
        image, category, box = item.get("image_id"), item.get("category_id"), item.get("bbox")
        try:
            if not is_int(image):
                raise ValueError(f"has image id {image!r:.80}; {_whole_ids(image)}")
            if not is_int(category):
                raise ValueError(f"has category id {category!r:.80}; {_whole_ids(category)}")
            region = item.get("segmentation")
            rings, lengths, size = parse_region(region) if self._with_regions else ([], [], (0, 0))
            if not box and not region:
                raise ValueError("has neither a bbox nor a segmentation")
            if not box:
                box = bounds_of(*parse_region(region))
                self._made_boxes += 1
            else:
                box = _checked_box(box, self._box_form)
            area = item.get("area", box[2] * box[3])
            if not is_number(area):
                raise ValueError(f"has the area {area!r:.80}")
            crowd = item.get("iscrowd")
            if crowd not in (None, 0, 1):
                raise ValueError(f"has iscrowd {crowd!r:.80}, expected 0 or 1")
            keypoints = _checked_keypoints(item["keypoints"]) if item.get("keypoints") else []
        except ValueError as exc:
            self._bad.append((image, f"{name} {exc}"))
            return
        if keypoints:
            self._with_keypoints.append((len(self._ids), len(keypoints) // 3))
            self._keypoints.extend(keypoints)
        self._ids.append(name)
        self._integers.extend((image, category, int(crowd or 0), len(rings), len(lengths), *size))
        self._floats.extend((*box, area))
        for ring in rings:
            self._points.extend(ring)
            self._ring_sizes.append(len(ring))
        self._lengths.extend(lengths)

    def resolve(self) -> Instances:
        categories = dict(sorted(self._categories.items()))
        index = {number: i for i, number in enumerate(categories)}
        integers = np.array(self._integers, np.int64).reshape(-1, 7)
        floats = np.array(self._floats, np.float64).reshape(-1, 5)
        sizes = np.array(self._sizes, np.int64).reshape(-1, 2)
        image = np.array([self._index.get(number, -1) for number in integers[:, 0].tolist()], np.int64)
        category = np.array([index.get(number, -1) for number in integers[:, 1].tolist()], np.int64)
        bad = [(self._index.get(at, -1) if is_int(at) else -1, reason) for at, reason in self._bad]
        good = (image >= 0) & (category >= 0)
        for row in np.flatnonzero((integers[:, 5] > 0) & (image >= 0)).tolist():
            (height, width), (rows, columns) = sizes[image[row]].tolist(), integers[row, 5:].tolist()
            if (rows, columns) != (height, width):
                why = f"has runs of {columns}x{rows} for an image of {width}x{height} (width x height)"
                bad.append((int(image[row]), f"{self._ids[row]} {why}"))
                good[row] = False
        for row in np.flatnonzero((image < 0) | (category < 0)).tolist():
            which, number = ("image", integers[row, 0]) if image[row] < 0 else ("category", integers[row, 1])
            bad.append((int(image[row]), f"{self._ids[row]} has {which} id {number}, which is not listed"))
        for at, count in self._with_keypoints:
            named = len(self._kinds.get(int(integers[at, 1]), ((),))[0])
            if named and named != count and good[at]:
                why = f"has {count} keypoints, its category has names for {named}"
                bad.append((int(image[at]), f"{self._ids[at]} {why}"))
                good[at] = False
        keypoints = np.zeros((len(integers), max([0, *(count for _, count in self._with_keypoints)]), 3), np.float32)
        values, begin = np.array(self._keypoints, np.float32).reshape(-1, 3), 0
        for at, count in self._with_keypoints:
            keypoints[at, :count] = values[begin : begin + count]
            begin += count
        limits = np.append(np.where(sizes > 0, sizes, np.inf)[:, ::-1], [[np.inf, np.inf]], axis=0)[image]
        out = good & reaches_out(floats[:, :4], "xywh", limits).any(axis=1)
        return Instances(
            names=self._names,
            image_ids=np.array(list(self._index), np.int64),
            sizes=sizes,
            category_ids=tuple(categories),
            category_names=tuple(categories.values()),
            bad=bad,
            image=np.where(good, image, -1),
            category=category,
            crowd=integers[:, 2].astype(np.uint8),
            boxes=floats[:, :4],
            areas=floats[:, 4],
            rings=integers[:, 3],
            ring_sizes=np.array(self._ring_sizes, np.int64),
            points=np.array(self._points, np.float32),
            runs=integers[:, 4],
            lengths=np.array(self._lengths, np.uint32),
            keypoints=keypoints,
            kinds_of_keypoints=tuple(dict.fromkeys(self._kinds[number] for number in sorted(self._kinds))),
            made_boxes=self._made_boxes,
            outside={int(image[row]): self._ids[row] for row in reversed(np.flatnonzero(out).tolist())},
        )


def parse_region(value: Any) -> tuple[list[list[float]], list[int], tuple[int, int]]:
    """Returns polygons, or run lengths and their height and width (else 0, 0); all are empty for no segmentation.

    ValueError says what is wrong; the message continues "annotation 7 ...".
    """
    if isinstance(value, dict):
        size, counts = value.get("size"), value.get("counts")
        if not isinstance(size, list) or len(size) != 2 or not all(is_int(side) and 0 < side < 2**31 for side in size):
            raise ValueError(f"has runs of size {size!r:.80}")
        if isinstance(counts, str):
            counts = decode_counts(counts)
        if not isinstance(counts, list) or not all(is_int(length) and 0 <= length < 2**32 for length in counts):
            raise ValueError("has runs with lengths that are none")
        if sum(counts) != size[0] * size[1]:
            raise ValueError(f"has runs of {sum(counts)} pixels for a size of {size[1]}x{size[0]}")
        return [], counts, (size[0], size[1])
    if not isinstance(value, list | None):
        raise ValueError(f"has the region {value!r:.60}")
    for ring in value or []:
        if not isinstance(ring, list) or len(ring) % 2 or not _are_numbers(ring):
            raise ValueError(f"has the polygon {ring!r:.60}")
        if len(ring) in (2, 4):
            also = "; cocoapi takes it for a box x, y, width, height: write out its corners" if len(ring) == 4 else ""
            raise ValueError(f"has the polygon {ring!r:.60} of {len(ring) // 2} corners, which has no area{also}")
    return value or [], [], (0, 0)


def bounds_of(rings: list[list[float]], lengths: list[int], size: tuple[int, int]) -> list[float]:
    """Returns the box around polygons, or around the pixels of run lengths: x, y, width, height."""
    if size != (0, 0):
        ends = np.cumsum(lengths)
        first, last = (ends - lengths)[1::2], ends[1::2] - 1
        first, last = first[first <= last], last[first <= last]
        if not len(first):
            return [0.0, 0.0, 0.0, 0.0]
        (left, top), (right, bottom) = divmod(first, size[0]), divmod(last, size[0])
        whole = bool((left != right).any())  # a run down to the foot of a column goes on at the top of the next
        low, high = (0, size[0]) if whole else (int(top.min()), int(bottom.max()) + 1)
        return [float(left.min()), float(low), float(right.max() + 1 - left.min()), float(high - low)]
    xs, ys = ([number for ring in rings for number in ring[at::2]] for at in (0, 1))
    return [min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)] if xs else [0.0, 0.0, 0.0, 0.0]


def _checked_box(box: Any, form: BoxForm) -> list[float]:
    """Returns a box of a form as x, y, width, height; ValueError says which value is wrong."""
    if not isinstance(box, list) or len(box) != 4:
        raise ValueError(f"has the box {box!r:.80}, expected a list of four numbers")
    if form in ("auto", "xywh") and all(map(is_number, box)) and box[2] >= 0 <= box[3]:
        return box
    names = CORNERS if form == "xyxy" else SIZED
    if wrong := [f"{name} is {value!r:.40}" for name, value in zip(names, box, strict=True) if not is_number(value)]:
        raise ValueError(f"has the box {box!r:.80}, whose {wrong[0]}, no number")
    sized: list[float] = box if form in ("auto", "xywh") else sized_boxes(np.array(box, np.float64), form).tolist()
    for name, size in zip(("width", "height"), sized[2:], strict=True):
        if size < 0:
            said = "" if form == "auto" else f", as {form},"
            raise ValueError(f"has the box {box!r:.80}, whose {name}{said} is {size:g}, less than 0")
    return sized


def _checked_keypoints(values: Any) -> list[float]:
    """Returns x, y, visibility, x, ... of an annotation; ValueError continues "annotation 7 ..."."""
    if not isinstance(values, list) or len(values) % 3 or not _are_numbers(values):
        count = f" of {len(values)} numbers" if isinstance(values, list) else ""
        raise ValueError(f"has keypoints{count} that are no triples x, y, visibility: {values!r:.60}")
    if wrong := [number for number in values[2::3] if number not in (0, 1, 2)]:
        raise ValueError(f"has a keypoint of visibility {wrong[0]!r:.40}, expected 0, 1 or 2")
    return values


def _is_bone(value: Any, count: int) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(is_int(end) and 1 <= end <= count for end in value)


def _whole_ids(value: object) -> str:
    """Returns why an id is invalid, as part of a sentence."""
    plain = isinstance(value, str) and value.strip().lstrip("-").isdigit()
    write = f": write {value.strip()} without quotes" if plain and isinstance(value, str) else ""
    return f"ids of images, categories and annotations are whole numbers{write}"


def decode_counts(counts: str) -> list[int]:
    """Returns the run lengths in COCO's compressed string; raises ValueError for any other.

    Each character holds 5 bits, low ones first, and a bit for whether more follow; from the third length on, the value
    is the difference to the length two before (as defined by maskApi.c of cocoapi).
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


def is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def is_number(value: Any) -> bool:
    # No coordinate is larger; the comparison is False for NaN, and safe for integers beyond any float.
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e9 < value < 1e9


def _are_numbers(ring: list[Any]) -> bool:
    # Fast, for the 40 million numbers of train2017: NaN and non-numbers show in the sum, others in minimum and maximum.
    try:
        return not ring or (isfinite(sum(ring)) and min(ring) > -1e9 and max(ring) < 1e9)
    except (TypeError, OverflowError):
        return False
