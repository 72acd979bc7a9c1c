"""Section of `gpu.py`: the questions of `bench_parallel.py` that one GPU can answer.

Steps and memory of each strategy, DDP on one rank over the plain model, precisions and memory orders.
"""

from __future__ import annotations

import json
from typing import Any

import bench_parallel
from gpu_bench import Bench


def parallel(bench: Bench) -> None:
    """Each record of `bench_parallel.py` as a figure; its median is the value."""
    kind = bench.device.torch.type
    out = bench.data / "bench_parallel.jsonl"  # not the name of the section, whose own figures lie beside it
    out.unlink(missing_ok=True)
    asked = ["step", "precision"] if bench.sizes.tiny else ["step", "precision", "scaling", "memory"]
    words = ["--data", str(bench.data), "--out", str(out), "--devices", kind, "--ranks", "1", "--only", *asked]
    try:
        bench_parallel.main([*words, "--quick"] if bench.sizes.tiny else words)
    finally:  # what was measured before a failure counts
        for line in out.read_text().splitlines() if out.exists() else ():
            record = json.loads(line)
            for name in ("machine", "versions", "commit", "time", "file", "target"):
                record.pop(name)
            bench.note(f"parallel-{record.pop('figure')}", **_value(record), **record)


def _value(record: dict[str, Any]) -> dict[str, Any]:
    """What the last table shows of a record."""
    if "peak_bytes" in record:
        return {"value": max(record["peak_bytes"]), "unit": "bytes"}
    if "images_per_s" in record:
        return {"value": record["images_per_s"]["median"], "unit": "images/s"}
    return {"value": record["ratio"]["median"], "unit": "of the base's step time"}
