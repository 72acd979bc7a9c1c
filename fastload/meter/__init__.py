"""Times the steps of a training loop and reads what the machine says meanwhile. Torch is imported for CUDA only."""

from fastload.meter.headspace import measure_headspace
from fastload.meter.machine import environment
from fastload.meter.meter import Meter
from fastload.meter.probe import Crew, Probe
from fastload.meter.sampler import Sampler
from fastload.meter.stats import LoaderStats

__all__ = ["Crew", "LoaderStats", "Meter", "Probe", "Sampler", "environment", "measure_headspace"]
