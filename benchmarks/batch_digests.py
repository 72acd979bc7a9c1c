"""Are the bytes of every batch what they were before? A digest of each field of each batch, for each feature.

    PYTHONPATH=OLD python benchmarks/batch_digests.py before.jsonl      the checkout OLD; 80 s on two cores
    PYTHONPATH=NEW python benchmarks/batch_digests.py after.jsonl       the same script, another checkout
    python benchmarks/batch_digests.py --compare before.jsonl after.jsonl
    PYTHONPATH=NEW python benchmarks/batch_digests.py some.jsonl --only "decode=device"   cases with this in their name

For people who change how batches are made. Both runs take place on one machine: rounding differs from CPU to CPU, so
this is no test. Stand-ins and files are those of tests/ of the checkout that is looked at; real images come from
../shared/data where it exists, drawn ones otherwise.

A line is a case: its name; the batches of epoch 0, of epoch 1 that is broken off in the middle, of epoch 2 (begun by a
new `iter()`), of epoch 5 (by `set_epoch`); the states in the middle of that one and at its end; and what a new loader
yields after `load_state_dict` of the middle one, with a batch of the epoch behind it. A batch is a text: each field's
dtype, shape, order of strides and digest, then `rows`, `valid`, `global_valid`, `names`, and where there are some
`sizes` and `pixel_mask`. Three batches are kept at a time, and looked at again: one that changed meanwhile says so.

`--compare` prints for each case the first batch that differs, and the parts of it that do, and ends with 1 if any does.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import hashlib
import inspect
import io
import itertools
import json
import logging
import os
import random
import sys
import tarfile
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset

import fastload
from fastload import ChunkWindow, ClassBatches, FastLoader, MixedEcho, PackedDataset, Remote, Weighted
from fastload.format.header import read_header
from fastload.format.ragged import Column
from fastload.format.texts import text_arrays
from fastload.pack.index import index_files
from fastload.repack import repack_file
from fastload.transforms import (
    CenterCrop,
    ColorJitter,
    CutMix,
    MixUp,
    Normalize,
    RandomApply,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
)

sys.path.extend(str(Path(fastload.__file__).resolve().parents[1] / folder) for folder in ("tests", "tools"))
from late_backend import Device
from ragged_cases import flip, flip_byte, jpeg_row, varied_file, varied_rows
from running_server import serving
from small_files import labels_in_turn, random_pixels, write_foreign, write_random, write_tokens

from sample_files import write_packed, write_ragged

CHECKOUT = Path(fastload.__file__).resolve().parents[1]
IMAGES = Path(__file__).resolve().parents[2] / "shared" / "data"
HELD = 3  # batches that are looked at again when so many more have come


# Data


def photos(tar: str, count: int, size: tuple[int, int]) -> list[bytes]:
    """JPEG files of an archive in ../shared/data, evenly spread; drawn ones of this height and width without it."""
    if not (path := IMAGES / tar).exists():
        return [jpeg_row(*size, seed=number)[0] for number in range(count)]
    with tarfile.open(path) as archive:
        members = [one for one in archive if one.name.endswith(".jpg")]
        return [archive.extractfile(one).read() for one in members[:: len(members) // count][:count]]


def pixels_of(file: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(file)) as image:
        return np.array(image.convert("RGB"))


def coordinates(rows: int) -> dict[str, Column]:
    """Boxes of up to three an image, with classes, and two keypoints in each, in pixels of an image of 24x20."""
    rng = np.random.default_rng(2)
    counts = np.arange(rows) % 4
    there = np.arange(3) < counts[:, None]
    x, y = rng.integers(0, 8, (2, rows, 3))
    boxes = np.stack([x, y, x + rng.integers(3, 8, (rows, 3)), y + rng.integers(3, 8, (rows, 3))], axis=-1)
    seen = rng.integers(0, 3, (rows, 3, 2, 1)) * there[..., None, None]
    points = np.concatenate([rng.uniform(0, 20, (rows, 3, 2, 2)) * (seen > 0), seen], axis=-1)
    return {
        "boxes": Column((boxes * there[..., None]).astype(np.float32), {"names": ("xmin", "ymin", "xmax", "ymax")}),
        "num_boxes": Column(counts),
        "box_labels": Column(np.where(there, np.arange(3), -1)),
        "keypoints": Column(points.astype(np.float32)),
    }


def captions(rows: int) -> dict[str, Column]:
    texts, counts = text_arrays(
        [[f"{k} dogs of {i} ä{'y' * (i % 23)}".encode() for k in range(i % 4)] for i in range(rows)]
    )
    return {"caption": Column(texts), "num_captions": Column(counts)}


def keys(rows: int, of: str = "") -> dict[str, Column]:
    return {"key": Column(np.array([f"{of}{row:03}.jpg".encode() for row in range(rows)]))}


class Pairs(Dataset):
    """A dataset of somebody else's: tuples of an image, a label and what is drawn from the global random states."""

    def __len__(self) -> int:
        return 44

    def __getitem__(self, index: int) -> Any:
        image = torch.full((3, 12, 10), index, dtype=torch.uint8)
        return image, index % 3, torch.rand(2), random.random(), np.random.random(2)  # noqa: NPY002


class Mappings(Pairs):
    """Samples that are dicts, with texts and floats."""

    def __getitem__(self, index: int) -> Any:
        image = np.full((16, 12), index, np.float32)
        return {"image": image, "name": f"number {index}", "more": {"of": index / 7}, 3: torch.tensor([index, 1])}


class Growing(Pairs):
    """Samples whose shape changes from batch to batch, so that they do not fit the slots made for the first."""

    def __getitem__(self, index: int) -> Any:
        return torch.full((3, 8 + 4 * (index // 8), 8), index, dtype=torch.uint8), index


def write_data(folder: Path) -> dict[str, Any]:
    """Writes all files; returns for each name what a loader takes as its source."""
    faces = photos("celeba/img_align_celeba.tar", 75, (218, 178))
    flowers = photos("flowers128/flowers128.tar", 26, (40, 52))
    raw = np.stack([pixels_of(face) for face in faces])
    of_faces = {"labels": labels_in_turn(len(faces), "abc")} | keys(len(faces))
    of_flowers = [(file, pixels_of(file).shape, 1) for file in flowers]
    small = {"rows": 70, "size": (32, 32, 3), "classes": "abc", "chunk_rows": 8, "splits": {"train": 50, "val": 20}}
    medium = {"rows": 40, "size": (24, 20, 3), "classes": "abc", "chunk_rows": 8, "masks": True}
    parts = [folder / f"part-{number}.h5" for number in range(3)]
    for number, (part, rows) in enumerate(zip(parts, (17, 3, 30), strict=True)):
        of_part = {"rows": rows, "seed": number, "splits": None, "columns": keys(rows, f"{number}/")}
        write_random(part, **small | of_part)
    index_files(parts, folder / "index.h5")
    of_one_size = [(file, (218, 178, 3), 1) for file in faces[:40]]
    of_several = [jpeg_row(24 + i % 5, 20 + i % 7, seed=i) for i in range(40)]
    labels, noise = {"labels": labels_in_turn(40, "abc")}, random_pixels(40, (16, 12, 3))
    raw_twice = varied_rows(jpeg=False) + varied_rows(jpeg=False)
    data = {
        "raw 32": write_random(folder / "small.h5", **small),
        "raw 218": write_packed(folder / "faces.h5", raw, of_faces, chunk_rows=8),
        "uint16": write_random(folder / "deep.h5", rows=30, dtype=np.uint16, classes="abc", chunk_rows=4),
        "jpeg 218": write_ragged(folder / "jpeg.h5", of_one_size, labels),
        "jpeg": varied_file(folder / "flowers.h5", of_flowers, masks=True),
        "mixed": varied_file(folder / "mixed.h5", varied_rows() + varied_rows()[::-1], masks=True),
        "ragged raw": varied_file(folder / "ragged.h5", raw_twice, masks=True),
        "masks": write_random(folder / "masks.h5", **medium, ignore_index=255),
        "boxes": write_random(folder / "boxes.h5", **medium, columns=coordinates(40)),
        "ragged boxes": write_ragged(folder / "ragged_boxes.h5", of_several, coordinates(40) | labels),
        "texts": write_random(folder / "texts.h5", **medium, columns=captions(40) | keys(40)),
        "no images": write_tokens(folder / "tokens.h5", rows=40),
        "gzip": write_foreign(folder / "gzip.h5", noise, chunk_rows=4, labels=np.arange(40) % 3),
        "index": folder / "index.h5",
        "files": [str(part) for part in parts[::-1]],
    }
    for name, of, options in (("zstd", "masks", {}), ("zstd of index", "index", {"chunk_bytes": 4 * 32 * 32 * 3})):
        data[name] = folder / f"{name}.h5"
        repack_file(data[of], data[name], codec="zstd", workers=0, **options)
    for name, of in (("damaged 32", "raw 32"), ("damaged jpeg", "jpeg"), ("damaged index", "index")):
        data[name] = folder / f"{name}.h5"
        if of == "index":
            again = [folder / f"damaged-{part.name}" for part in parts]
            for part, copy in zip(parts, again, strict=True):
                copy.write_bytes(part.read_bytes())
            index_files(again, data[name])
        else:
            again = [data[name]]
            data[name].write_bytes(data[of].read_bytes())
        extent = read_header(again[-1]).fields["images"]
        for row in (5, 17):
            if extent.ragged is not None:
                flip(again[-1], "images", row, -40)
            else:
                flip_byte(again[-1], extent.offset + row * extent.row_bytes + 9)
    for number, file in enumerate(flowers):
        path = folder / "photos" / f"class {number % 3}" / f"{number:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file)
    data["folder"] = folder / "photos"
    data |= {"pairs": Pairs(), "mappings": Mappings(), "growing": Growing()}
    data["of two"] = ConcatDataset([Pairs(), Subset(Pairs(), range(5, 20))])
    return {name: str(source) if isinstance(source, Path) else source for name, source in data.items()}


# Transforms


class Counting:
    """A transform that says nothing of threads, so it runs where batches are handed over."""

    geometric = False

    def apply(self, images: torch.Tensor, draws: Any) -> torch.Tensor:
        return 255 - images if images.dtype == torch.uint8 else (255 - images.view(torch.int16)).view(images.dtype)


def inverted(sample: Any) -> Any:
    return (255 - sample[0], *sample[1:])


def noisy(sample: Any) -> Any:
    return (*sample, torch.rand(2), random.random(), np.random.random(2))  # noqa: NPY002


def cut(sample: Any) -> Any:
    return (sample[0][:, :20, :20], *sample[1:])


def as_float(sample: Any) -> Any:
    return {"image": sample[0][:, 4:-4].float() / 255, "label": int(sample[1]), "text": "x" * int(sample[1])}


RGB = ([0.5, 0.4, 0.3], [0.2, 0.25, 0.3])
FLIP = [RandomHorizontalFlip(), Normalize(*RGB)]
CROP = [RandomResizedCrop(24), *FLIP]
TRANSFORMS: dict[str, Any] = {
    "nothing": [],
    "flip": FLIP,
    "crop": CROP,
    "eval": [Resize(28), CenterCrop(20), Normalize(*RGB, dtype=torch.bfloat16)],
    "uint8": [RandomCrop(12, padding=2), RandomHorizontalFlip()],
    "colour": [RandomResizedCrop(16), RandomApply([ColorJitter(0.3, 0.3, 0.3, 0.1)], p=0.5), *FLIP],
    "mix": [RandomResizedCrop(16), *FLIP, MixUp(0.4, num_classes=3, p=0.5), CutMix(num_classes=None, p=0.5)],
    "not safe": [RandomResizedCrop(16), Counting(), RandomHorizontalFlip()],
    "python": [Resize((12, 16)), lambda images: 255 - images],
}
OF_ONE_SIZE = ("raw 32", "raw 218", "jpeg 218", "masks", "zstd", "gzip", "index", "files")
OF_OWN_SIZES = ("jpeg", "mixed", "ragged raw")


# Cases


@dataclasses.dataclass(frozen=True)
class Case:
    """One loader; `options` are those of `FastLoader` and of `PackedDataset`, see `loader_of`."""

    name: str
    data: str
    options: dict[str, Any]
    batch_size: int = 8
    environment: dict[str, str] = dataclasses.field(default_factory=dict)


def ranks(rank: int, nodes: int, of_node: int) -> dict[str, str]:
    """The environment that torchrun gives a rank."""
    numbers = {"RANK": rank, "WORLD_SIZE": nodes * of_node, "GROUP_RANK": rank // of_node, "GROUP_WORLD_SIZE": nodes}
    return {name: str(number) for name, number in (numbers | {"LOCAL_WORLD_SIZE": of_node}).items()}


def cases() -> Iterator[Case]:
    """The matrix: each value at least once with each neighbour that matters."""

    def case(
        data: str, *words: Any, batch_size: int = 8, environment: dict[str, str] | None = None, **options: Any
    ) -> Case:
        options = {"transform": TRANSFORMS.get(words[-1], []) if words else [], **options}
        said = [f"{name}={getattr(value, '__name__', value)}" for name, value in options.items() if name != "transform"]
        return Case(", ".join([data, *map(str, words), *said]), data, options, batch_size, environment or {})

    devices = ("cpu", "device")
    # Each kind of file, under each kind of transform, on both devices.
    for data, device in itertools.product(OF_ONE_SIZE, devices):
        for name in TRANSFORMS:
            common = name in ("nothing", "flip", "crop", "mix") or data in ("raw 32", "jpeg 218")
            if common and (name != "mix" or data not in ("masks", "zstd")):  # masks cannot be blended
                yield case(data, name, device=device)
    for data, device, name in itertools.product((*OF_OWN_SIZES, "ragged boxes"), devices, ("crop", "eval", "not safe")):
        yield case(data, name, device=device)
    for device, name in itertools.product(devices, ("nothing", "crop", "python")):
        transform = [] if name == "nothing" else [RandomResizedCrop(8) if name == "crop" else Counting()]
        yield case("uint16", name, transform=transform, device=device)
    for device in devices:
        fields = ("images", "masks", "boxes", "num_boxes", "box_labels", "keypoints", "labels", "row", "valid", "key")
        for name in ("nothing", "flip", "crop"):
            yield case("boxes", name, device=device, fields=fields)
        yield case("boxes", "crop", device=device, fields=fields, echo=2)
        yield case("boxes", "crop", device="device", fields=fields, cache="device" if device == "device" else "host")
        yield case("ragged boxes", "crop", device=device, fields=("images", "boxes", "num_boxes", "keypoints"))
        yield case("texts", "flip", device=device, fields=("images", "caption", "num_captions", "labels", "key"))
        yield case("texts", device=device, fields=("images", "caption", "key"), python=inverted, workers=1)
        yield case("no images", device=device, fields=("tokens", "row", "key"))
    # Orders, ends, ranks.
    for shuffle, ends in itertools.product((True, "full", "chunk", ChunkWindow(2), False), ("drop", "exact", "pad")):
        yield case("raw 32", shuffle=shuffle, ends=ends, batch_size=16)
        yield case("index", shuffle=shuffle, ends=ends, share=(1, 3))
    rng = np.random.default_rng(1)
    drawn = (Weighted(rng.random(70)), Weighted(rng.random(70), num_samples=40, replacement=False), ClassBatches(2, 4))
    for number, (shuffle, device) in enumerate(itertools.product(drawn, devices)):
        yield case("raw 32", f"drawn {number // 2}", "crop", shuffle=shuffle, device=device)
    for rank, ends in itertools.product((0, 1, 2), ("drop", "exact", "pad")):
        yield case("raw 32", f"rank {rank}", "crop", share=(rank, 3), ends=ends, batch_size=6)
        yield case(
            "raw 32",
            f"rank {rank} of 3",
            "crop",
            share="elastic",
            ends=ends,
            environment=ranks(rank, 1, 3),
        )
    for rank in (1, 5):
        yield case(
            "raw 32", f"rank {rank} of 2x3", share="node", ends="exact", batch_size=3, environment=ranks(rank, 2, 3)
        )
    yield case("raw 32", share="elastic", python=noisy, environment=ranks(1, 1, 3), workers=2)
    # Threads, ways to read, checks, echoes, caches.
    for workers, read in itertools.product((1, 2, 3), ("map", "pread")):
        yield case("raw 218", "crop", workers=workers, read=read)
        yield case("jpeg", "crop", workers=workers, read=read)
    yield case("raw 32", "crop", workers="auto", batch_size=64)
    for check in (None, "always", "first"):
        yield case("raw 32", "flip", check=check)
    echoes = (2, 3, MixedEcho(2, 2), MixedEcho(3, 1))
    for echo, device, (data, name) in itertools.product(
        echoes,
        devices,
        (("raw 32", "crop"), ("jpeg", "crop"), ("jpeg 218", "crop"), ("masks", "flip"), ("raw 32", "mix")),
    ):
        yield case(data, name, echo=echo, device=device)
    for cache, echo, name in itertools.product(("device", "host"), (1, 2, MixedEcho(2, 2)), ("nothing", "crop", "mix")):
        yield case("raw 32", name, cache=cache, echo=echo, device="device")
    for cache, data in itertools.product(("device", "host"), ("masks", "jpeg 218", "zstd", "index", "texts")):
        yield case(data, "flip", cache=cache, device="device", share=(1, 2), ends="exact")
    for cache, shuffle in itertools.product(
        ("device", "host"), ("full", False, ChunkWindow(2), Weighted(rng.random(70)))
    ):
        yield case("raw 32", "flip", cache=cache, shuffle=shuffle, device="device", ends="pad")
    # Batches that share a slot, and batches that fill one; the last one short.
    for batch_size, ends, device in itertools.product((1, 7, 64), ("exact", "pad"), devices):
        yield case("raw 218", batch_size, batch_size=batch_size, ends=ends, device=device)
        yield case("raw 32", batch_size, "crop", batch_size=batch_size, ends=ends, device=device)
    # Images of their own sizes.
    alike = {"group_by": "aspect"}
    forms = ({"batch": "list"}, {"batch": "pad"}, {"batch": "pad", "pad_to": 16} | alike, {"batch": "list"} | alike)
    for form, device, name in itertools.product(forms, devices, ("nothing", "flip", "resize")):
        transform = [Resize(20, max_size=40), *FLIP] if name == "resize" else TRANSFORMS[name]
        for data in (*OF_OWN_SIZES, "masks"):
            yield case(data, name, transform=transform, device=device, ends="exact", **form)
    for options in ({"echo": 2}, {"echo": MixedEcho(2, 2)}, {"share": (1, 3)}, {"workers": 3, "read": "pread"}):
        for device in devices:
            yield case("jpeg", "flip", batch="pad", pad_to=8, device=device, **options)
    yield case("ragged boxes", "flip", batch="pad", fields=("images", "boxes", "num_boxes", "keypoints", "pixel_mask"))
    # Parts of files.
    for part in ({"split": "val"}, {"rows": [3, 50, 3, 7, 8, 9, 1, 60, 61, 3, 20, 21]}, {"only": ["c", "a"]}):
        for device in devices:
            yield case("raw 32", "crop", **part, device=device, ends="exact")
        yield case("raw 32", **part, python=noisy, workers=1)
    yield case("jpeg", "crop", split="train", rows=[4, 4, 4, 1, 2, 9, 8, 7, 0, 3])
    # Processes.
    for python, device in itertools.product((inverted, noisy, as_float), devices):
        yield case("raw 32", python=python, device=device, workers=2)
    for workers, device in itertools.product((1, 2), devices):
        yield case("jpeg", "flip", python=cut, device=device, workers=workers)
    for workers in (1, 2, 3):
        yield case("raw 218", python=inverted, workers=workers, ends="exact")
    for options in (
        {"echo": 2, "transform": CROP},
        {"transform": TRANSFORMS["mix"]},
        {"share": (1, 3), "ends": "pad"},
        {"shuffle": ChunkWindow(2), "read": "pread"},
    ):
        for device in devices:
            yield case("raw 32", python=inverted, workers=1, device=device, **options)
    for data, device in itertools.product(("pairs", "mappings", "growing", "of two"), devices):
        yield case(data, workers=2, device=device, ends="exact", shuffle=data != "growing")
    yield case("pairs", workers=1, share=(1, 3), ends="pad", batch_size=3, transform=[RandomHorizontalFlip()], echo=2)
    yield case("pairs", workers=1, shuffle=False, ends="drop")
    # Damage.
    for data, device in itertools.product(("damaged 32", "damaged jpeg", "damaged index"), devices):
        for options in ({}, {"echo": 2}, {"ends": "exact", "share": (0, 2)}, {"read": "pread", "workers": 1}):
            yield case(data, "crop", on_damage="skip", device=device, **options)
    for cache in ("device", "host"):
        yield case("damaged 32", "crop", on_damage="skip", device="device", cache=cache)
    yield case("damaged jpeg", "flip", on_damage="skip", batch="pad")
    yield case("damaged 32", python=inverted, on_damage="skip", workers=2)
    # JPEGs that the device decodes; it cuts no masks.
    on_device = {"decode": "device", "device": "device", "fields": ("images", "labels")}
    for data, name in itertools.product(
        ("jpeg", "mixed", "jpeg 218"), ("crop", "eval", "colour", "python", "not safe", "uint8")
    ):
        if name != "uint8" or data == "jpeg 218":
            yield case(data, name, **on_device | {"fields": ("images", "labels", "row")})
    for options in (
        {"echo": 2},
        {"echo": MixedEcho(2, 2)},
        {"read": "pread", "workers": 3},
        {"share": (1, 3), "ends": "pad"},
        {"on_damage": "skip"},
    ):
        yield case("damaged jpeg" if "on_damage" in options else "jpeg", "crop", **on_device, **options)
    yield case("jpeg 218", **on_device)
    # Behind a URL, and in a folder that is packed meanwhile.
    for data, device in itertools.product(("raw 32", "jpeg", "zstd", "index", "zstd of index"), devices):
        yield case(data, "crop" if data == "jpeg" else "flip", device=device, url=True)
    for options in (
        {"python": inverted, "workers": 1},
        {"shuffle": "full", "batch_size": 5},
        {"share": (1, 2), "ends": "exact"},
    ):
        yield case("index", url=True, **options)
    for device in devices:
        yield case("folder", "crop", device=device, ends="exact")


# Running


def loader_of(source: Any, batch_size: int, options: dict[str, Any], folder: Path, url: str) -> FastLoader:
    """Makes a loader, whether this checkout has some options at `FastLoader` or at what it is given."""
    options = dict(options)
    accepted = inspect.signature(FastLoader.__init__).parameters
    select, only, behind_url = options.pop("rows", None), options.pop("only", None), options.pop("url", False)
    of_dataset = {name: options.pop(name) for name in ("fields", "split", "decode", "check") if name in options}
    of_dataset |= {"transform": options.pop("python")} if "python" in options else {}
    of_dataset |= {
        name: options.pop(name) for name in ("read", "on_damage") if name in options and name not in accepted
    }
    if behind_url:
        source = f"{url}/{Path(source).name}"
        of_dataset["remote"] = Remote(cache=folder / "chunks", max_bytes="64 MiB")
    if "pad_to" not in accepted and (batch := options.pop("batch", None)):
        from fastload import List, Pad

        known = {"multiple": options.pop("pad_to", None), "group_by": options.pop("group_by", None)}
        options["batch"] = (Pad if batch == "pad" else List)(**{name: value for name, value in known.items() if value})
    if isinstance(source, str) and Path(source).is_dir():
        if "cache_dir" in accepted:
            options["cache_dir"] = folder / "packed"
        else:
            source = PackedDataset.from_folder(source, cache_dir=folder / "packed")
    elif of_dataset or select is not None or only is not None:
        source = PackedDataset(source, **of_dataset)
        source = source if only is None else source.only(only)
        source = source if select is None else source.select(select)
    if options.get("device") == "device":
        options["device"] = Device()
    return FastLoader(source, batch_size, **{"seed": 3, "share": None, "workers": 2} | options)


def part_of(value: Any) -> str:
    """Returns a text that says dtype, shape, order of strides and digest of a tensor, or of what holds some."""
    if isinstance(value, torch.Tensor):
        host = value.detach().cpu().contiguous()
        strides = [
            (stride, -axis)
            for axis, (size, stride) in enumerate(zip(value.shape, value.stride(), strict=True))
            if size > 1
        ]
        order = "".join(str(-axis) for _, axis in sorted(strides, reverse=True))
        digest = hashlib.blake2b(
            host.view(torch.uint8).numpy().tobytes() if host.ndim else host.numpy().tobytes(), digest_size=6
        )
        shape = "x".join(map(str, value.shape))
        return f"{str(value.dtype).removeprefix('torch.')}({shape})/{order}:{digest.hexdigest()}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{part_of(one)}" for key, one in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        if all(isinstance(one, torch.Tensor) for one in value) and len(value) < 4:
            return f"[{','.join(map(part_of, value))}]"
        joined = "".join(map(part_of, value)).encode()
        return f"{type(value).__name__}({len(value)}):{hashlib.blake2b(joined, digest_size=6).hexdigest()}"
    return repr(value).replace(" ", "_")


def text_of(batch: Any) -> str:
    """Returns all that a batch is, as a text of parts without spaces."""
    fields = batch.items() if isinstance(batch, dict) else enumerate(batch)
    parts = {str(name): value for name, value in fields}
    for name in ("rows", "valid", "global_valid", "names", "sizes", "pixel_mask"):
        with contextlib.suppress(AttributeError):
            parts[name] = getattr(batch, name)
    return " ".join(f"{name}={part_of(value)}" for name, value in parts.items())


def texts_of(batches: Iterable[Any]) -> list[str]:
    """Returns the text of each batch; three of them are kept at a time, and looked at again."""
    texts: list[str] = []
    kept: collections.deque[tuple[int, Any]] = collections.deque()

    def drop() -> None:
        number, batch = kept.popleft()
        if (now := text_of(batch)) != texts[number]:
            texts[number] += f" changed_while_it_was_kept={hashlib.blake2b(now.encode(), digest_size=6).hexdigest()}"

    for number, batch in enumerate(batches):
        texts.append(text_of(batch))
        kept.append((number, batch))
        if len(kept) > HELD:
            drop()
    while kept:
        drop()
    return texts


def until_packed(loader: FastLoader) -> None:
    """Waits until the folder of a loader has been packed."""
    output, until = loader.dataset.output, time.monotonic() + 120
    while not output.exists() or output.with_name(f"{output.name}.journal").exists():
        if time.monotonic() > until:
            sys.exit(f"{output} was not packed within two minutes")
        time.sleep(0.02)


def run(make: Callable[[], FastLoader], is_folder: bool) -> dict[str, Any]:
    """Returns the batches and states of a case, see the top."""
    found: dict[str, Any] = {}
    with contextlib.closing(make()) as loader:
        found["epoch 0"] = texts_of(loader)
        if is_folder:
            until_packed(loader)
        half = (len(loader) + 1) // 2
        found["epoch 1, broken off"] = texts_of(itertools.islice(loader, half))
        found["epoch 2"] = texts_of(loader)
        loader.set_epoch(5)
        iterator = iter(loader)
        first = texts_of(itertools.islice(iterator, half))
        found["state in the middle"] = state = loader.state_dict()
        found["epoch 5"] = first + texts_of(iterator)
        found["state at the end"] = loader.state_dict()
    with contextlib.closing(make()) as loader:
        loader.load_state_dict(json.loads(json.dumps(state)))
        found["resumed"] = texts_of(loader) + texts_of(itertools.islice(loader, 1))
    return found


def write_table(out: Path, only: str) -> None:
    chosen = [case for case in cases() if only in case.name]
    names = [case.name for case in chosen]
    assert len(set(names)) == len(names), [name for name, count in collections.Counter(names).items() if count > 1]
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fastload-digests-") as name, out.open("w") as lines:
        folder = Path(name)
        files = folder / "files"
        files.mkdir()
        data = write_data(files)
        with serving(files) as server:
            for number, case in enumerate(chosen):
                own = folder / str(number)
                own.mkdir()
                make = functools.partial(loader_of, data[case.data], case.batch_size, case.options, own, server.url)
                started = time.monotonic()
                try:
                    with mock.patch.dict(os.environ, case.environment):
                        found = run(make, case.data == "folder")
                except Exception as error:  # noqa: BLE001 # a case that fails is a result, too
                    found = {"error": f"{type(error).__name__}: {error}".replace(name, "")}
                lines.write(json.dumps({"case": case.name, **found}) + "\n")
                took = time.monotonic() - started
                if took > 2 or "error" in found:
                    print(f"{case.name}: {took:.1f} s {found.get('error', '')}", file=sys.stderr)
    print(f"{len(chosen)} cases in {time.monotonic() - begun:.0f} s, {CHECKOUT.name} -> {out}")


def difference(one: dict[str, Any], other: dict[str, Any]) -> str:
    """Returns where two results of a case differ first; "" if they do not."""
    for part in one.keys() | other.keys():
        if part not in one or part not in other:
            return f"{part} is in one alone: {one.get('error') or other.get('error') or ''}"
    for part, mine in one.items():
        theirs = other[part]
        if mine == theirs:
            continue
        if not isinstance(mine, list):
            return f"{part}: {mine} and {theirs}"
        if len(mine) != len(theirs):
            return f"{part}: {len(mine)} and {len(theirs)} batches"
        number = next(number for number, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1])
        parts = itertools.zip_longest(mine[number].split(" "), theirs[number].split(" "))
        return f"{part}, batch {number}: " + "; ".join(f"{a} and {b}" for a, b in parts if a != b)
    return ""


def compare(before: Path, after: Path) -> int:
    one, other = ({line["case"]: line for line in map(json.loads, path.open())} for path in (before, after))
    differing = {name: difference(one[name], other[name]) for name in one if name in other}
    differing = {name: said for name, said in differing.items() if said}
    for name, said in differing.items():
        print(f"{name}\n    {said}")
    for names, path in ((one.keys() - other.keys(), before), (other.keys() - one.keys(), after)):
        for name in sorted(names):
            print(f"{name}\n    is in {path} alone")
    print(f"{len(differing)} of {len(one.keys() & other.keys())} cases differ")
    return 1 if differing or one.keys() != other.keys() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", help="file to write, a JSON line a case")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    parser.add_argument("--only", default="", help="cases with this text in their name")
    options = parser.parse_args()
    if options.compare:
        sys.exit(compare(*options.compare))
    if options.out is None:
        parser.error("give a file to write, or --compare")
    warnings.simplefilter("ignore")
    logging.getLogger("fastload").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    write_table(options.out, options.only)


if __name__ == "__main__":
    main()
