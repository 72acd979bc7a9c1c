"""What the package shows to the outside, and what importing it costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fastload
from fastload import errors

PACKAGE = Path(fastload.__file__).parent
TORCH_FREE = [
    "errors",
    "format",
    "layout",
    "decode",
    "sources",
    "pack",
    "plan",
    "read",
    "info",
    "quality",
    "verify",
    "preview",
    "repack",
    "export",
    "estimate",
    "meter",
    "verdict",
    "doctor.examine",
    "report",
    "cli",
]
LAYERS = [
    {"errors", "cpus", "memory", "measured", "new_file", "pairs", "in_threads", "long_reads"},
    {"verdict", "report"},
    {"ranges", "stopwatch"},
    {"meter"},
    {"doctor"},
    {"codecs", "store"},
    {"filters"},
    {"format", "sources", "decode", "fitting", "image_header", "jpeg_scan", "sixteen_bits", "plan"},
    {"jpeg_rows", "store_check", "stored_rows"},
    {
        "layout",
        "stored_file",
        "stored_samples",
        "open_readers",
        "compare_stored",
        "store_info",
        "pack",
        "read",
        "chunks",
        "info",
        "order_measures",
        "quality",
        "position",
        "compare",
        "verify",
        "preview",
        "page_cache",
    },
    {"repack"},
    {"export", "estimate"},
    {"ring", "groups", "shared_memory"},
    {"threads"},
    {"busy"},
    {"backend", "device", "serial_torch", "transforms", "dataset", "share", "batch", "samples"},
    {"agreement"},
    {"echo", "auto_workers"},
    {
        "augment",
        "placed_rows",
        "sizer",
        "times_raw",
        "turns",
        "decoder_laps",
        "inputs",
        "orders",
        "samplers",
        "worker",
        "torch_workers",
    },
    {"processes"},
    {"feed"},
    {"cache", "cache_choice", "cache_load"},
    {"iteration", "open_feed"},
    {"loader"},
    {"bench"},
    {"tune"},
    {"cli", "__main__"},
]


def test_the_export_list_is_this_and_each_name_is_there():
    tree = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert "WorkerError" in tree and all(issubclass(getattr(errors, name), errors.FastloadError) for name in tree)
    assert set(fastload.__all__) == tree | {
        "ChunkBatchSampler", "ChunkSampler", "ChunkWindow", "DistributedChunkSampler", "EpochPlan", "FastLoader",
        "Meter", "MixedEcho", "PackedDataset", "diagnose", "inspect_file", "pack_images", "transforms", "verify_file",
        "write_report",
    }  # fmt: skip
    for name in fastload.__all__:
        assert getattr(fastload, name) is not None
    assert set(fastload.__all__) <= set(dir(fastload))


def test_an_exported_name_is_never_a_modules_name():
    modules = {path.stem for path in PACKAGE.glob("*.py")} | {
        path.parent.name for path in PACKAGE.glob("*/__init__.py")
    }
    assert modules & (set(fastload.__all__) - {"transforms"}) == set()


def test_an_unknown_name_says_what_there_is():
    with pytest.raises(AttributeError, match="offers CacheError, ChunkBatchSampler"):
        _ = fastload.Fastloader  # type: ignore[attr-defined]


@pytest.mark.parametrize("module", TORCH_FREE)
def test_everything_up_to_read_works_without_torch(module):
    code = f"import sys; sys.modules['torch'] = None; import fastload.{module}"
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_imports_point_one_way_along_the_data_path():
    level = {name: number for number, names in enumerate(LAYERS) for name in names}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] == "__init__":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("fastload."):
                continue
            target = (node.module or "").split(".")[1]
            assert target == parts[0] or level[target] <= level[parts[0]], f"{path} imports {node.module}"
