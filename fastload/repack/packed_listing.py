"""The listing of a packed file: its rows as samples, with attributes and digests; and the choice of some of them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import translate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import (
    FormatError,
    MissingFileError,
    OptionError,
    SourceError,
    check_split,
    typed,
)
from fastload.format.digests import DIGEST_FIELDS, row_digests
from fastload.format.header import PIXEL_FIELDS, PackedFile, by_block, check_header, open_hdf5, read_header, read_shard
from fastload.format.ragged import Column
from fastload.options.repack import Choice
from fastload.read.reader import open_columns
from fastload.read.row_table import index_columns, index_part
from fastload.repack.packed_rows import rows_of
from fastload.sources.listing import Arrays, Listing, Masks, first_few, require_unique
from fastload.system.text import text_of

_CARRIED = {"decoder": "unknown", "source_layout": "hdf5", "seed": 0, "shuffled": False, "pack_options": "{}"}
"""Root attributes that also hold for copied rows, as does `repacked`, with the values for files of other tools."""

_OWN = {*PIXEL_FIELDS, *DIGEST_FIELDS, "split", "key"}


def list_packed(path: str | Path | PackedFile, damaged: list[int] | None = None) -> tuple[PackedFile, Listing]:
    """Returns the header and the listing of a packed file, or of another HDF5 file that can be read as one.

    `path` may be a header that was read, as of a URL.

    Rows keep their order, so splits are contiguous. The header and the columns are checked against their digests:
    FormatError or SourceError if they are not those that were written; but where a list is given, the numbers of rows
    with other values are added to it, and they stay in the listing. Labels of another tool's file that are texts
    become class numbers, in the order of the sorted texts.
    """
    file = path if isinstance(path, PackedFile) else read_header(path)
    digests, others = dict[str, NDArray[Any]](), list[str]()
    if file.holds_rows:
        with open_hdf5(file.path) as hdf5:
            digests = check_header(file, hdf5)
            others = [str(name) for name in hdf5 if name not in file.fields]  # bytes where they are not UTF-8
        file = replace(file, digests=by_block(digests)) if digests else file
    if lost := [name for name in ("labels", "masks") if name in others]:
        raise FormatError(
            f"{file.path}: `{lost[0]}` is of a kind that is not copied as it is, such as texts of any length. "
            f"Pack it: `fastload pack {typed(file.path)} OUT.h5`."
        )
    with open_columns(file) as stored:
        values = {name: stored[name][()] for name in stored if name not in digests} | digests
    keys = _keys(file, values)
    if file.version is not None:
        _check_fields(file, values, keys, damaged)
    split_names = tuple(file.splits) or ("all",)
    split = np.zeros(file.num_rows, np.uint8)
    for number, rows in enumerate(file.splits.values()):
        split[rows.start : rows.stop] = number
    own, sizes = {*_OWN}, np.zeros(file.num_rows, np.int64)
    for name in (name for name in PIXEL_FIELDS if name in file.fields):
        own.update(index_columns(file, name).values())
        sizes += index_part(values, file, name, "bytes")
    columns = {name: _column(file, name, values[name]) for name in file.fields if name not in own and values[name].size}
    masks = None
    if "masks" in file.fields:
        field = file.fields["masks"]
        extra = dict(field.attrs)
        ignored = extra.pop("ignore_index", None)  # Only a value that masks can hold counts.
        packed = rows_of(file, "masks")
        dtype = packed.dtype if isinstance(packed, Arrays) else field.dtype.newbyteorder("=")
        masks = Masks(
            files=packed,
            present=np.ones(file.num_rows, dtype=bool),
            names=field.names,
            ignore_index=int(ignored)
            if isinstance(ignored, (int, float)) and ignored in range(np.iinfo(dtype).max + 1)
            else None,
            attrs={} if file.version is None else extra,
            dtype=dtype,
        )
    hashed = file.version is not None and any(name in file.fields for name in PIXEL_FIELDS)
    return file, Listing(
        layout=str(file.attrs.get("source_layout", "hdf5")),
        keys=tuple(keys),
        split=split,
        split_names=split_names,
        columns=columns,
        notes=(f"{file.path.name}: left out, being no numbers by row: {first_few(others)}.",) if others else (),
        sizes=sizes,
        mtimes_ns=np.full(file.num_rows, file.identity.mtime_ns, np.int64),
        files=rows_of(file, "images") if "images" in file.fields else None,
        masks=masks,
        attrs=_CARRIED | {name: file.attrs[name] for name in (*_CARRIED, "repacked") if name in file.attrs},
        digests=values["digest"].astype(np.uint64) if hashed else None,
    )


def pack_options(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that the root attributes say a file was packed with; empty when they do not say."""
    try:
        found = json.loads(attrs["pack_options"])
    except (KeyError, TypeError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def regroup(listing: Listing, order: NDArray[np.int64]) -> Listing:
    """Returns some rows of a listing in this order, with only the splits that have rows, numbered as they appear."""
    part = listing.take(order)
    numbers, first = np.unique(part.split, return_index=True)
    numbers = numbers[np.argsort(first)]
    renumber = np.zeros(256, np.uint8)
    renumber[numbers] = np.arange(len(numbers))
    names = tuple(listing.split_names[number] for number in numbers.tolist())
    return replace(part, split=renumber[part.split], split_names=names)


def _keys(file: PackedFile, values: dict[str, NDArray[Any]]) -> list[str]:
    found = values.get("key")
    keys = [f"{row:08d}" for row in range(file.num_rows)]
    if found is not None and found.dtype.kind == "S" and found.ndim == 1:
        given = [text_of(key) for key in found.tolist()]
        if file.version is not None or len(set(given)) == len(given):
            keys = given
    require_unique(keys, str(file.path))
    return keys


def _column(file: PackedFile, name: str, values: NDArray[Any]) -> Column:
    field = file.fields[name]
    # Attributes of other tools may have any type, so only names are copied.
    attrs = dict(field.attrs) if file.version is not None else {}
    if field.names:
        attrs["names"] = field.names if file.version is not None else tuple(map(str, field.names))
    if file.version is None and name == "labels":
        values, attrs = _labels(file, values, attrs)
    return Column(values.astype(values.dtype.newbyteorder("="), copy=False), attrs)


def _labels(file: PackedFile, values: NDArray[Any], attrs: dict[str, Any]) -> tuple[NDArray[Any], dict[str, Any]]:
    """Returns labels of another tool's file as class numbers int64 (N,), or as they are if rows have several."""
    if values.ndim == 2 and values.shape[1] == 1:
        values = values.reshape(-1)
    if values.ndim == 1 and values.dtype.kind == "S":
        texts = [text_of(value) for value in values.tolist()]
        names = tuple(sorted(set(texts) - {""}))
        numbers = {name: number for number, name in enumerate(names)} | {"": -1}
        return np.array([numbers[text] for text in texts], np.int64), {"names": names} if names else {}
    whole = values.dtype.kind in "biu" or (
        values.dtype.kind == "f" and bool((np.isfinite(values) & (values == np.trunc(values))).all())
    )
    if not whole:
        raise FormatError(
            f"{file.path}: `labels` are {values.dtype} {values.shape}; expected whole numbers, or one text a row. "
            f"Convert them, or give numbers to be estimated another name, such as `targets`."
        )
    return values.astype(np.int64) if values.ndim == 1 else values, attrs


def without_damaged(
    path: Path, listing: Listing, rows: NDArray[np.int64], damaged: list[int]
) -> tuple[NDArray[np.int64], Listing]:
    """Returns those rows that are not damaged, and the listing with the others of them as skipped.

    SourceError: none is left.
    """
    bad = np.isin(rows, damaged)
    if not bad.any():
        return rows, listing
    if bad.all():
        raise SourceError(f"{path}: not one of {len(rows):,} rows is what was packed. Copy the file or pack it again.")
    why = "its label or another value is not what was packed: the digest differs"
    left_out = tuple((listing.keys[row], why) for row in rows[bad].tolist())
    return rows[~bad], replace(listing, skipped=(*listing.skipped, *left_out))


def _check_fields(
    file: PackedFile, values: dict[str, NDArray[Any]], keys: list[str], damaged: list[int] | None
) -> None:
    """Compares the values of every row, except for pixels, with their digest."""
    wrong = _different_rows(file, values)
    if damaged is not None:
        damaged += wrong.tolist()
    elif len(wrong):
        rows = first_few([f"row {row} ({keys[row]})" for row in wrong.tolist()])
        raise SourceError(
            f"{file.path}: labels or other values of {len(wrong)} rows changed since packing: {rows}. Copy "
            f"the file again, pack it again, or leave them out: `fastload repack {typed(file.path)} OUT.h5 "
            f"--on-error skip`."
        )


def _different_rows(file: PackedFile, values: dict[str, NDArray[Any]]) -> NDArray[np.int64]:
    """Returns the rows whose values, except for pixels, do not match their digest, int64 (n,), ascending."""
    names = [name for name in values if name not in DIGEST_FIELDS]
    if file.holds_rows:
        return np.flatnonzero(row_digests({name: values[name] for name in names}) != values["digest_fields"])
    wrong = []
    # Digests are of the values as each shard has them, such as the number of a split.
    for number in range(len(file.shards.names)):
        there, here = file.shards.rows_of(number)
        shard = read_shard(file, number)
        with open_hdf5(shard.path) as hdf5:
            digests = check_header(shard, hdf5)
            different = row_digests({name: hdf5[name][()] for name in names}) != digests["digest_fields"]
        wrong.append(here[different[there]])
        for name, known in digests.items():
            values[name][here] = known[there]
    return np.sort(np.concatenate(wrong))


def choose_rows(listing: Listing, choice: Choice, where: str | Path) -> NDArray[np.int64]:
    """Returns the rows that meet all conditions, in the order that they should have; int64.

    OptionError: an unknown split or label, a pattern that no key fits, rows not in the file, or no row left.
    """
    fits = np.ones(len(listing), dtype=bool)
    if choice.splits:
        for name in choice.splits:
            check_split(str(where), name, listing.split_names)
        fits &= np.isin(listing.split, [listing.split_names.index(name) for name in choice.splits])
    if choice.labels:
        fits &= _with_labels(listing, choice.labels, where)
    if choice.keys:
        fits &= _with_keys(listing, choice.keys, where)
    if choice.without:
        fits &= ~_with_keys(listing, choice.without, where)
    rows = np.arange(len(listing)) if choice.rows is None else _rows_in(choice.rows, len(listing), where)
    rows = rows[fits[rows]]
    if not len(rows):
        asked = [f"{name} {first_few(values)}" for name, values in choice.to_dict().items()]
        asked += [f"rows in {choice.rows}"] if choice.rows else []
        raise OptionError(f"{where}: no row fits all that was asked for ({'; '.join(asked)}). Ask for less.")
    return rows[np.argsort(listing.split[rows], kind="stable")]


def _with_keys(listing: Listing, patterns: Sequence[str], where: str | Path) -> NDArray[np.bool_]:
    """Returns bool (N,): rows whose key fits one of these patterns; each has to fit one."""
    found = np.zeros((len(patterns), len(listing)), dtype=bool)
    for pattern, row in zip(patterns, found, strict=True):
        match = re.compile(translate(pattern)).match
        row[:] = [match(key) is not None for key in listing.keys]
        if not row.any():
            seen = first_few(listing.keys[:3])
            raise OptionError(f"{where}: no key fits {pattern!r}; keys look like {seen}.")
    return np.asarray(found.any(axis=0))


def _with_labels(listing: Listing, wanted: Sequence[str], where: str | Path) -> NDArray[np.bool_]:
    """Returns bool (N,): rows with one of these labels; with attribute vectors, with one of these attributes."""
    if "labels" not in listing.columns:
        raise OptionError(f"{where}: it has no labels, so rows cannot be chosen by them.")
    column = listing.columns["labels"]
    names: tuple[str, ...] = tuple(column.attrs.get("names", ()))
    vectors = column.values.ndim == 2
    # By the numbers that occur: these may be anything, and a uint64 and a negative number have no type in common.
    occurring, of_row = np.unique(np.arange(column.values.shape[1]) if vectors else column.values, return_inverse=True)
    at = {number: place for place, number in enumerate(occurring.tolist())}
    chosen = []
    for label in wanted:
        if label in names:
            chosen.append(names.index(label))
        elif re.fullmatch(r"-?\d+", label) and (int(label) in at or (not vectors and -1 <= int(label) < len(names))):
            chosen.append(int(label))
        else:
            known = f"names are {first_few(names)}" if names else "it has no names of classes"
            numbers = f"numbers are {occurring[0]} to {occurring[-1]}"
            raise OptionError(f"{where}: no label {label!r}: give a name or a number; {numbers}, {known}.")
    places = [at[number] for number in chosen if number in at]
    if vectors:
        found: NDArray[np.bool_] = np.any(column.values[:, places] != 0, axis=1)
        return found
    return np.isin(of_row.reshape(-1), places)


def _rows_in(path: Path, num_rows: int, where: str | Path) -> NDArray[np.int64]:
    """Returns the row numbers in a file, int64."""
    if not path.is_file():
        raise MissingFileError(f"{path}: no such file; --rows wants a text file with a row number a line, or .npy.")
    if path.suffix.lower() == ".npy":
        rows = _read_npy(path)
    else:
        numbers = []
        for number, line in enumerate(path.read_bytes().decode("utf-8-sig", errors="replace").splitlines(), 1):
            text = line.partition("#")[0].strip()
            if text and not re.fullmatch(r"-?\d{1,18}", text):
                raise OptionError(f"{path}, line {number}: {text[:40]!r} is not a row number; expected one a line.")
            numbers += [int(text)] if text else []
        rows = np.array(numbers, np.int64)
    if not len(rows):
        raise OptionError(f"{path}: holds no row number.")
    outside = rows[(rows < 0) | (rows >= num_rows)]
    if len(outside):
        raise OptionError(f"{path}: row {outside[0]} is not in {where}, whose rows are 0 to {num_rows - 1}.")
    values, counts = np.unique(rows, return_counts=True)
    if len(values) < len(rows):
        twice = [str(row) for row in values[counts > 1].tolist()]
        raise OptionError(f"{path}: {len(twice)} rows stand there more than once: {first_few(twice)}. Remove repeats.")
    return rows


def _read_npy(path: Path) -> NDArray[np.int64]:
    try:
        found = np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError) as exc:
        raise OptionError(f"{path}: not an array that can be read ({exc}).") from exc
    if isinstance(found, np.ndarray) and found.dtype == bool and found.ndim == 1:
        raise OptionError(f"{path}: holds True and False; give row numbers, as numpy.flatnonzero makes them.")
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "iu" or found.ndim != 1:
        raise OptionError(f"{path}: needs one dimension of integers.")
    if found.dtype == np.uint64 and len(found) and found.max() > np.iinfo(np.int64).max:
        raise OptionError(f"{path}: row {found.max()} is no row of any file.")
    return found.astype(np.int64)
