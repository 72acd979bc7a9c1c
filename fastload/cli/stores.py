"""The table of stores that `fastload pack --dry-run` and `fastload info --stores` show."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from fastload.cli.output import one_line, print_pairs, print_table

if TYPE_CHECKING:
    from fastload.estimate import StoreEstimates


def print_stores(found: StoreEstimates) -> None:
    """What each store takes and gives, and which one to pick."""
    from fastload.chunks import format_bytes

    rates = f"images/s read and decoded in {found.threads} thread{'s' if found.threads > 1 else ''}, without transforms"
    typer.echo(f"\nstores, from {found.sampled:,} samples of these images on this machine ({rates})")
    rows = [
        (
            store.store,
            format_bytes(store.bytes),
            f"{store.bytes / found.raw_bytes:.0%}",
            f"{store.warm_per_s:,.0f}",
            "?" if store.disk_per_s is None else f"{store.disk_per_s:,.0f}",
            ", ".join(f"{count} {name}" for name, count in store.encodings.items()),
        )
        for store in found.stores
    ]
    print_table(("store", "size", "of raw", "from memory", "from this disk", "sampled rows"), rows)
    disk = found.disk
    rate = f"{format_bytes(disk.bytes_per_s)}/s, {disk.told}" if disk.bytes_per_s is not None else disk.told
    pairs = [("disk", rate), ("pick", found.reason)]
    if found.failed:
        pairs.append(("note", f"{found.failed:,} more samples could not be decoded; packing names them"))
    print_pairs((name, one_line(value)) for name, value in pairs)
