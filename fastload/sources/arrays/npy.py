"""NumPy's own files: an .npz, an .npy, or a folder of them. Named arrays of equal length are one dataset.

    pathmnist.npz           train_images, train_labels, val_images, ...
    mnist.npz               x_train, y_train, x_test, y_test
    images.npy labels.npy   in one folder, or in train/ and test/
    tokens.npy, ...         a dataset without images

Nothing is unpickled. Uncompressed arrays are read in place. `named` says what becomes of an array by its name.
"""

from __future__ import annotations

import io
import math
import os
import re
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.sources.archives.members import LOCAL_HEADER, content_offset
from fastload.sources.arrays.named import samples_of_arrays
from fastload.sources.arrays.raw_rows import Axes, MemoryRows, RawRows, npy_header
from fastload.sources.arrays.roles import NamedArray
from fastload.sources.assemble import Draft, Samples
from fastload.sources.listing import SPLITS, Arrays, SourceOptions, first_few
from fastload.sources.tree import Tree, key_of
from fastload.sources.webdataset.webdataset import webdataset_evidence
from fastload.system.machine import available_memory

if TYPE_CHECKING:
    from zipfile import ZipInfo

_SUFFIXES = (".npy", ".npz")


def arrays_evidence(tree: Tree) -> list[str]:
    """Returns the .npy and .npz files of a tree without images that is no WebDataset shard; none for any other tree."""
    if len(tree.images()) or webdataset_evidence(tree):
        return []
    return [key_of(name) for name in tree.names if name.lower().endswith(_SUFFIXES)]


def list_arrays(draft: Draft, tree: Tree, options: SourceOptions) -> Samples:
    """Returns the rows of NumPy arrays; `samples_of_arrays` decides by name what each array is.

    Raises:
        SourceError: a file is damaged or holds Python objects; or for the reasons of `samples_of_arrays`.
    """
    masks_wanted = options.masks != "none"
    names = [name for name in tree.names if name.lower().endswith(_SUFFIXES)]
    if not names:
        raise SourceError(f"{tree.given}: no .npy or .npz file. Give the file, or the folder that holds them.")
    arrays: list[NamedArray] = []
    bundles = [name for name in names if name.lower().endswith(".npz")]
    if len(bundles) > 1 and not all(_split_of(name) for name in bundles):
        raise SourceError(
            f"{tree.given} holds several .npz files ({len(bundles)}): {first_few(list(map(key_of, bundles)))}. "
            "Give one of them; or name them train.npz, val.npz and test.npz."
        )
    for i, name in enumerate(tree.names):
        if name.lower().endswith(".npy"):
            arrays.append(_read_npy(tree, i))
        elif name.lower().endswith(".npz"):
            arrays += read_npz(tree, i)
    flat = [array.name for array in arrays if not array.shape]
    if flat:
        draft.notes.append(f"Ignored, since they are single values: {first_few(flat)}.")
    if others := tree.others(i for i, name in enumerate(tree.names) if name.lower().endswith(_SUFFIXES)):
        draft.notes.append(f"Ignored the other files ({len(others)}): {first_few(others)}.")
    return samples_of_arrays(draft, arrays, masks_wanted=masks_wanted)


@dataclass(frozen=True, eq=False)
class _NpyArray:
    """An array in an .npy file, or in a member of an .npz.

    Attributes:
        where: the file, for messages.
        path: the file, if the array lies uncompressed in it; else None.
        offset: byte of `path`, or of what `load` returns, at which the elements begin.
        shape: (N, ...).
        dtype: as stored.
        fortran: whether the first axis varies fastest.
        load: returns the content of the .npy, used without a path.
    """

    where: str
    path: Path | None
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran: bool
    load: Callable[[], bytes]

    def named(self, name: str, mtime_ns: int, split: str) -> NamedArray:
        """Returns the array under a name, for `samples_of_arrays`."""
        return NamedArray(name, self.where, self.shape, self.dtype, self.values, self.rows, mtime_ns, split=split)

    def values(self) -> NDArray[Any]:
        """Returns the whole array."""
        count = math.prod(self.shape)
        if self.path is not None:
            flat = np.fromfile(self.path, self.dtype, count, offset=self.offset)
        else:
            flat = np.frombuffer(self.load(), self.dtype, count, self.offset)
        if len(flat) != count:
            raise SourceError(f"{self.where}: ended while it was read. Leave it alone, and run again.")
        return flat.reshape(self.shape, order="F" if self.fortran else "C")

    def rows(self, shape: tuple[int, ...], axes: Axes) -> Arrays:
        """Returns the reader of its rows, each (stored) of `shape`: in place if possible, else from memory."""
        if self.path is not None and not (self.fortran and len(self.shape) > 1):
            return RawRows.of(
                self.path, offset=self.offset, num_rows=self.shape[0], shape=shape, dtype=self.dtype, axes=axes
            )
        _require_memory(math.prod(self.shape) * self.dtype.itemsize, self.where)
        return MemoryRows.of(self.values().reshape(self.shape[0], *shape), axes)


def _split_of(name: str) -> str:
    """Returns the split that a folder of a path or its stem names; "" for none."""
    parts = re.split("/", name.rpartition(".")[0])
    return next((part for part in reversed(parts) if part.lower() in SPLITS), "")


def _read_npy(tree: Tree, i: int) -> NamedArray:
    name, where = tree.names[i], str(tree.path / key_of(tree.names[i]))
    split, stem = _split_of(name), key_of(name.rpartition("/")[2].rpartition(".")[0])
    if stem.lower() in SPLITS:
        stem = "data"
    if tree.archive:
        content = tree.read_text(i)
        stored = _stored(where, io.BytesIO(content), len(content), None, 0, lambda: content)
        return stored.named(stem, int(tree.mtimes_ns[i]), split)
    path = tree.path / name
    try:
        with open(path, "rb") as file:
            stored = _stored(where, file, os.fstat(file.fileno()).st_size, path, 0, bytes)
    except OSError as exc:
        raise SourceError(f"{where} cannot be read: {exc.strerror}. Make it readable for this user.") from exc
    return stored.named(stem, int(tree.mtimes_ns[i]), split)


def read_npz(tree: Tree, i: int) -> list[NamedArray]:
    """Returns the arrays in an .npz, of which only the headers are read.

    Raises:
        SourceError: it is damaged, or holds Python objects or records.
    """
    import zipfile

    where, split = str(tree.path / key_of(tree.names[i])), _split_of(tree.names[i])
    mtime, content = int(tree.mtimes_ns[i]), tree.read_text(i) if tree.archive else b""

    def reopen() -> IO[bytes]:
        return io.BytesIO(content) if tree.archive else open(tree.path / tree.names[i], "rb")

    arrays = []
    try:
        with reopen() as file, zipfile.ZipFile(file) as bundle:
            for member in bundle.infolist():
                if not member.filename.lower().endswith(".npy"):
                    continue
                if len([m for m in bundle.namelist() if m == member.filename]) > 1:
                    raise SourceError(f"{where}: {key_of(member.filename)} occurs twice. Save the arrays again.")
                inside = f"{where}: {key_of(member.filename)}"
                in_place = member.compress_type == zipfile.ZIP_STORED and not tree.archive
                path = tree.path / tree.names[i] if in_place else None
                base = _member_offset(file, member) if in_place else 0
                load, name = _member_loader(reopen, member, inside), key_of(member.filename.rpartition(".")[0])
                with bundle.open(member) as head:
                    stored = _stored(inside, head, member.file_size, path, base, load)
                arrays.append(stored.named(name, mtime, split))
    except (zipfile.BadZipFile, OSError, EOFError, RuntimeError, zlib.error, struct.error) as exc:
        if isinstance(exc, SourceError):
            raise
        raise SourceError(f"{where}: cannot be read as an .npz ({exc}). Copy or save it again.") from exc
    if not arrays:
        raise SourceError(f"{where}: holds no array (a member that ends in .npy). Is it an .npz of NumPy's?")
    return arrays


def _member_offset(file: IO[bytes], member: ZipInfo) -> int:
    """Returns the byte of an .npz at which the content of an uncompressed member begins."""
    position = file.tell()
    file.seek(member.header_offset)
    header = LOCAL_HEADER.unpack(file.read(LOCAL_HEADER.size))
    file.seek(position)
    return content_offset(member.header_offset, header)


def _member_loader(reopen: Callable[[], IO[bytes]], member: ZipInfo, where: str) -> Callable[[], bytes]:
    import zipfile

    def load() -> bytes:
        _require_memory(member.file_size, where)
        try:
            # This unpacks no more than the size in the directory, which was compared with the array's header.
            with reopen() as file, zipfile.ZipFile(file) as bundle, bundle.open(member) as content:
                return content.read()
        except (zipfile.BadZipFile, OSError, EOFError, RuntimeError, zlib.error) as exc:
            raise SourceError(f"{where}: is damaged ({exc}). Copy or save it again.") from exc

    return load


def _stored(
    where: str, file: IO[bytes], size: int, path: Path | None, base: int, load: Callable[[], bytes]
) -> _NpyArray:
    """Returns the array whose .npy content (`size` bytes, at byte `base` of `path`) `file` is positioned at."""
    shape, fortran, dtype, head_bytes = _header(file, where)
    needed = head_bytes + math.prod(shape) * dtype.itemsize
    if needed != size or min(shape, default=0) < 0:
        raise SourceError(
            f"{where}: holds {size:,} bytes, its header promises {needed:,} ({dtype} {shape}). "
            "The copy was probably cut short; copy or save it again."
        )
    return _NpyArray(where, path, base + head_bytes, shape, dtype, fortran, load)


def _header(file: IO[bytes], where: str) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Returns shape, Fortran order, dtype and length of an .npy's header, for an array of numbers or texts."""
    try:
        shape, fortran, dtype = npy_header(file)
    except ValueError as exc:
        raise SourceError(f"{where}: not an .npy array, or a damaged one ({exc}). Copy or save it again.") from exc
    if dtype.hasobject:
        raise SourceError(
            f"{where}: an array of Python objects, which only unpickling could read; that could execute anything, so "
            "it is refused. Save it as numbers, or texts of a fixed length, with `astype`."
        )
    if dtype.names or dtype.subdtype or dtype.itemsize == 0:
        raise SourceError(f"{where}: an array of records ({dtype}). Save each of its fields as an array of its own.")
    return shape, fortran, dtype, file.tell()


def _require_memory(needed: int, where: str) -> None:
    if needed > available_memory():
        raise SourceError(
            f"{where}: {needed:,} bytes do not fit into memory, and cannot be read in place since they are compressed "
            "or in Fortran order. Save the array uncompressed (`numpy.save`), in C order."
        )
