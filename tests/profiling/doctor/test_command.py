"""Signals around a command: each process of it gets each of them once, and the doctor lives to tell."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from fastload.profiling.doctor.command import Signals, run_command

# Counts what it gets, and writes it down; ends on SIGUSR2, a little later, so that what comes twice is counted.
COUNTS = """
    import os, signal, sys, time
    seen = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: seen.append(signal.Signals(number).name))
    def write():
        with open(sys.argv[1] + ".new", "w") as file:
            file.write(" ".join(seen))
        os.rename(sys.argv[1] + ".new", sys.argv[1])
    until = time.monotonic() + 600
    while "SIGUSR2" not in seen and time.monotonic() < until:
        write()
        time.sleep(0.02)
    time.sleep(0.3)
    write()
    sys.exit(9)
"""
# Threads that take signals too, and a look that is slow most of the time. On a busy machine the witness takes longer to
# answer than a user is kept waiting.
DOCTOR = """
    import sys, threading, time
    from pathlib import Path
    from fastload.profiling.doctor import command
    command._ANSWER_S = 60
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    with command.Signals() as signals:
        ended = command.run_command(sys.argv[1:], Path("."), signals, look=lambda _pid: time.sleep(0.4))
        print(ended.code, ended.interrupted)
"""


def start(folder: Path, *command: object) -> subprocess.Popen[str]:
    """The doctor around a command, leading a process group of its own, when the command counts already."""
    for name, text in (("doctor.py", DOCTOR), ("counts.py", COUNTS)):
        (folder / name).write_text(textwrap.dedent(text))
    process = subprocess.Popen(
        [sys.executable, "doctor.py", *map(str, command)], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    wait_for(folder / "seen", process)
    return process


def wait_for(path: Path, process: subprocess.Popen[str] | None = None, count: int = 0) -> None:
    """Until the command counts, and has counted so many signals."""
    until = time.monotonic() + 600
    while not path.exists() or len(path.read_text().split()) < count:
        assert (process is None or process.poll() is None) and time.monotonic() < until
        time.sleep(0.02)


LEAVES = "import os, sys; os.setpgid(0, 0); os.execv(sys.executable, [sys.executable, 'counts.py', 'seen'])"
COMMANDS = {
    "Python": [sys.executable, "counts.py", "seen"],
    "a shell": ["bash", "-c", f"trap : INT TERM USR1 USR2\n{sys.executable} counts.py seen\nexit 9\n"],
    "Python that left the group": [sys.executable, "-c", LEAVES],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("send", [os.killpg, os.kill], ids=["to all", "to the doctor"])
def test_a_signal_to_the_group_and_one_to_the_doctor_reach_the_python_once(tmp_path, send, command):
    process = start(tmp_path, *COMMANDS[command])
    for count, number in enumerate((signal.SIGINT, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1), 1):
        send(process.pid, number)
        wait_for(tmp_path / "seen", process, count)  # else two may be one: a signal that waits is not counted
        time.sleep(0.6)  # nor would one that comes twice be
    send(process.pid, signal.SIGUSR2)
    out, err = process.communicate(timeout=600)
    assert (tmp_path / "seen").read_text() == "SIGINT SIGTERM SIGINT SIGUSR1 SIGUSR2"
    assert (out, err) == ("9 True\n", "")


def test_a_shell_that_dies_of_a_signal_leaves_no_python_behind(tmp_path):
    process = start(tmp_path, "bash", "-c", f"{sys.executable} counts.py seen\ntrue\n")
    process.send_signal(signal.SIGUSR2)
    out, _ = process.communicate(timeout=600)
    assert out == f"{128 + signal.SIGUSR2} False\n"
    wait_for(tmp_path / "seen", count=1)
    assert (tmp_path / "seen").read_text() == "SIGUSR2"


def test_workers_of_a_script_are_its_own_to_terminate(tmp_path):
    parent = """if True:
        import signal, subprocess, sys, time
        told = []
        signal.signal(signal.SIGTERM, lambda *_: told.append(1))
        child = subprocess.Popen([sys.executable, "counts.py", "seen"])
        until = time.monotonic() + 600
        while not told and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(0.3)
        child.send_signal(signal.SIGUSR2)
        sys.exit(child.wait())
    """
    process = start(tmp_path, sys.executable, "-c", parent)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=600)
    assert out == "9 True\n" and (tmp_path / "seen").read_text() == "SIGUSR2"


def test_what_a_look_raises_waits_until_the_command_has_ended(tmp_path):
    def look(_pid: int) -> None:
        raise RuntimeError("ours")

    late = "import sys, time; time.sleep(1); open(sys.argv[1], 'w').close()"
    with Signals() as signals, pytest.raises(RuntimeError, match="ours"):
        run_command([sys.executable, "-c", late, str(tmp_path / "late")], tmp_path, signals, look=look)
    assert (tmp_path / "late").exists()


def test_a_signal_from_before_the_command_keeps_it_from_starting_and_handlers_are_as_before(tmp_path):
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
    before = [*map(signal.getsignal, numbers)]
    with pytest.raises(KeyboardInterrupt), Signals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        run_command(["touch", str(tmp_path / "ran")], tmp_path, signals)
    assert not (tmp_path / "ran").exists()
    assert [*map(signal.getsignal, numbers)] == before


def test_without_a_witness_a_signal_is_the_doctors_alone_and_one_that_is_ignored_stays_so(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.wait(0.1) == (set(), set())
            assert run_command(["bash", "-c", "kill -HUP $$; exit 3"], tmp_path, signals).code == 3
            signals._witness.kill()
            signals._witness.wait()
            os.kill(os.getpid(), signal.SIGUSR1)
            assert signals.wait(600) == ({signal.SIGUSR1}, {signal.SIGUSR1})
    finally:
        signal.signal(signal.SIGHUP, before)
