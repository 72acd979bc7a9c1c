"""Whether a saved epoch can go on where ranks have fixed shares, or no longer have them."""

from __future__ import annotations

from dataclasses import replace

from fastload.errors import StateError

from .epoch import EpochPlan
from .shares import Segment
from .state import PlanState


def with_shares_of(plan: EpochPlan, state: PlanState, *, keeps_all: bool) -> PlanState:
    """The state as it can go on with the ranks, batches and shares of a plan.

    Within an epoch a state of fixed shares needs the very ranks and batches that it was saved with, and fixed shares;
    any other state needs ranks that can have any row. Between epochs everything may change.

    Args:
        plan: of the whole epoch of the state, as the loader would begin it.
        state: of the same data and shuffle.
        keeps_all: whether the loader can have fixed shares though its plan has none.

    Raises:
        StateError: the epoch is under way with other shares; the message says which.
    """
    here = Segment(plan.world_size, plan.batch_size, 0)
    done = [segment for segment in state.segments if segment.steps]
    if not done:
        # The batch in hand, whose echoes were counted, is another one with other shares.
        as_saved = state.fixed_shares == plan.fixed_shares
        return state if as_saved else replace(state, fixed_shares=plan.fixed_shares, echo_position=0)
    alike = all(segment[:2] == here[:2] for segment in done)
    if state.fixed_shares == plan.fixed_shares and (alike or not plan.fixed_shares):
        return state
    if state.fixed_shares and alike and keeps_all:
        return state
    last = done[-1]
    saved = replace(
        plan,
        world_size=last.world_size,
        batch_size=last.batch_size,
        ends=state.ends,
        segments=state.segments,
        fixed_shares=False,  # the number of steps is the same, and those of any ranks can be counted
    )
    if saved.num_steps == 0:
        all_steps = here._replace(steps=plan.num_steps)
        return replace(state, fixed_shares=plan.fixed_shares, echo_position=0, segments=(all_steps,))
    then, now = ("fixed" if fixed else "changing" for fixed in (state.fixed_shares, plan.fixed_shares))
    mend = 'cache="device" and the state\'s world and batch size' if state.fixed_shares else 'cache="host" or None'
    raise StateError(
        f"the state was saved within an epoch of {then} shares, world size {last.world_size}, batch size "
        f"{last.batch_size}; this loader has {now} shares, world size {here.world_size}, batch size {here.batch_size}, "
        f"and would need rows that other ranks keep. Go on with {mend}, or from a state saved at an epoch's end."
    )
