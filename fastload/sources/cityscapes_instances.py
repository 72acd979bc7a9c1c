"""Cityscapes' masks of instances: files `*_gtFine_instanceIds.png` of 16 bits, packed as they are.

A value below 1,000 is the label of a region without single instances, as in `labelIds` files: stuff, or a group of
things. Any other is label * 1,000 + number of the instance, counted from 0: the label of both is
`value // 1000 if value >= 1000 else value`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fastload.sources.assemble import Samples

LABELS = (
    "unlabeled", "ego vehicle", "rectification border", "out of roi", "static", "dynamic", "ground", "road", "sidewalk",
    "parking", "rail track", "building", "wall", "fence", "guard rail", "bridge", "tunnel", "pole", "polegroup",
    "traffic light", "traffic sign", "vegetation", "terrain", "sky", "person", "rider", "car", "truck", "bus",
    "caravan", "trailer", "train", "motorcycle", "bicycle",
)  # fmt: skip
"""The labels 0 to 33."""

NO_MASK = 65_535  # of frames without a mask
LABEL_DIVISOR = 1000


def of_instances(samples: Samples) -> Samples:
    """Returns samples whose masks are instanceIds files, with what their values mean."""
    if samples.masks is None:
        return samples
    attrs = {"kind": "instance", "label_divisor": LABEL_DIVISOR}
    dtype = np.dtype(np.uint16)
    masks = replace(samples.masks, names=LABELS, ignore_index=NO_MASK, attrs=attrs, dtype=dtype)
    return replace(samples, masks=masks)
