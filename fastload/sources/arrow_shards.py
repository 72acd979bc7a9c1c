"""The files of one Parquet or Arrow dataset: their columns, and where the bytes of their images lie.

Parquet: one pass unpacks the images to a temporary file. Reading one image costs its whole row group (100 rows of 40
kB: 7 ms an image, 0.7 ms in a pass), and packing reads rows in shuffled order. Arrow files hold their bytes as they
are, so their images are read in place.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastload.errors import MissingExtraError, SourceError
from fastload.sources.listing import Files
from fastload.sources.spans import FileSpans, Spill

_BATCH_BYTES = 2**25
_LIST_BYTES = 2**20  # of a column, read ahead


class Encoded(NamedTuple):
    """The images of one column, of all shards.

    Attributes:
        parts: what reads them.
        part: int32 (R,), which of the parts.
        place: int64 (R,), the place there.
        sizes: int64 (R,), bytes; 0 where a row holds none.
        paths: what each row calls its image; "" where it does not.
    """

    parts: tuple[Files, ...]
    part: NDArray[np.int32]
    place: NDArray[np.int64]
    sizes: NDArray[np.int64]
    paths: list[str]


class Shard:
    """One file of the dataset, whose rows follow those of the one before."""

    def __init__(self, path: Path) -> None:
        """Open it.

        Raises:
            MissingExtraError: pyarrow is not installed.
            SourceError: it is damaged.
        """
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError as exc:
            raise MissingExtraError(
                f"{path}: pyarrow reads this file, and is not installed. "
                "Install it with `pip install 'fastload[parquet]'`."
            ) from exc
        self.path = path
        self.parquet = path.suffix.lower() == ".parquet"
        with _named(path):
            if self.parquet:
                # Read a little at a time: a row group may be larger than the memory.
                self._file = pq.ParquetFile(path, pre_buffer=False, buffer_size=_LIST_BYTES)
                self.schema, self.num_rows = self._file.schema_arrow, self._file.metadata.num_rows
            else:
                self._map = pa.memory_map(os.fspath(path))
                self._table = pa.ipc.open_stream(self._map).read_all()
                self.schema, self.num_rows = self._table.schema, self._table.num_rows

        if self.num_rows < 0:
            raise SourceError(f"{path} is damaged: it promises {self.num_rows} rows. Fetch it again.")

    def column(self, name: str) -> Any:
        """One column as a chunked array."""
        with _named(self.path):
            column = self._file.read(columns=[name]).column(0) if self.parquet else self._table.column(name)
            column.validate(full=not self.parquet)  # a mapped file's offsets were never looked at
            self.check(len(column))
            return column

    def check(self, rows: int) -> None:
        """Refuse a file that promises another number of rows than it holds."""
        if rows != self.num_rows:
            raise SourceError(
                f"{self.path} is damaged: it promises {self.num_rows} rows and holds {rows}. Fetch it again."
            )

    def num_bytes(self) -> int:
        """Bytes that all columns take when they are unpacked, so at most those of the images."""
        with _named(self.path):
            meta = self._file.metadata
            # Not the sizes of single columns: pyarrow 26 aborts the process there where statistics are damaged.
            return sum(meta.row_group(group).total_byte_size for group in range(meta.num_row_groups))

    def batches(self, name: str) -> Iterator[Any]:
        """One column in arrays of some 32 MB."""
        if not self.parquet:
            yield from self.column(name).chunks
            return
        rows = max(1, min(1024, _BATCH_BYTES * self.num_rows // max(1, self.num_bytes())))
        batches = self._file.iter_batches(batch_size=rows, columns=[name], use_threads=False)
        while True:
            with _named(self.path):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch.column(0)

    def spans(self, offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> FileSpans:
        """Pieces of an Arrow file that lie at these addresses of its mapping."""
        status = os.stat(self.path)
        return FileSpans(os.path.abspath(self.path), status.st_size, status.st_mtime_ns, offsets, sizes)

    def address(self) -> int:
        """Where an Arrow file's first byte is mapped."""
        self._map.seek(0)
        return int(self._map.read_buffer(1).address)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as exc:  # ValueError: text in the schema that is not UTF-8
        raise SourceError(
            f"{path} cannot be read: {str(exc).splitlines()[0]}. It is damaged or cut short; fetch it again."
        ) from exc


def encoded_images(shards: list[Shard], name: str, beside: Path) -> Encoded:
    """The bytes of a column's images: where they lie, or in a temporary file.

    Args:
        shards: all of one kind.
        name: a struct of bytes and path, or binary.
        beside: folder of the dataset, where a temporary file may be made if nowhere else.

    Raises:
        SourceError: a file is damaged; there is no room.
    """
    parquet = shards[0].parquet
    spill = Spill(sum(shard.num_bytes() for shard in shards), beside) if parquet else None
    offsets, sizes, paths, parts, counts = [], [], list[str](), list[Files](), list[int]()
    for shard in shards:
        base = 0 if spill else shard.address()
        mine_offsets, mine_sizes = [], []
        for array in shard.batches(name):
            with _named(shard.path):
                starts, lengths, buffer = _bytes_of(array, paths)
            if spill:
                first, last = (int(starts[0]), int(starts[-1] + lengths[-1])) if len(starts) else (0, 0)
                at = spill.write(memoryview(buffer)[first:last]) if buffer is not None and last > first else 0
                starts = starts - first + at
            elif buffer is not None:
                starts = starts + (buffer.address - base)
            mine_offsets.append(starts)
            mine_sizes.append(lengths)
        offsets.append(np.concatenate([np.zeros(0, np.int64), *mine_offsets]))
        sizes.append(np.concatenate([np.zeros(0, np.int64), *mine_sizes]))
        counts.append(len(offsets[-1]))
        shard.check(counts[-1])
        if not spill:
            parts.append(shard.spans(offsets[-1], sizes[-1]))
    if spill:
        parts, counts = [spill.spans(np.concatenate(offsets), np.concatenate(sizes))], [sum(counts)]
    return Encoded(
        parts=tuple(parts),
        part=np.repeat(np.arange(len(parts), dtype=np.int32), counts),
        place=np.concatenate([np.arange(count, dtype=np.int64) for count in counts]),
        sizes=np.concatenate(sizes),
        paths=paths,
    )


def _bytes_of(array: Any, paths: list[str]) -> tuple[NDArray[np.int64], NDArray[np.int64], Any]:
    """Beginnings and lengths (0: null) of an array's bytes in its buffer; what it calls them is added to paths."""
    import pyarrow as pa
    import pyarrow.compute as pc

    while isinstance(array.type, pa.BaseExtensionType):
        array = array.storage
    rows = len(array)
    valid = np.asarray(array.is_valid().to_numpy(zero_copy_only=False))
    if pa.types.is_struct(array.type):
        paths += [path or "" for path in pc.struct_field(array, "path").to_pylist()]
        array = pc.struct_field(array, "bytes")  # null where the struct is
        valid = np.asarray(array.is_valid().to_numpy(zero_copy_only=False))
    else:
        paths += [""] * rows
    if pa.types.is_null(array.type):
        return np.zeros(rows, np.int64), np.zeros(rows, np.int64), None
    wide = pa.types.is_large_binary(array.type)
    _, ends, data = array.buffers()
    places = np.frombuffer(ends, np.int64 if wide else np.int32)[array.offset : array.offset + rows + 1].astype(
        np.int64
    )
    lengths = np.where(valid, np.diff(places), 0)
    return places[:-1], lengths, data
