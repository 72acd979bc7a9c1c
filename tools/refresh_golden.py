"""Write golden files of the tests anew, on purpose.

    python tools/refresh_golden.py format    tests/data/format_v1.h5: one tiny packed file of each format version, kept
                                             for ever; only a new format version needs a new one
    python tools/refresh_golden.py stores    tests/data/v1_*.h5 and golden_rows.json: one tiny packed file of version 1
                                             for each way to store images, kept for ever; it never replaces one
    python tools/refresh_golden.py bytes     tests/data/golden_bytes.json: what is packed of a small source of each
                                             layout; it says which datasets have changed
    python tools/refresh_golden.py help      tests/data/help-*.txt: the help of every command at three widths
    python tools/refresh_golden.py pages     docs/commands.md, docs/json.md and fastload/options/keywords.py, made from
                                             options, commands and their results

The package that is imported makes them: run it in the checkout's root, with `PYTHONPATH=.` unless it is installed with
`pip install -e`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastload.format.ragged import Column
from sample_files import write_packed

TESTS = Path(__file__).resolve().parents[1] / "tests"
TARGET = TESTS / "data" / "format_v1.h5"


def golden_images() -> NDArray[np.uint8]:
    """Ten images of 5 x 4 x 3 whose every value tells its place: uint8 (10, 5, 4, 3)."""
    return (np.arange(10 * 5 * 4 * 3) * 7 % 251).astype(np.uint8).reshape(10, 5, 4, 3)


def write_format() -> None:
    """Writes the packed file of the current format version."""
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    columns = {
        "labels": Column(np.arange(10, dtype=np.int64) % 3, {"names": ("cat", "dog", "größe")}),
        "bbox": Column(np.arange(40, dtype=np.int32).reshape(10, 4)),
        "key": Column(np.array([f"train/{i}.png".encode() for i in range(10)])),
    }
    masks = golden_images()[..., 0] % 4
    write_packed(
        TARGET,
        golden_images(),
        columns,
        masks=masks,
        ignore_index=3,
        chunk_rows=4,
        splits={"train": 7, "val": 3},
        seed=11,
    )
    print(f"wrote {TARGET} ({TARGET.stat().st_size} bytes)")


def write_stores() -> None:
    """Packs what `tests/test_golden_files.py` describes and is not there yet; writes the table of what they hold."""
    sys.path[:0] = [str(TESTS)]
    from test_golden_files import STORES, TABLE, kept_rows

    table = {TARGET.name: kept_rows(TARGET)}
    for name, make in STORES.items():
        path = TABLE.with_name(name)
        if not path.exists():
            with tempfile.TemporaryDirectory() as folder:
                make(Path(folder), path)
            print(f"wrote {path} ({path.stat().st_size} bytes)")
        table[name] = kept_rows(path)
    TABLE.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def write_bytes() -> None:
    """Packs every source of `tests/pack/golden_packs.py`, and writes the table of what came of each."""
    sys.path[:0] = [str(TESTS / "pack"), str(TESTS)]
    from golden_packs import CASES, TABLE, described

    before = json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {}
    table = {}
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            table[name] = described(case.make(Path(folder)), encodes=case.encodes)
        old = before.get(name, {})
        changed = [one for one in sorted(old.keys() | table[name].keys()) if old.get(one) != table[name].get(one)]
        if changed:
            print(f"{name}: {', '.join(changed)}")
    for name in before.keys() - table.keys():
        print(f"{name}: no longer packed")
    TABLE.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"wrote {TABLE}")


def write_help() -> None:
    """Writes the help of every command as the tests keep it."""
    sys.path[:0] = [str(TESTS / "cli"), str(TESTS)]
    from test_main import WIDTHS, drawn_help, kept_help

    for width in WIDTHS:
        kept_help(width).write_text("\n".join(drawn_help(width).values()))
        print(f"wrote {kept_help(width)}")


def write_pages() -> None:
    """Writes the pages that `reference_pages` makes."""
    import reference_pages  # imports torch

    reference_pages.write_pages()


def main() -> None:
    """Write the files that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("format", "stores", "bytes", "help", "pages"))
    writers = {
        "format": write_format, "stores": write_stores, "bytes": write_bytes, "help": write_help, "pages": write_pages,
    }  # fmt: skip
    writers[parser.parse_args().what]()


if __name__ == "__main__":
    main()
