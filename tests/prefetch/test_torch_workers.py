"""How worker processes begin and end, as real programs: Ctrl-C while they start, and the death of who made them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest
from child_processes import LIMIT_S, child_environment, run_python

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="processes are looked up in /proc")

PACKED = {"rows": 60, "size": (48, 40, 3), "chunk_rows": 8}

HEAD = """
    import ctypes, multiprocessing, os, signal, sys, time
    from fastload import FastLoader, PackedDataset

    def same(sample):
        return sample

    def sleeps(sample):
        print(os.getpid(), flush=True)
        time.sleep(3600)

    def keeps_the_gil(sample):
        print(os.getpid(), flush=True)
        ctypes.PyDLL(None).sleep(3600)
"""


def start(folder, text, **words):
    """Starts a script as a shell starts a job: its processes are a group of their own, which Ctrl-C goes to."""
    text = textwrap.dedent(HEAD) + textwrap.dedent(text)
    for name, value in words.items():
        text = text.replace(name, str(value))
    (folder / "script.py").write_text(text)
    # A Ctrl-C may come while psutil opens a file, of which Python then says that it was not closed.
    warnings = ["-W", "error", "-W", "ignore::ResourceWarning:psutil._common"]
    return subprocess.Popen(
        [sys.executable, *warnings, "script.py"], env=child_environment(), cwd=folder, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def of_session(session):
    """The living processes of a session, which is the main process's number."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def gone(session):
    deadline = time.monotonic() + LIMIT_S
    while (left := of_session(session)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not left


@pytest.fixture
def ends():
    """Ends the sessions that a test started, also if it fails."""
    sessions = []
    yield sessions.append
    for session in sessions:
        for process in of_session(session):
            process.kill()


KILLED = """
    if __name__ == "__main__":
        multiprocessing.set_start_method("METHOD")
        for _ in FastLoader(PackedDataset("PACKED", transform=HOW), 4, workers=2):
            pass
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not kill a stopped process's child")
@pytest.mark.parametrize(
    ("method", "how"),
    [("fork", "sleeps"), ("forkserver", "sleeps"), ("forkserver", "keeps_the_gil")],  # spawn starts as fork does
)
def test_a_worker_that_cannot_run_does_not_outlive_who_made_it(packed, tmp_path, ends, method, how):
    process = start(tmp_path, KILLED, PACKED=packed, METHOD=method, HOW=how)
    ends(process.pid)
    worker = psutil.Process(int(process.stdout.readline()))
    deadline = time.monotonic() + LIMIT_S
    if how == "sleeps":  # and is stopped
        worker.suspend()
        while worker.status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
            time.sleep(0.02)
        assert worker.status() == psutil.STATUS_STOPPED
    else:
        time.sleep(1.0)  # it is in C by then
    process.kill()
    assert gone(process.pid)
    process.communicate()


INTERRUPTED = """
    if __name__ == "__main__":
        multiprocessing.set_start_method("METHOD")
        loader = FastLoader(PackedDataset("PACKED", transform=same), 4, workers=2)
        print("begins", flush=True)
        while True:
            for _ in loader:
                time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("method", "after_s"),
    [("fork", 0.0), ("spawn", 0.1), ("spawn", 1.0), ("forkserver", 0.02), ("forkserver", 0.5)],
)
def test_ctrl_c_while_workers_start_is_said_once(packed, tmp_path, ends, method, after_s):
    process = start(tmp_path, INTERRUPTED, PACKED=packed, METHOD=method)
    ends(process.pid)
    assert process.stdout.readline() == "begins\n"
    time.sleep(after_s)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=LIMIT_S)
    assert gone(process.pid)
    assert process.returncode in (-signal.SIGINT, 130, 1)
    assert said.count("Traceback") == 1 and said.rstrip().endswith("KeyboardInterrupt"), said
    assert "\nProcess " not in f"\n{said}" and "leaked" not in said, said


OTHERS = """
    def unblocked(_):
        return not signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.getsignal(signal.SIGINT) is HANDLER

    HANDLER = signal.default_int_handler

    if __name__ == "__main__":
        multiprocessing.set_start_method("forkserver")
        signal.signal(signal.SIGUSR1, lambda number, frame: None)
        loader = FastLoader(PackedDataset("PACKED", transform=same), 4, workers=1)
        print(len(list(loader)))
        with multiprocessing.Pool(1) as pool:
            print(*pool.map(unblocked, [0])[0])
        print(signal.getsignal(signal.SIGINT) is HANDLER, signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        os._exit(0)
"""


def test_other_processes_of_the_same_forkserver_and_the_program_get_their_signals(packed, tmp_path):
    process = start(tmp_path, OTHERS, PACKED=packed)
    out, said = process.communicate(timeout=LIMIT_S)
    assert out.split("\n")[:3] == ["15", "True True", "True set()"], out + said


def test_the_start_method_is_left_to_the_user(packed, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing\n"
        "from fastload.prefetch.torch_workers import left_alone_by_signals\n"
        "if __name__ == '__main__':\n"
        "    with left_alone_by_signals() as context:\n"
        "        print(context.get_start_method())\n"
        "    print(multiprocessing.get_start_method(allow_none=True))\n"
    )
    has_server = "forkserver" in multiprocessing.get_all_start_methods()
    assert run_python(script).split() == ["forkserver" if has_server else "spawn", "None"]
