"""Checks of a `FastLoader`'s arguments, answers to those of a `DataLoader`, and how a loader describes itself."""

from __future__ import annotations

import html
from collections.abc import Collection
from pathlib import Path

from fastload.errors import OptionError
from fastload.plan import ChunkWindow, Echo
from fastload.prefetch.inputs import Input, PackedInput
from fastload.prefetch.resolved import Resolved
from fastload.system.text import counted
from fastload.system.whole_numbers import check_whole

_OF_DATALOADER = {
    "dataset": "it is the first argument, `source`",
    "num_workers": "`workers=` is the number of threads, or of processes where samples take Python code; leave it out "
    "for as many as suit this machine",
    "drop_last": '`ends="drop"` drops a last batch that is not full, `ends="exact"` keeps its samples, `ends="pad"` '
    "fills it up",
    "collate_fn": "batches are filled in place, a tensor for each field. What changes whole batches is a transform "
    "(`transform=[...]`); for another form of batches take a plain DataLoader over the PackedDataset",
    "pin_memory": '`device="cuda"` copies from pinned memory while the model computes; leave it out',
    "pin_memory_device": '`device="cuda"` copies from pinned memory while the model computes; leave it out',
    "persistent_workers": "threads and processes stay until `close()`; leave it out",
    "prefetch_factor": "a fixed set of buffers is filled ahead; leave it out",
    "sampler": "`shuffle=` chooses the order and a rank reads its share; `dataset.select(positions)` takes some "
    "samples, also several times",
    "batch_sampler": "`shuffle=` chooses the order; with batches of your own take a plain DataLoader over the "
    "PackedDataset",
    "generator": "`seed=` decides order and augmentation, whatever the workers",
    "worker_init_fn": "random numbers of Python code depend on `seed`, epoch and step, not on workers; leave it out",
    "multiprocessing_context": "processes start as `multiprocessing.set_start_method` says; leave it out",
    "in_order": "batches always come in the order of the plan; leave it out",
}


def answer(words: Collection[str]) -> None:
    """Raises OptionError for arguments of torch's `DataLoader`, with what takes their place."""
    known = [f"{word}=: {_OF_DATALOADER[word]}" for word in words if word in _OF_DATALOADER]
    if known:
        raise OptionError(f"FastLoader has no argument {'. It has no argument '.join(known)}.")


def check_reading(workers: object, data: Input) -> None:
    """Raises OptionError for numbers of workers without meaning."""
    if workers == 0 and data.runs_python:
        raise OptionError(
            "workers=0: the loader runs Python in processes, 1 or more. To debug a transform, look at dataset[0] "
            "in this process."
        )
    if workers is not None and not (isinstance(workers, str) and workers == "auto"):
        check_whole("workers", workers, least=1, others=', "auto" or None')


def check_damage(on_damage: object, data: Input) -> None:
    """Raises OptionError unless damaged rows can be found where they are to be skipped."""
    if on_damage not in ("raise", "skip"):
        raise OptionError(f'on_damage={on_damage!r} is not known; choose "raise" or "skip"')
    if on_damage == "skip" and not (isinstance(data, PackedInput) and data.dataset.check):
        raise OptionError(
            f'on_damage="skip": no row of {data.name} is compared with a digest, so none is known to be damaged. It '
            f"takes a file of `fastload pack`, and check other than None."
        )


def description(options: Resolved, echo: Echo) -> tuple[list[str], list[str]]:
    """Returns what a loader loads, and how, in a few words each; batches are those of an epoch on this rank."""
    data, plan, steps = options.data, options.plan, options.plan.num_steps
    what = [Path(data.name).name if isinstance(data, PackedInput) else data.name]
    if isinstance(data, PackedInput):
        dataset = data.dataset
        what += [f"split {dataset.split}"] if dataset.split else []
        what += ["some of its rows"] if data.selected is not None else []
    what += [counted(len(plan.rows), "row"), f"{steps:,} {'batch' if steps == 1 else 'batches'} of {plan.batch_size}"]
    if options.share.world_size > 1:
        what.append(f"rank {options.share.rank} of {options.share.world_size}")
    shuffle = f"windows of {plan.shuffle.chunks} chunks" if isinstance(plan.shuffle, ChunkWindow) else plan.shuffle
    how = [f"shuffle {shuffle}" if shuffle else "in order", f"ends {plan.ends}", f"seed {plan.seed}"]
    number = options.num_workers
    workers = ("process" if number == 1 else "processes") if data.runs_python else "thread" + "s" * (number > 1)
    reading = f" ({options.read})" if isinstance(data, PackedInput) else ""
    how.append(f"cached in {options.cache} memory" if options.cache else f"{number} {workers}{reading}")
    how.append(f"to {options.backend.device}" if options.backend is not None else "to host memory")
    transforms = options.augmentation.transforms
    how += [counted(len(transforms), "transform")] if transforms else []
    how += [f"echo {echo}"] if echo != 1 else []
    return what, how


def as_html(what: list[str], how: list[str]) -> str:
    """Returns a description as a small table for notebooks."""
    rows = (("FastLoader", what), ("how", how))
    cells = "".join(
        f"<tr><th style='text-align: left'>{name}</th>{''.join(f'<td>{html.escape(part)}</td>' for part in parts)}</tr>"
        for name, parts in rows
    )
    return f"<table>{cells}</table>"
