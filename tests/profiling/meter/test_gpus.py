"""Counters of the GPUs that a job uses, and the reason where there are none."""

from __future__ import annotations

import sys
import warnings

import pytest
from fake_nvml import FakeNvml

from fastload.profiling.meter.sampler import GPU_EXTRA, Gpus

ALL = {"utilization_percent", "memory_bytes", "power_w", "sm_mhz"}


@pytest.mark.parametrize(("visible", "expected"), [
    (None, [0, 1, 2]), ("1", [1]), ("2,0", [2, 0]), ("GPU-1", [1]), ("GPU-2,GPU-0", [2, 0]), ("GPU-2-abcdef", [2]),
    ("0,-1,1", [0]),  # CUDA's rule: what comes after the first that is none does not count
    ("", []), ("7", []), ("GPU-5", []),
])  # fmt: skip
def test_only_visible_gpus_are_read(visible, expected, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus = Gpus(FakeNvml(3), visible)
    assert gpus.indices == expected
    assert set(gpus.read()) == {f"gpu{index}.{counter}" for index in expected for counter in ALL}
    assert gpus.absent == ({} if expected else {"gpu": "CUDA_VISIBLE_DEVICES names no GPU"})


def test_the_variable_counts_where_nothing_else_is_said_and_without_pynvml_the_extra_is_named(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert Gpus(FakeNvml(2)).read() == {
        "gpu1.utilization_percent": 91, "gpu1.memory_bytes": 2000, "gpu1.power_w": 500, "gpu1.sm_mhz": 1980,
    }  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", None)
    gpus = Gpus()
    assert gpus.absent == {"gpu": GPU_EXTRA} and gpus.read() == {}


def test_a_mig_slice_has_no_utilization_and_says_why():
    nvml = FakeNvml(2)
    gpus = Gpus(nvml, "MIG-1")
    for _ in range(5):
        assert set(gpus.read()) == {f"gpu1.{counter}" for counter in ALL - {"utilization_percent"}}
    assert gpus.absent == {"gpu1.utilization_percent": "NVMLError: Not Supported"}
    assert nvml.calls.count("nvmlDeviceGetUtilizationRates") == 1, "what is not there is asked for once"


@pytest.mark.parametrize("visible", ["MIG-1-a,MIG-1-b", "1,MIG-1-b", "MIG-1-a,1,MIG-1-b"])
def test_a_second_slice_of_a_gpu_is_named_and_replaces_nothing(visible):
    gpus = Gpus(FakeNvml(2), visible)
    assert gpus.indices == [1] and gpus.absent == {"MIG-1-b": "another slice of GPU 1 is read"}
    assert ("gpu1.utilization_percent" in gpus.read()) == visible.startswith("1")


def test_a_counter_that_fails_now_and_then_stays():
    nvml = FakeNvml()
    gpus = Gpus(nvml, "0")
    for nvml.fails in (set(), {"nvmlDeviceGetPowerUsage"}, set()):
        assert ("gpu0.power_w" in gpus.read()) == (not nvml.fails)
    assert gpus.absent == {}


@pytest.mark.parametrize("call", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex"])
def test_a_driver_that_does_not_answer_is_one_reason_and_no_warning(call):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gpus = Gpus(FakeNvml(fails={call}), "0")
        assert gpus.read() == {} and gpus.used_by([1]) == set()
        gpus.close()
    assert gpus.absent == {"gpu": "NVMLError: Not Supported"}
    assert Gpus(FakeNvml(1), "MIG-5").absent == {"gpu": "NVMLError: Not Found"}


def test_gpus_of_a_job_are_those_its_processes_compute_on():
    pids = {1: [10, 77], 2: [99]}
    gpus = Gpus(FakeNvml(3, pids=pids), "0,1,2")
    assert gpus.used_by([77, 5]) == {1} and gpus.used_by([5]) == set()
    silent = Gpus(FakeNvml(3, pids=pids, fails={"nvmlDeviceGetComputeRunningProcesses"}), "0,1,2")
    assert silent.used_by([77]) == set()
