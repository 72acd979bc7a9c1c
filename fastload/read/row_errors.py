"""What messages call a row of a file, and the error where the system cannot read one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import FastloadError, FileChangedError, FormatError, ReadError, typed
from fastload.format.codecs import load_filters
from fastload.format.header import PackedFile, open_hdf5, read_shard
from fastload.read.identity import check_path
from fastload.system.text import text_of


def sample_name(file: PackedFile, row: int) -> str:
    """Returns what messages call a sample: its file, key and row; without the key where that cannot be read."""
    if file.shards is not None:
        numbers, rows = file.shards.locate(np.array([row]))
        with suppress(FastloadError, OSError):
            return sample_name(read_shard(file, int(numbers[0]), checked=False), int(rows[0]))
    field = file.fields.get("key")
    if field is None or field.dtype.kind != "S" or field.shape:
        return f"{file.path}: row {row}"
    with suppress(FastloadError, OSError):
        check_path(file)
        with open_hdf5(file.path) as hdf5:
            load_filters(file.path, "key", hdf5["key"])
            return f"{file.path}: sample {text_of(bytes(hdf5['key'][row]))!r} (row {row})"
    return f"{file.path}: row {row}"


def unreadable(
    gather: Callable[[NDArray[np.int64], Mapping[str, NDArray[Any]]], object],
    name: str,
    rows: NDArray[np.int64],
    out: NDArray[Any],
) -> dict[int, str]:
    """Has `gather` copy rows of a field into an array (n, ...); returns position -> why, of those it cannot read.

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
    whose = str(file.path) if row is None else sample_name(file, row)
    return ReadError(
        f"{whose}: `{name}` cannot be read ({error.strerror or error}). If the disk or the network fails, copy the "
        f"file to another; `fastload verify {typed(file.path)}` lists what is lost."
    )
