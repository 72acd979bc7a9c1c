"""The rows of a Parquet or Arrow dataset: their values, their keys, and what reads their images."""

from __future__ import annotations

import posixpath
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.sources.absent_masks import fill_value
from fastload.sources.arrow_shards import Encoded, Shard, encoded_images
from fastload.sources.arrow_values import Features, features_of, values_of_arrow
from fastload.sources.joined import JoinedFiles
from fastload.sources.listing import Files, Masks, first_few
from fastload.sources.table_images import ImageIndex
from fastload.sources.table_values import Values
from fastload.sources.tree import Tree, key_of, open_tree


def values_in(shards: list[Shard], name: str, features: Features) -> Values:
    """One column of all files; where these number their classes differently, by the classes of `features`.

    Raises:
        SourceError: a class that its file does not name; classes in lists that files number differently.
    """
    import pyarrow as pa

    kinds = [shard.schema.field(name).type for shard in shards if name in shard.schema.names]
    kind = next((kind for kind in kinds if not pa.types.is_null(kind)), pa.null())
    chunks: list[Any] = []
    for shard in shards:
        there = name in shard.schema.names and shard.schema.field(name).type == kind
        chunks += shard.column(name).chunks if there else [pa.nulls(shard.num_rows, kind)]
    names = features.classes.get(name, ())
    try:
        values = values_of_arrow(pa.chunked_array(chunks, kind), name, names)
    except UnicodeDecodeError as exc:
        raise SourceError(f"{shards[0].path}: column {name!r} holds text that is not UTF-8: {exc}.") from exc
    return _by_common_classes(shards, name, values) if names else values


def _by_common_classes(shards: list[Shard], name: str, values: Values) -> Values:
    """The values with each file's classes renumbered as `values.names` has them."""
    renumbered = values.values.copy()
    start = 0
    for shard in shards:
        rows = slice(start, start + shard.num_rows)
        start += shard.num_rows
        own = features_of(shard.schema).classes.get(name, values.names)
        if values.kind != "int":
            require_same_classes(shard, name, own, values.names)
            continue
        numbers = values.values[rows]
        if len(numbers) and int(numbers.max()) >= len(own):
            raise SourceError(
                f"{shard.path}: column {name!r} holds the class {numbers.max()}, but its schema names only "
                f"{len(own)}. Mend the schema, or fetch the files again."
            )
        if own != values.names[: len(own)]:
            table = np.array([*map(values.names.index, own), -1], np.int64)  # the last: below 0 stays without a class
            renumbered[rows] = table[np.maximum(numbers, -1)]
    return replace(values, values=renumbered)


def require_same_classes(shard: Shard, name: str, own: tuple[str, ...], names: tuple[str, ...]) -> None:
    """Refuse a file whose classes are numbered in another order, in a column of lists.

    Raises:
        SourceError: they are.
    """
    if own != names[: len(own)]:
        raise SourceError(
            f"{shard.path}: the classes of column {name!r} are numbered otherwise than in other files: "
            f"{first_few(list(own), 4)}, not {first_few(list(names), 4)}. Write all files with one list of classes."
        )


def index_of(tree: Tree) -> ImageIndex:
    return ImageIndex(open_tree(tree.path) if tree.file else tree)


def encoded_column(shards: list[Shard], name: str, features: Features, tree: Tree) -> Encoded:
    if name in features.images and not str(shards[0].schema.field(name).type).endswith("string"):
        return encoded_images(shards, name, tree.path)
    paths = values_in(shards, name, features).texts()
    nothing = np.zeros(len(paths), np.int64)
    return Encoded((), nothing.astype(np.int32), nothing, nothing, paths)


def resolved(
    encoded: Encoded, tree: Tree, names: list[str], shard_of: NDArray[np.int64]
) -> tuple[Files, NDArray[np.int64], NDArray[np.int64], dict[int, str]]:
    """What reads the images, their bytes, their times of modification, and why some rows have none.

    Without bytes in the table they are files beside it; else the time is 0.
    """
    part, place, sizes = encoded.part.copy(), encoded.place.copy(), encoded.sizes.copy()
    mtimes = np.zeros(len(sizes), np.int64)
    bad: dict[int, str] = {}
    absent = np.flatnonzero(sizes == 0)
    parts = encoded.parts
    if len(absent):
        index = index_of(tree)
        parts = (*parts, index.tree.files)
        for shard in np.unique(shard_of[absent]).tolist():
            rows = absent[shard_of[absent] == shard]
            folder = posixpath.dirname(names[shard])
            here = index.at(f"{folder}/" if folder else "")
            found = here.find([encoded.paths[row] for row in rows.tolist()], [""] * len(rows))
            for k, row in enumerate(rows.tolist()):
                position, path = int(found.positions[k]), encoded.paths[row]
                if position >= 0:
                    part[row], place[row], sizes[row] = len(parts) - 1, position, index.tree.sizes[position]
                    mtimes[row] = index.tree.mtimes_ns[position]
                elif path:
                    why = found.reasons.get(k, "is not there")
                    bad[row] = f"holds no bytes, only the path {path!r}, which {why}"
                else:
                    bad[row] = "holds no image: its bytes are null or empty"
    return JoinedFiles(parts, part, place), sizes, mtimes, bad


def masks_of(
    encoded: Encoded, tree: Tree, names: list[str], shard_of: NDArray[np.int64], notes: list[str], name: str
) -> tuple[Masks, NDArray[np.int64], NDArray[np.int64]]:
    """The masks, their bytes and their times, as `resolved` has them."""
    files, sizes, mtimes, bad = resolved(encoded, tree, names, shard_of)
    present = np.ones(len(shard_of), np.bool_)
    present[list(bad)] = False
    notes.append(f"Masks by column {name!r}.")
    fill, filled = fill_value(files, present, str(tree.given)) if present.any() else (255, [])
    notes += filled
    return Masks(files, present, ignore_index=fill), sizes, mtimes


def keys_of(encoded: Encoded | None, names: list[str], counts: list[int]) -> list[str]:
    """Shard and path within it where the paths of a shard are unique, else the number of the row."""
    keys: list[str] = []
    start = 0
    for name, count in zip(names, counts, strict=True):
        paths = encoded.paths[start : start + count] if encoded else []
        start += count
        if paths and "" not in paths and len(set(paths)) == count:
            inner = [path.replace("\\", "/").rpartition("/")[2] for path in paths]
            if len(set(inner)) < count:
                inner = [path.lstrip("/") for path in paths]
        else:
            inner = [f"{row:08d}" for row in range(count)]
        keys += [f"{key_of(name)}/{key_of(path)}" for path in inner]
    return keys
