"""Lossless compression of pixel datasets: codecs that fastload writes, and the HDF5 filters of any dataset.

| codec | HDF5 filter | needs | level |
| --- | --- | --- | --- |
| `none` | - | - | - |
| `gzip[:level]` | 1, part of HDF5 | - (zlib-ng reads it faster) | 0 to 9, by default 4 |
| `zstd[:level]` | 32015, registered; `hdf5plugin` brings it to HDF5 tools | the extra [zstd] | 1 to 19, by default 3 |

Compressing and decompressing release the GIL. `lzf` (32000, part of h5py) and the filters of `hdf5plugin` are read
through h5py only.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import threading
import zlib
from pathlib import Path
from typing import Any, Literal, NamedTuple

import h5py
import numpy as np
from h5py import h5z
from numpy.typing import NDArray

from fastload.errors import MissingExtraError, OptionError

CODEC_CHUNK_BYTES = 64 * 2**10
"""Bytes of a chunk of compressed rows, at least one row: reading one row decompresses its whole chunk.

Masks of 256x256: 33 us a row in chunks of one row, 62 us in chunks of 256 KiB, which make the file 4 % larger. Digits
of 28x28, zstd: 0.2 ms for a random row in 64 KiB, 2.7 ms in 1 MiB; both come to 21 % of the pixels, and take 2 us a row
in order.
"""

CodecName = Literal["none", "gzip", "zstd"]

GZIP_FILTER, SHUFFLE_FILTER, ZSTD_FILTER = 1, 2, 32015

FILTER_NAMES = {
    GZIP_FILTER: "deflate", SHUFFLE_FILTER: "shuffle", 3: "fletcher32", 4: "szip", 5: "nbit", 6: "scaleoffset",
    307: "bzip2", 32000: "lzf", 32001: "blosc", 32004: "lz4", 32008: "bitshuffle", 32013: "zfp",
    ZSTD_FILTER: "zstd", 32017: "sz", 32024: "sz3", 32026: "blosc2",
}  # fmt: skip
"""Names by registered number (HDF Group); the name that a file gives is up to the plugin that wrote it."""

_CODECS = {"gzip": (GZIP_FILTER, 0, 9, 4), "zstd": (ZSTD_FILTER, 1, 19, 3)}
"""Number of the filter; lowest, highest and default level."""


class Codec(NamedTuple):
    """A named choice of compression filter and level for pixel datasets."""

    name: CodecName = "none"
    level: int = 0
    # Whether a zstd frame ends in 4 bytes of its content's XXH64, which every reader of zstd compares, HDF5 tools too.
    # Not so in files of fastload 0.1.0, whose unfinished packs are continued as they were begun.
    checksum: bool = False

    def __str__(self) -> str:
        return self.name if self.name == "none" else f"{self.name}:{self.level}"

    @property
    def filter(self) -> tuple[int, tuple[int, ...]] | None:
        """Number and parameters of its HDF5 filter; None for "none"."""
        return (_CODECS[self.name][0], (self.level,)) if self.name in _CODECS else None

    def compress(self, data: bytes | memoryview) -> bytes:
        """Returns the bytes compressed as the HDF5 filter does, which is also a ragged row of encoding "zstd"."""
        if self.name == "gzip":
            return zlib.compress(data, self.level)
        if self.name == "zstd":
            return bytes(_zstd("packing with zstd").compressor(self.level, self.checksum).compress(data))
        return bytes(data)


NONE = Codec()


def parse_codec(text: str, *, besides: tuple[str, ...] = ()) -> Codec:
    """Returns the codec named "none", "gzip", "gzip:LEVEL", "zstd" or "zstd:LEVEL".

    OptionError: the name is unknown, or needs an extra that is not installed; `besides` are other words that the caller
    accepts, for the message.
    """
    if text == "none":
        return NONE
    if (found := re.fullmatch(r"(gzip|zstd)(?::([0-9]+))?", text)) is None:
        accepted = ", ".join([*besides, "none", "gzip[:0-9]", "zstd[:1-19]"])
        raise OptionError(f"codec={text!r} is not known; accepted: {accepted}.")
    _, low, high, usual = _CODECS[found[1]]
    level = int(found[2] or usual)
    if not low <= level <= high:
        raise OptionError(f"codec={text!r}: {found[1]} has the levels {low} to {high}.")
    if found[1] == "zstd" and not has_zstd():
        raise OptionError(f"codec={text!r} needs zstandard. Install: pip install zstandard hdf5plugin.")
    return Codec("gzip", level) if found[1] == "gzip" else Codec("zstd", level, checksum=True)


def has_zstd() -> bool:
    """Whether the extra [zstd] is installed."""
    return importlib.util.find_spec("zstandard") is not None


def has_zlib_ng() -> bool:
    """Whether zlib-ng is there, with which chunks of gzip are read faster."""
    return importlib.util.find_spec("zlib_ng") is not None


def decompress_zstd(data: Any, out: NDArray[np.uint8]) -> None:
    """Decompresses a zstd frame into C-contiguous memory, and never beyond it; releases the GIL.

    Raises:
        ValueError: the frame is damaged, or holds more or fewer bytes than `out`.
        MissingExtraError: zstandard is not installed.
    """
    module = _zstd("reading what is compressed with zstd")
    try:
        said = module.content_size(data)
        reader = module.decompressor.stream_reader(data)
        found = len(out) + 1 if said > len(out) else reader.readinto(out)
        if found == len(out):
            found += len(reader.read(1))  # without that the checksum of a large frame is not compared
    except module.error as exc:
        raise ValueError(str(exc)) from exc
    if found != len(out):
        raise ValueError(f"{'more' if found > len(out) else f'{found:,}'} bytes where {len(out):,} are expected")


class _Zstd(threading.local):
    """The zstandard module with its contexts, one set a thread: threads must not share them."""

    def __init__(self) -> None:
        module: Any = importlib.import_module("zstandard")
        self.error = module.ZstdError
        self.content_size = module.frame_content_size
        self.compressor = functools.cache(
            lambda level, checksum: module.ZstdCompressor(level=level, write_checksum=checksum)
        )
        self.decompressor = module.ZstdDecompressor()


@functools.cache
def _zstd(what: str) -> _Zstd:
    try:
        return _Zstd()
    except ImportError as exc:
        raise MissingExtraError(f"{what} needs zstandard. Install it with: pip install zstandard hdf5plugin.") from exc


class Filter(NamedTuple):
    """One HDF5 filter of a dataset: its registered number, its parameters, and its name in messages."""

    number: int
    parameters: tuple[int, ...]
    name: str


def pipeline(item: h5py.Dataset) -> tuple[Filter, ...]:
    """Returns the filters of a dataset, in the order in which they were applied."""
    plist = item.id.get_create_plist()
    return tuple(
        Filter(
            number, tuple(values), FILTER_NAMES.get(number) or given.decode(errors="backslashreplace") or str(number)
        )
        for number, _, values, given in map(plist.get_filter, range(plist.get_nfilters()))
    )


def is_decoded_here(one: Filter) -> bool:
    """Whether fastload decodes this filter by itself, without HDF5."""
    if one.number == ZSTD_FILTER:
        return has_zstd()
    return one.number == GZIP_FILTER or (one.number == SHUFFLE_FILTER and bool(one.parameters))


def load_filters(path: Path, name: str, item: h5py.Dataset) -> None:
    """Prepares h5py to decode a dataset: loads hdf5plugin if a filter needs it.

    Raises:
        MissingExtraError: a filter is not installed; the message says how to install it, if that is known.
    """
    for one in pipeline(item):
        if h5z.filter_avail(one.number):
            continue
        why = (
            "neither HDF5 nor hdf5plugin has here. Write the file anew where the filter is installed: `h5repack -f "
            "GZIP=4`."
        )
        try:
            importlib.import_module("hdf5plugin")
        except ImportError:
            why = "is not installed here. Install what reads it with: pip install zstandard hdf5plugin."
        if not h5z.filter_avail(one.number):
            what = f"{path}: `{name}` is compressed with {one.name} (HDF5 filter {one.number})"
            raise MissingExtraError(f"{what}, which {why}")


def why_unreadable(path: Path, name: str, item: h5py.Dataset) -> str | None:
    """Returns a message about the filter that is missing to decode a dataset; None where none is."""
    if all(map(is_decoded_here, pipeline(item))):
        return None
    try:
        load_filters(path, name, item)
    except MissingExtraError as exc:
        return str(exc)
    return None
