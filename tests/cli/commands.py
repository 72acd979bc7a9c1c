"""Commands called as from a shell, within this process."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable

from click.testing import CliRunner, Result

from fastload.cli import app


def run(*words: object, code: int = 0) -> Result:
    """Calls `fastload WORDS` and requires its exit code."""
    result = CliRunner().invoke(app, [*map(str, words)])
    assert result.exit_code == code, result.output
    return result


def said(*words: object) -> str:
    """Returns what a command prints on stdout, each run of spaces and line breaks as one space."""
    return " ".join(run(*words).stdout.split())


def refused(*words: object) -> str:
    """Returns the one line on stderr with which a command is refused; stdout is empty."""
    result = run(*words, code=1)
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    assert result.stdout == ""
    return result.stderr


PROCESS = (sys.executable, "-c", "from fastload.cli import main\nif __name__ == '__main__': main()")
"""The command in a process of its own; a packer's workers import it again."""


def interrupted(*words: object, when: Callable[[subprocess.Popen[str]], object]) -> tuple[str, str]:
    """Returns stdout and stderr of a command that gets Ctrl-C once `when(process)` has returned, and ends with 130.

    Its log has a line every tenth of a second, not every five: `when` may wait for one while the cores are busy.
    """
    python, option, code = PROCESS
    words = (python, option, f"import fastload.cli.output\nfastload.cli.output.LINE_EVERY_S = 0.1\n{code}", *words)
    with subprocess.Popen(
        [*map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        when(process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=600)
    assert process.returncode == 130, out + err
    return out, err
