"""What messages call a row of a file, and the error where the system cannot read one."""

from __future__ import annotations

from contextlib import suppress

from fastload.errors import FastloadError, ReadError
from fastload.format.codecs import load_filters
from fastload.format.header import PackedFile, open_hdf5
from fastload.read.identity import check_path
from fastload.system.text import text_of


def sample_name(file: PackedFile, row: int) -> str:
    """Returns what messages call a sample: its file, key and row; without the key where that cannot be read."""
    field = file.fields.get("key")
    if field is None or field.dtype.kind != "S" or field.shape:
        return f"{file.path}: row {row}"
    with suppress(FastloadError, OSError):
        check_path(file)
        with open_hdf5(file.path) as hdf5:
            load_filters(file.path, "key", hdf5["key"])
            return f"{file.path}: sample {text_of(bytes(hdf5['key'][row]))!r} (row {row})"
    return f"{file.path}: row {row}"


def read_error(file: PackedFile, name: str, row: int | None, error: OSError) -> ReadError:
    """Returns the error to raise where the system cannot read a row, if known which, of a field."""
    whose = str(file.path) if row is None else sample_name(file, row)
    return ReadError(
        f"{whose}: `{name}` cannot be read ({error.strerror or error}). If the disk or the network fails, copy the "
        f"file to another; `fastload verify {file.path}` lists what is lost."
    )
