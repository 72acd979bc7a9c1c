"""A plan of packing, `OUT.h5.plan`: what any process on any machine needs to pack one of the shards of OUT.h5.

It is a zip. `plan.json` describes it; `00017.npz` is shard 17 as a `PackJob` (`plain`): its samples in order, how each
is read, and all that was decided about the whole dataset. Shards lie where the plan lies, wherever that is mounted.

A shard is packed under a name of its own attempt, and gets its final name when it is complete and on disk. So any
number of processes may pack the same shard: each writes the same bytes, and none touches the files of another.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fastload.errors import (
    FastloadError,
    FileChangedError,
    FormatError,
    MissingFileError,
    OptionError,
    OutputError,
    PackError,
    ResumeError,
    SourceError,
)
from fastload.format.writer import writer_name
from fastload.images.decode import decoder_versions
from fastload.options.pack import Progress
from fastload.pack.begin import remove
from fastload.pack.finish import PackReport
from fastload.pack.index import IndexReport, index_packed
from fastload.pack.output_url import check_url, exists, found_object, remove_empty, remove_output, upload, work_folder
from fastload.pack.pack_options import KEPT, PackJob, output_exists
from fastload.pack.plain import from_bytes, to_bytes
from fastload.pack.shards import ShardPlan, is_shard, kept_shard, shard_path
from fastload.remote.ranges import open_binary
from fastload.remote.urls import ObjectPath, Remote, is_url, path_of, remote_in_force, requests_as
from fastload.sources.listing import first_few
from fastload.system.files import output_errors, sync_folder
from fastload.system.machine import process_exists
from fastload.system.threads import in_threads

VERSION = 1
SUFFIX = ".plan"
_HEAD = "plan.json"
_ATTEMPT = ".try-"
_GONE = "was written to or replaced since", "cannot be read: "  # how files say that they changed, or are gone
_FIRST_DATE = (1980, 1, 1, 0, 0, 0)  # of a zip: the same plan has the same bytes


@dataclass(frozen=True)
class PlanFile:
    """A plan's facts about the whole dataset.

    Attributes:
        path: the plan.
        source: absolute path of the dataset, or its URL.
        num_samples: rows of all shards.
        num_shards: the shards.
        spread: folders that they are spread over; 0: they lie where the plan does.
        identities: of each shard, hex: of its samples' files, and of what was decided about the whole dataset.
        release: of fastload.
        decoder: versions of the libraries that decode.
        temporary: whether a call on an engine made it, which replaces and removes it unasked.
        converted: how many images are changed in kind, by a description.
        skipped: (key, reason) of each sample left out.
        notes: what was recognised in the source, what was absent or ignored, and what was chosen.
    """

    path: Path
    source: str
    num_samples: int
    num_shards: int
    spread: int
    identities: tuple[str, ...]
    release: str
    decoder: str
    temporary: bool
    converted: dict[str, int]
    skipped: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> PlanFile:
        """Returns what a plan says.

        Raises:
            MissingFileError: it is not there.
            FormatError: it is no plan, or of another release.
        """
        with _opened(path) as archive:
            head = json.loads(archive.read(_HEAD))
            if head.pop("fastload_plan") != VERSION:
                raise FormatError(f"{path}: is a plan of another release of fastload. Make it anew.")
            head["skipped"] = tuple((key, reason) for key, reason in head["skipped"])
            texts = {name: tuple(head[name]) for name in ("identities", "notes")}
            return cls(**{**head, **texts, "path": path})

    @property
    def output(self) -> Path:
        """The index that the shards are to have."""
        return self.path.with_name(self.path.name.removesuffix(SUFFIX))

    def shard(self, number: int) -> Path:
        """Returns the path of a shard."""
        return shard_path(self.output, number, self.num_shards, self.spread)

    def is_packed(self, number: int) -> bool:
        """Whether a shard is there, complete."""
        return is_shard(self.shard(number), number, self.num_shards, self.identities[number])

    def job(self, number: int) -> PackJob:
        """Returns the job of packing a shard.

        Raises:
            OptionError: there is no such shard.
            ResumeError: this process has another release, or other libraries, than the process that made the plan.
        """
        if not 0 <= number < self.num_shards:
            raise OptionError(f"{self.path}: there is no shard {number}; it has 0 to {self.num_shards - 1}.")
        for name, then, now in (
            ("release", self.release, writer_name()),
            ("decoder", self.decoder, decoder_versions()),
        ):
            if then != now:
                raise ResumeError(
                    f"{self.path}: the {name} was {then}, here it is {now}, and shards could differ. Install the same "
                    f"on all machines, or make the plan anew."
                )
        with _opened(self.path) as archive:
            job = from_bytes(archive.read(_member(number)))
            if not isinstance(job, PackJob):
                raise FormatError(f"{self.path}: shard {number} is damaged. Make the plan anew.")
        return replace(job, output=self.shard(number))


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """Opens a plan; MissingFileError or FormatError: it is missing, or is no plan."""
    try:
        with open_binary(path) as file, zipfile.ZipFile(file) as archive:
            yield archive
    except FastloadError:
        raise
    except FileNotFoundError as exc:
        raise MissingFileError(f"{path}: is missing. Make it with `fastload pack ... --plan`.") from exc
    except OSError as exc:
        raise FormatError(f"{path}: cannot be read ({exc.strerror or exc}).") from exc
    except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as exc:
        raise FormatError(f"{path}: cannot be read as a plan of packing ({exc}). Make it anew.") from exc


def is_plan(path: str | Path) -> bool:
    """Whether a path names a plan, by its ending."""
    return str(path).endswith(SUFFIX)


def plan_path(output: Path) -> Path:
    """Returns the path of an output's plan."""
    return output.with_name(output.name + SUFFIX)


def write_plan(job: PackJob, plan: ShardPlan, *, temporary: bool = False) -> PlanFile:
    """Writes the plan of a job, next to its output; OutputError: another is there, or it cannot be written."""
    path, survey = plan_path(job.output), plan.survey
    there = found_object(path) if isinstance(path, ObjectPath) else None
    if (there or path.exists()) and not job.overwrite:
        before: PlanFile | None = None
        with suppress(FormatError):
            before = PlanFile.read(path)
        if before is None or not before.temporary:
            raise output_exists(path)
    found = PlanFile(
        path=path,
        source=job.source if is_url(job.source) else os.path.abspath(job.source),
        num_samples=survey.num_samples,
        num_shards=len(plan),
        spread=plan.spread,
        identities=plan.identities,
        release=writer_name(),
        decoder=decoder_versions(),
        temporary=temporary,
        converted=survey.converted,
        skipped=survey.skipped,
        notes=survey.notes,
    )
    head = {"fastload_plan": VERSION, **asdict(found)}
    del head["path"]
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    if isinstance(path, ObjectPath):
        part = work_folder(path) / part.name
    try:
        with output_errors(f"{path}: cannot be written ({{}})."):
            with open(part, "xb") as file:
                with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
                    archive.writestr(zipfile.ZipInfo(_HEAD, _FIRST_DATE), json.dumps(head, indent=1))
                    for number in range(len(plan)):
                        one = replace(plan.job(job, number), output=Path(), overwrite=False, on_progress=None)
                        member = zipfile.ZipInfo(_member(number), _FIRST_DATE)
                        archive.writestr(member, to_bytes(one), zipfile.ZIP_DEFLATED, 1)
                        if job.on_progress:
                            job.on_progress("writing the plan", number + 1, len(plan))
                file.flush()
                os.fsync(file.fileno())
            if not isinstance(path, ObjectPath):
                os.replace(part, path)
                sync_folder(path.absolute().parent)
        if isinstance(path, ObjectPath):
            upload(part, path, before=there, is_same=lambda *_: False)
    finally:
        part.unlink(missing_ok=True)
        if isinstance(path, ObjectPath):
            remove_empty(part.parent)
    return found


@contextmanager
def planned_file(job: PackJob, plan: ShardPlan) -> Iterator[PlanFile]:
    """Gives the plan's file, the same one if it is there; one that is for this call alone is removed at its end."""
    found: PlanFile | None = None
    with suppress(MissingFileError, FormatError):
        found = PlanFile.read(plan_path(job.output))
    if found is None or found.identities != plan.identities:
        found = write_plan(job, plan, temporary=True)
    yield found
    if found.temporary:
        remove_output(found.path)


def _member(number: int) -> str:
    return f"{number:05d}.npz"


def pack_planned(
    plan: PlanFile,
    number: int,
    pack: Callable[[PackJob], PackReport],
    progress: Progress | None,
    *,
    overwrite: bool,
    keep: bool,
) -> PackReport:
    """Packs a shard by `pack`, unless it is there, complete, and to be kept; see `fastload.pack_shard`."""
    job = replace(plan.job(number), overwrite=overwrite)
    if not isinstance(job.output, ObjectPath):
        with output_errors(f"{job.output}: its folder cannot be made ({{}})."):
            job.output.parent.mkdir(parents=True, exist_ok=True)
    kept = kept_shard(job)
    if kept is not None and keep:
        return kept
    if kept is None and exists(job.output) and not overwrite:  # next to the journal of an interrupted pack
        raise output_exists(job.output)
    place = job.output  # on this machine
    if isinstance(job.output, ObjectPath):
        place = work_folder(job.output) / job.output.name
    host = "".join(c if c.isalnum() else "-" for c in socket.gethostname())
    for (_, process, _), files in _attempts([place], f"{host}.").items():
        if not process_exists(process):
            _remove(files)
    attempt = place.with_name(f"{place.name}{_ATTEMPT}{host}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        report = pack(replace(job, output=attempt, overwrite=False, on_progress=progress, alone=True))
        if gone := [f"{key}: {reason}" for key, reason in report.skipped if reason.startswith(_GONE)]:
            # They could be read when the plan was made: leaving them out would hide that.
            raise SourceError(f"{plan.source}: {len(gone)} samples are not what they were: {first_few(gone, 3)}.")
        if isinstance(job.output, ObjectPath):
            if not keep or kept_shard(job) is None:
                upload(attempt, job.output, before=found_object(job.output))
        elif not keep or kept_shard(job) is None:
            with output_errors(f"{job.output}: cannot get its name ({{}}). Pack the shard again."):
                os.replace(attempt, job.output)
                sync_folder(job.output.parent)
    except (SourceError, FileChangedError) as exc:
        raise SourceError(
            f"{job.output}: cannot be packed: {str(exc).removesuffix(KEPT).rstrip()} What is left out, and whether the "
            f"source is still the same, is up to the plan: else make {plan.path.name} anew."
        ) from exc
    finally:
        for files in _attempts([place], attempt.name.rpartition(_ATTEMPT)[2]).values():
            _remove(files)
        if isinstance(job.output, ObjectPath):
            remove_empty(place.parent)
    return replace(report, path=job.output)


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


def index_plan(
    plan: str | Path, output: str | Path, *, overwrite: bool = False, remote: Remote | None = None
) -> IndexReport:
    """Writes the index of the shards of a plan, and removes what killed attempts at them have left.

    Args:
        plan: made by `fastload pack ... --plan` or `plan_images`; its path or URL.
        output: the index, in the folder of the plan; its path or URL.
        overwrite: replace an output that exists.
        remote: how objects behind URLs are requested.

    Raises:
        PackError: shards are missing, or do not belong to the plan; it names them.
        OptionError, OutputError, FormatError: as `index_files`.
    """
    if is_plan(output):
        raise OutputError(
            f"{output}: plans have this ending. Name the index, such as {str(output).removesuffix(SUFFIX)}."
        )
    with requests_as(remote):
        output = path_of(output)
        if isinstance(output, ObjectPath):
            check_url(output, overwrite=overwrite)
        return index_shards(PlanFile.read(path_of(plan)), output, overwrite=overwrite)


def index_shards(found: PlanFile, output: Path, *, overwrite: bool) -> IndexReport:
    """Writes the index of the shards of a plan, which were just packed, as `index_plan`."""
    plan, numbers = found.path, range(found.num_shards)
    shards = [found.shard(number) for number in numbers]
    at_url = isinstance(plan, ObjectPath)
    packed = in_threads(found.is_packed, numbers, remote_in_force().in_flight if at_url else 0, ordered=True)
    missing = [number for number, there in zip(numbers, packed, strict=True) if not there]
    if missing:
        others = [number for number in missing if exists(shards[number])]
        replaced = ""
        if others:
            replaced = f" Others have the names of {first_few(map(str, others))}: for these say `--overwrite`, too."
        raise PackError(
            f"{plan}: {len(missing)} of {len(shards)} shards are not packed: {first_few(map(str, missing))}. Pack them "
            f"with `--shard-index`, such as {missing[0]}, which becomes {shards[missing[0]].name}.{replaced}"
        )
    report = index_packed(shards, output, overwrite=overwrite)
    for files in () if at_url else _attempts(shards).values():
        _remove(files)
    return report
