"""Readings of a job: of this process, or of another with its children."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
from fake_nvml import FakeNvml

from fastload import Meter, OptionError
from fastload.profiling.meter import Sampler, environment
from fastload.profiling.meter.sampler import (
    OthersCpus,
    Rates,
    cpu_seconds,
    family_of,
    mean_cpus,
    mean_others,
    others_cpu_seconds,
    process_memory,
    taken_cpus,
)

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")


def until(holds):
    """A thread gets its turn some time; how soon is the machine's affair."""
    last = time.monotonic() + 600
    while not holds():
        assert time.monotonic() < last, "it never came"
        time.sleep(0.01)


def test_readings_come_in_order_and_end_with_the_block():
    with Sampler(nvml=FakeNvml(), visible="0", every_s=0.001) as sampler:
        until(lambda: len(sampler.readings) > 5)
    readings = sampler.readings
    at_s = [one["at_s"] for one in readings]
    assert at_s == sorted(at_s)
    assert all(one["gpu0.power_w"] == 500 for one in readings)
    assert not [thread for thread in threading.enumerate() if thread.name == "fastload-sampler"]
    sampler.stop()  # again: nothing happens
    assert sampler.readings == readings
    with pytest.raises(OptionError, match="once"):
        sampler.start()


@LINUX
def test_a_reading_has_cpu_memory_and_disk_of_the_job():
    with Sampler(nvml=FakeNvml(0), every_s=0.001) as sampler:
        until(lambda: any("disk_read_bytes_per_s" in one for one in sampler.readings))
    names = {name for one in sampler.readings for name in one}
    assert {"cpu_percent", f"cpu_percent.{os.getpid()}", "memory_bytes", "disk_read_bytes_per_s"} <= names
    assert not any(name.startswith("gpu") for name in names) and sampler.absent == {"gpu": "there is no GPU"}
    memory = next(one["memory_bytes"] for one in sampler.readings if "memory_bytes" in one)
    assert 2**20 < memory < 2**40


@LINUX
def test_another_process_is_read_with_its_family_and_may_end():
    code = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=sys.stdin);"
        "print(child.pid, flush=True); child.wait()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        child = int(process.stdout.readline())
        assert family_of(process.pid) == [process.pid, child] and {process.pid, child} < {*family_of(os.getpid())}
        assert process_memory(2**30, child) > 0 and cpu_seconds([child])[child] >= 0  # the first one is none
        with Sampler(process.pid, nvml=FakeNvml(), visible="0", every_s=0.01) as sampler:
            until(lambda: f"cpu_percent.{child}" in sampler.readings[-1])
            assert f"cpu_percent.{os.getpid()}" not in sampler.readings[-1]
            process.communicate("\n")
            count = len(sampler.readings)
            until(lambda: len(sampler.readings) > count + 2)  # the job is gone, the driver is still read
        assert "cpu_percent" not in sampler.readings[-1] and "gpu0.power_w" in sampler.readings[-1]
    assert process_memory(process.pid) == 0 and cpu_seconds([process.pid]) == {}


def test_rates_count_processes_from_the_second_look_on():
    rates = Rates()
    assert rates.of({1: 5.0}) == {} and list(rates.of({1: 6.0, 2: 100.0})) == [1]
    assert rates.of({1: 7.0, 2: 90.0})[1] > 0


def test_only_the_gpus_of_the_job_are_told_where_the_driver_knows():
    nvml = FakeNvml(2)
    with Sampler(nvml=nvml, visible="0,1", every_s=0.005) as sampler:
        assert {"gpu0.power_w", "gpu1.power_w"} <= set(sampler.readings[0])
        nvml.pids = {1: [os.getpid()]}
        until(lambda: "gpu0.power_w" not in sampler.readings[0])
        assert "gpu1.power_w" in sampler.readings[0]


def test_what_the_system_does_not_tell_is_named_and_what_could_be_read_once_is_tried_again(monkeypatch):
    lost = NotImplementedError("couldn't find /proc/diskstats")
    first, last = ({"sda": SimpleNamespace(busy_time=busy)} for busy in (0, 10**6))
    disks = Mock(side_effect=[lost, first, None, lost, last])
    monkeypatch.setattr("psutil.disk_io_counters", disks)
    silent, sampler = Sampler(nvml=FakeNvml(), visible="0"), Sampler(nvml=FakeNvml(), visible="0")
    for one in [silent] * 3 + [sampler] * 4:
        one._counters._slow_due_s = 0
        assert "gpu0.power_w" in one.read()
    assert silent.absent == {"disk_busy_percent": "NotImplementedError: couldn't find /proc/diskstats"}
    assert sampler.absent == {} and disks.call_count == 5 and "cpu_percent" in sampler.readings[-1]


def test_readings_that_end_are_not_silent():
    callback = Mock(side_effect=[None, None, RuntimeError("no room")])
    with Sampler(nvml=FakeNvml(0), every_s=0.001, callback=callback) as sampler:
        until(lambda: "readings" in sampler.absent)
    assert sampler.absent["readings"] == "RuntimeError: no room"


def test_long_runs_are_thinned(monkeypatch):
    monkeypatch.setattr("fastload.profiling.meter.sampler.MOST_READINGS", 16)
    sampler = Sampler(nvml=FakeNvml(0), every_s=1e-4)
    for _ in range(200):
        sampler.read()
    assert 8 <= len(sampler.readings) <= 16
    at_s = [one["at_s"] for one in sampler.readings]
    assert at_s == sorted(at_s)


def test_a_meter_reads_the_driver_it_is_given_or_says_that_it_reads_nothing(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with Meter(nvml=FakeNvml(fails={"nvmlDeviceGetUtilizationRates"}), sample_every_s=0.001) as meter:
        until(lambda: len(meter.readings) > 3)
    assert meter.absent == {"gpu0.utilization_percent": "NVMLError: Not Supported"}
    assert all("gpu0.sm_mhz" in one for one in meter.measured().readings)
    meter = Meter(sample_every_s=0)
    assert meter.readings == () and "readings" in meter.absent
    with pytest.raises(OptionError, match="every_s"):
        Sampler(every_s=0)


def test_the_environment_names_no_host_and_no_user():
    found = environment()
    assert found["its compiled loops"]
    assert {"CPU", "CPUs for this process", "memory", "system", "Python"} <= set(found)
    assert all(isinstance(value, str) for value in found.values())
    assert os.uname().nodename not in " ".join(found.values()) or len(os.uname().nodename) < 3


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="only Linux says what each CPU did")
def test_a_program_that_is_no_descendant_counts_as_another(tmp_path, monkeypatch):
    monkeypatch.setattr("fastload.profiling.meter.sampler.taken_cpus", lambda others: others)
    burn = "import pathlib, sys, time\nwhile time.process_time() < 0.6: pass\npathlib.Path(sys.argv[1]).touch()"
    others, done = OthersCpus(), tmp_path / "done"
    assert others.cpus is None
    begin_s = time.perf_counter()
    with others.measured():  # a shell that ends leaves its child to the system
        subprocess.run(["sh", "-c", '"$@" &', "sh", sys.executable, "-c", burn, str(done)], check=True)
        until(done.exists)
    assert others.cpus * (time.perf_counter() - begin_s) >= 0.5


def test_the_mean_of_readings_is_over_the_time_that_each_stands_for():
    readings = [{"at_s": 1.0, "others_cpu_percent": 100.0}, {"at_s": 1.5}, {"at_s": 4.0, "others_cpu_percent": 0.0}]
    assert mean_others(readings, [(0.0, 4.0)]) == pytest.approx(taken_cpus(0.25))
    assert mean_others(readings, [(0.0, 1.0), (3.0, 4.0)]) == pytest.approx(taken_cpus(0.5))
    assert mean_others(readings, []) == mean_others([], [(0.0, 4.0)]) == 0.0
    of_the_job = [one | {"cpu_percent": 60.0 * one["at_s"]} for one in readings]
    assert mean_cpus(of_the_job, [(0.5, 1.5)]) == pytest.approx((0.6 + 0.9) / 2) and mean_cpus([], [(0.0, 4.0)]) == 0.0


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="only Linux says what each CPU did")
def test_children_that_have_ended_are_not_other_programs(monkeypatch):
    times = psutil.cpu_times(percpu=True)
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: times)  # as if no CPU had done anything since
    code = "import time\nwhile time.process_time() < 0.3: pass"
    before_s = others_cpu_seconds(family_of(os.getpid()))
    for _ in range(2):  # each ends before anybody has looked at it
        subprocess.run([sys.executable, "-c", code], check=True)
    assert before_s - others_cpu_seconds(family_of(os.getpid())) >= 0.55


LAUNCHER_OF_TWO = """
import subprocess, sys
with subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE) as other_rank:
    subprocess.run([sys.executable, "-c", sys.argv[2]], stdin=other_rank.stdout, check=True)
    other_rank.kill()
"""
OTHER_RANK = """
import time
while time.process_time() < 0.3: pass
print(flush=True)
time.sleep(600)
"""
SEEN_BY_A_RANK = """
import os, psutil
from fastload.profiling.meter.sampler import family_of, others_cpu_seconds
times = psutil.cpu_times(percpu=True)
psutil.cpu_times = lambda percpu: times
input()  # the other rank has worked by then
alone_s = others_cpu_seconds(family_of(os.getpid()))
os.environ["LOCAL_WORLD_SIZE"] = "2"
print(alone_s - others_cpu_seconds(family_of(os.getpid())))
"""


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="only Linux says what each CPU did")
def test_other_ranks_are_not_other_programs(no_launcher):
    run = [sys.executable, "-c", LAUNCHER_OF_TWO, OTHER_RANK, SEEN_BY_A_RANK]
    assert float(subprocess.run(run, check=True, capture_output=True, text=True).stdout) >= 0.25
