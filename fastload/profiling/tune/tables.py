"""Results of a search as a table, as JSON and for a report. Works without torch."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fastload.profiling.meter.sampler import environment
from fastload.profiling.tune.selection import Row, fits
from fastload.system.text import format_bytes
from fastload.timing.results import Measured, Table

if TYPE_CHECKING:
    from fastload.profiling.tune.search import Tuned


def table_of(result: Tuned) -> Table:
    """Returns a table with a row for each candidate: an arrow marks the chosen one, `over` those beyond the budget."""
    step = f", {result.step}" if result.step else ""
    title = f"batches of {result.batch_size:,}{step}; {_budget_text(result)}"
    orders = len({row.candidate.order for row in result.rows}) > 1
    head = [
        "",
        "workers",
        *(["shuffle"] if orders else []),
        "read",
        "images/s",
        "lowest to highest",
        "CPU s/1,000",
        "CPU",
    ]
    head += ["first batch", "memory", *(["stall"] if result.step else []), *(["mixing"] if orders else [])]
    rows = []
    for row in result.rows:
        one = row.candidate
        rates = [trial.samples_per_s for trial in row.trials]
        marks = ["->"] if result.chosen is not None and one == result.chosen.row.candidate else []
        cells = [" ".join(marks) or ("default" if one == result.default else ""), str(one.workers)]
        cells += [*([one.order] if orders else []), one.read, f"{row.samples_per_s:,.0f}"]
        cells += [f"{min(rates):,.0f} to {max(rates):,.0f}, {len(rates)}", f"{row.cpu_s_per_1000:.3g}"]
        cells += [f"{row.cpu_share:.0%}{'' if fits(row, result.cpu_budget) else ' over'}"]
        cells += [f"{1000 * row.first_batch_s:,.0f} ms", format_bytes(row.memory_bytes)]
        cells += [f"{row.stall_share or 0:.1%}"] if result.step else []
        cells += [_mixing(row)] if orders else []
        rows.append(tuple(cells))
    return Table(title, tuple(head), tuple(rows))


def gain_text(result: Tuned) -> str:
    """Returns how the chosen candidate compares with the default, over the rounds in which both ran."""
    if result.chosen is not None and result.chosen.row.candidate == result.default:
        return "; these are the default arguments"
    if not result.gain:
        return ""
    middle, least, most = statistics.median(result.gain), min(result.gain), max(result.gain)
    return f"; {middle:.3g} times the default's images/s ({least:.3g} to {most:.3g}, {len(result.gain)} pairs)"


def measured(result: Tuned, *, command: str) -> Measured:
    """Returns the result in the form that `write_report` takes."""
    facts = [("to paste", result.call)]
    if result.chosen is not None:
        facts.append(("why", result.chosen.reason + gain_text(result)))
    facts += [("note", note) for note in result.notes]
    return Measured(
        title=f"fastload tune {result.name}",
        command=command,
        elapsed_s=result.elapsed_s,
        samples_per_s=result.chosen.row.samples_per_s if result.chosen is not None else 0.0,
        facts=tuple(facts),
        tables=(table_of(result),),
        environment=environment(),
    )


def to_dict(result: Tuned) -> dict[str, Any]:
    """Returns the result as plain dicts, lists, strings and numbers."""
    chosen = result.chosen
    return {
        "version": 1,
        "call": result.call,
        "chosen": None if chosen is None else {**_row_dict(chosen.row), "reason": chosen.reason},
        "gain": list(result.gain),
        "default": asdict(result.default),
        "rows": [_row_dict(row) | {"over_budget": not fits(row, result.cpu_budget)} for row in result.rows],
        "batch_size": result.batch_size,
        "cpu_budget": result.cpu_budget,
        "cpus": result.cpus,
        "step": result.step,
        "crop": result.crop,
        "step_on_cpu": result.step_on_cpu,
        "notes": list(result.notes),
        "elapsed_s": result.elapsed_s,
        "interrupted": result.interrupted,
    }


def _budget_text(result: Tuned) -> str:
    cpus = f"{result.cpus} CPU{'s' if result.cpus > 1 else ''}"
    who = "loading and this training together" if result.step_on_cpu else "loading"
    if result.cpu_budget >= 1:
        return f"{who} may take all of {cpus}"
    return f"{who} may take {result.cpu_budget:.0%} of {cpus}"


def _row_dict(row: Row) -> dict[str, Any]:
    names = ("samples_per_s", "cpu_s_per_1000", "cpu_share", "stall_share")
    return {**asdict(row), **{name: getattr(row, name) for name in names}}


def _mixing(row: Row) -> str:
    if not row.mixing:
        return "-"
    return "as full" if not row.mixes_worse else f"worse: {row.mixing}"
