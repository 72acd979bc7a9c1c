"""Time of device work: on the device, by the clock, and by torch's profiler."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import harness
from gpu_device import Device

Work = Callable[[], object]


def device_ms(device: Device, work: Work, repeats: int) -> dict[str, Any]:
    """Milliseconds on the device of each call, from the first thing it starts there to the last.

    The device is kept busy until the host has handed over the whole call, so the host's time is not in the figure;
    `host_hidden` says whether that succeeded each time.
    """
    work()
    device.synchronize()
    begin_s = time.perf_counter()
    work()
    delay_s = min(max(3 * (time.perf_counter() - begin_s), 0.001), 0.1)
    device.synchronize()
    times, hidden = [], 0
    for _ in range(repeats):
        first, begin, end = device.event(), device.event(), device.event()
        begin_s = time.perf_counter()
        first.record()
        device.delay(delay_s)
        begin.record()
        work()
        end.record()
        host_ms = (time.perf_counter() - begin_s) * 1e3
        end.synchronize()
        hidden += host_ms < first.elapsed_time(begin)
        times.append(begin.elapsed_time(end))
    return {"ms": harness.spread(times), "host_hidden": hidden == repeats}


def call_ms(device: Device, work: Work, repeats: int, calls: int) -> dict[str, float]:
    """Milliseconds a call by the clock, of calls one after another: what a training loop would see, host included."""
    work()
    times = []
    for _ in range(repeats):
        device.synchronize()
        begin_s = time.perf_counter()
        for _ in range(calls):
            work()
        device.synchronize()
        times.append((time.perf_counter() - begin_s) / calls * 1e3)
    return harness.spread(times)


def kernel_ms(device: Device, work: Work, calls: int) -> dict[str, Any]:
    """Milliseconds a call that the device's own kernels and copies take, by torch's profiler; the largest by name."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.kind == "cuda" else [])]
    work()
    device.synchronize()
    try:
        with profile(activities=activities) as profiled:
            for _ in range(calls):
                work()
            device.synchronize()
    except RuntimeError as exc:  # the driver's tracing is not to be had everywhere
        return {"ms": 0.0, "largest": {}, "error": str(exc)[:300]}
    by_name = {
        event.key[:80]: event.self_device_time_total / calls / 1e3
        for event in profiled.key_averages()
        if str(event.device_type).endswith("CUDA") and event.self_device_time_total
    }
    largest = dict(sorted(by_name.items(), key=lambda item: -item[1])[:5])
    return {"ms": sum(by_name.values()), "largest": largest}


class InFlight:
    """Lets the host run at most three batches ahead of the device, and waits without keeping a core busy."""

    def __init__(self, device: Device) -> None:
        self._device, self._events = device, [device.event(blocking=True) for _ in range(3)]
        self._count = 0

    def step(self) -> None:
        """Called after each batch."""
        event = self._events[self._count % 3]
        if self._count >= 3:
            event.synchronize()
        event.record()
        self._count += 1

    def finish(self) -> None:
        """Waits until the last batch is done."""
        event = self._device.event(blocking=True)
        event.record()
        event.synchronize()
