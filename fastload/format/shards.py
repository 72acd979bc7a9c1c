"""The shards of a dataset: which files make one array of rows, and in what order.

A file that holds its rows itself is its only shard; an index names others. `read_shards` reads one, `create_index`
writes one; `fastload.format` defines it. Nothing of N rows is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import xxhash
from h5py import h5d, h5p, h5s, h5t
from numpy.typing import NDArray

from fastload.errors import FormatError
from fastload.format.digests import KEEPS_GIL, attributes, plain

INDEX_VERSION = 1

_MOST_RUNS = 2**18

INDEX_AGAIN = "Make the index again: `fastload index SHARD.h5 ... -o OUT.h5`."
_GROUPS: dict[str, dict[str, str]] = {
    "shards": {
        **{"name": "S", "header_digest": "S"},
        **dict.fromkeys(("num_rows", "bytes", "images_offset", "chunk_rows"), "i"),
    },
    "pieces": dict.fromkeys(("shard", "first", "rows"), "i"),
}
"""The groups of an index: the kind of each of their datasets."""


@dataclass(frozen=True, eq=False)
class Shards:
    """The shards of a dataset, and the pieces of them that follow one another in its rows.

    Attributes:
        names: path of each shard, relative to the dataset's folder, with `/`.
        digests: `header_digest` of each.
        num_rows, num_bytes, images_offset, chunk_rows: int64 (S,), of each shard: its rows, its bytes, the byte at
            which its images begin (-1: they do not lie in one piece), and the rows of a chunk of its images.
        shard, first, rows: int64 (P,), of each piece: the number of its shard, its first row there, and its rows.
    """

    names: tuple[str, ...]
    digests: tuple[str, ...]
    num_rows: NDArray[np.int64]
    num_bytes: NDArray[np.int64]
    images_offset: NDArray[np.int64]
    chunk_rows: NDArray[np.int64]
    shard: NDArray[np.int64]
    first: NDArray[np.int64]
    rows: NDArray[np.int64]

    @classmethod
    def of_file(
        cls, name: str, digest: str, num_rows: int, num_bytes: int, images_offset: int | None, chunk_rows: int
    ) -> Shards:
        """Returns those of a file that holds its rows itself; `images_offset` None: they do not lie in one piece."""
        begin = -1 if images_offset is None else images_offset
        numbers = (num_rows, num_bytes, begin, chunk_rows, 0, 0, num_rows)
        return cls((name,), (digest,), *(np.array([number], np.int64) for number in numbers))

    @cached_property
    def begins(self) -> NDArray[np.int64]:
        """The first row of each piece, as a row of the index, int64 (P,)."""
        return np.cumsum(self.rows) - self.rows

    def chunks_of(self, chunk_rows: int) -> int:
        """Returns in how many chunks of shards, at most, the rows of a chunk of the plan lie, of chunk_rows each."""
        sizes = np.maximum(1, self.chunk_rows[self.shard])
        leads = self.first % sizes
        if not (leads.any() or (sizes % chunk_rows).any() or (self.begins % chunk_rows).any()):
            return 1
        counts = -(-(leads + self.rows) // sizes)
        number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        begins = np.repeat(self.begins - leads, counts) + number * np.repeat(sizes, counts)
        begins = np.maximum(begins, np.repeat(self.begins, counts))  # the row of the index that each begins with
        found = np.bincount(begins // chunk_rows)
        found[begins[begins % chunk_rows == 0] // chunk_rows] -= 1  # what is not there already when a chunk begins
        return int(found.max()) + 1

    def locate(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns of each row, checked to be in range, its shard and its row there: int64 (B,) each."""
        if len(self.rows) == 1 and not self.first[0]:
            return np.zeros(len(rows), np.int64), rows
        if self._runs is None:
            piece = np.searchsorted(self.begins, rows, "right") - 1
            return self.shard[piece], rows - self._shifts[piece]
        unit, pieces = self._runs
        shard, there = np.empty_like(rows, np.int64), np.empty_like(rows, np.int64)
        for first in range(0, len(rows), KEEPS_GIL):
            some = slice(first, first + KEEPS_GIL)
            piece = pieces[rows[some] // unit]
            shard[some] = self.shard[piece]
            there[some] = rows[some] - self._shifts[piece]
        return shard, there

    @cached_property
    def _runs(self) -> tuple[int, NDArray[np.int64]] | None:
        """The piece of each run of so many rows, which never reaches into another; None where there are too many.

        A look at it keeps the GIL, which other threads do not give back soon: it takes a fifth of the time of a search.
        """
        num_rows = int(self.rows.sum())
        unit = int(np.gcd.reduce(self.begins)) or num_rows
        if num_rows > _MOST_RUNS * unit:
            return None
        return unit, np.repeat(np.arange(len(self.rows)), -(-self.rows // unit))

    @cached_property
    def _shifts(self) -> NDArray[np.int64]:
        """By how much the number of a row of each piece is larger in the index than in its shard, int64 (P,)."""
        return self.begins - self.first

    def rows_of(self, shard: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the rows of a shard in the order of the index, and the row of the index of each, int64 (n,)."""
        mine = np.flatnonzero(self.shard == shard).tolist()
        there = [np.arange(self.first[at], self.first[at] + self.rows[at]) for at in mine]
        here = [np.arange(self.begins[at], self.begins[at] + self.rows[at]) for at in mine]
        return np.concatenate(there), np.concatenate(here)

    def tables(self) -> dict[str, dict[str, NDArray[Any]]]:
        """Returns the datasets of both groups, as they are written."""
        return {
            "shards": {
                "name": np.array([name.encode() for name in self.names]),
                "num_rows": self.num_rows,
                "bytes": self.num_bytes,
                "images_offset": self.images_offset,
                "chunk_rows": self.chunk_rows,
                "header_digest": np.array([digest.encode() for digest in self.digests]),
            },
            "pieces": {"shard": self.shard, "first": self.first, "rows": self.rows},
        }


def read_shards(path: Path, file: h5py.File) -> tuple[Shards, dict[str, dict[str, Any]]]:
    """Returns the shards of an index, checked, and the description of each of its fields, by name.

    FormatError: it is of a newer release, or was changed after it was written.
    """
    version = plain(file.attrs["fastload_index"])
    if version != INDEX_VERSION:
        raise FormatError(
            f"{path}: an index of version {version!r}; this release reads {INDEX_VERSION}. Install a newer release."
        )
    found: dict[str, Any] = {}
    for group, kinds in _GROUPS.items():
        for name, kind in kinds.items():
            item = file.get(f"{group}/{name}")
            fits = isinstance(item, h5py.Dataset) and not item.is_virtual and not item.external
            if not fits or len(item.shape) != 1 or item.dtype.kind != kind:
                raise FormatError(f"{path}: `{group}/{name}` is missing or of another type. {INDEX_AGAIN}")
            found[name] = item[()]
    item = file.get("shards/fields")
    if not isinstance(item, h5py.Dataset) or item.dtype != np.uint8 or len(item.shape) != 1:
        raise FormatError(f"{path}: `shards/fields` is missing or of another type. {INDEX_AGAIN}")
    text = item[()].tobytes()
    names, digests = ([plain(one) for one in found.pop(name).tolist()] for name in ("name", "header_digest"))
    numbers = {name: values.astype(np.int64) for name, values in found.items()}
    numbers["num_bytes"] = numbers.pop("bytes")
    shards = Shards(tuple(names), tuple(digests), **numbers)
    if index_digest(shards, text, attributes(file)) != plain(file.attrs.get("header_digest")):
        raise FormatError(f"{path}: the index is not as it was written: it was changed or damaged. {INDEX_AGAIN}")
    _check(path, shards, int(plain(file.attrs["num_rows"])))
    try:
        described = json.loads(text)
    except ValueError as exc:
        raise FormatError(f"{path}: `shards/fields` is no JSON. {INDEX_AGAIN}") from exc
    return shards, described


def _check(path: Path, shards: Shards, num_rows: int) -> None:
    """Raises FormatError unless each piece lies within its shard, and together they are all rows, each once."""
    count = len(shards.names)
    for name in shards.names:
        check_name(path, name)
    if path.name in shards.names:
        raise FormatError(f"{path}: names itself as a shard. {INDEX_AGAIN}")
    equal = {len(values) for values in (shards.digests, shards.num_rows, shards.num_bytes, shards.images_offset,
                                        shards.chunk_rows)} == {count}  # fmt: skip
    equal = equal and len(shards.shard) == len(shards.first) == len(shards.rows) and count > 0
    if equal:
        shard, first, rows = shards.shard, shards.first, shards.rows
        equal = bool(((shard >= 0) & (shard < count) & (first >= 0) & (rows > 0)).all())
        equal = equal and bool((first <= shards.num_rows[shard] - rows).all()) and int(rows.sum()) == num_rows
    if not equal:
        raise FormatError(f"{path}: its pieces are not rows of its shards. {INDEX_AGAIN}")


def split_of(splits: Mapping[str, range], rows: NDArray[np.int64]) -> NDArray[np.intp]:
    """Returns the number of each row's split, of splits that follow one another: int64 (n,)."""
    return np.searchsorted([run.stop for run in splits.values()], rows, "right")


def check_name(path: Path, name: str) -> None:
    """Raises FormatError for the name of a shard that may lead out of the folder of its index."""
    if not name or name.startswith("/") or "\\" in name or "\0" in name or (".." in name and ".." in name.split("/")):
        raise FormatError(
            f"{path}: names a shard {name!r}, which does not lie in the folder of the index or below it; refused as "
            f"unsafe. {INDEX_AGAIN}"
        )


def index_digest(shards: Shards, fields: bytes, attrs: Mapping[str, Any]) -> str:
    """Returns XXH3-128 in hex over root attributes but `header_digest`, the fields' description, and both groups."""
    said = {name: value for name, value in attrs.items() if name != "header_digest"}
    digest = xxhash.xxh3_128(json.dumps(said, sort_keys=True, ensure_ascii=True, default=str).encode())
    digest.update(fields)
    for group in shards.tables().values():
        for name in sorted(group):
            digest.update(np.ascontiguousarray(group[name]).data)
    return digest.hexdigest()


def create_index(
    file: h5py.File, shards: Shards, fields: Mapping[str, Mapping[str, Any]], own: Mapping[str, NDArray[Any]]
) -> bytes:
    """Writes both groups and the virtual datasets of an index into a new file; returns the fields' description.

    Args:
        fields: of each, what `read_shards` is to return, with `fill`, the value where a shard is missing.
        own: the datasets (N,) whose values are not simply the shards' values one after another: `images_offset` and
            `masks_offset` of ragged fields, and `split` where its numbers differ.
    """
    for group, values in shards.tables().items():
        for name, array in values.items():
            file.create_dataset(f"{group}/{name}", data=array, track_times=False)
    text = json.dumps(fields, ensure_ascii=True).encode()
    file.create_dataset("shards/fields", data=np.frombuffer(text, np.uint8), track_times=False)
    for name, field in fields.items():
        if name in own:
            file.create_dataset(
                name, data=own[name], track_times=False, compression="gzip" if name == "split" else None
            )
        else:
            _create_virtual(file, name, field, shards)
    return text


def _create_virtual(file: h5py.File, name: str, field: Mapping[str, Any], shards: Shards) -> None:
    """Creates a virtual dataset over the rows of the pieces; of ragged fields, over all bytes of the shards in turn."""
    plist = h5p.create(h5p.DATASET_CREATE)
    plist.set_obj_track_times(False)
    dtype = np.dtype(field["stored_dtype"])
    if field["fill"]:
        plist.set_fill_value(np.array(field["fill"], dtype))
    row, parts = tuple(field["stored_shape"]), list(_parts(shards))
    if field["ragged"] is not None:
        parts = list(_ragged_parts(field["ragged"]["shard_bytes"]))
    total = sum(count for _, _, _, count, _ in parts)
    space = h5s.create_simple((total, *row))
    zeros = (0,) * len(row)
    for begin, shard, first, count, num_rows in parts:
        space.select_hyperslab((begin, *zeros), (count, *row))
        source = h5s.create_simple((num_rows, *row))
        source.select_hyperslab((first, *zeros), (count, *row))
        plist.set_virtual(space, shards.names[shard].replace("%", "%%").encode(), name.encode(), source)
    kind = h5t.py_create(dtype.newbyteorder("<"))
    if dtype.kind == "S":
        kind.set_cset(h5t.CSET_UTF8)
    h5d.create(file.id, name.encode(), kind, h5s.create_simple((total, *row)), plist)


def _parts(shards: Shards) -> Iterator[tuple[int, int, int, int, int]]:
    """Yields of each piece its first row, its shard, its first row there, its rows, and the rows of that shard."""
    sizes = shards.num_rows[shards.shard]
    yield from zip(
        *(values.tolist() for values in (shards.begins, shards.shard, shards.first, shards.rows, sizes)), strict=True
    )


def _ragged_parts(sizes: Sequence[int]) -> Iterator[tuple[int, int, int, int, int]]:
    """Yields such parts for bytes: the bytes of each shard, one after another."""
    at = 0
    for number, size in enumerate(sizes):
        yield at, number, 0, size, size
        at += size


def check_mappings(
    path: Path, file: h5py.File, shards: Shards, names: Iterable[str], ragged: Mapping[str, Sequence[int]]
) -> None:
    """Raises FormatError unless the virtual datasets of an index lead other programs to the rows that its pieces say.

    `names`: of its fields; `ragged`: of those whose rows vary in length the bytes of their rows in each shard.
    """
    for name in names:
        item = file.get(name)
        if not isinstance(item, h5py.Dataset) or not (item.is_virtual or name.endswith("_offset") or name == "split"):
            raise FormatError(f"{path}: `{name}` is no virtual dataset over its shards. {INDEX_AGAIN}")
        if not item.is_virtual:
            continue
        expected = list(_ragged_parts(ragged[name]) if name in ragged else _parts(shards))
        rest = item.shape[1:]
        plist = item.id.get_create_plist()
        found = []
        for at in range(plist.get_virtual_count()):
            (first, *_), (last, *ends) = plist.get_virtual_vspace(at).get_select_bounds()
            source = plist.get_virtual_srcspace(at)
            every = source.get_select_type() == h5s.SEL_ALL
            begin = 0 if every else source.get_select_bounds()[0][0]
            whole = plist.get_virtual_dsetname(at) == name and tuple(end + 1 for end in ends) == rest
            shard = plist.get_virtual_filename(at).replace("%%", "%")
            found.append((int(first), shard if whole else "", int(begin), int(last - first + 1)))
        if found != [(begin, shards.names[shard], first, count) for begin, shard, first, count, _ in expected]:
            raise FormatError(f"{path}: `{name}` leads other programs to other rows than the index says. {INDEX_AGAIN}")
