"""Readings of the driver and the system as words and tables."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from fastload.measured import Measured, Table
from fastload.report.plots import Line
from fastload.report.thin import into_series
from fastload.report.words import bytes_text, number_text

PROCESSES = 6
"""The busiest of a job, each in a line of its own."""


def table_of_gpus(run: Measured, names: Sequence[str]) -> Table:
    """Lowest, mean and highest of one GPU; of several, a line for each with its means."""
    gpus = sorted({name.partition(".")[0] for name in names}, key=lambda gpu: (len(gpu), gpu))
    if len(gpus) == 1:
        return table_of_readings(run, names)
    kinds = sorted({name.partition(".")[2] for name in names}, reverse=True)
    rows = []
    for gpu in gpus:
        cells = (_reading_text(f"{gpu}.{kind}", mean_of(run, f"{gpu}.{kind}")) for kind in kinds)
        rows.append((gpu_name(gpu), *cells))
    return Table("", ("Means", *(_SPOKEN.get(kind, kind) for kind in kinds)), tuple(rows))


def table_of_readings(run: Measured, names: Sequence[str]) -> Table:
    """Lowest, mean and highest of each reading named; of many processes the busiest."""
    found = [(name, into_series(run.readings, name, len(run.readings) or 1)) for name in names]
    known = [(name, series.mean) for name, series in found if series is not None]
    busiest = sorted((one for one in known if "cpu_percent." in one[0]), key=lambda one: -float(one[1].mean()))
    left_out = {name for name, _ in busiest[PROCESSES:]}
    rows = [
        (_spoken(name), *(_reading_text(name, float(value)) for value in (values.min(), values.mean(), values.max())))
        for name, values in known
        if name not in left_out
    ]
    if left_out:
        after = max(i for i, row in enumerate(rows) if row[0].startswith("process ")) + 1
        rows.insert(after, (f"{len(left_out):,} less busy processes", "", "", ""))
    return Table("", ("Reading", "lowest", "mean", "highest"), tuple(rows))


def means_text(run: Measured, lines: Sequence[Line], unit: str) -> str:
    """Each line with its mean: `GPU 0 64.0 % on average.`"""
    means = (f"{line.name} {number_text(mean_of(run, line.key) * line.factor)}{unit} on average" for line in lines)
    return f"{', '.join(means)}."


def mean_of(run: Measured, name: str) -> float:
    """The mean of one reading; NaN where there is none."""
    series = into_series(run.readings, name, 1)
    return math.nan if series is None else float(series.mean[0])


_SPOKEN = {
    "utilization_percent": "utilization",
    "memory_bytes": "memory",
    "power_w": "power",
    "sm_mhz": "clock",
    "cpu_percent": "CPU",
    "disk_read_bytes_per_s": "read from disk",
    "disk_busy_percent": "disk busy",
}


def _spoken(name: str) -> str:
    """`gpu0.power_w` as `GPU 0 power`, `cpu_percent.71` as `process 71`; a name unknown here as it is."""
    first, _, rest = name.partition(".")
    if rest in _SPOKEN:
        return f"{gpu_name(name)} {_SPOKEN[rest]}"
    if first in _SPOKEN:
        return f"process {rest}" if rest else _SPOKEN[first]
    return name


def gpu_name(name: str) -> str:
    """`gpu0.power_w` as `GPU 0`."""
    return re.sub(r"^gpu", "GPU ", name.partition(".")[0])


def _reading_text(name: str, value: float) -> str:
    if not math.isfinite(value):
        return "not known"
    what = name.partition(".")[2] if name.startswith("gpu") else name.partition(".")[0]
    if what == "cpu_percent":
        return f"{number_text(value / 100)} cores"
    if what.endswith("_bytes_per_s"):
        return f"{number_text(value / 1e6)} MB/s"
    if what.endswith("_bytes"):
        return bytes_text(value)
    for ending, unit in (("_percent", " %"), ("_w", " W"), ("_mhz", " MHz")):
        if what.endswith(ending):
            return number_text(value) + unit
    return number_text(value)
