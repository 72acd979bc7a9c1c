"""Folders that `fastload export` wrote, read back exactly. Two files hold what image files cannot:

    fastload.json     key, image and mask file of each row, names of splits, attributes of every column
    fields.npz        `split` and every column, with dtype and shape

They are used only while they fit the folder: all listed files are there, no image was added, and the table for people
(manifest.csv) is unchanged. Otherwise the user has edited the export, and it is read as any folder or table.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard, get_args

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.format.column import Column, Moves
from fastload.sources.listing import Listing, Masks, OnError, SourceOptions, first_few, require_unique
from fastload.sources.open_tree import open_tree
from fastload.sources.tree import Tree, key_of

SIDECAR, FIELDS, TABLE = "fastload.json", "fields.npz", "manifest.csv"
FORMAT, VERSION = "fastload-export", 1

_NO_COLUMNS = ("images", "masks", "split", "key", "digest", "digest_fields", "", ".", "..")
_HEAD_BYTES = 2**16  # of one array in an .npz, at most


@dataclass(frozen=True)
class _Sidecar:
    """The content of fastload.json.

    Attributes:
        where: its path, for messages.
        folder: its folder in the tree, "" or ending in `/`.
        values: the JSON object.
        keys: key of each row.
        images: path of each row's image, relative to folder.
        masks: path of each row's mask, relative to folder; "" for none.
        positions: name -> position of the files of the tree.
    """

    where: str
    folder: str
    values: dict[str, Any]
    keys: list[str]
    images: list[str]
    masks: list[str]
    positions: dict[str, int]

    def rows_in_tree(self, paths: list[str]) -> NDArray[np.int64]:
        """Returns the positions in the tree of paths relative to folder."""
        return np.array([self.positions[self.folder + path] for path in paths], np.int64)


def exported_evidence(tree: Tree) -> list[str]:
    """Returns the `fastload.json` of a tree if it fits the other files; else nothing."""
    name = _find(tree)
    return [key_of(name)] if name and not why_ignored(tree) else []


def why_ignored(tree: Tree) -> str:
    """Returns why the `fastload.json` of a tree is ignored; "" if it is used, or if there is none."""
    if not _find(tree):
        return ""
    try:
        _read(tree)
    except SourceError as exc:
        return str(exc)
    return ""


def list_exported(
    source: str | Path | Tree, *, on_error: OnError = "fail", options: SourceOptions | None = None
) -> Listing:
    """Returns the listing of an export: keys, splits, columns with dtype, shape and attributes, masks with classes.

    Raises:
        SourceError: fastload.json or fields.npz is absent or damaged, or does not fit the other files.
    """
    tree = open_tree(source)
    sidecar = _read(tree)
    columns, split = _fields(tree, sidecar)
    rows = sidecar.rows_in_tree(sidecar.images)
    masks = None
    if options is None or options.masks != "none":
        masks = _masks(tree, sidecar)
    return Listing(
        layout="exported",
        keys=tuple(sidecar.keys),
        split=split,
        split_names=tuple(sidecar.values["split_names"]),
        columns=columns,
        notes=(f"Layout exported, recognised by {key_of(sidecar.folder + SIDECAR)}.", *tree.notes),
        sizes=tree.sizes[rows],
        mtimes_ns=tree.mtimes_ns[rows],
        files=tree.files.take(rows),
        masks=masks,
    )


def _find(tree: Tree) -> str:
    """Returns the name of the only fastload.json, at the top or one folder below (archives of a folder); else ""."""
    found = [name for name in tree.names if name.rpartition("/")[2] == SIDECAR and name.count("/") <= 1]
    return found[0] if len(found) == 1 else ""


def _read(tree: Tree) -> _Sidecar:
    """Returns fastload.json, checked against the other files of the tree and the table."""
    name = _find(tree)
    if not name:
        raise SourceError(f"{tree.given}: no {SIDECAR}, which `fastload export` writes. Give the folder it wrote.")
    where = f"{tree.path}/{key_of(name)}"
    positions = {name: i for i, name in enumerate(tree.names)}
    try:
        values = json.loads(tree.read_text(positions[name]))
    except (ValueError, RecursionError) as exc:
        raise _damaged(where, f"it is no JSON ({exc})") from exc
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise _damaged(where, "it is not what `fastload export` writes")
    if values.get("version") != VERSION:
        raise SourceError(
            f"{where}: version {values.get('version')!r}; this release reads {VERSION}. Install the release that "
            f"wrote it ({values.get('writer')}), or remove {SIDECAR} to pack the images alone."
        )
    keys, images, masks = _rows(where, values)
    sidecar = _Sidecar(where, name[: -len(SIDECAR)], values, keys, images, masks, positions)
    _check_files(tree, sidecar)
    return sidecar


def _damaged(where: str, why: str) -> SourceError:
    return SourceError(f"{where}: {why}. Export again, or remove {SIDECAR} to pack what the other files say.")


def _rows(where: str, values: dict[str, Any]) -> tuple[list[str], list[str], list[str]]:
    rows = values.get("rows")
    if not isinstance(rows, list) or not rows:
        raise _damaged(where, "it lists no rows")
    for row in rows:
        if not (isinstance(row, list) and len(row) == 3 and all(isinstance(text, str) for text in row)):
            raise _damaged(where, f"a row is {str(row)[:80]}, not a key, an image and a mask")
        for path in filter(None, row[1:]):
            if path.startswith("/") or "\\" in path or {"", ".", ".."} & set(path.split("/")):
                raise _damaged(where, f"{path[:80]!r} would lead out of the folder; refused")
    keys, images, masks = (list(each) for each in zip(*rows, strict=True))
    files = [*images, *filter(None, masks)]
    if len(set(files)) < len(files):
        raise _damaged(where, "it lists a file twice")
    require_unique(keys, where)
    return keys, images, masks


def _check_files(tree: Tree, sidecar: _Sidecar) -> None:
    listed = {sidecar.folder + path for path in (*sidecar.images, *filter(None, sidecar.masks))}
    absent = sorted(name for name in listed | {sidecar.folder + FIELDS} if name not in sidecar.positions)
    if absent:
        raise _damaged(
            sidecar.where, f"files it lists are gone ({len(absent)}): {first_few(list(map(key_of, absent)), 3)}"
        )
    there = [tree.names[i] for i in tree.images().tolist()] + [name for name, _ in tree.broken]
    others = sorted(set(there) - listed)
    if others:
        shown = first_few(list(map(key_of, others)), 3)
        raise _damaged(sidecar.where, f"images were added that it does not list ({len(others)}): {shown}")
    table = sidecar.values.get("manifest")
    if table is not None:
        at = sidecar.positions.get(sidecar.folder + TABLE)
        if at is None or xxhash.xxh3_128_hexdigest(tree.read_text(at)) != table:
            raise _damaged(sidecar.where, f"{TABLE} was changed since it was written")


def _fields(tree: Tree, sidecar: _Sidecar) -> tuple[dict[str, Column], NDArray[np.uint8]]:
    """Returns the columns, and the split of each row."""
    names = sidecar.values.get("split_names")
    if not _are_texts(names) or not 0 < len(names) == len(set(names)) <= 256:
        raise _damaged(sidecar.where, "its split_names are no list of different names")
    columns: dict[str, Column] = {}
    described = sidecar.values.get("columns")
    if not isinstance(described, list) or not all(isinstance(column, dict) for column in described):
        raise _damaged(sidecar.where, "it does not describe the columns")
    where = f"{tree.path}/{key_of(sidecar.folder + FIELDS)}"
    try:
        with zipfile.ZipFile(io.BytesIO(tree.read_text(sidecar.positions[sidecar.folder + FIELDS]))) as archive:
            for column in described:
                name = column.get("name")
                if not isinstance(name, str) or name in columns or name in _NO_COLUMNS or "/" in name:
                    raise _damaged(sidecar.where, f"{str(name)[:80]!r} is no name of a column, or occurs twice")
                values = _array(archive, where, name, _kind(sidecar, column))
                columns[name] = Column(values, _attrs(sidecar, column.get("attrs")), _moves(sidecar, column, values))
            split: NDArray[np.uint8] = _array(archive, where, "split", (np.dtype(np.uint8), (len(sidecar.keys),)))
    except (zipfile.BadZipFile, KeyError, EOFError, ValueError, NotImplementedError, OSError) as exc:
        if isinstance(exc, SourceError):
            raise
        raise SourceError(
            f"{where}: damaged, or not the one that {SIDECAR} describes ({exc}). Export again, or remove {SIDECAR}."
        ) from exc
    if int(split.max()) >= len(names):
        raise _damaged(sidecar.where, f"a row is of split {int(split.max())}, of {len(names)} that have names")
    return columns, split


def _kind(sidecar: _Sidecar, column: dict[str, Any]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Returns the dtype and the shape (N, ...) that fastload.json states for a column."""
    shape = column.get("shape")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise _damaged(sidecar.where, f"the shape of `{column['name']}` is {str(shape)[:80]}")
    try:
        dtype = np.dtype(str(column.get("dtype")))
    except TypeError as exc:
        raise _damaged(sidecar.where, f"the dtype of `{column['name']}` is {str(column.get('dtype'))[:80]}") from exc
    if dtype.kind not in "biufS":
        raise _damaged(sidecar.where, f"`{column['name']}` is {dtype}, which a packed file never holds")
    return dtype, (len(sidecar.keys), *shape)


def _array(archive: zipfile.ZipFile, where: str, name: str, kind: tuple[np.dtype[Any], tuple[int, ...]]) -> Any:
    """Returns one array of fields.npz, checked against dtype and shape; nothing is ever unpickled."""
    dtype, shape = kind
    info = archive.getinfo(f"{name}.npy")
    most = math.prod(shape) * dtype.itemsize + _HEAD_BYTES
    if info.file_size > most:
        raise SourceError(
            f"{where}: `{name}` would be {info.file_size:,} bytes, at most {most:,} are possible; refused."
        )
    with archive.open(info) as file:
        values = np.lib.format.read_array(io.BytesIO(file.read(most)), allow_pickle=False)
    if values.dtype != dtype or values.shape != shape:
        raise SourceError(
            f"{where}: `{name}` is {values.dtype} {values.shape}, {SIDECAR} says {dtype} {shape}. Export again, or "
            f"remove {SIDECAR}."
        )
    return values


def _moves(sidecar: _Sidecar, column: dict[str, Any], values: NDArray[Any]) -> Moves:
    moves: Moves = column.get("moves", "")
    last = values.shape[-1] if values.ndim > 1 else 1
    if moves not in get_args(Moves) or (moves and (values.dtype.kind not in "iuf" or last % 2)):
        raise _damaged(sidecar.where, f"`{column['name']}` cannot hold coordinates such as {str(moves)[:80]!r}")
    if moves in ("xywh", "xyxy") and last != 4:
        raise _damaged(sidecar.where, f"`{column['name']}` cannot hold boxes, of {last} numbers")
    return moves


def _masks(tree: Tree, sidecar: _Sidecar) -> Masks | None:
    about = sidecar.values.get("masks")
    if about is None:
        return None
    if not isinstance(about, dict) or not _are_texts(about.get("names")):
        raise _damaged(sidecar.where, "its description of masks cannot be read")
    ignored = about.get("ignore_index")
    if ignored is not None and (type(ignored) is not int or not 0 <= ignored <= 255):
        raise _damaged(sidecar.where, f"ignore_index is {str(ignored)[:80]}, not 0 to 255")
    present = np.array([bool(path) for path in sidecar.masks])
    if not present.any():
        raise _damaged(sidecar.where, "it describes masks and lists none")
    # A row without a mask stands for any file: it is never read.
    any_mask = next(filter(None, sidecar.masks))
    files = tree.files.take(sidecar.rows_in_tree([path or any_mask for path in sidecar.masks]))
    return Masks(files, present, tuple(about["names"]), ignored, _attrs(sidecar, about.get("attrs")))


def _are_texts(values: Any) -> TypeGuard[list[str]]:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _attrs(sidecar: _Sidecar, values: Any) -> dict[str, Any]:
    """Returns checked HDF5 attributes, with lists as tuples."""
    if not isinstance(values, dict):
        raise _damaged(sidecar.where, "it holds attributes that cannot be read")
    for name, value in values.items():
        numbers = value if isinstance(value, list) else [value]
        if not name or not (isinstance(value, str) or _are_texts(value) or all(_is_number(each) for each in numbers)):
            raise _damaged(sidecar.where, f"the attribute {name[:80]!r} is neither texts nor numbers")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _is_number(value: Any) -> bool:
    """Whether a value is a number that an HDF5 attribute can hold."""
    return isinstance(value, float) or (isinstance(value, int) and -(2**63) <= value < 2**63)
