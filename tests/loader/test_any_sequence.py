"""Whatever is done to a loader, and in whatever order, each pass is that of a loader that was made for it alone."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from late_backend import Device
from PIL import Image
from torch.utils.data import Dataset

import fastload
from fastload.dataset import PackedDataset
from fastload.loader.loader import FastLoader
from fastload.plan import MixedEcho
from fastload.transforms import RandomHorizontalFlip, RandomResizedCrop

N = 46
PACKED = {"rows": N, "size": (20, 16, 3), "seed": 1, "classes": "abc", "chunk_rows": 8}


def as_it_is(sample):
    return sample


class Cursed(Dataset):
    """One sample cannot be had; the others draw at random."""

    def __len__(self):
        return N

    def __getitem__(self, index):
        if index == 13:
            raise LookupError("sample 13 is cursed")
        return torch.full((3, 4, 4), index, dtype=torch.uint8), index + 0.5 * np.random.random(), str(index)  # noqa: NPY002


class Sometimes(Dataset):
    """Some samples do not fit the slots."""

    def __len__(self):
        return N

    def __getitem__(self, index):
        return {"image": torch.full((3, 4, 4), index, dtype=torch.uint8), "x": torch.rand(2 if index % 9 else 1)[:1]}


class Copying(Device):
    """A device that reads slots of shared memory by copies alone: they are over before it is unpinned."""

    def pin(self, memory):
        undo = super().pin(memory)

        def checked():
            assert self.run == self.begun, "a copy may still read this memory"
            self.computing = False
            undo()

        return checked


CHANGING = [RandomResizedCrop(8), RandomHorizontalFlip()]
KINDS = {
    "threads": {},
    "groups": {"batch_size": 2},  # several batches are filled at a time
    "transformed": {"transform": CHANGING},
    "jpeg": {"source": "jpeg", "transform": CHANGING},
    "echo": {"echo": 3, "transform": CHANGING},
    "mixed echo": {"echo": MixedEcho(2, 2), "transform": CHANGING},
    "exact": {"ends": "exact", "shuffle": "full"},
    "device": {"device": True, "echo": 2},
    "cached": {"device": True, "cache": "device", "transform": CHANGING},
    "cached on the host": {"device": True, "cache": "host"},
    "processes": {"source": "python", "ends": "exact"},
    "processes, mixed echo": {"source": "python", "transform": CHANGING, "echo": MixedEcho(2, 2), "device": True},
    "cursed": {"source": Cursed()},
    "sometimes": {"source": Sometimes()},
}
FEW = st.integers(1, 4)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("pass"), st.just(99)),
        st.tuples(st.just("pass"), FEW),
        # The same end again and again, which the loader comes to expect.
        st.tuples(st.just("passes"), FEW),
        st.tuples(st.just("begin"), st.integers(0, 3)),
        st.tuples(st.just("more"), FEW),
        st.tuples(st.just("set_epoch"), st.integers(0, 4)),
        st.tuples(st.just("save"), st.just(0)),
        st.tuples(st.just("load"), st.just(0)),
        st.tuples(st.just("length"), st.just(0)),
        st.tuples(st.just("close"), st.just(0)),
        st.tuples(st.just("other"), FEW),
        st.tuples(st.just("kill"), st.just(0)),
        st.tuples(st.just("reshape"), st.integers(0, 2)),
    ),
    min_size=2,
    max_size=9,
)  # fmt: skip
# World size, rank and batch size.
SHAPES = [(1, 0, 7), (2, 1, 7), (1, 0, 5)]


@pytest.fixture(scope="module")
def jpeg(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    drawn = np.random.default_rng(3)
    for name in range(N):
        pixels = drawn.integers(0, 255, (3, 4, 3), np.uint8)
        Image.fromarray(pixels).resize((24 + name % 3, 20)).save(folder / f"{name:02d}.jpg")
    path = tmp_path_factory.mktemp("stored") / "stored.h5"
    fastload.pack_images(folder, path, store="source", workers=0)
    return path


class Kept:
    """A loader that is kept: what is tested."""

    counts_bytes = True

    def __init__(self, make):
        self.make, self.iterator = make, None
        self.loader = make(SHAPES[0])

    def begin(self):
        self.iterator = iter(self.loader)

    def standing(self):
        return self.loader

    def epoch(self):
        return self.loader.epoch

    def load(self, state):
        self.loader.load_state_dict(state)

    def close(self):
        self.loader.close()

    def reshape(self, shape):
        state = self.loader.state_dict()
        self.loader.close()
        self.loader, self.iterator = self.make(shape), None
        self.loader.load_state_dict(state)


class Fresh(Kept):
    """The same of a new loader for each pass, which is told where to begin: the model."""

    def __init__(self, make):
        self.shape, self.coming, self.all = SHAPES[0], None, []
        super().__init__(self._made)
        self.make_one = make
        self.coming = self.loader = self._made(self.shape)

    def _made(self, shape):
        if not hasattr(self, "make_one"):
            return None
        self.all.append(self.make_one(shape))
        return self.all[-1]

    def next(self):
        """The loader of the next pass."""
        if self.coming is not None:
            return self.coming
        following = self._made(self.shape)
        following.set_epoch(self.loader.epoch + 1)
        return following

    def begin(self):
        self.loader, self.coming = self.next(), None
        self.iterator = iter(self.loader)

    def standing(self):
        return self.loader if self.coming is None or self.iterator is not None else self.coming

    def epoch(self):
        return (self.loader if self.coming is None else self.coming).epoch

    def load(self, state):
        self.coming = self.next()
        self.coming.load_state_dict(state)
        self.iterator = None

    def close(self):
        self.iterator = None

    def reshape(self, shape):
        state = self.standing().state_dict()
        self.shape = shape
        self.coming, self.iterator = self._made(shape), None
        self.coming.load_state_dict(state)

    def end(self):
        for loader in self.all:
            loader.close()


def content(batch):
    named = batch if isinstance(batch, dict) else dict(enumerate(batch))
    fields = {name: field.tolist() if isinstance(field, torch.Tensor) else field for name, field in named.items()}
    return [fields, batch.rows.tolist(), batch.valid.tolist(), batch.global_valid]


def taken(side, count):
    """What comes of asking so many times: batches with the state and the stats after each, and how it ended.

    Bytes are counted where they are read from the file for each batch: by threads, without a cache.
    """
    found = []
    for _ in range(count):
        if side.iterator is None:
            return [*found, "no pass"]
        try:
            batch = next(side.iterator)
        except StopIteration:
            found.append("the end")
            side.iterator = None
        except Exception as error:  # noqa: BLE001  # the same must come of both
            found.append((type(error), str(error).splitlines()[0]))
            side.iterator = None
        else:
            stats = side.loader.stats
            counted = (stats.fresh_samples, stats.consumed_samples, stats.steps, stats.echo)
            counted += (stats.bytes_read,) if side.counts_bytes else ()
            found.append([content(batch), side.epoch(), side.standing().state_dict(), counted])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_any_sequence_of_calls_gives_what_new_loaders_would_give(packed, jpeg, kind):
    options = {"seed": 4, "workers": 2} | KINDS[kind]
    source = options.pop("source", "packed")
    with_processes = source not in ("packed", "jpeg")

    def make(shape, source=source, workers=2):
        world_size, rank, batch_size = shape
        given = {"batch_size": batch_size, "share": (rank, world_size)} | options | {"workers": workers}
        if given.get("device"):
            given["device"] = Copying() if with_processes else Device()
        data = {"packed": packed, "jpeg": jpeg, "python": PackedDataset(packed, transform=as_it_is)}
        return FastLoader(data[source] if isinstance(source, str) else source, **given)

    def kill():
        """Kills a worker process of the kept loader, between two passes."""
        pool = kept.loader._producer.pool
        if with_processes and pool is not None and pool._workers is not None and kept.iterator is None:
            with suppress(ProcessLookupError):
                os.kill(pool._workers.pids[0], signal.SIGKILL)
            pool._workers._workers[0].join()

    # Threads read the same batches of a packed file, and start faster.
    model = "packed" if source == "python" else source
    other = FastLoader(packed, 5, workers=1, shuffle=False)

    # Processes start for each example, and their transforms are Python.
    part = {"packed": 2, "jpeg": 2, "python": 5}.get(source if isinstance(source, str) else "", 8)

    @settings(
        max_examples=settings.default.max_examples // part + 1,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(actions=ACTIONS)
    def holds(actions):
        nonlocal kept
        kept, fresh = Kept(make), Fresh(lambda shape: make(shape, model, 1))
        sides, saved = (kept, fresh), []
        for side in sides:
            side.counts_bytes = not with_processes and "cache" not in options
        try:
            for name, number in actions:
                if name in ("pass", "passes", "begin"):
                    for _ in range(3 if name == "passes" else 1):
                        for side in sides:
                            side.begin()
                        assert taken(kept, number) == taken(fresh, number)
                        if name != "begin":
                            for side in sides:
                                side.iterator = None
                elif name == "more":
                    assert taken(kept, number) == taken(fresh, number)
                elif name == "set_epoch":
                    kept.loader.set_epoch(number)
                    fresh.coming = fresh.next()
                    fresh.coming.set_epoch(number)
                elif name == "save":
                    saved.append(kept.loader.state_dict())
                    assert saved[-1] == fresh.standing().state_dict()
                elif name == "load" and saved:
                    for side in sides:
                        side.load(saved[-1])
                    kept.iterator = None
                elif name == "length":
                    running = fresh.iterator is not None and fresh.coming is None
                    assert len(kept.loader) == len(fresh.loader if running else fresh.next())
                elif name == "close":
                    for side in sides:
                        side.close()
                    kept.iterator = None
                elif name == "other":
                    for count, _ in enumerate(other):
                        if count == number:
                            break
                elif name == "kill":
                    kill()
                elif name == "reshape":
                    for side in sides:
                        side.reshape(SHAPES[number])
                assert kept.loader.epoch == fresh.epoch()
        finally:
            kept.loader.close()
            fresh.end()

    kept = None
    holds()
    other.close()
