"""Samples that Python code makes: any map-style dataset, or a packed one's Python transform, in worker processes."""

from __future__ import annotations

from fastload.prefetch.inputs import Input
from fastload.prefetch.stage import Stage, Where


class Samples(Stage):
    """Makes samples, and writes them to the slot; carried out by `sample_worker.Filler`, for the pool of processes."""

    where = Where.PROCESS

    def __init__(self, data: Input) -> None:
        self.why = f"{data.code} is Python code, which threads would run one at a time"
