"""Parquet files and Hugging Face datasets: tables with images as bytes, or without any image.

data/train-00000-of-00257.parquet   as on the Hub; splits by the names of files or of the folders above them
photos.parquet                      one file, one split
train/data-00000-of-00001.arrow     a folder that `datasets` saved with save_to_disk, recognised by its state.json
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import FastloadError, SourceError
from fastload.sources.arrow.encoded_images import encoded_column, image_index, keys_of, resolve_images, resolve_masks
from fastload.sources.arrow.features import Features, common_classes, features_of, require_same_classes, values_in
from fastload.sources.arrow.shards import Shard
from fastload.sources.listing import Listing, OnError, SourceOptions, first_few, split_of_parts
from fastload.sources.open_tree import open_tree
from fastload.sources.tables.boxes import OBJECTS, nested_boxes
from fastload.sources.tables.columns import columns_of, missing_labels, plain_name
from fastload.sources.tables.image_tables import IMAGE_COLUMNS, split_of_name
from fastload.sources.tables.splits import MASK_COLUMNS, split_cells, split_index
from fastload.sources.tree import Tree, key_of

_PART = re.compile(r"(.*-)(\d{5,6})-of-(\d{5,6})(?:-[0-9a-f]+)?(\.\w+)", re.DOTALL)
_FIRST_IMAGES = ("image", "img", "pixel_values", "picture", "photo")


def parquet_evidence(tree: Tree) -> list[str]:
    """Returns the Parquet or Arrow files of a tree, if they hold images or the tree has no image files."""
    if tree.archive:
        return []
    names = [tree.names[i] for i in _table_positions(tree)]
    if not names or tree.file:
        return [key_of(name) for name in names]
    if len(tree.images()) and not names[0].endswith(".arrow"):
        try:
            features = features_of(Shard(tree.path / names[0]).schema)
        except FastloadError:
            return []
        if not features.images:
            return []
    return [key_of(name) for name in names[:3]]


def list_parquet(
    source: str | Path | Tree, *, on_error: OnError = "fail", options: SourceOptions | None = None
) -> Listing:
    """Returns the listing of a dataset of Parquet or Arrow files, row by row.

    Columns are those of a manifest; lists of numbers, all of one length, keep their dtype: `input_ids` int64 (N, L).

    Raises:
        MissingExtraError: pyarrow is not installed.
        SourceError: a file is damaged, or a column has different types; a row has no image or label (unless skipped).
    """
    options = options or SourceOptions()
    tree = open_tree(source)
    if tree.archive:
        raise SourceError(f"{tree.path}: Parquet files inside an archive are not read. Unpack it and give the folder.")
    positions = _table_positions(tree)
    if not positions:
        raise SourceError(f"{tree.path}: there is no .parquet file, nor a folder that `datasets` saved.")
    names = [tree.names[i] for i in positions]
    shards = [Shard(tree.path / name) for name in names]
    counts = [shard.num_rows for shard in shards]
    total = sum(counts)
    if total == 0:
        raise SourceError(
            f"{tree.given}: {first_few([key_of(name) for name in names])} hold no rows. Fetch them again."
        )
    shard_of = np.repeat(np.arange(len(shards)), counts)
    row_of = np.concatenate([np.arange(count) for count in counts])
    # If files number their classes differently, the numbers of the training files are kept.
    order = sorted(range(len(shards)), key=lambda i: split_of_name(names[i]) != "train")
    features, differ = common_classes([features_of(shards[i].schema) for i in order], [counts[i] for i in order])
    columns = _column_names(shards, names)
    notes = [f"Layout parquet, recognised by {first_few([key_of(name) for name in names], 3)}; {total} rows."]
    if differ:
        notes.append(f"Files name different classes in column {first_few(differ)}: renumbered by name, all of them.")
    if lacking := _missing_parts(names):
        if on_error == "fail" and not tree.file:
            raise SourceError(
                f"{tree.given}: files that are missing by the names of the others ({len(lacking)}): "
                f"{first_few(lacking)}. Fetch them, or pack what is there with `--on-error skip`."
            )
        notes.append(f"Files are missing by the names of the others ({len(lacking)}): {first_few(lacking)}.")

    image = _image_column(features, columns, shards, tree, options, notes)
    splits, split_column = _splits(shards, names, columns, shard_of, options, notes)
    split, split_names = split_index(splits)
    encoded = encoded_column(shards, image, features, tree) if image else None
    nothing = np.zeros(total, np.int64)
    files, sizes, mtimes, bad = (
        resolve_images(encoded, tree, names, shard_of) if encoded else (None, nothing, nothing, dict[int, str]())
    )
    mask = next((n for n in features.images if n != image and plain_name(n) in (*MASK_COLUMNS, "label")), "")
    masks = None
    if mask and image and options.masks == "none":
        notes.append(f"Masks in column {mask!r} were left alone, as asked for.")
    elif mask and image:
        coded = encoded_column(shards, mask, features, tree)
        masks, mask_sizes, mask_mtimes = resolve_masks(coded, tree, names, shard_of, notes, mask)
        # A resume notices a changed mask as it notices a changed image: both make the sample.
        sizes, mtimes = sizes + mask_sizes, np.maximum(mtimes, mask_mtimes)

    def location(row: int) -> str:
        return f"row {row_of[row]} of {key_of(names[shard_of[row]])}"

    others = [name for name in features.images if name not in (image, mask)]
    if others:
        notes.append(f"Columns ignored: {first_few([f'{name} (more images)' for name in others])}.")
    taken = {image, mask, split_column, *others}
    nested = None
    if objects := next((name for name in OBJECTS if name in columns and name not in taken), ""):
        cells = [cell for shard in shards for cell in shard.column(objects).to_pylist()]
        for shard in shards if objects in features.classes else ():
            own = features_of(shard.schema).classes.get(objects, ())
            require_same_classes(shard, objects, own, features.classes[objects])
        nested = nested_boxes(cells, lambda row: f"{tree.given}: {location(row)}", features.classes.get(objects, ()))
        if nested:
            taken.add(objects)
            notes.append(f"Boxes by column {objects!r}, taken for x, y, width, height.")
    table = {name: values_in(shards, name, features) for name in columns if name not in taken}

    if bad and on_error == "fail":
        shown = first_few([f"{location(row)} {why}" for row, why in sorted(bad.items())])
        raise SourceError(
            f"{tree.given}: rows without their image ({len(bad)}): {shown}. Fetch the files again, or leave those rows "
            "out with `--on-error skip`."
        )
    made, lost, said = columns_of(
        table, wanted=options.labels, split=split, split_names=split_names, where=str(tree.given)
    )
    made = (nested or {}) | made
    if lost and on_error == "fail":
        raise missing_labels(lost, location, str(tree.given))
    if not image and not made:
        raise SourceError(
            f"{tree.given}: there is neither a column of images nor one of numbers: {', '.join(columns)}."
        )
    if not image:
        notes.append("No column holds images: a dataset of columns only.")
        sizes = np.full(total, sum(column.values[:1].nbytes for column in made.values()), np.int64)
    bad = lost | bad
    keep = np.delete(np.arange(total), list(bad))
    if len(keep) == 0:
        raise SourceError(f"{tree.given}: not one row can be packed, e.g. {location(0)}: {bad[0]}.")
    listing = Listing(
        layout="parquet",
        keys=tuple(keys_of(encoded, names, counts)),
        split=split,
        split_names=split_names,
        columns=made,
        notes=(*notes, *said, *tree.notes),
        sizes=sizes,
        mtimes_ns=np.maximum(tree.mtimes_ns[np.array(positions)][shard_of], mtimes),
        files=files,
        skipped=tuple((location(row), why) for row, why in sorted(bad.items())),
        masks=masks,
    )
    return listing.take(keep) if bad else listing


def _table_positions(tree: Tree) -> list[int]:
    """Returns the positions of the Parquet files; without any, of the Arrow files next to a state.json."""
    found = [i for i, name in enumerate(tree.names) if name[-1:] in "tT" and name.lower().endswith(".parquet")]
    if found:
        return found
    saved = {name.rpartition("/")[0] for name in tree.names if name.rpartition("/")[2] == "state.json"}
    return [i for i, name in enumerate(tree.names) if name.endswith(".arrow") and name.rpartition("/")[0] in saved]


def _missing_parts(names: list[str]) -> list[str]:
    """Returns the names of files that are missing from a series such as train-00000-of-00003.parquet."""
    parts: dict[tuple[str, str, str], set[int]] = {}
    for name in names:
        if found := _PART.fullmatch(name):
            before, number, total, suffix = found.groups()
            parts.setdefault((before, total, suffix), set()).add(int(number))
    lacking: list[str] = []
    for (before, total, suffix), there in parts.items():
        for number in range(min(int(total), 100_000)) if len(there) < int(total) else ():
            if number not in there:
                lacking.append(key_of(f"{before}{number:0{len(total)}d}-of-{total}{suffix}"))
    return lacking


def _column_names(shards: list[Shard], names: list[str]) -> list[str]:
    """Returns the names of the columns of all shards.

    Raises:
        SourceError: a column has different types in two files; null fits any type.
    """
    import pyarrow as pa

    known: dict[str, tuple[Any, str]] = {}
    for shard, file in zip(shards, names, strict=True):
        for field in shard.schema:
            kind, first = known.setdefault(field.name, (field.type, file))
            if pa.types.is_null(kind):
                known[field.name] = (field.type, file)
            elif field.type != kind and not pa.types.is_null(field.type):
                raise SourceError(
                    f"{shard.path}: column {field.name!r} is {field.type}, but {kind} in {key_of(first)}. "
                    "Give the files of one dataset (one configuration of it)."
                )
    return list(known)


def _image_column(
    features: Features,
    columns: list[str],
    shards: list[Shard],
    tree: Tree,
    options: SourceOptions,
    notes: list[str],
) -> str:
    """Returns the column of images, of bytes or of paths to files; "" if there is none."""
    if options.image_column:
        if options.image_column not in columns:
            raise SourceError(
                f"{tree.given}: there is no column {options.image_column!r} for images. There are {', '.join(columns)}."
            )
        return options.image_column
    usual = [name for name in features.images if plain_name(name) in _FIRST_IMAGES]
    no_masks = [name for name in features.images if plain_name(name) not in MASK_COLUMNS]
    if found := usual or no_masks:
        notes.append(f"Images by column {found[0]!r}.")
        return found[0]
    plain = {plain_name(name): name for name in columns}
    for candidate in [plain[name] for name in IMAGE_COLUMNS if name in plain]:
        values = values_in(shards[:1], candidate, features)
        if values.kind == "text" and any(image_index(tree).hits(values.texts()[:40])):
            notes.append(f"Images by the paths in column {candidate!r}.")
            return candidate
    return ""


def _splits(
    shards: list[Shard],
    names: list[str],
    columns: list[str],
    shard_of: NDArray[np.int64],
    options: SourceOptions,
    notes: list[str],
) -> tuple[list[str], str]:
    """Returns the split of each row, and the column that says it; without one, by the names of files and folders."""
    wanted = options.split_column or ("split" if "split" in columns else "")
    if wanted:
        if wanted not in columns:
            raise SourceError(
                f"{shards[0].path}: there is no column {wanted!r} for splits. There are {', '.join(columns)}."
            )
        said = split_cells(values_in(shards, wanted, Features((), {})).texts(), plain_name(wanted))
        if all(said) and len(set(said)) < 256:
            notes.append(f"Splits by column {wanted!r}: {', '.join(sorted(set(said)))}.")
            return said, wanted
        raise SourceError(
            f"{shards[0].path}: column {wanted!r} can be no split: a value is empty, or there are too many."
        )
    by_file = []
    for name in names:
        by_file.append(split_of_name(name) or split_of_parts(name.split("/")[-2::-1]))
    if any(by_file):
        notes.append(f"Splits by names of files: {', '.join(sorted(set(by_file) - {''}))}.")
    return [by_file[i] for i in shard_of.tolist()], ""
