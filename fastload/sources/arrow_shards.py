"""The files of one Parquet or Arrow dataset: their columns, and where the bytes of their images lie.

Parquet: one pass unpacks the images to a temporary file. Reading one image costs its whole row group (100 rows of 40
kB: 7 ms an image, 0.7 ms in a pass), and packing reads rows in shuffled order. Arrow files hold their bytes as they
are, so their images are read in place.
"""

from __future__ import annotations

import errno
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
    """One file of the dataset, whose rows follow those of the one before; opened anew for each use.

    There may be thousands of them, and a process may often keep no more than 1024 files open.
    """

    def __init__(self, path: Path) -> None:
        """Read its schema.

        Raises:
            MissingExtraError: pyarrow is not installed.
            SourceError: it is damaged.
        """
        try:
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
                with pq.ParquetFile(path) as file:
                    self.schema, self._meta = file.schema_arrow, file.metadata
                    self.num_rows = self._meta.num_rows
            else:
                table, _ = self._mapped()
                self.schema, self.num_rows = table.schema, table.num_rows

        if self.num_rows < 0:
            raise SourceError(f"{path} is damaged: it promises {self.num_rows} rows. Fetch it again.")

    def column(self, name: str) -> Any:
        """One column as a chunked array."""
        with _named(self.path):
            if self.parquet:
                with self._file() as file:
                    column = file.read(columns=[name]).column(0)
            else:
                column = self._mapped()[0].column(name)
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
            meta = self._meta
            # Not the sizes of single columns: pyarrow 26 aborts the process there where statistics are damaged.
            return sum(meta.row_group(group).total_byte_size for group in range(meta.num_row_groups))

    def batches(self, name: str) -> Iterator[tuple[Any, int]]:
        """One column in arrays of some 32 MB, each with the address at which the file's first byte is mapped or 0."""
        if not self.parquet:
            table, address = self._mapped()
            column = table.column(name)
            with _named(self.path):
                column.validate(full=True)  # a mapped file's offsets were never looked at
            yield from ((chunk, address) for chunk in column.chunks)
            return
        rows = max(1, min(1024, _BATCH_BYTES * self.num_rows // max(1, self.num_bytes())))
        with _named(self.path):
            file = self._file()
        with file:
            batches = file.iter_batches(batch_size=rows, columns=[name], use_threads=False)
            while True:
                with _named(self.path):
                    batch = next(batches, None)
                if batch is None:
                    return
                yield batch.column(0), 0

    def spans(self, offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> FileSpans:
        """Pieces of an Arrow file that lie at these addresses of its mapping."""
        status = os.stat(self.path)
        return FileSpans(os.path.abspath(self.path), status.st_size, status.st_mtime_ns, offsets, sizes)

    def _file(self) -> Any:
        import pyarrow.parquet as pq

        # Read a little at a time: a row group may be larger than the memory.
        return pq.ParquetFile(self.path, metadata=self._meta, pre_buffer=False, buffer_size=_LIST_BYTES)

    def _mapped(self) -> tuple[Any, int]:
        """The table of an Arrow file, which keeps the file mapped, though not open; and where its first byte lies."""
        import pyarrow as pa

        with _named(self.path), pa.memory_map(os.fspath(self.path)) as file:
            address = int(file.read_buffer(1).address)
            file.seek(0)
            return pa.ipc.open_stream(file).read_all(), address


@contextmanager
def _named(path: Path) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except OSError as exc:
        if exc.errno in (errno.EMFILE, errno.ENFILE):
            raise SourceError(
                f"{path} cannot be opened: too many files are open. Allow more with `ulimit -n`, or close some."
            ) from exc
        raise _damaged(path, exc) from exc
    except (pa.ArrowException, ValueError) as exc:  # ValueError: text in the schema that is not UTF-8
        raise _damaged(path, exc) from exc


def _damaged(path: Path, exc: Exception) -> SourceError:
    return SourceError(
        f"{path} cannot be read: {str(exc).splitlines()[0]}. It is damaged or cut short; fetch it again."
    )


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
        mine_offsets, mine_sizes = [], []
        for array, base in shard.batches(name):
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
