"""What a dataset says of itself: the folder of its files, and its transforms, as one would type them again."""

from __future__ import annotations

import os
import re
import tempfile
from typing import Any

_ROOTS = ("root", "root_dir", "data_dir", "data_root", "image_dir", "img_dir", "folder", "path", "directory")
_TARGETS = "mask|label|target|annotation|segm"  # in the name of an attribute that is a folder of them
_MOST_PATHS = 64  # of a list of files are looked at
_MOST_TRANSFORMS = 16
_CLOSE = 1e-6
_USUAL_SCALE = (0.08, 1.0)  # of a random crop that is resized: the part of the image's area
_BEGIN = 64  # bytes of the index of shards, in which it says what it lists


def facts_of(dataset: Any) -> dict[str, Any]:
    """Returns `root` and `split`, "" where they are not known, and `transforms`, such as `RandomResizedCrop(224)`."""
    for _ in range(8):  # a Subset of a Subset, and the like
        inner = getattr(dataset, "dataset", None)
        if inner is None or inner is dataset:
            break
        dataset = inner
    held = getattr(dataset, "__dict__", {})
    named = [held[name] for name in ("transform", "transforms") if held.get(name) is not None]
    transform = next(
        iter([*named, *(one for name, one in held.items() if "transform" in name and callable(one))]), None
    )
    transforms = [_written(one) for one in _listed(transform)[:_MOST_TRANSFORMS]]
    root = _root_of(held)
    return {"root": root, "split": _split_of(held, root), "transforms": transforms}


def _split_of(held: dict[str, Any], root: str) -> str:
    """Returns the part of its files that a dataset takes, if the packed file of its folder has such a split."""
    if isinstance(held.get("train"), bool):  # of torchvision's MNIST and CIFAR
        return "train" if held["train"] else "test"
    split = held.get("image_set", held.get("split"))  # the former is that of torchvision's VOC
    if split not in ("train", "val", "test"):
        return ""
    return split if "image_set" in held or os.path.isdir(os.path.join(root, split)) else ""


def _root_of(held: dict[str, Any]) -> str:
    """Returns the folder among a dataset's attributes, or that of the files in one of its lists.

    Empty for one that holds shards of MosaicML Streaming or LitData, which nothing here reads.
    """
    root = _found_root(held)
    try:
        with open(os.path.join(root, "index.json"), "rb") as file:
            begin = file.read(_BEGIN)
    except OSError:
        return root
    return "" if b'"shards"' in begin or b'"chunks"' in begin else root


def _found_root(held: dict[str, Any]) -> str:
    shared = {os.path.realpath(one) for one in (tempfile.gettempdir(), os.path.expanduser("~"), os.sep)}
    folders = {
        name: os.fspath(value)
        for name, value in held.items()
        if isinstance(value, (str, os.PathLike)) and os.path.isdir(value) and os.path.realpath(value) not in shared
    }
    if len(folders) > 1 and any(re.search(_TARGETS, name) for name in folders):  # images and masks, side by side
        parents = {os.path.dirname(os.path.normpath(folder)) or "." for folder in folders.values()}
        if len(parents) == 1 and not shared.intersection(map(os.path.realpath, parents)):
            return parents.pop()
    if named := [folders[name] for name in _ROOTS if name in folders]:
        return named[0]
    if folders:
        return next(iter(folders.values()))
    # The stages of a WebDataset; the one that lists the shards has their addresses.
    stages = held.get("pipeline")
    shards = [getattr(stage, "urls", None) for stage in stages] if isinstance(stages, list) else []
    for value in (*held.values(), *shards):
        if isinstance(value, (list, tuple)) and value:
            some = value[:: max(1, len(value) // _MOST_PATHS)]
            paths = [one[0] if isinstance(one, (list, tuple)) and one else one for one in some]
            if all(isinstance(path, (str, os.PathLike)) for path in paths) and os.path.isfile(paths[0]):
                folder = os.path.commonpath([os.path.dirname(os.fspath(path)) for path in paths])
                return str(folder or ".")
    return ""


def _listed(transform: Any) -> list[Any]:
    """Returns the transforms in one that holds a list of them."""
    inner = getattr(transform, "transforms", None)
    if hasattr(inner, "transforms"):
        return _listed(inner)
    if not isinstance(inner, (list, tuple)):
        return [] if transform is None else [transform]
    return [one for each in inner for one in _listed(each)]


def _written(transform: Any) -> str:
    """Returns a transform as a call with its size and scale, its mean and deviation, or how far it changes colours."""
    words = []
    name = getattr(transform, "__name__", type(transform).__name__)
    size, mean, std = (getattr(transform, name, None) for name in ("size", "mean", "std"))
    if isinstance(size, int):
        words = [str(size)]
    elif isinstance(size, (list, tuple)) and 0 < len(size) < 3 and all(isinstance(one, int) for one in size):
        words = [str(size[0]) if len({*size}) == 1 else str(tuple(size))]
    elif isinstance(mean, (list, tuple)) and isinstance(std, (list, tuple)):
        words = [str(list(mean)), str(list(std))]
    elif name == "ColorJitter":
        names = ("brightness", "contrast", "saturation", "hue")
        strengths = [_strength(getattr(transform, one, None), one) for one in names]
        words = [one for one in strengths if one] if all(strengths) else []
    scale = getattr(transform, "scale", None)
    if words and name.startswith("RandomResizedCrop") and isinstance(scale, (list, tuple)) and len(scale) == 2:
        words += [f"scale=({scale[0]:g}, {scale[1]:g})"] if tuple(scale) != _USUAL_SCALE else []
    return f"{name}({', '.join(words)})"


def _strength(factors: Any, name: str) -> str:
    """Returns how far a jitter changes colours, as one would type it; "" where it is not known.

    torchvision keeps the range of factors, and of shifts of `hue`.
    """
    if factors is None:
        return "0"
    if isinstance(factors, (int, float)):
        return f"{factors:g}"
    if not (isinstance(factors, (list, tuple)) and len(factors) == 2):
        return ""
    low, high = factors
    if not (isinstance(low, (int, float)) and isinstance(high, (int, float))):
        return ""
    usual = 0.0 if name == "hue" else 1.0
    return f"{high - usual:g}" if abs(low + high - 2 * usual) < _CLOSE else f"({low:g}, {high:g})"
