"""Results of a search as a table, as JSON and for a report. Works without torch."""

from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fastload.profiling.meter.sampler import environment
from fastload.profiling.tune.selection import Row, fits
from fastload.system.text import counted, format_bytes
from fastload.timing.results import Measured, Table

if TYPE_CHECKING:
    from fastload.profiling.tune.search import Tuned


def table_of(result: Tuned) -> Table:
    """Returns a table with a row for each candidate: an arrow marks the chosen one, `over` those beyond the budget."""
    chosen = result.chosen.row.candidate if result.chosen is not None else None
    orders = len({row.candidate.order for row in result.rows}) > 1

    def cells(row: Row) -> dict[str, str]:
        one, rates = row.candidate, [trial.samples_per_s for trial in row.trials]
        mixing = f"worse: {row.mixing}" if row.mixes_worse else "as full" if row.mixing else "-"
        return {
            "": "->" if one == chosen else "default" if one == result.default else "",
            "workers": str(one.workers),
            **({"shuffle": one.order} if orders else {}),
            "read": one.read,
            "images/s": f"{row.samples_per_s:,.0f}",
            "lowest to highest": f"{min(rates):,.0f} to {max(rates):,.0f}, {len(rates)}",
            "CPU s/1,000": f"{row.cpu_s_per_1000:.3g}",
            "CPU": f"{row.cpu_share:.0%}{'' if fits(row, result.cpu_budget) else ' over'}",
            "first batch": f"{1000 * row.first_batch_s:,.0f} ms",
            "memory": format_bytes(row.memory_bytes),
            **({"stall": f"{row.stall_share or 0:.1%}"} if result.step else {}),
            **({"mixing": mixing} if orders else {}),
        }

    step = f", {result.step}" if result.step else ""
    who = "loading and this training together" if result.step_on_cpu else "loading"
    share = "all" if result.cpu_budget >= 1 else f"{result.cpu_budget:.0%}"
    budget = f"{who} may take {share} of {counted(result.cpus, 'CPU')}"
    rows = [cells(row) for row in result.rows]
    head = tuple(rows[0]) if rows else ()
    return Table(f"batches of {result.batch_size:,}{step}; {budget}", head, tuple(tuple(row.values()) for row in rows))


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
    chosen = None
    if result.chosen is not None:
        chosen = {**_row_dict(result.chosen.row), "reason": result.chosen.reason}
    rows = [_row_dict(row) | {"over_budget": not fits(row, result.cpu_budget)} for row in result.rows]
    found = {"version": 1, **asdict(result), "chosen": chosen, "rows": rows}
    del found["name"]
    return found


def _row_dict(row: Row) -> dict[str, Any]:
    names = ("samples_per_s", "cpu_s_per_1000", "cpu_share", "stall_share")
    return {**asdict(row), **{name: getattr(row, name) for name in names}}
