"""Which values masks hold, and the one that stands for a mask that is absent: none that the others hold."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.sources.listing import Files

_PROBED = 32  # enough for a rare value to show, few enough to take a blink
_SEARCHED = 4096  # where a value must be one that no mask holds: some seconds, and only where masks are absent


def values_of_masks(files: Files, rows: Sequence[int], most: int = _PROBED) -> NDArray[np.int64]:
    """The sorted values in some of the masks of these rows, evenly chosen; without those that are no index masks.

    The packer reads every mask and says what is wrong with one; this only tells how they are numbered.
    """
    # Imported here, as whoever only needs a Column should not pay for Pillow.
    from fastload.image_header import open_image, pillow_silenced

    step = -(-max(1, len(rows)) // most)
    seen = np.zeros(256, np.bool_)
    for row in rows[::step]:
        try:
            with pillow_silenced(), open_image(files.read(row)) as image:
                if image.mode in ("1", "L", "P"):
                    seen[np.asarray(image).astype(np.uint8)] = True
        except Exception as exc:  # noqa: BLE001  # Pillow's plugins raise anything; the packer names the damaged file
            _ = exc
    return np.flatnonzero(seen)


def fill_value(files: Files, present: NDArray[np.bool_], where: str) -> tuple[int | None, list[str]]:
    """The value of absent masks, which becomes `ignore_index`, and the note about it; None where none is absent.

    It is 255 unless other masks hold that (255 is foreground where masks are 0 and 255), then the next unused below.

    Args:
        files: the masks, by row.
        present: bool (N,), which rows have one.
        where: the source, for messages.

    Raises:
        SourceError: the masks use all 256 values.
    """
    if present.all():
        return None, []
    rows = np.flatnonzero(present).tolist()
    seen = values_of_masks(files, rows, _SEARCHED)
    free = np.setdiff1d(np.arange(256), seen)
    absent = int((~present).sum())
    if not len(free):
        raise SourceError(
            f"{where}: images have no mask ({absent}), and the other masks use all values from 0 to 255, so none can "
            "stand for it. Add the masks, or leave all masks out with `--masks none`."
        )
    value = int(free[-1])
    why = f", as other masks hold {', '.join(map(str, range(255, value, -1)))}" if value < 255 else ""
    sampled = f" (of {_SEARCHED} masks or fewer that were looked at)" if len(rows) > _SEARCHED else ""
    return value, [f"Images without a mask ({absent}): theirs are {value} throughout{why}{sampled}."]
