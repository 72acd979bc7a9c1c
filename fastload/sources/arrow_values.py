"""Columns of Arrow tables as values, and what Hugging Face's `datasets` wrote beside them about their meaning."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.sources.table_columns import LABELS, plain_name
from fastload.sources.table_values import Values, nothing, other


@dataclass(frozen=True)
class Features:
    """What a table's schema says of its columns.

    Attributes:
        images: those that hold images, in order.
        classes: column -> names of its classes.
    """

    images: tuple[str, ...]
    classes: dict[str, tuple[str, ...]]


def features_of(schema: Any) -> Features:
    """The features in a schema's metadata, or as far as its types tell: a struct of bytes and path is an image."""
    import pyarrow as pa

    try:
        told = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, ValueError, TypeError, RecursionError):
        told = {}
    images, classes = [], {}
    for field in schema:
        feature = told.get(field.name) if isinstance(told, dict) else None
        said = feature.get("_type", "") if isinstance(feature, dict) else ""
        kind = field.type
        pair = pa.types.is_struct(kind) and {kind.field(i).name for i in range(kind.num_fields)} >= {"bytes", "path"}
        binary = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
        if said == "Image" or ((pair or binary) and said in ("", "Value")):  # not Audio, Video or Pdf
            images.append(field.name)
        while isinstance(feature, dict) and "feature" in feature:
            feature = feature["feature"]
        if isinstance(feature, list) and len(feature) == 1:
            feature = feature[0]
        if isinstance(feature, dict) and "_type" not in feature:  # objects with boxes: the classes of these
            inner = [value.get("feature", value) for value in feature.values() if isinstance(value, dict)]
            feature = next((value for value in inner if isinstance(value, dict) and "names" in value), None)
        if (
            isinstance(feature, dict)
            and feature.get("_type") == "ClassLabel"
            and isinstance(feature.get("names"), list)
        ):
            classes[field.name] = tuple(map(str, feature["names"]))
    return Features(tuple(images), classes)


def common_classes(each: list[Features], counts: list[int]) -> tuple[Features, list[str]]:
    """The features of all files of a dataset: where their lists of classes differ, the union of these.

    Args:
        each: of the files, in order.
        counts: their rows; a file without any says nothing.

    Returns:
        The features, and the columns whose classes differ between files.
    """
    classes: dict[str, tuple[str, ...]] = {}
    differ: list[str] = []
    for features, count in zip(each, counts, strict=True):
        for name, names in features.classes.items() if count else ():
            known = classes.setdefault(name, names)
            if known != names:
                # A longer list that begins like the other only names more.
                classes[name] = (*known, *[one for one in names if one not in known])
                differ += [name] if name not in differ else []
    images = dict.fromkeys(name for features in each for name in features.images)
    return Features(tuple(images), each[0].classes | classes), differ


def values_of_arrow(column: Any, name: str, names: tuple[str, ...] = ()) -> Values:
    """The values of a chunked array; lists of one length (of lists ...) of numbers as (N, L, ...)."""
    import pyarrow as pa
    import pyarrow.compute as pc

    while isinstance(column.type, pa.BaseExtensionType):  # Array2D and its kin, where `datasets` is imported
        column = pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
    kind, rows = column.type, len(column)
    if pa.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
        kind = column.type
    if column.null_count == rows or pa.types.is_null(kind):
        return nothing(rows)
    missing = np.asarray(pc.is_null(column, nan_is_null=pa.types.is_floating(kind)).to_numpy())
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind):
        filled = pc.fill_null(column, False if pa.types.is_boolean(kind) else 0)
        numbers = filled.to_numpy()
        if numbers.dtype == np.uint64 and numbers.max() >= 2**63:
            return other(rows)
        return Values("int", numbers.astype(np.int64), missing, names)
    if pa.types.is_floating(kind):
        return Values("float", column.cast(pa.float64()).to_numpy().astype(np.float64), missing)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        values = np.empty(rows, object)
        values[:] = ["" if cell is None else cell for cell in column.to_pylist()]
        return Values("text", values, missing | (values == ""))
    if _is_list(kind):
        fixed = _fixed(column)
        if fixed is not None:
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
    """(N, L, ...) of a numeric type where all lists, and those in them, are of one length; else None."""
    import pyarrow as pa
    import pyarrow.compute as pc

    shape = [len(column)]
    while _is_list(column.type):
        if column.null_count or len(column) == 0:
            return None
        lengths = pc.min_max(pc.list_value_length(column)).as_py()
        if lengths["min"] != lengths["max"] or lengths["min"] == 0:
            return None
        shape.append(lengths["min"])
        column = pc.list_flatten(column)
    if column.null_count or not (
        pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or pa.types.is_boolean(column.type)
    ):
        return None
    numbers = column.to_numpy()
    return np.asarray(numbers.astype(np.uint8) if numbers.dtype == np.bool_ else numbers).reshape(shape)
