"""The recipe of a loader's batches: which stages make them, where each runs, and why. Modes are decided here alone."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from fastload.errors import OptionError, level_of_the_user
from fastload.format.header import PackedFile
from fastload.prefetch.inputs import Input, PackedInput
from fastload.prefetch.loader_plan import LoaderPlan, default_workers
from fastload.prefetch.stages.cut import CutRows
from fastload.prefetch.stages.device_decode import DecodeOnDevice
from fastload.prefetch.stages.from_cache import FetchCached, GatherCached, WriteIndex
from fastload.prefetch.stages.gather import (
    GatherRows,
    MappedImages,
    ReadTexts,
    StoreInSlot,
    ToUserLayout,
    WhileHeld,
    WriteFacts,
)
from fastload.prefetch.stages.to_device import CopySlot, OnSideStream
from fastload.prefetch.stages.transform import Augmentation, DrawNumbers, TransformBatch, TransformInThread, named
from fastload.prefetch.stages.variable_size import (
    PIXELS,
    DecodeVariableSize,
    JoinPixels,
    PadImages,
    SaySizes,
    SendPixels,
    TransformEach,
)
from fastload.prefetch.work import Stage, Where
from fastload.system import native
from fastload.transforms import ImageSpec, check_pipeline
from fastload.transforms.engine.decode_time_resize import DecodeTimeResize, find_decode_time_resize, find_placed_head
from fastload.transforms.tv_tensors import refuse_torchvision


class MakeSamples(Stage):
    """Makes samples by Python code, and writes them to the slot; carried out by `sample_worker.Filler`."""

    where = Where.PROCESS

    def __init__(self, data: Input) -> None:
        self.why = f"{data.code} is Python code, which threads would run one at a time"


@dataclass(frozen=True)
class Recipe:
    """The stages of a loader's batches, in order.

    Attributes:
        stages: in the order in which a batch passes them.
        augmentation: the loader's transforms.
        workers: threads that read, or processes that run Python.
        threads: those of them that this process starts; of processes, one that sends requests.
        ahead: slots that are filled ahead.
        computes: whether the threads decode or transform, and do not only copy.
        variable_size: whether images keep sizes of their own.
        decodes: whether stored images are decoded by threads.
    """

    stages: tuple[Stage, ...]
    augmentation: Augmentation
    workers: int
    threads: int
    ahead: int
    computes: bool = False
    variable_size: bool = False
    decodes: bool = False

    def at(self, where: Where) -> tuple[Stage, ...]:
        """Returns the stages that run somewhere, in order."""
        return tuple(stage for stage in self.stages if stage.where is where)

    def describe(self) -> str:
        """Returns a line a stage: its name, where it runs, and why it is there."""
        steps = [(type(step).__name__, stage.where.value, step.why) for stage in self.stages for step in stage.steps()]
        width, where = (max(len(step[part]) for step in steps) for part in (0, 1))
        lines = [f"{name:{width}}  {place:{where}}  {why}".rstrip() for name, place, why in steps]
        return "\n".join(lines)


def make_recipe(options: LoaderPlan) -> Recipe:
    """Returns the stages for a loader's data and options.

    Raises:
        OptionError: transforms that do not fit the images, or ragged images without a transform that gives them one
            size. What Python code makes is looked at before the first batch.
    """
    data, transforms, backend = options.data, options.transforms, options.backend
    packed = data.packed
    variable_size = options.form.kind != "stack" and packed is not None
    head = None
    if packed is not None and variable_size:
        head = _placed_head(options, packed)
    elif packed is not None and packed.ragged:
        head = _decode_time_resize(options, packed)
    if packed is not None and transforms:
        _check_transforms(packed, transforms, head, variable_size=variable_size)
    seed, rank, coordinates = options.plan.seed, options.share.rank, data.coordinates()
    augmentation = Augmentation(transforms, seed, rank, data.ignore_index, coordinates)
    in_threads = packed is not None and backend is None and options.echo == 1
    in_threads = in_threads and (augmentation.in_threads or (variable_size and not transforms))
    if head is not None:
        # On the CPU flips cost nothing more there; elsewhere each echo flips anew.
        head = head.with_flips() if in_threads and not variable_size else head
        augmentation = replace(augmentation, done=head.count)
    by_device = data.decode_on_device and data.has_jpegs() and _decodes_on_device(options, packed, head)
    if packed is None:
        return _of_samples(options, augmentation)
    if options.cache is not None:
        return _of_cache(options, packed, augmentation)
    if variable_size:
        assert head is not None, "it may be empty"
        parts = _of_variable_size(options, packed, augmentation, head, in_threads=in_threads)
    elif by_device:
        assert backend is not None, "it decodes"
        why = "the same kernel cuts the decoded images"
        decode = DecodeOnDevice(packed, backend, augmentation, head)
        parts = _Parts(("images",), [decode], [JoinPixels(), TransformBatch(augmentation, why)])
    else:
        parts = _of_one_size(options, packed, augmentation, head, in_threads=in_threads)
    dataset, computes = packed.dataset, bool(parts.made)
    gathered = [name for name, _, _ in dataset.layout() if name not in parts.apart]
    gather = GatherRows(dataset, gathered, into_slot=not computes, mapped=parts.mapped)
    reading: list[Stage] = [WhileHeld([gather, *parts.made, StoreInSlot()]) if computes else gather]
    reading += [ReadTexts(dataset, packed.read_mode, alone=False)] if dataset.text_fields else []
    file = None if computes else dataset.file
    workers = options.workers or default_workers(
        data,
        options.batch_size,
        computing=in_threads or (packed.ragged and not by_device),
        # Decoding them on the device takes little of a CPU, and each batch in flight all the memory of its images.
        to_device=backend is not None and not by_device,
    )
    if backend is None:
        stages = [*reading, ToUserLayout(file), *parts.use]
    else:
        spec = head.spec if head is not None else None
        if spec is None and "images" in dataset.fields:
            shape, dtype = packed.image_spec()
            spec = ImageSpec(*shape, dtype)
        draws = [DrawNumbers(augmentation, options.uses, spec)] if parts.use and not variable_size else []
        stages = [WriteFacts(), *reading, *draws, *_on_device(options, augmentation, file, [], parts.use)]
    stages += [SaySizes(options.form)] if variable_size else []
    return Recipe(
        tuple(stages),
        augmentation,
        workers=workers,
        threads=workers,
        ahead=workers,
        computes=computes,
        variable_size=variable_size,
        decodes=packed.ragged,
    )


class _Parts(NamedTuple):
    """What differs among recipes of packed rows."""

    apart: tuple[str, ...]  # fields that are not gathered with the others
    made: list[Stage]  # by the threads, behind the gathering
    use: list[Stage]  # for each use, or on the side stream
    mapped: MappedImages | None = None  # images that the transforms take from where they lie


def _of_variable_size(
    options: LoaderPlan, packed: PackedInput, augmentation: Augmentation, head: DecodeTimeResize, *, in_threads: bool
) -> _Parts:
    """Returns the stages of images that keep sizes of their own."""
    form, index, on_device = options.form, packed.ignore_index, options.backend is not None
    pads, left = form.kind == "pad", bool(augmentation.transforms[augmentation.done :])
    where = Where.THREAD if in_threads else Where.USE
    pads_on_way = on_device and pads and not left and options.echo == 1
    here: list[Stage] = [TransformEach(packed, augmentation, where)] * left
    here += [PadImages(form, index, where, on_device=on_device)] * (pads and not pads_on_way)
    # Images leave the thread's memory before it begins its next batch, where they are padded or sent.
    made: list[Stage] = [DecodeVariableSize(packed, augmentation, head, leaves=on_device or (in_threads and pads))]
    made += here if in_threads else []
    made += [SendPixels(form if pads_on_way else None, index)] if on_device else []
    return _Parts(PIXELS, made, [JoinPixels(), *([] if in_threads else here)])


def _of_one_size(
    options: LoaderPlan,
    packed: PackedInput,
    augmentation: Augmentation,
    head: DecodeTimeResize | None,
    *,
    in_threads: bool,
) -> _Parts:
    """Returns the stages of images of one size, or of those that the first transforms give one."""
    left, dataset = augmentation.transforms[augmentation.done :], packed.dataset
    rest = left if in_threads else ()
    ragged = [name for name in PIXELS if name in dataset.file.fields and dataset.file.fields[name].ragged]
    mapped = MappedImages(dataset.file) if rest and head is None else None
    made: list[Stage] = [CutRows(dataset, augmentation, head, rest)] if head is not None else []
    made += [TransformInThread(augmentation, mapped)] if rest else []
    use: list[Stage] = [_transform_batch(options, augmentation)] if left and not in_threads else []
    return _Parts(tuple(ragged) if head is not None else (), made, use, mapped)


def _on_device(
    options: LoaderPlan, augmentation: Augmentation, file: PackedFile | None, fetch: list[Stage], use: list[Stage]
) -> list[Stage]:
    """Returns the stages of a batch from its slot to the loop; `fetch`: those behind the copy."""
    backend = options.backend
    assert backend is not None, "there is a device"
    left = augmentation.transforms[augmentation.done :]
    in_any_thread = all(getattr(one, "thread_safe", False) for one in left) and not augmentation.mixes
    if use and options.echo == 1 and in_any_thread:
        return [CopySlot(backend, file, again=True), *fetch, OnSideStream(backend, use)]
    return [CopySlot(backend, file, again=False), *fetch, *use]


def _of_samples(options: LoaderPlan, augmentation: Augmentation) -> Recipe:
    """Returns the recipe for samples that Python code makes; their form is known with the first one."""
    backend, transforms = options.backend, augmentation.transforms
    stages: list[Stage] = [MakeSamples(options.data)]
    use: list[Stage] = [_transform_batch(options, augmentation)] if transforms else []
    if backend is not None:
        stages += [DrawNumbers(augmentation, options.uses, None)] if transforms else []
        use = _on_device(options, augmentation, None, [], use)
    stages += use
    workers = options.workers or default_workers(options.data, options.batch_size, computing=True, to_device=False)
    return Recipe(tuple(stages), augmentation, workers=workers, threads=1, ahead=workers)


def _of_cache(options: LoaderPlan, packed: PackedInput, augmentation: Augmentation) -> Recipe:
    """Returns the recipe for rows that are cached."""
    dataset, backend, location = packed.dataset, options.backend, options.cache
    assert backend is not None and location is not None, "rows are cached for a device"
    shape, dtype = packed.image_spec() if "images" in dataset.fields else ((0, 0, 0), torch.uint8)
    spec = ImageSpec(*shape, dtype) if "images" in dataset.fields else None
    stages: list[Stage] = [WriteFacts(), WriteIndex(dataset, location)]
    stages += [ReadTexts(dataset, packed.read_mode, alone=True)] if dataset.text_fields else []
    stages.append(DrawNumbers(augmentation, options.uses, spec))
    fetch: list[Stage] = [FetchCached(backend)] if location == "host" else []
    use: list[Stage] = [GatherCached(backend)] if location == "device" else []
    use.append(_transform_batch(options, augmentation))
    stages += _on_device(options, augmentation, None, fetch, use)
    workers = options.workers or default_workers(packed, options.batch_size, computing=packed.ragged, to_device=True)
    # One thread is enough for some numbers a sample, and is a few batches ahead.
    return Recipe(tuple(stages), augmentation, workers=workers, threads=1, ahead=2, decodes=packed.ragged)


def why_slow(options: LoaderPlan, recipe: Recipe) -> str:
    """Returns why the reading threads decode, crop or transform images slowly here; "" if they do not, or fast."""
    if options.data.runs_python:
        return ""
    if any(isinstance(step, DecodeOnDevice) for stage in recipe.stages for step in stage.steps()):
        return ""
    on_cpu = options.backend is None and bool(recipe.augmentation.transforms)
    if not (recipe.decodes or recipe.computes or on_cpu):
        return ""
    return native.why_slow(options.packed.seems_to_have_jpegs)


def _check_transforms(
    packed: PackedInput, transforms: Sequence[Any], head: DecodeTimeResize | None, *, variable_size: bool
) -> None:
    fields = packed.dataset.fields
    if "images" not in fields:
        raise OptionError(
            f"transform: the batch has no images, its fields are {', '.join(fields)}. Add images to fields, or "
            f"leave transform out."
        )
    shape, dtype = packed.image_spec()
    done = 0
    if variable_size:
        shape = (shape[0], *packed.sizes()[0].tolist())
    elif head is not None:
        shape = head.spec.channels, head.spec.height, head.spec.width
        done = head.count
    check_pipeline(transforms, shape, dtype, fields, packed.dataset.coordinates(), done=done)


def as_list(transforms: object) -> tuple[Any, ...]:
    """Returns the argument `transform` as a tuple. Raises OptionError where it is no list, or of torchvision."""
    given: Any = () if transforms is None else transforms
    refuse_torchvision(given)
    if not isinstance(given, Sequence):
        check_pipeline(given, (0, 0, 0), torch.uint8, ())  # which refuses it
    return tuple(given)


def _transform_batch(options: LoaderPlan, augmentation: Augmentation) -> TransformBatch:
    """Returns the stage that runs the transforms which no reading thread runs."""
    if options.cache is not None:
        return TransformBatch(augmentation, "the same kernel gathers cached rows")
    what = named(augmentation.left)
    if options.echo != 1:
        return TransformBatch(augmentation, f"{what}: drawn anew for each use of a batch")
    in_loop = [one for one in augmentation.left if not getattr(one, "thread_safe", False)]
    in_loop += [one for one in augmentation.left if getattr(one, "mixes", False)]
    if in_loop:
        return TransformBatch(
            augmentation, f"{what}: all in the loop's thread, as {named(in_loop[:1])} has to run there"
        )
    if options.backend is None:
        return TransformBatch(augmentation, f"{what}: in the loop's thread, behind the processes")
    return TransformBatch(augmentation, f"{what}: on the device, before the loop asks")


def _decodes_on_device(options: LoaderPlan, packed: PackedInput | None, head: DecodeTimeResize | None) -> bool:
    """Whether stored JPEGs are decoded by the device, and cut there when a batch is handed over; warns if not."""
    if reason := _why_not_on_device(options, packed, head):
        what = f'{options.data.name}: decode="device": JPEGs are decoded by the CPU'
        warnings.warn(f"{what}: {reason}.", stacklevel=level_of_the_user())
    return not reason


def _why_not_on_device(options: LoaderPlan, packed: PackedInput | None, head: DecodeTimeResize | None) -> str:
    """Returns why stored JPEGs cannot be decoded by the device; empty if they can. The data are JPEGs."""
    if options.backend is None:
        return "the loader has no device; give FastLoader device='cuda'"
    if packed is None:
        return "the dataset's own transform is Python, which runs in processes"
    if options.form.kind != "stack":
        return f'batch="{options.form.kind}" sends images as they are'
    if options.cache is not None:
        return f"cache={options.cache!r} keeps decoded images"
    if "masks" in packed.dataset.fields:
        return "masks are cut with their images by the CPU"
    (channels, _, _), dtype = packed.image_spec()
    if dtype != torch.uint8 or channels == 4:
        return f"of images of {channels} channels and {dtype}"
    if head is not None and (head.pads or head.resizes > 1):
        return "the transforms that give the images one size pad them, or resize them twice"
    return options.backend.why_no_jpegs()


def _placed_head(options: LoaderPlan, data: PackedInput) -> DecodeTimeResize:
    """Returns the leading transforms to run in the threads that read images of their own sizes, maybe none."""
    what = f'batch="{options.form.kind}"'
    if "images" not in data.dataset.fields:
        raise OptionError(f"{what}: the batch has no images. Add images to fields, or leave batch out.")
    if options.cache is not None:
        raise OptionError(f"{what}: cache={options.cache!r} caches images of one size. Leave one of them out.")
    for transform in options.transforms:
        if getattr(transform, "mixes", False):
            raise OptionError(
                f"{what}: {type(transform).__name__} mixes images of one size, and these keep their own. Leave it "
                f"out, or give them one size (RandomResizedCrop, Resize) and leave batch out."
            )
    (channels, _, _), dtype = data.image_spec()
    once = options.echo == 1 and data.dataset.file.fields["images"].ragged is not None
    return find_placed_head(options.transforms if once else (), channels, dtype, name=data.name)


def _decode_time_resize(options: LoaderPlan, data: PackedInput) -> DecodeTimeResize | None:
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
    if data.varied and options.cache is not None:
        raise OptionError(
            f"{data.name}: cache={options.cache!r} caches images of one size, and these differ in size. Leave cache "
            f"out, or pack them with `fastload pack --size`."
        )
    if not data.varied and (options.cache is not None or options.echo != 1):
        return None  # each echo cuts anew
    (channels, _, _), dtype = data.image_spec()
    try:
        return find_decode_time_resize(options.transforms, channels, dtype, name=data.name)
    except OptionError:
        if data.varied:
            raise
        return None
