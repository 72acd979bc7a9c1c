"""A thread's time, split into stages, and into running, blocked and neither."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fastload.timing.results import BatchWork, WorkTime, mean_stages
from fastload.timing.stopwatch import Stopwatch, beyond_usual_s, current, process_cpu_s, run_delay_reader

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
NAP_S = 0.02  # a sleep takes at least as long as it was asked to


def until_undisturbed(test):
    """Runs a test again where it fails: who loses the CPU between the looks at two clocks sees less than there was."""

    @functools.wraps(test)
    def run():
        for _ in range(20):
            with contextlib.suppress(AssertionError):
                return test()
        return test()

    return run


def spin():
    return sum(number * number for number in range(20_000))


@until_undisturbed
def test_running_is_running_and_sleeping_is_blocked():
    watch = Stopwatch("transform", by_threads=False)
    spin()
    watch.lap("decoding")
    time.sleep(NAP_S)
    work = watch.end()
    assert work.stages["decoding"].running_s > 0 and work.lock_s == 0
    assert sum(one.blocked_s for one in work.stages.values()) >= NAP_S / 2
    watch.begin()
    assert set(watch.end().stages) == {"transform"}, "each batch counts from its own beginning"


@LINUX
@until_undisturbed
def test_blocked_while_a_process_reads_is_reading_unless_a_stage_of_its_own_read():
    watch = Stopwatch("transform", by_threads=False)
    Path("/proc/cpuinfo").read_bytes()
    time.sleep(NAP_S)
    work = watch.end()
    assert work.stages["reading"].blocked_s >= NAP_S / 2 and work.stages["transform"].blocked_s == 0
    watch.begin()
    Path("/proc/cpuinfo").read_bytes()
    watch.lap("reading")
    time.sleep(NAP_S)
    assert watch.end().stages["transform"].blocked_s >= NAP_S / 2
    watch.begin()
    for _ in range(20):  # its own looks at the system are no reading
        time.sleep(0.001)
        watch.lap("transform")
    assert "reading" not in watch.end().stages


@until_undisturbed
def test_threads_that_read_nothing_are_blocked_by_a_lock():
    lock, works = threading.Lock(), []

    def work():
        watch = Stopwatch("reading", by_threads=True).start()
        assert current() is watch
        spin()
        watch.lap("reading")
        assert not lock.acquire(timeout=NAP_S)
        watch.lap("reading", for_lock=True)
        works.append(watch.end())

    with lock:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert current() is None
    assert works[0].lock_s > 0 and works[0].stages["reading"].blocked_s >= works[0].lock_s > 0


def test_slow_samples_are_those_far_above_the_usual_ones_of_their_batch():
    assert beyond_usual_s([1.0, 2.0, 1.0, 9.0, 3.0, 1.0, 1.0]) == 8.0
    assert beyond_usual_s([1.0, 2.0, 2.5]) == beyond_usual_s([1.0, 9.0]) == beyond_usual_s([]) == 0
    watch, until_s = Stopwatch("transform", by_threads=False), 0.0
    for longer in (0, 0, 0, 4):  # 4 times as long as the others together, however slow the machine
        begin_s = time.thread_time()
        spin()
        while time.thread_time() < longer * until_s + begin_s:
            spin()
        watch.lap("transform")
        watch.sample()
        until_s += time.thread_time() - begin_s
    assert watch.end().slow_s > 0
    watch.begin()
    watch.sample()
    assert watch.end().slow_s == 0


@pytest.mark.skipif(not os.path.exists("/proc/thread-self/schedstat"), reason="the system does not say")
def test_what_a_thread_waits_for_a_cpu_is_told_of_its_batch():
    cpus = os.sched_getaffinity(0)
    rival = subprocess.Popen([sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{min(cpus)}}})\nwhile 1: 0"])
    try:
        os.sched_setaffinity(0, {min(cpus)})
        watch, delay_s = Stopwatch("transform", by_threads=False), run_delay_reader()
        begin_s = delay_s()
        for _ in range(10_000):
            spin()
            if (waited_s := delay_s() - begin_s) > 0:
                break
        assert watch.end().runnable_s >= waited_s > 0
    finally:
        os.sched_setaffinity(0, cpus)
        rival.kill()
        rival.wait()


def test_parts_and_sums_of_work():
    work = BatchWork({"reading": WorkTime(4.0, 2.0)}, lock_s=1.0, slow_s=0.5, runnable_s=3.0)
    assert work / 2 == BatchWork({"reading": WorkTime(2.0, 1.0)}, 0.5, 0.25, 1.5)
    both = {"reading": WorkTime(4.0, 2.0), "collate": WorkTime(1.0, 0.0)}
    assert work + BatchWork({"collate": WorkTime(1.0, 0.0)}) == BatchWork(both, 1.0, 0.5, 3.0)
    assert mean_stages([work, work]) == work.stages and mean_stages([]) == {}


@LINUX
def test_readers_close_what_they_opened():
    gc.collect()  # what earlier tests left
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        assert run_delay_reader()() >= 0
        Stopwatch("reading", by_threads=True).end()
    assert len(os.listdir("/proc/self/fd")) == before


def test_time_of_a_process_on_a_cpu():
    first = process_cpu_s(os.getpid())
    spin()
    assert first is not None and process_cpu_s(os.getpid()) > first
    assert process_cpu_s(2**22 + 1) is None
