from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload import FastLoader, OptionError, PackedDataset
from fastload.prefetch.ring import SLACK
from fastload.profiling.bench.faults import DelayedDataset, Delays, Fault, parse_fault


def test_a_fault_is_parsed_and_what_is_none_is_refused_with_those_there_are():
    faults = {"slow-disk=20": (0.02, 1), "stall=300@50": (0.3, 50), "stall=1.5@1": (0.0015, 1), "kill-worker": (0.0, 0)}
    for text, (delay_s, every) in faults.items():
        assert parse_fault(text) == Fault(text, delay_s, every)
    for text in ["", *"slow-disk slow-disk= slow-disk=-1 stall=300 stall=300@0 stall=@5 kill stall=a@b".split()]:
        with pytest.raises(OptionError, match=r"slow-disk=MS.*stall=MS@EVERY.*kill-worker"):
            parse_fault(text)


@given(reads=st.lists(st.integers(1, 200), max_size=50), every=st.integers(1, 7), batch_size=st.integers(1, 64))
def test_one_batch_of_every_few_is_held_up_however_many_are_read_at_once(reads, every, batch_size):
    delays = Delays(Fault("stall", 0.0, every), batch_size)
    for rows in reads:
        delays.before(rows)
    assert delays.count == sum(reads) // (batch_size * every)


def test_batches_are_the_same_and_held_up_as_often_as_asked(packed_file):
    path = packed_file(rows=40)
    slow = DelayedDataset(path)
    slow.delays = Delays(Fault("slow-disk=1", 0.001, 1), 4)
    plain = FastLoader(PackedDataset(path), 4, seed=3, shuffle="full", ends="drop")
    delayed = FastLoader(slow, 4, seed=3, shuffle="full", ends="drop", workers=2)
    for a, b in zip(plain, delayed, strict=True):
        assert np.array_equal(a[0].numpy(), b[0].numpy())
    delayed.close()
    # Of the next epoch no more is read ahead than there are slots.
    assert 10 <= slow.delays.count <= 10 + SLACK + 2
    assert slow.delays.seconds == pytest.approx(0.001 * slow.delays.count)
