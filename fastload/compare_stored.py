"""Rows of byte stores beside their source: each made again as it was packed, its JPEG or its pixels compared."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fastload.errors import ImageError
from fastload.fitting import Target
from fastload.format import PackedFile
from fastload.open_readers import SAMPLES
from fastload.pack.chunk_work import Worker
from fastload.pack.encode import RowEncoder
from fastload.pack.options import PackOptions
from fastload.pack.store_plan import StoreOption, StorePlan, ways
from fastload.store import JPEG, EncodedRow
from fastload.stored_rows import decode_row
from fastload.stored_samples import StoredSamples

GONE = "its image can no longer be decoded"
OTHER_MASK = 1 << 20
"""A difference that is no number of levels: the mask is another one."""


@dataclass(frozen=True)
class StoredTask:
    """Rows to compare, with the sample of the listing that each one holds.

    Attributes:
        file: header of the packed file.
        plan: as `plan_of` gives it.
        rows, samples: int64 (n,).
        headers: HEADERS (n,), of the samples; zero where it cannot be read.
    """

    file: PackedFile
    plan: StorePlan
    rows: NDArray[np.int64]
    samples: NDArray[np.int64]
    headers: NDArray[np.void]


def plan_of(file: PackedFile, options: PackOptions, target: Target | None) -> StorePlan:
    """How rows were made, as far as it decides about their pixels."""
    field = file.fields["images"]
    return StorePlan(
        channels=field.shape[2],
        dtype=field.dtype.newbyteorder("="),
        option=options.store or StoreOption(),
        target=target,
        max_size=options.max_size if target is None else None,
        images="store",
        masks="rows" if "masks" in file.fields else None,
    )


def compare_stored(worker: Worker, task: StoredTask) -> tuple[NDArray[np.int64], NDArray[np.int64], dict[int, str]]:
    """Rows, the largest difference of each in the file's own levels, and row -> why it differs otherwise."""
    differences, reasons = np.zeros(len(task.rows), np.int64), dict[int, str]()
    samples = SAMPLES.of(task.file)
    encoders = _MadeAgain(worker, task.plan)
    for at, (row, sample) in enumerate(zip(task.rows.tolist(), task.samples.tolist(), strict=True)):
        header = task.headers[at]
        if not header["height"]:
            continue  # its reason is known
        try:
            found: int | str = _compare_row(samples, encoders, row, sample, header)
        except (ImageError, OSError) as exc:
            found = f"{GONE}: {exc}"
        if isinstance(found, str):
            reasons[row] = found
        else:
            differences[at] = found
    return task.rows, differences, reasons


class _MadeAgain:
    """What makes rows as they were made; a JPEG in one of two ways, if its file says no more than that."""

    def __init__(self, worker: Worker, plan: StorePlan) -> None:
        masks = worker.masks if plan.masks else None
        self.masked = masks is not None
        self._source = replace(plan, option=StoreOption("source"))
        options = {"raw": StoreOption(), "source": StoreOption("source"), "jpeg": replace(plan.option, kind="jpeg")}
        self._encoders = {
            kind: RowEncoder(worker.images, masks, replace(plan, option=option)) for kind, option in options.items()
        }
        self._kept = plan.option.kind != "jpeg"

    def again(self, sample: int, header: np.void, *, jpeg: bool) -> EncodedRow:
        """The row of a sample, as pixels or as JPEG."""
        if not jpeg:
            return self._encoders["raw"].encode(sample, header)
        if self._kept:
            made = self._encoders["source"].encode(sample, header)
            if made.encoding == JPEG:
                return made
        return self._encoders["jpeg"].encode(sample, header)

    def keeps(self, sample: int, header: np.void) -> bool:
        """Whether a JPEG is the sample's own file."""
        return self._kept and bool(ways(self._source, sample, header)[0])


def _compare_row(samples: StoredSamples, encoders: _MadeAgain, row: int, sample: int, header: np.void) -> int | str:
    """The largest difference of a row, or why it differs."""
    stored = samples.stored("images", row)
    is_jpeg = stored.encoding == JPEG
    now = encoders.again(sample, header, jpeg=is_jpeg)
    if now.shape != stored.shape:
        return (
            f"its image is {now.shape[1]}x{now.shape[0]} (width x height), packed was "
            f"{stored.shape[1]}x{stored.shape[0]}"
        )
    if encoders.masked and not np.array_equal(
        np.frombuffer(now.mask or b"", np.uint8), samples.pixels("masks", row).reshape(-1)
    ):
        return OTHER_MASK
    if is_jpeg and now.encoding == JPEG and now.image == stored.data:
        return 0
    dtype = samples.file.fields["images"].dtype
    pixels = decode_row(bytes(now.image), now.encoding, now.shape, now.orientation, dtype)
    levels = int(np.abs(pixels.astype(np.int64) - samples.pixels("images", row)).max())
    if is_jpeg and encoders.keeps(sample, header):
        return "its JPEG has other bytes" + (f" (pixels differ by up to {levels} levels)" if levels else "")
    return levels
