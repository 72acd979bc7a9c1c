"""A meter's figures in files: CSV of the steps, JSON lines of everything, TensorBoard's scalars."""

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
from fastload.measured import Step
from fastload.new_file import check_new_file, save_text

_COLUMNS = tuple(field.name for field in fields(Step))

StrPath = str | os.PathLike[str]


class ScalarWriter(Protocol):
    """What `torch.utils.tensorboard.SummaryWriter` is here."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> object:
        """One point of one curve."""
        ...


def write_csv(path: StrPath, steps: Iterable[tuple[int, Step]], *, force: bool) -> None:
    """Numbered steps as a table: `step` and the fields of `Step`; what is not known is empty."""
    text = io.StringIO(newline="")
    table = csv.writer(text)
    table.writerow(("step", *_COLUMNS))
    for number, step in steps:
        table.writerow((number, *(getattr(step, name) for name in _COLUMNS)))
    _save(text.getvalue(), path, force)


def write_jsonl(path: StrPath, lines: Iterable[str], *, force: bool) -> None:
    """The lines in a file of their own."""
    _save("".join(lines), path, force)


def _save(text: str, path: StrPath, force: bool) -> None:
    check_new_file(path, force=force)
    save_text(text, Path(path), force=force)


def head_line(environment: Mapping[str, str]) -> str:
    """The first line: what made the file, and where."""
    return _line({"kind": "meter", "version": 1, "environment": dict(environment)})


def step_line(number: int, step: Step, loop: int) -> str:
    """A step of a loop; loops are counted from 0 in the order in which they began."""
    # json.dumps takes 3 times as long.
    depth = "null" if step.queue_depth is None else step.queue_depth
    return (
        f'{{"kind": "step", "loop": {loop}, "step": {number}, "begin_s": {step.begin_s:.6f}, '
        f'"wait_s": {step.wait_s:.7f}, "copy_s": {step.copy_s:.7f}, "transform_s": {step.transform_s:.7f}, '
        f'"compute_s": {step.compute_s:.7f}, "samples": {step.samples}, "queue_depth": {depth}}}\n'
    )


def reading_line(reading: Mapping[str, float]) -> str:
    """A reading of the sampler."""
    return _line({"kind": "reading", **reading})


def end_line(totals: Any, loop: int) -> str:
    """Sums over all steps of a loop, also those that were not kept."""
    return _line({"kind": "totals", "loop": loop, **asdict(totals)})


def _line(content: Mapping[str, Any]) -> str:
    return json.dumps(content) + "\n"


class Record:
    """A file of JSON lines that grows as things happen. Threads may share it; what was told survives a kill.

    Args:
        path: of a new file.
        force: replaces one that exists.
    """

    def __init__(self, path: StrPath, *, force: bool) -> None:
        self._fd = _open_to_append(path, force=force)
        self.path = Path(path)
        self.failure = ""

    def tell(self, line: str) -> None:
        """Appends a line; a disk that is full ends the record, not the training."""
        if self._fd >= 0:
            try:
                os.write(self._fd, line.encode())
            except OSError as error:
                self.failure = f"{self.path}: {error.strerror}"
                self.close()

    def close(self) -> None:
        """Ends it; telling more does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _open_to_append(path: StrPath, *, force: bool) -> int:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if force else os.O_EXCL)
    try:
        return os.open(path, flags, 0o666)
    except OSError as error:
        check_new_file(path, force=force)  # says what to do, where that is known
        raise OutputError(f"{os.fspath(path)}: cannot be written ({error.strerror}).") from error


def to_scalars(
    writer: ScalarWriter,
    steps: Sequence[tuple[int, Step]],
    readings: Sequence[Mapping[str, float]],
    *,
    prefix: str,
    first_step: int,
) -> None:
    """Curves of the steps, in milliseconds, and of the readings, each at the step that was under way."""
    for number, step in steps:
        for name in ("wait", "copy", "transform", "compute"):
            writer.add_scalar(f"{prefix}/{name}_ms", 1e3 * getattr(step, f"{name}_s"), first_step + number)
        if step.duration_s > 0:
            writer.add_scalar(f"{prefix}/samples_per_s", step.samples / step.duration_s, first_step + number)
        if step.queue_depth is not None:
            writer.add_scalar(f"{prefix}/queue_depth", step.queue_depth, first_step + number)
    begins = [step.begin_s for _, step in steps]
    for reading in readings:
        place = max(0, bisect_left(begins, reading["at_s"]) - 1)
        number = steps[place][0] if steps else 0
        for name, value in _curves(reading):
            writer.add_scalar(f"{prefix}/{name}", value, first_step + number)


def _curves(reading: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    for name, value in reading.items():
        if name != "at_s" and not name.startswith("cpu_percent."):  # processes come and go
            yield name.replace(".", "/"), value
