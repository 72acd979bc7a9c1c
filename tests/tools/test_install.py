"""What is installed: the packages that packing needs, and a library that any Linux of the wheels' tag can load."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import venv
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from child_processes import LIMIT_S
from packaging.requirements import Requirement

import fastload
from fastload.system import native

ROOT = Path(__file__).resolve().parents[2]


def requirements(platform: str = sys.platform) -> list[str]:
    lines = (ROOT / "tools/requirements-pack.txt").read_text().splitlines()
    wanted = [Requirement(line) for line in lines if line and not line.startswith("#")]
    chosen = [one for one in wanted if one.marker is None or one.marker.evaluate({"sys_platform": platform})]
    return [f"{one.name}{one.specifier}" for one in chosen]


def installed_for(lines: list[str]) -> dict[str, Distribution]:
    """What pip would install for requirements, of what is installed here."""
    found: dict[str, Distribution] = {}
    wanted = list(map(Requirement, lines))
    while wanted:
        name = wanted.pop().name
        if name not in found:
            found[name] = distribution(name)
            further = map(Requirement, found[name].requires or [])
            wanted += [one for one in further if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


@pytest.mark.parametrize(("platform", "without"), [("linux", {"torch", "psutil"}), ("darwin", {"torch"})])
def test_packing_needs_the_dependencies_without_torch_and_on_linux_without_psutil(
    platform: str, without: set[str]
) -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert sorted(requirements(platform)) == sorted(one for one in declared if Requirement(one).name not in without)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere psutil is a thirteenth")
def test_twelve_packages_without_torch_pack_verify_and_tell(tmp_path: Path) -> None:
    # Links to what is installed here, in an environment that has nothing else.
    venv.create(tmp_path, symlinks=True)
    (site,) = tmp_path.glob("lib/python*/site-packages")
    for name, found in installed_for(requirements()).items():
        tops = {file.parts[0] for file in found.files or [] if file.parts[0] != ".."}
        assert tops, f"{name} has no list of its files"
        for top in tops - {"__pycache__"}:
            (site / top).symlink_to(str(found.locate_file(top)))
    (site / "fastload").symlink_to(Path(fastload.__file__).parent)
    own = distribution("fastload-hdf5")
    (info,) = {file.parts[0] for file in own.files or [] if file.parts[0].endswith(".dist-info")}
    (site / info).symlink_to(str(own.locate_file(info)))
    words = [tmp_path / "bin" / "python", "-I", ROOT / "tools/check_install.py", "--packing"]
    done = subprocess.run(
        words, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "12 packages: click, fastload-hdf5, h5py," in done.stdout and "packed, verified" in done.stdout


@pytest.mark.skipif(native.library() is None, reason="fastload was installed without its compiled loops")
@pytest.mark.skipif(sys.platform != "linux", reason="versions of symbols are glibc's")
def test_the_compiled_loops_need_no_newer_glibc_than_the_tag_of_the_wheels_promises() -> None:
    promised = re.search(r"^glibc=(\d+)", (ROOT / "tools/wheels.sh").read_text(), re.MULTILINE)
    assert promised
    library = Path(native.__file__).with_name("libfastload.so").read_bytes()
    needed = {(int(major), int(minor)) for major, minor in re.findall(rb"GLIBC_(\d+)\.(\d+)", library)}
    assert needed and max(needed) <= (2, int(promised[1]))
