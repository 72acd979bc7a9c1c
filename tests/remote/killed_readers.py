"""Readers of a dataset behind a URL that are killed: `python killed_readers.py URL CACHE MAX_BYTES KILLS`.

Three forks of this process read batches, and compare them, through one cache. A random one is killed and replaced after
a random number of batches, KILLS times. Prints how many readers ended by themselves, which is a failure.
"""

from __future__ import annotations

import os
import random
import select
import signal
import sys
import traceback

import numpy as np

from fastload.read.reader import open_rows
from fastload.remote.open_url import open_remote
from fastload.remote.urls import Remote

READERS = 3
LIMIT_S = 120  # ends a hang


def read_for_ever(url: str, cache: str, max_bytes: int, seed: int, pipe: int) -> None:
    """Reads batches of neighbouring rows and compares them; says so by a byte through the pipe after each."""
    file = open_remote(url, Remote(cache=cache, max_bytes=max_bytes, in_flight=4, give_up_after=30))
    reader = open_rows(file, ["images", "labels"], "map", check="always")
    rng = np.random.default_rng(seed)
    outs = {"images": np.empty((8, 16, 16, 3), np.uint8), "labels": np.empty(8, np.int64)}
    while True:
        first = rng.integers(0, file.num_rows - 20)
        reader.gather(np.sort(rng.choice(np.arange(first, first + 20), 8, replace=False)), outs)
        os.write(pipe, b".")


def started(url: str, cache: str, max_bytes: int, seed: int, pipe: int) -> int:
    """Returns the number of a forked reader. No client of an object store was opened before in this process."""
    child = os.fork()
    if child == 0:
        signal.alarm(LIMIT_S)
        try:
            read_for_ever(url, cache, max_bytes, seed, pipe)
        except BaseException:  # noqa: BLE001  # shown, and counted by its exit code
            traceback.print_exc()
        finally:
            os._exit(3)
    return child


def wait_for_bytes(pipe: int, count: int) -> None:
    """Returns when so many batches have been read since."""
    os.set_blocking(pipe, False)
    while count > 0:
        assert select.select([pipe], [], [], LIMIT_S)[0], "nobody reads any more"
        count -= len(os.read(pipe, count))


def kill(url: str, cache: str, max_bytes: int, kills: int) -> int:
    """Returns how many readers ended by themselves."""
    randoms = random.Random(0)
    out, into = os.pipe()
    readers = [started(url, cache, max_bytes, seed, into) for seed in range(READERS)]
    ended_alone = 0
    try:
        for number in range(kills):
            wait_for_bytes(out, randoms.randrange(1, 40))
            victim = randoms.choice(readers)
            os.kill(victim, signal.SIGKILL)
            ended_alone += os.WIFEXITED(os.waitpid(victim, 0)[1])
            readers[readers.index(victim)] = started(url, cache, max_bytes, READERS + number, into)
        wait_for_bytes(out, 100)
    finally:
        for reader in readers:
            os.kill(reader, signal.SIGKILL)
            ended_alone += os.WIFEXITED(os.waitpid(reader, 0)[1])
    return ended_alone


if __name__ == "__main__":
    print(kill(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
