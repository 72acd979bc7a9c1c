"""Loaders of JPEGs that the device decodes, cut by the kernel in Triton's interpreter: run by test_device_decode.py,
in a process of its own with TRITON_INTERPRET=1. Prints the name of each list, and fails at the first difference."""

from __future__ import annotations

import tempfile
from pathlib import Path

from ragged_cases import varied_file
from test_device_decode import LISTS, Device, batches

from fastload.transforms.engine import gpu
from fastload.transforms.engine.pipeline import FusedPass


def main() -> None:
    launched = []
    fused = gpu.fused

    def counted(source, *args, **options):
        launched.append(source.ndim)
        return fused(source, *args, **options)

    with tempfile.TemporaryDirectory() as folder:
        path = varied_file(Path(folder) / "varied.h5")
        for name in ("training", "evaluation", "colour"):
            expected = batches(path, LISTS[name], "cpu", epochs=1)
            by_kernel, FusedPass.runs_by_kernel = FusedPass.runs_by_kernel, lambda self, device: True
            gpu.fused = counted
            found = batches(path, LISTS[name], epochs=1, device=Device(), workers=2)
            FusedPass.runs_by_kernel, gpu.fused = by_kernel, fused
            assert launched and set(launched) == {1}, f"{launched}: sources with one dimension"
            # A level of rounding, which colour lets grow; divided by the smallest standard deviation. The interpreter
            # truncates to bfloat16.
            levels = 4.5 if name == "colour" else 1
            for (images, *others), (images_there, *others_there) in zip(found, expected, strict=True):
                assert (images.float() - images_there.float()).abs().max() <= levels / 255 / 0.2 + 0.03, name
                assert all(one.equal(other) for one, other in zip(others, others_there, strict=True)), name
            print(name)


if __name__ == "__main__":
    main()
