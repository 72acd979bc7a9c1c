"""Fields that hold places in the image, boxes and points, in the forms that files have and the one transforms move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from fastload.transforms.spec import ImageSpec

# Fields of these names hold places in the image; a moved image would leave them behind.
COORDINATE_FIELDS = ("bbox", "landmarks")

Kind = Literal["xyxy", "xywh", "points"]


@dataclass(frozen=True)
class Coordinates:
    """How a field holds places in the image.

    Attributes:
        kind: "points": (B, 2 P) or (B, P, 2) as x, y; "xyxy" or "xywh": (B, 4), corners, or a corner and a size.
        unusable: why its places are not pixels of the images as they are packed; empty if they are.
    """

    kind: Kind
    unusable: str = ""


def as_moved(fields: dict[str, torch.Tensor], coordinates: Mapping[str, Coordinates]) -> dict[str, torch.Tensor]:
    """The coordinates among the fields as transforms move them, float32: boxes (B, 4) as corners, points (B, P, 2)."""
    moved = {}
    for name, how in coordinates.items():
        if name not in fields:
            continue
        values = fields[name].to(torch.float32)
        if how.kind == "points":
            values = values.reshape(len(values), -1, 2)
        elif how.kind == "xywh":
            values = torch.cat([values[:, :2], values[:, :2] + values[:, 2:]], dim=1)
        moved[name] = values
    return moved


def as_handed_over(
    moved: dict[str, torch.Tensor],
    fields: dict[str, torch.Tensor],
    coordinates: Mapping[str, Coordinates],
    spec: ImageSpec,
) -> dict[str, torch.Tensor]:
    """The moved coordinates in the form that the fields had, float32; boxes cut off at the image's edges."""
    result = {}
    for name, values in moved.items():
        kind = coordinates[name].kind
        if kind != "points":
            x, y = values[:, 0::2].clamp(0, spec.width), values[:, 1::2].clamp(0, spec.height)
            values = torch.stack([x[:, 0], y[:, 0], x[:, 1], y[:, 1]], dim=1)
        if kind == "xywh":
            values = torch.cat([values[:, :2], values[:, 2:] - values[:, :2]], dim=1)
        result[name] = values.reshape(fields[name].shape)
    return result
