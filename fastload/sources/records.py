"""Records in shard files: MosaicML's MDS and TFRecord, as TensorFlow and its datasets write it.

MDS: an index.json names the shards and the encoding of each field. A record is the sizes of its fields of varying size,
then all its fields. Nothing is unpickled.

    train/index.json                version 2: the shards, their fields, encodings and sizes
    train/shard.00000.mds[.zstd]    number of records, where each begins (uint32), fields as text, the records
    val/index.json                  a folder for each split; or one index for all

TFRecord: a record is its length (uint64), a checksum of that, a tf.train.Example in protobuf, and a checksum of it. An
Example maps the names of features to lists of bytes, floats or int64. Checksums of lengths are checked when files are
listed, checksums of records when their images are read: else all images would be read twice.

    train-00000-of-01024                 image/encoded, image/class/label, image/object/bbox/xmin, ...
    mnist-train.tfrecord-00000-of-00001  of tensorflow-datasets, next to features.json and label.labels.txt
    photos.tfrecord[.gz]                 one file, one split

A format only yields the cells of each record, and images stay where they are in the shards; `list_records` finds out
which cell is the image, and makes columns of the rest. The checksum is CRC-32C (Castagnoli's polynomial; RFC 3720,
B.4): 100 kB take 13 us compiled, 1 ms in NumPy.
"""

from __future__ import annotations

import bz2
import gzip
import posixpath
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from fastload.errors import FastloadError, ImageError, MissingExtraError, OptionError, SourceError
from fastload.format.ragged import Column, Moves
from fastload.images.image_header import KINDS, ImageHeader, check_size, header_of_pixels, looks_like_image
from fastload.options.pack import BoxForm, SourceOptions
from fastload.remote.ranges import open_binary
from fastload.remote.urls import ObjectPath
from fastload.sources.assemble import Draft, Samples, Splits, fill_value, header_of, keys_in_shards
from fastload.sources.boxes import BOX_KEYS, CORNERS, BoxSlots, box_columns, in_stored_form, label_column
from fastload.sources.captions import caption_column, caption_columns, maybe_captions, texts_in
from fastload.sources.foreign import SHARD_NAME, in_python
from fastload.sources.listing import SPLITS, Files, Masks, Reader, first_few, split_of_shard
from fastload.sources.spans import FileSpans, JoinedFiles, ListedFile, ListedObject, UnpackedImages
from fastload.sources.tables import (
    IMAGES,
    LABELS,
    Frame,
    Values,
    columns_of,
    other,
    plain_name,
    usual_names,
    values_of,
)
from fastload.sources.tree import Tree, key_of
from fastload.sources.webdataset import MASK_WORDS
from fastload.system.native import library
from fastload.system.text import read_json

_BLOCK_BYTES, _AHEAD = 2**20, 8  # of a shard behind a URL
_PROBED = 16  # blobs of a field by which it is known whether they are images
_FILE_NAMES = ("filename", "file_name", "fname", "file", "path", "image_path", "name")


BLOB_HEAD = 256
"""Bytes of a blob that are read to find its format."""


class Blob(NamedTuple):
    """Bytes that lie in a shard as they are: the file of an image, or a text."""

    offset: int
    size: int
    head: bytes  # the first of them: all of a short blob

    @classmethod
    def of(cls, data: bytes, offset: int, size: int) -> Blob:
        """Returns the blob at an offset, given its first bytes."""
        return cls(offset, size, data[:size] if size <= len(data) and size <= BLOB_HEAD else data[:16])


class Pixels(NamedTuple):
    """Pixels that lie in a shard as they are."""

    offset: int
    shape: tuple[int, ...]  # (H, W), (H, W, C) or (C, H, W)
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        """Bytes of all."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def upright(self) -> tuple[int, ...]:
        """Returns the shape as (H, W) or (H, W, C); () if it is no image's."""
        shape = self.shape
        if len(shape) == 3 and shape[2] not in KINDS[8] and shape[0] in KINDS[8]:
            shape = (*shape[1:], shape[0])
        known = self.dtype in (np.uint8, np.uint16) and (len(shape) == 2 or (len(shape) == 3 and shape[2] in KINDS[8]))
        return shape if known else ()


Cell = Blob | Pixels | int | float | str | list[Any] | dict[str, Any] | NDArray[Any] | None


class Record(NamedTuple):
    """One record of a shard."""

    cells: dict[str, Cell]  # by field
    whole: Blob | None = None  # where it lies, with its checksum, if its format has one


Unpack = Callable[[IO[bytes]], Iterable[bytes]]
"""Returns the content of a compressed shard, block by block."""


def blocks(opener: Callable[[IO[bytes]], Any], file: IO[bytes]) -> Iterable[bytes]:
    """Yields what a file unpacks to, given what opens it, such as `gzip.open`."""
    with opener(file) as content:
        while block := content.read(_BLOCK_BYTES):
            yield block


@dataclass(frozen=True, eq=False)
class ShardFile:
    """One shard: a file, an object, or where the content of a compressed one was unpacked to."""

    name: str  # path in the tree
    file: ListedFile | ListedObject  # holds its bytes
    path: Path  # what to open to read them
    base: int  # where they begin
    num_bytes: int
    owner: object = field(default=None, repr=False)  # keeps a temporary file alive

    def reader(self) -> IO[bytes]:
        """Returns the file to read, which begins `base` bytes before the shard."""
        return open_binary(self.path, block_bytes=_BLOCK_BYTES, ahead=_AHEAD)

    def spans(self, cells: Sequence[Blob | Pixels | None]) -> FileSpans:
        """Returns the reader of the bytes of these cells; None has none."""
        offsets, sizes = ([getattr(cell, name, 0) for cell in cells] for name in ("offset", "size"))
        return FileSpans(self.file, np.array(offsets, np.int64), np.array(sizes, np.int64), self.owner)


def open_shards(tree: Tree, wanted: Sequence[tuple[int, Unpack | None]]) -> list[ShardFile]:
    """Returns the shards at these positions of a tree; compressed ones are unpacked to a temporary file.

    Raises:
        SourceError: the tree is an archive; a compressed shard is damaged, or there is no room for it.
    """
    if tree.archive:
        raise SourceError(f"{tree.path}: shards inside an archive are not read. Unpack it, and give the folder.")
    packed = [i for i, unpack in wanted if unpack]
    # Images hardly shrink.
    spill = UnpackedImages(2 * int(tree.sizes[packed].sum()), tree.path) if packed else None
    pieces: dict[int, tuple[int, int]] = {}
    for i, unpack in wanted:
        if unpack is None or spill is None:
            continue
        start, size = 0, 0
        try:
            with open_binary(tree.path / Path(tree.names[i]), block_bytes=_BLOCK_BYTES, ahead=_AHEAD) as file:
                for block in unpack(file):
                    at = spill.write(memoryview(block))
                    start, size = start if size else at, size + len(block)
        except FastloadError:
            raise
        except Exception as exc:  # decompressors raise errors of their own
            raise SourceError(f"{tree.where(i)} cannot be unpacked: {exc}. It is damaged; fetch it again.") from exc
        pieces[i] = start, size
    shards = []
    for i, unpack in wanted:
        if unpack and spill:
            listed = spill.spans(np.zeros(0, np.int64), np.zeros(0, np.int64)).file
            shards.append(ShardFile(tree.names[i], listed, Path(listed.path), *pieces[i], spill))
            continue
        path = tree.path / Path(tree.names[i])
        listed = ListedObject.of(path) if isinstance(path, ObjectPath) else ListedFile.of(path)
        shards.append(ShardFile(tree.names[i], listed, path, 0, listed.num_bytes))
    return shards


@dataclass(eq=False)
class RecordTable:
    """The cells of all records, shard by shard; see `tables.frame.CellTable`."""

    shards: list[ShardFile]
    counts: list[int] = field(default_factory=list)  # records in each shard
    cells: dict[str, list[Cell]] = field(default_factory=dict)  # field -> the cell of each record, None if it has none
    mtimes_ns: list[int] = field(default_factory=list)  # of each shard, as it was listed
    records: list[Blob | None] = field(default_factory=list)  # where each lies, if it is checked
    check: Callable[[FileSpans, FileSpans], Files] | None = None  # makes the reader of pieces of checked records

    @classmethod
    def of(
        cls,
        tree: Tree,
        shards: list[ShardFile],
        read: Callable[[ShardFile], Iterator[Record]],
        check: Callable[[FileSpans, FileSpans], Files] | None = None,
    ) -> Self:
        """Returns the table of the records that `read` yields of each shard."""
        table, total = cls(shards, check=check), 0
        written = dict(zip(tree.names, tree.mtimes_ns.tolist(), strict=True))
        for shard in shards:
            before = total
            for record in read(shard):
                table.records.append(record.whole)
                for name, cell in record.cells.items():
                    column = table.cells.setdefault(name, [])
                    column += [None] * (total - len(column))
                    column.append(cell)
                total += 1
            table.counts.append(total - before)
            table.mtimes_ns.append(written[shard.name])
        for column in table.cells.values():
            column += [None] * (total - len(column))
        return table

    def __len__(self) -> int:
        """Number of records."""
        return sum(self.counts)

    def location(self, row: int) -> str:
        """Returns the number of a record in its shard, for messages."""
        ends = np.cumsum(self.counts)
        shard = int(np.searchsorted(ends, row, side="right"))
        return f"record {row - int(ends[shard]) + self.counts[shard]} of {key_of(self.shards[shard].name)}"

    def files(self, name: str) -> JoinedFiles:
        """Returns the reader of the bytes of a field of every record."""
        column, parts, start = self.cells[name], list[tuple[Files, int]](), 0
        for shard, count in zip(self.shards, self.counts, strict=True):
            cells = [cell if isinstance(cell, (Blob, Pixels)) else None for cell in column[start : start + count]]
            spans: Files = shard.spans(cells)
            if self.check and not shard.owner:  # what unpacked a compressed shard has checked it
                whole = self.records[start : start + count]
                held = [record if cell else None for record, cell in zip(whole, cells, strict=True)]
                spans = self.check(shard.spans(cells), shard.spans(held))
            parts.append((spans, count))
            start += count
        return JoinedFiles.of(parts)

    def pictures(self) -> dict[str, int]:
        """Returns the fields that hold images, and the number of records that have one."""
        found: dict[str, int] = {}
        for name, column in self.cells.items():
            some = [cell for cell in column if isinstance(cell, (Blob, Pixels))]
            probed = some[:: -(-len(some) // _PROBED)] if some else []
            if probed and all(
                bool(cell.upright()) if isinstance(cell, Pixels) else looks_like_image(cell.head) for cell in probed
            ):
                found[name] = len(some)
        return found


@dataclass(frozen=True, eq=False)
class RawPictures:
    """Reads pixels that lie in shards as they are."""

    files: JoinedFiles
    pixels: tuple[Pixels, ...]  # of each sample
    mask: bool = False  # whether they are masks, (H, W)

    def header(self, i: int) -> ImageHeader:
        """Returns size, channels and bits of image i, as the shard states them."""
        shape = self.pixels[i].upright()
        check_size(*shape[:2])
        return header_of_pixels(shape, self.pixels[i].dtype)

    def read(self, i: int) -> NDArray[Any]:
        """Returns the pixels of image i, (H, W) or (H, W, C)."""
        of = self.pixels[i]
        pixels = np.frombuffer(self.files.read(i), of.dtype).reshape(of.shape)
        if of.upright() != of.shape:
            pixels = np.ascontiguousarray(pixels.transpose(1, 2, 0))
        return pixels.reshape(pixels.shape[:2]) if self.mask and pixels.ndim == 3 else pixels

    def take(self, indices: NDArray[np.integer[Any]]) -> RawPictures:
        return replace(self, files=self.files.take(indices), pixels=tuple([self.pixels[i] for i in indices.tolist()]))


Further = Callable[[Reader], tuple[dict[str, Column], dict[int, str]]]
"""Returns further columns, given the images of all records; and record -> why it cannot be packed."""


def list_records(
    draft: Draft,
    table: RecordTable,
    splits: Sequence[str],
    options: SourceOptions,
    classes: Mapping[str, tuple[str, ...]] | None = None,
    further: Further | None = None,
) -> Samples:
    """Returns the samples of a table of records, in their order.

    Args:
        splits: the split of each shard, "" if it has none.
        classes: field -> names of the classes that its integers stand for.
        further: makes columns of fields that it takes out of the table.

    Raises:
        OptionError: there is no field that an option names.
        SourceError: no field holds images, or several do; a record lacks its image or label (unless skipped).
    """
    pictures = table.pictures()
    image, mask = _image_and_mask(draft, table, pictures, options)
    column = table.cells[image]
    bad = {row: f"has no image in {image!r}" for row, cell in enumerate(column) if not isinstance(cell, (Blob, Pixels))}
    images = _reader(table, image)
    of_records, shards = Splits.of(splits), np.repeat(np.arange(len(table.shards)), table.counts)
    by_row = Splits(of_records.index[shards], of_records.names)
    masks = _masks(draft, table, mask) if mask else None
    columns: dict[str, Column] = {}
    if further:
        columns, why = further(images)
        bad = why | bad
    names, paths = _paths(table)
    values = {
        name: _values(cells, (classes or {}).get(name, ()))
        for name, cells in table.cells.items()
        if name not in (*pictures, names)
    }
    nested = [name for name, some in values.items() if some.kind == "other"]
    if lost := [name for name in nested if any(cell is not None for cell in table.cells[name])]:
        draft.notes.append(f"NOT READ: {first_few(lost, 12)}: neither numbers nor text nor images.")
        values = {name: some for name, some in values.items() if name not in lost}
    said = {name: list(map(text_of, table.cells[name])) for name in values if maybe_captions(_last(name))}
    if options.captions != "none" and (caption := caption_column(said, options.labels)):
        draft.notes.append(f"Captions by the field {caption!r}.")
        columns |= caption_columns(draft, list(map(texts_in, said[caption])), options, table.location)
        del values[caption]
    usable = [name for name, some in values.items() if some.kind != "other" and some.values.ndim == 1]
    labels = options.labels or tuple(usual_names(usable, (*LABELS, "y", "cls"), _last)[:1])
    made, unlabelled = columns_of(Frame(values, draft.where, by_row, labels, table.location), draft.notes)
    bad = unlabelled | bad
    draft.leave_out_all(
        [(table.location(row), why) for row, why in sorted(bad.items())],
        "records that are not as the others",
        "Write the shards again",
        len(table),
    )
    sizes = np.array([getattr(cell, "size", 0) for cell in column], np.int64)
    keys = keys_in_shards([shard.name for shard in table.shards], table.counts, paths)
    samples = Samples(keys, images, sizes, np.array(table.mtimes_ns, np.int64)[shards], by_row, columns | made, masks)
    kept = np.array([row for row in range(len(table)) if row not in bad], np.int64)
    return replace(samples, rows=kept[np.argsort(by_row.index[kept], kind="stable")])


def splits_of_shards(where: str, names: Sequence[str], known: Mapping[str, str] | None = None) -> list[str]:
    """Returns the split of each shard, by `known` or by its name; SourceError if only some name one."""
    found = [(known or {}).get(name) or split_of_shard(name) for name in names]
    if any(found) and not all(found):
        without = [key_of(name) for name, split in zip(names, found, strict=True) if not split]
        raise SourceError(
            f"{where}: shards that name no split ({len(without)}): {first_few(without)}; the others are "
            f"{', '.join(sorted(set(found) - {''}))}. Move them away, or into a folder called after their split."
        )
    return found


def _last(name: str) -> str:
    """Returns the last part of a field's name, for comparison: `label` of image/class/label."""
    return plain_name(re.split(r"[/.]", name)[-1])


def _image_and_mask(
    draft: Draft, table: RecordTable, pictures: dict[str, int], options: SourceOptions
) -> tuple[str, str]:
    """Returns the fields of the image and of the mask, "" for no mask."""
    image = options.image_column
    if image and image not in pictures:
        said = "holds no images" if image in table.cells else f"is not there; there are {first_few(table.cells, 20)}"
        raise OptionError(f"{draft.where}: the field --image-column {image!r} {said}.")
    masks = [name for name in pictures if not MASK_WORDS.isdisjoint(re.split(r"[^a-z]+", name.lower()))]
    if not image:
        rest = [name for name in pictures if name not in masks]
        usual = usual_names(rest, IMAGES, _last)
        # As MosaicML writes images and masks: x and y.
        masks += [name for name in rest if name == "y"] if usual[:1] == ["x"] else []
        rest = [name for name in rest if name not in masks]
        if len(rest) > 1 and len(set(map(_last, usual[:2]))) != len(usual[:2]):
            usual = []
        if len(rest) != 1 and not usual:
            what = f"several fields hold images: {first_few(rest)}" if rest else "no field holds images"
            fix = f"Say which one to pack: `--image-column {rest[0]}`." if rest else _fields_said(table)
            raise SourceError(f"{draft.where}: {what}. {fix}")
        image = (usual or rest)[0]
    if others := [name for name in pictures if name != image and name not in masks[:1]]:
        draft.notes.append(f"NOT READ: further images of each record: {first_few(others)}.")
    if masks and options.masks == "none":
        draft.notes.append(f"Masks in {masks[0]!r} were left alone, as asked for.")
        masks = []
    draft.notes.append(f"Images by the field {image!r}" + (f", masks by {masks[0]!r}." if masks else "."))
    return image, (masks or [""])[0]


def _fields_said(table: RecordTable) -> str:
    said = []
    for name, cells in table.cells.items():
        first = next((cell for cell in cells if cell is not None), None)
        blob = first if isinstance(first, Blob) else None
        what = f"{blob.size} bytes that begin with {blob.head[:8]!r}" if blob else type(first).__name__
        said.append(f"{name} ({what})")
    return f"Its records have {first_few(said, 12)}. Images are the bytes of JPEG, PNG or other image files."


def _reader(table: RecordTable, name: str, *, mask: bool = False) -> JoinedFiles | RawPictures:
    column = table.cells[name]
    files = table.files(name)
    if not any(isinstance(cell, Pixels) for cell in column):
        return files
    empty = Pixels(0, (0, 0), np.dtype(np.uint8))
    return RawPictures(files, tuple(cell if isinstance(cell, Pixels) else empty for cell in column), mask)


def _masks(draft: Draft, table: RecordTable, name: str) -> Masks:
    present = np.array([isinstance(cell, (Blob, Pixels)) for cell in table.cells[name]])
    files = _reader(table, name, mask=True)
    fill = None if present.all() else 255
    if isinstance(files, JoinedFiles):
        fill = fill_value(draft, files, present)
    elif fill is not None:
        draft.notes.append("Records without a mask: theirs are 255 throughout.")
    return Masks(files, present, ignore_index=fill)


def _paths(table: RecordTable) -> tuple[str, list[str]]:
    """Returns the field with the names of the image files, and these; "" and [] if there is none."""
    for name, cells in table.cells.items():
        if _last(name) in _FILE_NAMES:
            paths = [text_of(cell) or "" for cell in cells]
            if any(paths):
                return name, paths
    return "", []


def text_of(cell: Cell) -> str | None:
    """Returns a cell as text; None if it is no text."""
    if isinstance(cell, Blob):
        try:
            cell = cell.head.decode("utf-8") if cell.size == len(cell.head) else None
        except UnicodeDecodeError:
            return None
    return cell if isinstance(cell, str) and "\0" not in cell else None


def _values(cells: list[Cell], names: tuple[str, ...] = ()) -> Values:
    """Returns a field as values of one type: numbers, text, or arrays of one shape."""
    arrays = [cell for cell in cells if isinstance(cell, np.ndarray)]
    if arrays:
        kinds = {(array.shape, array.dtype) for array in arrays}
        if len(kinds) > 1 or len(arrays) < len(cells) or arrays[0].dtype.kind not in "biuf":
            return other(len(cells))
        return Values("list", np.stack(arrays), np.zeros(len(cells), np.bool_))
    if any(isinstance(cell, (Blob, Pixels)) for cell in cells):
        texts = [text_of(cell) for cell in cells]
        if any(text is None and cell is not None for text, cell in zip(texts, cells, strict=True)):
            return other(len(cells))
        cells = list(texts)
    values = values_of(cells)
    if names and values.kind == "int" and int(values.values.max(initial=0)) < len(names):
        return replace(values, names=names)
    return values


_INDEX = "index.json"
_MOST_HEAD = 2**16  # bytes of an index.json that show whose it is
_PICKLE = "pkl"
_BLOCK = 2**20
_VALUES = {  # as numbered in an array
    bits + at: f"{kind}{bits}"
    for bits in (8, 16, 32, 64)
    for at, kind in enumerate(("uint", "int", "float"))
    if bits + at != 10
}
_SHAPES = (np.uint8, np.uint16, np.uint32, np.uint64)
_PILLOW = {"L": (1, np.uint8), "P": (1, np.uint8), "RGB": (3, np.uint8), "RGBA": (4, np.uint8), "I;16": (1, np.uint16)}


class _Decoder(NamedTuple):
    """Makes cells of one encoding."""

    cell: Callable[[bytes, int, int], Cell]  # given the first bytes of a field, its offset in the file, and its size
    most: int = 2**31  # bytes of a field that are read: of an image few


class _MdsShard(NamedTuple):
    """One shard as an index.json describes it."""

    name: str  # path in the tree
    packed: str  # path of its compressed form; "" if there is none
    compression: str
    samples: int
    num_bytes: int  # uncompressed
    fields: tuple[tuple[str, str, int], ...]  # name, encoding, and size (0 if it varies) of each field


def mds_evidence(tree: Tree) -> list[str]:
    """Returns the index.json of each folder of MDS shards."""
    return [key_of(tree.names[i]) for i in _indexes(tree) if b'"mds"' in _head(tree, i)]


def list_mds(draft: Draft, tree: Tree, options: SourceOptions) -> Samples:
    """Returns the samples of MDS shards in their order; splits by the names of folders."""
    found: dict[str, _MdsShard] = {}  # by name: an index for all folders names the same shards as those in them
    for i in _indexes(tree):
        found |= {shard.name: shard for shard in _shards_of(tree, i)}
    if not found:
        raise SourceError(f"{tree.given}: there is no {_INDEX} that names MDS shards. Give the folder that holds it.")
    shards = list(found.values())
    position = {name: i for i, name in enumerate(tree.names)}
    wanted: list[tuple[int, Unpack | None]] = []
    missing = [shard.name for shard in shards if shard.name not in position and shard.packed not in position]
    if missing:
        raise SourceError(
            f"{tree.given}: shards that {_INDEX} names are missing ({len(missing)}): "
            f"{first_few(map(key_of, missing))}. Fetch them; a cache that StreamingDataset evicted from is not "
            "the whole dataset."
        )
    for shard in shards:
        unpacked = shard.name in position
        wanted.append((position[shard.name if unpacked else shard.packed], None if unpacked else _unpack(tree, shard)))
    refused = sorted({name for shard in shards for name, encoding, _ in shard.fields if encoding == _PICKLE})
    if refused and draft.on_error == "fail":
        raise SourceError(
            f"{draft.where}: the fields {', '.join(refused)} are pickles, which can run any program when they are "
            "read. Write them as json, int or ndarray instead, or leave them out with `--on-error skip`."
        )
    draft.note("NOT READ, since they are pickles: fields", refused)
    files = open_shards(tree, wanted)
    described = dict(zip((file.name for file in files), shards, strict=True))
    table = RecordTable.of(tree, files, lambda file: _records(tree, file, described[file.name]))
    draft.title = f"Layout mds, recognised by {first_few(mds_evidence(tree), 3)}: {len(table)} samples."
    tree.known[[i for i, _ in wanted]] = True
    return list_records(draft, table, splits_of_shards(draft.where, [shard.name for shard in shards]), options)


def _indexes(tree: Tree) -> list[int]:
    return [i for i, name in tree.not_images if name.endswith(_INDEX) and name.rpartition("/")[2] == _INDEX]


def _head(tree: Tree, i: int) -> bytes:
    with suppress(ImageError):
        return tree.files.read_head(i, _MOST_HEAD)
    return b""


def _shards_of(tree: Tree, i: int) -> list[_MdsShard]:
    """Returns the shards that an index.json names."""
    where, folder = tree.where(i), tree.names[i].removesuffix(_INDEX)
    try:
        index = read_json(tree.read_text(i))
        index_of = index if isinstance(index, dict) else {}
        shards = [_shard(folder, one) for one in index_of.get("shards", ())]
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        fix = "Fetch it again; without it, `streaming.base.util` can merge the index files of parts."
        raise SourceError(f"{where} is damaged: {type(exc).__name__}: {exc}. {fix}") from exc
    return shards


def _shard(folder: str, one: dict[str, Any]) -> _MdsShard:
    if one["format"] != "mds" or one["version"] != 2:
        raise ValueError(f"a shard of format {one['format']!r}, version {one['version']!r}; read is 'mds', version 2")
    names = [one[key]["basename"] if one.get(key) else "" for key in ("raw_data", "zip_data")]
    if any(posixpath.isabs(name) or ".." in name.split("/") for name in names):
        raise ValueError(f"a shard outside of its folder: {names}")
    raw, packed = (posixpath.normpath(folder + name) if name else "" for name in names)
    fields = zip(one["column_names"], one["column_encodings"], [size or 0 for size in one["column_sizes"]], strict=True)
    compression = str(one.get("compression") or "").partition(":")[0]
    return _MdsShard(raw, packed, compression, int(one["samples"]), int(one["raw_data"]["bytes"]), tuple(fields))


def _unpack(tree: Tree, shard: _MdsShard) -> Unpack:
    known: dict[str, Unpack] = {"gz": partial(blocks, gzip.open), "bz2": partial(blocks, bz2.open), "zstd": _zstd}
    if shard.compression not in known:
        folder = tree.given / shard.name.rpartition("/")[0]
        raise SourceError(
            f"{tree.path / shard.packed} is compressed with {shard.compression!r}; read are {', '.join(known)}. "
            + in_python(
                f"from streaming import StreamingDataset; pack_images(StreamingDataset(local={str(folder)!r}, "
                "shuffle=False, batch_size=1), 'out.h5')"
            )
        )
    if shard.compression == "zstd":
        try:
            import zstandard  # noqa: F401
        except ImportError as exc:
            raise MissingExtraError(
                f"{tree.path / shard.packed} is compressed with zstd, which zstandard reads. Install it with "
                "`pip install fastload[zstd]`."
            ) from exc
    return partial(_at_most, known[shard.compression], shard.num_bytes)


def _at_most(unpack: Unpack, num_bytes: int, file: IO[bytes]) -> Iterable[bytes]:
    """Yields what a shard unpacks to, no further than to the first block beyond the bytes that its index states."""
    done = 0
    for block in unpack(file):
        yield block
        if (done := done + len(block)) > num_bytes:
            return


def _zstd(file: IO[bytes]) -> Iterable[bytes]:
    import zstandard

    yield from zstandard.ZstdDecompressor().read_to_iter(file, write_size=_BLOCK)


def _records(tree: Tree, file: ShardFile, shard: _MdsShard) -> Iterator[Record]:
    """Yields the cells of each record of a shard; SourceError if it is not as its index says."""
    where = str(tree.path / key_of(file.name))
    if file.num_bytes != shard.num_bytes:
        raise SourceError(
            f"{where} has {file.num_bytes} bytes{' unpacked' if file.owner else ''}, where its {_INDEX} says "
            f"{shard.num_bytes}. It was cut short or replaced: fetch it again."
        )
    fields = [(name, size, _decoder(where, name, encoding)) for name, encoding, size in shard.fields]
    varying = sum(not size for _, size, _ in fields)
    with file.reader() as content:
        content.seek(file.base)
        table = np.frombuffer(content.read(4 * (shard.samples + 2)), "<u4").astype(np.int64)
        begins = table[1:]
        inside = len(begins) == shard.samples + 1 and int(begins[-1]) == file.num_bytes
        if (
            not inside
            or table[0] != shard.samples
            or (np.diff(begins) < 4 * varying).any()
            or int(begins[0]) < 4 * len(table)
        ):
            raise SourceError(
                f"{where}: its table of {shard.samples} records is damaged, or longer than the 4 GiB that MDS can "
                "number. Fetch it again, or write it anew with a smaller size_limit."
            )
        for number, (begin, end) in enumerate(pairwise(begins.tolist())):
            content.seek(file.base + begin)
            sizes = iter(np.frombuffer(content.read(4 * varying), "<u4").tolist())
            record: dict[str, Cell] = {}
            at = begin + 4 * varying
            for name, fixed, decode in fields:
                size = fixed or next(sizes)
                if at + size > end:
                    raise SourceError(f"{where}: record {number} is damaged: {name!r} reaches beyond its end.")
                if decode is not None:
                    content.seek(file.base + at)
                    try:
                        cell = decode.cell(content.read(min(size, decode.most)), file.base + at, size)
                    except (ValueError, KeyError, IndexError, TypeError) as exc:
                        raise SourceError(f"{where}: record {number}: its field {name!r} is damaged: {exc}.") from exc
                    if isinstance(cell, dict):
                        record |= {f"{name}.{key}": value for key, value in cell.items()}
                    else:
                        record[name] = cell
                at += size
            yield Record(record)


def _decoder(where: str, name: str, encoding: str) -> _Decoder | None:
    """Returns the decoder of an encoding; None for pickles, which are never read."""
    kind, _, form = encoding.partition(":")
    if kind == _PICKLE:
        return None
    if kind in ("bytes", "jpeg", "png"):
        return _Decoder(lambda data, at, size: Blob.of(data, at, size), BLOB_HEAD)
    if kind == "pil":
        return _Decoder(_pillow_image, 64)
    if kind == "ndarray":
        return _Decoder(partial(_array, form))
    simple: dict[str, Callable[[bytes], Any]] = {
        "str": bytes.decode,
        "json": read_json,
        "str_int": int,
        "str_float": float,
        "str_decimal": float,
    }
    if kind in simple:
        return _Decoder(lambda data, at, size: simple[kind](data))
    if (dtype := {"int": "int64"}.get(kind, kind)) in _VALUES.values():
        return _Decoder(lambda data, at, size: np.frombuffer(data, dtype)[0].item())
    fix = "Write it as jpeg, png, bytes, int, str, json or ndarray."
    raise SourceError(f"{where}: the field {name!r} has the encoding {encoding!r}, which is not read. {fix}")


def _pillow_image(data: bytes, at: int, size: int) -> Cell:
    width, height, letters = np.frombuffer(data, "<u4", 3).tolist()
    mode = data[12 : 12 + min(letters, 16)].decode("ascii")
    if mode not in _PILLOW:
        raise ValueError(f"a raw image of Pillow's mode {mode!r}; read are {', '.join(_PILLOW)}")
    channels, dtype = _PILLOW[mode]
    pixels = Pixels(at + 12 + letters, (height, width, channels)[: 3 if channels > 1 else 2], np.dtype(dtype))
    if pixels.size != size - 12 - letters:
        raise ValueError(f"a raw image of {width}x{height} {mode} in {size - 12 - letters} bytes")
    return pixels


def _array(form: str, data: bytes, at: int, size: int) -> Cell:
    """Returns an array, or pixels where its shape and dtype are an image's; `form` is "dtype:shape" or less."""
    name, _, sides = form.partition(":")
    start = 0
    if not name:
        name, start = _VALUES[data[0]], 1
    if sides:
        shape = tuple(map(int, sides.split(",")))
    else:
        kind = np.dtype(_SHAPES[data[start] & 3])
        axes = data[start] >> 2
        shape = tuple(np.frombuffer(data, kind, axes, start + 1).tolist())
        start += 1 + axes * kind.itemsize
    pixels = Pixels(at + start, shape, np.dtype(name))
    if pixels.size != size - start:
        raise ValueError(f"an array {shape} of {name} in {size - start} bytes")
    return pixels if pixels.upright() else np.frombuffer(data, name, offset=start).reshape(shape)


_OF_TFDS = re.compile(r".*-(\w+)\.tfrecord-\d+-of-\d+", re.DOTALL)
_LENGTH, _CHECK = struct.Struct("<QI"), 4
_GZIP = b"\x1f\x8b"
_LOOKED_AT = 3
_WINDOW = 4096
_SLACK = 1e-3  # by which fractions may be beyond an image, as rounding leaves them
_BYTES, _FLOATS, _INTEGERS = 1, 2, 3
_BOX_LABELS = ("label", "text", "name")
_SHAPE = (("height", "rows", "h"), ("width", "cols", "columns", "w"), ("depth", "channels", "c"))
_TENSORFLOW = in_python(
    "samples = [(tensorflow.io.decode_raw(one['image'], 'uint8').numpy().reshape(SHAPE), int(one['label'])) for one in "
    "dataset]; pack_images(samples, 'out.h5')"
)


def tfrecord_evidence(tree: Tree) -> list[str]:
    """Returns the first files that are TFRecords by their name and the checksum of their first record's length."""
    found = []
    for i in _positions(tree)[:_LOOKED_AT]:
        with suppress(ImageError):
            head = tree.files.read_head(i, _WINDOW)
            if head.startswith(_GZIP):
                head = zlib.decompressobj(31).decompress(head, _LENGTH.size)
            if _length(head) is not None:
                found.append(key_of(tree.names[i]))
    return found


def list_tfrecord(draft: Draft, tree: Tree, options: SourceOptions) -> Samples:
    """Returns the samples of TFRecord files, in their order; splits by their names.

    Columns are as in `list_records`; `boxes` (x, y, width, height in pixels), `num_boxes` and `box_labels` of
    image/object/bbox/xmin and its kin, or of objects/bbox as tensorflow-datasets writes it.
    """
    positions = _positions(tree)
    if not positions:
        raise SourceError(f"{tree.given}: there is no file called like a TFRecord (train-00000-of-00128, x.tfrecord).")
    names = [tree.names[i] for i in positions]
    draft.require_parts(names)
    packed = [tree.files.read_head(i, 2) == _GZIP for i in positions]
    shards = open_shards(
        tree, [(i, partial(blocks, gzip.open) if gz else None) for i, gz in zip(positions, packed, strict=True)]
    )
    table = RecordTable.of(
        tree, shards, lambda shard: _examples(str(tree.path / key_of(shard.name)), shard), CheckedSpans
    )
    draft.title = f"Layout tfrecord, recognised by {first_few(map(key_of, names), 3)}: {len(table)} records."
    about = [i for i, name in tree.not_images if name.endswith((".labels.txt", "features.json", "dataset_info.json"))]
    tree.known[[*positions, *about]] = True
    _check_counts(draft, tree, table)
    _with_pixels(draft, table)
    splits = splits_of_shards(draft.where, names, _splits_of_tfds(names) if about else {})
    classes = {name: found for name in table.cells if (found := _class_names(tree, name))}
    return list_records(draft, table, splits, options, classes, partial(_boxes, draft, tree, table, options.boxes))


def _positions(tree: Tree) -> list[int]:
    # The last letter rules most names out quickly.
    some = ((i, name) for i, name in tree.not_images if name[-1] in "dscrzDSCRZ0123456789")
    names = ((i, name.rpartition("/")[2].lower()) for i, name in some)
    return [i for i, name in names if SHARD_NAME.fullmatch(name)]


def _masked(data: bytes) -> int:
    """Returns the checksum of bytes as TFRecord writes it: their CRC-32C, turned, and a number added."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _length(head: bytes) -> int | None:
    """Returns the length that a record's head states; None if its checksum is another."""
    if len(head) < _LENGTH.size:
        return None
    length, stated = _LENGTH.unpack_from(head)
    return int(length) if _masked(head[:8]) == stated else None


@dataclass(frozen=True, eq=False)
class CheckedSpans:
    """Reads pieces of records, each with its whole record, whose checksum must be right."""

    pieces: FileSpans
    records: FileSpans  # the record of each, with its checksum

    def read(self, i: int) -> bytes:
        """Returns all bytes of piece i; ImageError says if its record is damaged."""
        record = self.records.read(i)
        if _masked(record[:-_CHECK]) != int.from_bytes(record[-_CHECK:], "little"):
            raise ImageError("is damaged: the checksum of its record is another. Fetch the file again")
        start = int(self.pieces.offsets[i] - self.records.offsets[i])
        return record[start : start + int(self.pieces.sizes[i])]

    def read_head(self, i: int, size: int) -> bytes:
        return self.pieces.read_head(i, size)

    def ranges(self, indices: NDArray[np.integer[Any]], *, heads: bool) -> list[Any]:
        """Returns the ranges of an object that are read, as `BucketFiles.ranges`."""
        return (self.pieces if heads else self.records).ranges(indices, heads=heads)

    def take(self, indices: NDArray[np.integer[Any]]) -> CheckedSpans:
        return CheckedSpans(self.pieces.take(indices), self.records.take(indices))


def _examples(where: str, shard: ShardFile) -> Iterator[Record]:
    """Yields the features of each record; SourceError names the file, the record and the problem."""
    at, number = 0, 0
    with shard.reader() as file:
        while at < shard.num_bytes:
            file.seek(shard.base + at)
            head = file.read(_LENGTH.size)
            length = _length(head)
            begin = at + _LENGTH.size
            if length is None and begin <= shard.num_bytes:
                fix = "The file is damaged from there on, or no TFRecord: fetch it again."
                raise SourceError(f"{where}: record {number}, at byte {at}: the checksum of its length is wrong. {fix}")
            if length is None or begin + length + _CHECK > shard.num_bytes:
                raise SourceError(
                    f"{where}: record {number}, at byte {at}, is cut short: the file ends at byte {shard.num_bytes}"
                    f"{f', not {begin + length + _CHECK}' if length is not None else ''}. Its copy or download did not "
                    "finish: fetch it again."
                )
            try:
                features = _features(_Window(file, shard.base + begin, length))
                yield Record(features, Blob(shard.base + begin, length + _CHECK, b""))
            except (ValueError, struct.error) as exc:
                raise SourceError(
                    f"{where}: record {number}, at byte {at}, is no tf.train.Example ({exc}). Other messages are not "
                    f"read. {_TENSORFLOW}"
                ) from exc
            at, number = begin + length + _CHECK, number + 1


class _Window:
    """Reads a record piece by piece, since most of its bytes are an image's, which are left alone."""

    def __init__(self, file: IO[bytes], start: int, size: int) -> None:
        self._file, self.start, self.end = file, start, start + size
        self._data, self._base = b"", start

    def read(self, at: int, size: int) -> bytes:
        """Returns so many bytes at an offset of the file; fewer at the record's end."""
        size = min(size, self.end - at)
        begin = at - self._base
        if begin < 0 or begin + size > len(self._data):
            self._file.seek(at)
            self._data, self._base = self._file.read(min(max(size, _WINDOW), self.end - at)), at
            begin = 0
        return self._data[begin : begin + size]

    def varint(self, at: int) -> tuple[int, int]:
        """Returns a number of 7 bits a byte, and where it ends."""
        data, value = self.read(at, 10), 0
        for i, byte in enumerate(data):
            value |= (byte & 0x7F) << 7 * i
            if byte < 0x80:
                return value, at + i + 1
        raise ValueError("a number without an end")

    def fields(self, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """Yields the number of each field of a message, its wire type, and where its content begins and ends."""
        while at < end:
            tag, at = self.varint(at)
            kind = tag & 7
            if kind == 2:
                size, at = self.varint(at)
            elif kind in (1, 5):
                size = 8 if kind == 1 else 4
            elif kind == 0:
                size = self.varint(at)[1] - at
            else:
                raise ValueError(f"a field of wire type {kind}")
            if at + size > end:
                raise ValueError("a field reaches beyond its message")
            yield tag >> 3, kind, at, at + size
            at += size


def _features(window: _Window) -> dict[str, Cell]:
    """Returns the features of an Example, by name."""
    found: dict[str, Cell] = {}
    for number, kind, at, end in window.fields(window.start, window.end):
        if number != 1 or kind != 2:
            raise ValueError("a SequenceExample, of several steps" if (number, kind) == (2, 2) else f"field {number}")
        for _, _, begin, stop in window.fields(at, end):
            entry = {part: (first, last) for part, _, first, last in window.fields(begin, stop)}
            if 1 not in entry:
                raise ValueError("a feature without a name")
            first, last = entry[1]
            name = window.read(first, last - first).decode("utf-8")
            found[name] = _feature(window, *entry[2]) if 2 in entry else None
    return found


def _feature(window: _Window, at: int, end: int) -> Cell:
    """Returns the only value of a feature, or the list of its values; None for none."""
    found: list[Any] = []
    for number, _, begin, stop in window.fields(at, end):
        for _, _, first, last in window.fields(begin, stop):
            if number == _BYTES:
                size = last - first
                found.append(Blob.of(window.read(first, min(size, BLOB_HEAD)), first, size))
            elif number == _FLOATS:
                found += np.frombuffer(window.read(first, last - first), "<f4").tolist()
            elif number == _INTEGERS:
                while first < last:
                    value, first = window.varint(first)
                    found.append(value - (value >> 63 << 64))
    if len(found) > 1 and isinstance(found[0], Blob):
        texts = [text_of(blob) for blob in found]
        found = texts if None not in texts else found
    return found if len(found) > 1 else found[0] if found else None


def _splits_of_tfds(names: Iterable[str]) -> dict[str, str]:
    """Returns the split of each file that is named as tensorflow-datasets names its own."""
    found = {name: match[1] for name in names if (match := _OF_TFDS.fullmatch(name.rpartition("/")[2]))}
    return {name: SPLITS.get(split.lower(), split) for name, split in found.items()}


def _check_counts(draft: Draft, tree: Tree, table: RecordTable) -> None:
    """Refuses files of tensorflow-datasets that hold other numbers of records than its dataset_info.json states."""
    for i, name in tree.not_images:
        if name.rpartition("/")[2] != "dataset_info.json":
            continue
        folder = name.rpartition("/")[0]
        there: dict[str, int] = {}
        for shard, count in zip(table.shards, table.counts, strict=True):
            above, _, base = shard.name.rpartition("/")
            if above == folder and (match := _OF_TFDS.fullmatch(base)):
                there[match[1]] = there.get(match[1], 0) + count
        with suppress(ValueError, KeyError, TypeError, AttributeError):  # else it is of another program
            for split in read_json(tree.read_text(i))["splits"]:
                stated = sum(map(int, split["shardLengths"]))
                if draft.on_error == "fail" and stated != (found := there.get(split["name"], stated)):
                    said = f"states {stated} records of {split['name']!r}, there are {found}"
                    draft.leave_out(key_of(name), said)


def _class_names(tree: Tree, feature: str) -> tuple[str, ...]:
    """Returns the names of a feature's classes, which tensorflow-datasets writes next to the records; () for none."""
    wanted = f"{feature.replace('/', '-')}.labels.txt"
    found = next((i for i, name in tree.not_images if name.rpartition("/")[2] == wanted), None)
    return () if found is None else tuple(line.text for line in tree.lines(found))


def _with_pixels(draft: Draft, table: RecordTable) -> None:
    """Turns bytes that are raw pixels into these, where features say height, width and depth; else refuses them."""
    if table.pictures():
        return
    sides = [next((cells for name, cells in table.cells.items() if _plain(name) in known), None) for known in _SHAPE]
    unknown = []
    for name, cells in table.cells.items():
        blobs = [cell for cell in cells if isinstance(cell, Blob)]
        if not blobs or all(text_of(blob) is not None for blob in blobs):
            continue
        shapes = list(zip(*(side or [None] * len(cells) for side in sides), strict=True))
        made = [
            _pixels(cell, *shape) if isinstance(cell, Blob) else None for cell, shape in zip(cells, shapes, strict=True)
        ]
        if all(pixels is not None for pixels, cell in zip(made, cells, strict=True) if isinstance(cell, Blob)):
            table.cells[name] = list(made)
        else:
            unknown.append(f"{name} ({blobs[0].size} bytes)")
    if unknown and not table.pictures():
        raise SourceError(
            f"{draft.where}: no feature holds the file of an image (JPEG, PNG, WebP, ...). Raw pixels in "
            f"{first_few(unknown)} are read only where integer features say their height, width and depth, and these "
            f"are uint8. {_TENSORFLOW} SHAPE and `dataset` are yours to say."
        )


def _plain(name: str) -> str:
    return name.rpartition("/")[2].lower()


def _pixels(blob: Blob, height: Cell, width: Cell, depth: Cell) -> Pixels | None:
    """Returns a blob as uint8 pixels of this size, if it has just so many bytes; without a depth, gray or colour."""
    if not isinstance(height, int) or not isinstance(width, int) or min(height, width) < 1:
        return None
    depths = (depth,) if isinstance(depth, int) else (1, 3)
    shapes = [(height, width, depth) for depth in depths if height * width * depth == blob.size]
    pixels = Pixels(blob.offset, shapes[0], np.dtype(np.uint8)) if shapes else None
    return pixels if pixels and pixels.upright() else None


class _Boxes(NamedTuple):
    """The boxes of all records, as they are written."""

    feature: str  # that holds them
    form: BoxForm  # of each of them
    of: list[NDArray[np.float64]]  # (M, 4) of each record
    labels: list[list[Any]] | None  # of each record, one a box
    names: tuple[str, ...]  # of the classes that integers among the labels stand for


def _boxes(
    draft: Draft, tree: Tree, table: RecordTable, asked: BoxForm, images: Reader
) -> tuple[dict[str, Column], dict[int, str]]:
    """Returns the columns of boxes, in pixels, and why a record's cannot be; takes them out of the table."""
    boxes = _written_boxes(tree, table, asked)
    if boxes is None:
        return {}, {}
    given = [in_stored_form(some, boxes.form)[0] for some in boxes.of]
    form: Moves = "xyxy" if boxes.form in ("xyxy", "yxyx") else "xywh"
    filled = [some for some in given if len(some)]
    in_pixels = asked != "auto" and 2 * sum(some.max() > 1 + _SLACK for some in filled) > len(filled)
    bad: dict[int, str] = {}
    owners, scaled, found = list[int](), list[Any](), list[Any]()
    for row, some in enumerate(given):
        own = boxes.labels[row] if boxes.labels else [None] * len(some)
        try:
            width, height = (1, 1) if in_pixels else _size_for_boxes(images, row, some)
            if ((some[:, 2:] < some[:, :2]) if form == "xyxy" else (some[:, 2:] < 0)).any():
                raise ImageError("has a box that ends before it begins")
            if len(own) != len(some):
                raise ImageError(f"has {len(some)} boxes and {len(own)} labels of boxes")
        except ImageError as exc:
            bad[row] = str(exc)
            continue
        owners += [row] * len(some)
        scaled += (some * (width, height, width, height)).tolist()
        found += own
    array = np.array(scaled, np.float32).reshape(-1, 4)
    slots = BoxSlots.without_nan(array, np.array(owners, np.int64), len(given), draft.where)
    turned = "in pixels" if in_pixels else "in fractions of the image were turned into pixels"
    draft.notes.append(f"Boxes by {boxes.feature} {turned}: x, y, width, height.")
    return slots.columns(array, label_column(found, boxes.names), form), bad


def _size_for_boxes(images: Reader, row: int, boxes: NDArray[np.float64]) -> tuple[int, int]:
    """Returns width and height of an image whose boxes are fractions of it; ImageError if they cannot be."""
    if not len(boxes):
        return 1, 1
    if not np.isfinite(boxes).all() or boxes.min() < -_SLACK or boxes.max() > 1 + _SLACK:
        raise ImageError(
            f"has boxes with numbers from {boxes.min():g} to {boxes.max():g}, where TensorFlow has fractions of the "
            "image, 0 to 1. If all are in pixels, `--boxes` says so (xyxy, yxyx, xywh or cxcywh)"
        )
    header = header_of(images, row)
    if header.orientation > 1:
        raise ImageError("is turned by its EXIF orientation, which TensorFlow ignores: boxes would be next to objects")
    return header.width, header.height


def _written_boxes(tree: Tree, table: RecordTable, asked: BoxForm) -> _Boxes | None:
    """Takes boxes, and their labels, out of a table; None if it has none.

    Numbers with names of their own (xmin, x_center) say what they are; of four in one list only features.json does, as
    tensorflow-datasets writes it, or `asked`.

    Raises:
        SourceError: nothing says what the numbers in a list are, names contradict `asked`, or there are not as many of
            each.
    """
    cells = table.cells
    for folder in dict.fromkeys(name.rpartition("/")[0] for name in cells):
        above = f"{folder}/" if folder else ""
        form, four = box_columns(name.removeprefix(above) for name in cells if name.rpartition("/")[0] == folder)
        lists = any(isinstance(cell, list) for side in four for cell in cells[above + side])
        if four and (lists or plain_name(folder).endswith("bbox") or four == CORNERS):
            sides = [[_as_list(cell) for cell in cells.pop(above + side)] for side in four]
            if any(len({len(side) for side in one}) > 1 for one in zip(*sides, strict=True)):
                raise SourceError(f"{tree.given}: the features {above}{', '.join(four)} have different numbers.")
            boxes = [np.array(one, np.float64).reshape(4, -1).T for one in zip(*sides, strict=True)]
            # x, y, width and height may also be of the middle.
            if asked not in ("auto", form) and (form, asked) != ("xywh", "cxcywh"):
                raise SourceError(
                    f"{tree.given}: `--boxes {asked}`, but the features {above}{', '.join(four)} are {form} by their "
                    "names. Leave `--boxes` out."
                )
            form = form if asked == "auto" else asked
            return _Boxes(f"{above}{', '.join(four)}", form, boxes, *_labels_of_boxes(tree, table, folder))
    for name in [name for name in cells if _plain(name) in BOX_KEYS]:
        written = [_as_list(cell) for cell in cells[name]]
        numbers = all(isinstance(one, (int, float)) for some in written for one in some)
        if not any(written) or not numbers or any(len(some) % 4 for some in written):
            continue
        about = [i for i, other in tree.not_images if other.rpartition("/")[2] == "features.json"]
        said = [text for i in about if b"BBoxFeature" in (text := tree.read_text(i))]
        known = bool(said) and not any(re.search(rb'"bboxFormat": *"(?!(REL_)?YXYX)', text) for text in said)
        if asked == "auto" and not known:
            raise SourceError(
                f"{tree.given}: the feature {name!r} holds boxes as four numbers in a row, such as "
                f"{', '.join(f'{one:g}' for one in next(filter(None, written))[:4])}, and nothing says what they are. "
                "TensorFlow has ymin, xmin, ymax, xmax: `--boxes yxyx`; others two corners, x before y: `--boxes "
                "xyxy`; a corner, width and height: `--boxes xywh`; or the middle: `--boxes cxcywh`."
            )
        del cells[name]
        boxes = [np.array(some, np.float64).reshape(-1, 4) for some in written]
        form = "yxyx" if asked == "auto" else asked
        return _Boxes(name, form, boxes, *_labels_of_boxes(tree, table, name))
    return None


def _labels_of_boxes(tree: Tree, table: RecordTable, boxes: str) -> tuple[list[list[Any]] | None, tuple[str, ...]]:
    """Takes the labels of boxes, which are next to their feature, out of a table; and names of their classes."""
    cells, above = table.cells, boxes.rpartition("/")[0]
    near = [name for name in cells if above and name.startswith(f"{above}/")]
    names = [name for last in _BOX_LABELS for name in near if _plain(name) == last]
    if not names:
        return None, ()
    found = [[text_of(one) if isinstance(one, Blob) else one for one in _as_list(cell)] for cell in cells[names[0]]]
    for name in names:
        del cells[name]
    return found, _class_names(tree, names[0])


def _as_list(cell: Cell) -> list[Any]:
    return cell if isinstance(cell, list) else [] if cell is None else [cell]


_CRC_ALL = 0xFFFFFFFF
_CRC_SHORT = 64  # bytes up to which a plain loop is the fastest
_CRC_BLOCK = 512  # bytes whose remainders are looked up at once


@cache
def _crc_table() -> tuple[int, ...]:
    """Returns the remainder of each byte."""
    table = range(256)
    for _ in range(8):
        table = [value >> 1 ^ (0x82F63B78 if value & 1 else 0) for value in table]  # type: ignore[assignment]
    return tuple(table)


@cache
def _crc_array() -> NDArray[np.uint32]:
    return np.array(_crc_table(), np.uint32)


@cache
def _crc_by_distance() -> NDArray[np.uint32]:
    """Returns the remainder of a byte (256) that so many bytes of zero follow (_CRC_BLOCK), the last column none."""
    table = np.empty((_CRC_BLOCK, 256), np.uint32)
    table[-1] = _crc_array()
    for at in range(_CRC_BLOCK - 2, -1, -1):
        table[at] = _crc_array()[table[at + 1] & 0xFF] ^ table[at + 1] >> 8
    return table


def crc32c(data: bytes) -> int:
    """Returns the CRC-32C of bytes."""
    if len(data) > _CRC_SHORT and (compiled := library()) is not None:
        return int(compiled.fastload_crc32c(data, len(data), _crc_array().ctypes.data))
    crc, table, rest = _CRC_ALL, _crc_table(), 0
    if len(data) > _CRC_SHORT:
        # A remainder is linear: each block's own, and what the one before becomes over its first four bytes.
        rest = len(data) // _CRC_BLOCK * _CRC_BLOCK
        blocks = np.frombuffer(data, np.uint8, rest).reshape(-1, _CRC_BLOCK)
        by_distance = _crc_by_distance()
        own = np.bitwise_xor.reduce(by_distance[np.arange(_CRC_BLOCK), blocks], axis=1)
        first, second, third, fourth = by_distance[:4].tolist()
        for remainder in own.tolist():
            crc = remainder ^ first[crc & 0xFF] ^ second[crc >> 8 & 0xFF] ^ third[crc >> 16 & 0xFF] ^ fourth[crc >> 24]
    for byte in data[rest:]:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ _CRC_ALL
