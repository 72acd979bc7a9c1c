"""The beginning of a pack: a new one, or after the tasks that an interrupted call of the same pack has left whole.

`begin_or_resume` compares the journal with the current call, and takes the headers of images from it if no source
file changed. Tasks are kept whose source files are the same and whose rows lie in the file as they were written.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.errors import OutputError, ResumeError, SourceError
from fastload.format.writer import writer_name
from fastload.images.decode import decoder_versions
from fastload.pack.encode import Headers
from fastload.pack.engine import PackTasks
from fastload.pack.journal import (
    Journal,
    JournalContents,
    TaskRecord,
    headers_from_json,
    headers_to_json,
    of_another_release,
    source_table,
)
from fastload.pack.pack_options import KEPT, PackJob, journal_path, output_exists
from fastload.pack.pack_worker import Worker
from fastload.pack.pool import PackPool
from fastload.pack.survey import read_headers, survey_listing
from fastload.sources.listing import first_few
from fastload.system.files import mode_for, open_output, output_errors
from fastload.system.syscalls import file_system_of

_SMALLER = "`fastload pack` makes smaller files with `--size`, `--max-size` or `--store source`"

_TMPFS = 0x01021994  # its number in statfs(2)


def begin_or_resume(
    job: PackJob, journal: Journal, found: JournalContents | None, pool: PackPool
) -> tuple[PackTasks, dict[int, TaskRecord]]:
    """Returns the tasks of a pack, and the records of those done and whole; its files are ready for the others.

    ResumeError: what lies there belongs to another source, option or release, and may not be overwritten.
    """
    old = None
    if os.path.lexists(job.part):
        if found is not None and {file for _, file, _ in found.head["streams"]} <= {job.part.name, job.masks.name}:
            changed = changed_since(job, found.head, found.sources)
        elif any(map(of_another_release, (journal_path(job.output), job.part))):
            changed = f"another release of fastload began it and can finish it; {writer_name()} cannot read its journal"
        else:
            changed = "its journal is missing or damaged"
        if not changed:
            old = found
        elif not job.overwrite:
            raise _cannot_continue(job, changed)
    elif job.output.exists() and not job.overwrite:
        raise output_exists(job.output)
    headers = None
    if job.whole is not None:
        headers = None if job.whole.headers is None else Headers(job.whole.headers, Counter(), {})
    elif job.listing.files is not None:
        if old is not None and np.array_equal(old.sources, source_table(job.listing)):
            headers = headers_from_json(old.head["headers"])
        headers = headers or read_headers(job.listing, pool, job.on_progress)
    try:
        survey = survey_listing(job, pool, headers)
    except SourceError as exc:
        if old is None or job.overwrite:
            raise
        if headers is not None and not headers.reasons:
            raise _cannot_continue(job, _other_images(job, old, headers, str(exc))) from exc
        raise SourceError(f"{exc} {KEPT}") from exc
    earlier = survey.plan.without_checksums() if survey.plan is not None else None
    if old is not None and repr(earlier).replace(", checksum=False", "") == old.head["plan"]:
        # Begun by a release whose zstd frames had no checksums: all frames of a file are alike.
        survey, old.head["plan"] = replace(survey, plan=earlier), repr(earlier)
    if old is not None and repr(survey.plan) == old.head["plan"]:
        placed = {name: (file, base) for name, file, base in old.head["streams"]}
        if survey.plan is None or placed.keys() >= set(survey.row_lengths):
            tasks = PackTasks.of(job, survey, placed)
            if all(os.path.exists(stream.path) for stream in tasks.streams):
                return tasks, _resume(tasks, old, pool)
    elif old is not None and not job.overwrite:
        why = f"now {survey.plan}, formerly {old.head['plan']}"
        raise _cannot_continue(job, _other_images(job, old, headers, why))
    discard(job, found)
    tasks = PackTasks.of(job, survey)
    _begin(tasks, journal, headers, pool)
    return tasks, {}


def _cannot_continue(job: PackJob, changed: str) -> ResumeError:
    return ResumeError(
        f"{job.part}: left by an interrupted pack that this call cannot continue: {changed}. Start again with "
        f"`--overwrite`, or remove {job.part.name} and {journal_path(job.output).name}."
    )


def _other_images(job: PackJob, old: JournalContents, headers: Headers | None, why: str) -> str:
    """Returns that images changed so that all would be packed in another way, in words."""
    known = headers_from_json(old.head["headers"]) if len(old.sources) == len(job.listing) else None
    names = []
    if known is not None and headers is not None:
        for sample in np.flatnonzero(known.table != headers.table).tolist():
            header = headers.table[sample]
            kind = f"{header['height']}x{header['width']}, {header['channels']} channels of {header['bits']} bits"
            names.append(f"{job.listing.keys[sample]} ({kind})")
    which = f"{first_few(names)} changed since then, and " if names else ""
    return f"{which}images would be packed in another way now: {why}"


def _resume(tasks: PackTasks, found: JournalContents, pool: PackPool) -> dict[int, TaskRecord]:
    """Returns the records of tasks whose sources are the same, and whose rows lie where they belong, unchanged.

    Where offsets depend on the rows before, these are the tasks before the first that is not so. Space for the others
    is reserved.
    """
    job = tasks.job
    for path in {stream.path for stream in tasks.streams} or {str(job.part)}:
        wait_for_orphans(Path(path))
    records: dict[int, TaskRecord] = {}
    ends = [(0,) * len(tasks.streams)]
    for number in range(tasks.num_tasks):
        rows, start = tasks.rows(number), ends[-1] if tasks.ordered else tasks.starts(number)
        now = (rows.start, rows.stop - rows.start, tasks.sources_check(number), start)
        record = found.tasks.get(number)
        # What was skipped is tried again where it must not be: it may have been repaired, or its error is to be shown.
        if (
            record is not None
            and (record.first, record.count, record.sources, record.starts) == now
            and not (record.failed and job.on_error == "fail")
        ):
            records[number] = record
            ends.append(tasks.ends(record))
        elif tasks.ordered:
            break
    broken = tasks.num_tasks
    written = [(record, tasks.streams) for record in records.values()]
    for done, (number, right) in enumerate(pool.run(Worker.check, written)):
        if not right:
            del records[number]
            broken = min(broken, number)
        if job.on_progress:
            job.on_progress("checking what an earlier run packed", done + 1, len(written))
    if tasks.ordered:
        records = {number: record for number, record in records.items() if number < broken}
        # This also removes what a call that was stopped in its last step wrote behind the rows: gaps between rows must
        # stay zero.
        behind = {stream.path: stream.base + end for stream, end in zip(tasks.streams, ends[len(records)], strict=True)}
        for path, end_of_rows in behind.items():
            with _changing(path) as fd:
                os.ftruncate(fd, end_of_rows)
    remove(job.meta)  # Left by a last step that was interrupted; it is made again.
    _check_space(tasks, records.values(), pool)
    _reserve(tasks)
    return records


def _begin(tasks: PackTasks, journal: Journal, headers: Headers | None, pool: PackPool) -> None:
    """Starts a new pack: its journal, and its files with the space that is known to be needed."""
    job = tasks.job
    needed = [job.meta]  # Most packs do not make it, but one that has to must not find out at its end.
    needed += [job.masks] * any(stream.path == str(job.masks) for stream in tasks.streams)
    for path in filter(os.path.lexists, needed):
        if path == job.meta or not job.overwrite:
            replaced = "" if path == job.meta else ", or replace it with `--overwrite`"
            raise ResumeError(
                f"{path}: exists, and is of no unfinished pack of {job.output.name}, which needs that name until it is "
                f"complete. Move it away{',' if replaced else ' or'} choose another output{replaced}."
            )
        remove(path)
    _check_space(tasks, (), pool)
    head = {
        **identity_of(job),
        "plan": repr(tasks.survey.plan),
        "streams": [(stream.name, os.path.basename(stream.path), stream.base) for stream in tasks.streams],
        "headers": headers_to_json(headers),
        "parts": [part.name for part in job.parts],
    }
    journal.begin(head, tasks.sources)
    made: list[Path] = []
    try:
        _reserve(tasks, made)
    except OutputError:
        for path in made:
            remove(path)
        raise


def own_files(job: PackJob, found: JournalContents | None) -> list[Path]:
    """Returns the unfinished files besides the journal; `OUT.h5.masks` if the journal names it, or cannot be read.

    `OUT.h5.meta` is the pack's, too, if there is a journal: a pack does not begin next to somebody else's.
    """
    if found is None:
        named = {job.part.name, job.masks.name} if os.path.lexists(job.part) else set()
    else:
        named = {job.part.name, job.meta.name, *(file for _, file, _ in found.head["streams"])}
    return [path for path in (job.meta, job.masks, job.part) if path.name in named and os.path.lexists(path)]


def discard(job: PackJob, found: JournalContents | None) -> None:
    """Removes the files of an unfinished pack, but for its journal."""
    for path in own_files(job, found):
        if not path.is_symlink():
            wait_for_orphans(path)
        remove(path)


def remove(path: Path) -> None:
    """Removes an unfinished file, or nothing."""
    with output_errors(f"{path}: cannot be removed ({{}}). Remove it, then run the same command again."):
        path.unlink(missing_ok=True)


def wait_for_orphans(part: Path) -> None:
    """Waits until no worker of a killed packer has the file open; each ends with its parent, within moments."""
    with _changing(part) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX)


@contextmanager
def _changing(path: str | Path) -> Iterator[int]:
    """Yields a descriptor of a file being packed; OutputError: it cannot be opened, or an operation failed."""
    with output_errors(f"{path}: cannot be written ({{}}). What was packed is kept: run the same command again."):
        fd = open_output(Path(path), os.O_RDWR)
        try:
            yield fd
        finally:
            os.close(fd)


def identity_of(job: PackJob) -> dict[str, Any]:
    """Returns what must be the same for a pack to be continued, besides the source files."""
    fields = xxhash.xxh3_64()
    for name, column in sorted(job.listing.columns.items()):
        fields.update(f"{name} {column.values.dtype.str} {column.values.shape} {sorted(column.attrs.items())}".encode())
        fields.update(np.ascontiguousarray(column.values).data)
    fields.update(np.ascontiguousarray(job.listing.split).data)
    if (masks := job.listing.masks) is not None:
        fields.update(f"masks {masks.names} {masks.ignore_index} {sorted(masks.attrs.items())}".encode())
        fields.update(np.ascontiguousarray(masks.present).data)
    return {
        "release": writer_name(),
        "decoder": decoder_versions(),
        "layout": job.listing.layout,
        "options": job.options.to_dict(),
        "fields": fields.hexdigest(),
    }


def changed_since(job: PackJob, head: Mapping[str, Any], old: NDArray[np.void]) -> str:
    """Returns the first difference to a journal's head and sources, SOURCE (N,), in words; "" when there is none."""
    identity, table = identity_of(job), source_table(job.listing)
    for name in ("release", "decoder", "layout"):
        if head[name] != identity[name]:
            return f"the {name} was {head[name]}, now it is {identity[name]}"
    then, now = head["options"], identity["options"]
    for name in {**then, **now}:
        if then.get(name) != now.get(name):
            return f"option {name} was {then.get(name)}, now it is {now.get(name)}"
    keys, old_keys = set(table["key"].tolist()), set(old["key"].tolist())
    if keys != old_keys or len(table) != len(old):
        new = [job.listing.keys[i] for i in np.flatnonzero(~np.isin(table["key"], old["key"]))[:3]]
        which = f", among the new ones {', '.join(new)}" if new else ""
        gone = len(old_keys - keys)
        return f"the source had {len(old)} images, of which {gone} are gone; now it has {len(table)}{which}"
    if head["fields"] != identity["fields"]:
        return "labels, splits or other fields of the source changed"
    return ""


def _check_space(tasks: PackTasks, done: Collection[TaskRecord], pool: PackPool) -> None:
    """Raises OutputError if the disk has too little free space for the rows that are not done."""
    output, survey = tasks.job.output, tasks.survey
    free, needed = free_bytes(output), tasks.bytes_to_come(done, pool)
    if needed > free:
        error = OutputError(
            f"{output}: needs up to {needed:,} bytes while {survey.num_samples:,} images are packed, {free:,} are "
            f"free. Free some, or choose another disk; {_SMALLER}."
        )
        error.errno = errno.ENOSPC
        raise error


def free_bytes(output: Path) -> int:
    """Returns the bytes free on the file system of an output; raises OutputError if its folder is missing."""
    try:
        return shutil.disk_usage(output.absolute().parent).free
    except OSError as exc:
        raise OutputError(
            f"{output}: its folder {output.absolute().parent} does not exist or cannot be read "
            f"({os.strerror(exc.errno or 0)}). Make it first."
        ) from exc


def _reserve(tasks: PackTasks, made: list[Path] | None = None) -> None:
    """Extends the files by the space that is known to be needed: a full disk shows before decoding.

    With `made` they are new, and are added to it; who may not read the file that they will replace cannot read them.
    """
    mode = mode_for(tasks.job.output) | stat.S_IRUSR | stat.S_IWUSR
    for path in dict.fromkeys([tasks.job.part, *(Path(stream.path) for stream in tasks.streams)]):
        num_bytes = tasks.known_end if path == tasks.job.part else 1
        with output_errors(f"{path}: cannot be written ({{}}). Choose another folder."):
            fd = open_output(path, os.O_RDWR | (0 if made is None else os.O_CREAT | os.O_EXCL), mode)
        if made is not None:
            made.append(path)
        with (
            os.fdopen(fd, "r+b", buffering=0) as file,
            output_errors(
                f"{path}: {num_bytes:,} bytes cannot be reserved ({{}}). Free some space, or choose another disk; "
                f"{_SMALLER}."
            ),
        ):
            if file_system_of(path) == _TMPFS or not hasattr(os, "posix_fallocate"):  # as on macOS
                # tmpfs would hand out its pages here and now, 0.25 s per GB during which no worker decodes; its free
                # space has just been checked.
                file.truncate(max(num_bytes, path.stat().st_size))
            else:
                os.posix_fallocate(fd, 0, num_bytes)
