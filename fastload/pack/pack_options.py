"""The options of packing that shape a packed file's bytes, and `PackJob`: one call of the packer, with its files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import OptionError, OutputError, SourceError
from fastload.options.pack import OnError, PackOptions, Progress
from fastload.pack.decisions import RaggedPlan
from fastload.sources.listing import Listing
from fastload.system.files import is_below

KEPT = "What was packed so far is kept: the same command continues with it."
MAKE_ROOM = "What was packed is kept: make room, then run the same command again."


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
class PartsFacts:
    """The facts about the parts of a file that packing them found, and that its report repeats.

    Attributes:
        converted: how many images were changed in kind, by a description such as "gray -> RGB".
        warned: (key, warning) of each JPEG that was packed though libjpeg warns of it.
    """

    converted: dict[str, int]
    warned: tuple[tuple[str, str], ...]


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
    of_parts: PartsFacts | None = None

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
