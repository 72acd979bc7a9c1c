"""Who waits for whom in a cache that is full or whose server fails: nobody for ever, and old failures end."""

from __future__ import annotations

import gc
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from child_processes import child_environment
from remote_files import holding, write_kind
from small_files import write_random
from torch.utils.data import DataLoader

from fastload import ChunkWindow, FastLoader, PackedDataset
from fastload.errors import AccessError, CacheError, RemoteError
from fastload.pack.index import index_files
from fastload.read.fetch_ahead import FetchAhead
from fastload.remote import evictor
from fastload.remote.remote_shards import RemoteShards
from fastload.remote.urls import Remote

if TYPE_CHECKING:
    from running_server import RangeServer

LONG_S = 60  # ends a hang


@pytest.fixture
def opened(range_server: RangeServer, tmp_path: Path) -> Iterator[Callable[..., RemoteShards]]:
    """Opens a file of the server through one cache."""
    found: list[RemoteShards] = []

    def open_(name: str, **options: Any) -> RemoteShards:
        dataset = PackedDataset(f"{range_server.url}/{name}", remote=Remote(cache=tmp_path / "cache", **options))
        found.append(dataset.file.remote)  # type: ignore[arg-type]
        return found[-1]

    yield open_
    for one in found:
        one.close()


def shards(folder: Path, number: int) -> None:
    """Shards of 10 chunks of 48 KiB each, and their index, data.h5."""
    options = {"rows": 40, "size": (64, 64, 3), "chunk_rows": 4, "classes": "abc"}
    files = [write_random(folder / f"part-{i}.h5", seed=i, **options) for i in range(number)]
    index_files(files, folder / "data.h5")


def within(call: Callable[[], object]) -> object:
    """Returns what a call gives in a thread; fails where it does not end."""
    done = Future[object]()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as exc:  # noqa: BLE001  # raised in the test
            done.set_exception(exc)

    threading.Thread(target=run, daemon=True).start()
    return done.result(LONG_S)


def test_an_old_error_of_a_header_ends_when_it_has_come(opened, range_server):
    shards(range_server.folder, 2)
    remote = opened("data.h5", give_up_after=0.2)
    header = int(remote.table.headers[1])
    range_server.set(status=500)
    remote.cache.current().announce([header])
    while not remote.cache.current().in_use.failed:
        time.sleep(0.01)
    range_server.set()
    for _ in range(2):
        with holding(remote.cache.current(), [header + 1]):
            pass


def test_chunks_that_did_not_come_take_no_room(opened, range_server):
    shards(range_server.folder, 2)
    remote = opened("data.h5", max_bytes=560_000, give_up_after=0.5)
    (range_server.folder / "part-1.h5").unlink()
    before = remote.room.bound.num_bytes
    for chunk in range(remote.table.data_of(1).start, remote.table.num_chunks):
        with pytest.raises(RemoteError):
            remote.cache.current().hold([chunk])
    assert remote.cache.cached.records.kept().tolist() == [] and remote.room.bound.num_bytes <= before + 2 * 4096
    for chunk in range(6):
        with holding(remote.cache.current(), [chunk]):
            pass


def test_who_evicts_does_not_wait_for_who_waits_for_room(opened, range_server):
    shards(range_server.folder, 3)
    remote = opened("data.h5", max_bytes=560_000, give_up_after=20, in_flight=4)
    fetcher, table = remote.cache.current(), remote.table
    begun = table.data_of(1).start
    for chunk in range(begun, begun + 3):  # as a killed process leaves them: without their header
        remote.cache.cached.records.begin(chunk)
    for chunk in range(11):
        with holding(fetcher, [chunk]):
            pass
    fetcher.evictor.needed = lambda chunks: np.where((chunks >= begun) & (chunks < begun + 3), 1e9, 1.0)
    range_server.set(latency_s=0.3)
    fetcher.announce([int(table.headers[1])])
    last = table.data_of(2).start
    within(lambda: fetcher.hold([int(table.headers[2]), *range(last, last + 3)]))
    within(lambda: fetcher.hold([int(table.headers[1])]))


def test_who_evicts_does_not_wait_for_a_header_that_is_on_its_way(opened, range_server):
    shards(range_server.folder, 2)
    fetcher = opened("data.h5").cache.current()
    header = 11  # of the second shard, which a thread fetches, and maybe has to make room for
    fetcher.in_use.fetching.add(header)

    def look() -> None:
        with fetcher.obtainer.header(1, fetch=False):
            pass

    with pytest.raises(evictor.AbsentError):
        within(look)
    fetcher.in_use.fetching.discard(header)


def test_a_chunk_that_another_dataset_evicts_is_fetched_again_for_who_waits(opened, range_server):
    shards(range_server.folder, 2)
    fetcher = opened("data.h5").cache.current()
    with holding(fetcher, [0, 3]):
        pass
    assert fetcher.in_use.claim(3, announced=False), "as a thread of another dataset does"
    found = Future[None]()
    threading.Thread(target=lambda: found.set_result(fetcher.hold([3])), daemon=True).start()
    while 3 not in fetcher.in_use.awaited:
        time.sleep(0.01)
    fetcher.in_use.unclaim(3, evicted=True)
    found.result(LONG_S)


TWO_JOBS = """
import sys
from fastload import FastLoader, PackedDataset, Remote

url, cache, seed = sys.argv[1:]
data = PackedDataset(url, remote=Remote(cache=cache, max_bytes=17_000_000, give_up_after=600))
loader = FastLoader(data, 32, seed=int(seed), share=None)
print(sum(len(batch[0]) for _ in range(2) for batch in loader))
"""


def test_two_jobs_whose_windows_do_not_fit_into_one_cache_both_end(range_server, tmp_path):
    write_random(range_server.folder / "data.h5", rows=420, size=(128, 128, 3), chunk_rows=10, classes="abc")
    command = [sys.executable, "-c", TWO_JOBS, f"{range_server.url}/data.h5", str(tmp_path / "cache")]
    environment = child_environment()
    jobs = [subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, env=environment) for i in range(2)]
    assert [int(job.communicate(timeout=500)[0]) for job in jobs] == [832, 832]


def test_a_batch_of_more_chunks_than_the_cache_holds_is_an_error_at_once(range_server, tmp_path):
    write_random(range_server.folder / "data.h5", rows=420, size=(64, 64, 3), chunk_rows=4, classes="abc")
    url = f"{range_server.url}/data.h5"
    dataset = PackedDataset(url, remote=Remote(cache=tmp_path, max_bytes="1MB"))
    with pytest.raises(CacheError, match=r"too small: reading rows of \d+ chunks at a time takes .*ChunkSampler"):
        list(DataLoader(dataset, 64, sampler=range(0, 420, 5)))
    assert sum(len(batch[0]) for batch in DataLoader(dataset, 20)) == 420
    with pytest.raises(CacheError, match="or use fewer workers") as caught:
        FastLoader(dataset, 64, shuffle=ChunkWindow(4), workers=8)
    assert "smaller windows" not in str(caught.value)
    with pytest.raises(CacheError, match="smaller windows"):
        FastLoader(dataset, 64, shuffle="full")
    dataset.file.remote.close()


def same(sample: Any) -> Any:
    return sample


def test_an_error_of_the_fetching_process_ends_the_wait_for_its_workers(range_server, tmp_path):
    write_random(range_server.folder / "data.h5", rows=3000, size=(32, 32, 3), chunk_rows=4, classes="abc")
    remote = Remote(cache=tmp_path, max_bytes="6MB", in_flight=2)
    dataset = PackedDataset(f"{range_server.url}/data.h5", transform=same, remote=remote)
    with (
        closing(FastLoader(dataset, 8, shuffle=ChunkWindow(2), workers=2)) as loader,
        pytest.raises(AccessError, match=r"data\.h5: access was refused"),
    ):
        for number, _ in enumerate(loader):
            if number == 5:
                range_server.set(status=403)
    dataset.file.remote.close()


def test_fetching_ahead_goes_on_after_an_outage(range_server, tmp_path, monkeypatch):
    kind = write_kind("shards of jpeg", tmp_path / "kind")
    for path in kind.parent.iterdir():
        (range_server.folder / path.name).write_bytes(path.read_bytes())
    made, init = list[FetchAhead](), FetchAhead.__init__

    def note(self: FetchAhead, *args: Any, **options: Any) -> None:
        made.append(self)
        init(self, *args, **options)

    monkeypatch.setattr(FetchAhead, "__init__", note)
    dataset = PackedDataset(f"{range_server.url}/data.h5", remote=Remote(cache=tmp_path / "cache", give_up_after=0.3))
    range_server.set(status=500)
    with closing(FastLoader(dataset, 4, shuffle=False, workers=1)) as loader:
        with pytest.raises(RemoteError):
            next(iter(loader))
        range_server.set()
        assert sum(1 for _ in loader) == len(loader)
        ahead = made[-1]
        assert ahead._thread is not None and ahead._error is None
    dataset.file.remote.close()


def test_what_is_closed_gives_its_descriptors_back(range_server, tmp_path):
    write_random(range_server.folder / "data.h5", rows=64, size=(16, 16, 3), chunk_rows=4, classes="abc")

    def read() -> None:
        dataset = PackedDataset(f"{range_server.url}/data.h5", remote=Remote(cache=tmp_path))
        dataset[9]
        dataset.file.remote.close()

    def kept() -> list[str]:
        gc.collect()
        links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
        return [os.readlink(link) for link in links if os.path.exists(link) and str(tmp_path) in os.readlink(link)]

    for _ in range(5):
        read()
    assert len(kept()) <= 3, kept()


def test_a_wait_for_room_is_said(opened, range_server, caplog, monkeypatch):
    monkeypatch.setattr(evictor, "_WARNED_AFTER_S", 0.2)
    write_random(range_server.folder / "data.h5", rows=120, size=(64, 64, 3), chunk_rows=4, classes="abc")
    one, other = (opened("data.h5", max_bytes=560_000, give_up_after=2) for _ in range(2))
    one.cache.current().hold([0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    with caplog.at_level(logging.WARNING, "fastload"), pytest.raises(CacheError, match="have been in use for 2 s"):
        other.cache.current().hold([12, 13])
    assert re.search(r"max_bytes of 546\.9 KiB is reached, .*by this process or others", caplog.text)
