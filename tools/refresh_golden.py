"""Write `tests/data/format_v1.h5` anew: one tiny packed file of each format version is kept for ever.

Run it only when a new format version needs a new file; the file of an old version never changes.

    python tools/refresh_golden.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastload.layout import write_packed
from fastload.sources.listing import Column

TARGET = Path(__file__).parents[1] / "tests" / "data" / "format_v1.h5"


def golden_images() -> NDArray[np.uint8]:
    """Ten images of 5 x 4 x 3 whose every value tells its place: uint8 (10, 5, 4, 3)."""
    return (np.arange(10 * 5 * 4 * 3) * 7 % 251).astype(np.uint8).reshape(10, 5, 4, 3)


def main() -> None:
    """Write the file."""
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    columns = {
        "labels": Column(np.arange(10, dtype=np.int64) % 3, {"names": ("cat", "dog", "größe")}),
        "bbox": Column(np.arange(40, dtype=np.int32).reshape(10, 4)),
        "key": Column(np.array([f"train/{i}.png".encode() for i in range(10)])),
    }
    masks = golden_images()[..., 0] % 4
    write_packed(
        TARGET,
        golden_images(),
        columns,
        masks=masks,
        ignore_index=3,
        chunk_rows=4,
        splits={"train": 7, "val": 3},
        seed=11,
    )
    print(f"wrote {TARGET} ({TARGET.stat().st_size} bytes)")


if __name__ == "__main__":
    main()
