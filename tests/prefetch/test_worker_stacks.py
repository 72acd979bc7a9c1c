"""What a worker is doing, as far as another process can find out."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing

from fastload.prefetch.waiting import WorkerStacks


def test_a_worker_that_ends_while_it_is_asked_has_no_stack():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()

    class StillThere(WorkerStacks):
        def answered_by(self, pid):
            return True  # when it was looked at

    with closing(StillThere()) as stacks:
        assert stacks.of(process.pid) == ""
