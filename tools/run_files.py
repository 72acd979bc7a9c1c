"""What a run of `train.py` keeps on disk: its checkpoint, and the log of its losses."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

PARTS = ("model", "optimizer", "scaler", "loader", "random", "step", "epoch")
"""What a checkpoint holds."""


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """The state of a run under its name, whole or not at all, also when the machine dies; ends the script if it cannot.

    Two runs that are given one name do not mix: the later checkpoint counts.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as out:
            torch.save(state, out)
            out.flush()
            os.fsync(out.fileno())
        part.replace(path)
    except (OSError, RuntimeError) as error:  # torch's writer has errors of its own
        part.unlink(missing_ok=True)
        reason = error.__context__ if isinstance(error.__context__, OSError) else error
        kept = "; the one before it is kept" if path.exists() else ""
        raise SystemExit(f"error: {path}: the checkpoint could not be written{kept}: {reason}") from None


def load_checkpoint(path: Path) -> dict[str, Any]:
    """What `save_checkpoint` wrote, on the CPU; ends the script where it is something else."""
    try:
        # On the CPU: AdamW's counters stay where they are loaded, and a step would wait for the GPU to say them.
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, UnpicklingError):
        # What torch says advises to load it without care.
        raise SystemExit(f"error: {path}: damaged, or no checkpoint of this script. Give another file.") from None
    absent = [name for name in PARTS if not isinstance(state, dict) or name not in state]
    if absent:
        raise SystemExit(
            f"error: {path}: no checkpoint of this script, or of an older one (it lacks {', '.join(absent)}). Leave "
            f"out --resume, or give another file."
        )
    return state  # type: ignore[no-any-return]


def begin_log(path: Path, step: int) -> None:
    """Leave what a log says up to a step: what was logged after the checkpoint comes again."""
    if not path.exists():
        return
    try:
        # The last line may lack its end.
        lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        kept = [line for line in lines if json.loads(line)["step"] <= step]
    except (ValueError, KeyError, TypeError):
        raise SystemExit(f"error: {path}: is no loss log of this script. Give another --loss-log.") from None
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text("".join(kept))
    part.replace(path)


def append_log(path: Path, lines: list[dict[str, float]]) -> None:
    """One JSON line each."""
    with open(path, "a") as out:
        out.writelines(json.dumps(line) + "\n" for line in lines)


def free_name(path: Path) -> Path:
    """That name if no file has it, else the first of `name-2`, `name-3` and so on."""
    others = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2))
    return next(name for name in itertools.chain([path], others) if not name.exists())
