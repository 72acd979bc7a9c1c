"""Writes a meter's figures to files: steps as CSV, everything as JSON lines, curves for TensorBoard."""

from __future__ import annotations

import csv
import io
import json
import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Protocol

from fastload.errors import OutputError
from fastload.system.files import check_new_file, save_text
from fastload.timing.results import Step

_COLUMNS = tuple(field.name for field in fields(Step))

StrPath = str | os.PathLike[str]


class ScalarWriter(Protocol):
    """The part of `torch.utils.tensorboard.SummaryWriter` that is used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> object:
        """Adds a point to a curve."""
        ...


def write_csv(path: StrPath, steps: Iterable[tuple[int, Step]], *, force: bool) -> None:
    """Writes numbered steps as a table with the columns `step` and the fields of `Step`; unknown values are empty."""
    text = io.StringIO(newline="")
    table = csv.writer(text)
    table.writerow(("step", *_COLUMNS))
    for number, step in steps:
        table.writerow((number, *(getattr(step, name) for name in _COLUMNS)))
    _save(text.getvalue(), path, force)


def write_jsonl(path: StrPath, lines: Iterable[str], *, force: bool) -> None:
    """Writes lines to a new file."""
    _save("".join(lines), path, force)


def _save(text: str, path: StrPath, force: bool) -> None:
    check_new_file(path, force=force)
    save_text(text, Path(path), force=force)


def head_line(environment: Mapping[str, str]) -> str:
    """Returns the first line of a file: its format, and where it was made."""
    return _line({"kind": "meter", "version": 1, "environment": dict(environment)})


def step_line(number: int, step: Step, loop: int) -> str:
    """Returns the line of a step; loops are numbered from 0 in the order in which they began."""
    # Written by hand: json.dumps takes 3 times as long.
    depth = "null" if step.queue_depth is None else step.queue_depth
    return (
        f'{{"kind": "step", "loop": {loop}, "step": {number}, "begin_s": {step.begin_s:.6f}, '
        f'"wait_s": {step.wait_s:.7f}, "copy_s": {step.copy_s:.7f}, "transform_s": {step.transform_s:.7f}, '
        f'"compute_s": {step.compute_s:.7f}, "samples": {step.samples}, "queue_depth": {depth}}}\n'
    )


def reading_line(reading: Mapping[str, float]) -> str:
    """Returns the line of a reading of the sampler."""
    return _line({"kind": "reading", **reading})


def end_line(totals: Any, loop: int) -> str:
    """Returns the line with the sums over all steps of a loop, including those that were not kept."""
    return _line({"kind": "totals", "loop": loop, **asdict(totals)})


def _line(content: Mapping[str, Any]) -> str:
    return json.dumps(content) + "\n"


class Record:
    """A file of JSON lines that grows line by line, so that a killed process loses none. Threads may share it.

    Args:
        path: of a new file.
        force: whether to replace an existing file.
    """

    def __init__(self, path: StrPath, *, force: bool) -> None:
        self._fd = _open_to_append(path, force=force)
        self.path = Path(path)
        self.failure = ""

    def append(self, line: str) -> None:
        """Appends a line. If that fails, as on a full disk, the record ends and the training goes on."""
        if self._fd >= 0:
            try:
                os.write(self._fd, line.encode())
            except OSError as error:
                self.failure = f"{self.path}: {error.strerror}"
                self.close()

    def close(self) -> None:
        """Closes the file; further lines are ignored."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _open_to_append(path: StrPath, *, force: bool) -> int:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if force else os.O_EXCL)
    try:
        return os.open(path, flags, 0o666)
    except OSError as error:
        check_new_file(path, force=force)  # raises an error with advice, if the reason is a known one
        raise OutputError(f"{os.fspath(path)}: cannot be written ({error.strerror}).") from error


def to_scalars(
    writer: ScalarWriter,
    steps: Sequence[tuple[int, Step]],
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
        for name, value in _curves(reading):
            writer.add_scalar(f"{prefix}/{name}", value, first_step + number)


def _curves(reading: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    for name, value in reading.items():
        if name != "at_s" and not name.startswith("cpu_percent."):  # processes come and go
            yield name.replace(".", "/"), value
