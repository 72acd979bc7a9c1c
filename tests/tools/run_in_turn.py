"""Runs scripts one after another in one process, each as if by itself: importing torch takes longer than they do.

    python run_in_turn.py RUNS.json

RUNS.json lists runs, {"words": [SCRIPT, WORD...], "first": "Python that runs before"}; RUNS.out.json gets the exit code
and the output of each.
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
import traceback
from pathlib import Path


def run(words: list[str], first: str) -> tuple[int, str]:
    said = io.StringIO()
    sys.argv = words
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            exec(first, {})
            runpy.run_path(words[0], run_name="__main__")
        except BaseException:  # noqa: BLE001  # also Ctrl-C, which a run may be about
            traceback.print_exc()
            return 1, said.getvalue()
    return 0, said.getvalue()


if __name__ == "__main__":
    given = Path(sys.argv[1])
    results = [run(each["words"], each["first"]) for each in json.loads(given.read_text())]
    given.with_suffix(".out.json").write_text(json.dumps(results))
