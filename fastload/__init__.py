"""fastload: a data path for training image models in PyTorch.

Pack a data set into one HDF5 file (`pack_images`), then train from it (`FastLoader`, or `PackedDataset` and the
samplers with a plain `DataLoader`). Names are imported on first use, so that `import fastload` and commands that do not
need torch never import it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastload import transforms
    from fastload.dataset import PackedDataset
    from fastload.errors import (
        AccessError,
        CacheError,
        DamagedRowError,
        FastloadError,
        FileChangedError,
        ForkError,
        FormatError,
        ImageError,
        MissingExtraError,
        MissingFileError,
        ObjectExistsError,
        ObjectMissingError,
        OptionError,
        OutputError,
        PackError,
        ReadError,
        RemoteError,
        ReplacedError,
        ResumeError,
        SharedMemoryError,
        ShareError,
        SourceError,
        StateError,
        WorkerError,
        WorkerTimeoutError,
    )
    from fastload.inspection.info import inspect_file
    from fastload.inspection.verify import verify_file
    from fastload.loader.loader import FastLoader
    from fastload.loader.loader_options import List, Pad, Workers
    from fastload.pack import pack_images, pack_shard, plan_images
    from fastload.pack.index import index_files
    from fastload.pack.run import index_plan
    from fastload.plan import ChunkWindow, ClassBatches, EpochPlan, MixedEcho, Weighted
    from fastload.profiling.doctor.in_process import diagnose
    from fastload.profiling.meter import Meter
    from fastload.profiling.report import write_report
    from fastload.remote.urls import Remote
    from fastload.samplers import ChunkBatchSampler, ChunkSampler, DistributedChunkSampler

__all__ = [
    "AccessError",
    "CacheError",
    "ChunkBatchSampler",
    "ChunkSampler",
    "ChunkWindow",
    "ClassBatches",
    "DamagedRowError",
    "DistributedChunkSampler",
    "EpochPlan",
    "FastLoader",
    "FastloadError",
    "FileChangedError",
    "ForkError",
    "FormatError",
    "ImageError",
    "List",
    "Meter",
    "MissingExtraError",
    "MissingFileError",
    "MixedEcho",
    "ObjectExistsError",
    "ObjectMissingError",
    "OptionError",
    "OutputError",
    "PackError",
    "PackedDataset",
    "Pad",
    "ReadError",
    "Remote",
    "RemoteError",
    "ReplacedError",
    "ResumeError",
    "ShareError",
    "SharedMemoryError",
    "SourceError",
    "StateError",
    "Weighted",
    "WorkerError",
    "WorkerTimeoutError",
    "Workers",
    "diagnose",
    "index_files",
    "index_plan",
    "inspect_file",
    "pack_images",
    "pack_shard",
    "plan_images",
    "transforms",
    "verify_file",
    "write_report",
]

_HOMES = {
    "ChunkBatchSampler": "fastload.samplers",
    "ChunkSampler": "fastload.samplers",
    "ChunkWindow": "fastload.plan",
    "ClassBatches": "fastload.plan",
    "DistributedChunkSampler": "fastload.samplers",
    "EpochPlan": "fastload.plan",
    "FastLoader": "fastload.loader.loader",
    "List": "fastload.loader.loader_options",
    "Meter": "fastload.profiling.meter",
    "MixedEcho": "fastload.plan",
    "PackedDataset": "fastload.dataset",
    "Pad": "fastload.loader.loader_options",
    "Remote": "fastload.remote.urls",
    "Weighted": "fastload.plan",
    "Workers": "fastload.loader.loader_options",
    "diagnose": "fastload.profiling.doctor.in_process",
    "index_files": "fastload.pack.index",
    "index_plan": "fastload.pack.run",
    "inspect_file": "fastload.inspection.info",
    "pack_images": "fastload.pack",
    "pack_shard": "fastload.pack",
    "plan_images": "fastload.pack",
    "verify_file": "fastload.inspection.verify",
    "write_report": "fastload.profiling.report",
}
"""Module of each name in `__all__`; the others are in `fastload.errors`."""


def __getattr__(name: str) -> Any:
    if name == "transforms":
        return import_module("fastload.transforms")
    if name == "__version__":
        return import_module("importlib.metadata").version("fastload-hdf5")
    if name not in __all__:
        raise AttributeError(f"module 'fastload' has no attribute {name!r}; it offers {', '.join(__all__)}")
    try:
        value = getattr(import_module(_HOMES.get(name, "fastload.errors")), name)
    except ModuleNotFoundError as exc:
        needed = import_module("fastload.errors").training_needs(exc, f"fastload.{name}")
        if needed is exc:
            raise
        raise needed from exc
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
