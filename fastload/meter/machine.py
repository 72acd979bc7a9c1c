"""Where something was measured, in words: machine and versions, no names of people or hosts."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from fastload.cpus import available_cpus

_PACKAGES = ("fastload", "torch", "numpy", "h5py", "pillow", "simplejpeg")


def environment() -> dict[str, str]:
    """Name and text of what the figures depend on; the GPU's only where CUDA is in use already."""
    found = {
        "CPU": _cpu_name(),
        "CPUs for this process": str(available_cpus()),
        "memory": f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "load (1 min)": f"{os.getloadavg()[0]:.2f}",
        "Python": platform.python_version(),
    }
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        found["GPU"] = f"{torch.cuda.get_device_name()}, one of {torch.cuda.device_count()}, CUDA {torch.version.cuda}"
    return found


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
