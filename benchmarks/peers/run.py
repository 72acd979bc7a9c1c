"""fastload beside other loaders: the same images, batches and transforms, each in its own environment.

    python benchmarks/peers/environments.py               first: one environment a loader
    python benchmarks/peers/run.py --search               data, packed files, and the search of settings: half an hour
    python benchmarks/peers/run.py                        two passes of everything, about 25 minutes
    python benchmarks/peers/run.py --work rows_32 --only ffcv --passes 3
    python benchmarks/peers/run.py --quick --here --only memmap     tiny sizes, in this Python's own environment
    python benchmarks/peers/page.py                       docs/comparison.md from the records

In each pass the works follow in shuffled order, and for each of them all loaders in shuffled order, one process each;
`measure.py` says what such a process measures. fastload is always among them: a ratio is taken within a pass.
Settings are those of the search, by `benchmarks/results/peers_settings.json`: for each loader and work a first epoch
and then a second of whole ones with each candidate of its adapter, and the fastest is taken. A measurement during which
others used more CPU than DISTURBED is repeated, twice at most, and its record says so.

`pack_faces` packs the JPEG files of the faces into pixels: the whole process by an outer clock, then the time to sync
its files, their bytes on disk, its CPU seconds; and what becomes of it when it is killed on its way and started again.
"""

from __future__ import annotations

import argparse
import ctypes
import filecmp
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import harness
from peers import environments, prepare
from peers.measure import PR_SET_CHILD_SUBREAPER, files_under, machine_cpu_s, read_in
from peers.work import Work, expected_sums, to_json, works_of

PEERS = Path(__file__).resolve().parent
SETTINGS = harness.RESULTS / "peers_settings.json"
PR_SET_PDEATHSIG = 1
DISTURBED = 0.2  # CPUs used by others
REPEATS, LONGEST_S = 2, 240
CONDITIONS = {"rows_218x178": ("step", "train", "python")}  # further parts of these works
COLD = ("rows_218x178", "jpeg_photos")
RESUMED = ("rows_218x178",)


class Run:
    """One run: its options, its environments and the file that it appends to."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.data: Path = options.data
        self.works = works_of(prepare.data_sets(self.data, quick=options.quick, photos=options.photos))
        if options.quick:
            for name, work in self.works.items():
                self.works[name] = Work(**{**vars(work), "batch_size": work.data.num_images // 4})
        self.peers = self.usable()
        self.scratch = self.data / "scratch"
        self.scratch.mkdir(exist_ok=True)
        self.searched: dict[str, Any] = json.loads(SETTINGS.read_text()) if SETTINGS.exists() else {}
        self.expected: dict[str, Any] = {}
        # Without the folders of this machine.
        words = [
            Path(sys.argv[0]).name,
            *re.sub(r" --(data|photos|out)[ =]\S+", "", " " + " ".join(sys.argv[1:])).split(),
        ]
        self.about = {
            "run": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": " ".join(["python benchmarks/peers/" + words[0], *words[1:]]),
            "options": {name: getattr(options, name) for name in ("passes", "seconds", "seed", "quick", "here")},
            "machine": harness.machine(),
            "commit": harness.commit(),
        }
        self.first_pass = 0
        if options.add:
            records = [json.loads(line) for line in options.out.read_text().splitlines()]
            self.about["run"] = max(record["run"] for record in records)
            self.first_pass = 1 + max(record["pass"] for record in records if record["run"] == self.about["run"])

    def usable(self) -> list[str]:
        """The loaders asked for whose environment is there, fastload among them."""
        wanted = [name for name in environments.adapters() if name in (*self.options.only, "fastload")]
        if self.options.here:
            return wanted
        missing = [name for name in wanted if not environments.python_of(self.options.venvs, name).exists()]
        if missing:
            print(f"no environment, left out: {', '.join(missing)}", flush=True)
        return [name for name in wanted if name not in missing]

    def ask(self, peer: str, work: Work, parts: list[str], **more: Any) -> dict[str, Any]:
        """What `measure.py` answers in the loader's environment."""
        request, out = self.scratch / "request.json", self.scratch / "answer.json"
        said = {"peer": peer, "work": to_json(work), "path": str(self.path(peer, work)), "parts": parts}
        said |= {"settings": {}, "seed": self.options.seed, "seconds": self.options.seconds, **more}
        request.write_text(json.dumps(said))
        out.unlink(missing_ok=True)
        process = self.start(peer, request, out)
        try:
            code = process.wait(LONGEST_S)
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {LONGEST_S} s"}
        finally:
            end(process)
        if out.exists():
            return json.loads(out.read_text())  # type: ignore[no-any-return]
        return {"failed": f"its process ended with {code}: " + environments.reason(self.log.read_text())}

    def start(self, peer: str, request: Path, out: Path) -> subprocess.Popen[bytes]:
        """Starts `measure.py` in a session of its own."""
        python = sys.executable if self.options.here else str(environments.python_of(self.options.venvs, peer))
        variables = environments.environment_of({"TMPDIR": str(self.scratch)})
        command = [python, str(PEERS / "measure.py"), str(request), str(out)]
        with open(self.log, "wb") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=log, env=variables, start_new_session=True, preexec_fn=end_with_parent
            )

    @property
    def log(self) -> Path:
        """What the last process printed."""
        return self.scratch / "said.log"

    def path(self, peer: str, work: Work) -> Path:
        """What a loader reads for a work: its own packed file or folder, or what was prepared."""
        if environments.literal(peer, "PACKS"):
            return self.data / "packed" / peer / f"{work.data.name}-{work.encoding}"
        return work.data.folder if work.data.rows is None or work.encoding == "jpeg" else work.data.rows

    def packed(self, peer: str, work: Work) -> str:
        """Packs for a loader what is not packed yet; returns why that failed, if it did."""
        path = self.path(peer, work)
        done = path.with_name(f"{path.name}.done")
        if not environments.literal(peer, "PACKS") or done.exists():
            return ""
        remove(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        answer = self.ask(peer, work, ["pack"], workers=os.cpu_count() or 1)
        if why := answer.get("failed") or answer.get("unsupported"):
            return str(why)
        done.touch()
        return ""

    def search(self, peer: str, work: Work) -> dict[str, Any]:
        """The settings that were fastest for a loader and a work, searched for where that is not recorded."""
        name = f"{peer}/{work.name}"
        if self.options.quick:
            return self.ask(peer, work, ["search"], seconds=0.0)
        if name not in self.searched or self.options.again:
            answer = self.ask(peer, work, ["search"], seconds=min(0.7, self.options.seconds))
            record = {key: answer[key] for key in ("candidates", "unsupported", "failed", "versions") if key in answer}
            record |= {"machine": self.about["machine"], "time": datetime.now(UTC).isoformat(timespec="seconds")}
            if best(record) is None and "unsupported" not in record:
                return record  # asked again the next time
            self.searched = json.loads(SETTINGS.read_text()) if SETTINGS.exists() else {}
            self.searched[name] = record
            SETTINGS.write_text(json.dumps(dict(sorted(self.searched.items())), indent=1) + "\n")
            print(f"search {name}: {told(best(record)) or record.get('unsupported')}", flush=True)
        return dict(self.searched[name])

    def measure(self, peer: str, work: Work, number: int) -> dict[str, Any]:
        """One record: that loader's figures of that work in that pass."""
        if why := self.packed(peer, work):
            return {"failed": f"packing: {why}"}
        searched = self.search(peer, work)
        if "unsupported" in searched:
            return {"unsupported": searched["unsupported"]}
        chosen = best(searched)
        if chosen is None:
            failures = [one["failed"] for one in searched.get("candidates", ()) if "failed" in one]
            return {"failed": searched.get("failed") or " / ".join(failures)[:600] or "no candidate"}
        parts = self.parts(work, number)
        disturbed: list[float] = []
        while True:
            found = self.ask(peer, work, parts, settings=chosen)
            timed = [found[part] for part in parts if part != "cold" and "other_cpus" in found.get(part, {})]
            others = max((part["other_cpus"] for part in timed if part.get("seconds", 1) > 0.3), default=0.0)
            if others <= DISTURBED or len(disturbed) == REPEATS or self.options.quick:
                break
            disturbed.append(round(others, 2))
        if "verify" in found and "failed" not in found["verify"]:
            found["verify"] = {**found["verify"], "expected": self.expectation(work)}
        return {**found, "settings": chosen, "repeated": disturbed, "other_cpus": round(others, 2)}

    def parts(self, work: Work, number: int) -> list[str]:
        """The parts of a work's measurement; what needs no repetition is taken in the first pass of a call."""
        conditions = CONDITIONS.get(work.name, ())
        if self.options.conditions and work.encoding == "raw" and work.transform is None:
            conditions = CONDITIONS["rows_218x178"]
        parts = ["cold"] if work.name in COLD else []
        parts += ["first", "alone", *conditions]
        if number == self.first_pass:
            parts.insert(parts.index("alone") + 1, "memory")
            parts += ["verify"] + (["resume"] if work.name in RESUMED else [])
        return [part for part in parts if part in self.options.parts]

    def expectation(self, work: Work) -> dict[str, Any]:
        """The sums of an epoch by the prepared arrays; of works with a transform only how many images and labels."""
        if work.transform is not None:
            return {"images": work.batches * work.batch_size}
        if work.name not in self.expected:
            self.expected[work.name] = expected_sums(work)
        return dict(self.expected[work.name])

    def pack(self, peer: str, work: Work, number: int) -> dict[str, Any]:
        """The whole command of packing, in the first pass also killed on its way and started again."""
        if not environments.literal(peer, "PACKS"):
            return {"unsupported": "reads what is there: it has no packing step"}
        out = self.scratch / "packing"
        disturbed: list[float] = []
        while True:
            remove(out)
            found = self.pack_once(peer, work, out)
            if "failed" in found or "unsupported" in found:
                return found
            if found["other_cpus"] <= DISTURBED or len(disturbed) == REPEATS or self.options.quick:
                break
            disturbed.append(round(found["other_cpus"], 2))
        if number == self.first_pass and "resume" in self.options.parts:
            found["killed"] = self.killed(peer, work, out, found["seconds"], found["cpu_s"])
        remove(out)
        return {**found, "settings": {"workers": os.cpu_count()}, "repeated": disturbed}

    def pack_once(self, peer: str, work: Work, out: Path, kill_after_s: float | None = None) -> dict[str, Any]:
        """Packs into `out`; with `kill_after_s` all its processes are killed then, unless it is done."""
        request, told_at = self.scratch / "request.json", self.scratch / "answer.json"
        said = {"peer": peer, "work": to_json(work), "path": str(out), "parts": ["pack"], "settings": {}, "seed": 0}
        request.write_text(json.dumps({**said, "seconds": 0, "workers": os.cpu_count() or 1}))
        told_at.unlink(missing_ok=True)
        read_in([work.data.folder])
        os.sync()
        used, machine_s, begin = children_cpu_s(), machine_cpu_s(), time.perf_counter()
        process = self.start(peer, request, told_at)
        try:
            process.wait(kill_after_s or LONGEST_S)
        except subprocess.TimeoutExpired:
            end(process)
            return {"failed": f"killed after {kill_after_s or LONGEST_S:.1f} s"}
        seconds = time.perf_counter() - begin
        end(process)
        cpu_s = children_cpu_s() - used
        others = max(0.0, machine_cpu_s() - machine_s - cpu_s) / seconds
        answer = (
            json.loads(told_at.read_text())
            if told_at.exists()
            else {"failed": environments.reason(self.log.read_text())}
        )
        if answer:
            return dict(answer)
        files = list(files_under(out))
        begin = time.perf_counter()
        for file in files:
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
        synced_s = time.perf_counter() - begin
        count = work.data.num_images
        return {
            "images": count,
            "seconds": seconds,
            "images_per_s": count / seconds,
            "synced_s": synced_s,
            "synced_images_per_s": count / (seconds + synced_s),
            "cpu_s": cpu_s,
            "bytes": sum(file.stat().st_blocks * 512 for file in files),
            "other_cpus": others,
        }

    def killed(self, peer: str, work: Work, whole: Path, seconds: float, cpu_s: float) -> dict[str, Any]:
        """What a packer makes of what was left when it was killed on its way."""
        out = self.scratch / "packing-killed"
        remove(out)
        kill_after_s = 0.75 * seconds  # by then all of them are at their images
        first = self.pack_once(peer, work, out, kill_after_s)
        if "failed" not in first or same_tree(whole, out):
            return {"how": "was done before it could be killed"}
        left = sum(file.stat().st_blocks * 512 for file in files_under(out)) if out.exists() else 0
        again = self.pack_once(peer, work, out)
        equal = "failed" not in again and same_tree(whole, out)
        remove(out)
        found = {"left_bytes": left, "kill_after_s": kill_after_s, "same_bytes": equal}
        if "failed" in again:
            return {**found, "how": "refused", "said": again["failed"].replace(f"{self.scratch}/", "")}
        over = {"over_whole": again["seconds"] / seconds, "cpu_over_whole": again["cpu_s"] / cpu_s}
        return {**found, "how": "packed", "seconds": again["seconds"], **over}

    def note(self, record: dict[str, Any]) -> None:
        """Appends a record, and says it."""
        with open(self.options.out, "a") as out:
            out.write(json.dumps({**record, **self.about}) + "\n")
        rates = {
            part: record[part]["images_per_s"] for part in ("cold", "alone") if "images_per_s" in record.get(part, {})
        }
        shares = {
            part: record[part]["share"] for part in ("step", "train", "python") if "share" in record.get(part, {})
        }
        parts = [f"{part} {rate:,.0f}/s" for part, rate in rates.items()]
        parts += [f"{part} {share:.2f}" for part, share in shares.items()]
        if "synced_s" in record:
            parts.append(f"{record['images_per_s']:,.0f}/s, synced {record['synced_images_per_s']:,.0f}/s")
        parts += [f"{key}: {record[key]}" for key in ("failed", "unsupported") if key in record]
        parts += [f"{part} failed: {found['failed']}" for part, found in record.items()
                  if isinstance(found, dict) and "failed" in found]  # fmt: skip
        if record.get("repeated"):
            parts.append(f"repeated: others used {record['repeated']} CPUs")
        where = f"{record['pass']} {record['work']} {record['peer']}"
        print(f"{where} {told(record.get('settings'))}: {'; '.join(parts)}", flush=True)

    def passes(self) -> None:
        """Everything, in shuffled order."""
        chance = random.Random(f"{self.about['run']} {self.first_pass}")
        for number in range(self.first_pass, self.first_pass + self.options.passes):
            for name in chance.sample(self.options.work, len(self.options.work)):
                work = self.works[name]
                for peer in chance.sample(self.peers, len(self.peers)):
                    take = self.pack if name.startswith("pack") else self.measure
                    self.note({"pass": number, "work": name, "peer": peer, **take(peer, work, number)})

    def searches(self) -> None:
        """Packs and searches alone."""
        for peer in [name for name in self.peers if name in self.options.only]:
            for name in self.options.work:
                if name.startswith("pack"):
                    continue
                if why := self.packed(peer, self.works[name]):
                    print(f"packing {peer}/{name}: {why}", flush=True)
                else:
                    self.search(peer, self.works[name])


def best(searched: dict[str, Any]) -> dict[str, Any] | None:
    """The settings of the fastest candidate."""
    rates = [one for one in searched.get("candidates", ()) if "images_per_s" in one]
    return dict(max(rates, key=lambda one: one["images_per_s"])["settings"]) if rates else None


def told(settings: dict[str, Any] | None) -> str:
    """Settings in a line."""
    return "" if settings is None else ", ".join(f"{name}={value}" for name, value in settings.items()) or "defaults"


def end(process: subprocess.Popen[bytes]) -> None:
    """Kills what is left of a process and its session, and waits for all of it, so that its CPU seconds are counted."""
    left = psutil.Process().children(recursive=True)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for one in left:
        with suppress(psutil.Error):
            one.kill()
    process.wait()
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def end_with_parent() -> None:
    """Lets this process be killed when its parent ends, so that nothing is left running."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def children_cpu_s() -> float:
    """CPU seconds of the children that ended, with theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def remove(path: Path) -> None:
    """Removes what packing left, and what it put beside."""
    for one in path.parent.glob(f"{path.name}*"):
        if one.is_dir() and not one.is_symlink():
            shutil.rmtree(one, ignore_errors=True)
        else:
            one.unlink(missing_ok=True)


def same_tree(left: Path, right: Path) -> bool:
    """Whether two files or folders hold the same bytes under the same names."""
    if not (left.is_dir() and right.is_dir()):
        return left.is_file() and right.is_file() and filecmp.cmp(left, right, shallow=False)
    names = [{file.relative_to(folder) for file in files_under(folder)} for folder in (left, right)]
    return names[0] == names[1] and all(filecmp.cmp(left / name, right / name, shallow=False) for name in names[0])


PARTS = ("cold", "first", "alone", "memory", "step", "train", "python", "verify", "resume")
WORKS = ("rows_218x178", "rows_32", "rows_256", "raw_augment", "jpeg_photos", "jpeg_faces", "pack_faces")


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = environments.adapters()
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PEER", help=", ".join(names))
    parser.add_argument("--work", nargs="+", choices=WORKS, default=list(WORKS), metavar="WORK", help=", ".join(WORKS))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--add", action="store_true", help="more passes of the newest run in --out")
    parser.add_argument("--seconds", type=float, default=1.0, help="of whole epochs in each part (default: 1)")
    parser.add_argument("--conditions", action="store_true", help="step, train and python also for the other rows")
    parser.add_argument("--search", action="store_true", help="pack and search settings, and nothing else")
    parser.add_argument("--again", action="store_true", help="search settings also where they are recorded")
    parser.add_argument("--here", action="store_true", help="all loaders in this Python's environment")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, default=harness.ROOT / ".bench" / "peers", help="folder (.bench/peers)")
    parser.add_argument("--photos", type=Path, default=prepare.PHOTOS, help="clothing photos, a folder or their tar")
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "peers.jsonl", help="JSON lines to append to")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    options = parser.parse_args()
    if options.quick:
        options.passes, options.seconds = 1, 0.05
    options.venvs = options.data.resolve()
    options.data = options.venvs / ("quick" if options.quick else "")
    options.data.mkdir(parents=True, exist_ok=True)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of packers come here, where they are counted
    run = Run(options)
    if options.search:
        run.searches()
    else:
        run.passes()


if __name__ == "__main__":
    main()
