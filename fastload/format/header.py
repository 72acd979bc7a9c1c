"""Reads and checks the header of a packed file, or of any HDF5 file, without its pixels.

Start with `read_header`, which returns a `PackedFile` of `Field`s; `valid` has the checks of a file's attributes.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import h5py
import numpy as np
from numpy.typing import NDArray

from fastload.errors import FileChangedError, FormatError, MissingFileError, SourceError
from fastload.format import valid
from fastload.format.codecs import pipeline
from fastload.format.digests import (
    DIGEST_FIELDS,
    MOST_READ,
    block_digests,
    dtype_of,
    header_digest,
    linear_offset,
    repaired_splits,
)
from fastload.format.ragged import RaggedExtent
from fastload.format.shards import INDEX_AGAIN, Shards, read_shards
from fastload.format.valid import CHANGED, FORMAT_VERSION, bad, open_hdf5
from fastload.system.files import is_below
from fastload.timing.results import NetworkUse

__all__ = ["FORMAT_VERSION", "Field", "FileIdentity", "PackedFile", "open_hdf5", "read_header"]

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
    # Of an index: whether `offset` is None only because the rows lie in several shards, back to back in each
    in_shards: bool = False
    # Of labels that `PackedDataset.only` counts anew: number in the file -> number handed over, ascending; () as stored
    renumbered: tuple[tuple[int, int], ...] = ()
    ragged: RaggedExtent | None = field(default=None, init=False)  # of a `RaggedField`

    @property
    def linear(self) -> bool:
        """Whether all rows, or all rows of a shard, lie back to back in native byte order and without a filter."""
        return self.offset is not None or self.in_shards

    @property
    def chunked(self) -> bool:
        """Whether its rows are read through HDF5, chunk by chunk; else they are bytes at known places of the file."""
        return not self.linear

    @property
    def base(self) -> int:
        """The byte of the file at which its rows begin, unless they are chunked or the file is an index."""
        return self.offset or 0

    @property
    def varied(self) -> bool:
        """Whether its rows differ in shape."""
        return False

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in the file; their mean if it is ragged."""
        return math.prod(self.shape) * self.dtype.itemsize  # Python's integers do not wrap

    @property
    def chunk_rows(self) -> int:
        """Rows in a chunk, their mean if it is ragged; 0 for contiguous storage."""
        return self.chunks[0] if self.chunks else 0

    def empty(self, count: int) -> NDArray[Any]:
        """Returns memory for so many rows of one shape, (count, ...) in native byte order."""
        return np.empty((count, *self.shape), self.dtype.newbyteorder("="))

    def stored_shape(self, num_rows: int) -> tuple[int, ...]:
        """Returns the shape of the array of its rows in the file: bytes (T,) where they vary in length."""
        return (num_rows, *self.shape)

    def bytes_in(self, shards: Shards) -> NDArray[np.int64]:
        """Returns the bytes of its rows in each shard, int64 (S,), decoded if they are chunked."""
        return shards.num_rows * self.row_bytes

    def in_shard(self) -> Field:
        """Returns a file's field as that of an index whose only shard the file is."""
        return replace(self, offset=None, in_shards=self.offset is not None)


@dataclass(frozen=True)
class RaggedField(Field):
    """Images or masks whose rows vary in length, encoded one by one; further datasets are their index.

    Type and shape are of a decoded row, with 0 where rows differ, and `offset` is None.
    """

    ragged: RaggedExtent = field(kw_only=True)
    shard_bytes: tuple[int, ...] = ()  # the bytes of its rows in each shard

    @property
    def chunked(self) -> bool:
        return False

    @property
    def base(self) -> int:
        return self.ragged.base

    @property
    def varied(self) -> bool:
        return 0 in self.shape

    @property
    def row_bytes(self) -> int:
        return max(1, self.ragged.num_bytes // self.ragged.num_rows)

    @property
    def chunk_rows(self) -> int:
        return self.ragged.chunk_rows

    def stored_shape(self, num_rows: int) -> tuple[int, ...]:
        return (self.ragged.num_bytes,)

    def bytes_in(self, shards: Shards) -> NDArray[np.int64]:
        return np.array(self.shard_bytes, np.int64)

    def in_shard(self) -> Field:
        return replace(self, ragged=self.ragged._replace(base=0))


class FileIdentity(NamedTuple):
    """A file's identity in the kernel; it changes when the file is replaced, truncated or written to.

    Whoever writes to a file can set its mtime back, but not its ctime. That changes with names and permissions, too.
    `mtime_ns` is -1 for a sparse file that is filled while it is read: its times mean nothing.
    """

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    def fits(self, found: tuple[int, int, int, int, int]) -> bool:
        """Whether a file of that identity is this one, unchanged."""
        return self == found or (self.mtime_ns < 0 and self[:3] == found[:3])

    @classmethod
    def of(cls, stat: os.stat_result) -> FileIdentity:
        return cls(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


class ShardFiles(Protocol):
    """Where the files of a dataset's shards are."""

    def holding_header(self, shard: int) -> AbstractContextManager[None]:
        """Returns a context within which all of a shard but the chunks of its large fields is in its file."""
        ...

    def path(self, shard: int) -> Path:
        """Returns the file of a shard, which may be missing. FormatError: it may not be read."""
        ...

    def url_of(self, shard: int) -> str:
        """Returns the URL of a shard, without secrets; "" for a file of this machine."""
        ...

    def network_use(self) -> NetworkUse | None:
        """Returns what this process fetched of them so far; None for files of this machine."""
        ...

    def read_anew(self, num_bytes: int) -> None:
        """Has them read as they are at their source, not from a cache, so many bytes at a time."""
        ...

    def close(self) -> None:
        """Ends what fetches them; nothing that was fetched can be read afterwards."""
        ...


class LocalShards:
    """The shards of an index that are files of this machine, all of them there."""

    def __init__(self, index: PackedFile) -> None:
        self._index = index

    def holding_header(self, shard: int) -> AbstractContextManager[None]:
        return nullcontext()

    def path(self, shard: int) -> Path:
        name, folder = self._index.shards.names[shard], self._index.path.absolute().parent
        if not is_below(path := folder / name, folder):
            raise FormatError(
                f"{self._index.path}: its shard {name} is a link that leaves the folder; refused as unsafe."
            )
        return path

    def url_of(self, shard: int) -> str:
        return ""

    def network_use(self) -> None:
        return None

    def read_anew(self, num_bytes: int) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class PackedFile:
    """The header of a file: everything but its rows."""

    path: Path
    version: int | None  # format version, None for an HDF5 file that fastload did not write
    num_rows: int  # N
    fields: dict[str, Field]  # by name: images, masks, labels, then the others by name
    splits: dict[str, range]  # name -> its contiguous run of rows; empty when the file has no split dataset
    header_digest: str  # hex; identifies the file's content in saved states
    shuffled: bool  # rows were shuffled within each split when the file was packed
    seed: int  # seed of that shuffle
    identity: FileIdentity  # the file's identity when its header was read
    attrs: dict[str, Any]  # root attributes as plain Python values
    # The files that hold its rows: itself alone, or those that an index names
    shards: Shards = field(compare=False, repr=False)
    # Names in a file of another program that are no field: groups, texts of any length, other numbers of rows
    left_out: tuple[str, ...] = ()
    remote: ShardFiles | None = None  # where its rows are fetched from; None: they are in its files
    url: str = ""  # that it or its rows are fetched from, without secrets; "" for a file of this machine
    given: str = ""  # the path as the user wrote it; empty: `path`
    listed: tuple[str, ...] = ()  # of an index that was made when it was opened: its files or URLs, as they were given
    # Of each dataset of digests, what `block_digests` says of it, if they were compared with `header_digest`
    digests: dict[str, NDArray[np.uint64]] | None = field(default=None, compare=False, repr=False)

    @property
    def name(self) -> str:
        """Its name in messages: its path as given, or the URL that it is read from."""
        return self.url or self.given or str(self.path)

    def __hash__(self) -> int:
        return hash((self.path, self.identity))

    @property
    def is_index(self) -> bool:
        """Whether other files hold its rows; a file that holds them itself is its only shard."""
        return self.path.name not in self.shards.names

    @property
    def ragged(self) -> dict[str, RaggedField]:
        """The fields whose rows vary in length, by name."""
        return {name: field for name, field in self.fields.items() if isinstance(field, RaggedField)}

    @property
    def holds_rows(self) -> bool:
        """Whether the file itself holds its rows, and all of them are there: it is no index and not remote."""
        return self.remote is None and not self.is_index

    @property
    def place(self) -> Path:
        """A file of this machine that says on which file system its rows are."""
        return self.files[0] if self.listed and self.remote is None else self.path

    @property
    def shard_files(self) -> ShardFiles:
        """Where the files of its shards are."""
        return self.remote or LocalShards(self)

    @property
    def files(self) -> list[Path]:
        """The files that hold its rows: itself, or its shards."""
        return [self.path.parent / name for name in self.shards.names]


def read_header(path: str | os.PathLike[str]) -> PackedFile:
    """Returns the checked header of an HDF5 file; closes the file again.

    Raises:
        MissingFileError: there is no such file.
        FormatError: not HDF5, truncated, unsafe, of a newer format, or without a readable `images`.
    """
    path = Path(path)
    with open_hdf5(path) as file:
        # Of the open file: the path may lead to another one by now.
        is_real = file.driver == "sec2"
        identity = FileIdentity.of(os.stat(file.id.get_vfd_handle() if is_real else path))
        if "fastload_index" in file.attrs:
            return _index_header(path, file, identity)
        version, attrs = valid.root_attributes(path, file)
        packed = version is not None
        num_rows, fields = _fields(path, file, packed=packed, file_bytes=identity.size)
        splits: dict[str, range] = {}
        if "split" in fields and not fields["split"].shape and fields["split"].names:
            names, values = fields["split"].names, file["split"][()]
            if packed and "digest_fields" in fields:
                columns = {name: file[name] for name in fields if name not in (*PIXEL_FIELDS, *DIGEST_FIELDS)}
                values = repaired_splits(columns, file["digest_fields"], len(names))
            splits = valid.splits(path, values, names, packed=packed)
        digest = (attrs.get("header_digest") if packed else None) or header_digest(file)
        main = fields.get("images", next(iter(fields.values())))
        return PackedFile(
            path=path,
            version=version,
            num_rows=num_rows,
            fields=fields,
            splits=splits,
            header_digest=digest,
            shuffled=packed and bool(attrs.get("shuffled", False)),
            seed=attrs.get("seed", 0) if packed else 0,
            identity=identity,
            attrs=attrs,
            shards=Shards.of_file(path.name, digest, num_rows, identity.size, main.offset, main.chunk_rows),
            left_out=tuple(str(name) for name in islice(file, MOST_READ // 2) if name not in fields),
        )


def _index_header(path: Path, file: h5py.File, identity: FileIdentity) -> PackedFile:
    """Returns the header of an index, from its groups: its virtual datasets are for other programs."""
    version, attrs = valid.root_attributes(path, file)
    shards, described = read_shards(path, file)
    num_rows = int(shards.rows.sum())
    try:
        fields = {name: field_of_index(name, said, num_rows) for name, said in described.items()}
        stops = np.cumsum(attrs["split_rows"]).tolist()
        runs = zip(attrs["split_names"], [0, *stops[:-1]], stops, strict=True)
        splits = {str(name): range(start, stop) for name, start, stop in runs}
        if version is None or stops[-1:] != [num_rows]:
            raise ValueError("its splits are not all of its rows")
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise FormatError(f"{path}: its fields or splits cannot be read ({exc}). {INDEX_AGAIN}") from exc
    return PackedFile(
        path=path,
        version=version,
        num_rows=num_rows,
        fields=fields,
        splits=splits,
        header_digest=str(attrs["header_digest"]),
        shuffled=bool(attrs.get("shuffled", False)),
        seed=attrs.get("seed", 0),
        identity=identity,
        attrs=attrs,
        shards=shards,
    )


def field_of_index(name: str, said: dict[str, Any], num_rows: int) -> Field:
    """Returns a field of an index of so many rows, from its description in `shards/fields`."""
    shape, chunk_rows, ragged = tuple(map(int, said["shape"])), int(said["chunk_rows"]), said["ragged"]
    same: dict[str, Any] = {
        "name": name,
        "dtype": np.dtype(said["dtype"]),
        "shape": shape,
        "filters": tuple(map(str, said["filters"])),
        "names": tuple(map(str, said["names"])),
        "attrs": {key: tuple(value) if isinstance(value, list) else value for key, value in said["attrs"].items()},
    }
    if not ragged:
        return Field(**same, chunks=(chunk_rows, *shape) if chunk_rows else None, in_shards=bool(said["linear"]))
    of_shards = tuple(map(int, ragged["shard_bytes"]))
    extent = RaggedExtent(0, sum(of_shards), int(ragged["chunk_bytes"]), num_rows, chunk_rows)
    return RaggedField(**same, ragged=extent, shard_bytes=of_shards)


def read_shard(index: PackedFile, number: int) -> PackedFile:
    """Returns the header of a shard, read once as long as the file stays the same; of a file of its own that itself.

    Raises:
        MissingFileError, FormatError: it is missing, cannot be read, or leads out of the index's folder.
        FileChangedError: it is not the file that the index was made of.
    """
    if index.holds_rows:
        return index
    known = _shard_headers.setdefault(index, {})
    if (found := known.get(number)) is not None:
        with suppress(OSError, FormatError):
            if found.path == index.shard_files.path(number) and found.identity.fits(
                FileIdentity.of(os.stat(found.path))
            ):
                return found
    if len(known) >= _MOST_HEADERS:
        known.clear()
    found = known[number] = _read_shard(index, number)
    return found


_MOST_SPLITS = 256


def join_split_names(of_files: Sequence[tuple[Path, Collection[str]]]) -> tuple[str, ...]:
    """Returns the names of the splits of several files as one dataset, as they first appear.

    SourceError: some have splits and others none, whose rows would be a split "all" that is not all of them; or there
    are more than a file can hold.
    """
    names = tuple(dict.fromkeys(name for _, of_file in of_files for name in of_file))
    without = [path for path, of_file in of_files if set(of_file) <= {"all"}]
    others = [path for path, of_file in of_files if not set(of_file) <= {"all"}]
    if without and others:
        known = ", ".join(name for name in names if name != "all")
        raise SourceError(
            f"{without[0]}: has no splits, and {others[0]} has some ({known}). Together its rows would be in none of "
            f"those, but in a split 'all' that is not all. Pack its images again from folders named after splits, such "
            f"as train/ and val/."
        )
    if len(names) > _MOST_SPLITS:
        files = " and ".join(str(path) for path, _ in of_files)
        raise SourceError(f"{files}: {len(names)} different splits, more than the {_MOST_SPLITS} a file can hold.")
    return names


_MOST_HEADERS = 4096  # of shards of one index
_shard_headers: weakref.WeakKeyDictionary[PackedFile, dict[int, PackedFile]] = weakref.WeakKeyDictionary()


def _read_shard(index: PackedFile, number: int) -> PackedFile:
    shards, files = index.shards, index.shard_files
    name = shards.names[number]
    url = files.url_of(number)
    try:
        with files.holding_header(number):
            found = read_header(files.path(number))
    except MissingFileError as exc:
        if url:
            raise
        raise MissingFileError(
            f"{index.name}: its shard {name} is missing. Copy it there, or make the index of the shards that are there."
        ) from exc
    then = (int(shards.num_rows[number]), int(shards.num_bytes[number]), shards.digests[number])
    if (found.num_rows, found.identity.size, found.header_digest) != then:
        raise FileChangedError(
            f"{index.name}: its shard {name} is not the file that the index was made of: {then[0]:,} rows, {then[1]:,} "
            f"bytes and the digest {then[2]} then, {found.num_rows:,}, {found.identity.size:,} and "
            f"{found.header_digest} now. Copy the right one there, or make the index again: `fastload index`."
        )
    if url:
        return replace(found, identity=found.identity._replace(mtime_ns=-1), url=url)
    return found


def require_digests(file: PackedFile) -> None:
    """Raises FormatError if a packed file lacks the digests of its rows."""
    # Any other missing dataset changes the header digest. A file without images has row digests too.
    found = {name: (field.dtype, field.shape) for name, field in file.fields.items()}
    if wrong := [name for name in DIGEST_FIELDS if found.get(name) != (np.dtype(np.uint64), ())]:
        raise FormatError(
            f"{file.name}: its digests cannot be read (missing or of another type: {', '.join(wrong)}). {CHANGED}"
        )


def check_header(file: PackedFile, hdf5: h5py.File) -> dict[str, NDArray[np.uint64]]:
    """Raises FormatError if names, shapes, attributes or digests of a packed file are not those that were written.

    Returns the digests of its rows that were compared, (N,) each, by their dataset; none of another program's file.
    """
    digests: dict[str, NDArray[np.uint64]] = {}
    if file.version is None:
        return digests
    require_digests(file)
    if header_digest(hdf5, digests) != file.attrs.get("header_digest"):
        raise FormatError(
            f"{file.name}: its header (names, attributes, shapes or digests) is not as it was written: it was "
            f"changed or damaged after packing. Copy the file again, or pack it again."
        )
    return digests


def with_digests(file: PackedFile) -> PackedFile:
    """Returns the header of a packed file with `digests`; raises FormatError as `check_header`."""
    with open_hdf5(file.path) as hdf5:
        return replace(file, digests=by_block(check_header(file, hdf5)))


def by_block(digests: Mapping[str, NDArray[np.uint64]]) -> dict[str, NDArray[np.uint64]]:
    """Returns what `PackedFile.digests` keeps of the digests of rows."""
    return {name: block_digests(values) for name, values in digests.items()}


def _fields(path: Path, file: h5py.File, *, packed: bool, file_bytes: int) -> tuple[int, dict[str, Field]]:
    """Returns N and every readable dataset of the root group; refuses what is unsafe, or wrong in a packed file."""
    if packed and len(file) > MOST_READ:
        raise FormatError(f"{path}: holds {len(file):,} datasets, far more than any release writes. {CHANGED}")
    # Of many in a file of another program those that mean something, and the first ones; half, since packing adds some.
    known = [name for name in (*PIXEL_FIELDS, "labels", "split", "key") if name in file]
    looked_at = dict.fromkeys([*islice(file, MOST_READ if packed else MOST_READ // 2), *known])
    datasets = {name: item for name in looked_at if (item := _dataset(path, file, name, packed=packed)) is not None}
    if not packed and "images" not in datasets:
        found = ", ".join(datasets) or "nothing"
        raise FormatError(f"{path}: no dataset `images` in its root group (found: {found}). Pack the original files.")
    if not datasets:
        raise FormatError(f"{path}: no dataset in its root group. Packing was probably cut short; pack it again.")
    ragged = {name for name in PIXEL_FIELDS if packed and name in datasets and "row_shape" in datasets[name].attrs}
    for name in ragged:
        valid.check_ragged(path, name, datasets)
    first = datasets["images_offset"] if "images" in ragged else datasets.get("images", next(iter(datasets.values())))
    num_rows = int(first.shape[0])
    if num_rows == 0:
        raise bad(path, first.name[1:], "holds no row.")
    for name, item in list(datasets.items()):
        if item.shape[0] == num_rows or name in ragged:
            continue
        if packed or name in ("labels", "masks"):
            advice = CHANGED if packed else "Give each image one."
            raise bad(path, name, f"has {item.shape[0]} rows, `{first.name[1:]}` has {num_rows}. {advice}")
        del datasets[name]
    if "images" in datasets and "images" not in ragged:
        valid.check_images(path, datasets["images"], packed=packed)
    if packed and "masks" in datasets and "masks" not in ragged:
        valid.check_masks(path, datasets["masks"])
    order = sorted(datasets, key=lambda name: (name not in PIXEL_FIELDS, name != "labels", name))
    rows_of = dict.fromkeys(ragged, num_rows)
    if packed and "key" in datasets and (datasets["key"].dtype.kind != "S" or len(datasets["key"].shape) != 1):
        raise bad(path, "key", f"is {datasets['key'].dtype} {datasets['key'].shape}, not text. {CHANGED}")
    for name in order:
        valid.check_stored(path, name, datasets[name], file_bytes, pixels=name in PIXEL_FIELDS)
    return num_rows, {name: _field(path, name, datasets[name], packed, file_bytes, rows_of.get(name)) for name in order}


def _dataset(path: Path, file: h5py.File, name: str | bytes, *, packed: bool) -> h5py.Dataset | None:
    if not isinstance(name, str):  # h5py returns bytes where they are not UTF-8
        if packed:
            raise FormatError(f"{path}: has a dataset of the name {name!r}, which no release writes. {CHANGED}")
        return None
    link = file.get(name, getlink=True)
    if isinstance(link, h5py.ExternalLink):
        raise bad(path, name, f"is a link into another file ({link.filename}); refused as unsafe.")
    try:
        item = file[name]
    except KeyError as exc:
        raise bad(path, name, f"cannot be opened: its header is damaged, or a link to nothing. {CHANGED}") from exc
    if Path(item.file.filename) != Path(file.filename):
        raise bad(path, name, f"leads into another file ({item.file.filename}); refused as unsafe.")
    unknown = ""
    if not isinstance(item, h5py.Dataset):
        unknown = "is a group; a packed file has datasets only."
    elif item.external:
        raise bad(path, name, f"keeps its data in another file ({item.external[0][0]}); refused as unsafe.")
    elif item.is_virtual:
        raise bad(path, name, "is a virtual dataset over other files; refused as unsafe.")
    elif (dtype := dtype_of(item)) is None or dtype.kind not in "biufS" or not item.shape:
        unknown = f"has type {dtype or 'unknown to NumPy'}, which a packed file never holds."
    if unknown and packed:
        raise bad(path, name, f"{unknown} Pack it again.")
    return None if unknown else item


def _field(path: Path, name: str, item: h5py.Dataset, packed: bool, file_bytes: int, ragged_rows: int | None) -> Field:
    """Returns the description of a dataset; `ragged_rows` is N if it is ragged."""
    names, attrs = valid.field_attributes(path, item, name, packed=packed)
    same: dict[str, Any] = {
        "name": name,
        "chunks": tuple(int(n) for n in item.chunks) if item.chunks else None,
        "filters": tuple(one.name for one in pipeline(item)),
        "names": names,
        "attrs": attrs,
    }
    shape = tuple(int(n) for n in item.shape[1:])
    result = Field(dtype=item.dtype, shape=shape, offset=linear_offset(item), **same)
    if result.offset is not None:
        rows = result.chunk_rows or 1  # chunks are allocated whole
        end = result.offset + -(-int(item.shape[0]) // rows) * rows * result.row_bytes
        if end > file_bytes:
            raise valid.cut_off(path, name, end, file_bytes)
    if ragged_rows is None:
        return result
    if result.offset is None or result.chunks is None:
        raise bad(path, name, f"does not lie in one piece. {CHANGED}")
    extent = RaggedExtent(result.offset, int(item.shape[0]), result.chunks[0], ragged_rows)
    shape, dtype = tuple(attrs.pop("row_shape")), np.dtype(attrs.pop("row_dtype")).newbyteorder("<")
    return RaggedField(dtype=dtype, shape=shape, ragged=extent, shard_bytes=(extent.num_bytes,), **same)
