"""Chooses the cause that binds, and the change to make first."""

from __future__ import annotations

from fastload.measured import Verdict
from fastload.verdict.demands import Demands

CAUSES = (
    "reading",
    "decoding",
    "transform",
    "collate",
    "hand-over",
    "copy to the device",
    "too few workers",
    "too many workers",
    "worker start-up",
    "a slow sample now and then",
    "lock contention",
    "compute",
)
"""What a verdict names, in plain words."""


def judge(demands: Demands) -> Verdict:
    """What binds this loop."""
    raise NotImplementedError
