"""The options of `fastload repack`, `merge`, `append` and `export`, and of their functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fastload.format import CHUNK_BYTES
from fastload.options import check_options, option
from fastload.options.pack import OnError, Progress
from fastload.options.parse import parse_bytes

ExportLayout = Literal["auto", "folder", "csv"]
ExportFormat = Literal["folder", "imagefolder", "webdataset", "hf"]
_Progress = "called with (stage, done, total)."


def _values(value: str | Sequence[str] | None) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())


@dataclass(frozen=True)
class Choice:
    """The conditions on rows to keep: a row must meet every condition given, and any value of each."""

    splits: tuple[str, ...] = option(
        (),
        "Only this split; may be repeated.",
        "rows of this split, or of these.",
        name="split", accepts="list[str] | str | None", convert=_values,
    )  # fmt: skip
    labels: tuple[str, ...] = option(
        (),
        "Only rows of this class; may be repeated.",
        "rows of this class, or of these, by their names or their numbers as text.",
        name="label", metavar="NAME|INDEX", accepts="list[str] | str | None", convert=_values,
    )  # fmt: skip
    keys: tuple[str, ...] = option(
        (),
        "Only keys that match this pattern; may be repeated.",
        "rows whose key fits one of these patterns, as in a shell: `*` any characters including `/`, `?` one "
        "character, `[ab]`.",
        name="key", metavar="GLOB", accepts="list[str] | str | None", convert=_values,
    )  # fmt: skip
    rows: Path | None = option(
        None,
        "Only the rows in a text file (one number per line) or .npy, in that order.",
        "a file of row numbers, text (one on a line) or .npy, which also set the order within each split.",
        parser=Path, metavar="PATH", accepts="str | Path | None",
        convert=lambda rows: None if rows is None else Path(rows),
    )  # fmt: skip
    without: tuple[str, ...] = option(
        (),
        "No keys that match this pattern; may be repeated.",
        "such patterns of keys whose rows are left out.",
        metavar="GLOB", accepts="list[str] | str | None", convert=_values,
    )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Returns the conditions given, as plain JSON values and without paths."""
        given: dict[str, Any] = {name: list(getattr(self, name)) for name in ("splits", "labels", "keys", "without")}
        return {name: values for name, values in given.items() if values}


@dataclass(frozen=True)
class _CopyOptions:
    """Options of copying rows, for `repack` and `merge`, which say more of some."""

    chunk_bytes: int | None = None
    shuffle: bool = False
    seed: int = option(0, "Seed of --shuffle.", "seed of that shuffle.")
    codec: str = option(
        "keep",
        "Keep the compression, decompress, or compress.",
        '"keep": compressed rows stay compressed; "none": they are decompressed; "gzip" or "zstd", with or without a '
        'level, 0 to 9 ("gzip:4") or 1 to 19 ("zstd:3"). Of rows of varying length, "zstd" compresses those that are '
        "pixels. JPEGs always stay as they are.",
        metavar="keep|none|gzip[:L]|zstd[:L]",
    )  # fmt: skip
    workers: int | None = option(
        None,
        "Threads that compress; by default one per CPU.",
        "processes that compress, by default one for each CPU; one thread copies, and compresses what comes of a URL.",
    )
    on_error: OnError = option(
        "fail",
        "Stop at a damaged row, or leave it out.",
        '"fail" stops at a row that is not what was packed; "skip" leaves it out and lists it, also a JPEG that was '
        'damaged before it was packed, which "fail" copies without decoding.',
    )
    overwrite: bool = option(
        False,
        "Replace an existing output, or another unfinished one.",
        "replace an output that exists, and discard unfinished work on something else.",
        names=("--overwrite",),
    )  # fmt: skip
    progress: Progress | None = option(None, "", _Progress)

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class RepackOptions(_CopyOptions):
    """How a packed file is copied, and which of its rows."""

    chunk_bytes: int | None = option(
        None,
        "Approximate size of a chunk; by default as in FILE.",
        "the size that chunks should have; by default as in the file, if it is a packed one, or 64 KiB with another "
        "codec for rows of one size.",
        parser=parse_bytes, metavar="BYTES",
    )  # fmt: skip
    shuffle: bool = option(
        False,
        "Shuffle rows within each split, or keep their order.",
        "shuffle rows within each split; by default they keep their order.",
        names=("--shuffle/--no-shuffle",),
    )  # fmt: skip
    choice: Choice = field(default_factory=Choice)


@dataclass(frozen=True)
class MergeOptions(_CopyOptions):
    """How packed files are joined to one."""

    chunk_bytes: int = option(
        CHUNK_BYTES,
        "Approximate size of a chunk, such as 8MiB or 512K.",
        "the size that chunks should have.",
        parser=parse_bytes, metavar="BYTES", shown="8MiB",
    )  # fmt: skip
    shuffle: bool = option(
        False,
        "Shuffle rows within each split, or keep one file after another.",
        "shuffle rows within each split; by default one file's follow another's.",
        names=("--shuffle/--no-shuffle",),
    )  # fmt: skip


@dataclass(frozen=True)
class AppendOptions:
    """How images are added to a packed file; everything else is as the file was packed."""

    layout: str | None = option(
        None, "Layout of MORE, by default recognised.", "name of its layout; recognised by default."
    )
    workers: int | None = option(
        None,
        "Processes that decode; by default one per CPU.",
        "processes that decode, by default one for each CPU.",
    )
    on_error: OnError = option(
        "fail",
        "Stop at a damaged row, or leave it out.",
        '"fail" stops at an image that cannot be decoded, or at a damaged row; "skip" leaves it out.',
    )
    progress: Progress | None = option(None, "", _Progress)

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class ExportOptions:
    """How the images of a packed file are written as files."""

    split: str | None = option(None, "Only this split.", "export only this split.")
    layout: ExportLayout = option(
        "auto",
        "Class folders, or one folder and manifest.csv; auto: class folders if they hold all labels.",
        '"folder": class folders, inside folders of splits if there are several; "csv": the folder `images`, '
        '`mask_images` if there are masks, and the table `manifest.csv` with everything else; "auto": folders if they '
        'say everything. Only for format "folder".',
    )
    format: ExportFormat = option(
        "folder",
        "Folders that `pack` reads back exactly; or for torchvision, WebDataset (shards), Hugging Face.",
        '"folder": files that `fastload pack` packs to the same rows, in every detail; "imagefolder": folders of '
        'classes in folders of splits, for torchvision\'s ImageFolder; "webdataset": tar shards; "hf": an imagefolder '
        "of Hugging Face, with a metadata.jsonl for each split. Notes name what a format leaves out.",
    )
    shard_bytes: int | None = option(
        None,
        "Most bytes of a shard; by default 1GiB.",
        'limit for a shard of "webdataset", by default 1 GiB.',
        parser=parse_bytes, metavar="BYTES", least=1, needs="at least 1; 1 GiB is usual",
    )  # fmt: skip
    workers: int | None = option(
        None,
        "Threads that encode; by default one per CPU.",
        "threads that encode, by default one for each CPU.",
    )
    progress: Progress | None = option(None, "", _Progress)

    def __post_init__(self) -> None:
        check_options(self)
