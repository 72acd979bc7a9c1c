"""Folders that `fastload export` wrote, read back exactly. Two files hold what image files cannot:

    fastload.json     key, image and mask file of each row, names of splits, attributes of every column
    fields.npz        `split` and every column, with dtype and shape

They are used only while they fit the folder: all listed files are there, no image was added, and the table for people
(manifest.csv) is unchanged. Otherwise the user has edited the export, and it is read as any folder or table.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, TypeGuard, get_args

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.format.column import Column, Moves
from fastload.sources.arrays.npy import read_npz
from fastload.sources.assemble import Draft, MaskFiles, Samples, Splits
from fastload.sources.listing import SourceOptions, first_few, require_unique
from fastload.sources.tree import Tree, key_of

SIDECAR, FIELDS, TABLE = "fastload.json", "fields.npz", "manifest.csv"
FORMAT, VERSION = "fastload-export", 1

_NO_COLUMNS = ("images", "masks", "split", "key", "digest", "digest_fields", "", ".", "..")


@dataclass(frozen=True)
class _Sidecar:
    """The content of fastload.json.

    Attributes:
        where: its path, for messages.
        folder: its folder in the tree, "" or ending in `/`.
        values: the JSON object.
        positions: name -> position of the files of the tree.
    """

    where: str
    folder: str
    values: dict[str, Any]
    positions: dict[str, int]

    def damaged(self, why: str) -> SourceError:
        return SourceError(f"{self.where}: {why}. Export again, or remove {SIDECAR} to pack what the other files say.")

    def column(self, at: int) -> list[str]:
        """Returns the keys, images or masks of all rows: their text 0, 1 or 2."""
        return [row[at] for row in self.values["rows"]]

    def files(self) -> list[str]:
        """Returns the paths of images and masks relative to folder."""
        return [*self.column(1), *filter(None, self.column(2))]

    def positions_of(self, paths: list[str]) -> list[int]:
        """Returns the positions in the tree of paths relative to folder, -1 for ""."""
        return [self.positions[self.folder + path] if path else -1 for path in paths]


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


def list_exported(draft: Draft, tree: Tree, options: SourceOptions) -> Samples:
    """Returns an export: keys, splits, columns with dtype, shape and attributes, masks with classes.

    Raises:
        SourceError: fastload.json or fields.npz is absent or damaged, or does not fit the other files.
    """
    sidecar = _read(tree)
    draft.title = f"Layout exported, recognised by {key_of(sidecar.folder + SIDECAR)}."
    columns, splits = _fields(tree, sidecar)
    masks = None if options.masks == "none" else _masks(sidecar)
    samples = Samples.in_tree(tree, sidecar.positions_of(sidecar.column(1)), splits, columns, masks)
    return replace(samples, keys=sidecar.column(0))


def _find(tree: Tree) -> str:
    """Returns the name of the only fastload.json, at the top or one folder below (archives of a folder); else ""."""
    found = [name for name in tree.names if name.rpartition("/")[2] == SIDECAR and name.count("/") <= 1]
    return found[0] if len(found) == 1 else ""


def _read(tree: Tree) -> _Sidecar:
    """Returns fastload.json, checked against the other files of the tree and the table."""
    name = _find(tree)
    if not name:
        raise SourceError(f"{tree.given}: no {SIDECAR}, which `fastload export` writes. Give the folder it wrote.")
    positions = {name: i for i, name in enumerate(tree.names)}
    sidecar = _Sidecar(tree.where(positions[name]), name.removesuffix(SIDECAR), {}, positions)
    try:
        values = json.loads(tree.read_text(positions[name]))
    except (ValueError, RecursionError) as exc:
        raise sidecar.damaged(f"it is no JSON ({exc})") from exc
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise sidecar.damaged("it is not what `fastload export` writes")
    if values.get("version") != VERSION:
        raise SourceError(
            f"{sidecar.where}: version {values.get('version')!r}; this release reads {VERSION}. Install the release "
            f"that wrote it ({values.get('writer')}), or remove {SIDECAR} to pack the images alone."
        )
    sidecar = replace(sidecar, values=values)
    _check_rows(sidecar)
    _check_files(tree, sidecar)
    return sidecar


def _check_rows(sidecar: _Sidecar) -> None:
    rows = sidecar.values.get("rows")
    if not isinstance(rows, list) or not rows:
        raise sidecar.damaged("it lists no rows")
    for row in rows:
        if not (_are_texts(row) and len(row) == 3):
            raise sidecar.damaged(f"a row is {str(row)[:80]}, not a key, an image and a mask")
        for path in filter(None, row[1:]):
            if path.startswith("/") or "\\" in path or {"", ".", ".."} & set(path.split("/")):
                raise sidecar.damaged(f"{path[:80]!r} would lead out of the folder; refused")
    if len(set(sidecar.files())) < len(sidecar.files()):
        raise sidecar.damaged("it lists a file twice")
    require_unique(sidecar.column(0), sidecar.where)


def _check_files(tree: Tree, sidecar: _Sidecar) -> None:
    listed = {sidecar.folder + path for path in sidecar.files()}
    absent = sorted(name for name in listed | {sidecar.folder + FIELDS} if name not in sidecar.positions)
    if absent:
        shown = first_few(list(map(key_of, absent)), 3)
        raise sidecar.damaged(f"files it lists are gone ({len(absent)}): {shown}")
    there = [tree.names[i] for i in tree.images().tolist()] + [name for name, _ in tree.broken]
    if others := sorted(set(there) - listed):
        shown = first_few(list(map(key_of, others)), 3)
        raise sidecar.damaged(f"images were added that it does not list ({len(others)}): {shown}")
    table = sidecar.values.get("manifest")
    if table is not None:
        at = sidecar.positions.get(sidecar.folder + TABLE)
        if at is None or xxhash.xxh3_128_hexdigest(tree.read_text(at)) != table:
            raise sidecar.damaged(f"{TABLE} was changed since it was written")


def _fields(tree: Tree, sidecar: _Sidecar) -> tuple[dict[str, Column], Splits]:
    """Returns the columns, and the split of each row."""
    names, described, count = sidecar.values.get("split_names"), sidecar.values.get("columns"), len(sidecar.column(0))
    if not _are_texts(names) or not 0 < len(names) == len(set(names)) <= 256:
        raise sidecar.damaged("its split_names are no list of different names")
    if not isinstance(described, list) or not all(isinstance(column, dict) for column in described):
        raise sidecar.damaged("it does not describe the columns")
    position = sidecar.positions[sidecar.folder + FIELDS]
    where = tree.where(position)
    try:
        arrays = {array.name: array for array in read_npz(tree, position)}
    except SourceError as exc:
        why = str(exc).removeprefix(f"{where}: ")
        raise SourceError(
            f"{where}: damaged, or not the one that {SIDECAR} describes ({why}). Export again, or remove {SIDECAR}."
        ) from exc

    def values_of(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        found = f"{arrays[name].dtype} {arrays[name].shape}" if name in arrays else "absent"
        if found != f"{dtype} {shape}":
            raise SourceError(
                f"{where}: `{name}` is {found}, {SIDECAR} says {dtype} {shape}. Export again, or remove {SIDECAR}."
            )
        return arrays[name].values()

    columns: dict[str, Column] = {}
    for column in described:
        name = column.get("name")
        if not isinstance(name, str) or name in columns or name in _NO_COLUMNS or "/" in name:
            raise sidecar.damaged(f"{str(name)[:80]!r} is no name of a column, or occurs twice")
        values = values_of(name, *_kind(sidecar, column, count))
        columns[name] = Column(values, _attrs(sidecar, column.get("attrs")), _moves(sidecar, column, values))
    split = values_of("split", np.dtype(np.uint8), (count,))
    if int(split.max()) >= len(names):
        raise sidecar.damaged(f"a row is of split {int(split.max())}, of {len(names)} that have names")
    return columns, Splits(split, tuple(names))


def _kind(sidecar: _Sidecar, column: dict[str, Any], count: int) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Returns the dtype and the shape (N, ...) that fastload.json states for a column."""
    shape, name = column.get("shape"), column["name"]
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise sidecar.damaged(f"the shape of `{name}` is {str(shape)[:80]}")
    try:
        dtype = np.dtype(str(column.get("dtype")))
    except TypeError as exc:
        raise sidecar.damaged(f"the dtype of `{name}` is {str(column.get('dtype'))[:80]}") from exc
    if dtype.kind not in "biufS":
        raise sidecar.damaged(f"`{name}` is {dtype}, which a packed file never holds")
    return dtype, (count, *shape)


def _moves(sidecar: _Sidecar, column: dict[str, Any], values: NDArray[Any]) -> Moves:
    moves: Moves = column.get("moves", "")
    last = values.shape[-1] if values.ndim > 1 else 1
    if moves not in get_args(Moves) or (moves and (values.dtype.kind not in "iuf" or last % 2)):
        raise sidecar.damaged(f"`{column['name']}` cannot hold coordinates such as {str(moves)[:80]!r}")
    if moves in ("xywh", "xyxy") and last != 4:
        raise sidecar.damaged(f"`{column['name']}` cannot hold boxes, of {last} numbers")
    return moves


def _masks(sidecar: _Sidecar) -> MaskFiles | None:
    about, paths = sidecar.values.get("masks"), sidecar.column(2)
    if about is None:
        return None
    if not isinstance(about, dict) or not _are_texts(about.get("names")):
        raise sidecar.damaged("its description of masks cannot be read")
    ignored = about.get("ignore_index")
    if ignored is not None and (type(ignored) is not int or not 0 <= ignored <= 255):
        raise sidecar.damaged(f"ignore_index is {str(ignored)[:80]}, not 0 to 255")
    if not any(paths):
        raise sidecar.damaged("it describes masks and lists none")
    return MaskFiles(sidecar.positions_of(paths), tuple(about["names"]), ignored, _attrs(sidecar, about.get("attrs")))


def _are_texts(values: Any) -> TypeGuard[list[str]]:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _attrs(sidecar: _Sidecar, values: Any) -> dict[str, Any]:
    """Returns checked HDF5 attributes, with lists as tuples."""
    if not isinstance(values, dict):
        raise sidecar.damaged("it holds attributes that cannot be read")
    for name, value in values.items():
        numbers = value if isinstance(value, list) else [value]
        if not name or not (isinstance(value, str) or _are_texts(value) or all(map(_is_number, numbers))):
            raise sidecar.damaged(f"the attribute {name[:80]!r} is neither texts nor numbers")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _is_number(value: Any) -> bool:
    """Whether a value is a number that an HDF5 attribute can hold."""
    return isinstance(value, float) or (isinstance(value, int) and -(2**63) <= value < 2**63)
