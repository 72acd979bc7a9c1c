"""Fields that hold boxes and points: from the forms that files have to the one that transforms move, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from fastload.images.fit import axis_letter

COORDINATE_FIELDS = ("bbox", "boxes", "landmarks")
"""Fields of these names hold coordinates in the image, which have to move with it."""

Kind = Literal["xyxy", "xywh", "points"]


@dataclass(frozen=True)
class Coordinates:
    """How a field holds coordinates in the image.

    Attributes:
        kind: "points": (B, 2 P) or (B, P, 2) as x, y; "xyxy" or "xywh": (B, 4) or (B, M, 4), corners, or a corner and a
            size. Where an image has several boxes, those of four zeros only fill the row up, and stay so.
        unusable: why its numbers are not pixels of the images as they are packed; empty if they are.
    """

    kind: Kind
    unusable: str = ""


def coordinates_of(name: str, shape: tuple[int, ...], columns: Sequence[str], frame: str = "") -> Coordinates:
    """Returns how a field of COORDINATE_FIELDS holds a sample's numbers, of a shape, by the names of its columns.

    The frame says why they are not pixels of the packed images; empty if they are.
    """
    words = [column.lower() for column in columns]
    if name == "landmarks":
        flat = len(shape) == 1 and shape[0] % 2 == 0
        if not flat and not (len(shape) == 2 and shape[1] == 2):
            return Coordinates("points", f"a sample's are {shape}, not (2 P,) or (P, 2) numbers x, y")
        if flat and words and not all("xy"[i % 2] in word for i, word in enumerate(words)):
            return Coordinates("points", "the names of its columns do not say x, y, x, y, ...")
        return Coordinates("points", frame)
    kinds: dict[str, Kind] = {"xyxy": "xyxy", "xywh": "xywh"}
    letters = "".join(axis_letter(word) for word in words)
    if len(shape) not in (1, 2) or shape[-1] != 4 or letters not in kinds:
        return Coordinates(
            "xyxy",
            "its attribute `names` does not say what its numbers are, four such as x_1, y_1, width, height or xmin, "
            "ymin, xmax, ymax",
        )
    return Coordinates(kinds[letters], frame)


def as_moved(fields: dict[str, torch.Tensor], coordinates: Mapping[str, Coordinates]) -> dict[str, torch.Tensor]:
    """Returns the coordinates among the fields in the form that transforms move, float32.

    Boxes are corners x1, y1, x2, y2, (B, 4) or (B, M, 4), points (B, P, 2).
    """
    moved = {}
    for name, how in coordinates.items():
        if name not in fields:
            continue
        values = fields[name].to(torch.float32)
        if how.kind == "points":
            values = values.reshape(len(values), -1, 2)
        elif how.kind == "xywh":
            values = torch.cat([values[..., :2], values[..., :2] + values[..., 2:]], dim=-1)
        moved[name] = values
    return moved


def as_handed_over(
    moved: dict[str, torch.Tensor],
    fields: dict[str, torch.Tensor],
    coordinates: Mapping[str, Coordinates],
    size: tuple[int, int],
) -> dict[str, torch.Tensor]:
    """Returns moved coordinates in the form that the fields had, float32; boxes are clamped to (height, width)."""
    result = {}
    for name, values in moved.items():
        kind = coordinates[name].kind
        if kind != "points":
            x, y = values[..., 0::2].clamp(0, size[1]), values[..., 1::2].clamp(0, size[0])
            values = torch.stack([x[..., 0], y[..., 0], x[..., 1], y[..., 1]], dim=-1)
        if kind == "xywh":
            values = torch.cat([values[..., :2], values[..., 2:] - values[..., :2]], dim=-1)
        if kind != "points" and values.ndim == 3:
            values = values.masked_fill((fields[name] == 0).all(dim=-1, keepdim=True), 0)
        result[name] = values.reshape(fields[name].shape)
    return result
