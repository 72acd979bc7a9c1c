"""Builds what reads JPEGs with AddressSanitizer, for `jpeg_ways.py --under FOLDER`: `python build_asan.py FOLDER`.

libjpeg-turbo is built twice, of the release in simplejpeg's wheel and of the one in Pillow's, from a clone of its
repository; simplejpeg against the first; a copy of the installed Pillow gets the second; and fastload's native code is
compiled in a copy of the package. Needs git, cmake and a C compiler, and pip to build simplejpeg.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FLAGS = "-fsanitize=address -fno-omit-frame-pointer -fPIC -g"


def libjpeg(clone: str, release: str, folder: Path) -> Path:
    """Returns where a release of libjpeg-turbo is installed that was built with AddressSanitizer."""
    source, installed = folder / f"libjpeg-{release}", folder / f"libjpeg-{release}-installed"
    if not installed.exists():
        subprocess.run(["git", "clone", "-q", "--branch", release, "--depth", "1", clone, source], check=True)
        options = ["-DWITH_SIMD=0", "-DENABLE_STATIC=0", f"-DCMAKE_C_FLAGS=-O1 {FLAGS}"]
        where = [f"-DCMAKE_INSTALL_PREFIX={installed}", "-DCMAKE_INSTALL_LIBDIR=lib"]
        subprocess.run(["cmake", "-S", source, "-B", source / "build", *options, *where], check=True)
        subprocess.run(["cmake", "--build", source / "build", "-j", str(os.cpu_count()), "-t", "install"], check=True)
    return installed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--libjpeg", default="https://github.com/libjpeg-turbo/libjpeg-turbo", help="or a local clone")
    parser.add_argument("--simplejpeg", default="simplejpeg", help="what pip builds: a requirement, or its sources")
    parser.add_argument("--in-simplejpeg", default="3.1.2", help="release of libjpeg-turbo in its wheel")
    options = parser.parse_args()
    folder = options.folder.resolve()
    packages = folder / "packages"
    shutil.rmtree(packages, ignore_errors=True)
    packages.mkdir(parents=True)
    from PIL import features

    of_pillow = libjpeg(options.libjpeg, str(features.version("libjpeg_turbo")), folder)
    of_simplejpeg = libjpeg(options.libjpeg, options.in_simplejpeg, folder)
    around = {
        **os.environ, "SIMPLEJPEG_DYNAMIC_LINKING": "1", "CFLAGS": f"-I{of_simplejpeg}/include {FLAGS}",
        "LDFLAGS": f"-fsanitize=address -L{of_simplejpeg}/lib -Wl,-rpath,{of_simplejpeg}/lib",
    }  # fmt: skip
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-binary",
        "simplejpeg",
        "--target",
        str(packages),
    ]
    subprocess.run([*pip, options.simplejpeg], env=around, check=True)
    pillow = importlib.metadata.distribution("pillow")
    tops = {file.parts[0] for file in pillow.files or [] if ".." not in file.parts}
    for top in sorted(tops):
        shutil.copytree(Path(str(pillow.locate_file(top))), packages / top)
    (own,) = (packages / "pillow.libs").glob("libjpeg-*")
    shutil.copy(of_pillow / "lib" / "libjpeg.so", own)
    shutil.copytree(ROOT / "fastload", packages / "fastload", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copytree(ROOT / "tools", packages / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    compiler = f"cc {FLAGS}"
    subprocess.run([sys.executable, packages / "tools/build_native.py"], env={**os.environ, "CC": compiler}, check=True)
    sanitizer = subprocess.run(["cc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    how = "detect_leaks=0:abort_on_error=1:allocator_may_return_null=1:detect_odr_violation=0"
    around = {"LD_PRELOAD": sanitizer.stdout.strip(), "ASAN_OPTIONS": how}
    (folder / "environment.json").write_text(json.dumps(around))


if __name__ == "__main__":
    main()
