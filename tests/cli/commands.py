"""Commands called as from a shell, within this process."""

from __future__ import annotations

from typer.testing import CliRunner, Result

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
