"""Reads the events that the injected module writes, while the files grow, and groups them by loader."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastload.profiling.doctor.costs import Event, Fetch, StepRecord, fetch_of, step_of

MOST_FETCHES = 16_384
"""Number of batches of a loader whose making is read. Of more, an evenly spaced part is."""

_decode = json.JSONDecoder().raw_decode


@dataclass(eq=False)
class LoaderRecord:
    """One loader of one process, over all its epochs.

    Attributes:
        process: the `process` event of the one that iterates it.
        facts: its `loader` event.
        steps: the steps that have ended.
        elapsed_s: time that the loop spent with this loader.
        epochs: as in `Demands`.
        trials: its `trial` events.
        fetches, lines: how its batches were made, and how often its workers were seen at each line of code, after
            `RecordReader.read_making`.
    """

    process: Event
    facts: Event
    steps: list[StepRecord] = field(default_factory=list)
    elapsed_s: float = 0.0
    epochs: list[tuple[float, float]] = field(default_factory=list)
    trials: list[Event] = field(default_factory=list)
    fetches: list[Fetch] = field(default_factory=list)
    lines: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Records:
    """A job's processes, and the loaders that they iterated.

    Attributes:
        num_processes: that wrote events.
        loaders: those with at least one step.
        saw_torch: whether any process imported torch's DataLoader.
        faults: failures of the injected module.
    """

    num_processes: int
    loaders: tuple[LoaderRecord, ...]
    saw_torch: bool = False
    faults: tuple[str, ...] = ()


class RecordReader:
    """Reads a job's records again and again, only what is new each time. Objects that `read` returned are updated.

    The job may still run: lines that are incomplete or cannot be parsed are left out.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[Path, _File] = {}
        self._makers: dict[int, LoaderRecord] = {}  # by a worker's pid

    def read(self) -> Records:
        """Returns everything recorded so far, except how batches were made."""
        for path in sorted(self._folder.glob("*.jsonl")):
            self._files.setdefault(path, _File(path))
        for file in self._files.values():
            file.read(self._makers)
        known = [file for file in self._files.values() if file.process]
        loaders = {id(loader): loader for file in known for loader in file.loaders.values()}
        return Records(
            len(known),
            tuple(loader for loader in loaders.values() if loader.steps),
            any(file.saw_torch for file in known),
            tuple(fault for file in known for fault in file.faults),
        )

    def read_making(self, loader: LoaderRecord) -> None:
        """Reads how a loader's batches were made, by its workers or in the loop itself, as far as `read` has come."""
        files = []  # each with the loader that its process works for
        loader.lines.clear()
        for file in self._files.values():
            maker = self._makers.get(file.process.get("pid", 0))
            if maker is loader:
                loader.lines.update(file.code_lines)
            if maker is loader or loader in file.loaders.values():
                files.append((file, maker))
        every = max(1, -(-sum(file.num_made for file, _ in files) // MOST_FETCHES))
        made = (
            (file, maker, line)
            for file, maker in files
            for line in itertools.islice(filter(_is_about_making, _whole_lines(file.path)), file.num_made)
        )
        loader.fetches = [
            fetch
            for file, maker, line in itertools.islice(made, every - 1, None, every)  # parsing is slow
            if (event := _parsed(line)) and file.loaders.get(event.get("id", 0), maker) is loader
            if (fetch := fetch_of(file.process["pid"], event)).work.stages
        ]


class _File:
    """The file of one process: what was read so far, and the state that the next lines continue.

    Attributes:
        loaders: by number.
        num_made: lines about the making of a batch.
        code_lines: how often the process was seen at each line of code.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.process: Event = {}
        self.loaders: dict[int, LoaderRecord] = {}
        self.saw_torch = False
        self.faults: list[str] = []
        self.num_made = 0
        self.code_lines: dict[str, int] = {}
        self._read_to = 0
        # A loop that makes a new loader for each epoch gets one record for all of them.
        self._alike: dict[tuple[Any, ...], LoaderRecord] = {}
        self._last: dict[int, Event] = {}  # by loader: its last `iter` or `next`, until its epoch ends

    def read(self, makers: dict[int, LoaderRecord]) -> None:
        """Reads all new events except fetches; notes in `makers` which worker works for which loader."""
        for line in _whole_lines(self.path, self._read_to):
            self._read_to += len(line)
            self.num_made += _is_about_making(line)
            if _is_fetch(line):
                continue
            event = _parsed(line)
            kind = event.get("e")
            if kind == "process":
                self.process = event
            elif kind == "torch":
                self.saw_torch = True
            elif kind == "fault":
                self.faults.append(event["what"])
            elif kind == "line":
                self.code_lines = dict(map(tuple, event["places"]))  # the counts so far
            elif kind is not None and self.process:
                self._follow(kind, event, makers)

    def _follow(self, kind: str, event: Event, makers: dict[int, LoaderRecord]) -> None:
        """Takes an event of a loop over a loader."""
        number = event.get("id", 0)
        if kind == "loader":
            kinds = tuple(value for name, value in event.items() if name not in ("id", "t"))
            self.loaders[number] = self._alike.setdefault(kinds, LoaderRecord(self.process, event))
        loader = self.loaders.get(number)
        if loader is None:
            return
        if kind == "trial":
            loader.trials.append(event)
        elif kind == "iter":
            self._last[number] = event
            makers.update(dict.fromkeys(event.get("pids", ()), loader))
        elif kind in ("next", "end") and number in self._last:
            before = self._last.pop(number)
            is_first = before["e"] == "iter"
            if not is_first and event.get("step") is not None:
                step = step_of(before, event["step"])
                loader.steps.append(step)
                loader.elapsed_s += step.step.duration_s
            if kind == "end":
                loader.elapsed_s += event["wait"]
                if not is_first:
                    loader.epochs[-1] = (loader.epochs[-1][0], event["wait"])
                return
            self._last[number] = event
            if "inside" in event:
                loader.facts |= event["inside"]["worker_info"]
            event["begun"] = before["t"] if is_first else event["t"]
            if is_first:
                loader.epochs.append((event["t"] + event["wait"] - before["t"], 0.0))


def _whole_lines(path: Path, begin: int = 0) -> Iterator[bytes]:
    """Yields the complete lines from a position on."""
    try:
        with path.open("rb") as file:
            file.seek(begin)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                yield line
    except OSError:
        return


def _is_fetch(line: bytes) -> bool:
    return b'"fetch"' in line[:20]  # the kind comes first


def _is_about_making(line: bytes) -> bool:
    return _is_fetch(line) or b'"inside"' in line  # a FastLoader's figures come with the batch


def _parsed(line: bytes) -> Event:
    """Returns the event on a line, {} if it is malformed."""
    try:
        event, _ = _decode(line.decode())  # json.loads takes 1.5 times as long
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}
