"""The types of keyword arguments, for editors and for mypy.

Written by `python tools/refresh_golden.py pages` from the fields of the dataclasses.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from fastload.options.pack import (
    Bits,
    BoxesOf,
    BoxForm,
    Engine,
    Fit,
    MaskSize,
    MasksWanted,
    Mode,
    OnError,
    OutsideBoxes,
    Progress,
)
from fastload.options.repack import ExportFormat, ExportLayout
from fastload.remote.urls import Remote


class PackKeywords(TypedDict, total=False):
    """The options of `PackCall`."""

    layout: str | None
    size: int | tuple[int, int] | None
    fit: Fit
    max_size: int | None
    mode: Mode | None
    bits: Bits | None
    labels: Sequence[str]
    image_column: str
    split_column: str
    captions: str
    root: str | Path | None
    download: bool
    masks: MasksWanted
    mask_files: str
    boxes: BoxForm
    boxes_of: BoxesOf
    mask_size: MaskSize
    mask_values: str
    palette: str | Path | None
    ignore_index: int | str | None
    outside_boxes: OutsideBoxes
    limit: int | None
    store: str | None
    codec: str
    chunk_bytes: int
    shuffle: bool
    seed: int
    strict: bool
    allow_large_images: bool
    shards: int | None
    shard_bytes: int | None
    spread: int
    engine: Engine | None
    address: str | None
    workers: int | None
    on_error: OnError
    overwrite: bool
    parents: bool
    remote: Remote | None
    progress: Progress | None


class RepackKeywords(TypedDict, total=False):
    """The options of `RepackOptions`."""

    chunk_bytes: int | None
    shuffle: bool
    seed: int
    codec: str
    workers: int | None
    on_error: OnError
    overwrite: bool
    progress: Progress | None
    split: list[str] | str | None
    label: list[str] | str | None
    key: list[str] | str | None
    rows: str | Path | None
    without: list[str] | str | None


class MergeKeywords(TypedDict, total=False):
    """The options of `MergeOptions`."""

    chunk_bytes: int
    shuffle: bool
    seed: int
    codec: str
    workers: int | None
    on_error: OnError
    overwrite: bool
    progress: Progress | None


class AppendKeywords(TypedDict, total=False):
    """The options of `AppendOptions`."""

    layout: str | None
    workers: int | None
    on_error: OnError
    progress: Progress | None


class ExportKeywords(TypedDict, total=False):
    """The options of `ExportOptions`."""

    split: str | None
    layout: ExportLayout
    format: ExportFormat
    shard_bytes: int | None
    workers: int | None
    progress: Progress | None
