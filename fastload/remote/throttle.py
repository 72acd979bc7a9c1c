"""Bounds how many requests are in progress at once, by what the server bears: `Throttle`; and waits between tries."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Measured against tests/remote/range_server.py on two cores, 32 requests in flight, answers after 50 ms, refusals at
# once: of 213 requests/s allowed, a third of full rate, it served 1.00 and 1.03 in two runs of 8 s, 3 and 5 % of all
# requests were refused, and full rate was back after 1.4 s. Of 60/s allowed: 1.05 and 9 %. Unpaced, with answers
# after 100 ms, it served 0.72 of 100/s. With CUT = 0.9 the refusals were three times as many.
CUT = 0.85  # of the limit, once a round trip
GROWTH = 1 / 20  # for an answer, until that is one for a round trip
LEAST = 1 / 2  # also where refusals are chance, and fewer requests are refused as often
QUIET_S = 2.0  # without a refusal, and the limit grows by a quarter for an answer
LONGEST_BACKOFF_S = 5.0


class Throttle:
    """At most `limit` requests at a time: fewer after a refusal, one more for each round trip without, up to `most`.

    A server refuses by 503, 429 or no answer in time. Refusals of one round trip count once: all were sent before any
    came back. Refusals come back much sooner than answers; a slot is held for a round trip even so, or the same slot
    would be refused many times while one answer is under way. Below `most`, requests begin evenly spread over a round
    trip: in bursts, a server that counts in short spans would refuse some, and have nothing to do afterwards. So the
    limit is also a rate, `limit` a round trip, and may fall below 1.

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
        self._refused_s = -1e9
        self._heard_s = 0.0  # refusals of requests begun before this led to the last cut

    @contextmanager
    def slot(self) -> Iterator[Permit]:
        """Waits for a slot and holds it within; the outcome of the request is set on it."""
        with self._changed:
            while self._free() <= 0 and not self._closed.is_set():
                self._changed.wait()
            self._active += 1
            now_s = self._clock()
            gap_s = self.round_trip_s / self.limit if self.limit < self.most else 0.0
            begin_s = max(now_s, self._next_s) if gap_s else now_s
            self._next_s = begin_s + gap_s
        if begin_s > now_s:
            self.sleep(begin_s - now_s)
        slot = Permit(self._clock())
        try:
            yield slot
        finally:
            self._learn(slot)
            with self._changed:
                self._active -= 1
                self._changed.notify(max(0, self._free()))

    def _free(self) -> int:
        return max(1, int(self.limit)) - self._active

    def _learn(self, slot: Permit) -> None:
        """Adjusts the limit by a request's outcome; after a refusal it takes as long as an answer would have taken."""
        took_s = self._clock() - slot.began_s
        with self._changed:
            if slot.outcome == "answered":
                self.round_trip_s += (took_s - self.round_trip_s) / (8 if self.round_trip_s else 1)
                growth = min(GROWTH, self.limit / 40, 1 / self.limit)
                quiet_s = max(QUIET_S, 4 * self.round_trip_s / min(1.0, self.limit))
                if self._clock() - self._refused_s > quiet_s:
                    growth = max(growth, self.limit / 4)
                self.limit = min(float(self.most), self.limit + growth)
            elif slot.outcome == "refused":
                self._refused_s = self._clock()
                if slot.began_s >= self._heard_s:
                    self.limit = max(self.limit * CUT, LEAST)
                    self._heard_s = self._refused_s + self.round_trip_s
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


class Permit:
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
