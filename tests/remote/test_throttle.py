"""How many requests are in progress at once: by a clock of the test's own, and against a server that refuses."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from fastload.remote import throttle
from fastload.remote.client import open_client
from fastload.remote.throttle import Throttle, backoff_s
from fastload.remote.urls import Remote


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Unslept(Throttle):
    """Sleeps on the test's clock."""

    def __init__(self, most: int) -> None:
        self.clock = Clock()
        super().__init__(most, self.clock)

    def sleep(self, seconds: float) -> bool:
        self.clock.now_s += max(0.0, seconds)
        return True

    def request(self, outcome: str, took_s: float = 0.05) -> None:
        with self.slot() as slot:
            self.clock.now_s += took_s
            slot.outcome = outcome


def test_it_begins_at_full_rate() -> None:
    assert Throttle(32).limit == 32


def test_refusals_of_one_round_trip_cut_once() -> None:
    requests = Unslept(32)
    requests.request("answered")
    slots = [requests.slot() for _ in range(10)]
    for entered in [slot.__enter__() for slot in slots]:
        entered.outcome = "refused"
    for slot in slots:
        slot.__exit__(None, None, None)
    assert requests.limit == pytest.approx(32 * throttle.CUT)


def test_refusals_of_the_next_round_trip_cut_again() -> None:
    requests = Unslept(32)
    requests.request("answered")
    for _ in range(2):
        requests.request("refused", 0.2)
        requests.clock.now_s += 0.2
    assert requests.limit == pytest.approx(32 * throttle.CUT**2)


def test_a_broken_answer_changes_nothing() -> None:
    requests = Unslept(32)
    requests.request("")
    assert requests.limit == 32


def test_the_limit_has_a_floor_and_comes_back_to_full() -> None:
    requests = Unslept(32)
    requests.request("answered")
    for _ in range(200):
        requests.request("refused", 0.2)
        requests.clock.now_s += 0.2
    assert requests.limit == throttle.LEAST
    for _ in range(200):
        requests.request("answered")
    assert requests.limit == 32


def test_below_full_rate_requests_begin_evenly_spread() -> None:
    requests = Unslept(8)
    requests.request("answered", 0.8)
    requests.request("refused", 0.0)
    gap_s = requests.round_trip_s / requests.limit
    began = []
    for _ in range(3):
        with requests.slot() as slot:
            began.append(slot.began_s)
    assert began[2] - began[1] == pytest.approx(gap_s) and began[1] - began[0] == pytest.approx(gap_s)


def test_never_more_than_the_limit_at_once() -> None:
    requests, lock = Throttle(4), threading.Lock()
    active, most = 0, 0

    def work(_: int) -> None:
        nonlocal active, most
        with requests.slot() as slot:
            with lock:
                active += 1
                most = max(most, active)
            slot.outcome = "answered"
            with lock:
                active -= 1

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(500)))
    assert 1 <= most <= 4


def test_close_lets_waiting_threads_go() -> None:
    requests = Throttle(1)
    entered = threading.Event()

    def work() -> None:
        with requests.slot():
            entered.set()

    with requests.slot():
        waiting = threading.Thread(target=work)
        waiting.start()
        assert not entered.is_set()
        requests.close()
        waiting.join()
    assert entered.is_set() and not requests.sleep(3600)


def test_waits_grow_up_to_five_seconds_and_are_drawn() -> None:
    assert all(0 <= backoff_s(1) <= 0.1 for _ in range(100))
    assert all(0 <= backoff_s(1000) <= 5 for _ in range(100))
    assert len({backoff_s(5) for _ in range(10)}) == 10


def test_a_server_that_refuses_most_serves_what_it_allows(range_server) -> None:
    """Counted in requests, by the server, since no test looks at the clock: few of all are refused."""
    (range_server.folder / "x").write_bytes(bytes(1000))
    client, key = open_client(f"{range_server.url}/x", Remote(in_flight=32, give_up_after=60))
    range_server.set(latency_s=0.02, requests_per_s=500)
    with client, ThreadPoolExecutor(32) as pool:
        list(pool.map(lambda _: client.read(key, 0, 1000), range(1500)))
        refused = sum(entry["status"] == 503 for entry in range_server.log())
        assert 0 < refused < 0.25 * len(range_server.log())
        assert refused == client.counts.throttled
        range_server.set(latency_s=0.001)
        while client.counts.requests < 20_000 and client.allowed < 32:
            list(pool.map(lambda _: client.read(key, 0, 1000), range(100)))
        assert client.allowed == 32, "not back at full rate"
    assert range_server.most_at_once() <= 33  # the log is one
