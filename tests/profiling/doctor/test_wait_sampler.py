"""Where the kernel says that threads wait, of real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from fastload.profiling.doctor.kernel import WaitSampler, WaitShares
from fastload.profiling.doctor.loader_records import Fetch
from fastload.timing.results import BatchWork

LOCKED, OUTWARD = WaitShares(lock=1.0), WaitShares(outward=1.0)
WAITS = {
    "a lock of a file": (LOCKED, """
        import fcntl, os
        held = os.open("held", os.O_CREAT | os.O_RDWR)
        fcntl.flock(held, fcntl.LOCK_EX)
        if os.fork():
            fcntl.flock(os.open("held", os.O_RDWR), fcntl.LOCK_EX)
        time.sleep(60)
    """),
    "a lock of processes": (LOCKED, """
        import multiprocessing
        lock = multiprocessing.Lock()
        lock.acquire()
        print("ready", flush=True)
        lock.acquire()
    """),
    "a thread of its own that sleeps": (OUTWARD, """
        import threading
        helper = threading.Thread(target=time.sleep, args=(60,), daemon=True)
        helper.start()
        print("ready", flush=True)
        helper.join()
    """),
    "a sleep": (OUTWARD, "time.sleep(60)"),
    "a socket": (OUTWARD, """
        import socket
        ours, theirs = socket.socketpair()
        print("ready", flush=True)
        ours.recv(1)
    """),
    "a server": (OUTWARD, """
        import socket
        server = socket.create_server(("127.0.0.1", 0))
        ours = socket.create_connection(server.getsockname())
        print("ready", flush=True)
        ours.recv(1)
    """),
    "a server, with a timeout": (OUTWARD, """
        import socket
        server = socket.create_server(("127.0.0.1", 0))
        ours = socket.create_connection(server.getsockname(), timeout=60)
        print("ready", flush=True)
        ours.recv(1)
    """),
    "a pipe": (WaitShares(), """
        import os
        print("ready", flush=True)
        os.read(os.pipe()[0], 1)
    """),
}  # fmt: skip


def all_sleep(pid: int) -> bool:
    """Whether no thread of a process runs or wants to: one that was just started may, on a busy machine."""
    stats = [stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(stat.rpartition(")")[2].split()[0] == "S" for stat in stats)


@pytest.mark.parametrize("what", WAITS)
def test_locks_are_told_from_other_waits(tmp_path, what):
    if Path("/proc/self/wchan").read_bytes() == b"" and not os.access("/proc/1/wchan", os.R_OK):
        pytest.skip("this system does not say where a thread waits")
    shares, code = WAITS[what]
    command = [sys.executable, "-c", "import time\n" + textwrap.dedent(code)]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert '"ready"' not in code or process.stdout.readline() == b"ready\n"
            wchan = Path(f"/proc/{process.pid}/wchan")
            while wchan.read_bytes() in (b"", b"0") or not all_sleep(process.pid):
                time.sleep(0.01)
            looks, begin = WaitSampler(), time.perf_counter()
            looks.pids = [process.pid]
            while len(looks._seen[process.pid][0]) < 15:
                time.sleep(0.01)
            looks.close()
            made = Fetch(process.pid, begin, time.perf_counter() - begin, BatchWork({}), 0.5)
            assert looks.shares([made]) == shares
        finally:
            os.killpg(process.pid, 9)
