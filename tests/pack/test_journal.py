"""The journal: what is read of it wherever it is torn, and those of other releases."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from fastload.errors import ResumeError
from fastload.pack import pack_images
from fastload.pack.encode import HEADERS, ROW, Headers
from fastload.pack.journal import SOURCE, Journal, TaskRecord, headers_from_json, headers_to_json

HEAD = {
    **dict.fromkeys(("release", "decoder", "layout", "fields", "plan"), ""),
    **{"options": {"size": 3}, "streams": [["images", "o.h5.part", 4096]], "headers": None},
}
REPORT = {
    **{"store": "raw", "header_digest": "ab", "path": "o.h5.part", "chunks": 1, "pixel_bytes": 1, "sources": 1},
    **{"converted": {}, "encodings": {}, "skipped": [], "notes": []},
}


def _record(number: int) -> TaskRecord:
    rows = np.zeros(3, ROW)
    rows["row"], rows["digest"] = [7, 8, 10], 2**64 - 1 - number
    return TaskRecord(number, 7, 4, 2**63 + 5, (11, 12), (2**64 - 1, 3), rows, {9: "truncated é"})


def _written(path: Path) -> list[int]:
    """Writes a journal of tasks 1 and 0; returns its size after the head and after each."""
    with closing(Journal(path)) as journal:
        journal.begin(HEAD, np.ones(5, SOURCE))
        ends = [path.stat().st_size]
        for number in (1, 0):
            journal.written(_record(number))
            ends.append(path.stat().st_size)
    return ends


def test_the_journal_is_read_up_to_the_last_whole_record_wherever_it_is_torn(tmp_path: Path) -> None:
    path = tmp_path / "o.h5.journal"
    ends = _written(path)
    whole = path.read_bytes()
    for size in range(0, len(whole) + 1, 7):
        path.write_bytes(whole[:size])
        with closing(Journal(path)) as journal:
            found = journal.read()
            if size < ends[0]:
                assert found is None
                continue
            assert found is not None and found.head == HEAD and len(found.sources) == 5
            assert sorted(found.tasks) == sorted([1, 0][: sum(size >= end for end in ends[1:])])
            for number, task in found.tasks.items():
                assert task.to_bytes() == _record(number).to_bytes() and task.reasons == {9: "truncated é"}
            journal.finished(REPORT)
            again = journal.read()
            assert again is not None and again.finished == REPORT and len(again.tasks) == len(found.tasks)


@pytest.mark.parametrize("at", [0, 8, 16, 23, 70])
def test_a_record_damaged_in_digest_number_length_or_body_and_all_behind_it_are_not_believed(
    tmp_path: Path, at: int
) -> None:
    ends = _written(tmp_path / "j")
    data = bytearray((tmp_path / "j").read_bytes())
    data[ends[0] + at] ^= 1
    (tmp_path / "j").write_bytes(data)
    with closing(Journal(tmp_path / "j")) as journal:
        found = journal.read()
        assert found is not None and found.tasks == {} and (tmp_path / "j").stat().st_size == ends[0]


@pytest.mark.parametrize(
    ("number", "body"),
    [
        (0, b"{"),
        (0, bytes(3)),
        (0, (2**63).to_bytes(8, "little") + b"{}"),
        (0, (2).to_bytes(8, "little") + b"[]"),
        (0, (2).to_bytes(8, "little") + b"{}"),
        (0, _record(0).to_bytes()[:-1]),
        (0, _record(0).to_bytes().replace(b"truncated", b"truncat\xff\xff")),
        (-2, b"[1]"),
        (-2, json.dumps(REPORT | {"path": None}).encode()),
        (-2, json.dumps({name: REPORT[name] for name in list(REPORT)[1:]}).encode()),
        (-2, b"[" * 100_000),
    ],
)
def test_a_record_that_no_packer_writes_is_not_believed_even_if_its_digest_is_right(
    tmp_path: Path, number: int, body: bytes
) -> None:
    ends = _written(tmp_path / "j")
    digest = xxhash.xxh3_64_digest(body, seed=number % 2**64)
    record = digest + number.to_bytes(8, "little", signed=True) + len(body).to_bytes(8, "little") + body
    data = (tmp_path / "j").read_bytes()
    (tmp_path / "j").write_bytes(data[: ends[1]] + record + data[ends[1] :])
    with closing(Journal(tmp_path / "j")) as journal:
        found = journal.read()
        assert found is not None and list(found.tasks) == [1] and (tmp_path / "j").stat().st_size == ends[1]


@pytest.mark.parametrize(
    "changes",
    [
        *({name: ...} for name in HEAD),
        {"options": []},
        {"headers": 3},
        {"streams": [["images", "o.h5.part"]]},
        {"streams": [["images", "o.h5.part", "4096"]]},
        {"streams": [["images", "other.h5", 4096]]},  # of somebody else: it would be cut
        {"streams": [["images", "../o.h5.part", 4096]]},
    ],
)
def test_a_head_that_no_packer_writes_is_refused_even_if_its_digest_is_right(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    images = [np.full((2, 3, 3), value, np.uint8) for value in range(4)]
    (tmp_path / "other.h5").write_bytes(b"mine" * 3000)
    (tmp_path / "o.h5.part").write_bytes(bytes(9000))
    with closing(Journal(tmp_path / "o.h5.journal")) as journal:
        journal.begin(
            {name: value for name, value in {**HEAD, **changes}.items() if value is not ...}, np.ones(4, SOURCE)
        )
    with pytest.raises(ResumeError, match=r"its journal is missing or damaged.*Start again with `--overwrite`"):
        pack_images(images, tmp_path / "o.h5")
    assert pack_images(images, tmp_path / "o.h5", overwrite=True).num_samples == 4
    assert (tmp_path / "other.h5").read_bytes() == b"mine" * 3000


def test_headers_that_are_damaged_are_read_anew() -> None:
    found = headers_to_json(Headers(np.zeros(2, HEADERS), Counter({"RGB": 2}), {}))
    assert found is not None and headers_from_json(found) is not None
    for changes in ({"table": "!"}, {"table": "AAAA"}, {"kinds": 3}, {"reasons": [1]}, {"reasons": None}):
        assert headers_from_json(found | changes) is None
    assert headers_from_json({}) is None


def test_headers_are_read_back() -> None:
    table = np.array([(20, 70_000, 3, 16, 0, 1), (1, 2, 1, 8, 6, 6), (20, 70_000, 3, 16, 0, 1)], HEADERS)
    found = Headers(table, Counter({"RGB;16": 3}), {2: "truncated é"})
    again = headers_from_json(headers_to_json(found))
    assert again is not None and np.array_equal(again.table, table) and again[1:] == found[1:]
    assert headers_from_json(headers_to_json(None)) is None


@pytest.mark.parametrize(
    ("journal", "part", "said"),
    [
        (b"fastload journal 2\n" + bytes(500), bytes(9000), "another release of fastload began it"),
        (b"fastload ordered1\n" + bytes(500), bytes(9000), "another release of fastload began it"),
        (None, b"fastload chunks1\n" + bytes(500), "another release of fastload began it"),
        (b"fast", bytes(9000), "its journal is missing or damaged"),
        (bytes(700), bytes(9000), "its journal is missing or damaged"),
    ],
)
def test_unfinished_work_of_another_release_is_kept_until_it_may_be_overwritten(
    tmp_path: Path, journal: bytes | None, part: bytes, said: str
) -> None:
    left = {"o.h5.part": part, **({} if journal is None else {"o.h5.journal": journal})}
    for name, data in left.items():
        (tmp_path / name).write_bytes(data)
    images = [np.full((2, 3, 3), value, np.uint8) for value in range(4)]
    with pytest.raises(ResumeError, match=rf"{said}.*Start again with `--overwrite`, or remove o.h5.part"):
        pack_images(images, tmp_path / "o.h5")
    assert all((tmp_path / name).read_bytes() == data for name, data in left.items())
    assert pack_images(images, tmp_path / "o.h5", overwrite=True).num_samples == 4
    assert [path.name for path in tmp_path.iterdir()] == ["o.h5"]
