"""benchmarks/gpu.py on the CPU: every branch runs, and a failure, a hang or a missing package stays where it is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.py"
IN_FORKS = Path(__file__).with_name("gpu_in_forks.py")  # some tests start processes as gpu.py does

SECTIONS = [
    "machine", "sanity", "data", "kernel", "train-resnet50", "host-to-device", "train-resnet18", "copy", "device-cache",
    "stored", "host-cache", "workers", "step-rate", "cpu-seconds", "plain-resnet50", "plain-resnet18", "parallel",
    "train-compiled", "plots",
]  # fmt: skip


@pytest.fixture
def in_benchmarks(monkeypatch):
    for folder in ("benchmarks", "tools"):
        monkeypatch.syspath_prepend(ROOT / folder)


@pytest.fixture
def run(warm_python, tmp_path):
    """Returns a function that gives the records of a tiny run on the CPU, by section."""
    out = tmp_path / "out"

    def ran(*words, expect=0, script=IN_FORKS):
        given = ["--device", "cpu", "--tiny", "--out", out, "--data", tmp_path, *words]
        done = warm_python.run(script, *given, cwd=tmp_path)
        assert done.returncode == expect, done.stdout + done.stderr
        return records_of(out)

    return ran


def records_of(out):
    lines = (out / "gpu.jsonl").read_text().splitlines()
    return {record["section"]: record for record in map(json.loads, lines)}


def may_be_absent(reason):
    """What a CPU, or a machine without torchvision, cannot have; everything else must have run."""
    return find_spec("torchvision") is None and "torchvision cannot be imported" in reason


@pytest.mark.slow
def test_every_section_gives_its_figures_without_optional_packages_and_leaves_nothing_behind(
    run, tmp_path, tmp_path_factory
):
    names = ("simplejpeg", "hdf5plugin", "zstandard")
    script = tmp_path_factory.mktemp("without") / "without.py"
    lines = (
        "import runpy, sys",
        f"sys.modules.update(dict.fromkeys({names!r}))",
        f"runpy.run_path({str(IN_FORKS)!r}, run_name='__main__')",
    )
    script.write_text("\n".join(lines))
    records = run("--set", "all", script=script)
    seconds = records["sanity"]["figures"]["imports that fail"]["seconds"]
    assert all("ModuleNotFoundError" in seconds[name] for name in names)
    assert list(records) == SECTIONS
    for record in records.values():
        assert "error" not in record and "skipped" not in record, record
        assert record["note"] == "cpu, not a GPU figure"
        for name, figure in record["figures"].items():
            assert "error" not in figure, (name, figure)
            assert "value" in figure or may_be_absent(figure["skipped"]), (name, figure)
    measured = {name for record in records.values() for name, figure in record["figures"].items() if "value" in figure}
    assert {
        "copy device to device", "fused crop, batch 8", "correct crop, batch 8", "crop, batch 8, over plain torch",
        "fused crop and colour", "fused resize 64", "page cache to device, batch 8, workers default",
        "training resnet50", "training resnet18", "training resnet18, batch 16", "host time of next(), batch 8",
        "training resnet50, stored JPEG, threads 2", "training resnet50, stored JPEG, device",
        "worker processes to device, pinned", "training resnet18, compiled", "highest step rate, cache None",
        "zero-copy, rows by gather_rows",
        "CPU seconds per 1,000, fastload, cache None",
    } <= measured  # fmt: skip
    training = records["train-resnet50"]["figures"]["training resnet50"]
    assert training["counters"]["utilization_percent"]["count"] >= 1
    assert training["cached_counters"]["power_w"]["count"] >= 1
    assert training["peaks"]["host_bytes"] > 0
    filled = records["device-cache"]["figures"]["device cache, photos to 32, batch 8"]
    assert filled["filled_gb_per_s"] > 0 and filled["workers"] >= 1
    wrong = {name: figure["value"] for name, figure in records["sanity"]["figures"].items() if "wrong" in name}
    assert len(wrong) == 7
    assert set(wrong.values()) == {0}
    assert 0 <= training["stall_share"] <= 1
    pictures = [tmp_path / "out" / f"gpu_{name}.png" for name in ("kernel", "feed", "training", "step_rate")]
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.slow
def test_failing_and_hanging_sections_leave_the_others_and_what_needs_the_data_is_told_that_there_are_none(run):
    words = ["--only", "copy", "kernel", "step-rate", "--fail", "data", "--hang", "kernel", "--limit", "kernel=1"]
    records = run(*words, expect=1)
    assert "code 1" in records["data"]["error"]
    assert "this section was told to fail" in records["data"]["log"]
    assert "over its limit of 1 s" in records["kernel"]["error"]
    assert records["step-rate"]["error"] == "the data could not be made"
    assert records["copy"]["figures"]["copy device to device"]["value"] > 0
    assert "error" not in records["plots"]


@pytest.mark.slow
def test_what_was_measured_when_the_run_is_stopped_counts_and_its_data_is_removed(tmp_path):
    words = ["--device", "cpu", "--tiny", "--out", tmp_path / "out", "--data", tmp_path, "--only", "sanity", "kernel"]
    with subprocess.Popen([sys.executable, SCRIPT, *words], stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if "imports that fail" in line:
                process.terminate()
                break
        assert process.wait(60) == 143
    [_, sanity] = map(json.loads, (tmp_path / "out" / "gpu.jsonl").read_text().splitlines())
    assert "stopped" in sanity["error"] and sanity["figures"]["imports that fail"]["value"] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_pinned_bytes_are_counted_until_they_are_not_pinned_any_more(in_benchmarks):
    from gpu_device import Registered

    class Some:
        def pin(self, memory):
            return (lambda: undone.append(len(memory))) if len(memory) < 100 else None

    undone, counted = [], Registered(Some)
    first, second, refused = (Some().pin(np.zeros(count, np.uint8)) for count in (10, 20, 100))
    assert (counted.now, counted.peak, refused) == (30, 30, None)
    first()
    second()
    assert (counted.now, counted.peak, undone) == (0, 30, [10, 20])


def test_sections_without_time_are_skipped_by_name(run):
    records = run("--only", "copy", "--budget-s", "1")
    assert "the budget left" in records["copy"]["skipped"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_without_the_device_nothing_is_measured_or_left(tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPT, "--data", tmp_path], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 1
    assert "nothing can be measured with --device cuda" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_section_runs_on_a_gpu(tmp_path):
    words = ["--device", "cuda", "--tiny", "--out", tmp_path / "out", "--data", tmp_path, "--set", "all"]
    done = subprocess.run([sys.executable, SCRIPT, *words], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    records = records_of(tmp_path / "out")
    assert list(records) == SECTIONS
    for record in records.values():
        assert "error" not in record and "skipped" not in record, record
        for name, figure in record["figures"].items():
            assert "error" not in figure and "void" not in figure, (name, figure)


def test_figures_of_a_cpu_are_kept_out_of_the_results(tmp_path):
    results = ROOT / "benchmarks" / "results"
    for words, said in ((["--tiny", "--out", results / "cpu"], "no figure"), ([], "give --tiny")):
        done = subprocess.run([sys.executable, SCRIPT, "--device", "cpu", *words], capture_output=True, text=True)
        assert done.returncode == 2 and said in done.stderr
    assert not (results / "cpu").exists()


def test_the_sections_of_a_command_end_within_its_budget_and_each_is_in_one(in_benchmarks):
    import gpu
    import gpu_sections

    for sections in gpu.SETS.values():
        assert gpu.MACHINE_S + sum(sections.values()) + gpu.PLOTS_S <= gpu.BUDGET_S
    assert set(gpu.LIMITS_S) == set(gpu_sections.SECTIONS) - {"machine", "plots"}


def test_a_section_gets_what_earlier_ones_left_and_later_ones_do_not_need(in_benchmarks, tmp_path):
    import gpu

    run, left = gpu.Run.__new__(gpu.Run), [gpu.PLOTS_S + 500.0]
    run.options, run.data, run.stopped = SimpleNamespace(limit={"copy": 7.0}), tmp_path, False
    run.left_s, given = lambda: left[0], {}

    def section(name, limit_s):
        given[name] = limit_s
        left[0] -= min(limit_s, 60.0)
        return {}

    run.section, run.write = section, lambda record: None
    run.sections(["sanity", "kernel", "parallel", "copy"])
    limits = gpu.LIMITS_S
    assert given["sanity"] == 2 * limits["sanity"] and given["kernel"] == 2 * limits["kernel"] and given["copy"] == 7.0
    left[0] = gpu.PLOTS_S + 10.0 + limits["sanity"] + limits["kernel"] + limits["copy"]
    run.sections(["sanity", "kernel", "copy"])
    assert given["sanity"] == limits["sanity"] + 10 and given["kernel"] == limits["kernel"]


def test_a_packed_file_that_was_not_written_to_its_end_has_no_name(in_benchmarks, tmp_path, monkeypatch):
    import gpu_data

    pixels, path = np.ones((8, 4, 4, 3), np.uint8), tmp_path / "photos.h5"
    with monkeypatch.context() as patched, pytest.raises(OSError, match="full"):
        patched.setattr(os, "pwrite", lambda *_: 0)
        gpu_data.write_repeated(path, pixels, 20, 1)
    assert not path.exists()
    gpu_data.write_repeated(path, pixels, 20, 1)
    assert [file.name for file in tmp_path.iterdir()] == ["photos.h5"]


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(("lane_bytes", "access"), [(1, "b8"), (4, "b32"), (16, "v4.b32")])
def test_each_lane_reads_and_writes_so_many_bytes_at_once(in_benchmarks, lane_bytes, access):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    import gpu_lanes

    dtype, values = gpu_lanes.LANES[lane_bytes]
    pointer = {torch.uint8: "*u8", torch.int32: "*i32"}[dtype]
    signature = {"source": pointer, "target": pointer, "BLOCK": "constexpr"}
    hints = {(number,): [["tt.divisibility", 16]] for number in (0, 1)}
    constants = {(2,): 32 * gpu_lanes.WARPS * values}
    source = ASTSource(gpu_lanes._copy, signature, constants, hints)
    # For a GPU that need not be there: the interpreter, by which the section is tried on the CPU, takes more.
    options = {"num_warps": gpu_lanes.WARPS, "enable_fp_fusion": True}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    assert [set(re.findall(rf"\b{kind}\.global\.([\w.]+)", ptx)) for kind in ("ld", "st")] == [{access}, {access}]


def test_one_figure_that_fails_leaves_the_next(tmp_path, in_benchmarks):
    from gpu_bench import Bench, Sizes

    bench = Bench(None, Sizes.of(tiny=True), tmp_path, tmp_path / "figures.jsonl")
    bench.figure("wrong", lambda: {"value": 1 // 0})
    bench.figure("right", lambda: {"value": 2.0}, target=">= 1")
    wrong, right = map(json.loads, (tmp_path / "figures.jsonl").read_text().splitlines())
    assert wrong["error"].startswith("ZeroDivisionError")
    assert right == {"figure": "right", "value": 2.0, "target": ">= 1"}


def test_counters_are_what_the_driver_has_and_a_driver_that_is_not_there_is_an_error_among_them(in_benchmarks):
    from gpu_meter import PretendNvml, counters

    class OldDriver(PretendNvml):
        def nvmlDeviceGetPowerUsage(self, handle):
            raise RuntimeError("not supported")

    class NoDriver(PretendNvml):
        def nvmlInit(self):
            raise RuntimeError("no driver")

    driver = OldDriver()
    with counters(driver, every_s=0.001, visible="0") as found:
        while driver.asked < 3:
            time.sleep(0.001)
    assert set(found) == {"utilization_percent", "memory_bytes", "sm_mhz"} and found["sm_mhz"]["mean"] == 1980
    assert 90 <= found["utilization_percent"]["lowest"] <= found["utilization_percent"]["highest"] <= 92
    with counters(NoDriver(), every_s=0.001) as found:
        pass
    assert found == {"error": "RuntimeError: no driver"}


def test_bytes_to_move_are_those_of_the_windows_and_the_output(in_benchmarks):
    import gpu_pipelines

    images = torch.zeros(4, 3, 60, 50, dtype=torch.uint8)
    resized = gpu_pipelines.bytes_to_move(gpu_pipelines.plain_resize(20), images, 20)
    assert resized == 4 * 3 * (60 * 50 + 2 * 20 * 20)
    cropped = gpu_pipelines.bytes_to_move(gpu_pipelines.augmentation(20), images, 20)
    assert 4 * 3 * 2 * 20 * 20 < cropped < resized


def test_launches_are_counted_and_get_the_options_of_a_configuration(in_benchmarks):
    import gpu_pipelines

    module = SimpleNamespace(fused=lambda source, **options: (source, options))
    launches = gpu_pipelines.Launches(module)
    assert not launches.any_since_last()
    with launches.using(block_x=64):
        assert module.fused(1, dtype=2) == (1, {"dtype": 2, "block_x": 64})
    assert module.fused(1, dtype=2) == (1, {"dtype": 2})
    assert launches.any_since_last()
    assert not launches.any_since_last()


def test_highest_rate_ends_where_the_ratio_first_falls(in_benchmarks):
    from gpu_steps import highest_kept

    def points(*ratios):
        return [{"images_per_s": 100.0 * (i + 1), "ratio": {"median": ratio}} for i, ratio in enumerate(ratios)]

    assert highest_kept(points(1.0, 0.995, 0.98, 0.995)) == 200.0
    assert highest_kept(points(0.9, 1.0)) == 0.0
    assert highest_kept(points(1.0, 1.0)) == 200.0


def test_table_says_which_targets_are_met(in_benchmarks):
    from gpu import judged

    assert judged({"value": 0.7, "target": ">= 0.7"}) == ": met"
    assert judged({"value": 0.69, "target": ">= 0.7"}) == ": MISSED"
    assert judged({"value": 0.2, "target": "<= 0.1"}) == ": MISSED"
    assert judged({"value": 0.9, "target": ">= 0.7", "void": "the fused kernel did not run"}) == ""
    assert judged({"error": "OutOfMemoryError", "target": ">= 0.7"}) == ""


def test_void_figures_are_not_drawn(tmp_path, in_benchmarks):
    import plot_gpu

    figures = {"kept": {"value": 1.0}, "fell back": {"value": 2.0, "void": "the fused kernel did not run"},
               "failed": {"error": "OutOfMemoryError"}}  # fmt: skip
    (tmp_path / "gpu.jsonl").write_text(json.dumps({"section": "kernel", "figures": figures, "time": "2026"}) + "\n")
    assert list(plot_gpu.read(tmp_path / "gpu.jsonl")[0]) == ["kept"]
