"""The layout of an HDF5 file's pixels on disk, the cost of reading one random image, and the gain of packing again.

A shuffled epoch reads every image by itself, so an epoch of N images costs N times that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import h5py
import numpy as np

from fastload.format.codecs import CODEC_CHUNK_BYTES
from fastload.format.digests import plain
from fastload.format.header import PackedFile
from fastload.format.ragged import ENCODINGS
from fastload.format.writer import chunk_rows_for
from fastload.read.row_table import index_part
from fastload.system.advice import advice
from fastload.system.text import format_bytes

# HDF5 2.0 raised the default chunk cache of a dataset from 1 MiB to 8 MiB.
OLD_CACHE_BYTES = 2**20
CACHE_BYTES = 8 * 2**20 if h5py.version.hdf5_version_tuple >= (2, 0, 0) else OLD_CACHE_BYTES

TINY_CHUNK_BYTES = 16 * 2**10
MANY_CHUNKS = 1000


@dataclass(frozen=True)
class ChunkLayout:
    """The layout of one dataset of pixels on disk."""

    dataset: str  # its name in the file
    shape: tuple[int, ...]  # (N, ...)
    chunks: tuple[int, ...] | None  # HDF5 chunk shape; None for contiguous storage
    # Whether images lie back to back from `first_offset` on, unfiltered, so that FastLoader reads them without HDF5
    linear: bool
    first_offset: int | None  # byte of the file at which image 0 starts; None if not linear
    chunk_rows: int  # images that a chunk holds (or cuts through); all images for contiguous storage
    chunk_bytes: int  # of one chunk, uncompressed
    num_chunks: int  # chunks in the file's index; 1 for contiguous storage
    missing_chunks: int  # chunks that were never written and read as the fill value
    compressed: bool  # whether the chunks pass through a filter
    stored_bytes: int  # allocated in the file
    pixel_bytes: int  # of all images, uncompressed
    image_bytes: int  # of one image, uncompressed
    chunks_per_image: int  # chunks that one image touches; more than 1 if chunks cut images
    chunk_bytes_per_image: int  # uncompressed bytes of those chunks
    read_bytes_per_image: int  # bytes of the file read for one random image, with HDF5's default chunk cache
    decoded_bytes_per_image: int  # bytes that HDF5 produces for one random image, with the same cache


def chunk_layout(name: str, item: h5py.Dataset, offset: int | None) -> ChunkLayout:
    """Returns the layout of a dataset (N, ...) with at least one image; `offset`: of linear data, else None."""
    shape = tuple(int(n) for n in item.shape)
    chunks = tuple(int(n) for n in item.chunks) if item.chunks else None
    box = chunks or shape
    image_bytes = math.prod(shape[1:]) * item.dtype.itemsize
    chunk_bytes = math.prod(box) * item.dtype.itemsize
    per_image = math.prod(-(-size // chunk) for size, chunk in zip(shape[1:], box[1:], strict=True))
    num_chunks = int(item.id.get_num_chunks()) if chunks else 1
    stored = int(item.id.get_storage_size())
    compressed = item.id.get_create_plist().get_nfilters() > 0
    if offset is not None or chunks is None:
        read = decoded = image_bytes
    elif compressed:
        read, decoded = stored * per_image // max(num_chunks, 1), chunk_bytes * per_image
    else:
        # Measured with HDF5 2.0: an unfiltered chunk that fits the cache is read whole for one image; one that does
        # not fit is bypassed, and only the image's bytes are read.
        read = decoded = chunk_bytes * per_image if chunk_bytes <= CACHE_BYTES else image_bytes
    return ChunkLayout(
        dataset=name,
        shape=shape,
        chunks=chunks,
        linear=offset is not None,
        first_offset=offset,
        chunk_rows=box[0],
        chunk_bytes=chunk_bytes,
        num_chunks=num_chunks,
        missing_chunks=-(-shape[0] // box[0]) * per_image - num_chunks,
        compressed=compressed,
        stored_bytes=stored,
        pixel_bytes=shape[0] * image_bytes,
        image_bytes=image_bytes,
        chunks_per_image=per_image,
        chunk_bytes_per_image=chunk_bytes * per_image,
        read_bytes_per_image=read,
        decoded_bytes_per_image=decoded,
    )


def findings(item: h5py.Dataset, layout: ChunkLayout) -> list[str]:
    """Returns sentences on what makes training from this dataset slow; none if an image is a read of its own bytes."""
    found = []
    name = f"`{layout.dataset}`"
    if item.external or item.is_virtual:
        found.append(f"{name} keeps its data in other files, which FastLoader refuses as unsafe.")
    if layout.chunks_per_image > 1:
        factor = layout.chunk_bytes_per_image / layout.image_bytes
        found.append(
            f"Chunks of {_product(layout.chunks)} cut the images of {name} ({_product(layout.shape[1:])}): one image "
            f"lies in {layout.chunks_per_image} chunks, together {format_bytes(layout.chunk_bytes_per_image)}, "
            f"{factor:,.0f} times its own {format_bytes(layout.image_bytes)}."
        )
    # The last chunk of a packed file is stored in full, too: packing again would change nothing about that.
    if layout.chunks and not layout.compressed and layout.stored_bytes > 1.2 * _packed_bytes(layout):
        found.append(
            f"Chunks at the border of {name} are stored in full: {format_bytes(layout.stored_bytes)} on disk for "
            f"{format_bytes(layout.pixel_bytes)} of pixels."
        )
    if layout.chunks and not layout.linear:
        chunk = f"A chunk of {name} ({format_bytes(layout.chunk_bytes)}) is larger than"
        caches = "HDF5's chunk cache (8 MiB by default since HDF5 2.0, 1 MiB before)"
        if layout.compressed and layout.chunk_bytes > 8 * 2**20:
            found.append(f"{chunk} {caches}: it is read and decoded again for each of its images, even in order.")
        elif layout.compressed and layout.chunk_bytes > OLD_CACHE_BYTES:
            found.append(
                f"{chunk} the chunk cache of HDF5 before 2.0 (1 MiB): there each of its images decodes it again."
            )
        elif not layout.compressed and layout.chunk_bytes > CACHE_BYTES:
            found.append(
                f"{chunk} {caches}: HDF5 bypasses the cache and reads piece by piece; with a larger cache "
                f"(rdcc_nbytes) it reads {format_bytes(layout.chunk_bytes_per_image)} for one random image."
            )
    if layout.chunk_bytes < TINY_CHUNK_BYTES and layout.num_chunks > MANY_CHUNKS:
        found.append(
            f"Tiny chunks: {layout.num_chunks:,} of {format_bytes(layout.chunk_bytes)} each, every one with its own "
            f"entry in HDF5's index. fastload's chunks are about 8 MiB."
        )
    if layout.missing_chunks > 0:
        found.append(
            f"{layout.missing_chunks:,} of {layout.missing_chunks + layout.num_chunks:,} chunks of {name} were never "
            f"written: their images read as {plain(item.fillvalue)}. The file is probably incomplete."
        )
    if item.dtype.kind == "f":
        found.append(f"{name} holds {item.dtype}, {item.dtype.itemsize} times the bytes of uint8. {advice('uint8')}")
    if layout.chunks and not layout.linear and (layout.compressed or layout.chunk_bytes_per_image > layout.image_bytes):
        found.append(_gain(layout))
    return found


def repack_hint(layout: ChunkLayout, *, packed: bool) -> str:
    """Returns how to fix a file in which all pixels are present and of a type that fastload packs, without the images.

    Where compression saves much, and only the chunks are too large for random access, it is kept in smaller ones.
    `packed`: fastload wrote the file, so that `repack` keeps its codec.
    """
    growth = layout.pixel_bytes / max(layout.stored_bytes, 1)
    small = max(CODEC_CHUNK_BYTES, layout.image_bytes)
    if not layout.compressed or layout.chunk_bytes_per_image < 2 * small or growth < 1.2:
        # A packed file keeps the size of its chunks.
        larger = ["--chunk-bytes 8MiB"] * (packed and layout.chunk_bytes < TINY_CHUNK_BYTES)
        plain = ["--codec none"] * (layout.compressed or not larger)
        return advice("repack", options=" ".join([*plain, *larger]))
    option, does = ("--chunk-bytes 64KiB", "keeps") if packed else ("--codec gzip", "makes")
    return advice("repack compressed", options=option, does=does, size=format_bytes(small), growth=f"{growth:.1f}")


def _packed_bytes(layout: ChunkLayout) -> int:
    """Returns the bytes of the images in a packed file, with what its last chunk leaves free."""
    rows = chunk_rows_for(layout.image_bytes, layout.shape[0])
    return -(-layout.shape[0] // rows) * rows * layout.image_bytes


def _gain(layout: ChunkLayout) -> str:
    """Returns a sentence on what packing again would gain: bytes read and decoded for one random image."""
    factor = layout.chunk_bytes_per_image / layout.image_bytes
    whole = format_bytes(layout.chunk_bytes_per_image) + (f", {factor:,.0f} times as much" if factor >= 1.5 else "")
    if layout.compressed:
        growth = layout.pixel_bytes / max(layout.stored_bytes, 1)
        cost = (
            f"now it reads {format_bytes(layout.read_bytes_per_image)} and decodes {whole}. The packed file is not "
            f"compressed: {format_bytes(layout.pixel_bytes)}, {growth:.1f} times as large"
        )
    elif layout.read_bytes_per_image > layout.image_bytes:
        cost = f"now it reads {whole}"
    else:
        cost = f"now it reads pieces of its chunks or, where the cache holds them, {whole}"
    return (
        f"Packing again would win: one random image is one read of its own {format_bytes(layout.image_bytes)}; {cost}."
    )


def _product(shape: tuple[int, ...] | None) -> str:
    return " x ".join(str(n) for n in shape or ())


@dataclass(frozen=True)
class EncodingInfo:
    """The rows of a ragged dataset that have one encoding."""

    name: str  # "raw", "jpeg" or "zstd"
    rows: int  # their number
    row_bytes: int  # of one row, on average
    share_of_raw: float  # their bytes divided by the bytes of their pixels


@dataclass(frozen=True)
class RaggedInfo:
    """A dataset of rows of varying length."""

    encodings: tuple[EncodingInfo, ...]  # that occur, most rows first
    num_sizes: int  # number of different (height, width)
    smallest: tuple[int, int]  # least height and least width, of different rows maybe
    largest: tuple[int, int]  # likewise
    row_bytes: int  # of one row in the file, on average
    pixel_bytes: int  # of all rows, decoded
    stored_bytes: int  # of all rows in the file
    allocated_bytes: int  # of its chunks; the last one counts whole
    chunk_bytes: int  # of one chunk
    num_chunks: int  # number of chunks
    beyond_chunk: int  # rows larger than a chunk, which have chunks of their own

    @property
    def share_of_raw(self) -> float:
        """Bytes in the file divided by the bytes of the pixels."""
        return self.stored_bytes / max(self.pixel_bytes, 1)

    @property
    def filled(self) -> float:
        """Share of the chunks that rows fill; the rest is gaps between rows."""
        return self.stored_bytes / max(self.allocated_bytes, 1)


def describe_ragged(hdf5: h5py.File, file: PackedFile, name: str) -> RaggedInfo:
    """Describes a ragged field by the lengths and encodings of its rows."""
    field, store = file.ragged[name], file.ragged[name].ragged
    lengths, kinds, sizes = (index_part(hdf5, file, name, part) for part in ("bytes", "encoding", "shape"))
    sizes = sizes.astype(np.int64)[:, :2]
    areas = sizes.prod(axis=1)
    channels = field.shape[2] if len(field.shape) == 3 else 1
    raw = areas * (channels * field.dtype.itemsize)
    encodings = []
    for number in np.unique(kinds).tolist():
        here = kinds == number
        known = ENCODINGS[number] if number < len(ENCODINGS) else f"unknown ({number})"
        share = float(lengths[here].sum() / max(int(raw[here].sum()), 1))
        encodings.append(EncodingInfo(known, int(here.sum()), int(lengths[here].mean()), share))
    num_chunks = -(-store.num_bytes // store.chunk_bytes)
    return RaggedInfo(
        encodings=tuple(sorted(encodings, key=lambda found: -found.rows)),
        num_sizes=len(np.unique(sizes, axis=0)),
        smallest=tuple(sizes.min(axis=0).tolist()),
        largest=tuple(sizes.max(axis=0).tolist()),
        row_bytes=int(lengths.mean()),
        pixel_bytes=int(raw.sum()),
        stored_bytes=int(lengths.sum()),
        allocated_bytes=num_chunks * store.chunk_bytes,
        chunk_bytes=store.chunk_bytes,
        num_chunks=num_chunks,
        beyond_chunk=int(np.count_nonzero(lengths > store.chunk_bytes)),
    )
