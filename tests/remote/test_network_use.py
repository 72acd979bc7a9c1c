"""What a loader fetched is counted by epoch; a loop that waits for the network hears it from its meter or doctor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from small_files import write_random

from fastload import ChunkWindow, FastLoader, Meter, PackedDataset
from fastload.remote.urls import Remote
from fastload.timing.results import NETWORK, NetworkUse, Verdict

if TYPE_CHECKING:
    from running_server import RangeServer

ROWS, SIZE, CHUNK_ROWS, B = 1200, (32, 32, 3), 20, 40
CHUNKS, ROW = ROWS // CHUNK_ROWS, 32 * 32 * 3


@pytest.fixture
def served(range_server: RangeServer) -> RangeServer:
    """The server, with out.h5: 60 chunks of 60 KiB."""
    write_random(range_server.folder / "out.h5", rows=ROWS, size=SIZE, classes="abc", chunk_rows=CHUNK_ROWS)
    return range_server


@pytest.fixture
def loader_of(served: RangeServer, tmp_path: Path) -> Iterator[Any]:
    """Makes a FastLoader of out.h5 with options of `Remote`; its cache begins empty."""
    made = []

    def make(**options: Any) -> FastLoader:
        dataset = PackedDataset(f"{served.url}/out.h5", remote=Remote(cache=tmp_path / "cache", **options))
        made.append((FastLoader(dataset, B, workers=2, shuffle=ChunkWindow(2)), dataset))
        return made[-1][0]

    yield make
    for loader, dataset in made:
        loader.close()
        dataset.file.remote.close()


def train(loader: FastLoader, epochs: int, step_s: float = 0.0) -> Verdict:
    """Runs a loop whose steps take so long, and returns its verdict."""
    with Meter(sample_every_s=0) as meter:
        for _ in range(epochs):
            for _ in meter.watch(loader):
                time.sleep(step_s)
    return meter.verdict


def test_an_epoch_counts_what_came_and_the_next_one_what_lay_in_the_cache(loader_of, served):
    loader = loader_of(in_flight=4)  # few chunks are held from one epoch to the next
    found = []
    for _ in range(2):
        for batch in loader:
            assert len(batch[0]) == B
        found.append(loader.stats)
    first, second = found
    # The rows of an epoch lie in all chunks; what is fetched ahead of the second epoch counts in the first.
    assert first.fetched_chunks + second.fetched_chunks == CHUNKS
    assert first.fetched_bytes + second.fetched_bytes == ROWS * ROW
    assert second.fetched_chunks == 0 and first.cache_hits + second.cache_hits > CHUNKS // 2
    gets = [request for request in served.log() if request["method"] == "GET"]
    assert CHUNKS <= first.requests + second.requests <= len(gets) and first.retries == second.retries == 0
    assert first.network_wait_s >= 0 <= second.network_wait_s
    assert loader.stats == second, "what comes after the epoch is not counted in it"


def test_a_file_of_this_machine_counts_nothing(served):
    loader = FastLoader(served.folder / "out.h5", B)
    verdict = train(loader, 1)
    stats = loader.stats
    assert (stats.fetched_bytes, stats.fetched_chunks, stats.cache_hits, stats.requests) == (0, 0, 0, 0)
    assert stats.network_wait_s == 0.0 and NETWORK not in verdict.sentence and "network" not in str(verdict.evidence)


def test_requests_that_are_sent_again_are_counted(loader_of, served):
    loader = loader_of()
    served.set(refused=0.3)
    for _ in loader:
        pass
    assert loader.stats.retries > 5 and loader.stats.requests >= loader.stats.fetched_chunks + loader.stats.retries


def test_a_loop_that_waits_for_a_slow_connection_is_told_the_network_and_to_ask_for_more_at_once(loader_of, served):
    loader = loader_of(in_flight=2)
    served.set(bytes_per_s=400_000)
    verdict = train(loader, 1)
    assert verdict.cause == NETWORK and verdict.worth_making and verdict.cures[0].cause == NETWORK
    assert verdict.cures[0].change == "ask for more at once: Remote(in_flight=4) instead of 2"
    assert "/s with " in verdict.sentence and "of at most 2 requests in flight, none refused" in verdict.sentence
    (line,) = [line for line in verdict.evidence if line.startswith("over the network from")]
    assert f"{served.url}/out.h5 came {CHUNKS} chunks" in line or "chunks (" in line
    assert any("train on: later epochs find in the cache" in line for line in verdict.evidence)
    assert not any(cure.cause in ("too few workers", "too many workers") for cure in verdict.cures)


def test_a_loop_that_the_network_keeps_up_with_is_not_told_of_it(loader_of):
    loader = loader_of()
    for _ in range(2):  # the cache is warm then
        for _ in loader:
            pass
    verdict = train(loader, 2, step_s=0.01)
    assert verdict.cause == "compute" and NETWORK not in verdict.sentence
    (line,) = [line for line in verdict.evidence if "over the network" in line]
    assert line.startswith(f"nothing came over the network from {loader.dataset.file.name}")


def test_chunks_that_come_again_each_epoch_call_for_a_larger_cache(loader_of, served):
    loader = loader_of(in_flight=4, max_bytes=2 * 2**20)  # of 3.5 MiB
    served.set(bytes_per_s=1_000_000)
    verdict = train(loader, 3)
    assert verdict.cause == NETWORK
    changes = [verdict.cures[0].change, *verdict.evidence]
    assert any("give the cache room for more: Remote(max_bytes=...)" in text for text in changes)
    assert any("of them not for the first time" in line for line in verdict.evidence)


def test_a_server_that_refuses_is_not_to_be_asked_for_more(loader_of, served):
    served.set(requests_per_s=40)
    verdict = train(loader_of(), 1)
    assert verdict.cause == NETWORK and "refused (the server accepts about" in verdict.sentence
    assert "in_flight=" not in verdict.cures[0].change and "send fewer requests" in verdict.cures[0].change


def test_a_meter_adds_up_what_came_in_all_passes(loader_of):
    loader = loader_of(in_flight=4)
    with Meter(sample_every_s=0) as meter:
        for _ in range(2):
            for _ in meter.watch(loader):
                pass
        whole = meter.demands().network
        for number, _ in enumerate(meter.watch(loader)):
            if number == 20:
                running = meter.demands().network
                break
    assert isinstance(whole, NetworkUse) and isinstance(running, NetworkUse)
    assert whole.chunks == CHUNKS and whole.url == loader.dataset.file.name and whole.in_flight == 4
    assert running.elapsed_s > whole.elapsed_s and running.hits > whole.hits


SCRIPT = """
import os, sys
from fastload import ChunkWindow, FastLoader, PackedDataset, Remote

loader = FastLoader(PackedDataset(sys.argv[1], remote=Remote(in_flight=2)), 40, workers=2, shuffle=ChunkWindow(2))
for epoch in range(2):
    for images, labels in loader:
        pass
"""


@pytest.mark.slow
def test_the_doctor_of_a_script_names_the_network(served, tmp_path):
    served.set(latency_s=0.05)
    (tmp_path / "train.py").write_text(SCRIPT)
    words = [sys.executable, "-m", "fastload", "doctor", "--json", "out.json", "--", sys.executable, "train.py"]
    done = subprocess.run(
        [*words, f"{served.url}/out.h5"],
        cwd=tmp_path,
        env=os.environ | {"FASTLOAD_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert f"verdict: {NETWORK} binds" in done.stderr and "requests in flight, none refused" in done.stderr
    assert f"over the network from {served.url}/out.h5" in done.stderr
    assert str(served.folder) not in done.stderr and "waiting for the network" in json.dumps(found)
