from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastload.errors import PackError
from fastload.pack.fill import HEADERS
from fastload.pack.journal import DONE, RECORD, SKIPPED, SOURCE, Journal, _checks, source_table


def _begin(path: Path, num_rows: int) -> Journal:
    journal = Journal(path)
    keys = [f"{i}.jpg" for i in range(3)]
    journal.begin({"num_rows": num_rows, "release": "1"}, source_table(keys, np.arange(3), np.arange(3) * 10))
    return journal


def test_claims_are_read_back(tmp_path):
    journal = _begin(tmp_path / "j", 8)
    journal.rows(np.array([0, 1, 2]), np.array([7, 0, 9], np.uint64), {1: "truncated: 3 bytes, größer als erwartet"})
    journal.rows(np.array([5]), np.array([2**63 + 1], np.uint64), {})
    journal.close()
    head, sources, claims = Journal(tmp_path / "j").read()
    assert head["release"] == "1" and sources["mtime_ns"].tolist() == [0, 10, 20]
    assert claims.state.tolist() == [DONE, SKIPPED, DONE, 0, 0, DONE, 0, 0]
    assert claims.digest[5] == 2**63 + 1 and not claims.closing
    assert claims.reasons == {1: "truncated: 3 bytes, größer als erwartet"}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(cut=st.integers(0, 400))
def test_a_journal_cut_anywhere_claims_a_prefix_and_can_be_continued(tmp_path, cut):
    path = tmp_path / "j"
    journal = _begin(path, 6)
    head_bytes = path.stat().st_size
    for row in range(4):
        journal.rows(np.array([row]), np.array([row + 100], np.uint64), {3: "bad " * 9} if row == 3 else {})
    journal.closing()
    journal.close()
    whole = path.read_bytes()
    path.write_bytes(whole[: max(0, len(whole) - cut)])
    journal = Journal(path)
    found = journal.read()
    if len(whole) - cut < head_bytes:
        assert found is None
    else:
        claims = found[2]
        rows = int(np.sum(claims.state != 0))
        assert claims.state.tolist() == [DONE, DONE, DONE, SKIPPED][:rows] + [0] * (6 - rows)
        journal.rows(np.array([5]), np.array([55], np.uint64), {})
        assert journal.read()[2].state[5] == DONE
    journal.close()


def test_a_damaged_record_and_all_behind_it_are_not_believed(tmp_path):
    path = tmp_path / "j"
    journal = _begin(path, 4)
    head_bytes = path.stat().st_size
    journal.rows(np.arange(4), np.arange(4).astype(np.uint64), {})
    data = bytearray(path.read_bytes())
    data[head_bytes + 2 * RECORD.itemsize + 17] ^= 1
    path.write_bytes(data)
    assert journal.read()[2].state.tolist() == [DONE, DONE, 0, 0]


def test_a_changed_source_voids_what_was_said_of_its_row_before(tmp_path):
    path = tmp_path / "j"
    journal = _begin(path, 4)
    journal.rows(np.array([0, 2]), np.array([7, 0], np.uint64), {2: "truncated"})
    before = path.stat().st_size
    source = np.array([(0, 33, -5)], SOURCE)
    header = np.array([(20, 70_000, 3, 16, 0)], HEADERS)
    journal.changed(np.array([2]), source, header)
    half = path.read_bytes()[: before + RECORD.itemsize]
    claims = journal.read()[2]
    assert claims.state.tolist() == [DONE, 0, 0, 0] and not claims.reasons
    assert list(claims.changed) == [2] and claims.changed[2][0] == source[0] and claims.changed[2][1] == header[0]
    journal.rows(np.array([2]), np.array([9], np.uint64), {})
    assert journal.read()[2].state.tolist() == [DONE, 0, DONE, 0]
    path.write_bytes(half)
    claims = journal.read()[2]
    assert claims.reasons == {2: "truncated"} and not claims.changed
    journal.close()


def test_a_second_packer_is_refused(tmp_path):
    journal = _begin(tmp_path / "j", 1)
    with pytest.raises(PackError, match="another process is packing"):
        Journal(tmp_path / "j")
    journal.close()
    Journal(tmp_path / "j").close()


@given(st.binary(max_size=320))
def test_checksums_are_those_of_xxh32(data: bytes) -> None:
    records = np.frombuffer(data[: len(data) // 32 * 32], RECORD).copy()
    records["check"] = 0
    expected = [xxhash.xxh32_intdigest(record.tobytes()) for record in records]
    assert _checks(records).tolist() == expected
