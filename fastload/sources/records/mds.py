"""MosaicML's MDS: shards of records, and an index.json that names them and the encoding of each field.

    train/index.json                version 2: the shards, their fields, encodings and sizes
    train/shard.00000.mds[.zstd]    number of records, where each begins (uint32), fields as text, the records
    val/index.json                  a folder for each split; or one index for all

A record is the sizes of its fields of varying size, then all its fields. Nothing is unpickled.
"""

from __future__ import annotations

import bz2
import gzip
import posixpath
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import IO, Any, NamedTuple

import numpy as np

from fastload.errors import ImageError, MissingExtraError, SourceError
from fastload.sources.assemble import Draft, Samples
from fastload.sources.foreign import in_python
from fastload.sources.listing import SourceOptions, first_few
from fastload.sources.records.record_table import (
    BLOB_HEAD,
    Blob,
    Cell,
    Pixels,
    Record,
    RecordTable,
    ShardFile,
    Unpack,
    list_records,
    open_shards,
    splits_of_shards,
)
from fastload.sources.tree import Tree, key_of
from fastload.system.text import read_json

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


class _Shard(NamedTuple):
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
    found: dict[str, _Shard] = {}  # by name: an index for all folders names the same shards as those in them
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


def _shards_of(tree: Tree, i: int) -> list[_Shard]:
    """Returns the shards that an index.json names."""
    where, folder = tree.where(i), tree.names[i].removesuffix(_INDEX)
    try:
        index = read_json(tree.read_text(i))
        index_of = index if isinstance(index, dict) else {}
        shards = [_shard(folder, one) for one in index_of.get("shards", ())]
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise SourceError(
            f"{where} is damaged: {type(exc).__name__}: {exc}. Fetch it again; without it, `streaming.base.util` can "
            "merge the index files of parts."
        ) from exc
    return shards


def _shard(folder: str, one: dict[str, Any]) -> _Shard:
    if one["format"] != "mds" or one["version"] != 2:
        raise ValueError(f"a shard of format {one['format']!r}, version {one['version']!r}; read is 'mds', version 2")
    names = [one[key]["basename"] if one.get(key) else "" for key in ("raw_data", "zip_data")]
    if any(posixpath.isabs(name) or ".." in name.split("/") for name in names):
        raise ValueError(f"a shard outside of its folder: {names}")
    raw, packed = (posixpath.normpath(folder + name) if name else "" for name in names)
    fields = zip(one["column_names"], one["column_encodings"], [size or 0 for size in one["column_sizes"]], strict=True)
    compression = str(one.get("compression") or "").partition(":")[0]
    return _Shard(raw, packed, compression, int(one["samples"]), int(one["raw_data"]["bytes"]), tuple(fields))


def _unpack(tree: Tree, shard: _Shard) -> Unpack:
    known: dict[str, Unpack] = {"gz": partial(_blocks, gzip.open), "bz2": partial(_blocks, bz2.open), "zstd": _zstd}
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


def _blocks(opener: Callable[[IO[bytes]], Any], file: IO[bytes]) -> Iterable[bytes]:
    with opener(file) as content:
        while block := content.read(_BLOCK):
            yield block


def _zstd(file: IO[bytes]) -> Iterable[bytes]:
    import zstandard

    yield from zstandard.ZstdDecompressor().read_to_iter(file, write_size=_BLOCK)


def _records(tree: Tree, file: ShardFile, shard: _Shard) -> Iterator[Record]:
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
    raise SourceError(
        f"{where}: the field {name!r} has the encoding {encoding!r}, which is not read. Write it as jpeg, png, bytes, "
        "int, str, json or ndarray."
    )


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
