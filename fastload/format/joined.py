"""Several packed files as one dataset: whether they can be, and what the index of them says.

`join_files` compares headers and returns `AlikeFiles`: the packer writes them as an index, and `open_files` makes of
them an index that is in no file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from fastload.errors import FormatError, OptionError, SourceError
from fastload.format import CHUNK_BYTES
from fastload.format.codecs import CODEC_CHUNK_BYTES
from fastload.format.digests import attributes
from fastload.format.header import (
    IMAGES_OFFSET,
    PIXEL_FIELDS,
    Field,
    FileIdentity,
    PackedFile,
    RaggedField,
    check_header,
    field_of_index,
    join_split_names,
    open_hdf5,
    read_header,
)
from fastload.format.ragged import RaggedExtent, ragged_offsets
from fastload.format.shards import INDEX_VERSION, Shards, create_index, index_digest
from fastload.format.texts import is_text
from fastload.format.writer import chunk_rows_for, new_file, scratch_file, set_attrs, writer_name
from fastload.system.files import is_below, read_bytes
from fastload.system.text import first_few

_MOST_NAMES = 5  # that messages list whole


@dataclass(frozen=True, eq=False)
class AlikeFiles:
    """Packed files as the shards of one dataset.

    Attributes:
        headers: of the files, each as an index's: of one shard, or, of an index, of several.
        shards: the shards of all, and their rows split by split.
        splits: name -> number of rows, in the order of the rows.
    """

    headers: tuple[PackedFile, ...]
    shards: Shards
    splits: dict[str, int]

    def fields(self) -> dict[str, dict[str, Any]]:
        """Returns the description of each field that an index has in `shards/fields`, see `create_index`."""
        return {name: self._described(name) for name in self.headers[0].fields}

    def attrs(self) -> dict[str, Any]:
        """Returns the root attributes of an index, but for its digest."""
        first = self.headers[0]
        return {
            "fastload_version": max(header.version or 1 for header in self.headers),
            "fastload_index": INDEX_VERSION,
            "fastload_writer": writer_name(),
            "num_rows": sum(self.splits.values()),
            "split_names": tuple(self.splits),
            "split_rows": np.array(list(self.splits.values())),
            "shuffled": all(header.shuffled for header in self.headers),
            "seed": first.seed,
            **{name: _joined(self.headers, name) for name in ("decoder", "source_layout") if name in first.attrs},
            "pack_options": json.dumps(_same_options(self.headers), sort_keys=True, separators=(",", ":")),
        }

    def index(self) -> bytes:
        """Returns the file that is the index of them."""
        fields = self.fields()
        # With indexes among them it is not for other programs, and has offsets as each shard has them.
        for_others = len(self.headers) == len(self.shards.names)
        own = {f"{name}_offset": _offsets(self, name) for name in self.headers[0].ragged if for_others}
        if any(header.fields["split"].names != tuple(self.splits) for header in self.headers):  # other numbers
            own["split"] = np.repeat(np.arange(len(self.splits), dtype=np.uint8), list(self.splits.values()))
        with scratch_file() as (fd, path):
            with new_file(path) as file:
                text = create_index(file, self.shards, fields, own)
                for name, said in fields.items():
                    texts = {"names": said["names"]} if said["names"] else {}
                    set_attrs(file[name], {**said["attrs"], **texts})
                set_attrs(file, self.attrs())
            with h5py.File(path, "r+", driver="stdio") as file:
                set_attrs(file, {"header_digest": index_digest(self.shards, text, attributes(file))})
            return read_bytes(fd, os.fstat(fd).st_size, 0)

    def header(self, folder: Path, listed: Sequence[str]) -> PackedFile:
        """Returns the header of an index of them that is in no file; their names are relative to the folder.

        Its digest is of what the shards hold, wherever they lie.
        """
        fields, num_rows = json.loads(json.dumps(self.fields())), sum(self.splits.values())
        attrs = self.attrs() | {"split_rows": tuple(self.splits.values())}
        stops = np.cumsum(list(self.splits.values())).tolist()
        by_content = replace(self.shards, names=self.shards.digests)
        name = f"[{first_few([os.path.basename(one) for one in listed], 3)}]"
        return PackedFile(
            path=folder / name,
            version=attrs["fastload_version"],
            num_rows=num_rows,
            fields={name: field_of_index(name, one, num_rows) for name, one in fields.items()},
            splits={name: range(stop - self.splits[name], stop) for name, stop in zip(self.splits, stops, strict=True)},
            header_digest=index_digest(by_content, json.dumps(fields).encode(), attrs),
            shuffled=attrs["shuffled"],
            seed=attrs["seed"],
            identity=FileIdentity(0, 0, int(self.shards.num_bytes.sum()), -1, 0),
            attrs=attrs,
            shards=self.shards,
            given=name,
            listed=tuple(listed),
        )

    def _described(self, name: str) -> dict[str, Any]:
        """Returns the description of a field of all shards, see `create_index`."""
        fields = [header.fields[name] for header in self.headers]
        first = fields[0]
        dtype, shape = first.dtype, list(first.shape)
        if dtype.kind == "S":
            dtype = max((field.dtype for field in fields), key=lambda one: one.itemsize)
        ragged, chunk_rows = None, 0
        if name in self.headers[0].ragged:
            shape = [n if all(field.shape[axis] == n for field in fields) else 0 for axis, n in enumerate(shape)]
            extent = self._extent_of_one(name)
            chunk_rows = extent.chunk_rows
            ragged = {"shard_bytes": _shard_bytes(self.headers, name), "chunk_bytes": extent.chunk_bytes}
        elif name in PIXEL_FIELDS:
            chunk_rows = self._chunk_rows(first) if name == "images" else max(field.chunk_rows for field in fields)
        names = first.names
        if name == "split":
            names = tuple(dict.fromkeys(one for header in self.headers for one in header.splits))
        return {
            "dtype": dtype.str,
            "shape": shape,
            "stored_dtype": "|u1" if ragged else dtype.str,
            "stored_shape": [] if ragged else shape,
            "chunk_rows": chunk_rows,
            "filters": list(dict.fromkeys(one for field in fields for one in field.filters)),
            "names": list(names),
            "attrs": first.attrs,
            "linear": all(field.linear for field in fields),
            "fill": -1 if name in ("labels", "box_labels") and dtype.kind == "i" else 0,
            "ragged": ragged,
        }

    def _chunk_rows(self, images: Field) -> int:
        """Returns the rows of a chunk of the plan, by which an index has the order of one file of its rows.

        As many as that would have by the options that all shards were packed with, where their own chunks are that
        long, or shorter only for want of rows or to fill whole pages (`whole_pages`); else those of the longest chunk.
        """
        aim, total, own = _aimed_at(self.headers), sum(self.splits.values()), self.shards.chunk_rows
        small = [min(aim, CODEC_CHUNK_BYTES)] if images.filters else []
        for chunk_bytes in [*small, aim] if own.all() and len(own) > 1 else ():
            rows = chunk_rows_for(images.row_bytes, total, chunk_bytes)
            paged = np.array([rows - rows % 2**power for power in range(IMAGES_OFFSET.bit_length())])
            if (own[:, None] == np.minimum(paged, self.shards.num_rows[:, None])).any(axis=1).all():
                return rows
        return int(own.max())

    def _extent_of_one(self, name: str) -> RaggedExtent:
        """Returns the extent that a ragged field would have in one file of all rows; of indexes, the mean of theirs."""
        extents = [header.ragged[name].ragged for header in self.headers]
        aim = _aimed_at(self.headers)
        if any(one.chunk_bytes != min(aim, one.num_bytes) for one in extents):
            aim = max(one.chunk_bytes for one in extents)
        num_bytes = sum(one.num_bytes for one in extents)
        if len(self.headers) == len(self.shards.names):
            num_bytes = ragged_offsets(_in_order(self, f"{name}_bytes"), aim)[1]
        return RaggedExtent(0, num_bytes, min(aim, num_bytes), sum(self.splits.values()))


def _aimed_at(headers: Sequence[PackedFile]) -> int:
    """Returns the size of chunks that files were packed with, the default where they do not say the same."""
    said = _same_options(headers).get("chunk_bytes")
    return said if isinstance(said, int) and said > 0 else CHUNK_BYTES


def _shard_bytes(headers: Sequence[PackedFile], name: str) -> list[int]:
    return [size for header in headers for size in header.ragged[name].shard_bytes]


def _offsets(files: AlikeFiles, name: str) -> NDArray[np.int64]:
    """Returns the offsets of all rows of a ragged field in all files' bytes, one file after another, int64 (N,)."""
    sizes = np.array(_shard_bytes(files.headers, name))
    bases: NDArray[np.int64] = np.cumsum(sizes) - sizes  # of the shards
    found: NDArray[np.int64] = _in_order(files, f"{name}_offset")
    return found + bases[np.repeat(files.shards.shard, files.shards.rows)]


def _in_order(files: AlikeFiles, dataset: str) -> NDArray[np.int64]:
    """Returns the values of a dataset of all files, which are no indexes, in the order of the rows: int64 (N,)."""
    found = np.empty(sum(files.splits.values()), np.int64)
    for number, header in enumerate(files.headers):
        there, here = files.shards.rows_of(number)
        with open_hdf5(header.path) as hdf5:
            found[here] = hdf5[dataset][()][there]
    return found


def _joined(headers: Sequence[PackedFile], name: str) -> str:
    return "; ".join(sorted({str(header.attrs.get(name)) for header in headers}))


def _same_options(headers: Sequence[PackedFile]) -> dict[str, Any]:
    options = [json.loads(header.attrs.get("pack_options", "{}")) for header in headers]
    return {name: value for name, value in options[0].items() if all(one.get(name) == value for one in options)}


def join_files(headers: Sequence[PackedFile], names: Sequence[Sequence[str]]) -> AlikeFiles:
    """Returns files as one dataset: for each split the rows of the first file, then those of the second, and so on.

    Args:
        headers: of files that fastload wrote, indexes among them.
        names: of each file the names that its shards get; one name for a file that is no index.

    Raises:
        SourceError: two files differ in a way that one dataset cannot, hold the same, or only one of them has splits.
    """
    of_all = tuple(header if header.is_index else as_index(header) for header in headers)
    every = [header.shards for header in of_all]
    _check_alike(of_all)
    splits = {
        name: sum(len(header.splits.get(name, ())) for header in of_all)
        for name in join_split_names([(Path(header.name), header.splits) for header in of_all])
    }
    pieces = [piece for name in splits for piece in _pieces(of_all, name)]
    of_shards = ("num_rows", "num_bytes", "images_offset", "chunk_rows")
    shards = Shards(
        names=tuple(name for some in names for name in some),
        digests=tuple(digest for one in every for digest in one.digests),
        **{name: np.concatenate([getattr(one, name) for one in every]) for name in of_shards},
        **dict(zip(("shard", "first", "rows"), np.concatenate(pieces, axis=1), strict=True)),
    )
    return AlikeFiles(of_all, shards, splits)


def _pieces(headers: Sequence[PackedFile], split: str) -> Iterator[NDArray[np.int64]]:
    """Yields of each file with rows of a split where they lie: shard, first row there and rows, int64 (3, P)."""
    base = 0
    for header in headers:
        shards = header.shards
        if split in header.splits:
            run = header.splits[split]
            begins = np.maximum(shards.begins, run.start)
            stops = np.minimum(shards.begins + shards.rows, run.stop)
            some = begins < stops
            yield np.stack([shards.shard + base, shards.first + begins - shards.begins, stops - begins])[:, some]
        base += len(shards.names)


def open_files(files: Sequence[str | os.PathLike[str]]) -> PackedFile:
    """Returns the header of an index, in no file, of packed files of this machine; rows are in the order of the list.

    Files are compared as `fastload index` does, also with their digests; an index counts as its shards.

    Raises:
        OptionError: the list is empty, or holds something else.
        SourceError: as `join_files`, or a file was not written by fastload.
        MissingFileError, FormatError: a file is missing, or cannot be read.
    """
    check_list(files)
    headers = [checked_file(Path(file)) for file in files]
    paths = [_shard_paths(header) for header in headers]
    folder = os.path.commonpath([os.path.dirname(path) for some in paths for path in some])
    names = [[os.path.relpath(path, folder) for path in some] for some in paths]
    return join_files(headers, names).header(Path(folder), [os.fspath(file) for file in files])


def check_list(files: object) -> None:
    """Raises OptionError unless it is a list of paths or URLs, one or more."""
    hint = 'Give packed files by their paths or URLs, such as sorted(glob.glob("data/*.h5"))'
    if not isinstance(files, (list, tuple)):
        raise OptionError(f"{files!r:.200} ({type(files).__name__}) is neither a path nor a list of paths. {hint}.")
    if not files:
        raise OptionError(f"{files!r}: a list without a file has no rows. {hint}; a pattern may match nothing.")
    for number, file in enumerate(files):
        if not isinstance(file, (str, os.PathLike)):
            raise OptionError(
                f"{files!r:.200}: [{number}] of this list of files is {file!r:.100} ({type(file).__name__}), not a "
                f"path. {hint}."
            )


def checked_file(path: Path) -> PackedFile:
    """Returns the header of a file or index that fastload wrote, compared with its digests."""
    header = require_written(read_header(path), str(path))
    if not header.is_index:
        with open_hdf5(path) as hdf5:
            check_header(header, hdf5)
    return header


def require_written(header: PackedFile, name: str) -> PackedFile:
    """Returns a header; raises SourceError unless fastload wrote the file."""
    if header.version is None:
        raise SourceError(
            f"{name}: was not written by fastload. An index is made of files of `fastload pack` or `repack`."
        )
    return header


def _shard_paths(header: PackedFile) -> list[str]:
    """Returns the files that hold the rows of a file or index, links followed."""
    folder = header.path.absolute().parent
    for path in header.files if header.is_index else ():
        if not is_below(path, folder):
            raise FormatError(f"{header.path}: its shard {path} is a link that leaves the folder; refused as unsafe.")
    return [os.path.realpath(path) for path in header.files]


def twice(one: str, other: str) -> str:
    """Returns the message where a file comes twice."""
    what = "is given twice" if one == other else f"holds the same as {other}"
    return (
        f"{one}: {what}: every row would be there twice. Leave it out. To see rows more often, take "
        f"`dataset.select(positions)`, whose positions may repeat, or shuffle=Weighted(weights)."
    )


def _check_alike(headers: Sequence[PackedFile]) -> None:
    """Raises SourceError if files cannot be shards of one dataset; names the first difference."""
    seen: dict[str, str] = {}
    for header in headers:
        for number, digest in enumerate(header.shards.digests):
            name = header.name if len(header.shards.names) == 1 else f"{header.name} ({header.shards.names[number]})"
            if digest in seen:
                raise SourceError(twice(name, seen[digest]))
            seen[digest] = name
    kinds = [{name: _kind(field) for name, field in header.fields.items()} for header in headers]
    for header, other in zip(headers, kinds, strict=True):
        differ = [name for name in dict.fromkeys([*kinds[0], *other]) if kinds[0].get(name) != other.get(name)]
        if differ:
            said = "; ".join(
                f"`{name}`: {_in_words(kinds[0].get(name), other.get(name))} in {headers[0].name}, "
                f"{_in_words(other.get(name), kinds[0].get(name))} in {header.name}"
                for name in differ
            )
            raise SourceError(
                f"Files that differ cannot be shards of one dataset: {said}. `fastload merge` joins classes by name "
                f"and pads boxes; else pack them with the same options."
            )


def _kind(field: Field) -> tuple[Any, ...]:
    """Returns what must be the same of a field in all shards."""
    if is_text(field.dtype, field.shape):  # of any length
        return "texts", field.shape, "rows", (), field.attrs
    if field.name == "split":  # joined by name
        return field.dtype.name, field.shape, "rows", (), {}
    if isinstance(field, RaggedField):
        return field.dtype.name, ("H", "W", *field.shape[2:]), "rows of varying length", field.names, field.attrs
    return field.dtype.name, field.shape, "rows", field.names, field.attrs


def _in_words(kind: tuple[Any, ...] | None, other: tuple[Any, ...] | None) -> str:
    """Returns what a field is, of many names those that the other one has not, or elsewhere."""
    if kind is None:
        return "absent"
    dtype, shape, form, names, attrs = kind
    theirs = other[3] if other is not None else ()
    if theirs and len(names) > _MOST_NAMES:
        names = [name for at, name in enumerate(names) if theirs[at : at + 1] != (name,)]
    more = f", names {first_few(names)}" if names else ""
    return f"{form} of {dtype} ({', '.join(map(str, shape))}){more}" + (f", {attrs}" if attrs else "")


def as_index(file: PackedFile) -> PackedFile:
    """Returns a packed file's header as an index's, whose only shard is the file itself."""
    return replace(file, fields={name: field.in_shard() for name, field in file.fields.items()})
