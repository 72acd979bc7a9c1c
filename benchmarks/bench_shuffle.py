"""What does each shuffle cost in images/s, and how well does it mix?

    python benchmarks/bench_shuffle.py            about two minutes, 5 GB of disk in .bench
    python benchmarks/bench_shuffle.py --quick    tiny sizes, to see that it runs; the figures mean nothing

Two files of 218x178x3 rows with the same chunks. `mixed`: the faces of bench_loader.py as `fastload pack` writes them,
rows shuffled within each split, 40 attributes; its split `train` is read. `sorted`: the same pixels with 100 classes
of equal size, one after another, as a folder of classes packed with `--no-shuffle`.

For full shuffle, chunk windows and no shuffle, `quality-FILE-SHUFFLE` holds the measures of
`fastload.inspection.shuffle_quality` (defined in `fastload.plan.randomness`; `worse` names those in which the order is
worse than full shuffle beyond its spread) and images/s of FastLoader from a warm page cache, touching each page, in
pairs with full shuffle: `ratio` is shuffle / full, and full over itself is the noise. `quality-FILE-expected` holds
what random permutations give, with the spread of full shuffle's. Warm, no order is faster by much; what chunk windows
save is reads from a cold disk.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

import harness
from fastload import ChunkWindow, FastLoader, PackedDataset
from fastload.format.header import read_header
from fastload.format.ragged import Column
from fastload.inspection.shuffle_quality import WINDOWS, OrderQuality, measure_shuffles
from sample_files import write_packed

NUM_CLASSES = 100


def sorted_faces(folder: Path, mixed: Path) -> Path:
    """The same pixels and chunks, the rows in the order of their classes."""
    path = folder / mixed.name.replace("faces", "sorted")
    if not path.exists():
        header = read_header(mixed)
        field, num_rows = header.fields["images"], header.num_rows
        pixels = np.memmap(mixed, field.dtype, "r", field.offset or 0, (num_rows, *field.shape))
        classes = Column(np.arange(num_rows) * NUM_CLASSES // num_rows)
        part = path.with_suffix(".writing")
        write_packed(part, pixels, {"labels": classes}, chunk_rows=field.chunk_rows, shuffled=False)
        part.rename(path)
    return path


def rate(loader: FastLoader) -> float:
    """Images a second over one epoch, one byte of each page read."""
    loader.set_epoch(0)
    return harness.rate(harness.pixels_of(loader))


def measure(journal: harness.Journal, name: str, path: Path, batch_size: int, options: argparse.Namespace) -> None:
    """All shuffles of one file."""
    found = measure_shuffles(path, batch_size=batch_size)
    dataset = PackedDataset(path, found.split, ["images"])
    shape = [*dataset.file.fields["images"].shape]
    about = {"name": name, "rows": found.num_rows, "row_shape": shape, "chunk_rows": found.chunk_rows,
             "batch_size": found.batch_size, "labels": found.labels, "default": found.default}  # fmt: skip
    first = found.orders[0].measures
    expected = {key: each.full for key, each in first.items() if each}
    spreads = {f"{key}_spread": each.spread for key, each in first.items() if each}
    journal.note(f"quality-{name}-expected", file=about, **expected, **spreads)
    full = FastLoader(dataset, found.batch_size, shuffle="full", workers=options.workers)
    for order in found.orders:
        loader = FastLoader(dataset, found.batch_size, shuffle=_shuffle(order), ends="drop", workers=options.workers)
        speed = harness.compare(lambda loader=loader: rate(loader), lambda: rate(full), pairs=options.pairs)  # type: ignore[misc]
        loader.close()
        values: dict[str, Any] = {key: each.value for key, each in order.measures.items() if each}
        worse = [key for key, each in order.measures.items() if each and not each.as_good]
        asked = name == "mixed" and order.shuffle == found.default
        journal.note(
            f"quality-{name}-{order.shuffle}",
            target="as good as full shuffle, or say how far" if asked else "",
            file=about,
            window_chunks=order.window_chunks,
            window_rows=order.window_rows,
            **values,
            worse=", ".join(worse),
            verdict=order.verdict,
            **speed,
        )
        print(f"  {order.verdict}", flush=True)
    full.close()


def _shuffle(order: OrderQuality) -> Any:
    if order.window_chunks:
        return ChunkWindow(order.window_chunks)
    return "full" if order.shuffle == "full" else False


def main() -> None:
    """Measure both files."""
    parser = harness.command_line("Measure what each shuffle costs and how well it mixes.", "shuffle", pairs=7)
    parser.add_argument("--rows", type=int, default=20_000, help="faces of 218x178x3 (default: 20,000)")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--workers", type=int, help="FastLoader's; default: its own choice")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.pairs = 64, 1
    torch.set_num_threads(1)
    journal = harness.begin(options, "pairs", "rows", "workers", windows=list(WINDOWS), page_cache="warm")
    mixed = harness.packed_faces(options.data, options.rows)
    batch_size = min(options.batch_size, options.rows // 8)
    measure(journal, "mixed", mixed, batch_size, options)
    measure(journal, "sorted", sorted_faces(options.data, mixed), batch_size, options)


if __name__ == "__main__":
    main()
