"""Reads a loader's epochs one after another, ahead of the passes over them: an epoch's first batches are there at once.

    epoch 0 [batches ...............]                 epoch 1 [batches ...
    read    [...............][first ones of epoch 1]  [...

The choice of the next reads is a guess: the next epoch, as far as the loop will go. A wrong guess wastes these reads.
"""

from __future__ import annotations

from collections.abc import Iterator

from fastload.plan import EpochPlan, PlannedBatch
from fastload.prefetch.cached_feed import CachedFeed
from fastload.prefetch.device_stage import DeviceBatch, DeviceStage
from fastload.prefetch.process_stream import ProcessFeed
from fastload.prefetch.resolved import Resolved
from fastload.prefetch.thread_stream import ThreadFeed
from fastload.system.threads import ShortSwitchInterval
from fastload.timing.probe import Probe

Feed = ThreadFeed | ProcessFeed | CachedFeed
"""Makes a loader's batches; kept by it from one epoch to the next."""


class EpochsAhead(Iterator[DeviceBatch]):
    """The batches of the epoch that was begun last, on their device; kept from one pass to the next.

    A pass is expected to take all batches of its epoch, or, if the last two passes were left after the same number of
    batches, as many: then no more of each epoch are read, and the next epoch's first ones follow. If it goes on beyond,
    the rest of its epoch is read from there on.
    """

    def __init__(self, options: Resolved) -> None:
        self._options = options
        self._feed: Feed | None = None
        self._probe: Probe | None = None
        self._stage: DeviceStage | None = None  # reads one epoch after another; None: nothing is read
        self._ahead: EpochPlan | None = None  # the epoch whose first batch it gives next; None: it is amid one
        self._stop = 0  # batches of each epoch that it gives; 0: all
        self._left_after = 0  # batches after which the last pass was left, and after which the next one will be
        self._usual_end = 0  # 0: at the epoch's end
        self._switches: ShortSwitchInterval | None = None  # while a pass runs

    def begin(self, feed: Feed, plan: EpochPlan, probe: Probe | None = None) -> None:
        """Begins a pass over a plan's epoch, or the rest of it, whether it was read ahead or not.

        The probe takes note of when batches are there; None: nobody measures.
        """
        is_ahead = self._ahead == plan and (probe is None) == (self._probe is None)
        self._plan, self._probe, self._taken = plan, probe, 0
        if self._stage is None or not is_ahead:
            self._stage = self._read(feed, 0, self._usual_end)
        self._ahead, self._stage.probe = None, probe
        if feed.short_switches:
            self._switches = ShortSwitchInterval()

    def __next__(self) -> DeviceBatch:
        assert self._stage is not None and self._feed is not None, "a pass was begun"
        if self._taken == self._stop > 0:
            self._stage = self._read(self._feed, self._taken)
        batch = next(self._stage)
        self._taken += 1
        return batch

    def depth(self) -> int | None:
        """Returns how many batches lie ready; None: not known."""
        return self._stage.depth() if self._stage is not None else None

    def end(self) -> None:
        """Ends the pass. Unless it took what was expected, reading stops."""
        taken, planned = self._taken, self._plan.num_steps
        left_after = taken if taken < planned else 0
        self._usual_end, self._left_after = left_after if left_after == self._left_after else 0, left_after
        if self._switches is not None:
            self._switches.end()
        if taken == planned or taken == self._stop > 0:
            self._ahead = self._plan.following
        else:
            self.close()

    def close(self) -> None:
        """Throws away what was read ahead. The feed stays open."""
        stage, self._stage, self._feed, self._ahead, self._stop = self._stage, None, None, None, 0
        if stage is not None:
            stage.close()

    def _read(self, feed: Feed, done: int, stop: int = 0) -> DeviceStage:
        """Begins to read the epoch after its first `done` batches, and those after it; `stop`: so many of each."""
        self.close()
        epochs = _epochs_from(self._plan, self._options, done, stop or None)
        # Row numbers in order, lazily -> slots filled ahead -> the device; transformed, once for each use, by the pass.
        stage = DeviceStage(feed.stream(epochs, timed=self._probe is not None), self._options.backend)
        self._feed, self._stop, stage.probe = feed, stop, self._probe
        return stage


def _epochs_from(
    plan: EpochPlan | None, options: Resolved, done: int, stop: int | None
) -> Iterator[tuple[int, Iterator[PlannedBatch]]]:
    """Yields the epochs' numbers, and their batches. No method: who reads ahead must not keep who is read for."""
    while plan is not None:
        planned = plan.batches(options.share.rank, done, stop)
        if (selected := options.data.selected) is not None:
            planned = (batch.selected(selected, options.data.mentions) for batch in planned)
        yield plan.epoch, planned
        plan, done = plan.following, 0
