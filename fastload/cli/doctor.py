"""`fastload doctor`: runs a training script and says what limits its speed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import click

from fastload.cli.arguments import Force
from fastload.cli.command_line import Argument
from fastload.cli.output import check_report, json_text, one_line, one_line_errors
from fastload.options import Option

if TYPE_CHECKING:
    from fastload.profiling.doctor.examine import Examined
    from fastload.profiling.doctor.loader_records import RecordedEvents

_FAULTS = 3


def doctor(
    command: Annotated[list[str], Argument("-- COMMAND ...", help="The command, after two dashes.")],
    seconds: Annotated[
        float | None,
        Option(least=1, help="Interrupt the command after this time, as Ctrl-C would."),
    ] = None,
    json_path: Annotated[Path | None, Option(names=("--json",), help="Write everything measured to this file.")] = None,
    report: Annotated[Path | None, Option(names=("--report",), help="Write a report to this .html file.")] = None,
    force: Force = False,
) -> None:
    """Run a training script and say what limits it: fastload doctor -- python train.py

    Times each DataLoader and FastLoader, in all ranks and workers.
    Nothing is edited; output, signals and exit code stay the script's own.
    The verdict is printed on stderr when it ends, or after Ctrl-C.
    """
    with one_line_errors():
        from fastload.cli.live import live_panel, show_nothing
        from fastload.errors import OptionError
        from fastload.profiling.doctor.command import Signals, check_command
        from fastload.profiling.doctor.examine import examine
        from fastload.system.files import check_new_file, save_text

        check_command(command)
        if json_path is not None:
            if str(json_path).startswith("-"):
                raise OptionError(f"--json {json_path}: name a file; stdout belongs to the script.")
            check_new_file(json_path, force=force)
        check_report(report, force=force)
        if json_path is not None and report is not None and os.path.realpath(json_path) == os.path.realpath(report):
            raise OptionError(f"--json {json_path} --report {report}: both name one file; give each its own.")
        with Signals() as signals:  # to the end: a second, impatient Ctrl-C does not lose the verdict
            with live_panel("doctor", seconds, script_runs=True) as show:
                look = None if show is show_nothing else lambda records: show(_figures(records))
                examined = examine(command, signals, seconds=seconds, look=look, over=_say_what_comes)
            _print(examined)
            # The exit code stays the command's; a file that cannot be written is no reason to leave out the other.
            with suppress(click.exceptions.Exit), one_line_errors():
                if json_path is not None:
                    save_text(json_text(examined.measured.to_dict()) + "\n", json_path, force=force)
            with suppress(click.exceptions.Exit), one_line_errors():
                if report is not None:
                    from fastload.profiling.report import write_report

                    write_report(examined.measured, report, force=force)
    raise click.exceptions.Exit(examined.code)


def _say_what_comes() -> None:
    click.echo("fastload doctor: the command has ended; changes are tried for some seconds", err=True)


def _figures(records: RecordedEvents) -> Mapping[str, str | float]:
    """Returns the figures of the loader that takes the most time, for the panel."""
    loader = max(records.loaders, key=lambda found: found.elapsed_s, default=None)
    if loader is None:
        return {"steps": "none yet"}
    elapsed_s = sum(step.duration_s for step in loader.last)
    return {
        "steps": float(loader.steps.count),
        "steps/s, last 50": len(loader.last) / elapsed_s if elapsed_s else 0.0,
        "waiting, last 50": f"{sum(step.wait_s for step in loader.last) / elapsed_s:.0%}" if elapsed_s else "",
    }


def _print(examined: Examined) -> None:
    """Prints the verdict and its evidence on stderr: stdout belongs to the command."""

    def say(text: str) -> None:
        click.echo(one_line(text), err=True)

    for fault in examined.faults[:_FAULTS]:
        say(f"warning: something could not be measured: {fault}")
    if len(examined.faults) > _FAULTS:
        say(f"warning: and {len(examined.faults) - _FAULTS:,} more of these")
    if examined.code and not examined.so_far:
        say(f"warning: the command failed, with exit code {examined.code}; what follows is of the time before that")
    measured, verdict = examined.measured, examined.measured.verdict
    if verdict is None:
        say(f"verdict: none: {examined.why_no_verdict}.")
        return
    rate = f"{measured.num_steps:,} steps, {measured.samples_per_s:,.0f} samples/s"
    say(f"fastload doctor: {'so far ' if examined.so_far else ''}{rate}")
    facts = dict(measured.facts)
    if "rank" in facts:
        say(f"  these figures are of rank {facts['rank']}")
    if headspace := measured.headspace_samples_per_s:
        say(f"  headspace {headspace:,.0f} samples/s: {measured.headspace_how}")
    names = sorted({name for one in measured.readings for name in one if name.endswith(".utilization_percent")})
    for name in names:
        busy = fmean(one[name] for one in measured.readings if name in one)
        say(f"  {name.partition('.')[0]} busy {busy:.0f} % of the time (a duty cycle: any kernel ran)")
    if not names:
        say(f"  GPU utilization: {facts.get('GPU', 'not read')}")
    for line in verdict.evidence:
        say(f"  {line}")
    for remedy in verdict.cures[1:4]:
        how = remedy.how_in_brief
        say(f"  also: {remedy.change}: {remedy.gain:.1f} times as fast{f' ({how})' if how else ''}")
    if verdict.worth_making:
        for line in verdict.cures[0].instructions:
            say(f"  {line}")
    say(f"verdict: {verdict.sentence}.")
