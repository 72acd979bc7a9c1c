"""Draws a contact sheet of a packed file: some of its images with labels, masks, boxes and landmarks.

In: a file. Out: a PNG. `make_preview` below chooses and reads the rows; `overlay` draws marks over an image and makes
its label; `sheet` arranges the page.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from fastload.errors import ImageError, OptionError
from fastload.format.codecs import load_filters
from fastload.format.header import PackedFile, open_hdf5, read_header
from fastload.inspection.preview.overlay import labels_of, marks_of
from fastload.inspection.preview.sheet import Thumbnail, draw_sheet
from fastload.read.checked import CheckedSamples
from fastload.read.ragged_rows import sample_error
from fastload.system.files import check_new_file, save_bytes
from fastload.system.whole_numbers import check_whole


def make_preview(
    path: str | Path,
    output: str | Path,
    *,
    count: int = 40,
    split: str | None = None,
    seed: int = 0,
    overwrite: bool = False,
) -> tuple[int, ...]:
    """Draws a contact sheet as a PNG and returns the rows it shows.

    The rows are spread evenly over the file (or one split): one is drawn at random from each of `count` equal parts.
    Small images are enlarged by whole factors, large ones reduced; transparency shows a checkerboard; masks are drawn
    half-transparent; boxes (`boxes`, `bbox`) and landmarks are drawn if the names of their columns define their form;
    16 bits are scaled to the largest value shown.

    Args:
        path: a packed file, or any HDF5 file with a dataset `images` of uint8 or uint16.
        output: .png to write; it appears complete or not at all.
        count: images to show.
        split: name of the split to show; None for all rows.
        seed: another seed shows other images.
        overwrite: whether to replace an existing output.

    Raises:
        MissingFileError, FormatError: as `read_header`.
        OptionError: the file holds no images, or count, split or the output's suffix is invalid.
        OutputError: the output exists or cannot be written.
    """
    path, output = Path(path), Path(output)
    if output.suffix.lower() != ".png":
        raise OptionError(f"{output}: a preview is a PNG; give it a name that ends in .png.")
    check_new_file(output, force=overwrite, option="--overwrite")
    check_whole("count", count, least=1)
    check_whole("seed", seed, least=0)
    file = read_header(path)
    if "images" not in file.fields:
        raise OptionError(
            f"{path}: holds no images, so there is nothing to draw. `fastload info {path}` lists what it holds."
        )
    if split is not None and split not in file.splits:
        known = ", ".join(file.splits) or "it has no splits"
        raise OptionError(f"{path}: no split {split!r}; accepted: {known}.")
    rows = _spread(file.splits[split] if split is not None else range(file.num_rows), count, seed)
    with open_hdf5(path) as hdf5:
        for name in file.fields:
            load_filters(path, name, hdf5[name])
        with closing(CheckedSamples(file)) as samples:
            pixels = {name: [_pixels(samples, name, row) for row in rows] for name in samples.names}
        thumbnails = _thumbnails(hdf5, file, rows, pixels)
    picture = io.BytesIO()
    draw_sheet(file, thumbnails, split).save(picture, format="PNG", optimize=False)
    save_bytes(picture.getvalue(), output, force=True)
    return rows


def _pixels(samples: CheckedSamples, name: str, row: int) -> NDArray[Any]:
    """Returns an image or a mask; raises FormatError, naming the sample, if it cannot be read."""
    try:
        return samples.pixels(name, row)
    except ImageError as exc:
        raise sample_error(samples.file, row, str(exc)) from exc


def _spread(rows: range, count: int, seed: int) -> tuple[int, ...]:
    """Returns `count` different rows (all if there are fewer), ascending, one from each of as many equal parts."""
    count = min(count, len(rows))
    edges = np.arange(count + 1) * len(rows) // count
    return tuple(rows[int(at)] for at in np.random.default_rng(seed).integers(edges[:-1], edges[1:]))


def _thumbnails(
    hdf5: h5py.File, file: PackedFile, rows: Sequence[int], pixels: Mapping[str, Sequence[NDArray[Any]]]
) -> list[Thumbnail]:
    images = [_channels_last(image) for image in pixels["images"]]
    if images[0].dtype.itemsize > 1:
        top = max(1, *(int(image.max(initial=0)) for image in images))
        images = [(image.astype(np.uint32) * 255 // top).astype(np.uint8) for image in images]
    masks: list[NDArray[np.uint8] | None] = [None] * len(rows)
    if "masks" in pixels:
        # A mask of another size, as other tools may write it, cannot be drawn over the image.
        fitting = zip(pixels["masks"], images, strict=True)
        masks = [mask if mask.shape == image.shape[:2] else None for mask, image in fitting]
    marks = marks_of(hdf5, file, rows, masks)
    labels = labels_of(hdf5, file, rows)
    split_of = {row: name for name, run in file.splits.items() for row in rows if row in run}
    several = len(file.splits) > 1
    row_texts = [f"{split_of.get(row, '')} · row {row}" if several else f"row {row}" for row in rows]
    return [Thumbnail(*parts) for parts in zip(images, marks, labels, row_texts, strict=True)]


def _channels_last(image: NDArray[Any]) -> NDArray[Any]:
    if image.ndim == 2:
        return image[..., None]
    if image.shape[2] in (1, 3, 4):
        return image
    return image.transpose(1, 2, 0) if image.shape[0] in (1, 3, 4) else image[..., :1]
