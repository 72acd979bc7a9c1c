from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastload.system import syscalls


@pytest.mark.parametrize("how", ["half", "zero", "copy"])
def test_a_file_that_is_truncated_while_it_is_copied_from_is_an_error_not_a_death(tmp_path: Path, how: str) -> None:
    """Twelve by FASTLOAD_TRUNCATIONS=12."""
    trials = int(os.environ.get("FASTLOAD_TRUNCATIONS", "2"))
    probe = tmp_path / "probe"
    probe.touch()
    with open(probe, "rb") as file:
        if not syscalls.hold_off_writers(file.fileno()):
            pytest.skip(f"no leases here ({sys.platform})")
    tools = Path(__file__).parents[2] / "tools"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(tools), os.environ.get("PYTHONPATH")])),
    }
    command = [sys.executable, str(Path(__file__).with_name("truncate_in_use.py")), str(tmp_path), str(trials), how]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["FileChangedError"] * trials, done.stderr
