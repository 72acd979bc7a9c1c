"""The filters that HDF5 passes a dataset's chunks through: which there are, and who can take them back."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import NamedTuple

import h5py
from h5py import h5z

from fastload.codecs import GZIP_FILTER, SHUFFLE_FILTER, ZSTD_FILTER, filter_name, has_zstd
from fastload.errors import MissingExtraError


class Filter(NamedTuple):
    """One filter of a dataset: its registered number, its parameters, and what messages call it."""

    number: int
    parameters: tuple[int, ...]
    name: str


def pipeline(item: h5py.Dataset) -> tuple[Filter, ...]:
    """The filters of a dataset, in the order in which they were applied."""
    plist = item.id.get_create_plist()
    found = [plist.get_filter(i) for i in range(plist.get_nfilters())]
    return tuple(Filter(number, tuple(values), filter_name(number, given)) for number, _, values, given in found)


def is_decoded_here(one: Filter) -> bool:
    """Whether fastload takes this filter back by itself, without HDF5."""
    if one.number == ZSTD_FILTER:
        return has_zstd()
    return one.number == GZIP_FILTER or (one.number == SHUFFLE_FILTER and bool(one.parameters))


def load_filters(path: Path, name: str, item: h5py.Dataset) -> None:
    """Makes h5py ready to decode a dataset: loads hdf5plugin where a filter needs it.

    Raises:
        MissingExtraError: a filter is not installed; it names the extra that has it, if one has.
    """
    for one in pipeline(item):
        if h5z.filter_avail(one.number):
            continue
        where = f"{path}: `{name}` is compressed with {one.name} (HDF5 filter {one.number})"
        try:
            importlib.import_module("hdf5plugin")
        except ImportError as exc:
            raise MissingExtraError(
                f"{where}, which is not installed here. Install what reads it with: pip install 'fastload[zstd]'."
            ) from exc
        if not h5z.filter_avail(one.number):
            raise MissingExtraError(
                f"{where}, which neither HDF5 nor hdf5plugin has here. Write the file anew where the filter is "
                f"installed: `h5repack -f GZIP=4`."
            )


def why_unreadable(path: Path, name: str, item: h5py.Dataset) -> str | None:
    """The message of what is not installed to decode a dataset; None where nothing is missing."""
    if all(map(is_decoded_here, pipeline(item))):
        return None
    try:
        load_filters(path, name, item)
    except MissingExtraError as exc:
        return str(exc)
    return None
