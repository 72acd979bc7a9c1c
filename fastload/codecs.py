"""Lossless codecs of pixel datasets: their names, their HDF5 filters, and functions that leave the GIL.

| codec | HDF5 filter | needs | level |
| --- | --- | --- | --- |
| `none` | - | - | - |
| `gzip[:level]` | 1, part of HDF5 | - | 0 to 9, by default 4 |
| `zstd[:level]` | 32015, registered; `hdf5plugin` brings it to HDF5 tools | the extra [zstd] | 1 to 19, by default 3 |

`lzf` (32000, part of h5py) is read through h5py only, as are the filters of `hdf5plugin`.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import threading
import zlib
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastload.errors import MissingExtraError, OptionError

CODEC_CHUNK_BYTES = 64 * 2**10
"""At which chunks of compressed rows aim, at least one row: a reader of one row decompresses its whole chunk.

Masks of 256x256: 33 us a row in chunks of one row, 62 us in chunks of 256 KiB, which make the file 4 % larger. Digits
of 28x28, zstd: 0.2 ms for a random row in 64 KiB, 2.7 ms in 1 MiB; both come to 21 % of the pixels, and take 2 us a row
in order.
"""

CodecName = Literal["none", "gzip", "zstd"]

GZIP_FILTER, SHUFFLE_FILTER, LZF_FILTER, ZSTD_FILTER = 1, 2, 32000, 32015

FILTER_NAMES = {
    GZIP_FILTER: "deflate", SHUFFLE_FILTER: "shuffle", 3: "fletcher32", 4: "szip", 5: "nbit", 6: "scaleoffset",
    307: "bzip2", LZF_FILTER: "lzf", 32001: "blosc", 32004: "lz4", 32008: "bitshuffle", 32013: "zfp",
    ZSTD_FILTER: "zstd", 32017: "sz", 32024: "sz3", 32026: "blosc2",
}  # fmt: skip
"""By the numbers that the HDF Group registered: what a file says of its filters is up to the writer's plugin."""

_LEVELS = {"gzip": (0, 9, 4), "zstd": (1, 19, 3)}
"""Lowest, highest and usual level."""


class Codec(NamedTuple):
    """What a pixel dataset is compressed with."""

    name: CodecName = "none"
    level: int = 0

    def __str__(self) -> str:
        return self.name if self.name == "none" else f"{self.name}:{self.level}"

    @property
    def filter(self) -> tuple[int, tuple[int, ...]] | None:
        """Number and parameters of its HDF5 filter; None for "none"."""
        numbers = {"gzip": GZIP_FILTER, "zstd": ZSTD_FILTER}
        return (numbers[self.name], (self.level,)) if self.name in numbers else None

    def compress(self, data: bytes | memoryview) -> bytes:
        """The bytes as the HDF5 filter stores them, and as a stored row of encoding "zstd" holds them."""
        if self.name == "gzip":
            return zlib.compress(data, self.level)
        if self.name == "zstd":
            return bytes(_zstd("packing with zstd").compressor(self.level).compress(data))
        return bytes(data)


NONE = Codec()


def parse_codec(text: str, *, besides: tuple[str, ...] = ()) -> Codec:
    """The codec that "none", "gzip", "gzip:LEVEL", "zstd" or "zstd:LEVEL" names.

    Args:
        text: what was said.
        besides: other words that the caller accepts, for the message.

    Raises:
        OptionError: it names none, or needs an extra that is not installed.
    """
    found = re.fullmatch(r"(none|gzip|zstd)(?::([0-9]+))?", text)
    if found is None or (found[1] == "none" and found[2]):
        accepted = ", ".join([*besides, "none", "gzip[:0-9]", "zstd[:1-19]"])
        raise OptionError(f"codec={text!r} is not known; accepted: {accepted}.")
    if found[1] == "none":
        return NONE
    low, high, usual = _LEVELS[found[1]]
    level = int(found[2] or usual)
    if not low <= level <= high:
        raise OptionError(f"codec={text!r}: {found[1]} has the levels {low} to {high}.")
    if found[1] == "zstd" and not has_zstd():
        raise OptionError(f"codec={text!r} needs zstandard. Install it with: pip install 'fastload[zstd]'.")
    return Codec("gzip" if found[1] == "gzip" else "zstd", level)


def filter_name(number: int, given: bytes = b"") -> str:
    """What messages call an HDF5 filter.

    Args:
        given: what the file calls it, for one that is not known here.
    """
    return FILTER_NAMES.get(number) or given.decode(errors="backslashreplace") or str(number)


def has_zstd() -> bool:
    """Whether the extra [zstd] is there."""
    return importlib.util.find_spec("zstandard") is not None


def decompress_zstd(data: Any, out: NDArray[np.uint8]) -> None:
    """Fills memory with what a zstd frame holds; the GIL is free meanwhile.

    Args:
        data: the frame, in whatever holds bytes.
        out: uint8, one axis, C-contiguous; no more is written, whatever the frame says of its length.

    Raises:
        ValueError: it is damaged, or holds more or fewer bytes.
        MissingExtraError: zstandard is not installed.
    """
    module = _zstd("reading what is compressed with zstd")
    try:
        said = module.content_size(data)
        reader = module.decompressor().stream_reader(data)
        found = len(out) + 1 if said > len(out) else reader.readinto(out)
        if said < 0 and found == len(out):
            found += len(reader.read(1))
    except module.error as exc:
        raise ValueError(str(exc)) from exc
    if found != len(out):
        raise ValueError(f"{'more' if found > len(out) else f'{found:,}'} bytes where {len(out):,} are expected")


class _Zstd(threading.local):
    """zstandard's contexts of one thread: they are not to be shared."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.error = module.ZstdError
        self.content_size = module.frame_content_size
        self._compressors: dict[int, Any] = {}
        self._decompressor: Any = None

    def compressor(self, level: int) -> Any:
        if level not in self._compressors:
            self._compressors[level] = self._module.ZstdCompressor(level=level)
        return self._compressors[level]

    def decompressor(self) -> Any:
        if self._decompressor is None:
            self._decompressor = self._module.ZstdDecompressor()
        return self._decompressor


_loaded: list[_Zstd] = []


def _zstd(what: str) -> _Zstd:
    if not _loaded:
        try:
            _loaded.append(_Zstd(importlib.import_module("zstandard")))
        except ImportError as exc:
            raise MissingExtraError(f"{what} needs zstandard. Install it with: pip install 'fastload[zstd]'.") from exc
    return _loaded[0]
