"""The injected module inside a script: what the script sees of it, and on which Pythons it runs."""

from __future__ import annotations

import ast
import glob
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from fastload.profiling.doctor import injected
from fastload.profiling.doctor.command import INJECT, environment_for
from fastload.profiling.doctor.loader_records import RecordedEvents
from fastload.profiling.doctor.loop_demands import demands_of

SCRIPT = """
    import os, pickle, sys, warnings
    import torch
    from multiprocessing.reduction import ForkingPickler
    from torch.utils.data import DataLoader, Dataset

    class Numbers(Dataset):
        def __len__(self):
            return 64
        def __getitem__(self, index):
            return torch.full((4,), float(index))

    class Odd(DataLoader):            # compares by value, has no hash
        def __eq__(self, other):
            return isinstance(other, Odd)

    class Shaped:
        def __init__(self, data):
            self.data = data
        def shape(self):
            return self.data.shape

    class Mine(torch.Tensor):         # looks its functions up, as torchvision's tv_tensors do
        known, seen = {torch.Tensor.to}, []
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            cls.seen.append(func in cls.known)
            return super().__torch_function__(func, types, args, kwargs or {})

    class Loud(ForkingPickler):
        def dump(self, value):
            super().dump(("loud", value))

    if __name__ == "__main__":
        names = [batch[0, 0].item() for batch in Odd(Numbers(), batch_size=8)]
        assert names == [float(n) for n in range(0, 64, 8)], names
        for batch in DataLoader(Numbers(), batch_size=8, collate_fn=lambda rows: Shaped(torch.stack(rows))):
            assert batch.shape()[0] == 8
        torch.zeros(3).as_subclass(Mine).to(torch.float64)
        assert Mine.seen == [True], Mine.seen
        assert pickle.loads(Loud.dumps(1)) == ("loud", 1)
        compiled = torch.compile(lambda x: x.to(torch.float64).to("cpu").sum(), backend="eager", fullgraph=True)
        assert compiled(torch.ones(3)).item() == 3
        # A daemon closes what it inherited, and gets the same numbers for its own files.
        os.closerange(3, 64)
        mine = [os.open(sys.argv[1] + str(n), os.O_RDWR | os.O_CREAT) for n in range(40)]
        for batch in DataLoader(Numbers(), batch_size=8):
            pass
        assert all(os.fstat(number).st_size == 0 for number in mine)
        print("fine")
"""


def run(folder: Path, script: str, python: list[str], *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """A script under the injected package, which writes into `folder / "records"`."""
    (folder / "train.py").write_text(textwrap.dedent(script))
    (folder / "records").mkdir()
    environ = environment_for(folder / "records", os.environ | more)
    command = [*python, "train.py", *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600, cwd=folder)


def test_a_script_sees_nothing_of_it(tmp_path):
    done = run(tmp_path, SCRIPT, [sys.executable, "-W", "error"], str(tmp_path / "own"), LOCAL_WORLD_SIZE="auto")
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr
    records = RecordedEvents(tmp_path / "records").read()
    assert [fault for fault in records.faults if "LOCAL_WORLD_SIZE" not in fault] == []
    assert sum(loader.steps.count for loader in records.loaders) == 24


TRIAL = """
    import time
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Crowded(Dataset):
        def __len__(self):
            return 4 * 4000
        def __getitem__(self, index):
            time.sleep(0.01)
            return index

    if __name__ == "__main__":
        begin, seen = time.monotonic(), []
        for batch in DataLoader(Crowded(), batch_size=4, num_workers=WORKERS, multiprocessing_context="fork"):
            seen += batch.tolist()
            if time.monotonic() - begin > 9:
                break
        assert seen == list(range(len(seen))), seen
"""


@pytest.mark.slow
def test_a_trial_of_fewer_workers_keeps_the_order_and_holds_the_others_back(tmp_path):
    workers = 3 * len(os.sched_getaffinity(0))
    done = run(tmp_path, TRIAL.replace("WORKERS", str(workers)), [sys.executable, "-W", "ignore"])
    assert done.returncode == 0, done.stderr
    [loader] = RecordedEvents(tmp_path / "records").read().loaders
    assert {trial["limit"] for trial in loader.trials} == {0, workers // 3}
    # Where samples only wait, a third of the workers makes a third of the batches; on a busy machine some more.
    _, few_s, all_s = demands_of(loader, cpus=2).fewer_workers
    assert few_s > all_s


OTHERS = glob.glob(os.path.expanduser("~/.pyenv/versions/3.*/bin/python"))
PYTHONS = [name for name in OTHERS if any(f"/3.{minor}." in name for minor in (9, 10, 12, 13))]


@pytest.mark.parametrize("python", [*PYTHONS, sys.executable], ids=lambda path: Path(path).parts[-3])
def test_it_runs_in_the_users_python_and_warns_of_nothing(tmp_path, python):
    text = """
        import bz2, lzma, zlib
        from multiprocessing import Lock, Pool

        def twice(n):
            return 2 * n

        if __name__ == "__main__":
            with Lock(), Pool(2) as pool:
                assert pool.map(twice, range(100)) == [2 * n for n in range(100)]
            assert zlib.decompress(zlib.compress(b"x")) == lzma.decompress(lzma.compress(b"x")) == b"x"
            print("fine")
    """
    done = run(tmp_path, text, [python, "-W", "error"])
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")
    lines = [json.loads(line) for path in (tmp_path / "records").iterdir() for line in path.read_text().splitlines()]
    assert {line["e"] for line in lines} == {"process", "begin"}


def test_what_is_injected_is_a_stub_and_a_package_that_needs_the_standard_library_only():
    stub = INJECT / "sitecustomize.py"
    assert [*INJECT.glob("*.py")] == [stub] and len(stub.read_text().splitlines()) <= 30
    for path in (stub, *Path(injected.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names, path.name


def test_a_script_runs_when_the_package_cannot_be_imported(tmp_path):
    shutil.copy(INJECT / "sitecustomize.py", tmp_path)
    environ = environment_for(tmp_path, os.environ) | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", "print('fine')"], env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")
