"""The packed file, version 1: its definition, and the reader of its header.

A packed file is a standard HDF5 file (superblock of HDF5 1.10, no user block) that any HDF5 tool opens.
Every dataset stands in the root group and has first dimension N, the number of samples; stores apart, see below.

| dataset | type, shape | storage |
| --- | --- | --- |
| `images` | uint8 or uint16 (N, H, W, C), C = 1, 3 or 4 | chunks (K, H, W, C), see below; absent for tokens alone |
| `masks` | uint8 (N, H, W); attributes `ignore_index`, `names` | chunks (K, H, W), likewise; optional |
| `labels` | int64 (N,), or uint8 (N, A) for attribute vectors of 0 and 1; attribute `names` | contiguous; optional |
| any other | fixed-shape numeric (N, ...): `identity`, `boxes`, `landmarks`, `tokens`, ... | contiguous; optional |
| `split` | uint8 (N,), attribute `names`; each split is one contiguous run of rows | contiguous |
| `key` | fixed-length UTF-8 (N,), the path relative to the source, undecodable bytes as `\\xNN` | contiguous |
| `digest` | uint64 (N,), XXH3-64 of the row's `images` bytes followed by its `masks` bytes | contiguous |
| `digest_fields` | uint64 (N,), XXH3-64 of the row's bytes in all other datasets but `digest`, by name | contiguous |

A label of -1 says that the sample has none. Integers are little-endian. Places in images (`bbox`, `boxes`,
`landmarks`) are pixels of the packed image, x before y, unless an attribute `coordinates` says otherwise; attribute
`names` says what their numbers are. `boxes` (N, M, 4) are filled up with zeros, `box_labels` (N, M) with -1.

Pixel datasets are, on disk, one linear array: allocated early, no fill value written, no filter, shape ==
maxshape, so that HDF5 lays their chunks back to back. The first chunk of `images` begins at byte 4096 whatever N
is, so row i lies at `4096 + i * row_bytes`. Chunks hold K = max(1, min(N, chunk_bytes // row_bytes)) whole rows;
the last one is allocated in full and zero behind row N. With a codec they pass through HDF5's gzip or zstd filter
instead; then rows have no offset, and digests are of their decoded bytes.

Images of several sizes, or kept as JPEG, lie in a byte store, and so do their masks: see `fastload.store`.

Root attributes: `fastload_version` (1), `fastload_writer`, `decoder` (names and versions of what decoded the
pixels), `source_layout`, `pack_options` (JSON; only what shapes bytes), `seed`, `shuffled` (rows were shuffled
within each split), `repacked` (JSON; what was chosen from or joined to a packed file, where that was done), and
`header_digest`: XXH3-128 (hex) over the JSON description of every dataset (shape, dtype, chunks, offset, attributes)
and of the root attributes, then the bytes of `digest` and `digest_fields`. It is the file's identity. There are no
time stamps: the same source and options give the same bytes.

Files of other origin are described in the same terms: a dataset whose rows do not lie back to back has no offset
and is read through h5py. External links and storage, virtual datasets, object types and offsets outside the file
are refused; nothing is ever unpickled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.errors import FormatError, MissingFileError
from fastload.filters import pipeline
from fastload.store import INDEX_DTYPES, Store, index_names

FORMAT_VERSION = 1
IMAGES_OFFSET = 4096
"""Byte at which the first row of `images` lies in every file that fastload writes."""

PIXEL_FIELDS = ("images", "masks")
DIGEST_FIELDS = ("digest", "digest_fields")


@dataclass(frozen=True)
class Field:
    """One dataset of N rows.

    Attributes:
        name: its name in the root group.
        dtype: type of its elements, as stored.
        shape: shape of one row; (H, W, C) for images.
        offset: byte of the file at which row 0 lies when all rows lie back to back in native byte order and
            without a filter; None when HDF5 has to be asked.
        chunks: HDF5 chunk shape, None for contiguous storage.
        filters: names of its HDF5 filters, in order.
        names: class, attribute or split names; empty when the dataset has none.
        attrs: its other attributes as plain Python values.
        store: how its rows lie where they have lengths of their own; dtype and shape are then those of a decoded row,
            with 0 where rows differ, and offset is None.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int | None = None
    chunks: tuple[int, ...] | None = None
    filters: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    attrs: dict[str, Any] = field(default_factory=dict)
    store: Store | None = None

    @property
    def varied(self) -> bool:
        """Whether rows differ in shape."""
        return self.store is not None and 0 in self.shape

    @property
    def row_bytes(self) -> int:
        """Bytes of one row as it is stored; the mean in a store."""
        if self.store is not None:
            return max(1, self.store.num_bytes // self.store.num_rows)
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    @property
    def chunk_rows(self) -> int:
        """Rows in a chunk, on average in a store; 0 for contiguous storage."""
        if self.store is not None:
            return self.store.chunk_rows
        return self.chunks[0] if self.chunks else 0


@dataclass(frozen=True)
class FileIdentity:
    """What the kernel says a file is; it changes when the file is replaced, truncated or written to."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, stat: os.stat_result) -> FileIdentity:
        """The identity in the result of a stat."""
        return cls(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)


@dataclass(frozen=True)
class PackedFile:
    """The header of a file: everything but its rows.

    Attributes:
        path: as given.
        version: format version, None for an HDF5 file that fastload did not write.
        num_rows: N.
        fields: by name: images, masks, labels, then the others by name.
        splits: name -> its contiguous run of rows; empty when the file has no split dataset.
        header_digest: hex; the file's identity for saved states.
        shuffled: rows were shuffled within each split when the file was packed.
        seed: of that shuffle.
        identity: of the file at the time its header was read.
        attrs: root attributes as plain Python values.
    """

    path: Path
    version: int | None
    num_rows: int
    fields: dict[str, Field]
    splits: dict[str, range]
    header_digest: str
    shuffled: bool
    seed: int
    identity: FileIdentity
    attrs: dict[str, Any]


def read_header(path: str | Path) -> PackedFile:
    """The checked header of an HDF5 file; the file is closed again.

    Raises:
        MissingFileError: there is no such file.
        FormatError: not HDF5, truncated, unsafe, of a newer format, or without a readable `images`.
    """
    path = Path(path)
    with open_hdf5(path) as file:
        try:
            return _read_header(path, file)
        except (OSError, RuntimeError, KeyError) as exc:  # h5py, where the checksum of some metadata fails
            raise FormatError(
                f"{path}: its HDF5 metadata is damaged ({exc}). Copy it again, or pack it again."
            ) from exc


def _read_header(path: Path, file: h5py.File) -> PackedFile:
    identity = FileIdentity.of(os.stat(path))
    attrs = {name: plain(value) for name, value in file.attrs.items()}
    version = _version(path, attrs)
    fields = _fields(path, file, packed=version is not None, file_bytes=identity.size)
    num_rows = int(file[_counted(fields)].shape[0])
    splits = _splits(path, file, fields)
    digest = attrs.get("header_digest") if version is not None else None
    return PackedFile(
        path=path,
        version=version,
        num_rows=num_rows,
        fields=fields,
        splits=splits,
        header_digest=str(digest) if digest else header_digest(file),
        shuffled=bool(attrs.get("shuffled", False)),
        seed=int(attrs.get("seed", 0)),
        identity=identity,
        attrs=attrs,
    )


def open_hdf5(path: Path) -> h5py.File:
    """The file opened for reading.

    Raises:
        MissingFileError: there is no such file.
        FormatError: not an HDF5 file, or a truncated one.
    """
    if not path.exists():
        raise MissingFileError(f"{path}: no such file. Make one with `fastload pack SRC {path}`.")
    if path.is_dir():
        raise FormatError(f"{path}: a folder, not a packed file. Pack it first: `fastload pack {path} OUT.h5`.")
    if path.name.endswith(".part"):
        raise FormatError(f"{path}: an unfinished pack. Run the same `fastload pack` command again to complete it.")
    if not path.is_file():
        raise FormatError(f"{path}: a pipe or device, not a file. Name a packed file.")
    try:
        return _open_with_or_without_lock(path)
    except PermissionError as exc:
        raise FormatError(f"{path}: permission denied. Make it readable for this user.") from exc
    except OSError as exc:
        if path.stat().st_size == 0:
            raise FormatError(f"{path}: the file is empty (0 bytes). Pack it again.") from exc
        if "truncated" in str(exc):
            raise FormatError(
                f"{path}: truncated: {path.stat().st_size:,} bytes on disk, fewer than its header promises. "
                f"The copy was probably cut short; copy it again, or pack it again."
            ) from exc
        raise FormatError(
            f"{path}: not an HDF5 file that can be opened ({exc}). Name a file that `fastload pack` made, or another "
            f"HDF5 file."
        ) from exc


def _open_with_or_without_lock(path: Path) -> h5py.File:
    """The file opened with HDF5's lock if possible.

    Locks fail on NFS and Lustre (h5py #1101), and HDF5 refuses to open a file that this process has open in another
    way of locking, so what the user does elsewhere decides which way works.
    """
    for locking in (None, False, True):
        try:
            return h5py.File(path, "r", locking=locking)
        except OSError as exc:
            if "lock" not in str(exc):
                raise
    return h5py.File(path, "r", locking="best-effort")


def header_digest(file: h5py.File) -> str:
    """XXH3-128 in hex over the description of every dataset and attribute, and over both digest arrays."""
    datasets = {
        name: {
            "shape": list(item.shape),
            "dtype": item.dtype.str,
            "chunks": list(item.chunks) if item.chunks else None,
            "offset": linear_offset(item),
            "attrs": {key: plain(value) for key, value in item.attrs.items()},
        }
        for name, item in sorted(file.items())
        if isinstance(item, h5py.Dataset)
    }
    attrs = {key: plain(value) for key, value in file.attrs.items() if key != "header_digest"}
    text = json.dumps({"datasets": datasets, "attrs": attrs}, sort_keys=True, ensure_ascii=True, default=str)
    digest = xxhash.xxh3_128(text.encode())
    for name in DIGEST_FIELDS:
        if name in datasets:
            digest.update(np.ascontiguousarray(file[name][()]).data)
    return digest.hexdigest()


def row_digests(columns: Mapping[str, NDArray[Any]]) -> NDArray[np.uint64]:
    """XXH3-64 of each row's bytes in these arrays, one after another in the order of their names.

    Args:
        columns: arrays (N, ...) of equal N; little-endian, any memory order.

    Returns:
        uint64 (N,).
    """
    parts = [_row_bytes(columns[name]) for name in sorted(columns)]
    rows = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
    return np.fromiter(map(xxhash.xxh3_64_intdigest, rows), dtype=np.uint64, count=len(rows))


def _row_bytes(values: NDArray[Any]) -> NDArray[np.uint8]:
    values = np.ascontiguousarray(values.astype(values.dtype.newbyteorder("<"), copy=False))
    return values.reshape(len(values), -1).view(np.uint8)


def plain(value: Any) -> Any:
    """An HDF5 attribute as str, int, float, bool or a tuple of these."""
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="backslashreplace")
    if isinstance(value, np.ndarray):
        return tuple(plain(item) for item in value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    return value


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


def _fields(path: Path, file: h5py.File, *, packed: bool, file_bytes: int) -> dict[str, Field]:
    """Every readable dataset of the root group; refuses what is unsafe or, in a packed file, out of shape."""
    datasets = {name: item for name in file if (item := _dataset(path, file, name, packed=packed)) is not None}
    if not packed and "images" not in datasets:
        found = ", ".join(datasets) or "nothing"
        raise FormatError(f"{path}: no dataset `images` in its root group (found: {found}). Pack the original files.")
    if not datasets:
        raise FormatError(f"{path}: no dataset in its root group. Packing was probably cut short; pack it again.")
    stores = {name for name in PIXEL_FIELDS if packed and name in datasets and "row_shape" in datasets[name].attrs}
    for name in stores:
        _check_store(path, name, datasets)
    first = datasets["images_offset"] if "images" in stores else datasets.get("images", next(iter(datasets.values())))
    num_rows = int(first.shape[0])
    if num_rows == 0:
        raise FormatError(f"{path}: `{first.name[1:]}` holds no row.")
    for name, item in list(datasets.items()):
        if item.shape[0] == num_rows or name in stores:
            continue
        if packed or name in ("labels", "masks"):
            raise FormatError(
                f"{path}: `{name}` has {item.shape[0]} rows, `{first.name[1:]}` has {num_rows}. The file was changed "
                f"after packing; pack it again."
            )
        del datasets[name]
    if "images" in datasets and "images" not in stores:
        _check_images(path, datasets["images"], packed=packed)
    front = [name for name in ("images", "masks", "labels") if name in datasets]
    order = front + sorted(set(datasets) - set(front))
    return {
        name: _stored(path, name, datasets[name], num_rows, file_bytes=file_bytes)
        if name in stores
        else _field(path, name, datasets[name], file_bytes=file_bytes)
        for name in order
    }


def _counted(fields: Mapping[str, Field]) -> str:
    """The dataset whose first dimension is the number of rows."""
    first = next(iter(fields.values()))
    return f"{first.name}_offset" if first.store is not None else first.name


def _dataset(path: Path, file: h5py.File, name: str, *, packed: bool) -> h5py.Dataset | None:
    link = file.get(name, getlink=True)
    if isinstance(link, h5py.ExternalLink):
        raise FormatError(f"{path}: `{name}` is a link into another file ({link.filename}); refused as unsafe.")
    try:
        item = file[name]
    except KeyError as exc:
        raise FormatError(f"{path}: `{name}` leads nowhere; refused. The file was changed after packing.") from exc
    if Path(item.file.filename) != Path(file.filename):
        raise FormatError(f"{path}: `{name}` leads into another file ({item.file.filename}); refused as unsafe.")
    if not isinstance(item, h5py.Dataset):
        if packed:
            raise FormatError(f"{path}: `{name}` is a group; a packed file has datasets only. Pack it again.")
        return None
    if item.external:
        raise FormatError(
            f"{path}: `{name}` keeps its data in another file ({item.external[0][0]}); refused as unsafe."
        )
    if item.is_virtual:
        raise FormatError(f"{path}: `{name}` is a virtual dataset over other files; refused as unsafe.")
    if item.dtype.kind not in "biufS" or item.shape is None or len(item.shape) == 0:
        if packed:
            raise FormatError(
                f"{path}: `{name}` has type {item.dtype}, which a packed file never holds. Pack it again."
            )
        return None
    return item


def _check_images(path: Path, item: h5py.Dataset, *, packed: bool) -> None:
    ranks = (4,) if packed else (3, 4)
    if item.dtype.type not in (np.uint8, np.uint16) or len(item.shape) not in ranks:
        raise FormatError(
            f"{path}: `images` is {item.dtype} {item.shape}; expected uint8 or uint16 (N, H, W, C). "
            f"Pack the original files."
        )
    if packed and item.shape[3] not in (1, 3, 4):
        raise FormatError(f"{path}: `images` has {item.shape[3]} channels; a packed file has 1, 3 or 4. Pack it again.")


def _check_store(path: Path, name: str, datasets: Mapping[str, h5py.Dataset]) -> None:
    """Refuse a store that is none, or without what tells its rows."""
    store = datasets[name]
    shape = plain(store.attrs["row_shape"])
    rank = 2 if name == "masks" else 3
    fits = isinstance(shape, tuple) and len(shape) == rank and all(isinstance(n, int) and n >= 0 for n in shape)
    fits = fits and (rank == 2 or shape[2] in (1, 3, 4)) and plain(store.attrs.get("row_dtype")) in ("uint8", "uint16")
    if store.dtype != np.uint8 or len(store.shape) != 1 or not fits:
        raise FormatError(
            f"{path}: `{name}` is {store.dtype} {store.shape} with rows {shape!r}, no store of images. The file was "
            f"changed after packing; pack it again."
        )
    for index in index_names(name):
        dtype, row = INDEX_DTYPES[index.removeprefix(f"{name}_")]
        found = datasets.get(index)
        if found is None or found.dtype != np.dtype(dtype) or tuple(found.shape[1:]) != row:
            raise FormatError(
                f"{path}: `{index}`, which tells the rows of `{name}`, is missing or of another type. The file was "
                f"changed after packing; pack it again."
            )


def _stored(path: Path, name: str, item: h5py.Dataset, num_rows: int, *, file_bytes: int) -> Field:
    """The field whose rows lie in a store that `_check_store` accepted."""
    plain_field = _field(path, name, item, file_bytes=file_bytes)
    if plain_field.offset is None or plain_field.chunks is None:
        raise FormatError(
            f"{path}: `{name}` does not lie in one piece. The file was changed after packing; pack it again."
        )
    attrs = dict(plain_field.attrs)
    store = Store(plain_field.offset, int(item.shape[0]), plain_field.chunks[0], num_rows)
    shape, dtype = attrs.pop("row_shape"), np.dtype(attrs.pop("row_dtype")).newbyteorder("<")
    return replace(plain_field, dtype=dtype, shape=tuple(shape), offset=None, attrs=attrs, store=store)


def _field(path: Path, name: str, item: h5py.Dataset, *, file_bytes: int) -> Field:
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
        num_rows = int(item.shape[0])
        end = result.offset + -(-num_rows // (result.chunk_rows or 1)) * (result.chunk_rows or 1) * result.row_bytes
        if end > file_bytes:
            raise FormatError(
                f"{path}: truncated: `{name}` ends at byte {end:,}, the file at {file_bytes:,}. Copy or pack it again."
            )
    return result


def linear_offset(item: h5py.Dataset) -> int | None:
    """Byte at which row 0 lies when all rows lie back to back, ready to be used as they are; else None."""
    if not item.dtype.isnative or item.external or item.is_virtual:
        return None
    if item.chunks is None:
        offset = item.id.get_offset()
        return None if offset is None else int(offset)
    if tuple(item.chunks[1:]) != tuple(item.shape[1:]) or item.id.get_create_plist().get_nfilters():
        return None
    chunk_rows = int(item.chunks[0])
    num_chunks = -(-int(item.shape[0]) // chunk_rows)
    if not num_chunks or item.id.get_num_chunks() != num_chunks:
        return None
    table = np.full(num_chunks, -1, dtype=np.int64)

    def note(chunk: Any) -> None:
        table[chunk.chunk_offset[0] // chunk_rows] = chunk.byte_offset

    item.id.chunk_iter(note)
    chunk_bytes = int(np.prod(item.chunks, dtype=np.int64)) * item.dtype.itemsize
    base = int(table[0])
    return base if np.array_equal(table, base + np.arange(num_chunks) * chunk_bytes) else None


def _splits(path: Path, file: h5py.File, fields: Mapping[str, Field]) -> dict[str, range]:
    if "split" not in fields or fields["split"].shape or not fields["split"].names:
        return {}
    names = fields["split"].names
    values = file["split"][()].astype(np.int64)
    starts = np.concatenate(([0], np.flatnonzero(np.diff(values)) + 1))
    stops = np.append(starts[1:], len(values))
    runs = values[starts]
    if len(set(runs.tolist())) != len(runs) or runs.max() >= len(names):
        raise FormatError(
            f"{path}: `split` is not one contiguous run of rows per split. The file was changed after packing; "
            f"pack it again."
        )
    return {names[run]: range(int(a), int(b)) for run, a, b in zip(runs, starts, stops, strict=True)}
