"""Scripts in forks of one process that has imported torch already: each fresh process takes 2 s of a CPU for that.

And as long again for torch._dynamo, which the first optimizer imports. Or of one that has imported something else.

A script finds what it finds when it is started by itself: its words, its folder on sys.path, its exit code and what is
done at exit. Only environment variables that torch reads when it is imported have to be there from the beginning.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

_SERVER = """
import gc, json, os, runpy, signal, sys
gc.disable()  # to look for garbage takes a fifth of the time of the imports
exec(sys.argv[1])
gc.collect()
gc.enable()
gc.freeze()  # without it each fork looks through, and so copies, all that was imported, at the latest when it ends: 1 s

for line in sys.stdin:
    if not line.strip():
        sys.exit()
    words, cwd, log, limit_s, frozen = json.loads(line)
    if not (child := os.fork()):
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
if not frozen:
    gc.unfreeze()
signal.alarm(limit_s)
os.chdir(cwd)
for number, name in enumerate((os.devnull, log + ".out", log + ".err")):
    os.dup2(opened := os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), number)
    os.close(opened)
if words[0] == "-m":
    sys.path[0], sys.argv = cwd, words[1:]
    runpy.run_module(words[1], run_name="__main__", alter_sys=True)
else:
    sys.path[0], sys.argv = os.path.dirname(words[0]), words
    runpy.run_path(words[0], run_name="__main__")
"""


class WarmPython:
    """A process that forks for each script; they run one after the other. `environment` is that of all of them.

    `first` is what the process does before the first of them.
    """

    def __init__(
        self, environment: Mapping[str, str], folder: Path, first: str = "import numpy, torch._dynamo"
    ) -> None:
        self._log = folder / "warm"
        self._server = subprocess.Popen(
            [sys.executable, "-c", _SERVER, first],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip

    def run(
        self, *words: object, cwd: Path, limit_s: int = 600, frozen: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """As `subprocess.run([sys.executable, *words], ...)` with its output captured; killed after limit_s.

        `frozen`: what was imported before is not looked through for garbage, which takes a second; Triton, where it was
        imported, complains of that on stderr at the end.
        """
        assert self._server.stdin is not None and self._server.stdout is not None
        given = [str(word) for word in words]
        print(json.dumps([given, str(cwd), str(self._log), limit_s, frozen]), file=self._server.stdin, flush=True)
        code = int(self._server.stdout.readline())
        out, err = (Path(f"{self._log}.{name}").read_text() for name in ("out", "err"))
        return subprocess.CompletedProcess(given, code, out, err)

    def finish(self, *words: object, cwd: Path) -> None:
        """Runs a script that has to end with 0."""
        done = self.run(*words, cwd=cwd)
        assert done.returncode == 0, done.stdout + done.stderr

    def __enter__(self) -> WarmPython:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The end of its input would not come while worker processes live that were forked off this one.
        self._server.communicate("\n")
