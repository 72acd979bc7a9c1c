"""Events of a device: they are freed by the process that made them."""

from __future__ import annotations

import os

import pytest
from child_processes import in_a_fork

from fastload.timing import clocks

torch = pytest.importorskip("torch")


def test_a_forked_process_frees_no_event(monkeypatch):
    freed = []

    class Native:
        def __del__(self, here=os.getpid()):  # noqa: B008  # torch's ends a process that has no device
            freed.append(1) if os.getpid() == here else os._exit(3)

    class Event:
        def __new__(cls, **options):
            event = super().__new__(cls)
            event.native, event.options = Native(), options
            return event

    monkeypatch.setattr(torch.cuda, "Event", Event)
    kept = [clocks.cuda_event(blocking=True)]
    assert kept[0].options == {"blocking": True}
    in_a_fork(kept.clear)
    assert not freed
    kept.clear()
    assert freed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_fork_of_a_process_with_a_device_goes_on_when_it_drops_the_events():
    clock = clocks.CudaClock()
    marks = [clock.mark(), clocks.cuda_event(blocking=True)]
    in_a_fork(marks.clear)
    clock.wait(marks[0])
