"""COCO: folders of images, and in `annotations/` the objects in them.

    train2017/000000000009.jpg, val2017/
    annotations/instances_train2017.json, instances_val2017.json      boxes, polygons and run lengths
    annotations/person_keypoints_train2017.json                        persons with keypoints, where it stands alone
    train/a.jpg, train/_annotations.coco.json                          the same as Roboflow exports it
    annotations/panoptic_train2017.json, panoptic_train2017/*.png      segments of things and stuff
    test2017/                                                          images without annotations

Boxes are packed as they are; masks are drawn from the polygons only if they are asked for. Panoptic masks are files:
they are packed where there is no instances file, else if they are asked for.
"""

from __future__ import annotations

import itertools
import re
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, Literal, NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray

from fastload.errors import ImageError, SourceError
from fastload.format.ragged import Column
from fastload.images.decode import read_mask, upright
from fastload.images.fit import Target, resample_mask
from fastload.images.image_header import ImageHeader, check_size, header_of_pixels
from fastload.options.pack import BoxesOf, BoxForm, SourceOptions
from fastload.sources.assemble import Draft, Samples, Splits, header_of, split_path
from fastload.sources.boxes import (
    CORNERS,
    SIZED,
    BoxSlots,
    declared_size,
    keypoints_column,
    reaches_out,
    sized_boxes,
)
from fastload.sources.captions import INSTANCES, PANOPTIC, captions_of
from fastload.sources.listing import SPLITS, Files, Masks, first_few
from fastload.sources.mask_classes import type_of_numbers
from fastload.sources.tree import Tree, key_of
from fastload.system.advice import advice
from fastload.system.text import text_of, walk_json

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
        keypoints=np.concatenate(
            [np.pad(file.keypoints, ((0, 0), (0, most - file.keypoints.shape[1]), (0, 0))) for file in files]
        ),
        made_boxes=sum(file.made_boxes for file in files),
        names=[file.names[i] for file, keep in zip(files, kept, strict=True) for i in np.flatnonzero(keep).tolist()],
        image_ids=np.concatenate([file.image_ids for file in files])[every],
        sizes=np.concatenate([file.sizes for file in files])[every],
        image=np.concatenate([np.append(part, -1)[file.image] for file, part in zip(files, parts, strict=True)]),
        bad=[],
    )


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
            fix = "Fetch it again, or move it away."
            raise SourceError(f"{where} has no {' and no '.join(lacking)}, so it is no annotations file of COCO. {fix}")

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
            raise SourceError(f"{where} ({name:.200}) has height {given[0]!r:.40}, width {given[1]!r:.40}. Fix it.")
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


_MOST_ID = 2**24 - 1


@dataclass(frozen=True, eq=False)
class Panoptic:
    """The segments of N images: image i has `spans[i]` of the S segments."""

    files: list[str]  # name of each image's PNG; "" for an image that is not annotated
    spans: NDArray[np.int64]  # (N, 2), first and stop
    ids: NDArray[np.int64]  # (S,), their colours
    category: NDArray[np.int64]  # (S,), index in the categories
    crowd: NDArray[np.uint8]  # (S,)
    things: tuple[int, ...]  # of each category: 1 if its segments are single things, 0 for stuff as sky

    def of_images(self, rows: NDArray[np.int64]) -> Panoptic:
        """Returns the segments of these images, in their order; -1 stands for an image without any."""
        spans = np.concatenate([self.spans, np.zeros((1, 2), np.int64)])[rows]
        return replace(self, files=[self.files[row] if row >= 0 else "" for row in rows.tolist()], spans=spans)


def read_panoptic(data: bytes, where: str) -> tuple[Instances, Panoptic]:
    """Returns the images and categories of a panoptic file, as an instances file without annotations; its segments.

    `where` is its path, which SourceError names.
    """
    content = _PanopticContent(where)
    content.read(data)
    return content.resolve(), content.segments()


class _PanopticContent(Content):
    """A panoptic file as it is read."""

    def __init__(self, where: str) -> None:
        super().__init__(where, with_regions=False)
        self._files: dict[int, str] = {}  # image id -> PNG
        self._firsts: dict[int, tuple[int, int]] = {}  # image id -> where its segments begin and end
        self._segments = array("q")  # id, category and crowd of each
        self._things: dict[int, int] = {}

    def add_category(self, at: int, item: dict[str, Any]) -> None:
        super().add_category(at, item)
        self._things[item["id"]] = int(item.get("isthing", 1) == 1)

    def add_annotation(self, number: int, item: dict[str, Any]) -> None:
        image, name, segments = item.get("image_id"), item.get("file_name"), item.get("segments_info")
        first, seen = len(self._segments), set[int]()
        try:
            if not is_int(image):
                raise ValueError(f"has image id {image!r:.80}")
            if image in self._files:
                raise ValueError("is the second one of its image")
            if not isinstance(name, str) or not isinstance(segments, list):
                raise ValueError(f"has file_name {name!r:.80} and segments_info {segments!r:.40}")
            for segment in segments:
                found = segment if isinstance(segment, dict) else {}
                own, category = found.get("id"), found.get("category_id")
                if not is_int(own) or not is_int(category) or not 0 < own <= _MOST_ID or own in seen:
                    raise ValueError(f"has the segment {segment!r:.80}")
                seen.add(own)
                self._segments.extend((own, category, int(found.get("iscrowd", 0) == 1)))
        except ValueError as exc:
            del self._segments[first:]
            self._bad.append((image, f"annotation number {number} {exc}"))
            return
        self._files[image], self._firsts[image] = name, (first // 3, len(self._segments) // 3)

    def segments(self) -> Panoptic:
        """Returns the segments of all images, in the order of the images."""
        index = {number: i for i, number in enumerate(sorted(self._categories))}
        table = np.array(self._segments, np.int64).reshape(-1, 3)
        return Panoptic(
            files=[self._files.get(number, "") for number in self._index],
            spans=np.array([self._firsts.get(number, (0, 0)) for number in self._index], np.int64).reshape(-1, 2),
            ids=table[:, 0],
            category=np.array([index.get(number, -1) for number in table[:, 1].tolist()], np.int64),
            crowd=table[:, 2].astype(np.uint8),
            things=tuple(self._things[number] for number in sorted(self._categories)),
        )

    def resolve(self) -> Instances:
        """Returns images and categories; `bad` names the annotations of images or categories that are not listed."""
        for image, (first, stop) in self._firsts.items():
            if image not in self._index:
                self._bad.append((-1, f"the annotation of image id {image} has an image that is not listed"))
            unknown = [number for number in self._segments[3 * first + 1 : 3 * stop : 3] if number not in self._things]
            if unknown:
                self._bad.append((image, f"a segment has category id {unknown[0]}, which is not listed"))
        return super().resolve()


def join_panoptic(parts: Sequence[Panoptic], kept: Sequence[NDArray[np.bool_]], others: int) -> Panoptic:
    """Returns the segments of the images kept of all parts, and of so many `others` behind them, which have none."""
    firsts = np.cumsum([0, *(len(part.ids) for part in parts)])
    spans = [part.spans[keep] + first for part, keep, first in zip(parts, kept, firsts[:-1], strict=True)]
    names = [part.files[i] for part, keep in zip(parts, kept, strict=True) for i in np.flatnonzero(keep).tolist()]
    return replace(
        parts[0],
        files=[*names, *[""] * others],
        spans=np.concatenate([*spans, np.zeros((others, 2), np.int64)]),
        ids=np.concatenate([part.ids for part in parts]),
        category=np.concatenate([part.category for part in parts]),
        crowd=np.concatenate([part.crowd for part in parts]),
    )


def segment_columns(found: Panoptic, about: dict[str, Any], where: str) -> dict[str, Column]:
    """Returns the columns of segments, N rows each; `about` are the attributes that name the categories.

    `segment_labels` int64 (N, M): the category of segment k of an image is at k - 1; -1 behind the last.
    `segment_crowd` uint8 (N, M), `num_segments` int64 (N,).
    """
    counts = found.spans[:, 1] - found.spans[:, 0]
    at = _ranges(found.spans[:, 0], counts)
    slots = BoxSlots.of(np.repeat(np.arange(len(counts)), counts), len(counts), where)
    return {
        "segment_labels": Column(slots.padded(found.category[at], -1), {**about, "things": found.things}),
        "segment_crowd": Column(slots.padded(found.crowd[at])),
        "num_segments": Column(slots.counts),
    }


def panoptic_masks(
    kind: Literal["panoptic", "semantic"],
    found: Panoptic,
    files: Files,
    present: NDArray[np.bool_],
    about: dict[str, Any],
) -> Masks:
    """Returns the masks of all images: the number of a pixel's segment from 1 on, 0 for none; or its category.

    `files` are the PNGs by image, `present` says where there is one. Categories are 0 to K - 1, void is `ignore_index`.
    """
    counts = found.spans[:, 1] - found.spans[:, 0]
    if kind == "semantic":
        dtype, void = type_of_numbers(len(about["names"]) - 1, "categories")
        values, names = found.category, tuple(about["names"])
    else:
        (dtype, _), void, names = type_of_numbers(int(counts.max(initial=0)), "segments of an image"), 0, ()
        values = np.zeros(len(found.ids), np.int64)
        values[_ranges(found.spans[:, 0], counts)] = _ranges(np.ones_like(counts), counts)
    masks = PanopticMasks(files, found.spans, found.ids, np.maximum(values, 0).astype(dtype), void)
    attrs = {"kind": kind, "category_ids": about["category_ids"]} if names else {"kind": kind}
    return Masks(masks, present, names, ignore_index=void, attrs=attrs, dtype=dtype)


@dataclass(frozen=True, eq=False)
class PanopticMasks:
    """Reads panoptic PNGs as masks, (H, W), with a value for each segment."""

    files: Files  # (N,)
    spans: NDArray[np.int64]  # (N, 2), the segments of each image among S
    ids: NDArray[np.int64]  # (S,), their colours
    values: NDArray[np.uint8 | np.uint16]  # (S,), their values in the mask, whose type the mask has
    void: int  # the value of pixels in no segment

    def header(self, i: int) -> ImageHeader:
        """Returns size and bits of the mask from `read(i)`."""
        found = header_of(self.files, i)
        return header_of_pixels((found.height, found.width), self.values.dtype)

    def read(self, i: int) -> NDArray[Any]:
        """Returns mask i, uint8 or uint16 (H, W); ImageError names a segment that its annotation does not list."""
        first, stop = self.spans[i].tolist()
        red, green, blue = np.moveaxis(read_mask(self.files.read(i), colours=True).astype(np.int32), 2, 0)
        pixels = red | green << 8 | blue << 16
        order = np.argsort(self.ids[first:stop])
        ids = np.append(0, self.ids[first:stop][order])  # ascending, since no segment is 0
        values = np.append(self.values.dtype.type(self.void), self.values[first:stop][order])
        at = np.minimum(np.searchsorted(ids, pixels), len(ids) - 1)
        if (unknown := ids[at] != pixels).any():
            number = int(pixels[unknown][0])
            raise ImageError(f"holds the segment {number} in {int((pixels == number).sum()):,} pixels, not in its json")
        mask: NDArray[Any] = values[at]
        return mask

    def take(self, indices: NDArray[np.integer[Any]]) -> PanopticMasks:
        """Returns the masks of the samples at these indices, in their order."""
        return replace(self, files=self.files.take(indices), spans=self.spans[indices])

    def compact(self) -> PanopticMasks:
        """Returns the same masks without the segments of other images."""
        counts = self.spans[:, 1] - self.spans[:, 0]
        stops = np.cumsum(counts)
        kept = _ranges(self.spans[:, 0], counts)
        spans = np.stack([stops - counts, stops], axis=1)
        return replace(self, spans=spans, ids=self.ids[kept], values=self.values[kept])


_OTHERS = re.compile(r"(?:^|/)((?:stuff|image_info)_[^/]+\.json)$")
_YEAR = re.compile(r"_?\d{4}$")

_MANY_CROSSINGS = 2**22  # of polygon and row; more take memory as no object's do


class _Segments(NamedTuple):
    """A panoptic file, and the segments of the images of an instances file."""

    content: Instances  # its images and categories
    found: Panoptic
    pngs: NDArray[np.int64]  # position in the tree of each image's PNG, -1 for none
    position: int  # of the file itself in the tree


class _InstancesFile(NamedTuple):
    """One instances file and the images it is about."""

    split: str  # of its images
    json: str  # its name
    instances: Instances  # its content
    rows: NDArray[np.int64]  # position in the tree of each image that it lists, -1 if that is absent
    keep: NDArray[np.bool_]  # whether that image is there, and no annotation of it is bad
    position: int  # of the file itself in the tree
    segments: _Segments | None = None  # of these images, if they are asked for


def coco_evidence(tree: Tree) -> list[str]:
    """Returns the files instances_*.json, person_keypoints_*.json or _annotations.coco.json; else panoptic_*.json."""
    jsons = [name for _, name in tree.not_images if name.endswith(".json")]
    found = list(filter(INSTANCES.search, jsons)) or list(filter(PANOPTIC.search, jsons))
    return [key_of(name) for name in found]


def list_coco(draft: Draft, tree: Tree, options: SourceOptions) -> Samples:
    """Returns COCO's images, with or without annotations, split by split, in the order of their names.

    Columns: `image_id` int64 (N,), -1 if no file lists the image; `boxes` float32 (N, M, 4) as x, y, width, height from
    0, in the order of the file, also those without area; `box_labels` int64 (N, M), category ids mapped to 0, 1, ... in
    ascending order (attributes `names` and, with the original ids, `category_ids`), -1 behind the last box;
    `box_crowd` uint8 (N, M); `num_boxes` int64 (N,). Where annotations have keypoints: `keypoints` float32
    (N, M, K, 3), see `keypoints_column`. `caption` and `num_captions`, if there are captions_*.json.

    Masks, if asked for, have `ignore_index` 255, or for more than 254 classes or instances, as uint16, 65,535. Smaller
    annotations (by `area`) are drawn over larger ones, crowds below all others:
      "semantic": 0 = background, box label + 1 = class, also of crowds.
      "instance": 0 = background, k = the k-th box of the image, counted from 1; crowds are ignored, as they are many.

    Panoptic masks ("panoptic", or by default where there is no instances file; "semantic" then has categories 0 to
    K - 1 of things and stuff, and void is `ignore_index`): 0 = in no segment, which is `ignore_index`, k = segment k,
    whose category is `segment_labels` at k - 1, see `segment_columns`.
    """
    only_panoptic = not any(map(INSTANCES.search, tree.names)) and any(map(PANOPTIC.search, tree.names))
    if only_panoptic and options.masks == "instance":
        fix = "Say `--masks panoptic` (each pixel's segment) or `--masks semantic` (its category)."
        raise SourceError(f"{tree.given}: has panoptic files and no instances file. {fix}")
    drawn = of_segments = ""  # the kind of masks
    if options.masks == "panoptic" or (only_panoptic and options.masks != "none"):
        of_segments = "semantic" if options.masks == "semantic" else "panoptic"
    elif options.masks in ("semantic", "instance"):
        drawn = options.masks
    draft.leave_out_broken(tree)
    notes = draft.notes
    if of_segments:
        notes.append("Masks come from panoptic_*.json.")
    elif any(map(PANOPTIC.search, tree.names)):
        notes.append(advice("panoptic"))
    if ignored := [key_of(name) for _, name in tree.not_images if name.endswith(".json") and _OTHERS.search(name)]:
        notes.append(f"NOT READ: {first_few(ignored)}; only objects are packed.")
    parts = _read_parts(
        tree, bool(drawn), draft, options.boxes, panoptic=bool(of_segments), only_panoptic=only_panoptic
    )
    first = parts[0].instances
    _check_categories(draft, [(part.json, part.instances) for part in parts])
    tests = _unlisted(tree, parts, draft)
    rows = [part.rows[part.keep] for part in parts]
    images = [*np.concatenate(rows).tolist(), *tests]
    said = [part.split for part, kept in zip(parts, rows, strict=True) for _ in kept] + ["test"] * len(tests)
    all_files = join_instances([part.instances for part in parts], [part.keep for part in parts])
    slots = BoxSlots.of(all_files.image, len(images), draft.where)
    about = {"names": first.category_names, "category_ids": first.category_ids}
    columns = {"image_id": Column(np.concatenate([all_files.image_ids, np.full(len(tests), -1, np.int64)]))}
    if not only_panoptic:
        boxes = all_files.boxes.astype(np.float32)
        columns |= slots.columns(boxes, Column(all_files.category, about), box_crowd=all_files.crowd)
        outside = {
            key_of(tree.names[part.rows[i]]): f"{name} in {part.json}"
            for part in parts
            for i, name in part.instances.outside.items()
        }
        columns["boxes"] = replace(columns["boxes"], origins=outside)
    _check_meaning(draft, all_files, drawn)
    if all_files.keypoints.shape[1]:
        columns["keypoints"] = _keypoints(draft, all_files, slots)
    columns |= captions_of(draft, tree, images, options)
    if not only_panoptic and (empty := int((slots.counts == 0).sum()) - len(tests)):
        notes.append(f"Images without an annotation were kept ({empty}).")
    if thin := int((all_files.boxes[:, 2:] == 0).any(axis=1).sum()):
        notes.append(f"Boxes without area were kept as they are ({thin}).")
    draft.refuse_left_out(len(images))
    samples = Samples.in_tree(tree, images, Splits.of(said), columns, by_name=True)
    samples = replace(samples, declared=np.pad(all_files.sizes, ((0, len(tests)), (0, 0))))
    if of_segments:
        return _with_segments(draft, tree, samples, of_segments, parts, len(tests))
    if options.masks == "auto":
        notes.append(advice("masks of objects"))
    if not drawn or not images:
        return samples
    if without := int((all_files.rings + all_files.runs == 0).sum()):
        notes.append(f"Annotations without a region have a box, and are not in the masks ({without}).")
    jsons = [part.position for part in parts]  # from which the masks are drawn
    samples = samples.made_also_of(tree.sizes[jsons].sum(), tree.mtimes_ns[jsons].max())
    masks = replace(_drawn_masks(tree, drawn, all_files, slots, images), drawn=True)
    if options.boxes_of != "auto":
        assert isinstance(masks.files, DrawnMasks), "they have just been made"
        masks = replace(masks, files=UprightMasks(masks.files, tree.files.take(np.array(images)), options.boxes_of))
    return replace(samples, masks=masks)


def _with_segments(
    draft: Draft, tree: Tree, samples: Samples, kind: str, parts: list[_InstancesFile], others: int
) -> Samples:
    """Returns the samples with panoptic masks of a kind ("panoptic" or "semantic") and the columns of their segments.

    The last `others` of them are in no file.
    """
    of_parts = [part.segments for part in parts if part.segments is not None]
    _check_categories(draft, [(key_of(tree.names[part.position]), part.content) for part in of_parts])
    found = join_panoptic([part.found for part in of_parts], [part.keep for part in parts], others)
    pngs = [part.pngs[keep.keep] for part, keep in zip(of_parts, parts, strict=True)]
    at = np.concatenate([*pngs, np.full(others, -1, np.int64)])
    if without := int((at < 0).sum()) - others:
        draft.notes.append(f"Images without a panoptic annotation were kept, their masks are void ({without}).")
    first = of_parts[0].content
    about = {"names": first.category_names, "category_ids": first.category_ids}
    kind_of_mask: Literal["semantic", "panoptic"] = "semantic" if kind == "semantic" else "panoptic"
    masks = panoptic_masks(kind_of_mask, found, tree.files.take(np.maximum(at, 0)), at >= 0, about)
    columns = {} if kind == "semantic" else segment_columns(found, about, draft.where)
    for part in of_parts:
        samples = samples.made_also_of(tree.sizes[part.position], tree.mtimes_ns[part.position])
    further = (np.where(at >= 0, of[at], 0) for of in (tree.sizes, tree.mtimes_ns))
    return replace(samples.made_also_of(*further), columns=samples.columns | columns, masks=masks)


def _check_categories(draft: Draft, files: list[tuple[str, Instances]]) -> None:
    """Raises SourceError for files, by name and content, whose categories differ."""
    (name, first), *others = files
    for other, content in others:
        if content.categories != first.categories:
            raise SourceError(f"{draft.where}: {name} and {other} have different categories. Pack each by itself.")


def _drawn_masks(tree: Tree, kind: str, found: Instances, slots: BoxSlots, images: list[int]) -> Masks:
    """Returns the masks of a kind ("semantic" or "instance"), which are drawn when they are read.

    `images` are the positions in the tree of all samples; first `found`'s, then samples without a mask.
    """
    sample, slot, crowd = slots.sample, slots.slot, found.crowd
    numbered = (sample >= 0) & (crowd == 0)
    most = len(found.category_names) if kind == "semantic" else int(slot[numbered].max(initial=-1)) + 1
    dtype, void = type_of_numbers(most, f"{tree.given}: {'categories' if kind == 'semantic' else 'instances'}")
    if (unknown := (found.sizes == 0).any(axis=1)).any():
        name = key_of(tree.names[images[int(np.argmax(unknown))]])
        raise SourceError(f"{tree.given}: height and width of {name} are not said, so its mask cannot be drawn.")
    values = found.category + 1 if kind == "semantic" else np.where(crowd == 1, void, slot + 1)
    # Order of drawing: by sample; in it crowds first, then larger before smaller areas, then as in the file.
    order = np.lexsort((-found.areas, 1 - crowd, sample)).astype(np.int64)
    rows, every, without = sample[order], np.arange(len(images)), len(images) - len(found.sizes)
    spans = [np.searchsorted(rows, every, "left"), np.searchsorted(rows, every, "right")]
    return Masks(
        files=DrawnMasks(
            sizes=np.pad(found.sizes, ((0, without), (0, 0))),
            spans=np.stack(spans, axis=1).astype(np.int64),
            drawn=order,
            values=np.where(sample < 0, 0, values).astype(dtype),
            ends=np.cumsum(found.rings),
            ring_ends=np.cumsum(found.ring_sizes),
            points=found.points,
            run_ends=np.cumsum(found.runs),
            lengths=found.lengths,
        ),
        present=every < len(found.sizes),
        names=("background", *found.category_names) if kind == "semantic" else (),
        ignore_index=void,
        dtype=dtype,
        attrs={"kind": kind, "category_ids": found.category_ids} if kind == "semantic" else {"kind": kind},
    )


def _read_parts(
    tree: Tree, drawn: bool, draft: Draft, boxes: BoxForm, *, panoptic: bool, only_panoptic: bool
) -> list[_InstancesFile]:
    """Returns the instances files of which images are there; refuses none, and files that contradict each other.

    `panoptic`: with the segments of their images; `only_panoptic`: in place of instances files there are panoptic ones.
    """
    position_of = {tree.names[i]: i for i in tree.images.tolist()}
    folders = {split_path(name)[0] for name in position_of}
    parts: list[_InstancesFile] = []
    owner: dict[int, str] = {}
    pattern = PANOPTIC if only_panoptic else INSTANCES
    jsons = [(i, match) for i, name in enumerate(tree.names) if (match := pattern.search(name))]
    of_keypoints = [key_of(tree.names[i]) for i, match in jsons if match.groupdict().get("keypoints")]
    if 0 < len(of_keypoints) < len(jsons):
        jsons = [(i, match) for i, match in jsons if not match["keypoints"]]
        draft.notes.append(
            f"NOT READ: {first_few(of_keypoints)}, as {first_few([key_of(tree.names[i]) for i, _ in jsons], 2)} hold "
            "all objects of these images. To pack persons with their keypoints instead, move the latter away."
        )
    if not jsons:
        fix = "Unpack COCO's annotations into a folder annotations next to the folders of images."
        raise SourceError(f"{tree.given}: there is no instances_*.json or person_keypoints_*.json. {fix}")
    for position, match in jsons:
        json = key_of(tree.names[position])
        # Likeliest first. Images may lie anywhere below these; for the last two only directly in them.
        folder = split_path(tree.names[position])[0]
        above, base = split_path(folder[:-1])
        root = above if base == "annotations" else folder
        name = match[match.lastindex] if match.lastindex else "all"
        stems = dict.fromkeys((name, _YEAR.sub("", name)))
        candidates = [f"{root}{at}{stem}/" for stem in stems for at in ("", "images/")] + [f"{root}images/", root]
        if not folders.intersection(candidates[-2:]) and not any(
            at.startswith(tuple(candidates[:-2])) for at in folders
        ):
            draft.notes.append(f"{json} was ignored: its images are not there (no {key_of(candidates[0])}).")
            continue
        bare = _YEAR.sub("", name)
        split = SPLITS.get(bare.lower(), key_of(bare))
        if other := next((part.json for part in parts if part.split == split), ""):
            raise SourceError(f"{tree.given}: {other} and {json} are both the split {split!r}. Move one of them away.")
        segments = _read_segments(tree, split_path(tree.names[position])[0], name, position_of) if panoptic else None
        if only_panoptic and segments is not None:
            instances = segments.content
        elif only_panoptic:
            instances = read_panoptic(tree.read_text(position), f"{tree.path / json}")[0]
        else:
            instances = read_instances(tree.read_text(position), f"{tree.path / json}", drawn, boxes)
        folder, names = _found_names(draft, json, instances.names, candidates, position_of)
        rows = np.array([position_of.get(folder + name, -1) for name in names], np.int64)
        keys = [key_of(folder + name) for name in names]
        if not keys:
            raise SourceError(f"{tree.path / json} lists no images. Fetch it again, or move it away.")
        for i, row in enumerate(rows.tolist()):
            if row < 0:
                draft.leave_out(keys[i], f"is listed in {json}, but has no file")
            elif row in owner:
                raise SourceError(
                    f"{tree.path / json}: {keys[i]} is listed a second time (first in {owner[row]}). "
                    "Fix the file: an image is one sample of one split."
                )
            else:
                owner[row] = json
        for at, reason in instances.bad:
            if at < 0:
                draft.leave_out(f"{json}: {reason.partition(' has ')[0]}", f"has {reason.partition(' has ')[2]}")
            else:
                draft.leave_out(keys[at], f"is contradicted by {json}: {reason}")
        keep = rows >= 0
        keep[[at for at, _ in instances.bad if at >= 0]] = False
        if segments is not None:
            segments = _for_images(draft, tree, segments, instances, keys, keep)
        draft.notes.append(f"Split {split}: {len(rows)} images of {json} in {key_of(folder) or 'the folder itself'}.")
        parts.append(_InstancesFile(split, json, instances, rows, keep, position, segments))
    if not parts:
        raise SourceError(
            f"{tree.given}: there are no images of {first_few([key_of(tree.names[i]) for i, _ in jsons])}. Unpack them "
            "next to the folder annotations, as train2017/ and val2017/."
        )
    return parts


def _read_segments(tree: Tree, folder: str, name: str, position_of: dict[str, int]) -> _Segments:
    """Returns the content of panoptic_NAME.json in a folder, and the positions of the PNGs of its images."""
    json = f"{folder}panoptic_{name}.json"
    position = next((i for i, other in tree.not_images if other == json), -1)
    if position < 0:
        raise SourceError(f"{tree.given}: there is no {key_of(json)}, which `--masks panoptic` packs. Put it there.")
    content, found = read_panoptic(tree.read_text(position), f"{tree.path / key_of(json)}")
    above = split_path(folder[:-1])[0] if folder else ""
    folders = dict.fromkeys(f"{root}panoptic_{name}/" for root in (folder, above))
    there = max(folders, key=lambda at: sum(at + file in position_of for file in found.files))
    pngs = [position_of.get(there + file, -1) for file in found.files]
    if max(pngs, default=-1) < 0:
        fix = f"Unpack panoptic_{name}.zip next to it."
        raise SourceError(f"{tree.given}: {key_of(json)} has no PNGs in {' or '.join(map(key_of, folders))}. {fix}")
    return _Segments(content, found, np.array(pngs, np.int64), position)


def _for_images(
    draft: Draft, tree: Tree, segments: _Segments, instances: Instances, keys: list[str], keep: NDArray[np.bool_]
) -> _Segments:
    """Returns the segments of the images of a file, by their ids; those that contradict are left out of `keep`, too."""
    at = {number: i for i, number in enumerate(segments.content.image_ids.tolist())}
    rows = np.array([at.get(number, -1) for number in instances.image_ids.tolist()], np.int64)
    found, pngs = segments.found.of_images(rows), np.where(rows < 0, -1, segments.pngs[rows])
    bad = dict(segments.content.bad) if segments.content is not instances else {}
    json = key_of(tree.names[segments.position])
    for i, row in enumerate(rows.tolist()):
        reason = f"is contradicted by {json}: {bad[row]}" if row in bad else ""
        if found.files[i] and pngs[i] < 0:
            reason = reason or f"has no mask: {found.files[i]}, which {json} names, is not there"
        if reason:
            draft.leave_out(keys[i], reason)
            keep[i] = False
    return segments._replace(found=found, pngs=pngs)


def _found_names(
    draft: Draft, json: str, names: list[str], folders: list[str], position_of: Mapping[str, int]
) -> tuple[str, list[str]]:
    """Returns the folder that holds most of the images with these names, and the names as it has them.

    If not all are there, `\\` counts as `/` in the others, and as many of their first parts are left out as finds most,
    such as folders of the machine where the file was written.
    """

    def spelled(folder: str, cut: int) -> list[str]:
        return [name if folder + name in position_of else _without_first(name, cut) for name in names]

    def there(folder: str, names: list[str]) -> int:
        return sum(folder + name in position_of for name in names)

    best = max(folders, key=lambda folder: there(folder, names))
    found, plain = there(best, names), names
    deepest = max((name.count("/") + name.count("\\") for name in names), default=0)
    for cut, folder in itertools.product(range(deepest + 1 if found < len(names) else 0), folders):
        tried = spelled(folder, cut)
        if (count := there(folder, tried)) > found:
            best, plain, found = folder, tried, count
    if changed := [(old, new) for old, new in zip(names, plain, strict=True) if old != new]:
        old, new = changed[0]
        draft.notes.append(f"Names in {json} that no image has were read as names of images: {old} as {new}.")
    return best, plain


def _without_first(name: str, count: int) -> str:
    """Returns a path with `/` for `\\`, without `./` and so many first parts, as far as it has them; none with `..`."""
    parts = [part for part in name.replace("\\", "/").split("/") if part not in ("", ".")]
    return name if ".." in parts or not parts else "/".join(parts[min(count, len(parts) - 1) :])


def _check_meaning(draft: Draft, found: Instances, drawn: str) -> None:
    """Notes or refuses annotations that are well formed and yet cannot mean what they say."""
    here = found.image >= 0
    if found.made_boxes:
        draft.notes.append(f"Annotations without a bbox got the one around their segmentation ({found.made_boxes}).")
    if here.any() and found.crowd[here].all():
        draft.notes.append(f"Every annotation is a crowd (iscrowd 1), of several objects ({int(here.sum())}).")
        if drawn == "instance":
            raise SourceError(
                f"{draft.where}: every annotation is a crowd (iscrowd 1), and those are no instances: masks would be "
                "void throughout. Write iscrowd 0 for single objects, or say `--masks semantic`."
            )
    boxes, sizes = found.boxes[here], found.sizes[found.image[here]]
    if len(boxes) and boxes.any() and (boxes >= 0).all() and (boxes <= 1).all() and not (sizes == 1).any():
        raise SourceError(
            f"{draft.where}: all boxes lie between 0 and 1, as fractions of the image do; COCO's are pixels (first: "
            f"{', '.join(f'{number:g}' for number in boxes[0].tolist())}). Multiply them by width and height."
        )


def _keypoints(draft: Draft, found: Instances, slots: BoxSlots) -> Column:
    """Returns the column of keypoints; their names only if all categories have the same."""
    kinds = found.kinds_of_keypoints
    names, skeleton = kinds[0] if len(kinds) == 1 else ((), ())
    column = keypoints_column(slots, found.keypoints, names, skeleton)
    which = (
        first_few(names) if names else f"{len(kinds)} categories name them differently" if kinds else "without names"
    )
    mirrored = "" if "flip_pairs" in column.attrs else "; which are left and right is not known, so mirrors swap none"
    draft.notes.append(f"Keypoints of each object: {found.keypoints.shape[1]} ({which}){mirrored}.")
    return column


def _unlisted(tree: Tree, parts: list[_InstancesFile], draft: Draft) -> list[int]:
    """Returns the positions of images in folders such as test2017/; unlisted images next to listed ones are noted."""
    listed = {row for part in parts for row in part.rows.tolist()}
    pngs = {png for part in parts if part.segments for png in part.segments.pngs.tolist()}
    folders = {split_path(tree.names[i])[0] for i in listed if i >= 0}
    jsons = " or ".join(part.json for part in parts)
    tests = []
    for i in [i for i in tree.images.tolist() if i not in listed and i not in pngs]:
        folder = split_path(tree.names[i])[0]
        if folder in folders:
            draft.leave_out(key_of(tree.names[i]), f"is not listed in {jsons}")
        elif SPLITS.get(_YEAR.sub("", split_path(folder[:-1])[1]).lower()) == "test":
            tests.append(i)
    if tests:
        draft.notes.append(f"Split test: {len(tests)} images without annotations; num_boxes is 0 and image_id -1.")
    return tests


@dataclass(frozen=True, eq=False)
class DrawnMasks:
    """Draws the mask of an image, (H, W), when it is read: 0 = background, later annotations over earlier ones."""

    sizes: NDArray[np.int64]  # (N, 2), height and width of each image
    spans: NDArray[np.int64]  # (N, 2), where the annotations of each image begin and end in `drawn`
    drawn: NDArray[np.int64]  # annotations in the order of drawing
    values: NDArray[np.uint8 | np.uint16]  # (A,), value in the mask of each annotation, whose type the mask has
    ends: NDArray[np.int64]  # (A,), where the polygons (rings) of each annotation end in `ring_ends`
    ring_ends: NDArray[np.int64]  # where the numbers of each ring end in `points`
    points: NDArray[np.float32]  # x, y, x, y, ...
    run_ends: NDArray[np.int64]  # (A,), where the runs of each annotation end in `lengths`
    lengths: NDArray[np.uint32]  # pixels of background and region in turn, down the columns

    def header(self, i: int) -> ImageHeader:
        """Returns the header of mask i: height and width of the image by the annotations, 1 channel."""
        height, width = self.sizes[i].tolist()
        check_size(height, width)
        return header_of_pixels((height, width), self.values.dtype)

    def read(self, i: int) -> NDArray[Any]:
        """Returns the mask of image i, uint8 or uint16 (H, W).

        ImageError says if its size is unknown, too large or another.
        """
        header, (first, last) = self.header(i), self.spans[i].tolist()
        mask = np.zeros((header.height, header.width), self.values.dtype)
        for a in self.drawn[first:last].tolist():
            value = self.values[a]
            lengths = self.lengths[self.run_ends[a - 1] if a else 0 : self.run_ends[a]]
            if len(lengths):
                if int(lengths.sum(dtype=np.int64)) != mask.size:
                    raise ImageError("has runs of another size than its image")
                inside = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)
                mask[inside.reshape(mask.shape[::-1]).T] = value
            for ring in range(self.ends[a - 1] if a else 0, self.ends[a]):
                start = self.ring_ends[ring - 1] if ring else 0
                fill_polygon(mask, self.points[start : self.ring_ends[ring]].reshape(-1, 2), value)
        return mask

    def take(self, indices: NDArray[np.integer[Any]]) -> DrawnMasks:
        return replace(self, sizes=self.sizes[indices], spans=self.spans[indices])

    def compact(self) -> DrawnMasks:
        """Returns the same masks without the annotations of others."""
        counts = self.spans[:, 1] - self.spans[:, 0]
        drawn = self.drawn[_ranges(self.spans[:, 0], counts)]
        stops = np.cumsum(counts)
        ends, rings = _cut(self.ends, drawn)
        ring_ends, points = _cut(self.ring_ends, rings)
        run_ends, runs = _cut(self.run_ends, drawn)
        return replace(
            self,
            spans=np.stack([stops - counts, stops], axis=1),
            drawn=np.arange(len(drawn)),
            values=self.values[drawn],
            ends=ends,
            ring_ends=ring_ends,
            points=self.points[points],
            run_ends=run_ends,
            lengths=self.lengths[runs],
        )


def _ranges(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the numbers start, start + 1, ..., `count` of them, of each pair, one range after another."""
    before = np.cumsum(counts) - counts
    shift: NDArray[np.int64] = np.repeat(starts - before, counts)
    return shift + np.arange(len(shift))


def _cut(ends: NDArray[np.int64], chosen: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the ends of the chosen lists among lists that lie one behind another, and where their items lay."""
    starts = np.append(0, ends)[chosen]
    counts = ends[chosen] - starts
    return np.cumsum(counts), _ranges(starts, counts)


def fill_polygon(mask: NDArray[Any], points: NDArray[np.floating[Any]], value: int | np.integer[Any]) -> None:
    """Sets the pixels of a mask whose centres lie inside a polygon, by the even-odd rule.

    Like cocoapi, but without its rounding to a fifth of a pixel. Pixels outside of the mask are left out.

    Args:
        mask: uint8 or uint16 (H, W); pixel (0, 0) is the square from 0 to 1.
        points: (P, 2), x and y of the corners; fewer than 3 cover nothing.
        value: the value to set.
    """
    height, width = mask.shape
    if len(points) < 3:
        return
    x0, y0 = points.T.astype(np.float64)
    x1, y1 = np.roll(x0, -1), np.roll(y0, -1)
    # The rows whose centre line an edge crosses; the upper end counts, the lower does not.
    first = np.clip(np.ceil(np.minimum(y0, y1) - 0.5), 0, height).astype(np.int64)
    counts = np.clip(np.ceil(np.maximum(y0, y1) - 0.5), 0, height).astype(np.int64) - first
    total = int(counts.sum())
    if total == 0:
        return
    if total > _MANY_CROSSINGS + 64 * mask.size:
        raise ImageError(f"has a polygon of {len(points)} corners that crosses its rows {total} times")
    edge = np.repeat(np.arange(len(points)), counts)
    row = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts) + first[edge]
    x = x0[edge] + (row + 0.5 - y0[edge]) * ((x1 - x0)[edge] / (y1 - y0)[edge])
    # The first pixel whose centre is not left of the crossing: from it on, inside and outside change.
    column = np.clip(np.ceil(x - 0.5), 0, width).astype(np.int64)
    top, left = int(row.min()), int(column.min())
    size = int(row.max()) + 1 - top, int(column.max()) + 1 - left
    crossings = np.bincount((row - top) * size[1] + column - left, minlength=size[0] * size[1])
    # Only odd or even matters, which 8 bits keep: four times as fast as sums of 64 bits.
    odd = np.cumsum(crossings.astype(np.uint8).reshape(size), axis=1, dtype=np.uint8)[:, :-1] & 1
    np.copyto(mask[top : top + size[0], left : left + size[1] - 1], value, where=odd.view(np.bool_), casting="unsafe")


@dataclass(frozen=True, eq=False)
class UprightMasks:
    """Draws the masks of images that have another size than their annotations declare, at the size that they have."""

    masks: DrawnMasks  # at the sizes that the annotations declare
    images: Files
    drawn_on: BoxesOf  # "upright": the declared size is wrong; "stored": masks are turned; "declared": resized

    def header(self, i: int) -> ImageHeader:
        """Returns the header of mask i: height and width of the image, and what its masks have."""
        header = header_of(self.images, i)
        return self.masks.header(i)._replace(height=header.height, width=header.width)

    def read(self, i: int) -> NDArray[Any]:
        """Returns the mask of image i, (H, W); raises as `DrawnMasks`."""
        image = header_of(self.images, i)
        if self.drawn_on == "upright":
            size = np.array([[image.height, image.width]])
            return replace(self.masks.take(np.array([i])), sizes=size).read(0)
        mask = self.masks.read(i)
        if self.drawn_on == "stored":
            mask = np.ascontiguousarray(upright(mask[..., None], image.orientation)[..., 0])
        if mask.shape == (image.height, image.width):
            return mask
        out = np.empty((image.height, image.width), mask.dtype)
        resample_mask(mask, Target(image.height, image.width, 1, mask.dtype, "stretch"), out)
        return out

    def take(self, indices: NDArray[np.integer[Any]]) -> UprightMasks:
        return replace(self, masks=self.masks.take(indices), images=self.images.take(indices))

    def compact(self) -> UprightMasks:
        """Returns the same masks without the annotations of others."""
        return replace(self, masks=self.masks.compact())
