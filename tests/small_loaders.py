"""Loaders of a file whose options are partly its dataset's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastload import FastLoader, PackedDataset

OF_DATASET = ("check", "on_damage", "read")


def apart(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns those of the options that are a `PackedDataset`'s, and those that are its `FastLoader`'s."""
    return (
        {name: value for name, value in options.items() if name in OF_DATASET},
        {name: value for name, value in options.items() if name not in OF_DATASET},
    )


def loader_of(path: Path, batch_size: int, *, fields: Any = None, **options: Any) -> FastLoader:
    """Returns a loader of a file."""
    own, options = apart(options)
    return FastLoader(PackedDataset(path, fields=fields, **own), batch_size, **options)
