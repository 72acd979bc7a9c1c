"""The index of packed files: they stay where they are, and are read as one dataset."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fastload.errors import OptionError, OutputError, SourceError
from fastload.format.header import PackedFile, read_header
from fastload.format.joined import checked_file, join_files
from fastload.pack.output_url import check_url, found_object, shown_as, upload
from fastload.pack.pack_options import output_exists
from fastload.remote.headers import fetch_header
from fastload.remote.ranges import client_of
from fastload.remote.urls import ObjectPath, Remote, path_of, remote_in_force, requests_as
from fastload.system.files import check_new_file, save_bytes
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
    joined = join_files(headers, [[_relative(header.path, output)] for header in headers])
    save_bytes(joined.index(), output, force=overwrite)
    return IndexReport(
        path=output,
        num_samples=sum(joined.splits.values()),
        splits=joined.splits,
        num_shards=len(headers),
        num_bytes=int(joined.shards.num_bytes.sum()),
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


def _header(path: Path, output: Path) -> PackedFile:
    """Returns the header of a file that fastload wrote, compared with its digests."""
    if path.exists() and output.exists() and path.samefile(output):
        raise OutputError(f"{output}: is one of the files to be indexed. Choose another name.")
    header = checked_file(path)
    if header.is_index:
        raise SourceError(f"{path}: is an index itself. An index is made of files of `fastload pack` or `repack`.")
    return header


def _relative(path: Path, output: Path) -> str:
    folder, found = (Path(os.path.realpath(each)) for each in (output.absolute().parent, path))
    if not found.is_relative_to(folder):
        raise OptionError(
            f"{path}: lies outside of {folder}, the folder of the index, which names its shards relative to itself. "
            f"Write the index to a folder above all of them."
        )
    return found.relative_to(folder).as_posix()
