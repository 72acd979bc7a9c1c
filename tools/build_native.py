"""Compiles fastload/system/native.c: into the wheel, or beside it in a checkout (`python tools/build_native.py`).

The build of the wheel calls it. Where there is no C compiler, or FASTLOAD_NATIVE=0 is set, the wheel is pure Python and
does everything all the same, with slower loops. No header but libc's is needed, and nothing is linked: to decode JPEGs
it calls the libjpeg-turbo that Pillow brings (CONTRIBUTING.md says why). tools/wheels.sh builds a release's wheels.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[1] / "fastload" / "system" / "native.c"
LIBRARY = SOURCE.with_name("libfastload.so")  # not native.so, which Python would take for a module
# No contraction: a fused product and sum would round otherwise on some CPUs. No errno: a square root is an instruction.
FLAGS = "-O3 -std=gnu11 -fPIC -shared -ffp-contract=off -fno-math-errno -fvisibility=hidden".split()


def build(output: Path) -> str:
    """Compiles the loops into a library; returns "" or why that was not possible, and then removes an older one."""
    output.unlink(missing_ok=True)
    if os.environ.get("FASTLOAD_NATIVE") == "0":
        return "FASTLOAD_NATIVE=0 is set"
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    part = output.with_suffix(".part")
    try:
        command = [*compiler, *FLAGS, "-o", str(part), str(SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as exc:
        return f"there is no C compiler: {compiler[0]} ({exc.strerror})"
    if done.returncode:
        part.unlink(missing_ok=True)
        return f"{shlex.join(command)} failed:\n{done.stderr}"
    part.replace(output)
    return ""


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a script in an environment that builds no wheels
    pass
else:

    class NativeBuildHook(BuildHookInterface):  # type: ignore[misc,type-arg]  # hatchling has no types here
        """Adds the library to the wheel, which is then of one platform, and of any Python 3."""

        PLUGIN_NAME = "custom"

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            """Called by hatchling before it collects the files of a wheel."""
            if reason := build(LIBRARY):
                self.app.display_warning(f"fastload is built without its compiled loops: {reason}")
                return
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{platform}"
            build_data["pure_python"] = False
            build_data["artifacts"].append("/fastload/system/libfastload.so")


if __name__ == "__main__":
    if failed := build(LIBRARY):
        sys.exit(failed)
