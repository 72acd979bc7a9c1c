"""Runs a benchmark for `compare_checkouts.py`: where it compares two ways, it waits to be told which to measure.

    python served_benchmark.py READ_FD WRITE_FD /checkout/benchmarks/bench_loader.py WORDS...

Its harness and its fastload are those of the benchmark's own checkout, however old.
"""

from __future__ import annotations

import json
import os
import runpy
import statistics
import sys
from collections.abc import Callable
from typing import Any


def main() -> None:
    """Serve what the command line names."""
    read_fd, write_fd, script = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    requests = os.fdopen(read_fd)

    def say(**values: Any) -> None:
        os.write(write_fd, f"{json.dumps(values)}\n".encode())

    def wait() -> None:
        """Waits for the word to go on: both checkouts make data in the same folder, one after the other."""
        assert requests.readline().strip() in ("go", "")

    def compare(way: Callable[[], float], base: Callable[[], float], **_: Any) -> dict[str, dict[str, float]]:
        ways, rates = {"way": way, "base": base}, {"way": [way()], "base": [base()]}  # once, to be warm
        say(ready=True)
        while (request := requests.readline().strip()) in ways:
            rates[request].append(ways[request]())
            say(rate=rates[request][-1])
        medians = {name: statistics.median(values) for name, values in rates.items()}
        ratio = medians["way"] / medians["base"]
        return {name: dict.fromkeys(("median", "lowest", "highest"), value) | {"count": 1}
                for name, value in (*medians.items(), ("ratio", ratio))}  # fmt: skip

    def note(_: object, figure: str, **values: Any) -> None:
        if "ratio" in values:  # a figure that came from a comparison
            say(figure=figure)
            wait()

    wait()
    sys.path[0] = os.path.dirname(script)
    import harness

    harness.compare, harness.Journal.note = compare, note  # type: ignore[assignment, method-assign]
    sys.argv = sys.argv[3:]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
