"""`OpenFile`: one file of a dataset, open for reading: its rows by field, and the bytes of its ragged rows.

It is the file whose header was read, which is looked at before and after rows are copied.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fastload.format.header import FileIdentity, PackedFile
from fastload.read.hdf5_chunks import ChunkedRows
from fastload.read.identity import TouchedError, WriteLease, check_open, open_checked
from fastload.read.linear import MappedRows, PreadRows


class OpenFile:
    """Some fields of an open file. Threads may share it, and it survives a fork.

    Args:
        header: of a file that holds rows itself.
        fields: of any kind; the index of ragged ones among them.
        read: "map" copies from a mapping of the file; "pread" never maps it.
        cache_chunks, windows: as in `ChunkedRows`, for fields that are read chunk by chunk.

    Attributes:
        fd: its descriptor; valid until `close`.
        held: within it a mapping may be touched, after `check_before`.
        held_sparse: the same for a sparse file, which is also written to by who fetches its chunks.
        changed: called with the identity of the file, where only its times are others than before.

    Raises:
        MissingFileError, FileChangedError: the file is gone, or not the one whose header was read.
    """

    def __init__(
        self,
        header: PackedFile,
        fields: Sequence[str],
        read: Literal["map", "pread"],
        *,
        cache_chunks: int = 8,
        windows: bool = False,
        changed: Callable[[FileIdentity], None] = lambda _: None,
    ) -> None:
        self.header, self.changed = header, changed
        self.fd = open_checked(header)
        self._identity, self._is_sparse, self._is_mapped = header.identity, header.identity.mtime_ns < 0, read == "map"
        self.held: WriteLease | nullcontext[None] = nullcontext()
        self.held_sparse: WriteLease | nullcontext[None] = nullcontext()
        self._linear: MappedRows | PreadRows | None = None
        self._sources: dict[str, MappedRows | PreadRows | ChunkedRows] = {}
        try:
            if self._is_mapped and not self._is_sparse:
                self.held = WriteLease(header, self.fd)
            elif self._is_mapped:
                self.held_sparse = WriteLease(header, self.fd, waits=False)
            kinds = {name: header.fields[name] for name in fields}
            self._dtypes = {name: field.dtype.newbyteorder("=") for name, field in kinds.items()}
            chunked = [name for name, field in kinds.items() if field.chunked]
            if linear := [name for name in kinds if name not in chunked]:  # and bytes of ragged fields
                self._linear = (MappedRows if self._is_mapped else PreadRows)(self.fd, header, linear)
                self._sources = dict.fromkeys(linear, self._linear)
            if chunked:
                chunks = ChunkedRows(header, chunked, cache_chunks=cache_chunks, windows=windows)
                self._sources |= dict.fromkeys(chunked, chunks)
        except BaseException:
            self.close()
            raise

    def copy(self, name: str, rows: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Copies rows of a field that is not ragged, int64 (n,) in range, into an array (n, ...), C-contiguous.

        Raises:
            FormatError, ReadError: a chunk is damaged, or the system cannot read it.
            FileChangedError: the file is too short.
        """
        if out.dtype == self._dtypes[name]:
            self._sources[name].gather(rows, {name: out})
            return
        values = np.empty(
            (len(rows), *out.shape[1:]), self._dtypes[name]
        )  # texts of an index may be shorter in one shard
        self._sources[name].gather(rows, {name: values})
        out[...] = values

    def mapped(self, name: str) -> NDArray[np.uint8] | None:
        """Returns all rows of a field as mapped, uint8 (N, row_bytes), all bytes of a ragged one, (T,), read-only.

        Valid until `close`, and to be touched within `held`. None where they are not mapped.
        """
        return self._linear.rows.get(name) if isinstance(self._linear, MappedRows) else None

    def read_bytes(
        self, name: str, offsets: NDArray[np.int64], lengths: NDArray[np.int64], out: NDArray[np.uint8]
    ) -> None:
        """Reads ranges of a ragged field's bytes, int64 (n,), one after another into `out`, uint8 (all bytes,).

        Raises FileChangedError if the file ends before a range does, ReadError if the system cannot read it.
        """
        assert isinstance(self._linear, PreadRows), "not mapped"
        self._linear.read_ranges(name, self.header.fields[name].base + offsets, lengths, out)

    def check_identity(self) -> FileIdentity:
        """Raises FileChangedError if the file was written to or truncated since its header was read.

        Where its header is equal all the same, `changed` is called. Returns its identity.
        """
        # For every batch: 2 us is little against its copy. This sees writes and truncation; another file under the same
        # name leaves the open one as it was.
        identity = check_open(self.header, self.fd)
        if identity != self._identity:
            self.changed(identity)
            self._identity = identity
        return identity

    def check_before(self) -> FileIdentity:
        """Returns the identity of the file, for `check_still`; before a mapping is touched it is looked at first.

        Touching a mapping of a truncated file kills the process. Data read by calls are checked only afterwards.
        """
        return self.check_identity() if self._is_mapped else self._identity

    def check_still(self, before: FileIdentity) -> None:
        """Raises FileChangedError or TouchedError if the file was written to before rows were copied, or meanwhile.

        Rows that were compared before are not when they are copied again, so nobody else would see it.
        """
        # Whoever has the file open for writing can write to it while it is mapped, too; a sparse one others fill.
        if self._is_mapped and (self._is_sparse or (isinstance(self.held, WriteLease) and self.held.holds)):
            return
        if self.check_identity() != before:
            raise TouchedError(f"{self.header.name}: was touched while rows were copied. Read them again.")

    def close(self) -> None:
        """Closes what it opened; no copy may be running. Calling it again does nothing."""
        for source in {*self._sources.values()}:
            source.close()
        self._sources, self._linear = {}, None
        for held in (self.held, self.held_sparse):
            if isinstance(held, WriteLease):
                held.close()
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # While the interpreter ends, globals are gone, and the kernel closes the file.
        if getattr(self, "fd", -1) >= 0 and not _is_finalizing():
            self.close()
