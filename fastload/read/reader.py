"""`Rows`: gathers rows of a dataset into memory that is there already.

One call a batch, from any number of threads. What the fields are, as readers and users see them: texts, the axes of
images, the form of a sample. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fastload.errors import FormatError, OptionError
from fastload.format.header import PIXEL_FIELDS, PackedFile
from fastload.format.texts import count_name, is_text, text_lists
from fastload.read.encoded import EncodedRows
from fastload.read.linear import Read
from fastload.read.row_check import Check, RowCheck
from fastload.read.row_table import Located, index_columns
from fastload.read.store import ResultT, Store


def text_fields(file: PackedFile) -> list[str]:
    """Returns the fields of a file that hold texts."""
    return [name for name, field in file.fields.items() if is_text(field.dtype, field.shape)]


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
            axes = image_axes(file)
            shape = ["1", *shape] if axes == "HW" else [shape[2], *shape[:2]] if axes == "HWC" else shape
        if is_text(field.dtype, field.shape):
            forms.append(f"{name} list of str" if field.shape else f"{name} str")
            continue
        dtype = "int64" if name == "labels" and not shape and field.dtype.kind in "iu" else field.dtype.name
        forms.append(f"{name} {dtype}" + (f" ({', '.join(shape)})" if shape else ""))
    return forms


class Rows:
    """Reads any rows of some fields of a dataset. Threads may share it, it survives a fork, and it cannot be pickled.

    Args:
        fields: those that are read, whatever the store opens more.
        store: where the rows lie.
        verify: as in `EncodedRows`; called before Pillow decodes a JPEG that libjpeg refuses.
        check: compares rows with their digests; None: nothing does.
    """

    def __init__(
        self,
        fields: Sequence[str],
        store: Store,
        *,
        verify: Callable[[PackedFile, int], None] | None = None,
        check: RowCheck | None = None,
    ) -> None:
        self.file, self.store, self._check = store.file, store, check
        kinds = {name: self.file.fields[name] for name in [*fields, *(check.needed if check else ())]}
        # Small fields first: the pixels push everything else out of the CPU's cache.
        ragged = self.file.ragged
        plain = sorted((field.chunked, field.row_bytes, name) for name, field in kinds.items() if name not in ragged)
        self._encoded = {name: EncodedRows(store, name, verify) for name in kinds if name in ragged}
        self._order = [*(name for _, _, name in plain), *self._encoded]

    def gather(self, rows: NDArray[np.int64], outs: Mapping[str, NDArray[Any]]) -> int:
        """Copies rows of the dataset into the arrays given, and returns the number of bytes copied.

        With `check` the rows are compared first, also in fields that no array is given for: call it, with or without
        arrays, before `decoded`, and before reading from `mapped` or `encoded`.

        Args:
            rows: int64, (B,), any order, repeats allowed.
            outs: field -> C-contiguous array (B, ...) of the field's dtype in native byte order; arrays of other names
                are left alone. Fields whose rows differ in shape are read by `decoded`.

        Raises:
            IndexError: a row is outside the dataset.
            DamagedRowError: rows are not what was packed; names the first one, and has the numbers of all.
            FormatError: a row cannot be decoded; names its sample.
            FileChangedError: a file was replaced, truncated or written to since its header was read.
        """
        known: dict[str, NDArray[Any]] = {}
        copied = 0
        for name in self._order:
            if name in outs:
                known[name] = outs[name]
                copied += outs[name].nbytes
        self.store.fill(rows, known, self._fill)
        return copied

    def within(self, rows: NDArray[np.int64], work: Callable[[], ResultT]) -> ResultT:
        """Returns what `work` does while the files of rows are held, so that what is mapped may be touched.

        It is done again where a file was touched meanwhile, or what came over a network had changed on its way.

        Raises IndexError and FileChangedError as `gather` does.
        """
        return self.store.within(self.store.table.locate(rows), work)

    def _fill(self, located: Located, outs: Mapping[str, NDArray[Any]]) -> None:
        plain = {name: out for name, out in outs.items() if name not in self._encoded} if self._encoded else outs
        if self._check is not None and len(due := self._check.due(located.rows)):
            self._check.gather(located, due, plain, self.store, self._encoded)
        else:
            for name, out in plain.items():
                self.store.copy(name, located, out)
        for name, encoded in self._encoded.items():
            if name in outs:
                assert not self.file.fields[name].varied, f"rows of {name} do not fit into one array"
                encoded.decoded(located.rows, outs[name])

    @property
    def compares(self) -> bool:
        """Whether there are rows that `gather` compares with their digests."""
        return self._check is not None and not self._check.all_seen

    def decoded(self, name: str, rows: NDArray[np.int64]) -> list[NDArray[Any]]:
        """Decodes rows of a ragged field, unchecked; returns an array for each: (H, W, C), masks (H, W)."""
        return self.within(rows, lambda: self._encoded[name].decoded(rows))

    def encoded(self, name: str) -> EncodedRows:
        """Returns the reader of a ragged field's encoded bytes, to be used like `mapped`."""
        return self._encoded[name]

    def mapped(self, name: str) -> NDArray[np.uint8] | None:
        """Returns all rows of a field as one array, uint8 (N, row_bytes), read-only; None where they are not one.

        Valid until `close`, and to be touched within `within`.
        """
        return self.store.whole(name)

    def close(self) -> None:
        """Closes what it opened; no gather may be running. Calling it again does nothing."""
        self.store.close()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("Rows hold open files and cannot be pickled; pickle a PackedDataset")


def texts_of(reader: Rows, name: str, rows: NDArray[np.int64]) -> list[Any]:
    """Returns the texts of rows, unchecked: a str each, or a list of them; `with_counts` says of which fields.

    Raises IndexError and FileChangedError as `Rows.gather` does.
    """
    fields = {one: reader.file.fields[one] for one in with_counts(reader.file, [name])}
    arrays = {one: np.empty((len(rows), *field.shape), field.dtype) for one, field in fields.items()}
    reader.store.columns(rows, arrays)
    return text_lists(arrays.pop(name), *arrays.values())


def open_rows(
    file: PackedFile,
    fields: Sequence[str],
    read: Read = "auto",
    *,
    cache_chunks: int = 8,
    windows: bool = False,
    verify: Callable[[PackedFile, int], None] | None = None,
    check: Check | None = None,
) -> Rows:
    """Returns a reader of some fields of a dataset; the caller closes it.

    Args:
        read, cache_chunks, windows: as in `Store`.
        verify: as in `Rows`.
        check: when `gather` compares rows with their digests, of files that fastload wrote; None: never.

    Raises:
        OptionError: unknown field or `read`.
        FormatError: the index of a ragged field cannot be read row by row.
    """
    for name in fields:
        if name not in file.fields:
            raise OptionError(f"{file.name}: no field {name!r}; it has {', '.join(file.fields)}")
    row_check = None if check is None else RowCheck(file, fields, check)
    opened = [*fields, *(row_check.needed if row_check else ())]
    for name in opened.copy():
        columns = index_columns(file, name).values()
        if not all(file.fields[column].linear for column in columns):
            raise FormatError(f"{file.path}: the index of {name!r} does not lie in one piece. Pack it again.")
        opened += columns
    kind = Store
    if file.remote is not None:
        from fastload.read.remote_store import RemoteStore as kind  # imports what files of this machine do not need
    store = kind(file, opened, read, cache_chunks=cache_chunks, windows=windows, watcher=row_check)
    return Rows(fields, store, verify=verify, check=row_check)


@contextmanager
def open_columns(file: PackedFile) -> Iterator[Mapping[str, StoredColumn]]:
    """Opens a file or index for reading its datasets other than pixels: `columns[name][()]`, and some of the rows.

    FileChangedError: it is not the file whose header was read.
    """
    names = [name for name in file.fields if name not in PIXEL_FIELDS]
    with closing(open_rows(file, names, "pread")) as reader:
        yield {name: StoredColumn(reader, name) for name in names}


class StoredColumn:
    """A dataset of a file or index; indexed by rows as one of h5py is."""

    def __init__(self, reader: Rows, name: str) -> None:
        self._reader, self._field = reader, reader.file.fields[name]
        self.shape, self.dtype = (reader.file.num_rows, *self._field.shape), self._field.dtype

    def __getitem__(self, key: Any) -> NDArray[Any]:
        """Returns rows by a whole number, a slice, an array of rows, or all by ().

        A tuple of them chooses along further axes. `split` of an index has the numbers of the index's splits.
        """
        first, *rest = (*key, slice(None))[: max(1, len(key))] if isinstance(key, tuple) else (key,)
        rows = np.arange(*first.indices(self.shape[0])) if isinstance(first, slice) else np.asarray(first, np.int64)
        found = self._field.empty(rows.size)
        self._reader.store.columns(np.atleast_1d(rows), {self._field.name: found})
        found = found[(slice(None), *rest)]
        return found if np.ndim(rows) else found[0]
