"""The beginning of an ordered pack: a new one, or after the tasks that an interrupted call has left whole."""

from __future__ import annotations

import os

from fastload.errors import ImageError, OutputError, ResumeError
from fastload.format.codecs import NONE
from fastload.pack.begin import (
    SYNC_BYTES,
    check_space,
    discard,
    identity_of,
    require_overwrite,
    reserve,
    wait_for_orphans,
    what_changed,
)
from fastload.pack.encode import RowEncoder
from fastload.pack.encoding import RaggedPlan
from fastload.pack.ordered.ordered_tasks import OrderedPack, TaskOffsets, check_rows
from fastload.pack.ordered.record_log import LogContents, TaskLog, TaskRecord
from fastload.pack.pool import PackPool

_SAMPLED_CHUNKS = 4


def begin_ordered(pack: OrderedPack, log: TaskLog, pool: PackPool) -> list[TaskRecord]:
    """Returns the first tasks, as far as they are done and whole; the unfinished files hold these and nothing else.

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
            records = _whole_tasks(pack, found, pool)
            _reserve_again(pack, records)
            return records
        if changed:
            require_overwrite(job, changed)
    discard(job, log.journal)
    _remove_masks_file(pack)
    check_space(job.output, pack.survey, extra_bytes(pack))
    files = [os.path.basename(stream.path) for stream in pack.streams]
    head = {**identity_of(job), "plan": _plan_text(pack.plan), "files": files}
    log.begin(head, pack.sources, sync=pack.survey.bytes_needed >= SYNC_BYTES)
    _create_files(pack, log)
    return []


def _changed(pack: OrderedPack, found: LogContents) -> str:
    """Returns the first difference to the interrupted pack, in words; "" when there is none."""
    changed = what_changed(identity_of(pack.job), pack.sources, found.head, found.sources, pack.job)
    if not changed and (now := _plan_text(pack.plan)) != found.head["plan"]:
        return f"images and masks would be stored in another way now ({now}, formerly {found.head['plan']})"
    return changed


def _whole_tasks(pack: OrderedPack, found: LogContents, pool: PackPool) -> list[TaskRecord]:
    """Returns the tasks before the first that is not done, whose sources changed, or whose rows are damaged."""
    records: list[TaskRecord] = []
    located: list[TaskOffsets] = []
    ends = [(0,) * len(pack.streams)]
    for number in range(pack.num_tasks):
        record = found.tasks.get(number)
        if record is None or not pack.is_of(record) or record.starts != ends[-1]:
            break
        if record.reasons and pack.job.on_error == "fail":
            break  # Tried again: it may have been repaired, or its error is to be shown.
        offsets, end = pack.locate(number, record.rows, ends[-1], record.checks)
        records.append(record)
        located.append(offsets)
        ends.append(end)
    whole = len(records)
    for done, (number, right) in enumerate(pool.run(check_rows, located)):
        whole = whole if right else min(whole, number)
        if pack.job.on_progress:
            pack.job.on_progress("checking what an earlier run packed", done + 1, len(located))
    # This also removes what a call that was stopped in its last step wrote behind the images: gaps between rows must
    # stay zero.
    for stream, end_of_rows in zip(pack.streams, ends[whole], strict=True):
        os.truncate(stream.path, stream.base + end_of_rows)
    return records[:whole]


def _reserve_again(pack: OrderedPack, records: list[TaskRecord]) -> None:
    """Reserves space for the rows that are not made yet."""
    job = pack.job
    job.meta.unlink(missing_ok=True)  # Left by a last step that was interrupted; it is made again.
    check_space(job.output, pack.survey, extra_bytes(pack), pack.fraction_of(len(records)))
    if pack.known_end is not None:
        reserve(job.part, pack.known_end, again=True)


def _remove_masks_file(pack: OrderedPack) -> None:
    """Removes a file that has the name of the rows of masks, which is not the packer's.

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


def _create_files(pack: OrderedPack, log: TaskLog) -> None:
    known = pack.known_end
    try:
        for stream in pack.streams:
            path = pack.job.part.with_name(os.path.basename(stream.path))
            reserve(path, known if stream.name == "images" and known is not None else max(stream.base, 1))
    except OutputError:
        discard(pack.job, log.journal)
        raise


def extra_bytes(pack: OrderedPack) -> int:
    """Returns the bytes needed besides all rows until the file is complete.

    Compressed chunks are made in `OUT.h5.meta` while the rows still lie in their own files. Masks lie in two files for
    a moment, also compressed ones where images stay in `OUT.h5.part`.
    """
    needed, compressed = 0, compressed_bytes(pack)
    images_stay = "images" not in compressed
    for stream in pack.streams:
        if stream.name in compressed:
            needed += compressed[stream.name] * (2 if images_stay else 1)
        elif stream.name == "masks":
            needed += pack.masks_bytes
    return needed


def compressed_bytes(pack: OrderedPack) -> dict[str, int]:
    """Returns for each dataset whose chunks are compressed about its compressed bytes, from some of its chunks."""
    survey, plan, num_rows = pack.survey, pack.plan, len(pack.samples)
    codecs = {"images": plan.image_codec, "masks": plan.mask_codec}
    specs = survey.pixels(num_rows)
    names = [stream.name for stream in pack.streams if stream.form == "rows" and codecs[stream.name] != NONE]
    assert survey.headers is not None and survey.listing.files is not None, "a plan is of images"
    encoder = RowEncoder(survey.listing.files, survey.listing.masks, plan)
    found = {}
    for name in names:
        before = after = 0
        for chunk in range(_SAMPLED_CHUNKS):
            first = chunk * num_rows // _SAMPLED_CHUNKS
            rows = []
            for sample in pack.samples[first : first + specs[name].chunk_rows].tolist():
                try:
                    row = encoder.encode(sample, survey.headers[sample])
                except (ImageError, OSError):
                    continue  # Packing reports it.
                rows.append(bytes((row.image if name == "images" else row.mask) or b""))
            data = b"".join(rows)
            before, after = before + len(data), after + len(codecs[name].compress(data))
        found[name] = int(num_rows * specs[name].row_bytes * after / before) if before else 0
    return found


def _plan_text(plan: RaggedPlan) -> str:
    """Returns the plan as the journal keeps it.

    It names classes as release 0.1.0 did, whatever they are called in the code, so that packs which that release began
    are continued.
    """
    text = repr(plan).replace("RaggedPlan(", "StorePlan(").replace("EncodingOption(", "StoreOption(")
    return text.replace("='ragged'", "='store'")
