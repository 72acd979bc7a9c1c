"""The listing of a file that is packed already: its rows as samples, its own attributes and digests kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import FormatError, SourceError
from fastload.format import DIGEST_FIELDS, PIXEL_FIELDS, PackedFile, open_hdf5, read_header, row_digests
from fastload.repack.rows import rows_of
from fastload.sources.listing import Column, Listing, Masks, first_few, require_unique

CARRIED = ("decoder", "source_layout", "seed", "shuffled", "pack_options", "repacked")
"""Root attributes that stay true of rows that were copied."""

_OWN = {*PIXEL_FIELDS, *DIGEST_FIELDS, "split", "key"}


def list_packed(path: str | Path) -> tuple[PackedFile, Listing]:
    """The header and the listing of a packed file, or of another HDF5 file that can be read as one.

    Rows keep their order, so splits are contiguous. The columns are checked against the digests stored with them.

    Raises:
        MissingFileError, FormatError: the file is not there, or cannot be read.
        SourceError: values of a row are damaged; it names the rows.
    """
    file = read_header(path)
    with open_hdf5(file.path) as hdf5:
        values = {name: hdf5[name][()] for name in file.fields if name not in PIXEL_FIELDS}
    keys = _keys(file, values)
    if file.version is not None:
        _check_fields(file, values, keys)
    split_names = tuple(file.splits) or ("all",)
    split = np.zeros(file.num_rows, np.uint8)
    for number, rows in enumerate(file.splits.values()):
        split[rows.start : rows.stop] = number
    columns = {
        name: _column(file, name, values[name]) for name in file.fields if name not in _OWN and values[name].size
    }
    masks = None
    if "masks" in file.fields:
        field = file.fields["masks"]
        extra = {name: value for name, value in field.attrs.items() if name != "ignore_index"}
        masks = Masks(
            files=rows_of(file, "masks"),
            present=np.ones(file.num_rows, dtype=bool),
            names=field.names,
            ignore_index=field.attrs.get("ignore_index"),
            attrs=extra,
        )
    row_bytes = sum(file.fields[name].row_bytes for name in PIXEL_FIELDS if name in file.fields)
    hashed = file.version is not None and any(name in file.fields for name in PIXEL_FIELDS)
    digests = values["digest"].astype(np.uint64) if hashed else None
    return file, Listing(
        layout=str(file.attrs.get("source_layout", "hdf5")),
        keys=tuple(keys),
        split=split,
        split_names=split_names,
        columns=columns,
        notes=(),
        sizes=np.full(file.num_rows, row_bytes, np.int64),
        mtimes_ns=np.full(file.num_rows, file.identity.mtime_ns, np.int64),
        files=rows_of(file, "images") if "images" in file.fields else None,
        masks=masks,
        attrs=_attrs(file),
        digests=digests,
    )


def pack_options(file: PackedFile) -> dict[str, Any]:
    """The options a file says it was packed with; empty when it says none."""
    try:
        found = json.loads(file.attrs["pack_options"])
    except (KeyError, TypeError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def regroup(listing: Listing, order: NDArray[np.int64]) -> Listing:
    """Some rows of a listing, in this order, with only the splits that have one, numbered as they appear."""
    part = listing.take(order)
    numbers, first = np.unique(part.split, return_index=True)
    numbers = numbers[np.argsort(first)]
    renumber = np.zeros(256, np.uint8)
    renumber[numbers] = np.arange(len(numbers))
    names = tuple(listing.split_names[number] for number in numbers.tolist())
    return replace(part, split=renumber[part.split], split_names=names)


def _attrs(file: PackedFile) -> dict[str, Any]:
    """The root attributes to carry over; what a foreign file lacks is said to be unknown."""
    given = {"decoder": "unknown", "source_layout": "hdf5", "seed": 0, "shuffled": False, "pack_options": "{}"}
    return given | {name: file.attrs[name] for name in CARRIED if name in file.attrs}


def _keys(file: PackedFile, values: dict[str, NDArray[Any]]) -> list[str]:
    found = values.get("key")
    if found is None or found.dtype.kind != "S" or found.ndim != 1:
        return [f"{row:08d}" for row in range(file.num_rows)]
    keys = [bytes(key).decode("utf-8", errors="backslashreplace") for key in found.tolist()]
    if file.version is None and len(set(keys)) < len(keys):
        return [f"{row:08d}" for row in range(file.num_rows)]
    require_unique(keys, str(file.path))
    return keys


def _column(file: PackedFile, name: str, values: NDArray[Any]) -> Column:
    field = file.fields[name]
    attrs = dict(field.attrs)
    if field.names:
        attrs["names"] = field.names
    if file.version is None:
        if name == "labels" and values.dtype.kind in "iu" and (values.ndim == 1 or values.shape[1:] == (1,)):
            values = values.reshape(-1).astype(np.int64)
        # Attributes of others may be of types that are not ours to copy; names are what matters.
        attrs = {"names": field.names} if field.names else {}
    return Column(values.astype(values.dtype.newbyteorder("="), copy=False), attrs)


def _check_fields(file: PackedFile, values: dict[str, NDArray[Any]], keys: list[str]) -> None:
    """Compare the values of every row, apart from pixels, with their digest."""
    missing = [name for name in DIGEST_FIELDS if name not in values or values[name].dtype != np.uint64]
    if missing:
        raise FormatError(
            f"{file.path}: its digests cannot be read (missing or of another type: {', '.join(missing)}). The file "
            f"was changed after packing; pack it again."
        )
    found = row_digests({name: values[name] for name in values if name not in DIGEST_FIELDS})
    wrong = np.flatnonzero(found != values["digest_fields"])
    if len(wrong):
        rows = first_few([f"row {row} ({keys[row]})" for row in wrong.tolist()])
        raise SourceError(
            f"{file.path}: labels or other values of {len(wrong)} rows are not those that were packed: {rows}. Copy "
            f"the file again, or pack it again."
        )
