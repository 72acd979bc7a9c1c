"""SIGKILL of a packer: its workers end with it, at once and whatever they are at; here they are even stopped."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from child_processes import child_environment
from PIL import Image
from warm_python import WarmPython

from fastload.pack import pack_images

_SCRIPT = """
import contextlib, os, signal, sys, time
from pathlib import Path
import psutil
from fastload.inspection.verify import verify_file
from fastload.pack import pack_images, survey_source
from fastload.repack import append_images, merge_files, repack_file
from fastload.system.threads import forked_workers

stage, how, call = sys.argv[1:]
os.chdir("data")

def has_started(worker):  # and asked for its end: a signal is sent when something happens to a descriptor
    for file in Path(f"/proc/{worker.pid}/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            if int(file.read_text().split()[3], 8) & os.O_ASYNC:
                return True
    return False

def progress(*words):
    now = words[0] if len(words) == 3 else ""
    workers = psutil.Process().children()
    if str(now).startswith(stage) and workers:
        if sys.platform == "linux":
            while not all(map(has_started, workers)):
                time.sleep(0.01)
            for worker in workers:
                worker.suspend()
        print(*(worker.pid for worker in workers), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

with forked_workers() if how == "forked" else contextlib.nullcontext():
    eval(call)
"""
_FIRST = "import fastload.cli, fastload.inspection.verify, fastload.pack, fastload.repack, simplejpeg"

CALLS = {
    "pack": ("packing", "pack_images('photos', 'OUT', workers=2, size=16, chunk_bytes=3000, progress=progress)"),
    "pack shards": ("packing", "pack_images('photos', 'OUT', workers=2, shards=2, progress=progress)"),
    "survey": ("reading", "survey_source('photos', workers=2, progress=progress)"),
    "repack": ("packing", "repack_file('ragged.h5', 'OUT', codec='zstd', workers=2, progress=progress)"),
    "append": ("packing", "append_images('a.h5', 'more', workers=2, progress=progress)"),
    "verify": ("", "verify_file('a.h5', source='photos', workers=2, progress=progress)"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    (folder / "killed.py").write_text(_SCRIPT)
    rng = np.random.default_rng(3)
    for number, source in itertools.product(range(80), ("photos", "more")):
        path = folder / "data" / source / f"class{number % 2}" / f"{source}{number:02d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (24, 24, 3), np.uint8)).save(path)
    for seed, name in enumerate("ab"):
        packed = folder / f"data/{name}.h5"
        pack_images(folder / "data/photos", packed, size=16, seed=seed, workers=0, chunk_bytes=3000)
    pack_images(folder / "data/photos", folder / "data/ragged.h5", store="jpeg", workers=0)
    return folder


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmPython]:
    with WarmPython(child_environment(), tmp_path_factory.mktemp("warm"), _FIRST) as python:
        yield python


@pytest.mark.parametrize(("call", "how"), [("pack", "started"), *((call, "forked") for call in CALLS)])
def test_no_worker_outlives_a_killed_packer(folder: Path, python: WarmPython, call: str, how: str) -> None:
    stage, words = CALLS[call]
    words = words.replace("OUT", f"{call} {how}.h5")
    done = python.run("killed.py", stage, how, words, cwd=folder, limit_s=60)
    workers = [psutil.Process(int(number)) for number in done.stdout.split() if psutil.pid_exists(int(number))]
    deadline = time.monotonic() + 60
    while (left := [worker for worker in workers if _lives(worker)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    for worker in left:
        worker.kill()
    assert done.returncode == -signal.SIGKILL and done.stdout, done.stderr
    assert not left, f"{len(left)} of {len(done.stdout.split())} workers are left"


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
