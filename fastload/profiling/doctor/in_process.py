"""`diagnose`: the doctor for a loader in this process, for example in a notebook."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from fastload.errors import OptionError
from fastload.profiling.doctor.command import FOLDER_VARIABLE, INJECT, environment_for
from fastload.profiling.doctor.examine import measured_of
from fastload.profiling.doctor.kernel import WaitSampler
from fastload.profiling.doctor.loader_records import read_records
from fastload.profiling.meter.clocks import HOW, measure_headspace
from fastload.profiling.meter.sampler import Sampler, family_of
from fastload.timing.results import Measured, Verdict

_MODULE = "fastload_doctor_injected"
_FAMILY_EVERY_S = 0.5
_SAMPLE_EVERY_S = 0.25


@dataclass(frozen=True)
class Diagnosis:
    """The verdict on a loop over a loader. Printing it shows the verdict and its evidence.

    Attributes:
        measured: everything measured.
        verdict: what limits the loop.
    """

    measured: Measured
    verdict: Verdict

    def __str__(self) -> str:
        return "\n".join([*(f"  {line}" for line in self.verdict.evidence), f"verdict: {self.verdict.sentence}."])

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
    folder = Path(tempfile.mkdtemp(prefix="fastload-doctor-"))
    kernel, sampler = WaitSampler(), Sampler(every_s=_SAMPLE_EVERY_S).start()
    batch = None
    try:
        with _metering(folder):
            batch = _loop(loader, step, seconds, kernel)
    finally:
        kernel.close()
        sampler.stop()
        records = read_records(folder)
        shutil.rmtree(folder, ignore_errors=True)
    mine = [found for found in records.loaders if found.process.pid == os.getpid()]
    if not mine:
        raise OptionError(f"diagnose() takes a DataLoader or a FastLoader, and cannot see into {type(loader).__name__}")
    found = max(mine, key=lambda record: record.elapsed_s)
    waits = kernel.shares(found.fetches)
    title = "fastload.diagnose()"
    measured = measured_of(found, records, readings=sampler.readings, waits=waits, title=title)
    if step is not None and batch is not None:
        rate = measure_headspace(step, batch, min(2.0, seconds / 4))
        measured = replace(measured, headspace_samples_per_s=rate, headspace_how=HOW)
    assert measured.verdict is not None, "a loader with steps has one"
    return Diagnosis(measured, measured.verdict)


def _loop(loader: Iterable[Any], step: Callable[[Any], object] | None, seconds: float, kernel: WaitSampler) -> Any:
    """Iterates the loader for some seconds, at least until one step has ended; returns the last batch."""
    batch, begun_s, due_s, passes = None, time.monotonic(), 0.0, 0
    while True:
        count = 0
        for count, batch in enumerate(loader, 1):
            if step is not None:
                step(batch)
            now_s = time.monotonic() - begun_s
            if now_s > due_s:
                due_s = now_s + _FAMILY_EVERY_S
                kernel.watch(family_of(os.getpid()))
            if now_s > seconds and (count > 1 or passes > 0):  # a step ends with the next batch, or with its pass
                return batch
        if count == 0:
            raise OptionError("diagnose(): the loader has no batch")
        passes += 1


@contextmanager
def _metering(folder: Path) -> Iterator[None]:
    """Within the block, loaders of this process, and workers that it starts, are timed and recorded in the folder."""
    module = _injected()
    installed = bool(module._changed)  # as under `fastload doctor`
    if not installed:
        module.install()
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", FOLDER_VARIABLE)}
    os.environ.update(environment_for(folder, os.environ))
    folder_before = module.meter_into(str(folder))
    try:
        yield
    finally:
        module.meter_into(folder_before)
        if not installed:
            module.uninstall()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _injected() -> ModuleType:
    """Returns the injected module, imported into this process."""
    if _MODULE not in sys.modules:
        spec = importlib.util.spec_from_file_location(_MODULE, INJECT / "sitecustomize.py")
        assert spec is not None and spec.loader is not None, "it is part of this package"
        module = importlib.util.module_from_spec(spec)
        sys.modules[_MODULE] = module
        spec.loader.exec_module(module)
    return sys.modules[_MODULE]
