"""The files of a Parquet or Arrow dataset: a Shard is one of them, with the bytes of its images; ArrowTable joins them.

The images of Parquet files are unpacked to a temporary file in one pass: reading a single image costs its whole row
group (100 rows of 40 kB: 7 ms an image, 0.7 ms in a pass), and packing reads rows in shuffled order. Arrow files hold
the bytes uncompressed, so their images are read in place.
"""

from __future__ import annotations

import errno
import json
import os
import re
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from fastload.errors import FastloadError, SourceError
from fastload.remote.paths import ObjectPath, remote_in_force
from fastload.remote.ranges import open_binary
from fastload.sources.listing import first_few
from fastload.sources.spans import FileSpans, ListedFile
from fastload.sources.tables.frame import LABELS, plain_name
from fastload.sources.tables.read_table import (
    Values,
    fixed_lists,
    is_list,
    nothing,
    other,
    require_pyarrow,
    values_of,
)
from fastload.sources.tree import key_of
from fastload.system.files import write_all

_LFS = b"version https://git-lfs"
_PARTITION = re.compile(r"(?:^|(?<=/))([^/=]+)=([^/]*)(?=/)")  # a folder as Hive, Spark and pyarrow write them
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
_BATCH_BYTES = 2**25
_LIST_BYTES = 2**20  # bytes of a column that are read ahead


class Shard:
    """One file of the dataset. It is opened anew for each use: there may be thousands, and often only 1024 may be open.

    Attributes:
        path: the file.
        parquet: whether it is Parquet, else Arrow.
        schema: its pyarrow schema.
        num_rows: number of its rows.
        images: the columns that hold images, by what `datasets` wrote into the schema, else by their types.
        classes: column -> names of its classes, as `datasets` wrote them into the schema.
    """

    def __init__(self, path: Path) -> None:
        """Reads the schema; raises if pyarrow is not installed (MissingExtraError) or the file is damaged."""
        require_pyarrow(path)
        import pyarrow.parquet as pq

        self.path = path
        self.parquet = path.suffix.lower() == ".parquet"
        with translate_errors(path):
            if self.parquet:
                with pq.ParquetFile(self._source()) as file:
                    self.schema, self._meta = file.schema_arrow, file.metadata
                    self.num_rows = self._meta.num_rows
            else:
                table, _ = self._mapped()
                self.schema, self.num_rows = table.schema, table.num_rows
        self.images, self.classes = _features_of(self.schema)
        if self.num_rows < 0:
            raise SourceError(f"{path} is damaged: it promises {self.num_rows} rows. Fetch it again.")

    def column(self, name: str) -> Any:
        """Returns one column as a pyarrow ChunkedArray."""
        with translate_errors(self.path):
            if not self.parquet:
                return self._mapped(name)[0]
            with self._file() as file:
                column = file.read(columns=[name]).column(0)
            column.validate()
        self.check(len(column))
        return column

    def check(self, rows: int) -> None:
        """Refuses a file that holds another number of rows than it states."""
        if rows != self.num_rows:
            raise SourceError(
                f"{self.path} is damaged: it promises {self.num_rows} rows and holds {rows}. Fetch it again."
            )

    def num_bytes(self) -> int:
        """Returns the bytes of all columns of a Parquet file when unpacked, an upper bound for the images' bytes."""
        with translate_errors(self.path):
            meta = self._meta
            # Not by column: there pyarrow 26 aborts the process if statistics are damaged.
            return sum(meta.row_group(group).total_byte_size for group in range(meta.num_row_groups))

    def batches(self, name: str) -> Iterator[tuple[Any, int]]:
        """Yields one column in arrays of some 32 MB, each with the address of the file's mapping (Parquet: 0)."""
        if not self.parquet:
            column, address = self._mapped(name)
            yield from ((chunk, address) for chunk in column.chunks)
            return
        rows = max(1, min(1024, _BATCH_BYTES * self.num_rows // max(1, self.num_bytes())))
        with translate_errors(self.path):
            file = self._file()
        with file:
            batches = file.iter_batches(batch_size=rows, columns=[name], use_threads=False)
            while True:
                with translate_errors(self.path):
                    batch = next(batches, None)
                if batch is None:
                    return
                yield batch.column(0), 0

    def spans(self, offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> FileSpans:
        """Returns the reader of pieces of an Arrow file at these offsets."""
        return FileSpans(ListedFile.of(self.path), offsets, sizes)

    def _source(self) -> Any:
        """Returns what pyarrow opens: the path, or an object as a file."""
        return open_binary(self.path) if isinstance(self.path, ObjectPath) else self.path

    def _file(self) -> Any:
        import pyarrow.parquet as pq

        # Buffered, not read ahead: a row group may be larger than the memory.
        return pq.ParquetFile(self._source(), metadata=self._meta, pre_buffer=False, buffer_size=_LIST_BYTES)

    def _mapped(self, name: str = "") -> tuple[Any, int]:
        """Returns the table of an Arrow file, or a column of it, and the address of the mapping, which it keeps."""
        import pyarrow as pa

        if isinstance(self.path, ObjectPath):
            raise SourceError(
                f"{self.path}: Arrow files are mapped into memory, which one behind a URL cannot be. Copy it here, or "
                "save the dataset as Parquet (`to_parquet`)."
            )
        with translate_errors(self.path), pa.memory_map(os.fspath(self.path)) as file:
            address = int(file.read_buffer(1).address)
            file.seek(0)
            found = pa.ipc.open_stream(file).read_all()
            if name:
                found = found.column(name)
                found.validate(full=True)  # the offsets in a mapped file are unchecked
            return found, address


def _features_of(schema: Any) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """Returns the columns of images and, by column, names of classes; a struct of bytes and path is an image too."""
    try:
        described = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, ValueError, TypeError, RecursionError):
        described = {}
    images, classes = [], {}
    for field in schema:
        feature = described.get(field.name) if isinstance(described, dict) else None
        said = feature.get("_type", "") if isinstance(feature, dict) else ""
        kind = field.type
        if said == "Image" or (holds_bytes(kind) and said in ("", "Value")):  # not Audio, Video or Pdf
            images.append(field.name)
        while isinstance(feature, dict) and "feature" in feature:
            feature = feature["feature"]
        if isinstance(feature, list) and len(feature) == 1:
            feature = feature[0]
        inner = [feature]
        if isinstance(feature, dict) and "_type" not in feature:  # objects with boxes: the classes are inside
            inner = [value.get("feature", value) for value in feature.values() if isinstance(value, dict)]
        named = [one for one in inner if isinstance(one, dict) and isinstance(one.get("names"), list)]
        if named and named[0].get("_type") == "ClassLabel":
            classes[field.name] = tuple(map(str, named[0]["names"]))
    return tuple(images), classes


_FIELDS = ("bytes", "data", "content", "image", "jpg", "jpeg", "png")
_HASH_BYTES = 64  # bytes of a fixed number up to which they are a hash or an id


def holds_bytes(kind: Any) -> bool:
    """Whether cells of a type are bytes, or a struct with a field of bytes, as images are stored."""
    import pyarrow as pa

    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if pa.types.is_struct(kind):
        return bool(bytes_field(kind))
    if pa.types.is_fixed_size_binary(kind):
        return bool(kind.byte_width > _HASH_BYTES)
    return any(fits(kind) for fits in (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view))


def bytes_field(kind: Any) -> str:
    """Returns the field of a struct that holds the bytes of images; "" if there is none. It may be null throughout."""
    fields = {kind.field(i).name: kind.field(i).type for i in range(kind.num_fields)}
    if {"bytes", "path"} <= fields.keys():
        return "bytes"
    return next((name for name in _FIELDS if name in fields and holds_bytes(fields[name])), "")


@contextmanager
def translate_errors(path: Path) -> Iterator[None]:
    """Turns errors of pyarrow into a SourceError that names the file."""
    import pyarrow as pa

    try:
        yield
    except FastloadError:
        raise
    except (pa.ArrowException, OSError, ValueError) as exc:  # ValueError: the schema holds text that is not UTF-8
        if isinstance(exc, OSError) and exc.errno in (errno.EMFILE, errno.ENFILE):
            raise SourceError(
                f"{path} cannot be opened: too many files are open. Allow more with `ulimit -n`, or close some."
            ) from exc
        fix = "It is damaged or cut short; fetch it again."
        with suppress(OSError, ValueError):
            if not isinstance(path, ObjectPath) and _begins(path, _LFS):
                fix = "It is a pointer of Git LFS, without the data: fetch these with `git lfs pull`."
        raise SourceError(f"{path} cannot be read: {str(exc).splitlines()[0].rstrip('.')}. {fix}") from exc


def _begins(path: Path, sign: bytes) -> bool:
    with open(path, "rb") as file:
        return file.read(len(sign)) == sign


class UnpackedImages:
    """A temporary file that images are unpacked to. It has no name, so it vanishes however the process ends.

    Other processes open it through /proc. On systems without /proc it has a name, and is removed with this object.
    """

    def __init__(self, num_bytes: int, dataset_folder: Path) -> None:
        """Creates the file in the first folder with room for it; the last that is tried is the dataset's."""
        last = remote_in_force().cache_folder() if isinstance(dataset_folder, ObjectPath) else dataset_folder
        folders = [os.environ.get("TMPDIR", ""), "/var/tmp", tempfile.gettempdir(), str(last)]
        folder = next((folder for folder in folders if folder and _has_room(folder, num_bytes)), None)
        if folder is None:
            raise SourceError(
                f"{dataset_folder}: its images are unpacked to a temporary file of {num_bytes / 1e9:.2f} GB first, for "
                f"which there is no room in {', '.join(dict.fromkeys(filter(None, folders)))}. Name a folder with room "
                "in the environment variable TMPDIR."
            )
        self._fd, self._path = tempfile.mkstemp(prefix="fastload-", dir=folder)
        self._end = 0
        if os.path.isdir("/proc/self/fd"):
            os.unlink(self._path)
            self._path = f"/proc/{os.getpid()}/fd/{self._fd}"
        weakref.finalize(self, _let_go, self._fd, self._path, os.getpid())

    def write(self, data: memoryview) -> int:
        """Appends data, and returns the offset at which it begins."""
        start = self._end
        try:
            write_all(self._fd, data)
        except OSError as exc:
            raise SourceError(
                f"the temporary file for its images cannot be written: {exc.strerror}. Name a folder with room in the "
                "environment variable TMPDIR."
            ) from exc
        self._end += len(data)
        return start

    def spans(self, offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> FileSpans:
        """Returns the reader of written pieces. Nothing may be written afterwards."""
        return FileSpans(ListedFile.of(self._path, os.fstat(self._fd)), offsets, sizes, self)


def _let_go(fd: int, path: str, pid: int) -> None:
    os.close(fd)
    if not path.startswith("/proc/") and os.getpid() == pid:  # not in a child that was forked
        os.unlink(path)


def _has_room(folder: str, num_bytes: int) -> bool:
    try:
        status = os.statvfs(folder)
        return os.access(folder, os.W_OK) and status.f_bavail * status.f_frsize > num_bytes + 2**26
    except OSError:
        return False


class ArrowTable:
    """The rows of all Parquet or Arrow files of a dataset, one file behind the other; see `tables.frame.CellTable`.

    Attributes:
        shards: the files, whose paths in the tree are `files`.
        names: the columns that all files have with one type, and columns by the names of folders; `images`: which of
            them hold images; `lists`: which have lists as cells.
        folders: column -> value in each row, by the names of folders that partition a dataset: `label=cat/0.parquet`.
        classes: column -> names of its classes, of all files; `renumbered` are the columns whose classes differ.
        shard_of: int64 (R,), the file that each row belongs to.
    """

    def __init__(self, shards: list[Shard], files: list[str], first: Callable[[str], bool]) -> None:
        """Joins files. If they number their classes differently, the numbers of those that `first` chooses are kept."""
        import pyarrow as pa

        self.shards, self.files = shards, files
        counts = [shard.num_rows for shard in shards]
        self.shard_of = np.repeat(np.arange(len(shards)), counts)
        self._row_of = np.concatenate([np.arange(count) for count in counts])
        images: dict[str, None] = {}
        self.classes: dict[str, tuple[str, ...]] = {}
        differ: dict[str, None] = {}
        for i in sorted(range(len(shards)), key=lambda i: not first(files[i])):
            images |= dict.fromkeys(shards[i].images)
            for name, names in shards[i].classes.items() if counts[i] else ():
                before = self.classes.setdefault(name, names)
                if before != names:
                    # New names are appended: a longer list that begins like the known one keeps its numbers.
                    self.classes[name] = (*before, *[one for one in names if one not in before])
                    differ[name] = None
        self.images, self.renumbered = list(images), list(differ)
        known: dict[str, tuple[Any, str]] = {}  # the type of each column, and the first file that has it
        for shard, file in zip(shards, files, strict=True):
            for field in shard.schema:
                kind, first_file = known.setdefault(field.name, (field.type, file))
                if pa.types.is_null(kind):  # fits any
                    known[field.name] = (field.type, file)
                elif field.type != kind and not pa.types.is_null(field.type):
                    raise SourceError(
                        f"{shard.path}: column {field.name!r} is {field.type}, but {kind} in {key_of(first_file)}. "
                        "Give the files of one dataset (one configuration of it)."
                    )
        self.folders = self._columns_by_folders(known)
        self.names = [*known, *self.folders]
        self.lists = {name for name, (kind, _) in known.items() if is_list(kind)}

    def _columns_by_folders(self, known: Collection[str]) -> dict[str, Values]:
        """Returns the columns that every file has by its folders and none inside, with the values of all rows."""
        said = [dict(_PARTITION.findall(file)) for file in self.files]
        names = [name for name in said[0] if name not in known and all(name in one for one in said)]
        found = {}
        for name in names:
            cells = [None if one[name] == _NO_VALUE else unquote(one[name]) for one in said]
            found[unquote(name)] = values_of([cells[i] for i in self.shard_of.tolist()])
        return found

    @property
    def where(self) -> str:
        return str(self.shards[0].path)

    def location(self, row: int) -> str:
        """Returns the number of a row in its file, and the file, for messages."""
        return f"row {self._row_of[row]} of {key_of(self.files[self.shard_of[row]])}"

    def texts(self, name: str) -> list[str]:
        """Returns the cells of a column as text; "" for missing ones."""
        return self.values(name).texts() if name in self.folders else values_in(self.shards, name).texts()

    def values(self, name: str) -> Values:
        """Returns a column, numbered by the classes of all files."""
        if name in self.folders:
            return self.folders[name]
        return values_in(self.shards, name, self.classes.get(name, ()))

    def objects(self, name: str) -> list[Any]:
        """Returns the cells of a column of objects, whose classes all files must number alike."""
        if name in self.folders:
            return list(self.folders[name].values)
        if classes := self.classes.get(name):
            for shard in self.shards:
                _require_same_classes(shard, name, shard.classes.get(name, ()), classes)
        return [
            cell
            for shard in self.shards
            for cell in (shard.column(name).to_pylist() if name in shard.schema.names else [None] * shard.num_rows)
        ]


def values_in(shards: list[Shard], name: str, names: tuple[str, ...] = ()) -> Values:
    """Returns one column of all files, numbered by the classes `names`, even if files number theirs differently.

    Raises:
        SourceError: a class has no name in its file; or lists of classes are numbered differently.
    """
    import pyarrow as pa

    kinds = [shard.schema.field(name).type for shard in shards if name in shard.schema.names]
    kind = next((kind for kind in kinds if not pa.types.is_null(kind)), pa.null())
    chunks: list[Any] = []
    for shard in shards:
        there = name in shard.schema.names and shard.schema.field(name).type == kind
        chunks += shard.column(name).chunks if there else [pa.nulls(shard.num_rows, kind)]
    try:
        values = values_of_arrow(pa.chunked_array(chunks, kind), name, names)
    except UnicodeDecodeError as exc:
        raise SourceError(f"{shards[0].path}: column {name!r} holds text that is not UTF-8: {exc}.") from exc
    if not names:
        return values
    parts = np.split(values.values, np.cumsum([shard.num_rows for shard in shards])[:-1])
    for i, (shard, numbers) in enumerate(zip(shards, parts, strict=True)):
        own = shard.classes.get(name, names)
        if values.kind != "int":
            _require_same_classes(shard, name, own, names)
            continue
        if len(numbers) and int(numbers.max()) >= len(own):
            raise SourceError(
                f"{shard.path}: column {name!r} holds the class {numbers.max()}, but its schema names only "
                f"{len(own)}. Fix the schema, or fetch the files again."
            )
        if own != names[: len(own)]:
            table = np.array([*map(names.index, own), -1], np.int64)  # the last: below 0 stays without a class
            parts[i] = table[np.maximum(numbers, -1)]
    return replace(values, values=np.concatenate(parts))


def _require_same_classes(shard: Shard, name: str, own: tuple[str, ...], names: tuple[str, ...]) -> None:
    # For columns that are not renumbered, such as lists.
    if own != names[: len(own)]:
        raise SourceError(
            f"{shard.path}: the classes of column {name!r} are numbered otherwise than in other files: "
            f"{first_few(own, 4)}, not {first_few(names, 4)}. Write all files with one list of classes."
        )


def values_of_arrow(column: Any, name: str, names: tuple[str, ...] = ()) -> Values:
    """Returns the values of a chunked array; nested lists of numbers, all of one length, become (N, L, ...)."""
    import pyarrow as pa
    import pyarrow.compute as pc

    while isinstance(column.type, pa.BaseExtensionType):  # Array2D and its kin, where `datasets` is imported
        column = pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_string_view(column.type):
        column = column.cast(pa.large_string())
    kind, rows = column.type, len(column)
    if column.null_count == rows or pa.types.is_null(kind):
        return nothing(rows)
    missing = np.asarray(pc.is_null(column, nan_is_null=pa.types.is_floating(kind)).to_numpy())
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind):
        numbers = pc.fill_null(column, False if pa.types.is_boolean(kind) else 0).to_numpy()
        if numbers.dtype == np.uint64 and numbers.max() >= 2**63:
            return other(rows)
        return Values("int", numbers.astype(np.int64), missing, names)
    if pa.types.is_floating(kind):
        return Values("float", column.cast(pa.float64()).to_numpy().astype(np.float64), missing)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        values = np.array(column.fill_null("").to_pylist(), object)
        return Values("text", values, missing | (values == ""))
    if is_list(kind):
        if (fixed := fixed_lists(column)) is not None:
            return Values("list", fixed, missing)
        leaf = kind.value_type
        tags = pa.types.is_integer(leaf) or pa.types.is_string(leaf)
        if tags and (names or plain_name(name) in LABELS):
            values = np.empty(rows, object)
            values[:] = [[] if cell is None else cell for cell in column.to_pylist()]
            return Values("list", values, missing, names)
    return other(rows)
