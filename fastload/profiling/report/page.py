"""Fills the template `page.html`, which escapes all strings from outside: text, tables and plots of each run."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from fastload.profiling.report import plots
from fastload.system.advice import advice
from fastload.system.text import format_bytes, number_text, seconds_text, share_text
from fastload.timing.results import Measured, Table, WorkTime, with_schema

LONG = 110
"""Number of characters from which a sentence is set in a smaller font."""


def make_page(runs: Sequence[Measured]) -> str:
    """Returns the HTML of a report: one run after another, and a table of all at the top if there are several."""
    css, script, template = (
        resources.files("fastload.profiling.report").joinpath(name).read_text(encoding="utf-8")
        for name in ("page.css", "page.js", "page.html")
    )
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "share": share_text, "number": number_text, "seconds": seconds_text, "numeric": _is_number, "code": _with_code,
        "capital": _capital,
    }  # fmt: skip
    data = with_schema(runs[0].to_dict() if len(runs) == 1 else {"runs": [run.to_dict() for run in runs]})
    return environment.from_string(template).render(
        title=" · ".join(run.title for run in runs[:3]) or "nothing measured",
        long=LONG,
        css=Markup(css),
        script=Markup(script),
        # The page's policy lets only this script run, whatever a string in the page contains.
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        runs=[
            {
                "prefix": "" if len(runs) == 1 else f"run{number}-",  # makes ids unique in the page
                "measured": run,
                "figures": key_figures(run),
                "shares": shares(run) if run.steps else {},
                "sections": sections(run),
            }
            for number, run in enumerate(runs, 1)
        ],
        overview=_overview(runs) if len(runs) > 1 else None,
        data=Markup(_json(data)),
    )


def _overview(runs: Sequence[Measured]) -> Table:
    """Returns the table that compares several runs."""
    rows = []
    for run in runs:
        share = run.verdict.stall_share if run.verdict else shares(run)["wait"] if run.steps else None
        waits = "no steps" if share is None else share_text(share)
        headspace = number_text(run.headspace_samples_per_s) if run.headspace_samples_per_s else "not measured"
        cause = run.verdict.cause if run.verdict else "no verdict"
        rows.append((run.title, number_text(run.samples_per_s), waits, headspace, cause))
    return Table("Side by side", ("Run", "samples/s", "waiting for data", "headspace", "what binds"), tuple(rows))


def _json(data: Any) -> str:
    """Returns JSON that is safe inside a script element."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"), default=str)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _is_number(text: str) -> bool:
    """Whether a table cell is a number, to be right-aligned."""
    return text[:1].isdigit() or (text[:1] in "-−" and text[1:2].isdigit())


def _capital(text: str) -> str:
    """Returns the text with a capital, unless it begins with a name such as `num_workers`."""
    return text[:1].upper() + text[1:] if text.split(" ")[0].isalpha() else text


def _with_code(text: str) -> Markup:
    """Returns the text escaped, with the parts between backquotes as code."""
    escaped = str(Markup.escape(text))
    paired = text.count("`") % 2 == 0
    return Markup(re.sub("`([^`]*)`", r"<code>\1</code>", escaped) if paired else escaped)


DUTY_CYCLE = (
    "NVML's utilization is a duty cycle: the share of the time in which at least one kernel ran, however few of the "
    "GPU's units it kept busy. A high figure does not show that the GPU is used well; the headspace shows what a "
    "loader could still win."
)
NO_GPU = f"No GPU was read: there is no NVIDIA GPU, its driver gave no counters, or {advice('nvidia-ml-py')}."
_ALL_OF_IT = 0.9  # of a run; a picture of one loop that takes so much shows nothing
NO_STEPS = "No step of a training loop was measured: the run ended before its second batch, or had no loop."


@dataclass(frozen=True)
class Section:
    """One section of a page."""

    heading: str  # its title
    anchor: str  # its id within the run
    plot: plots.Plot | None = None  # None: there is none
    missing: str = ""  # why there is no plot; empty: there is one, or the section never has one
    note: str = ""  # how to read the plot
    items: tuple[str, ...] = ()  # a list below the plot
    tables: tuple[Table, ...] = ()  # below the plot; a title may be empty


def key_figures(run: Measured) -> list[tuple[str, str, str]]:
    """Returns (name, value, remark) of the few figures at the top."""
    figures = []
    if run.elapsed_s > 0:
        figures.append(("samples/s", number_text(run.samples_per_s), f"over {seconds_text(run.elapsed_s)}"))
    if run.headspace_samples_per_s:
        remark = "of the same step without a loader"
        if run.samples_per_s > 0:
            remark = f"{number_text(run.headspace_samples_per_s / run.samples_per_s)} times this run"
        figures.append(("headspace, samples/s", number_text(run.headspace_samples_per_s), remark))
    if run.steps:
        durations = plots.parts_of(run.steps).sum(axis=0)
        mean_s, waits = float(durations.mean()), shares(run)["wait"]
        if run.verdict:  # which also counts the waits at the ends of epochs
            mean_s, waits = run.verdict.step_s, run.verdict.stall_share
        figures.append(("a step, mean", seconds_text(mean_s), f"{run.num_steps:,} steps"))
        figures.append(("waiting for data", share_text(waits), "of the time of all steps"))
    utilization = [
        mean_of(run, name) / 100 for name in plots.names_of(run.readings) if name.endswith(".utilization_percent")
    ]
    if utilization:
        of = f"a duty cycle; {share_text(min(utilization))} to {share_text(max(utilization))}"
        remark = f"{of} on {len(utilization)} GPUs" if len(utilization) > 1 else "a duty cycle"
        figures.append(("GPU utilization", share_text(float(np.mean(utilization))), remark))
    return figures


def shares(run: Measured) -> dict[str, float]:
    """Returns the share of the time of all steps that each part took, 0 to 1."""
    sums = plots.parts_of(run.steps).sum(axis=1)
    whole = float(sums.sum()) or 1.0
    return {part: float(value) / whole for part, value in zip(plots.PARTS, sums, strict=True)}


def sections(run: Measured) -> list[Section]:
    """Returns everything below the verdict, in order."""
    found = [*_run(run), _steps(run), _rate(run), _gpus(run), _machine(run), _stages(run)]
    items = tuple(
        f"{remedy.change}: {number_text(remedy.gain)} times as fast, {seconds_text(remedy.step_s)} a step "
        f"(takes away: {remedy.cause})" + (f"; to do it: {remedy.how_in_brief}" if remedy.how_in_brief else "")
        for remedy in (run.verdict.cures[1:] if run.verdict else ())
    )
    if items:
        found.append(Section("Other changes considered", "others", items=items))
    facts, environment = (
        (Table("", ("", ""), tuple(pairs)),) if pairs else () for pairs in (run.facts, run.environment.items())
    )
    if facts or run.tables:
        found.append(Section("Further figures", "further", tables=(*facts, *run.tables)))
    missing = "" if environment else "Machine and versions were not recorded."
    return [*found, Section("Environment", "environment", missing=missing, tables=environment)]


def _run(run: Measured) -> list[Section]:
    """Returns the section on all of a script's run; none of a run that was one loop."""
    if len(run.lanes) < 2 and sum(lane.seconds for lane in run.lanes) > _ALL_OF_IT * run.run_s:
        return []
    note = (
        "From top to bottom: the passes of each loop over a loader, then calls that take long. Loops of less than 5 % "
        "of the run, and other processes, are not drawn."
    )
    return [Section("The whole run", "course", plots.plot_run(run), note=note)] if run.lanes else []


def _steps(run: Measured) -> Section:
    heading, anchor = "Steps over time", "steps"
    if not run.steps:
        return Section(heading, anchor, missing=NO_STEPS)
    parts = plots.parts_of(run.steps)
    whole = parts.sum(axis=0)
    rows = []
    for name, values in [*zip(plots.PARTS, parts, strict=True), ("whole step", whole)]:
        middle, late = np.percentile(values, [50, 95])
        figures = (values.mean(), middle, late, values.max())
        share = float(values.sum() / (whole.sum() or 1.0))
        rows.append((name, share_text(share), *(seconds_text(float(value)) for value in figures)))
    drawn = "" if run.num_steps <= len(run.steps) else f" Recorded: {len(run.steps):,} of {run.num_steps:,} steps."
    note = (
        "From bottom to top: waiting for the batch, copying it to the device, augmenting it there, and the rest of the "
        "step. Where steps are many, a column is the mean of neighbours, and a thin line reaches up to the slowest of "
        f"them; a triangle at the edge marks one that is taller than the plot.{drawn}"
    )
    head = ("Part", "share", "mean", "median", "95 % below", "longest")
    return Section(heading, anchor, plots.plot_steps(run), note=note, tables=(Table("", head, tuple(rows)),))


def _rate(run: Measured) -> Section:
    heading, anchor = "Throughput and headspace", "rate"
    if not run.steps:
        return Section(heading, anchor, missing=NO_STEPS)
    note = "The headspace, the rate of the same step without a loader, was not measured in this run."
    if run.headspace_samples_per_s:
        how = f" ({run.headspace_how})" if run.headspace_how else ""
        note = (
            f"Dashed: the headspace, the rate of the same step without a loader{how}. No loader wins more on average."
        )
    return Section(heading, anchor, plots.plot_rate(run), note=note)


def _gpus(run: Measured) -> Section:
    heading, anchor = "GPU utilization", "gpu"
    names = [name for name in plots.names_of(run.readings) if name.startswith("gpu")]
    if not names:
        return Section(heading, anchor, missing=NO_GPU)
    tables = (table_of_gpus(run, names),)
    panel = plots.Panel(
        "GPU utilization, %", {name: gpu_name(name) for name in names if name.endswith(".utilization_percent")}, top=100
    )
    if not panel.lines:
        missing = "The driver gave no utilization; a slice of a GPU (MIG) has none."
        return Section(heading, anchor, missing=missing, tables=tables)
    plot = plots.plot_readings(run, [panel], f"GPU utilization over the run. {means_text(run, panel, ' %')}")
    return Section(heading, anchor, plot, note=DUTY_CYCLE, tables=tables)


_PANELS = (
    plots.Panel("CPU cores busy", {"cpu_percent": "this job", "others_cpu_percent": "other programs"}, factor=0.01),
    plots.Panel("read from disk, MB/s", {"disk_read_bytes_per_s": "disk"}, factor=1e-6),
    plots.Panel("disk busy, %", {"disk_busy_percent": "disk"}, top=100),
)


def _machine(run: Measured) -> Section:
    heading, anchor = "CPU and disk", "cpu"
    names = [name for name in plots.names_of(run.readings) if not name.startswith("gpu")]
    if not names:
        return Section(heading, anchor, missing="Neither CPU nor disk was read in this run.")
    tables = (table_of_readings(run, names),)
    panels = [replace(panel, lines={key: panel.lines[key] for key in panel.lines if key in names}) for panel in _PANELS]
    panels = [panel for panel in panels if panel.lines]
    if not panels:
        return Section(heading, anchor, tables=tables)
    label = " ".join(f"{panel.title}: {means_text(run, panel, '')}" for panel in panels)
    note = "The line is the mean of neighbouring readings, the band reaches from the lowest to the highest of them."
    return Section(heading, anchor, plots.plot_readings(run, panels, label), note=note, tables=tables)


def _stages(run: Measured) -> Section:
    heading, anchor = "What a batch costs, stage by stage", "stages"
    if not run.stages:
        return Section(heading, anchor, missing="The stages of this loader could not be measured separately.")
    whole = sum(run.stages.values(), WorkTime())
    rows = []
    for stage, work in [*plots.in_order(run.stages), ("all stages", whole)]:
        times = (seconds_text(seconds) for seconds in (work.running_s, work.blocked_s, work.total_s))
        rows.append((stage, *times, share_text(work.total_s / whole.total_s if whole.total_s else 0.0)))
    note = (
        "Time of the threads or processes that did it. Several work at once, so the sum may be longer than a step; it "
        "is hidden as long as enough of them work ahead."
    )
    table = Table("", ("Stage", "on a CPU", "blocked", "together", "share"), tuple(rows))
    return Section(heading, anchor, plots.plot_stages(run), note=note, tables=(table,))


PROCESSES = 6
"""Number of processes with a line of their own, the busiest ones."""


def table_of_gpus(run: Measured, names: Sequence[str]) -> Table:
    """Returns lowest, mean and highest readings of one GPU; of several GPUs, a line of means for each."""
    gpus = sorted({name.partition(".")[0] for name in names}, key=lambda gpu: (len(gpu), gpu))
    if len(gpus) == 1:
        return table_of_readings(run, names)
    kinds = sorted({name.partition(".")[2] for name in names}, reverse=True)
    rows = []
    for gpu in gpus:
        cells = (_reading_text(f"{gpu}.{kind}", mean_of(run, f"{gpu}.{kind}")) for kind in kinds)
        rows.append((gpu_name(gpu), *cells))
    return Table("", ("Means", *(_KINDS.get(kind, (kind,))[0] for kind in kinds)), tuple(rows))


def table_of_readings(run: Measured, names: Sequence[str]) -> Table:
    """Returns lowest, mean and highest of each reading; of many processes, only the busiest."""
    found = {name: plots.into_series(run.readings, name, len(run.readings) or 1) for name in names}
    known = {name: series.mean for name, series in found.items() if series is not None}
    processes = [name for name in known if "cpu_percent." in name]
    left_out = set(sorted(processes, key=lambda name: -float(known[name].mean()))[PROCESSES:])
    rows = []
    for name, values in known.items():
        if name not in left_out:
            first, _, rest = name.partition(".")
            spoken = _KINDS.get(name, (name,))[0]
            if rest in _KINDS:
                spoken = f"{gpu_name(name)} {_KINDS[rest][0]}"
            elif rest and first in _KINDS:
                spoken = f"process {rest}"
            figures = (values.min(), values.mean(), values.max())
            rows.append((spoken, *(_reading_text(name, float(figure)) for figure in figures)))
    if left_out:
        after = max(i for i, row in enumerate(rows) if row[0].startswith("process ")) + 1
        rows.insert(after, (f"{len(left_out):,} less busy processes", "", "", ""))
    return Table("", ("Reading", "lowest", "mean", "highest"), tuple(rows))


def means_text(run: Measured, panel: plots.Panel, unit: str) -> str:
    """Returns each line's mean: `GPU 0 64.0 % on average.`"""
    means = {name: number_text(mean_of(run, key) * panel.factor) for key, name in panel.lines.items()}
    return f"{', '.join(f'{name} {mean}{unit} on average' for name, mean in means.items())}."


def mean_of(run: Measured, name: str) -> float:
    """Returns the mean of a reading; NaN if there is none."""
    series = plots.into_series(run.readings, name, 1)
    return math.nan if series is None else float(series.mean[0])


_KINDS = {
    "utilization_percent": ("utilization", 1, " %"),
    "memory_bytes": ("memory", 1, ""),
    "power_w": ("power", 1, " W"),
    "sm_mhz": ("clock", 1, " MHz"),
    "cpu_percent": ("CPU", 0.01, " cores"),
    "others_cpu_percent": ("CPU, other programs", 0.01, " cores"),
    "disk_read_bytes_per_s": ("read from disk", 1e-6, " MB/s"),
    "disk_busy_percent": ("disk busy", 1, " %"),
}
"""Kind of a reading -> its name, a factor for its values, and their unit; bytes have units of their own."""


def gpu_name(name: str) -> str:
    """Returns `gpu0.power_w` as `GPU 0`."""
    return re.sub(r"^gpu", "GPU ", name.partition(".")[0])


def _reading_text(name: str, value: float) -> str:
    if not math.isfinite(value):
        return "not known"
    kind = name.partition(".")[2 if name.startswith("gpu") else 0]
    _, factor, unit = _KINDS.get(kind, ("", 1, ""))
    return format_bytes(value) if kind.endswith("_bytes") else f"{number_text(value * factor)}{unit}"
