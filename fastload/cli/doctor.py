"""`fastload doctor`: runs a training script and says what binds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fastload.cli.output import one_line, one_line_errors

if TYPE_CHECKING:
    from fastload.doctor.examine import Examined


def doctor(
    command: Annotated[list[str], typer.Argument(help="The command, after two dashes.", show_default=False)],
    seconds: Annotated[
        float | None, typer.Option("--seconds", min=1, help="Interrupt the command after so long, as Ctrl-C would.")
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write everything measured to this file.", show_default=False)
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--report", help="Write a report to this .html file.", show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite these files where they exist.")] = False,
) -> None:
    """Run a training script as it is, and say what binds: fastload doctor -- python train.py

    Times every DataLoader (and FastLoader) in it from inside, in all ranks and workers; nothing is edited. Its output,
    signals and exit code stay its own. The verdict comes on stderr when it ends; Ctrl-C gives the verdict so far.
    """
    with one_line_errors():
        from fastload.cli.files import check_output, write_json

        for path in (json_path, report):
            if path is not None:
                check_output(path, force=force)
        from fastload.doctor.examine import examine

        examined = examine(command, seconds=seconds)
        _tell(examined)
        if json_path is not None:
            write_json(json_path, examined.measured.to_dict())
        if report is not None:
            from fastload.report import write_report

            write_report(examined.measured, report, force=force)
    raise typer.Exit(examined.code)


def _tell(examined: Examined) -> None:
    """What was found, on stderr: stdout is the command's."""

    def say(text: str) -> None:
        typer.echo(one_line(text), err=True)

    for fault in examined.faults[:3]:
        say(f"warning: something could not be metered: {fault}")
    verdict = examined.measured.verdict
    if verdict is None:
        say(f"verdict: none: {examined.silence}.")
        return
    say(f"fastload doctor: {examined.measured.num_steps:,} steps, {examined.measured.samples_per_s:,.0f} samples/s")
    for line in verdict.evidence:
        say(f"  {line}")
    for cure in verdict.cures[1:4]:
        say(f"  also: {cure.change}: {cure.gain:.1f} times as fast at most")
    say(f"verdict: {verdict.sentence}.")
