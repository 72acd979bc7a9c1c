"""Samples that Python code makes: any map-style dataset, or a packed one's Python transform, in worker processes."""

from __future__ import annotations

from fastload.prefetch.inputs import Input, PackedInput
from fastload.prefetch.stage import Stage, Where


class Samples(Stage):
    """Makes samples, and writes them to the slot; carried out by `sample_worker.Filler`, for the pool of processes."""

    where = Where.PROCESS

    def __init__(self, data: Input) -> None:
        what = "the packed dataset's own transform" if isinstance(data, PackedInput) else data.name
        self.why = f"{what} is Python code, which threads would run one at a time"
