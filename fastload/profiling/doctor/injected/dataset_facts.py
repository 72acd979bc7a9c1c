"""Reads a dataset's own facts: the folder of its files, and its transforms, as one would type them again."""

from __future__ import annotations

import os
import re
import tempfile
from typing import Any

from .code_lines import TIMED

_ROOTS = ("root", "root_dir", "data_dir", "data_root", "image_dir", "img_dir", "folder", "path", "directory")
_TARGETS = "mask|label|target|annotation|segm"  # in the name of an attribute that is a folder of them
_MOST_PATHS = 64  # of a list of files are looked at
_MOST_TRANSFORMS = 16
_CLOSE = 1e-6
_USUAL_SCALE = (0.08, 1.0)  # of a random crop that is resized: the part of the image's area
_OF_TRANSFORMS = ("torchvision.transforms", "albumentations")  # modules of classes that are transforms
_LIBRARIES = (*_OF_TRANSFORMS, "timm", "kornia", "torch")  # whose transforms do what their names say
_BEGIN = 64  # bytes of the index of shards, in which it says what it lists


def facts_of(dataset: Any) -> dict[str, Any]:
    """Returns what `PlainLoader` wants to know of a dataset: its root, split and transforms, is_part, same_labels.

    `root` and `split` are "" where they are not known; of the transforms each is written as `RandomResizedCrop(224)`.
    """
    is_part = False
    for _ in range(8):  # a Subset of a Subset, and the like
        inner = getattr(dataset, "dataset", None)
        if inner is None or inner is dataset:
            break
        is_part = is_part or hasattr(dataset, "indices")
        dataset = inner
    held = getattr(dataset, "__dict__", {})
    root, transforms = _root_of(held), _listed(_transform_of(dataset, held))[:_MOST_TRANSFORMS]
    own = [type(one).__name__ for one in transforms if not type(one).__module__.startswith(_LIBRARIES)]
    return {
        "root": root,
        "split": _split_of(held, root),
        "transforms": [_written(one) for one in transforms],
        "own_transforms": own,
        "is_part": is_part,
        "same_labels": _has_labels_of_folders(dataset, held, root),
    }


def sampler_of(loader: Any) -> str:
    """Returns the class that orders a loader's samples; "" where it has none."""
    batches = getattr(loader, "batch_sampler", None)
    if batches is not None and type(batches).__name__ != "BatchSampler":
        return type(batches).__name__
    sampler = getattr(batches, "sampler", getattr(loader, "sampler", None))
    # One that is there for an iterable dataset, whose order it does not decide.
    return "" if sampler is None or "Infinite" in type(sampler).__name__ else type(sampler).__name__


def drops_last(loader: Any) -> bool | None:
    """Returns whether a loader drops a last batch that is not full; None where that is not known."""
    found = getattr(getattr(loader, "batch_sampler", None), "drop_last", getattr(loader, "drop_last", None))
    return found if isinstance(found, bool) else None


def _transform_of(dataset: Any, held: dict[str, Any]) -> Any:
    """Returns a dataset's transforms: an attribute, or else what its `__getitem__` finds in its module."""
    named = [held[name] for name in ("transform", "transforms") if held.get(name) is not None]
    named += [one for name, one in held.items() if "transform" in name and callable(one)]
    getting = getattr(type(dataset), "__getitem__", None)
    getting = getattr(getting, TIMED, getting)
    names = getattr(getattr(getting, "__code__", None), "co_names", ())
    around = getattr(getting, "__globals__", {})
    others = [*held.values(), *(around[name] for name in names if name in around)]
    return next(iter([*named, *(one for one in others if _is_transform(one))]), None)


def _is_transform(thing: Any) -> bool:
    """Returns whether something is a transform of a library, or holds a list of them."""
    owner = type(thing)
    listed = callable(thing) and isinstance(getattr(thing, "transforms", None), (list, tuple))
    return listed or (owner.__module__.startswith(_OF_TRANSFORMS) and callable(thing) and not isinstance(thing, type))


def _has_labels_of_folders(dataset: Any, held: dict[str, Any], root: str) -> bool:
    """Returns whether a dataset is one of torchvision that gives the labels it found, in the order of their names."""
    getting = getattr(type(dataset), "__getitem__", None)
    theirs = (getattr(getting, "__module__", None) or "").startswith("torchvision.datasets")
    if not theirs or held.get("target_transform") is not None:
        return False
    numbers, samples = held.get("class_to_idx"), held.get("samples")
    if not isinstance(numbers, dict):
        return True
    if numbers != {name: number for number, name in enumerate(sorted(numbers))}:
        return False
    some = samples[:: max(1, len(samples) // _MOST_PATHS)] if isinstance(samples, list) else []
    return all(numbers.get(os.path.relpath(path, root).split(os.sep)[0]) == label for path, label in some)


def _split_of(held: dict[str, Any], root: str) -> str:
    """Returns the part of its files that a dataset takes, if the packed file of its folder has such a split."""
    if isinstance(held.get("train"), bool):  # of torchvision's MNIST and CIFAR
        return "train" if held["train"] else "test"
    split = held.get("image_set", held.get("split"))  # torchvision's VOC has image_set
    if split not in ("train", "val", "test"):
        return ""
    return split if "image_set" in held or os.path.isdir(os.path.join(root, split)) else ""


def _root_of(held: dict[str, Any]) -> str:
    """Returns the folder among a dataset's attributes, or the folder of the files in one of its lists.

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
    # The stages of a WebDataset; the stage that lists the shards has their addresses.
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
