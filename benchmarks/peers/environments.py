"""Makes one virtual environment a loader, one after another, and records what each holds or why there is none.

    python benchmarks/peers/environments.py                   all of them: about ten minutes, 1 GB of disk each
    python benchmarks/peers/environments.py --only ffcv dali   some
    python benchmarks/peers/environments.py --again            also those that are there already

An environment has NumPy, psutil, torch for the CPU at the version of tools/constraints.txt, for the main thread that
trains, and the REQUIREMENTS of adapters/NAME.py; that of fastload has the requirements of pyproject.toml instead, and
the checkout on its path. The record is `benchmarks/results/peers_installed.json`. One that fails is recorded with the
last lines that pip or the import said, and the next one is made.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import build_native

PEERS = Path(__file__).resolve().parent
ROOT = PEERS.parents[1]
INSTALLED = PEERS.parent / "results" / "peers_installed.json"
COMMON = ("numpy", "psutil", "torch")
PLACEHOLDER = (2020, 2, 2)  # of files in archives of builders that write no times
LONGEST_S = 900


def adapters() -> list[str]:
    """The names of all adapters, fastload first."""
    names = sorted(path.stem for path in (PEERS / "adapters").glob("[a-z]*.py"))
    return sorted(names, key=lambda name: name != "fastload")


def literal(name: str, variable: str, default: Any = None) -> Any:
    """The value of a literal at the top of an adapter, which is not imported: its loader may be absent here."""
    for node in ast.parse((PEERS / "adapters" / f"{name}.py").read_text()).body:
        if isinstance(node, ast.Assign) and any(isinstance(at, ast.Name) and at.id == variable for at in node.targets):
            return ast.literal_eval(node.value)
    return default


def requirements(name: str) -> list[str]:
    """What pip is to install for an adapter, apart from what all have."""
    if name == "fastload":
        return list(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    return list(literal(name, "REQUIREMENTS", ()))


def python_of(folder: Path, name: str) -> Path:
    """The interpreter of an adapter's environment."""
    return folder / "venvs" / name / "bin" / "python"


def environment_of(extra: dict[str, str] | None = None) -> dict[str, str]:
    """The variables for a process in such an environment: only the checkout is on its path beside it."""
    # As a user has it: with OMP_WAIT_POLICY=PASSIVE torch gathers in two threads at a fifth of its rate, and without
    # bytecode fastload's modules, which are no package installed here, would be compiled at each start.
    without = ("PYTHONSAFEPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")
    kept = {name: value for name, value in os.environ.items() if name not in without}
    return {**kept, "PYTHONPATH": os.pathsep.join((str(ROOT), str(PEERS.parent))), **(extra or {})}


def unpacked(folder: Path, name: str) -> dict[str, str]:
    """Variables for pip to compile an adapter with the DEBIAN_PACKAGES it names, unpacked here; none if installed.

    Needs `apt-get download` and `dpkg`, but not root.
    """
    packages, links = literal(name, "DEBIAN_PACKAGES", ()), literal(name, "PKG_CONFIG", {})
    if not packages or subprocess.run(["pkg-config", "--exists", *links], check=False).returncode == 0:
        return {}
    prefix = folder / "debian" / name
    lib, include, at = prefix / "lib", prefix / "include", prefix / "root" / "usr"
    shutil.rmtree(prefix, ignore_errors=True)
    for made in (lib / "pkgconfig", include, prefix / "root"):
        made.mkdir(parents=True)
    subprocess.run(["apt-get", "download", "-q", *packages], cwd=prefix, capture_output=True, text=True, check=True)
    for package in prefix.glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(package), str(prefix / "root")], check=True)
    # All in one folder: blas and lapack lie in folders of their own, libz beside libc.
    for library in (one for one in (prefix / "root").rglob("*.so*") if not one.is_dir()):
        shutil.copy2(library, lib / library.name, follow_symlinks=False)
    shutil.copytree(at / "include", include, dirs_exist_ok=True)
    for architecture in at.glob("include/*-linux-*"):
        shutil.copytree(architecture, include, dirs_exist_ok=True)
    shutil.copytree(include / "opencv4", include, dirs_exist_ok=True)
    # Names the modules whose headers opencv.hpp includes: those that are here, and not what other packages bring.
    (include / "opencv2" / "opencv_modules.hpp").write_text("#define HAVE_OPENCV_CORE\n#define HAVE_OPENCV_IMGPROC\n")
    for library_name, linked in links.items():
        (lib / "pkgconfig" / f"{library_name}.pc").write_text(
            f"Name: {library_name}\nDescription: {library_name}\nVersion: 4.6.0\n"
            f"Libs: -L{lib} {linked}\nCflags: -I{include}\n"
        )
    flags = f"-Wl,--disable-new-dtags -Wl,-rpath,{lib} -Wl,-rpath-link,{lib}"
    return {"PKG_CONFIG_PATH": str(lib / "pkgconfig"), "LDFLAGS": flags}


def make(folder: Path, name: str, *, again: bool = True) -> dict[str, Any]:
    """Makes an environment, unless it is there and not to be made again; returns its record."""
    venv = python_of(folder, name).parents[1]
    there = python_of(folder, name).exists() and not again
    if not there:
        shutil.rmtree(venv, ignore_errors=True)
    begin = time.perf_counter()
    wanted = requirements(name)
    record: dict[str, Any] = {"requirements": wanted, "python": platform.python_version()}
    python, pip = str(python_of(folder, name)), [str(python_of(folder, name)), "-m", "pip", "install", "--no-compile"]
    constraints = ["-q", "-c", str(ROOT / "tools" / "constraints.txt")]
    try:
        extra = {} if there else unpacked(folder, name)
    except (OSError, subprocess.CalledProcessError) as error:
        return {**record, "failed": reason(f"unpacking Debian packages: {error} {getattr(error, 'stderr', '')}")}
    uncached = ["--no-cache-dir"] if extra else []  # a wheel of before may name libraries that are gone
    steps = (
        [sys.executable, "-m", "venv", str(venv)],
        [*pip, *constraints, *uncached, *COMMON, *wanted],
        [python, "-c", f"import json; from peers.adapters import {name} as m; print(json.dumps(m.versions()))"],
    )
    said = ""
    for step in steps[2:] if there else steps:
        try:
            done = subprocess.run(
                step, capture_output=True, text=True, env=environment_of(extra), timeout=LONGEST_S, check=False
            )
        except subprocess.TimeoutExpired:
            return {**record, "failed": f"not done after {LONGEST_S} s"}
        if done.returncode:
            return {**record, "failed": reason(done.stdout + done.stderr)}
        said = done.stdout
    record["versions"] = json.loads(said.splitlines()[-1])
    if not there:
        record["seconds"] = round(time.perf_counter() - begin)
    if name == "fastload":
        record["compiled loops"] = build_native.build(build_native.LIBRARY) or "built"
    record["mib"] = sum(path.lstat().st_size for path in venv.rglob("*") if not path.is_dir()) >> 20
    if wanted and name != "fastload":
        record["built"] = built(python, wanted[0])
    return record


def reason(text: str) -> str:
    """The last lines of an error, without what differs from machine to machine."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(("[notice]", "note:"))]
    errors = [line for line in lines if "error" in line.lower()] or lines
    return " / ".join(errors[-3:]).replace(str(ROOT), "").replace(str(Path.home()), "~")[:600]


def built(python: str, requirement: str) -> str | None:
    """The day of the newest file in the archive of a requirement, about its release; None where that is hidden."""
    with tempfile.TemporaryDirectory() as folder:
        command = [python, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, requirement]
        if subprocess.run(
            command, capture_output=True, env=environment_of(), timeout=LONGEST_S, check=False
        ).returncode:
            return None
        (path,) = Path(folder).iterdir()
        if zipfile.is_zipfile(path):
            days = [entry.date_time[:3] for entry in zipfile.ZipFile(path).infolist()]
        else:
            with tarfile.open(path) as tar:
                days = [datetime.fromtimestamp(entry.mtime, UTC).timetuple()[:3] for entry in tar]
    days = [day for day in days if day[0] > 2000 and day != PLACEHOLDER]
    return "{:04}-{:02}-{:02}".format(*max(days)) if days else None


def main() -> None:
    """Make what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=adapters(), default=adapters(), metavar="NAME")
    parser.add_argument("--data", type=Path, default=ROOT / ".bench" / "peers", help="folder for them (.bench/peers)")
    parser.add_argument("--again", action="store_true", help="make anew what is there")
    options = parser.parse_args()
    records = json.loads(INSTALLED.read_text()) if INSTALLED.exists() else {}
    for name in options.only:
        if not options.again and python_of(options.data, name).exists() and "versions" in records.get(name, {}):
            continue
        records[name] = make(options.data, name, again=options.again or "failed" in records.get(name, {}))
        records[name]["made"] = datetime.now(UTC).date().isoformat()
        INSTALLED.write_text(json.dumps(dict(sorted(records.items())), indent=1) + "\n")
        print(f"{name}: {records[name].get('versions') or records[name].get('failed')}", flush=True)


if __name__ == "__main__":
    main()
