"""Is one checkout of fastload as fast as another? Any benchmark's own figures, old over new, visit by visit.

    git worktree add /tmp/old v0.1.0
    python benchmarks/compare_checkouts.py /tmp/old . bench_loader.py -- --only take take32 --rows 8000

Both checkouts run the named benchmark at the same time, each in a process of its own with that checkout in front of
PYTHONPATH, and the words after `--` go to both. Wherever the benchmark compares two ways, the processes stop and are
told in turn (old new, new old, ...) to measure once: the one rests while the other measures, some tenths of a second
each, so a change of the machine's speed meets both. Two runs of a benchmark one after the other differ by 10 % and
more on a shared machine; the median of 30 such pairs is good to one or two percent.

`new_over_old` is the rate of the new checkout over the old one's; above 1 is faster. `control` is the same for the
base that the benchmark compares itself with (a bare copy, OpenCV alone): the same code in both, so what it is off 1 is
noise.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness

SERVED = Path(__file__).with_name("served_benchmark.py")


class Side:
    """One checkout's process: answers each request with the rate of one measurement."""

    def __init__(self, checkout: Path, script: str, words: list[str]) -> None:
        self.checkout = checkout
        requests_to_read, self._requests = os.pipe()
        self._answers, answers_to_write = os.pipe()
        theirs = (requests_to_read, answers_to_write)
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # as long as the process
        self.process = subprocess.Popen(
            [sys.executable, str(SERVED), *map(str, theirs), str(checkout / "benchmarks" / script), *words],
            cwd=checkout, env=os.environ | {"PYTHONPATH": str(checkout)}, pass_fds=theirs,
            stdout=self._log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        for fd in theirs:
            os.close(fd)
        self._answer_file = os.fdopen(self._answers)

    def ask(self, request: str) -> dict[str, Any]:
        """Sends a request (`go`, `way`, `base`, `next`) and returns the answer; {} when the benchmark has ended."""
        os.write(self._requests, f"{request}\n".encode())
        line = self._answer_file.readline()
        if not line and self.process.wait():
            self._log.seek(0)
            raise SystemExit(f"{self.checkout}: the benchmark failed\n{self._log.read()[-3000:]}")
        return json.loads(line) if line else {}  # type: ignore[no-any-return]


def in_turn(sides: list[Side], request: str, visits: int) -> list[float]:
    """New over old of so many pairs of measurements."""
    ratios = []
    for visit in range(visits):
        order = (0, 1) if visit % 2 == 0 else (1, 0)
        rates = {number: sides[number].ask(request)["rate"] for number in order}
        ratios.append(rates[1] / rates[0])
    return ratios


def main() -> None:
    """Compare what the command line names."""
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description="Compare two checkouts by a benchmark's own figures.")
    parser.add_argument("old", type=Path, help="folder of the older checkout")
    parser.add_argument("new", type=Path, help="folder of the newer one")
    parser.add_argument("script", help="a benchmark, as bench_loader.py; its words after --")
    parser.add_argument("--visits", type=int, default=30, help="pairs of measurements a figure (default: 30)")
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "checkouts.jsonl", help="JSON lines to append to")
    options = parser.parse_args(words[:cut])
    words = words[cut + 1 :]
    checkouts = [options.old.resolve(), options.new.resolve()]
    commits = [harness.commit(checkout) for checkout in checkouts]
    # Where the data lie says nothing about a figure.
    said = [word for word, before in zip(words, ["", *words], strict=False) if "--data" not in (word, before)]
    journal = harness.Journal(options.out, old=commits[0], new=commits[1], visits=options.visits, words=said)
    sides = [Side(checkout, options.script, words) for checkout in checkouts]
    while [side.ask("go") for side in sides] != [{}, {}]:  # one after the other: they share the data that they make
        ratios = in_turn(sides, "way", options.visits)
        control = in_turn(sides, "base", options.visits // 2)
        (figure,) = {side.ask("next")["figure"] for side in sides}
        journal.note(
            figure, benchmark=options.script, new_over_old=harness.spread(ratios), control=harness.spread(control)
        )


if __name__ == "__main__":
    main()
