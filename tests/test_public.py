"""What the package shows to the outside, and what importing it costs."""

from __future__ import annotations

import ast
import graphlib
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from child_processes import run_python

import fastload
from fastload import errors

PACKAGE = Path(fastload.__file__).parent
TORCH_FREE = """
errors options.pack options.measure format.header format.writer images.decode sources.layouts sources.objects pack
plan read.reader inspection.info inspection.shuffle_quality inspection.verify inspection.preview repack export
estimate profiling.meter profiling.verdict profiling.doctor.examine profiling.report remote.client cli
""".split()
# Each package imports only from those in lines before its own; within a line, only from those to its left of a `<`.
LEVELS = """
errors timing
system < device format distributed plan
remote
images < transforms
read options < sources
pack < dataset
inspection repack prefetch
export samplers loader estimate
profiling
cli
__main__
"""


def test_the_export_list_is_this_and_each_name_is_there():
    tree = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert "WorkerError" in tree and all(issubclass(getattr(errors, name), errors.FastloadError) for name in tree)
    assert set(fastload.__all__) == tree | {
        "ChunkBatchSampler", "ChunkSampler", "ChunkWindow", "ClassBatches", "DistributedChunkSampler", "EpochPlan",
        "FastLoader", "List", "Meter", "MixedEcho", "PackedDataset", "Pad", "Remote", "Weighted", "Workers", "diagnose",
        "index_files", "index_plan", "inspect_file", "pack_images", "pack_shard", "plan_images", "transforms",
        "verify_file", "write_report",
    }  # fmt: skip
    for name in fastload.__all__:
        assert getattr(fastload, name) is not None
    assert dir(fastload) == sorted(fastload.__all__)
    assert dir(fastload.transforms) == sorted(fastload.transforms.__all__)
    assert fastload.__version__ == version("fastload-hdf5")
    with pytest.raises(AttributeError, match="offers AccessError, CacheError"):
        _ = fastload.Fastloader  # type: ignore[attr-defined]
    modules = {path.stem for path in (*PACKAGE.glob("*.py"), *(init.parent for init in PACKAGE.glob("*/__init__.py")))}
    assert modules & (set(fastload.__all__) - {"transforms"}) == set(), "an exported name is never a module's"


def test_the_installed_wheel_is_tested_not_the_checkout_and_types_are_shipped():
    assert (PACKAGE / "py.typed").exists()
    if (prefix := os.environ.get("FASTLOAD_TESTED_PREFIX")) is None:
        pytest.skip("only tools/test.sh, which sets FASTLOAD_TESTED_PREFIX, promises that")
    assert PACKAGE.is_relative_to(prefix)
    child = subprocess.check_output([sys.executable, "-c", "import fastload; print(fastload.__file__)"], text=True)
    assert Path(child.strip()).is_relative_to(prefix)


@pytest.mark.parametrize("module", TORCH_FREE)
def test_everything_up_to_read_works_without_torch(module):
    run_python("-W", "error", "-c", f"import sys; sys.modules['torch'] = None; import fastload.{module}")


MODULES = {
    ".".join(("fastload", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}


def imported(path: Path) -> set[str]:
    """The modules of the package that a file imports, also inside functions and under TYPE_CHECKING."""
    package = ".".join(("fastload", *path.relative_to(PACKAGE).parts[:-1]))
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] + "." if node.level else ""
            base = f"{above}{node.module or ''}".rstrip(".")
            found |= {f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.startswith("fastload.")}


def test_imports_point_one_way_along_the_levels():
    steps = [step.split() for line in LEVELS.split("\n") for step in line.split("<") if step.strip()]
    assert len(LEVELS.strip().splitlines()) <= 12
    level = {name: number for number, names in enumerate(steps) for name in names}
    packages = {path.stem if path.is_file() else path.name for path in PACKAGE.iterdir()} - {"__init__", "__pycache__"}
    assert packages - {"py"} == level.keys()
    for path in sorted(PACKAGE.rglob("*.py")):
        own = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if own == "__init__":
            continue
        for module in imported(path):
            other = module.split(".")[1]
            if other in level and other != own:
                assert level[other] < level[own], f"{path} imports {module}"


def test_no_modules_import_one_another_in_a_circle():
    graph = {name: imported(path) & MODULES.keys() - {name} for name, path in MODULES.items()}
    graphlib.TopologicalSorter(graph).prepare()


PAGE = Path(__file__).resolve().parents[1] / "docs" / "architecture.md"


def test_the_page_on_the_architecture_shows_these_levels_and_a_line_for_each_package():
    section = PAGE.read_text().split("\n## Levels\n")[1].split("\n## ")[0]
    assert re.findall(r"^```text\n(.*?)^```$", section, re.MULTILINE | re.DOTALL) == [LEVELS.lstrip("\n")]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    assert [row[0].strip("`") for row in rows] == LEVELS.replace("<", " ").split()
    for row in rows:
        for module in re.findall(r"`([\w/]+)`", row[-1]) if len(row) == 4 else ():
            assert (PACKAGE / row[0].strip("`") / f"{module}.py").exists(), f"{row[0]}: read {module} first"


def test_a_package_that_is_missing_is_named_and_torch_with_what_to_install():
    code = """
import sys
sys.modules[sys.argv[1]] = None
import fastload
try:
    fastload.FastLoader
except ImportError as exc:
    print(type(exc).__name__, exc.name, type(exc.__cause__).__name__)
"""
    assert run_python("-c", code, "h5py").split() == ["ModuleNotFoundError", "h5py", "NoneType"]
    assert run_python("-c", code, "torch").split() == ["MissingExtraError", "None", "ModuleNotFoundError"]
