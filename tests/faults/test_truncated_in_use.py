from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from flipped_files import KINDS

from fastload import FastLoader, PackedDataset
from fastload.prefetch.stages.cut import CutRows
from fastload.prefetch.stages.transform import TransformInThread
from fastload.system import syscalls
from fastload.transforms import RandomResizedCrop


def skip_without_leases(folder: Path) -> None:
    """Asks the system itself, not the code that is tested here."""
    probe = folder / "probe"
    probe.touch()
    with open(probe, "rb") as file:
        try:
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except (AttributeError, OSError) as error:
            pytest.skip(f"no leases here ({sys.platform}: {error})")
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        assert syscalls.hold_off_writers(file.fileno())


@pytest.mark.parametrize("kind", ["raw", "jpeg"])
def test_writers_wait_while_threads_transform_what_lies_in_a_mapping(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without_leases(tmp_path)
    stage = {"raw": TransformInThread, "jpeg": CutRows}[kind]
    path, run, waits = KINDS[kind](tmp_path / "a.h5"), stage.run, list[bool]()

    def probing(*arguments: Any) -> None:
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
            waits.append(False)
        except BlockingIOError:
            waits.append(True)
        run(*arguments)

    monkeypatch.setattr(stage, "run", probing)
    dataset = PackedDataset(path, fields=["images"])
    for _ in FastLoader(dataset, 4, share=None, workers=1, transform=[RandomResizedCrop(8)]):
        pass
    assert waits and all(waits)


@pytest.mark.parametrize("how", ["half", "zero", "copy"])
def test_a_file_that_is_truncated_while_it_is_copied_from_is_an_error_not_a_death(tmp_path: Path, how: str) -> None:
    """Twelve by FASTLOAD_TRUNCATIONS=12."""
    trials = int(os.environ.get("FASTLOAD_TRUNCATIONS", "2"))
    skip_without_leases(tmp_path)
    tools = Path(__file__).parents[2] / "tools"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(tools), os.environ.get("PYTHONPATH")])),
    }
    command = [sys.executable, str(Path(__file__).with_name("truncate_in_use.py")), str(tmp_path), str(trials), how]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["FileChangedError"] * trials, done.stderr
