"""Images of a batch that still lie among all others: in a mapped file, or in a store on the device or the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from fastload.transforms.spec import ImageSpec


@dataclass(frozen=True, eq=False)
class ImageRows:
    """B images, not gathered yet: a transform that reads them anyway takes them from where they are.

    Attributes:
        source: (N, H, W, C) with any strides, on the CPU (pinned or not) or on the device of `samples`.
        samples: int64 (B,), which of them, on the device where the batch is wanted.
        gathered: makes the batch, (B, C, H, W) in channels_last memory of its own, for sources that are not simply
            contiguous memory of the CPU.
    """

    source: torch.Tensor
    samples: torch.Tensor
    gathered: Callable[[], torch.Tensor] | None = None

    @property
    def spec(self) -> ImageSpec:
        """Of one image."""
        _, height, width, channels = self.source.shape
        return ImageSpec(channels, height, width, self.source.dtype)

    def gather(self) -> torch.Tensor:
        """The batch, (B, C, H, W) in channels_last memory of its own, on the device of `samples`."""
        if self.gathered is not None:
            return self.gathered()
        # NumPy, and clip: a third of the time of torch's, and the GIL is asked for once.
        out = np.empty((len(self.samples), *self.source.shape[1:]), np.uint8)
        np.take(self.source.numpy(), self.samples.numpy(), axis=0, out=out, mode="clip")
        return torch.from_numpy(out).permute(0, 3, 1, 2)
