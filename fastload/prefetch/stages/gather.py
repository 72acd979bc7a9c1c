"""Rows of a packed file: copied into the slot, or for later stages, with texts; and the slot as the user gets it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.dataset import PackedDataset, as_handed_over
from fastload.format.header import PackedFile
from fastload.prefetch.ring import Ring, SlotField
from fastload.prefetch.work import Layout, Opened, Stage, Where, Work, fields_on_cpu, split
from fastload.read.linear import Read
from fastload.read.reader import Rows, image_axes, open_rows, with_counts
from fastload.timing.probe import span
from fastload.timing.stopwatch import lap


class GatherRows(Stage):
    """Copies rows from the file into the slot; or to tensors of their own, for stages that go on with them."""

    where = Where.THREAD
    divisible = True

    def __init__(
        self, dataset: PackedDataset, names: Sequence[str], *, into_slot: bool, mapped: MappedImages | None = None
    ) -> None:
        self._file, self._into_slot, self._mapped = dataset.file, into_slot, mapped
        self._layout = [item for item in dataset.layout() if item[0] in names]
        known = ", ".join(name for name, _, _ in self._layout)
        encoded = ", ".join(name for name in names if name in dataset.file.ragged)
        self.why = f"{known}: as the file has them" if into_slot else f"{known}: for the stages behind it"
        if not known:
            self.why = "compares rows with their digests"
        elif encoded:
            self.why += f"; {encoded} decoded"
        if mapped is not None:
            self.why += "; images stay where they are mapped"

    def open(self, opened: Opened) -> None:
        """Takes the reader; images that the transforms take from the mapping are left to them."""
        self._reader = opened.reader
        if self._mapped is not None and self._mapped.open(opened.reader):
            self._layout = [item for item in self._layout if item[0] != "images"]

    def output(self, given: Layout) -> Layout:
        """Adds the fields: as the file has them, or as they are handed over."""
        one = {name: np.empty((1, *shape), dtype) for name, shape, dtype in self._layout}
        one = one if self._into_slot else as_handed_over(self._file, one)
        return given | {name: (array.shape[1:], array.dtype) for name, array in one.items()}

    def run(self, work: Work) -> None:
        """Gathers the rows, which checks them, and that the file is the same."""
        if self._into_slot:
            with span("read"):
                work.copied.append(self._reader.gather(work.rows, work.arrays))
            return
        read = {name: np.empty((len(work.rows), *shape), dtype) for name, shape, dtype in self._layout}
        work.copied.append(self._reader.gather(work.rows, read))
        lap("reading")
        work.fields |= fields_on_cpu(as_handed_over(self._file, read))


class MappedImages:
    """The images of a file where they lie, for transforms that read no more of each than its window.

    Attributes:
        rows: uint8 (N, H, W, C); None: they are not mapped as such.
    """

    def __init__(self, file: PackedFile) -> None:
        self._file = file
        self.rows: torch.Tensor | None = None

    def open(self, reader: Rows) -> bool:
        """Takes the mapping, and returns whether there is one."""
        field, mapped = self._file.fields["images"], reader.mapped("images")
        plain = field.ragged is None and field.dtype == np.uint8 and image_axes(self._file) != "CHW"
        if mapped is not None and plain:
            shape = field.shape if len(field.shape) == 3 else (*field.shape, 1)
            self.rows = torch.from_numpy(writable(mapped)).view(len(mapped), *shape)
        return self.rows is not None


class WhileHeld(Stage):
    """Runs stages while the files of a batch's rows are held, so that what is mapped may be touched.

    They run again where a file was touched meanwhile, or what came over a network had changed on its way.
    """

    where = Where.THREAD

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages
        self.divisible = all(stage.divisible for stage in stages)
        self.alone = any(stage.alone for stage in stages)

    def open(self, opened: Opened) -> None:
        """Takes the reader, and opens the stages."""
        self._reader = opened.reader
        for stage in self._stages:
            stage.open(opened)

    def output(self, given: Layout) -> Layout:
        """Returns the fields behind the last stage."""
        for stage in self._stages:
            given = stage.output(given)
        self.views = {name: dtype for stage in self._stages for name, dtype in stage.views.items()}
        return given

    def run(self, work: Work) -> None:
        """Runs the stages."""

        def run() -> None:
            work.copied.clear()
            work.fields.clear()
            for stage in self._stages:
                stage.run(work)

        use_one_torch_thread()
        with span("read"):
            self._reader.within(work.rows, run)

    def close(self) -> None:
        """Closes the stages."""
        for stage in self._stages:
            stage.close()

    def steps(self) -> Sequence[Stage]:
        """Returns the stages."""
        return self._stages


class StoreInSlot(Stage):
    """Copies the fields that do not lie in the slot yet to their places there; those without a place travel with it."""

    where = Where.THREAD
    why = "into the memory of the batch, what does not lie there yet"
    divisible = True

    def run(self, work: Work) -> None:
        """Copies, and moves the others to `Work.extra`."""
        for name, target in work.targets.items():
            made = work.fields.pop(name, None)
            if made is not None and made.data_ptr() != target.data_ptr():
                target.copy_(made)
        work.extra |= work.fields
        work.fields = {}
        lap("transform")


class WriteFacts(Stage):
    """Writes row numbers and valid flags into the slot, so that they go to a device with the samples, in one copy."""

    where = Where.THREAD
    why = "batch.rows and batch.valid cross the bus with the samples"
    divisible = True

    def own_fields(self, batch_size: int) -> list[SlotField]:
        """Returns their fields."""
        return fact_fields(batch_size)

    def run(self, work: Work) -> None:
        """Writes them."""
        work.arrays["row"][:], work.arrays["valid"][:] = work.whole.rows, work.whole.valid


class ReadTexts(Stage):
    """Reads texts, which lie in no slot and go to no device."""

    where = Where.THREAD

    def __init__(self, dataset: PackedDataset, read: Read, *, alone: bool) -> None:
        self._dataset = dataset
        self.why = f"{', '.join(dataset.text_fields)}: texts are no tensors, and go to no device"
        # Where rows come from a cache, nothing else reads the file, or has compared the rows.
        self._own = with_counts(dataset.file, dataset.text_fields) if alone else ()
        self._read = read
        self._reader: Rows | None = None

    def open(self, opened: Opened) -> None:
        """Takes the reader, or opens one for the texts alone."""
        dataset = self._dataset
        self._reader = opened.reader
        if self._own:
            self._reader = open_rows(dataset.file, self._own, self._read, check=dataset.check)

    def run(self, work: Work) -> None:
        """Reads the texts of the rows."""
        reader, rows = self._reader, work.rows
        assert reader is not None, "it was opened"
        with span("read"):
            if not self._own:
                work.texts = self._dataset.texts(reader, rows)
                return

            def read() -> None:
                reader.gather(rows, {})  # which compares them
                work.texts = self._dataset.texts(reader, rows)

            reader.within(rows, read)

    def close(self) -> None:
        """Closes a reader of its own."""
        if self._own and self._reader is not None:
            self._reader.close()


class ToUserLayout(Stage):
    """Lends the slot to the user, as tensors: done by the thread that filled it.

    The training loop has nothing of this in its core's caches after a step, and would take 0.2 ms for it.
    """

    where = Where.THREAD

    def __init__(self, file: PackedFile | None) -> None:
        self.why = "the memory of the batch as tensors, without a copy"
        self._file = file  # whose rows lie in the slot as they are; None: they lie there as they are handed over
        self.ring: Ring | None = None  # set when its slots are known

    def run(self, work: Work) -> None:
        """Lends the slot, and splits the work into its members."""
        assert self.ring is not None, "the slots are known"
        try:
            work.lent = self.ring.lend(work.slot)
            self.split(work, work.lent)
        except BaseException:
            work.slot.loan = None  # it was not lent
            raise

    def split(self, work: Work, arrays: dict[str, NDArray[Any]]) -> None:
        """Splits a work into its members, each with its part of some arrays over the slot, or of copies."""
        if self._file is not None:
            arrays = as_handed_over(self._file, arrays)
        parts, texts = split(arrays, work.members), split(work.texts, work.members)
        work.split = []
        for part, said, planned in zip(parts, texts, work.members, strict=True):
            one = Work(work.slot, work.orders, work.epoch, planned, (planned,))
            one.fields, one.texts = fields_on_cpu(part, work.orders.views), said
            one.extra, one.facts = work.extra, dict(work.facts)  # of a batch that is alone in its slot
            one.copied = [work.bytes_read * len(planned.rows) // len(work.rows)]
            work.split.append(one)


def fact_fields(batch_size: int) -> list[SlotField]:
    """Returns the fields of a slot for what the plan says of each sample."""
    return [SlotField("row", (batch_size,), np.dtype(np.int64)), SlotField("valid", (batch_size,), np.dtype(np.bool_))]


def writable(mapped: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns the bytes of a read-only mapping, uint8 (T,), as an array that claims to be writable; it is not."""
    # torch warns of arrays that cannot be written to, as if somebody would.
    return np.ctypeslib.as_array((ctypes.c_uint8 * mapped.nbytes).from_address(mapped.ctypes.data))


def use_one_torch_thread() -> None:
    """Lets torch's kernels run in the calling thread alone from now on; other threads keep their number.

    There are as many reading threads as CPUs, and a team of OpenMP for each of them fights with the model's for the
    cores.
    """
    before = torch.get_num_threads()
    if before == 1:
        return
    torch.set_num_threads(1)
    # torch also gives the number to threads that begin later; a thread that ends at once puts it back.
    helper = threading.Thread(target=torch.set_num_threads, args=(before,))
    helper.start()
    helper.join()
