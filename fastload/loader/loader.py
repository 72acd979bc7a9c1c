"""`FastLoader`: joins the stages of the data path and keeps them from one epoch to the next.

    plan -> producer (read, or make by workers; ring; device) -> transform (echo) -> training loop

`plan` decides which rows each batch holds; `iteration.py` runs one pass over them.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from typing import Any, Self, cast

import numpy as np
import torch
from torch.utils.data import Dataset

from fastload.distributed.ranks import ShareOption, asks_process, check_share, process_group
from fastload.errors import OptionError
from fastload.loader.batch import Batch
from fastload.loader.echo_policy import open_echo, pass_ended
from fastload.loader.iteration import Iteration, PassCounter
from fastload.loader.loader_options import BatchOption, LoaderOptions, Source, WorkersOption, find_share, resolve
from fastload.loader.unknown_arguments import is_meant_as_argument, reject_unknown_arguments
from fastload.plan import ChunkWindow, Echo, Ends, Shuffle
from fastload.plan.cursor import EpochCursor, Position, resumed
from fastload.prefetch.auto_workers import AutoWorkers
from fastload.prefetch.loader_plan import LoaderPlan
from fastload.prefetch.producer import Producer
from fastload.prefetch.recipe import make_recipe
from fastload.prefetch.row_cache import CacheOption
from fastload.prefetch.work import Where
from fastload.system.text import counted, object_html, object_text
from fastload.timing.clocks import InFlight
from fastload.timing.probe import LoaderStats, Probe

__all__ = ["Batch", "FastLoader"]


class FastLoader:
    """Iterates over the batches of a packed file, or of any map-style dataset, read ahead into reused memory.

    A batch is a `Batch`, a tuple of tensors: images (B, C, H, W) in channels_last memory, uint8 (or uint16, as packed)
    unless a transform changes that; masks uint8 or uint16 (B, H, W); labels int64 (B,); other fields (B, ...). Its
    attributes `rows`, `valid` and `global_valid` say which samples it holds. It belongs to the caller, who may write to
    it and keep it; if many are kept, the loader copies batches and gets slower.

    Threads read a packed file. Where samples need Python code (a `PackedDataset` with a transform, or another dataset),
    worker processes run it and write the samples to shared memory; a batch then has the fields of the samples, as a
    tuple or as a dict (`DictBatch`). Processes start as `multiprocessing.set_start_method` says,
    else by a forkserver (in a notebook by fork), so a script begins its work under `if __name__ == "__main__":`. Random
    numbers that such code draws from `random`, `numpy.random` and `torch` depend on seed, epoch, rank and step, not on
    the workers.

    Each `iter()` after the first one begins the next epoch, unless `set_epoch` or `load_state_dict` was called before;
    it ends the iteration before it. While the last batches of an epoch are in use, the first of the next are read into
    the same memory, and thrown away if another iteration follows. Threads and processes stay until
    `close()`, or until the loader is gone.

    Args:
        source: path of a packed file, or a list of several that are alike; a `PackedDataset` (for a split, other
            fields, a subset, a Python transform, and for how a file is read: `read`, `check`, `on_damage`), or any
            map-style dataset. Also a folder, .zip or .tar of images, read as it is while it is packed; see
            `PackedDataset.from_folder`.
        batch_size: samples in a batch on this rank.
        shuffle: True (chosen by how the file was packed), "full", "chunk", a `ChunkWindow` or False; see `EpochPlan`.
            `Weighted` draws samples by weight or class, `ClassBatches` makes batches of some classes.
        ends: how an incomplete last batch is treated: "drop" leaves it out; "exact" makes it shorter, so that each row
            comes once (a rank without rows in the last step repeats one, with `valid` False); "pad" fills it with
            repeats whose `valid` is False, for code that needs one shape. None: "drop" if shuffled, else "exact".
        seed: of the order and of all random numbers.
        share: the rows of this rank: (rank, world_size), None for all rows, or "auto": see `resolve_share`, which is
            asked again at the first `iter()` or `len()`, so the loader may be made before the process group. "node":
            as "auto", but the ranks of a node share the same rows in every epoch, reshuffled among them, so a node
            reads and keeps the same chunks. This weakens the shuffle; a warning says by how much. Nodes come from
            torchrun, or from the process group, for which every rank has to make such a loader. Where the device caches
            fixed shares, ranks read these instead. "elastic": as "auto", but ranks share each step, not the epoch: its
            world size * batch_size rows are the same for any number of ranks, also in an epoch that other ranks began;
            so are the random numbers of transforms, and of Python code that makes samples one by one.
        workers: number of reading threads, or of processes that run Python. None: 2 threads for plain copies, up to 12
            for a GPU (one CPU stays free where there are more than 2, and fewer read where their batches would pin more
            than 1 GiB), otherwise one per CPU that this rank may use, at most 16. "auto" begins with that, and starts
            more processes for an epoch if in the last one the loop waited while the processes waited for a disk or a
            network. `Workers(..., timeout=30)` also limits how long a batch is waited for. The contents of batches do
            not depend on it.
        device: None or "cpu" leaves batches in host memory; "cuda" copies them while the model computes. A batch is
            then ready on the stream that was current at `next()`.
        transform: list of transforms (`fastload.transforms`), run on the device, drawn anew for each sample, epoch and
            echo.
        echo: how often each batch is used, augmented anew each time. `MixedEcho` puts other batches between the uses of
            one; "auto" chooses 1 to 4 for each epoch, from the waits of the last one, and begins with 1.
        cache: "device" reads all rows once, at the first `iter()`, into device memory, from which every epoch is
            gathered. Where they do not fit on each of several ranks, each keeps a fixed share, which changes the order;
            a warning says so. "host" uses pinned memory, with a copy on each rank; "auto" chooses device, host or None
            by how much memory is free, and logs why. Kept until `close()`.
        batch: "stack": images of one size, as the file has them or as the first transforms make them. "list" or `List`:
            a list of images of their own sizes. "pad" or `Pad`: the same samples padded to one size. Transforms run on
            each image by itself.

    Raises:
        OptionError: an argument is invalid, or the rows do not fill one batch.
        MissingFileError, FormatError, FileChangedError: the file is absent, cannot be read, or changed.
        DamagedRowError: (while iterating) a row has changed since it was packed.
        ShareError: rank and world size are not known, or with "node" the nodes, or nodes are not alike; (later, with
            echo="auto") a rank does not answer.
        WorkerError: (while iterating) the user's code raised an error, or a worker process died.
        WorkerTimeoutError: (while iterating) no batch came within the timeout; it is a WorkerError and a TimeoutError.
        SharedMemoryError: (while iterating) there is not enough shared memory for the workers' batches.
        CacheError: the rows to cache are larger than memory.
    """

    _is_finalizing = staticmethod(sys.is_finalizing)  # found here when the globals are gone

    def __init__(
        self,
        source: Source,
        batch_size: int,
        *,
        shuffle: Shuffle = True,
        ends: Ends | None = None,
        seed: int = 0,
        share: ShareOption = "auto",
        workers: WorkersOption = None,
        device: str | torch.device | None = None,
        transform: Sequence[Any] | None = (),
        echo: Echo = 1,
        cache: CacheOption = None,
        batch: BatchOption = "stack",
    ) -> None:
        self._given = LoaderOptions(
            source=source,
            batch_size=batch_size,
            shuffle=shuffle,
            ends=ends,
            seed=seed,
            share=share,
            workers=workers,
            device=device,
            transform=tuple(transform) if isinstance(transform, list) else transform,  # it is read now, and not again
            echo=echo,
            cache=cache,
            batch=batch,
        )
        self._loaded: Mapping[str, Any] | None = None  # by `load_state_dict`, before the first iteration
        self._rank_may_change = True  # until the first iteration
        self._resolve()
        self._active: Callable[[], Iteration | None] = lambda: None  # not kept alive
        # Two threads may begin iterations; the later one's stays. Taken before an iteration's lock, never after it.
        self._lock, self._lock_pid = threading.RLock(), os.getpid()

    def _resolve(self) -> None:
        """Resolves the arguments for the rank as it is known now; the next iteration is the first one."""
        given = self._given
        share, nodes, self._no_share = find_share(given.share)
        self._echo = open_echo(given.echo, share)
        options, self._recipe = resolve(given, share, nodes)
        self._options = options
        self._given = replace(given, source=options.data.dataset)
        self._auto = AutoWorkers() if options.auto_workers else None
        self._epochs = EpochCursor(options.plan, options.data.identity)
        self._in_flight = InFlight(options.backend.clock) if options.backend is not None else None
        self._counter = PassCounter(read=options.data.read_mode)
        self._producer = Producer(options, self._recipe)

    def __new__(cls, *positional: object, **words: object) -> Self:  # also gets arguments that `__init__` does not have
        """Raises OptionError for unknown arguments, such as torch's `DataLoader` has, and names the replacement."""
        accepted = inspect.signature(cls.__init__).parameters
        if not any(one.kind is one.VAR_KEYWORD for one in accepted.values()):
            reject_unknown_arguments(words, accepted, dict(zip(_ARGUMENTS, positional, strict=False)) | words)
        return super().__new__(cls)

    __new__.__signature__ = inspect.signature(__init__)  # type: ignore[attr-defined] # what inspect says of the class

    def __setattr__(self, name: str, value: object) -> None:
        if name in _ARGUMENTS:
            raise OptionError(
                f"loader.{name} cannot be set: batches are read ahead with what the loader was made with. `loader = "
                f"loader.with_({name}=...)` is a loader over the same file that goes on where this one stands."
            )
        if not name.startswith("_") and not hasattr(type(self), name) and is_meant_as_argument(name, _ARGUMENTS):
            reject_unknown_arguments({name: value}, _ARGUMENTS, self._arguments())
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name in _ARGUMENTS and "_given" in self.__dict__:
            return getattr(self._given, name)
        if name in ("sampler", "batch_sampler"):
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}: it plans its own order, so what skips "
                f"batches by a sampler, as Accelerate's skip_first_batches does, has none. Save `loader.state_dict()` "
                f"with the checkpoint; `load_state_dict(state)` then lets the next iteration be the rest of the epoch, "
                f"without reading what came before."
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def with_(self, **changes: Any) -> FastLoader:
        """Returns a loader over the same open file with some arguments changed, which continues at this one's position.

        Within an epoch it yields the rest of it, else the next epoch, with that epoch's random numbers: so batch size,
        transforms and echo can change between epochs or within one, as for progressive resizing. Where the order
        changes (by source, shuffle, seed, batch's `group_by`, or share from or to "elastic"), it begins the epoch anew.

        Raises:
            OptionError, ShareError: as for a new loader.
            StateError: the rest of the epoch cannot be read with other ranks or caches.
        """
        reject_unknown_arguments(changes, _ARGUMENTS, self._arguments() | changes)
        with self._alone():
            self._find_rank()
            made = FastLoader(**self._arguments() | changes)
            if self._has_order_of(made):
                made.load_state_dict(self.state_dict())
            else:
                here = self._decided(self._epochs.last if self._running() is not None else self._epochs.standing)
                made.set_epoch(here.plan.epoch + here.finished)
        return made

    def _arguments(self) -> dict[str, Any]:
        """Returns the arguments by name; none before `__init__` has them."""
        return dict(vars(self._given)) if "_given" in self.__dict__ else {}

    def _has_order_of(self, other: FastLoader) -> bool:
        ours, theirs = self._options.plan, other._options.plan
        order, its = ((plan.shuffle, plan.seed, plan.elastic, plan.groups is None) for plan in (ours, theirs))
        if order != its or self._options.data.identity() != other._options.data.identity():
            return False
        return ours.groups is None or theirs.groups is None or np.array_equal(ours.groups, theirs.groups)

    def __iter__(self) -> Iterator[Batch]:
        """Begins a new iteration; the one before it, if any, ends."""
        return self.iterate()

    def iterate(self, probe: Probe | None = None) -> Iterator[Batch]:
        """Like `iter(loader)`, but records each batch's timing in `probe`, which belongs to a `Meter`."""
        with self._alone():
            return self._iterate(probe)

    def _iterate(self, probe: Probe | None) -> Iterator[Batch]:
        self._find_rank()
        self._rank_may_change = False
        self._end_active()
        self._read_packed()
        options, counter = self._options, PassCounter(in_flight=self._in_flight, read=self._counter.read)
        check_share(self._given.share, options.share)
        options.data.check()
        if options.data.remote is not None:
            counter.used, counter.used_before = options.network_use, options.network_use()
        position = self._decided(self._epochs.coming())
        counter.bytes_read = self._producer.open(self._auto.number if self._auto is not None else None)
        pool = self._producer.pool
        assert pool is not None, "it is open"
        self._epochs.begin(position)
        self._counter = counter
        self._producer.begin(position.plan, probe)
        if probe is not None:
            probe.worker_info = pool.worker_info
            probe.network = counter.network if counter.used is not None else None
        on_end = functools.partial(pass_ended, self._echo, self._auto, pool, counter)
        at_use = self._recipe.at(Where.USE)
        iteration = Iteration(options, self._producer, at_use, position, counter, on_end, probe)
        self._active = weakref.ref(iteration)
        return cast("Iterator[Batch]", iteration)  # a DictBatch for samples that are dicts

    def _read_packed(self) -> None:
        """Switches from a folder to its packed file, if that is complete by now."""
        if (data := self._options.data.newest()) is not self._options.data:
            self._producer.close()
            self._options = replace(self._options, data=data)
            self._recipe, self._counter.read = make_recipe(self._options), data.read_mode
            self._producer = Producer(self._options, self._recipe)

    def describe(self) -> str:
        """Returns the stages that make a batch, a line each: name, where it runs, and why, or what it works on."""
        self._find_rank()
        return self._recipe.describe()

    def __len__(self) -> int:
        """Returns the batches of the next iteration on this rank, or of the running one from its start, with echoes."""
        self._find_rank()
        return self._decided(self._epochs.coming(running=self._running() is not None)).length

    def __repr__(self) -> str:
        return object_text("FastLoader", *_description(self._options, self._recipe.workers))

    def _repr_html_(self) -> str:
        return object_html("FastLoader", *_description(self._options, self._recipe.workers))

    def _find_rank(self) -> None:
        """Resolves the arguments anew if torch.distributed was initialized since, with another rank.

        Not after the first iteration began.
        """
        if not self._rank_may_change or not asks_process(self._given.share):
            return
        now = process_group()
        if now is None and self._no_share is not None:
            raise self._no_share
        if now is not None and now != self._options.share:
            loaded, epoch = self._loaded, self.epoch
            self._resolve()
            if loaded is not None:
                self.load_state_dict(loaded)
            self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration, from 0 on.

        A loaded state of the same epoch stays loaded: the iteration yields the rest of it, maybe nothing.
        """
        self._epochs.set_epoch(epoch)

    @property
    def batch_size(self) -> int:
        """The samples of a batch on this rank."""
        return int(self._given.batch_size)

    @property
    def echo(self) -> Echo:
        """The argument `echo`, which says how often each batch is used."""
        return self._given.echo

    @property
    def dataset(self) -> Dataset[Any]:
        """The samples' dataset, as of a `DataLoader`: `len(loader.dataset)` is their number on all ranks together."""
        return self._options.data.dataset

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration if that is decided, else of the last one."""
        return self._epochs.standing.plan.epoch

    def state_dict(self) -> dict[str, Any]:
        """Returns the loader's position, the same on every rank; numbers, strings and lists only.

        In the loop body it counts the current batch as done, and is of the running epoch, also after `set_epoch` there.
        """
        self._find_rank()
        running = self._running() is not None
        position = self._decided(self._epochs.last if running else self._epochs.standing)
        next_echo = None
        if self._echo.chooses:
            # In the loop body of the last step other ranks may not have finished theirs, and are not waited for.
            over = position.finished and not running
            next_echo = self._echo.next_schedule(0).factor if over else 0
        return self._epochs.state(position, next_echo=next_echo)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration the rest of the saved epoch, also with another world or batch size.

        If the saved epoch was finished, the next iteration is the next epoch. Batches that were to be used again (echo)
        are; where world size, batch size or echo differ now, they count as done.

        Raises:
            StateError: the state belongs to another file, seed or shuffle, or is damaged.
        """
        with self._alone():
            self._find_rank()
            loaded = self._epochs.checked(state)
            self._loaded = dict(state) if self._rank_may_change else None
            on_device = self._options.cache == "device"
            position = resumed(self._epochs.plan, loaded, self._echo.schedule_of, on_device=on_device)
            self._end_active()
            self._epochs.load(position)
            self._options = self._producer.options = replace(self._options, plan=self._epochs.plan)
            self._echo.adopt((loaded.next_echo if position.finished else None) or loaded.echo)

    @property
    def stats(self) -> LoaderStats:
        """Samples, steps, seconds and bytes of the current iteration, or of the last one.

        On a device, pending waits are not counted during the loop. After it, this waits until the device has reached
        the last batch, a few steps at most.
        """
        return self._counter.snapshot()

    def __enter__(self) -> Self:
        """Returns the loader itself: `with FastLoader(...) as loader:` closes it at the end."""
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends a running iteration and closes the file. Yielded batches stay valid, and `iter()` opens it again."""
        if self._is_finalizing():
            return  # from a generator that outlived its script; see Iteration.close
        with self._alone():
            self._end_active()
            self._producer.close()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a FastLoader holds open files and threads or processes, and can be neither pickled nor copied; make "
            "another one of the same dataset, and give it this one's state_dict()"
        )

    def _alone(self) -> AbstractContextManager[object]:
        """Keeps other threads from beginning and ending iterations."""
        if self._lock_pid != os.getpid():  # forked: a thread of the parent may hold it
            self._lock, self._lock_pid = threading.RLock(), os.getpid()
        return self._lock

    def _running(self) -> Iteration | None:
        iteration = self._active()
        return iteration if iteration is not None and iteration.running else None

    def _decided(self, position: Position) -> Position:
        """Returns the same position, with the echo factor of its epoch decided."""
        if position.schedule is None:
            if (iteration := self._running()) is not None:
                iteration.end_measuring()
            position.schedule = self._echo.next_schedule(position.plan.num_steps)
        return position

    def _end_active(self) -> None:
        active, self._active = self._active(), lambda: None
        if active is not None:
            active.displace()


def _description(options: LoaderPlan, workers: int) -> tuple[list[str], list[str]]:
    """Returns what a loader loads, and how, in a few words each; batches are counted for an epoch on this rank."""
    data, plan, steps = options.data, options.plan, options.plan.num_steps
    what = data.description()
    what += [counted(len(plan.rows), "row"), f"{steps:,} {'batch' if steps == 1 else 'batches'} of {plan.batch_size}"]
    what += ["elastic"] if plan.elastic else []
    if options.share.world_size > 1:
        what.append(f"rank {options.share.rank} of {options.share.world_size}")
        if (nodes := options.nodes) is not None:
            what.append(f"node {nodes.node_of(options.share.rank)} of {nodes.number}")
    shuffle = f"windows of {plan.shuffle.chunks} chunks" if isinstance(plan.shuffle, ChunkWindow) else plan.shuffle
    how = [f"shuffle {shuffle}" if shuffle else "in order", f"ends {plan.ends}", f"seed {plan.seed}"]
    by = ("process" if workers == 1 else "processes") if data.runs_python else "thread" + "s" * (workers > 1)
    reading = f" ({data.read_mode})" if data.read_mode else ""
    how.append(f"cached in {options.cache} memory" if options.cache else f"{workers} {by}{reading}")
    how.append(f"to {options.backend.device}" if options.backend is not None else "to host memory")
    how += [counted(len(options.transforms), "transform")] if options.transforms else []
    if options.form.kind != "stack":
        how.append(
            "a list of images" if options.form.kind == "list" else f"padded to multiples of {options.form.pad_to}"
        )
        how += ["by aspect"] if plan.groups is not None else []
    how += [f"echo {options.echo}"] if options.echo != 1 else []
    return what, how


_ARGUMENTS = tuple(field.name for field in fields(LoaderOptions))
