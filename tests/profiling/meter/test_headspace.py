"""The rate of a step without a loader."""

from __future__ import annotations

import pytest
import torch
from hand_clock import HandClock

from fastload import Meter, OptionError
from fastload.profiling.meter import measure_headspace

BATCH = (torch.zeros(8, 3), torch.zeros(8))


@pytest.mark.parametrize("behind", [False, True])
def test_the_first_step_and_a_disturbed_one_do_not_count(behind):
    clock, taken = HandClock(behind=behind), iter([100.0, 0.5, 0.5, 60.0, *[0.5] * 500])

    def step(batch):
        assert batch is BATCH
        clock.now += next(taken)

    assert measure_headspace(step, BATCH, 70, device=clock) == 16
    assert measure_headspace(step, BATCH, 0.1, device=clock, samples=3) == 6
    with Meter(device=clock, sample_every_s=0) as meter:
        for batch in meter.watch([BATCH]):
            step(batch)
        assert meter.headspace(step, BATCH, 5) == 16
    measured = meter.measured()
    assert measured.headspace_samples_per_s == 16 and measured.headspace_how == "measured on one cached batch"
    assert measured.num_steps == 1
    with pytest.raises(OptionError, match="seconds"):
        measure_headspace(print, BATCH, 0)
    with pytest.raises(OptionError, match="samples="):
        measure_headspace(print, "text")
