"""A driver as the tests need it: several GPUs, a MIG slice, calls that fail."""

from __future__ import annotations

from types import SimpleNamespace


class NVMLError(Exception):
    """What pynvml raises."""


class FakeNvml:
    """The functions of pynvml that are called, over `gpus` devices; those named in `fails` raise at every call.

    `pids`: by a device's index, processes that compute there.
    """

    NVML_CLOCK_SM = 1

    def __init__(self, gpus=1, fails=(), pids=None):
        self.gpus, self.fails, self.pids = gpus, set(fails), pids or {}
        self.calls = []
        self._functions = {
            "Init": lambda: None,
            "Shutdown": lambda: None,
            "DeviceGetCount": lambda: self.gpus,
            "DeviceGetHandleByIndex": lambda index: ("gpu", index),
            "DeviceGetHandleByUUID": self._slice,
            "DeviceGetUUID": lambda handle: (b"GPU-%d-abcdef" if handle[1] else "GPU-%d-abcdef") % handle[1],
            "DeviceGetDeviceHandleFromMigDeviceHandle": lambda handle: ("gpu", handle[1]),
            "DeviceGetIndex": lambda handle: handle[1],
            "DeviceGetUtilizationRates": self._rates,
            "DeviceGetMemoryInfo": lambda handle: SimpleNamespace(used=1000 * (1 + handle[1]), total=10_000),
            "DeviceGetPowerUsage": lambda handle: 500_000,
            "DeviceGetClockInfo": lambda handle, clock: {self.NVML_CLOCK_SM: 1980}[clock],
            "DeviceGetComputeRunningProcesses": lambda handle: [
                SimpleNamespace(pid=pid) for pid in self.pids.get(handle[1], ())
            ],
        }

    def __getattr__(self, name):
        function = self._functions[name.removeprefix("nvml")]
        self.calls.append(name)
        return _fail if name in self.fails else function

    def _slice(self, uuid):
        kind, number, *part = uuid.split("-")  # slices of a GPU: MIG-1-a, MIG-1-b
        if int(number) >= self.gpus:
            raise NVMLError("Not Found")
        return (kind.lower(), int(number), *part)

    def _rates(self, handle):
        return _fail() if handle[0] == "mig" else SimpleNamespace(gpu=90 + handle[1], memory=10)


def _fail(*_):
    raise NVMLError("Not Supported")
