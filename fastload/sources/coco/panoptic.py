"""COCO's panoptic masks: PNGs whose colours are ids of segments, and panoptic_*.json with the category of each.

annotations/panoptic_train2017.json                 images, segments_info of each, categories
annotations/panoptic_train2017/000000000009.png     id = red + 256 green + 65,536 blue; 0: in no segment
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fastload.errors import ImageError
from fastload.format.ragged import Column
from fastload.images.decode import read_mask
from fastload.images.image_header import ImageHeader, header_of_pixels, probe_image
from fastload.sources.coco.instances import Content, Instances, is_int
from fastload.sources.listing import Files, Masks
from fastload.sources.mask_classes import type_of_numbers

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


def segment_columns(found: Panoptic, about: dict[str, Any]) -> dict[str, Column]:
    """Returns the columns of segments, N rows each; `about` are the attributes that name the categories.

    `segment_labels` int64 (N, M): the category of segment k of an image is at k - 1; -1 behind the last.
    `segment_crowd` uint8 (N, M), `num_segments` int64 (N,).
    """
    counts = found.spans[:, 1] - found.spans[:, 0]
    slots = np.arange(max(1, int(counts.max(initial=0))))
    inside = slots < counts[:, None]
    at = (found.spans[:, :1] + slots)[inside]
    labels, crowd = np.full(inside.shape, -1, np.int64), np.zeros(inside.shape, np.uint8)
    labels[inside], crowd[inside] = found.category[at], found.crowd[at]
    return {
        "segment_labels": Column(labels, {**about, "things": found.things}),
        "segment_crowd": Column(crowd),
        "num_segments": Column(counts),
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
        for first, stop in found.spans.tolist():
            values[first:stop] = np.arange(1, stop - first + 1)
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
        found = probe_image(lambda size: self.files.read_head(i, size))
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
        kept = np.repeat(self.spans[:, 0] - (stops - counts), counts) + np.arange(int(counts.sum()))
        spans = np.stack([stops - counts, stops], axis=1)
        return replace(self, spans=spans, ids=self.ids[kept], values=self.values[kept])
