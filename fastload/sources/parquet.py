"""Parquet files and Hugging Face datasets: tables with images as bytes, or without any image.

data/train-00000-of-00257.parquet   as on the Hub; splits by the names of files or of the folders above them
photos.parquet                      one file, one split
train/data-00000-of-00001.arrow     a folder that `datasets` saved with save_to_disk, recognised by its state.json
photos-train.arrow                  what `datasets` cached, recognised by its dataset_info.json

A Shard is one file; ArrowTable joins them. The images of Parquet files are unpacked to a temporary file in one pass:
reading a single image costs its whole row group (100 rows of 40 kB: 7 ms an image, 0.7 ms in a pass), and packing reads
rows in shuffled order. Arrow files hold the bytes uncompressed, so their images are read in place.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from fastload.errors import FastloadError, SourceError
from fastload.options.pack import SourceOptions
from fastload.remote.ranges import open_binary
from fastload.remote.urls import ObjectPath
from fastload.sources.assemble import Draft, Samples, Splits, fill_value, keys_in_shards, split_path
from fastload.sources.boxes import BOX_KEYS, OBJECTS, nested_boxes, objects_of_lists
from fastload.sources.captions import caption_column, caption_columns, maybe_captions, texts_in
from fastload.sources.image_index import ImageIndex
from fastload.sources.listing import Masks, first_few, split_of_parts
from fastload.sources.manifest import IMAGE_COLUMNS, is_table, split_of_name
from fastload.sources.open_tree import open_tree
from fastload.sources.spans import FileSpans, JoinedFiles, ListedFile, UnpackedImages
from fastload.sources.tables import (
    IMAGES,
    LABELS,
    MASK_COLUMNS,
    Frame,
    Values,
    columns_of,
    fixed_lists,
    is_list,
    nothing,
    other,
    plain_name,
    require_pyarrow,
    splits_by_column,
    usual_names,
    values_of,
)
from fastload.sources.tree import Tree, is_image, key_of
from fastload.system.advice import advice

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
            raise SourceError(f"{self.path} is damaged: {rows} rows in place of {self.num_rows}. Fetch it again.")

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
            raise SourceError(f"{path} cannot be opened: too many open files. Allow more with `ulimit -n`.") from exc
        fix = "It is damaged or cut short; fetch it again."
        with suppress(OSError, ValueError):
            if not isinstance(path, ObjectPath) and _begins(path, _LFS):
                fix = "It is a pointer of Git LFS, without the data: fetch these with `git lfs pull`."
        raise SourceError(f"{path} cannot be read: {str(exc).splitlines()[0].rstrip('.')}. {fix}") from exc


def _begins(path: Path, sign: bytes) -> bool:
    with open(path, "rb") as file:
        return file.read(len(sign)) == sign


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


_LOOKED_AT = 40
# The first bytes of JPEG, PNG, GIF, BMP (of 64 MiB at most), TIFF and WebP as base64
_BASE64 = re.compile(r"data:image/|/9j/|iVBORw0KGgo|R0lGOD|Qk[0-9]|SUkq|UklGR")


def parquet_evidence(tree: Tree) -> list[str]:
    """Returns the Parquet or Arrow files of a tree, if they hold images or the tree has no image files."""
    if tree.archive:
        return []
    names = [tree.names[i] for i in _table_positions(tree)]
    if not names or tree.file:
        return [key_of(name) for name in names]
    if len(tree.images) and not names[0].endswith(".arrow"):
        try:
            shard = Shard(tree.path / names[0])
            tables = any(is_table(name) for _, name in tree.not_images)
            if not shard.images and (tables or not _column_of_paths([shard], tree)):
                return []
        except FastloadError:
            return []
    return [key_of(name) for name in names[:3]]


def list_parquet(draft: Draft, tree: Tree, options: SourceOptions) -> Samples:
    """Returns a dataset of Parquet or Arrow files, row by row.

    Columns are as in a manifest; lists of numbers, all of one length, keep their dtype: `input_ids` int64 (N, L).
    """
    notes = draft.notes
    table, written = _open_table(draft, tree)
    image = _image_column(table, tree, options, notes)
    splits, split_column = _splits(table, options, notes)
    images = _read_images(table, image, tree, options.root) if image else None
    mask = next((n for n in table.images if n != image and plain_name(n) in (*MASK_COLUMNS, "label")), "")
    masks = None
    if mask and image and options.masks == "none":
        notes.append(f"Masks in column {mask!r} were left alone, as asked for.")
    elif mask and image:
        masks = _read_images(table, mask, tree, options.root)
    lists = [f.name for shard in table.shards for f in shard.schema if _images_inside(f.type)]
    others = [name for name in dict.fromkeys([*table.images, *lists]) if name not in (image, mask)]
    if others:
        notes.append(advice("image column of Parquet", names=first_few(others)))
    taken = {image, mask, split_column, *others}
    nested = {}
    if objects := next((name for name in OBJECTS if name in table.names and name not in taken), ""):
        cells, classes = table.objects(objects), table.classes.get(objects, ())
        nested = nested_boxes(objects, cells, table.location, draft, classes, options.boxes)
        taken |= {objects} if nested else set()
    captions = {}
    texts = {name: table.objects(name) for name in table.names if maybe_captions(name) and name not in taken}
    if image and options.captions != "none" and (caption := caption_column(texts, (*options.labels, *table.classes))):
        notes.append(f"Captions by column {caption!r}.")
        captions = caption_columns(draft, list(map(texts_in, texts[caption])), options, table.location)
        taken |= {caption}
    lists = [name for name in table.names if name not in taken and name in table.lists]
    boxes = [name for name in lists if plain_name(name) in BOX_KEYS]
    if boxes and not nested and table.values(boxes[0]).kind == "other":  # else all images have as many boxes
        made_of, used = objects_of_lists({name: table.objects(name) for name in lists})
        classes = table.classes.get(used[-1], ()) if used else ()
        nested = nested_boxes(used[0], made_of, table.location, draft, classes, options.boxes) if used else {}
        taken |= set(used) if nested else set()
    values = {name: table.values(name) for name in table.names if name not in taken}
    bad = images.bad if images else {}
    missing, total = [(table.location(row), why) for row, why in sorted(bad.items())], len(table.shard_of)
    draft.leave_out_all(missing, "rows without their image", "Fetch the files again", total)
    made, lost = columns_of(Frame(values, draft.where, splits, options.labels, table.location), notes)
    columns = nested | made | captions
    lost = {row: why for row, why in lost.items() if row not in bad}
    unlabelled = [(table.location(row), why) for row, why in sorted(lost.items())]
    draft.leave_out_all(unlabelled, "rows without a label", "Fill them in", total)
    mtimes, counts = written[table.shard_of], [shard.num_rows for shard in table.shards]
    if images:
        mtimes = np.maximum(mtimes, images.mtimes_ns)
        keys = keys_in_shards(table.files, counts, images.paths)
        samples = Samples(keys, images.files, images.sizes, mtimes, splits, columns)
    elif not columns:
        there = ", ".join(table.names)
        raise SourceError(f"{tree.given}: there is neither a column of images nor one of numbers: {there}.")
    else:
        notes.append("No column holds images: a dataset of columns only.")
        if arrays := [n for n in usual_names(columns, (*IMAGES, "images", "pixels")) if columns[n].values.ndim > 1]:
            notes.append(
                f"Arrays in column {arrays[0]!r} are a field, not images: to pack them as images, save them as uint8 "
                "with `numpy.save('images.npy', ...)`, and give the folder."
            )
        sizes = np.full(len(mtimes), sum(column.values[:1].nbytes for column in columns.values()), np.int64)
        samples = Samples(keys_in_shards(table.files, counts, []), None, sizes, mtimes, splits, columns)
    if masks is not None:  # absent ones get a value that no other holds
        present = np.ones(len(masks.sizes), np.bool_)
        present[list(masks.bad)] = False
        notes.append(f"Masks by column {mask!r}.")
        fill = fill_value(draft, masks.files, present) if present.any() else 255
        found = Masks(masks.files, present, ignore_index=fill)
        samples = replace(samples, masks=found).made_also_of(masks.sizes, masks.mtimes_ns)
    return samples.without(bad.keys() | lost.keys())


class _ImageColumn(NamedTuple):
    """The images in one column of all files, R rows."""

    files: JoinedFiles
    sizes: NDArray[np.int64]  # (R,), bytes of each image
    mtimes_ns: NDArray[np.int64]  # (R,), time of modification of a file next to the table; 0: it is in the table itself
    paths: list[str]  # the path that each row names; "" for none
    bad: dict[int, str]  # row -> why it has no image


def _open_table(draft: Draft, tree: Tree) -> tuple[ArrowTable, NDArray[np.int64]]:
    """Returns the rows of all files, and the time of modification of each file."""
    if tree.archive:
        raise SourceError(f"{tree.path}: Parquet files inside an archive are not read. Unpack it and give the folder.")
    positions = _table_positions(tree)
    if not positions:
        raise SourceError(f"{tree.path}: there is no .parquet file, nor a folder that `datasets` saved.")
    tree.known[positions] = True
    names = [tree.names[i] for i in positions]
    shards = [Shard(tree.path / name) for name in names]
    if (total := sum(shard.num_rows for shard in shards)) == 0:
        raise SourceError(f"{tree.given}: {first_few(list(map(key_of, names)))} hold no rows. Fetch them again.")
    # If files number their classes differently, the numbers of the training files are kept.
    table = ArrowTable(shards, names, lambda name: split_of_name(name) == "train")
    draft.title = f"Layout parquet, recognised by {first_few([key_of(name) for name in names], 3)}; {total} rows."
    if table.renumbered:
        differ = first_few(table.renumbered)
        draft.notes.append(f"Files name different classes in column {differ}: renumbered by name, all of them.")
    if table.folders:
        draft.notes.append(f"Columns by the names of folders: {first_few(table.folders)}.")
    draft.require_parts(names)
    alike: dict[tuple[str, str], list[str]] = {}
    for name in names:
        split = split_of_name(name) or split_of_parts(name.split("/")[-2::-1])
        alike.setdefault((name.rpartition("/")[2], split), []).append(key_of(name))
    if several := next((of for of in alike.values() if len(of) > 1 and not table.folders), []):
        draft.notes.append(
            f"CHECK: files of one name in several folders ({first_few(several)}) are packed as one dataset. If they "
            "are configurations or versions of it, give the folder of one."
        )
    return table, tree.mtimes_ns[np.array(positions)]


def _table_positions(tree: Tree) -> list[int]:
    """Returns the positions of the Parquet files; without any, of the Arrow files that `datasets` saved or cached."""
    found = [i for i, name in tree.not_images if name.lower().endswith(".parquet")]
    if found:
        return found
    described = ("state.json", "dataset_info.json")
    saved = {name.rpartition("/")[0] for _, name in tree.not_images if name.rpartition("/")[2] in described}
    return [i for i, name in tree.not_images if name.endswith(".arrow") and name.rpartition("/")[0] in saved]


def _image_column(table: ArrowTable, tree: Tree, options: SourceOptions, notes: list[str]) -> str:
    """Returns the column of images, of bytes or of paths to files; "" if there is none."""
    if options.image_column in table.names:
        return options.image_column
    if options.image_column:
        there = ", ".join(table.names)
        raise SourceError(f"{tree.given}: there is no column {options.image_column!r} for images. There are {there}.")
    usual = usual_names(table.images, IMAGES)
    no_masks = [name for name in table.images if plain_name(name) not in MASK_COLUMNS]
    if found := usual or no_masks:
        notes.append(f"Images by column {found[0]!r}.")
        return found[0]
    if name := _column_of_paths(table.shards, tree, options.root):
        notes.append(f"Images by the paths in column {name!r}.")
        return name
    _refuse_other_images(table, tree)
    return ""


def _column_of_paths(shards: list[Shard], tree: Tree, root: Path | None = None) -> str:
    """Returns the column of a usual name whose texts name images of the tree; "" if there is none."""
    for candidate in usual_names(shards[0].schema.names, IMAGE_COLUMNS):
        values = values_in(shards[:1], candidate)
        if values.kind == "text" and any(_image_index(tree, root).hits(values.texts()[:_LOOKED_AT])):
            return candidate
    return ""


def _images_inside(kind: Any) -> bool:
    """Whether cells of a type are lists that may hold images."""
    return is_list(kind) and (holds_bytes(kind.value_type) or _images_inside(kind.value_type))


def _refuse_other_images(table: ArrowTable, tree: Tree) -> None:
    """Refuses a table without a column of images that holds them otherwise, and says how to write them."""
    for name in [one for one in table.names if one not in table.folders]:
        shard = next(shard for shard in table.shards if name in shard.schema.names)
        read = f"import pandas as pd; t = pd.read_parquet({str(shard.path)!r})"
        shown = shlex.quote(str(shard.path))
        write = "t.to_parquet('images.parquet')"
        if _images_inside(shard.schema.field(name).type):
            raise SourceError(
                f"{tree.given}: column {name!r} holds lists of images, and a sample here is one image. Write a row for "
                f"each image: `{read}.explode({name!r}); {write}`; or pick one: `t['image'] = t[{name!r}].str[0]`."
            )
        values = values_in([shard], name)
        cells = [cell for cell in values.texts()[:_LOOKED_AT] if cell] if values.kind == "text" else []
        if cells and all(re.match(r"https?://", cell) for cell in cells):
            raise SourceError(
                f"{tree.given}: no column holds images; {name!r} holds addresses, such as {cells[0][:60]}. Download "
                f"them first, e.g. `img2dataset --url_list {shown} --input_format parquet --url_col {name} "
                "--output_format webdataset`."
            )
        if cells and all(_BASE64.match(cell) for cell in cells):
            decode = f"t['image'] = [base64.b64decode(c.partition(',')[2] or c) for c in t.pop({name!r})]"
            fix = f"Write their bytes: `import base64; {read}; {decode}; {write}`."
            raise SourceError(f"{tree.given}: column {name!r} holds images as base64 text. {fix}")
        if cells and all(map(is_image, cells)):
            raise SourceError(
                f"{tree.given}: column {name!r} names images, such as {cells[0]}, and none of them lies below "
                f"{tree.path}. Put the Parquet files into the folder that the paths begin in, and give that folder."
            )


def _splits(table: ArrowTable, options: SourceOptions, notes: list[str]) -> tuple[Splits, str]:
    """Returns the split of each row, and the column that says it; without one, by the names of files and folders."""
    wanted = options.split_column or ("split" if "split" in table.names else "")
    said, column = splits_by_column(table, wanted, (), notes)
    if column:
        return Splits.of(said), column
    by_file = [split_of_name(name) or split_of_parts(name.split("/")[-2::-1]) for name in table.files]
    if any(by_file):
        notes.append(f"Splits by names of files: {', '.join(sorted(set(by_file) - {''}))}.")
    filled = np.unique(table.shard_of)
    splits = Splits.of([by_file[i] for i in filled.tolist()])
    return Splits(splits.index[np.searchsorted(filled, table.shard_of)], splits.names), ""


def _read_images(table: ArrowTable, name: str, tree: Tree, root: Path | None) -> _ImageColumn:
    """Returns the images of a column of bytes or of paths; a row without bytes names a file of the tree, or root."""
    paths: list[str] = []
    having = [shard for shard in table.shards if name in shard.schema.names]
    if lacking := [shard.path for shard in table.shards if shard.num_rows and shard not in having]:
        raise SourceError(
            f"{lacking[0]}: there is no column {name!r}, which holds the images in {having[0].path.name}. "
            "Move this file away if it is no part of the dataset."
        )
    if name in table.images and not str(having[0].schema.field(name).type).endswith("string"):
        files, sizes = _stored_images(table.shards, name, tree.path, paths)
    else:
        paths = table.values(name).texts()
        sizes = np.zeros(len(paths), np.int64)
        files = JoinedFiles((), sizes.astype(np.int32), sizes.copy())
    mtimes, bad = np.zeros(len(sizes), np.int64), dict[int, str]()
    absent = np.flatnonzero(sizes == 0)
    if not len(absent):
        return _ImageColumn(files, sizes, mtimes, paths, bad)
    index = _image_index(tree, root)
    for shard in np.unique(table.shard_of[absent]).tolist():
        rows = absent[table.shard_of[absent] == shard]
        here = index if root else index.at(split_path(table.files[shard])[0])
        found = here.find([paths[row] for row in rows.tolist()], [""] * len(rows))
        there, at = rows[found.positions >= 0], found.positions[found.positions >= 0]
        files.part[there], files.index[there] = len(files.parts), at
        sizes[there], mtimes[there] = index.tree.sizes[at], index.tree.mtimes_ns[at]
        for k in np.flatnonzero(found.positions < 0).tolist():
            path = paths[rows[k]]
            only = f"holds no bytes, only the path {path!r}, which {found.reasons.get(k, 'is not there')}"
            bad[int(rows[k])] = only if path else "holds no image: its bytes are null or empty"
    files = JoinedFiles((*files.parts, index.tree.files), files.part, files.index)
    return _ImageColumn(files, sizes, mtimes, paths, bad)


def _stored_images(
    shards: list[Shard], name: str, dataset_folder: Path, paths: list[str]
) -> tuple[JoinedFiles, NDArray[np.int64]]:
    """Returns the images of a column of bytes, of Arrow in place, of Parquet unpacked to a temporary file; their sizes.

    The path of each row is appended to `paths`.
    """
    parquet = shards[0].parquet
    spill = UnpackedImages(sum(shard.num_bytes() for shard in shards), dataset_folder) if parquet else None
    pieces: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    for shard in shards:
        if name not in shard.schema.names:
            pieces.append((np.zeros(0, np.int64), np.zeros(0, np.int64)))
            continue
        here, lengths = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for array, base in shard.batches(name):
            with translate_errors(shard.path):
                starts, length, buffer = _bytes_of(array, paths)
            if spill:
                first, last = (int(starts[0]), int(starts[-1] + length[-1])) if len(starts) else (0, 0)
                at = spill.write(memoryview(buffer)[first:last]) if buffer is not None and last > first else 0
                starts = starts - first + at
            elif buffer is not None:
                starts = starts + (buffer.address - base)
            here.append(starts)
            lengths.append(length)
        pieces.append((np.concatenate(here), np.concatenate(lengths)))
        shard.check(len(pieces[-1][0]))
    spans = [((spill or shard).spans(*piece), len(piece[0])) for shard, piece in zip(shards, pieces, strict=True)]
    return JoinedFiles.of(spans), np.concatenate([sizes for _, sizes in pieces])


def _bytes_of(array: Any, paths: list[str]) -> tuple[NDArray[np.int64], NDArray[np.int64], Any]:
    """Returns where each image begins in an array's buffer, its length (0: null), and the buffer; appends to paths."""
    import pyarrow as pa
    import pyarrow.compute as pc

    while isinstance(array.type, pa.BaseExtensionType):
        array = array.storage
    rows = len(array)
    if pa.types.is_struct(array.type):
        names = [array.type.field(i).name for i in range(array.type.num_fields)]
        path = next((name for name in ("path", "name", "filename", "file_name") if name in names), "")
        paths += [path or "" for path in pc.struct_field(array, path).to_pylist()] if path else [""] * rows
        array = pc.struct_field(array, bytes_field(array.type))  # null where the struct is
    else:
        paths += [""] * rows
    if pa.types.is_null(array.type):
        return np.zeros(rows, np.int64), np.zeros(rows, np.int64), None
    if not (pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type)):
        array = array.cast(pa.large_binary())
    valid = np.asarray(array.is_valid().to_numpy(zero_copy_only=False))
    _, ends, data = array.buffers()
    offsets = np.frombuffer(ends, np.int64 if pa.types.is_large_binary(array.type) else np.int32)
    starts = offsets[array.offset : array.offset + rows + 1].astype(np.int64)
    return starts[:-1], np.where(valid, np.diff(starts), 0), data


def _image_index(tree: Tree, root: Path | None) -> ImageIndex:
    """Returns the index of the image files in the folder of the tables, or below a root of theirs."""
    return ImageIndex(open_tree(root or tree.path) if root or tree.file else tree)
