"""Copies a slot to the device, as one piece; a batch's fields are tensors over that copy.

A slot is one copy: with the samples go row numbers, valid flags and the numbers that the transforms' kernel needs.
Other fields than images are copied out of it on the device, small ones (labels) all at once: a user who keeps the
labels of an epoch must not keep the memory of images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.dataset import as_handed_over
from fastload.device import Backend, moved_as_stored, own_copy
from fastload.format.header import PackedFile
from fastload.prefetch.ring import INNER, SlotField
from fastload.prefetch.work import TRANSFORM_PARAMETERS, Opened, Stage, Where, Work
from fastload.transforms.engine.placement import PlacedImages


class CopySlot(Stage):
    """Copies a slot, uint8 over the bus, within the side stream; what does not lie in it is copied by itself.

    Args:
        file: whose rows lie in the slot as they are; None: they lie there as they are handed over.
        again: whether images are copied to the same memory again and again: kernels of the side stream read them there,
            and nobody else. Else each batch has a copy of its own, which the user may keep.
    """

    where = Where.SIDE_STREAM

    def __init__(self, backend: Backend, file: PackedFile | None, *, again: bool) -> None:
        self._backend, self._file, self._again = backend, file, again
        self._layout: _SlotLayout | None = None  # which all batches of a ring have
        self._copy: torch.Tensor | None = None  # of a slot, and its large fields as tensors
        self._parts: dict[str, torch.Tensor] = {}
        self.why = f"to {getattr(backend, 'device', 'the device')}, in one piece"

    def run(self, work: Work) -> None:
        """Queues the copy."""
        backend, hosts = self._backend, work.arrays
        if self._file is not None:
            hosts = work.arrays = as_handed_over(self._file, work.arrays)
        if work.in_one_piece:
            memory = work.slot.memory
            layout = self._layout = self._layout or _SlotLayout.of(memory, work.arrays)
            large = self._copied(work, layout)
            storage = (work.raw if work.raw is not None else work.memory[0]).untyped_storage()
            layout = layout.cut(len(work.rows))
            for name, tensor in large.items():
                if name.startswith(INNER):
                    work.inner[name] = tensor if name == TRANSFORM_PARAMETERS else tensor[: len(work.rows)]
                elif name == "images" and not layout.turned:
                    work.fields[name] = tensor if len(tensor) == len(work.rows) else layout.large[name].of(storage)
                else:
                    part = layout.large[name].of(storage)
                    self._add(work, name, own_copy(part, backend, channels_last=name == "images"))
            if layout.small:
                small = own_copy(layout.tail.of(storage), backend)
                work.memory.append(small)
                storage, begin = small.untyped_storage(), layout.tail.offset
                work.fields |= {name: part.of(storage, begin) for name, part in layout.small.items()}
            hosts = {name: work.arrays[name] for name in layout.outside}
        for name, array in hosts.items():
            host = torch.from_numpy(array[: len(work.rows)])
            is_images = name == "images"
            moved = moved_as_stored(host, backend.copy, backend) if is_images else backend.copy(host.contiguous())
            self._add(work, name, moved)
        work.memory += _there_already(work)

    def _copied(self, work: Work, layout: _SlotLayout) -> dict[str, torch.Tensor]:
        """Queues the copy of a slot, and returns its large fields there, at their full size."""
        host = torch.from_numpy(work.slot.memory)
        if not self._again:
            slot = self._backend.copy(host)
            work.memory.append(slot)
            return {name: part.of(slot.untyped_storage()) for name, part in layout.large.items()}
        if self._copy is None:
            self._copy = self._backend.empty(tuple(host.shape), host.dtype)
            self._parts = {name: part.of(self._copy.untyped_storage()) for name, part in layout.large.items()}
        work.raw = self._backend.copy(host, self._copy)
        return self._parts

    def close(self) -> None:
        """Lets go of the memory."""
        self._copy, self._layout, self._parts = None, None, {}

    @staticmethod
    def _add(work: Work, name: str, moved: torch.Tensor) -> None:
        work.fields[name] = moved
        work.memory.append(moved)


class OnSideStream(Stage):
    """Runs stages of the hand-over on the side stream, behind the copy: the loop finds it done.

    For batches that are used once, where nothing of it has to run in the loop's thread.
    """

    where = Where.SIDE_STREAM

    def __init__(self, backend: Backend, stages: Sequence[Stage]) -> None:
        self._backend, self._stages = backend, stages

    def open(self, opened: Opened) -> None:
        """Opens the stages."""
        for stage in self._stages:
            stage.open(opened)

    def run(self, work: Work) -> None:
        """Runs the stages, and notes the memory that the user gets; the rest is read by the side stream alone."""
        of_others = _there_already(work)
        with self._backend.kernels():
            for stage in self._stages:
                stage.run(work)
        self._backend.note_read(of_others)
        for name, value in work.fields.items():
            if work.raw is not None and isinstance(value, torch.Tensor) and _is_of(value, work.raw):
                work.fields[name] = own_copy(value, self._backend, channels_last=name == "images")
        tensors = [one for value in work.fields.values() for one in (value if isinstance(value, list) else [value])]
        work.memory = list({tensor.untyped_storage()._cdata: tensor for tensor in tensors}.values())
        work.inner, work.drawn = {}, None

    def close(self) -> None:
        """Closes the stages."""
        for stage in self._stages:
            stage.close()

    def steps(self) -> Sequence[Stage]:
        """Returns the stages."""
        return self._stages


def _there_already(work: Work) -> list[torch.Tensor]:
    """Returns what reading threads brought to the device: a tensor of each piece of its memory."""
    found: list[torch.Tensor] = []
    for pixels in work.extra.values() if work.form is None else ():  # samples of Python code are not on it
        if isinstance(pixels, PlacedImages):
            found += (pixels.pixels, pixels.layout)
        elif isinstance(pixels, list):
            found += pixels[:1]  # all tensors of a list lie in one piece of memory
        elif isinstance(pixels, torch.Tensor):
            found.append(pixels)
    return found


def _is_of(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


class _Place(NamedTuple):
    """Where an array lies in memory."""

    offset: int  # in bytes
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # in items
    dtype: torch.dtype

    def cut(self, rows: int) -> _Place:
        """Returns the first rows of it."""
        return self._replace(shape=(rows, *self.shape[1:]))

    def of(self, storage: torch.UntypedStorage, begin: int = 0) -> torch.Tensor:
        """Returns the array in a copy of the memory from byte `begin` on: a tensor by itself, and no view of others.

        So writing to one field does not count as a change of the others, for autograd.
        """
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, (self.offset - begin) // self.dtype.itemsize, self.shape, self.stride)


class _SlotLayout(NamedTuple):
    """Where the fields of a batch lie in its slot, and in a copy of it."""

    large: dict[str, _Place]  # images, those that stay within the loader, and others that are not small
    small: dict[str, _Place]  # behind them
    tail: _Place  # uint8, from the first small one on
    outside: list[str]  # fields that do not lie in the slot, since they were converted
    turned: bool  # whether images lie there as (C, H, W): they cross the bus so, and are turned by the device
    rows: int  # that there is room for

    def cut(self, rows: int) -> _SlotLayout:
        """Returns the layout of a batch of fewer rows in the same slot."""
        if rows == self.rows:
            return self
        large, small = (
            {name: part if name == TRANSFORM_PARAMETERS else part.cut(rows) for name, part in parts.items()}
            for parts in (self.large, self.small)
        )
        return self._replace(large=large, small=small)

    @classmethod
    def of(cls, memory: NDArray[np.uint8], arrays: Mapping[str, NDArray[Any]]) -> _SlotLayout:
        """Returns the layout of arrays over a slot's memory."""
        large, small, outside = dict[str, _Place](), dict[str, _Place](), []
        for name, array in arrays.items():
            offset = array.ctypes.data - memory.ctypes.data
            if not 0 <= offset < memory.nbytes or not np.may_share_memory(memory, array):
                outside.append(name)
                continue
            host = torch.from_numpy(array)
            host = host.permute(0, 3, 1, 2) if name == "images" else host
            part = _Place(offset, tuple(host.shape), host.stride(), host.dtype)
            (small if SlotField(name, part.shape, array.dtype).small else large)[name] = part
        begin = min((part.offset for part in small.values()), default=memory.nbytes)
        assert all(part.offset < begin for part in large.values()), "small fields lie behind the others"
        tail, images = _Place(begin, (memory.nbytes - begin,), (1,), torch.uint8), arrays.get("images")
        turned = images is not None and not torch.from_numpy(images).is_contiguous()
        rows = max((len(array) for name, array in arrays.items() if name != TRANSFORM_PARAMETERS), default=0)
        return cls(large, small, tail, outside, turned, rows)
