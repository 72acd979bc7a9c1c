"""The options of packing that shape a packed file's bytes, and `PackJob`: one call of the packer, with its files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fastload.errors import FormatError, OptionError, OutputError, SourceError, check_choice
from fastload.format.codecs import parse_codec
from fastload.format.header import PackedFile
from fastload.format.writer import CHUNK_BYTES
from fastload.images.image_header import large_images
from fastload.remote.options import Remote
from fastload.remote.paths import path_of
from fastload.sources.listing import BoxesOf, BoxForm, Listing, MasksWanted, OnError, SourceOptions
from fastload.sources.mask_classes import MaskOptions, MaskSize, read_palette
from fastload.system.files import is_below
from fastload.system.machine import available_memory

if TYPE_CHECKING:
    from fastload.pack.decisions import RaggedPlan
    from fastload.pack.finish import PackReport

Fit = Literal["crop", "pad", "stretch"]
Mode = Literal["rgb", "gray", "rgba"]
Bits = Literal[8, 16]
OutsideBoxes = Literal["refuse", "clip", "keep"]
EncodingKind = Literal["raw", "jpeg", "source", "mixed", "keep"]
Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""

KEPT = "What was packed so far is kept: the same command continues with it."
MAKE_ROOM = "What was packed is kept: make room, then run the same command again."

JPEG_QUALITY = 90
"""The default quality of JPEGs made here, the same as FFCV's."""


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

    size: tuple[int, int] | None = None
    fit: Fit = "crop"
    mode: Mode | None = None
    seed: int = 0
    shuffle: bool = True
    chunk_bytes: int = CHUNK_BYTES
    limit: int | None = None
    source: SourceOptions = field(default_factory=SourceOptions)
    bits: Bits | None = None
    store: EncodingOption | None = None
    """None: "raw"."""
    max_size: int | None = None
    codec: str = "auto"
    """"auto" (masks, if it halves them, see `fastload.pack.survey`) or what `parse_codec` reads."""
    strict: bool = False
    """JPEGs that libjpeg warns of are left out."""
    masks: MaskOptions = field(default_factory=MaskOptions)
    outside_boxes: OutsideBoxes = "refuse"
    varied: bool = False
    """Rows of varying length, also where all images have one size."""
    allow_large_images: bool = False
    """Images above MAX_PIXELS are packed, too."""

    def __post_init__(self) -> None:
        for name, value, accepted in (
            ("fit", self.fit, Fit),
            ("mode", self.mode, Mode),
            ("bits", self.bits, Bits),
            ("outside_boxes", self.outside_boxes, OutsideBoxes),
        ):
            if value is not None:
                check_choice(name, value, get_args(accepted))
        sides = [1, 1] if self.size is None else list(self.size)
        for name, fits, needed in (
            ("size", len(sides) == 2 and min(sides) >= 1, "a height and a width of at least 1, such as 224 or 218x178"),
            ("seed", 0 <= self.seed < 2**63, "0 <= seed < 2**63"),
            ("chunk_bytes", self.chunk_bytes >= 1, "at least 1; 8 MiB is a good choice"),
            ("limit", self.limit is None or self.limit >= 1, "at least 1"),
            ("max_size", self.max_size is None or self.max_size >= 1, "at least 1, such as 256"),
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
        gzip = self.codec != "auto" and parse_codec(self.codec, besides=("auto",)).name == "gzip"
        if gzip and kind not in ("raw", "keep"):
            raise OptionError(f"codec={self.codec!r} works on images of one size stored raw; say `--codec zstd`.")

    def accepting_large(self, workers: int) -> AbstractContextManager[None]:
        """Returns the `large_images` of these options, for so many workers, which share the memory that is free."""
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
    """The arguments of `pack_images`, by name; those that shape the packed file's bytes are its `options`."""

    source: Path | Sequence[Any]
    output: Path
    options: PackOptions
    layout: str | None
    shards: int | None
    shard_bytes: int | None
    spread: int
    engine: Literal["ray"] | None
    address: str | None
    workers: int | None
    on_error: OnError
    overwrite: bool
    parents: bool
    remote: Remote | None
    progress: Progress | None


def pack_call(
    source: str | Path | Sequence[Any], output: str | Path, *, layout: str | None, masks: MasksWanted,
    mask_size: MaskSize, mask_values: str, palette: str | Path | None, ignore_index: int | str | None, mask_files: str,
    labels: Sequence[str], image_column: str, split_column: str, captions: str, root: str | Path | None, boxes: BoxForm,
    boxes_of: BoxesOf, download: bool, size: int | tuple[int, int] | None, fit: Fit, mode: Mode | None,
    bits: Bits | None, store: str | None, max_size: int | None, codec: str, workers: int | None, seed: int,
    shuffle: bool, chunk_bytes: int, shards: int | None, shard_bytes: int | None, spread: int,
    engine: Literal["ray"] | None, address: str | None, limit: int | None, outside_boxes: OutsideBoxes,
    on_error: OnError, strict: bool, allow_large_images: bool, overwrite: bool, parents: bool,
    remote: Remote | None = None, progress: Progress | None = None,
) -> PackCall:  # fmt: skip
    """Returns the call of `pack_images` with these arguments, or raises OptionError."""
    if isinstance(labels, str):
        raise OptionError(f"labels={labels!r}: give a list of columns, such as [{labels!r}].")
    options = PackOptions(
        store=parse_encoding(store) if store is not None else None,
        source=SourceOptions(
            masks=masks, labels=tuple(labels), image_column=image_column, split_column=split_column,
            mask_files=mask_files, root=path_of(root) if root is not None else None, download=download, boxes=boxes,
            boxes_of=boxes_of, captions=captions,
        ),
        masks=MaskOptions(
            mask_size, mask_values, palette=() if palette is None else read_palette(Path(palette)),
            ignore="" if ignore_index is None else str(ignore_index),
        ),
        size=(size, size) if isinstance(size, int) else size, fit=fit, mode=mode, seed=seed, shuffle=shuffle,
        chunk_bytes=chunk_bytes, limit=limit, bits=bits, max_size=max_size, codec=codec, strict=strict,
        outside_boxes=outside_boxes, allow_large_images=allow_large_images,
    )  # fmt: skip
    return PackCall(
        source=path_of(source) if isinstance(source, (str, Path)) else source, output=path_of(output), options=options,
        layout=layout, shards=shards, shard_bytes=shard_bytes, spread=spread, engine=engine, address=address,
        workers=workers, on_error=on_error, overwrite=overwrite, parents=parents, remote=remote, progress=progress,
    )  # fmt: skip


def is_joined(attrs: Mapping[str, Any]) -> bool:
    """Whether the root attributes say that a file has rows of several sources: merged, or appended to."""
    try:
        found = json.loads(attrs["repacked"])
    except (KeyError, TypeError, ValueError):
        return False
    return isinstance(found, dict) and not {"merged", "appended", "joined"}.isdisjoint(found)


@contextmanager
def of_file_options(what: str, has: Collection[str]) -> Iterator[None]:
    """Says of a SourceError or OptionError within that advises options of `fastload pack` who else has them not.

    `what` is a sentence that says whose options count; `has` are the options that may be advised.
    """
    try:
        yield
    except (SourceError, OptionError) as exc:
        if not set(re.findall(r"`(?:[^`]* )?--([a-z-]+)", str(exc))) - set(has):
            raise
        raise type(exc)(f"{exc} {what}; to choose others, pack the images with `fastload pack`.") from exc


@dataclass(frozen=True)
class Whole:
    """The decisions about a whole dataset that hold for a shard of it.

    Attributes:
        plan: how rows are made; None without images.
        headers: HEADERS (n,) of the shard's samples; None without images.
        key_bytes: of the dataset's longest key.
    """

    plan: RaggedPlan | None
    headers: NDArray[np.void] | None
    key_bytes: int


@dataclass(frozen=True)
class PackJob:
    """One call of the packer: what to pack (`source` is its name in messages), where to, and how."""

    source: str
    output: Path
    listing: Listing
    options: PackOptions
    on_error: OnError = "fail"
    overwrite: bool = False
    on_progress: Progress | None = None
    alone: bool = False  # whether no other process has this output: its name is of this attempt only
    whole: Whole | None = None  # of a shard
    is_part: bool = False  # of another output: its journal stays with it, by which the same call gives its report again
    # Files that it is made of, named after what they hold: they go, with their journals, when it is complete.
    parts: tuple[Path, ...] = ()
    parts_report: PackReport | None = None  # of packing the parts: its conversions and warnings are this file's, too

    @property
    def may_skip(self) -> bool:
        """Whether samples may turn out to be left out when they are decoded."""
        return self.on_error == "skip" or self.options.strict

    @property
    def part(self) -> Path:
        """The file while it is being packed."""
        return self.output.with_name(self.output.name + ".part")

    @property
    def meta(self) -> Path:
        """The complete file until it gets its name, where it cannot be made in `part`."""
        return self.output.with_name(self.output.name + ".meta")

    @property
    def masks(self) -> Path:
        """The file that holds the rows of masks while it is not known where they belong in the packed file."""
        return self.output.with_name(self.output.name + ".masks")


def journal_path(output: Path) -> Path:
    """Returns the path of an output's journal."""
    return output.with_name(output.name + ".journal")


def output_exists(output: Path) -> OutputError:
    """Returns the error that the output is there already."""
    return OutputError(f"{output}: exists. Choose another name, or replace it with `--overwrite`.")


def checked_output(output: str | Path, overwrite: bool, source: object = None) -> Path:
    """Returns the path to write to, the target of a link; raises OutputError if it cannot be written.

    A source that is a path must not be the output, nor contain it.
    """
    output = Path(output)
    if output.is_symlink() and (output := Path(os.path.realpath(output))).is_symlink():
        raise OutputError(f"{output}: is a link that leads back to itself. Remove it, or choose another name.")
    if output.is_dir():
        raise OutputError(f"{output}: a folder. Name a file in it, such as {output / 'out.h5'}.")
    if output.exists() and not output.is_file():
        raise OutputError(f"{output}: a device or pipe, which cannot hold a packed file. Name a file.")
    if output.name.endswith((".part", ".journal", ".meta", ".masks")):
        raise OutputError(f"{output}: this ending is kept for unfinished packs. Choose another name, such as out.h5.")
    if not output.absolute().parent.is_dir():
        or_ask = "" if source is None else ", or with `--parents`"  # which copies of packed files do not have
        raise OutputError(f"{output}: its folder {output.absolute().parent} does not exist. Make it first{or_ask}.")
    if output.exists() and not overwrite and not journal_path(output).exists():
        raise output_exists(output)
    if isinstance(source, (str, Path)):
        if Path(source).is_dir() and is_below(output, Path(source)):
            raise OutputError(
                f"{output}: lies inside the source {source}, which would then contain its own packed copy. Choose a "
                f"folder outside of it."
            )
        if Path(source).exists() and output.exists() and output.samefile(source):
            raise OutputError(f"{output}: is the source itself. Choose another name.")
    return output
