from __future__ import annotations

import threading

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fastload.errors import ImageError
from fastload.estimate import SAMPLES, spread, take_sample
from fastload.format.ragged import RAW, EncodedRow
from fastload.options.pack import EncodingOption

RAW_STORE, SOURCE = EncodingOption("raw"), EncodingOption("source")


def encode(sample: int, option: EncodingOption) -> EncodedRow:
    if sample % 10 == 3:
        raise ImageError("is damaged")
    return EncodedRow(np.full((2, 2, 1), sample % 256, np.uint8).data, RAW, (2, 2, 1), 1, sample)


@given(count=st.one_of(st.integers(1, SAMPLES), st.integers(1, 100_000)))
def test_a_sample_is_spread_evenly_from_its_first_on(count):
    found = spread(count, min(count, SAMPLES))
    assert len(set(found)) == len(found) and set(found) <= set(range(count))
    assert len(found) == min(count, SAMPLES)
    for part in (8, len(found)):
        gaps = np.diff([0, *sorted(found[:part]), count])
        assert gaps.max() <= 3 * count / min(part, len(found)) + 2


def test_each_sample_is_there_in_every_store_and_what_fails_is_counted():
    samples = np.arange(100, 130)
    found = take_sample(encode, [RAW_STORE, SOURCE], samples, threads=2, seconds=60)
    assert found.samples == [i for i in samples.tolist() if i % 10 != 3] and found.failed == 3
    assert [row.digest for row in found.rows[SOURCE]] == found.samples
    assert all(len(row.image) == 4 for row in found.rows[RAW_STORE])
    found = take_sample(encode, [RAW_STORE], np.arange(1000), threads=3, seconds=-1)
    assert len(found.samples) + found.failed == 3  # when the time is out, each thread has had one


def test_threads_share_the_work_and_progress_ends_at_the_total():
    names, seen = set(), []

    def slow(sample: int, option: EncodingOption) -> EncodedRow:
        names.add(threading.current_thread().name)
        both.wait(600)
        return encode(0, option)

    both = threading.Barrier(2)
    take_sample(slow, [RAW_STORE], np.arange(4), threads=2, seconds=60, progress=lambda *told: seen.append(told))
    assert len(names) == 2 and seen[-1] == ("measuring stores", 4, 4)
