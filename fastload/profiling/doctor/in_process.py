"""`diagnose`: the doctor for a loader in this process, for example in a notebook."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastload.errors import OptionError
from fastload.profiling.doctor import injected
from fastload.profiling.doctor.command import FOLDER_VARIABLE, environment_for
from fastload.profiling.doctor.examine import Recording
from fastload.profiling.meter.loops import measure_headspace
from fastload.timing.results import Measured, Verdict


@dataclass(frozen=True)
class Diagnosis:
    """The verdict on a loop over a loader. Printing it shows the verdict and its evidence."""

    measured: Measured  # everything measured
    verdict: Verdict  # what limits the loop

    def __str__(self) -> str:
        lines = [f"  {line}" for line in self.verdict.evidence]
        if self.verdict.worth_making:
            lines += [f"  {line}" for line in self.verdict.cures[0].instructions]
        return "\n".join([*lines, f"verdict: {self.verdict.sentence}."])

    __repr__ = __str__


def diagnose(loader: Iterable[Any], step: Callable[[Any], object] | None = None, *, seconds: float = 10.0) -> Diagnosis:
    """Measures a loop over this loader and says what limits it.

    The loader is iterated from its start, again and again, until the time is over and one whole step was seen. `step`
    is called with each batch, so a model that it trains is trained. With a step, the headspace is measured too: the
    rate of the step on one batch alone.

    Args:
        loader: a `DataLoader` or a `FastLoader`.
        step: one training step; None: the loader alone.
        seconds: time to measure.

    Raises:
        OptionError: not a loader, no time, or a loader without a batch.
    """
    if not seconds > 0:
        raise OptionError(f"seconds={seconds!r}: give a time above 0")
    if isinstance(loader, Iterator) or (not hasattr(loader, "dataset") and not hasattr(loader, "state_dict")):
        raise OptionError(f"diagnose() takes a DataLoader or a FastLoader, got {type(loader).__name__}")
    with Recording() as recording:
        with _metering(recording.folder):
            recording.follow(os.getpid())
            batch = _loop(loader, step, seconds, recording)
        mine = [found for found in recording.records.read().loaders if found.process["pid"] == os.getpid()]
        if not mine:
            name = type(loader).__name__
            raise OptionError(f"diagnose() takes a DataLoader or a FastLoader, and cannot see into {name}")
        main = max(mine, key=lambda record: record.elapsed_s)
        rate = None if step is None or batch is None else measure_headspace(step, batch, min(2.0, seconds / 4))
        measured = recording.measured(main, title="fastload.diagnose()", alone_samples_per_s=rate)
    assert measured.verdict is not None, "a loader with steps has one"
    return Diagnosis(measured, measured.verdict)


def _loop(loader: Iterable[Any], step: Callable[[Any], object] | None, seconds: float, recording: Recording) -> Any:
    """Iterates the loader for some seconds, at least until one step has ended; returns the last batch."""
    end_s, count = time.monotonic() + seconds, 0
    while True:
        before = count
        for batch in loader:
            count += 1
            if step is not None:
                step(batch)
            now_s = time.monotonic()
            recording.follow(os.getpid())
            if now_s > end_s and count > 1:  # a step ends with the next batch, or with its pass
                return batch
        if count == before:
            raise OptionError("diagnose(): the loader has no batch")


@contextmanager
def _metering(folder: Path) -> Iterator[None]:
    """Within the block, loaders of this process, and workers that it starts, are timed and recorded in the folder."""
    # Under `fastload doctor` it was imported before the script, and has wrapped everything.
    module: Any = sys.modules.get("fastload_doctor_injected", injected)
    installed = module.is_installed()
    if not installed:
        module.install()
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", FOLDER_VARIABLE)}
    os.environ.update(environment_for(folder, os.environ))
    folder_before = module.record_into(str(folder))
    try:
        yield
    finally:
        module.record_into(folder_before)
        if not installed:
            module.uninstall()
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
