"""Samples that are records in shard files: the cells of all records, which of them is the image, the rest as columns.

A format only yields the cells of each record; images stay where they are in the shards, and are read there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from fastload.errors import FastloadError, OptionError, SourceError
from fastload.format.ragged import Column
from fastload.images.image_header import KINDS, ImageHeader, check_size, header_of_pixels, looks_like_image
from fastload.remote.paths import ObjectPath
from fastload.remote.ranges import open_binary
from fastload.sources.assemble import Draft, Samples, Splits, fill_value, keys_in_shards
from fastload.sources.captions import caption_column, caption_columns, maybe_captions, texts_in
from fastload.sources.listing import Files, Masks, Reader, SourceOptions, first_few, split_of_shard
from fastload.sources.spans import FileSpans, JoinedFiles, ListedFile, ListedObject, UnpackedImages
from fastload.sources.tables.frame import IMAGES, LABELS, Frame, columns_of, plain_name, usual_names
from fastload.sources.tables.read_table import Values, other, values_of
from fastload.sources.tree import Tree, key_of
from fastload.sources.webdataset import MASK_WORDS

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
    if lost := [name for name, cells in table.cells.items() if name in values and _is_unread(cells, values[name])]:
        draft.notes.append(f"NOT READ: {first_few(lost, 12)}: neither numbers nor text nor images.")
        values = {name: some for name, some in values.items() if name not in lost}
    said = {name: list(map(text_of, table.cells[name])) for name in values if maybe_captions(_last(name))}
    if options.captions != "none" and (caption := caption_column(said, options.labels)):
        draft.notes.append(f"Captions by the field {caption!r}.")
        columns |= caption_columns(draft, list(map(texts_in, said[caption])), options, table.location)
        del values[caption]
    labels = options.labels or _label_field(values)
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


def _is_mask(name: str) -> bool:
    return not MASK_WORDS.isdisjoint(re.split(r"[^a-z]+", name.lower()))


def _image_and_mask(
    draft: Draft, table: RecordTable, pictures: dict[str, int], options: SourceOptions
) -> tuple[str, str]:
    """Returns the fields of the image and of the mask, "" for no mask."""
    image = options.image_column
    if image and image not in pictures:
        said = "holds no images" if image in table.cells else f"is not there; there are {first_few(table.cells, 20)}"
        raise OptionError(f"{draft.where}: the field --image-column {image!r} {said}.")
    masks = [name for name in pictures if _is_mask(name)]
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


def _is_unread(cells: list[Cell], values: Values) -> bool:
    return values.kind == "other" and any(cell is not None for cell in cells)


def _label_field(values: dict[str, Values]) -> tuple[str, ...]:
    """Returns the field of the labels by its usual names; () if there is none."""
    usable = [name for name, some in values.items() if some.kind != "other" and some.values.ndim == 1]
    return tuple(usual_names(usable, (*LABELS, "y", "cls"), _last)[:1])
