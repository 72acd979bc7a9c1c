"""The symptoms of ranks, and their cures: `python symptoms_of_ranks.py FOLDER` writes FOLDER/found.json."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import torch

import symptoms

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    os.environ.update(TORCH_CPP_LOG_LEVEL="ERROR", TORCH_DISTRIBUTED_DEBUG="INFO")
    torch.distributed.set_debug_level_from_env()  # read when torch was imported
    symptoms.LIMIT_S = 900.0
    path = symptoms.make_file(folder, 41, 8)
    unused = [(symptoms.unused_rank, 300.0, (path, way)) for way in ({}, *symptoms.UNUSED_CURES)]
    uneven = [(symptoms.uneven_rank, 300.0, (path, ends)) for ends in ("drop", "pad", "exact")]
    hang = (symptoms.uneven_rank, 10.0, (path, None))  # no rank is so much later than another, unless it never comes
    found = symptoms.on_ranks(folder, *unused, *uneven, hang)
    (folder / "found.json").write_text(json.dumps(found))
