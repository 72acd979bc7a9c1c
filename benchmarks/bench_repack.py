"""How fast are `fastload repack`, `merge` and `export`, beside `cp` and beside a loop of Pillow?

    python benchmarks/bench_repack.py                   all: about five minutes, 7 GB in .bench, 11 GB of /dev/shm
    python benchmarks/bench_repack.py --only tmpfs      one of: tmpfs, disk, gzip, export, resume
    python benchmarks/bench_repack.py --quick           tiny sizes, to see that it runs; the figures mean nothing

`tmpfs`, `disk`: bytes a second of the whole command over those of `cp`, file in the page cache, in turn. The command
hashes every row and, on a disk, waits until all of it lies there; so does `cp` here, by `sync FILE` behind it.
`-in-library` is the same without the start of Python: the time that the library reports. `cpu` gives seconds of
processor time of both, which neighbours on the machine change less than the clock.
`gzip`: MB/s of pixels compressed by two threads, over `gzip -4` of the file in one process.
`export`: images a second of the command over a loop that saves the same arrays with Pillow.
`resume`: chunks copied again after a kill in the middle.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from PIL import Image

import harness
from fastload.format import CHUNK_BYTES
from fastload.format.digests import row_digests
from fastload.format.ragged import Column
from fastload.format.writer import PixelSpec, chunk_rows_for, create_file

SHAPE = (218, 178, 3)
CHUNKS = "1MiB"


def timed(command: list[str]) -> tuple[float, float]:
    """Wall time and processor time of a whole process."""
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{command} failed:\n{said}")
    return time.perf_counter() - begin, usage.ru_utime + usage.ru_stime


def packed(path: Path, rows: int, seed: int) -> Path:
    """A packed file of so many rows of noise under a picture, written without holding them all."""
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".making")
    row_bytes = int(np.prod(SHAPE))
    block = np.random.default_rng(seed).integers(0, 32, (256, *SHAPE), dtype=np.uint8)
    block += np.linspace(0, 200, SHAPE[0], dtype=np.uint8)[:, None, None]
    block[:, 0, 0, 0] = np.arange(256)
    digests = np.resize(row_digests({"images": block}), rows)
    columns = {
        "labels": Column(np.arange(rows) % 10, {"names": tuple(f"class{i}" for i in range(10))}),
        "split": Column(np.zeros(rows, np.uint8), {"names": ("all",)}),
        "key": Column(np.array([f"{path.stem}/{i:08d}.jpg".encode() for i in range(rows)])),
        "digest": Column(digests),
    }
    attrs = {"decoder": "none", "source_layout": "arrays", "pack_options": "{}", "seed": 0, "shuffled": True}
    spec = PixelSpec(SHAPE, np.dtype(np.uint8), chunk_rows_for(row_bytes, rows, CHUNK_BYTES))
    offsets = create_file(part, num_rows=rows, pixels={"images": spec}, columns=columns, attrs=attrs)
    with open(part, "r+b") as file:
        file.seek(offsets["images"])
        for start in range(0, rows, 256):
            file.write(block[: min(256, rows - start)].data)
    part.rename(path)
    return path


def read_once(path: Path) -> None:
    """Bring a file into the page cache."""
    with open(path, "rb", buffering=0) as file:
        while file.read(1 << 24):
            pass


class Bench:
    """The options and the journal of one run; each public method is one figure."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.journal = harness.begin(options, "pairs", "count", workers=2, page_cache="warm")
        self.about = {"rows": options.count, "row_shape": SHAPE, "chunk_bytes": CHUNKS}

    def tmpfs(self) -> None:
        """Repack and merge over cp, all on tmpfs."""
        with tempfile.TemporaryDirectory(dir=self.options.tmpfs) as scratch:
            self._copies(Path(scratch), "tmpfs", sync=False)

    def disk(self) -> None:
        """Repack and merge over cp and sync, on the disk of `--data`."""
        self.options.data.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.options.data) as scratch:
            self._copies(Path(scratch), "disk", sync=True)

    def _copies(self, scratch: Path, where: str, *, sync: bool) -> None:
        whole = packed(scratch / "a.h5", self.options.count, 0)
        out, copy = scratch / "out.h5", scratch / "copy"
        self._pairs(
            f"repack-{where}",
            harness.cli("repack", whole, out, "--chunk-bytes", CHUNKS),
            [whole],
            out,
            copy,
            sync=sync,
        )
        whole.unlink()
        halves = [packed(scratch / f"{name}.h5", self.options.count // 2, seed) for seed, name in enumerate("bc")]
        self._pairs(f"merge-{where}", harness.cli("merge", *halves, "-o", out), halves, out, copy, sync=sync)

    def _pairs(
        self, figure: str, command: list[str], sources: list[Path], out: Path, copy: Path, *, sync: bool
    ) -> None:
        num_bytes = sum(source.stat().st_size for source in sources)
        cpu: dict[str, list[float]] = {"way": [], "base": []}
        for source in sources:
            read_once(source)

        def ours() -> float:
            seconds, busy = timed(command)
            cpu["way"].append(busy)
            out.unlink()
            return num_bytes / 1e6 / seconds

        def cp() -> float:
            joined = " && ".join(f"cp {source} {copy}{i}" for i, source in enumerate(sources))
            seconds, busy = timed(["sh", "-c", joined + (f" && sync {copy}*" if sync else "")])
            cpu["base"].append(busy)
            for i in range(len(sources)):
                Path(f"{copy}{i}").unlink()
            return num_bytes / 1e6 / seconds

        result = harness.compare(ours, cp, pairs=self.options.pairs)
        cpu_s = {name: float(np.median(values)) for name, values in cpu.items()}
        self.journal.note(
            figure, target=">= 0.5", unit="MB/s", file={**self.about, "bytes": num_bytes}, **result,
            cpu_s=harness.spread(cpu["way"]), cpu_s_cp=harness.spread(cpu["base"]),
            cpu_ratio=cpu_s["base"] / cpu_s["way"],
        )  # fmt: skip
        self.journal.note(
            f"{figure}-in-library", target=">= 0.5", unit="MB/s", file={**self.about, "bytes": num_bytes},
            **harness.compare(self._in_library(command, num_bytes, out), cp, pairs=self.options.pairs),
        )  # fmt: skip

    def _in_library(self, command: list[str], num_bytes: int, out: Path) -> Callable[[], float]:
        from fastload.repack import merge_files, repack_file

        words = command[3:]

        def work() -> float:
            if words[0] == "repack":
                report = repack_file(words[1], out, chunk_bytes=2**20)
            else:
                report = merge_files(words[1:3], out)
            out.unlink()
            return num_bytes / 1e6 / report.seconds

        return work

    def gzip(self) -> None:
        """Compressing by two threads over gzip, and the size that is left."""
        with tempfile.TemporaryDirectory(dir=self.options.tmpfs) as scratch:
            source = packed(Path(scratch) / "a.h5", self.options.count // 20, 0)
            out, num_bytes = Path(scratch) / "out.h5", source.stat().st_size
            sizes: dict[str, Any] = {}

            def ours() -> float:
                seconds, _ = timed(harness.cli("repack", source, out, "--codec", "gzip:4", "--workers", "2"))
                sizes["of_raw"] = out.stat().st_size / num_bytes
                out.unlink()
                return num_bytes / 1e6 / seconds

            def base() -> float:
                seconds, _ = timed(["sh", "-c", f"gzip -4 -c {source} > {out}"])
                sizes["gzip_of_raw"] = out.stat().st_size / num_bytes
                out.unlink()
                return num_bytes / 1e6 / seconds

            result = harness.compare(ours, base, pairs=self.options.pairs)
            self.journal.note("gzip", unit="MB/s", file={**self.about, "bytes": num_bytes}, **result, **sizes)

    def export(self) -> None:
        """The command over a loop of Pillow."""
        count = max(10, self.options.count // 20)
        with tempfile.TemporaryDirectory(dir=self.options.tmpfs) as scratch:
            source, folder = packed(Path(scratch) / "a.h5", count, 0), Path(scratch) / "out"

            def ours() -> float:
                seconds, _ = timed(harness.cli("export", source, folder, "--workers", "2"))
                shutil.rmtree(folder)
                return count / seconds

            def pillow() -> float:
                folder.mkdir()
                begin = time.perf_counter()
                with h5py.File(source) as file:
                    for row in range(count):
                        Image.fromarray(file["images"][row]).save(folder / f"{row}.png")
                seconds = time.perf_counter() - begin
                shutil.rmtree(folder)
                return count / seconds

            result = harness.compare(ours, pillow, pairs=self.options.pairs)
            self.journal.note("export", unit="images/s", file={**self.about, "rows": count}, **result)

    def resume(self) -> None:
        """Chunks copied again after a kill in the middle, of all chunks."""
        with tempfile.TemporaryDirectory(dir=self.options.tmpfs) as scratch:
            source, out = packed(Path(scratch) / "a.h5", self.options.count, 0), Path(scratch) / "out.h5"
            process = subprocess.Popen(harness.cli("repack", source, out), stderr=subprocess.DEVNULL)
            journal, record = out.with_name("out.h5.journal"), 32
            while process.poll() is None:
                done = journal.stat().st_size / record if journal.exists() else 0
                if done > 1.5 * self.options.count:  # its head lists every source, a record each, then come the rows
                    process.send_signal(signal.SIGKILL)
            process.wait()
            from fastload.repack import repack_file

            report = repack_file(source, out)
            self.journal.note(
                "resume",
                file=self.about,
                chunks=report.chunks,
                kept=report.chunks_kept,
                copied_again=report.chunks_decoded,
            )


def main() -> None:
    """Parse, measure, note."""
    parser = harness.command_line(__doc__, "repack", figures=("tmpfs", "disk", "gzip", "export", "resume"), pairs=7)
    parser.add_argument("--count", type=int, default=30_000, help="rows, 116 kB each")
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"))
    options = parser.parse_args()
    if options.quick:
        options.count, options.pairs = 400, 1
    harness.take_figures(Bench(options), options.only)


if __name__ == "__main__":
    main()
