"""What images of several kinds become, so that all share one shape and dtype; and what is said of it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.pack.options import Bits, Mode

_CHANNELS = {"gray": 1, "rgb": 3, "rgba": 4}
_MODES = {1: "gray", 3: "RGB", 4: "RGBA"}
_OWN_KINDS = {
    1: {1: {"L"}, 3: {"RGB"}, 4: {"RGBA"}},
    2: {1: {"I;16"}, 3: {"RGB;16"}, 4: {"RGBA;16"}},
}
"""By bytes a value and channels, the kinds that the file holds as they are."""


def one_kind(
    source: str | Path, headers: NDArray[np.void], mode: Mode | None, bits: Bits | None
) -> tuple[int, np.dtype[Any]]:
    """Channels and dtype that all images share: `mode` says the channels, `bits` the depth."""
    dtype = _depth(source, headers, bits)
    if mode is not None:
        return _CHANNELS[mode], dtype
    total, alpha = len(headers), int(np.sum(headers["channels"] == 4))
    if alpha and alpha < total:
        raise SourceError(
            f"{source}: {alpha} of {total} images have an alpha channel. Say what all shall become: `--mode rgb` drops "
            f"alpha, `--mode rgba` makes the others opaque."
        )
    if alpha:
        return 4, dtype
    return (3 if np.any(headers["channels"] == 3) else 1), dtype


def _depth(source: str | Path, headers: NDArray[np.void], bits: Bits | None) -> np.dtype[Any]:
    total, deep = len(headers), int(np.sum(headers["bits"] == 16))
    if bits == 8:
        return np.dtype(np.uint8)
    if bits == 16 and deep < total:
        raise SourceError(
            f"{source}: {total - deep} of {total} images have 8 bits a channel, which are never passed off as 16. "
            f"Leave `--bits 16` out, or pack the 16-bit images by themselves."
        )
    if deep and deep < total:
        raise SourceError(
            f"{source}: {deep} of {total} images have 16 bits a channel, the others 8. Say that all shall have 8: "
            f"`--bits 8` keeps the high byte of the 16-bit ones."
        )
    return np.dtype(np.uint16 if deep else np.uint8)


def conversions(kinds: Counter[str], channels: int, dtype: np.dtype[Any]) -> dict[str, int]:
    """How many images of each other kind become what the file holds."""
    goal = f"{_MODES[channels]} of {dtype.itemsize * 8} bits"
    own = _OWN_KINDS[dtype.itemsize][channels]
    return {f"{kind} -> {goal}": count for kind, count in sorted(kinds.items()) if count and kind not in own}
