"""A loader's options, resolved once: what its feed and its passes obey, and which stage runs its transforms.

size head     the first transforms, where they give images of several sizes one size: run by the reading threads
augmentation  all transforms: run by the reading threads too on the CPU, else when a batch is handed over
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from fastload.device import Backend
from fastload.distributed.ranks import Share, local_world_size
from fastload.errors import OptionError
from fastload.plan import ChunkWindow, Echo, EpochPlan, PlannedBatch
from fastload.prefetch.inputs import Input, PackedInput
from fastload.read.reader import Read
from fastload.system.machine import available_cpus
from fastload.transforms import Draws, apply_transforms, check_pipeline
from fastload.transforms.boxes_and_points import Coordinates
from fastload.transforms.engine.pipeline import SizeHead, find_size_head
from fastload.transforms.engine.placement import ImageRows, PlacedImages

Location = Literal["device", "host"]
"""Where rows are cached: in device memory, or in pinned memory of the host."""

# Two threads copy as fast as memory allows. Those that augment compute; each more holds one batch more in memory, as
# each process holds two.
_MAX_COPYING = 2
_MAX_WORKERS = 16


@dataclass(frozen=True)
class Augmentation:
    """A loader's transforms with the options that they run with."""

    transforms: tuple[Any, ...]  # as checked
    seed: int  # of the loader, as is the rank; random numbers depend on both
    rank: int
    ignore_index: int  # as in `apply_transforms`
    coordinates: Mapping[str, Coordinates]  # as in `apply_transforms`
    done: int = 0  # how many of the first transforms have run when a batch is made: those that gave its images one size

    def apply(
        self,
        fields: Mapping[str, torch.Tensor | ImageRows | PlacedImages],
        planned: PlannedBatch,
        *,
        epoch: int,
        echo: int = 0,
        output: torch.Tensor | None = None,
        kept: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Returns the fields of a batch, transformed; images may be not gathered or made yet.

        Random numbers also depend on epoch and echo; `output` and `kept` are as in `apply_transforms`.
        """
        return apply_transforms(
            self.transforms,
            fields,
            Draws(self.seed, epoch, planned.rows, echo),
            ignore_index=self.ignore_index,
            batch_draws=Draws.of_batch(self.seed, epoch, planned.step, self.rank, echo),
            coordinates=self.coordinates,
            output=output,
            kept=kept,
            done=self.done,
        )

    @property
    def in_threads(self) -> bool:
        """Whether threads may run the transforms, several batches at a time and in any order; False without any."""
        return bool(self.transforms) and all(getattr(transform, "thread_safe", False) for transform in self.transforms)

    @property
    def mixes(self) -> bool:
        """Whether a batch's samples depend on one another."""
        return any(getattr(transform, "mixes", False) for transform in self.transforms)


_NO_TRANSFORMS = Augmentation((), 0, 0, 0, {})


@dataclass(frozen=True)
class Resolved:
    """A loader's options after everything that depends on its data, ranks and machine was decided."""

    data: Input
    plan: EpochPlan  # of any whole epoch; with batch size, shuffle, ends and fixed shares
    share: Share  # of this rank
    read: Read  # as in `FastLoader`
    workers: int | None  # threads or processes asked for; None: by default
    auto_workers: bool  # whether their number is chosen anew for each epoch, by measurements
    backend: Backend | None  # of the device; None for the CPU
    cache: Location | None  # where rows are cached; None: nowhere
    augmentation: Augmentation = _NO_TRANSFORMS  # all transforms; those of the size head count as done in it
    # For ragged images, the transforms that the reading threads run to give them one size; None: there are none.
    size_head: SizeHead | None = None
    # Whether the reading threads run all transforms: on the CPU, where no echo needs the batch as it was.
    in_threads: bool = False
    # Whether stored JPEGs are decoded by the device, and cut there when a batch is handed over.
    decodes_on_device: bool = False

    @property
    def at_hand_over(self) -> bool:
        """Whether transforms run when a batch is handed over; the same kernel gathers cached rows and cuts images."""
        left = len(self.augmentation.transforms) - self.augmentation.done
        return self.cache is not None or self.decodes_on_device or (left > 0 and not self.in_threads)

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
    def decodes(self) -> bool:
        """Whether the threads that read decode ragged rows, or have them decoded."""
        return isinstance(self.data, PackedInput) and self.data.ragged

    @property
    def num_workers(self) -> int:
        """The number of threads or processes: as asked for, else one per CPU that this rank may use, up to a limit."""
        computing = self.in_threads or (self.decodes and not self.decodes_on_device)
        return self.workers or default_workers(processes=self.data.runs_python, computing=computing)

    def with_transforms(self, transform: Sequence[Any] | None, echo: Echo) -> Resolved:
        """Returns the options with transforms and the stages that run them; arguments as in `FastLoader`.

        Raises:
            OptionError: transforms that do not fit the images, or ragged images without a transform that gives them
                one size. What Python code makes is looked at before the first batch.
        """
        data, transforms = self.data, () if transform is None else transform
        given: object = transforms
        if not isinstance(given, Sequence):
            check_pipeline(transforms, (0, 0, 0), torch.uint8, ())  # which refuses it
        packed = data if isinstance(data, PackedInput) and not data.runs_python else None
        size_head = self._size_head(packed, transforms, echo) if packed is not None and packed.ragged else None
        coordinates = data.coordinates() if isinstance(data, PackedInput) else {}
        if packed is not None and transforms:
            fields = packed.dataset.fields
            if "images" not in fields:
                raise OptionError(
                    f"transform: the batch has no images, its fields are {', '.join(fields)}. Add images to fields, or "
                    f"leave transform out."
                )
            shape, dtype = packed.image_spec()
            done = 0
            if size_head is not None:
                shape = size_head.spec.channels, size_head.spec.height, size_head.spec.width
                done = size_head.count
            check_pipeline(transforms, shape, dtype, fields, coordinates, done=done)
        augmentation = Augmentation(tuple(transforms), self.plan.seed, self.share.rank, data.ignore_index, coordinates)
        in_threads = packed is not None and self.backend is None and echo == 1 and augmentation.in_threads
        if size_head is not None:
            # On the CPU flips cost nothing more there; elsewhere each echo flips anew.
            size_head = size_head.with_flips() if in_threads else size_head
            augmentation = replace(augmentation, done=size_head.count)
        options = replace(self, augmentation=augmentation, size_head=size_head, in_threads=in_threads)
        if not (isinstance(data, PackedInput) and data.dataset.decode == "device" and data.has_jpegs()):
            return options
        if reason := why_not_on_device(options):
            warnings.warn(f'{data.name}: decode="device": JPEGs are decoded by the CPU: {reason}.', stacklevel=3)
        return replace(options, decodes_on_device=not reason)

    def _size_head(self, data: PackedInput, transforms: Sequence[Any], echo: Echo) -> SizeHead | None:
        """Returns the leading transforms to run in the threads that read ragged rows.

        Required for images that differ in size; for JPEGs of one size, they save decoding where each is used once.
        """
        if "images" not in data.dataset.fields:
            if data.varied:
                raise OptionError(
                    f"{data.name}: its masks differ in size, and are brought to one size with their images. Add images "
                    f"to fields."
                )
            return None
        if data.varied and self.cache is not None:
            raise OptionError(
                f"{data.name}: cache={self.cache!r} caches images of one size, and these differ in size. Leave cache "
                f"out, or pack them with `fastload pack --size`."
            )
        if not data.varied and (self.cache is not None or echo != 1):
            return None  # each echo cuts anew
        (channels, _, _), dtype = data.image_spec()
        try:
            return find_size_head(transforms, channels, dtype, name=data.name)
        except OptionError:
            if data.varied:
                raise
            return None


def why_not_on_device(options: Resolved) -> str:
    """Returns why stored JPEGs cannot be decoded by the device; empty if they can. The data are JPEGs."""
    data, head = options.packed, options.size_head
    (channels, _, _), dtype = data.image_spec()
    if options.backend is None:
        return "the loader has no device; give FastLoader device='cuda'"
    if data.runs_python:
        return "the dataset's own transform is Python, which runs in processes"
    if options.cache is not None:
        return f"cache={options.cache!r} keeps decoded images"
    if "masks" in data.dataset.fields:
        return "masks are cut with their images by the CPU"
    if dtype != torch.uint8 or channels == 4:
        return f"of images of {channels} channels and {dtype}"
    if head is not None and (head.pads or head.resizes > 1):
        return "the transforms that give the images one size pad them, or resize them twice"
    return options.backend.why_no_jpegs()


def default_workers(*, processes: bool, computing: bool) -> int:
    """Returns the number of processes, or of threads, `computing` or only copying, when none is given."""
    most = _MAX_WORKERS if processes or computing else _MAX_COPYING
    return min(most, max(1, available_cpus() // local_world_size()))
