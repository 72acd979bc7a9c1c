"""The sections of `gpu.py`, each run by a process of its own: `python gpu_sections.py SECTION OPTIONS_AS_JSON`.

A section is a function of a `Bench` and writes figures; what goes wrong in one figure is written down in its place, and
the next one is measured. `gpu.py` sees to the rest: data, limits of time, the record.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from gpu_bench import Bench, Sizes


def machine(bench: Bench) -> None:
    """Where it runs: for every record."""
    from importlib.metadata import PackageNotFoundError, version

    import harness

    found = harness.versions()
    for package in ("torchvision", "triton", "nvidia-ml-py", "opencv-python-headless", "matplotlib", "xxhash"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    where = {"machine": harness.machine(), "versions": found, "commit": harness.commit()}
    bench.note("where", value=bench.device.facts()["name"], device=bench.device.facts(), **where)


def data(bench: Bench) -> None:
    """The faces and photos, as JPEG files and packed."""
    import gpu_data

    sizes = bench.sizes
    facts = gpu_data.build(
        bench.data, pictures=sizes.pictures, side=sizes.photo, photo_rows=sizes.photo_rows, face_rows=sizes.face_rows
    )
    bench.note("data", value=facts["faces"]["rows"], unit="faces", **facts)


def plots(bench: Bench) -> None:
    """The pictures of what was measured; `bench.data` is the record here."""
    try:
        import plot_gpu
    except ImportError as exc:
        bench.note("plots", skipped=f"matplotlib cannot be imported here ({exc}): draw gpu.jsonl elsewhere")
        return

    for path in plot_gpu.draw(bench.data):
        bench.note(path.name, value=path.stat().st_size, unit="bytes")


def _in(module: str, name: str, **options: Any) -> Callable[[Bench], None]:
    """A function of a module that is imported when it runs: one that cannot be imported fails alone."""

    def run(bench: Bench) -> None:
        from importlib import import_module

        partial(getattr(import_module(module), name), **options)(bench)

    return run


RESNET50, RESNET18 = {"net": "resnet50"}, {"net": "resnet18"}
SECTIONS: dict[str, Callable[[Bench], None]] = {
    "machine": machine,
    "data": data,
    "plots": plots,
    "sanity": _in("gpu_sanity", "sanity"),
    "copy": _in("gpu_kernel", "copy_rates"),
    "kernel": _in("gpu_kernel", "fused_kernel"),
    "host-to-device": _in("gpu_feed", "host_to_device"),
    "host-cache": _in("gpu_feed", "host_cache"),
    "device-cache": _in("gpu_feed", "device_cache"),
    "stored": _in("gpu_stored", "stored"),
    "workers": _in("gpu_stored", "workers"),
    "cpu-seconds": _in("gpu_feed", "cpu_seconds"),
    "train-resnet50": _in("gpu_train", "train", **RESNET50),
    "train-resnet18": _in("gpu_train", "train", **RESNET18),
    "step-rate": _in("gpu_steps", "step_rate"),
    "plain-resnet50": _in("gpu_train", "train_plain", **RESNET50),
    "plain-resnet18": _in("gpu_train", "train_plain", **RESNET18),
    "train-compiled": _in("gpu_train", "train", **RESNET18, compiled=True),
    "parallel": _in("gpu_parallel", "parallel"),
}


def main() -> None:
    """Run one section as the options say."""
    name, options = sys.argv[1], json.loads(sys.argv[2])
    if name == options.get("hang"):
        time.sleep(3600)
    if name == options.get("fail"):
        raise RuntimeError("this section was told to fail")
    warnings.simplefilter("ignore", DeprecationWarning)  # of fork beside threads, on Python 3.12
    device = None
    if name not in ("data", "plots"):
        from gpu_device import open_device

        device = open_device(options["device"])
    bench = Bench(device, Sizes.of(tiny=options["tiny"]), Path(options["data"]), Path(options["figures"]))
    code = 0
    try:
        SECTIONS[name](bench)
    except Exception:  # noqa: BLE001  # told to gpu.py, which goes on
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)  # everything is written: no worker process, thread or driver shall hold up the end


if __name__ == "__main__":
    main()
