"""What each case does, drawn from (plant, seed): `draw(plant, seed)`, and the same with its hold-up taken away.

Magnitudes are drawn: samples a batch, picture size, the accelerator's seconds a step, how many times that the planted
hold-up makes a step take, and where a way has several, which. What a plant is called is known to bench_doctor.py alone.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass

CORES = 2  # that the magnitudes below are made for: cases run on two cores, or pinned to two
LOOPS_PER_S = 16e6  # turns of the plain loop in `case.turn`, on the machine of the first run
RUN_S = 4.5  # how long a case's steps should take in all


@dataclass(frozen=True)
class Setting:
    """Everything that a case may be told; seconds are a sample's unless they say otherwise."""

    steps: int = 0
    epochs: int = 2
    batch: int = 16
    step_s: float = 0.02  # that the accelerator computes for a batch
    late: int = 1  # steps between two times that the loop waits for the accelerator
    trains: int = 0  # width of a network trained on the CPU instead
    # the file
    height: int = 64
    width: int = 64
    kind: str = "pixels"  # pixels, pillow, simplejpeg, cv2, mapped, rows, chunks
    way: str = "file"  # file, nap, lane, socket, direct
    way_s: float = 0.0
    lanes: int = 1
    crowd: float = 0.0
    blocks: int = 0
    # what is done to it
    crop: int = 0
    loops: int = 0
    passes: int = 0
    resize: int = 0
    ops: int = 0
    products: int = 0
    # one of so many
    every: int = 0
    every_s: float = 0.0
    every_size: int = 0
    # batches
    gather: str = "stack"  # stack, spans, sorted, arrays, objects, own
    gather_size: int = 0
    # the loader
    workers: int = 2
    persistent: bool = True
    context: str = "fork"
    begin_loops: int = 0
    first_loops: int = 0
    threads: int = 0
    beside: float = 0.0
    guard: str = ""  # lock, flock, pool, writer
    guard_size: int = 0
    together: bool = False  # samples of a batch asked for at once
    second: bool = False
    fast: bool = False  # a FastLoader
    # the way to the device
    move: str = ""  # bus, cast
    move_s: float = 0.0  # a batch


def _sized(setting: Setting, expected_s: float) -> Setting:
    """With as many steps as take RUN_S, when a step takes so long."""
    steps = max(8, round(RUN_S / expected_s / setting.epochs))
    return dataclasses.replace(setting, steps=steps)


def _base(rng: random.Random) -> tuple[Setting, float]:
    """Any case's begin: batch, picture and accelerator; and how many times that the hold-up shall make a step take."""
    side = rng.choice([48, 64, 80, 96])
    step_s = rng.uniform(0.015, 0.035)
    setting = Setting(batch=rng.choice([8, 12, 16, 24]), height=side, width=side, step_s=step_s)
    return setting, rng.uniform(1.5, 3.2)


Pair = tuple[Setting, Setting]
_PLANTS: dict[int, Callable[[random.Random], Pair]] = {}


def _plant(number: int) -> Callable[[Callable[[random.Random], Pair]], Callable[[random.Random], Pair]]:
    def keep(made: Callable[[random.Random], Pair]) -> Callable[[random.Random], Pair]:
        _PLANTS[number] = made
        return made

    return keep


def draw(plant: int, seed: int) -> Pair:
    """The case, and the case without its hold-up."""
    return _PLANTS[plant](random.Random(plant * 1000 + seed))


def plants() -> list[int]:
    """All numbers."""
    return sorted(_PLANTS)


def _held(base: Setting, gain: float, **changes: object) -> Pair:
    """A hold-up and the same without: `changes` are the fields that the cure gives their default again."""
    with_it = _sized(dataclasses.replace(base, **changes), gain * base.step_s)  # type: ignore[arg-type]
    kept = {field.name: getattr(Setting, field.name) for field in dataclasses.fields(Setting) if field.name in changes}
    return with_it, dataclasses.replace(with_it, **kept)


@_plant(11)
def _(rng: random.Random) -> Pair:
    base, gain = _base(rng)
    workers = rng.choice([2, 3, 4])
    base = dataclasses.replace(base, workers=workers)
    return _held(base, gain, way="nap", way_s=gain * base.step_s * workers / base.batch)


@_plant(24)
def _(rng: random.Random) -> Pair:
    base, gain = _base(rng)
    base = dataclasses.replace(base, workers=rng.choice([2, 3, 4]))
    return _held(base, gain, way="lane", way_s=gain * base.step_s / base.batch)


@_plant(37)
def _(rng: random.Random) -> Pair:
    base, gain = _base(rng)
    base = dataclasses.replace(base, workers=rng.choice([2, 3, 4]))
    lanes = rng.choice([1, 2])
    return _held(base, gain, way="socket", lanes=lanes, way_s=gain * base.step_s * lanes / base.batch)


@_plant(18)
def _(rng: random.Random) -> Pair:
    base, gain = _base(rng)
    base = dataclasses.replace(base, step_s=rng.uniform(0.008, 0.015), batch=8)
    # Blocks of 1 MiB, about 1.1 ms each from this machine's disk when it has nothing else to do.
    return _held(base, gain, way="direct", blocks=max(3, round(gain * base.step_s * 2 / 8 / 0.0011)))


def _decoded(rng: random.Random, kind: str, pixels_per_s: float) -> Pair:
    """Big JPEGs, of which a part is cropped; without: the decoded pixels, mapped."""
    base, gain = _base(rng)
    work_s = gain * base.step_s * CORES / base.batch
    height = max(200, round((work_s * pixels_per_s * 0.75) ** 0.5 / 8) * 8)
    base = dataclasses.replace(base, height=height, width=height * 4 // 3, crop=64)
    with_it, _ = _held(base, gain, kind=kind)
    return with_it, dataclasses.replace(with_it, kind="mapped")


@_plant(33)
def _(rng: random.Random) -> Pair:
    return _decoded(rng, "pillow", 95e6)


@_plant(15)
def _(rng: random.Random) -> Pair:
    return _decoded(rng, "simplejpeg", 160e6)


@_plant(29)
def _(rng: random.Random) -> Pair:
    return _decoded(rng, "cv2", 140e6)


@_plant(40)
def _(rng: random.Random) -> Pair:
    base, gain = _base(rng)
    return _held(base, gain, loops=round(gain * base.step_s * CORES / base.batch * LOOPS_PER_S))


@_plant(13)
def _(rng: random.Random) -> Pair:
    base, gain = _base(rng)
    # A pass over 96x96x3 float32 with three operations: some 15 us.
    base = dataclasses.replace(base, height=96, width=96)
    return _held(base, gain, passes=max(2, round(gain * base.step_s * CORES / base.batch / 15e-6)))


@_plant(26)
def _(rng: random.Random) -> Pair:
    base, gain = _base(rng)
    # Pillow's Lanczos to n x n: some 11 ns a pixel of the result.
    side = round((gain * base.step_s * CORES / base.batch / 11e-9) ** 0.5)
    return _held(base, gain, resize=side)


@_plant(22)
def _(rng: random.Random) -> Pair:
    base, gain = _base(rng)
    return _held(base, gain, gather="spans", gather_size=round(gain * base.step_s * CORES * LOOPS_PER_S))


@_plant(35)
def _(rng: random.Random) -> Pair:
    base, gain = _base(rng)
    # np.sort of float32: some 5 ns a value.
    return _held(base, gain, gather="sorted", gather_size=round(gain * base.step_s * CORES / 5e-9))


@_plant(31)
def _(rng: random.Random) -> Pair:
    base, gain = _base(rng)
    # Pickled, through the pipe, and unpickled by the loop: some 1.8 ms a MB.
    size = round(gain * base.step_s / 1.8e-3 * 1e6 / 4)
    with_it, _ = _held(base, gain, gather="arrays", gather_size=size)
    return with_it, dataclasses.replace(with_it, gather="tensors")


@_plant(16)
def _(rng: random.Random) -> Pair:
    base, gain = _base(rng)
    # A record of a name, a box and an area: some 1.6 us to pickle and unpickle.
    size = round(gain * base.step_s / 1.6e-6)
    with_it, _ = _held(base, gain, gather="objects", gather_size=size)
    return with_it, dataclasses.replace(with_it, gather="columns")


@_plant(28)
def _(rng: random.Random) -> Pair:
    base, gain = _base(rng)
    base = dataclasses.replace(base, gather="own", move="bus")
    return _held(base, gain, move_s=(gain - 1) * base.step_s)


@_plant(39)
def _(rng: random.Random) -> Pair:
    base, gain = _base(rng)
    # uint8 to float32 in new memory: some 1.5 ns a value.
    gain = rng.uniform(1.5, 2.5)
    side = round(((gain - 1) * base.step_s / base.batch / 3 / 1.5e-9) ** 0.5)
    return _held(dataclasses.replace(base, height=side, width=side), gain, move="cast")


def _mixed(rng: random.Random, base: Setting, work_s: float, waits: float = 0.0) -> Setting:
    """Work of so many seconds a sample: a part of it waits for a file, and the rest is shared out.

    A third each in Pillow's decoder, in a loop and in NumPy.
    """
    third = work_s * (1 - waits) / 3
    if waits:
        base = dataclasses.replace(base, way="nap", way_s=work_s * waits)
    side = max(64, round((third * 95e6) ** 0.5))
    base = dataclasses.replace(base, height=side, width=side, crop=64, kind="pillow")
    return dataclasses.replace(base, loops=round(third * LOOPS_PER_S), passes=max(1, round(third / 8e-6)))


@_plant(21)
def _(rng: random.Random) -> Pair:
    base, _ = _base(rng)
    gain = rng.uniform(1.5, 1.9)
    base = _mixed(rng, base, gain * base.step_s / base.batch, waits=0.4)
    with_it = _sized(dataclasses.replace(base, workers=1), gain * base.step_s)
    return with_it, dataclasses.replace(with_it, workers=CORES)


@_plant(34)
def _(rng: random.Random) -> Pair:
    base, _ = _base(rng)
    work = rng.uniform(0.7, 1.7)
    base = _mixed(rng, base, work * base.step_s / base.batch, waits=0.4)
    with_it = _sized(dataclasses.replace(base, workers=0, persistent=False), (1 + work) * base.step_s)
    return with_it, dataclasses.replace(with_it, workers=CORES, persistent=True)


def _crowded(base: Setting, workers: int, expected_s: float) -> Pair:
    """So many workers; without: as many as cores. Epochs are long beside what the workers fetch ahead."""
    with_it = _sized(dataclasses.replace(base, workers=workers), expected_s)
    with_it = dataclasses.replace(with_it, steps=max(with_it.steps, 5 * workers), epochs=1)
    return with_it, dataclasses.replace(with_it, workers=CORES)


@_plant(19)
def _(rng: random.Random) -> Pair:
    base, _ = _base(rng)
    base = dataclasses.replace(base, ops=rng.choice([2, 3]), threads=CORES, batch=8, height=96, width=96)
    return _crowded(base, rng.choice([6, 7, 8]), 0.2)


@_plant(36)
def _(rng: random.Random) -> Pair:
    base, _ = _base(rng)
    base = dataclasses.replace(base, height=96, width=96, products=rng.choice([2, 3]), batch=8)
    return _crowded(base, rng.choice([6, 8, 10]), 0.2)


@_plant(50)
def _(rng: random.Random) -> Pair:
    base, _ = _base(rng)
    # A thread beside each worker's own takes so much of a core, all the time: of two cores, eight leave 0.4 to 0.7.
    base = dataclasses.replace(base, beside=rng.uniform(0.16, 0.2), height=96, width=96)
    base = dataclasses.replace(base, passes=max(2, round(rng.uniform(0.8, 1.1) * base.step_s / base.batch / 15e-6)))
    return _crowded(base, rng.choice([8, 9, 10]), 3 * base.step_s)


@_plant(49)
def _(rng: random.Random) -> Pair:
    base, gain = _base(rng)
    workers, crowd = rng.choice([6, 8, 10]), rng.uniform(0.2, 0.4)
    way_s = gain * base.step_s / base.batch / (1 + crowd * (workers - 1))
    base = dataclasses.replace(base, way="lane", way_s=way_s, crowd=crowd)
    return _crowded(base, workers, gain * base.step_s)


def _restarted(rng: random.Random, **changes: object) -> Pair:
    base, _ = _base(rng)
    steps = rng.randint(10, 18)
    with_it = dataclasses.replace(base, persistent=False, steps=steps, **changes)  # type: ignore[arg-type]
    return with_it, dataclasses.replace(with_it, persistent=True)


@_plant(12)
def _(rng: random.Random) -> Pair:
    return _restarted(rng, epochs=rng.randint(7, 10), begin_loops=round(rng.uniform(0.3, 0.7) * LOOPS_PER_S))


@_plant(27)
def _(rng: random.Random) -> Pair:
    return _restarted(rng, epochs=4, context=rng.choice(["spawn", "forkserver"]))


@_plant(38)
def _(rng: random.Random) -> Pair:
    return _restarted(rng, epochs=rng.randint(7, 10), first_loops=round(rng.uniform(0.3, 0.7) * LOOPS_PER_S))


@_plant(14)
def _(rng: random.Random) -> Pair:
    base, gain = _base(rng)
    base = dataclasses.replace(base, batch=rng.choice([6, 8, 10]))
    every = rng.randint(40, 60)
    every_s = ((gain - 1) * every / base.batch + 2.5) * base.step_s
    return _held(base, gain, every=every, every_s=every_s)


@_plant(51)
def _(rng: random.Random) -> Pair:
    with_it, without = _PLANTS[14](rng)
    return dataclasses.replace(with_it, together=True), dataclasses.replace(without, together=True)


@_plant(30)
def _(rng: random.Random) -> Pair:
    base, gain = _base(rng)
    base = dataclasses.replace(base, batch=rng.choice([6, 8, 10]), kind="pillow", crop=48)
    every = rng.randint(40, 60)
    every_s = ((gain - 1) * every / base.batch + 2.5) * base.step_s
    return _held(base, gain, every=every, every_size=round((every_s * 95e6 * 0.75) ** 0.5))


def _guarded(rng: random.Random, guard: str) -> Pair:
    """Rows of an HDF5 file, about half a row's time in the file and half in its filter."""
    base, _ = _base(rng)
    gain = rng.uniform(1.8, 3.0)
    work_s = gain * base.step_s / base.batch
    # Inflating some 170 MB/s.
    side = max(40, round((0.35 * work_s * 170e6 / 3) ** 0.5))
    base = dataclasses.replace(base, height=side, width=side, kind="rows", way="nap", way_s=0.6 * work_s, workers=4)
    return _held(base, gain, guard=guard)


@_plant(23)
def _(rng: random.Random) -> Pair:
    return _guarded(rng, "lock")


@_plant(32)
def _(rng: random.Random) -> Pair:
    return _guarded(rng, "flock")


@_plant(17)
def _(rng: random.Random) -> Pair:
    with_it, _ = _guarded(rng, "pool")
    # Two processes with some threads each, which wait for one another in h5py; without: the same chunks, read by pread.
    with_it = dataclasses.replace(with_it, workers=2, way_s=2 * with_it.way_s, guard_size=rng.choice([4, 6, 8]))
    with_it = dataclasses.replace(with_it, together=True)
    return with_it, dataclasses.replace(with_it, kind="chunks")


@_plant(25)
def _(rng: random.Random) -> Pair:
    base, _ = _base(rng)
    base = dataclasses.replace(base, kind="rows", workers=0, persistent=False, batch=8)
    # What the writer compresses at a time, in MB: some 25 ms each.
    with_it, without = _held(base, 4.0, guard="writer", guard_size=rng.choice([1, 2]))
    return with_it, without


@_plant(20)
def _(rng: random.Random) -> Pair:
    base, _ = _base(rng)
    base = dataclasses.replace(base, step_s=3 * base.step_s)
    base = _mixed(rng, base, rng.uniform(0.05, 0.2) * base.step_s / base.batch)
    with_it = _sized(base, base.step_s)
    return with_it, dataclasses.replace(with_it, kind="mapped", loops=0, passes=0)


@_plant(41)
def _(rng: random.Random) -> Pair:
    base, _ = _base(rng)
    base = dataclasses.replace(base, trains=rng.choice([12, 16, 24]), step_s=0.0)
    with_it = _sized(base, 0.12)
    return with_it, with_it


@_plant(42)
def _(rng: random.Random) -> Pair:
    base, _ = _base(rng)
    base = dataclasses.replace(base, step_s=3 * base.step_s)
    base = dataclasses.replace(base, late=rng.randint(3, 5))
    base = _mixed(rng, base, rng.uniform(0.05, 0.2) * base.step_s / base.batch)
    with_it = _sized(base, base.step_s)
    return with_it, dataclasses.replace(with_it, kind="mapped", loops=0, passes=0)


@_plant(43)
def _(rng: random.Random) -> Pair:
    base, _ = _base(rng)
    base = dataclasses.replace(base, workers=3, step_s=3 * base.step_s)
    part = rng.uniform(1.02, 1.05)
    return _held(base, part, way="lane", way_s=part * base.step_s / base.batch)


@_plant(44)
def _(rng: random.Random) -> Pair:
    base, _ = _base(rng)
    base = dataclasses.replace(base, step_s=3 * base.step_s)
    base = _mixed(rng, base, rng.uniform(0.4, 0.7) * base.step_s / base.batch, waits=0.85)
    with_it = _sized(dataclasses.replace(base, workers=1), base.step_s)
    return with_it, dataclasses.replace(with_it, kind="mapped", loops=0, passes=0, way="file", way_s=0.0)


@_plant(45)
def _(rng: random.Random) -> Pair:
    base, _ = _base(rng)
    base = dataclasses.replace(base, workers=0, persistent=False, step_s=3 * base.step_s, batch=8)
    return _held(base, 1.05, loops=round(rng.uniform(0.01, 0.03) * base.step_s / base.batch * LOOPS_PER_S))


@_plant(46)
def _(rng: random.Random) -> Pair:
    base, _ = _base(rng)
    with_it = _sized(dataclasses.replace(base, fast=True, workers=2), base.step_s)
    return with_it, with_it


@_plant(47)
def _(rng: random.Random) -> Pair:
    base, gain = _base(rng)
    base = dataclasses.replace(base, fast=True)
    return _held(base, gain, loops=round(gain * base.step_s * CORES / base.batch * LOOPS_PER_S))


@_plant(48)
def _(rng: random.Random) -> Pair:
    base, gain = _base(rng)
    base = dataclasses.replace(base, second=True)
    return _held(base, gain, loops=round(gain * base.step_s * CORES / base.batch * LOOPS_PER_S))
