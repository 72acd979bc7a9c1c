"""Times the DataLoaders of a user's Python from inside, and writes events to a file.

`inject/sitecustomize.py` imports this package, before the script, into every Python of a job (ranks, workers, whatever
a shell script starts); `diagnose` imports it into its own process. It needs the standard library only, works from
Python 3.9 and torch 2.0 on, and imports nothing of fastload. It changes nothing that a script can see but the clock:
functions of torch, Pillow, h5py and a few decoders are wrapped when they are imported, each call goes through, and any
failure of this package is caught and recorded.

Each process appends lines of JSON to a file of its own as things happen, so a kill loses nothing. All times are seconds
of CLOCK_MONOTONIC, the same clock in every process. Events (key `e`):

    process  pid, rank, local_world, cpus, python                once, at the first further event
    begin    t                                                   the script is about to begin
    torch    version, cuda                                       torch was imported
    loader   id, workers, prefetch, persistent, batch_size, ...  a DataLoader is iterated for the first time
    iter     id, t, s, pids                                      an epoch's iterator was made in s seconds; its workers
    next     id, t, wait, ...                                    a batch was received; the times of the step before it;
                                                                 of a FastLoader's batch, its own figures too; of a
                                                                 loader around another, how many of its it took so far
    end      id, t, wait                                         the loader had no more batches
    shape    id, shape, dtype, bytes, masks                      the images of its first batch, whether masks follow
    inner    id, pids, workers, dataset, ...                     a loader takes its batches from a DataLoader within it
    trains   id                                                  a step of its loop ran backward, for the first time
    operations   id, images, tensors, operations, between, ...   what one of its steps on the CPUs consists of, and for
                                                                 how many threads
    call     name, t, s                                          a function was called that takes time between loops
    fetch    id, t, wall, delay, parts, ...                      a batch was made; id: by the loop itself, for a loader
    line     seen                                                [kind and names, count] of looks at a worker: the line
                                                                 of code, one where it waits, a part and the call there
    trial    id, t, limit, steps, s                              steps taken while `limit` workers could work; 0: all
    fault    what                                                this package failed; the script went on

Read `hooks` first (which calls are wrapped), then `loop_side` (waits, steps and copies), `batch_making` (one batch),
`timed_calls` (its parts), `code_lines` (names of places), `dataset_facts`, `step_operations`, `worker_trial` (fewer
workers, or none) and `event_file`.
"""

import os
import sys
from typing import Any

from .event_file import clock, events, note_fault
from .hooks import install, is_installed, record_into, uninstall

__all__ = ["install", "is_installed", "record_into", "start", "uninstall"]


def start() -> None:
    """Begins to record, before the script; a failure is recorded, and the script runs all the same."""
    try:
        install()
        events.write({"e": "begin", "t": clock()})
        _leave_out_our_interrupt()
    except Exception:  # noqa: BLE001  # whatever it is
        note_fault("install")


def _leave_out_our_interrupt() -> None:
    """Shows no traceback where the doctor interrupts the script because its time is over: nothing is wrong there."""
    shown = sys.excepthook

    def show(kind: Any, error: Any, traceback: Any) -> None:
        if not issubclass(kind, KeyboardInterrupt) or not os.path.exists(os.path.join(events.folder, "time-over")):
            shown(kind, error, traceback)

    sys.excepthook = show
