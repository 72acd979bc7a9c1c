"""`FastLoader`: joins the stages. What a batch holds is decided in `plan`, where its bytes go in `ring`.

plan -> read (announce, gather) -> ring -> device -> transform (echo) -> the training loop
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import numpy as np
import torch
from torch.utils.data import Dataset

from fastload.augment import Augmentation
from fastload.auto_workers import AutoWorkers
from fastload.backend import open_backend
from fastload.batch import Batch
from fastload.cache import StoreFeed
from fastload.cache_choice import CacheOption, choose_cache, say_order_quality
from fastload.dataset import PackedDataset
from fastload.echo import EchoPolicy, open_echo
from fastload.errors import OptionError, StateError
from fastload.feed import Feed
from fastload.inputs import PackedInput, as_input
from fastload.iteration import Counter, Iteration, Stages
from fastload.meter import LoaderStats, Probe
from fastload.open_feed import FeedOptions, open_feed
from fastload.plan import (
    ChunkWindow,
    Echo,
    Ends,
    EpochPlan,
    Pace,
    PlanState,
    Shuffle,
    check_state,
    resolve_ends,
    state_from_dict,
    state_to_dict,
    with_shares_of,
)
from fastload.position import Position, resumed
from fastload.read import Read
from fastload.share import ShareOption, check_share, resolve_share
from fastload.transforms import check_pipeline
from fastload.transforms.coordinates import Coordinates
from fastload.transforms.size_making import SizeMaking, size_making

__all__ = ["Batch", "FastLoader"]


class FastLoader:
    """Batches of a packed file, in order, read ahead into memory that is used again and again.

    A batch is a `Batch`: images (B, C, H, W) in channels_last memory, uint8 unless a transform changes that; masks
    (B, H, W); other fields (B, ...). It belongs to the caller, who may write to it and keep it as long as they like;
    who keeps many gets copies, and the loader gets slower.

    Threads read a packed file. Where a sample takes Python code, because the `PackedDataset` has a transform or the
    dataset is another one, worker processes run it and lay the samples into shared memory; a batch then has what the
    samples have, a tuple or a dict of it (`DictBatch`). Processes are started as `multiprocessing.set_start_method`
    says, else by a forkserver (in a notebook by fork), so a script begins its work under `if __name__ == "__main__":`.
    Random numbers that such code draws from `random`, `numpy.random` and `torch` depend on seed, epoch, rank and step,
    not on the workers.

    Each `iter()` after the first is the next epoch, unless `set_epoch` or `load_state_dict` came in between; it ends
    the iteration before it.

    Args:
        source: path of a packed file, a `PackedDataset` (for a split, other fields, a subset, a Python transform), or
            any map-style dataset.
        batch_size: samples in a batch on this rank.
        shuffle, ends, seed: as in `EpochPlan`; shuffle=True chooses by how the file was packed.
        share: "auto", (rank, world_size), or None for all rows; see `resolve_share`.
        workers: threads that read, or processes that run Python; None: one for each CPU that this rank may use, at
            most 16, or 2 where they only copy; "auto" begins with that, and starts more processes for an epoch where
            the last one was waited for and they wait themselves, for a disk or a network. What a batch holds does not
            depend on it.
        device: None or "cpu" leaves batches where they were read; "cuda" copies them beside the computation.
        transform: list of transforms, run on the device, drawn anew for each sample, epoch and echo.
        echo: times each batch is used, augmented anew each time; `MixedEcho` keeps the uses of a batch apart; "auto"
            chooses the times for each epoch, 1 to 4, from the last one's waits, and begins with 1.
        cache: "device" reads all rows once, at the first `iter()`, and keeps them in device memory; every epoch is
            then a gather there. Where they do not fit on each of several ranks, each keeps a fixed share, and the
            order is another one, which a warning tells. "host" keeps them in pinned memory, each rank its own copy;
            "auto" chooses device, host or None by what is free, and logs why. Until `close()`.
        read: "map", or "pread" for file systems where other machines may truncate the file.

    Raises:
        OptionError: an argument has no meaning, or there is not one whole batch.
        MissingFileError, FormatError, FileChangedError: the file is not there, cannot be read, or changed.
        ShareError: rank and world size cannot be known; (later, with echo="auto") a rank does not answer.
        WorkerError: (while iterating) the user's code raised, or a worker process died.
        SharedMemoryError: (while iterating) worker processes cannot share the memory of so many batches.
        CacheError: the rows to be kept are larger than memory.
    """

    _is_finalizing = staticmethod(sys.is_finalizing)  # found here when the globals are gone

    def __init__(
        self,
        source: str | os.PathLike[str] | PackedDataset | Dataset[Any],
        batch_size: int,
        *,
        shuffle: Shuffle = True,
        ends: Ends | None = None,
        seed: int = 0,
        share: ShareOption = "auto",
        workers: int | Literal["auto"] | None = None,
        device: str | torch.device | None = None,
        transform: Sequence[Any] | None = (),
        echo: Echo = 1,
        cache: CacheOption = None,
        read: Read = "map",
    ) -> None:
        data = as_input(source)
        if read not in ("map", "pread"):
            raise OptionError(f'read={read!r} is not known; choose "map" or "pread"')
        if workers == 0 and data.runs_python:
            raise OptionError(
                "workers=0: the loader runs Python in processes, 1 or more. To debug a transform, look at dataset[0] "
                "in this process."
            )
        self._auto = AutoWorkers() if isinstance(workers, str) and workers == "auto" else None
        if workers is not None and self._auto is None:
            _check_whole("workers", workers, least=1, others=', "auto" or None')
        self.batch_size = batch_size
        self.echo = echo
        self._read: Read = read
        self._share_option = share
        self._share = resolve_share(share)
        self._echo = open_echo(echo, self._share)
        self._workers = None if isinstance(workers, str) else workers
        self._backend = open_backend(device)
        self._cache = choose_cache(cache, data, self._backend, self._share)
        self._shuffle = data.resolve_shuffle(shuffle, kept=self._cache.place is not None)
        if isinstance(data, PackedInput) and data.runs_python:
            # Worker processes read for themselves.
            dataset = data.dataset.reading(read)
            if isinstance(self._shuffle, ChunkWindow):
                dataset.expect_window(self._shuffle.chunks)
            data = PackedInput(dataset)
        self._data = data
        transform = () if transform is None else transform
        self._sizing = self._sizing_of(transform)
        self._check_transforms(transform)
        self._seed = seed
        self._augmentation = Augmentation(
            tuple(transform), seed, self._share.rank, data.ignore_index, self._coordinates()
        )
        if self._sizing is not None:
            # On the CPU flips cost nothing more there; elsewhere each echo flips anew.
            self._sizing = self._sizing.with_flips() if self._in_threads else self._sizing
            self._augmentation = replace(self._augmentation, done=self._sizing.count)
        self._ends = ends
        # The next iteration, when it is already decided; None: the epoch after the last one's, from its beginning.
        self._next: Position | None = Position(self._new_plan(0))
        self._last = self._next
        self._finished: Position | None = None
        self._active: weakref.ref[Iteration] | None = None
        self._stats = Counter()
        self._feed: Feed | None = None
        self._feed_of_parent: Feed | None = None
        self._pid = os.getpid()
        self._require_steps(self._next.plan)
        say_order_quality(self._next.plan, self._share.rank, file_shuffled=data.shuffled)

    def __iter__(self) -> Iterator[Batch]:
        """A new iteration; the one before it, if any, ends."""
        return self.iterate()

    def iterate(self, probe: Probe | None = None) -> Iterator[Batch]:
        """The same as `iter()`, for a `Meter`: tells a probe what each batch takes."""
        self._end_active()
        check_share(self._share_option, self._share)
        self._data.check()
        position = self._decided(self._next or Position(self._new_plan(self._last.plan.epoch + 1)))
        counter = Counter()
        feed = self._open_feed(counter)
        self._next, self._last, self._finished = None, position, None
        self._stats = counter
        planned = self._data.rows_of(position.plan.batches(self._share.rank))
        stages = Stages(
            fields=self._data.fields or (),
            feed=feed,
            backend=self._backend,
            augmentation=self._augmentation if self._at_hand_over else None,
            seed=self._seed,
            rank=self._share.rank,
        )
        ended = functools.partial(_pass_ended, self._echo, self._auto, feed, counter)
        iteration = Iteration(stages, planned, position, self._stats, ended, probe)
        self._active = weakref.ref(iteration)
        return cast("Iterator[Batch]", iteration)  # a DictBatch for samples that are dicts

    def __len__(self) -> int:
        """Batches of the coming iteration on this rank, or of the running one from its beginning, echoes included."""
        if self._next is not None:
            return self._decided(self._next).steps_left
        if (iteration := self._running()) is not None:
            return iteration.num_batches
        return self._decided(Position(self._new_plan(0))).steps_left

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration that of an epoch. A loaded state of that very epoch stays loaded."""
        _check_whole("epoch", epoch, least=0)
        for loaded in (self._next, self._finished):
            if (
                loaded is not None
                and loaded.plan.epoch == epoch
                and (loaded is self._finished or loaded.plan.segments or loaded.steps)
            ):
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
        position = self._decided(self._next or self._last)
        segments, echo_position = position.progress()
        next_echo = None
        if self._echo.chooses:
            # In the loop body of the last step the other ranks may not have done theirs, and are not waited for.
            over = position.finished and self._running() is None
            next_echo = self._echo.next_schedule(0).factor if over else 0
        return state_to_dict(
            PlanState(
                header_digest=self._data.identity(),
                seed=self._seed,
                epoch=position.plan.epoch,
                shuffle=self._shuffle,
                ends=resolve_ends(position.plan.ends, self._shuffle),
                echo=position.uses.factor,
                echo_position=echo_position,
                echo_distance=position.uses.distance,
                next_echo=next_echo,
                segments=segments,
                fixed_shares=position.plan.fixed_shares,
            )
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration the rest of the epoch that was saved, also with another world or batch size.

        An epoch that was finished when it was saved is followed by the next one. Batches that were in use, and were to
        be used again, go on as they would have; where world, batch size or echo differ now they count as done.

        Raises:
            StateError: the state belongs to another file, seed or shuffle, or is damaged.
        """
        if not isinstance(state, Mapping):
            raise StateError(f"load_state_dict() takes what state_dict() gave, a dict; got {type(state).__name__}.")
        loaded = state_from_dict(dict(state))
        check_state(loaded, header_digest=self._data.identity(), seed=self._seed, shuffle=self._shuffle)
        loaded = with_shares_of(self._new_plan(loaded.epoch), loaded, keeps_all=self._cache.place == "device")
        plan = self._new_plan(loaded.epoch, loaded.segments, fixed_shares=loaded.fixed_shares)
        position = resumed(loaded, plan, self._echo.schedule_of(plan.num_steps, loaded.echo))
        self._end_active()
        self._cache = replace(self._cache, fixed_shares=plan.fixed_shares)
        self._last, self._next, self._finished = position, position, None
        self._echo.adopt(loaded.echo)
        if position.plan.num_steps == 0:
            self._finished, self._next = position, Position(self._new_plan(loaded.epoch + 1))
            self._echo.adopt(loaded.next_echo or loaded.echo)

    @property
    def stats(self) -> LoaderStats:
        """What the current iteration, or the last one, did."""
        return self._stats.snapshot()

    def close(self) -> None:
        """Ends a running iteration and closes the file. Batches handed over stay valid, and `iter()` opens it again."""
        if self._is_finalizing():
            return  # from a generator that outlived its script; see Iteration.close
        self._end_active()
        if self._feed is not None and self._pid == os.getpid():
            self._feed.close()
            self._feed = None

    def __reduce__(self) -> Any:
        raise TypeError(
            "a FastLoader holds open files and threads or processes, and can be neither pickled nor copied; make "
            "another one of the same dataset, and give it this one's state_dict()"
        )

    def _running(self) -> Iteration | None:
        iteration = self._active() if self._active is not None else None
        return iteration if iteration is not None and iteration.running else None

    def _decided(self, position: Position) -> Position:
        """The same position, with the echo factor of its epoch."""
        if position.schedule is None:
            if (iteration := self._running()) is not None:
                iteration.end_measuring()
            position.schedule = self._echo.next_schedule(position.plan.num_steps)
        return position

    def _end_active(self) -> None:
        active = self._active() if self._active is not None else None
        self._active = None
        if active is not None:
            active.displace()

    def _new_plan(self, epoch: int, segments: Sequence[Any] = (), *, fixed_shares: bool | None = None) -> EpochPlan:
        return EpochPlan(
            rows=self._data.plan_rows,
            chunk_rows=self._data.chunk_rows,
            seed=self._seed,
            epoch=epoch,
            world_size=self._share.world_size,
            batch_size=self.batch_size,
            shuffle=self._shuffle,
            ends=self._ends,
            segments=tuple(segments),
            fixed_shares=self._cache.fixed_shares if fixed_shares is None else fixed_shares,
        )

    def _require_steps(self, plan: EpochPlan) -> None:
        if plan.num_steps:
            return
        share = f"{len(plan.rows):,} samples" + (f" over {plan.world_size} ranks" if plan.world_size > 1 else "")
        mend = "Choose a smaller batch_size, or ends='pad' or 'exact'." if len(plan.rows) else "Choose another split."
        raise OptionError(
            f"{self._data.name}: {share} do not make one batch of {plan.batch_size} with ends={plan.ends!r}. {mend}"
        )

    def _check_transforms(self, transform: Any) -> None:
        """As far as it is known what they get; what Python code makes is looked at before the first batch."""
        if not isinstance(transform, Sequence):
            check_pipeline(transform, (0, 0, 0), torch.uint8, ())
        elif transform and isinstance(self._data, PackedInput) and not self._data.runs_python:
            if "images" not in self._data.dataset.fields:
                raise OptionError(
                    f"transform: the batch has no images, its fields are {', '.join(self._data.dataset.fields)}. "
                    f"Add images to fields, or leave transform out."
                )
            spec, done = self._data.image_spec(), 0
            if self._sizing is not None:
                spec = (self._sizing.spec.channels, self._sizing.spec.height, self._sizing.spec.width), spec[1]
                done = self._sizing.count
            check_pipeline(transform, *spec, self._data.dataset.fields, self._coordinates(), done=done)

    def _sizing_of(self, transform: Any) -> SizeMaking | None:
        """What makes one size of images that have several; of JPEGs of one size, what makes decoding cheaper."""
        data = self._data
        if (
            not isinstance(data, PackedInput)
            or data.runs_python
            or not data.stored
            or not isinstance(transform, Sequence)
        ):
            return None
        if "images" not in data.dataset.fields:
            if data.varied:
                raise OptionError(
                    f"{data.name}: its masks differ in size, and are brought to one size with their images. Add images "
                    f"to fields."
                )
            return None
        (channels, _, _), dtype = data.image_spec()
        if data.varied:
            if self._cache.place is not None:
                raise OptionError(
                    f"{data.name}: cache={self._cache.place!r} keeps images of one size, and these differ in size. "
                    f"Leave cache out, or pack them with `fastload pack --size`."
                )
            return size_making(transform, channels, dtype, what=data.name)
        if self._cache.place is not None or self.echo != 1:
            return None  # each echo cuts anew
        try:
            return size_making(transform, channels, dtype, what=data.name)
        except OptionError:
            return None

    def _coordinates(self) -> dict[str, Coordinates]:
        return self._data.coordinates() if isinstance(self._data, PackedInput) else {}

    @property
    def _at_hand_over(self) -> bool:
        """Whether a batch is augmented when it is handed over; rows that are kept are gathered by the same kernel."""
        left = len(self._augmentation.transforms) - self._augmentation.done
        return self._cache.place is not None or (left > 0 and not self._in_threads)

    @property
    def _in_threads(self) -> bool:
        """Whether the threads that read also augment: on the CPU, where no echo needs the batch as it was."""
        return (
            self._backend is None
            and isinstance(self._data, PackedInput)
            and not self._data.runs_python
            and self.echo == 1
            and self._augmentation.in_threads
        )

    def _open_feed(self, counter: Counter) -> Feed:
        """Kept from one epoch to the next, but not across a fork."""
        if self._pid != os.getpid():
            # Kept, though of no use: to free what lies on the device takes a device, which a forked child has not.
            self._feed_of_parent = self._feed if isinstance(self._feed, StoreFeed) else None
            self._feed, self._pid = None, os.getpid()
        workers = self._workers if self._auto is None else self._auto.number
        if self._feed is not None and not (self._feed.usable and _has(self._feed, workers)):
            self._feed.close()
            self._feed = None
        if self._feed is None:
            options = FeedOptions(
                data=self._data,
                batch_size=self.batch_size,
                read=self._read,
                workers=workers,
                auto=self._auto is not None,
                num_steps=self._new_plan(0).num_steps,
                shuffle=self._shuffle,
                share=self._share,
                backend=self._backend,
                cache=self._cache,
                augmentation=self._augmentation,
                in_threads=self._in_threads,
                sizing=self._sizing,
            )
            self._feed, counter.bytes_read = open_feed(options)
        return self._feed


def _has(feed: Feed, workers: int | None) -> bool:
    """Whether a feed has so many processes, if it has any; None: as many as by default."""
    force = feed.workforce() if workers is not None else None
    return force is None or force.number == workers


def _pass_ended(echo: EchoPolicy, auto: AutoWorkers | None, feed: Feed, counter: Counter, pace: Pace) -> None:
    """Tells those who decide on the next epoch. No method: a pass must not keep its loader."""
    echo.ended(pace, counter.echo)
    force = feed.workforce() if auto is not None else None
    if auto is not None and force is not None:
        auto.ended(
            force,
            batches=pace.batches,
            elapsed_s=pace.stall_s + pace.work_s,
            first_s=counter.first_waited_s,
        )


def _check_whole(name: str, value: object, *, least: int, others: str = "") -> None:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < least:
        raise OptionError(f"{name}={value!r}: give a whole number, {least} or more{others}")
