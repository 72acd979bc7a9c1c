"""Writes a meter's figures to files: steps as CSV, everything as JSON lines, curves for TensorBoard."""

from __future__ import annotations

import csv
import io
import json
import os
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Protocol

from fastload.errors import OutputError
from fastload.profiling.meter.loops import Totals
from fastload.profiling.meter.sampler import environment
from fastload.system.files import check_new_file, save_text
from fastload.timing.results import LoopStep, with_schema

StrPath = str | os.PathLike[str]


class ScalarWriter(Protocol):
    """The part of `torch.utils.tensorboard.SummaryWriter` that is used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> object: ...


def save_new(text: str, path: StrPath, *, force: bool) -> None:
    """Writes a text file, as a whole or not at all; raises OutputError if it cannot, or may not replace a file."""
    check_new_file(path, force=force)
    save_text(text, Path(path), force=force)


def csv_table(steps: Iterable[tuple[int, LoopStep]]) -> str:
    """Returns numbered steps as a table: `step` and the fields of `LoopStep`; unknown values are empty."""
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, ("step", *(field.name for field in fields(LoopStep))))
    table.writeheader()
    table.writerows({"step": number, **asdict(step)} for number, step in steps)
    return text.getvalue()


def json_line(kind: str, figures: Mapping[str, Any]) -> str:
    """Returns a line of a file of JSON lines."""
    return json.dumps({"kind": kind, **figures}) + "\n"


def head_line() -> str:
    """Returns the first line of a file: its format, and where it was made."""
    return json_line("meter", with_schema({"environment": environment()}))


def step_line(number: int, step: LoopStep, loop: int) -> str:
    """Returns the line of a step; loops are numbered from 0 in the order in which they began."""
    # Written by hand: json.dumps takes 3 times as long.
    depth = "null" if step.queue_depth is None else step.queue_depth
    return (
        f'{{"kind": "step", "loop": {loop}, "step": {number}, "begin_s": {step.begin_s:.6f}, '
        f'"wait_s": {step.wait_s:.7f}, "copy_s": {step.copy_s:.7f}, "transform_s": {step.transform_s:.7f}, '
        f'"compute_s": {step.compute_s:.7f}, "samples": {step.samples}, "queue_depth": {depth}}}\n'
    )


def end_line(totals: Totals, loop: int) -> str:
    """Returns the line with the sums over all steps of a loop, including those that were not kept."""
    return json_line("totals", {"loop": loop, **asdict(totals)})


class LineLog:
    """A file of JSON lines that grows line by line, so that a killed process loses none. Threads may share it."""

    def __init__(self, path: StrPath, *, force: bool) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if force else os.O_EXCL)
        try:
            self._fd = os.open(path, flags, 0o666)
        except OSError as error:
            check_new_file(path, force=force)  # raises an error with advice, if the reason is a known one
            raise OutputError(f"{os.fspath(path)}: cannot be written ({error.strerror}).") from error
        self.path = Path(path)

    def append(self, line: str) -> None:
        """Appends a line. If that fails, as on a full disk, the record ends and the training goes on."""
        if self._fd >= 0:
            try:
                os.write(self._fd, line.encode())
            except OSError:
                self.close()

    def close(self) -> None:
        """Closes the file; further lines are ignored."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def to_scalars(
    writer: ScalarWriter,
    steps: Sequence[tuple[int, LoopStep]],
    readings: Sequence[Mapping[str, float]],
    *,
    prefix: str,
    first_step: int,
) -> None:
    """Adds curves of the steps, in milliseconds, and of the readings, each at the step in which it was read."""
    for number, step in steps:
        for name in ("wait", "copy", "transform", "compute"):
            writer.add_scalar(f"{prefix}/{name}_ms", 1e3 * getattr(step, f"{name}_s"), first_step + number)
        if step.duration_s > 0:
            writer.add_scalar(f"{prefix}/samples_per_s", step.samples / step.duration_s, first_step + number)
        if step.queue_depth is not None:
            writer.add_scalar(f"{prefix}/queue_depth", step.queue_depth, first_step + number)
    begins = [step.begin_s for _, step in steps]
    for reading in readings:
        index = max(0, bisect_left(begins, reading["at_s"]) - 1)
        number = steps[index][0] if steps else 0
        for name, value in reading.items():
            if name != "at_s" and not name.startswith("cpu_percent."):  # processes come and go
                writer.add_scalar(f"{prefix}/{name.replace('.', '/')}", value, first_step + number)
