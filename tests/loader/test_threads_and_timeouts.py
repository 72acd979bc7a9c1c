"""Loaders under several threads, and batches that do not come: what hangs is named, within the timeout."""

from __future__ import annotations

import ctypes
import functools
import gc
import logging
import multiprocessing
import os
import signal
import threading
import time
import warnings

import numpy as np
import psutil
import pytest
import torch
from late_backend import Device

from fastload import Workers
from fastload.dataset import PackedDataset
from fastload.errors import FastloadError, OptionError, WorkerError, WorkerTimeoutError, shortened
from fastload.format.ragged import Column
from fastload.loader.loader import FastLoader
from fastload.prefetch import pool, torch_workers, waiting
from fastload.prefetch.inputs import PackedInput
from fastload.transforms import RandomHorizontalFlip

N = 64
PACKED = {
    "rows": N,
    "size": (24, 20, 3),
    "seed": 5,
    "classes": "abcdefg",
    "columns": {"key": Column(np.array([f"cat/{i:03d}.jpg".encode() for i in range(N)]))},
    "chunk_rows": 8,
}


@pytest.fixture
def start():
    before = multiprocessing.get_start_method(allow_none=True)
    yield lambda method: multiprocessing.set_start_method(method, force=True)
    multiprocessing.set_start_method(before, force=True)


def as_it_is(sample):
    return sample


def hangs_at_21(how, sample):
    if int(sample[1]) == 21:
        time.sleep(3600 if how == "sleeps" else 0.3)  # until a thread has sent the batch before
        if how == "keeps the GIL":
            ctypes.PyDLL(None).sleep(3600)
        os.kill(os.getpid(), signal.SIGSTOP)
    return sample


def python_loader(packed, how, **options):
    dataset = PackedDataset(packed, fields=["images", "row"], transform=functools.partial(hangs_at_21, how))
    return FastLoader(dataset, 8, shuffle=False, **{"workers": 2} | options)


def first_begun(loader):
    """Takes the first batch, which waits for the workers' start, without the timeout that the test is about."""
    batches = iter(loader)
    patience = loader._producer._run.patience
    timeout_s, patience.timeout_s = patience.timeout_s, 0.0
    found = [next(batches)]
    patience.timeout_s = timeout_s
    return batches, found


needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="what a process does is read in /proc")


@needs_proc
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("sleeps", r"(?s)Stack \(most recent call first\):\n  File .*test_threads_and_timeouts.py.*in hangs_at_21"),
        ("keeps the GIL", r"(?s)Stack \(most recent call first\):\n  File .*in hangs_at_21"),
        ("is stopped", r"It is stopped \(by SIGSTOP or a debugger\): `kill -CONT \d+` lets it go on"),
    ],
)
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_worker_that_hangs_is_named_after_the_timeout_and_killed(packed, start, method, how, message):
    start(method)
    loader = python_loader(packed, how, workers=Workers(2, timeout=1.5))
    batches, found = first_begun(loader)
    with pytest.raises(WorkerTimeoutError, match=message) as caught:
        for batch in batches:
            found.append(batch)  # an error keeps what came before it
    said = str(caught.value)
    assert "timeout=1.5 s" in said and "sample 'cat/021.jpg' (row 21), 6 of 8 in its batch" in said
    assert isinstance(caught.value, TimeoutError) and isinstance(caught.value, WorkerError)
    assert isinstance(caught.value, RuntimeError), "as what torch's DataLoader raises"
    assert [batch.rows[0].item() for batch in found] == [0, 8], "what comes before it"
    assert "multiprocessing" not in said and len(said) < 2000, "only the user's part of the stack"
    assert not multiprocessing.active_children()
    loader.close()


@needs_proc
def test_a_loader_that_timed_out_begins_anew(packed, start, tmp_path):
    start("fork")
    loader = python_loader(packed, "is stopped", workers=Workers(2, timeout=1.5))
    batches, _ = first_begun(loader)
    with pytest.raises(WorkerTimeoutError):
        list(batches)
    with pytest.raises(OptionError, match="ended by WorkerTimeoutError"):
        next(batches)
    batches, found = first_begun(loader)
    assert found[0].rows.tolist() == list(range(8))
    del batches
    loader.close()
    assert not multiprocessing.active_children()


@needs_proc
@pytest.mark.parametrize("how", ["sleeps", "is stopped"])
def test_break_and_close_end_workers_that_hang(packed, start, monkeypatch, how):
    monkeypatch.setattr(torch_workers, "_END_S", 0.2)
    start("fork")
    loader = python_loader(packed, how)
    deadline = time.monotonic() + 600
    for batch in loader:
        workers = [psutil.Process(pid) for pid in loader._producer.pool._workers.pids]
        if batch.rows[0] == 8:
            time.sleep(0.5)
            while how == "is stopped" and not any(one.status() == psutil.STATUS_STOPPED for one in workers):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            break  # not before, or what hangs would be skipped
    loader.close()
    assert not multiprocessing.active_children() and not any(worker.is_running() for worker in workers)


@needs_proc
def test_a_wait_without_a_timeout_is_warned_of_once_with_the_same_words(packed, start, monkeypatch):
    monkeypatch.setattr(waiting, "WARN_AFTER_S", 1.0)
    start("fork")
    loader = python_loader(packed, "is stopped", workers=1)

    def awake():
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline and not any("It is stopped" in one for one in said):
            time.sleep(0.05)
        time.sleep(0.5)  # long enough for another warning, if there were one
        os.kill(loader._producer.pool._workers.pids[0], signal.SIGCONT)

    said = []
    waker = threading.Thread(target=awake)
    waker.start()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_: said.append(str(message))
        assert len(list(loader)) == N // 8, "it waits on"
    waker.join()
    loader.close()
    stopped = [one for one in said if "It is stopped" in one]
    assert len(stopped) == 1 and "cat/021.jpg" in stopped[0] and "timeout=..." in stopped[0], said


@pytest.fixture
def hangs(monkeypatch):
    """Reading row 21 hangs until the event is set; its `begun` is set when it begins to."""
    from fastload.read.reader import Rows

    opened, gather = threading.Event(), Rows.gather
    opened.begun = threading.Event()

    def hanging(self, rows, arrays):
        if 21 in rows and not opened.is_set():
            opened.begun.set()
            opened.wait()
        return gather(self, rows, arrays)

    monkeypatch.setattr(Rows, "gather", hanging)
    yield opened
    opened.set()


@pytest.mark.parametrize("device", [None, "late"])
def test_a_reading_thread_that_hangs_is_named_and_left_behind(packed, pixels, hangs, device):
    device = Device(patience=1) if device else None
    loader = FastLoader(packed, 8, shuffle=False, workers=Workers(1, timeout=0.5), device=device)
    with pytest.raises(WorkerTimeoutError) as caught:
        list(loader)
    said = str(caught.value)
    assert "sample 'cat/" in said and "8 rows: 16, 17, 18" in said and "in hanging" in said
    assert "Thread fastload-worker-0 (most recent call last)" in said
    loader.close()
    if device:
        device.drain()
    hangs.set()
    assert_whole(loader, pixels)
    loader.close()


def assert_whole(loader, pixels):
    batches = list(loader)
    assert torch.cat([batch.rows for batch in batches]).tolist() == list(range(N))
    for batch in batches:
        assert torch.equal(batch[0], torch.from_numpy(pixels[batch.rows.numpy()]).permute(0, 3, 1, 2))


def test_rows_that_a_thread_was_left_with_never_come_into_a_later_batch(packed, pixels, hangs):
    loader = FastLoader(packed, 8, shuffle=False, workers=Workers(2, timeout=0.5))
    for _ in range(2):
        with pytest.raises(WorkerTimeoutError):
            list(loader)
    kept = iter(FastLoader(packed, 8, shuffle=False))
    hangs.set()  # the threads write to their slots now
    for _ in range(3):
        assert_whole(loader, pixels)
    del kept
    loader.close()


def test_close_and_break_do_not_wait_for_ever_for_a_thread(packed, pixels, hangs, monkeypatch, caplog):
    monkeypatch.setattr(pool, "_CLOSE_S", 0.3)
    loader = FastLoader(packed, 8, shuffle=False, workers=1)
    with caplog.at_level(logging.WARNING, logger="fastload"):
        for batch in loader:
            if batch.rows[0] == 8:
                hangs.begun.wait()
                break
    assert "did not finish its batch" in caplog.text
    hangs.set()
    loader.set_epoch(0)
    assert_whole(loader, pixels)
    loader.close()


def test_a_name_that_cannot_be_read_is_a_row_number(packed, hangs, monkeypatch):
    monkeypatch.setattr(PackedInput, "name_of", lambda self, row: hangs.wait() and "never")
    loader = FastLoader(packed, 8, shuffle=False, workers=Workers(1, timeout=0.3))
    with pytest.raises(WorkerTimeoutError, match=r"begins with row 16 \(8 rows"):
        list(loader)
    loader.close()


def test_reading_threads_are_warned_of_too(packed, pixels, hangs, monkeypatch):
    monkeypatch.setattr(waiting, "WARN_AFTER_S", 0.3)
    loader = FastLoader(packed, 8, shuffle=False, workers=1)
    threading.Timer(1.2, hangs.set).start()
    with pytest.warns(UserWarning, match=r"(?s)no batch has come for .* s.*in hanging.*timeout=\.\.\."):
        assert_whole(loader, pixels)
    loader.close()


@pytest.mark.parametrize("cache", ["device", "host"])
def test_filling_a_cache_times_out_too(packed, hangs, cache):
    device = Device(patience=1)
    loader = FastLoader(packed, 8, cache=cache, device=device, workers=Workers(timeout=0.5))
    with pytest.raises(WorkerTimeoutError, match="in hanging"):
        iter(loader)
    device.drain()
    loader.close()


def test_auto_workers_and_transforms_take_a_timeout(packed, start):
    start("fork")
    workers = Workers("auto", timeout=600)
    loader = FastLoader(
        PackedDataset(packed, transform=as_it_is), 8, workers=workers, transform=[RandomHorizontalFlip()]
    )
    assert len(list(loader)) == N // 8
    loader.close()


def test_a_wait_counts_from_its_begin_however_often_it_is_looked_at(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now[0])
    patience = waiting.Patience(10.0)
    for _ in range(2):  # each wait anew
        patience.begin()
        for passed in (0, 4, 8):
            now[0] += 4 * (passed > 0)
            assert patience.left(str) == 10 - passed
        now[0] += 2
        with pytest.raises(WorkerTimeoutError, match="within timeout=10 s"):
            patience.left(str)


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf"), "5", None, True])
def test_a_timeout_is_a_number_of_seconds(packed, timeout):
    with pytest.raises(OptionError, match=r"timeout=.*seconds.*0 waits"):
        Workers(timeout=timeout)
    assert FastLoader(packed, 8, workers=Workers(timeout=np.float32(2.5))) is not None


@pytest.mark.parametrize("error", [ValueError, FastloadError])
def test_the_text_of_an_error_in_a_worker_is_bounded(packed, start, error):
    start("fork")
    loader = FastLoader(PackedDataset(packed, transform=functools.partial(raises, error)), 8, workers=1)
    with pytest.raises(FastloadError) as caught:
        list(loader)
    said = str(caught.value)
    assert len(said) < 50_000 and "begin xxx" in said and "xxx end" in said and "characters left out" in said
    loader.close()


def raises(error, sample):
    raise error("begin " + "x" * 50_000_000 + " end")


def test_short_texts_stay_as_they_are():
    assert shortened("a" * 10_000) == "a" * 10_000
    said = shortened("b" + "a" * 20_000 + "e", most=100)
    assert said.startswith("ba") and said.endswith("ae") and "(19,902 characters left out)" in said


@pytest.mark.parametrize("python", [False, True])
def test_threads_that_iterate_over_one_loader_get_whole_batches_or_are_told(packed, pixels, start, python):
    start("fork")
    source = PackedDataset(packed, transform=as_it_is) if python else packed
    loader = FastLoader(source, 8, shuffle=False, workers=1)
    told, wrong, whole = [], [], []

    def consume():
        for _ in range(5 if python else 20):
            rows = []
            try:
                for batch in loader:
                    rows += batch.rows.tolist()
                    if not torch.equal(batch[0], torch.from_numpy(pixels[batch.rows.numpy()]).permute(0, 3, 1, 2)):
                        wrong.append(rows)
                    time.sleep(0.0005)
                whole.append(rows)
            except OptionError as error:
                told.append(str(error))
            except BaseException as error:  # noqa: BLE001  # looked at below, in the main thread
                wrong.append(error)

    threads = [threading.Thread(target=consume, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert not any(thread.is_alive() for thread in threads) and not wrong
    assert all(rows == list(range(N)) for rows in whole)
    assert told and all("newer iter() of the same FastLoader" in one and "another FastLoader" in one for one in told)
    loader.close()
    gc.collect()
