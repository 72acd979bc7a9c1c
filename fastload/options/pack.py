"""The options of packing: what shapes a packed file's bytes (`PackOptions`), and one call of `pack_images`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fastload.errors import FormatError, OptionError
from fastload.format import CHUNK_BYTES
from fastload.options import check_options, from_arguments, option
from fastload.options.masks import Palette, classes_of_palette, classes_of_values, read_palette
from fastload.options.parse import parse_bytes, parse_names, parse_path, parse_size
from fastload.remote.urls import Remote, path_of

if TYPE_CHECKING:
    from fastload.format.header import PackedFile

Fit = Literal["crop", "pad", "stretch"]
Mode = Literal["rgb", "gray", "rgba"]
Bits = Literal[8, 16]
OutsideBoxes = Literal["refuse", "clip", "keep"]
EncodingKind = Literal["raw", "jpeg", "source", "mixed", "keep"]
MasksWanted = Literal["auto", "none", "semantic", "instance", "panoptic"]
MaskSize = Literal["same", "image"]
BoxForm = Literal["auto", "xyxy", "xywh", "cxcywh", "yxyx"]
BoxesOf = Literal["auto", "upright", "stored", "declared"]
OnError = Literal["fail", "skip"]
Engine = Literal["ray"]
Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""

READ, SIZE, MASKS, STORE, SHARDS = (
    "What to read",
    "Size and channels",
    "Masks and boxes",
    "Encoding and order",
    "Shards, and packing on several machines",
)

JPEG_QUALITY = 90
"""The default quality of JPEGs made here, the same as FFCV's."""


def _names(value: Sequence[str]) -> tuple[str, ...]:
    if isinstance(value, str):
        raise OptionError(f"labels={value!r}: give a list of columns, such as [{value!r}].")
    return tuple(value)


def _pair(size: int | Sequence[int] | None) -> tuple[int, int] | None:
    if size is None:
        return None
    height, width = (size, size) if isinstance(size, int) else size
    return int(height), int(width)


@dataclass(frozen=True)
class SourceOptions:
    """Options about a dataset that its files do not say. `Layout.takes` says which layout uses which of these."""

    labels: tuple[str, ...] = option(
        (),
        "Columns with the labels; of folders: top, deepest, last, names or none.",
        "columns of a table that hold labels; by default those with a usual name.",
        parser=parse_names, metavar="A,B", group=READ, accepts="Sequence[str]", convert=_names,
    )  # fmt: skip
    image_column: str = option(
        "",
        "Column of a table with the images.",
        "column of a table that names or holds the images; by default found by its usual names.",
        metavar="NAME", group=READ,
    )  # fmt: skip
    split_column: str = option(
        "",
        "Column of a table with the split.",
        "column of a table that names the split; by default found by its usual names.",
        metavar="NAME", group=READ,
    )  # fmt: skip
    captions: str = option(
        "all",
        "Texts of images: all, none, or cut to N bytes.",
        '"all": texts of images are packed as `caption`; "none"; or the most bytes of one in UTF-8, such as "512": '
        "longer ones are cut.",
        metavar="all|none|N", group=READ,
    )  # fmt: skip
    root: Path | None = option(
        None,
        "Folder of a table's paths, or of torchvision.",
        "folder that a table's paths are relative to (by default its own, or one that is found), or that torchvision's "
        "data lie in.",
        parser=parse_path, metavar="PATH", group=READ, accepts="str | Path | None",
        convert=lambda root: None if root is None else path_of(root),
    )  # fmt: skip
    download: bool = option(
        False,
        "Let torchvision download missing files to --root.",
        "let torchvision fetch missing files into `root`.",
        names=("--download",), group=READ,
    )  # fmt: skip
    masks: MasksWanted = option(
        "auto",
        "auto, none, semantic, instance or panoptic; may be drawn.",
        '"auto": masks that are there as files; "none"; "semantic" or "instance": masks of this kind, drawn from '
        'polygons if the layout has no files of them; "panoptic": COCO\'s, with columns of their segments.',
        metavar="KIND", group=MASKS,
    )  # fmt: skip
    mask_files: str = option(
        "",
        "Paths of the masks, where there are several kinds.",
        "pattern of the paths of the masks, in which `*` stands for any characters, where images have several kinds of "
        "them, such as `semantic/*`; by default found by their names.",
        metavar="PATTERN", group=MASKS,
    )  # fmt: skip
    boxes: BoxForm = option(
        "auto",
        "A box's numbers: auto, xyxy, xywh, cxcywh or yxyx.",
        'form of the boxes in a table or in COCO\'s files: "xyxy" (two corners; "yxyx": y before x), "xywh" (a corner, '
        'width and height), "cxcywh" (the middle, width and height); by default what the format says.',
        metavar="FORM", group=MASKS,
    )  # fmt: skip
    boxes_of: BoxesOf = option(
        "auto",
        "Boxes and masks are of the upright image, of the stored one, before EXIF turns it, or of the declared size.",
        'which image boxes, points, polygons and masks were drawn on: "upright", as it is packed; "stored", as its '
        'file stores it, before its EXIF orientation turns it; "declared", of the size that the annotations declare '
        'and that the file has no more, so that they are scaled. By default "upright", and an image of another size '
        'than declared, or that EXIF turns while its mask fits before and after, is an error, or with on_error "skip" '
        "left out.",
        metavar="IMAGE", group=MASKS,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_options(self)
        if self.captions not in ("all", "none") and not re.fullmatch("[1-9][0-9]{0,8}", self.captions):
            raise OptionError(
                f"captions={self.captions!r} is not known; accepted: all, none, or the most bytes of a caption, such "
                f"as 512."
            )

    def given(self) -> dict[str, Any]:
        """Returns the options that differ from their default, by name."""
        return {name: value for name, value in vars(self).items() if value != vars(SourceOptions())[name]}

    def to_dict(self) -> dict[str, Any]:
        """Returns the options that differ from their default, as plain JSON values and without paths."""
        given = self.given()
        for name in ("root", "download"):  # where it lies, and how it came there, is nothing of the file's
            given.pop(name, None)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}


@dataclass(frozen=True)
class MaskOptions:
    """Options about masks that any layout takes."""

    size: MaskSize = option(
        "same",
        "same; image: resize masks of one shape to the images.",
        '"same": masks have the size of their images; "image": masks with the proportions of their images, within 1 %, '
        "are resized to it, each value the nearest one.",
        name="mask_size", metavar="SIZE", group=MASKS,
    )  # fmt: skip
    values: str = option(
        "auto",
        "Values that are classes 0, 1, ...; keep; auto: 255 is 1.",
        'which values of masks are which classes, in order, such as "0,255" or "0=background,255=person"; they become '
        '0, 1, ...; "keep": values stay; "auto": masks of 0 and 255 become 0 and 1, others stay.',
        name="mask_values", metavar="V[=NAME],...", group=MASKS,
    )  # fmt: skip
    palette: Palette = option(
        (),
        "Colours of classes: lines of r,g,b,name, or CVAT's.",
        "file with the colour of each class (red, green, blue, name), for masks of colours.",
        parser=Path, metavar="FILE", group=MASKS, accepts="str | Path | None",
        convert=lambda path: () if path is None else read_palette(Path(path)),
    )  # fmt: skip
    ignore: str = option(
        "",
        "Value or class of masks that means no class.",
        "the value of masks, or the class of the palette, that means no class; it becomes the file's `ignore_index`, "
        "255 unless the dataset has one.",
        name="ignore_index", parser=str, metavar="V|NAME", group=MASKS, accepts="int | str | None",
        convert=lambda value: "" if value is None else str(value),
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_options(self)
        if self.palette and self.values != "auto":
            raise OptionError("`--palette` says what colours mean, `--mask-values` what numbers do. Give one of them.")
        if self.ignore and not self.palette and self.values in ("auto", "keep"):
            raise OptionError("`--ignore-index` belongs to `--mask-values` or `--palette`, which say what others are.")
        if self.palette:
            classes_of_palette(self.palette, self.ignore)
        elif self.values not in ("auto", "keep"):
            classes_of_values(self.values, self.ignore)

    @classmethod
    def of_dict(cls, given: Mapping[str, Any]) -> MaskOptions:
        """Returns the options that `to_dict` gave."""
        return cls(**{**given, "palette": tuple(tuple(row) for row in given.get("palette", ()))})

    def to_dict(self) -> dict[str, Any]:
        """Returns the options that differ from their default, as plain JSON values."""
        return {name: value for name, value in vars(self).items() if value != vars(MaskOptions())[name]}


@dataclass(frozen=True)
class EncodingOption:
    """The encoding that `--store` asks for."""

    # "raw": pixels; "jpeg": every image encoded as JPEG; "source": the file's own bytes if it is a JPEG that the loader
    # can decode, else pixels (a JPEG that `--max-size` makes smaller is encoded again, which loses a second time);
    # "mixed": a fraction of the rows as JPEG (their own bytes where possible), the others as pixels; "keep": as a
    # packed file holds them (`repack`), encoded or as pixels to be compressed.
    kind: EncodingKind = "raw"
    quality: int = JPEG_QUALITY  # 1 to 100, of JPEGs made here
    fraction: float = 0.0  # 0 to 1, for "mixed"

    def __str__(self) -> str:
        extra = {"jpeg": f":{self.quality}", "mixed": f":{self.fraction:g}"}
        return self.kind + extra.get(self.kind, "")


def parse_encoding(text: str) -> EncodingOption:
    """Returns the option named by "raw", "jpeg", "jpeg:QUALITY", "source" or "mixed:FRACTION", or OptionError."""
    accepted = "accepted: raw, jpeg, jpeg:1 to jpeg:100, source, mixed:FRACTION with 0 < FRACTION < 1."
    if text in ("raw", "source"):
        return EncodingOption("raw" if text == "raw" else "source")
    if found := re.fullmatch(r"jpeg(?::([0-9]{1,3}))?", text):
        quality = int(found[1] or JPEG_QUALITY)
        if 1 <= quality <= 100:
            return EncodingOption("jpeg", quality)
    if (found := re.fullmatch(r"mixed:([0-9]*\.?[0-9]+)", text)) and 0 < float(found[1]) < 1:
        return EncodingOption("mixed", fraction=float(found[1]))
    raise OptionError(f"store={text!r} is not known; {accepted}")


_NEWER = (
    "source",
    "bits",
    "store",
    "max_size",
    "codec",
    "strict",
    "outside_boxes",
    "masks",
    "varied",
    "allow_large_images",
)  # than format 1


@dataclass(frozen=True)
class PackOptions:
    """The options that shape a packed file's bytes; its attribute `pack_options` holds them as JSON."""

    size: tuple[int, int] | None = option(
        None,
        "Bring every image to this height x width.",
        "height and width of every image, one number for a square; by default each image keeps its size.",
        parser=parse_size, metavar="S|HxW", group=SIZE, accepts="int | tuple[int, int] | None",
        convert=_pair,
    )  # fmt: skip
    fit: Fit = option(
        "crop",
        "How --size does it: crop, pad or stretch.",
        '"crop": resize to cover, cut the middle out; "pad": resize to fit inside, black around; "stretch".',
        metavar="HOW", group=SIZE,
    )  # fmt: skip
    max_size: int | None = option(
        None,
        "Shrink images until their shorter side is S or less.",
        "limit for an image's shorter side in pixels; larger images are resized to it. Not with `size`. A JPEG resized "
        'under store="source" is encoded again, with quality 90.',
        metavar="S", group=SIZE, least=1, needs="at least 1, such as 256",
    )  # fmt: skip
    mode: Mode | None = option(
        None,
        "rgb, gray or rgba; by default gray if all images are.",
        '"rgb", "gray" or "rgba" converts; by default gray if all images are gray, else RGB.',
        metavar="MODE", group=SIZE,
    )  # fmt: skip
    bits: Bits | None = option(
        None,
        "8 keeps the high byte of 16; 16 needs 16-bit images.",
        "8 keeps the high byte of 16-bit images, 16 requires them; by default 16 if all images have them.",
        parser=int, metavar="8|16", group=SIZE,
    )  # fmt: skip
    source: SourceOptions = field(default_factory=SourceOptions)
    masks: MaskOptions = field(default_factory=MaskOptions)
    outside_boxes: OutsideBoxes = option(
        "refuse",
        "refuse, clip or keep boxes that reach out of their image.",
        'boxes that reach out of their image by more than a pixel: "refuse": an error, or with on_error "skip" those '
        'images are left out; "clip": cut to the image; "keep": packed as they are.',
        metavar="DO", group=MASKS,
    )  # fmt: skip
    limit: int | None = option(
        None,
        "Pack only N images, spread over SRC.",
        "pack only so many samples, spread evenly over the source.",
        group=READ, least=1,
    )  # fmt: skip
    store: EncodingOption | None = option(
        None,
        "raw, jpeg[:Q], source (SRC's own JPEGs) or mixed:F; see --dry-run.",
        '"raw": pixels, the default; "jpeg" or "jpeg:QUALITY": every image encoded as JPEG; "source": the bytes of the '
        "file where it is a JPEG, without a second loss unless `max_size` makes it smaller; "
        '"mixed:FRACTION": this fraction of the rows as JPEG, the others as pixels.',
        metavar="HOW", group=STORE, accepts="str | None",
        convert=lambda text: None if text is None else parse_encoding(text),
    )  # fmt: skip
    codec: str = option(
        "auto",
        "Lossless: none, gzip[:L], zstd[:L]; auto: gzip for some masks.",
        'lossless compression of all but JPEG: "none", "gzip[:LEVEL]", "zstd[:LEVEL]"; "auto": zstd for masks if it '
        "makes them half as large.",
        metavar="NAME", group=STORE,
    )  # fmt: skip
    chunk_bytes: int = option(
        CHUNK_BYTES,
        "Approximate size of a chunk, as 8MiB or 512K.",
        "the size that chunks should have.",
        parser=parse_bytes, metavar="BYTES", group=STORE, shown="8MiB",
        least=1, needs="at least 1; 8 MiB is a good choice",
    )  # fmt: skip
    shuffle: bool = option(
        True,
        "Shuffle rows within each split, or keep SRC's order.",
        "shuffle rows within each split; False keeps the order of the source.",
        names=("--shuffle/--no-shuffle",), group=STORE,
    )  # fmt: skip
    seed: int = option(0, "Seed of the order of rows.", group=STORE)
    strict: bool = option(
        False,
        "Leave out JPEGs that libjpeg warns of, as damaged.",
        "leave out and list JPEGs that libjpeg warns of, as of corrupt data, though it can decode them; by default "
        'they are packed, and listed. With store="source" this decodes all of them, which takes much longer.',
        names=("--strict",),
    )  # fmt: skip
    allow_large_images: bool = option(
        False,
        "Pack images above 178,956,970 pixels, too.",
        "pack images above 178,956,970 pixels, too, which are refused by default: a file of a few kB can claim to be "
        "one, and fill the memory. Of a JPEG a half, a quarter or an eighth of the size is decoded where `size` or "
        "`max_size` allow it; other files need up to 16 bytes a pixel (64 with 16 bits a channel), and are refused "
        "where a worker's share of the memory does not suffice.",
        names=("--allow-large-images",),
    )  # fmt: skip
    varied: bool = False
    """Rows of varying length, also where all images have one size; `append` alone asks for it."""

    def __post_init__(self) -> None:
        check_options(self)
        sides = [1, 1] if self.size is None else list(self.size)
        for name, fits, needed in (
            ("size", len(sides) == 2 and min(sides) >= 1, "a height and a width of at least 1, such as 224 or 218x178"),
            ("seed", 0 <= self.seed < 2**63, "0 <= seed < 2**63"),
        ):
            if not fits:
                raise OptionError(f"{name}={getattr(self, name)}: needs {needed}.")
        kind = "raw" if self.store is None else self.store.kind
        if self.max_size is not None and self.size is not None:
            raise OptionError("`--max-size` lets sizes differ, `--size` makes them one. Give only one of them.")
        if kind == "source" and self.size is not None:
            raise OptionError(
                "`--store source` keeps the files' own bytes, which `--size` would have to change. Say `--store jpeg` "
                "with `--size`, or `--store source` with `--max-size`, which changes larger ones only."
            )
        if self.codec == "auto":
            return
        from fastload.format.codecs import parse_codec

        if parse_codec(self.codec, besides=("auto",)).name == "gzip" and kind not in ("raw", "keep"):
            raise OptionError(f"codec={self.codec!r} works on images of one size stored raw; say `--codec zstd`.")

    def accepting_large(self, workers: int) -> AbstractContextManager[None]:
        """Returns the `large_images` of these options, for so many workers, which share the memory that is free."""
        from fastload.images.image_header import large_images
        from fastload.system.machine import available_memory

        return large_images(available_memory() // max(1, workers) if self.allow_large_images else 0)

    @property
    def pads(self) -> bool:
        """Whether images are brought to a size with padding around them."""
        return self.size is not None and self.fit == "pad"

    @classmethod
    def of_file(cls, file: PackedFile) -> PackOptions:
        """Returns the options that a file was packed with; raises FormatError if they are none of this release."""
        try:
            options = json.loads(file.attrs["pack_options"])
            given = options.get("source", {})
            values = {
                **options,
                "size": tuple(options["size"]) if options["size"] else None,
                "source": SourceOptions(**{**given, "labels": tuple(given.get("labels", ()))}),
                "store": parse_encoding(options["store"]) if "store" in options else None,
                "masks": MaskOptions.of_dict(options.get("masks", {})),
                # Earlier releases packed all boxes as they are.
                "outside_boxes": options.get("outside_boxes", "keep"),
            }
            return cls(**values)
        except (KeyError, TypeError, ValueError) as exc:
            raise FormatError(
                f"{file.path}: its pack_options cannot be read ({exc}), so its images cannot be decoded in the same "
                f"way. Verify it without a source, or pack it again."
            ) from exc

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON values; options newer than format 1 only where they differ from their defaults."""
        values = {
            **vars(self),
            "size": list(self.size) if self.size else None,
            "source": self.source.to_dict(),
            "masks": self.masks.to_dict(),
            "store": None if self.store in (None, EncodingOption()) else str(self.store),
            "codec": "" if self.codec == "auto" else self.codec,
            "outside_boxes": "" if self.outside_boxes == "refuse" else self.outside_boxes,
        }
        defaults = {name for name in _NEWER if not values[name]}
        return {name: value for name, value in values.items() if name not in defaults}


@dataclass(frozen=True)
class PackCall:
    """The arguments of `pack_images`; those that shape the packed file's bytes are its `options`."""

    source: Path | Sequence[Any]
    output: Path
    layout: str | None = option(
        None,
        "Layout of SRC, else recognised; see `fastload layouts`.",
        "name of the layout; recognised by default.",
        metavar="NAME", group=READ,
    )  # fmt: skip
    options: PackOptions = field(default_factory=PackOptions)
    shards: int | None = option(
        None,
        "Write N files, and OUT.h5 as an index over them.",
        "write so many files, OUT-00000-of-0000N.h5 and so on, and the output as an index over them, which is read as "
        "one dataset.",
        group=SHARDS,
    )  # fmt: skip
    shard_bytes: int | None = option(
        None,
        "Write files of about this size, and an index.",
        "the same, with as many files as give each about this size.",
        parser=parse_bytes, metavar="BYTES", group=SHARDS,
    )  # fmt: skip
    spread: int = option(
        0,
        "Spread these files over N folders.",
        "put these files into so many folders in the output's folder; 0: into that folder itself.",
        group=SHARDS,
    )  # fmt: skip
    engine: Engine | None = option(
        None,
        "Pack the shards on the nodes of a Ray cluster.",
        '"ray": read headers and pack the files on the nodes of a Ray cluster, which see source and output.',
        group=SHARDS,
    )  # fmt: skip
    address: str | None = option(
        None,
        "Of the cluster: auto, local, or HOST:PORT.",
        'of that cluster; None: the cluster that this machine belongs to; "local": this machine alone.',
        metavar="WHERE", group=SHARDS,
    )  # fmt: skip
    workers: int | None = option(
        None,
        "Processes that decode, by default one per CPU.",
        "processes that decode, by default one for each CPU; 0 decodes in this process.",
    )  # fmt: skip
    on_error: OnError = option(
        "fail",
        "Stop at an image that cannot be read, or leave it out.",
        '"fail" stops at an image that cannot be decoded, "skip" leaves it out and lists it.',
    )
    overwrite: bool = option(
        False,
        "Replace an existing output, or another unfinished pack.",
        "replace an output that exists, and discard an unfinished pack of something else.",
        names=("--overwrite",),
    )  # fmt: skip
    parents: bool = option(
        False,
        "Make the folder of OUT.h5 where there is none.",
        "make the output's folder where it does not exist.",
        names=("--parents",),
    )  # fmt: skip
    remote: Remote | None = option(
        None, "", "how objects of a source or an output behind a URL are requested; None: `Remote()`."
    )
    progress: Progress | None = option(None, "", "called with (stage, done, total).")

    def __post_init__(self) -> None:
        check_options(self)


def pack_call(source: str | Path | Sequence[Any], output: str | Path, arguments: Mapping[str, Any]) -> PackCall:
    """Returns the call of `pack_images` with these arguments, or raises OptionError."""
    return from_arguments(
        PackCall, arguments, of="pack_images",
        source=path_of(source) if isinstance(source, (str, Path)) else source, output=path_of(output),
    )  # fmt: skip
