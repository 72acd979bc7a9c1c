"""Tasks that tests run on the nodes of a Ray cluster, which import this module and no other of the tests."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from fastload.errors import OutputError, SourceError


def begin(folder: str) -> None:
    """Notes in a folder that an attempt has begun."""
    with open(f"{folder}/began", "a", encoding="utf-8") as file:
        file.write(f"{os.getpid()}\n")


def wait_for_leave(task: tuple[str, float], report: Callable[[int], None]) -> str:
    """Ends after so many seconds, or once there is leave to."""
    folder, seconds = task
    begin(folder)
    report(1)
    end = time.monotonic() + seconds
    while time.monotonic() < end and not os.path.exists(f"{folder}/leave"):
        time.sleep(0.02)
    return folder


def fail(task: tuple[str, str], report: Callable[[int], None]) -> None:
    """Fails by its source, its storage or its process."""
    folder, kind = task
    begin(folder)
    if kind == "source":
        raise SourceError("its images are no images")
    if kind == "storage":
        raise OutputError(28, "No space left on device")
    os.kill(os.getpid(), 9)
