"""The options of a `FastLoader` as they are given, and what they mean for its data, on this rank and machine.

LoaderOptions ---resolve---> LoaderPlan and Recipe, which pools and passes obey
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from fastload.dataset import PackedDataset, is_unpacked
from fastload.device import open_backend
from fastload.distributed.consensus import resolve_nodes
from fastload.distributed.ranks import Nodes, Share, ShareOption, cpus_of_rank, process_group, resolve_share
from fastload.errors import MissingFileError, OptionError, ShareError, check_choice, check_whole, is_whole
from fastload.format.joined import check_list
from fastload.plan import ChunkWindow, Echo, Ends, EpochPlan, ResolvedShuffle, Shuffle, is_drawing
from fastload.plan.order import likeness
from fastload.prefetch.inputs import Input, as_input, shuffle_of
from fastload.prefetch.loader_plan import BatchForm, LoaderPlan, group_size
from fastload.prefetch.recipe import Recipe, as_list, make_recipe, why_slow
from fastload.prefetch.row_cache import CacheOption, choose_cache, warn_of_fixed_pieces
from fastload.prefetch.waiting import check_timeout
from fastload.remote.urls import is_url
from fastload.system import native
from fastload.system.argument_names import Options

_MOST_MULTIPLE = 4096
_MOST_WORKERS = 1024

GroupBy = Literal["aspect"] | None


@dataclass(frozen=True)
class List(Options):
    """Batches of images of their own sizes: `FastLoader(batch=List())`, or "list" for short.

    The batch has a list of images (C, h, w), and of masks (h, w); other fields, as boxes, are tensors.

    Args:
        group_by: "aspect": batches hold images of similar aspect ratio. An epoch's rows, ends, ranks and resuming stay
            as without it. None: rows come as `shuffle` orders them.

    Raises:
        OptionError: an argument is invalid.
    """

    group_by: GroupBy = None

    _INSTEAD: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("multiple", "pad_to"), "Images of a list are not padded; Pad(multiple=...) pads them."
    )

    def __post_init__(self) -> None:
        check_choice("group_by", self.group_by, ("aspect", None))


@dataclass(frozen=True)
class Pad(Options):
    """Batches of images of their own sizes, padded to one: `FastLoader(batch=Pad(multiple=32))`, or "pad" for short.

    Each image lies at the top left of one tensor, with zeros around it (masks: `ignore_index`); `batch.pixel_mask` says
    which pixels are image.

    Args:
        multiple: height and width of the batch are multiples of it.
        group_by: as of `List`; batches then need less padding.

    Raises:
        OptionError: an argument is invalid.
    """

    multiple: int = 1
    group_by: GroupBy = None

    _INSTEAD: ClassVar[Mapping[str, str]] = {
        "pad_to": "Say multiple=: height and width of the batch are multiples of it."
    }

    def __post_init__(self) -> None:
        check_choice("group_by", self.group_by, ("aspect", None))
        check_whole("multiple", self.multiple, least=1)
        if self.multiple > _MOST_MULTIPLE:
            raise OptionError(
                f"Pad(multiple={self.multiple}): height and width of batches are multiples of it; no network asks for "
                f"over {_MOST_MULTIPLE}."
            )


@dataclass(frozen=True)
class Workers(Options):
    """The threads or processes that make batches: `FastLoader(workers=Workers(4, timeout=30))`.

    Args:
        number: as `workers` of `FastLoader`: a number, "auto", or None for the default.
        timeout: seconds for which `next()` waits for a batch, as in torch's `DataLoader`; the first wait includes the
            workers' start. Then a `WorkerTimeoutError` names the sample in progress, with its worker's stack; a hanging
            process is ended, a hanging thread left alone. 0: it waits without limit, and a warning after a minute says
            the same.

    Raises:
        OptionError: an argument is invalid.
    """

    number: int | Literal["auto"] | None = None
    timeout: float = 0

    _INSTEAD: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("n", "num_workers", "workers"), "Say number=, or the number alone: Workers(4)."
    )

    def __post_init__(self) -> None:
        others = ', "auto" or None'
        if is_whole(self.number) and self.number == 0:
            others += "; to debug a transform in this process, look at dataset[0]"
        if self.number is not None and not (isinstance(self.number, str) and self.number == "auto"):
            check_whole("workers", self.number, least=1, others=others)
            if self.number > _MOST_WORKERS:
                raise OptionError(
                    f"workers={self.number}: a rank has {_MOST_WORKERS} threads or processes at most, and each holds a "
                    f"batch or two in memory. Leave workers out for as many as suit this machine ({cpus_of_rank()} "
                    f'CPUs for this rank), or give "auto".'
                )
        check_timeout(self.timeout)


Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | PackedDataset | Dataset[Any]
BatchOption = Literal["stack", "list", "pad"] | List | Pad
WorkersOption = int | Literal["auto"] | Workers | None


@dataclass(frozen=True)
class LoaderOptions:
    """The arguments of a `FastLoader`, as it was given them."""

    source: Source
    batch_size: int
    shuffle: Shuffle
    ends: Ends | None
    seed: int
    share: ShareOption
    workers: WorkersOption
    device: str | torch.device | None
    transform: Sequence[Any] | None
    echo: Echo
    cache: CacheOption
    batch: BatchOption

    def __post_init__(self) -> None:
        """Raises OptionError where a class is given in place of an object of it."""
        for name in ("shuffle", "workers", "echo", "batch"):
            value = getattr(self, name)
            if isinstance(value, type):
                raise OptionError(
                    f"{name}={value.__name__} is a class. Give an object of it, with its parentheses: "
                    f"{name}={value.__name__}(...)."
                )


def find_share(option: ShareOption) -> tuple[Share, Nodes | None, ShareError | None]:
    """Returns the share of this rank, the nodes if they are asked for, and the error if the rank is not known yet.

    torch.distributed may say the rank before the first iteration; until then the share is the whole.

    Raises:
        OptionError: the option is invalid.
        ShareError: there is a process group, and nodes are not known or not alike.
    """
    try:
        share = resolve_share(option)
        return share, resolve_nodes(share) if option == "node" else None, None
    except ShareError as error:
        if process_group() is not None:
            raise
        return Share(0, 1), None, error


def resolve(given: LoaderOptions, share: Share, nodes: Nodes | None) -> tuple[LoaderPlan, Recipe]:
    """Returns what the options mean for the data, on the rank of a share, and the stages of its batches.

    Warns of what is slow or weakens the shuffle.

    Raises:
        OptionError: an option is invalid, or does not go with the others or the data.
        MissingFileError, FormatError: a file is not there, or cannot be read.
        ShareError: ranks could not agree on a cache.
        CacheError: the rows to cache do not fit.
    """
    data, workers = _input(given.source), given.workers
    workers = workers if isinstance(workers, Workers) else Workers(workers)
    form, groups = _form(given, data)
    backend = open_backend(given.device)
    location, fixed_shares = choose_cache(given.cache, data, backend, share)
    nodes = None if fixed_shares else nodes
    pieces = share.world_size if fixed_shares else nodes.number if nodes is not None else 0
    order = shuffle_of(data, given.shuffle, cached=location is not None)
    check_drawing(order, pieces, fixed_shares=fixed_shares)
    if given.share == "elastic" and fixed_shares:
        raise OptionError(
            f'{data.name}: cache="device": the rows do not fit on each device, so each rank would keep a share, '
            f'and share="elastic" gives ranks other rows in each epoch. Leave one out, or take cache="host".'
        )
    data = data.expecting(order.chunks if isinstance(order, ChunkWindow) else None)
    plan = EpochPlan(
        rows=data.plan_rows,
        chunk_rows=data.chunk_rows,
        seed=given.seed,
        world_size=share.world_size,
        batch_size=given.batch_size,
        shuffle=order,
        ends=given.ends,
        fixed_pieces=pieces if pieces > 1 else 0,
        elastic=given.share == "elastic",
        groups=groups,
    )
    resolved = LoaderPlan(
        data=data,
        plan=plan,
        share=share,
        nodes=nodes,
        workers=None if isinstance(workers.number, str) else workers.number,
        auto_workers=isinstance(workers.number, str),
        backend=backend,
        cache=location,
        timeout_s=float(workers.timeout),
        form=form,
        transforms=as_list(given.transform),
        echo=given.echo,
    )
    recipe = make_recipe(resolved)
    _check_steps(plan, data)
    _check_cache(resolved, recipe.workers)
    native.say_once(partial(why_slow, resolved, recipe))
    warn_of_fixed_pieces(plan, share, nodes, file_shuffled=data.shuffled)
    return resolved, recipe


def _input(source: Source) -> Input:
    """Returns the data of a source; a folder or archive becomes a dataset of its images, see `from_folder`."""
    if isinstance(source, str) and not source:
        raise OptionError('source="": give the path of a packed file, or of a folder of images; "." is this folder.')
    if isinstance(source, (str, os.PathLike)) and not is_url(source):
        path = Path(source)
        if is_unpacked(path):
            return as_input(PackedDataset.from_folder(path))
        # Of a pattern the error says what to give in its place.
        if not path.suffix and not path.exists() and not set("*?") & set(path.name):
            raise MissingFileError(
                f"{path}: no such file or folder. Give a packed file, or a folder, .zip or .tar of images to be packed."
            )
    if isinstance(source, (list, tuple)) and (not source or any(isinstance(one, (str, os.PathLike)) for one in source)):
        check_list(source)  # else its elements are samples
    return as_input(source)


def _form(given: LoaderOptions, data: Input) -> tuple[BatchForm, NDArray[np.int64] | None]:
    """Returns the form of batches, and a number for each planned row, by which alike images are put together, or None.

    Raises OptionError for options without meaning, and where samples have no sizes of their own.
    """
    batch = given.batch
    if not isinstance(batch, (List, Pad)):
        if batch not in ("stack", "list", "pad"):
            raise OptionError(f'batch={batch!r} is not known; choose "stack", "list", "pad", List(...) or Pad(...)')
        batch = List() if batch == "list" else Pad() if batch == "pad" else batch
    masked = "pixel_mask" in (data.fields or ()) and not data.runs_python
    if masked and not isinstance(batch, Pad):
        raise OptionError(
            f'fields: "pixel_mask" is of padded batches, and this is batch={given.batch!r}. Say batch="pad", or '
            f"batch=Pad(multiple=32)."
        )
    if batch == "stack":
        return BatchForm(), None
    if batch.group_by is not None and given.batch_size == 1:
        raise OptionError('group_by="aspect": a batch of one image has no others to be like. Leave group_by out.')
    if batch.group_by is not None and given.shuffle is False:
        raise OptionError('group_by="aspect" needs shuffled rows: shuffle=False keeps the order of the file.')
    if (packed := data.packed) is None:
        raise OptionError(
            f"batch={given.batch!r}: the samples are made by Python code, in processes that make tensors of one size. "
            f"Give FastLoader a packed file without a transform of its own, and transforms of fastload.transforms; or "
            f"take a plain DataLoader with a collate_fn."
        )
    form = BatchForm("pad", int(batch.multiple)) if isinstance(batch, Pad) else BatchForm("list")
    return form, likeness(packed.sizes()) if batch.group_by else None


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


def _check_steps(plan: EpochPlan, data: Input) -> None:
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


def _check_cache(options: LoaderPlan, workers: int) -> None:
    """Raises CacheError where the cache of remote chunks has no room for what the ranks of this machine read at once.

    For each rank the windows of the batches that its threads read at a time, and of the next one; without windows the
    rows of these batches may be in as many chunks.
    """
    data, remote = options.data, options.data.remote
    if remote is None:
        return
    window, plan, ranks, chunk_rows = options.window, options.plan, len(options.local_ranks), data.chunk_rows
    group = group_size(data.row_bytes * options.batch_size, plan.num_steps)
    rows = (workers + 1) * group * options.batch_size
    if window is not None:
        shards = data.dataset.file.shards
        number = window.chunks * (-(-rows // (window.chunks * chunk_rows)) + 1) * shards.chunks_of(chunk_rows)
        what = f"reading windows of {window.chunks} chunks"
    elif plan.shuffle is False:
        number, what = rows // max(1, chunk_rows) + workers + 2, "reading in order"
    else:
        number, what = rows, f"reading batches of {options.batch_size} rows anywhere"
    what += f" by {ranks} ranks of this machine" if ranks > 1 else ""
    remote.room.ranks, remote.source.lets_damage_pass = ranks, options.skip_damaged
    smaller = plan.shuffle is not False and (window is None or window.chunks > 4)
    less = "shuffle in smaller windows (shuffle=ChunkWindow(4))" if smaller else "use fewer workers"
    remote.room.check(number, what, f", or {less}")
