"""Bounds how many requests are in progress at once, by what the server bears: `Throttle`; and waits between tries."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Measured against tests/remote/range_server.py, which allowed 200 requests a second of 50 ms each and refused the rest
# while 32 were in flight (two of three at full rate): see tests/remote/test_throttle.py.
CUT = 0.85
GROWTH = 1 / 20
LEAST = 1 / 64
LONGEST_BACKOFF_S = 5.0


class Throttle:
    """At most `limit` requests at a time: less after each refusal, one more for each round trip without, up to `most`.

    A server refuses by 503, 429 or no answer in time. Refusals of one round trip count once: all were sent before any
    came back. Refusals come back much sooner than answers; a slot is held for a round trip even so, or the same slot
    would be refused many times while one answer is under way. So `limit` slots make at most `limit` requests a round
    trip, which is a rate; below 1 a slot pauses between its requests.

    Threads share it.

    Args:
        most: requests in progress at once at full rate, 1 or more.
        clock: seconds, as from `time.monotonic`.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self.limit = float(most)
        self.round_trip_s = 0.0  # of answers, smoothed; 0 before the first
        self._clock = clock
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._active = 0
        self._next_s = 0.0  # the next request begins no sooner
        self._heard_s = 0.0  # refusals of requests begun before this are those of the last cut

    @contextmanager
    def slot(self) -> Iterator[Slot]:
        """Waits for a slot and holds it within; the outcome of the request is set on it."""
        with self._changed:
            while not self._closed.is_set():
                wait_s = self._next_s - self._clock()
                if wait_s <= 0 and self._active < max(1, int(self.limit)):
                    break
                self._changed.wait(wait_s if wait_s > 0 else None)
            self._active += 1
            slot = Slot(self._clock())
            if self.limit < 1:
                self._next_s = slot.began_s + self.round_trip_s / self.limit
        try:
            yield slot
        finally:
            self._learn(slot)
            with self._changed:
                self._active -= 1
                self._changed.notify_all()

    def _learn(self, slot: Slot) -> None:
        """Adjusts the limit by a request's outcome; after a refusal it takes as long as an answer would have taken."""
        took_s = self._clock() - slot.began_s
        with self._changed:
            if slot.outcome == "answered":
                self.round_trip_s += (took_s - self.round_trip_s) / (8 if self.round_trip_s else 1)
                self.limit = min(float(self.most), self.limit + min(GROWTH, 1 / self.limit))
            elif slot.outcome == "refused" and slot.began_s >= self._heard_s:
                self.limit = max(self.limit * CUT, LEAST)
                self._heard_s = self._clock() + self.round_trip_s
        if slot.outcome == "refused":
            self.sleep(self.round_trip_s * random.uniform(0.5, 1.5) - took_s)

    def sleep(self, seconds: float) -> bool:
        """Waits; returns False at once when `close` was or is called."""
        return not self._closed.wait(max(0.0, seconds))

    def close(self) -> None:
        """Lets nobody wait any longer."""
        with self._changed:
            self._closed.set()
            self._changed.notify_all()


class Slot:
    """One request's place: when it began, and by `outcome` how it ended: "answered", "refused", or "" for neither."""

    def __init__(self, began_s: float) -> None:
        self.began_s = began_s
        self.outcome = ""


def backoff_s(failures: int) -> float:
    """Returns how long to wait after the nth failure in a row: at random from 0 to 0.1 s, doubled each time, up to 5 s.

    Full jitter: clients that failed together do not come back together (M. Brooker, "Exponential Backoff And Jitter",
    AWS Architecture Blog, 2015).
    """
    return random.uniform(0.0, min(LONGEST_BACKOFF_S, 0.1 * 2 ** min(failures - 1, 10)))
