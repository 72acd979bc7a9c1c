from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fastload


def test_the_installed_wheel_is_tested_not_the_checkout():
    prefix = os.environ.get("FASTLOAD_TESTED_PREFIX")
    if prefix is None:
        pytest.skip("only tools/test.sh, which sets FASTLOAD_TESTED_PREFIX, promises that")
    assert Path(fastload.__file__).is_relative_to(prefix)
    code = "import fastload; print(fastload.__file__)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert Path(child.stdout.strip()).is_relative_to(prefix)


def test_types_are_shipped():
    assert (Path(fastload.__file__).parent / "py.typed").exists()
