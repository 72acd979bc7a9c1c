"""What a loader did, in numbers: samples, seconds waited, bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoaderStats:
    """One epoch of a loader, so far.

    Attributes:
        fresh_samples: samples read from the file.
        consumed_samples: samples handed over, echoes included.
        steps: batches handed over, echoes included.
        elapsed_s: from the beginning of the epoch to the last batch handed over, or to its end.
        stall_s: of these, the seconds that the training loop waited for a batch.
        bytes_read: copied from the file, for the fresh samples.
        echo: times each batch is used in this epoch.
    """

    fresh_samples: int = 0
    consumed_samples: int = 0
    steps: int = 0
    elapsed_s: float = 0.0
    stall_s: float = 0.0
    bytes_read: int = 0
    echo: int = 1

    @property
    def fresh_samples_per_s(self) -> float:
        """Samples read a second; what the disk and this loader are measured by."""
        return self.fresh_samples / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def consumed_samples_per_s(self) -> float:
        """Samples trained on a second; with echoes more than were read."""
        return self.consumed_samples / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def stall_share(self) -> float:
        """Part of the time that the training loop waited, 0 to 1."""
        return min(1.0, self.stall_s / self.elapsed_s) if self.elapsed_s else 0.0
