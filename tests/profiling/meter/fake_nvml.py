"""A driver as the tests need it: several GPUs, a MIG slice, calls that fail."""

from __future__ import annotations

from types import SimpleNamespace


class NVMLError(Exception):
    """What pynvml raises."""


class FakeNvml:
    """The functions of pynvml that are called, over devices given by index.

    Args:
        gpus: how many.
        fails: names of functions that raise, at every call.
        pids: by index, processes that compute there.
    """

    NVML_CLOCK_SM = 1

    def __init__(self, gpus=1, fails=(), pids=None):
        self.gpus, self.fails, self.pids = gpus, set(fails), pids or {}
        self.calls = []

    def __getattribute__(self, name):
        if not name.startswith("nvml"):
            return super().__getattribute__(name)
        self.calls.append(name)
        if name in self.fails:

            def fail(*_):
                raise NVMLError("Not Supported")

            return fail
        return super().__getattribute__(name)

    def nvmlInit(self):
        pass

    def nvmlShutdown(self):
        pass

    def nvmlDeviceGetCount(self):
        return self.gpus

    def nvmlDeviceGetHandleByIndex(self, index):
        return ("gpu", index)

    def nvmlDeviceGetHandleByUUID(self, uuid):
        kind, number, *part = uuid.split("-")  # slices of a GPU: MIG-1-a, MIG-1-b
        if int(number) >= self.gpus:
            raise NVMLError("Not Found")
        return (kind.lower(), int(number), *part)

    def nvmlDeviceGetUUID(self, handle):
        return (b"GPU-%d-abcdef" if handle[1] else "GPU-%d-abcdef") % handle[1]

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle):
        return ("gpu", handle[1])

    def nvmlDeviceGetIndex(self, handle):
        return handle[1]

    def nvmlDeviceGetUtilizationRates(self, handle):
        if handle[0] == "mig":
            raise NVMLError("Not Supported")
        return SimpleNamespace(gpu=90 + handle[1], memory=10)

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(used=1000 * (1 + handle[1]), total=10_000)

    def nvmlDeviceGetPowerUsage(self, handle):
        return 500_000

    def nvmlDeviceGetClockInfo(self, handle, clock):
        assert clock == self.NVML_CLOCK_SM
        return 1980

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return [SimpleNamespace(pid=pid) for pid in self.pids.get(handle[1], ())]
