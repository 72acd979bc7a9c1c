"""Fuzzes every parser with atheris for some minutes: `python tests/faults/fuzz/run.py --minutes 60`.

The time is shared by all targets, or by those that are named, one after another. A finding is anything but a result or
a FastloadError: an exception, more memory than `--memory-mb`, more than `--seconds` for one input, a crash. Each kind
is printed once, and its first input kept in the folder `--work`, from which `--replay FILE TARGET` shows it again;
`--record FILE` appends a line of JSON for each target.

atheris is not among the packages of the test environment: `pip install atheris` (Linux, macOS), or `--path FOLDER` of
a `pip install --target FOLDER atheris`.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import re
import resource
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
CORPUS = HERE / "corpus"


def signature(error: BaseException) -> str:
    """Returns the kind of an exception and the last line of fastload's that it came through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "fastload" in frame.filename and "faults" not in frame.filename]
    last = ours[-1] if ours else frames[-1]
    return f"{type(error).__name__} {Path(last.filename).name}:{last.lineno} {last.name}"


def fuzz(name: str, target: Any, seconds: int, options: argparse.Namespace, work: Path) -> None:
    """Runs one target in this process until its time is over; findings of exceptions are kept, and it goes on."""
    import atheris

    from fastload.errors import FastloadError

    warnings.simplefilter("ignore")
    with suppress(ValueError, OSError):  # not on macOS
        resource.setrlimit(resource.RLIMIT_AS, (options.memory_mb * 2**20 * 4,) * 2)
    known = set[str]()

    def one(data: bytes) -> None:
        try:
            target.run(data)
        except FastloadError:
            return
        except Exception as error:  # noqa: BLE001  # any other is a finding
            kind = signature(error)
            if kind not in known:
                known.add(kind)
                path = work / f"finding-{hashlib.sha1(kind.encode()).hexdigest()[:10]}"
                path.write_bytes(data)
                path.with_suffix(".txt").write_text("".join(traceback.format_exception(error)), errors="replace")
                print(f"FINDING {path.name} {kind}: {str(error)[:200]!r}", flush=True)

    words = [
        *(f"-max_total_time={seconds}", f"-timeout={options.seconds}", f"-rss_limit_mb={options.memory_mb}"),
        *(f"-artifact_prefix={work}/", f"-max_len={options.longest}", "-print_final_stats=1", "-len_control=20"),
    ]
    atheris.Setup([sys.argv[0], *words, str(work / "corpus")], one)
    atheris.Fuzz()


def forked(run: Callable[[], None]) -> tuple[int, str]:
    """Returns the exit code of a fork of this process that ran a function, below 0 for a signal, and what it wrote."""
    with tempfile.TemporaryFile() as said:
        sys.stdout.flush()
        child = os.fork()
        if not child:
            code = 1
            try:
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
                run()
                code = 0
            except BaseException:  # noqa: BLE001  # shown by the parent
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        return code, said.read().decode(errors="replace")


def long_run(name: str, target: Any, seconds: float, options: argparse.Namespace) -> dict[str, Any]:
    """Runs one target for so many seconds, anew after each crash; returns what came of it."""
    work = options.work / name
    (work / "corpus").mkdir(parents=True, exist_ok=True)
    kept = [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]
    for number, seed in enumerate((*target.seeds, *kept)):
        (work / "corpus" / f"seed-{number}").write_bytes(seed)
    found: dict[str, str] = {}
    executions, first, last, cpu_s = 0, 0, 0, 0.0
    end, left = time.monotonic() + seconds, max(1, int(seconds))
    while left > 0:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
        # The fuzzer ends its process at once, so its files are removed here.
        with tempfile.TemporaryDirectory(prefix="fastload-fuzz-", dir=memory) as scratch:
            os.environ["FASTLOAD_FUZZ_SCRATCH"] = scratch
            code, said = forked(partial(fuzz, name, target, left, options, work))
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s += after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        found |= dict(re.findall(r"FINDING (\S+) (.+)", said))
        executions += max([0, *map(int, re.findall(r"^#(\d+)", said, re.MULTILINE))])
        covered = [int(n) for n in re.findall(r"cov: (\d+)", said)]
        first, last = first or next(iter(covered), 0), max([last, *covered])
        for what, path in re.findall(r"ERROR: libFuzzer: ([^\n(]+).*?Test unit written to (\S+)", said, re.DOTALL):
            found[Path(path).name] = what.strip()
        if code and "libFuzzer" not in said:
            raise SystemExit(f"{name}: the fuzzer cannot run:\n{said[-3000:]}")
        left = int(end - time.monotonic())
    return {"executions": executions, "cpu_s": cpu_s, "branches": [first, last], "findings": sorted(found.values()),
            "inputs": [str(work / name) for name in found]}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", help="names of targets; none: all")
    parser.add_argument("--minutes", type=float, default=10.0, help="of all targets together")
    parser.add_argument("--memory-mb", type=int, default=1024)
    parser.add_argument("--seconds", type=int, default=20, help="that one input may take")
    parser.add_argument("--longest", type=int, default=4096, help="bytes of an input")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "fastload-fuzz")
    parser.add_argument("--path", default="", help="folder that holds atheris")
    parser.add_argument("--record", type=Path, help="file to which figures are appended")
    parser.add_argument("--replay", type=Path, help="runs one input and shows what comes of it")
    options = parser.parse_args()
    folders = [HERE, ROOT, ROOT / "tools", ROOT / "tests", *([options.path] if options.path else [])]
    sys.path[:0] = map(str, folders)
    if options.replay:
        from targets import TARGETS, clean_up

        try:
            print(TARGETS[options.targets[0]].run(options.replay.read_bytes()))
        finally:
            clean_up()
        return
    if importlib.util.find_spec("atheris") is None:
        raise SystemExit("atheris is not installed: `pip install atheris`, or give its folder with `--path`.")
    import atheris

    end = time.monotonic() + 60 * options.minutes
    # Imported once: it takes longer than a target's turn of some seconds. Each turn is a fork.
    with atheris.instrument_imports(include=["fastload", "tarfile", "zipfile"], enable_loader_override=False):
        from targets import TARGETS
    names = options.targets or list(TARGETS)
    journal = None
    if options.record:
        sys.path.append(str(ROOT / "benchmarks"))
        from harness import Journal

        journal = Journal(options.record, minutes=options.minutes, memory_mb=options.memory_mb, seconds=options.seconds)
    total, open_findings = 0, 0
    for turn, name in enumerate(names):
        found = long_run(name, TARGETS[name], (end - time.monotonic()) / (len(names) - turn), options)
        total, open_findings = total + found["executions"], open_findings + len(found["findings"])
        if journal:
            journal.note(f"fuzz-{name}", target="0 findings", **{key: found[key] for key in list(found)[:4]})
        print(f"{name:16} {found['executions']:10,} executions, {found['cpu_s']:6.0f} s of CPU, branches "
              f"{found['branches'][0]} -> {found['branches'][1]}, {len(found['findings'])} findings")  # fmt: skip
        for what, path in zip(found["findings"], found["inputs"], strict=True):
            print(f"    {what}\n        {path}", flush=True)
    print(f"{total:,} executions, {open_findings} findings")
    os._exit(bool(open_findings))


if __name__ == "__main__":
    main()
