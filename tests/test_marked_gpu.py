"""Tests marked `gpu` run where torch, Triton, pytest and the wheel are, and nothing else that the suite needs."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from child_processes import child_environment

TESTS = Path(__file__).resolve().parent
IMPORTED = {"numpy", "h5py", "pillow", "psutil", "xxhash"}
"""What the loader imports, all of it among the wheel's dependencies."""


def needed(names: set[str]) -> set[str]:
    """Distributions with all that they require, without extras."""
    found, left = set[str](), list(names)
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        if name in found:
            continue
        found.add(name)
        try:
            wanted = requires(name) or []
        except PackageNotFoundError:  # of another platform
            continue
        left += [re.split(r"[^\w.-]", one, maxsplit=1)[0] for one in wanted if "extra ==" not in one]
    return found


def gpu_tests(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", "-q", *words],
        cwd=TESTS.parent, env=child_environment(CUDA_VISIBLE_DEVICES="", **environment), capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_tests_for_a_gpu_are_collected_and_skip_without_the_packages_of_the_others(tmp_path):
    project = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["project"]
    assert {re.split(r"\W", one)[0] for one in project["dependencies"]} > IMPORTED
    kept = needed({"torch", "triton", "pytest", *IMPORTED})
    names = packages_distributions()
    blocked = {name for name, of in names.items() if not kept & {re.sub(r"[-_.]+", "-", one).lower() for one in of}}
    blocked -= {"fastload", "_distutils_hack", "pkg_resources", "setuptools"}
    assert {"hypothesis", "click", "rich", "simplejpeg"} <= blocked
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({sorted(blocked)!r}))\n")
    path = f"{tmp_path}:{child_environment()['PYTHONPATH']}"
    bare = gpu_tests("-m", "gpu", "-rs", PYTHONPATH=path, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert bare.returncode == 0, bare.stdout + bare.stderr
    reasons = re.findall(r"^SKIPPED \[\d+\] [^ ]+: (.*)$", bare.stdout, re.MULTILINE)
    assert reasons and set(reasons) <= {"needs a CUDA device", "Triton is not installed"}
    [skipped] = re.findall(r"^(\d+) skipped, ", bare.stdout, re.MULTILINE)
    # Another expression of the same tests imports every module. Those that do not say gpu have no mark of their own,
    # and no other file may hold it for them.
    texts = {path: path.read_text(encoding="utf-8") for path in TESTS.rglob("*.py")}
    marked = {path.name for path, text in texts.items() if "mark.gpu" in text} - {"conftest.py"}
    assert marked and all(name.startswith("test_") for name in marked)
    modules = [path for path in texts if path.name.startswith("test_") and "gpu" in texts[path].lower()]
    everywhere = gpu_tests("-m", "gpu and gpu", "--collect-only", *map(str, modules))
    assert everywhere.returncode == 0, everywhere.stdout + everywhere.stderr
    [collected] = re.findall(r"^(\d+)/\d+ tests collected", everywhere.stdout, re.MULTILINE)
    assert int(skipped) == int(collected) > 50
