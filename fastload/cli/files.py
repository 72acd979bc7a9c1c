"""Files that commands write beside what they print."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from fastload.errors import OutputError


def check_output(path: Path, *, force: bool) -> None:
    """Refuses a path that could not be written at the end, before any work.

    Raises:
        OutputError: it exists and force is not set, it is a folder, or its folder is not there or read-only.
    """
    if path.is_dir():
        raise OutputError(f"{path}: is a folder; name a file in it.")
    if path.exists() and not force:
        raise OutputError(f"{path}: exists already. Give another name, or --force to overwrite it.")
    if not path.parent.is_dir():
        raise OutputError(f"{path}: there is no folder {path.parent}. Make it first.")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise OutputError(f"{path}: the folder {path.parent} cannot be written to. Name one that can.")


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes one JSON object; the file has its name only when it is complete."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps(value, indent=1, default=str) + "\n")
    partial.replace(path)
