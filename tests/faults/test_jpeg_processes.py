"""JPEGs of every process, precision and sampling, through each way that reads one: never a crash.

All of them, under AddressSanitizer, as `jpeg_ways.py` says: FASTLOAD_JPEGS=5040 FASTLOAD_ASAN=folder of build_asan.py.
"""

from __future__ import annotations

import os
from pathlib import Path

from jpeg_processes import all_names, sample
from jpeg_ways import run


def test_jpegs_of_every_process_end_in_a_result_or_an_error_of_ours() -> None:
    count, under = int(os.environ.get("FASTLOAD_JPEGS", "20")), os.environ.get("FASTLOAD_ASAN")
    names = list(sample(count))
    assert {name.split("-")[0] for name in names} == {name.split("-")[0] for name in all_names()}
    assert run(names, Path(under) if under else None, commands=count > 20) == []
