"""What a call of the packer says of its work."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from fastload.format import PIXEL_FIELDS, PackedFile
from fastload.pack.resume import PackJob
from fastload.store import index_names

_NOT_OF_THE_SAMPLE = ("images", "split", "key", "digest", "digest_fields")


@dataclass(frozen=True)
class PackReport:
    """What was packed.

    Attributes:
        path: the finished file.
        layout: name of the source's layout.
        num_samples: rows of the file.
        image_shape: (H, W, C), 0 where images differ; () without images.
        dtype: "uint8" or "uint16"; "" without images.
        fields: names of the file's other datasets that hold something of a sample: masks, labels, ...
        splits: name -> number of rows.
        converted: how many images were changed in kind, by a description such as "gray -> RGB".
        skipped: (key, reason) of each sample left out.
        notes: what was recognised in the source, what was absent or ignored, and what was chosen.
        file_bytes: size of the file.
        seconds: time this call took.
        images_per_s: images this call decoded over the time that decoding and writing them took.
        chunks: chunks of the file as planned; of a pack in order, its tasks.
        chunks_kept: those that an earlier, interrupted call had packed.
        chunks_decoded: those that this call decoded.
        store: how images are stored, such as "raw" or "jpeg:90".
        encodings: how many rows are "raw", "jpeg" and "zstd".
    """

    path: Path
    layout: str
    num_samples: int
    image_shape: tuple[int, ...]
    dtype: str
    fields: tuple[str, ...]
    splits: dict[str, int]
    converted: dict[str, int]
    skipped: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    file_bytes: int
    seconds: float
    images_per_s: float
    chunks: int
    chunks_kept: int
    chunks_decoded: int
    store: str = "raw"
    encodings: dict[str, int] = field(default_factory=dict)


def report_of(
    job: PackJob,
    file: PackedFile,
    converted: dict[str, int],
    skipped: tuple[tuple[str, str], ...],
    *,
    started: float,
    images_per_s: float,
    chunks: int,
    chunks_kept: int,
    chunks_decoded: int,
    notes: tuple[str, ...],
    store: str = "raw",
    encodings: dict[str, int] | None = None,
) -> PackReport:
    """The report of a file that is finished.

    Args:
        started: by time.perf_counter().
        encodings: by default all rows are raw.
    """
    images = file.fields.get("images")
    return PackReport(
        path=job.output,
        layout=job.listing.layout,
        num_samples=file.num_rows,
        image_shape=images.shape if images else (),
        dtype=str(images.dtype) if images else "",
        fields=tuple(name for name in file.fields if name not in _NOT_OF_THE_SAMPLE and not _of_store(name, file)),
        splits={name: len(rows) for name, rows in file.splits.items()},
        converted=converted,
        skipped=skipped,
        notes=notes,
        file_bytes=file.identity.size,
        seconds=time.perf_counter() - started,
        images_per_s=images_per_s,
        chunks=chunks,
        chunks_kept=chunks_kept,
        chunks_decoded=chunks_decoded,
        store=store,
        encodings={"raw": file.num_rows} if encodings is None and images else encodings or {},
    )


def _of_store(name: str, file: PackedFile) -> bool:
    """Whether a dataset tells where the rows of a store lie."""
    return any(
        field is not None and field.store is not None and name in index_names(field.name)
        for field in map(file.fields.get, PIXEL_FIELDS)
    )
