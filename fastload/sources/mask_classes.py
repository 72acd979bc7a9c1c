"""The user's options for masks: which values or colours stand for which class, and masks drawn at another size.

`with_mask_options` puts a reader around the masks of a listing, whatever its layout is. It gives the classes 0 to K - 1
in the order in which they were named, at the size of the image.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import ImageError, OptionError, SourceError
from fastload.images.decode import as_index_mask, read_mask, upright
from fastload.images.fit import Target, resample_mask
from fastload.images.image_header import ImageHeader, header_of_pixels
from fastload.options.masks import Classes, classes_of_palette, classes_of_values
from fastload.options.pack import MaskOptions
from fastload.sources.assemble import header_of, values_in_masks
from fastload.sources.listing import Files, Listing, Masks, Pictures, Reader, first_few

COLOURS = "Masks are colours"
"""Begins notes that say what palette a dataset has or lacks, which are of no use to whoever gives one."""

_SAME_SHAPE = 0.01  # difference of aspect ratios up to which a mask of another size shows the whole of its image
_LOOKED_AT = 256  # masks, to find out what values they hold


def type_of_numbers(most: int, what: str = "") -> tuple[np.dtype[Any], int]:
    """Returns the type of masks that hold numbers up to `most`, and its largest value, which means no class.

    SourceError, about `what`: 16 bits do not hold them.
    """
    if most > 65_534:
        raise SourceError(f"{what}: {most:,}, but a mask of 16 bits holds 65,534 next to background and void.")
    return (np.dtype(np.uint8), 255) if most <= 254 else (np.dtype(np.uint16), 65_535)


def _type_of(classes: Classes) -> np.dtype[Any]:
    """Returns the type of masks of these classes, and of the value for none."""
    return type_of_numbers(len(classes.codes) - 1)[0]


def with_mask_options(
    listing: Listing, options: MaskOptions, source: str | Path, *, padded: bool = False, stored: bool = False
) -> Listing:
    """Returns the listing with masks as the options say.

    `padded`: images are brought to a size with padding. `stored`: masks that are files were drawn on the images as
    these are stored, and are turned as EXIF turns these.

    Raises:
        OptionError: it has no masks.
    """
    masks = listing.masks
    if masks is None or listing.files is None:
        if options != MaskOptions():
            raise OptionError(
                f"{source}: packed without masks (layout {listing.layout}), so {', '.join(_given(options))} means "
                f"nothing. Leave it out."
            )
        return listing
    # What `fastload export` wrote is to become what it was.
    said = replace(options, values="keep") if listing.layout == "exported" and options == MaskOptions() else options
    if masks.palette and said.values == "auto" and not said.palette:
        said = replace(said, palette=masks.palette)
    classes, notes = _classes(masks, said)
    kept = [note for note in listing.notes if not (options.palette and note.startswith(COLOURS))]
    listing = replace(listing, notes=(*kept, *notes))
    turned = listing.files if stored and not masks.drawn and isinstance(listing.files, Files) else None
    if classes is None and options.size == "same" and turned is None:
        return _with_padding(listing) if padded else listing
    names, ignore, attrs, dtype = masks.names, masks.ignore_index, masks.attrs, masks.dtype
    if classes is not None:
        names, dtype = classes.names, _type_of(classes)
        if classes.ignored or (ignore is not None and ignore < len(names)):
            ignore = ignore if ignore is not None and ignore >= len(names) else classes.nothing
        attrs = {**attrs, "source_values": tuple(map(classes.written, classes.codes))}
    images = listing.files if options.size == "image" else None
    files = MappedMasks(masks.files, images, classes, masks.ignore_index, ignore, turned)
    masks = replace(masks, files=files, names=names, ignore_index=ignore, attrs=attrs, dtype=dtype)
    listing = replace(listing, masks=masks)
    return _with_padding(listing) if padded else listing


def _with_padding(listing: Listing) -> Listing:
    """Returns the listing whose masks have a value for what `--fit pad` leaves black, if classes are known; a note."""
    masks = listing.masks
    if masks is None or masks.ignore_index is not None:
        return listing
    if isinstance(masks.files, MappedMasks) and masks.files.classes is not None:
        masks = replace(masks, ignore_index=masks.files.classes.nothing)
        note = f"Padding is {masks.ignore_index} in masks, which is ignored."
        return replace(listing, masks=masks, notes=(*listing.notes, note))
    note = "Padding is 0 in masks, which may be a class: `--mask-values` names the classes, and makes it 255, ignored."
    return replace(listing, notes=(*listing.notes, note))


def _given(options: MaskOptions) -> list[str]:
    names = {"size": "--mask-size", "values": "--mask-values", "palette": "--palette", "ignore": "--ignore-index"}
    return [f"`{name}`" for at, name in names.items() if getattr(options, at) != getattr(MaskOptions(), at)]


def _classes(masks: Masks, options: MaskOptions) -> tuple[Classes | None, list[str]]:
    """Returns the classes that the options name, or a binary mask's; None: values stay; and notes on that."""
    if options.palette:
        return classes_of_palette(options.palette, options.ignore), []
    if options.values not in ("auto", "keep"):
        return classes_of_values(options.values, options.ignore), []
    if options.values == "keep" or masks.names or not isinstance(masks.files, Files):
        return None, []
    rows = np.flatnonzero(masks.present).tolist()
    seen = tuple(values_in_masks(masks.files, rows, _LOOKED_AT).tolist())
    looked = f"({min(len(rows), _LOOKED_AT)} looked at)"
    if seen == (0, 1):
        return None, [f"Masks hold 0 and 1 {looked}: two classes."]
    if seen[:1] != (0,) or seen[-1] not in (255, 65_535):
        return None, []
    top = seen[-1]
    if len(seen) > 2:
        others = first_few(map(str, seen[1:-1]))
        return None, [f"Masks hold 0, {top} and {others} {looked}, and stay so: `--mask-values` names classes."]
    note = f"Masks hold 0 and {top} {looked}: packed as classes 0 and 1; `--mask-values keep` leaves them as they are."
    return Classes(seen, ("0", str(top)), guessed=True), [note]


@dataclass(frozen=True, eq=False)
class MappedMasks:
    """Masks of classes 0 to K - 1, (H, W), out of masks of other values, colours or sizes."""

    masks: Reader
    images: Reader | None  # whose size the masks get; None: they keep their own
    classes: Classes | None  # None: values stay as they are
    source_ignore: int | None  # the value of `masks` that means no class
    ignore: int | None  # how it is packed
    turned: Reader | None = None  # images by whose EXIF orientation masks are turned; None: they are upright

    def header(self, i: int) -> ImageHeader:
        """Returns the header of the mask from `read(i)`; ImageError where the shape is not the image's."""
        own = header_of(self.masks, i)
        size = (own.width, own.height) if self._orientation(i) > 4 else (own.height, own.width)
        size = size if self.images is None else self._size(i, *size)
        return header_of_pixels(size, self._dtype(own.bits))

    def read(self, i: int) -> NDArray[Any]:
        """Returns mask i, (H, W), uint8 or for many classes, or numbers of 16 bits that stay as they are, uint16.

        ImageError: it holds a value or colour that stands for no class.
        """
        values = self._mapped(self._pixels(i))
        values = np.ascontiguousarray(upright(values[..., None], self._orientation(i))[..., 0])
        if self.images is None:
            return values
        height, width = self._size(i, *values.shape)
        if values.shape == (height, width):
            return values
        sized = np.empty((height, width), values.dtype)
        resample_mask(values, Target(height, width, 1, values.dtype, "stretch"), sized)
        return sized

    def take(self, indices: NDArray[np.integer[Any]]) -> MappedMasks:
        """Returns the masks of the samples at these indices, in their order."""
        images, turned = (None if of is None else of.take(indices) for of in (self.images, self.turned))
        return replace(self, masks=self.masks.take(indices), images=images, turned=turned)

    def _orientation(self, i: int) -> int:
        """Returns the EXIF orientation by which mask i is to be turned: its image's, unless it has its own."""
        if self.turned is None or (isinstance(self.masks, Files) and header_of(self.masks, i).orientation != 1):
            return 1
        return header_of(self.turned, i).orientation

    def _pixels(self, i: int) -> NDArray[Any]:
        """Returns the values of mask i, (H, W), or its colours, uint8 (H, W, 3)."""
        if isinstance(self.masks, Files):
            return read_mask(self.masks.read(i), colours=self.classes is not None and self.classes.colours)
        if self.classes is not None and self.classes.colours:
            raise ImageError("is an array of numbers, so a palette of colours says nothing of it")
        if isinstance(self.masks, Pictures):
            values: NDArray[Any] = self.masks.read(i)
            return values
        out = np.empty((1, *self.masks.shape), self.masks.dtype)
        self.masks.read_rows(np.array([i]), out)
        pixels: NDArray[Any] = out[0]
        return pixels

    def _dtype(self, bits: int) -> np.dtype[Any]:
        """Returns the type of masks out of those with so many bits."""
        return np.dtype(f"u{bits // 8}") if self.classes is None else _type_of(self.classes)

    def _mapped(self, pixels: NDArray[Any]) -> NDArray[Any]:
        """Returns the class of each pixel, or its number as it is, uint8 or uint16 (H, W)."""
        if self.classes is None:
            return as_index_mask(pixels, self._dtype(16 if pixels.dtype.itemsize > 1 else 8))
        codes = pixels.astype(np.int32)
        if self.classes.colours:
            red, green, blue = np.moveaxis(codes, 2, 0)
            codes = red << 16 | green << 8 | blue
        table = _table(self.classes, self.source_ignore, self.ignore)
        found = table[np.clip(codes, 0, len(table) - 1)]
        if (found < 0).any():
            raise ImageError(self._unknown(codes, found < 0))
        return np.asarray(found, _type_of(self.classes))

    def _unknown(self, codes: NDArray[Any], where: NDArray[np.bool_]) -> str:
        """Returns the problem with a mask that holds a value without a class."""
        classes = self.classes
        assert classes is not None, "only called with classes"
        row, column = np.argwhere(where)[0].tolist()
        code = classes.written(int(codes[row, column]))
        what = f"holds the {'colour' if classes.colours else 'value'} {code} in {int(where.sum()):,} pixels (the first "
        what += f"at x {column}, y {row})"
        if classes.guessed:
            return f"{what}, where other masks hold {' and '.join(map(str, classes.codes))} only: `--mask-values keep`"
        option = "`--palette`" if classes.colours else "`--mask-values`"
        return f"{what}, which {option} gives no class"

    def _size(self, i: int, height: int, width: int) -> tuple[int, int]:
        """Returns height and width of image i, if a mask of this size shows the whole of it."""
        assert self.images is not None, "only called with images"
        image = header_of(self.images, i)
        if not same_shape((height, width), (image.height, image.width)):
            raise ImageError(
                f"is {width}x{height}, the image {image.width}x{image.height} (width x height): another shape, so that "
                f"`--mask-size image` would distort it"
            )
        return image.height, image.width


def same_shape(mask: Sequence[int], image: Sequence[int]) -> bool:
    """Returns whether heights and widths have the same ratio, within 1 %."""
    return abs(mask[1] * image[0] / (mask[0] * image[1]) - 1) <= _SAME_SHAPE


@functools.lru_cache(maxsize=4)
def _table(classes: Classes, source_ignore: int | None, ignore: int | None) -> NDArray[Any]:
    """Returns the class of each code, int16 or int32 (codes + 1,), -1 for those that have none, such as the last."""
    small = classes.nothing == 255
    table = np.full((2**24 if classes.colours else 2**16) + 1, -1, np.int16 if small else np.int32)
    if ignore is not None:
        if source_ignore is not None and not classes.colours:
            table[source_ignore] = ignore
        table[list(classes.ignored)] = ignore
    table[list(classes.codes)] = np.arange(len(classes.codes))
    return table
