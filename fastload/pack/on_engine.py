"""Packing shards on the nodes of a cluster: each is asked whether it can, headers are read, and shards are packed.

The dataset is listed here. Nodes get samples as bytes (`plain`) to read headers, and the path of the plan to pack.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fastload.errors import FastloadError, PackError
from fastload.format.writer import writer_name
from fastload.images.decode import decoder_versions
from fastload.options.pack import Progress
from fastload.pack.encode import HEADERS, Headers, announce_samples, headers_of
from fastload.pack.finish import PackReport
from fastload.pack.output_url import found_object, probe_of
from fastload.pack.pack_options import PackJob
from fastload.pack.plain import from_bytes, to_bytes
from fastload.pack.plan_file import PlanFile
from fastload.remote.urls import ObjectPath, Remote, path_of, remote_in_force, requests_as
from fastload.sources.listing import Arrays, Listing, only_arrays
from fastload.system.files import output_errors

if TYPE_CHECKING:
    from fastload.system.ray_cluster import RayCluster, Report

_BLOCK = 4096  # samples whose headers are read by one task
_TRIED = 3  # samples that each node reads before anything is packed


def check_nodes(job: PackJob, engine: RayCluster) -> None:
    """Raises PackError if nodes differ from this machine in what packing needs; it names what differs on which."""
    folder, listing = job.output.absolute().parent, job.listing
    sample = np.unique(np.arange(_TRIED) * (len(listing) - 1) // max(1, _TRIED - 1))
    with _probe(job.output, folder) as probe:
        about = probe, _samples(listing, sample), remote_in_force()
        here = look_around(about)
        answers, failures = engine.ask_nodes(look_around, about)
    differ = [f"{node}: {why}" for node, why in failures.items()]
    for node, found in answers.items():
        differ += [f"{node}: {found[what] or here[what]}" for what in here if found[what] != here[what]]
    differ = [one.removesuffix(".") for one in differ]
    if differ:
        raise PackError(
            f"{job.output}: cannot be packed on this cluster, as nodes differ from this machine, which has "
            f"{here['release']} with {here['decoder']}: {'; '.join(differ)}. Install the same everywhere, and put "
            f"source and output on storage that all nodes see under the same path."
        )


@contextmanager
def _probe(output: Path, folder: Path) -> Iterator[str]:
    """Gives the path or URL of a small file in the output's folder, which is there within the block."""
    if isinstance(output, ObjectPath):
        with probe_of(output) as url:
            yield str(url)
        return
    with output_errors(f"{output}: its folder cannot be written to ({{}}). Choose another one."):
        handle, probe = tempfile.mkstemp(prefix=f".{output.name[:40]}.", suffix=".probe", dir=folder)
    os.close(handle)
    try:
        yield probe
    finally:
        Path(probe).unlink(missing_ok=True)


def look_around(about: tuple[str, bytes, Remote]) -> dict[str, str]:
    """Returns what a machine has, and what it does not see, in words; "" where nothing is amiss."""
    probe, samples, remote = about
    with requests_as(remote):
        return _look_around(path_of(probe), samples)


def _look_around(probe: Path, samples: bytes) -> dict[str, str]:
    found = {"release": writer_name(), "decoder": decoder_versions(), "source": "", "output": ""}
    files, masks, count = from_bytes(samples)
    if files is not None:
        try:
            if isinstance(files, Arrays):
                files.read_rows(np.arange(count), np.empty((count, *files.shape), files.dtype))
            reasons = list(headers_of(files, masks, np.arange(count)).reasons.values())
        except FastloadError as exc:
            reasons = [str(exc)]
        if reasons:
            found["source"] = f"does not see the source: {reasons[0]}"
    if isinstance(probe, ObjectPath):
        try:
            if found_object(probe) is None:
                found["output"] = f"does not see what lies at {probe.parent}, or another store"
            with probe_of(probe):
                pass
        except FastloadError as exc:
            found["output"] = f"cannot write to the output's folder: {exc}"
        return found
    folder = os.path.dirname(probe)
    if not os.path.exists(probe):
        found["output"] = f"does not see the output's folder {folder}, or another one of that name"
        return found
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as exc:
        found["output"] = f"cannot write to the output's folder {folder} ({exc.strerror})"
    return found


def _samples(listing: Listing, samples: NDArray[np.int64]) -> bytes:
    files, masks = listing.files, listing.masks
    return to_bytes((files and files.take(samples), masks and masks.take(samples), len(samples)))


def headers_on(engine: RayCluster, listing: Listing, progress: Progress | None) -> Headers | None:
    """Returns the headers of all samples, read by the nodes; None where there is nothing to be read."""
    if listing.files is None or only_arrays(listing):
        return None
    table, kinds, reasons = np.zeros(len(listing), HEADERS), Counter[str](), dict[int, str]()
    starts = range(0, len(listing), _BLOCK)
    blocks = (_samples(listing, np.arange(start, min(start + _BLOCK, len(listing)))) for start in starts)
    done = 0
    for number, found in engine.run(read_headers, blocks, name="block of headers"):
        first = starts[number]
        table[first : first + len(found.table)] = found.table
        kinds.update(found.kinds)
        reasons.update({first + sample: reason for sample, reason in found.reasons.items()})
        done += len(found.table)
        if progress:
            progress("reading headers", done, len(listing))
    return Headers(table, kinds, reasons)


def read_headers(samples: bytes, report: Report) -> Headers:
    """Returns the headers of samples, on a node."""
    files, masks, count = from_bytes(samples)
    report(count)
    announce_samples(files, masks, np.arange(count), heads=True)
    return headers_of(files, masks, np.arange(count))


def pack_on(
    engine: RayCluster,
    plan: PlanFile,
    pack: Callable[[tuple[str, int, bool, Remote], Report], PackReport],
    progress: Progress | None,
    *,
    overwrite: bool,
) -> list[PackReport]:
    """Returns the reports of all shards, packed by the nodes.

    `pack` is called there with (plan, number, overwrite, remote).
    """

    def on_done(count: int) -> None:
        if progress:
            progress("packing", min(count, plan.num_samples), plan.num_samples)

    path, remote = str(plan.path.absolute()), remote_in_force()
    tasks = ((path, number, overwrite, remote) for number in range(plan.num_shards))
    found = dict(
        engine.run(pack, tasks, name="shard", on_done=on_done, typical=lambda report: report.chunks_decoded > 0)
    )
    on_done(plan.num_samples)
    return [found[number] for number in range(plan.num_shards)]
