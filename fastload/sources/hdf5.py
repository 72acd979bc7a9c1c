"""HDF5 files that fastload did not write: datasets of equal length, taken by their names as NumPy's arrays are.

    images, labels                          (N, H, W, C) or (N, C, H, W), at the top or in train/ and test/
    features, targets, attribute `split`    fuel
    ..._train_x.h5, ..._train_y.h5, ...     PatchCamelyon: one file for each split and field

Links to other files, storage outside the file and virtual datasets are refused. A dataset whose rows lie back to back
in the file is read in place. Any other is read through HDF5: as a whole if it fits into half of the available memory,
else by chunks.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import FileChangedError, FormatError, MissingFileError, SourceError, typed
from fastload.format.chunk_filters import FilteredChunks
from fastload.format.digests import linear_offset, plain
from fastload.format.valid import check_stored, open_hdf5
from fastload.options.pack import SourceOptions
from fastload.sources.arrays import IMAGES, NamedArray, samples_of_arrays
from fastload.sources.assemble import Draft, Samples, Splits
from fastload.sources.listing import SPLITS, Arrays, first_few, in_split_order
from fastload.sources.raw_rows import Axes, StoredRows, upright
from fastload.sources.spans import ListedFile
from fastload.sources.tree import Tree, key_of

_SUFFIXES = (".h5", ".hdf5", ".hdf")
_FUEL = ("split", "split_array")


def hdf5_evidence(tree: Tree) -> list[str]:
    """Returns the HDF5 files of a tree without images; none for any other tree."""
    if len(tree.images):
        return []
    return [key_of(name) for _, name in tree.not_images if name.lower().endswith(_SUFFIXES)]


def list_hdf5(draft: Draft, tree: Tree, options: SourceOptions) -> Samples:
    """Returns the rows of HDF5 datasets; `samples_of_arrays` decides by name what each dataset is."""
    positions = [i for i, name in tree.not_images if name.lower().endswith(_SUFFIXES)]
    tree.known[positions], names = True, [tree.names[i] for i in positions]
    if not names:
        raise SourceError(f"{tree.given}: no HDF5 file (.h5, .hdf5). Give the file, or the folder that holds it.")
    if tree.archive:
        raise SourceError(f"{tree.given}: HDF5 in an archive cannot be read in place. Unpack it, and pack the folder.")
    if not tree.in_place:
        raise SourceError(f"{tree.given}: HDF5 behind a URL cannot be read in place. Copy it here, and pack the copy.")
    arrays: list[NamedArray] = []
    splits: dict[str, NDArray[np.int64]] = {}
    hidden: dict[str, NDArray[np.int64]] = {}
    for name in names:
        path = tree.path / name
        split = next((part for part in re.split(r"[-_./]", name.lower()) if part in SPLITS), "")
        try:
            with open_hdf5(path) as file:
                if "fastload_version" in file.attrs:
                    fix = f"Change its chunks, order or rows with `fastload repack {typed(path)} OUT.h5`."
                    raise SourceError(f"{path}: fastload packed this file. {fix}")
                found = list(_datasets(path, file, draft.notes))
                arrays += [replace(array, split=split if len(names) > 1 else "") for array in found]
                if len(names) == 1:
                    splits, hidden, lists = _fuel_splits(path, file)
                    arrays = [array for array in arrays if array.name not in lists]
        except (FormatError, MissingFileError) as exc:
            raise SourceError(str(exc)) from exc
    counts = Counter((array.name, array.split) for array in arrays)
    if twice := sorted({name for (name, _), count in counts.items() if count > 1}):
        raise SourceError(f"{tree.given}: several files hold {first_few(twice)}. Give one of them.")
    samples = samples_of_arrays(draft, arrays, options)
    return _with_splits(draft, samples, splits, hidden) if splits else samples


@contextmanager
def _dataset(path: str | Path, name: str) -> Iterator[Any]:
    """Opens a dataset of a file; what HDF5 raises when it is read names the file."""
    try:
        with open_hdf5(Path(path)) as file:
            yield file[name]
    except (FormatError, MissingFileError) as exc:
        raise SourceError(f"{path}: {name} cannot be read ({exc}). Copy the file again.") from exc


@dataclass(frozen=True, eq=False)
class _Hdf5Rows(StoredRows):
    """Rows that only HDF5 can read, compressed or scattered; each batch decodes the chunks that it needs."""

    file: ListedFile
    name: str  # of the dataset
    chunk_rows: int  # rows that are decoded together
    chunks: FilteredChunks | None  # decodes them; None: HDF5 does

    def read_rows(self, indices: NDArray[np.int64], out: NDArray[Any]) -> None:
        rows = self.rows[indices]
        self.file.require_unchanged()
        with _reading(self.file.path, self.name, self.chunks) as read:
            chunk = rows // self.chunk_rows
            for number in np.unique(chunk).tolist():
                where, first = np.flatnonzero(chunk == number), number * self.chunk_rows
                block = read(number, self.chunk_rows)
                block = block.reshape(len(block), *self.stored_shape)
                out[where] = upright(block, self.axes)[rows[where] - first]
        self.file.require_unchanged()


@contextmanager
def _reading(
    path: str | Path, name: str, chunks: FilteredChunks | None
) -> Iterator[Callable[[int, int], NDArray[Any]]]:
    """Gives what reads the rows of a chunk, by its number and the rows of a chunk."""
    if chunks is None:
        with _dataset(path, name) as item:
            yield lambda number, rows: np.asarray(item[number * rows : (number + 1) * rows])
        return
    try:
        with open(path, "rb") as file:
            yield lambda number, rows: chunks.rows(file.fileno(), number)
    except (FormatError, FileChangedError) as exc:
        raise SourceError(str(exc)) from exc
    except OSError as exc:
        raise SourceError(f"{path}: {name} cannot be read ({exc.strerror or exc}). Copy the file again.") from exc


def _datasets(path: Path, file: Any, notes: list[str]) -> Iterator[NamedArray]:
    """Yields every dataset of a file, also those in groups. If one group holds all, names omit it."""
    import h5py

    found = dict(_walk(path, file, file, "", set()))
    tops = {name.partition("/")[0] for name in found}
    around = f"{tops.pop()}/" if len(tops) == 1 and all("/" in name for name in found) else ""
    if around.rstrip("/").lower() in SPLITS:
        around = ""
    file_bytes = os.path.getsize(path)
    for name, item in found.items():
        if item.shape and item.dtype.kind != "O":
            check_stored(path, name, item, file_bytes, pixels=len(item.shape) > 2)
        if not item.shape:
            notes.append(f"Ignored {name}: a single value.")
            continue
        short, is_text = name.removeprefix(around), h5py.check_string_dtype(item.dtype) is not None
        is_text &= item.dtype.kind == "O" and len(item.shape) == 1
        if item.dtype.kind in "biufS" or is_text:
            yield _named(path, short, name, item, is_text)
        elif short.rpartition("/")[2].lower() in IMAGES:
            raise SourceError(
                f"{path}: {name}: rows of different length (or of type {item.dtype}), which have no one shape. Export "
                "the images to files, and pack those with --size."
            )
        else:
            notes.append(f"Ignored {name}: of type {item.dtype}.")


def _named(path: Path, short: str, name: str, item: Any, is_text: bool) -> NamedArray:
    """Returns a dataset under a shorter name; the file is opened anew for each read."""
    dtype, shape, chunk_rows = item.dtype, tuple(map(int, item.shape)), int(item.chunks[0]) if item.chunks else 1
    offset = None
    if dtype.kind in "biufS":  # the rows may lie back to back, in any byte order
        contiguous = item.chunks is None and not item.id.get_create_plist().get_nfilters()
        offset = item.id.get_offset() if contiguous else linear_offset(item)

    chunks = FilteredChunks.of(path, name, item)

    def values() -> NDArray[Any]:
        if chunks is not None:
            every = np.empty(shape, dtype.newbyteorder("="))
            with _reading(path, name, chunks) as read:
                for first in range(0, shape[0], chunk_rows):
                    every[first : first + chunk_rows] = read(first // chunk_rows, chunk_rows)
            return every
        with _dataset(path, name) as item:
            return np.array(item.asstr(errors="backslashreplace")[()].tolist()) if is_text else np.asarray(item[()])

    def by_chunks(row_shape: tuple[int, ...], axes: Axes) -> Arrays:
        rows = np.arange(shape[0], dtype=np.int64)
        return _Hdf5Rows(rows, row_shape, dtype, axes, ListedFile.of(path), name, chunk_rows, chunks)

    classes = plain(item.attrs["names"]) if "names" in item.attrs else ()
    classes = tuple(map(str, classes)) if isinstance(classes, tuple) else (str(classes),)
    at, mtime_ns = None if offset is None else (path, int(offset)), os.stat(path).st_mtime_ns
    kind = np.dtype("U1") if is_text else dtype
    return NamedArray(short, f"{path}: {name}", shape, kind, values, mtime_ns, at, by_chunks, classes)


def _walk(path: Path, file: Any, group: Any, prefix: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yields (name, dataset) of all below a group. Groups in `seen` are not entered: links may form a circle."""
    import h5py

    seen.add(h5py.h5o.get_info(group.id).addr)
    for name in group:
        where = f"{path}: `{prefix}{name}`"
        link = group.get(name, getlink=True)
        if isinstance(link, h5py.ExternalLink):
            raise SourceError(f"{where} is a link into another file ({link.filename}); refused as unsafe.")
        try:
            item = group[name]
        except KeyError as exc:
            raise SourceError(f"{where} leads nowhere; refused. Copy the file again, or remove the link.") from exc
        if Path(item.file.filename) != Path(file.filename):
            raise SourceError(f"{where} leads into another file ({item.file.filename}); refused as unsafe.")
        if isinstance(item, h5py.Group):
            if h5py.h5o.get_info(item.id).addr not in seen:
                yield from _walk(path, file, item, f"{prefix}{name}/", seen)
        elif isinstance(item, h5py.Dataset):
            if item.external:
                raise SourceError(f"{where} keeps its data in another file ({item.external[0][0]}); refused as unsafe.")
            if item.is_virtual:
                raise SourceError(f"{where} is a virtual dataset over other files; refused as unsafe.")
            yield f"{prefix}{name}", item


def _fuel_splits(path: Path, file: Any) -> tuple[dict[str, NDArray[np.int64]], dict[str, NDArray[np.int64]], set[str]]:
    """Returns fuel's split -> rows, source -> rows whose values are withheld, and the datasets that list rows."""
    import h5py

    name = next((name for name in _FUEL if name in file.attrs), "")
    table = file.attrs[name] if name else None
    fields = table.dtype.names if isinstance(table, np.ndarray) else None
    if table is None or not fields:
        return {}, {}, set()
    if not {"split", "source", "start", "stop"} <= set(fields):
        raise SourceError(f"{path}: attribute `{name}` is not fuel's table of splits. Remove it to pack without.")
    splits, hidden, lists = dict[str, NDArray[np.int64]](), dict[str, NDArray[np.int64]](), set[str]()
    for line in table:
        split, source = (str(plain(line[key])) for key in ("split", "source"))
        rows = np.arange(int(line["start"]), int(line["stop"]), dtype=np.int64)
        indices = line["indices"] if "indices" in fields else None
        if isinstance(indices, h5py.Reference) and indices:
            target = file[indices]
            if not isinstance(target, h5py.Dataset) or target.dtype.kind not in "iu" or len(target.shape) != 1:
                raise SourceError(f"{path}: the indices of the split {split!r} are no list of rows.")
            rows = target[()].astype(np.int64)
            lists.add(str(target.name).lstrip("/"))
        if "available" in fields and not line["available"]:
            hidden[source] = np.append(hidden.get(source, rows[:0]), rows)
        elif not np.array_equal(splits.setdefault(split, rows), rows):
            raise SourceError(f"{path}: the split {split!r} has other rows for {source} than for what is before it.")
    return splits, hidden, lists


def _with_splits(
    draft: Draft, samples: Samples, splits: dict[str, NDArray[np.int64]], hidden: dict[str, NDArray[np.int64]]
) -> Samples:
    """Returns the samples with fuel's splits. Rows in no split form the split `other`; withheld labels become -1."""
    by_name = {SPLITS.get(name.lower(), name): rows for name, rows in splits.items()}
    names, count = list(in_split_order(by_name)), len(samples.keys)
    split = np.full(count, 255, np.uint8)
    for number, name in enumerate(names):
        rows = by_name[name]
        if rows.min(initial=0) < 0 or rows.max(initial=-1) >= count:
            raise SourceError(f"{draft.where}: the split {name!r} names rows that are not there, of {count}.")
        taken = np.unique(split[rows])
        if len(taken) and taken[0] != 255:
            fix = "Each sample is in one split; remove one of them from the attribute."
            raise SourceError(f"{draft.where}: the splits {names[taken[0]]!r} and {name!r} share rows. {fix}")
        split[rows] = number
    draft.notes.append(f"Splits as fuel's attribute has them: {', '.join(names)}.")
    if others := np.count_nonzero(split == 255):
        draft.notes.append(f"Rows in no split ({others}) are the split 'other'.")
        split[split == 255] = len(names)
        names.append("other")
    columns = dict(samples.columns)
    for source, rows in hidden.items():
        if source in ("targets", "labels") and "labels" in columns and columns["labels"].values.ndim == 1:
            labels = columns["labels"].values.copy()
            labels[rows] = -1
            columns["labels"] = replace(columns["labels"], values=labels)
            draft.notes.append(f"{source} are withheld for {len(rows)} rows: their labels are -1.")
    return replace(samples, splits=Splits(split, tuple(names)), columns=columns)
