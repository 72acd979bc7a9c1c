"""Checks a `FastLoader`'s arguments, explains what replaces a `DataLoader`'s, and describes a loader in words."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from fastload.errors import MissingFileError, OptionError, check_whole
from fastload.format.joined import check_list
from fastload.format.valid import folder_of_files
from fastload.plan import ChunkWindow, Echo, EpochPlan, ResolvedShuffle, is_drawing
from fastload.plan.order import likeness
from fastload.prefetch.inputs import Input, PackedInput
from fastload.prefetch.resolved import BatchForm, Resolved
from fastload.prefetch.thread_stream import group_size
from fastload.remote.options import is_url
from fastload.remote.shards import RemoteShards
from fastload.system.text import counted

_MOST_PAD_TO = 4096

_OF_DATALOADER = {
    "dataset": "it is the first argument, `source`",
    "num_workers": "`workers=` is the number of threads, or of processes where samples take Python code; leave it out "
    "for as many as suit this machine",
    "drop_last": '`ends="drop"` drops a last batch that is not full, `ends="exact"` makes it shorter, `ends="pad"` '
    "fills it up",
    "collate_fn": "batches are filled in place, a tensor for each field. What changes whole batches is a transform "
    '(`transform=[...]`); `batch="list"` or "pad" takes images of their own sizes; for another form of batches take a '
    "plain DataLoader over the PackedDataset",
    "pin_memory": '`device="cuda"` copies from pinned memory while the model computes; leave it out',
    "pin_memory_device": '`device="cuda"` copies from pinned memory while the model computes; leave it out',
    "persistent_workers": "threads and processes stay until `close()`; leave it out",
    "prefetch_factor": "a fixed set of buffers is filled ahead; leave it out",
    "sampler": "`shuffle=` chooses the order and a rank reads its share, `shuffle=Weighted(weights)` draws by weight; "
    "`dataset.select(positions)` takes some samples, also several times",
    "batch_sampler": "`shuffle=` chooses the order, `shuffle=ClassBatches(classes, samples)` batches by class; with "
    "batches of your own take a plain DataLoader over the PackedDataset",
    "generator": "`seed=` decides order and augmentation, whatever the workers",
    "worker_init_fn": "random numbers of Python code depend on `seed`, epoch and step, not on workers; leave it out",
    "multiprocessing_context": "processes start as `multiprocessing.set_start_method` says; leave it out",
    "in_order": "batches always come in the order of the plan; leave it out",
}


def answer(words: Collection[str], signature: inspect.Signature) -> None:
    """Raises OptionError for arguments that a loader does not have: torch's `DataLoader`'s, and misspelt ones.

    Messages say what replaces an argument of `DataLoader`, and which argument a misspelt one resembles most.
    """
    accepted = signature.parameters
    unknown = [word for word in words if word not in accepted]
    if not unknown or any(one.kind is one.VAR_KEYWORD for one in accepted.values()):
        return
    if known := [f"{word}=: {_OF_DATALOADER[word]}" for word in unknown if word in _OF_DATALOADER]:
        raise OptionError(f"FastLoader has no argument {'. It has no argument '.join(known)}.")
    near = difflib.get_close_matches(unknown[0].lower(), accepted, n=1)
    hint = f"Did you mean {near[0]}=?" if near else "`help(fastload.FastLoader)` lists those it has."
    raise OptionError(f"FastLoader has no argument {unknown[0]}=. {hint}")


def is_meant_as_argument(word: str, accepted: Collection[str]) -> bool:
    """Whether a word is an argument of torch's `DataLoader`, or nearly one that a loader has."""
    return word in _OF_DATALOADER or bool(difflib.get_close_matches(word.lower(), accepted, n=1, cutoff=0.85))


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


def opened(source: Any, cache_dir: str | os.PathLike[str] | None) -> Any:
    """Returns the source; a folder or archive becomes a dataset of its images, see `from_folder`."""
    path = Path(source) if isinstance(source, (str, os.PathLike)) else Path()
    if path.is_dir() and isinstance(source, (str, os.PathLike)) and _holds_packed_only(path):
        raise folder_of_files(path)
    if isinstance(source, (str, os.PathLike)) and (
        path.is_dir() or (path.suffix.lower() in (".zip", ".tar") and path.is_file())
    ):
        # Imported here, as who reads packed files does not need the packer.
        from fastload.loader.from_folder import open_unpacked

        return open_unpacked(path, cache_dir)
    if isinstance(source, (str, os.PathLike)) and not is_url(source) and not path.suffix and not path.exists():
        if set("*?") & set(path.name):
            return source  # the error says what to give in the place of a pattern
        raise MissingFileError(
            f"{path}: no such file or folder. Give a packed file, or a folder, .zip or .tar of images to be packed."
        )
    if isinstance(source, (list, tuple)) and (not source or any(isinstance(one, (str, os.PathLike)) for one in source)):
        check_list(source)  # else its elements are samples
    if cache_dir is not None:
        raise OptionError("cache_dir=: it is where a folder is packed, and source is none. Leave it out.")
    return source


def _holds_packed_only(folder: Path) -> bool:
    """Whether a folder holds files that end in .h5, and beside them nothing but what packing leaves."""
    found = {entry.suffix if entry.is_file() else "/" for entry in folder.iterdir() if not entry.name.startswith(".")}
    return ".h5" in found and found <= {".h5", ".plan", ".part", ".journal", ".meta", ".masks"}


def check_form(
    batch: object, pad_to: object, group_by: object, data: Input, batch_size: int, shuffle: object
) -> tuple[BatchForm, NDArray[np.int64] | None]:
    """Returns the form of batches, and a number for each planned row, by which alike images are put together, or None.

    Raises OptionError for options without meaning, and where samples have no sizes of their own.
    """
    if batch not in ("stack", "list", "pad"):
        raise OptionError(f'batch={batch!r} is not known; choose "stack", "list" or "pad"')
    if group_by not in (None, "aspect"):
        raise OptionError(f'group_by={group_by!r} is not known; choose "aspect" or None')
    check_whole("pad_to", pad_to, least=1)
    if cast(int, pad_to) > _MOST_PAD_TO:
        raise OptionError(
            f"pad_to={pad_to}: sides of batches are multiples of it; no network asks for over {_MOST_PAD_TO}."
        )
    if pad_to != 1 and batch != "pad":
        raise OptionError(f'pad_to={pad_to}: batches are not padded with batch="{batch}". Say batch="pad".')
    if group_by is not None and batch == "stack":
        raise OptionError(
            'group_by="aspect": with batch="stack" all images have one size, and none is padded. Say batch="pad", or '
            'batch="list".'
        )
    if group_by is not None and batch_size == 1:
        raise OptionError('group_by="aspect": a batch of one image has no others to be like. Leave group_by out.')
    if group_by is not None and shuffle is False:
        raise OptionError('group_by="aspect" needs shuffled rows: shuffle=False keeps the order of the file.')
    masked = "pixel_mask" in (data.fields or ()) and not data.runs_python
    if masked and batch != "pad":
        raise OptionError(f'fields: "pixel_mask" is of padded batches, and this is batch="{batch}". Say batch="pad".')
    if batch == "stack":
        return BatchForm(), None
    if not isinstance(data, PackedInput) or data.runs_python:
        raise OptionError(
            f'batch="{batch}": the samples are made by Python code, in processes that make tensors of one size. '
            f"Give FastLoader a packed file without a transform of its own, and transforms of fastload.transforms; or "
            f"take a plain DataLoader with a collate_fn."
        )
    form = BatchForm(cast('Literal["list", "pad"]', batch), int(cast(int, pad_to)))
    return form, likeness(data.sizes()) if group_by else None


def check_drawing(shuffle: ResolvedShuffle, pieces: int, *, fixed_shares: bool) -> None:
    """Raises OptionError where rows are drawn from all that there are, and ranks or nodes would keep some of them."""
    if not is_drawing(shuffle) or pieces <= 1:
        return
    if fixed_shares:
        raise OptionError(
            f'cache="device": the rows do not fit on one device, so each rank would keep a share of them, and '
            f'shuffle={shuffle!r} draws any row on any rank. Give cache="host", or leave cache out.'
        )
    raise OptionError(
        f'share="node": the ranks of a node would read one piece of the file, and shuffle={shuffle!r} draws any row on '
        f'any rank. Leave share out, which is share="auto".'
    )


def check_steps(plan: EpochPlan, data: Input) -> None:
    """Raises OptionError for a plan without a single batch."""
    if not plan.num_steps:
        ranks = f" over {plan.world_size} ranks" if plan.world_size > 1 else ""
        hint = "Choose a smaller batch_size, or ends='pad' or 'exact'." if plan.rows else "Choose other rows."
        if plan.rows and is_drawing(plan.shuffle):
            few = "fewer ranks" if plan.unit > 1 else "a larger num_samples"
            hint = f"{plan.shuffle!r} has no more: choose {few}, or ends='pad' or 'exact'."
        raise OptionError(
            f"{data.name}: {plan.num_positions:,} samples{ranks} do not make one batch of {plan.batch_size} with "
            f"ends={plan.ends!r}. {hint}"
        )


def check_cache(options: Resolved) -> None:
    """Raises CacheError where the cache of remote chunks has no room for what the ranks of this machine read at once.

    For each rank the windows of the batches that its threads read at a time, and of the next one; without windows the
    rows of these batches may be in as many chunks.
    """
    file = options.data.dataset.file if isinstance(options.data, PackedInput) else None
    if file is None or file.remote is None:
        return
    window, plan, ranks, chunk_rows = options.window, options.plan, len(options.local_ranks), options.data.chunk_rows
    group = group_size(options.packed.row_bytes * plan.batch_size, plan.num_steps)
    rows = (options.num_workers + 1) * group * plan.batch_size
    if window is not None:
        number = window.chunks * (-(-rows // (window.chunks * chunk_rows)) + 1) * file.shards.chunks_of(chunk_rows)
        what = f"reading windows of {window.chunks} chunks"
    elif plan.shuffle is False:
        number, what = rows // max(1, chunk_rows) + options.num_workers + 2, "reading in order"
    else:
        number, what = rows, f"reading batches of {plan.batch_size} rows anywhere"
    what += f" by {ranks} ranks of this machine" if ranks > 1 else ""
    remote = cast(RemoteShards, file.remote)
    remote.room.ranks, remote.source.lets_damage_pass = ranks, options.skip_damaged
    smaller = plan.shuffle is not False and (window is None or window.chunks > 4)
    less = "shuffle in smaller windows (shuffle=ChunkWindow(4))" if smaller else "use fewer workers"
    remote.room.check(number, what, f", or {less}")


def description(options: Resolved, echo: Echo) -> tuple[list[str], list[str]]:
    """Returns what a loader loads, and how, in a few words each; batches are counted for an epoch on this rank."""
    data, plan, steps = options.data, options.plan, options.plan.num_steps
    what = [Path(data.name).name if isinstance(data, PackedInput) else data.name]
    if isinstance(data, PackedInput):
        dataset = data.dataset
        what += [f"split {dataset.split}"] if dataset.split else []
        what += ["some of its rows"] if data.selected is not None else []
    what += [counted(len(plan.rows), "row"), f"{steps:,} {'batch' if steps == 1 else 'batches'} of {plan.batch_size}"]
    what += ["elastic"] if plan.elastic else []
    if options.share.world_size > 1:
        what.append(f"rank {options.share.rank} of {options.share.world_size}")
        if (nodes := options.nodes) is not None:
            what.append(f"node {nodes.node_of(options.share.rank)} of {nodes.number}")
    shuffle = f"windows of {plan.shuffle.chunks} chunks" if isinstance(plan.shuffle, ChunkWindow) else plan.shuffle
    how = [f"shuffle {shuffle}" if shuffle else "in order", f"ends {plan.ends}", f"seed {plan.seed}"]
    number = options.num_workers
    workers = ("process" if number == 1 else "processes") if data.runs_python else "thread" + "s" * (number > 1)
    reading = f" ({options.read})" if isinstance(data, PackedInput) else ""
    how.append(f"cached in {options.cache} memory" if options.cache else f"{number} {workers}{reading}")
    how.append(f"to {options.backend.device}" if options.backend is not None else "to host memory")
    transforms = options.augmentation.transforms
    how += [counted(len(transforms), "transform")] if transforms else []
    if options.own_sizes:
        how.append(
            "a list of images" if options.form.kind == "list" else f"padded to multiples of {options.form.pad_to}"
        )
        how += ["by aspect"] if plan.groups is not None else []
    how += [f"echo {echo}"] if echo != 1 else []
    return what, how
