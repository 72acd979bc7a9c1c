"""One file of a Parquet or Arrow dataset: its columns, what they are, and the reader of the bytes of its images.

The images of Parquet files are unpacked to a temporary file in one pass: reading a single image costs its whole row
group (100 rows of 40 kB: 7 ms an image, 0.7 ms in a pass), and packing reads rows in shuffled order. Arrow files hold
the bytes uncompressed, so their images are read in place.
"""

from __future__ import annotations

import errno
import json
import os
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import MissingExtraError, SourceError
from fastload.sources.spans import FileSpans, ListedFile
from fastload.system.files import write_all

_BATCH_BYTES = 2**25
_LIST_BYTES = 2**20  # bytes of a column that are read ahead


class Shard:
    """One file of the dataset. It is opened anew for each use: there may be thousands, and often only 1024 may be open.

    Attributes:
        path: the file.
        parquet: whether it is Parquet, else Arrow.
        schema: its pyarrow schema.
        num_rows: number of its rows.
        images: the columns that hold images, by what `datasets` wrote into the schema, else by their types.
        classes: column -> names of its classes, as `datasets` wrote them into the schema.
    """

    def __init__(self, path: Path) -> None:
        """Reads the schema; raises if pyarrow is not installed (MissingExtraError) or the file is damaged."""
        try:
            import pyarrow.parquet as pq
        except ImportError as exc:
            raise MissingExtraError(
                f"{path}: pyarrow reads this file, and is not installed. Install it with `pip install pyarrow`."
            ) from exc
        self.path = path
        self.parquet = path.suffix.lower() == ".parquet"
        with translate_errors(path):
            if self.parquet:
                with pq.ParquetFile(path) as file:
                    self.schema, self._meta = file.schema_arrow, file.metadata
                    self.num_rows = self._meta.num_rows
            else:
                table, _ = self._mapped()
                self.schema, self.num_rows = table.schema, table.num_rows
        self.images, self.classes = _features_of(self.schema)
        if self.num_rows < 0:
            raise SourceError(f"{path} is damaged: it promises {self.num_rows} rows. Fetch it again.")

    def column(self, name: str) -> Any:
        """Returns one column as a pyarrow ChunkedArray."""
        with translate_errors(self.path):
            if self.parquet:
                with self._file() as file:
                    column = file.read(columns=[name]).column(0)
            else:
                column = self._mapped()[0].column(name)
            column.validate(full=not self.parquet)  # the offsets in a mapped file are unchecked
            self.check(len(column))
            return column

    def check(self, rows: int) -> None:
        """Refuses a file that holds another number of rows than it states."""
        if rows != self.num_rows:
            raise SourceError(
                f"{self.path} is damaged: it promises {self.num_rows} rows and holds {rows}. Fetch it again."
            )

    def num_bytes(self) -> int:
        """Returns the bytes of all columns of a Parquet file when unpacked, an upper bound for those of the images."""
        with translate_errors(self.path):
            meta = self._meta
            # Not by column: there pyarrow 26 aborts the process if statistics are damaged.
            return sum(meta.row_group(group).total_byte_size for group in range(meta.num_row_groups))

    def batches(self, name: str) -> Iterator[tuple[Any, int]]:
        """Yields one column in arrays of some 32 MB, each with the address of the file's mapping (Parquet: 0)."""
        if not self.parquet:
            table, address = self._mapped()
            column = table.column(name)
            with translate_errors(self.path):
                column.validate(full=True)  # the offsets in a mapped file are unchecked
            yield from ((chunk, address) for chunk in column.chunks)
            return
        rows = max(1, min(1024, _BATCH_BYTES * self.num_rows // max(1, self.num_bytes())))
        with translate_errors(self.path):
            file = self._file()
        with file:
            batches = file.iter_batches(batch_size=rows, columns=[name], use_threads=False)
            while True:
                with translate_errors(self.path):
                    batch = next(batches, None)
                if batch is None:
                    return
                yield batch.column(0), 0

    def spans(self, offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> FileSpans:
        """Returns the reader of pieces of an Arrow file at these offsets."""
        return FileSpans(ListedFile.of(self.path), offsets, sizes)

    def _file(self) -> Any:
        import pyarrow.parquet as pq

        # Buffered, not read ahead: a row group may be larger than the memory.
        return pq.ParquetFile(self.path, metadata=self._meta, pre_buffer=False, buffer_size=_LIST_BYTES)

    def _mapped(self) -> tuple[Any, int]:
        """Returns the table of an Arrow file, which keeps the file mapped but not open, and the mapping's address."""
        import pyarrow as pa

        with translate_errors(self.path), pa.memory_map(os.fspath(self.path)) as file:
            address = int(file.read_buffer(1).address)
            file.seek(0)
            return pa.ipc.open_stream(file).read_all(), address


def _features_of(schema: Any) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """Returns the columns of images and, by column, names of classes; a struct of bytes and path is an image too."""
    import pyarrow as pa

    try:
        described = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, ValueError, TypeError, RecursionError):
        described = {}
    images, classes = [], {}
    for field in schema:
        feature = described.get(field.name) if isinstance(described, dict) else None
        said = feature.get("_type", "") if isinstance(feature, dict) else ""
        kind = field.type
        pair = pa.types.is_struct(kind) and {kind.field(i).name for i in range(kind.num_fields)} >= {"bytes", "path"}
        binary = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
        if said == "Image" or ((pair or binary) and said in ("", "Value")):  # not Audio, Video or Pdf
            images.append(field.name)
        while isinstance(feature, dict) and "feature" in feature:
            feature = feature["feature"]
        if isinstance(feature, list) and len(feature) == 1:
            feature = feature[0]
        inner = [feature]
        if isinstance(feature, dict) and "_type" not in feature:  # objects with boxes: the classes are inside
            inner = [value.get("feature", value) for value in feature.values() if isinstance(value, dict)]
        named = [one for one in inner if isinstance(one, dict) and isinstance(one.get("names"), list)]
        if named and named[0].get("_type") == "ClassLabel":
            classes[field.name] = tuple(map(str, named[0]["names"]))
    return tuple(images), classes


@contextmanager
def translate_errors(path: Path) -> Iterator[None]:
    """Turns errors of pyarrow into a SourceError that names the file."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as exc:  # ValueError: the schema holds text that is not UTF-8
        if isinstance(exc, OSError) and exc.errno in (errno.EMFILE, errno.ENFILE):
            raise SourceError(
                f"{path} cannot be opened: too many files are open. Allow more with `ulimit -n`, or close some."
            ) from exc
        raise SourceError(
            f"{path} cannot be read: {str(exc).splitlines()[0]}. It is damaged or cut short; fetch it again."
        ) from exc


class UnpackedImages:
    """A temporary file that images are unpacked to. It has no name, so it vanishes however the process ends.

    Other processes open it through /proc. On systems without /proc it has a name, and is removed with this object.
    """

    def __init__(self, num_bytes: int, dataset_folder: Path) -> None:
        """Creates the file in the first folder with room for it; the last that is tried is the dataset's."""
        folders = [os.environ.get("TMPDIR", ""), "/var/tmp", tempfile.gettempdir(), str(dataset_folder)]
        folder = next((folder for folder in folders if folder and _has_room(folder, num_bytes)), None)
        if folder is None:
            raise SourceError(
                f"{dataset_folder}: its images are unpacked to a temporary file of {num_bytes / 1e9:.2f} GB first, for "
                f"which there is no room in {', '.join(dict.fromkeys(filter(None, folders)))}. Name a folder with room "
                "in the environment variable TMPDIR."
            )
        self._fd, self._path = tempfile.mkstemp(prefix="fastload-", dir=folder)
        self._end = 0
        if os.path.isdir("/proc/self/fd"):
            os.unlink(self._path)
            self._path = f"/proc/{os.getpid()}/fd/{self._fd}"
        weakref.finalize(self, _let_go, self._fd, self._path, os.getpid())

    def write(self, data: memoryview) -> int:
        """Appends data, and returns the offset at which it begins."""
        start = self._end
        try:
            write_all(self._fd, data)
        except OSError as exc:
            raise SourceError(
                f"the temporary file for its images cannot be written: {exc.strerror}. Name a folder with room in the "
                "environment variable TMPDIR."
            ) from exc
        self._end += len(data)
        return start

    def spans(self, offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> FileSpans:
        """Returns the reader of pieces of what was written. Nothing may be written afterwards."""
        return FileSpans(ListedFile.of(self._path, os.fstat(self._fd)), offsets, sizes, self)


def _let_go(fd: int, path: str, pid: int) -> None:
    os.close(fd)
    if not path.startswith("/proc/") and os.getpid() == pid:  # not in a child that was forked
        os.unlink(path)


def _has_room(folder: str, num_bytes: int) -> bool:
    try:
        status = os.statvfs(folder)
        return os.access(folder, os.W_OK) and status.f_bavail * status.f_frsize > num_bytes + 2**26
    except OSError:
        return False
