"""What a file holds and how it lies on disk, for packed files and for anybody's HDF5."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from fastload.chunks import MEND, REPACK, ChunkLayout, chunk_layout, findings
from fastload.errors import FormatError
from fastload.filters import pipeline, why_unreadable
from fastload.format import PackedFile, linear_offset, open_hdf5, plain, read_header
from fastload.store_info import StoreInfo, describe_store

MAX_COUNTED_BYTES = 256 * 2**20


@dataclass(frozen=True)
class FieldInfo:
    """One dataset.

    Attributes:
        name: path in the file, without the leading slash.
        shape: of the whole dataset, (N, ...).
        dtype: of its elements as NumPy writes it.
        bytes: of its elements, uncompressed.
        stored_bytes: that HDF5 allocated for it in the file.
        chunks: HDF5 chunk shape; None for contiguous storage.
        filters: names of its HDF5 filters.
        linear: all rows lie back to back, unfiltered, so a row can be read without HDF5.
        num_names: how many class, attribute or split names it carries.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    stored_bytes: int
    chunks: tuple[int, ...] | None
    filters: tuple[str, ...]
    linear: bool
    num_names: int


@dataclass(frozen=True)
class FileInfo:
    """What `inspect_file` found; `to_dict` gives it as JSON-able values.

    Attributes:
        path: as given.
        version: format version; None for a file that fastload did not write.
        writer: release that wrote it; None likewise.
        num_samples: N; for a foreign file the rows of its pixel dataset, 0 without one.
        fields: every dataset by name, pixels first.
        splits: name -> (start, stop) of its rows.
        classes: class or attribute names in label order.
        class_counts: samples of each class, or with each attribute set; None when there are no names.
        layout: how the pixels lie on disk; None when no dataset looks like images, or when these lie in a store.
        stores: `images` and `masks` that lie in byte stores: what each holds.
        file_bytes: size of the file.
        pixel_bytes: of the pixels, uncompressed and decoded.
        header_digest: identity of the file, hex; None for a file that FastLoader cannot read.
        decoder: what decoded the pixels.
        source_layout: layout of the source the file was packed from.
        pack_options: options that shaped its bytes.
        seed: of the shuffle.
        shuffled: rows were shuffled within each split.
        findings: sentences: what makes the file slow or unreadable, and the mend.
    """

    path: Path
    version: int | None
    writer: str | None
    num_samples: int
    fields: dict[str, FieldInfo]
    splits: dict[str, tuple[int, int]]
    classes: tuple[str, ...]
    class_counts: tuple[int, ...] | None
    layout: ChunkLayout | None
    stores: dict[str, StoreInfo]
    file_bytes: int
    pixel_bytes: int
    header_digest: str | None
    decoder: str | None
    source_layout: str | None
    pack_options: dict[str, Any]
    seed: int | None
    shuffled: bool | None
    findings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers, for `json.dumps`."""
        return {**asdict(self), "path": str(self.path)}


def inspect_file(path: str | Path) -> FileInfo:
    """Everything about a file that its header and HDF5's chunk index tell; pixels are not read.

    Works on any HDF5 file: where `read_header` refuses a foreign one, all its groups are walked and the largest
    image-like dataset is described.

    Raises:
        MissingFileError: there is no such file.
        FormatError: not HDF5, truncated, or a packed file that is damaged or of a newer format.
    """
    path = Path(path)
    header: PackedFile | None = None
    refusal = ""
    try:
        header = read_header(path)
    except FormatError as exc:
        if not _is_foreign(path):
            raise
        refusal = f"FastLoader cannot read this file as it is: {exc}"
    with open_hdf5(path) as file:
        try:
            return _inspect(path, file, header, refusal)
        except (RuntimeError, KeyError, OSError) as exc:
            raise FormatError(
                f"{path}: its HDF5 structure is damaged ({exc}). Copy it again, or pack it again."
            ) from exc


def _is_foreign(path: Path) -> bool:
    with open_hdf5(path) as file:
        try:
            return "fastload_version" not in file.attrs
        except (RuntimeError, KeyError, OSError):
            return False  # its very attributes cannot be read; the first refusal says so


def _inspect(path: Path, file: h5py.File, header: PackedFile | None, refusal: str) -> FileInfo:
    datasets = {name: file[name] for name in header.fields} if header else dict(_walk(file))
    offsets = {name: header.fields[name].offset if header else linear_offset(item) for name, item in datasets.items()}
    fields = {name: _field_info(name, item, offsets[name]) for name, item in datasets.items()}
    stored = [name for name, field in header.fields.items() if field.store is not None] if header else []
    stores = {name: describe_store(file, header, name) for name in stored} if header else {}
    for name in stored:
        fields[name] = replace(fields[name], linear=True)
    found = [refusal] if refusal else []
    missing = [reason for name, item in datasets.items() if (reason := why_unreadable(path, name, item))]
    pixels = None if "images" in stores else _pixel_dataset(datasets)
    layout = None
    if pixels:
        fields = {pixels: fields[pixels], **fields}
        layout = chunk_layout(pixels, datasets[pixels], offsets[pixels])
        found += findings(datasets[pixels], layout)
    elif not header:
        found.append("No dataset looks like images: numbers with three or four axes.")
    mend = REPACK if header and layout and not layout.missing_chunks else MEND
    attrs = header.attrs if header and header.version is not None else {}
    return FileInfo(
        path=path,
        version=header.version if header else None,
        writer=_text(attrs.get("fastload_writer")),
        num_samples=header.num_rows if header else (layout.shape[0] if layout else 0),
        fields=fields,
        splits={name: (rows.start, rows.stop) for name, rows in header.splits.items()} if header else {},
        classes=header.fields["labels"].names if header and "labels" in header.fields else (),
        class_counts=_class_counts(file, header) if header else None,
        layout=layout,
        stores=stores,
        file_bytes=path.stat().st_size,
        pixel_bytes=layout.pixel_bytes if layout else stores["images"].pixel_bytes if "images" in stores else 0,
        header_digest=header.header_digest if header else None,
        decoder=_text(attrs.get("decoder")),
        source_layout=_text(attrs.get("source_layout")),
        pack_options=_pack_options(attrs.get("pack_options")),
        seed=header.seed if header and attrs else None,
        shuffled=header.shuffled if header and attrs else None,
        findings=(*missing, *found, mend) if found else tuple(missing),
    )


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _pack_options(value: Any) -> dict[str, Any]:
    try:
        options = json.loads(value)
    except (TypeError, ValueError):
        return {}
    return options if isinstance(options, dict) else {}


def _walk(file: h5py.File) -> Iterator[tuple[str, h5py.Dataset]]:
    """Every dataset of every group; `visititems` follows no soft and no external link."""
    found: dict[str, h5py.Dataset] = {}
    file.visititems(lambda name, item: found.__setitem__(name, item) if isinstance(item, h5py.Dataset) else None)
    yield from found.items()


def _field_info(name: str, item: h5py.Dataset, offset: int | None) -> FieldInfo:
    names = plain(item.attrs["names"]) if "names" in item.attrs else ()
    return FieldInfo(
        name=name,
        shape=_shape(item),
        dtype=str(item.dtype),
        bytes=math.prod(_shape(item)) * item.dtype.itemsize,
        stored_bytes=int(item.id.get_storage_size()),
        chunks=tuple(int(n) for n in item.chunks) if item.chunks else None,
        filters=tuple(one.name for one in pipeline(item)),
        linear=offset is not None,
        num_names=len(names) if isinstance(names, tuple) else 1,
    )


def _shape(item: h5py.Dataset) -> tuple[int, ...]:
    return tuple(int(n) for n in item.shape or ())


def _pixel_dataset(datasets: dict[str, h5py.Dataset]) -> str | None:
    """`images`, else the largest dataset of plain numbers with 3 or 4 axes; None when there is none."""
    likely = {
        name: math.prod(item.shape) * item.dtype.itemsize
        for name, item in datasets.items()
        if item.dtype.kind in "uif" and item.ndim in (3, 4) and math.prod(item.shape)
    }
    return max(likely, key=lambda name: (name == "images", likely[name])) if likely else None


def _class_counts(file: h5py.File, header: PackedFile) -> tuple[int, ...] | None:
    """Samples of each class, or with each attribute set; one pass over the labels, which are small."""
    labels = header.fields.get("labels")
    if labels is None or not labels.names or labels.row_bytes * header.num_rows > MAX_COUNTED_BYTES:
        return None
    values = file["labels"][()]
    if values.dtype.kind not in "iu":
        return None
    if values.ndim == 2 and values.shape[1] == len(labels.names):
        counts = np.count_nonzero(values, axis=0)
    else:
        known = values[(values >= 0) & (values < len(labels.names))].ravel()
        counts = np.bincount(known.astype(np.int64), minlength=len(labels.names))
    return tuple(int(count) for count in counts)
