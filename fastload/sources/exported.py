"""Folders that `fastload export` wrote, read back exactly. Two files hold what image files cannot:

    fastload.json     key, image and mask file of each row, names of splits, attributes of every column
    fields.npz        `split` and every column, with dtype and shape

They are used only while they fit the folder: all listed files are there, no image was added, and the table for people
(manifest.csv) is unchanged. Otherwise the user has edited the export, and it is read as any folder or table.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard, get_args

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.format.ragged import Column, Moves
from fastload.options.pack import SourceOptions
from fastload.sources.arrays import read_npz
from fastload.sources.assemble import Draft, MaskFiles, Samples, Splits, split_path
from fastload.sources.listing import first_few, require_unique
from fastload.sources.tree import Tree, key_of
from fastload.system.text import read_json

SIDECAR, FIELDS, TABLE = "fastload.json", "fields.npz", "manifest.csv"
FORMAT, VERSION = "fastload-export", 1

_NO_COLUMNS = ("images", "masks", "split", "key", "digest", "digest_fields", "", ".", "..")


@dataclass(frozen=True)
class _Sidecar:
    """The content of fastload.json, checked against the other files of its tree."""

    where: str  # its path, for messages
    folder: str  # its folder in the tree, "" or ending in `/`
    positions: dict[str, int]  # name -> position of the files of the tree
    values: dict[str, Any] = field(default_factory=dict)  # the JSON object
    rows: tuple[tuple[str, str, str], ...] = ()  # key, image, mask ("" for none); paths relative to folder

    def damaged(self, why: str) -> SourceError:
        return SourceError(f"{self.where}: {why}. Export again, or remove {SIDECAR} to pack what the other files say.")

    def require(self, good: object, why: str) -> None:
        if not good:
            raise self.damaged(why)

    def at(self, part: int) -> list[int]:
        """Returns the position in the tree of each row's image (1) or mask (2), -1 for none."""
        return [self.positions[self.folder + row[part]] if row[part] else -1 for row in self.rows]


def exported_evidence(tree: Tree) -> list[str]:
    """Returns the `fastload.json` of a tree if it fits the other files; else nothing."""
    name = _find(tree)
    return [key_of(name)] if name and not why_ignored(tree) else []


def why_ignored(tree: Tree) -> str:
    """Returns why the `fastload.json` of a tree is ignored; "" if it is used, or if there is none."""
    try:
        if name := _find(tree):
            _read(tree)
    except SourceError as exc:
        # The reason speaks of them.
        folder = name.removesuffix(SIDECAR)
        tree.known[[i for i, at in tree.not_images if at in (name, folder + FIELDS)]] = True
        return str(exc)
    return ""


def list_exported(draft: Draft, tree: Tree, options: SourceOptions) -> Samples:
    """Returns an export: keys, splits, columns with dtype, shape and attributes, masks with classes."""
    sidecar = _read(tree)
    draft.title = f"Layout exported, recognised by {key_of(sidecar.folder + SIDECAR)}."
    columns, splits = _fields(tree, sidecar)
    masks = None if options.masks == "none" else _masks(sidecar)
    samples = Samples.in_tree(tree, sidecar.at(1), splits, columns, masks)
    return replace(samples, keys=[key for key, _, _ in sidecar.rows])


def _find(tree: Tree) -> str:
    """Returns the name of the only fastload.json, at the top or one folder below (archives of a folder); else ""."""
    found = [name for _, name in tree.not_images if split_path(name)[1] == SIDECAR and name.count("/") <= 1]
    return found[0] if len(found) == 1 else ""


def _read(tree: Tree) -> _Sidecar:
    """Returns fastload.json, checked against the other files of the tree and the table."""
    name = _find(tree)
    if not name:
        raise SourceError(f"{tree.given}: no {SIDECAR}, which `fastload export` writes. Give the folder it wrote.")
    positions = {name: i for i, name in enumerate(tree.names)}
    sidecar = _Sidecar(tree.where(positions[name]), name.removesuffix(SIDECAR), positions)
    try:
        values = read_json(tree.read_text(positions[name]))
    except ValueError as exc:
        raise sidecar.damaged(f"it is no JSON ({exc})") from exc
    sidecar.require(
        isinstance(values, dict) and values.get("format") == FORMAT, "it is not what `fastload export` writes"
    )
    if values.get("version") != VERSION:
        raise SourceError(
            f"{sidecar.where}: version {values.get('version')!r:.80}; this release reads {VERSION}. Install the "
            f"release that wrote it ({str(values.get('writer'))[:80]}), or remove {SIDECAR} to pack the images alone."
        )
    rows = values.get("rows")
    sidecar.require(isinstance(rows, list) and rows, "it lists no rows")
    for row in rows:
        good = _are_texts(row) and len(row) == 3
        sidecar.require(good, f"a row is {str(row)[:80]}, not a key, an image and a mask")
        for path in filter(None, row[1:]):
            safe = path[0] != "/" and "\\" not in path and not {"", ".", ".."} & set(path.split("/"))
            sidecar.require(safe, f"{path[:80]!r} would lead out of the folder; refused")
    sidecar = replace(sidecar, values=values, rows=tuple(map(tuple, rows)))
    require_unique([row[0] for row in rows], sidecar.where)
    paths = [path for _, image, mask in sidecar.rows for path in ((image, mask) if mask else (image,))]
    listed = {sidecar.folder + path for path in paths}
    sidecar.require(len(listed) == len(paths), "it lists a file twice")
    absent = sorted((listed | {sidecar.folder + FIELDS}) - sidecar.positions.keys())
    sidecar.require(not absent, f"files it lists are gone ({len(absent)}): {first_few(map(key_of, absent), 3)}")
    others = sorted({*(tree.names[i] for i in tree.images.tolist()), *dict(tree.broken)} - listed)
    shown = first_few(map(key_of, others), 3)
    sidecar.require(not others, f"images were added that it does not list ({len(others)}): {shown}")
    if (table := values.get("manifest")) is not None:
        at = sidecar.positions.get(sidecar.folder + TABLE)
        same = at is not None and xxhash.xxh3_128_hexdigest(tree.read_text(at)) == table
        sidecar.require(same, f"{TABLE} was changed since it was written")
    return sidecar


def _fields(tree: Tree, sidecar: _Sidecar) -> tuple[dict[str, Column], Splits]:
    """Returns the columns, and the split of each row."""
    names, described = sidecar.values.get("split_names"), sidecar.values.get("columns")
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
            f"{where}: damaged, or not the file that {SIDECAR} describes ({why}). Export again, or remove {SIDECAR}."
        ) from exc

    def values_of(name: str, dtype: np.dtype[Any], *shape: int) -> NDArray[Any]:
        wanted = f"{dtype} {(len(sidecar.rows), *shape)}"
        found = f"{arrays[name].dtype} {arrays[name].shape}" if name in arrays else "absent"
        if found != wanted:
            raise SourceError(f"{where}: `{name}` is {found}, {SIDECAR} says {wanted}. Export again, or remove that.")
        return arrays[name].values()

    columns: dict[str, Column] = {}
    for column in described:
        name, shape = column.get("name"), column.get("shape")
        if not isinstance(name, str) or name in columns or name in _NO_COLUMNS or "/" in name:
            raise sidecar.damaged(f"{str(name)[:80]!r} is no name of a column, or occurs twice")
        if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
            raise sidecar.damaged(f"the shape of `{name}` is {str(shape)[:80]}")
        try:
            dtype = np.dtype(str(column.get("dtype")))
        except (TypeError, ValueError, SyntaxError, OverflowError, MemoryError) as exc:
            raise sidecar.damaged(f"the dtype of `{name}` is {str(column.get('dtype'))[:80]}") from exc
        sidecar.require(dtype.kind in "biufS", f"`{name}` is {dtype}, which a packed file never holds")
        values, moves = values_of(name, dtype, *shape), column.get("moves", "")
        last = shape[-1] if shape else 1
        triples = moves == "xyv"
        if moves not in get_args(Moves) or (moves and (dtype.kind not in "iuf" or last % (3 if triples else 2))):
            raise sidecar.damaged(f"`{name}` cannot hold coordinates such as {str(moves)[:80]!r}")
        sidecar.require(moves not in ("xywh", "xyxy") or last == 4, f"`{name}` cannot hold boxes, of {last} numbers")
        columns[name] = Column(values, _attrs(sidecar, column.get("attrs")), moves)
    split = values_of("split", np.dtype(np.uint8))
    highest = int(split.max())
    sidecar.require(highest < len(names), f"a row is of split {highest}, of {len(names)} that have names")
    return columns, Splits(split, tuple(names))


def _masks(sidecar: _Sidecar) -> MaskFiles | None:
    about = sidecar.values.get("masks")
    if about is None:
        return None
    if not isinstance(about, dict) or not _are_texts(about.get("names")):
        raise sidecar.damaged("its description of masks cannot be read")
    ignored = about.get("ignore_index")
    if ignored is not None and (type(ignored) is not int or not 0 <= ignored <= 65_535):
        raise sidecar.damaged(f"ignore_index is {str(ignored)[:80]}, not 0 to 65535")
    sidecar.require(any(mask for _, _, mask in sidecar.rows), "it describes masks and lists none")
    dtype = None if about.get("bits") != 16 else np.dtype(np.uint16)  # also where what was exported is small
    return MaskFiles(sidecar.at(2), tuple(about["names"]), ignored, _attrs(sidecar, about.get("attrs")), dtype)


def _are_texts(values: Any) -> TypeGuard[list[str]]:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _attrs(sidecar: _Sidecar, values: Any) -> dict[str, Any]:
    """Returns checked HDF5 attributes, with lists as tuples."""
    if not isinstance(values, dict):
        raise sidecar.damaged("it holds attributes that cannot be read")
    for name, value in values.items():
        numbers = value if isinstance(value, list) else [value]
        fits = all(isinstance(n, float) or (isinstance(n, int) and -(2**63) <= n < 2**63) for n in numbers)
        if not name or not (isinstance(value, str) or _are_texts(value) or fits):
            raise sidecar.damaged(f"the attribute {name[:80]!r} is neither texts nor numbers")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
