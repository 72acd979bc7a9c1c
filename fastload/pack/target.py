"""Where a shard is made: a file of this machine, and what becomes of it when it is complete.

| target | made as | then |
| --- | --- | --- |
| a file | itself | |
| an object behind a URL | a file in a folder `pack-...` in `Remote.cache` | uploaded, and the folder removed |
| a shard of a plan file | `SHARD.h5.try-HOST.PROCESS.TOKEN`, in its folder or that of its URL | renamed or uploaded |

A call after a kill continues with the first two. Attempts begin anew, so that any number of processes may pack the same
shard: each writes the same bytes, and none touches the files of another.

| file in the folder of a URL | content |
| --- | --- |
| `OUT.h5.part`, `.journal`, ... | an unfinished pack, see `engine` |
| `OUT.h5.lock` | locked by the call that packs |
| `OUT.h5`, `OUT.h5.packed` | the complete file, and a record of its source, until it is uploaded |
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import xxhash

from fastload.errors import FileChangedError, FormatError, OutputError, PackError, SourceError
from fastload.format.header import PackedFile, open_hdf5, read_header
from fastload.format.ragged import ENCODINGS
from fastload.pack.begin import identity_of, remove
from fastload.pack.finish import PackFacts, PackReport, report_of
from fastload.pack.journal import source_table
from fastload.pack.output_url import (
    exists,
    found_object,
    header_at,
    is_same_packed,
    packed_marker,
    remove_empty,
    upload,
    work_folder,
)
from fastload.pack.pack_options import KEPT, PackJob, checked_output, journal_path, output_exists
from fastload.pack.plain import from_bytes, to_bytes
from fastload.pack.plan import Plan, SharedPlan
from fastload.read.row_table import index_part
from fastload.remote.urls import ObjectPath
from fastload.sources.listing import first_few
from fastload.system.files import open_output, output_errors, sync_folder
from fastload.system.machine import process_exists

_ORPHANS_S = 5.0  # for which workers of a killed call may keep its lock
_ATTEMPT = ".try-"
_GONE = "was written to or replaced since", "cannot be read: "  # how files say that they changed, or are gone


@dataclass
class Target:
    """A shard that is being made.

    Attributes:
        job: of packing it, to a file of this machine.
        report: of that file when it is complete: set by whoever packs it, unless an earlier call has.
    """

    job: PackJob
    report: PackReport | None = None

    @property
    def made(self) -> PackReport:
        """The report of the complete file."""
        assert self.report is not None, "set before the block ends"
        return self.report


def kept_shard(job: PackJob) -> PackReport | None:
    """Returns the report of a shard that an earlier call has completed; None if it is to be packed.

    OutputError: something else lies there, and may not be overwritten.
    """
    at_url = isinstance(job.output, ObjectPath)
    if not exists(job.output) or (not at_url and journal_path(job.output).exists()):
        return None
    with suppress(FormatError), header_at(job.output) as found:
        if found.attrs.get("shard") == job.listing.attrs["shard"]:
            return _report_of_kept(job, found)
    if not job.overwrite:
        raise output_exists(job.output)
    return None


def _report_of_kept(job: PackJob, file: PackedFile) -> PackReport:
    images, plan = file.fields.get("images"), None if job.whole is None else job.whole.plan
    counts, pixel_bytes = dict[str, int](), 0
    masks = file.fields["masks"].dtype.itemsize if "masks" in file.fields else 0
    if images is not None:
        with open_hdf5(file.path) as columns:
            encodings = index_part(columns, file, "images", "encoding")
            height, width, channels = index_part(columns, file, "images", "shape").astype(np.int64).T
        found = np.bincount(encodings, minlength=len(ENCODINGS)).tolist()
        counts = {name: count for name, count in zip(ENCODINGS, found, strict=True) if count}
        pixel_bytes = int((height * width * (channels * images.dtype.itemsize + masks)).sum())
    facts = PackFacts(
        converted={},
        skipped=(),
        warned=(),
        notes=(),
        store="raw" if plan is None else str(plan.option),
        encodings=counts,
        chunks=-(-file.num_rows // max(1, images.chunk_rows if images else 1)),
        pixel_bytes=pixel_bytes,
    )
    return report_of(job, file, facts)


def target_of(plan: Plan, job: PackJob, *, keep: bool) -> AbstractContextManager[Target]:
    """Returns the target of a shard, which gets its name when the `with` block ends without an error.

    `keep`: a complete one that somebody else has made meanwhile stays.
    """
    if isinstance(plan, SharedPlan):
        return _attempt(plan, job, keep=keep)
    return _object(job) if isinstance(job.output, ObjectPath) else _file(job)


@contextmanager
def _file(job: PackJob) -> Iterator[Target]:
    yield Target(replace(job, output=checked_output(job.output, job.overwrite)))


@contextmanager
def _object(job: PackJob) -> Iterator[Target]:
    """Gives a file in the work folder of the job's URL, and uploads it.

    Raises:
        OutputError: the object was made meanwhile.
        RemoteError: the upload failed; the file is kept.
    """
    to = job.output
    assert isinstance(to, ObjectPath), "an output behind a URL"
    with _locked_folder(to) as folder:
        there = found_object(to)
        local = replace(job, output=folder / to.name)
        target = Target(local, _packed_before(local))
        packed_before = target.report is not None
        yield target
        report = target.made
        if not packed_before:
            packed_marker(local.output).write_bytes(to_bytes({"identity": _identity(job), "report": report}))
        if there is None or job.overwrite or not is_same_packed(to, local.output):
            if there is not None and not job.overwrite:
                raise output_exists(to)

            def sent(done: int, total: int) -> None:
                if job.on_progress:
                    job.on_progress("uploading", report.num_samples * done // total, report.num_samples)

            upload(local.output, to, before=there, progress=sent)
        shutil.rmtree(folder, ignore_errors=True)
    target.report = replace(report, path=to)


@contextmanager
def _locked_folder(to: ObjectPath) -> Iterator[Path]:
    """Yields the work folder of a URL, which no other call of this machine uses meanwhile; PackError: one does."""
    deadline_s = time.monotonic() + _ORPHANS_S
    while True:
        lock = work_folder(to) / f"{to.name}.lock"  # `lock` alone may be the name of the output
        with output_errors(f"{lock}: cannot be written ({{}}). Name another folder: FASTLOAD_CACHE."):
            fd = open_output(lock, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            os.close(fd)
            if time.monotonic() > deadline_s:
                raise PackError(f"{to}: another process here is packing to this URL. Wait for it, or stop it.") from exc
            time.sleep(0.05)
            continue
        except OSError:
            pass  # a file system without locks
        try:
            if os.fstat(fd).st_nlink:  # else another call has just ended, and removed it
                yield lock.parent
                return
        finally:
            if os.fstat(fd).st_nlink:
                lock.unlink()
                remove_empty(lock.parent)
            os.close(fd)


def _identity(job: PackJob) -> str:
    said = json.dumps([identity_of(job), job.on_error, job.listing.attrs], sort_keys=True, default=str)
    return xxhash.xxh3_128_hexdigest(said.encode() + source_table(job.listing).tobytes())


def _packed_before(job: PackJob) -> PackReport | None:
    """Returns the report of the complete file at a job's output if it was packed of the same; else removes it."""
    if not job.output.exists() or journal_path(job.output).exists():
        return None
    with suppress(OSError, ValueError, KeyError, TypeError):
        said = from_bytes(packed_marker(job.output).read_bytes())
        report = said["report"]
        if said["identity"] == _identity(job) and isinstance(report, PackReport):
            read_header(job.output)
            return replace(report, chunks_kept=report.chunks, chunks_decoded=0, images_per_s=0.0, decoded_per_s=0.0)
    remove(packed_marker(job.output))
    remove(job.output)
    return None


@contextmanager
def _attempt(plan: SharedPlan, job: PackJob, *, keep: bool) -> Iterator[Target]:
    """Gives a file of a name of its own; see `fastload.pack_shard` for errors."""
    if exists(job.output) and not job.overwrite:  # next to the journal of an interrupted pack
        raise output_exists(job.output)
    place = job.output  # on this machine
    if isinstance(job.output, ObjectPath):
        place = work_folder(job.output) / job.output.name
    host = "".join(c if c.isalnum() else "-" for c in socket.gethostname())
    for (_, process, _), files in _attempts([place], f"{host}.").items():
        if not process_exists(process):
            _remove(files)
    attempt = place.with_name(f"{place.name}{_ATTEMPT}{host}.{os.getpid()}.{secrets.token_hex(4)}")
    target = Target(replace(job, output=attempt, overwrite=False, alone=True))
    try:
        yield target
        if gone := [f"{key}: {reason}" for key, reason in target.made.skipped if reason.startswith(_GONE)]:
            # They could be read when the plan was made: leaving them out would hide that.
            raise SourceError(f"{plan.file.source}: {len(gone)} samples are not what they were: {first_few(gone, 3)}.")
        if not keep or kept_shard(job) is None:
            if isinstance(job.output, ObjectPath):
                upload(attempt, job.output, before=found_object(job.output))
            else:
                with output_errors(f"{job.output}: cannot get its name ({{}}). Pack the shard again."):
                    os.replace(attempt, job.output)
                    sync_folder(job.output.parent)
    except (SourceError, FileChangedError) as exc:
        raise SourceError(
            f"{job.output}: cannot be packed: {str(exc).removesuffix(KEPT).rstrip()} What is left out, and whether the "
            f"source is still the same, is up to the plan: else make {plan.file.path.name} anew."
        ) from exc
    finally:
        for files in _attempts([place], attempt.name.rpartition(_ATTEMPT)[2]).values():
            _remove(files)
        if isinstance(job.output, ObjectPath):
            remove_empty(place.parent)
    target.report = replace(target.made, path=job.output)


def remove_attempts(shards: Iterable[Path]) -> None:
    """Removes what killed attempts at shards of this machine have left."""
    for files in _attempts(shards).values():
        _remove(files)


def _attempts(shards: Iterable[Path], begin: str = "") -> dict[tuple[str, int, str], list[Path]]:
    """Returns the files of attempts at shards: (host, number of the process, token) -> paths.

    `begin`: only of attempts whose name begins so.
    """
    names: dict[Path, set[str]] = {}
    for shard in shards:
        names.setdefault(shard.parent, set()).add(shard.name)
    found: dict[tuple[str, int, str], list[Path]] = {}
    for folder, known in names.items():
        for file in os.listdir(folder):
            shard_name, _, attempt = file.rpartition(_ATTEMPT)
            host, _, rest = attempt.partition(".")
            process, _, rest = rest.partition(".")
            if shard_name in known and attempt.startswith(begin) and process.isdigit() and rest:
                found.setdefault((host, int(process), rest.partition(".")[0]), []).append(folder / file)
    return found


def _remove(files: Iterable[Path]) -> None:
    for file in files:
        with suppress(OutputError):  # as another process may have done
            remove(file)
