"""Resolves a loader's transforms: which stage runs them, and whether they fit its data.

size head     the first transforms, where they give images of several sizes one size: run by the reading threads
augmentation  all transforms: run by the reading threads too on the CPU, else when a batch is handed over
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fastload.errors import OptionError
from fastload.plan import Echo
from fastload.prefetch.augment import Augmentation
from fastload.prefetch.inputs import Input, PackedInput
from fastload.prefetch.resolved import Resolved
from fastload.transforms import check_pipeline
from fastload.transforms.boxes_and_points import Coordinates
from fastload.transforms.engine.size_head import SizeHead, find_size_head


def with_transforms(options: Resolved, transform: Sequence[Any] | None, echo: Echo) -> Resolved:
    """Returns a loader's options with its transforms and the stages that run them.

    Args:
        options: all others.
        transform, echo: as in `FastLoader`.

    Raises:
        OptionError: transforms that do not fit the images, or ragged images without a transform that gives them one
            size. What Python code makes is looked at before the first batch.
    """
    data, transform = options.data, () if transform is None else transform
    size_head = _size_head(transform, options, echo)
    _check(transform, data, size_head)
    augmentation = Augmentation(
        tuple(transform), options.plan.seed, options.share.rank, data.ignore_index, _coordinates(data)
    )
    on_cpu = options.backend is None and isinstance(data, PackedInput) and not data.runs_python
    in_threads = on_cpu and echo == 1 and augmentation.in_threads
    if size_head is not None:
        # On the CPU flips cost nothing more there; elsewhere each echo flips anew.
        size_head = size_head.with_flips() if in_threads else size_head
        augmentation = replace(augmentation, done=size_head.count)
    left = len(augmentation.transforms) - augmentation.done
    at_hand_over = options.cache is not None or (left > 0 and not in_threads)
    return replace(
        options, augmentation=augmentation, size_head=size_head, in_threads=in_threads, at_hand_over=at_hand_over
    )


def _size_head(transform: Any, options: Resolved, echo: Echo) -> SizeHead | None:
    """Returns the leading transforms to run in the reading threads.

    Required for images that differ in size; for JPEGs of one size, they save decoding where each is used once.
    """
    data, cache = options.data, options.cache
    if not isinstance(data, PackedInput) or data.runs_python or not data.ragged or not isinstance(transform, Sequence):
        return None
    if "images" not in data.dataset.fields:
        if data.varied:
            raise OptionError(
                f"{data.name}: its masks differ in size, and are brought to one size with their images. Add images to "
                f"fields."
            )
        return None
    (channels, _, _), dtype = data.image_spec()
    if data.varied:
        if cache is not None:
            raise OptionError(
                f"{data.name}: cache={cache!r} caches images of one size, and these differ in size. Leave "
                f"cache out, or pack them with `fastload pack --size`."
            )
        return find_size_head(transform, channels, dtype, name=data.name)
    if cache is not None or echo != 1:
        return None  # each echo cuts anew
    try:
        return find_size_head(transform, channels, dtype, name=data.name)
    except OptionError:
        return None


def _check(transform: Any, data: Input, size_head: SizeHead | None) -> None:
    """Raises OptionError for transforms that do not fit the images, as far as they are known before the first batch."""
    if not isinstance(transform, Sequence):
        check_pipeline(transform, (0, 0, 0), torch.uint8, ())
    elif transform and isinstance(data, PackedInput) and not data.runs_python:
        if "images" not in data.dataset.fields:
            raise OptionError(
                f"transform: the batch has no images, its fields are {', '.join(data.dataset.fields)}. Add images to "
                f"fields, or leave transform out."
            )
        spec, done = data.image_spec(), 0
        if size_head is not None:
            spec = (size_head.spec.channels, size_head.spec.height, size_head.spec.width), spec[1]
            done = size_head.count
        check_pipeline(transform, *spec, data.dataset.fields, _coordinates(data), done=done)


def _coordinates(data: Input) -> dict[str, Coordinates]:
    return data.coordinates() if isinstance(data, PackedInput) else {}
