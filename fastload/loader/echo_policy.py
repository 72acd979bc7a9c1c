"""The echo factor of each epoch: given, or chosen from the waits of the epoch before.

With several ranks, each chooses the factor it needs when its pass ends and publishes it through the process group's
store; whoever needs the next epoch's factor reads all ranks' factors. The largest is taken: all ranks take equally many
steps, and wait for the slowest source.
"""

from __future__ import annotations

import logging

from fastload.distributed.consensus import Agreement, open_agreement
from fastload.distributed.ranks import Share
from fastload.loader.iteration import PassCounter
from fastload.plan import Echo, EchoHistory, EchoSchedule, MixedEcho, Pace, check_echo, choose_factor
from fastload.prefetch.auto_workers import AutoWorkers
from fastload.prefetch.pool import Pool
from fastload.prefetch.process_pool import ProcessPool

_log = logging.getLogger("fastload")


class EchoPolicy:
    """Decides the echo factors of a loader's epochs: always the same, or chosen from each pass by `choose_factor`.

    A choice is agreed on with the other ranks, if there are any.
    """

    def __init__(
        self, factor: int = 1, distance: int = 0, *, chooses: bool = False, agreement: Agreement | None = None
    ) -> None:
        self.chooses = chooses
        self._factor = factor
        self._distance = distance
        self._agreement = agreement
        self._history = EchoHistory()
        self._wish = 1
        self._reason = ""
        self._passes = 0  # that ended; the same number on every rank
        self._published = 0  # passes whose wish was published
        self._decided = True

    def next_schedule(self, num_batches: int) -> EchoSchedule:
        """Returns the schedule of so many batches of the next epoch, with the factor that the ranks agree on.

        Raises ShareError if a rank does not publish in time what it needs.
        """
        if not self._decided:
            factor, reason = self._wish, self._reason
            if self._agreement is not None:
                self._publish()
                factor = self._agreement.largest(self._passes)
                if factor != self._wish:
                    reason += f", which asks for {self._wish}; another rank needs {factor}"
            if factor != self._factor:
                said = 'echo="auto": each batch is used %d times from now on, not %d: %s'
                _log.info(said, factor, self._factor, reason)
            self._factor, self._decided = factor, True
        return EchoSchedule(num_batches, self._factor, self._distance)

    def schedule_of(self, num_batches: int, factor: int) -> EchoSchedule:
        """Returns the schedule of so many batches of an epoch that began with a factor, by a loaded state.

        A given factor counts, not the state's.
        """
        return EchoSchedule(num_batches, factor if self.chooses else self._factor, self._distance)

    def adopt(self, factor: int) -> None:
        """Takes over a state's factor, unless one was given, until a pass of the epoch with it ends."""
        if self.chooses:
            self._factor, self._decided = factor, True

    def ended(self, pace: Pace, factor: int) -> None:
        """Chooses this rank's next factor from the pace of a pass, once for each, and publishes it; never waits."""
        if not self.chooses:
            return
        self._wish, self._reason, self._history = choose_factor(pace, factor, self._history)
        self._passes += 1
        self._decided = False
        try:
            self._publish()
        except RuntimeError:
            # A pass may end when the process group is gone already. Whoever asks for the next factor gets the error.
            _log.debug("the echo factor of pass %d could not be published", self._passes, exc_info=True)

    def _publish(self) -> None:
        if self._agreement is not None and self._published < self._passes:
            self._agreement.publish(self._passes, self._wish)
            self._published = self._passes


def open_echo(echo: Echo, share: Share) -> EchoPolicy:
    """Returns the policy of an `echo` option. OptionError: it is invalid, or "auto" where ranks cannot agree."""
    echo = check_echo(echo)
    if isinstance(echo, int):
        return EchoPolicy(echo)
    if isinstance(echo, MixedEcho):
        return EchoPolicy(echo.factor, echo.distance)
    agreement = open_agreement(share, option='echo="auto"', what="how many times it needs each batch")
    return EchoPolicy(chooses=True, agreement=agreement)


def pass_ended(echo: EchoPolicy, auto: AutoWorkers | None, pool: Pool, counter: PassCounter, pace: Pace) -> None:
    """Lets echo and workers be chosen for the next epoch. No method: a pass must not keep its loader alive."""
    echo.ended(pace, counter.echo)
    if auto is not None and isinstance(pool, ProcessPool) and (watched := pool.pass_meter) is not None:
        measured = watched.measured(pace.batches, pace.stall_s + pace.work_s, counter.first_waited_s, pool.busy_s())
        # What the host waits for while a device still works is no reason for more workers.
        measured = measured._replace(starved_s=min(measured.starved_s, pace.stall_s))
        auto.ended(measured, pool.number, worker_bytes=pool.worker_bytes)
