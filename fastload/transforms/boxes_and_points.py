"""Converts fields of boxes and points from the forms in files to the form that transforms move, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
import torch

from fastload.images.fit import axis_letter
from fastload.transforms.engine.buffers import sent

COORDINATE_FIELDS = ("bbox", "boxes", "landmarks", "keypoints")
"""Fields of these names hold coordinates in the image, which have to move with it."""

Kind = Literal["xyxy", "xywh", "points", "xyv"]

_PROBES = ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0))
"""Points that are moved along, to see whether an image is mirrored."""


@dataclass(frozen=True)
class Coordinates:
    """The form in which a field holds coordinates in the image.

    Attributes:
        kind: "points": (B, 2 P) or (B, ..., 2) as x, y; "xyv": (B, ..., K, 3) as x, y and a visibility, of which 0
            means that there is no point; "xyxy" or "xywh": (B, 4) or (B, M, 4), corners, or a corner and a size. Where
            an image has several boxes, boxes of four zeros are padding, and stay zeros.
        unusable: why its numbers are not pixels of the images as they are packed; empty if they are.
        flip_pairs: for each of K points its number in a mirrored image, such as the other eye's; (): unchanged.
    """

    kind: Kind
    unusable: str = ""
    flip_pairs: tuple[int, ...] = ()


def coordinates_of(
    name: str, shape: tuple[int, ...], columns: Sequence[str], frame: str = "", flip_pairs: Any = ()
) -> Coordinates:
    """Returns how a field of COORDINATE_FIELDS holds a sample's numbers, of a shape, by the names of its columns.

    The frame says why they are not pixels of the packed images, empty if they are; `flip_pairs` is the attribute.
    """
    if name == "keypoints":
        kind: Kind = "xyv" if len(shape) > 1 and shape[-1] == 3 else "points"
        flat = len(shape) == 1 and shape[0] % 2 == 0 and shape[0] % 3 > 0
        if kind == "points" and not flat and not (len(shape) > 1 and shape[-1] == 2):
            return Coordinates("points", f"a sample's are {shape}, not (..., K, 3) with a visibility or (..., K, 2)")
        pairs = flip_pairs if isinstance(flip_pairs, tuple) else (flip_pairs,)
        if pairs and (len(shape) < 2 or sorted(pairs) != list(range(shape[-2]))):
            return Coordinates(kind, "its attribute `flip_pairs` does not name each of its points once")
        return Coordinates(kind, frame, pairs)
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

    Boxes are corners x1, y1, x2, y2, (B, 4) or (B, M, 4), points (B, P, 2), behind which three more show how images
    were turned where points of two sides are to change places.
    """
    moved = {}
    for name, how in coordinates.items():
        if name not in fields:
            continue
        values = fields[name].to(torch.float32)
        if how.kind in ("points", "xyv"):
            values = values.reshape(len(values), -1, 2 if how.kind == "points" else 3)[..., :2]
            if how.flip_pairs:
                values = torch.cat([values, _on(_PROBES, values.device).expand(len(values), -1, -1)], dim=1)
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
    """Returns moved coordinates in the form that the fields had, float32; boxes are clamped to (height, width).

    Points with a visibility that lie outside of the image, by more than a pixel, become three zeros.
    """
    result = {}
    for name, values in moved.items():
        how, shape = coordinates[name], fields[name].shape
        if how.kind in ("points", "xyv"):
            result[name] = _points_handed_over(values, fields[name], how, size).reshape(shape)
            continue
        x, y = values[..., 0::2].clamp(0, size[1]), values[..., 1::2].clamp(0, size[0])
        values = torch.stack([x[..., 0], y[..., 0], x[..., 1], y[..., 1]], dim=-1)
        if how.kind == "xywh":
            values = torch.cat([values[..., :2], values[..., 2:] - values[..., :2]], dim=-1)
        if values.ndim == 3:
            values = values.masked_fill((fields[name] == 0).all(dim=-1, keepdim=True), 0)
        result[name] = values.reshape(shape)
    return result


def _points_handed_over(
    values: torch.Tensor, field: torch.Tensor, how: Coordinates, size: tuple[int, int]
) -> torch.Tensor:
    """Returns points in the form of a field, (B, P, 2) or, with their visibility, (B, P, 3)."""
    mirrored = None
    if how.flip_pairs:
        values, probes = values[:, :-3], values[:, -3:]
        (a, b), (c, d) = ((probes[:, at] - probes[:, 0]).unbind(-1) for at in (1, 2))
        mirrored = (a * d - b * c < 0)[:, None, None, None]
    if how.kind == "xyv":
        visibility = field.to(torch.float32).reshape(len(field), -1, 3)[..., 2:]
        x, y = values[..., :1], values[..., 1:]
        there = (visibility > 0) & (x >= -1) & (x <= size[1]) & (y >= -1) & (y <= size[0])
        values = torch.cat([values, visibility], dim=-1).masked_fill(~there, 0)
    if mirrored is not None:
        points = values.reshape(len(values), -1, len(how.flip_pairs), values.shape[-1])
        others = points.index_select(2, _on(how.flip_pairs, values.device))
        values = torch.where(mirrored, others, points)
    return values


@cache
def _on(values: tuple[Any, ...], device: torch.device) -> torch.Tensor:
    """Returns constant numbers on a device, sent once."""
    array = np.array(values)
    return sent(array.astype(np.float32) if array.dtype.kind == "f" else array, device)
