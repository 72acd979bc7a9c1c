"""What a user may say about a dataset beyond its path; `Layout.takes` says what concerns which source."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from fastload.errors import OptionError

MasksWanted = Literal["auto", "none", "semantic", "instance"]


@dataclass(frozen=True)
class SourceOptions:
    """How a dataset is to be read.

    Attributes:
        masks: which masks to pack. "auto": those that lie there as files, none that would have to be drawn.
        labels: the columns of a table that are labels; () for those with a usual name.
        image_column: the column of a table that names or holds the images; "" for one with a usual name.
        split_column: the column of a table that names the split; "" for one with a usual name.
        root: folder that paths in a table are relative to; None for the table's own, or one that is found.
    """

    masks: MasksWanted = "auto"
    labels: tuple[str, ...] = ()
    image_column: str = ""
    split_column: str = ""
    root: Path | None = None

    def __post_init__(self) -> None:
        if self.masks not in get_args(MasksWanted):
            raise OptionError(f"masks={self.masks!r} is not known; accepted: {', '.join(get_args(MasksWanted))}.")

    def given(self) -> dict[str, Any]:
        """Those that differ from the default, by name."""
        return {name: value for name, value in vars(self).items() if value != vars(SourceOptions())[name]}

    def to_dict(self) -> dict[str, Any]:
        """Those that differ from the default, as plain JSON values and without paths."""
        given = self.given()
        given.pop("root", None)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}
