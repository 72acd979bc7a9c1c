"""Packing: a dataset as it lies on disk becomes one HDF5 file of chunked uint8 pixels.

`pack_images` surveys the source, lets worker processes decode and write chunks in place, and finishes the file.
What is under way lies in `OUT.h5.part` and `OUT.h5.journal` (and masks in `OUT.h5.masks` where rows have no size
beforehand: see `fastload.pack.ordered`); the same call continues it after a kill.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastload.cpus import available_cpus
from fastload.errors import OptionError, OutputError
from fastload.layout import CHUNK_BYTES
from fastload.pack.options import Bits, Fit, Mode, PackOptions, Progress
from fastload.pack.report import PackReport
from fastload.pack.resume import PackJob, exists, journal_path
from fastload.pack.run import run_job
from fastload.pack.store_plan import parse_store
from fastload.pack.survey import Survey, limited, list_samples, survey_source
from fastload.pack.workers import WorkerPool
from fastload.sources.listing import Listing, OnError
from fastload.sources.options import MasksWanted, SourceOptions
from fastload.sources.tree import open_tree

__all__ = ["PackOptions", "PackReport", "Survey", "check_output", "pack_images", "pack_listing", "survey_source"]


def pack_images(
    source: str | Path | Sequence[Any],
    output: str | Path,
    *,
    layout: str | None = None,
    masks: MasksWanted = "auto",
    labels: Sequence[str] = (),
    image_column: str = "",
    split_column: str = "",
    root: str | Path | None = None,
    size: int | tuple[int, int] | None = None,
    fit: Fit = "crop",
    mode: Mode | None = None,
    bits: Bits | None = None,
    store: str | None = None,
    max_size: int | None = None,
    codec: str = "auto",
    workers: int | None = None,
    seed: int = 0,
    shuffle: bool = True,
    chunk_bytes: int = CHUNK_BYTES,
    limit: int | None = None,
    on_error: OnError = "fail",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> PackReport:
    """Pack a dataset of images into one HDF5 file.

    Interrupted, the same call continues: chunks that an earlier call packed are checked and kept.

    Args:
        source: folder, .zip, .tar, table or array file in a known layout (`fastload layouts` lists them); or any object
            with a length whose items are (image or array, label), such as a torchvision dataset: PIL images, uint8 or
            uint16 arrays (H, W[, C]), encoded bytes. Its items are asked for twice and must be the same then.
        output: file to make; beside it lie `.part` and `.journal` until it is complete, and `.masks` and `.meta` where
            masks are brought behind the images, and metadata or compressed chunks are made.
        layout: name of the layout; recognised by default.
        masks: "auto": masks that lie there as files; "none"; "semantic" or "instance": those, drawn from polygons where
            the layout has no files of them.
        labels: the columns of a table that are labels; by default those with a usual name.
        image_column: the column of a table that names or holds the images.
        split_column: the column of a table that names the split.
        root: folder that a table's paths are relative to.
        size: height and width that every image gets, one number for a square; by default each keeps its own.
        fit: "crop": resize to cover, cut the middle; "pad": resize to fit inside, black around; "stretch".
        mode: "rgb", "gray" or "rgba" converts on purpose; by default gray stays gray if all are gray, else RGB.
        bits: 8 keeps the high byte of 16-bit images, 16 insists on them; by default 16 stay 16 if all have them.
        store: "raw": pixels, the default; "jpeg" or "jpeg:QUALITY": encoded anew; "source": each file's own bytes where
            it is a JPEG, without a second loss, unless `max_size` makes it smaller; "mixed:FRACTION": so many of the
            rows as JPEG, the others as pixels.
        max_size: pixels of an image's shorter side at most; larger ones are resized to it, without `size`. A JPEG
            resized under store="source" is encoded anew, with quality 90.
        codec: lossless compression of what is not JPEG: "none", "gzip[:LEVEL]", "zstd[:LEVEL]"; "auto": zstd for masks
            that it makes half as large.
        workers: processes that decode, by default one per CPU; 0 decodes in this process.
        seed: of the order of rows.
        shuffle: shuffle rows within each split; False keeps the order of the source.
        chunk_bytes: size at which chunks aim.
        limit: pack only so many samples, spread evenly over the source.
        on_error: "fail" stops at an image that cannot be decoded, "skip" leaves it out and lists it.
        overwrite: replace an output that exists, and discard an unfinished pack of something else.
        progress: called with (stage, done, total).

    Raises:
        SourceError: the source cannot be packed as it is.
        OptionError: an argument has no meaning.
        OutputError: the output exists, or cannot be written.
        ResumeError: an unfinished pack of another source, option or release is in the way.
        PackError: a worker died, or another process packs to the same output.
    """
    if isinstance(labels, str):
        raise OptionError(f"labels={labels!r}: give a list of columns, such as [{labels!r}].")
    said = SourceOptions(masks, tuple(labels), image_column, split_column, Path(root) if root is not None else None)
    square = (size, size) if isinstance(size, int) else size
    options = PackOptions(
        square, fit, mode, seed, shuffle, chunk_bytes, limit, said, bits,
        parse_store(store) if store is not None else None, max_size, codec,
    )  # fmt: skip
    if not isinstance(source, (str, Path)):
        from fastload.sources.objects import list_objects

        return pack_listing(
            limited(list_objects(source, on_error=on_error), options), output, options=options,
            source_name=type(source).__name__, workers=workers or 0, on_error=on_error, overwrite=overwrite,
            progress=progress,
        )  # fmt: skip
    started = time.perf_counter()
    output = _checked_output(output, overwrite, workers)
    _check_apart(Path(source), output)
    with WorkerPool(available_cpus() if workers is None else workers) as pool:
        # Imported here: repacking, which has its listing, does without all the layouts.
        from fastload.sources import LAYOUTS, detect_layout

        tree = open_tree(source)
        name = layout or detect_layout(tree)[0]
        if name not in LAYOUTS or LAYOUTS[name].decodes:
            pool.start_early()
        listing = list_samples(tree, name, options, on_error)
        return run_job(PackJob(str(source), output, listing, options, on_error, overwrite, progress), pool, started)


def pack_listing(
    listing: Listing,
    output: str | Path,
    *,
    options: PackOptions,
    source_name: str,
    workers: int | None = None,
    on_error: OnError = "fail",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> PackReport:
    """Pack a listing that is at hand already; otherwise as `pack_images`.

    Args:
        source_name: what messages call the source.
    """
    started = time.perf_counter()
    output = _checked_output(output, overwrite, workers)
    with WorkerPool(available_cpus() if workers is None else workers) as pool:
        return run_job(PackJob(source_name, output, listing, options, on_error, overwrite, progress), pool, started)


def _checked_output(output: str | Path, overwrite: bool, workers: int | None) -> Path:
    """The path to write to: what a link names, so that the link stays."""
    if workers is not None and workers < 0:
        raise OptionError(f"workers={workers}: needs at least 0.")
    output = Path(output)
    if output.is_symlink():
        output = output.resolve()
    check_output(output)
    if output.exists() and not overwrite and not journal_path(output).exists():
        raise exists(output)
    return output


def check_output(output: Path) -> None:
    """Refuse an output that cannot be, before any work."""
    if output.is_dir():
        raise OutputError(f"{output}: a folder. Name a file in it, such as {output / 'out.h5'}.")
    if output.exists() and not output.is_file():
        raise OutputError(f"{output}: a device or pipe, which cannot hold a packed file. Name a file.")
    if output.name.endswith((".part", ".journal", ".meta", ".masks")):
        raise OutputError(f"{output}: this ending is kept for unfinished packs. Choose another name, such as out.h5.")
    if not output.absolute().parent.is_dir():
        raise OutputError(f"{output}: its folder {output.absolute().parent} does not exist. Make it first.")


def _check_apart(source: Path, output: Path) -> None:
    """Refuse an output that is the source, or lies in it."""
    if source.is_dir() and output.resolve().is_relative_to(source.resolve()):
        raise OutputError(
            f"{output}: lies inside the source {source}, which would then contain its own packed copy. Choose a "
            f"folder outside of it."
        )
    if source.exists() and output.exists() and output.samefile(source):
        raise OutputError(f"{output}: is the source itself. Choose another name.")
