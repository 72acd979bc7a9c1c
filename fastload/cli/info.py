"""`fastload info` says what a file holds, how it lies on disk and what would make it faster; `preview` draws it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from fastload.cli.arguments import AsJson, PackedName
from fastload.cli.command_line import Argument
from fastload.cli.output import (
    bold,
    one_line,
    one_line_errors,
    print_encodings,
    print_finding,
    print_json,
    print_pairs,
    print_table,
    progress_bar,
    splits_pair,
)
from fastload.options import Option
from fastload.options.parse import parse_file, parse_rows
from fastload.system.advice import advice
from fastload.system.text import counted, format_bytes, share_text

if TYPE_CHECKING:
    from fastload.inspection.chunk_layout import ChunkLayout, RaggedInfo
    from fastload.inspection.info import FieldInfo, FileInfo
    from fastload.inspection.shuffle_quality import Measure, ShuffleQuality


MAX_CLASSES = 12
MAX_FIELDS = 40
MAX_TEXT = 80
MAX_FINDINGS = 20


def info(
    file: Annotated[Any, Argument("FILE", parser=parse_file, help="A packed file or its URL, or any HDF5 file.")],
    as_json: AsJson = False,
    shuffle_quality: Annotated[
        bool, Option(names=("--shuffle-quality",), help="Measure how well each shuffle mixes this file; takes seconds.")
    ] = False,
    batch_size: Annotated[
        int, Option(names=("--batch-size",), least=2, help="Samples in a batch, for --shuffle-quality.")
    ] = 256,
    stores: Annotated[
        bool,
        Option(
            names=("--stores",),
            help="Estimate size and loading rate of each `fastload pack --store` here; takes seconds.",
        ),
    ] = False,
) -> None:
    """Show what a file holds, how it lies on disk, and what makes it slow.

    Works on any HDF5 file: says what reading one random image costs, and
    what packing again would gain.
    """
    with one_line_errors():
        from fastload.inspection.info import inspect_file

        found = inspect_file(file)
        quality = None
        if shuffle_quality:
            from fastload.inspection.shuffle_quality import measure_shuffles

            quality = measure_shuffles(file, batch_size=batch_size)
        estimates = None
        if stores:
            from fastload.remote.urls import local_path

            local_path(
                file,
                "--stores measures encodings of a file of this machine, on its disk. Leave --stores out, or give it a "
                "copy: `fastload repack URL OUT.h5`.",
            )
            from fastload.estimate import estimate_file

            with progress_bar() as progress:
                estimates = estimate_file(file, progress=progress)
        if as_json:
            measured = {"shuffle_quality": quality, "store_estimates": estimates}
            print_json(found.to_dict() | {name: value.to_dict() for name, value in measured.items() if value})
        else:
            _print(found)
            if quality:
                _print_quality(quality)
            if estimates:
                print_encodings(estimates)
            elif found.version is not None and "images" in found.fields and found.cached is None:
                click.echo(f"\n{advice('stores')}")


def _print(found: FileInfo) -> None:
    origin = "not packed by fastload" if found.version is None else f"{found.writer}, format {found.version}"
    click.echo(f"{bold(found.name)} ({one_line(origin)})")
    pairs = [("samples", f"{found.num_samples:,}")]
    if found.splits:
        pairs.append(splits_pair({name: stop - start for name, (start, stop) in found.splits.items()}))
    if found.classes:
        counts = found.class_counts or (None,) * len(found.classes)
        some = zip(found.classes[:MAX_CLASSES], counts, strict=False)
        shown = ", ".join(name if count is None else f"{name} {count:,}" for name, count in some)
        more = f" and {len(found.classes) - MAX_CLASSES:,} more" if len(found.classes) > MAX_CLASSES else ""
        label = "attributes" if len(found.fields["labels"].shape) == 2 else "classes"
        pairs.append((label, f"{len(found.classes):,}: {shown}{more}"))
    if found.mask_shares:
        pairs.append(("masks", _mask_classes(found)))
    if found.captions:
        more = f" and {len(found.captions) - 1:,} more" if len(found.captions) > 1 else ""
        pairs.append(("captions", f"of the first image {one_line(found.captions[0])[:MAX_TEXT]!r}{more}"))
    if found.num_shards is not None:
        pairs.append(("shards", f"{found.num_shards:,}; {advice('verify shards')}"))
    pairs.append(("size", f"{format_bytes(found.file_bytes)} on disk, {format_bytes(found.pixel_bytes)} of pixels"))
    if found.layout:
        pairs += _layout_pairs(found.layout)
    for name, ragged in found.stores.items():
        pairs += _ragged_pairs(name, ragged)
    if found.version is not None:
        # Seed, shuffle and chunks are shown on other lines; without a size `fit` had no effect.
        own = {"seed", "shuffle", "chunk_bytes", *(() if found.pack_options.get("size") else ("fit",))}
        options = ", ".join(
            f"{name} {' x '.join(map(str, value)) if isinstance(value, list) else value}"
            for name, value in found.pack_options.items()
            if value is not None and name not in own
        )
        pairs += [
            ("rows", f"shuffled within each split, seed {found.seed}" if found.shuffled else "as in the source"),
            ("source", f"layout {found.source_layout}" + (f"; {options}" if options else "")),
            ("decoder", found.decoder or "unknown"),
            ("digest", found.header_digest or ""),
        ]
    if found.needs:
        needs = "; ".join(f"{name}, {what}" for name, what in found.needs.items())
        pairs.append(("other tools", f"need more than HDF5 for {needs}"))
    if found.header_digest:
        pairs.append(("reading", _reading(found)))
    print_pairs(pairs)
    click.echo()
    _print_fields(list(found.fields.values()))
    if found.findings:
        click.echo()
        for finding in found.findings[:MAX_FINDINGS]:
            print_finding(finding)
    elif found.version is None:
        click.echo("\nNothing to fix: FastLoader reads each image as one piece of this file.")


def _mask_classes(found: FileInfo) -> str:
    """Returns the classes of masks with their shares of the pixels that were looked at, most frequent first.

    What is ignored stands behind them.
    """
    classes = [value for value in found.mask_shares if value != found.mask_ignored]
    ordered = sorted(classes, key=lambda value: -found.mask_shares[value])
    names = dict(enumerate(found.mask_names))
    shares = [f"{names.get(value, value)} {share_text(found.mask_shares[value])}" for value in ordered[:MAX_CLASSES]]
    more = f" and {len(ordered) - MAX_CLASSES:,} more" if len(ordered) > MAX_CLASSES else ""
    head = f"{len(names):,} classes: " if names else "values: "
    ignored = found.mask_shares.get(-1 if found.mask_ignored is None else found.mask_ignored)
    last = f"; ignored ({found.mask_ignored}) {share_text(ignored)}" if ignored is not None else ""
    return f"{head}{', '.join(shares) or 'none'}{more} of the pixels{last}"


def _reading(found: FileInfo) -> str:
    if found.cached is not None:
        return f"chunk by chunk over the network, and kept in {found.cached}: {advice('cache list')}"
    if found.read == "pread":
        return f"pread: on {found.file_system} others may truncate a mapped file, which ends the process that reads it"
    if found.held_off:
        return "map; writers to the file wait while rows are copied"
    return f"map; {advice('pread')}"


def _layout_pairs(layout: ChunkLayout) -> list[tuple[str, str]]:
    chunks = "none (contiguous)"
    if layout.chunks is not None:
        cut = ", and they cut images" if layout.chunks_per_image > 1 else ""
        rows = counted(layout.chunk_rows, "image")
        chunks = f"{layout.num_chunks:,} of {rows}{cut} ({format_bytes(layout.chunk_bytes)})"
        if (last := layout.shape[0] % layout.chunk_rows) and not layout.compressed:
            chunks += f", each stored in full, the last {last / layout.chunk_rows:.0%} filled"
    linear = f", one linear array from byte {layout.first_offset:,}" if layout.linear else ", not linear"
    read = "" if layout.linear else f"{counted(layout.chunks_per_image, 'chunk')}, "
    cost = f"{read}{format_bytes(layout.read_bytes_per_image)} read"
    if layout.decoded_bytes_per_image != layout.read_bytes_per_image:
        cost += f", {format_bytes(layout.decoded_bytes_per_image)} decoded"
    return [("chunks", chunks + linear), ("one image", f"{format_bytes(layout.image_bytes)}: {cost}")]


def _ragged_pairs(name: str, ragged: RaggedInfo) -> list[tuple[str, str]]:
    (low_height, low_width), (height, width) = ragged.smallest, ragged.largest
    sizes = f"{height} x {width}"
    if ragged.num_sizes > 1:
        sizes = f"{ragged.num_sizes:,} sizes, heights {low_height} to {height}, widths {low_width} to {width}"
    chunks = f"{ragged.num_chunks:,} of {format_bytes(ragged.chunk_bytes)}, {ragged.filled:.1%} filled"
    chunks += "; each row whole in one"
    if ragged.beyond_chunk:
        chunks += f", but {ragged.beyond_chunk:,} larger than a chunk"
    encodings = [
        f"{each.name} {each.rows:,} ({format_bytes(each.row_bytes)} each, {each.share_of_raw:.1%} of raw)"
        for each in ragged.encodings
    ]
    return [
        (name, f"{sizes}; {format_bytes(ragged.row_bytes)} each on average, {ragged.share_of_raw:.1%} of raw"),
        ("  stored as", ", ".join(encodings)),
        ("  chunks", chunks),
    ]


def _print_fields(fields: Sequence[FieldInfo]) -> None:
    def shape_of(shape: tuple[int, ...]) -> str:
        return " x ".join(f"{n:,}" for n in shape) or "single value"

    rows = []
    for field in fields[:MAX_FIELDS]:
        storage = "contiguous" if field.chunks is None else f"chunks {shape_of(field.chunks)}"
        filters = f", {' + '.join(field.filters)}" if field.filters else ""
        rows.append((field.name, shape_of(field.shape), field.dtype, format_bytes(field.bytes), storage + filters))
    print_table(("field", "shape", "type", "size", "storage"), rows)
    if len(fields) > MAX_FIELDS:
        click.echo(f"  {advice('more fields', count=f'{len(fields) - MAX_FIELDS:,}')}")


def _print_quality(found: ShuffleQuality) -> None:
    """Prints one line for each shuffle; a star marks values worse than full shuffle's by more than its spread."""
    from fastload.inspection.shuffle_quality import format_percent

    def shown(name: str, measure: Measure | None) -> str:
        if measure is None:
            return "-"
        value = format_percent(measure.value) if name == "mates_again" else f"{measure.value:.3f}"
        return value + ("" if measure.as_good else " *")

    rows = f"{found.num_rows:,} samples of split {found.split}" if found.split else f"{found.num_rows:,} samples"
    chunks = f", chunks of {found.chunk_rows:,}" if found.chunk_rows else ""
    click.echo(f"\nshuffle quality: {one_line(rows)} in batches of {found.batch_size:,}{chunks}")
    expected = [
        shown(name, measure and replace(measure, value=measure.full, as_good=True))
        for name, measure in found.orders[0].measures.items()
    ]
    table: list[Sequence[str]] = [("expected of full", f"{found.num_rows:,}", *expected)]
    for order in found.orders:
        table.append((order.shuffle, f"{order.window_rows:,}", *(shown(*one) for one in order.measures.items())))
    print_table(("shuffle", "mixes rows", "file order", "label mix", "epoch distance", "mates again"), table)
    click.echo("  * worse than random permutations, by more than 3 standard deviations of an epoch")
    print_pairs([
        ("file order", "rank correlation of the epoch with the file: 0 none, 1 as the file lies"),
        ("label mix", f"how much the {found.labels or 'labels'} of batches differ, in multiples of full shuffle's"),
        ("epoch distance", "how far a sample moves from epoch to epoch: 0 not at all, 1 as under full shuffle"),
        ("mates again", "share of a batch's samples that are in one batch again in the next epoch"),
    ])  # fmt: skip
    for order in found.orders:
        if order.shuffle == found.default:
            click.echo(f"\nshuffle=True means {order.shuffle} for this file: {order.verdict}.")
    for note in found.notes:
        print_finding(note)


def preview(
    file: PackedName,
    output: Annotated[
        Path | None,
        Option(
            names=(
                "--output",
                "-o",
            ),
            help="PNG to write; by default FILE.png; of a URL, here.",
        ),
    ] = None,
    count: Annotated[int | None, Option(help="Images to show; by default 40.")] = None,
    split: Annotated[str | None, Option(help="Show this split only.")] = None,
    seed: Annotated[int, Option(help="Another seed shows other images.")] = 0,
    rows: Annotated[
        Any, Option(parser=parse_rows, metavar="N,N", help="Show these rows, as `batch.rows` has them.")
    ] = None,
    overwrite: Annotated[bool, Option(names=("--overwrite",), help="Replace an output that exists.")] = False,
) -> None:
    """Draw a contact sheet of a file: images, labels, masks, boxes, landmarks."""
    if rows and count is not None:
        raise click.UsageError("--count goes with images that are chosen here: --rows shows all that it names.")
    with one_line_errors():
        from fastload.inspection.preview import make_preview
        from fastload.remote.urls import as_given, short_name

        given = as_given(file)
        target = output or (Path(given.rpartition("/")[2]) if isinstance(given, str) else given).with_suffix(".png")
        rows = make_preview(
            file,
            target,
            count=40 if count is None else count,
            split=split,
            seed=seed,
            rows=rows or (),
            overwrite=overwrite,
        )
        click.echo(f"{len(rows)} images of {one_line(short_name(given))} drawn in {one_line(str(target))}")
