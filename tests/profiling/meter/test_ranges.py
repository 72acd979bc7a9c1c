"""Ranges that profilers show: there when somebody looks, nothing else."""

from __future__ import annotations

import pytest
import torch
from hand_clock import Device, HandClock
from torch.profiler import ProfilerActivity, profile

from fastload import FastLoader, Meter
from fastload.timing import ranges
from fastload.transforms import RandomHorizontalFlip

PACKED = {"rows": 32, "size": (8, 6, 3), "chunk_rows": 8}


def names_of(profiler):
    return {event.key for event in profiler.key_averages() if event.key.startswith("fastload.")}


def test_a_profiler_shows_the_stages_and_under_a_meter_the_waits_of_any_loader(packed):
    loader = FastLoader(packed, 8, transform=[RandomHorizontalFlip()], echo=2, device=Device(HandClock()))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        assert len(list(loader)) == 8
    assert names_of(profiler) == {"fastload.wait", "fastload.copy", "fastload.transform"}
    wait = next(event for event in profiler.key_averages() if event.key == "fastload.wait")
    assert wait.count == 9  # and once to learn that there is no more
    with profile(activities=[ProfilerActivity.CPU]) as profiler, Meter(sample_every_s=0) as meter:
        list(meter.watch([torch.zeros(1)] * 3))
    assert names_of(profiler) == {"fastload.wait"}


def test_worker_threads_have_ranges_too_where_all_threads_are_recorded(packed):
    config = getattr(torch._C._profiler, "_ExperimentalConfig", None)
    try:
        config = config(profile_all_threads=True)
    except TypeError:
        pytest.skip("this torch cannot record all threads")
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as profiler:
        list(FastLoader(packed, 8, transform=[RandomHorizontalFlip()]))
    assert {"fastload.wait", "fastload.read", "fastload.transform"} <= names_of(profiler)


def test_off_unless_asked_or_profiled():
    assert ranges.span("wait") is ranges.span("read")
    with Meter(sample_every_s=0, ranges=True):
        assert ranges.span("wait") is not ranges.span("wait")
        with Meter(sample_every_s=0, ranges=True), ranges.span("copy"):
            pass
        with pytest.raises(KeyError), ranges.span("copy"):
            raise KeyError
    assert ranges.span("wait") is ranges.span("read")
