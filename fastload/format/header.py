"""Reads and checks the header of a packed file, or of any HDF5 file, without its pixels.

Start with `read_header`, which returns a `PackedFile` of `Field`s.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from fastload.errors import FormatError, MissingFileError
from fastload.format.codecs import pipeline
from fastload.format.digests import header_digest, linear_offset, plain
from fastload.format.ragged import INDEX_DTYPES, RaggedExtent, index_names

FORMAT_VERSION = 1
_CHANGED = "The file was changed after packing; pack it again."
IMAGES_OFFSET = 4096
"""Byte at which the first row of `images` lies in every file that fastload writes."""

PIXEL_FIELDS = ("images", "masks")


@dataclass(frozen=True)
class Field:
    """One dataset of N rows, as the header describes it."""

    name: str  # its name in the root group
    dtype: np.dtype[Any]  # type of its elements in the file
    shape: tuple[int, ...]  # shape of one row; (H, W, C) for images
    # Byte of the file at which row 0 begins if all rows lie back to back in native byte order and without a filter;
    # else None: the rows are read through HDF5
    offset: int | None = None
    chunks: tuple[int, ...] | None = None  # HDF5 chunk shape, None for contiguous storage
    filters: tuple[str, ...] = ()  # names of its HDF5 filters, in order
    names: tuple[str, ...] = ()  # class, attribute or split names; empty when the dataset has none
    attrs: dict[str, Any] = field(default_factory=dict)  # its other attributes as plain Python values
    # Extent of its encoded rows if they vary in length; dtype and shape are then those of a decoded row, with 0 where
    # rows differ, and offset is None
    ragged: RaggedExtent | None = None

    @property
    def varied(self) -> bool:
        return self.ragged is not None and 0 in self.shape

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in the file; their mean if it is ragged."""
        if self.ragged is not None:
            return max(1, self.ragged.num_bytes // self.ragged.num_rows)
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    @property
    def chunk_rows(self) -> int:
        """Rows in a chunk, their mean if it is ragged; 0 for contiguous storage."""
        if self.ragged is not None:
            return self.ragged.chunk_rows
        return self.chunks[0] if self.chunks else 0


class FileIdentity(NamedTuple):
    """A file's identity in the kernel; it changes when the file is replaced, truncated or written to."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, stat: os.stat_result) -> FileIdentity:
        return cls(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)


@dataclass(frozen=True)
class PackedFile:
    """The header of a file: everything but its rows."""

    path: Path  # as given
    version: int | None  # format version, None for an HDF5 file that fastload did not write
    num_rows: int  # N
    fields: dict[str, Field]  # by name: images, masks, labels, then the others by name
    splits: dict[str, range]  # name -> its contiguous run of rows; empty when the file has no split dataset
    header_digest: str  # hex; identifies the file's content in saved states
    shuffled: bool  # rows were shuffled within each split when the file was packed
    seed: int  # seed of that shuffle
    identity: FileIdentity  # the file's identity when its header was read
    attrs: dict[str, Any]  # root attributes as plain Python values

    def __hash__(self) -> int:
        return hash((self.path, self.identity))


def read_header(path: str | Path) -> PackedFile:
    """Returns the checked header of an HDF5 file; closes the file again.

    Raises:
        MissingFileError: there is no such file.
        FormatError: not HDF5, truncated, unsafe, of a newer format, or without a readable `images`.
    """
    path = Path(path)
    with open_hdf5(path) as file:
        try:
            identity = FileIdentity.of(os.stat(path))
            attrs = {name: plain(value) for name, value in file.attrs.items()}
            version = _version(path, attrs)
            num_rows, fields = _fields(path, file, packed=version is not None, file_bytes=identity.size)
            digest = attrs.get("header_digest") if version is not None else None
            return PackedFile(
                path=path,
                version=version,
                num_rows=num_rows,
                fields=fields,
                splits=_splits(path, file, fields),
                header_digest=str(digest) if digest else header_digest(file),
                shuffled=bool(attrs.get("shuffled", False)),
                seed=int(attrs.get("seed", 0)),
                identity=identity,
                attrs=attrs,
            )
        except (OSError, RuntimeError, KeyError) as exc:  # h5py, where the checksum of some metadata fails
            raise FormatError(
                f"{path}: its HDF5 metadata is damaged ({exc}). Copy it again, or pack it again."
            ) from exc


def check_header(file: PackedFile, hdf5: h5py.File) -> None:
    """Raises FormatError if names, shapes, attributes or digests of a packed file are not those that were written."""
    if file.version is not None and header_digest(hdf5) != file.attrs.get("header_digest"):
        raise FormatError(
            f"{file.path}: its header (names, attributes, shapes or digests) is not the one that was written: it was "
            f"changed or damaged after packing. Copy the file again, or pack it again."
        )


def open_hdf5(path: Path) -> h5py.File:
    """Opens a file for reading.

    Raises:
        MissingFileError: there is no such file.
        FormatError: not an HDF5 file, or a truncated one.
    """
    if not path.exists():
        if (part := path.with_name(f"{path.name}.part")).exists():
            raise MissingFileError(
                f"{path}: not complete yet, only {part.name} is there. Wait for the command that makes it, or run "
                f"the same one again."
            )
        raise MissingFileError(f"{path}: no such file. Make one with `fastload pack SRC {path}`.")
    if path.is_dir():
        raise FormatError(f"{path}: a folder, not a packed file. Pack it first: `fastload pack {path} OUT.h5`.")
    if path.name.endswith(".part"):
        raise FormatError(f"{path}: an unfinished pack. Run the same `fastload pack` command again to complete it.")
    if not path.is_file():
        raise FormatError(f"{path}: a pipe or device, not a file. Name a packed file.")
    try:
        # Locks fail on NFS and Lustre (h5py #1101), and HDF5 refuses to open a file that this process has already open
        # with another choice of locking; so each choice is tried.
        for locking in (None, False, True):
            try:
                return h5py.File(path, "r", locking=locking)
            except OSError as exc:
                if "lock" not in str(exc):
                    raise
        return h5py.File(path, "r", locking="best-effort")
    except OSError as exc:
        if isinstance(exc, PermissionError):
            what = "permission denied. Make it readable for this user."
        elif path.stat().st_size == 0:
            what = "the file is empty (0 bytes). Pack it again."
        elif "truncated" in str(exc):
            what = (
                f"truncated: {path.stat().st_size:,} bytes on disk, fewer than its header promises. The copy was "
                f"probably cut short; copy it again, or pack it again."
            )
        else:
            what = (
                f"not an HDF5 file that can be opened ({exc}). Name a file that `fastload pack` made, or another "
                f"HDF5 file."
            )
        raise FormatError(f"{path}: {what}") from exc


def _version(path: Path, attrs: Mapping[str, Any]) -> int | None:
    if "fastload_version" not in attrs:
        return None
    version = attrs["fastload_version"]
    if not isinstance(version, int) or version < 1:
        raise FormatError(f"{path}: its fastload_version is {version!r}, which no release wrote. Pack it again.")
    if version > FORMAT_VERSION:
        raise FormatError(
            f"{path}: format version {version}, written by {attrs.get('fastload_writer', 'a newer fastload')}; this "
            f"release reads up to {FORMAT_VERSION}. Install that release or a newer one."
        )
    return version


def _fields(path: Path, file: h5py.File, *, packed: bool, file_bytes: int) -> tuple[int, dict[str, Field]]:
    """Returns N and every readable dataset of the root group; refuses what is unsafe, or wrong in a packed file."""
    datasets = {name: item for name in file if (item := _dataset(path, file, name, packed=packed)) is not None}
    if not packed and "images" not in datasets:
        found = ", ".join(datasets) or "nothing"
        raise FormatError(f"{path}: no dataset `images` in its root group (found: {found}). Pack the original files.")
    if not datasets:
        raise FormatError(f"{path}: no dataset in its root group. Packing was probably cut short; pack it again.")
    ragged = {name for name in PIXEL_FIELDS if packed and name in datasets and "row_shape" in datasets[name].attrs}
    for name in ragged:
        _check_ragged(path, name, datasets)
    first = datasets["images_offset"] if "images" in ragged else datasets.get("images", next(iter(datasets.values())))
    num_rows = int(first.shape[0])
    if num_rows == 0:
        raise _bad(path, first.name[1:], "holds no row.")
    for name, item in list(datasets.items()):
        if item.shape[0] == num_rows or name in ragged:
            continue
        if packed or name in ("labels", "masks"):
            raise _bad(path, name, f"has {item.shape[0]} rows, `{first.name[1:]}` has {num_rows}. {_CHANGED}")
        del datasets[name]
    if "images" in datasets and "images" not in ragged:
        images = datasets["images"]
        if images.dtype.type not in (np.uint8, np.uint16) or len(images.shape) not in ((4,) if packed else (3, 4)):
            wanted = "expected uint8 or uint16 (N, H, W, C). Pack the original files."
            raise _bad(path, "images", f"is {images.dtype} {images.shape}; {wanted}")
        if packed and images.shape[3] not in (1, 3, 4):
            raise _bad(path, "images", f"has {images.shape[3]} channels; a packed file has 1, 3 or 4. Pack it again.")
    order = sorted(datasets, key=lambda name: (name not in PIXEL_FIELDS, name != "labels", name))
    rows_of = dict.fromkeys(ragged, num_rows)
    return num_rows, {name: _field(path, name, datasets[name], file_bytes, rows_of.get(name)) for name in order}


def _dataset(path: Path, file: h5py.File, name: str, *, packed: bool) -> h5py.Dataset | None:
    link = file.get(name, getlink=True)
    if isinstance(link, h5py.ExternalLink):
        raise _bad(path, name, f"is a link into another file ({link.filename}); refused as unsafe.")
    try:
        item = file[name]
    except KeyError as exc:
        raise _bad(path, name, "leads nowhere; refused. The file was changed after packing.") from exc
    if Path(item.file.filename) != Path(file.filename):
        raise _bad(path, name, f"leads into another file ({item.file.filename}); refused as unsafe.")
    unknown = ""
    if not isinstance(item, h5py.Dataset):
        unknown = "is a group; a packed file has datasets only."
    elif item.external:
        raise _bad(path, name, f"keeps its data in another file ({item.external[0][0]}); refused as unsafe.")
    elif item.is_virtual:
        raise _bad(path, name, "is a virtual dataset over other files; refused as unsafe.")
    elif item.dtype.kind not in "biufS" or not item.shape:
        unknown = f"has type {item.dtype}, which a packed file never holds."
    if unknown and packed:
        raise _bad(path, name, f"{unknown} Pack it again.")
    return None if unknown else item


def _bad(path: Path, name: str, what: str) -> FormatError:
    return FormatError(f"{path}: `{name}` {what}")


def _check_ragged(path: Path, name: str, datasets: Mapping[str, h5py.Dataset]) -> None:
    """Raises FormatError for a ragged dataset of the wrong type, or without its index."""
    item = datasets[name]
    shape = plain(item.attrs["row_shape"])
    rank = 2 if name == "masks" else 3
    fits = isinstance(shape, tuple) and len(shape) == rank and all(isinstance(n, int) and n >= 0 for n in shape)
    fits = fits and (rank == 2 or shape[2] in (1, 3, 4)) and plain(item.attrs.get("row_dtype")) in ("uint8", "uint16")
    if item.dtype != np.uint8 or len(item.shape) != 1 or not fits:
        what = f"is {item.dtype} {item.shape} with rows {shape!r}, not images of varying size."
        raise _bad(path, name, f"{what} {_CHANGED}")
    for index in index_names(name):
        dtype, row = INDEX_DTYPES[index.removeprefix(f"{name}_")]
        found = datasets.get(index)
        if found is None or found.dtype != np.dtype(dtype) or tuple(found.shape[1:]) != row:
            what = f"`{index}`, part of the index of `{name}`, is missing or of another type"
            raise FormatError(f"{path}: {what}. {_CHANGED}")


def _field(path: Path, name: str, item: h5py.Dataset, file_bytes: int, ragged_rows: int | None) -> Field:
    """Returns the description of a dataset; `ragged_rows` is N if it is ragged."""
    attrs = {key: plain(value) for key, value in item.attrs.items()}
    names = attrs.pop("names", ())
    result = Field(
        name=name,
        dtype=item.dtype,
        shape=tuple(int(n) for n in item.shape[1:]),
        offset=linear_offset(item),
        chunks=tuple(int(n) for n in item.chunks) if item.chunks else None,
        filters=tuple(one.name for one in pipeline(item)),
        names=names if isinstance(names, tuple) else (names,),
        attrs=attrs,
    )
    if result.offset is not None:
        rows = result.chunk_rows or 1  # chunks are allocated whole
        end = result.offset + -(-int(item.shape[0]) // rows) * rows * result.row_bytes
        if end > file_bytes:
            raise FormatError(
                f"{path}: truncated: `{name}` ends at byte {end:,}, the file at {file_bytes:,}. Copy or pack it again."
            )
    if ragged_rows is None:
        return result
    if result.offset is None or result.chunks is None:
        raise _bad(path, name, f"does not lie in one piece. {_CHANGED}")
    extent = RaggedExtent(result.offset, int(item.shape[0]), result.chunks[0], ragged_rows)
    shape, dtype = tuple(attrs.pop("row_shape")), np.dtype(attrs.pop("row_dtype")).newbyteorder("<")
    return replace(result, dtype=dtype, shape=shape, offset=None, ragged=extent)


def _splits(path: Path, file: h5py.File, fields: Mapping[str, Field]) -> dict[str, range]:
    if "split" not in fields or fields["split"].shape or not fields["split"].names:
        return {}
    names = fields["split"].names
    values = file["split"][()].astype(np.int64)
    starts = np.concatenate(([0], np.flatnonzero(np.diff(values)) + 1))
    stops = np.append(starts[1:], len(values))
    runs = values[starts]
    if len(set(runs.tolist())) != len(runs) or runs.max() >= len(names):
        raise FormatError(f"{path}: `split` is not one contiguous run of rows per split. {_CHANGED}")
    return {names[run]: range(int(a), int(b)) for run, a, b in zip(runs, starts, stops, strict=True)}
