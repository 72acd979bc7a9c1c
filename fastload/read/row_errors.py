"""What messages call a row, and the errors to raise where one cannot be read, or is not what was packed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import (
    DamagedRowError,
    FastloadError,
    FileChangedError,
    FormatError,
    ImageError,
    ReadError,
    typed,
)
from fastload.format.codecs import load_filters
from fastload.format.header import PackedFile, open_hdf5, read_shard
from fastload.format.ragged import JPEG, RAW, ZSTD
from fastload.read.identity import check_path
from fastload.system.text import text_of


def holder_of(file: PackedFile, row: int) -> tuple[PackedFile, int]:
    """Returns the header of the file that holds a row of a dataset, and its row there; as given if it is unreadable."""
    numbers, rows = file.shards.locate(np.array([row]))
    with suppress(FastloadError, OSError):
        return read_shard(file, int(numbers[0])), int(rows[0])
    return file, row


def sample_name(file: PackedFile, row: int) -> str:
    """Returns what messages call a sample: its file, key and row; without the key where that cannot be read."""
    file, row = holder_of(file, row)
    field = file.fields.get("key")
    if field is None or field.dtype.kind != "S" or field.shape:
        return f"{file.name}: row {row}"
    with suppress(FastloadError, OSError):
        check_path(file)
        with open_hdf5(file.path) as hdf5:
            load_filters(file.path, "key", hdf5["key"])
            return f"{file.name}: sample {text_of(bytes(hdf5['key'][row]))!r} (row {row})"
    return f"{file.name}: row {row}"


def unreadable(
    gather: Callable[[NDArray[np.int64], Mapping[str, NDArray[Any]]], object],
    name: str,
    rows: NDArray[np.int64],
    out: NDArray[Any],
) -> dict[int, str]:
    """Copies rows of a field into an array (n, ...) by `gather`; returns {position: reason} for unreadable ones.

    FileChangedError: the file was written to or truncated.
    """
    try:
        gather(rows, {name: out})
    except FileChangedError:
        raise
    except (FormatError, OSError, RuntimeError) as exc:  # of a chunk; of the disk; of h5py where a filter fails
        if len(rows) > 1:  # One bad sector or chunk makes the read of them all fail.
            alone = (unreadable(gather, name, rows[at : at + 1], out[at : at + 1]) for at in range(len(rows)))
            return {at: why for at, found in enumerate(alone) for why in found.values()}
        why = exc.__cause__ or exc
        return {0: getattr(why, "strerror", None) or str(why)}
    return {}


def read_error(file: PackedFile, name: str, row: int | None, error: OSError) -> ReadError:
    """Returns the error to raise where the system cannot read a row, if known which, of a field."""
    whose = file.name if row is None else sample_name(file, row)
    return ReadError(
        f"{whose}: `{name}` cannot be read ({error.strerror or error}). If the disk or the network fails, copy the "
        f"file to another; `fastload verify {typed(file.path)}` lists what is lost."
    )


def sample_error(file: PackedFile, row: int, reason: str) -> DamagedRowError:
    """Returns the error to raise for a damaged row: it names the sample, and says what to do."""
    file, row, whole = *holder_of(file, row), row
    if file.url:
        return DamagedRowError(
            f"{sample_name(file, row)}: {reason}. The object is damaged, or its copy in the cache "
            f"({file.path.parent}): have that fetched again (`fastload cache clear`), and if that does not help copy "
            f"the object there again.",
            (whole,),
        )
    return DamagedRowError(
        f"{sample_name(file, row)}: {reason}. The file was damaged after packing: list all damage with "
        f"`fastload verify {typed(file.path)}`, then copy it again, or pack it again.",
        (whole,),
    )


def cannot_be_decoded(name: str, encoding: int, error: Exception) -> str:
    """Returns the problem with a row of `images` or `masks` that raised ImageError or MemoryError."""
    whose = "its mask's" if name == "masks" else "its"
    stored = {RAW: "raw pixels", JPEG: "JPEG", ZSTD: "zstd frame"}.get(encoding, f"encoding {encoding}")
    why = error if isinstance(error, ImageError) else "not enough memory"
    return f"{whose} stored {stored} cannot be decoded ({why})"
