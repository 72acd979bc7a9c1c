"""CIFAR-10 and CIFAR-100, the Python and the binary version; images are read in place.

    cifar-10-batches-py/    data_batch_1 ... data_batch_5, test_batch, batches.meta          pickles
    cifar-100-python/       train, test, meta                                                pickles
    cifar-10-batches-bin/   data_batch_1.bin ... test_batch.bin, batches.meta.txt            1 + 3072 bytes an image
    cifar-100-binary/       train.bin, test.bin, fine_label_names.txt, coarse_label_names.txt  2 + 3072

The pickles are read by `cifar_pickle`, which executes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.sources.arrays.raw_rows import MemoryRows, RawRows, RowFile, joined_samples
from fastload.sources.assemble import Draft, Samples, split_path
from fastload.sources.cifar_pickle import read_pickle
from fastload.sources.listing import Arrays, SourceOptions, first_few
from fastload.sources.tree import Tree, key_of
from fastload.system.text import text_of

_SHAPE = (3, 32, 32)
_PIXELS = 3072


@dataclass(frozen=True)
class _Version:
    """One published version of one of the two datasets."""

    title: str  # name for messages
    train: tuple[str, ...]  # names of the files with training images
    test: str  # name of the file with test images
    labels: tuple[tuple[str, int], ...]  # (name, number of classes) of each column, as in a record
    keys: tuple[str, ...]  # the key of each of these columns in a pickle
    names: dict[str, tuple[str, str]]  # column -> the file with the names of its classes, and their key in that pickle
    binary: bool = False  # whether the files hold binary records, not pickles


_TEN = tuple(f"data_batch_{i}" for i in range(1, 6))
_FINE_COARSE = (("coarse_labels", 20), ("labels", 100))
_VERSIONS = (
    _Version("CIFAR-10 for Python", _TEN, "test_batch", (("labels", 10),), ("labels",),
             {"labels": ("batches.meta", "label_names")}),
    _Version("CIFAR-10, binary", tuple(f"{name}.bin" for name in _TEN), "test_batch.bin", (("labels", 10),), (),
             {"labels": ("batches.meta.txt", "")}, True),
    _Version("CIFAR-100 for Python", ("train",), "test", _FINE_COARSE, ("coarse_labels", "fine_labels"),
             {"labels": ("meta", "fine_label_names"), "coarse_labels": ("meta", "coarse_label_names")}),
    _Version("CIFAR-100, binary", ("train.bin",), "test.bin", _FINE_COARSE, (),
             {"labels": ("fine_label_names.txt", ""), "coarse_labels": ("coarse_label_names.txt", "")}, True),
)  # fmt: skip


def cifar_evidence(tree: Tree) -> list[str]:
    """Returns the files of a tree that are CIFAR's batches by their names."""
    return [key_of(tree.names[i]) for _, _, files in _find(tree) for i in files.values()]


def list_cifar(draft: Draft, tree: Tree, options: SourceOptions) -> Samples:
    """Returns CIFAR-10 or CIFAR-100, batch after batch, splits `train` and `test`.

    Columns: `labels` int64 (N,); for CIFAR-100 the fine ones, and also `coarse_labels` int64 (N,); `names` from the
    files of names. Keys: file of the batch, then the image's own name, or its number in the binary version.

    Raises:
        SourceError: a batch is absent (unless skipped), has a wrong length or wrong labels, or is a pickle that asks
            for more than arrays and plain values.
    """
    found = _find(tree)
    if not found:
        raise SourceError(
            f"{tree.given}: no batches of CIFAR. Expected data_batch_1 ... test_batch, or train, test and meta, or "
            "the same with .bin; give the folder that was unpacked from the download."
        )
    if len(found) > 1:
        named = [f"{version.title} in {key_of(folder) or 'the folder itself'}" for version, folder, _ in found]
        raise SourceError(
            f"{tree.given} holds more than one dataset: {' and '.join(named)}. Give the folder of one of them."
        )
    version, folder, files = found[0]
    shown = first_few([key_of(tree.names[i]) for i in files.values()])
    draft.title = f"Layout cifar: {version.title}, recognised by {shown}."
    absent = [f"{key_of(folder)}{name}" for name in version.train if name not in files]
    if len(absent) == len(version.train):
        draft.notes.append(f"There are no training images: {first_few(absent)} is absent.")
    elif absent and draft.on_error == "fail":
        raise SourceError(
            f"{draft.where}: {version.title} lacks {first_few(absent)}, so {len(absent)} of {len(version.train)} parts "
            "of the training images. Unpack the download again, or pack without them with `--on-error skip`."
        )
    else:
        for name in absent:
            draft.leave_out(name, "is absent with all of its images")
    if version.test not in files:
        draft.notes.append(f"There are no test images: {key_of(folder)}{version.test} is absent.")
    read = _read_binary if version.binary else _read_pickled
    batches = [read(tree, i, version, "test" if name == version.test else "train") for name, i in files.items()]
    attrs: dict[str, dict[str, Any]] = {}
    there = {name: i for i, name in enumerate(tree.names)}
    used = set(files.values())
    for column, classes in version.labels[::-1]:
        file, key = version.names[column]
        i = there.get(folder + file, -1)
        attrs[column] = {"names": _class_names(tree, i, key, classes)} if i >= 0 else {}
        if i < 0:
            draft.notes.append(f"There is no {file}: the classes of {column} have no names.")
        used.add(i)
    return joined_samples(draft, tree, batches, attrs, used)


def _find(tree: Tree) -> list[tuple[_Version, str, dict[str, int]]]:
    """Returns each CIFAR dataset in a tree: version, folder (ending in `/`), and file name -> position, in order."""
    folders: dict[str, dict[str, int]] = {}
    for i, name in tree.not_images:
        folder, base = split_path(name)
        folders.setdefault(folder, {})[base] = i
    found = []
    for folder, names in folders.items():
        for version in _VERSIONS:
            files = {name: names[name] for name in (*version.train, version.test) if name in names}
            # `train` and `test` of CIFAR-100 may be anything: the files beside them and their content tell.
            known = any(name in names for name, _ in version.names.values())
            if len(version.labels) == 1:
                fits = True
            elif version.binary:
                fits = known or all(tree.sizes[i] % (_PIXELS + 2) == 0 and tree.sizes[i] > 0 for i in files.values())
            else:
                fits = known and all(tree.files.read_head(i, 1) in (b"\x80", b"(") for i in files.values())
            if files and fits:
                found.append((version, folder, files))
    return found


def _read_pickled(tree: Tree, i: int, version: _Version, split: str) -> RowFile:
    where, content = tree.where(i), tree.read_text(i)
    batch = _unpickled(content, where)
    data = batch.get("data")
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape[1:] != (_PIXELS,):
        kind = f"{data.dtype} {data.shape}" if isinstance(data, np.ndarray) else type(data).__name__
        raise SourceError(f"{where}: `data` is {kind}; expected uint8 (n, {_PIXELS}). Fetch the download again.")
    count = data.shape[0]
    labels = {
        column: _checked(batch.get(key), count, classes, f"{where}: `{key}`")
        for (column, classes), key in zip(version.labels, version.keys, strict=True)
    }
    names: Any = batch.get("filenames")
    whole = isinstance(names, list) and len(names) == count and not set(map(type, names)) - {str, bytes}
    # A pickle can hold a long name once and name it for each image: keys would take more memory than the file.
    names = list(map(text_of, names)) if whole and sum(map(len, names)) <= len(content) else []
    rows: Arrays = MemoryRows.of(data.reshape(count, *_SHAPE), "CHW")
    # Python 3 writes arrays as text with protocols 0 to 2; else the pickle holds the bytes themselves.
    raw = data.tobytes()
    offset = content.find(raw[:_PIXELS])  # of the first image: a search for all of them takes ten times as long
    if data.flags.c_contiguous and offset >= 0 and content[offset : offset + len(raw)] == raw:
        rows = _rows(tree, i, content, count, offset, _PIXELS)
    return RowFile(i, split, rows, count, labels, names)


def _read_binary(tree: Tree, i: int, version: _Version, split: str) -> RowFile:
    where, content = tree.where(i), tree.read_text(i)
    head = len(version.labels)
    record = head + _PIXELS
    if len(content) % record or not content:
        raise SourceError(
            f"{where}: {len(content):,} bytes are no whole number of records of {record} ({head} of labels, {_PIXELS} "
            "of pixels). The copy was probably cut short; unpack the download again."
        )
    count = len(content) // record
    table = np.frombuffer(content, np.uint8).reshape(count, record)
    labels = {
        column: _checked(table[:, at].tolist(), count, classes, f"{where}: {column}")
        for at, (column, classes) in enumerate(version.labels)
    }
    return RowFile(i, split, _rows(tree, i, content, count, head, record), count, labels)


def _rows(tree: Tree, i: int, content: bytes, count: int, offset: int, stride: int) -> Arrays:
    """Returns the reader of images at a fixed distance in a file: in place, or from its content in an archive."""
    if not tree.in_place:
        strides = (stride, *np.empty(_SHAPE, np.uint8).strides)
        return MemoryRows.of(np.ndarray((count, *_SHAPE), np.uint8, content, offset, strides), "CHW")
    path, dtype = tree.path / tree.names[i], np.uint8
    return RawRows.of(path, offset=offset, num_rows=count, shape=_SHAPE, dtype=dtype, stride=stride, axes="CHW")


def _checked(values: object, count: int, classes: int, what: str) -> NDArray[np.int64]:
    """Returns the labels of a batch, once their number and values are checked."""
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if not isinstance(values, list) or set(map(type, values)) - {int}:
        raise SourceError(f"{what}: no list of integers. Unpack the download again.")
    if len(values) != count:
        raise SourceError(f"{what}: {len(values)} labels for {count} images. Unpack the download again.")
    for row, value in enumerate(values):
        if not 0 <= value < classes:
            raise SourceError(
                f"{what}: image {row} has the label {value}; expected 0 to {classes - 1}. Unpack the download again."
            )
    return np.array(values, np.int64)


def _class_names(tree: Tree, i: int, key: str, classes: int) -> tuple[str, ...]:
    """Returns the names of the classes in a text file or, with a key, in a pickle."""
    where, content = tree.where(i), tree.read_text(i)
    names: Any = content.decode("utf-8", "backslashreplace").split()
    if key:
        names = _unpickled(content, where).get(key)
        if not isinstance(names, list) or not all(isinstance(name, (str, bytes)) for name in names):
            raise SourceError(f"{where}: `{key}` is no list of names. Unpack the download again, or remove the file.")
        names = list(map(text_of, names))
    if len(names) != classes:
        raise SourceError(
            f"{where}: {len(names)} names for {classes} classes. Unpack the download again, or remove the file."
        )
    return tuple(names)


def _unpickled(content: bytes, where: str) -> dict[str, Any]:
    """Returns a pickled dict with its keys as text, whether Python 2 or 3 wrote them."""
    value = read_pickle(content, where)
    if not isinstance(value, dict):
        raise SourceError(f"{where}: the pickle holds no dict. Fetch the download again.")
    return {text_of(key): item for key, item in value.items() if isinstance(key, (bytes, str))}
