"""What is said of the network follows from what was measured of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fastload.profiling.verdict import CAUSES, Demands, judge
from fastload.profiling.verdict.sentences import network_changes, network_facts, network_rate
from fastload.timing.results import NETWORK, BatchWork, LoopStep, NetworkUse, WorkTime

MIB = 2**20
USE = NetworkUse(
    elapsed_s=10.0, bytes=400 * MIB, chunks=50, hits=5, requests=52, busy_s=300.0, waited_s=12.0, url="s3://b/out.h5",
    in_flight=32, allowed=32.0, dataset_bytes=900 * MIB, room_bytes=2000 * MIB,
)  # fmt: skip


def demands(network: NetworkUse | None, *, network_s: float = 0.03, wait_s: float = 0.02, **more: Any) -> Demands:
    """A loop of 40 steps of 5 ms over a FastLoader of two threads, whose batches wait so long for the network."""
    steps = tuple(LoopStep(0.025 * number, wait_s, 0.0, 0.0, 0.005, 64) for number in range(40))
    work = BatchWork({"reading": WorkTime(0.002), NETWORK: WorkTime(0.0, network_s)})
    return Demands(
        batches=(work,) * 40, steps=steps, workers=2, ahead=8, cpus=2, by_threads=True, is_fastload=True,
        step_running_s=0.005, epochs=((0.02, 0.0),), starts_s=(0.0,), network=network, **more,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "first"),
    [
        ({}, "ask for more at once: Remote(in_flight=64) instead of 32"),
        ({"busy_s": 50.0}, "bring the data nearer: a bucket in this machine's region, or a faster network"),
        ({"refused": 10}, "send fewer requests: pack larger chunks (--chunk-bytes), or ask for a higher limit there"),
        ({"busy_s": 50.0, "nodes": 4}, 'let each of 4 nodes keep a part of its own: FastLoader(share="node")'),
        (
            {"busy_s": 50.0, "nodes": 4, "by_node": True},
            "bring the data nearer: a bucket in this machine's region, or a",
        ),
        (
            {"again": 40, "room_bytes": 500 * MIB},
            "give the cache room for more: Remote(max_bytes=...), of 500.0 MiB",
        ),
        ({"again": 10, "room_bytes": 500 * MIB}, "ask for more at once: Remote(in_flight=64) instead of 32"),
        (
            {"busy_s": 50.0, "room_bytes": 500 * MIB},
            "give the cache room for all: Remote(max_bytes=...), of 500.0 MiB",
        ),
    ],
)
def test_the_first_change_follows_from_what_was_measured(changed: dict[str, Any], first: str) -> None:
    found = network_changes(demands(replace(USE, **changed)))
    assert found[0].startswith(first)
    assert any("train on" in one for one in found) == ("room_bytes" not in changed)


def test_the_sentence_says_what_came_and_how() -> None:
    verdict = judge(demands(USE))
    assert verdict.cause == NETWORK in CAUSES and verdict.worth_making and not verdict.fastload_helps
    assert verdict.sentence.startswith(
        "waiting for the network binds: 80% of the time the step waits for data (25.0 ms a step), which came at "
        "40.0 MiB/s with 30.0 of at most 32 requests in flight, none refused; first ask for more at once: "
        "Remote(in_flight=64) instead of 32: with every chunk there in time a step would take about 5"
    )
    assert [name for name in CAUSES if name in verdict.sentence] == [NETWORK]
    assert not any("workers" in cure.change for cure in verdict.cures)
    assert network_facts(USE)[0] in verdict.evidence
    assert network_rate(replace(USE, refused=3, allowed=7.25)).endswith(
        "3 of 52 refused (the server accepts about 7.2 at once)"
    )


def test_a_network_that_nothing_waits_for_is_not_the_cause() -> None:
    verdict = judge(demands(USE, network_s=0.0, wait_s=0.0001))
    assert verdict.cause == "compute"
    assert any("over the network from s3://b/out.h5 came 50 chunks" in line for line in verdict.evidence)
    assert not any("next against the network" in line for line in verdict.evidence)


def test_busy_neighbours_do_not_hide_a_network_that_binds() -> None:
    verdict = judge(demands(USE, others_cpus=1.8, job_cpus=0.4))
    assert verdict.cause == NETWORK


def test_counts_are_added_and_subtracted_and_states_are_the_first_ones() -> None:
    later = replace(USE, chunks=70, allowed=8.0)
    assert (later - USE).chunks == 20 and (later - USE).allowed == 8.0 and (later - USE).url == USE.url
    assert (later + USE).chunks == 120 and (later + USE).in_flight == 32
    assert NetworkUse().bytes_per_s == NetworkUse().mean_in_flight == 0.0
