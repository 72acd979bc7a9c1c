"""Bytes of packed files that must never drift: the same source and options give the same file, release after release.

A test that fails here means that files packed by an earlier release are no longer packed again as they were. That may
happen only on purpose, and never by moving code. `golden_packs` says what is compared and what no release can promise.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from golden_packs import CASES, TABLE, command, described

import fastload

GOLDEN: dict[str, dict[str, str]] = json.loads(TABLE.read_text(encoding="utf-8"))
REFRESH = f"If they are to change, write {TABLE.name} anew with: PYTHONPATH=. python tools/refresh_golden.py bytes"


@pytest.mark.parametrize("name", CASES)
def test_packed_bytes_are_those_they_always_were(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    for module in case.needs:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    found, golden = described(case.make(tmp_path), encodes=case.encodes), GOLDEN.get(name, {})
    lines = []
    for dataset in sorted(found.keys() | golden.keys()):
        before, now = golden.get(dataset, "absent"), found.get(dataset, "absent")
        if before != now:
            lines.append(f"dataset {dataset}\n  in the table: {before}\n  packed now:   {now}")
    if lines:
        pytest.fail("\n".join([f"{name}: packed bytes have changed.", *lines, REFRESH]), pytrace=False)


def test_every_layout_is_in_the_table() -> None:
    assert list(GOLDEN) == list(CASES), REFRESH
    packed = " ".join(datasets["(file)"] for datasets in GOLDEN.values())
    # torchvision is not ours: what it reads may change with its release, and it cannot be imported everywhere.
    layouts = [name for line in command("layouts").splitlines() if (name := line.split()[0]) != "torchvision"]
    assert len(layouts) >= 16
    assert [layout for layout in layouts if f'source_layout ascii[{len(layout)}] "{layout}"' not in packed] == []


def test_the_identity_of_a_file_is_computed_as_it_always_was() -> None:
    """`header_digest` is over the versions of libraries too, so the table leaves it out; of a kept file it is known."""
    assert fastload.verify_file(TABLE.with_name("format_v1.h5"), workers=0).ok
