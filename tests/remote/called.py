"""Commands called as from a shell, within this process, for the tests of this folder."""

from __future__ import annotations

from click.testing import CliRunner, Result

from fastload.cli import app


def called(*words: object, code: int = 0) -> Result:
    """Calls `fastload WORDS` and requires its exit code."""
    result = CliRunner().invoke(app, [*map(str, words)])
    assert result.exit_code == code, result.output
    return result
