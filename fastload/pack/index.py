"""The index of packed files: they stay where they are, and are read as one dataset."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from fastload.errors import OptionError, OutputError, SourceError
from fastload.format.codecs import CODEC_CHUNK_BYTES
from fastload.format.digests import attributes
from fastload.format.header import (
    IMAGES_OFFSET,
    PIXEL_FIELDS,
    Field,
    PackedFile,
    check_header,
    join_split_names,
    open_hdf5,
    read_header,
)
from fastload.format.ragged import RaggedExtent, ragged_offsets
from fastload.format.shards import INDEX_VERSION, Shards, create_index, index_digest
from fastload.format.texts import is_text
from fastload.format.writer import CHUNK_BYTES, chunk_rows_for, new_file, scratch_file, set_attrs, writer_name
from fastload.pack.output_url import check_url, found_object, shown_as, upload
from fastload.pack.pack_options import output_exists
from fastload.remote.headers import fetch_header
from fastload.remote.options import Remote
from fastload.remote.paths import ObjectPath, path_of, remote_in_force, requests_as
from fastload.remote.ranges import client_of
from fastload.sources.listing import first_few
from fastload.system.files import check_new_file, read_bytes, save_bytes
from fastload.system.threads import in_threads


@dataclass(frozen=True)
class IndexReport:
    """The contents of an index.

    Attributes:
        path: the index.
        num_samples: rows of all shards.
        splits: name -> number of rows.
        num_shards: the shards.
        num_bytes: bytes of all shards.
        index_bytes: bytes of the index itself.
        image_shape: (H, W, C), 0 where images differ; () without images.
    """

    path: Path
    num_samples: int
    splits: dict[str, int]
    num_shards: int
    num_bytes: int
    index_bytes: int
    image_shape: tuple[int, ...]


def index_files(
    files: Sequence[str | Path], output: str | Path, *, overwrite: bool = False, remote: Remote | None = None
) -> IndexReport:
    """Writes an index of packed files, by which they are read as one dataset, without copying them.

    Splits are joined by name: train holds the first file's rows, then the second's, and so on.

    Args:
        files: one or more packed files with the same fields, shapes, dtypes and classes, in the folder of the output
            or below it; or their URLs, if the output's is given as one: headers are then read by ranges.
        output: the index, or its URL, which is written only if it is not there meanwhile.
        overwrite: replace an output that exists.
        remote: how objects behind URLs are requested.

    Raises:
        SourceError: two files differ in a way that one dataset cannot; or one was given twice.
        OptionError: no files, or one outside of the output's folder.
        MissingFileError, FormatError: a file is missing, or cannot be read.
        OutputError: the output exists, or cannot be written.
    """
    output, paths = path_of(output), [path_of(file) for file in files]
    if isinstance(output, ObjectPath) or any(isinstance(path, ObjectPath) for path in paths):
        with requests_as(remote):
            if isinstance(output, ObjectPath):
                check_url(output, overwrite=overwrite)
            return index_objects(paths, output, overwrite=overwrite)
    if output.exists() and not overwrite:
        raise output_exists(output)
    check_new_file(output, force=overwrite)
    if not files:
        raise OptionError("an index needs at least one packed file.")
    headers = [_header(path, output) for path in paths]
    _check_alike(headers)
    names = [_relative(header.path, output) for header in headers]
    split_names = join_split_names([(header.path, header.splits) for header in headers])
    pieces = [
        (number, header.splits[name].start, len(header.splits[name]))
        for name in split_names
        for number, header in enumerate(headers)
        if name in header.splits
    ]
    shards = _shards(headers, names, np.array(pieces, np.int64))
    split_rows = [sum(len(header.splits.get(name, ())) for header in headers) for name in split_names]
    write_index(output, headers, shards, dict(zip(split_names, split_rows, strict=True)), overwrite=overwrite)
    return IndexReport(
        path=output,
        num_samples=sum(split_rows),
        splits=dict(zip(split_names, split_rows, strict=True)),
        num_shards=len(headers),
        num_bytes=int(shards.num_bytes.sum()),
        index_bytes=os.path.getsize(output),
        image_shape=images.shape if (images := read_header(output).fields.get("images")) else (),
    )


def index_packed(paths: Sequence[Path], output: Path, *, overwrite: bool) -> IndexReport:
    """Writes the index of shards that were just packed, as `index_files`.

    An object that another packer of the same has written meanwhile is no error.
    """
    if isinstance(output, ObjectPath):
        return index_objects(paths, output, overwrite=overwrite)
    return index_files(paths, output, overwrite=overwrite)


def index_objects(paths: Sequence[Path], output: Path, *, overwrite: bool) -> IndexReport:
    """Writes the index of objects, from copies of all but their pixels; see `index_files`.

    Without `overwrite` it is written only if there is none; an equal index, by another process, counts as written.
    """
    if not isinstance(output, ObjectPath):
        raise OptionError(
            f"{output}: the index of files behind URLs lies where they do, as it names them relative to itself. Give a "
            f"URL, such as {paths[0].with_name('out.h5')}."
        )
    folder, names = output.parent, list[str]()
    for path in paths:
        if not isinstance(path, ObjectPath) or not path.is_relative_to(folder):
            raise OptionError(
                f"{path}: lies outside of {folder}, the folder of the index, which names its shards relative to "
                f"itself. Write the index to a folder above all of them."
            )
        if path == output:
            raise OutputError(f"{output}: is one of the files to be indexed. Choose another name.")
        names.append(path.relative_to(folder).as_posix())
    before = found_object(output) if overwrite else None
    with tempfile.TemporaryDirectory(prefix="fastload-index-") as copies:
        with shown_as(Path(copies), folder):

            def copy(name: str) -> Path:
                client, key = client_of(folder / name)
                info, path = client.head(key), Path(copies) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                fetch_header(client, key, info.num_bytes, info.etag, path)
                return path

            known = dict.fromkeys(names)  # `index_files` refuses one that is given twice
            done = dict(zip(known, in_threads(copy, known, remote_in_force().in_flight, ordered=True), strict=True))
            report = index_files([done[name] for name in names], Path(copies) / output.name)
        upload(report.path, output, before=before, is_same=_same_bytes, at_once=True)
    return replace(report, path=output)


def _same_bytes(path: ObjectPath, local: Path) -> bool:
    client, key = client_of(path)
    return client.holding(key, local.read_bytes()) is not None


def write_index(
    output: Path, headers: Sequence[PackedFile], shards: Shards, splits: dict[str, int], *, overwrite: bool
) -> None:
    """Writes the index of shards whose headers are these; each split's rows follow the rows of the split before."""
    first = headers[0]
    fields = {name: _described(name, headers, shards) for name in first.fields}
    ragged = [name for name, field in first.fields.items() if field.ragged is not None]
    own = {f"{name}_offset": _offsets(f"{name}_offset", name, headers, shards) for name in ragged}
    if any(header.fields["split"].names != tuple(splits) for header in headers):  # whose numbers mean other splits
        own["split"] = np.repeat(np.arange(len(splits), dtype=np.uint8), list(splits.values()))
    attrs: dict[str, Any] = {
        "fastload_version": max(header.version or 1 for header in headers),
        "fastload_index": INDEX_VERSION,
        "fastload_writer": writer_name(),
        "num_rows": sum(splits.values()),
        "split_names": tuple(splits),
        "split_rows": np.array(list(splits.values())),
        "shuffled": all(header.shuffled for header in headers),
        "seed": first.seed,
        **{name: _joined(headers, name) for name in ("decoder", "source_layout") if name in first.attrs},
        "pack_options": json.dumps(_same_options(headers), sort_keys=True, separators=(",", ":")),
    }
    with scratch_file() as (fd, path):
        with new_file(path) as file:
            text = create_index(file, shards, fields, own)
            for name, said in fields.items():
                texts = {"names": said["names"]} if said["names"] else {}
                set_attrs(file[name], {**said["attrs"], **texts})
            set_attrs(file, attrs)
        with h5py.File(path, "r+", driver="stdio") as file:
            set_attrs(file, {"header_digest": index_digest(shards, text, attributes(file))})
        data = read_bytes(fd, os.fstat(fd).st_size, 0)
    save_bytes(data, output, force=overwrite)


def _header(path: Path, output: Path) -> PackedFile:
    """Returns the header of a file that fastload wrote, compared with its digests."""
    if path.exists() and output.exists() and path.samefile(output):
        raise OutputError(f"{output}: is one of the files to be indexed. Choose another name.")
    header = read_header(path)
    if header.version is None or header.shards is not None:
        kind = "is an index itself" if header.shards is not None else "was not written by fastload"
        raise SourceError(f"{path}: {kind}. An index is made of files of `fastload pack` or `repack`.")
    with open_hdf5(path) as hdf5:
        check_header(header, hdf5)
    return header


def _relative(path: Path, output: Path) -> str:
    folder, found = (Path(os.path.realpath(each)) for each in (output.absolute().parent, path))
    if not found.is_relative_to(folder):
        raise OptionError(
            f"{path}: lies outside of {folder}, the folder of the index, which names its shards relative to itself. "
            f"Write the index to a folder above all of them."
        )
    return found.relative_to(folder).as_posix()


def _shards(headers: Sequence[PackedFile], names: Sequence[str], pieces: NDArray[np.int64]) -> Shards:
    images = [header.fields.get("images") for header in headers]
    return Shards(
        names=tuple(names),
        digests=tuple(header.header_digest for header in headers),
        num_rows=np.array([header.num_rows for header in headers]),
        num_bytes=np.array([header.identity.size for header in headers]),
        images_offset=np.array([-1 if one is None or one.offset is None else one.offset for one in images]),
        chunk_rows=np.array([0 if one is None else one.chunk_rows for one in images]),
        shard=pieces[:, 0].copy(),
        first=pieces[:, 1].copy(),
        rows=pieces[:, 2].copy(),
    )


def _check_alike(headers: Sequence[PackedFile]) -> None:
    """Raises SourceError if files cannot be shards of one dataset; names the first difference."""
    seen: dict[str, PackedFile] = {}
    for header in headers:
        if header.header_digest in seen:
            raise SourceError(
                f"{header.path}: holds the same as {seen[header.header_digest].path}: every row would be there twice."
            )
        seen[header.header_digest] = header
    kinds = [{name: _kind(field) for name, field in header.fields.items()} for header in headers]
    for header, other in zip(headers, kinds, strict=True):
        differ = [name for name in dict.fromkeys([*kinds[0], *other]) if kinds[0].get(name) != other.get(name)]
        if differ:
            said = "; ".join(
                f"`{name}`: {_in_words(kinds[0].get(name))} in {headers[0].path}, {_in_words(other.get(name))} in "
                f"{header.path}"
                for name in differ
            )
            raise SourceError(
                f"Files that differ cannot be shards of one dataset: {said}. `fastload merge` joins classes by name "
                f"and pads boxes; else pack them with the same options."
            )


def _kind(field: Field) -> tuple[Any, ...]:
    """Returns what must be the same of a field in all shards."""
    shape: tuple[Any, ...] = ("H", "W", *field.shape[2:]) if field.ragged is not None else field.shape
    form = "rows of varying length" if field.ragged is not None else "rows"
    if is_text(field.dtype, field.shape):  # of any length
        return "texts", shape, "rows", (), field.attrs
    if field.name == "split":  # joined by name
        return field.dtype.name, shape, form, (), {}
    return field.dtype.name, shape, form, field.names, field.attrs


def _in_words(kind: tuple[Any, ...] | None) -> str:
    if kind is None:
        return "absent"
    dtype, shape, form, names, attrs = kind
    more = f", names {first_few(names)}" if names else ""
    return f"{form} of {dtype} ({', '.join(map(str, shape))}){more}" + (f", {attrs}" if attrs else "")


def _described(name: str, headers: Sequence[PackedFile], shards: Shards) -> dict[str, Any]:
    """Returns the description of a field of all shards, see `create_index`."""
    fields = [header.fields[name] for header in headers]
    first = fields[0]
    dtype, shape = first.dtype, list(first.shape)
    if dtype.kind == "S":
        dtype = max((field.dtype for field in fields), key=lambda one: one.itemsize)
    ragged, chunk_rows = None, _chunk_rows(fields, headers) if name in PIXEL_FIELDS else 0
    if first.ragged is not None:
        shape = [n if all(field.shape[axis] == n for field in fields) else 0 for axis, n in enumerate(shape)]
        extents = [field.ragged for field in fields if field.ragged is not None]
        aim = _aimed_at(headers)
        if any(one.chunk_bytes != min(aim, one.num_bytes) for one in extents):
            aim = max(one.chunk_bytes for one in extents)
        num_bytes = ragged_offsets(_in_order(f"{name}_bytes", headers, shards), aim)[1]
        chunk_bytes = min(aim, num_bytes)
        chunk_rows = RaggedExtent(0, num_bytes, chunk_bytes, sum(header.num_rows for header in headers)).chunk_rows
        ragged = {"shard_bytes": [one.num_bytes for one in extents], "chunk_bytes": chunk_bytes}
    names = first.names
    if name == "split":
        names = tuple(dict.fromkeys(one for header in headers for one in header.splits))
    return {
        "dtype": dtype.str,
        "shape": shape,
        "stored_dtype": "|u1" if ragged else dtype.str,
        "stored_shape": [] if ragged else shape,
        "chunk_rows": chunk_rows,
        "filters": list(dict.fromkeys(one for field in fields for one in field.filters)),
        "names": list(names),
        "attrs": first.attrs,
        "linear": all(field.offset is not None for field in fields),
        "fill": -1 if name in ("labels", "box_labels") and dtype.kind == "i" else 0,
        "ragged": ragged,
    }


def _aimed_at(headers: Sequence[PackedFile]) -> int:
    """Returns the size of chunks that files were packed with, the default where they do not say one and the same."""
    said = _same_options(headers).get("chunk_bytes")
    return said if isinstance(said, int) and said > 0 else CHUNK_BYTES


def _chunk_rows(fields: Sequence[Field], headers: Sequence[PackedFile]) -> int:
    """Returns the rows of a chunk of the plan, by which an index has the order of one file of its rows.

    As many as that would have by the options that all shards were packed with, where their own chunks are that long, or
    shorter only for want of rows or to fill whole pages (`whole_pages`); else those of the longest chunk.
    """
    aim, total, field = _aimed_at(headers), sum(header.num_rows for header in headers), fields[0]
    small = [min(aim, CODEC_CHUNK_BYTES)] if field.filters else []
    for chunk_bytes in [*small, aim] if field.chunks and len(headers) > 1 else ():
        rows = chunk_rows_for(field.row_bytes, total, chunk_bytes)
        paged = {rows - rows % 2**power for power in range(IMAGES_OFFSET.bit_length())}
        pairs = zip(fields, headers, strict=True)
        if all(one.chunk_rows in {min(rows, header.num_rows) for rows in paged} for one, header in pairs):
            return rows
    return max(one.chunk_rows for one in fields)


def _offsets(dataset: str, name: str, headers: Sequence[PackedFile], shards: Shards) -> NDArray[np.int64]:
    """Returns the offsets of all rows of a ragged field in all shards' bytes, one shard after another, int64 (N,)."""
    extents = [header.fields[name].ragged for header in headers]
    sizes = np.array([extent.num_bytes for extent in extents if extent is not None])
    bases: NDArray[np.int64] = np.cumsum(sizes) - sizes  # of the shards
    found: NDArray[np.int64] = _in_order(dataset, headers, shards) + bases[np.repeat(shards.shard, shards.rows)]
    return found


def _in_order(dataset: str, headers: Sequence[PackedFile], shards: Shards) -> NDArray[np.int64]:
    """Returns the values of a dataset of all shards, in the order of the index: int64 (N,)."""
    found = np.empty(int(shards.rows.sum()), np.int64)
    for number, header in enumerate(headers):
        there, here = shards.rows_of(number)
        with open_hdf5(header.path) as hdf5:
            found[here] = hdf5[dataset][()][there]
    return found


def _joined(headers: Sequence[PackedFile], name: str) -> str:
    return "; ".join(sorted({str(header.attrs.get(name)) for header in headers}))


def _same_options(headers: Sequence[PackedFile]) -> dict[str, Any]:
    options = [json.loads(header.attrs.get("pack_options", "{}")) for header in headers]
    return {name: value for name, value in options[0].items() if all(one.get(name) == value for one in options)}
