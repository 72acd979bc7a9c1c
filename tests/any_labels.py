"""What a process does with a packed file whose labels have any values, in little memory; `test_any_labels.py` runs it.

python any_labels.py FILE
"""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil

from fastload.export import export_file
from fastload.inspection.info import inspect_file
from fastload.inspection.preview import make_preview
from fastload.inspection.shuffle_quality import measure_shuffles
from fastload.inspection.verify import verify_file
from fastload.pack import pack_images
from fastload.repack import repack_file

MOST_BYTES = 2**30
"""Memory beyond what the process has when it begins: threads take some, a table of all numbers up to a label 16 times
as much."""


def work(file: Path) -> None:
    with suppress(ValueError, OSError):  # macOS has no such limit
        limit = psutil.Process().memory_info().vms + MOST_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    inspect_file(file)
    make_preview(file, file.with_suffix(".png"))
    measure_shuffles(file, batch_size=2)
    for layout in ("auto", "csv"):
        folder = file.with_name(f"as-{layout}")
        export_file(file, folder, layout=layout, workers=1)
        again = pack_images(folder, file.with_name(f"{layout}.h5"), workers=0).path
        assert verify_file(again, source=folder, workers=0).ok
        (folder / "fastload.json").unlink()
        pack_images(folder, file.with_name(f"{layout}-without.h5"), workers=0)
    largest = max(np.load(file.with_suffix(".npy")).tolist())
    if isinstance(largest, int):
        report = repack_file(file, file.with_name("one.h5"), label=(str(largest),), workers=0)
        print(report.num_samples)


if __name__ == "__main__":
    work(Path(sys.argv[1]))
