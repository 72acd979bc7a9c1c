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
import struct
import zlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.sources.archives import LOCAL_HEADER, content_offset
from fastload.sources.arrays.named import NamedArray, samples_of_arrays
from fastload.sources.arrays.raw_rows import npy_header
from fastload.sources.assemble import Draft, Samples
from fastload.sources.listing import SPLITS, SourceOptions, first_few, split_of_parts
from fastload.sources.tree import Tree, key_of
from fastload.sources.webdataset import webdataset_evidence
from fastload.system.machine import available_memory

if TYPE_CHECKING:
    from zipfile import ZipInfo

_SUFFIXES = (".npy", ".npz")


def arrays_evidence(tree: Tree) -> list[str]:
    """Returns the .npy and .npz files of a tree without images that is no WebDataset shard; none for any other tree."""
    if len(tree.images()) or webdataset_evidence(tree):
        return []
    return [key_of(name) for _, name in tree.not_images if name.lower().endswith(_SUFFIXES)]


def list_arrays(draft: Draft, tree: Tree, options: SourceOptions) -> Samples:
    """Returns the rows of NumPy arrays; `samples_of_arrays` decides by name what each array is."""
    positions = [i for i, name in enumerate(tree.names) if name.lower().endswith(_SUFFIXES)]
    if not positions:
        raise SourceError(f"{tree.given}: no .npy or .npz file. Give the file, or the folder that holds them.")
    bundles = [tree.names[i] for i in positions if tree.names[i].lower().endswith(".npz")]
    if len(bundles) > 1 and not all(_split_of(name) for name in bundles):
        raise SourceError(
            f"{tree.given} holds several .npz files ({len(bundles)}): {first_few(map(key_of, bundles))}. "
            "Give one of them; or name them train.npz, val.npz and test.npz."
        )
    arrays = [array for i in positions for array in (read_npz if tree.names[i] in bundles else _read_npy)(tree, i)]
    draft.note("Ignored, since they are single values", [array.name for array in arrays if not array.shape])
    tree.known[positions] = True
    return samples_of_arrays(draft, arrays, options)


def _split_of(name: str) -> str:
    """Returns the split that the stem of a path or a folder of it names; "" for none."""
    return split_of_parts(reversed(name.rpartition(".")[0].split("/")))


def _read_npy(tree: Tree, i: int) -> list[NamedArray]:
    stem = key_of(tree.names[i].rpartition("/")[2].rpartition(".")[0])
    name = "data" if stem.lower() in SPLITS else stem
    if not tree.in_place:
        content = tree.read_text(i)
        return [_described(tree, i, name, "", io.BytesIO(content), len(content), lambda: content)]
    try:
        with open(tree.path / tree.names[i], "rb") as file:
            return [_described(tree, i, name, "", file, os.fstat(file.fileno()).st_size, 0)]
    except OSError as exc:
        raise SourceError(f"{tree.where(i)} cannot be read: {exc.strerror}. Make it readable for this user.") from exc


def read_npz(tree: Tree, i: int) -> list[NamedArray]:
    """Returns the arrays in an .npz, of which only the headers are read.

    Raises:
        SourceError: it is damaged, or holds Python objects or records.
    """
    import zipfile

    where, content = tree.where(i), b"" if tree.in_place else tree.read_text(i)
    damages = zipfile.BadZipFile, OSError, EOFError, RuntimeError, OverflowError, zlib.error, struct.error

    def reopen() -> IO[bytes]:
        return open(tree.path / tree.names[i], "rb") if tree.in_place else io.BytesIO(content)

    def load(member: ZipInfo) -> bytes:
        try:
            # This unpacks no more than the size in the directory, which was compared with the array's header.
            with reopen() as file, zipfile.ZipFile(file) as bundle, bundle.open(member) as data:
                return data.read()
        except (*damages, ValueError) as exc:
            raise SourceError(f"{where}: {key_of(member.filename)}: is damaged ({exc}). Save it again.") from exc

    arrays = []
    try:
        with reopen() as file, zipfile.ZipFile(file) as bundle:
            occurs = Counter(bundle.namelist())
            for member in bundle.infolist():
                if not member.filename.lower().endswith(".npy"):
                    continue
                if occurs[member.filename] > 1:
                    raise SourceError(f"{where}: {key_of(member.filename)} occurs twice. Save the arrays again.")
                if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise SourceError(f"{where}: {key_of(member.filename)}: not compressed by NumPy. Save it again.")
                source: int | Callable[[], bytes] = partial(load, member)
                if member.compress_type == zipfile.ZIP_STORED and tree.in_place:
                    position = file.tell()
                    file.seek(member.header_offset)
                    header = LOCAL_HEADER.unpack(file.read(LOCAL_HEADER.size))
                    source = content_offset(member.header_offset, header)
                    file.seek(position)
                    if source + member.file_size > int(tree.sizes[i]):
                        raise SourceError(f"{where}: {key_of(member.filename)}: is cut short. Copy or save it again.")
                inside, name = f": {key_of(member.filename)}", key_of(member.filename.rpartition(".")[0])
                with bundle.open(member) as head:
                    arrays.append(_described(tree, i, name, inside, head, member.file_size, source))
    except SourceError:
        raise
    except (*damages, ValueError) as exc:  # the latter at a directory that leads out of the file
        raise SourceError(f"{where}: cannot be read as an .npz ({exc}). Copy or save it again.") from exc
    if not arrays:
        raise SourceError(f"{where}: holds no array (a member that ends in .npy). Is it an .npz of NumPy's?")
    return arrays


def _described(
    tree: Tree, i: int, name: str, inside: str, file: IO[bytes], size: int, source: int | Callable[[], bytes]
) -> NamedArray:
    """Returns the array whose .npy content of `size` bytes `file` is positioned at; only the header is read.

    `source` is the byte of file i at which the content begins, or a function that returns the content; `inside` says
    for messages where in file i it lies.

    Raises:
        SourceError: it is damaged, or no array of numbers or texts.
    """
    where, path = f"{tree.where(i)}{inside}", tree.path / tree.names[i]
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
    start, count = file.tell(), math.prod(shape)
    needed = start + count * dtype.itemsize
    if needed != size:
        raise SourceError(
            f"{where}: holds {size:,} bytes, its header promises {needed:,} ({dtype} {shape}). "
            "The copy was probably cut short; copy or save it again."
        )
    in_place = None
    if not callable(source) and not (fortran and len(shape) > 1):
        in_place = path, source + start

    def values() -> NDArray[Any]:
        if in_place is None and count * dtype.itemsize > available_memory():
            raise SourceError(
                f"{where}: {count * dtype.itemsize:,} bytes do not fit into memory, and cannot be read in place since "
                "they are compressed or in Fortran order. Save the array uncompressed (`numpy.save`), in C order."
            )
        if callable(source):
            flat = np.frombuffer(source(), dtype, count, start)
        else:
            flat = np.fromfile(path, dtype, count, offset=source + start)
        if len(flat) != count:
            raise SourceError(f"{where}: ended while it was read. Leave it alone, and run again.")
        return flat.reshape(shape, order="F" if fortran else "C")

    mtime_ns, split = int(tree.mtimes_ns[i]), _split_of(tree.names[i])
    return NamedArray(name, where, shape, dtype, values, mtime_ns, in_place, split=split)
