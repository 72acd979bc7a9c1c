"""Truncates a packed file while a loader copies from it all the time, and prints how the loader's process ended.

    python tests/faults/truncate_in_use.py FOLDER TRIALS [half|zero|copy]

Each trial is a fork of this process. Expected is "FileChangedError"; a death by SIGBUS is what must not be.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np

from fastload.errors import FileChangedError
from fastload.loader.loader import FastLoader
from sample_files import write_packed

_ROW = (64, 64, 3)


def _load(path: Path, ready: int) -> None:
    loader = FastLoader(path, 64, workers=2)
    for _ in range(1000):
        for _ in loader:
            if ready >= 0:
                os.write(ready, b"x")
                os.close(ready)
                ready = -1


def trial(path: Path, original: Path, how: str, after_s: float) -> str:
    """Returns how the loading process ended: the name of its exception, or of its signal."""
    shutil.copyfile(original, path)
    os.utime(path, ns=(10**18, 10**18))
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            _load(path, writes)
        except FileChangedError:
            code = 3
        finally:
            os._exit(code)
    os.close(writes)
    os.read(reads, 1)
    os.close(reads)
    time.sleep(after_s)
    if how == "half":
        os.truncate(path, path.stat().st_size // 2)
    elif how == "zero":
        path.write_bytes(b"")
    else:  # of another file: an equal one is read on
        shutil.copyfile(original.with_name("other.h5"), path)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return signal.Signals(-code).name if code < 0 else {3: "FileChangedError"}.get(code, f"exit code {code}")


def main() -> None:
    folder, trials, how = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "half"
    rows = np.broadcast_to(np.arange(4096, dtype=np.uint32).astype(np.uint8)[:, None, None, None], (4096, *_ROW))
    original = write_packed(folder / "original.h5", np.ascontiguousarray(rows))
    write_packed(folder / "other.h5", np.ascontiguousarray(255 - rows))
    rng = random.Random(5)
    for _ in range(trials):
        print(trial(folder / "in_use.h5", original, how, rng.random() / 10), flush=True)


if __name__ == "__main__":
    main()
