"""`FastLoader`: joins the stages. What a batch holds is decided in `plan`, where its bytes go in `ring`.

plan -> read (announce, gather) -> ring -> device -> transform (echo) -> the training loop
"""

from __future__ import annotations

import functools
import hashlib
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.cpus import available_cpus
from fastload.dataset import PackedDataset, as_handed_over
from fastload.device import open_backend
from fastload.errors import OptionError, StateError
from fastload.format import PackedFile
from fastload.groups import group_size
from fastload.iteration import SLOTS_IN_COPY, Batch, Counter, Iteration, Position, Stages
from fastload.meter import LoaderStats
from fastload.plan import (
    ChunkWindow,
    Ends,
    EpochPlan,
    PlannedBatch,
    PlanState,
    ResolvedShuffle,
    Shuffle,
    check_state,
    resolve_ends,
    resolve_shuffle,
    state_from_dict,
    state_to_dict,
)
from fastload.read import Read, RowReader, image_axes
from fastload.read.identity import check_path
from fastload.read.readahead import ReadAhead, has_read_ahead
from fastload.ring import SLACK, Ring, SlotField, split_loose
from fastload.share import ShareOption, check_share, local_world_size, resolve_share
from fastload.transforms import check_pipeline

_MAX_WORKERS = 2

__all__ = ["Batch", "FastLoader"]


class FastLoader:
    """Batches of a packed file, in order, read ahead by threads into memory that is used again and again.

    A batch is a `Batch`: images (B, C, H, W) in channels_last memory, uint8 unless a transform changes that; masks
    (B, H, W); other fields (B, ...). It belongs to the caller, who may write to it and keep it as long as they like;
    who keeps many gets copies, and the loader gets slower.

    Each `iter()` after the first is the next epoch, unless `set_epoch` or `load_state_dict` came in between; it ends
    the iteration before it.

    Args:
        source: path of a packed file, or a `PackedDataset` (for a split, other fields, a subset).
        batch_size: samples in a batch on this rank.
        shuffle, ends, seed: as in `EpochPlan`; shuffle=True chooses by how the file was packed.
        share: "auto", (rank, world_size), or None for all rows; see `resolve_share`.
        workers: threads that read; None chooses.
        device: None or "cpu" leaves batches where they were read; "cuda" copies them beside the computation.
        transform: list of transforms, run on the device, drawn anew for each sample, epoch and echo.
        echo: times each batch is used.
        cache: None; other values belong to a later release.
        read: "map", or "pread" for file systems where other machines may truncate the file.

    Raises:
        OptionError: an argument has no meaning, or there is not one whole batch.
        MissingFileError, FormatError, FileChangedError: the file is not there, cannot be read, or changed.
        ShareError: rank and world size cannot be known.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | PackedDataset,
        batch_size: int,
        *,
        shuffle: Shuffle = True,
        ends: Ends | None = None,
        seed: int = 0,
        share: ShareOption = "auto",
        workers: int | None = None,
        device: str | torch.device | None = None,
        transform: Sequence[Any] = (),
        echo: int = 1,
        cache: object = None,
        read: Read = "map",
    ) -> None:
        self._dataset = _as_dataset(source)
        self._file = self._dataset.file
        if cache is not None:
            raise OptionError(
                f"cache={cache!r}: this release has no cache of its own; leave it out. The kernel keeps the pages of a "
                f"packed file in memory while there is room."
            )
        if read not in ("map", "pread"):
            raise OptionError(f'read={read!r} is not known; choose "map" or "pread"')
        _check_whole("echo", echo, least=1)
        if workers is not None:
            _check_whole("workers", workers, least=1)
        self.batch_size = batch_size
        self.echo = echo
        self._read: Read = read
        self._share_option = share
        self._share = resolve_share(share)
        self._workers = workers or _default_workers()
        self._backend = open_backend(device)
        self._check_transforms(transform)
        self._transforms = tuple(transform)
        self._selected = None if isinstance(self._dataset.rows, range) else self._dataset.rows
        self._chunk_rows = 0 if self._selected is not None else self._file.fields[_main_field(self._dataset)].chunk_rows
        self._shuffle = _resolve_shuffle(shuffle, self._file.shuffled, self._chunk_rows)
        self._seed = seed
        self._ends = ends
        # The next iteration, when it is already decided; None: the epoch after the last one's, from its beginning.
        self._next: Position | None = Position(self._new_plan(0))
        self._last = self._next
        self._finished: Position | None = None
        self._active: weakref.ref[Iteration] | None = None
        self._stats = Counter()
        self._reader: RowReader | None = None
        self._ring: Ring | None = None
        self._pid = os.getpid()
        self._require_steps(self._next.plan)

    def __iter__(self) -> Iterator[Batch]:
        """A new iteration; the one before it, if any, ends."""
        self._end_active()
        check_share(self._share_option, self._share)
        check_path(self._file)
        position = self._next or Position(self._new_plan(self._last.plan.epoch + 1))
        self._next, self._last, self._finished = None, position, None
        self._stats = Counter()
        planned = position.plan.batches(self._share.rank)
        if self._selected is not None:
            planned = _with_rows_of(self._selected, planned)
        iteration = Iteration(self._open(), planned, position, self._stats)
        self._active = weakref.ref(iteration)
        return iteration

    def __len__(self) -> int:
        """Batches of the coming iteration on this rank, or of the running one from its beginning, echoes included."""
        if self._next is not None:
            return self._next.batches_left(self.echo)
        if self._active is not None and (iteration := self._active()) is not None and iteration.running:
            return iteration.num_batches
        return self._new_plan(0).num_steps * self.echo

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration that of an epoch. A loaded state of that very epoch stays loaded."""
        _check_whole("epoch", epoch, least=0)
        for loaded in (self._next, self._finished):
            if loaded is not None and loaded.plan.epoch == epoch and (loaded is self._finished or loaded.plan.segments):
                self._next = loaded
                return
        self._next = Position(self._new_plan(epoch))

    @property
    def epoch(self) -> int:
        """The epoch of the coming iteration if it is decided, else of the last one."""
        return (self._next or self._last).plan.epoch

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, the same on every rank; numbers, strings and lists only.

        Taken in the loop body it counts the batch in hand as done.
        """
        position = self._next or self._last
        return state_to_dict(
            PlanState(
                header_digest=self._data_identity(),
                seed=self._seed,
                epoch=position.plan.epoch,
                shuffle=self._shuffle,
                ends=resolve_ends(position.plan.ends, self._shuffle),
                echo=self.echo,
                echo_position=position.echoes,
                segments=position.plan.segments_after(position.steps),
            )
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration the rest of the epoch that was saved, also with another world or batch size.

        An epoch that was finished when it was saved is followed by the next one. Echoes of a batch that were done are
        left out, unless the batches are other ones now.

        Raises:
            StateError: the state belongs to another file, seed or shuffle, or is damaged.
        """
        if not isinstance(state, Mapping):
            raise StateError(f"load_state_dict() takes what state_dict() gave, a dict; got {type(state).__name__}.")
        loaded = state_from_dict(dict(state))
        check_state(loaded, header_digest=self._data_identity(), seed=self._seed, shuffle=self._shuffle)
        self._end_active()
        plan = self._new_plan(loaded.epoch, loaded.segments)
        same = not loaded.segments or loaded.segments[-1][:2] == (self._share.world_size, self.batch_size)
        echoes = loaded.echo_position if same and loaded.echo == self.echo else 0
        position = Position(plan, echoes=echoes)
        self._last, self._next, self._finished = position, position, None
        if plan.num_steps == 0:
            self._finished, self._next = position, Position(self._new_plan(loaded.epoch + 1))

    @property
    def stats(self) -> LoaderStats:
        """What the current iteration, or the last one, did."""
        return self._stats.snapshot()

    def close(self) -> None:
        """Ends a running iteration and closes the file. Batches handed over stay valid, and `iter()` opens it again."""
        self._end_active()
        reader, self._reader, self._ring = self._reader, None, None
        if reader is not None:
            reader.close()

    def _end_active(self) -> None:
        active = self._active() if self._active is not None else None
        self._active = None
        if active is not None:
            active.displace()

    def _new_plan(self, epoch: int, segments: Sequence[Any] = ()) -> EpochPlan:
        rows = self._dataset.rows
        return EpochPlan(
            rows=rows if isinstance(rows, range) else range(len(rows)),
            chunk_rows=self._chunk_rows,
            seed=self._seed,
            epoch=epoch,
            world_size=self._share.world_size,
            batch_size=self.batch_size,
            shuffle=self._shuffle,
            ends=self._ends,
            segments=tuple(segments),
        )

    def _require_steps(self, plan: EpochPlan) -> None:
        if plan.num_steps:
            return
        share = f"{len(plan.rows):,} samples" + (f" over {plan.world_size} ranks" if plan.world_size > 1 else "")
        mend = "Choose a smaller batch_size, or ends='pad' or 'exact'." if len(plan.rows) else "Choose another split."
        raise OptionError(
            f"{self._file.path}: {share} do not make one batch of {plan.batch_size} with ends={plan.ends!r}. {mend}"
        )

    def _check_transforms(self, transform: Any) -> None:
        if transform or not isinstance(transform, Sequence):
            if "images" not in self._dataset.fields:
                raise OptionError(
                    f"transform: the batch has no images, its fields are {', '.join(self._dataset.fields)}. "
                    f"Add images to fields, or leave transform out."
                )
            images = _image_shape(self._file)
            dtype = torch.from_numpy(np.empty(0, self._file.fields["images"].dtype.newbyteorder("="))).dtype
            check_pipeline(transform, images, dtype, self._dataset.fields)

    def _data_identity(self) -> str:
        """Of the rows this loader reads: a state of another split must not be taken for one of this."""
        rows = self._dataset.rows
        if self._selected is not None:
            return f"{self._file.header_digest}/{hashlib.sha256(self._selected.tobytes()).hexdigest()[:16]}"
        whole = rows == range(self._file.num_rows)
        return self._file.header_digest if whole else f"{self._file.header_digest}/{rows[0]}-{rows[-1]}"

    def _open(self) -> Stages:
        """The stages; reader and ring are kept from one epoch to the next, but not across a fork."""
        fields = self._dataset.layout()
        batch_bytes = sum(SlotField(name, (self.batch_size, *shape), dtype).nbytes for name, shape, dtype in fields)
        # On the device each batch is copied by itself, and its slot returns by itself.
        group = 1 if self._backend else group_size(batch_bytes, self._new_plan(0).num_steps)
        layout = [SlotField(name, (group * self.batch_size, *shape), dtype) for name, shape, dtype in fields]
        if self._pid != os.getpid():
            self._reader, self._ring, self._pid = None, None, os.getpid()
        windowed = isinstance(self._shuffle, ChunkWindow)
        if self._reader is None:
            # A window's chunks, and those of the next one that it is read into already.
            chunks = 2 * self._shuffle.chunks if isinstance(self._shuffle, ChunkWindow) else self._workers
            self._reader = RowReader(self._file, [field.name for field in layout], self._read, cache_chunks=chunks)
        if self._backend is None:
            in_slots, loose = split_loose(layout)
            if self._ring is None:
                self._ring = Ring(in_slots, SLACK + self._workers)
        else:
            loose = []
            if self._ring is None:
                facts = [SlotField("row", (self.batch_size,), np.dtype(np.int64))]
                facts.append(SlotField("valid", (self.batch_size,), np.dtype(np.bool_)))
                self._ring = Ring(layout + facts, SLOTS_IN_COPY + 1 + self._workers, self._backend.allocate)
        reader, rows = self._reader, self._dataset.rows

        def read_ahead() -> ReadAhead:
            return ReadAhead(
                reader.fd,
                [self._file.fields[field.name] for field in layout],
                rows if isinstance(rows, range) else range(self._file.num_rows),
                chunk_rows=self._chunk_rows if windowed else 0,
            )

        masks = self._file.fields.get("masks")
        return Stages(
            fields=self._dataset.fields,
            reader=reader,
            ring=self._ring,
            loose=loose,
            present=functools.partial(as_handed_over, self._file),
            backend=self._backend,
            transforms=self._transforms,
            seed=self._seed,
            ignore_index=int(masks.attrs.get("ignore_index", 0)) if masks else 0,
            echo=self.echo,
            group=group,
            workers=self._workers,
            # In file order the kernel's own read-ahead is better: cold, 19,500 images/s against 11,300 with ours.
            read_ahead=read_ahead if has_read_ahead() and self._shuffle is not False else None,
        )


def _as_dataset(source: Any) -> PackedDataset:
    if isinstance(source, PackedDataset):
        if source.transform is not None:
            raise OptionError(
                "a PackedDataset with a Python transform needs worker processes, which FastLoader does not have in "
                "this release. Give FastLoader a transform=[...] on batches, or use a plain DataLoader."
            )
        return source
    if isinstance(source, (str, os.PathLike)):
        return PackedDataset(os.fspath(source))
    if isinstance(source, (list, tuple)):
        raise OptionError(
            "several files in one FastLoader are not in this release: pack them into one file (`fastload pack`), or "
            "use torch.utils.data.ConcatDataset of PackedDatasets in a plain DataLoader."
        )
    raise OptionError(
        f"source: expected the path of a packed file or a PackedDataset, got {type(source).__name__}. Other datasets "
        f"are not in this release: use a plain DataLoader for them, or `fastload pack` their files."
    )


def _main_field(dataset: PackedDataset) -> str:
    """The field whose chunks decide how rows are shuffled."""
    return "images" if "images" in dataset.file.fields else next(iter(dataset.file.fields))


def _resolve_shuffle(shuffle: Shuffle, file_shuffled: bool, chunk_rows: int) -> ResolvedShuffle:
    # Without chunks, as in a subset or in contiguous storage, there is no window to read.
    chosen_by_file = shuffle is True or shuffle == "auto"
    return "full" if chosen_by_file and not chunk_rows else resolve_shuffle(shuffle, file_shuffled)


def _image_shape(file: PackedFile) -> tuple[int, int, int]:
    """(C, H, W)."""
    axes, shape = image_axes(file), file.fields["images"].shape
    if axes == "HW":
        return 1, shape[0], shape[1]
    return (shape[2], shape[0], shape[1]) if axes == "HWC" else (shape[0], shape[1], shape[2])


def _with_rows_of(selected: NDArray[np.int64], planned: Iterator[PlannedBatch]) -> Iterator[PlannedBatch]:
    """The planned positions of a subset as rows of the file."""
    return (batch._replace(rows=selected[batch.rows]) for batch in planned)


def _default_workers() -> int:
    return max(1, min(_MAX_WORKERS, available_cpus() // local_world_size()))


def _check_whole(name: str, value: object, *, least: int) -> None:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < least:
        raise OptionError(f"{name}={value!r}: give a whole number, {least} or more")
