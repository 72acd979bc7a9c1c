"""Measurements made up for tests of the report: usual, long, empty, and out to break the page."""

from __future__ import annotations

import math

import numpy as np

from fastload.timing.results import Lane, LoopStep, Measured, Remedy, Table, Verdict, WorkTime

IMG = "<img src=x onerror=document.title='broken'>.h5"
SCRIPT = "</script><script>document.title='broken'</script>"


def usual(
    num_steps: int = 60, *, gpus: int = 1, spike_at: int | None = None, title: str = "bench photos.h5"
) -> Measured:
    """A run of so many steps of 20 ms, a third of it waiting; one step of 3 s where asked for."""
    rng = np.random.default_rng(0)
    steps, at_s = [], 0.0
    for number in range(num_steps):
        wait = 2.99 if number == spike_at else 0.006 + 0.002 * rng.random()
        step = LoopStep(at_s, wait, 0.001, 0.001, 0.012, 32)
        steps.append(step)
        at_s += step.duration_s
    same = {"cpu_percent.71": 80.0, "disk_read_bytes_per_s": 2e8, "disk_busy_percent": 60.0}
    for gpu in range(gpus):
        same |= {f"gpu{gpu}.utilization_percent": 70.0 - gpu, f"gpu{gpu}.memory_bytes": 3e9}
    readings = [{"at_s": at_s * k / 20, "cpu_percent": 150.0 + k, **same} for k in range(20)]
    mean_s = at_s / num_steps
    verdict = Verdict(
        "decoding",
        "decoding binds: the loop waits 35 % of its time",
        ("a batch takes 40 ms to decode with `Image.open`", "2 workers were on a CPU 97 % of the time"),
        mean_s,
        0.35,
        (
            Remedy("decoding", "pack the images with `fastload pack`", mean_s / 1.5, 1.5),
            Remedy("too few workers", "use `num_workers=4`", mean_s / 1.2, 1.2),
        ),
        True,
        True,
    )
    return Measured(
        title,
        "fastload bench photos.h5 --step tiny",
        tuple(steps),
        num_steps,
        at_s,
        32 * num_steps / at_s,
        {"reading": WorkTime(0.001, 0.004), "decoding": WorkTime(0.04, 0.0)},
        2300.0,
        "measured on one cached batch",
        tuple(readings),
        verdict,
        (("first batch", "80 ms"),),
        (Table("Slowest steps", ("step", "took"), (("7", "21 ms"),)),),
        {"machine": "x86-64, 2 cores", "torch": "2.13.0"},
        lanes=(Lane("train, judged", at_s, ((1.0, 1.0 + at_s),)), Lane("validate", 0.2, ((1.2 + at_s, 1.4 + at_s),))),
        run_s=at_s + 2.0,
    )


def hostile() -> Measured:
    """Markup, TeX and letters that the plots' font lacks wherever a string may stand; readings that are no numbers."""
    nothing = math.nan
    return Measured(
        IMG,
        SCRIPT,
        (LoopStep(0.0, 0.1, 0.0, 0.0, 0.2, 4), LoopStep(0.3, 0.1, nothing, 0.0, 0.2, 4)),
        2,
        0.6,
        13.3,
        {IMG: WorkTime(0.1, 0.1), "$x_$ 解码 " + SCRIPT: WorkTime(0.1, 0.0)},
        20.0,
        SCRIPT,
        ({"at_s": 0.1, "gpu0.utilization_percent": nothing, IMG: 3.0, "gpu0.power_w": math.inf, "cpu_percent": 30.0},),
        Verdict(
            SCRIPT,
            IMG,
            (IMG, SCRIPT, f"`{IMG}`"),
            0.3,
            0.33,
            (Remedy(IMG, IMG, 0.2, 1.5), Remedy(SCRIPT, SCRIPT, 0.2, 1.1)),
        ),
        ((IMG, SCRIPT),),
        (Table(IMG, (IMG, SCRIPT), ((IMG, SCRIPT),)),),
        {IMG: SCRIPT, "file": "photo\udcff.h5"},
        lanes=(Lane(IMG, 0.6, ((0.1, 0.7),)), Lane(SCRIPT, 0.2, ((0.7, 0.8), (0.9, 1.0)))),
        run_s=1.0,
    )
