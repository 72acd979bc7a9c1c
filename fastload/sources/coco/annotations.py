"""COCO's annotations by sample: columns of boxes, and masks that are drawn when they are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.format.column import Column
from fastload.sources.box_forms import SIZED, BoxSlots
from fastload.sources.coco.instances import Instances
from fastload.sources.coco.masks import DrawnMasks, Regions
from fastload.sources.listing import Masks
from fastload.sources.tree import Tree, key_of

VOID = 255
MOST_VALUES = 254
"""Classes or instances that a mask of 8 bits can hold, besides background and void."""


class InstancesFile(NamedTuple):
    """One instances file and the images it is about."""

    split: str
    json: str
    instances: Instances
    rows: NDArray[np.int64]
    """Position in the tree of each image that the file lists, -1 if it is absent or left out."""
    listed: frozenset[int]
    """Positions in the tree of all images that it lists."""
    position: int
    """Position in the tree of the file itself."""


class Classes(NamedTuple):
    """Names of the categories and their ids in the file, ascending by id."""

    names: tuple[str, ...]
    ids: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Boxes:
    """The A annotations of all instances files, one file behind the other.

    Attributes:
        slots: sample of each annotation, and its number among the boxes of that.
        category: int64 (A,), index of each category.
        boxes: float64 (A, 4), x, y, width, height.
        areas: float64 (A,), area of each region.
        crowd: uint8 (A,), 1 for a crowd.
    """

    slots: BoxSlots
    category: NDArray[np.int64]
    boxes: NDArray[np.float64]
    areas: NDArray[np.float64]
    crowd: NDArray[np.uint8]

    @classmethod
    def of(cls, parts: list[InstancesFile], num_samples: int) -> Boxes:
        """Returns the annotations of the kept images, which are the first samples, file by file; others have none."""
        rows, start = [], 0
        for part in parts:
            kept = part.rows >= 0
            sample = np.where(kept, np.cumsum(kept) - 1 + start, -1)
            rows.append(np.where(part.instances.good, sample[part.instances.image], -1))
            start += int(kept.sum())
        return cls(
            slots=BoxSlots.of(np.concatenate(rows), num_samples),
            category=np.concatenate([part.instances.category for part in parts]),
            boxes=np.concatenate([part.instances.boxes for part in parts]),
            areas=np.concatenate([part.instances.areas for part in parts]),
            crowd=np.concatenate([part.instances.crowd for part in parts]),
        )

    def columns(self, classes: Classes) -> dict[str, Column]:
        """Returns the columns of boxes, padded to the most boxes of any image (at least 1)."""
        boxes, labels = self.slots.padded(self.boxes.astype(np.float32)), self.slots.padded(self.category, -1)
        return {
            "boxes": Column(boxes, {"names": SIZED}, "xywh"),
            "box_labels": Column(labels, {"names": classes.names, "category_ids": classes.ids}),
            "box_crowd": Column(self.slots.padded(self.crowd)),
            "num_boxes": Column(self.slots.counts),
        }

    def masks(self, tree: Tree, kind: str, parts: list[InstancesFile], images: list[int], classes: Classes) -> Masks:
        """Returns the masks of a kind ("semantic" or "instance"), which are drawn when they are read.

        Raises:
            SourceError: there are more classes or instances than a mask can hold, or the size of an image is unknown.
        """
        if kind == "semantic" and len(classes.names) > MOST_VALUES:
            raise SourceError(
                f"{tree.given}: {len(classes.names)} categories, but a mask of 8 bits holds {MOST_VALUES}. "
                "Pack boxes only, or `--masks instance`."
            )
        sample, slot = self.slots.sample, self.slots.slot
        single = (sample >= 0) & (self.crowd == 0)
        if kind == "instance" and (beyond := single & (slot >= MOST_VALUES)).any():
            row = int(sample[beyond][0])
            key, count = key_of(tree.names[images[row]]), self.slots.counts[row]
            raise SourceError(
                f"{tree.given}: {key} has {count} instances, but a mask of 8 bits "
                f"holds {MOST_VALUES}. Pack boxes only, or `--masks semantic`."
            )
        heights, widths = np.zeros(len(images), np.int64), np.zeros(len(images), np.int64)
        start = 0
        for part in parts:
            kept = part.rows >= 0
            stop = start + int(kept.sum())
            heights[start:stop], widths[start:stop] = part.instances.heights[kept], part.instances.widths[kept]
            start = stop
        present = np.arange(len(images)) < start
        if (unknown := present & ((heights == 0) | (widths == 0))).any():
            name = key_of(tree.names[images[int(np.flatnonzero(unknown)[0])]])
            raise SourceError(f"{tree.given}: height and width of {name} are not said, so its mask cannot be drawn.")
        values = self.category + 1 if kind == "semantic" else np.where(self.crowd == 1, VOID, slot + 1)
        # Order of drawing: by sample; in it crowds first, then larger before smaller areas, then as in the file.
        order = np.lexsort((-self.areas, 1 - self.crowd, sample)).astype(np.int64)
        rows = sample[order]
        return Masks(
            files=DrawnMasks(
                heights=heights,
                widths=widths,
                first=np.searchsorted(rows, np.arange(len(images)), "left").astype(np.int64),
                last=np.searchsorted(rows, np.arange(len(images)), "right").astype(np.int64),
                drawn=order,
                values=np.where(sample < 0, 0, values).astype(np.uint8),
                regions=_joined([part.instances.regions for part in parts if part.instances.regions is not None]),
            ),
            present=present,
            names=("background", *classes.names) if kind == "semantic" else (),
            ignore_index=VOID,
            attrs={"kind": kind, "category_ids": classes.ids} if kind == "semantic" else {"kind": kind},
        )


def _joined(regions: list[Regions]) -> Regions:
    """Returns the regions of several files as one."""

    def ends(parts: list[NDArray[np.int64]], lengths: list[int]) -> NDArray[np.int64]:
        starts = np.cumsum([0, *lengths[:-1]])
        return np.concatenate([part + start for part, start in zip(parts, starts, strict=True)]).astype(np.int64)

    return Regions(
        ends=ends([part.ends for part in regions], [len(part.ring_ends) for part in regions]),
        ring_ends=ends([part.ring_ends for part in regions], [len(part.points) for part in regions]),
        points=np.concatenate([part.points for part in regions]),
        run_ends=ends([part.run_ends for part in regions], [len(part.lengths) for part in regions]),
        lengths=np.concatenate([part.lengths for part in regions]),
    )
