"""Named ranges for profilers: `fastload.wait`, `fastload.read`, `fastload.copy`, ...

Off, a range costs 0.2 us. Ranges are on while `torch.profiler` records, and while a `Meter(ranges=True)` runs, which
also sends them to NVTX where CUDA is in use. Torch's profiler sees only the ranges of its own thread unless it records
all threads; NVTX sees all. No torch here, unless it is imported already.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

_OFF = nullcontext()
_asked = [0]  # Meters that want ranges; one number for the process, as the profiler's own switch is


def ask(count: int) -> None:
    """Adds `count`, maybe negative, to the number of meters that want ranges in this process."""
    _asked[0] += count


def span(name: str) -> AbstractContextManager[Any]:
    """Returns a context manager: the range `fastload.NAME`, or one that does nothing if nobody records."""
    if not _asked[0]:
        profiler = sys.modules.get("torch.autograd.profiler")
        if not getattr(profiler, "_is_profiler_enabled", False):
            return _OFF
    return _recorded(f"fastload.{name}") if "torch" in sys.modules else _OFF


@contextmanager
def _recorded(name: str) -> Iterator[None]:
    torch: Any = sys.modules["torch"]
    nvtx = torch.cuda.nvtx.range(name) if _asked[0] and torch.cuda.is_initialized() else _OFF
    with nvtx, torch.profiler.record_function(name):
        yield
