"""Chooses the feed of a loader, and its number of workers: a cache of rows, processes that run Python, or threads."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fastload.device.backend import Backend
from fastload.distributed.ranks import Share, local_world_size
from fastload.errors import OptionError
from fastload.plan import ChunkWindow, ResolvedShuffle
from fastload.prefetch.augment import Augmentation
from fastload.prefetch.cache_choice import CacheChoice
from fastload.prefetch.cache_load import load_cache
from fastload.prefetch.cached_feed import CachedFeed
from fastload.prefetch.feeds import Feed, ProcessFeed, ThreadFeed
from fastload.prefetch.inputs import OtherInput, PackedInput
from fastload.prefetch.sample_layout import SampleLayout
from fastload.read.readahead import has_read_ahead
from fastload.read.reader import Read
from fastload.system.machine import available_cpus
from fastload.transforms import check_pipeline
from fastload.transforms.engine.size_head import SizeHead

# Two threads copy as fast as memory allows. Those that augment compute; each more holds one batch more in memory, as
# each process holds two.
_MAX_COPYING = 2
_MAX_WORKERS = 16


@dataclass(frozen=True)
class FeedOptions:
    """A loader's resolved options, as far as its feed depends on them.

    Attributes:
        data: the loader's data.
        batch_size, read: as in `FastLoader`.
        workers: threads or processes asked for; None: by default.
        auto: whether their number is chosen by measurements.
        num_steps: batches of an epoch, more or less.
        shuffle: resolved.
        share: of this rank.
        backend: of the device; None for the CPU.
        cache: where rows are cached.
        augmentation: of the loader.
        in_threads: whether the threads that read also augment.
        size_head: for ragged images, the transforms that the reading threads run to give them one size; None: later
            stages run them.
    """

    data: PackedInput | OtherInput
    batch_size: int
    read: Read
    workers: int | None
    auto: bool
    num_steps: int
    shuffle: ResolvedShuffle
    share: Share
    backend: Backend | None
    cache: CacheChoice
    augmentation: Augmentation
    in_threads: bool
    size_head: SizeHead | None = None

    @property
    def num_workers(self) -> int:
        """The number of threads or processes: as asked for, else one per CPU that this rank may use, up to a limit."""
        processes = not isinstance(self.data, PackedInput) or self.data.runs_python
        return self.workers or default_workers(processes=processes, computing=self.in_threads or self._decodes)

    @property
    def _decodes(self) -> bool:
        """Whether the threads that read decode ragged rows."""
        data = self.data
        if not isinstance(data, PackedInput):
            return False
        file = data.dataset.file
        return any(file.fields[name].ragged is not None for name, _, _ in data.dataset.layout())


def default_workers(*, processes: bool, computing: bool) -> int:
    """Returns the number of threads or processes when none is given.

    Args:
        processes: whether they are processes.
        computing: whether they are threads that decode or augment too, and do not only copy.
    """
    most = _MAX_WORKERS if processes or computing else _MAX_COPYING
    return min(most, max(1, available_cpus() // local_world_size()))


def open_feed(options: FeedOptions) -> tuple[Feed, int]:
    """Returns the feed of a loader, and the bytes that were read for it already.

    Raises:
        CacheError: the memory for the cache is not there.
        FileChangedError: the file was written to or truncated.
    """
    data, backend = options.data, options.backend
    window = options.shuffle if isinstance(options.shuffle, ChunkWindow) else None
    # In file order the kernel's own read-ahead is better: cold, 19,500 images/s against 11,300 with ours.
    announces = has_read_ahead() and options.shuffle is not False
    chunk_rows = data.chunk_rows if window else 0
    workers = options.num_workers
    if options.cache.location is not None:
        assert isinstance(data, PackedInput) and backend is not None, "only rows of a file are cached, for a device"
        cache = load_cache(data, options.cache, options.share, backend, read=options.read, workers=workers)
        return CachedFeed(cache, options.batch_size, backend), cache.nbytes
    if not isinstance(data, PackedInput) or data.runs_python:
        processes = ProcessFeed(
            data,
            options.batch_size,
            workers=workers,
            chunk_rows=chunk_rows,
            on_layout=functools.partial(_check_samples, options.augmentation.transforms, data.name),
            backend=backend,
            announces=announces,
            auto=options.auto,
        )
        return processes, 0
    threads = ThreadFeed(
        data.dataset,
        options.batch_size,
        num_steps=options.num_steps,
        read=options.read,
        workers=workers,
        chunk_rows=chunk_rows,
        # A window's chunks, and those of the next one that it is read into already.
        cache_chunks=2 * window.chunks if window else workers,
        backend=backend,
        announces=announces,
        augmentation=options.augmentation if options.in_threads else None,
        head=None if options.size_head is None else (options.size_head, options.augmentation),
    )
    return threads, 0


def _check_samples(transforms: Sequence[Any], name: str, layout: SampleLayout) -> None:
    """Raises OptionError if transforms do not fit the samples. No method, since the feed keeps it."""
    if not transforms:
        return
    leaf = dict(zip(layout.form.names, layout.leaves, strict=True)).get("images")
    if leaf is None:
        raise OptionError(
            f"transform: {name}: the samples have no image, a tensor (C, H, W) that comes first in a tuple or is "
            f"called 'image' or 'images' in a dict. Leave transform out, or transform in the loop."
        )
    if leaf.shape[0] not in (1, 3, 4) and leaf.shape[2] in (1, 3, 4):
        raise OptionError(
            f"transform: {name}: the samples' image is {leaf.shape}, as (height, width, channels), and transforms take "
            f"(C, H, W). Give torch.from_numpy(image).permute(2, 0, 1) as the sample's image."
        )
    dtype = torch.from_numpy(np.empty(0, leaf.dtype)).dtype
    check_pipeline(transforms, (leaf.shape[0], leaf.shape[1], leaf.shape[2]), dtype, layout.form.names)
