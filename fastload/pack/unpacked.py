"""A folder, .zip or .tar of images as a dataset before it is packed: read as it is while it is packed.

    first epochs    files of the folder ----decoded by the loader's threads----> batches
    meanwhile       `fastload pack FOLDER FILE --store source`, in a process with low priority
    then            the packed file --------------------------------------------> batches

Samples come in the order that the packed file has, so nothing changes when it is there. `PackedDataset.from_folder`
makes a dataset of an `UnpackedFolder`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.distributed.ranks import local_rank
from fastload.errors import FastloadError, FileChangedError, ImageError, OptionError, OutputError, SourceError, typed
from fastload.format.header import Field, FileIdentity, PackedFile, RaggedField, open_hdf5
from fastload.format.ragged import JPEG, RaggedExtent, common_shape
from fastload.format.shards import Shards
from fastload.options.pack import PackOptions, parse_encoding
from fastload.pack import Survey, survey_source
from fastload.pack.decisions import jpegs_kept_and_made, row_sizes
from fastload.pack.encode import RowEncoder, reason_of
from fastload.pack.pool import BackgroundPack
from fastload.read.reader import Rows
from fastload.read.row_table import Located, LocatedIndex, index_part
from fastload.read.store import Store
from fastload.system.files import is_below
from fastload.system.text import counted, text_of

_log = logging.getLogger("fastload")

_FEW_FILES, _FEW_BYTES = 10_000, 2**29


def open_unpacked(source: str | os.PathLike[str], cache_dir: str | os.PathLike[str] | None) -> UnpackedFolder:
    """Returns the samples of a folder or archive, and where its packed file is, or will be.

    Raises:
        SourceError: it cannot be packed; the message is `fastload pack`'s.
        OutputError: the packed file's folder cannot be written.
        OptionError: `cache_dir` lies inside the source, or is no folder.
    """
    path = Path(source)
    output = packed_path(path, cache_dir)
    try:
        workers = 0 if _has_few_files(path) else None
        survey = survey_source(path, options=PackOptions(store=parse_encoding("source")), workers=workers)
    except SourceError as error:
        raise SourceError(
            f"{error} PackedDataset.from_folder has no such options: pack it with them (`fastload pack {typed(path)} "
            f"OUT.h5 --store source ...`), and give FastLoader that file."
        ) from error
    if survey.headers is None or survey.plan is None:
        raise SourceError(f"{path}: holds no images. `fastload pack` packs it, and FastLoader reads the file.")
    if not output.exists() and not os.access(output.parent, os.W_OK):
        raise OutputError(
            f"{output}: its folder cannot be written, where {path} is packed while it is read. Name another one, "
            f"PackedDataset.from_folder({os.fspath(path)!r}, cache_dir=...), or pack it: `fastload pack {typed(path)} "
            f"OUT.h5 --store source`."
        )
    return UnpackedFolder(path, output, survey)


def _has_few_files(path: Path) -> bool:
    """Whether the headers of all files are read in less time than processes for it take to start."""
    if path.is_file():
        return path.stat().st_size <= _FEW_BYTES
    walked = (1 + len(files) for _, _, files in os.walk(path))
    return all(total <= _FEW_FILES for total in itertools.accumulate(walked))


def packed_path(source: Path, cache_dir: str | os.PathLike[str] | None) -> Path:
    """Returns where the packed file of a folder or archive lies: in the same folder, or in another one."""
    whole = Path(os.path.realpath(source))
    if cache_dir is None:
        return whole.with_name(f"{whole.name}.fastload.h5")
    folder = Path(cache_dir)
    if is_below(folder, whole):
        raise OptionError(f"cache_dir={os.fspath(cache_dir)!r}: lies inside the source {source}. Name another folder.")
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if not folder.is_dir():
        raise OptionError(
            f"cache_dir={os.fspath(cache_dir)!r}: is no folder, and none can be made there. Name another."
        )
    # Folders of one name may lie in several places.
    return folder.absolute() / f"{whole.name}-{xxhash.xxh3_64_hexdigest(os.fsencode(whole))[:8]}.fastload.h5"


def _identity(survey: Survey) -> str:
    """Returns what identifies the samples in saved states, whether they are packed yet or not."""
    digest, listing = xxhash.xxh3_64(), survey.listing
    digest.update("\0".join(listing.keys[sample] for sample in survey.order.tolist()).encode())
    every: list[NDArray[Any]] = [listing.sizes, listing.split, *(one.values for one in listing.columns.values())]
    for values in every:
        digest.update(np.ascontiguousarray(values[survey.order]).data)
    return f"source-{digest.hexdigest()}"


def _check_same(file: PackedFile, source: Path, survey: Survey) -> None:
    """Raises FileChangedError unless a packed file holds the samples of a folder, in the order of the survey."""
    listing, order = survey.listing, survey.order
    keys = [listing.keys[sample] for sample in order.tolist()]
    with open_hdf5(file.path) as hdf5:
        packed = [text_of(bytes(key)) for key in hdf5["key"][()]]
        lengths = _stored_lengths(hdf5, file)
    newest = int(listing.mtimes_ns.max(initial=0))
    changed = ""
    if new := sorted(set(keys) - set(packed)):
        changed = f"{new[0]} is not in the packed file"
    elif gone := sorted(set(packed) - set(keys)):
        changed = f"{gone[0]} is gone"
    elif packed != keys:
        changed = "its splits are others"
    elif len(other := np.flatnonzero((lengths >= 0) & (lengths != listing.sizes[order]))):
        changed = f"{keys[int(other[0])]} has another size in bytes"
    elif newest > file.identity.mtime_ns:
        changed = f"{listing.keys[int(listing.mtimes_ns.argmax())]} was written to later"
    if changed:
        raise FileChangedError(
            f"{source}: changed since it was packed into {file.path}: {changed}. Remove that file, and it is packed "
            f"anew; or give FastLoader the file itself, to train on what it holds."
        )


def _stored_lengths(hdf5: h5py.File, file: PackedFile) -> NDArray[np.int64]:
    """Returns the bytes of each image that is kept as its file is, int64 (N,); -1 for others."""
    kept = index_part(hdf5, file, "images", "encoding") == JPEG
    return np.where(kept, index_part(hdf5, file, "images", "bytes"), -1).astype(np.int64)


class UnpackedFolder:
    """A folder or archive, its samples in the order of the packed file that is made of them.

    Attributes:
        path: of the folder or archive.
        output: path of the packed file, when it is complete.
        identity: identifies the samples in saved states, whether they are packed yet or not.
        file: the header that the packed file will have, as far as a loader looks at it.
    """

    def __init__(self, path: Path, output: Path, survey: Survey) -> None:
        self.path, self.output, self._survey = path, output, survey
        self.identity = _identity(survey)
        self.file = _header(path, survey, self.identity)
        self._absolute = path.absolute()  # the script may go to another folder before it is packed
        self._packing: BackgroundPack | None = None

    @property
    def is_packed(self) -> bool:
        """Whether the packed file is complete."""
        return self.output.exists()

    def check_same(self, packed: PackedFile) -> None:
        """Raises FileChangedError unless the packed file holds the folder's samples as they were listed."""
        _check_same(packed, self.path, self._survey)

    def pack(self) -> None:
        """Begins to pack it in the background, unless that was begun before; says in the log that it did, or failed."""
        if self._packing is None and not local_rank():  # the first rank of a machine packs, the others read the result
            self._packing = BackgroundPack(self._absolute, self.output)
            images = counted(self.file.num_rows, "image")
            _log.warning(f"{self.path}: {images}, read as they are while they are packed into {self.output}")
        elif self._packing is not None and (failure := self._packing.failure()):
            _log.warning(
                f"{self.path}: read as it is until {self.output} is there, not packed by this script: {failure}"
            )

    def name_of(self, row: int) -> str:
        """Returns what messages call a sample."""
        return f"{self.path}: sample {self.keys_of(np.array([row]))[0]!r}"

    def keys_of(self, rows: NDArray[np.int64]) -> tuple[str, ...]:
        """Returns the path of each sample (R,) below the folder, as the packed file will have it for its key."""
        return tuple(self._survey.listing.keys[sample] for sample in self._survey.order[rows].tolist())

    def open_rows(self, fields: Sequence[str]) -> Rows:
        """Returns a reader of the folder's files in the place of one of the packed file."""
        return Rows(fields, FolderStore(self.file, self._survey, self.name_of))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packing": None}


def _header(source: Path, survey: Survey, identity: str) -> PackedFile:
    """Returns the header that the packed file of a survey will have, as far as a loader looks at it."""
    plan, listing = survey.plan, survey.listing
    assert plan is not None and survey.headers is not None, "there are images"
    shapes = _shapes(survey)
    num_bytes, count = survey.dataset_bytes["images"], survey.num_samples
    extent = RaggedExtent(0, num_bytes, min(survey.options.chunk_bytes, num_bytes), count)
    fields: dict[str, Field] = {
        "images": RaggedField(
            "images", plan.dtype.newbyteorder("<"), common_shape(shapes), ragged=extent, shard_bytes=(num_bytes,)
        )
    }
    if (labels := listing.columns.get("labels")) is not None:
        names = tuple(labels.attrs.get("names", ()))
        fields["labels"] = Field("labels", labels.values.dtype, labels.values.shape[1:], names=names)
    return PackedFile(
        path=source,
        version=1,
        num_rows=count,
        fields=fields,
        splits={},
        header_digest=identity,
        shuffled=survey.options.shuffle,
        seed=survey.options.seed,
        identity=FileIdentity(0, 0, 0, 0, 0),
        attrs={},
        shards=Shards.of_file(source.name, identity, count, num_bytes, None, extent.chunk_rows),
    )


def _shapes(survey: Survey) -> NDArray[np.int32]:
    """Returns the shape of each row's image, int32 (N, 3)."""
    assert survey.plan is not None and survey.headers is not None, "there are images"
    sizes = row_sizes(survey.plan, survey.headers[survey.order])
    channels = np.full((len(sizes), 1), survey.plan.channels)
    return np.concatenate([sizes, channels], axis=1).astype(np.int32)


class FolderStore(Store):
    """The rows of a dataset that are files of a folder, read and encoded one by one as `fastload pack` does.

    Args:
        file: header of the packed file that will be made of them.
        name_of: returns what messages call a row.
    """

    def __init__(self, file: PackedFile, survey: Survey, name_of: Callable[[int], str]) -> None:
        super().__init__(file, [], "pread")
        listing, order = survey.listing, survey.order
        assert survey.plan is not None and survey.headers is not None and listing.files is not None, "there are images"
        self._name_of, self._headers, self._samples = name_of, survey.headers[order], order
        self._encoder = RowEncoder(listing.files, None, survey.plan)
        own, made = jpegs_kept_and_made(survey.plan, order, self._headers)
        self._values: dict[str, NDArray[Any]] = {
            "images_offset": np.arange(len(order)),  # the numbers of the rows
            "images_bytes": survey.row_lengths["images"],
            "images_shape": _shapes(survey),
            "images_encoding": np.where(own | made, JPEG, 0),
            "images_orientation": np.where(own, self._headers["jpeg"], 1),
        }
        if (labels := listing.columns.get("labels")) is not None:
            self._values["labels"] = np.ascontiguousarray(labels.values[order])

    def holding(self, located: Located, fields: Collection[str] | None = None) -> AbstractContextManager[None]:
        """Does nothing: each file is checked when it is read."""
        return nullcontext()

    def copy(self, name: str, located: Located, out: NDArray[Any]) -> None:
        np.take(self._values[name].astype(out.dtype, copy=False), located.rows, axis=0, out=out, mode="clip")

    def encoded(
        self, name: str, index: LocatedIndex, memory: NDArray[np.uint8] | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.uint8] | None]:
        taken = [np.frombuffer(self._encoded(int(row)), np.uint8) for row in index.offset]
        index.bytes[:] = [len(data) for data in taken]  # a JPEG that is made is as long as it turns out
        ends = np.cumsum(index.bytes)
        memory = np.empty(int(ends[-1]) if len(ends) else 0, np.uint8) if memory is None else memory
        if len(memory):
            np.concatenate(taken, out=memory[: ends[-1]])
        return memory.ctypes.data + ends - index.bytes, memory

    def _encoded(self, row: int) -> memoryview:
        try:
            return memoryview(self._encoder.encode(int(self._samples[row]), self._headers[row]).image).cast("B")
        except (ImageError, OSError) as error:
            raise self.damaged(row, reason_of(error)) from error

    def damaged(self, row: int, reason: str) -> FastloadError:
        return SourceError(
            f"{self._name_of(row)} {reason}. Repair or remove it; or pack without it: `fastload pack "
            f"{typed(self.file.path)} OUT.h5 --store source --on-error skip`, and give FastLoader that file."
        )
