"""benchmarks/peers/run.py, whose measurements are forks of this process; see forks.py."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from forks import ForkedPopen, in_the_place_of

from peers import run

PRELOADED = torch

run.subprocess = in_the_place_of(ForkedPopen)  # type: ignore[assignment]
sys.exit(run.main())
