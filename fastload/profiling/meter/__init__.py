"""Times the steps of a training loop, and reads GPU, CPU, memory and disk counters meanwhile.

In: any iterable of batches, watched by a `Meter`. Out: for each step the time spent waiting, copying, transforming and
computing; readings of the machine; a verdict (`profiling.verdict`); files for other tools. The batches pass through
unchanged. Torch is imported for CUDA only.

Read `meter` first (the public class, and one pass over a loader), then `loops` (the sums; host or
CUDA events; the headspace), `sampler` (the readings), `exports`. Imports `timing` and `profiling.verdict`,
not the loader.
"""

from fastload.profiling.meter.loops import measure_headspace
from fastload.profiling.meter.meter import Meter
from fastload.profiling.meter.sampler import Sampler, environment

__all__ = ["Meter", "Sampler", "environment", "measure_headspace"]
