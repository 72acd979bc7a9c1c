"""A loader's options, resolved once: what its recipe, its pool and its passes obey."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from fastload.device import Backend
from fastload.distributed.ranks import Nodes, Share, cpus_of_rank, local_ranks, local_world_size
from fastload.plan import ChunkWindow, Echo, EpochPlan, MixedEcho, PlannedBatch
from fastload.prefetch.inputs import Input, PackedInput
from fastload.prefetch.ring import SLOTS_IN_COPY
from fastload.prefetch.waiting import Patience
from fastload.system.machine import available_memory
from fastload.timing.results import NetworkUse

Location = Literal["device", "host"]
"""Where rows are cached: in device memory, or in pinned memory of the host."""

ReplaceDamaged = Callable[[PlannedBatch, Collection[int]], PlannedBatch | None]
"""Returns a batch with damaged rows replaced by others of it; None: none is left. See `PlannedBatch.without`."""

# Threads that compute, and processes; each more holds one batch more in memory, as each process holds two.
_MAX_WORKERS = 16
# Threads that only copy. What they copy for the CPU is used from its caches, and two of them are as fast as its memory.
_MAX_COPYING = 2
# For a device they have to keep up with its bus: some 50 GB/s over PCIe 5. Alone on a machine of two CPUs one thread
# copies 11 (rows of 3 KB) to 15 GB/s (116 KB) from the page cache, among others less: eight at 6 GB/s fill the bus.
# On an H200's host eight brought 25 of its 54 GB/s, 3.3 each: where there are CPUs, twelve do.
_MAX_FEEDING, _MANY_CPUS, _MAX_FEEDING_OF_MANY = 8, 16, 12
# Slots are pinned, which takes them from all other processes: as much as this part of the free memory of a machine, or
# these bytes if that is more. Larger batches are read by fewer threads, but by these.
_PINNED_PART = 1 / 32
_PINNED_BYTES = 2**30
_LEAST_FEEDING = 2


@dataclass(frozen=True)
class BatchForm:
    """The form of images in a batch: stacked, all of one size; a list of images of their own sizes; or these padded."""

    kind: Literal["stack", "list", "pad"] = "stack"
    pad_to: int = 1  # height and width of padded batches are multiples of it


_STACKED = BatchForm()


@dataclass(frozen=True)
class LoaderPlan:
    """A loader's options after everything that depends on its data, ranks and machine was decided."""

    data: Input
    plan: EpochPlan  # of any whole epoch; with batch size, shuffle, ends and fixed pieces
    share: Share  # of this rank
    nodes: Nodes | None  # that read the same rows in each epoch; None: that is not asked for
    workers: int | None  # threads or processes asked for; None: by default
    auto_workers: bool  # whether their number is chosen anew for each epoch, by measurements
    backend: Backend | None  # of the device; None for the CPU
    cache: Location | None  # where rows are cached; None: nowhere
    timeout_s: float = 0.0  # for which the loop waits for a batch; 0: for ever
    form: BatchForm = _STACKED
    transforms: tuple[Any, ...] = ()
    echo: Echo = 1

    @property
    def uses(self) -> int:
        """The uses of each batch, if known when it is read: numbers for further ones are drawn at the hand-over."""
        if isinstance(self.echo, MixedEcho):
            return self.echo.factor
        return 1 if isinstance(self.echo, str) else int(self.echo)

    @property
    def batch_size(self) -> int:
        """The most samples that a batch has: of a rank whose share is smaller than the batch size, its share."""
        plan = self.plan
        share = plan.unit * -(-plan.num_positions // plan.unit // plan.world_size)
        return min(plan.batch_size, share) if plan.ends == "exact" else plan.batch_size

    @property
    def replace_damaged(self) -> ReplaceDamaged | None:
        """Returns a batch without these rows, see `PlannedBatch.without`; None: they are an error."""
        return partial(PlannedBatch.without, world_size=self.share.world_size) if self.skip_damaged else None

    @property
    def skip_damaged(self) -> bool:
        """Whether damaged rows are replaced, and are no error."""
        return self.data.skips_damaged

    def patience(self) -> Patience:
        """Returns the time limit of a new stream's waits."""
        return Patience(self.timeout_s, self.data.name_of)

    @property
    def packed(self) -> PackedInput:
        """The data, where threads read it from a packed file."""
        packed = self.data.packed
        assert packed is not None, "processes run Python code"
        return packed

    def network_use(self) -> NetworkUse:
        """Returns what this process fetched so far of a dataset behind a URL."""
        remote = self.data.remote
        assert remote is not None, "it is behind a URL"
        nodes = max(1, self.share.world_size // local_world_size())
        return replace(remote.network_use(), nodes=nodes, by_node=self.nodes is not None)

    @property
    def local_ranks(self) -> range:
        """The ranks of this machine, as far as they are known."""
        return local_ranks(self.share, self.nodes)

    @property
    def keeps_share(self) -> bool:
        """Whether the device keeps only the rank's share of the rows, which is the same in all epochs."""
        return self.cache == "device" and self.plan.fixed_pieces == self.plan.world_size

    @property
    def window(self) -> ChunkWindow | None:
        """The window of chunks whose rows are mixed; None: rows are read one by one."""
        return self.plan.shuffle if isinstance(self.plan.shuffle, ChunkWindow) else None


def default_workers(data: Input, batch_size: int, *, computing: bool, to_device: bool) -> int:
    """Returns the number of threads or processes when none is given.

    Args:
        data: of the loader, as is the batch size.
        computing: whether threads decode or run transforms, and do not only copy.
        to_device: whether batches go to a device.
    """
    if not (data.runs_python or computing):
        batch_bytes = data.row_bytes * batch_size if to_device else None
        return copying_threads(cpus_of_rank(), batch_bytes, available_memory() // local_world_size())
    return min(_MAX_WORKERS, cpus_of_rank())


def copying_threads(cpus: int, batch_bytes: int | None, free_bytes: int) -> int:
    """Returns how many threads copy rows, one or more, at most as many as the rank has CPUs.

    `batch_bytes`: size of a batch that goes to a device, from pinned memory; None: batches stay on the CPU.
    `free_bytes` are the rank's part of the machine's free memory.
    """
    if batch_bytes is None:
        return min(_MAX_COPYING, cpus)
    # One CPU is left for the thread that trains, where two threads can copy besides.
    spare = cpus - 1 if cpus > _LEAST_FEEDING else cpus
    fitting = most_pinned(free_bytes) // max(1, batch_bytes) - (SLOTS_IN_COPY + 1)
    most = _MAX_FEEDING if cpus < _MANY_CPUS else _MAX_FEEDING_OF_MANY
    return min(spare, most, max(_LEAST_FEEDING, fitting))


def most_pinned(free_bytes: int) -> int:
    """Returns how many bytes of slots a loader pins at most, of so much free memory of its rank."""
    return max(_PINNED_BYTES, int(_PINNED_PART * free_bytes))


GROUP_BYTES = 12 * 2**20
"""Bytes that are filled at a time, about, where batches are smaller."""


def group_size(batch_bytes: int, num_steps: int) -> int:
    """Returns how many batches to fill at a time.

    About GROUP_BYTES, and an eighth of the epoch at most, so that reading stays ahead.
    """
    return max(1, min(GROUP_BYTES // max(1, batch_bytes), num_steps // 8))
