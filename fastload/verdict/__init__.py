"""What binds a training loop, from what its batches cost and its steps waited: a pure function of measurements."""

from fastload.verdict.demands import BatchWork, Demands
from fastload.verdict.judge import judge
from fastload.verdict.words import CAUSES

__all__ = ["CAUSES", "BatchWork", "Demands", "judge"]
