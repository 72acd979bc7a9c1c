"""A loader's options, resolved once: what its feed and its passes obey, and which stage runs its transforms.

size head     the first transforms, where they give images of several sizes one size: run by the reading threads
augmentation  all transforms: run by the reading threads too on the CPU, else when a batch is handed over
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.device import Backend
from fastload.distributed.ranks import Nodes, Share, cpus_of_rank, local_ranks, local_world_size
from fastload.errors import OptionError, level_of_the_user
from fastload.plan import ChunkWindow, Echo, EpochPlan, MixedEcho, PlannedBatch
from fastload.prefetch.device_stage import SLOTS_IN_COPY
from fastload.prefetch.fill_threads import WORDS, ReplaceDamaged
from fastload.prefetch.inputs import Input, PackedInput
from fastload.prefetch.ring import SlotField
from fastload.prefetch.waiting import Patience
from fastload.read.linear import Read
from fastload.remote.shards import RemoteShards
from fastload.system import native
from fastload.system.machine import available_memory
from fastload.timing.network import NetworkUse
from fastload.transforms import Draws, ImageSpec, check_pipeline
from fastload.transforms.boxes_and_points import Coordinates
from fastload.transforms.engine.pipeline import Drawn, Pipeline, spec_of
from fastload.transforms.engine.placement import ImageRows, PlacedImages
from fastload.transforms.engine.size_head import SizeHead, find_placed_head, find_size_head
from fastload.transforms.tv_tensors import refuse_torchvision

Location = Literal["device", "host"]
"""Where rows are cached: in device memory, or in pinned memory of the host."""

# Threads that compute, and processes; each more holds one batch more in memory, as each process holds two.
_MAX_WORKERS = 16
# Threads that only copy. What they copy for the CPU is used from its caches, and two of them are as fast as its memory.
_MAX_COPYING = 2
# For a device they have to keep up with its bus: some 50 GB/s over PCIe 5. Alone on a machine of two CPUs one thread
# copies 11 (rows of 3 KB) to 15 GB/s (116 KB) from the page cache, among others less: eight at 6 GB/s fill the bus.
_MAX_FEEDING = 8
# Slots are pinned, which takes them from all other processes: as much as this part of the free memory of a machine, or
# these bytes if that is more. Larger batches are read by fewer threads, but by these.
_PINNED_PART = 1 / 32
_PINNED_BYTES = 2**30
_LEAST_FEEDING = 2

# Specs that transforms are kept ready for; images of their own sizes have many.
_MOST_SPECS = 4096


@dataclass(frozen=True)
class BatchForm:
    """The form of images in a batch: stacked, all of one size; a list of images of their own sizes; or these padded."""

    kind: Literal["stack", "list", "pad"] = "stack"
    pad_to: int = 1  # height and width of padded batches are multiples of it


_STACKED = BatchForm()


@dataclass(frozen=True)
class Augmentation:
    """A loader's transforms with the options that they run with."""

    transforms: tuple[Any, ...]  # as checked
    seed: int  # of the loader, as is the rank; random numbers depend on both
    rank: int
    ignore_index: int  # as in `apply_transforms`
    coordinates: Mapping[str, Coordinates]  # as in `apply_transforms`
    done: int = 0  # how many of the first transforms have run when a batch is made: those that gave its images one size
    _ready: dict[ImageSpec, Pipeline] = field(default_factory=dict, init=False, repr=False, compare=False)

    def pipeline(self, spec: ImageSpec) -> Pipeline:
        """Returns the transforms that are left, ready for images of a spec; made once for each."""
        ready = self._ready.get(spec)
        if ready is None:
            if len(self._ready) >= _MOST_SPECS:
                self._ready.clear()
            self._ready[spec] = ready = Pipeline(
                self.transforms,
                spec,
                ignore_index=self.ignore_index,
                coordinates=self.coordinates,
                done=self.done,
            )
        return ready

    def apply(
        self,
        fields: Mapping[str, torch.Tensor | ImageRows | PlacedImages],
        planned: PlannedBatch,
        *,
        epoch: int,
        echo: int = 0,
        output: torch.Tensor | None = None,
        kept: bool = False,
        drawn: Drawn | None = None,
        words: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Returns the fields of a batch, transformed; images may be not gathered or made yet.

        Random numbers also depend on epoch and echo; the other arguments are as in `Pipeline.apply`. What was drawn
        beforehand counts for the uses that it is of.
        """
        if drawn is not None and echo >= drawn.uses:
            drawn = words = None
        return self.pipeline(spec_of(fields["images"])).apply(
            fields,
            self.draws(epoch, planned, echo),
            drawn=drawn,
            words=words,
            use=echo,
            batch_draws=Draws.of_batch(self.seed, epoch, planned.step, self.rank, echo) if self.mixes else None,
            output=output,
            kept=kept,
        )

    def draws(self, epoch: int, planned: PlannedBatch, echo: int = 0, *, echoes: int = 1) -> Draws:
        """Returns the random numbers of a batch's samples, for so many uses from `echo` on."""
        return Draws(self.seed, epoch, planned.rows, echo, echoes=echoes, times=planned.times)

    @property
    def in_threads(self) -> bool:
        """Whether threads may run the transforms, several batches at a time and in any order; False without any."""
        return bool(self.transforms) and all(getattr(transform, "thread_safe", False) for transform in self.transforms)

    @cached_property
    def mixes(self) -> bool:
        """Whether a batch's samples depend on one another."""
        return any(getattr(transform, "mixes", False) for transform in self.transforms)


_NO_TRANSFORMS = Augmentation((), 0, 0, 0, {})


@dataclass(frozen=True)
class Resolved:
    """A loader's options after everything that depends on its data, ranks and machine was decided."""

    data: Input
    plan: EpochPlan  # of any whole epoch; with batch size, shuffle, ends and fixed pieces
    share: Share  # of this rank
    nodes: Nodes | None  # that read the same rows in each epoch; None: that is not asked for
    read: Read  # as in `FastLoader`
    workers: int | None  # threads or processes asked for; None: by default
    auto_workers: bool  # whether their number is chosen anew for each epoch, by measurements
    backend: Backend | None  # of the device; None for the CPU
    cache: Location | None  # where rows are cached; None: nowhere
    timeout_s: float = 0.0  # for which the loop waits for a batch; 0: for ever
    form: BatchForm = _STACKED
    augmentation: Augmentation = _NO_TRANSFORMS  # all transforms; it counts the size head's as done
    # For ragged images, the transforms that the reading threads run to give them one size; None: there are none. For
    # images of their own sizes, the first transforms, maybe none, which the threads run as they decode.
    size_head: SizeHead | None = None
    # Whether the reading threads run all transforms (and pad): on the CPU, where no echo needs the batch as it was.
    in_threads: bool = False
    uses: int = 1  # of each batch, if known when it is read; numbers for further uses are drawn at the hand-over
    # Whether stored JPEGs are decoded by the device, and cut there when a batch is handed over.
    decodes_on_device: bool = False
    images: ImageSpec | None = None  # as Python code makes them, once that is known

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
    def at_hand_over(self) -> bool:
        """Whether transforms run when a batch is handed over; the same kernel gathers cached rows and cuts images."""
        left = len(self.augmentation.transforms) - self.augmentation.done
        if self.own_sizes:
            return False
        return self.cache is not None or self.decodes_on_device or (left > 0 and not self.in_threads)

    @property
    def own_sizes(self) -> bool:
        """Whether images keep sizes of their own; `own_sizes` then does the rest when a batch is handed over."""
        return self.form.kind != "stack"

    @property
    def packed(self) -> PackedInput:
        """The data, where threads read it from a packed file."""
        assert isinstance(self.data, PackedInput), "a dataset that is not packed is made by processes"
        return self.data

    @property
    def is_remote(self) -> bool:
        """Whether rows are fetched over the network."""
        return isinstance(self.data, PackedInput) and self.data.dataset.file.remote is not None

    def network_use(self) -> NetworkUse:
        """Returns what this process fetched so far of a dataset behind a URL."""
        remote = cast(RemoteShards, self.packed.dataset.file.remote)
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

    @property
    def decodes(self) -> bool:
        """Whether the threads that read decode ragged rows, or have them decoded."""
        return isinstance(self.data, PackedInput) and self.data.ragged

    def why_slow(self) -> str:
        """Returns why the reading threads decode, crop or transform images slowly here; "" if they do not, or fast."""
        if not isinstance(self.data, PackedInput) or self.data.runs_python or self.decodes_on_device:
            return ""
        on_cpu = self.backend is None and bool(self.augmentation.transforms)
        if not (self.decodes or self.size_head is not None or on_cpu):
            return ""
        return native.why_slow(self.data.seems_to_have_jpegs)

    @property
    def num_workers(self) -> int:
        """The number of threads or processes: as asked for, else `default_workers`."""
        return self.workers or default_workers(
            self.data,
            self.plan.batch_size,
            computing=self.in_threads or (self.decodes and not self.decodes_on_device),
            # Decoding them on the device takes little of a CPU, and each batch in flight all the memory of its images.
            to_device=self.backend is not None and not self.decodes_on_device,
        )

    def with_transforms(self, transform: Sequence[Any] | None, echo: Echo) -> Resolved:
        """Returns the options with transforms and the stages that run them; arguments as in `FastLoader`.

        Raises:
            OptionError: transforms that do not fit the images, or ragged images without a transform that gives them
                one size. What Python code makes is looked at before the first batch.
        """
        data, transforms = self.data, () if transform is None else transform
        given: object = transforms
        refuse_torchvision(transforms)
        if not isinstance(given, Sequence):
            check_pipeline(transforms, (0, 0, 0), torch.uint8, ())  # which refuses it
        packed = data if isinstance(data, PackedInput) and not data.runs_python else None
        size_head = None
        if self.own_sizes and packed is not None:
            size_head = self._placed_head(packed, transforms, echo)
        elif packed is not None and packed.ragged:
            size_head = self._size_head(packed, transforms, echo)
        coordinates = data.dataset.coordinates() if isinstance(data, PackedInput) else {}
        if packed is not None and transforms:
            fields = packed.dataset.fields
            if "images" not in fields:
                raise OptionError(
                    f"transform: the batch has no images, its fields are {', '.join(fields)}. Add images to fields, or "
                    f"leave transform out."
                )
            shape, dtype = packed.image_spec()
            done = 0
            if self.own_sizes:
                shape = (shape[0], *packed.sizes()[0].tolist())
            elif size_head is not None:
                shape = size_head.spec.channels, size_head.spec.height, size_head.spec.width
                done = size_head.count
            check_pipeline(transforms, shape, dtype, fields, coordinates, done=done)
        augmentation = Augmentation(tuple(transforms), self.plan.seed, self.share.rank, data.ignore_index, coordinates)
        in_threads = packed is not None and self.backend is None and echo == 1
        in_threads = in_threads and (augmentation.in_threads or (self.own_sizes and not transforms))
        if self.own_sizes and size_head is not None:
            augmentation = replace(augmentation, done=size_head.count)
        elif size_head is not None:
            # On the CPU flips cost nothing more there; elsewhere each echo flips anew.
            size_head = size_head.with_flips() if in_threads else size_head
            augmentation = replace(augmentation, done=size_head.count)
        uses = echo.factor if isinstance(echo, MixedEcho) else 1 if isinstance(echo, str) else int(echo)
        options = replace(self, augmentation=augmentation, size_head=size_head, in_threads=in_threads, uses=uses)
        if not (isinstance(data, PackedInput) and data.dataset.decode == "device" and data.has_jpegs()):
            return options
        if reason := why_not_on_device(options):
            said = f'{data.name}: decode="device": JPEGs are decoded by the CPU: {reason}.'
            warnings.warn(said, stacklevel=level_of_the_user())
        return replace(options, decodes_on_device=not reason)

    @cached_property
    def _pipeline(self) -> Pipeline | None:
        """The transforms whose numbers are drawn before a batch goes to its device; None: there are none."""
        if self.backend is None or not self.at_hand_over:
            return None
        if self.images is not None:
            return self.augmentation.pipeline(self.images)
        if "images" not in self.packed.dataset.fields:
            return None
        shape, dtype = self.packed.image_spec()
        return self.augmentation.pipeline(self.size_head.spec if self.size_head else ImageSpec(*shape, dtype))

    def words_field(self) -> list[SlotField]:
        """Returns the field of a slot that `draw` writes to; none if it is not to be called."""
        words = self._pipeline.num_words(self.uses * self.plan.batch_size) if self._pipeline else 0
        return [SlotField(WORDS, (words,), np.dtype(np.int32))] if words else []

    def draw(self, epoch: int, planned: PlannedBatch, words: NDArray[np.int32]) -> Drawn:
        """Draws the transforms' numbers for all uses of a batch; see `Pipeline.draw`. Any thread may call it."""
        assert self._pipeline is not None, "there are words to be drawn"
        draws = self.augmentation.draws(epoch, planned, echoes=self.uses)
        return self._pipeline.draw(draws, self.uses, words[: self._pipeline.num_words(self.uses * len(planned.rows))])

    def _placed_head(self, data: PackedInput, transforms: Sequence[Any], echo: Echo) -> SizeHead:
        """Returns the leading transforms to run in the threads that read images of their own sizes, maybe none."""
        what = f'batch="{self.form.kind}"'
        if "images" not in data.dataset.fields:
            raise OptionError(f"{what}: the batch has no images. Add images to fields, or leave batch out.")
        if self.cache is not None:
            raise OptionError(f"{what}: cache={self.cache!r} caches images of one size. Leave one of them out.")
        for transform in transforms:
            if getattr(transform, "mixes", False):
                raise OptionError(
                    f"{what}: {type(transform).__name__} mixes images of one size, and these keep their own. Leave it "
                    f"out, or give them one size (RandomResizedCrop, Resize) and leave batch out."
                )
        (channels, _, _), dtype = data.image_spec()
        once = echo == 1 and data.dataset.file.fields["images"].ragged is not None
        return find_placed_head(transforms if once else (), channels, dtype, name=data.name)

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
    if options.own_sizes:
        return f'batch="{options.form.kind}" sends images as they are'
    if options.cache is not None:
        return f"cache={options.cache!r} keeps decoded images"
    if "masks" in data.dataset.fields:
        return "masks are cut with their images by the CPU"
    if dtype != torch.uint8 or channels == 4:
        return f"of images of {channels} channels and {dtype}"
    if head is not None and (head.pads or head.resizes > 1):
        return "the transforms that give the images one size pad them, or resize them twice"
    return options.backend.why_no_jpegs()


def default_workers(data: Input, batch_size: int, *, computing: bool, to_device: bool) -> int:
    """Returns the number of threads or processes when none is given.

    Args:
        data: of the loader, as is the batch size.
        computing: whether threads decode or run transforms, and do not only copy.
        to_device: whether batches go to a device.
    """
    if isinstance(data, PackedInput) and not (data.runs_python or computing):
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
    pinned_bytes = max(_PINNED_BYTES, int(_PINNED_PART * free_bytes))
    fitting = pinned_bytes // max(1, batch_bytes) - (SLOTS_IN_COPY + 1)
    return min(spare, _MAX_FEEDING, max(_LEAST_FEEDING, fitting))
