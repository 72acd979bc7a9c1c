"""Readers of the images or masks in a column of Parquet or Arrow files: of their bytes, or of files they name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastload.sources.arrow.features import ArrowTable
from fastload.sources.arrow.shards import Shard, UnpackedImages, translate_errors
from fastload.sources.assemble import split_path
from fastload.sources.open_tree import open_tree
from fastload.sources.spans import JoinedFiles
from fastload.sources.tables.image_index import ImageIndex
from fastload.sources.tree import Tree, key_of


class ImageColumn(NamedTuple):
    """The images in one column of all files, R rows.

    Attributes:
        files: reads them.
        sizes: int64 (R,), bytes of each image.
        mtimes_ns: int64 (R,), time of modification of each file beside the table; 0 for an image in the table itself.
        paths: the path that each row names; "" for none.
        bad: row -> why it has no image.
    """

    files: JoinedFiles
    sizes: NDArray[np.int64]
    mtimes_ns: NDArray[np.int64]
    paths: list[str]
    bad: dict[int, str]


def read_images(table: ArrowTable, name: str, tree: Tree) -> ImageColumn:
    """Returns the images of a column of bytes or of paths; a row without bytes names a file of the tree.

    Raises:
        SourceError: a file is damaged, or there is no room for the temporary file.
    """
    paths: list[str] = []
    if name in table.features.images and not str(table.shards[0].schema.field(name).type).endswith("string"):
        files, sizes = _stored_images(table.shards, name, tree.path, paths)
    else:
        paths = table.values(name).texts()
        sizes = np.zeros(len(paths), np.int64)
        files = JoinedFiles((), sizes.astype(np.int32), sizes)
    mtimes, bad = np.zeros(len(sizes), np.int64), dict[int, str]()
    absent = np.flatnonzero(sizes == 0)
    if not len(absent):
        return ImageColumn(files, sizes, mtimes, paths, bad)
    part, at_part, sizes, parts = files.part.copy(), files.index.copy(), sizes.copy(), files.parts
    index = image_index(tree)
    for shard in np.unique(table.shard_of[absent]).tolist():
        rows = absent[table.shard_of[absent] == shard]
        here = index.at(split_path(table.files[shard])[0])
        found = here.find([paths[row] for row in rows.tolist()], [""] * len(rows))
        for k, row in enumerate(rows.tolist()):
            position = int(found.positions[k])
            if position >= 0:
                part[row], at_part[row], sizes[row] = len(parts), position, index.tree.sizes[position]
                mtimes[row] = index.tree.mtimes_ns[position]
            elif paths[row]:
                why = found.reasons.get(k, "is not there")
                bad[row] = f"holds no bytes, only the path {paths[row]!r}, which {why}"
            else:
                bad[row] = "holds no image: its bytes are null or empty"
    return ImageColumn(JoinedFiles((*parts, index.tree.files), part, at_part), sizes, mtimes, paths, bad)


def _stored_images(
    shards: list[Shard], name: str, dataset_folder: Path, paths: list[str]
) -> tuple[JoinedFiles, NDArray[np.int64]]:
    """Returns the images of a column of bytes, of Arrow in place, of Parquet unpacked to a temporary file; their sizes.

    Args:
        shards: all files, of one kind.
        name: the column, a struct of bytes and path, or binary.
        dataset_folder: where the temporary file is made if the usual folders have no room.
        paths: the path of each row is appended.
    """
    parquet = shards[0].parquet
    spill = UnpackedImages(sum(shard.num_bytes() for shard in shards), dataset_folder) if parquet else None
    pieces: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    for shard in shards:
        here, lengths = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for array, base in shard.batches(name):
            with translate_errors(shard.path):
                starts, length, buffer = _bytes_of(array, paths)
            if spill:
                first, last = (int(starts[0]), int(starts[-1] + length[-1])) if len(starts) else (0, 0)
                at = spill.write(memoryview(buffer)[first:last]) if buffer is not None and last > first else 0
                starts = starts - first + at
            elif buffer is not None:
                starts = starts + (buffer.address - base)
            here.append(starts)
            lengths.append(length)
        pieces.append((np.concatenate(here), np.concatenate(lengths)))
        shard.check(len(pieces[-1][0]))
    spans = [((spill or shard).spans(*piece), len(piece[0])) for shard, piece in zip(shards, pieces, strict=True)]
    return JoinedFiles.of(spans), np.concatenate([sizes for _, sizes in pieces])


def _bytes_of(array: Any, paths: list[str]) -> tuple[NDArray[np.int64], NDArray[np.int64], Any]:
    """Returns where each image begins in an array's buffer, its length (0: null), and the buffer; appends to paths."""
    import pyarrow as pa
    import pyarrow.compute as pc

    while isinstance(array.type, pa.BaseExtensionType):
        array = array.storage
    rows = len(array)
    if pa.types.is_struct(array.type):
        paths += [path or "" for path in pc.struct_field(array, "path").to_pylist()]
        array = pc.struct_field(array, "bytes")  # null where the struct is
    else:
        paths += [""] * rows
    if pa.types.is_null(array.type):
        return np.zeros(rows, np.int64), np.zeros(rows, np.int64), None
    wide = pa.types.is_large_binary(array.type)
    valid = np.asarray(array.is_valid().to_numpy(zero_copy_only=False))
    _, ends, data = array.buffers()
    starts = np.frombuffer(ends, np.int64 if wide else np.int32)[array.offset : array.offset + rows + 1].astype(
        np.int64
    )
    lengths = np.where(valid, np.diff(starts), 0)
    return starts[:-1], lengths, data


def image_index(tree: Tree) -> ImageIndex:
    """Returns the index of the image files in the folder of the tables."""
    return ImageIndex(open_tree(tree.path) if tree.file else tree)


def keys_of(all_paths: list[str], table: ArrowTable) -> list[str]:
    """Returns the keys of the rows: shard and path, if the paths in the shard are unique, else shard and row number.

    `all_paths` are the paths of the R rows, [] without images.
    """
    keys: list[str] = []
    start = 0
    for name, shard in zip(table.files, table.shards, strict=True):
        count = shard.num_rows
        paths = all_paths[start : start + count]
        start += count
        if paths and "" not in paths and len(set(paths)) == count:
            inner = [path.replace("\\", "/").rpartition("/")[2] for path in paths]
            if len(set(inner)) < count:
                inner = [path.lstrip("/") for path in paths]
        else:
            inner = [f"{row:08d}" for row in range(count)]
        prefix = f"{key_of(name)}/"
        keys += [prefix + key_of(path) for path in inner]
    return keys
