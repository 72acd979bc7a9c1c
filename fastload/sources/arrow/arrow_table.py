"""The rows of several Parquet or Arrow files as one table, with one list of classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.sources.arrow.shards import Shard
from fastload.sources.listing import first_few
from fastload.sources.tables.frame import LABELS, plain_name
from fastload.sources.tables.read_table import Values, nothing, other
from fastload.sources.tree import key_of


class ArrowTable:
    """The rows of all Parquet or Arrow files of a dataset, one file behind the other; see `tables.frame.CellTable`.

    Attributes:
        shards: the files, whose paths in the tree are `files`.
        names: the columns of all files, of one type in all; `images` are those of them that hold images.
        classes: column -> names of its classes, of all files; `renumbered` are the columns whose classes differ.
        shard_of: int64 (R,), the file that each row belongs to.
    """

    def __init__(self, shards: list[Shard], files: list[str], first: Callable[[str], bool]) -> None:
        """Joins files. If they number their classes differently, the numbers of those that `first` chooses are kept."""
        self.shards, self.files = shards, files
        counts = [shard.num_rows for shard in shards]
        self.shard_of = np.repeat(np.arange(len(shards)), counts)
        self._row_of = np.concatenate([np.arange(count) for count in counts])
        images: dict[str, None] = {}
        self.classes: dict[str, tuple[str, ...]] = {}
        differ: dict[str, None] = {}
        for i in sorted(range(len(shards)), key=lambda i: not first(files[i])):
            images |= dict.fromkeys(shards[i].images)
            for name, names in shards[i].classes.items() if counts[i] else ():
                known = self.classes.setdefault(name, names)
                if known != names:
                    # New names are appended: a longer list that begins like the known one keeps its numbers.
                    self.classes[name] = (*known, *[one for one in names if one not in known])
                    differ[name] = None
        self.images, self.renumbered = list(images), list(differ)
        self.names = _column_names(shards, files)

    @property
    def where(self) -> str:
        return str(self.shards[0].path)

    def location(self, row: int) -> str:
        """Returns the number of a row in its file, and the file, for messages."""
        return f"row {self._row_of[row]} of {key_of(self.files[self.shard_of[row]])}"

    def texts(self, name: str) -> list[str]:
        """Returns the cells of a column as text; "" for missing ones."""
        return values_in(self.shards, name).texts()

    def values(self, name: str) -> Values:
        """Returns a column, numbered by the classes of all files."""
        return values_in(self.shards, name, self.classes.get(name, ()))

    def objects(self, name: str) -> list[Any]:
        """Returns the cells of a column of objects, whose classes all files must number alike."""
        if classes := self.classes.get(name):
            for shard in self.shards:
                _require_same_classes(shard, name, shard.classes.get(name, ()), classes)
        return [cell for shard in self.shards for cell in shard.column(name).to_pylist()]


def _column_names(shards: list[Shard], names: list[str]) -> list[str]:
    """Returns the names of the columns of all shards, which must be of one type in all; null fits any."""
    import pyarrow as pa

    known: dict[str, tuple[Any, str]] = {}
    for shard, file in zip(shards, names, strict=True):
        for field in shard.schema:
            kind, first = known.setdefault(field.name, (field.type, file))
            if pa.types.is_null(kind):
                known[field.name] = (field.type, file)
            elif field.type != kind and not pa.types.is_null(field.type):
                raise SourceError(
                    f"{shard.path}: column {field.name!r} is {field.type}, but {kind} in {key_of(first)}. "
                    "Give the files of one dataset (one configuration of it)."
                )
    return list(known)


def values_in(shards: list[Shard], name: str, names: tuple[str, ...] = ()) -> Values:
    """Returns one column of all files, numbered by the classes `names`, even if files number theirs differently.

    Raises:
        SourceError: a class has no name in its file; or lists of classes are numbered differently.
    """
    import pyarrow as pa

    kinds = [shard.schema.field(name).type for shard in shards if name in shard.schema.names]
    kind = next((kind for kind in kinds if not pa.types.is_null(kind)), pa.null())
    chunks: list[Any] = []
    for shard in shards:
        there = name in shard.schema.names and shard.schema.field(name).type == kind
        chunks += shard.column(name).chunks if there else [pa.nulls(shard.num_rows, kind)]
    try:
        values = values_of_arrow(pa.chunked_array(chunks, kind), name, names)
    except UnicodeDecodeError as exc:
        raise SourceError(f"{shards[0].path}: column {name!r} holds text that is not UTF-8: {exc}.") from exc
    if not names:
        return values
    parts = np.split(values.values, np.cumsum([shard.num_rows for shard in shards])[:-1])
    for i, (shard, numbers) in enumerate(zip(shards, parts, strict=True)):
        own = shard.classes.get(name, names)
        if values.kind != "int":
            _require_same_classes(shard, name, own, names)
            continue
        if len(numbers) and int(numbers.max()) >= len(own):
            raise SourceError(
                f"{shard.path}: column {name!r} holds the class {numbers.max()}, but its schema names only "
                f"{len(own)}. Fix the schema, or fetch the files again."
            )
        if own != names[: len(own)]:
            table = np.array([*map(names.index, own), -1], np.int64)  # the last: below 0 stays without a class
            parts[i] = table[np.maximum(numbers, -1)]
    return replace(values, values=np.concatenate(parts))


def _require_same_classes(shard: Shard, name: str, own: tuple[str, ...], names: tuple[str, ...]) -> None:
    # For what is not renumbered, such as lists.
    if own != names[: len(own)]:
        raise SourceError(
            f"{shard.path}: the classes of column {name!r} are numbered otherwise than in other files: "
            f"{first_few(list(own), 4)}, not {first_few(list(names), 4)}. Write all files with one list of classes."
        )


def values_of_arrow(column: Any, name: str, names: tuple[str, ...] = ()) -> Values:
    """Returns the values of a chunked array; nested lists of numbers, all of one length, become (N, L, ...)."""
    import pyarrow as pa
    import pyarrow.compute as pc

    while isinstance(column.type, pa.BaseExtensionType):  # Array2D and its kin, where `datasets` is imported
        column = pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    kind, rows = column.type, len(column)
    if column.null_count == rows or pa.types.is_null(kind):
        return nothing(rows)
    missing = np.asarray(pc.is_null(column, nan_is_null=pa.types.is_floating(kind)).to_numpy())
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind):
        numbers = pc.fill_null(column, False if pa.types.is_boolean(kind) else 0).to_numpy()
        if numbers.dtype == np.uint64 and numbers.max() >= 2**63:
            return other(rows)
        return Values("int", numbers.astype(np.int64), missing, names)
    if pa.types.is_floating(kind):
        return Values("float", column.cast(pa.float64()).to_numpy().astype(np.float64), missing)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        values = np.array(column.fill_null("").to_pylist(), object)
        return Values("text", values, missing | (values == ""))
    if _is_list(kind):
        if (fixed := _fixed(column)) is not None:
            return Values("list", fixed, missing)
        leaf = kind.value_type
        tags = pa.types.is_integer(leaf) or pa.types.is_string(leaf)
        if tags and (names or plain_name(name) in LABELS):
            values = np.empty(rows, object)
            values[:] = [[] if cell is None else cell for cell in column.to_pylist()]
            return Values("list", values, missing, names)
    return other(rows)


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _fixed(column: Any) -> NDArray[Any] | None:
    """Returns lists as a numeric array (N, L, ...) if all lists of a level have one length; else None."""
    import pyarrow as pa
    import pyarrow.compute as pc

    shape = [len(column)]
    while _is_list(column.type):
        lengths = set(pc.unique(pc.list_value_length(column)).to_pylist())
        if column.null_count or len(lengths) != 1 or not (length := lengths.pop()):
            return None
        shape.append(length)
        column = pc.list_flatten(column)
    kinds = pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean
    if column.null_count or not any(fits(column.type) for fits in kinds):
        return None
    numbers = column.to_numpy()
    return np.asarray(numbers.astype(np.uint8) if numbers.dtype == np.bool_ else numbers).reshape(shape)
