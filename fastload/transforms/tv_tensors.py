"""Samples for torchvision's v2 transforms, which move masks, boxes and points that come as its tv_tensors.

torchvision is never imported here: whoever gives a transform of it has done so.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch.utils._pytree import tree_map

from fastload.errors import OptionError
from fastload.transforms.boxes_and_points import COORDINATE_FIELDS, Coordinates

_PIXEL_FIELDS = ("masks", "pixel_mask")
# Transforms of torchvision that draw and do not say so in their names.
_DRAWING = (
    "AugMix", "AutoAugment", "ColorJitter", "CutMix", "ElasticTransform", "GaussianBlur", "GaussianNoise", "JPEG",
    "MixUp", "RandAugment", "ScaleJitter", "TrivialAugmentWide",
)  # fmt: skip
# Transforms of torchvision that a batch needs none of.
_NEEDLESS = ("ConvertImageDtype", "Identity", "PILToTensor", "ToDtype", "ToImage", "ToPureTensor", "ToTensor")
# The methods of a module that are its call.
_CALLS = ("forward", "__call__", "_call_impl", "_wrapped_call_impl")


def is_v2(transform: object) -> bool:
    """Whether it is a transform of torchvision.transforms.v2, or a list of transforms with one among them."""
    return any(map(_is_v2, _parts(transform)))


def refuse_image_transforms(transform: object) -> None:
    """Raises OptionError if a transform of samples is one of torchvision's that takes an image alone."""
    first = next((part for part in _parts(transform) if not _is_list(part)), None)  # others get what it returns
    if _of_torchvision(first) and not _is_v2(first):
        raise OptionError(
            f"PackedDataset(transform=...): {_named(first)} of torchvision takes an image alone, and a sample is the "
            f"tuple of its fields. Transforms of torchvision.transforms.v2 take the whole tuple, and move masks and "
            f"boxes along. Or give a function that returns (transform(sample[0]), *sample[1:])."
        )


def _parts(transform: object) -> Iterator[object]:
    """Yields the transforms that one runs: those in lists of torch and torchvision, the object of a bound `forward`."""
    if isinstance(transform, functools.partial):
        yield from _parts(transform.func)
    elif isinstance(transform, MethodType) and transform.__name__ in _CALLS:
        yield from _parts(transform.__self__)
    elif isinstance(compiled := getattr(transform, "_orig_mod", None), torch.nn.Module):
        yield from _parts(compiled)
    elif isinstance(transform, torch.nn.Sequential) and type(transform).forward is torch.nn.Sequential.forward:
        for part in transform:
            yield from _parts(part)
    elif _is_list(transform):
        if type(transform).__name__ != "Compose":
            yield transform  # it draws which ones it runs
        for part in transform.transforms:  # type: ignore[attr-defined]  # `_is_list` has seen it
            yield from _parts(part)
    elif _of_torchvision(transform) and not _is_v2(transform) and hasattr(transform, "lambd"):
        yield from _parts(transform.lambd)
    else:
        yield transform


def _is_list(transform: object) -> bool:
    """Whether it is one of torchvision's lists of transforms: Compose, RandomApply, RandomChoice, RandomOrder."""
    listed = getattr(transform, "transforms", None)
    return isinstance(listed, Iterable) and (_is_v2(transform) or _of_torchvision(transform))


def _is_v2(transform: object) -> bool:
    v2 = sys.modules.get("torchvision.transforms.v2")
    base = getattr(v2, "Transform", None)
    return base is not None and "torchvision.tv_tensors" in sys.modules and isinstance(transform, base)


def _of_torchvision(transform: object) -> bool:
    """Whether a call runs torchvision's own code, and not code of a user's subclass."""
    kind = type(transform)
    code = transform if _is_function(transform) else getattr(kind, "forward", kind.__call__)
    return str(getattr(code, "__globals__", {}).get("__name__", "")).startswith("torchvision.transforms.")


def _is_function(transform: object) -> bool:
    return hasattr(transform, "__code__")


def _named(transform: object) -> str:
    return str(getattr(transform, "__name__", type(transform).__name__))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(names))


class OnTvTensors:
    """Calls a v2 transform with a sample whose fields are tv_tensors, and returns the sample with plain tensors.

    Images are given as `Image`, masks as `Mask`, boxes as `BoundingBoxes` and points as `KeyPoints`; all else as it is.
    Padding boxes are left out, and the results are padded again. Visibilities of points stay; points of visibility 0
    stay zeros.

    Args:
        transform: a v2 transform.
        fields: names of a sample's, in order, with images.
        coordinates: how fields hold boxes and points.

    Raises:
        OptionError: boxes or points cannot follow their images; (when called) the transform removed boxes, and not
            what belongs to them.
    """

    def __init__(
        self, transform: Callable[[Any], Any], fields: Sequence[str], coordinates: Mapping[str, Coordinates]
    ) -> None:
        self._transform, self._fields, self._coordinates = transform, tuple(fields), coordinates
        name = type(transform).__name__
        for field in fields:
            how = coordinates.get(field)
            if how is None and field not in COORDINATE_FIELDS:
                continue
            why = how.unusable if how is not None else "nothing says what its numbers are"
            if how is not None and how.kind in ("points", "xyv") and not hasattr(_tv_tensors(), "KeyPoints"):
                why = why or "this torchvision has no KeyPoints, which came with 0.23"
            if why:
                raise OptionError(
                    f"PackedDataset(transform=...): {name} moves pixels, and the coordinates in {field} cannot follow: "
                    f"{why}. Leave {field} out of fields; or, for a transform that moves nothing, give a function that "
                    f"calls it with the image alone: it returns (transform(sample[0]), *sample[1:])."
                )

    def __call__(self, sample: tuple[Any, ...]) -> Any:
        """Returns what the transform makes of a sample; its tensors have the dtypes that the transform gives them."""
        given = dict(zip(self._fields, sample, strict=True))
        count = _num_boxes(given)
        size = tuple(given["images"].shape[-2:])
        of_boxes = [] if count is None else self._fields_of_boxes(given)
        wrapped = tuple(
            self._wrapped(name, value[:count] if name in of_boxes else value, size) for name, value in given.items()
        )
        result = self._transform(wrapped)
        if not isinstance(result, (tuple, list)) or len(result) != len(given):
            return tree_map(_plain, result)
        made = dict(zip(self._fields, map(_plain, result), strict=True))
        kept = count if count is None else len(made["boxes"])
        for name in of_boxes:
            if len(made[name]) != kept:
                self._refuse_removal(name, [other for other in of_boxes if other != "boxes"], count, kept)
        for name, value in made.items():
            if isinstance(value, torch.Tensor):
                full = given[name]
                made[name] = self._unwrapped(name, value, full[:count] if name in of_boxes else full)
        for name in of_boxes:
            made[name] = _padded(made[name], len(given[name]), -1 if name == "box_labels" else 0)
        if kept != count and "num_boxes" in given:
            made["num_boxes"] = torch.full_like(given["num_boxes"], kept or 0)
        return tuple(made.values())

    def _fields_of_boxes(self, given: Mapping[str, Any]) -> list[str]:
        """Returns the fields that have a row for each box."""
        boxes = given["boxes"]
        return [
            name
            for name, value in given.items()
            if name == "boxes"
            or (name.startswith("box_") and value.ndim and len(value) == len(boxes))
            or (name == "keypoints" and value.ndim > 2 and len(value) == len(boxes))
        ]

    def _wrapped(self, name: str, value: Any, size: tuple[int, ...]) -> Any:
        """Returns a field of a sample as a tv_tensor, if there is one for it; size: height and width of the image."""
        tv, how = _tv_tensors(), self._coordinates.get(name)
        if name == "images":
            return tv.Image(value)
        if name in _PIXEL_FIELDS:
            return tv.Mask(value.to(torch.uint8) if value.dtype is torch.bool else value)
        if how is None:
            return value
        if how.kind in ("points", "xyv"):
            points = value[..., :2] if how.kind == "xyv" or value.ndim > 1 else value.reshape(-1, 2)
            return tv.KeyPoints(points.clone(), canvas_size=size)
        return tv.BoundingBoxes(value.reshape(-1, 4).clone(), format=how.kind.upper(), canvas_size=size)

    def _unwrapped(self, name: str, value: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Returns a plain tensor in the form of the field that was given."""
        how = self._coordinates.get(name)
        if name == "pixel_mask":
            return value.to(torch.bool)
        if how is None or name == "boxes":
            return value
        if how.kind == "xyv" and value.shape[:-1] == given.shape[:-1]:
            seen = given[..., 2:]
            return torch.cat([value, seen.to(value.dtype)], dim=-1).masked_fill(seen == 0, 0)
        if how.kind == "xyv" or value.numel() != given.numel():
            raise OptionError(
                f"PackedDataset(transform=...): {type(self._transform).__name__} returned {name} of {len(value)} for "
                f"{len(given)}, and nothing says which are left. Samples of a batch have as many; leave out what "
                f"removes them, or {name} out of fields."
            )
        return value.reshape(given.shape)

    def _refuse_removal(self, name: str, others: list[str], count: int | None, kept: int | None) -> None:
        places = ", ".join(f"sample[{self._fields.index(other)}]" for other in others)
        raise OptionError(
            f"PackedDataset(transform=...): the transform left {kept} of {count} boxes, and did not remove the same "
            f"rows of {name}. Give SanitizeBoundingBoxes labels_getter=, a function that returns ({places},), or leave "
            f"{name} out of fields."
        )


def refuse_torchvision(transform: object) -> None:
    """Raises OptionError if a transform of batches is one of torchvision's.

    They would draw once for a whole batch, and get the images alone.
    """
    listed = list(transform) if isinstance(transform, (list, tuple)) else [transform]
    parts = [part for one in listed for part in _parts(one) if _is_v2(part) or _of_torchvision(part)]
    if not parts:
        return
    drawing = [_named(part) for part in parts if _draws(part)]
    still = [_named(part) for part in parts if not _draws(part)]
    names = list(dict.fromkeys(map(_named, parts)))
    ours = sys.modules["fastload.transforms"].__all__  # this module is a part of it
    own = [name for name in names if name in ours]
    needless = [name for name in names if name in _NEEDLESS]
    others = [name for name in names if name not in own and name not in needless]
    said, ways = [], []
    if drawing:
        said.append(f"{_listed(drawing)} of torchvision would draw once for a whole batch.")
    if still:
        said.append(
            f"{_listed(still)} of torchvision would get the images of a batch alone, and no masks and boxes with them."
        )
    if own:
        ways.append(f"Take fastload.transforms' {', '.join(own)}, with the same parameters.")
    if needless:
        ways.append(f"Leave {', '.join(needless)} out: images are tensors, and Normalize scales them.")
    if others:
        ways.append(f"fastload.transforms has no {', '.join(others)}.")
    raise OptionError(
        f"FastLoader(transform=...): {' '.join(said + ways)} PackedDataset(transform=...) takes the transforms of "
        f"torchvision.transforms.v2, and calls them with each sample."
    )


def _draws(transform: object) -> bool:
    """Whether a transform of torchvision draws random numbers; its functions never do."""
    name = type(transform).__name__
    return not _is_function(transform) and ("Random" in name or name in _DRAWING)


def _tv_tensors() -> Any:
    return sys.modules["torchvision.tv_tensors"]


def _num_boxes(given: Mapping[str, Any]) -> int | None:
    """Returns how many boxes of a sample are no padding; None: it has no several boxes."""
    boxes = given.get("boxes")
    if boxes is None or boxes.ndim != 2:
        return None
    if "num_boxes" in given:
        return int(given["num_boxes"])
    there = (boxes != 0).any(dim=-1).nonzero()
    return int(there[-1]) + 1 if len(there) else 0


def _plain(value: Any) -> Any:
    tv = isinstance(value, _tv_tensors().TVTensor)
    return value.as_subclass(torch.Tensor) if tv else value


def _padded(values: torch.Tensor, rows: int, fill: int) -> torch.Tensor:
    """Returns values with as many rows as a field has, filled."""
    if len(values) > rows:
        raise OptionError(f"PackedDataset(transform=...): it returned {len(values)} boxes, and a row has {rows}.")
    return torch.cat([values, values.new_full((rows - len(values), *values.shape[1:]), fill)])
