"""`fastload doctor` around real scripts: what they do is untouched, and what they did is known."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent, indent

import pytest
import torch
from warm_python import WarmPython

from fastload.profiling.verdict import CAUSES
from fastload.timing.results import WAITING

COMMAND = [sys.executable, "-m", "fastload", "doctor"]
PYTHON = ("--", sys.executable, "train.py")
LOADER = """
import os, sys, time
import torch
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.full((3, 8, 8), float(index)), index

if __name__ == "__main__":
"""
ONE_EPOCH = """
    for batch in DataLoader(Numbers(), batch_size=8):
        pass
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes the training script that does this; the tests' processes run beside it."""
    monkeypatch.chdir(tmp_path)
    return lambda text: Path("train.py").write_text(LOADER + indent(dedent(text), "    "))


def in_a_new_process(*words: object, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *map(str, words)], capture_output=True, text=True, timeout=600, **options)  # type: ignore[call-overload,no-any-return]


@pytest.fixture
def doctor(warm_python: WarmPython) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs it in the current folder; in a fork, as it imports torch for the trials of its verdict."""
    return lambda *words: warm_python.run("-m", "fastload", "doctor", *words, cwd=Path.cwd())


def found(done: subprocess.CompletedProcess[str], code: int = 0) -> dict:
    assert done.returncode == code, done.stderr
    return json.loads(Path("out.json").read_text())


def verdict_of(done: subprocess.CompletedProcess[str]) -> str:
    [line] = [line for line in done.stderr.splitlines() if line.startswith("verdict:")]
    return line


def test_the_scripts_output_and_exit_code_are_its_own_and_the_verdict_names_one_cause(write):
    write("""
        print(sys.argv[1:], os.environ["PYTHONPATH"].count("inject"), [p for p in sys.path if "inject" in p])
        for _ in range(2):
            for images, numbers in DataLoader(Numbers(), batch_size=8, num_workers=1):
                time.sleep(0.001)
        print("done", file=sys.stderr)
        sys.exit(5)
    """)
    done = in_a_new_process("--json", "out.json", *PYTHON, "--lr", "0.1")
    measured = found(done, code=5)
    assert done.stdout == "['--lr', '0.1'] 1 []\n" and done.stderr.startswith("done\n")
    assert sum(cause in verdict_of(done) for cause in CAUSES) == 1
    assert measured["num_steps"] == 16 and measured["verdict"]["cause"] in CAUSES
    # 64 samples of 2 ms each lie behind every epoch, whoever waited for them.
    assert measured["stages"][WAITING]["blocked_s"] > 4 * 0.002


@pytest.mark.parametrize(
    "end, code", [("raise ValueError('mine')", 1), ("os._exit(7)", 7), ("os.kill(os.getpid(), 9)", 137)]
)
def test_a_script_that_dies_leaves_its_code_and_a_verdict_on_what_it_did(write, doctor, end, code):
    write(f"""
        for step, batch in enumerate(DataLoader(Numbers(), batch_size=8)):
            if step == 5:
                {end}
    """)
    done = doctor(*PYTHON)
    assert done.returncode == code and ("ValueError: mine" in done.stderr) == (code == 1)
    assert "none" not in verdict_of(done)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_workers_that_are_forked_after_steps_on_a_gpu_live(write):
    write("""
        for _ in range(3):
            for images, numbers in DataLoader(Numbers(), batch_size=8, num_workers=2):
                images.cuda().sum()
    """)
    assert found(in_a_new_process("--json", "out.json", *PYTHON))["num_steps"] == 24


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_of_other_start_methods_are_seen_inside(write, doctor, method):
    write(f"""
        for batch in DataLoader(Numbers(), batch_size=8, num_workers=1, multiprocessing_context="{method}"):
            pass
    """)
    assert found(doctor("--json", "out.json", *PYTHON))["stages"][WAITING]["blocked_s"] > 4 * 0.002


REMOTE = """
    import socket, socketserver, threading

    class Answer(socketserver.BaseRequestHandler):
        def handle(self):
            while self.request.recv(1):
                time.sleep(0.005)
                self.request.sendall(b"x")

    class Remote(Numbers):
        line = None
        def __len__(self):
            return 600
        def __getitem__(self, index):
            if self.line is None:
                self.line = socket.create_connection(server.server_address)
            self.line.sendall(b"?")
            self.line.recv(1)  # the answer
            return index

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for batch in DataLoader(Remote(), batch_size=4, num_workers=2, multiprocessing_context="fork"):
        pass
    server.shutdown()
"""


def test_a_dataset_that_waits_for_the_network_is_told_its_line_and_a_number_of_workers(write, doctor):
    write(REMOTE)
    done = doctor("--json", "out.json", *PYTHON)
    verdict = found(done)["verdict"]
    number = Path("train.py").read_text().splitlines().index("            self.line.recv(1)  # the answer") + 1
    assert verdict["cause"] == WAITING and f"at __getitem__ (train.py:{number})" in verdict_of(done)
    assert "num_workers=" in verdict["cures"][0]["change"]
    assert f"  to do it: {verdict['cures'][0]['how']}\n" in done.stderr


def test_of_several_loaders_the_one_that_takes_the_time_is_judged_and_no_step_holds_another_loaders_epoch(
    write, doctor
):
    write("""
        time.sleep(2)
        train, val = DataLoader(Numbers(), batch_size=4), DataLoader(Numbers(), batch_size=32)
        for epoch in range(2):
            for step, batch in enumerate(train):
                if step == 8:
                    for other in val:
                        time.sleep(0.5)
    """)
    measured = found(doctor("--json", "out.json", *PYTHON))
    assert measured["verdict"] is not None and any(name == "other loaders" for name, _ in measured["facts"])
    longest = max(step["compute_s"] for step in measured["steps"])
    assert measured["num_steps"] == (30 if longest < 0.4 else 4)
    # Readings and steps share an axis: neither has the seconds before the loop.
    at_s = [one["at_s"] for one in measured["readings"]]
    assert at_s and min(at_s) >= 0 and measured["steps"][0]["begin_s"] == 0
    assert measured["command"] == measured["title"]


def test_a_script_that_never_ends_is_interrupted_when_the_time_is_over_also_under_a_shell(write, doctor):
    write("""
        try:
            while True:
                for batch in DataLoader(Numbers(), batch_size=8):
                    pass
                open("running", "w").close()
        except KeyboardInterrupt:
            print("saved a checkpoint")
            sys.exit(3)
    """)
    for seconds in (12, 60, 300):  # torch's import alone may take longer on a busy machine
        done = doctor("--seconds", seconds, "--", "bash", "-c", f"{sys.executable} train.py; exit $?")
        if Path("running").exists():
            break
    assert done.returncode == 3 and done.stdout == "saved a checkpoint\n"
    assert "none" not in verdict_of(done) and "so far" in done.stderr


def test_the_loop_that_trains_is_judged_and_where_the_rest_of_the_run_went_is_said(write, doctor):
    write("""
        weight = torch.ones(3, 8, 8, requires_grad=True)
        train, val = DataLoader(Numbers(), batch_size=8), DataLoader(Numbers(), batch_size=16, num_workers=1)
        for epoch in range(2):
            for images, numbers in train:
                (images * weight).sum().backward()
            for batch in val:
                time.sleep(0.2)
            torch.save(weight, "weight.pt")
            time.sleep(0.3)
    """)
    measured = found(doctor("--json", "out.json", *PYTHON))
    assert measured["num_steps"] == 16
    course = [line for line in measured["verdict"]["evidence"] if "of the run" in line]
    assert any("before its first loop" in line for line in course)
    assert sum("the loop over Numbers" in line and "with 16 steps, judged here" in line for line in course) == 1
    assert any("with 8 steps: " in line for line in course)


def test_no_line_of_the_parent_is_said_to_be_a_workers(write, doctor):
    write("""
        import statistics
        numbers = DataLoader(range(400_000), 20_000, num_workers=1, collate_fn=statistics.pvariance,
                             multiprocessing_context="fork")
        for epoch in range(3):
            for variance in numbers:
                pass
    """)
    notes = found(doctor("--json", "out.json", *PYTHON))["verdict"]["evidence"]
    assert not any("workers were at" in line for line in notes), notes


def test_sigterm_and_more_and_more_of_ctrl_c_end_the_script_and_lose_no_verdict(write):
    write("""
        while True:
            for step, batch in enumerate(DataLoader(Numbers(), batch_size=8)):
                if step == 4:
                    open("running", "w").close()
    """)
    command = [*COMMAND, *PYTHON]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not Path("running").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    while process.poll() is None:  # also while it reads what was recorded, and judges
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.02)
    _, err = process.communicate(timeout=600)
    assert "verdict: " in err and "fastload doctor: so far " in err


def test_the_exit_code_stays_the_scripts_when_the_report_cannot_be_written_after_it(write, doctor):
    write(ONE_EPOCH + "    open('out.json', 'w').close()\n    sys.exit(6)\n")
    done = doctor("--json", "out.json", "--report", "out.html", *PYTHON)
    assert done.returncode == 6 and "out.json: exists" in done.stderr and "none" not in verdict_of(done)
    assert Path("out.json").read_text() == "" and Path("out.html").exists()


def test_what_says_nothing_is_told_why(write):
    write(ONE_EPOCH)
    Path("plain.py").write_text("print(1)")
    for words, why in {
        (sys.executable, "-I", "train.py"): "-I, which ignores PYTHONPATH",
        ("true",): "started no Python",
        (sys.executable, "plain.py"): "never used torch's DataLoader",
    }.items():
        assert why in verdict_of(in_a_new_process("--", *words))
    Path("fails.py").write_text("import torch.utils.data\nraise SystemExit('no such folder')\n")
    done = in_a_new_process("--", sys.executable, "fails.py")
    assert "the command failed, with exit code 1" in verdict_of(done) and done.returncode == 1


def test_a_script_whose_time_is_over_too_soon_shows_no_traceback_and_is_told_to_take_more(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("waits.py").write_text("import time\nopen('running', 'w').close()\ntime.sleep(600)\n")
    for seconds in (3, 30, 300):  # a Python that is interrupted before its own start shows its own traceback
        done = in_a_new_process("--seconds", seconds, "--", sys.executable, "waits.py")
        if Path("running").exists():
            break
    assert "give more --seconds" in verdict_of(done) and "Traceback" not in done.stderr and done.returncode == 0
    Path("waits.py").write_text("import time\ntry: time.sleep(600)\nexcept KeyboardInterrupt: raise SystemExit(3)\n")
    assert in_a_new_process("--seconds", seconds, "--", sys.executable, "waits.py").returncode == 3


def test_a_shell_script_and_a_shadowed_sitecustomize_run_as_without_the_doctor(write, tmp_path):
    mine = tmp_path / "own" / "sitecustomize.py"
    mine.parent.mkdir()
    mine.write_text("import builtins; builtins.mine = 'from my sitecustomize'\n")
    write('    print(mine, sys.modules["sitecustomize"].__file__)' + ONE_EPOCH)
    Path("x.sh").write_text(f"set -e\n{sys.executable} train.py\n")
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(mine.parent), os.environ.get("PYTHONPATH", "")])}
    done = in_a_new_process("--", "bash", "x.sh", env=environ)
    assert done.stdout == f"from my sitecustomize {mine}\n", done.stderr
    assert "none" not in verdict_of(done)


def test_ranks_of_a_torchrun_job_are_told_from_workers(write, doctor):
    write("""
        slow = os.environ["RANK"] == "1"
        for batch in DataLoader(Numbers(), batch_size=4 if slow else 8, num_workers=1):
            time.sleep(0.001)
    """)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    measured = found(doctor("--json", "out.json", "--", *torchrun, "train.py"))
    assert dict(measured["facts"])["rank"] in ("1, which waits longest of 2", "0, which waits longest of 2")
    assert measured["num_steps"] in (8, 16)


def test_wrong_use_is_refused_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    there = Path("there.json")
    there.write_text("mine")
    done = in_a_new_process("--json", there, "--", "touch", "ran")
    assert done.returncode == 1 and "--overwrite" in done.stderr and there.read_text() == "mine"
    assert in_a_new_process("--json", "no/folder.json", "--", "touch", "ran").returncode == 1
    both = in_a_new_process("--json", "one.html", "--report", "./one.html", "--", "touch", "ran")
    assert both.returncode == 1 and "give each its own" in both.stderr
    assert not Path("ran").exists()
    done = in_a_new_process("--", "no-such-program")
    assert done.returncode == 1 and "no such program" in done.stderr
    Path("train.py").write_text("")
    assert "fastload doctor -- python ./train.py" in in_a_new_process("--", "./train.py").stderr
    assert in_a_new_process().returncode == 2
