"""Which rows each batch holds, decided before anything is read. NumPy only, O(1) memory in the number of rows.

`options` names the shuffles and ends, `permutation` is the keyed bijection beneath them, `order` puts an epoch's rows
in sequence, `shares` cuts the sequence among ranks, `epoch` cuts batches, `echo` says which steps use each of them,
`state` saves where a run stands.
"""

from __future__ import annotations

from .echo import (
    Echo,
    EchoHistory,
    EchoSchedule,
    MixedEcho,
    Pace,
    Use,
    check_echo,
    choose_factor,
)
from .epoch import EpochPlan, PlannedBatch, batch_seed
from .fixed_shares import with_shares_of
from .options import ChunkWindow, Ends, ResolvedShuffle, Shuffle, resolve_ends, resolve_shuffle
from .permutation import permute, unpermute
from .shares import Segment, rank_share
from .state import PlanState, check_state, state_from_dict, state_to_dict

__all__ = [
    "ChunkWindow",
    "Echo",
    "EchoHistory",
    "EchoSchedule",
    "Ends",
    "EpochPlan",
    "MixedEcho",
    "Pace",
    "PlanState",
    "PlannedBatch",
    "ResolvedShuffle",
    "Segment",
    "Shuffle",
    "Use",
    "batch_seed",
    "check_echo",
    "check_state",
    "choose_factor",
    "permute",
    "rank_share",
    "resolve_ends",
    "resolve_shuffle",
    "state_from_dict",
    "state_to_dict",
    "unpermute",
    "with_shares_of",
]
