"""Where a run says which tests may skip, another that does fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MODULES = {
    "test_tests.py": """
import pytest

@pytest.fixture
def absent():
    pytest.skip("needs what is not here")

def test_that_skips():
    pytest.skip("needs a CUDA device")

@pytest.mark.skipif(True, reason="needs another system")
def test_that_is_marked():
    pass

def test_of_a_fixture(absent):
    pass

@pytest.mark.xfail(reason="is known to be wrong")
def test_that_fails():
    assert False

def test_that_passes():
    pass
""",
    "test_module.py": "import pytest\npytest.importorskip('no_such_package', reason='a package')\n",
}


def outcomes(folder: Path, allowed: str | None) -> dict[str, int]:
    """Returns how many tests ended how, of a run of MODULES in which some may skip."""
    for name, text in MODULES.items():
        (folder / name).write_text(text)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "FASTLOAD"))}
    told = {} if allowed is None else {"FASTLOAD_MAY_SKIP": allowed}
    words = ["-q", "-p", "skips", "-p", "no:cacheprovider", "--continue-on-collection-errors", "--rootdir", folder]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, folder], capture_output=True, text=True, check=False, cwd=folder,
        env=inherited | told | {"PYTHONPATH": str(Path(__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip
    pairs = (words.split() for words in done.stdout.splitlines()[-1].split(" in ")[0].split(", "))
    return {outcome: int(number) for number, outcome in pairs}


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        (None, {"passed": 1, "skipped": 4, "xfailed": 1}),
        ("needs a CUDA device\nneeds what\nneeds another\na package", {"passed": 1, "skipped": 4, "xfailed": 1}),
        ("needs what\n\na package", {"failed": 1, "error": 1, "passed": 1, "skipped": 2, "xfailed": 1}),
        ("", {"failed": 1, "errors": 3, "passed": 1, "xfailed": 1}),
    ],
    ids=["all", "each by its reason", "some", "none"],
)
def test_a_skip_that_is_not_allowed_is_a_failure(tmp_path, allowed, expected):
    assert outcomes(tmp_path, allowed) == expected
