"""Rows that lie back to back in the file: copied from a mapping of it, or read by system calls (`resolve_read_mode`).

From a mapping a batch is one copy, for pixels with the GIL released once. Without one, truncating the file is an error
and does not kill the process: one call of compiled code reads all rows of a batch, and so releases the GIL once; one
`preadv` a row releases it once a row, and each time waits up to 5 ms for a main thread that runs Python (measured, rows
of 116 kB: 33,000 images/s against 320; with an idle main thread both reach 105,000). `preadv` is used where the loops
were not compiled.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fastload.errors import FileChangedError, OptionError
from fastload.format.digests import KEEPS_GIL
from fastload.format.header import PackedFile
from fastload.read.row_errors import read_error
from fastload.system import native, syscalls
from fastload.system.files import read_into

Read = Literal["auto", "map", "pread"]
"""How rows are read; see `resolve_read_mode`."""

FILE_SYSTEMS = {
    0x6969: "NFS", 0x517B: "SMB", 0xFE534D42: "SMB", 0xFF534D42: "CIFS", 0x65735546: "FUSE", 0x01021997: "9P",
    0x0BD00BD0: "Lustre", 0x47504653: "GPFS", 0x00C36400: "Ceph", 0x19830326: "BeeGFS", 0x20030528: "OrangeFS",
    0x5346414F: "AFS", 0x6B414653: "AFS", 0x73757245: "Coda", 0x7461636F: "OCFS2", 0x01161970: "GFS2",
    0xAAD7AAEA: "PanFS", 0xBEEFDEAD: "StorNext", 0xA501FCF5: "VxFS", 0x786F4256: "vboxsf", 0xBACBACBC: "vmhgfs",
    0x7C7C6673: "prl_fs",
}  # fmt: skip
"""File systems that others may change unseen by this kernel, by their numbers in statfs(2): other machines, the host of
a virtual machine, a process (FUSE). Not overlayfs, on which containers run: it is local, and leases hold
off writers (`WriteLease`) as on the file system below it, which is tested; mapped it is as fast, too."""

# Rows up to this length (labels, attributes, boxes) are copied by indexing, in slices that keep the GIL.
SHORT_ROW_BYTES = 256

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # Linux, on x86-64 and ARM
_MOST_JOINED = 30_000  # mappings; the system allows 65,530 a process (vm.max_map_count)

# Reads shorter than this are joined where rows are neighbours in the file; a read costs about 1 us.
_MAX_REQUEST_BYTES = 1 << 20


def resolve_read_mode(path: Path, read: Read) -> Literal["map", "pread"]:
    """Returns how a file is read: "map", from a mapping of it, or "pread", by system calls.

    "auto" is "pread" on `FILE_SYSTEMS`: there nothing keeps others from truncating the file while rows are copied,
    which ends the process if it is mapped. Elsewhere it is "map": reading by system calls takes twice as long for rows
    of 116 kB, four times as long for rows of 3 kB (17 us and 1.5 us a row, by one thread, in memory already).
    """
    if read not in ("auto", "map", "pread"):
        raise OptionError(f'read={read!r} is not known; choose "auto", "map" or "pread"')
    if read == "auto":
        return "pread" if syscalls.file_system_of(path) in FILE_SYSTEMS else "map"
    return read


class MappedRows:
    """Gathers rows of linear fields from one shared, read-only mapping, which outlives the descriptor.

    Any thread may call it, also after a fork.

    Attributes:
        rows: of each field all rows as mapped, uint8 (N, row_bytes), of a ragged one all bytes, (T,); read-only, valid
            until `close`.
    """

    def __init__(self, fd: int, file: PackedFile, fields: Sequence[str]) -> None:
        self._map = mmap.mmap(fd, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        self.rows: dict[str, NDArray[np.uint8]] = {}
        self._begins: dict[str, int] = {}  # where the first row lies in memory
        self._short: dict[str, NDArray[np.void]] = {}  # rows as opaque elements, (N,)
        of_ragged = file.ragged
        for name in fields:
            field = file.fields[name]
            if name in of_ragged:
                num_bytes = of_ragged[name].ragged.num_bytes
                self.rows[name] = np.frombuffer(self._map, np.uint8, num_bytes, field.base)
                continue
            # As bytes, whatever the dtype: NumPy copies a whole source that is not aligned to its elements.
            flat = np.frombuffer(self._map, np.uint8, file.num_rows * field.row_bytes, field.base)
            self.rows[name] = flat.reshape(file.num_rows, field.row_bytes)
            self._begins[name] = flat.ctypes.data
            if 0 < field.row_bytes <= SHORT_ROW_BYTES:
                self._short[name] = flat.view((np.void, field.row_bytes))

    def gather(self, rows: NDArray[np.int64], outs: Mapping[str, NDArray[Any]]) -> None:
        """Copies rows, checked to be in range, into C-contiguous arrays of their fields' dtype, (B, ...) each."""
        for name, out in outs.items():
            assert out.flags.c_contiguous, "a gather needs C-contiguous memory"
            short = self._short.get(name)
            if short is None:
                source = self.rows[name]
                target = out.reshape(-1).view(np.uint8).reshape(len(rows), source.shape[1])
                if native.library() is not None:
                    native.gather(self.addresses(name, rows), target)
                else:
                    # "clip", since rows were checked before: "raise" copies through a buffer, at a third of the speed.
                    np.take(source, rows, axis=0, out=target, mode="clip")
                continue
            elements = out.reshape(-1).view(short.dtype)
            for first in range(0, len(rows), KEEPS_GIL):
                part = slice(first, first + KEEPS_GIL)
                elements[part] = short[rows[part]]

    def addresses(self, name: str, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns where rows of a field begin in memory, int64 (B,); valid until `close`."""
        found: NDArray[np.int64] = self._begins[name] + rows * self.rows[name].shape[1]
        return found

    def close(self) -> None:
        """Releases the mapping; it is unmapped when the last array over it is gone."""
        self.rows.clear()
        self._short.clear()
        self._map = None  # type: ignore[assignment]  # closing it would raise while a view lives


class PreadRows:
    """Gathers rows of linear fields by reading them from the file. Any thread may call it.

    The descriptor must stay open for reading as long as this lives.
    """

    def __init__(self, fd: int, file: PackedFile, fields: Sequence[str]) -> None:
        self._fd = fd
        self._file = file
        self._layout = {name: (file.fields[name].base, file.fields[name].row_bytes) for name in fields}

    def gather(self, rows: NDArray[np.int64], outs: Mapping[str, NDArray[Any]]) -> None:
        """Copies rows, checked to be in range, into arrays (B, ...). FileChangedError: the file is too short."""
        # A run: rows of the batch that follow one another in the file, too. One request reads them all.
        one_run = len(rows) == 1 or bool((np.diff(rows) == 1).all())
        for name, out in outs.items():
            offset, row_bytes = self._layout[name]
            if not row_bytes or not rows.size:
                continue
            assert out.flags.c_contiguous, "a gather needs C-contiguous memory"
            memory = out.reshape(-1).view(np.uint8)
            if one_run:
                self._read_whole(name, memory.data, offset + int(rows[0]) * row_bytes)
                continue
            at = np.arange(len(rows))
            in_run = at - np.maximum.accumulate(np.where(np.append(True, np.diff(rows) != 1), at, 0))
            starts = np.flatnonzero(in_run % max(1, _MAX_REQUEST_BYTES // row_bytes) == 0)
            lengths = np.diff(np.append(starts, len(rows))) * row_bytes
            self.read_ranges(name, offset + rows[starts] * row_bytes, lengths, memory)

    def close(self) -> None:
        """Does nothing: the descriptor stays open."""

    def read_ranges(
        self, name: str, offsets: NDArray[np.int64], lengths: NDArray[np.int64], out: NDArray[np.uint8]
    ) -> None:
        """Reads ranges of the file, one after another into `out`, uint8 (bytes of all of them,).

        Raises FileChangedError, naming the field, if the file ends before a range does.
        """
        memory = np.cumsum(lengths) - lengths
        if len(offsets) > 1 and native.library() is not None:
            done = native.read_ranges(self._fd, offsets, lengths, out)
        else:
            done = np.zeros(len(offsets), np.int64)
        view = out.data
        for i in np.flatnonzero(done != lengths).tolist():
            at, length, offset = int(memory[i]), int(lengths[i]), int(offsets[i])
            self._read_whole(name, view[at : at + length], offset)

    def _read_whole(self, name: str, view: memoryview, offset: int) -> None:
        field = self._file.fields[name]
        try:
            end = offset + read_into(self._fd, view, offset)
        except OSError as exc:
            if field.offset is None:
                raise read_error(self._file, name, None, exc) from exc
            if len(view) > field.row_bytes:  # which of the rows it is
                for at in range(0, len(view), field.row_bytes):
                    self._read_whole(name, view[at : at + field.row_bytes], offset + at)
            raise read_error(self._file, name, (offset - field.offset) // field.row_bytes, exc) from exc
        if end < offset + len(view):
            row = "a row" if field.offset is None else f"row {(end - field.offset) // field.row_bytes}"
            raise FileChangedError(
                f"{self._file.name}: ends at byte {end:,}, inside {row} of {name}: it was truncated while in use. "
                f"Write new files under a new name while training."
            )


class MappedShards:
    """The images of all shards as one array, mapped back to back; a shard's part is there once it was joined.

    The mappings last as long as an array over them does.
    """

    def __init__(self, file: PackedFile, row_bytes: int) -> None:
        self._shards, self._row_bytes = file.shards, row_bytes
        # Reserved, not backed by memory: touching what no shard is mapped to would end the process.
        self._range = mmap.mmap(
            -1, _pages(file.num_rows * row_bytes), mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ
        )
        self._address = np.frombuffer(self._range, np.uint8, 1).ctypes.data
        self.rows = np.frombuffer(self._range, np.uint8, file.num_rows * row_bytes).reshape(file.num_rows, row_bytes)
        self._joined = np.zeros(len(file.shards.names), np.bool_)

    @classmethod
    def of(cls, file: PackedFile) -> MappedShards | None:
        """Returns the joined images of an index, or None where they cannot be one array."""
        field, shards = file.fields["images"], file.shards
        if not field.in_shards or len(shards.shard) > _MOST_JOINED:
            return None
        starts = shards.begins * field.row_bytes
        inside = shards.images_offset[shards.shard] + shards.first * field.row_bytes
        if (shards.images_offset < 0).any() or (starts % mmap.PAGESIZE != inside % mmap.PAGESIZE).any():
            return None
        if (starts % mmap.PAGESIZE).any():  # two shards would share a page
            return None
        try:
            return cls(file, field.row_bytes)
        except OSError:  # more than there are addresses
            return None

    def forget(self) -> None:
        """Lets the shards be joined again, from other files; until then their parts are what they were."""
        self._joined[:] = False

    def join(self, number: int, fd: int) -> None:
        """Maps the images of a shard, an open file, to their place."""
        if self._joined[number]:
            return
        shards = self._shards
        for at in np.flatnonzero(shards.shard == number).tolist():
            offset = int(shards.images_offset[number] + shards.first[at] * self._row_bytes)
            address = self._address + int(shards.begins[at]) * self._row_bytes
            num_bytes = int(shards.rows[at]) * self._row_bytes
            found = _mmap(address, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, fd, offset)
            if found != address:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._joined[number] = True


def addresses_of(
    bases: NDArray[np.int64], shard: NDArray[np.int64], there: NDArray[np.int64], row_bytes: int
) -> NDArray[np.int64]:
    """Returns the addresses of rows of shards, whose first rows lie at `bases`, int64 (B,)."""
    found = np.empty(len(shard), np.int64)
    for first in range(0, len(shard), KEEPS_GIL):
        some = slice(first, first + KEEPS_GIL)
        found[some] = bases[shard[some]] + there[some] * row_bytes
    return found


def as_rows(out: NDArray[Any]) -> NDArray[np.uint8]:
    """Returns a view of a batch, C-contiguous and not empty, as bytes (B, row_bytes)."""
    return out.reshape(-1).view(np.uint8).reshape(len(out), -1)


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _mmap(address: int, num_bytes: int, prot: int, flags: int, fd: int, offset: int) -> int:
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    return int(function(address, num_bytes, prot, flags, fd, offset) or 0)
