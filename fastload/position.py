"""How far an epoch is, and how a saved state becomes that again."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fastload.errors import StateError
from fastload.plan import EchoSchedule, EpochPlan, PlanState, Segment


@dataclass
class Position:
    """How far an epoch is; what a state saves.

    Attributes:
        plan: of the epoch, or of what was left of it when it was resumed.
        schedule: which of the plan's batches each step uses; None: the factor is not asked for yet.
        steps: of the schedule, those done. Batches that were in use when the epoch was resumed are read again.
    """

    plan: EpochPlan
    schedule: EchoSchedule | None = None
    steps: int = 0

    @property
    def uses(self) -> EchoSchedule:
        """The schedule, where it is decided."""
        assert self.schedule is not None, "nobody asked for the factor of this epoch"
        return self.schedule

    @property
    def steps_left(self) -> int:
        """Steps still to come, echoes included."""
        return max(0, self.uses.num_steps - self.steps)

    @property
    def finished(self) -> bool:
        """Whether no step is left."""
        return self.steps >= self.uses.num_steps

    def progress(self) -> tuple[tuple[Segment, ...], int]:
        """`segments` and `echo_position` of a state."""
        done = self.uses.finished(self.steps)
        segments, echo_position = self.plan.segments_after(done), self.steps - done * self.uses.factor
        if echo_position:
            # Whose batches are in use: their echoes are done only for ranks and batches of this size.
            segments = (*segments, Segment(self.plan.world_size, self.plan.batch_size, 0))
        return segments, echo_position


def resumed(state: PlanState, plan: EpochPlan, schedule: EchoSchedule) -> Position:
    """Where a state leaves an epoch, finished or not.

    Args:
        state: of the same data and order.
        plan: with the state's epoch and segments, and the world, batch size and ends that go on.
        schedule: of the plan's batches.

    Raises:
        StateError: the state counts more steps than its batches have.
    """
    last = state.segments[-1] if state.segments else Segment(plan.world_size, plan.batch_size, 0)
    saved = replace(plan, world_size=last.world_size, batch_size=last.batch_size, ends=state.ends)
    theirs = EchoSchedule(saved.num_steps, state.echo, state.echo_distance)
    steps = state.echo_position
    if steps and (steps >= theirs.num_steps or theirs.finished(steps)):
        raise StateError(f"the loader state is damaged: echo_position is {steps}, of {saved.num_steps} batches left")
    same = (
        (last.world_size, last.batch_size) == (plan.world_size, plan.batch_size)
        and (theirs.factor, theirs.distance) == (schedule.factor, schedule.distance)
        # Other ends do not matter to a single batch.
        and (not theirs.distance or theirs.num_batches == schedule.num_batches)
    )
    if steps and not same:
        # Of the batches in use each row was used once at least.
        plan = replace(plan, segments=saved.segments_after(theirs.begun(steps)))
        saved, steps = replace(saved, segments=plan.segments), 0
    if state.segments and saved.num_steps == 0:
        # What "drop" left out then may make whole batches now, but that epoch is over.
        plan = replace(plan, segments=plan.segments_after(plan.num_steps))
    return Position(plan, replace(schedule, num_batches=plan.num_steps), steps)
