"""`RowReader`: gathers rows of a file into memory that is there already.

One call a batch, from any number of threads. No torch here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fastload.errors import FastloadError, FormatError, OptionError
from fastload.format.digests import KEEPS_GIL
from fastload.format.header import FileIdentity, PackedFile
from fastload.format.texts import count_name, is_text, text_lists
from fastload.read.hdf5_chunks import ChunkedRows
from fastload.read.identity import HeldOffWriters, Result, TouchedError, check_open, open_checked, until_untouched
from fastload.read.linear import MappedRows, PreadRows, Read, chosen
from fastload.read.ragged_rows import RaggedReader
from fastload.read.row_check import Check, RowCheck


class RowReader:
    """Reads any rows of some fields of a file. Threads may share it, it survives a fork, and it cannot be pickled.

    Args:
        read: "map" copies from a mapping of the file; "pread" never maps it, so that truncating the file cannot kill
            the process (SIGBUS); "auto" is one of them, see `chosen`.
        cache_chunks, windows: as in `ChunkedRows`, for fields that are read chunk by chunk.
        verify: as in `RaggedReader`; called before Pillow decodes a JPEG that libjpeg refuses.
        check: when `gather` compares rows with their digests, of a file that fastload wrote, or what remembers which it
            compared; None: never.

    Raises:
        OptionError: unknown field or `read`.
        MissingFileError, FileChangedError: the file is gone, or not the one whose header was read.
    """

    def __init__(
        self,
        file: PackedFile,
        fields: Sequence[str],
        read: Read = "auto",
        *,
        cache_chunks: int = 8,
        windows: bool = False,
        verify: Callable[[PackedFile, int], None] | None = None,
        check: Check | RowCheck | None = None,
    ) -> None:
        for name in fields:
            if name not in file.fields:
                raise OptionError(f"{file.name}: no field {name!r}; it has {', '.join(file.fields)}")
        self._check = RowCheck(file, fields, check) if isinstance(check, str) else check
        if self._check is not None:
            self._check.begin(file.identity)
            fields = list(dict.fromkeys([*fields, *self._check.needed]))
        self.file = file
        self.fd = open_checked(file)  # valid until `close`
        self._identity, self._is_sparse = file.identity, file.identity.mtime_ns < 0
        # Within it the mapping may be touched, after `check_identity`.
        self.held: HeldOffWriters | nullcontext[None] = nullcontext()
        # The same for a sparse file, which is also written to by who fetches its chunks; not taken by `holding`.
        self.held_sparse: HeldOffWriters | nullcontext[None] = nullcontext()
        self._sources: dict[str, MappedRows | PreadRows | ChunkedRows] = {}
        self._ragged: dict[str, RaggedReader] = {}
        try:
            read = chosen(file.path, read)
            self._is_mapped = read == "map"
            if read == "map" and not self._is_sparse:
                self.held = HeldOffWriters(file, self.fd)
            elif read == "map":
                self.held_sparse = HeldOffWriters(file, self.fd, waits=False)
            linear, other = list[str](), list[str]()
            for name in fields:
                if file.fields[name].ragged is not None:
                    self._ragged[name] = RaggedReader(self.fd, file, name, read, verify)
                else:
                    (other if file.fields[name].offset is None else linear).append(name)
            if linear:
                # Small fields first: the pixels push everything else out of the CPU's cache.
                linear.sort(key=lambda name: file.fields[name].row_bytes)
                kind = MappedRows if read == "map" else PreadRows
                self._sources = dict.fromkeys(linear, kind(self.fd, file, linear))
            if other:
                chunks = ChunkedRows(file, other, cache_chunks=cache_chunks, windows=windows)
                self._sources |= dict.fromkeys(other, chunks)
        except BaseException:
            self.close()
            raise

    def gather(self, rows: NDArray[np.int64], outs: Mapping[str, NDArray[Any]]) -> int:
        """Copies rows of the file into the arrays given, and returns the number of bytes copied.

        With `check` the rows are compared first, also in fields that no array is given for: call it, with or without
        arrays, before `decoded`, and before reading from `mapped` or `ragged`.

        Args:
            rows: int64, (B,), any order, repeats allowed.
            outs: field -> C-contiguous array (B, ...) of the field's dtype in native byte order; arrays of other names
                are left alone. Fields whose rows differ in shape are read by `decoded`.

        Raises:
            IndexError: a row is outside the file.
            DamagedRowError: rows are not what was packed; names the first one.
            FormatError: a row cannot be decoded; names its sample.
            FileChangedError: the file was replaced, truncated or written to since its header was read.
        """
        return self._gather_hashed(rows, outs, None)

    def _gather_hashed(
        self, rows: NDArray[np.int64], outs: Mapping[str, NDArray[Any]], hashed: NDArray[np.uint64] | None
    ) -> int:
        """Like `gather`, for rows whose pixels were copied before; `hashed`: the digests of these, uint64 (B,)."""
        try:
            with self.holding(rows):
                return self._gathered(rows, outs, hashed)
        except TouchedError:
            return self.within(rows, lambda: self._gathered(rows, outs, hashed))

    def within(self, rows: NDArray[np.int64], work: Callable[[], Result]) -> Result:
        """Returns what `work` does within `holding` rows, done again where the file was touched meanwhile."""

        def held() -> Result:
            with self.holding(rows):
                return work()

        return until_untouched(held)

    @contextmanager
    def holding(self, rows: NDArray[np.int64]) -> Iterator[None]:
        """Within it the mapping may be touched where it has these rows, and nobody writes there; may be nested.

        Raises IndexError and FileChangedError as `gather` does; TouchedError, at its end: see `within`.
        """
        check_rows(rows, self.file.num_rows, self.file.name)
        with self.held:
            before = self.check_before()
            try:
                yield
            except FastloadError:
                self.check_identity()  # what was damaged may be another file
                raise
            self.check_still(before)

    def _gathered(
        self, rows: NDArray[np.int64], outs: Mapping[str, NDArray[Any]], hashed: NDArray[np.uint64] | None
    ) -> int:
        copied = sum(outs[name].nbytes for name in self._sources if name in outs)
        if self._check is not None and len(due := self._check.due(rows)):
            self._check.gather(rows, due, outs, self._sources, self._ragged, hashed)
        else:
            for name, source in self._sources.items():
                if name in outs:
                    source.gather(rows, {name: outs[name]})
        for name, ragged in self._ragged.items():
            if name in outs:
                assert not self.file.fields[name].varied, f"rows of {name} do not fit into one array"
                ragged.decoded(rows, outs[name])
                copied += outs[name].nbytes
        return copied

    @property
    def compares(self) -> bool:
        """Whether there are rows that `gather` compares with their digests."""
        return self._check is not None and not self._check.all_seen

    def decoded(self, name: str, rows: NDArray[np.int64]) -> list[NDArray[Any]]:
        """Decodes rows of a ragged field, unchecked; returns an array for each: (H, W, C), masks (H, W)."""
        return self.within(rows, lambda: self._ragged[name].decoded(rows))

    def texts(self, name: str, rows: NDArray[np.int64]) -> list[Any]:
        """Returns the texts of rows, unchecked: a str each, or a list of them; `with_counts` says of which fields.

        Raises IndexError and FileChangedError as `gather` does.
        """
        fields = {one: self.file.fields[one] for one in with_counts(self.file, [name])}
        arrays = {one: np.empty((len(rows), *field.shape), field.dtype) for one, field in fields.items()}
        self.within(rows, lambda: [self._sources[one].gather(rows, {one: array}) for one, array in arrays.items()])
        return text_lists(arrays.pop(name), *arrays.values())

    def ragged(self, name: str) -> RaggedReader:
        """Returns the reader of a ragged field's encoded bytes, to be used like `mapped`."""
        return self._ragged[name]

    def mapped(self, name: str) -> NDArray[np.uint8] | None:
        """Returns all rows of a field as mapped, uint8 (N, row_bytes), read-only; None where they are not mapped.

        Valid until `close`, and to be touched within `holding`.
        """
        source = self._sources.get(name)
        return source.rows(name) if isinstance(source, MappedRows) else None

    def check_identity(self) -> FileIdentity:
        """Raises FileChangedError if the file was written to or truncated since its header was read.

        Where its header is equal all the same, rows that were compared with their digests are compared again. Returns
        its identity.
        """
        # For every batch: 2 us is little against its copy. This sees writes and truncation; another file under the same
        # name leaves the open one as it was.
        identity = check_open(self.file, self.fd)
        if identity != self._identity:
            if self._check is not None:
                self._check.begin(identity)
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
        if self._is_mapped and (self._is_sparse or (isinstance(self.held, HeldOffWriters) and self.held.holds)):
            return
        if self.check_identity() != before:
            raise TouchedError(f"{self.file.name}: was touched while rows were copied. Read them again.")

    def close(self) -> None:
        """Closes what it opened; no gather may be running. Calling it again does nothing."""
        for source in {*self._sources.values(), *self._ragged.values()}:
            source.close()
        self._sources, self._ragged = {}, {}
        for held in (self.held, self.held_sparse):
            if isinstance(held, HeldOffWriters):
                held.close()
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # While the interpreter ends, globals are gone, and the kernel closes the file.
        if getattr(self, "fd", -1) >= 0 and not _is_finalizing():
            self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a RowReader holds an open file and cannot be pickled; pickle a PackedDataset")


def check_rows(rows: NDArray[np.int64], num_rows: int, what: object) -> None:
    """Raises IndexError, naming the first row outside [0, num_rows). Gathers clip, so a bad row would pass unseen."""
    unsigned = rows.view(np.uint64)  # a negative row is then larger than any
    for first in range(0, len(rows), KEEPS_GIL):
        if unsigned[first : first + KEEPS_GIL].max() >= num_rows:
            bad = rows[unsigned >= num_rows][0]
            raise IndexError(f"{what}: row {bad} is outside 0..{num_rows - 1}")


def text_fields(file: PackedFile) -> list[str]:
    """Returns the fields of a file that hold texts."""
    return [name for name, field in file.fields.items() if field.ragged is None and is_text(field.dtype, field.shape)]


def with_counts(file: PackedFile, names: Iterable[str]) -> list[str]:
    """Returns fields, and behind them the datasets that say how many texts a row has of those that hold several."""
    texts = [
        name for name in names if name in file.fields and is_text(file.fields[name].dtype, file.fields[name].shape)
    ]
    counts = [count_name(name) for name in texts if file.fields[name].shape]
    fitting = [
        name for name in counts if (field := file.fields.get(name)) and field.dtype.kind in "iu" and not field.shape
    ]
    return list(dict.fromkeys([*names, *fitting]))


def image_axes(file: PackedFile) -> Literal["HWC", "CHW", "HW"]:
    """Returns the order of the axes of one image in the file, by its shape: other writers do not say.

    FormatError: neither the first nor the last axis can be channels.
    """
    shape = file.fields["images"].shape
    if len(shape) == 2:
        return "HW"
    if len(shape) == 3 and shape[2] in (1, 3, 4):
        return "HWC"
    if len(shape) == 3 and shape[0] in (1, 3, 4):
        return "CHW"
    raise FormatError(
        f"{file.name}: one image has the shape {shape}; expected (H, W, C), (C, H, W) or (H, W) with 1, 3 or 4 "
        f"channels. Pack the original files."
    )


def forms_of_samples(file: PackedFile | None, fields: Iterable[str]) -> list[str]:
    """Returns fields with type and shape of a sample, `images uint8 (3, H, W)`; without the file their names."""
    forms = []
    for name in fields:
        field = file.fields.get(name) if file is not None else None
        if file is None or field is None:  # "row" and its like are in no file
            forms.append(name)
            continue
        shape = ["HWC"[axis] if field.varied and not length else str(length) for axis, length in enumerate(field.shape)]
        if name == "images":
            axes = "HWC" if field.ragged is not None else image_axes(file)
            shape = ["1", *shape] if axes == "HW" else [shape[2], *shape[:2]] if axes == "HWC" else shape
        if is_text(field.dtype, field.shape):
            forms.append(f"{name} list of str" if field.shape else f"{name} str")
            continue
        dtype = "int64" if name == "labels" and not shape and field.dtype.kind in "iu" else field.dtype.name
        forms.append(f"{name} {dtype}" + (f" ({', '.join(shape)})" if shape else ""))
    return forms
