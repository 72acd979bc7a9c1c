"""Describes what a file holds and how it lies on disk, for packed files and any other HDF5 file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import h5py
import numpy as np

from fastload.errors import FormatError, ReadError
from fastload.format.codecs import FILTER_NAMES, pipeline, why_unreadable
from fastload.format.digests import MOST_READ, attributes, dtype_of, linear_offset
from fastload.format.header import FileIdentity, PackedFile, open_hdf5, read_header
from fastload.format.joined import open_files
from fastload.format.shards import Shards, check_mappings
from fastload.format.texts import captions_of_row
from fastload.inspection.chunk_layout import (
    ChunkLayout,
    RaggedInfo,
    chunk_layout,
    describe_ragged,
    findings,
    repack_hint,
)
from fastload.read.linear import FILE_SYSTEMS, resolve_read_mode
from fastload.read.row_table import index_part
from fastload.remote.open_url import open_packed, open_remote
from fastload.remote.urls import FileName, as_given, is_url, short_name
from fastload.system import syscalls
from fastload.system.advice import advice
from fastload.system.text import text_of

if TYPE_CHECKING:
    from fastload.remote.remote_shards import RemoteShards

MAX_COUNTED_BYTES = 256 * 2**20
_MOST_OBJECTS = 1000  # of a file that FastLoader cannot read; each takes 0.3 ms
_MOST_MASKS, _MASK_BYTES = 64, 64 * 2**20  # that are looked at
_OF_HDF5 = ("deflate", "shuffle", "fletcher32", "szip", "nbit", "scaleoffset", "lzf")  # h5py brings lzf
_MENTIONED = 16  # groups and other types in a foreign file are nothing special


@dataclass(frozen=True)
class FieldInfo:
    """One dataset."""

    name: str  # path in the file, without the leading slash
    shape: tuple[int, ...]  # of the whole dataset, (N, ...)
    dtype: str  # of its elements, as NumPy writes it
    bytes: int  # of its elements, uncompressed
    stored_bytes: int  # that HDF5 allocated for it in the file
    chunks: tuple[int, ...] | None  # HDF5 chunk shape; None for contiguous storage
    filters: tuple[str, ...]  # names of its HDF5 filters
    linear: bool  # whether all rows lie back to back, unfiltered, so that a row can be read without HDF5
    num_names: int  # number of class, attribute or split names in its attributes


@dataclass(frozen=True)
class FileInfo:
    """Result of `inspect_file`; `to_dict` returns it as values for JSON.

    Attributes:
        path: as given; of a URL without what may be secret in it.
        version: format version; None for a file that fastload did not write.
        writer: release that wrote it; None for such a file.
        num_samples: of a foreign file the rows of its pixel dataset, 0 without one.
        fields: every dataset by name, pixels first.
        splits: by name, the first row of each and the one behind its last.
        classes: class or attribute names in label order.
        class_counts: samples of each class, or with each attribute set; None if there are no names.
        mask_shares: by value, its share of the masks' pixels, in up to 64 masks; empty without masks.
        mask_names: names of the classes in masks, by number; empty where they have none.
        mask_ignored: value of masks that means no class (`ignore_index`); None where there is none.
        layout: how the pixels lie on disk; None if no dataset looks like images, or if the images are ragged.
        stores: `images` and `masks` if they are ragged (rows of varying length): what each holds.
        file_bytes: size of the file.
        pixel_bytes: of the pixels, uncompressed and decoded.
        header_digest: identity of the file, hex; None for a file that FastLoader cannot read.
        captions: texts of the first image, as an example.
        decoder: that decoded the pixels.
        source_layout: layout of the source the file was packed from.
        pack_options: options that affected the file's bytes.
        seed: of the shuffle.
        shuffled: whether rows were shuffled within each split.
        read: how `FastLoader` reads it by default, "map" or "pread".
        file_system: name of the network file system or the like that it is on; None for a local one.
        held_off: whether writers wait while rows are copied from its mapping; not where nothing is mapped.
        num_shards: of an index; None for a file that holds its rows itself.
        cached: of a URL, the folder of the cache on this machine that its chunks are read from; None for a path.
        needs: by dataset, how it is compressed, and the package that a program needs to read it besides h5py or
            another HDF5 library; datasets that need none are left out.
        findings: sentences on what makes the file slow or unreadable, and how to fix it.
    """

    path: Path | str
    version: int | None
    writer: str | None
    num_samples: int
    fields: dict[str, FieldInfo]
    splits: dict[str, tuple[int, int]]
    classes: tuple[str, ...]
    class_counts: tuple[int, ...] | None
    mask_shares: dict[int, float]
    mask_names: tuple[str, ...]
    mask_ignored: int | None
    layout: ChunkLayout | None
    stores: dict[str, RaggedInfo]
    file_bytes: int
    pixel_bytes: int
    header_digest: str | None
    decoder: str | None
    source_layout: str | None
    pack_options: dict[str, Any]
    seed: int | None
    shuffled: bool | None
    read: str
    file_system: str | None
    held_off: bool
    findings: tuple[str, ...]
    num_shards: int | None = None
    cached: Path | None = None
    captions: tuple[str, ...] = ()

    @property
    def needs(self) -> dict[str, str]:
        """The packages that other programs need, by dataset."""
        found = {}
        for name, field in self.fields.items():
            plugins = [one for one in field.filters if one not in _OF_HDF5]
            if plugins:
                number = next((number for number, known in FILTER_NAMES.items() if known == plugins[0]), 0)
                found[name] = advice("hdf5plugin", filter=plugins[0], number=number)
        for name, ragged in self.stores.items():
            if any(each.name == "zstd" for each in ragged.encodings):
                found[name] = advice("zstandard")
        return found

    @property
    def name(self) -> str:
        """The name of its path, or the whole URL."""
        return short_name(self.path)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain dicts, lists, strings and numbers, for `json.dumps`."""
        return {
            "file": self.name,
            **asdict(self),
            "path": str(self.path),
            "needs": self.needs,
            "cached": None if self.cached is None else str(self.cached),
        }


def inspect_file(path: FileName | Sequence[FileName]) -> FileInfo:
    """Describes a file by its header and HDF5's chunk index; of pixels only some masks are read.

    Works on any HDF5 file: if `read_header` refuses a foreign one, all its groups are searched and the largest dataset
    that looks like images is described. Of a URL only headers are fetched, and no masks are looked at. A list of packed
    files is described as the index of them.

    Raises:
        MissingFileError: there is no such file.
        FormatError: not HDF5, truncated, or a packed file that is damaged or of a newer format.
        RemoteError, OptionError: as `open_remote`, of a URL.
    """
    if not isinstance(path, (str, os.PathLike)):
        if not any(map(is_url, path)):
            return _inspect_index(open_files(path), None)
        listed = open_remote([os.fspath(one) for one in path])
        with closing(cast("RemoteShards", listed.remote)):
            return _inspect_index(listed, None)
    if is_url(path):
        return _inspect_url(path)
    path = Path(path)
    header: PackedFile | None = None
    refusal = ""
    try:
        header = read_header(path)
    except FormatError as exc:
        with open_hdf5(path) as file, suppress(RuntimeError, KeyError, OSError):
            if "fastload_version" not in file.attrs:
                refusal = f"FastLoader cannot read this file as it is: {exc}"
        if not refusal:  # a packed file, or not even its attributes can be read
            raise
    with open_hdf5(path) as file:
        if header is not None and header.is_index:
            return _inspect_index(header, file)
        return _inspect(path, file, header, refusal)


def _inspect_url(url: FileName) -> FileInfo:
    """Describes a file or an index behind a URL, by what its headers say."""
    with open_packed(url) as header:
        shards, remote = header.shards, cast("RemoteShards", header.remote)
        held = nullcontext() if header.is_index else remote.holding_header(0)
        remote.cache.current().announce(
            remote.table.headers.tolist()
        )  # of many shards, whose labels are counted, several at a time
        with held, open_hdf5(header.path) as file:
            if header.is_index:
                found = _inspect_index(header, file)
            else:
                found = _inspect(header.path, file, read_header(header.path), "", with_pixels=False)
        return replace(
            found,
            path=as_given(url),
            file_bytes=int(shards.num_bytes.sum()) + (header.identity.size if found.num_shards is not None else 0),
            file_system=None,
            held_off=False,
            cached=header.path.parent.parent.parent,
        )


def _inspect_index(header: PackedFile, file: h5py.File | None) -> FileInfo:
    """Describes an index with its shards by what it says of them; its virtual datasets have to agree with that.

    `file`: None for an index that is in no file.
    """
    shards = header.shards
    if file is not None:
        check_mappings(
            header.path, file, shards, header.fields, {name: one.shard_bytes for name, one in header.ragged.items()}
        )
    fields = {
        name: FieldInfo(
            name=name,
            shape=field.stored_shape(header.num_rows),
            dtype="uint8" if name in header.ragged else str(field.dtype),
            bytes=(num_bytes := field.row_bytes * header.num_rows),
            stored_bytes=num_bytes,
            chunks=field.chunks,
            filters=field.filters,
            linear=field.linear,
            num_names=len(field.names),
        )
        for name, field in header.fields.items()
    }
    from fastload.read.reader import open_columns  # 15 ms, which most files do not need

    with open_columns(header) as columns:
        counts, images = _class_counts(columns, header), header.fields.get("images")
        captions = tuple(captions_of_row(columns, 0))
        pixels = 0
        if images is not None:
            sizes = index_part(columns, header, "images", "shape").astype(np.int64)
            pixels = int(sizes.prod(axis=1).sum()) * images.dtype.itemsize
    return FileInfo(
        **_of_header(header),
        num_samples=header.num_rows,
        fields=fields,
        class_counts=counts,
        mask_shares={},
        layout=None,
        stores={},
        file_bytes=(header.path.stat().st_size if file is not None else 0) + int(shards.num_bytes.sum()),
        pixel_bytes=pixels,
        num_shards=len(shards.names),
        captions=captions,
        findings=(),
    )


def _of_header(header: PackedFile) -> dict[str, Any]:
    """Returns what the header of a file or of an index says, as attributes of `FileInfo`."""
    attrs = header.attrs if header.version is not None else {}
    texts = {name: str(attrs[name]) for name in ("fastload_writer", "decoder", "source_layout") if name in attrs}
    pack_options: dict[str, Any] = {}
    with suppress(TypeError, ValueError):
        pack_options = dict(json.loads(attrs.get("pack_options", "")))
    return {
        "path": header.path,
        "version": header.version,
        "writer": texts.get("fastload_writer"),
        "splits": {name: (rows.start, rows.stop) for name, rows in header.splits.items()},
        "classes": header.fields["labels"].names if "labels" in header.fields else (),
        "mask_names": header.fields["masks"].names if "masks" in header.fields else (),
        "mask_ignored": _ignored(header),
        "header_digest": header.header_digest or None,
        "decoder": texts.get("decoder"),
        "source_layout": texts.get("source_layout"),
        "pack_options": pack_options,
        "seed": header.seed if attrs else None,
        "shuffled": header.shuffled if attrs else None,
        **_reading(header.place),
    }


def _inspect(
    path: Path, file: h5py.File, header: PackedFile | None, refusal: str, *, with_pixels: bool = True
) -> FileInfo:
    datasets: dict[str, h5py.Dataset] = {}
    if header:
        datasets, hidden = {name: file[name] for name in header.fields}, max(0, len(file) - len(header.fields))
    else:  # every group; soft and external links are not followed
        hidden = _visit(file, datasets)
        shards = Shards.of_file(path.name, "", 0, 0, None, 0)
        header = PackedFile(path, None, 0, {}, {}, "", False, 0, FileIdentity.of(path.stat()), {}, shards)
    stores = {name: describe_ragged(file, header, name) for name in header.ragged}
    offsets = {name: linear_offset(item) for name, item in datasets.items()}
    fields = {}
    for name, item in datasets.items():
        names = attributes(item).get("names", ())
        shape = tuple(int(n) for n in item.shape or ())
        fields[name] = FieldInfo(
            name=name,
            shape=shape,
            dtype=str(item.dtype),
            bytes=math.prod(shape) * item.dtype.itemsize,
            stored_bytes=int(item.id.get_storage_size()),
            chunks=tuple(int(n) for n in item.chunks) if item.chunks else None,
            filters=tuple(one.name for one in pipeline(item)),
            linear=offsets[name] is not None,
            num_names=len(names) if isinstance(names, tuple) else 1,
        )
    found = [refusal] if refusal else []
    num_attributes = max([len(file.attrs), *(len(item.attrs) for item in datasets.values())])
    notes = []
    if hidden > _MENTIONED:
        notes.append(f"{hidden:,} more datasets or groups in it are not looked at.")
    elif header.left_out:
        notes.append(f"Not loaded, being no numbers by image: {', '.join(header.left_out)}.")
    if num_attributes > MOST_READ:
        notes.append(f"Of {num_attributes:,} attributes only the first {MOST_READ:,} are looked at.")
    missing = [reason for name, item in datasets.items() if (reason := why_unreadable(path, name, item))]
    # `images`, else the largest dataset of plain numbers with 3 or 4 axes.
    likely = [
        name
        for name, item in datasets.items()
        if item.dtype.kind in "uif" and item.ndim in (3, 4) and fields[name].bytes and "images" not in stores
    ]
    layout = None
    if likely:
        pixels = max(likely, key=lambda name: (name == "images", fields[name].bytes))
        fields = {pixels: fields[pixels], **fields}
        layout = chunk_layout(pixels, datasets[pixels], offsets[pixels])
        found += findings(datasets[pixels], layout)
    elif not header.fields:
        found.append("No dataset looks like images: numbers with three or four axes.")
    hint = advice("pack images again")
    if header.fields and layout and not layout.missing_chunks:
        hint = repack_hint(layout, packed=header.version is not None)
    return FileInfo(
        **_of_header(header),
        num_samples=header.num_rows or (layout.shape[0] if layout else 0),
        fields=fields,
        class_counts=_class_counts(file, header),
        mask_shares=_mask_shares(header) if not refusal and with_pixels else {},
        captions=tuple(captions_of_row(file, 0)) if header.fields and not refusal and with_pixels else (),
        layout=layout,
        stores=stores,
        file_bytes=path.stat().st_size,
        pixel_bytes=layout.pixel_bytes if layout else stores["images"].pixel_bytes if "images" in stores else 0,
        findings=(*missing, *notes, *found, hint) if found else (*missing, *notes),
    )


def _reading(path: Path) -> dict[str, Any]:
    read = resolve_read_mode(path, "auto")
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        held_off = read == "map" and syscalls.hold_off_writers(fd)
    finally:
        os.close(fd)  # which lets writers
    return {"read": read, "file_system": FILE_SYSTEMS.get(syscalls.file_system_of(path) or 0), "held_off": held_off}


def _visit(file: h5py.File, datasets: dict[str, h5py.Dataset]) -> int:
    """Adds the datasets of all groups, by path, up to `_MOST_OBJECTS`; returns the objects left out, as far as known.

    Soft and external links are not followed.
    """
    left = iter(range(_MOST_OBJECTS))

    def add(name: str | bytes, item: h5py.HLObject) -> bool | None:
        if isinstance(item, h5py.Dataset) and dtype_of(item) is not None:
            datasets[text_of(name)] = item
        return True if next(left, None) is None else None  # anything but None ends the visit

    return max(1, len(file) - _MOST_OBJECTS) if file.visititems(add) else 0


def _class_counts(file: Mapping[str, Any], header: PackedFile) -> tuple[int, ...] | None:
    """Returns the samples of each class, or with each attribute set; reads all labels, which are small."""
    labels = header.fields.get("labels")
    if labels is None or not labels.names or labels.row_bytes * header.num_rows > MAX_COUNTED_BYTES:
        return None
    if (values := file["labels"][()]).dtype.kind not in "iu":
        return None
    if values.ndim == 2 and values.shape[1] == len(labels.names):
        counts = np.count_nonzero(values, axis=0)
    else:
        known = values[(values >= 0) & (values < len(labels.names))].ravel()
        counts = np.bincount(known.astype(np.int64), minlength=len(labels.names))
    return tuple(int(count) for count in counts)


def _mask_shares(header: PackedFile) -> dict[int, float]:
    """Returns the share of each value in the pixels of some masks, evenly chosen; none where they cannot be read."""
    field = header.fields.get("masks")
    if field is None or not header.num_rows or field.dtype.name not in ("uint8", "uint16") or len(field.shape) != 2:
        return {}
    from fastload.read.reader import open_rows  # which imports more than other files need

    count = max(1, min(_MOST_MASKS, _MASK_BYTES // field.row_bytes, header.num_rows))
    rows = np.arange(count) * header.num_rows // count
    total = np.zeros(1 << 8 * field.dtype.itemsize, np.int64)
    with suppress(ReadError), closing(open_rows(header, ["masks"])) as reader:
        if field.varied:
            masks = reader.decoded("masks", rows)
        else:
            masks = [field.empty(count)]
            reader.gather(rows, {"masks": masks[0]})
        for mask in masks:
            total += np.bincount(mask.ravel(), minlength=len(total))
    return {value: total[value] / total.sum() for value in np.flatnonzero(total).tolist()}


def _ignored(header: PackedFile) -> int | None:
    found = header.fields["masks"].attrs.get("ignore_index") if "masks" in header.fields else None
    return found if isinstance(found, int) else None
