"""Keypoints of objects, such as the joints of persons: a column next to the boxes, and which of them a mirror swaps."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fastload.format.ragged import Column
from fastload.sources.box_forms import BoxSlots

_SIDES = re.compile(r"left|right|(?<![a-z])[lr](?![a-z])", re.IGNORECASE)
_OTHER = {"left": "right", "right": "left", "l": "r", "r": "l"}


def keypoints_column(
    slots: BoxSlots,
    points: NDArray[np.float32],
    names: Sequence[str] = (),
    skeleton: Sequence[tuple[int, int]] = (),
    flip_pairs: Sequence[int] = (),
) -> Column:
    """Returns the column `keypoints`, float32 (N, M, K, 3): x, y and visibility, which is COCO's.

    0: not labelled, and then all three are 0, as behind the last box of a sample; 1: labelled, but hidden; 2: visible.
    Attributes, as far as known: `names` of the K points; `skeleton`, the pairs of points that are joined, one pair
    behind the other; `flip_pairs`, for each point its number in a mirrored image.

    Args:
        slots: where the B objects lie.
        points: (B, K, 3).
        names: K names.
        skeleton: pairs of numbers of points, from 0.
        flip_pairs: K numbers of points; (): by the names, such as left_eye and right_eye.
    """
    flip_pairs = tuple(flip_pairs) or flip_pairs_of(names)
    attrs = {
        "names": tuple(names),
        "skeleton": tuple(number for pair in skeleton for number in pair),
        "flip_pairs": flip_pairs,
    }
    return Column(slots.padded(points), {name: value for name, value in attrs.items() if value}, "xyv")


def flip_pairs_of(names: Sequence[str]) -> tuple[int, ...]:
    """Returns for each point the number of the one of the other side, by their names, else its own; () for no sides."""
    number = {name.lower(): at for at, name in enumerate(names)}
    mirrored = [_SIDES.sub(lambda found: _OTHER[found[0].lower()], name.lower()) for name in names]
    pairs = [number.get(name, at) for at, name in enumerate(mirrored)]
    pairs = [other if pairs[other] == at else at for at, other in enumerate(pairs)]
    return () if pairs == list(range(len(pairs))) else tuple(pairs)
