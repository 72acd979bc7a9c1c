"""Decides which rows each batch of an epoch holds, on every rank, before anything is read.

Input: a range of rows, seed, epoch, ranks, batch size, options. Output: `EpochPlan`, whose `batches(rank)` yields row
numbers lazily, and states for resuming. All of it is a pure function of its arguments, in O(1) memory in the number of
rows.

Read first: `epoch` (`EpochPlan`), then its parts: `shuffle` (the options), `order` (an epoch's rows in sequence, by the
keyed bijection of `permutation`), `weighted` (rows drawn instead), `shares` (the sequence cut among ranks). Then
`echo_schedule` (which steps use each batch), `cursor` (where a run stands, and its states), `randomness` (how far an
order is from a random one).

Imports `errors` and `system`; NumPy only, no torch.
"""

from __future__ import annotations

from fastload.plan.echo_schedule import Echo, EchoHistory, EchoSchedule, MixedEcho, Pace, Use, check_echo, choose_factor
from fastload.plan.epoch import EpochPlan, PlannedBatch, batch_seed
from fastload.plan.order import ChunkWindow, Ends, ResolvedShuffle, Shuffle, is_drawing, resolve_shuffle
from fastload.plan.permutation import permute
from fastload.plan.shares import rank_share
from fastload.plan.weighted import ClassBatches, Weighted

__all__ = [
    "ChunkWindow",
    "ClassBatches",
    "Echo",
    "EchoHistory",
    "EchoSchedule",
    "Ends",
    "EpochPlan",
    "MixedEcho",
    "Pace",
    "PlannedBatch",
    "ResolvedShuffle",
    "Shuffle",
    "Use",
    "Weighted",
    "batch_seed",
    "check_echo",
    "choose_factor",
    "is_drawing",
    "permute",
    "rank_share",
    "resolve_shuffle",
]
