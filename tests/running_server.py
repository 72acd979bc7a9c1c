"""`serving`: a running `range_server.py`, in its own process, and what it was asked for."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class RangeServer:
    """A running `range_server.py`: `folder` is served at `url`; what it does wrong is set by `set`."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url

    def set(self, **faults: Any) -> None:
        """Sets faults, keywords of `range_server.Faults`, and turns off all others."""
        self._ask("control", json.dumps(faults).encode())

    def log(self) -> list[dict[str, Any]]:
        """The requests so far: method, path, query, range, status, port of the connection, secrets."""
        return self._ask("log")["requests"]

    def most_at_once(self) -> int:
        return self._ask("log")["most"]

    def _ask(self, path: str, body: bytes | None = None) -> Any:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(urllib.request.Request(f"{self.url}/{path}", data=body)) as answer:
            return json.load(answer)


@contextmanager
def serving(folder: Path, host: str = "127.0.0.1") -> Iterator[RangeServer]:
    """A server of the files in a folder, in its own process."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, str(Path(__file__).parent / "remote" / "range_server.py"), str(folder), "--host", host]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        yield RangeServer(folder, f"http://{host}:{int(process.stdout.readline())}")
        process.stdin.close()  # ends it
