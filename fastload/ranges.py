"""Names for a profiler: what the stages do shows up as `fastload.wait`, `fastload.read`, `fastload.copy`, ...

Off, a range costs 0.2 us. It is on while `torch.profiler` records, and while a `Meter(ranges=True)` runs, which also
gives the names to NVTX where CUDA is in use. Torch's profiler sees the ranges of its own thread only, unless it is told
to record all threads; NVTX has those of all. No torch here, unless it is there already.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

_OFF = nullcontext()
_asked = [0]  # Meters that ask for ranges: the profiler's own switch is one for the process too


def ask(count: int) -> None:
    """So many more, or fewer, ask for ranges in this process."""
    _asked[0] += count


def span(name: str) -> AbstractContextManager[Any]:
    """A range of this name, `fastload.` before it, if anybody wants to know."""
    if not _asked[0]:
        profiler = sys.modules.get("torch.autograd.profiler")
        if not getattr(profiler, "_is_profiler_enabled", False):
            return _OFF
    return _Span(f"fastload.{name}") if "torch" in sys.modules else _OFF


class _Span:
    def __init__(self, name: str) -> None:
        torch: Any = sys.modules["torch"]
        self._name = name
        self._record = torch.profiler.record_function(name)
        self._nvtx = torch.cuda.nvtx if _asked[0] and torch.cuda.is_initialized() else None

    def __enter__(self) -> None:
        if self._nvtx is not None:
            self._nvtx.range_push(self._name)
        self._record.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._record.__exit__(kind, error, trace)
        if self._nvtx is not None:
            self._nvtx.range_pop()
