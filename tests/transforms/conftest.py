"""Puts this folder and `engine` on sys.path: their tests share `batches.py` and `colour_reference.py`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).with_name("engine")))
