"""What `fastload export` wrote, read back exactly: beside the files lie two that say what these cannot.

    fastload.json     which file each row's image and mask is in, its key, names of splits, attributes of every column
    fields.npz        `split` and every column, with dtype and shape

They are believed as long as the files are still those: all listed are there, no image has come to them, and the table
for people is as it was. Otherwise the user has changed something, and the folders or the table say what is meant.
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
from fastload.sources.listing import Column, Listing, Masks, Moves, OnError, first_few, require_unique
from fastload.sources.options import SourceOptions
from fastload.sources.tree import Tree, key_of, open_tree

SIDECAR, FIELDS, TABLE = "fastload.json", "fields.npz", "manifest.csv"
FORMAT, VERSION = "fastload-export", 1

_NO_COLUMNS = ("images", "masks", "split", "key", "digest", "digest_fields", "", ".", "..")
_HEAD_BYTES = 2**16  # of one array in an .npz, at most


@dataclass(frozen=True)
class _Said:
    """fastload.json, and where it lies.

    Attributes:
        where: its path, for messages.
        folder: in front of all names of the tree, "" or ending in `/`.
        values: the JSON object.
        keys, images, masks: of each row; paths relative to folder, "" for no mask.
        places: name of a file in the tree -> its position.
    """

    where: str
    folder: str
    values: dict[str, Any]
    keys: list[str]
    images: list[str]
    masks: list[str]
    places: dict[str, int]

    def rows_in_tree(self, paths: list[str]) -> NDArray[np.int64]:
        """Positions in the tree of some of these paths."""
        return np.array([self.places[self.folder + path] for path in paths], np.int64)


def exported_evidence(tree: Tree) -> list[str]:
    """`fastload.json`, where everything beside it is as it says; empty for anything else."""
    name = _find(tree)
    return [key_of(name)] if name and not why_passed_over(tree) else []


def why_passed_over(tree: Tree) -> str:
    """Why the `fastload.json` of a tree is not believed; "" when there is none, or when it is."""
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
    """The listing of an export: keys, splits, columns with dtype, shape and attributes, masks and what they mean.

    Raises:
        SourceError: fastload.json or fields.npz is absent or damaged, or does not fit the files beside it.
    """
    tree = open_tree(source)
    said = _read(tree)
    columns, split = _fields(tree, said)
    rows = said.rows_in_tree(said.images)
    masks = None
    if options is None or options.masks != "none":
        masks = _masks(tree, said)
    return Listing(
        layout="exported",
        keys=tuple(said.keys),
        split=split,
        split_names=tuple(said.values["split_names"]),
        columns=columns,
        notes=(f"Layout exported, told by {key_of(said.folder + SIDECAR)}.", *tree.notes),
        sizes=tree.sizes[rows],
        mtimes_ns=tree.mtimes_ns[rows],
        files=tree.files.take(rows),
        masks=masks,
    )


def _find(tree: Tree) -> str:
    """The name of the one fastload.json, in the tree itself or in a folder of it, as in an archive of a folder."""
    found = [name for name in tree.names if name.rpartition("/")[2] == SIDECAR and name.count("/") <= 1]
    return found[0] if len(found) == 1 else ""


def _read(tree: Tree) -> _Said:
    """fastload.json, checked against the names of the files beside it, and against the table."""
    name = _find(tree)
    if not name:
        raise SourceError(f"{tree.given}: no {SIDECAR}, which `fastload export` writes. Give the folder it wrote.")
    where = f"{tree.path}/{key_of(name)}"
    places = {name: i for i, name in enumerate(tree.names)}
    try:
        values = json.loads(tree.read_text(places[name]))
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
    said = _Said(where, name[: -len(SIDECAR)], values, keys, images, masks, places)
    _check_files(tree, said)
    return said


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


def _check_files(tree: Tree, said: _Said) -> None:
    listed = {said.folder + path for path in (*said.images, *filter(None, said.masks))}
    absent = sorted(name for name in listed | {said.folder + FIELDS} if name not in said.places)
    if absent:
        raise _damaged(
            said.where, f"files it lists are gone ({len(absent)}): {first_few(list(map(key_of, absent)), 3)}"
        )
    there = [tree.names[i] for i in tree.images().tolist()] + [name for name, _ in tree.broken]
    others = sorted(set(there) - listed)
    if others:
        shown = first_few(list(map(key_of, others)), 3)
        raise _damaged(said.where, f"images were added that it does not list ({len(others)}): {shown}")
    table = said.values.get("manifest")
    if table is not None:
        at = said.places.get(said.folder + TABLE)
        if at is None or xxhash.xxh3_128_hexdigest(tree.read_text(at)) != table:
            raise _damaged(said.where, f"{TABLE} was changed since it was written")


def _fields(tree: Tree, said: _Said) -> tuple[dict[str, Column], NDArray[np.uint8]]:
    """The columns, and the split of each row."""
    names = said.values.get("split_names")
    if not _are_texts(names) or not 0 < len(names) == len(set(names)) <= 256:
        raise _damaged(said.where, "its split_names are no list of different names")
    columns: dict[str, Column] = {}
    described = said.values.get("columns")
    if not isinstance(described, list) or not all(isinstance(column, dict) for column in described):
        raise _damaged(said.where, "it does not describe the columns")
    where = f"{tree.path}/{key_of(said.folder + FIELDS)}"
    try:
        with zipfile.ZipFile(io.BytesIO(tree.read_text(said.places[said.folder + FIELDS]))) as archive:
            for column in described:
                name = column.get("name")
                if not isinstance(name, str) or name in columns or name in _NO_COLUMNS or "/" in name:
                    raise _damaged(said.where, f"{str(name)[:80]!r} is no name of a column, or occurs twice")
                values = _array(archive, where, name, _kind(said, column))
                columns[name] = Column(values, _attrs(said, column.get("attrs")), _moves(said, column, values))
            split: NDArray[np.uint8] = _array(archive, where, "split", (np.dtype(np.uint8), (len(said.keys),)))
    except (zipfile.BadZipFile, KeyError, EOFError, ValueError, NotImplementedError, OSError) as exc:
        if isinstance(exc, SourceError):
            raise
        raise SourceError(
            f"{where}: damaged, or not the one that {SIDECAR} describes ({exc}). Export again, or remove {SIDECAR}."
        ) from exc
    if int(split.max()) >= len(names):
        raise _damaged(said.where, f"a row is of split {int(split.max())}, of {len(names)} that have names")
    return columns, split


def _kind(said: _Said, column: dict[str, Any]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """dtype and shape (N, ...) that a column must have."""
    shape = column.get("shape")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise _damaged(said.where, f"the shape of `{column['name']}` is {str(shape)[:80]}")
    try:
        dtype = np.dtype(str(column.get("dtype")))
    except TypeError as exc:
        raise _damaged(said.where, f"the dtype of `{column['name']}` is {str(column.get('dtype'))[:80]}") from exc
    if dtype.kind not in "biufS":
        raise _damaged(said.where, f"`{column['name']}` is {dtype}, which a packed file never holds")
    return dtype, (len(said.keys), *shape)


def _array(archive: zipfile.ZipFile, where: str, name: str, kind: tuple[np.dtype[Any], tuple[int, ...]]) -> Any:
    """One array of fields.npz, once its header is known to be what it must be; nothing is ever unpickled."""
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


def _moves(said: _Said, column: dict[str, Any], values: NDArray[Any]) -> Moves:
    moves: Moves = column.get("moves", "")
    last = values.shape[-1] if values.ndim > 1 else 1
    if moves not in get_args(Moves) or (moves and (values.dtype.kind not in "iuf" or last % 2)):
        raise _damaged(said.where, f"`{column['name']}` cannot hold places such as {str(moves)[:80]!r}")
    if moves in ("xywh", "xyxy") and last != 4:
        raise _damaged(said.where, f"`{column['name']}` cannot hold boxes, of {last} numbers")
    return moves


def _masks(tree: Tree, said: _Said) -> Masks | None:
    about = said.values.get("masks")
    if about is None:
        return None
    if not isinstance(about, dict) or not _are_texts(about.get("names")):
        raise _damaged(said.where, "what it says of masks cannot be read")
    ignored = about.get("ignore_index")
    if ignored is not None and (type(ignored) is not int or not 0 <= ignored <= 255):
        raise _damaged(said.where, f"ignore_index is {str(ignored)[:80]}, not 0 to 255")
    present = np.array([bool(path) for path in said.masks])
    if not present.any():
        raise _damaged(said.where, "it speaks of masks and lists none")
    # A row without a mask stands for any file; it is not asked for.
    any_mask = next(filter(None, said.masks))
    files = tree.files.take(said.rows_in_tree([path or any_mask for path in said.masks]))
    return Masks(files, present, tuple(about["names"]), ignored, _attrs(said, about.get("attrs")))


def _are_texts(values: Any) -> TypeGuard[list[str]]:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _attrs(said: _Said, values: Any) -> dict[str, Any]:
    """Attributes, lists as tuples."""
    if not isinstance(values, dict):
        raise _damaged(said.where, "it holds attributes that cannot be read")
    for name, value in values.items():
        numbers = value if isinstance(value, list) else [value]
        if not name or not (isinstance(value, str) or _are_texts(value) or all(_is_number(each) for each in numbers)):
            raise _damaged(said.where, f"the attribute {name[:80]!r} is neither texts nor numbers")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _is_number(value: Any) -> bool:
    """Whether HDF5 can hold it."""
    return isinstance(value, float) or (isinstance(value, int) and -(2**63) <= value < 2**63)
