"""Estimates for a dataset in each encoding on this machine: its size, and images/s from memory and disk.

`estimate_survey` takes a source that was surveyed, `estimate_file` a packed file; both return `EncodingEstimates` with
the encoding to pick. Read `encodings` first (rows of some samples in every encoding; sizes and rates of all rows, and
the pick), then `rates` (how fast they are decoded, how fast the disk is read). Imports `pack`, `repack`, `read`,
`inspection` and below; never torch.
"""

from fastload.estimate.encodings import EncodingEstimate, EncodingEstimates, estimate_file, estimate_survey
from fastload.estimate.rates import DiskRate

__all__ = ["DiskRate", "EncodingEstimate", "EncodingEstimates", "estimate_file", "estimate_survey"]
