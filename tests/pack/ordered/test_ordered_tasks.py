"""How rows are cut into tasks, and what the journal keeps of them."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fastload.pack.journal import SOURCE, Journal
from fastload.pack.ordered.ordered_tasks import task_bounds
from fastload.pack.ordered.record_log import ROW, RowStream, TaskLog, TaskRecord


@given(st.lists(st.integers(0, 50), min_size=1, max_size=80), st.integers(1, 120))
def test_tasks_hold_all_rows_once_and_few_bytes_each(lengths: list[int], task_bytes: int) -> None:
    bounds = task_bounds(np.array(lengths), task_bytes)
    assert bounds[0] == 0 and bounds[-1] == len(lengths)
    assert len(bounds) - 1 >= min(16, len(lengths))
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        assert stop - start == 1 or (stop > start and sum(lengths[start:stop]) <= task_bytes)


@given(st.lists(st.integers(0, 40), max_size=40), st.integers(1, 30), st.sampled_from(["rows", "ragged"]), st.data())
def test_offsets_of_rows_as_they_come_are_those_of_all_at_once(lengths, chunk_bytes, form, data) -> None:
    rows = np.zeros(len(lengths), ROW)
    rows["images"] = lengths
    stream = RowStream("images", "x", 4096, form, chunk_bytes)
    cut = data.draw(st.integers(0, len(lengths)))
    first, middle = stream.offsets(rows[:cut], 0)
    second, end = stream.offsets(rows[cut:], middle)
    whole, whole_end = stream.offsets(rows, 0)
    assert np.concatenate((first, second)).tolist() == whole.tolist() and end == whole_end


def _record(number: int) -> TaskRecord:
    rows = np.zeros(3, ROW)
    rows["row"], rows["digest"] = [7, 8, 10], 2**64 - 1 - number
    return TaskRecord(number, 7, 4, 2**63 + 5, (11, 12), (2**64 - 1, 3), rows, {9: "truncated é"})


def test_the_journal_is_read_up_to_the_last_whole_record_wherever_it_is_torn(tmp_path: Path) -> None:
    path = tmp_path / "o.h5.journal"
    with closing(Journal(path)) as journal:
        log = TaskLog(journal)
        log.begin({"options": {"size": 3}}, np.ones(5, SOURCE))
        ends = [path.stat().st_size]
        for number in (1, 0):
            log.written(_record(number))
            ends.append(path.stat().st_size)
    whole = path.read_bytes()
    for size in range(0, len(whole) + 1, 7):
        path.write_bytes(whole[:size])
        with closing(Journal(path)) as journal:
            found = TaskLog(journal).read()
            if size < ends[0]:
                assert found is None
                continue
            assert found is not None and found.head == {"options": {"size": 3}} and len(found.sources) == 5
            assert sorted(found.tasks) == sorted([1, 0][: sum(size >= end for end in ends[1:])])
            for number, task in found.tasks.items():
                assert task.to_bytes() == _record(number).to_bytes() and task.reasons == {9: "truncated é"}
            TaskLog(journal).finished({"header_digest": "ab"})
            again = TaskLog(journal).read()
            assert (
                again is not None and again.finished == {"header_digest": "ab"} and len(again.tasks) == len(found.tasks)
            )
