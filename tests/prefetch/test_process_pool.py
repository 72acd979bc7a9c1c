"""FastLoader with worker processes: Python transforms of packed files, and datasets that are not ours."""

from __future__ import annotations

import collections
import functools
import gc
import itertools
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from child_processes import child_environment, in_a_fork
from late_backend import Device

import fastload.prefetch.loader_plan
import fastload.transforms.engine.pipeline
from fastload.dataset import PackedDataset
from fastload.errors import FileChangedError, OptionError, StateError, WorkerError
from fastload.format.ragged import Column
from fastload.loader.batch import Batch, DictBatch
from fastload.loader.loader import FastLoader
from fastload.prefetch import process_pool, torch_workers
from fastload.prefetch.process_pool import PREFETCH
from fastload.prefetch.ring import SLACK
from fastload.prefetch.sample_worker import Filler, requested_rows
from fastload.transforms import Normalize, RandomHorizontalFlip, RandomResizedCrop
from sample_files import write_packed, write_ragged

N, SHAPE = 60, (48, 40, 3)  # a batch of 16 images is more than 64 KiB, and so lies in a slot
PACKED = {
    "rows": N,
    "size": SHAPE,
    "seed": 5,
    "classes": "abcdefg",
    "columns": {"key": Column(np.array([f"cat/{i:03d}.jpg".encode() for i in range(N)]))},
    "chunk_rows": 8,
    "splits": {"train": 40, "val": 20},
}


@pytest.fixture
def start(monkeypatch):
    """Sets the start method for one test."""

    def choose(method):
        multiprocessing.set_start_method(method, force=True)

    before = multiprocessing.get_start_method(allow_none=True)
    yield choose
    multiprocessing.set_start_method(before, force=True)


def as_it_is(sample):
    return sample


def inverted(sample):
    return (255 - sample[0], *sample[1:])


def workers_of(pid=None):
    """Living worker processes of a process: torch gives them a name, and a forkserver stands between."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE and "fastload-worker" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def darkened_in_place(sample):
    sample[0][:, :10] = 0
    return sample


def turned(sample):
    """A view of the sample's own memory, of the same shape, in another order."""
    return (sample[0].flip(2) if sample[1] % 2 else sample[0][[2, 1, 0]], sample[1])


def rows_of(loader):
    return [batch.rows.tolist() for batch in loader]


def assert_pixels(batch, pixels, transform=as_it_is):
    rows = batch.rows
    images = torch.from_numpy(pixels[rows.numpy()]).permute(0, 3, 1, 2)
    made = [transform((image, row % 7))[0] for image, row in zip(images.clone(), rows, strict=True)]
    assert torch.equal(batch[0], torch.stack(made)) and torch.equal(batch[1], rows % 7)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_batches_are_the_plans_whatever_starts_the_workers(packed, pixels, start, method):
    start(method)
    # One worker where starting it imports torch anew.
    with_python = FastLoader(PackedDataset(packed, transform=inverted), 16, seed=3, workers=1 + (method == "fork"))
    threads = FastLoader(packed, 16, seed=3)
    for _ in range(2):
        batches = list(with_python)
        assert [batch.rows.tolist() for batch in batches] == rows_of(threads)
        for batch in batches:
            assert isinstance(batch, Batch) and batch[0].is_contiguous(memory_format=torch.channels_last)
            assert batch.valid.all() and batch.global_valid == 16
            assert_pixels(batch, pixels, inverted)
    assert with_python.stats.fresh_samples == 48
    with_python.close()


def noisy(sample):
    """Random numbers of all three kinds."""
    image, label = sample
    return image, label, torch.rand(3), random.random(), np.random.random(2)  # noqa: NPY002


def test_what_is_drawn_at_random_depends_on_no_worker(packed):
    def drawn(workers, epoch=0):
        loader = FastLoader(PackedDataset(packed, transform=noisy), 16, workers=workers)
        loader.set_epoch(epoch)
        result = [[*batch[2].flatten().tolist(), *batch[3].tolist(), *batch[4].flatten().tolist()] for batch in loader]
        loader.close()
        return result

    state = torch.get_rng_state(), random.getstate()
    once = drawn(1)
    assert once == drawn(2)
    numbers = [number for batch in once for number in batch]
    assert len(set(numbers)) == len(numbers)
    assert not set(numbers) & {number for batch in drawn(1, epoch=1) for number in batch}
    assert torch.equal(state[0], torch.get_rng_state()) and state[1] == random.getstate(), "ours were drawn from"


@pytest.mark.parametrize("transform", [as_it_is, inverted, darkened_in_place, turned])
def test_every_batch_is_what_the_transform_makes_and_may_be_kept(packed, pixels, transform):
    loader = FastLoader(PackedDataset(packed, transform=transform), 16, shuffle=False, workers=2)
    batches = [batch for _ in range(3) for batch in loader]
    assert len(batches) == 12
    for batch in batches:
        assert_pixels(batch, pixels, transform)
    loader.close()
    gc.collect()
    for batch in batches:
        assert_pixels(batch, pixels, transform)
        batch[0].zero_()
    assert_pixels(next(iter(FastLoader(packed, 16))), pixels)


class MixedWithTheOneBefore:
    """Keeps a reference to a sample, as it was given, beyond its turn."""

    def __init__(self, every):
        self.every = every
        self.calls = 0
        self.before = None
        self.as_it_was = None

    def __call__(self, sample):
        if self.before is not None and not torch.equal(self.before, self.as_it_was):
            raise ValueError("the memory of a sample that is still held was written to")
        self.calls += 1
        if self.calls % self.every == 0:
            self.before, self.as_it_was = sample[0], sample[0].clone()
        return (sample[0] // 2, *sample[1:]) if self.calls % 3 == 0 else sample


@pytest.mark.parametrize("every", [1, 7, 16, 100])
def test_a_transform_may_keep_what_it_is_given(packed, pixels, every):
    loader = FastLoader(
        PackedDataset(packed, transform=MixedWithTheOneBefore(every)), 16, shuffle=False, workers=1, ends="drop"
    )
    calls = 1  # the first sample is looked at beforehand
    for _ in range(6):
        for batch in loader:
            expected = torch.from_numpy(pixels[batch.rows.numpy()]).permute(0, 3, 1, 2).clone()
            for place in range(16):
                calls += 1
                if calls % 3 == 0:
                    expected[place] //= 2
            assert torch.equal(batch[0], expected)
            batch[0].zero_()
    assert calls == 1 + 6 * (N // 16) * 16
    loader.close()


Pair = collections.namedtuple("Pair", ["image", "label"])


def as_float(sample):
    return sample[0][:, 4:-4, 4:-4].float() / 255, int(sample[1]), float(sample[1]) / 2, bool(sample[1])


def as_dict(sample):
    return {"image": sample[0], "label": sample[1], 3: "x" * int(sample[1]), "more": {"row": sample[1]}}


def as_pair(sample):
    return Pair(*sample)


def image_only(sample):
    return sample[0]


def in_bfloat16(sample):
    return sample[0].to(torch.bfloat16), sample[1]


@pytest.mark.parametrize("transform", [as_float, as_dict, as_pair, image_only, in_bfloat16])
def test_a_batch_is_what_torch_would_collate(packed, transform):
    dataset = PackedDataset(packed, transform=transform)
    loader = FastLoader(dataset, 16, workers=1)
    batches = list(loader)
    assert len(batches) == N // 16
    for batch in batches:
        expected = torch.utils.data.default_collate(dataset.__getitems__(batch.rows.tolist()))
        if isinstance(expected, torch.Tensor):
            expected = (expected,)  # a batch has its facts beside it, and a tensor has no place for them
        if isinstance(expected, dict):
            assert isinstance(batch, DictBatch) and list(batch) == list(expected)
            assert batch.pop("more")["row"].tolist() == expected.pop("more")["row"].tolist()
            pairs = [(batch[key], expected[key]) for key in expected]
        else:
            assert isinstance(batch, Batch) and len(batch) == len(expected)
            pairs = list(zip(batch, expected, strict=True))
        for ours, theirs in pairs:
            if isinstance(theirs, torch.Tensor):
                assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
            else:
                assert list(ours) == list(theirs)
    loader.close()


def of_size(sample):
    size = 8 + 8 * (int(sample[1]) // 16)
    return sample[0][:, :size, :size], sample[1]


def test_batches_of_changing_shape_are_right_and_said_to_be_slow(packed, pixels):
    dataset = PackedDataset(packed, fields=["images", "row"], transform=of_size)
    loader = FastLoader(dataset, 16, shuffle=False, ends="drop", workers=1)
    with pytest.warns(UserWarning, match=r"uint8 \(3, 8, 8\).*now \(uint8 \(3, 16, 16\), int64 \(\)\).*0.4 times"):
        batches = list(loader)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batches += list(loader)
    sizes = [tuple(batch[0].shape) for batch in batches[:3]]
    assert sizes == [(16, 3, 8, 8), (16, 3, 16, 16), (16, 3, 24, 24)]
    for batch in batches:
        size = batch[0].shape[-1]
        assert size == 8 + 8 * (int(batch.rows[0]) // 16)
        images = torch.from_numpy(pixels[batch.rows.numpy()]).permute(0, 3, 1, 2)
        assert torch.equal(batch[0], images[:, :, :size, :size])
    loader.close()


def of_own_size(sample):
    size = 8 + int(sample[1]) % 3
    return sample[0][:, :size, :size], sample[1]


def at_21(how, sample):
    """Gives every sample as it is, but number 21."""
    if int(sample[1]) != 21:
        return sample
    if how == "raises":
        raise KeyError("a mistake of the user's")
    if how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exits":
        os._exit(3)
    if how == "leaves":
        sys.exit(3)
    return None if how == "is none" else (sample[0], None)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raises", r"(?s)file\.h5: sample 'cat/021\.jpg' \(row 21\).*raised KeyError: .a mistake.*in at_21"),
        ("is none", r"cat/021\.jpg.*the sample is None"),
        ("has no label", r"(?s)cat/021\.jpg.*(a field of the sample is None|NoneType)"),
        (of_own_size, r"(?s)sample 'cat/001\.jpg' \(row 1\) is \(uint8 \(3, 9, 9\).*(row 0\)).*\(3, 8, 8\)"),
        ("leaves", r"(?s)sample 'cat/021\.jpg' \(row 21\).*raised SystemExit: 3"),
        (
            "exits",
            r"ended with exit code 3.*cat/021\.jpg' \(row 21\): a process that made nothing else ended .* 3, too",
        ),
        (
            "is killed",
            r"killed by SIGKILL.*cat/021\.jpg' \(row 21\): a process that made nothing else was killed by SIGK",
        ),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_what_goes_wrong_in_a_worker_is_named_and_ends_all(packed, how, message, workers, descriptors):
    before = descriptors()
    transform = how if callable(how) else functools.partial(at_21, how)
    dataset = PackedDataset(packed, fields=["images", "row"], transform=transform)
    loader = FastLoader(dataset, 16, shuffle=False, workers=workers)
    for _ in range(2):  # it begins anew, and meets the same
        with pytest.raises(WorkerError, match=message):
            list(loader)
        assert not multiprocessing.active_children()
    loader.close()
    assert descriptors() <= before


def test_rows_that_end_a_worker_also_alone_are_skipped_as_damaged_ones(packed, caplog):
    dataset = PackedDataset(packed, fields=["images", "row"], transform=ends_at_some, on_damage="skip")
    loader = FastLoader(dataset, 16, shuffle=False, workers=2, ends="exact")
    for epoch in range(2):
        batches = list(loader)
        rows, valid = (torch.cat(parts).tolist() for parts in ([b[1] for b in batches], [b.valid for b in batches]))
        bad = [at for at, whole in enumerate(valid) if not whole]
        assert bad == list(ENDS) and [rows[at] for at in bad] == [22, 49]
        assert all(row == at for at, row in enumerate(rows) if at not in bad) and len(rows) == len(dataset)
        assert loader.stats.damaged_rows == ENDS
        assert sum("takes its place" in record.message for record in caplog.records) == len(ENDS), epoch
    loader.close()
    assert not multiprocessing.active_children()


ENDS = (21, 48)


def ends_at_some(sample):
    if int(sample[1]) in ENDS:
        os.kill(os.getpid(), signal.SIGSEGV)
    return sample


def ends_once(marker, sample):
    if int(sample[1]) == 21 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return sample


def test_a_worker_that_no_sample_ended_is_an_error_that_says_what_it_was_at(packed, tmp_path):
    transform = functools.partial(ends_once, tmp_path / "killed")
    dataset = PackedDataset(packed, fields=["images", "row"], transform=transform, on_damage="skip")
    with pytest.raises(
        WorkerError, match=r"SIGKILL.* It was at .*cat/021.jpg' \(row 21\); that does not end a process"
    ):
        list(FastLoader(dataset, 16, shuffle=False, workers=1))
    assert not multiprocessing.active_children()


def slow(sample):
    time.sleep(0.02)
    return sample


@pytest.fixture
def descriptors(packed):
    """The number of open descriptors, once what is opened only once is open."""
    loader = FastLoader(PackedDataset(packed, transform=as_it_is), 16, workers=1)
    list(loader)
    loader.close()

    def count():
        # Of queues that were closed: each ends its pipe a moment later.
        for thread in [one for one in threading.enumerate() if one.name == "QueueFeederThread"]:
            thread.join(600)
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    return count


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_break_close_and_collection_end_the_workers(packed, start, method, descriptors):
    start(method)
    for _ in range(2):  # the first time a forkserver begins
        before = descriptors()
        loader = FastLoader(PackedDataset(packed, transform=as_it_is), 16, workers=1)
        found = set[int | None]()
        for _ in range(3):
            for _ in loader:
                break
            list(loader)
            found |= {process.pid for process in multiprocessing.active_children()}
        assert len(found) == 1, "it stays for the next epoch, also after a break"
        loader.close()
        assert not multiprocessing.active_children(), "close"
        assert len(list(loader)) == 3, "iter() begins anew"
        batch = next(iter(loader))
        del loader
        assert not multiprocessing.active_children(), "collected by its last reference"
        assert batch[0].shape == (16, 3, 48, 40)
        del batch, _
    assert descriptors() <= before


HEAD = """
    import multiprocessing, sys, time, warnings
    from fastload import FastLoader, PackedDataset

    def same(sample):
        return sample
"""


def run_script(folder, text, packed):
    return subprocess.run(**script(folder, text, packed), capture_output=True, text=True, timeout=600)


def script(folder, text, packed):
    path = Path(folder) / "script.py"
    path.write_text(f"PACKED = {str(packed)!r}\n" + textwrap.dedent(HEAD) + textwrap.dedent(text))
    return {"args": [sys.executable, "-W", "error", str(path)], "env": child_environment(), "cwd": folder}


def test_ctrl_c_while_workers_start_leaves_a_loader_that_starts_others(tmp_path, packed):
    done = run_script(
        tmp_path,
        """
        import os, signal, threading

        if __name__ == "__main__":
            multiprocessing.set_start_method("forkserver")
            loader = FastLoader(PackedDataset(PACKED, transform=same), 16, workers=2)
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            try:
                while True:
                    list(loader)
            except KeyboardInterrupt:
                print(len(list(loader)), len(list(loader)))
        """,
        packed,
    )
    assert done.returncode == 0 and done.stdout == "3 3\n", done.stderr


ENDLESS = """
    def slow(sample):
        time.sleep(0.01)
        return sample

    if __name__ == "__main__":
        multiprocessing.set_start_method(METHOD)
        loader = FastLoader(PackedDataset(PACKED, transform=slow), 16, workers=2)
        while True:
            for batch in loader:
                print(batch[0].shape, flush=True)
"""


@pytest.mark.parametrize("method", ["fork", "forkserver"])
@pytest.mark.parametrize("how", ["ctrl-c", "kill"])
def test_nothing_is_left_behind_after_ctrl_c_or_kill(packed, tmp_path, method, how):
    text = ENDLESS.replace("METHOD", repr(method))
    process = subprocess.Popen(
        **script(tmp_path, text, packed),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert "torch.Size" in process.stdout.readline()
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 2
        named = {name for each in [process.pid, *(each.pid for each in family)] for name in shared_names(each)}
        if how == "ctrl-c":
            os.killpg(process.pid, signal.SIGINT)  # the terminal sends it to all of them
        else:
            process.kill()
        _, said = process.communicate(timeout=600)
        assert (
            process.returncode == (-signal.SIGINT if how == "ctrl-c" else -signal.SIGKILL)
            or "KeyboardInterrupt" in said
        )
        _, alive = psutil.wait_procs(family, timeout=600)
        assert not alive, [each.cmdline() for each in alive]
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    deadline = time.monotonic() + 600  # Python's own tracker takes away the semaphores of a killed process
    while any(map(os.path.exists, named)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [name for name in named if os.path.exists(name)]


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_signals_to_all_processes_are_left_to_the_program(packed, tmp_path, method):
    text = """
        import os, signal

        if __name__ == "__main__":
            multiprocessing.set_start_method(METHOD)
            signal.signal(signal.SIGUSR1, lambda number, frame: print("handled", flush=True))
            loader = FastLoader(PackedDataset(PACKED, transform=same), 16, workers=2)
            for number in (signal.SIGUSR1, signal.SIGINT):
                try:
                    for batch in loader:
                        os.killpg(0, number)
                        time.sleep(0.001)
                except KeyboardInterrupt:
                    print("interrupted", flush=True)
                print(sum(int(batch.valid.sum()) for batch in loader), "rows", flush=True)
    """
    done = subprocess.run(
        **script(tmp_path, text.replace("METHOD", repr(method)), packed),
        capture_output=True,
        text=True,
        start_new_session=True,
        timeout=600,
    )
    assert done.stderr == "" and done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said == ["handled"] * (len(said) - 3) + ["48 rows", "interrupted", "48 rows"]
    assert len(said) > 3


def shared_names(pid):
    """Files of /dev/shm that a process has mapped."""
    with open(f"/proc/{pid}/maps") as maps:
        return {words[5] for line in maps if len(words := line.split()) == 6 and words[5].startswith("/dev/shm/")}


def test_a_script_that_ends_in_the_middle_ends_its_workers_in_silence_whatever_still_iterates(packed, tmp_path):
    done = run_script(
        tmp_path,
        """
        from contextlib import closing

        def endless(loader):
            while True:
                yield from loader

        def closed_at_last(loader):
            with closing(loader):
                yield from endless(loader)

        if __name__ == "__main__":
            ways = [
                (way, FastLoader(PackedDataset(PACKED, transform=same if processes else None), 16, workers=1))
                for way in (iter, endless, closed_at_last)
                for processes in (False, True)
            ]
            ways.append((endless, FastLoader(PACKED, 16, echo=2)))
            batches = [way(loader) for way, loader in ways]
            for of_one in batches:
                shape = next(of_one)[0].shape
            print(shape)
        """,
        packed,
    )
    assert done.returncode == 0 and done.stderr == "" and "Size" in done.stdout, done.stderr


ASKS = "import logging\nlogging.getLogger(__name__)\n"  # so that only its workers see whether it has a guard


@pytest.mark.parametrize("first", ["", ASKS, f"{ASKS}multiprocessing.set_start_method('spawn', force=True)\n"])
def test_a_script_without_its_guard_is_told_so_once(warm_python, packed, tmp_path, first):
    text = f"{first}next(iter(FastLoader(PackedDataset(PACKED, transform=same), 16, workers=1)))"
    done = warm_python.run(script(tmp_path, text, packed)["args"][-1], cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.count("Traceback") == 1, done.stderr
    assert re.findall(
        r'^fastload\.errors\.OptionError: the script has no `if __name__ == "__main__"', done.stderr, re.M
    )


def test_a_guard_may_be_a_function(warm_python, packed, tmp_path):
    text = """
        class Main:
            def is_running(self):
                return __name__ == "__main__"

        if Main().is_running():
            print(len(list(FastLoader(PackedDataset(PACKED, transform=same), 16, workers=1))))
    """
    done = warm_python.run(script(tmp_path, text, packed)["args"][-1], cwd=tmp_path)
    assert done.returncode == 0 and done.stdout == "3\n", done.stderr


def test_a_server_of_processes_that_imports_a_script_without_its_guard_ends_in_silence(warm_python, packed, tmp_path):
    text = """
        multiprocessing.current_process()._inheriting = True
        next(iter(FastLoader(PackedDataset(PACKED, transform=same), 16)))
    """
    done = warm_python.run(script(tmp_path, text, packed)["args"][-1], cwd=tmp_path)
    assert done.returncode == torch_workers.NO_GUARD_CODE and not done.stderr


def ends_by_itself(sample):
    os._exit(os.EX_OSERR)


def test_a_transform_that_ends_the_process_by_a_system_error_is_no_missing_guard(packed, start):
    start("forkserver")
    with pytest.raises(WorkerError, match="ended with exit code 71") as caught:
        list(FastLoader(PackedDataset(packed, transform=ends_by_itself), 16, workers=1))
    assert "no `if __name__" not in str(caught.value)


def test_a_server_of_processes_that_ends_while_it_imports_is_told_with_its_cause(warm_python, packed, tmp_path):
    (tmp_path / "ends.py").write_text("import os\nos._exit(1)\n")
    text = """
        if __name__ == "__main__":
            multiprocessing.set_start_method("forkserver", force=True)
            multiprocessing.set_forkserver_preload(["ends"])
            next(iter(FastLoader(PackedDataset(PACKED, transform=same), 16, workers=1)))
    """
    done = warm_python.run(script(tmp_path, text, packed)["args"][-1], cwd=tmp_path)
    assert re.search(r"WorkerError: a worker process ended while it was started: importing the script", done.stderr)
    assert re.search(r"(EOF|Connection\w+|BrokenPipe)Error.*\n\nThe above exception was the direct cause", done.stderr)


def label_only(sample):
    return sample[1]


def test_what_worker_processes_cannot_do_is_refused(packed, pixels, start):
    start("forkserver")
    python = PackedDataset(packed, transform=as_it_is)
    for source, options, message in (
        (PackedDataset(packed, transform=lambda sample: sample), {}, "cannot be sent to worker processes.*lambda.*top"),
        (python, {"workers": 0}, r"workers=0.*dataset\[0\]"),
        (LikeImageFolder(pixels), {"shuffle": "chunk"}, "chunk"),
        (PackedDataset(packed, transform=label_only), {"transform": [RandomHorizontalFlip()]}, "samples have no image"),
    ):
        with pytest.raises(OptionError, match=message):
            list(FastLoader(source, 16, **{"workers": 1} | options))
        assert not multiprocessing.active_children()


def test_a_file_that_changes_under_the_workers_is_named(tmp_path, pixels):
    path = write_packed(tmp_path / "a.h5", pixels, chunk_rows=8)
    loader = FastLoader(PackedDataset(path, transform=slow), 8, shuffle=False, workers=1)
    batches = iter(loader)
    next(batches)
    write_packed(path, 255 - pixels, chunk_rows=8)
    with pytest.raises(FileChangedError, match=r"(?s)a\.h5: changed while in use.*In a worker process"):
        list(batches)


def test_ends_echo_plan_fields_and_transforms_of_batches_are_as_with_threads(packed, pixels):
    dataset = PackedDataset(packed, fields=["images", "valid", "row"], transform=as_it_is)
    loader = FastLoader(dataset, 16, shuffle=False, echo=2, workers=1)
    batches = list(loader)
    assert len(batches) == len(loader) == 8
    assert torch.cat([batch.rows[batch.valid] for batch in batches[::2]]).tolist() == list(range(N))
    for batch in batches:
        assert torch.equal(batch[1], batch.valid) and torch.equal(batch[2], batch.rows)
        assert torch.equal(batch[0], torch.from_numpy(pixels[batch.rows.numpy()]).permute(0, 3, 1, 2))
    assert loader.stats.fresh_samples == N and loader.stats.consumed_samples == 2 * N
    loader.close()
    # Transforms of batches follow the Python ones.
    options = {"seed": 4, "transform": [RandomHorizontalFlip(), Normalize((0.5,) * 3, (0.5,) * 3)]}
    loader = FastLoader(PackedDataset(packed, transform=as_it_is), 16, workers=1, **options)
    for ours, theirs in zip(loader, list(FastLoader(packed, 16, **options)), strict=True):
        assert torch.equal(ours[0], theirs[0])
    loader.close()


class LikeImageFolder(torch.utils.data.Dataset):
    """As torchvision's: a list of (path, class), opened one by one."""

    def __init__(self, pixels, bad=None):
        self.pixels = pixels
        self.samples = [(f"photos/cat/{i:03d}.jpg", i % 7) for i in range(len(pixels))]
        self.bad = bad

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        if index == self.bad:
            raise OSError("broken data stream")
        return torch.from_numpy(self.pixels[index]).permute(2, 0, 1), self.samples[index][1]


class InGroups(LikeImageFolder):
    def __getitem__(self, index):
        raise AssertionError("it is asked for many")

    def __getitems__(self, indices):
        if self.bad in indices:
            raise OSError("broken data stream")
        return [super(InGroups, self).__getitem__(index) for index in indices]


class WithoutOne(LikeImageFolder):
    def __getitem__(self, index):
        return None if index == self.bad else super().__getitem__(index)


class TooFew(InGroups):
    def __getitems__(self, indices):
        return super().__getitems__([index for index in indices if index != self.bad])


@pytest.mark.parametrize("kind", [LikeImageFolder, InGroups])
def test_any_map_style_dataset_is_fed_through_the_ring(pixels, kind):
    loader = FastLoader(kind(pixels), 16, seed=2, workers=2)
    batches = list(loader)
    assert len(loader) == 3 and len({row for batch in batches for row in batch.rows.tolist()}) == 48
    for batch in batches:
        assert_pixels(batch, pixels)
    exact = FastLoader(kind(pixels), 16, shuffle=False, share=(1, 3), workers=1)
    assert torch.cat([batch.rows[batch.valid] for batch in exact]).tolist() == list(range(20, 40))
    loader.close()


def test_errors_of_other_datasets_name_the_sample(pixels):
    for kind, message in (
        (LikeImageFolder, r"LikeImageFolder\[5\] \(photos/cat/005.jpg\).*OSError: broken data stream"),
        (InGroups, r"one of InGroups\[0\].*InGroups\[5\].*OSError"),
        (WithoutOne, r"WithoutOne\[5\].*raised TypeError: the sample is None"),
        (TooFew, r"one of TooFew\[0\].*raised StopIteration"),
    ):
        with pytest.raises(WorkerError, match=message):
            list(FastLoader(kind(pixels, bad=5), 16, shuffle=False, workers=1))


def test_states_of_other_datasets_know_their_type_and_length(pixels):
    state = FastLoader(LikeImageFolder(pixels), 16).state_dict()
    FastLoader(LikeImageFolder(pixels), 16).load_state_dict(state)
    for other in (LikeImageFolder(pixels[:50]), InGroups(pixels)):
        with pytest.raises(StateError, match="LikeImageFolder/60"):
            FastLoader(other, 16).load_state_dict(state)


class ImageAndMask(LikeImageFolder):
    def __getitem__(self, index):
        image, _ = super().__getitem__(index)
        return {"image": image, "target": image[0].clone()}


def test_masks_of_other_datasets_move_with_their_images(pixels):
    loader = FastLoader(ImageAndMask(pixels), 16, transform=[RandomHorizontalFlip()], workers=1)
    flipped = 0
    for batch in loader:
        assert torch.equal(batch["image"][:, 0], batch["target"])
        flipped += int((batch["image"] != torch.from_numpy(pixels[batch.rows.numpy()]).permute(0, 3, 1, 2)).any())
    assert flipped
    loader.close()


def test_no_more_memory_is_pinned_for_processes_than_is_fair(packed, pixels, monkeypatch):
    monkeypatch.setattr(fastload.prefetch.loader_plan, "_PINNED_BYTES", 1)
    monkeypatch.setattr(fastload.prefetch.process_pool, "available_memory", lambda: 0)
    device = Device()
    loader = FastLoader(PackedDataset(packed, transform=as_it_is), 8, shuffle=False, device=device, workers=2)
    for batch in loader:
        assert_pixels(batch, pixels)
    # Three of the loop, one a process and one, where two a process would be under way.
    assert device.pinned == 6 * loader._producer.pool.ring.slot_bytes
    device.drain()
    loader.close()
    assert device.pinned == 0


def test_a_device_copies_from_pinned_slots_and_they_are_unpinned_at_the_end(packed, pixels):
    device = Device(patience=1)
    dataset = PackedDataset(packed, transform=as_it_is)
    loader = FastLoader(dataset, 16, shuffle=False, ends="exact", workers=1, device=device)
    for number, batch in enumerate(loader):
        assert device.pinned == 6 * loader._producer.pool.ring.slot_bytes, number
        assert_pixels(batch, pixels)
        assert batch.valid.sum() == batch.global_valid
    assert number == 3
    device.drain()
    loader.close()
    assert device.pinned == 0


CHANGING = [RandomResizedCrop((30, 26)), RandomHorizontalFlip(), Normalize((0.5,) * 3, (0.5,) * 3)]


def facts(batch):
    values = list(batch.values()) if isinstance(batch, dict) else list(batch)
    fields = [value.clone() if isinstance(value, torch.Tensor) else value for value in values]
    return [*fields, batch.rows.clone(), batch.valid.clone(), torch.tensor(batch.global_valid)]


def assert_same(batches, expected):
    assert len(batches) == len(expected)
    for batch, other in zip(batches, expected, strict=True):
        for one, two in zip(batch, other, strict=True):
            same = torch.equal(one, two) and one.dtype == two.dtype if isinstance(one, torch.Tensor) else one == two
            assert same, (one, two)


def label_first(sample):
    return sample[1], sample[0]


def with_text(sample):
    return {"image": sample[0], "label": sample[1], 3: "x" * int(sample[1])}


def float_row(sample):
    return sample[0], sample[1] / 2


def channels_first(sample):
    return sample[0].contiguous(), *sample[1:]


@pytest.mark.parametrize(
    ("fields", "transform", "transforms", "echo"),
    [
        (["images", "labels"], as_it_is, CHANGING, 2),
        (["images", "labels"], channels_first, CHANGING, 1),
        (["images", "labels"], with_text, CHANGING, 1),
        (["images", "labels"], as_float, [RandomHorizontalFlip()], 1),
        (["images", "valid", "row"], as_it_is, CHANGING, 1),
        (["images", "row"], as_pair, [], 2),
        (["images", "labels"], label_first, [], 1),
        (["labels"], as_it_is, [], 1),
    ],
)
def test_a_batch_goes_to_its_device_in_one_copy_with_what_was_drawn(
    packed, monkeypatch, fields, transform, transforms, echo
):
    dataset, options = PackedDataset(packed, fields=fields, transform=transform), {"seed": 3, "ends": "exact"}
    options |= {"transform": transforms, "echo": echo, "workers": 2}
    expected = FastLoader(dataset, 16, **options)
    epochs = [[facts(batch) for batch in expected] for _ in range(2)]
    expected.close()
    device = Device()
    loader, record, recorded = FastLoader(dataset, 16, device=device, **options), device.record, []
    device.record = lambda again=None: (
        recorded.append(device.crossed) or record(again)
    )  # once for each batch that is brought there
    if transforms is CHANGING:
        monkeypatch.setattr(fastload.transforms.engine.pipeline, "drawn_now", None)
    for epoch in range(2):
        assert_same([facts(batch) for batch in loader], epochs[epoch])
    assert len(recorded) >= 8 and device.pinned and recorded == [*range(1, len(recorded) + 1)]
    device.drain()
    loader.close()


def test_a_row_that_is_no_row_number_stays_out_of_the_slot(packed):
    dataset = PackedDataset(packed, fields=["images", "row"], transform=float_row)
    expected = FastLoader(dataset, 16, seed=3, workers=1)
    device = Device()
    loader = FastLoader(dataset, 16, seed=3, workers=1, device=device)
    assert_same([facts(batch) for batch in loader], [facts(batch) for batch in expected])
    device.drain()
    loader.close()
    expected.close()


def test_workers_end_without_a_word_with_the_garbage_that_refers_to_them(packed):
    """An error and its traceback are such garbage. Its parts are ended in any order: a pipe before who writes to it."""
    for _ in range(4):
        loader = FastLoader(PackedDataset(packed, transform=of_size), 16, workers=2)
        batches = iter(loader)
        next(batches)
        children = multiprocessing.active_children()
        everything = [loader, batches, loader._producer.pool._workers]
        everything.append(everything)
        loader._producer.pool._workers.garbage = everything
        del loader, batches, everything
        assert len(children) == 2
        while any(child.is_alive() for child in children):  # a thread that plans a batch may refer to it, too
            gc.collect()  # pytest makes errors of what finalizers and threads raise
            time.sleep(0.01)
    assert not torch_workers._queues_in_use


def wait_for_all(loader, before=10**9):
    """Waits until the workers have done what they were asked for before a batch that begins with this row."""
    pool, deadline = loader._producer.pool, time.monotonic() + 600

    def first_is_missing():
        asked = next(iter(pool._asked.values()), None)
        return asked and not (asked.done and (asked.planned is None or asked.rows[0] >= before))

    while first_is_missing():
        assert time.monotonic() < deadline
        time.sleep(0.01)
        pool._receive_all()


def test_batches_that_do_not_fit_their_slot_are_as_right_on_a_device(packed):
    dataset = PackedDataset(packed, fields=["images", "row"], transform=of_size)
    options = {"shuffle": False, "ends": "drop", "workers": 2, "transform": CHANGING, "echo": 2}
    with pytest.warns(UserWarning, match="change from batch to batch"):
        loader = FastLoader(dataset, 16, **options)
        expected = [facts(batch) for batch in loader]
    wait_for_all(loader)
    assert loader._producer.pool.ring.collect() == SLACK + 1, "the next epoch's batches have the others"
    loader.close()
    device = Device()
    loader = FastLoader(dataset, 16, device=device, **options)
    with pytest.warns(UserWarning, match="change from batch to batch"):
        batches = [facts(batch) for batch in loader]
    assert_same(batches, expected)
    device.drain()
    loader.close()


def at_row(row, how, go, sample):
    """Gives every sample as it is, but one, and that when a file is there: a worker that dies has sent the others."""
    if int(sample[1]) != row:
        return sample
    while how == "is killed" and not go.exists():
        time.sleep(0.01)
    return at_21(how, (sample[0], 21))


@pytest.mark.parametrize("how", ["raises", "is killed"])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("device", [None, "late"])
def test_batches_before_an_error_are_handed_over_first(packed, tmp_path, device, workers, how):
    transform = functools.partial(at_row, 40, how, tmp_path / "go")
    dataset = PackedDataset(packed, fields=["images", "row"], transform=transform)
    device = Device(patience=1) if device else None
    loader = FastLoader(dataset, 16, shuffle=False, workers=workers, device=device)
    for _ in range(2):
        batches, found = iter(loader), []
        with pytest.raises(WorkerError, match="a mistake of the user's" if how == "raises" else "killed by SIGKILL"):
            while True:
                found.append(next(batches).rows[0].item())
                wait_for_all(loader, before=32 if how == "is killed" else 10**9)
                (tmp_path / "go").touch()
        assert found == [0, 16]
        (tmp_path / "go").unlink()
        assert not multiprocessing.active_children()
        if device:
            device.drain()
    loader.close()


def slow_or_killed(folder, sample):
    """The batch of rows 16 to 31 is made only when the worker of a later one is gone, after its first has arrived."""
    row = int(sample[1])
    while row == 32 and not (folder / "arrived").exists():
        time.sleep(0.01)
    if row == 32:
        time.sleep(0.5)  # a thread of this worker sent that first batch, and may hold the lock of all results still
        (folder / "killed").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    while row == 16 and not gone(folder / "killed"):
        time.sleep(0.01)
    return sample


def gone(file):
    pid = file.read_text() if file.exists() else ""
    return bool(pid) and (not psutil.pid_exists(int(pid)) or psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize("device", [None, "late"])
def test_a_batch_comes_that_another_worker_still_makes_when_one_dies(packed, tmp_path, device):
    dataset = PackedDataset(packed, fields=["images", "row"], transform=functools.partial(slow_or_killed, tmp_path))
    device = Device(patience=1) if device else None
    loader, found = FastLoader(dataset, 16, shuffle=False, workers=2, device=device), []
    with pytest.raises(WorkerError, match="killed by SIGKILL"):
        for batch in loader:
            found.append(batch.rows[0].item())
            (tmp_path / "arrived").touch()
    assert found == [0, 16]
    if device:
        device.drain()
    loader.close()


def test_results_that_a_dead_worker_holds_up_are_not_waited_for_forever(packed, tmp_path, monkeypatch):
    monkeypatch.setattr(torch_workers, "_LOOK_S", 0.1)
    dataset = PackedDataset(packed, fields=["images", "row"], transform=functools.partial(slow_or_killed, tmp_path))
    loader, found = FastLoader(dataset, 16, shuffle=False, workers=2), []
    with pytest.raises(WorkerError, match="killed by SIGKILL"):
        for batch in loader:
            found.append(batch.rows[0].item())
            # As if the dead one had had it: the other cannot send its result.
            loader._producer.pool._workers._worker_result_queue._wlock.acquire()
            (tmp_path / "arrived").touch()
    assert found == [0]
    loader.close()


@pytest.mark.parametrize("device", [None, "late"])
def test_an_error_around_a_request_comes_at_its_batch_too(packed, start, monkeypatch, device):
    start("fork")
    carry_out = Filler.__getitem__

    def refused(filler, request):
        result = carry_out(filler, request)
        if request.slot >= 0 and 32 in requested_rows(filler._control, request.slot, 16):
            raise LookupError("outside of what reports errors")
        return result

    monkeypatch.setattr(Filler, "__getitem__", refused)
    dataset = PackedDataset(packed, fields=["images", "row"], transform=as_it_is)
    device = Device(patience=1) if device else None
    loader = FastLoader(dataset, 16, shuffle=False, workers=2, device=device)
    for _ in range(2):
        found = []
        with pytest.raises(LookupError, match="outside of what"):
            for batch in loader:
                found.append(batch.rows[0].item())
                wait_for_all(loader)
        assert found == [0, 16]
        if device:
            device.drain()
    loader.close()


class HoldsOne:
    """Keeps its first sample of every few, as it was given, and sees whether anybody writes to it."""

    def __init__(self):
        self.held = []
        self.calls = 0

    def __call__(self, sample):
        if any(not torch.equal(held, as_it_was) for held, as_it_was in self.held):
            raise ValueError("the memory of a sample that is still held was written to")
        if self.calls % 40 == 0 and len(self.held) < 3:
            self.held.append((sample[0], sample[0].clone()))
        self.calls += 1
        return sample


@pytest.mark.parametrize("taken", [1, 100])
def test_what_one_workers_transform_keeps_no_other_worker_writes_to(packed, pixels, taken):
    loader = FastLoader(PackedDataset(packed, transform=HoldsOne()), 8, workers=2, seed=4)
    slots = set()
    for _ in range(12):
        for number, batch in enumerate(loader, 1):
            assert_pixels(batch, pixels)
            batch[0].fill_(number)
            if number >= taken:
                break
        slots.add(len(loader._producer.pool.ring.slots))
    assert max(slots) > SLACK + 2 * PREFETCH + 1, "a slot was kept, and replaced"
    loader.close()


class Interrupting:
    """Raises KeyboardInterrupt at the n-th line that runs in functions of a module."""

    def __init__(self, module, functions, number):
        self.file, self.functions, self.left = module.__file__, functions, number

    def __call__(self, frame, event, _):
        if frame.f_code.co_filename != self.file or frame.f_code.co_name not in self.functions:
            return None
        if event == "line":
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
        return self


@pytest.mark.parametrize("device", [None, "late"])
def test_ctrl_c_at_any_line_that_takes_results_loses_none_of_them(packed, start, device):
    start("fork")
    device = Device(patience=1) if device else None
    loader = FastLoader(PackedDataset(packed, transform=as_it_is), 8, shuffle=False, workers=1, device=device)
    expected = rows_of(loader)
    interrupted = 0
    for line in itertools.count(1):
        batches = iter(loader)
        next(batches)
        tracing = sys.gettrace()
        try:
            sys.settrace(Interrupting(process_pool, ("_receive", "_receive_all"), line))
            for _ in batches:
                pass
        except KeyboardInterrupt:
            interrupted += 1
        else:
            break
        finally:
            sys.settrace(tracing)
        assert not multiprocessing.active_children(), "nobody knows what they were asked for"
        if device:
            device.drain()
        assert rows_of(loader) == expected
    assert interrupted >= 6
    loader.close()


def interrupting(flag, training, sample):
    if int(sample[1]) % 16 == 7 and os.path.exists(flag):
        os.remove(flag)
        os.kill(training, signal.SIGINT)
        time.sleep(0.2)
    return sample


@pytest.mark.parametrize("device", [None, "late"])
def test_after_ctrl_c_in_the_loop_the_loader_begins_anew(packed, tmp_path, device):
    flag = tmp_path / "interrupt"
    dataset = PackedDataset(
        packed, fields=["images", "row"], transform=functools.partial(interrupting, str(flag), os.getpid())
    )
    device = Device(patience=1) if device else None
    loader = FastLoader(dataset, 4, shuffle=False, workers=2, device=device)
    expected = rows_of(loader)
    for taken in (0, 2, 5):
        with pytest.raises(KeyboardInterrupt):
            batches = iter(loader)
            for _ in range(taken):
                next(batches)
            flag.touch()
            while True:
                for _ in batches:
                    pass
                batches = iter(loader)
        if device:
            device.drain()
        flag.unlink(missing_ok=True)
        assert rows_of(loader) == expected
    loader.close()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_a_loader_closed_in_mid_epoch_with_a_device_leaves_nothing_pinned(packed, pixels, taken):
    device = Device(patience=1)
    loader = FastLoader(PackedDataset(packed, transform=as_it_is), 8, shuffle=False, workers=2, device=device)
    for _ in range(2):
        batches = iter(loader)
        kept = [next(batches) for _ in range(taken)]
        device.drain()
        loader.close()
        assert device.pinned == 0 and not multiprocessing.active_children()
        for batch in kept:
            assert_pixels(batch, pixels)
        with pytest.raises(OptionError, match="ended by a newer"):
            next(batches)


def test_a_user_may_write_to_what_processes_made_and_a_device_uses_again(packed, pixels):
    dataset = PackedDataset(packed, transform=as_it_is)
    device = Device(patience=1)
    loader = FastLoader(dataset, 16, shuffle=False, ends="drop", workers=1, device=device, echo=2)
    for number, batch in enumerate(loader):
        assert_pixels(batch, pixels)
        assert batch.rows.tolist() == [*range(number // 2 * 16, number // 2 * 16 + 16)] and batch.valid.all()
        for tensor in (*batch, batch.rows, batch.valid):
            tensor.zero_()
    assert number == 5
    device.drain()
    loader.close()


def test_a_forked_copy_of_a_loader_leaves_the_workers_alone(packed, start):
    start("fork")
    loader = FastLoader(PackedDataset(packed, transform=slow), 8, shuffle=False, workers=1)
    batches = iter(loader)
    first = next(batches).rows.tolist()

    def dropped():
        nonlocal batches, loader
        del batches
        loader.close()
        del loader
        gc.collect()

    in_a_fork(dropped)
    assert len(first + [row for batch in batches for row in batch.rows.tolist()]) == 60
    assert len(multiprocessing.active_children()) == 1
    loader.close()


class Nested(torch.utils.data.Dataset):
    def __init__(self, packed):
        self.packed = packed

    def __len__(self):
        return 1

    def __getitem__(self, index):
        try:
            next(iter(FastLoader(PackedDataset(self.packed, transform=as_it_is), 16, workers=1)))
        except OptionError as error:
            return str(error)


def test_a_loader_in_another_loaders_worker_is_told_so(packed):
    [[said]] = torch.utils.data.DataLoader(Nested(packed), num_workers=1)
    assert "cannot run in a worker of another loader" in said


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_forked_process_uses_the_loader_or_is_told_why_not(packed, start, method):
    start(method)
    loader = FastLoader(PackedDataset(packed, transform=as_it_is), 16, workers=1)
    list(loader)

    def use():
        if method == "fork":
            assert len(list(loader)) == 3
            return
        with pytest.raises(OptionError, match="forked from one that had started a forkserver"):
            list(loader)

    in_a_fork(use)
    assert len(list(loader)) == 3
    loader.close()


def test_a_script_in_a_file_has_a_forkserver_and_one_from_stdin_forks_its_workers(packed, tmp_path):
    text = """
        def method(sample):
            return sample[1], multiprocessing.get_start_method()

        if __name__ == "__main__":
            [batch] = FastLoader(PackedDataset(PACKED, transform=method), 60, workers=1)
            print(batch[1][0], multiprocessing.get_start_method(allow_none=True))
    """
    options = script(tmp_path, text, packed)
    for words, method in ((options["args"], "forkserver"), ([sys.executable, "-"], "fork")):
        with open(options["args"][-1]) as lines:
            done = subprocess.run(words, env=options["env"], stdin=lines, capture_output=True, text=True)
        assert done.stdout.split() == [method, "None"], done.stderr


def test_too_little_shared_memory_is_named_before_anything_is_filled(packed, tmp_path):
    done = run_script(
        tmp_path,
        """
        import resource, signal
        from fastload.errors import SharedMemoryError

        if __name__ == "__main__":
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, resource.RLIM_INFINITY))
            loader = FastLoader(PackedDataset(PACKED, transform=same), 60, workers=1)
            try:
                next(iter(loader))
            except SharedMemoryError as error:
                print(error)
        """,
        packed,
    )
    assert "of shared memory for the batches that worker processes fill" in done.stdout, done.stderr
    assert "smaller batch_size or fewer workers" in done.stdout and "ulimit -f" in done.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_worker_batches_come_on_the_gpu_from_pinned_slots(packed, pixels):
    loader = FastLoader(PackedDataset(packed, transform=inverted), 16, workers=2, device="cuda")
    for _ in range(3):
        for batch in loader:
            assert batch[0].is_cuda and batch.rows.is_cuda and batch.valid.is_cuda
            expected = 255 - torch.from_numpy(pixels[batch.rows.cpu().numpy()]).permute(0, 3, 1, 2)
            assert torch.equal(batch[0].cpu(), expected) and torch.equal(batch[1], batch.rows % 7)
    loader.close()


def cropped(sample):
    return (sample[0][:, :30, :40].contiguous(), *sample[1:])


def test_images_of_several_sizes_become_one_size_in_the_workers(tmp_path):
    rng = np.random.default_rng(7)
    images = [rng.integers(0, 256, (30 + i % 5, 44 - i % 4, 3), dtype=np.uint8) for i in range(24)]
    path = write_ragged(tmp_path / "v.h5", images, {"labels": Column(np.arange(24, dtype=np.int64))})
    dataset = PackedDataset(path, transform=cropped)
    loader = FastLoader(dataset, batch_size=8, shuffle="chunk", workers=1)
    for _ in range(2):
        seen = []
        for batch, labels in loader:
            for image, label in zip(batch, labels.tolist(), strict=True):
                assert torch.equal(image, torch.from_numpy(images[label][:30, :40]).permute(2, 0, 1))
                seen.append(label)
        assert sorted(seen) == list(range(24))
    loader.close()
