"""Several packed files as one listing: splits joined by name, classes by name."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import OptionError, SourceError
from fastload.format.header import PackedFile, join_split_names
from fastload.format.ragged import Column
from fastload.format.texts import count_name, is_text
from fastload.repack.packed_listing import list_packed, pack_options, regroup, without_damaged
from fastload.repack.packed_rows import RaggedRows, joined_rows
from fastload.sources.listing import Arrays, Files, Listing, Masks, Pictures, first_few
from fastload.sources.raw_rows import JoinedRows
from fastload.system.machine import available_memory

_LARGE, _MOST_TIMES = 2**28, 16  # bytes of texts from which on they are compared with what they take now
_IDS = "category_ids"  # the attribute with the number that a COCO file gives to each class

_Part = tuple[PackedFile, Listing]


def list_merged(paths: Sequence[str | Path], *, skip_damaged: bool = False) -> Listing:
    """Returns the rows of all files: for each split the first file's, then the second's, and so on.

    `skip_damaged`: rows whose label or other values are not what was packed are left out, and not an error.

    SourceError: two files differ in a way that one file cannot hold; it names both. OptionError: fewer than two
    files, or one twice. Else as `list_packed`.
    """
    if len(paths) < 2:
        raise OptionError("merge needs at least two files.")
    found = [os.path.realpath(path) for path in paths]  # Path.resolve raises RuntimeError for links in a circle
    for at, path in enumerate(paths):
        if found[at] in found[:at]:
            raise OptionError(f"{path}: given twice; every row would be there twice.")
    parts = [_part(path, skip_damaged=skip_damaged) for path in paths]
    for part in parts[1:]:
        _check_same_fields(parts[0], part)
    notes = [f"Merged {', '.join(f'{file.path.name} ({file.num_rows:,} rows)' for file, _ in parts)}."]
    notes += [note for _, listing in parts for note in listing.notes]
    parts = _with_equal_boxes(parts, notes)
    columns = {name: _join_columns(name, parts, notes) for name in parts[0][1].columns}
    split_names = join_split_names([(file.path, listing.split_names) for file, listing in parts])
    split = [
        np.array([split_names.index(name) for name in listing.split_names], np.uint8)[listing.split]
        for _, listing in parts
    ]
    files = [listing.files for _, listing in parts if listing.files is not None]
    known = [listing.digests for _, listing in parts if listing.digests is not None]
    joined = Listing(
        layout=_only({listing.layout for _, listing in parts}, "merged"),
        keys=_keys(parts, notes),
        split=np.concatenate(split),
        split_names=split_names,
        columns=columns,
        notes=tuple(notes),
        sizes=np.concatenate([listing.sizes for _, listing in parts]),
        mtimes_ns=np.concatenate([listing.mtimes_ns for _, listing in parts]),
        files=_joined(files, parts) if files else None,
        masks=_join_masks(parts),
        skipped=tuple(one for _, listing in parts for one in listing.skipped),
        attrs=_attrs(parts),
        digests=np.concatenate(known) if len(known) == len(parts) else None,
    )
    return regroup(joined, np.argsort(joined.split, kind="stable"))


def _part(path: str | Path, *, skip_damaged: bool) -> _Part:
    damaged: list[int] = []
    file, listing = list_packed(path, damaged if skip_damaged else None)
    kept, listing = without_damaged(file.path, listing, np.arange(len(listing)), damaged)
    return file, listing.take(kept) if len(kept) < len(listing) else listing


def _only(values: set[str], otherwise: str) -> str:
    return values.pop() if len(values) == 1 else otherwise


def _check_same_fields(first: _Part, other: _Part) -> None:
    """Raises SourceError if the fields of two files cannot be rows of one."""
    kinds = [_kinds(part) for part in (first, other)]
    differ = [name for name in dict.fromkeys([*kinds[0], *kinds[1]]) if kinds[0].get(name) != kinds[1].get(name)]
    if differ:
        differences = "; ".join(
            f"`{name}`: {kinds[0].get(name, 'absent')} in {first[0].path}, {kinds[1].get(name, 'absent')} in "
            f"{other[0].path}"
            for name in differ
        )
        raise SourceError(
            f"Files that differ cannot be merged: {differences}. Pack both from their images with the same "
            f"options of `fastload pack`, such as `--size`, `--mode` and `--store`."
        )


def _kinds(part: _Part) -> dict[str, str]:
    """Returns {field: "dtype (shape of a row)"} of a file."""
    file, listing = part
    kinds = {}
    for name, rows in {"images": listing.files, "masks": listing.masks and listing.masks.files}.items():
        if isinstance(rows, RaggedRows):
            field = file.fields[name]
            channels = f" with {field.shape[2]} channels" if name == "images" else ""
            kinds[name] = f"{field.dtype.name} rows of varying length{channels}"
        elif isinstance(rows, Arrays):
            kinds[name] = f"{rows.dtype} {rows.shape}"
    for name, column in listing.columns.items():
        kinds[name] = f"{column.values.dtype.name} {column.values.shape[1:]}"
        if is_text(column.values.dtype, column.values.shape[1:]):
            kinds[name] = "texts" if column.values.ndim == 1 else "lists of texts"
    for name in _of_boxes(listing):
        values, each = listing.columns[name].values, "segments" if name.startswith("segment") else "boxes"
        kinds[name] = f"{values.dtype.name} ({', '.join([each, *map(str, values.shape[2:])])})"
    return kinds


def _of_boxes(listing: Listing) -> list[str]:
    """Returns the columns (N, M, ...) with values of up to M boxes, or segments, for each image."""
    kinds = [kind for kind in (("boxes", "box_"), ("segments", "segment_")) if f"num_{kind[0]}" in listing.columns]
    return [
        name
        for name, column in listing.columns.items()
        if (column.values.ndim > 1 and any(name == many or name.startswith(one) for many, one in kinds))
        or (name == "keypoints" and column.values.ndim == 4 and "num_boxes" in listing.columns)
    ]


def _of_texts(listing: Listing) -> list[str]:
    """Returns the columns (N, M) with up to M texts for each image."""
    columns = listing.columns.items()
    return [name for name, one in columns if one.values.dtype.kind == "S" and count_name(name) in listing.columns]


def _with_equal_boxes(parts: Sequence[_Part], notes: list[str]) -> list[_Part]:
    """Returns the files with columns of boxes, and of texts, padded to the size of the largest."""
    joined = [(file, dict(listing.columns)) for file, listing in parts]
    for name in (*_of_boxes(parts[0][1]), *_of_texts(parts[0][1])):
        rooms = [columns[name].values.shape[1] for _, columns in joined]
        if len(set(rooms)) > 1 and name in ("boxes", "segment_labels"):
            sizes = ", ".join(f"{room} in {file.path.name}" for room, (file, _) in zip(rooms, joined, strict=True))
            what = "boxes" if name == "boxes" else "segments"
            notes.append(
                f"Images have room for up to {max(rooms)} {what} ({sizes}); what is behind the last is filled."
            )
        _check_room(name, [columns[name].values for _, columns in joined], parts)
        for room, (_, columns) in zip(rooms, joined, strict=True):
            values = columns[name].values
            more = np.zeros((len(values), max(rooms) - room, *values.shape[2:]), values.dtype)
            if name in ("box_labels", "segment_labels"):
                more[:] = -1
            columns[name] = replace(columns[name], values=np.concatenate([values, more], axis=1))
    return [(file, replace(listing, columns=c)) for (file, listing), (_, c) in zip(parts, joined, strict=True)]


def _check_room(name: str, columns: Sequence[NDArray[Any]], parts: Sequence[_Part]) -> None:
    """Raises SourceError for texts of many rows of one file that would take the room of a few long ones of another."""
    room = max(each.shape[1] for each in columns) * max(each.dtype.itemsize for each in columns)
    needed, now = room * sum(map(len, columns)), sum(each.nbytes for each in columns)
    if columns[0].dtype.kind == "S" and needed > _LARGE and needed > min(_MOST_TIMES * now, available_memory() // 3):
        longest = max(zip(columns, parts, strict=True), key=lambda pair: pair[0].dtype.itemsize)[1][0].path
        raise SourceError(
            f"`{name}` would take {needed:,} bytes, {now:,} in the files: all rows get room for the longest text, of "
            f"{longest}. Pack that one again with `--captions BYTES`, which cuts it."
        )


def _join_columns(name: str, parts: Sequence[_Part], notes: list[str]) -> Column:
    """Returns a column of all files, with class numbers for the union of their names."""
    columns = [listing.columns[name] for _, listing in parts]
    for (file, _), column in zip(parts, columns, strict=True):
        for key in ({*column.attrs, *columns[0].attrs}) - {"names", _IDS}:
            if column.attrs.get(key) != columns[0].attrs.get(key):
                raise SourceError(
                    f"Files that differ cannot be merged: attribute {key} of `{name}` is {columns[0].attrs.get(key)} "
                    f"in {parts[0][0].path}, {column.attrs.get(key)} in {file.path}."
                )
    names = [tuple(column.attrs.get("names", ())) for column in columns]
    if len(set(names)) == 1:
        attrs = _with_ids(name, columns, names, names[0], notes)
        return replace(columns[0], values=np.concatenate([column.values for column in columns]), attrs=attrs)
    if bare := [str(file.path) for (file, _), group in zip(parts, names, strict=True) if not group]:
        raise SourceError(
            f"`{name}` has names in some of the files and none in {first_few(bare)}: which class is which cannot be "
            f"known. Pack it again with names."
        )
    union = tuple(dict.fromkeys(label for group in names for label in group))
    values = []
    for (file, _), column, group in zip(parts, columns, names, strict=True):
        numbers = column.values
        if numbers.dtype.kind != "i" or (numbers.size and not -1 <= numbers.min() <= numbers.max() < len(group)):
            other = next(i for i, others in enumerate(names) if others != names[0])
            raise SourceError(
                f"Files that differ cannot be merged: names of `{name}` are {first_few(names[0])} in "
                f"{parts[0][0].path}, {first_few(names[other])} in {parts[other][0].path}, and its values in "
                f"{file.path} are not class numbers that could be mapped."
            )
        # The last item is for -1, which means that there is no class.
        table = np.array([*(union.index(label) for label in group), -1], column.values.dtype)
        values.append(table[numbers])
    counts = ", ".join(f"{len(group)} in {file.path.name}" for group, (file, _) in zip(names, parts, strict=True))
    notes.append(f"`{name}`: classes differ ({counts}); they were joined by name into {len(union)}.")
    return Column(np.concatenate(values), {**_with_ids(name, columns, names, union, notes), "names": union})


def _with_ids(
    name: str, columns: Sequence[Column], names: Sequence[tuple[str, ...]], union: tuple[str, ...], notes: list[str]
) -> dict[str, Any]:
    """Returns the first column's attributes with the `category_ids` of the union, or without if files contradict."""
    every = [tuple(column.attrs.get(_IDS, ())) for column in columns]
    attrs = {key: value for key, value in columns[0].attrs.items() if key != _IDS}
    if not any(every):
        return dict(columns[0].attrs)
    pairs = {
        (label, number)
        for group, ids in zip(names, every, strict=True)
        for label, number in itertools.zip_longest(group, ids)
    }
    known = dict(pairs)
    if len(pairs) == len(known) == len(set(known.values())) and None not in known and None not in known.values():
        return {**attrs, _IDS: tuple(known[label] for label in union)}
    notes.append(f"`{name}`: {_IDS} contradict each other in these files, and are left out; names of classes stay.")
    return attrs


def _keys(parts: Sequence[_Part], notes: list[str]) -> tuple[str, ...]:
    """Returns the keys of all rows; if two files share one, all keys begin with their file's name."""
    keys = [key for _, listing in parts for key in listing.keys]
    twice = len(keys) - len(set(keys))
    if not twice:
        return tuple(keys)
    stems: list[str] = []
    for file, _ in parts:
        stem, number = file.path.stem, 2
        while stem in stems:
            stem, number = f"{file.path.stem}-{number}", number + 1
        stems.append(stem)
    notes.append(f"Keys that stand in more than one file ({twice:,}): all now begin with their file's name, "
                 f"{', '.join(f'{stem}/' for stem in stems)}.")  # fmt: skip
    return tuple(f"{stem}/{key}" for stem, (_, listing) in zip(stems, parts, strict=True) for key in listing.keys)


def _joined(files: Sequence[Files | Pictures | Arrays], parts: Sequence[_Part]) -> JoinedRows | RaggedRows:
    ragged = [rows for rows in files if isinstance(rows, RaggedRows)]
    if ragged:
        return joined_rows(ragged)
    counts = [file.num_rows for file, _ in parts]
    return JoinedRows.of(list(zip([rows for rows in files if isinstance(rows, Arrays)], counts, strict=True)))


def _join_masks(parts: Sequence[_Part]) -> Masks | None:
    masks = [listing.masks for _, listing in parts]
    first = masks[0]
    if first is None:
        return None
    for (file, _), other in zip(parts, masks, strict=True):
        assert other is not None, "fields were compared"
        for what in ("names", "ignore_index", "attrs"):
            if getattr(other, what) != getattr(first, what):
                raise SourceError(
                    f"Files that differ cannot be merged: {what} of `masks` is {_short(getattr(first, what))} in "
                    f"{parts[0][0].path}, {_short(getattr(other, what))} in {file.path}. Pack "
                    f"both with the same classes, or both without masks: `fastload pack --masks none`."
                )
    every = [each for each in masks if each is not None]
    files = _joined([each.files for each in every], parts)
    return replace(first, files=files, present=np.concatenate([each.present for each in every]))


def _short(value: Any) -> str:
    return first_few(map(str, value)) if isinstance(value, tuple) else str(value)


def _attrs(parts: Sequence[_Part]) -> dict[str, Any]:
    """Returns the root attributes: equal ones stay; rows of several files one after another are not shuffled."""
    options = [pack_options(file.attrs) for file, _ in parts]
    same = {name: value for name, value in options[0].items() if all(o.get(name) == value for o in options)}
    merged = [{"name": file.path.name, "rows": file.num_rows} for file, _ in parts]
    return {
        "decoder": "; ".join(sorted({str(listing.attrs["decoder"]) for _, listing in parts})),
        "source_layout": _only({str(listing.attrs["source_layout"]) for _, listing in parts}, "merged"),
        "pack_options": json.dumps(same),
        "seed": 0,
        "shuffled": False,
        "repacked": json.dumps({"merged": merged}),
    }
