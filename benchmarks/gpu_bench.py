"""What a section of `gpu.py` is given: how much to measure, on what, and where to write figures down."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Sizes:
    """Sizes of one run.

    Attributes:
        pictures: drawn faces.
        photo: side of the square photos; `large` is that of the images for Resize.
        crop: side of what they are cut to; `small_crop` that of faces for ResNet-18.
        photo_rows: rows of the packed photos.
        face_rows: rows of the packed faces, as wished and as they may be.
        batches: batch sizes, the usual one first.
        workers: threads that read; None is the default. `decoders` decode JPEGs, `plain_workers` are processes.
        sanity_rows: rows of the file of the sanity section.
        face: height and width of a packed face.
        gather_threads: threads that copy rows to pinned memory.
        lane_bytes: bytes that the kernel copies over the bus; a multiple of 2,048.
        copy_bytes: of the plain copies.
        repeats: timed calls of one way.
        pairs: times that two ways are run in turn.
        segment_s: seconds of one way in a turn.
        watch_s: seconds that the counters are read while training.
        rates: images/s that the synthetic step is made for.
        tiny: nothing is measured, only run.
    """

    pictures: int = 4096
    photo: int = 256
    large: int = 512
    crop: int = 224
    small_crop: int = 128
    photo_rows: int = 16_384
    face_rows: tuple[int, int] = (202_599, 50_000)
    batches: tuple[int, ...] = (256, 1024)
    workers: tuple[int | None, ...] = (None, 2, 4, 16)
    decoders: tuple[int, ...] = (8, 16)
    sanity_rows: int = 2048
    face: tuple[int, int] = (218, 178)
    gather_threads: tuple[int, ...] = (1, 2, 4, 8, 16)
    lane_bytes: int = 1 << 28
    copy_bytes: int = 1 << 30
    repeats: int = 20
    pairs: int = 5
    segment_s: float = 2.0
    watch_s: float = 6.0
    plain_workers: int = 16
    rates: tuple[int, ...] = (
        10_000, 20_000, 30_000, 40_000, 60_000, 80_000, 120_000, 200_000, 400_000, 1_000_000,
    )  # fmt: skip
    tiny: bool = False

    @classmethod
    def of(cls, *, tiny: bool) -> Sizes:
        """Those the figures are asked for, or tiny ones."""
        if not tiny:
            return cls()
        return cls(
            pictures=64, photo=48, large=64, crop=32, small_crop=32, photo_rows=96, face_rows=(96, 64), batches=(8, 16),
            workers=(None, 1), decoders=(1, 2), sanity_rows=64, face=(50, 40), gather_threads=(1, 2),
            lane_bytes=1 << 14, copy_bytes=1 << 20, repeats=2, pairs=1, segment_s=0.05, watch_s=0.2, plain_workers=1,
            rates=(500, 20_000), tiny=True,
        )  # fmt: skip


@dataclass
class Bench:
    """What a section is given.

    Attributes:
        device: see `gpu_device.Device`; None in the sections that need none.
        sizes: how much is measured.
        data: folder of the data.
        figures: file that figures are appended to, one JSON line each.
    """

    device: Any
    sizes: Sizes
    data: Path
    figures: Path

    def note(self, figure: str, **values: Any) -> None:
        """Writes a figure down for good. `value`, `unit` and `target` are what the last table shows."""
        with open(self.figures, "a") as out:
            out.write(json.dumps({"figure": figure, **values}) + "\n")
            out.flush()
            os.fsync(out.fileno())
        told = values.get("error") or values.get("skipped") or f"{values.get('value')} {values.get('unit', '')}"
        print(f"  {figure}: {told}", flush=True)

    def figure(self, name: str, measure: Callable[[], dict[str, Any]], **about: Any) -> dict[str, Any]:
        """Measures, writes down and returns what was found; an error becomes the figure's own, and others follow."""
        import torch

        from gpu_pipelines import AbsentError, path_taken

        path_taken()  # what ran before is not this figure's
        try:
            values = measure()
        except AbsentError as exc:
            values = {"skipped": str(exc)}
        except Exception as exc:  # noqa: BLE001  # whatever it is, the other figures are still to be had
            values = {"error": f"{type(exc).__name__}: {exc}"[:1000], "trace": traceback.format_exc()[-2000:]}
        self.note(name, **about, **values)
        if "error" in values and self.device is not None and self.device.kind == "cuda":
            torch.cuda.empty_cache()
        return values
