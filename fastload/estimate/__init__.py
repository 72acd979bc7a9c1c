"""What a dataset would be in each store, on this machine: its size, and images/s from memory and from this disk.

`source` and `file` take a sample of a dataset, as the packer makes rows; `rates` decodes it as often as a fraction of
a second allows, `disk` measures the disk, `stores` joins them, and `pick` says which store is read fastest. No torch.
"""

from fastload.estimate.disk import DiskRate
from fastload.estimate.file import estimate_file
from fastload.estimate.pick import StoreEstimate
from fastload.estimate.source import estimate_survey
from fastload.estimate.stores import StoreEstimates

__all__ = ["DiskRate", "StoreEstimate", "StoreEstimates", "estimate_file", "estimate_survey"]
