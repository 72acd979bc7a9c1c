"""Messages between the packer and its worker processes."""

from __future__ import annotations

import pickle
from multiprocessing.connection import Connection
from typing import Any

from fastload.errors import PackError


def send(worker: Connection, message: bytes) -> None:
    """Send a worker what was pickled.

    Raises:
        PackError: it died.
    """
    try:
        # Not send(): interrupted by Ctrl-C, its exported buffer makes Python print an "Exception ignored" at exit.
        worker.send_bytes(message)
    except OSError as exc:
        raise _worker_died() from exc


def receive(worker: Connection) -> Any:
    """What a worker answered.

    Raises:
        PackError: it died.
    """
    try:
        return pickle.loads(worker.recv_bytes())
    except (EOFError, OSError) as exc:
        raise _worker_died() from exc


def _worker_died() -> PackError:
    return PackError(
        "a worker process died: killed (out of memory?), or crashed while decoding. What was packed is kept: the same "
        "command continues. With `--workers 1` less memory is used."
    )
