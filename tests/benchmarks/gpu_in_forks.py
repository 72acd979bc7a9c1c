"""benchmarks/gpu.py, whose sections are forks of this process; see forks.py.

torch._dynamo, which the first optimizer imports, is imported before. Nothing else of a section is. Ranks that a
section starts are forks, too.
"""

from __future__ import annotations

import functools
import gc
import sys
from pathlib import Path

import numpy
import torch._dynamo
import torch.multiprocessing

sys.path.insert(0, str(Path(__file__).resolve().parent))
from forks import ForkedPopen, in_the_place_of

del sys.path[0]
if not sys.flags.safe_path:
    del sys.path[0]  # this folder, which no section has
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import gpu  # noqa: E402  its folder is on the path from here on

PRELOADED = numpy, torch

gc.freeze()  # as in tests/warm_python.py
torch.multiprocessing.spawn = functools.partial(torch.multiprocessing.start_processes, start_method="fork")
ForkedPopen.again = ("gpu",)
gpu.subprocess = in_the_place_of(ForkedPopen)
sys.exit(gpu.main())
