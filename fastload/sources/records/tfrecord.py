"""TFRecord: files of records, each a tf.train.Example, as TensorFlow and its datasets write them.

    train-00000-of-01024                 image/encoded, image/class/label, image/object/bbox/xmin, ...
    mnist-train.tfrecord-00000-of-00001  of tensorflow-datasets, next to features.json and label.labels.txt
    photos.tfrecord[.gz]                 one file, one split

A record is its length (uint64), a checksum of that, an Example in protobuf, and a checksum of it. An Example maps the
names of features to lists of bytes, floats or int64. Checksums of lengths are checked when files are listed, checksums
of records when their images are read: else all images would be read twice.
"""

from __future__ import annotations

import gzip
import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastload.errors import ImageError, SourceError
from fastload.format.ragged import Column, Moves
from fastload.images.image_header import ImageHeader, probe_image
from fastload.sources.assemble import Draft, Samples
from fastload.sources.box_forms import CORNERS, BoxSlots, in_stored_form
from fastload.sources.foreign import SHARD_NAME, in_python
from fastload.sources.listing import SPLITS, BoxForm, Files, Reader, SourceOptions, first_few
from fastload.sources.records.record_table import (
    BLOB_HEAD,
    Blob,
    Cell,
    Pixels,
    Record,
    RecordTable,
    ShardFile,
    list_records,
    open_shards,
    splits_of_shards,
    text_of,
)
from fastload.sources.spans import FileSpans
from fastload.sources.tables.boxes import BOX_KEYS, box_columns, label_column
from fastload.sources.tables.frame import plain_name
from fastload.sources.tree import Tree, key_of
from fastload.system.crc32c import crc32c
from fastload.system.text import read_json

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
    shards = open_shards(tree, [(i, _gunzip if gz else None) for i, gz in zip(positions, packed, strict=True)])
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


def _gunzip(file: IO[bytes]) -> Iterable[bytes]:
    with gzip.open(file) as content:
        while block := content.read(2**20):
            yield block


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
                raise SourceError(
                    f"{where}: record {number}, at byte {at}: the checksum of its length is wrong. The file is damaged "
                    "from there on, or no TFRecord: fetch it again."
                )
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
            found[name] = _values(window, *entry[2]) if 2 in entry else None
    return found


def _values(window: _Window, at: int, end: int) -> Cell:
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
    slots = BoxSlots.of(np.array(owners, np.int64), len(given), draft.where)
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
    header: ImageHeader = (
        probe_image(lambda size: images.read_head(row, size)) if isinstance(images, Files) else images.header(row)  # type: ignore[union-attr]
    )
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
