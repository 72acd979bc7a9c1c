"""`PackedDataset`: a packed file as a map-style dataset, for a plain `DataLoader`, `FastLoader` and single samples."""

from __future__ import annotations

import copy
import difflib
import hashlib
import operator
import os
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._pytree import register_pytree_node
from torch.utils.data import Dataset, default_collate
from torch.utils.data._utils.collate import collate

from fastload.errors import (
    FileChangedError,
    FormatError,
    MissingFileError,
    OptionError,
    check_choice,
    check_split,
    is_whole,
    typed,
)
from fastload.format.digests import DIGEST_FIELDS
from fastload.format.header import PIXEL_FIELDS, Field, FileIdentity, PackedFile, read_header, with_digests
from fastload.format.joined import check_list, open_files
from fastload.format.valid import folder_of_files
from fastload.plan import ChunkWindow
from fastload.read.checked import require_packed
from fastload.read.identity import check_path, is_unchanged
from fastload.read.linear import Read
from fastload.read.readahead import ReadAhead
from fastload.read.reader import Rows, forms_of_samples, image_axes, open_rows, text_fields, texts_of, with_counts
from fastload.read.row_check import Check
from fastload.read.row_errors import sample_name
from fastload.remote.open_url import open_remote
from fastload.remote.urls import Remote, is_url
from fastload.system.argument_names import checks_names
from fastload.system.text import counted, object_html, object_text
from fastload.transforms.boxes_and_points import COORDINATE_FIELDS, Coordinates, coordinates_of
from fastload.transforms.tv_tensors import OnTvTensors, is_v2, refuse_image_transforms

if TYPE_CHECKING:
    from fastload.pack.unpacked import UnpackedFolder

Sample = tuple[Any, ...]
Transform = Callable[[Any], Any]

CheckOption = Literal["auto", "always", "first"] | None
OnDamage = Literal["raise", "skip"]

PLAN_FIELDS = ("row", "valid", "pixel_mask")
"""Fields that are not in the file: `FastLoader` adds them to a batch if they are asked for."""

_BOOKKEEPING = ("split", *DIGEST_FIELDS)

# What the error on an unknown split says of files without splits.
_HOLD_OUT = (
    "; `torch.utils.data.random_split(dataset, [0.9, 0.1])` holds some of them out, and a folder of train/ and val/ is "
    "packed with splits"
)

# Values of the attribute `coordinates` of fields whose numbers are not pixels of the packed images, in words.
_NOT_OF_THE_PACKED = {
    "original": "they are pixels of the original images, of which the packed ones are parts",
    "aligned, before it was resized": "they are pixels of the images before `fastload pack --size` resized them",
    "unknown": "it is not known what their numbers are",
}

_LOADER_HAS = "It is FastLoader's: FastLoader(PackedDataset(...), batch_size, {})."
_OF_LOADER = {
    **{
        name: _LOADER_HAS.format(f"{name}=...")
        for name in ("batch_size", "shuffle", "ends", "seed", "share", "workers", "device", "echo", "cache", "batch")
    },
    "num_workers": _LOADER_HAS.format("workers=..."),
    "timeout": _LOADER_HAS.format("workers=Workers(timeout=...)"),
    "pad_to": _LOADER_HAS.format("batch=Pad(multiple=...)"),
    "group_by": _LOADER_HAS.format("batch=Pad(group_by=...)"),
}
_INSTEAD = {
    **_OF_LOADER,
    "cache_dir": "A folder of images is packed there: PackedDataset.from_folder(folder, cache_dir=...). Of a URL, it "
    "is remote=Remote(cache=...).",
    "download": "A packed file is only read; `fastload pack` makes one.",
}
_OF_FILE = "A folder has none before it is packed: `fastload pack` it, and give PackedDataset(file, {}=...)."
_INSTEAD_OF_FOLDER = {
    **_OF_LOADER,
    "split": "Give the folder of the split alone, or `fastload pack` the whole, and PackedDataset(file, split=...).",
    **{name: _OF_FILE.format(name) for name in ("fields", "decode")},
    "transform": "Give FastLoader(transform=[...]), which runs on whole batches; or `fastload pack` the folder, and "
    "give PackedDataset(file, transform=...).",
    "remote": "It is for URLs: PackedDataset(url, remote=...).",
}


class PackedDataset(Dataset[Any]):
    """The samples of a packed file, each a tuple of its fields.

    Images are torch.uint8 (C, H, W), a permuted view, each in its own size if they differ; masks (H, W); other fields
    have the dtype of the file, labels int64; numbers are tensors without dimensions; texts are str (`key`) or a list of
    str (`caption`). A pickle holds the path, the options and the file's identity, and each process opens the file at
    its first read, so any start method and any number of threads work.

    Args:
        path: a file or index of `fastload pack`, or another HDF5 file with a dataset `images`; also its URL
            (s3://bucket/out.h5, gs://, az://, https://, or another scheme that fsspec knows), see `Remote`. A list of
            files and indexes that are alike, rows in their order split by split, as `fastload index` joins them.
        split: name of a split; None for all rows.
        fields: names of fields, in the order wanted; None for images, and labels if present; in a file without images
            all numeric fields, by name, labels last. "row" is the sample's row in the file; "valid" is True and
            "pixel_mask" (H, W) all True, except in (padded) batches of a `FastLoader`.
        transform: called with the tuple of fields, returns the sample. Transforms of torchvision v2 get images, masks,
            boxes and points as tv_tensors, so that all move alike; their results are converted to plain tensors.
        decode: where a `FastLoader` with a CUDA device decodes stored JPEGs: "cpu", in its threads, or "device", by
            nvJPEG through torchvision, and cuts them there. Never run on a GPU so far. Samples asked for one by one are
            decoded by the CPU.
        check: when values are compared with the digests that `fastload pack` wrote, so that corrupted bytes raise an
            error. "always": each time that a row is read; "first": the first time that this dataset reads it in this
            process (it keeps a bit for each row); None: never. "auto" is "first", and None for files that fastload did
            not write, which have no digests. Unless it is None, the file's header is compared at once.
        read: "map" copies rows from a memory mapping of the file; "pread" reads them by system calls, which takes two
            to four times as long, but survives any change to the file by others. "auto" is "pread" on network file
            systems and the like, else "map"; see docs/damaged-files.md.
        on_damage: what a `FastLoader` does with damaged rows. "raise": the first one ends the loop. "skip": the next
            good row of the batch takes its place, with `valid` False; `stats` counts and lists such rows, and the first
            one is logged. A batch without a good row is an error, as is always a damaged sample asked for by itself.
        remote: where chunks of a URL are cached on this machine, and how they are requested; None: `Remote()`.

    Raises:
        MissingFileError, FormatError: the file is missing, cannot be read, or its header is damaged.
        OptionError: unknown split, field, decoder or check; the file has no digests to compare with.
        DamagedRowError: (while reading) a row has changed since it was packed.
    """

    @checks_names(_INSTEAD)
    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        split: str | None = None,
        fields: Sequence[str] | None = None,
        transform: Transform | None = None,
        *,
        decode: Literal["cpu", "device"] = "cpu",
        check: CheckOption = "auto",
        read: Read = "auto",
        on_damage: OnDamage = "raise",
        remote: Remote | None = None,
    ) -> None:
        self._in_loader = False
        _check_reading(check, read, on_damage)
        if decode not in ("cpu", "device"):
            raise OptionError(f'PackedDataset(decode={decode!r}): JPEGs are decoded by the "cpu" or the "device"')
        given: object = transform
        if given is not None and (isinstance(given, type) or not callable(given)):
            raise OptionError(
                f"PackedDataset(transform={transform!r}): expected a function that takes the tuple of fields of one "
                f"sample and returns the sample. Pass transforms of whole batches (fastload.transforms) to "
                f"FastLoader(transform=[...])."
            )
        self._url = _urls_of(path)
        self._remote = remote or Remote() if self._url else remote
        if remote is not None and not self._url:
            raise OptionError(
                f"PackedDataset({str(path)!r}, remote=...): this is no URL such as s3://bucket/out.h5, and files of "
                f"this machine are read where they are. Leave remote out."
            )
        self.split = split
        self.transform = transform
        self.decode = decode
        self._file: PackedFile | None = self._opened(path)
        self.path = self._file.path  # of a URL, where its chunks are cached
        self._given = self._file.given
        self._identity, self._digest = self._file.identity, self._file.header_digest
        self._digests: dict[str, NDArray[np.uint64]] | None = None  # `PackedFile.digests`, for processes that open it
        self.check: Check | None = None  # when rows are compared with their digests
        self._begin_checks(check)
        if on_damage == "skip" and self.check is None:
            raise OptionError(
                f'on_damage="skip": no row of {self._file.name} is compared with a digest, so none is known to be '
                f"damaged. It takes a file of `fastload pack`."
            )
        self.read: Read = read
        self.on_damage: OnDamage = on_damage
        if split is not None:
            check_split(self._file.name, split, self._file.splits, without=_HOLD_OUT)
        self._range = range(self._file.num_rows) if split is None else self._file.splits[split]
        self._selected: NDArray[np.int64] | None = None
        self._labels: Mapping[str, Field] = {}  # fields of classes as `only` counts them
        self.fields = _checked_fields(self._file, fields)
        self._of_folder = ""  # what identifies the folder's samples, if the file was packed of one while it was read
        self._window_chunks: int | None = None  # of a shuffle that is expected
        self._reader: Rows | None = None
        _ = self.sample_transform  # says now which fields cannot follow it

    @staticmethod
    @checks_names(_INSTEAD_OF_FOLDER)
    def from_folder(
        folder: str | os.PathLike[str],
        *,
        cache_dir: str | os.PathLike[str] | None = None,
        check: CheckOption = "auto",
        read: Read = "auto",
        on_damage: OnDamage = "raise",
    ) -> PackedDataset:
        """Returns the samples of a folder, .zip or .tar of images: of its packed file, if an earlier run left one.

        Else a `FastLoader` packs it in the background (`fastload pack --store source`, in a process of low priority)
        while it reads the images as they are, and reads the packed file from the next epoch on, once that is complete.
        Order, random numbers and states are the same before and after. Interrupted packing goes on in the next run.

        Args:
            folder: path of the folder or archive.
            cache_dir: folder of the packed file; None: it is `FOLDER.fastload.h5`, next to it.
            check, read, on_damage: of the packed file, as in `PackedDataset`. Files of images have no digests, so until
                it is there nothing is compared, and an image that cannot be decoded is an error.

        Raises:
            SourceError: it cannot be packed; the message is `fastload pack`'s.
            MissingFileError, OptionError: there is no such folder or archive, or the packed file cannot lie there.
            FileChangedError: it changed after it was packed.
            OutputError: the packed file's folder cannot be written.
        """
        # Imported here, as who reads packed files does not need the packer.
        from fastload.pack.unpacked import open_unpacked

        _check_reading(check, read, on_damage)
        path = Path(folder)
        if not path.exists():
            raise MissingFileError(f"{path}: no such folder or archive. Give a folder, .zip or .tar of images.")
        if not is_unpacked(path):
            raise OptionError(
                f"PackedDataset.from_folder({str(path)!r}): this is no folder, .zip or .tar of images. If it is a "
                f"packed file, give it to PackedDataset or FastLoader."
            )
        found = open_unpacked(path, cache_dir)
        if found.is_packed:
            return _packed_of(found, check=check, read=read, on_damage=on_damage)
        return UnpackedDataset(found, check=check, read=read, on_damage=on_damage)

    def __setattr__(self, name: str, value: object) -> None:
        if (name in _FIXED and name in self.__dict__) or (name in _FIXED_IN_LOADERS and self._in_loader):
            why = "a loader has this dataset, and would not see it" if self._in_loader else "what is read follows it"
            raise OptionError(f"dataset.{name} cannot be set: {why}. Make another one: PackedDataset(..., {name}=...).")
        object.__setattr__(self, name, value)

    def fix(self) -> None:
        """Forbids setting attributes from now on: a loader has read them."""
        self._in_loader = True

    def _opened(self, path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> PackedFile:
        """Returns the header of what a path or URL leads to."""
        return open_remote(self._url, self._remote) if self._url else _header_of(path)

    @property
    def file(self) -> PackedFile:
        """The file's header; read again in a process that got this dataset as a pickle.

        Raises:
            FileChangedError: the file has changed since the dataset was made.
        """
        if self._file is None:
            file = open_remote(self._url, self._remote) if self._url else read_header(self.path)
            if self._url:
                alike, then, now = file.header_digest == self._digest, self._digest, file.header_digest
            else:
                file = replace(file, given=self._given, digests=self._digests)
                known = replace(file, identity=self._identity, header_digest=self._digest)
                alike = is_unchanged(known, file.identity)
                then, now = map(_described, (known.identity, file.identity))
            if not alike:
                raise FileChangedError(
                    f"{file.name}: changed since the dataset was made: {then} then, {now} now. Make the dataset again."
                )
            vars(self)["path"] = file.path  # of a URL, in the cache of this process
            self._file = self._renumbered(file)
        return self._file

    @property
    def rows(self) -> range | NDArray[np.int64]:
        """Rows of the file in the dataset's order, a range or (after `select`) int64 (N,); do not modify."""
        return self._range if self._selected is None else self._selected

    @property
    def sample_transform(self) -> Transform | None:
        """The function from the tuple of fields to a sample: `transform`, in `OnTvTensors` for torchvision v2."""
        transform = self.transform
        refuse_image_transforms(transform)
        if transform is None or "images" not in self.fields or not is_v2(transform):
            return transform
        return OnTvTensors(transform, self.fields, self.coordinates())

    def coordinates(self) -> dict[str, Coordinates]:
        """Returns how fields hold boxes and points, where the file says so."""
        known = {}
        for name in self.fields:
            if name in COORDINATE_FIELDS and name in self.file.fields:
                field = self.file.fields[name]
                frame = _NOT_OF_THE_PACKED.get(str(field.attrs.get("coordinates")), "")
                known[name] = coordinates_of(name, field.shape, field.names, frame, field.attrs.get("flip_pairs", ()))
        return known

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes or attributes in labels; empty if the file has none."""
        return self.file.fields["labels"].names if "labels" in self.file.fields else ()

    def select(self, rows: Sequence[int] | NDArray[Any]) -> PackedDataset:
        """Returns a dataset of some of the samples, in the order given.

        Args:
            rows: positions in this dataset, as for indexing; repeats are allowed.

        Raises:
            IndexError: a position is out of range.
        """
        return self._with(_selected=self._file_rows(positions_of("select()", rows)))

    def only(
        self, classes: Sequence[str | int] | NDArray[Any] | Mapping[str | int, str], *, field: str = "labels"
    ) -> PackedDataset:
        """Returns a dataset of some classes' samples, with labels renumbered from 0; `classes` has the classes' names.

        Args:
            classes: names of classes, or their numbers in this dataset, in the order of their new numbers. A mapping
                gives each a new name and numbers the new names in order, which can merge classes:
                `{"cat": "animal", "dog": "animal"}`.
            field: name of the field of classes, where there are several.

        Raises:
            OptionError: the file has no such field with one class an image; a class is unknown, or no sample has it.
        """
        name = field
        labels = self.class_numbers(name)
        of_classes = self.file.fields[name]
        merged = classes if isinstance(classes, Mapping) else None
        if isinstance(classes, (np.ndarray, torch.Tensor)):
            classes = classes.tolist()
        if not isinstance(classes, (list, tuple, range, Mapping)) or not classes:
            order = "; a set has no order, which the new numbers follow" if isinstance(classes, Set) else ""
            raise OptionError(
                f"only({classes!r}): give a list of names or numbers of classes, or a mapping to new names{order}"
            )
        numbers = [_class_number(self.file, of_classes.names, one) for one in classes]
        if len(set(numbers)) < len(numbers):
            raise OptionError(f"{self.file.name}: only(): a class is named twice in {list(classes)!r}")
        if absent := [one for one, number in zip(classes, numbers, strict=True) if not (labels == number).any()]:
            raise OptionError(f"{self.file.name}: no sample has the class {', '.join(map(repr, absent))}: leave it out")
        named = [of_classes.names[number] if of_classes.names else str(number) for number in numbers]
        named = named if merged is None else list(map(str, merged.values()))
        names = tuple(dict.fromkeys(named))
        pairs = {number: names.index(name) for number, name in zip(numbers, named, strict=True)}
        stored = dict(of_classes.renumbered) or {number: number for number in numbers}
        again = sorted((old, pairs[number]) for old, number in stored.items() if number in pairs)
        dataset = self.select(np.flatnonzero(np.isin(labels, numbers)))
        dataset._labels = {**self._labels, name: replace(of_classes, names=names, renumbered=tuple(again))}
        dataset._file = dataset._renumbered(self.file)
        return dataset

    def _renumbered(self, file: PackedFile) -> PackedFile:
        """Returns the header with the classes of `only`."""
        anew = {
            name: replace(file.fields[name], names=field.names, renumbered=field.renumbered)
            for name, field in self._labels.items()
        }
        return replace(file, fields=file.fields | anew) if anew else file

    def class_numbers(self, field: str = "labels") -> NDArray[np.int64]:
        """Returns the class of each sample, int64 (N,), -1 for none, read from a field of classes.

        They are not compared with digests, which cover whole rows, pixels included.

        Raises:
            OptionError: there is no such field, or it does not hold one class a sample.
            FileChangedError, ReadError: the file can no longer be read.
        """
        fields = self.file.fields
        if field not in fields or not _is_one_number(self.file, field):
            found = fields.get(field)
            why = f"holds {found.dtype} {('N', *found.shape)}" if found else "is not in the file"
            known = ", ".join(repr(name) for name in fields if _is_one_number(self.file, name)) or "none"
            hint = "Name a field of one class a sample, a whole number"
            raise OptionError(f"{self.file.name}: {field!r} {why}. {hint}; it has {known}.")
        rows = np.asarray(self.rows, np.int64)
        found_in = np.empty(len(rows), fields[field].dtype.newbyteorder("="))
        one = self._with(fields=(field,), check=None)
        with closing(one.open_reader("auto", cache_chunks=1, windows=False)) as reader:
            reader.gather(rows, {field: found_in})
        return as_handed_over(self.file, {field: found_in})[field].astype(np.int64, copy=False)

    def data_identity(self) -> str:
        """Returns a string that identifies the file's content and the rows chosen; saved states are checked by it."""
        digest, rows = self._of_folder or self.file.header_digest, self.rows
        for name, field in sorted(self._labels.items()):
            said = repr((field.names, field.renumbered)) + (name if name != "labels" else "")
            digest = f"{digest}/{hashlib.sha256(said.encode()).hexdigest()[:16]}"
        if not isinstance(rows, range):
            return f"{digest}/{hashlib.sha256(rows.tobytes()).hexdigest()[:16]}"
        return digest if rows == range(self.file.num_rows) else f"{digest}/{rows.start}-{rows.stop - 1}"

    def as_chosen(self, other: PackedDataset) -> PackedDataset:
        """Returns this dataset with the samples, fields and transform of another dataset of the same source."""
        names = ("split", "transform", "fields", "_range", "_selected", "_labels")
        dataset = self._with(**{name: getattr(other, name) for name in names})
        dataset._file = dataset._renumbered(self.file)
        return dataset

    def expect_window(self, chunks: int) -> None:
        """Sizes the cache of decoded chunks for a shuffle in windows of this many chunks; called by samplers.

        Only files that are read chunk by chunk, compressed or foreign ones, have this cache: one in each process, for
        the present window and the next.
        """
        if chunks != self._window_chunks:
            self._window_chunks, self._reader = chunks, None

    def reading(self, read: Read) -> PackedDataset:
        """Returns the same dataset with another way to read."""
        return self._with(read=read)

    def expecting(self, chunks: int | None) -> PackedDataset:
        """Returns the same dataset for a loader that shuffles in windows of so many chunks; None: in no windows."""
        return self._with(_window_chunks=chunks)

    def _begin_checks(self, check: CheckOption) -> None:
        """Sets `check`; compares the file's header with its digest unless that was done before."""
        if self._url and (self._remote or Remote()).shared:  # whose cache others may change at any time
            if check is None or self.file.version is None:
                why = "check=None" if check is None else "a file without digests, which fastload did not write,"
                raise OptionError(f"{self.file.name}: {why} does not go with Remote(shared=True)")
            check = "always"
        if self.file.version is None:
            if check in ("always", "first"):
                raise OptionError(
                    f"{self.file.name}: check={check!r}: fastload did not write this file, so it holds no digests to "
                    f"compare with. Leave check out, or `fastload repack {typed(self.path)} OUT.h5`."
                )
            return
        if self.check is None and check is not None and self.file.holds_rows:  # shards: when read
            self._file = with_digests(self.file)
            self._digests = self._file.digests
        vars(self)["check"] = "first" if check == "auto" else check

    def samples(self, rows: NDArray[np.int64]) -> list[Sample]:
        """Returns the samples of rows of the file, read in one call, before any transform.

        Raises:
            IndexError: a row is outside the file.
            FileChangedError: the file was written to or truncated.
            DamagedRowError: a row has changed since it was packed.
        """
        columns = (
            list(map(as_tensor, column)) if isinstance(column, list) else torch.from_numpy(column)
            for column in self.columns(rows)
        )
        return list(zip(*columns, strict=True))

    def collate(self, samples: Sequence[Any]) -> Any:
        """Returns samples as a batch, for `DataLoader(dataset, collate_fn=dataset.collate)`.

        Like torch's `default_collate`, but texts (`caption`) stay a list for each sample, as in `FastLoader`.
        Torch would transpose these lists, and fail where samples have different numbers of texts.

        Raises:
            OptionError: images or other fields differ in shape.
        """
        if why := self._uneven(samples, texts=False):
            raise OptionError(why)
        if not isinstance(samples[0], (tuple, dict)):
            return collated(samples)
        if isinstance(samples[0], dict):
            return {key: collated([sample[key] for sample in samples]) for key in samples[0]}
        return [collated(values) for values in zip(*samples, strict=True)]

    def columns(
        self, rows: NDArray[np.int64], into: Mapping[str, NDArray[Any]] | None = None
    ) -> list[NDArray[Any] | list[Any]]:
        """Returns the fields of rows as arrays (B, ...) with the axes of samples; images (B, C, H, W).

        If samples differ in size, a field is a list of arrays: (C, H, W) each, masks (H, W); texts are lists, too.
        Fields are gathered into the arrays in `into`, which `layout` describes; others are allocated.
        """
        arrays = dict(into or {})
        varied = [name for name in self._from_file if self.file.fields[name].varied]
        for name, shape, dtype in self.layout():
            if name not in arrays and name not in varied:
                arrays[name] = np.empty((len(rows), *shape), dtype)
        lists = self._gathered(self._open(), rows, arrays, varied)
        arrays = as_handed_over(self.file, arrays) | {"row": rows.copy(), "valid": np.ones(len(rows), np.bool_)}
        if "images" in arrays:
            arrays["images"] = arrays["images"].transpose(0, 3, 1, 2)
        if "images" in lists:
            lists["images"] = [image.transpose(2, 0, 1) for image in lists["images"]]
        if "pixel_mask" in self.fields:
            images = lists["images"] if "images" in lists else arrays["images"]
            lists["pixel_mask"] = [np.ones(image.shape[1:], np.bool_) for image in images]
        return [lists[name] if name in lists else arrays[name] for name in self.fields]

    def _gathered(
        self, reader: Rows, rows: NDArray[np.int64], arrays: dict[str, NDArray[Any]], varied: Sequence[str]
    ) -> dict[str, list[Any]]:
        """Reads rows into arrays, and returns the fields that arrays cannot hold: texts, and rows of varying size."""
        if not varied and not self.text_fields:
            reader.gather(rows, arrays)
            return {}

        def read() -> dict[str, list[Any]]:
            reader.gather(rows, arrays)  # which checks their digests
            return {name: reader.decoded(name, rows) for name in varied} | self.texts(reader, rows)

        return reader.within(rows, read)

    def read_ahead(self, *, chunk_rows: int = 0, recent_chunks: int = 64) -> ReadAhead:
        """Returns a `ReadAhead` for rows of this dataset, which opens the files itself; the caller closes it."""
        rows = self.rows if isinstance(self.rows, range) else range(self.file.num_rows)
        names = with_counts(self.file, self._from_file)
        return ReadAhead(self.file, names, rows, chunk_rows=chunk_rows, recent_chunks=recent_chunks)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return object_text("PackedDataset", *self._description())

    def _repr_html_(self) -> str:
        return object_html("PackedDataset", *self._description())

    def _description(self) -> tuple[list[str], list[str]]:
        parts = [f"split {self.split}"] if self.split else []
        parts += ["some of its rows"] if self._selected is not None else []
        function = getattr(self.transform, "__qualname__", type(self.transform).__qualname__)
        how = forms_of_samples(self._file, self.fields) + ([f"transform {function}"] if self.transform else [])
        return [self.file.name.rpartition("/")[2], *parts, counted(len(self), "row")], how

    def __getitem__(self, index: Any) -> Any:
        """Returns the sample at a position; for a list or an int array of B positions a batch of them.

        A batch is a tuple of the fields, (B, ...) each, read in one call; with a transform, samples as `collate` has
        them. `DataLoader(dataset, batch_size=None, sampler=BatchSampler(...))` asks for such.

        Raises:
            IndexError: a position is out of range.
            OptionError: True and False in place of positions; samples of a batch differ in size.
            FileChangedError: the file was written to or truncated.
        """
        if isinstance(index, (list, np.ndarray, torch.Tensor)) and np.ndim(index):
            return self._batch(positions_of(f"{self.file.name}: dataset[...]", index))
        if isinstance(index, (bool, np.bool_)) or (isinstance(index, torch.Tensor) and index.dtype == torch.bool):
            positions_of(f"{self.file.name}: dataset[...]", [bool(index)])
        try:
            position = operator.index(index)
        except TypeError as exc:
            raise TypeError(
                f"{self.file.name}: a sample is chosen by a whole number, several by a list of them, not by "
                f"{type(index).__name__}; `select([...])` gives a dataset of some."
            ) from exc
        return self.__getitems__([position])[0]

    def _batch(self, positions: NDArray[np.int64]) -> Any:
        if self.transform is not None:
            return self.collate(self.__getitems__(positions))
        if varied := [name for name in self._from_file if self.file.fields[name].varied]:
            raise OptionError(
                f"{self.file.name}: {' and '.join(varied)} differ in size, so a list of positions makes no batch. "
                f"Give PackedDataset a transform that brings them to one size, or take "
                f"FastLoader(transform=[RandomResizedCrop(224)]); `select([...])` gives a dataset of some samples."
            )
        columns = self.columns(self._file_rows(positions))
        texts = self.text_fields
        return tuple(
            column if name in texts else torch.from_numpy(np.stack(column) if isinstance(column, list) else column)
            for name, column in zip(self.fields, columns, strict=True)
        )

    def __getitems__(self, indices: Sequence[int] | NDArray[np.int64]) -> list[Any]:
        """Returns samples, read in one call; negative positions count from the end.

        Where they differ in shape, torch's `default_collate` of them raises OptionError.

        Raises:
            IndexError: a position is out of range.
            FileChangedError: the file was written to or truncated.
        """
        samples = self.samples(self._file_rows(np.asarray(indices, dtype=np.int64)))
        transform = self.sample_transform
        made = samples if transform is None else [transform(sample) for sample in samples]
        varied = any(self.file.fields[name].varied for name in self._from_file)
        if transform is None and not varied and not self.text_fields:
            return made
        # A `DataLoader` asks for the samples of a batch at once, and then calls its collate_fn.
        return _UnevenBatch(made, self._uneven) if self._uneven(made) else made

    def _uneven(self, samples: Sequence[Any], *, texts: bool = True) -> str:
        """Returns why torch's `default_collate` makes no batch of samples, and what to do; "" if shapes are equal.

        `texts`: whether lists of texts count, of which samples have different numbers.
        """
        names = self.fields if self.transform is None else ()
        found = (_difference(samples[0], other, names, texts=texts) for other in samples[1:])
        name, one, other = next(filter(None, found), ("", (), ()))
        if not name:
            return ""
        sizes = [f"of {len(each)}" if isinstance(each, (tuple, list)) else tuple(each.shape) for each in (one, other)]
        why = f"{self.file.name}: the samples of a batch differ: {name} {sizes[0]} and {sizes[1]}."
        if _are_texts(one):
            return f"{why} DataLoader(..., collate_fn=dataset.collate) keeps a list of texts for each sample."
        if name in PIXEL_FIELDS or (isinstance(sizes[0], tuple) and len(sizes[0]) > 2):
            return (
                f"{why} Bring images to one size: `fastload pack SRC OUT.h5 --size 256`, or a transform of samples "
                f"that crops or resizes, as PackedDataset(..., transform=v2.RandomResizedCrop(224)) with torchvision's "
                f"v2. DataLoader(..., collate_fn=list) keeps them as they are."
            )
        return f"{why} Give the DataLoader a collate_fn of your own; collate_fn=list keeps samples as they are."

    def __getstate__(self) -> dict[str, Any]:
        # An index that is in no file goes along; any other header is read again.
        kept = self._file if self._file is not None and self._file.listed and not self._url else None
        return {**self.__dict__, "_file": kept, "_reader": None}

    def _with(self, **changed: Any) -> PackedDataset:
        """Returns the same dataset with other attributes, and without an open reader."""
        dataset = copy.copy(self)
        vars(dataset).update(changed, _file=self._file, _in_loader=False)
        return dataset

    @property
    def _from_file(self) -> list[str]:
        return [name for name in self.fields if name not in PLAN_FIELDS]

    def _file_rows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        size = len(self)
        if indices.size and (indices.min() < -size or indices.max() >= size):
            bad = indices[(indices < -size) | (indices >= size)][0]
            raise IndexError(
                f"{self.file.name}: index {bad} is out of range for {size} samples. If it came from a sampler, that is "
                f"one of another dataset."
            )
        indices = np.where(indices < 0, indices + size, indices)
        return indices + self._range.start if self._selected is None else self._selected[indices]

    def _open(self) -> Rows:
        if self._reader is None:
            # Two threads may both open a reader; garbage collection closes the slower one's.
            chunks = self._window_chunks
            cache_chunks = 2 * (chunks or ChunkWindow().chunks)
            self._reader = self.open_reader(self.read, cache_chunks=cache_chunks, windows=chunks is not None)
        return self._reader

    def open_reader(self, read: Read, *, cache_chunks: int, windows: bool) -> Rows:
        """Returns a reader of this dataset's fields; the caller closes it. Options: as for `open_rows`."""
        return open_rows(
            self.file,
            with_counts(self.file, self._from_file),
            read,
            cache_chunks=cache_chunks,
            windows=windows,
            verify=require_packed,
            check=self.check,
        )

    def check_unchanged(self) -> None:
        """Raises FileChangedError if the file was replaced or written to."""
        if self.file.remote is None:  # of a copy in a cache the reader notices it, and fetches it again
            check_path(self.file)

    def packed(self) -> PackedDataset:
        """Returns the dataset to be read from now on: this one, or for a folder its packed file once that is there."""
        return self

    def name_of(self, row: int) -> str:
        """Returns what messages call a row of the file."""
        return sample_name(self.file, row)

    def keys_of(self, rows: NDArray[np.int64]) -> tuple[str, ...]:
        """Returns the key of each row (R,) of the file, or its number where the file has no keys."""
        if "key" not in self.file.fields:
            return tuple(map(str, rows.tolist()))
        with closing(open_rows(self.file, ["key"])) as reader:
            return tuple(texts_of(reader, "key", rows))

    def layout(self) -> list[tuple[str, tuple[int, ...], np.dtype[Any]]]:
        """Returns name, shape of a row and native dtype of each field that is read from the file, but for texts.

        A shape has 0 where rows differ; such fields are not gathered into arrays.
        """
        fields, texts = self.file.fields, self.text_fields
        named = [(name, fields[name]) for name in self._from_file if name not in texts]
        return [(name, field.shape, field.dtype.newbyteorder("=")) for name, field in named]

    @property
    def text_fields(self) -> list[str]:
        """The fields asked for that are texts, which no array holds."""
        texts = text_fields(self.file)
        return [name for name in self.fields if name in texts]

    def texts(self, reader: Rows, rows: NDArray[np.int64]) -> dict[str, list[Any]]:
        """Returns the texts of rows, by field; the reader has compared the rows, where they are to be."""
        return {name: texts_of(reader, name, rows) for name in self.text_fields}


class UnpackedDataset(PackedDataset):
    """The samples of a folder in the order of the packed file that is made of them; see `PackedDataset.from_folder`.

    Attributes:
        output: the packed file, when it is complete.
    """

    def __init__(self, folder: UnpackedFolder, *, check: CheckOption, read: Read, on_damage: OnDamage) -> None:
        self._folder, self.output = folder, folder.output
        self._options: dict[str, Any] = {"check": check, "read": read, "on_damage": on_damage}  # of the packed file
        super().__init__(folder.path, check=None)
        self._of_folder = folder.identity

    def _opened(self, path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> PackedFile:
        return self._folder.file

    def check_unchanged(self) -> None:
        """Does nothing: each file is checked when it is read."""

    def packed(self) -> PackedDataset:
        """Returns the packed file if it is complete; else this dataset, after packing was begun.

        Raises:
            FileChangedError: the folder changed while it was packed.
        """
        if self._folder.is_packed:
            return _packed_of(self._folder, **self._options).as_chosen(self)
        self._folder.pack()
        return self

    def name_of(self, row: int) -> str:
        """Returns what messages call a sample."""
        return self._folder.name_of(row)

    def keys_of(self, rows: NDArray[np.int64]) -> tuple[str, ...]:
        """Returns the path of each sample (R,) below the folder, as the packed file will have it for its key."""
        return self._folder.keys_of(rows)

    def open_reader(self, read: Read, *, cache_chunks: int, windows: bool) -> Rows:
        """Returns a reader of the folder's files in place of one of the packed file."""
        return self._folder.open_rows(self.fields)

    def read_ahead(self, *, chunk_rows: int = 0, recent_chunks: int = 64) -> Any:
        """Returns one that announces nothing."""
        return _NothingAhead()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_file": self._file}


class _NothingAhead:
    def announce(self, rows: NDArray[np.int64]) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


def _packed_of(folder: UnpackedFolder, *, check: CheckOption, read: Read, on_damage: OnDamage) -> PackedDataset:
    """Returns the packed file of a folder, with its states. Raises FileChangedError if the folder changed."""
    dataset = PackedDataset(folder.output, check=check, read=read, on_damage=on_damage)
    folder.check_same(dataset.file)
    dataset._of_folder = folder.identity
    return dataset


def _check_reading(check: object, read: object, on_damage: object) -> None:
    """Raises OptionError for options that have no meaning, whatever the file."""
    check_choice("check", check, ("auto", "always", "first", None))
    check_choice("read", read, ("auto", "map", "pread"))
    check_choice("on_damage", on_damage, ("raise", "skip"))
    if on_damage == "skip" and check is None:
        raise OptionError(
            'on_damage="skip": rows are known to be damaged by their digests, so it takes a check other than None.'
        )


def is_unpacked(path: Path) -> bool:
    """Whether a path leads to a folder, .zip or .tar of images. Raises OptionError for a folder of packed files."""
    if path.is_dir() and _holds_packed_only(path):
        raise folder_of_files(path)
    return path.is_dir() or (path.suffix.lower() in (".zip", ".tar") and path.is_file())


def _holds_packed_only(folder: Path) -> bool:
    """Whether a folder holds files that end in .h5, and beside them nothing but what packing leaves."""
    found = {entry.suffix if entry.is_file() else "/" for entry in folder.iterdir() if not entry.name.startswith(".")}
    return ".h5" in found and found <= {".h5", ".plan", ".part", ".journal", ".meta", ".masks"}


def _class_number(file: PackedFile, names: Sequence[str], given: Any) -> int:
    """Returns the number of a class that is named, or given by its number."""
    if isinstance(given, str) and given in names:
        return names.index(given)
    if is_whole(given) and (not names or 0 <= given < len(names)):
        return int(given)
    near = difflib.get_close_matches(str(given), names, 1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    raise OptionError(f"{file.name}: there is no class {given!r}{hint} It has {shown or 'numbers without names'}.")


_FIXED = frozenset(("path", "split", "fields", "check", "read", "on_damage"))
_FIXED_IN_LOADERS = frozenset(("transform", "decode"))


def _is_one_number(file: PackedFile, name: str) -> bool:
    """Whether a field is one whole number a row, which may mean a class."""
    field = file.fields[name]
    return field.dtype.kind in "iu" and not field.shape and name not in _BOOKKEEPING


def positions_of(where: str, rows: Any) -> NDArray[np.int64]:
    """Returns positions as int64 (N,). Raises OptionError, naming `where` they were given, if they are invalid."""
    chosen = np.asarray(rows)
    if chosen.dtype.kind == "b":
        raise OptionError(
            f"{where}: these are True and False {chosen.shape}. Give the positions that are True: "
            f"numpy.flatnonzero(mask)."
        )
    if chosen.ndim != 1 or (chosen.size and chosen.dtype.kind not in "iu"):
        raise OptionError(f"{where}: give whole numbers in one dimension, got {chosen.dtype} {chosen.shape}")
    return chosen.astype(np.int64)


def _urls_of(path: Any) -> str | tuple[str, ...]:
    """Returns the URL, or the URLs of a list that has some; "" for files of this machine."""
    if isinstance(path, (list, tuple)):
        check_list(path)
        return tuple(map(str, path)) if any(map(is_url, path)) else ""
    return str(path) if is_url(path) else ""


def _header_of(path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> PackedFile:
    """Returns the header of a file with its absolute path, since the script may go to another folder; or of several."""
    if not isinstance(path, (str, os.PathLike)):
        return open_files(path)
    file = read_header(path)
    return file if file.path.is_absolute() else replace(file, path=file.path.absolute(), given=str(file.path))


def as_tensor(value: Any) -> Any:
    """Returns an array as a tensor over its memory, and texts as they are."""
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def collated(values: Sequence[Any]) -> Any:
    """Returns one field of some samples as torch collates it, but lists of texts as a list of these lists."""
    if all(map(_are_texts, values)):
        return list(values)
    return default_collate(list(values))


def _difference(one: Any, other: Any, names: Sequence[str] = (), *, texts: bool) -> tuple[str, Any, Any] | None:
    """Returns the name of the first part of two samples that differs in shape or length, and that part of each."""
    if isinstance(one, (torch.Tensor, np.ndarray)) and isinstance(other, (torch.Tensor, np.ndarray)):
        return ("tensors", one, other) if one.shape != other.shape else None
    if isinstance(one, dict) and isinstance(other, dict):
        parts = [(str(name), one[name], other[name]) for name in one if name in other]
    elif isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        if not texts and _are_texts(one) and _are_texts(other):
            return None
        if len(one) != len(other):
            return "lists", one, other
        numbered = [f"part {number}" for number in range(len(one))]
        parts = list(zip(names if len(names) == len(one) else numbered, one, other, strict=True))
    else:
        return None
    for name, ours, theirs in parts:
        if found := _difference(ours, theirs, texts=texts):
            return name, *found[1:]
    return None


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


class _UnevenBatch(list[Any]):
    """Samples of a batch that differ in shape: torch's `default_collate` of them raises OptionError if it fails.

    torch looks up how to collate by the type of the first sample, and transforms take samples by their exact type, so
    these stay as they are. Its copies, slices and pickles are plain lists.
    """

    def __init__(self, samples: list[Any], why: Callable[[Sequence[Any]], str]) -> None:
        super().__init__(samples)
        self._why = why

    def __getitem__(self, index: Any) -> Any:
        caller = sys._getframe(1)
        # What a collate_fn made of the samples before may be of one shape, and a table of functions of its own may
        # collate samples of any.
        if caller.f_code is collate.__code__ and (why := self._why(self)):
            try:
                collate(list(self), collate_fn_map=caller.f_locals["collate_fn_map"])
            except RuntimeError as error:
                raise OptionError(why) from error
        return super().__getitem__(index)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return list, (list(self),)


# Transforms that look for tensors in whatever they are given, as torchvision's v2, look into a batch, too.
register_pytree_node(_UnevenBatch, lambda batch: (list(batch), None), lambda samples, _: list(samples))

_LARGEST = 2**63 - 1


def as_handed_over(file: PackedFile, arrays: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Returns gathered arrays as users get them: images as a view (B, H, W, C), integer labels as int64."""
    arrays = dict(arrays)
    if "images" in arrays:
        axes, images = image_axes(file), arrays["images"]
        if axes == "HW":
            arrays["images"] = images[..., None]
        elif axes == "CHW":
            arrays["images"] = images.transpose(0, 2, 3, 1)
    labels = arrays.get("labels")
    if labels is not None and labels.ndim == 1 and labels.dtype.kind in "iu":
        if labels.dtype == np.uint64 and labels.size and labels.max() > _LARGEST:
            raise FormatError(f"{file.name}: `labels` has {labels.max():,}, more than int64 holds; pack other labels")
        arrays["labels"] = labels.astype(np.int64, copy=False)
    for name in arrays:
        if name in file.fields and (pairs := file.fields[name].renumbered):
            stored, new = np.array(pairs, np.int64).T
            at = np.searchsorted(stored, arrays[name].astype(np.int64))
            arrays[name] = new[np.minimum(at, len(new) - 1)].astype(arrays[name].dtype, copy=False)
    return arrays


_NOT_LOADED = "is none of numbers, one for each image: a group, texts of any length, or of another length"


def _checked_fields(file: PackedFile, fields: Sequence[str] | None) -> tuple[str, ...]:
    # Fields for which torch has a dtype.
    kinds = {name: (field.dtype.kind, field.dtype.itemsize) for name, field in file.fields.items()}
    numeric = [name for name, (kind, size) in kinds.items() if kind in "biu" or (kind == "f" and size in (2, 4, 8))]
    if fields is None and "labels" in file.left_out:
        raise FormatError(
            f"{file.name}: `labels` {_NOT_LOADED}. Pack the file, which makes class numbers of texts "
            f"(`fastload pack {typed(file.path)} OUT.h5`), or leave them out: fields=['images']."
        )
    if fields is None and "images" in file.fields:
        fields = [name for name in ("images", "labels") if name in file.fields]
    if fields is None:
        own = [name for name in numeric if name not in _BOOKKEEPING]
        if not own:
            raise OptionError(
                f"{file.name}: it has neither images nor another field of numbers; say which in fields=[...]"
            )
        return tuple(sorted(own, key=lambda name: name == "labels"))
    accepted = (*numeric, *text_fields(file), *PLAN_FIELDS)
    if isinstance(fields, str) or not fields or len(set(fields)) != len(fields):
        raise OptionError(f"fields={fields!r}: give one or more of {', '.join(accepted)}, each once, in a list")
    for name in fields:
        if name not in accepted:
            why = (
                "holds neither texts nor numbers that torch has a type for"
                if name in file.fields
                else "is not in the file"
            )
            why = _NOT_LOADED if name in file.left_out else why
            raise OptionError(f"{file.name}: field {name!r} {why}; choose from {', '.join(accepted)}")
    if "images" in fields:
        image_axes(file)
    elif "pixel_mask" in fields:
        raise OptionError(f"{file.name}: pixel_mask says which pixels belong to an image: add images to fields")
    return tuple(fields)


def _described(identity: FileIdentity) -> str:
    return f"inode {identity.inode}, {identity.size:,} bytes, mtime {identity.mtime_ns}, ctime {identity.ctime_ns} ns"
