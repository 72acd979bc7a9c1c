"""A loader's options, resolved once: what its feed and its passes obey, wherever it was decided."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from fastload.device import Backend
from fastload.distributed.ranks import Share, local_world_size
from fastload.plan import ChunkWindow, EpochPlan
from fastload.prefetch.augment import Augmentation
from fastload.prefetch.inputs import Input, PackedInput
from fastload.read.readahead import has_read_ahead
from fastload.read.reader import Read
from fastload.system.machine import available_cpus
from fastload.transforms.engine.size_head import SizeHead

Location = Literal["device", "host"]
"""Where rows are cached: in device memory, or in pinned memory of the host."""

# Two threads copy as fast as memory allows. Those that augment compute; each more holds one batch more in memory, as
# each process holds two.
_MAX_COPYING = 2
_MAX_WORKERS = 16

_NO_TRANSFORMS = Augmentation((), 0, 0, 0, {})


@dataclass(frozen=True)
class Resolved:
    """A loader's options after everything that depends on its data, ranks and machine was decided.

    Attributes:
        data: the loader's data.
        plan: of any whole epoch; with batch size, shuffle, ends and fixed shares.
        share: of this rank.
        read: as in `FastLoader`.
        workers: threads or processes asked for; None: by default.
        auto_workers: whether their number is chosen anew for each epoch, by measurements.
        backend: of the device; None for the CPU.
        cache: where rows are cached; None: nowhere.
        augmentation: all transforms; those of the size head count as done in it.
        size_head: for ragged images, the transforms that the reading threads run to give them one size; None: there
            are none.
        in_threads: whether the reading threads run all transforms: on the CPU, where no echo needs the batch as it was.
        at_hand_over: whether transforms run when a batch is handed over; cached rows are gathered by the same kernel.
    """

    data: Input
    plan: EpochPlan
    share: Share
    read: Read
    workers: int | None
    auto_workers: bool
    backend: Backend | None
    cache: Location | None
    augmentation: Augmentation = _NO_TRANSFORMS
    size_head: SizeHead | None = None
    in_threads: bool = False
    at_hand_over: bool = False

    @property
    def packed(self) -> PackedInput:
        """The data, where threads read it from a packed file."""
        assert isinstance(self.data, PackedInput), "a dataset that is not packed is made by processes"
        return self.data

    @property
    def window(self) -> ChunkWindow | None:
        """The window of chunks whose rows are mixed; None: rows are read one by one."""
        return self.plan.shuffle if isinstance(self.plan.shuffle, ChunkWindow) else None

    @property
    def window_chunk_rows(self) -> int:
        """Rows of the chunks that the window is made of; 0: there is no window."""
        return self.data.chunk_rows if self.window is not None else 0

    @property
    def announces(self) -> bool:
        """Whether coming rows of a packed file are announced to the kernel."""
        # In file order the kernel's own read-ahead is better: cold, 19,500 images/s against 11,300 with ours.
        return has_read_ahead() and self.plan.shuffle is not False

    @property
    def decodes(self) -> bool:
        """Whether the threads that read decode ragged rows."""
        return isinstance(self.data, PackedInput) and self.data.ragged

    @property
    def num_workers(self) -> int:
        """The number of threads or processes: as asked for, else one per CPU that this rank may use, up to a limit."""
        return self.workers or default_workers(
            processes=self.data.runs_python, computing=self.in_threads or self.decodes
        )

    def in_file_order(self, batch_rows: int) -> Resolved:
        """Returns the options to read rows once as they lie in the file, so many at a time, untransformed."""
        plan = replace(self.plan, batch_size=batch_rows, shuffle=False, fixed_shares=False)
        return replace(self, plan=plan, cache=None, size_head=None, in_threads=False)


def default_workers(*, processes: bool, computing: bool) -> int:
    """Returns the number of threads or processes when none is given.

    Args:
        processes: whether they are processes.
        computing: whether they are threads that decode or augment too, and do not only copy.
    """
    most = _MAX_WORKERS if processes or computing else _MAX_COPYING
    return min(most, max(1, available_cpus() // local_world_size()))
