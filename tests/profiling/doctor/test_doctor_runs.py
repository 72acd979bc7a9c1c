"""`fastload doctor` around real scripts: what they do is untouched, and what they did is known."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from fastload.profiling.verdict import CAUSES

COMMAND = [sys.executable, "-c", "import sys; sys.argv[0] = 'fastload'; from fastload.cli import main; main()"]
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
"""


def script(folder: Path, text: str, name: str = "train.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(LOADER) + textwrap.dedent(text))
    return path


def doctor(*words: object, cwd: Path, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "doctor", *map(str, words)], cwd=cwd, capture_output=True, text=True, timeout=600, **options
    )  # type: ignore[call-overload,no-any-return]


def verdict_of(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in done.stderr.splitlines() if line.startswith("verdict:")]
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_the_scripts_output_and_exit_code_are_its_own_and_the_verdict_names_one_cause(tmp_path):
    path = script(tmp_path, """
        if __name__ == "__main__":
            print(sys.argv[1:], os.environ["PYTHONPATH"].count("inject"), [p for p in sys.path if "inject" in p])
            for _ in range(2):
                for images, numbers in DataLoader(Numbers(), batch_size=8, num_workers=1):
                    time.sleep(0.001)
            print("done", file=sys.stderr)
            sys.exit(5)
    """)  # fmt: skip
    done = doctor("--json", "out.json", "--", sys.executable, path, "--lr", "0.1", cwd=tmp_path)
    assert done.returncode == 5
    assert done.stdout == "['--lr', '0.1'] 1 []\n"
    assert done.stderr.startswith("done\n")
    assert sum(cause in verdict_of(done) for cause in CAUSES) == 1
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["num_steps"] == 16 and found["verdict"]["cause"] in CAUSES
    # 64 samples of 2 ms each lie behind every epoch, whoever waited for them.
    assert found["stages"]["reading"]["blocked_s"] > 4 * 0.002


@pytest.mark.parametrize(
    "end, code", [("raise ValueError('mine')", 1), ("os._exit(7)", 7), ("os.kill(os.getpid(), 9)", 137)]
)
def test_a_script_that_dies_leaves_its_code_and_a_verdict_on_what_it_did(tmp_path, end, code):
    path = script(tmp_path, f"""
        if __name__ == "__main__":
            for step, batch in enumerate(DataLoader(Numbers(), batch_size=8)):
                if step == 5:
                    {end}
    """)  # fmt: skip
    done = doctor("--", sys.executable, path, cwd=tmp_path)
    assert done.returncode == code
    assert ("ValueError: mine" in done.stderr) == (code == 1)
    assert "none" not in verdict_of(done)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_of_other_start_methods_are_seen_inside(tmp_path, method):
    path = script(tmp_path, f"""
        if __name__ == "__main__":
            loader = DataLoader(Numbers(), batch_size=8, num_workers=1, multiprocessing_context="{method}")
            for batch in loader:
                pass
    """)  # fmt: skip
    done = doctor("--json", "out.json", "--", sys.executable, path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out.json").read_text())["stages"]["reading"]["blocked_s"] > 4 * 0.002


def test_of_several_loaders_the_one_that_takes_the_time_is_judged_and_no_step_holds_another_loaders_epoch(tmp_path):
    path = script(tmp_path, """
        if __name__ == "__main__":
            train, val = DataLoader(Numbers(), batch_size=4), DataLoader(Numbers(), batch_size=32)
            for epoch in range(2):
                for step, batch in enumerate(train):
                    if step == 8:
                        for other in val:
                            time.sleep(0.5)
    """)  # fmt: skip
    doctor("--json", "out.json", "--", sys.executable, path, cwd=tmp_path)
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["verdict"] is not None and any(name == "other loaders" for name, _ in found["facts"])
    longest = max(step["compute_s"] for step in found["steps"])
    assert found["num_steps"] == (30 if longest < 0.4 else 4)


def test_a_script_that_never_ends_is_interrupted_when_the_time_is_over(tmp_path):
    path = script(tmp_path, """
        if __name__ == "__main__":
            try:
                while True:
                    for batch in DataLoader(Numbers(), batch_size=8):
                        pass
                    open("running", "w").close()
            except KeyboardInterrupt:
                print("saved a checkpoint")
                sys.exit(3)
    """)  # fmt: skip
    for seconds in (5, 40, 300):  # torch's import alone may take longer on a busy machine
        done = doctor("--seconds", seconds, "--", sys.executable, path, cwd=tmp_path)
        if (tmp_path / "running").exists():
            break
    assert done.returncode == 3 and done.stdout == "saved a checkpoint\n"
    assert "none" not in verdict_of(done)


@pytest.mark.parametrize("end", ["send_signal", "killpg"])
def test_ctrl_c_reaches_the_script_once_and_gives_the_verdict_so_far(tmp_path, end):
    path = script(tmp_path, """
        if __name__ == "__main__":
            seen = 0
            while True:
                try:
                    for batch in DataLoader(Numbers(), batch_size=8):
                        open("running", "w").close()
                    if seen:
                        break
                except KeyboardInterrupt:
                    seen += 1
            print(seen)
    """)  # fmt: skip
    process = begin(tmp_path, path)
    if end == "killpg":
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0 and out == "1\n"
    assert "verdict: " in err and "fastload doctor: so far " in err


def begin(folder: Path, path: Path) -> subprocess.Popen[str]:
    """The doctor around a script that has its first batch, leading a process group of its own."""
    process = subprocess.Popen(
        [*COMMAND, "doctor", "--", sys.executable, str(path)], cwd=folder, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    while not (folder / "running").exists():
        assert process.poll() is None
        time.sleep(0.05)
    return process


def test_sigterm_and_more_and_more_of_ctrl_c_end_the_script_and_lose_no_verdict(tmp_path):
    path = script(tmp_path, """
        if __name__ == "__main__":
            while True:
                for step, batch in enumerate(DataLoader(Numbers(), batch_size=8)):
                    if step == 4:
                        open("running", "w").close()
    """)  # fmt: skip
    process = begin(tmp_path, path)
    process.send_signal(signal.SIGTERM)
    while process.poll() is None:  # also while it reads what was recorded, and judges
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.02)
    _, err = process.communicate(timeout=600)
    assert "verdict: " in err and "so far" in err


def test_the_exit_code_stays_the_scripts_when_the_report_cannot_be_written_after_it(tmp_path):
    path = script(tmp_path, """
        if __name__ == "__main__":
            for batch in DataLoader(Numbers(), batch_size=8):
                pass
            open("out.json", "w").close()
            sys.exit(6)
    """)  # fmt: skip
    done = doctor("--json", "out.json", "--report", "out.html", "--", sys.executable, path, cwd=tmp_path)
    assert done.returncode == 6 and "out.json: exists" in done.stderr and "none" not in verdict_of(done)
    assert (tmp_path / "out.json").read_text() == "" and (tmp_path / "out.html").exists()


def test_readings_and_steps_share_an_axis(tmp_path):
    path = script(tmp_path, """
        if __name__ == "__main__":
            time.sleep(2)
            for batch in DataLoader(Numbers(), batch_size=1):
                time.sleep(0.01)
    """)  # fmt: skip
    assert doctor("--json", "out.json", "--", sys.executable, path, cwd=tmp_path).returncode == 0
    found = json.loads((tmp_path / "out.json").read_text())
    at_s = [one["at_s"] for one in found["readings"]]
    assert at_s and min(at_s) >= 0 and found["steps"][0]["begin_s"] == 0
    assert found["command"] == found["title"]


def test_what_says_nothing_is_told_why(tmp_path):
    path = script(tmp_path, """
        if __name__ == "__main__":
            for batch in DataLoader(Numbers(), batch_size=8):
                pass
    """)  # fmt: skip
    assert "-I, which ignores PYTHONPATH" in verdict_of(doctor("--", sys.executable, "-I", path, cwd=tmp_path))
    assert "started no Python" in verdict_of(doctor("--", "true", cwd=tmp_path))
    (tmp_path / "plain.py").write_text("print(1)")
    assert "never used torch's DataLoader" in verdict_of(doctor("--", sys.executable, "plain.py", cwd=tmp_path))


def test_a_shell_script_and_a_shadowed_sitecustomize_run_as_without_the_doctor(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("import builtins; builtins.mine = 'from my sitecustomize'\n")
    script(tmp_path, """
        if __name__ == "__main__":
            print(mine, sys.modules["sitecustomize"].__file__)
            for batch in DataLoader(Numbers(), batch_size=8):
                pass
    """)  # fmt: skip
    (tmp_path / "x.sh").write_text(f"set -e\n{sys.executable} train.py\n")
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "own"), os.environ.get("PYTHONPATH", "")])}
    done = doctor("--", "bash", "x.sh", cwd=tmp_path, env=environ)
    assert done.stdout == f"from my sitecustomize {tmp_path / 'own' / 'sitecustomize.py'}\n", done.stderr
    assert "none" not in verdict_of(done)


def test_ranks_of_a_torchrun_job_are_told_from_workers(tmp_path):
    path = script(tmp_path, """
        if __name__ == "__main__":
            slow = os.environ["RANK"] == "1"
            for batch in DataLoader(Numbers(), batch_size=4 if slow else 8, num_workers=1):
                time.sleep(0.001)
    """)  # fmt: skip
    done = doctor(
        "--json", "out.json", "--", sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
        path, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert ("rank", "1, which waits longest of 2") in [tuple(fact) for fact in found["facts"]] or (
        "rank", "0, which waits longest of 2") in [tuple(fact) for fact in found["facts"]]  # fmt: skip
    assert found["num_steps"] in (8, 16)


def test_wrong_use_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "there.json").write_text("mine")
    done = doctor("--json", "there.json", "--", "touch", "ran", cwd=tmp_path)
    assert done.returncode == 1 and "--force" in done.stderr and not (tmp_path / "ran").exists()
    assert (tmp_path / "there.json").read_text() == "mine"
    assert doctor("--json", "no/folder.json", "--", "touch", "ran", cwd=tmp_path).returncode == 1
    done = doctor("--", "no-such-program", cwd=tmp_path)
    assert done.returncode == 1 and "no such program" in done.stderr
    (tmp_path / "train.py").write_text("")
    assert "fastload doctor -- python ./train.py" in doctor("--", "./train.py", cwd=tmp_path).stderr
    assert doctor(cwd=tmp_path).returncode == 2
