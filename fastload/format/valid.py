"""Every value of a header is checked here, once, before anything is computed from it; `open_hdf5` opens the file.

A file may have been damaged, or made by somebody who wants to harm its reader: each number, name and text may be
anything that HDF5 can hold. `header` reads files with these functions; behind it values have the types that they claim.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from fastload.errors import FastloadError, FormatError, MissingFileError, typed
from fastload.format.chunk_filters import check_gzip
from fastload.format.digests import MOST_READ, attributes, plain
from fastload.format.ragged import INDEX_DTYPES, index_names

FORMAT_VERSION = 2
"""The newest format that is read. Files are written in the oldest one that holds them: see `fastload.format`."""

CHANGED = "The file was changed after packing; pack it again."

# Types of root attributes of a packed file; those in `_OBJECTS` are JSON.
_ROOT: dict[str, tuple[type, str]] = {
    "fastload_version": (int, "a whole number"),
    "fastload_writer": (str, "a text"),
    "decoder": (str, "a text"),
    "source_layout": (str, "a text"),
    "pack_options": (str, "a JSON object"),
    "repacked": (str, "a JSON object"),
    "header_digest": (str, "a text"),
    "seed": (int, "a whole number"),
    "shuffled": (int, "true or false"),
}
_OBJECTS = ("pack_options", "repacked")

# Most bytes that one byte of a file can stand for: of zeros compressed by gzip, and by zstd.
_MOST_BY_GZIP, _MOST_BY_ANY = 1100, 40_000
# What a dataset may claim with nothing in the file: chunks that were never written are zeros, few rows cost little.
_FREE_BYTES, _FREE_PIXEL_BYTES = 64 * 2**20, 16 * 2**30
_PATTERN = re.compile(r"[*?]")
_MOST_OPENED = 32  # files of a folder, to find an index among them
_MOST_CHUNK_BYTES = 2**32  # what HDF5 before 2.0 can read


def bad(path: Path, name: str, what: str) -> FormatError:
    return FormatError(f"{path}: `{name}` {what}")


def root_attributes(path: Path, file: h5py.File) -> tuple[int | None, dict[str, Any]]:
    """Returns the format version, None for a file of another program, and the root attributes, of the right types."""
    if "fastload_version" not in file.attrs:
        return None, attributes(file)
    version = plain(file.attrs["fastload_version"])
    if type(version) is not int or version < 1:
        raise FormatError(f"{path}: its fastload_version is {version!r}, which no release wrote. Pack it again.")
    if version > FORMAT_VERSION:
        writer = plain(file.attrs.get("fastload_writer", "a newer fastload"))
        raise FormatError(
            f"{path}: format version {version}, written by {_shown(writer)}; this release reads up to "
            f"{FORMAT_VERSION}. Install that release or a newer one."
        )
    if len(file.attrs) > MOST_READ:
        raise FormatError(f"{path}: has {len(file.attrs):,} attributes, far more than any release writes. {CHANGED}")
    found = attributes(file)
    for name, (kind, wanted) in _ROOT.items():
        if name not in found:
            continue
        fits = isinstance(found[name], kind) and (name not in _OBJECTS or isinstance(_parsed(found[name]), dict))
        if not fits:
            raise FormatError(f"{path}: its attribute {name!r} is {_shown(found[name])}, not {wanted}. {CHANGED}")
    return version, found


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def field_attributes(
    path: Path, item: h5py.Dataset, name: str, *, packed: bool
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Returns the names (of classes, attributes, splits) of a dataset, and its other attributes.

    In a file of another program, a value of a type that is not expected is left out.
    """
    if packed and len(item.attrs) > MOST_READ:
        raise bad(path, name, f"has {len(item.attrs):,} attributes, far more than any release writes. {CHANGED}")
    found = attributes(item)
    names = found.pop("names", ())
    names = names if isinstance(names, tuple) else (names,)
    if not all(isinstance(one, str) for one in names):
        if packed:
            raise bad(path, name, f"has names that are no texts: {_shown(names)}. {CHANGED}")
        names = tuple(str(one) for one in names if not isinstance(one, tuple))
    for key, kind, wanted in (("ignore_index", int, "a whole number"), ("coordinates", str, "a text")):
        if key in found and not isinstance(found[key], kind):
            if packed:
                raise bad(path, name, f"has an attribute {key!r} that is {_shown(found[key])}, not {wanted}. {CHANGED}")
            del found[key]
    return names, found


def check_images(path: Path, images: h5py.Dataset, *, packed: bool) -> None:
    """Raises FormatError for `images` of the wrong type or shape; not for ragged ones."""
    if images.dtype.type not in (np.uint8, np.uint16) or len(images.shape) not in ((4,) if packed else (3, 4)):
        wanted = "expected uint8 or uint16 (N, H, W, C). Pack the original files."
        raise bad(path, "images", f"is {images.dtype} {images.shape}; {wanted}")
    if packed and images.shape[3] not in (1, 3, 4):
        raise bad(path, "images", f"has {images.shape[3]} channels; a packed file has 1, 3 or 4. Pack it again.")
    if 0 in images.shape[1:]:
        raise bad(path, "images", f"is {images.shape}: its images have no pixels. Pack the original files.")


def check_masks(path: Path, masks: h5py.Dataset) -> None:
    """Raises FormatError for `masks` of the wrong type or shape in a packed file; not for ragged ones."""
    if masks.dtype.type not in (np.uint8, np.uint16) or len(masks.shape) != 3:
        raise bad(path, "masks", f"is {masks.dtype} {masks.shape}, not uint8 or uint16 (N, H, W). {CHANGED}")


def check_stored(path: Path, name: str, item: h5py.Dataset, file_bytes: int, *, pixels: bool) -> None:
    """Raises FormatError for a dataset that is cut off, or cannot come from as few bytes as the file has for it.

    Work and memory by the number of rows are then in proportion to the file.
    """
    num_bytes = math.prod(map(int, item.shape)) * item.dtype.itemsize
    created = item.id.get_create_plist()
    filtered = created.get_nfilters() > 0
    if item.chunks:
        chunk_bytes = math.prod(map(int, item.chunks)) * item.dtype.itemsize
        grid = (-(-int(size) // int(chunk)) for size, chunk in zip(item.shape, item.chunks, strict=True))
        if filtered and chunk_bytes >= _MOST_CHUNK_BYTES:
            raise bad(path, name, f"has chunks of {chunk_bytes:,} bytes, each decoded whole. Make them smaller.")
        if not filtered and created.get_alloc_time() == h5py.h5d.ALLOC_TIME_EARLY:
            # All of its chunks are in the file. HDF5 would count them one by one, whatever number the file states.
            num_bytes = math.prod(grid) * chunk_bytes
            if num_bytes > file_bytes:
                raise cut_off(path, name, num_bytes, file_bytes)
        if filtered and not pixels:  # which h5py reads
            check_gzip(path, name, item)
    stored = file_bytes if num_bytes <= file_bytes else min(int(item.id.get_storage_size()), file_bytes)
    most = stored * (_MOST_BY_ANY if pixels else _MOST_BY_GZIP if filtered else 1)
    if num_bytes > most + (_FREE_PIXEL_BYTES if pixels else _FREE_BYTES) or int(item.shape[0]) > most + _FREE_BYTES:
        raise bad(
            path,
            name,
            f"claims {_shown(tuple(item.shape))} values, {num_bytes:,} bytes, of which the file holds "
            f"{stored:,}: it was cut short, or damaged. Copy it again, or make it again.",
        )


def cut_off(path: Path, name: str, end: int, file_bytes: int) -> FormatError:
    return FormatError(
        f"{path}: truncated: `{name}` ends at byte {end:,}, the file at {file_bytes:,}. Copy or pack it again."
    )


def check_ragged(path: Path, name: str, datasets: Mapping[str, h5py.Dataset]) -> None:
    """Raises FormatError for a ragged dataset of the wrong type, or without its index."""
    item = datasets[name]
    shape = plain(item.attrs["row_shape"])
    rank = 2 if name == "masks" else 3
    fits = isinstance(shape, tuple) and len(shape) == rank
    fits = fits and all(isinstance(size, int) and 0 <= size < 2**31 for size in shape)
    fits = fits and (rank == 2 or shape[2] in (1, 3, 4)) and plain(item.attrs.get("row_dtype")) in ("uint8", "uint16")
    if item.dtype != np.uint8 or len(item.shape) != 1 or not fits:
        what = f"is {item.dtype} {item.shape} with rows {_shown(shape)}, not images of varying size."
        raise bad(path, name, f"{what} {CHANGED}")
    for index in index_names(name):
        dtype, row = INDEX_DTYPES[index.removeprefix(f"{name}_")]
        found = datasets.get(index)
        if found is None or found.dtype != np.dtype(dtype) or tuple(found.shape[1:]) != row:
            what = f"`{index}`, part of the index of `{name}`, is missing or of another type"
            raise FormatError(f"{path}: {what}. {CHANGED}")


def splits(path: Path, values: NDArray[Any], names: tuple[str, ...], *, packed: bool) -> dict[str, range]:
    """Returns name -> its run of rows, from the numbers of the splits (N,) and their names.

    A file of another program whose `split` means something else has none.
    """
    fits = values.dtype.kind in "biu" and len(set(names)) == len(names)
    if fits:
        starts = np.concatenate(([0], np.flatnonzero(values[1:] != values[:-1]) + 1))
        stops = np.append(starts[1:], len(values))
        runs = [int(run) for run in values[starts]]
        fits = len(set(runs)) == len(runs) and min(runs) >= 0 and max(runs) < len(names)
    if fits:
        return {names[run]: range(int(a), int(b)) for run, a, b in zip(runs, starts, stops, strict=True)}
    if packed:
        raise FormatError(f"{path}: `split` is not one contiguous run of rows per split. {CHANGED}")
    return {}


def folder_of_files(path: Path) -> FormatError:
    """Returns the error for a folder that holds packed files, in the place of a file."""
    for file in islice(sorted(path.glob("*.h5")), _MOST_OPENED):
        with suppress(OSError), h5py.File(file) as hdf5:
            if "fastload_index" in hdf5.attrs:
                return FormatError(f"{path}: a folder, not a packed file. Give the index in it: {str(file)!r}.")
    return FormatError(
        f"{path}: a folder, not a packed file. Give the list of the files in it, in the order of their rows: "
        f"sorted(glob.glob({str(path / '*.h5')!r})); or make an index of them: `fastload index {typed(path)}/*.h5 -o "
        f"{typed(path)}.h5`."
    )


def open_hdf5(path: Path, *, anew: bool = False) -> Hdf5File:
    """Opens a file for reading.

    `anew`: read metadata from the file, also where this process has it open: HDF5 would give what it read then.

    Raises:
        MissingFileError: there is no such file.
        FormatError: not an HDF5 file, or a truncated one.
    """
    if not path.exists():
        if (part := path.with_name(f"{path.name}.part")).exists():
            raise MissingFileError(
                f"{path}: not complete yet, only {part.name} is there. Wait for the command that makes it, or run "
                f"the same one again."
            )
        if _PATTERN.search(str(path)):
            raise MissingFileError(
                f"{path}: no such file, and patterns are not expanded. Give the list of the files, in the order of "
                f"their rows: sorted(glob.glob({str(path)!r}))."
            )
        raise MissingFileError(f"{path}: no such file. Make one with `fastload pack SRC {typed(path)}`.")
    if path.is_dir():
        if any(path.glob("*.h5")):
            raise folder_of_files(path)
        raise FormatError(f"{path}: a folder, not a packed file. Pack it first: `fastload pack {typed(path)} OUT.h5`.")
    if path.name.endswith((".part", ".journal")):
        raise FormatError(f"{path}: of an unfinished pack. Run the same `fastload pack` command again to complete it.")
    if not path.is_file():
        raise FormatError(f"{path}: a pipe or device, not a file. Name a packed file.")
    try:
        # Locks fail on NFS and Lustre (h5py #1101), and HDF5 refuses to open a file that this process has already open
        # with another choice of locking; so each choice is tried.
        # For descriptors, since the others ask for a file's real path; it shares nothing with files open by another.
        driver = "stdio" if anew or path.is_relative_to("/proc/self/fd") else None
        for locking in (None, False, True):
            try:
                return Hdf5File(path, "r", locking=locking, driver=driver)
            except OSError as exc:
                if "lock" not in str(exc):
                    raise
        return Hdf5File(path, "r", locking="best-effort")
    except (OSError, RuntimeError, ValueError, TypeError, OverflowError) as exc:  # by what the superblock says
        if isinstance(exc, PermissionError):
            what = "permission denied. Make it readable for this user."
        elif path.stat().st_size == 0:
            what = "the file is empty (0 bytes). Pack it again."
        elif "truncated" in str(exc):
            what = (
                f"truncated: {path.stat().st_size:,} bytes on disk, fewer than its header promises. The copy was "
                f"probably cut short; copy it again, or pack it again."
            )
        else:
            what = (
                f"not an HDF5 file, or one whose first bytes are damaged ({exc}). Copy it again, or name a file that "
                f"`fastload pack` made, or another HDF5 file."
            )
        raise FormatError(f"{path}: {what}") from exc


class Hdf5File(h5py.File):  # type: ignore[misc]  # h5py has no types
    """An HDF5 file whose context turns what h5py raises for damaged metadata into a FormatError that names the file."""

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        path = self.filename if self.id.valid else ""
        super().__exit__(kind, error, where)
        if error is not None and not isinstance(error, FastloadError) and is_of_hdf5(error):
            raise damaged(path, error) from error


def damaged(path: str | Path, error: BaseException) -> FormatError:
    """Returns the error to raise where HDF5 cannot make sense of a file, or cannot read it."""
    reason = "not enough memory for what it claims to hold" if isinstance(error, MemoryError) else error
    return FormatError(f"{path}: its HDF5 metadata is damaged ({reason}). Copy it again, or pack it again.")


def is_of_hdf5(error: BaseException) -> bool:
    """Whether h5py raised an error, of nearly any type where metadata is damaged, or NumPy for want of memory."""
    if isinstance(error, (OSError, RuntimeError, KeyError, MemoryError, OverflowError)):
        return True
    where = error.__traceback__
    while where is not None and where.tb_next is not None:
        where = where.tb_next
    module = str(where.tb_frame.f_globals.get("__name__", "")) if where is not None else ""
    return isinstance(error, Exception) and module.split(".")[0] == "h5py"
