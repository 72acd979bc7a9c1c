"""Names the part of a training loop that limits its speed, and the change to make first.

In: `Demands`, the measured times of a loop's steps and of the batches it used, from the meter, the doctor or the bench.
Out: a `Verdict` (`fastload.timing.results`) with the cause, one sentence, the measurements behind it, and what each
change would gain. Everything is a pure function of measurements: nothing is timed or read here.

Read `demands` first (the input, and the mean costs made from it), then `judge` (which change helps most), then
`sentences` (the words). Imports only `fastload.timing`; the meter, the doctor and the bench import this package.
"""

from fastload.profiling.verdict.demands import Demands
from fastload.profiling.verdict.judge import judge
from fastload.profiling.verdict.sentences import CAUSES

__all__ = ["CAUSES", "Demands", "judge"]
