"""Beginning a pack in order: anew, or with the tasks that an interrupted call has left whole."""

from __future__ import annotations

import os

from fastload.errors import OutputError, ResumeError
from fastload.pack.ordered.log import Found, TaskLog, TaskRecord
from fastload.pack.ordered.space import bytes_beside
from fastload.pack.ordered.tasks import OrderedPack
from fastload.pack.ordered.work import Placed, check_rows
from fastload.pack.reserve import check_space, reserve
from fastload.pack.resume import SYNC_BYTES, discard, give_up, identity_of, wait_for_orphans, what_changed
from fastload.pack.workers import WorkerPool


def begin_in_order(pack: OrderedPack, log: TaskLog, pool: WorkerPool) -> list[TaskRecord]:
    """The first tasks, as far as they are done and whole; files under way hold these and nothing else.

    Raises:
        ResumeError: what lies there belongs to another source, option or release, and may not be overwritten.
        OutputError: the disk is too full.
    """
    job = pack.job
    if job.part.exists():
        found = log.read()
        changed = "its journal is missing or damaged" if found is None else _changed(pack, found)
        if found is not None and not changed and all(os.path.exists(stream.path) for stream in pack.streams):
            for stream in pack.streams:
                wait_for_orphans(job.part.with_name(os.path.basename(stream.path)))
            records = _whole(pack, found, pool)
            _reserve_again(pack, records)
            return records
        if changed:
            give_up(job, changed)
    discard(job, log.journal)
    _check_masks(pack)
    check_space(job.output, pack.survey, bytes_beside(pack))
    files = [os.path.basename(stream.path) for stream in pack.streams]
    head = {**identity_of(job), "plan": repr(pack.plan), "files": files}
    log.begin(head, pack.sources, sync=pack.survey.bytes_needed >= SYNC_BYTES)
    _create(pack, log)
    return []


def _check_masks(pack: OrderedPack) -> None:
    """Make room for the rows of masks: what has their name now is somebody's own file.

    Raises:
        ResumeError: it may not be overwritten.
    """
    job = pack.job
    if pack.plan.masks is None or not job.masks.exists():
        return
    if not job.overwrite:
        raise ResumeError(
            f"{job.masks}: exists, and is of no unfinished pack of {job.output.name}, which needs that name until it "
            f"is complete. Move it away, choose another output, or replace it with `--overwrite`."
        )
    job.masks.unlink()


def _changed(pack: OrderedPack, found: Found) -> str:
    """What differs from the interrupted pack, in words; "" when nothing does."""
    changed = what_changed(identity_of(pack.job), pack.sources, found.head, found.sources, pack.job)
    if not changed and found.head["plan"] != repr(pack.plan):
        return f"images and masks would be stored in another way now ({pack.plan}, formerly {found.head['plan']})"
    return changed


def _whole(pack: OrderedPack, found: Found, pool: WorkerPool) -> list[TaskRecord]:
    """The tasks up to the first that is not done, is of another source now, or whose rows are not what was written."""
    records: list[TaskRecord] = []
    placed: list[Placed] = []
    ends = [(0,) * len(pack.streams)]
    for number in range(pack.num_tasks):
        record = found.tasks.get(number)
        if record is None or not pack.is_of(record) or record.starts != ends[-1]:
            break
        if record.reasons and pack.job.on_error == "fail":
            break  # Tried again: it may have been repaired, or is to be named.
        where, end = pack.place(number, record.rows, ends[-1], record.checks)
        records.append(record)
        placed.append(where)
        ends.append(end)
    wrong = len(records)
    for done, (number, right) in enumerate(pool.run(check_rows, placed)):
        wrong = wrong if right else min(wrong, number)
        if pack.job.progress:
            pack.job.progress("checking what an earlier run packed", done + 1, len(placed))
    # Also what a call that was stopped in its last step wrote behind the images: places between rows must stay zero.
    for stream, end_of_rows in zip(pack.streams, ends[wrong], strict=True):
        os.truncate(stream.path, stream.base + end_of_rows)
    return records[:wrong]


def _reserve_again(pack: OrderedPack, records: list[TaskRecord]) -> None:
    """Hold space for what is still to be made; what is there stays, whatever comes of it."""
    job = pack.job
    job.meta.unlink(missing_ok=True)  # of a last step that was interrupted; it is made anew
    check_space(job.output, pack.survey, bytes_beside(pack), pack.part_of(len(records)))
    if pack.known_end is not None:
        reserve(job.part, pack.known_end, again=True)


def _create(pack: OrderedPack, log: TaskLog) -> None:
    known = pack.known_end
    try:
        for stream in pack.streams:
            path = pack.job.part.with_name(os.path.basename(stream.path))
            reserve(path, known if stream.name == "images" and known is not None else max(stream.base, 1))
    except OutputError:
        discard(pack.job, log.journal)
        raise
