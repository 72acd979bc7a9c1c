"""Parquet files and Hugging Face datasets: tables with images as bytes, or without any image.

data/train-00000-of-00257.parquet   as on the Hub; splits by the names of files or of the folders above them
photos.parquet                      one file, one split
train/data-00000-of-00001.arrow     a folder that `datasets` saved with save_to_disk, recognised by its state.json
photos-train.arrow                  what `datasets` cached, recognised by its dataset_info.json
"""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastload.errors import FastloadError, SourceError
from fastload.sources.arrow.shards import (
    ArrowTable,
    Shard,
    UnpackedImages,
    bytes_field,
    holds_bytes,
    translate_errors,
    values_in,
)
from fastload.sources.assemble import Draft, Samples, Splits, fill_value, keys_in_shards, split_path
from fastload.sources.captions import caption_column, caption_columns, maybe_captions, texts_in
from fastload.sources.listing import Masks, SourceOptions, first_few, split_of_parts
from fastload.sources.open_tree import open_tree
from fastload.sources.spans import JoinedFiles
from fastload.sources.tables.boxes import BOX_KEYS, OBJECTS, nested_boxes, objects_of_lists
from fastload.sources.tables.frame import (
    IMAGES,
    MASK_COLUMNS,
    Frame,
    columns_of,
    plain_name,
    splits_by_column,
    usual_names,
)
from fastload.sources.tables.image_index import ImageIndex
from fastload.sources.tables.image_tables import IMAGE_COLUMNS, is_table, split_of_name
from fastload.sources.tables.read_table import is_list
from fastload.sources.tree import Tree, is_image, key_of
from fastload.system.advice import advice

_LOOKED_AT = 40
# The first bytes of JPEG, PNG, GIF, BMP (of 64 MiB at most), TIFF and WebP as base64
_BASE64 = re.compile(r"data:image/|/9j/|iVBORw0KGgo|R0lGOD|Qk[0-9]|SUkq|UklGR")


def parquet_evidence(tree: Tree) -> list[str]:
    """Returns the Parquet or Arrow files of a tree, if they hold images or the tree has no image files."""
    if tree.archive:
        return []
    names = [tree.names[i] for i in _table_positions(tree)]
    if not names or tree.file:
        return [key_of(name) for name in names]
    if len(tree.images()) and not names[0].endswith(".arrow"):
        try:
            shard = Shard(tree.path / names[0])
            tables = any(is_table(name) for _, name in tree.not_images)
            if not shard.images and (tables or not _column_of_paths([shard], tree)):
                return []
        except FastloadError:
            return []
    return [key_of(name) for name in names[:3]]


def list_parquet(draft: Draft, tree: Tree, options: SourceOptions) -> Samples:
    """Returns a dataset of Parquet or Arrow files, row by row.

    Columns are as in a manifest; lists of numbers, all of one length, keep their dtype: `input_ids` int64 (N, L).

    Raises:
        MissingExtraError: pyarrow is not installed.
        SourceError: a file is damaged, or a column has different types; a row has no image or label (unless skipped).
    """
    notes = draft.notes
    table, written = _open_table(draft, tree)
    image = _image_column(table, tree, options, notes)
    splits, split_column = _splits(table, options, notes)
    images = _read_images(table, image, tree, options.root) if image else None
    mask = next((n for n in table.images if n != image and plain_name(n) in (*MASK_COLUMNS, "label")), "")
    masks = None
    if mask and image and options.masks == "none":
        notes.append(f"Masks in column {mask!r} were left alone, as asked for.")
    elif mask and image:
        masks = _read_images(table, mask, tree, options.root)
    lists = [f.name for shard in table.shards for f in shard.schema if _images_inside(f.type)]
    others = [name for name in dict.fromkeys([*table.images, *lists]) if name not in (image, mask)]
    if others:
        notes.append(advice("image column of Parquet", names=first_few(others)))
    taken = {image, mask, split_column, *others}
    nested = {}
    if objects := next((name for name in OBJECTS if name in table.names and name not in taken), ""):
        cells, classes = table.objects(objects), table.classes.get(objects, ())
        nested = nested_boxes(objects, cells, table.location, draft, classes, options.boxes)
        taken |= {objects} if nested else set()
    captions = {}
    texts = {name: table.objects(name) for name in table.names if maybe_captions(name) and name not in taken}
    if image and options.captions != "none" and (caption := caption_column(texts, (*options.labels, *table.classes))):
        notes.append(f"Captions by column {caption!r}.")
        captions = caption_columns(draft, list(map(texts_in, texts[caption])), options, table.location)
        taken |= {caption}
    lists = [name for name in table.names if name not in taken and name in table.lists]
    boxes = [name for name in lists if plain_name(name) in BOX_KEYS]
    if boxes and not nested and table.values(boxes[0]).kind == "other":  # else all images have as many boxes
        made_of, used = objects_of_lists({name: table.objects(name) for name in lists})
        classes = table.classes.get(used[-1], ()) if used else ()
        nested = nested_boxes(used[0], made_of, table.location, draft, classes, options.boxes) if used else {}
        taken |= set(used) if nested else set()
    values = {name: table.values(name) for name in table.names if name not in taken}
    bad = images.bad if images else {}
    missing = [(table.location(row), why) for row, why in sorted(bad.items())]
    draft.leave_out_all(missing, "rows without their image", "Fetch the files again, or leave those rows out")
    made, lost = columns_of(Frame(values, draft.where, splits, options.labels, table.location), notes)
    columns = nested | made | captions
    lost = {row: why for row, why in lost.items() if row not in bad}
    unlabelled = [(table.location(row), why) for row, why in sorted(lost.items())]
    shown = [f"{location}: {why}" for location, why in unlabelled]
    fix = "Fill them in, or leave those images out"
    draft.leave_out_all(unlabelled, "rows without a label", fix, shown)
    mtimes, counts = written[table.shard_of], [shard.num_rows for shard in table.shards]
    if images:
        mtimes = np.maximum(mtimes, images.mtimes_ns)
        samples = Samples(
            keys_in_shards(table.files, counts, images.paths), images.files, images.sizes, mtimes, splits, columns
        )
    elif not columns:
        there = ", ".join(table.names)
        raise SourceError(f"{tree.given}: there is neither a column of images nor one of numbers: {there}.")
    else:
        notes.append("No column holds images: a dataset of columns only.")
        if arrays := [n for n in usual_names(columns, (*IMAGES, "images", "pixels")) if columns[n].values.ndim > 1]:
            notes.append(
                f"Arrays in column {arrays[0]!r} are a field, not images: to pack them as images, save them as uint8 "
                "with `numpy.save('images.npy', ...)`, and give the folder."
            )
        sizes = np.full(len(mtimes), sum(column.values[:1].nbytes for column in columns.values()), np.int64)
        samples = Samples(keys_in_shards(table.files, counts, []), None, sizes, mtimes, splits, columns)
    if masks is not None:  # absent ones get a value that no other holds
        present = np.ones(len(masks.sizes), np.bool_)
        present[list(masks.bad)] = False
        notes.append(f"Masks by column {mask!r}.")
        fill = fill_value(draft, masks.files, present) if present.any() else 255
        found = Masks(masks.files, present, ignore_index=fill)
        samples = replace(samples, masks=found).made_also_of(masks.sizes, masks.mtimes_ns)
    return samples.without(bad.keys() | lost.keys())


class _ImageColumn(NamedTuple):
    """The images in one column of all files, R rows."""

    files: JoinedFiles
    sizes: NDArray[np.int64]  # (R,), bytes of each image
    mtimes_ns: NDArray[np.int64]  # (R,), time of modification of a file next to the table; 0: it is in the table itself
    paths: list[str]  # the path that each row names; "" for none
    bad: dict[int, str]  # row -> why it has no image


def _open_table(draft: Draft, tree: Tree) -> tuple[ArrowTable, NDArray[np.int64]]:
    """Returns the rows of all files, and the time of modification of each file."""
    if tree.archive:
        raise SourceError(f"{tree.path}: Parquet files inside an archive are not read. Unpack it and give the folder.")
    positions = _table_positions(tree)
    if not positions:
        raise SourceError(f"{tree.path}: there is no .parquet file, nor a folder that `datasets` saved.")
    tree.known[positions] = True
    names = [tree.names[i] for i in positions]
    shards = [Shard(tree.path / name) for name in names]
    if (total := sum(shard.num_rows for shard in shards)) == 0:
        raise SourceError(
            f"{tree.given}: {first_few([key_of(name) for name in names])} hold no rows. Fetch them again."
        )
    # If files number their classes differently, the numbers of the training files are kept.
    table = ArrowTable(shards, names, lambda name: split_of_name(name) == "train")
    draft.title = f"Layout parquet, recognised by {first_few([key_of(name) for name in names], 3)}; {total} rows."
    if table.renumbered:
        differ = first_few(table.renumbered)
        draft.notes.append(f"Files name different classes in column {differ}: renumbered by name, all of them.")
    if table.folders:
        draft.notes.append(f"Columns by the names of folders: {first_few(table.folders)}.")
    draft.require_parts(names)
    alike: dict[tuple[str, str], list[str]] = {}
    for name in names:
        split = split_of_name(name) or split_of_parts(name.split("/")[-2::-1])
        alike.setdefault((name.rpartition("/")[2], split), []).append(key_of(name))
    if several := next((of for of in alike.values() if len(of) > 1 and not table.folders), []):
        draft.notes.append(
            f"CHECK: files of one name in several folders ({first_few(several)}) are packed as one dataset. If they "
            "are configurations or versions of it, give the folder of one."
        )
    return table, tree.mtimes_ns[np.array(positions)]


def _table_positions(tree: Tree) -> list[int]:
    """Returns the positions of the Parquet files; without any, of the Arrow files that `datasets` saved or cached."""
    found = [i for i, name in tree.not_images if name.lower().endswith(".parquet")]
    if found:
        return found
    described = ("state.json", "dataset_info.json")
    saved = {name.rpartition("/")[0] for _, name in tree.not_images if name.rpartition("/")[2] in described}
    return [i for i, name in tree.not_images if name.endswith(".arrow") and name.rpartition("/")[0] in saved]


def _image_column(table: ArrowTable, tree: Tree, options: SourceOptions, notes: list[str]) -> str:
    """Returns the column of images, of bytes or of paths to files; "" if there is none."""
    if options.image_column in table.names:
        return options.image_column
    if options.image_column:
        there = ", ".join(table.names)
        raise SourceError(f"{tree.given}: there is no column {options.image_column!r} for images. There are {there}.")
    usual = usual_names(table.images, IMAGES)
    no_masks = [name for name in table.images if plain_name(name) not in MASK_COLUMNS]
    if found := usual or no_masks:
        notes.append(f"Images by column {found[0]!r}.")
        return found[0]
    if name := _column_of_paths(table.shards, tree, options.root):
        notes.append(f"Images by the paths in column {name!r}.")
        return name
    _refuse_other_images(table, tree)
    return ""


def _column_of_paths(shards: list[Shard], tree: Tree, root: Path | None = None) -> str:
    """Returns the column of a usual name whose texts name images of the tree; "" if there is none."""
    for candidate in usual_names(shards[0].schema.names, IMAGE_COLUMNS):
        values = values_in(shards[:1], candidate)
        if values.kind == "text" and any(_image_index(tree, root).hits(values.texts()[:_LOOKED_AT])):
            return candidate
    return ""


def _images_inside(kind: Any) -> bool:
    """Whether cells of a type are lists that may hold images."""
    return is_list(kind) and (holds_bytes(kind.value_type) or _images_inside(kind.value_type))


def _refuse_other_images(table: ArrowTable, tree: Tree) -> None:
    """Refuses a table without a column of images that holds them otherwise, and says how to write them."""
    for name in [one for one in table.names if one not in table.folders]:
        shard = next(shard for shard in table.shards if name in shard.schema.names)
        read = f"import pandas as pd; t = pd.read_parquet({str(shard.path)!r})"
        shown = shlex.quote(str(shard.path))
        write = "t.to_parquet('images.parquet')"
        if _images_inside(shard.schema.field(name).type):
            raise SourceError(
                f"{tree.given}: column {name!r} holds lists of images, and a sample here is one image. Write a row for "
                f"each image: `{read}.explode({name!r}); {write}`; or pick one: `t['image'] = t[{name!r}].str[0]`."
            )
        values = values_in([shard], name)
        cells = [cell for cell in values.texts()[:_LOOKED_AT] if cell] if values.kind == "text" else []
        if cells and all(re.match(r"https?://", cell) for cell in cells):
            raise SourceError(
                f"{tree.given}: no column holds images; {name!r} holds addresses, such as {cells[0][:60]}. Download "
                f"them first, e.g. `img2dataset --url_list {shown} --input_format parquet --url_col {name} "
                "--output_format webdataset`."
            )
        if cells and all(_BASE64.match(cell) for cell in cells):
            decode = f"t['image'] = [base64.b64decode(c.partition(',')[2] or c) for c in t.pop({name!r})]"
            raise SourceError(
                f"{tree.given}: column {name!r} holds images as base64 text. Write their bytes: "
                f"`import base64; {read}; {decode}; {write}`."
            )
        if cells and all(map(is_image, cells)):
            raise SourceError(
                f"{tree.given}: column {name!r} names images, such as {cells[0]}, and none of them lies below "
                f"{tree.path}. Put the Parquet files into the folder that the paths begin in, and give that folder."
            )


def _splits(table: ArrowTable, options: SourceOptions, notes: list[str]) -> tuple[Splits, str]:
    """Returns the split of each row, and the column that says it; without one, by the names of files and folders."""
    wanted = options.split_column or ("split" if "split" in table.names else "")
    said, column = splits_by_column(table, wanted, (), notes)
    if column:
        return Splits.of(said), column
    by_file = [split_of_name(name) or split_of_parts(name.split("/")[-2::-1]) for name in table.files]
    if any(by_file):
        notes.append(f"Splits by names of files: {', '.join(sorted(set(by_file) - {''}))}.")
    filled = np.unique(table.shard_of)
    splits = Splits.of([by_file[i] for i in filled.tolist()])
    return Splits(splits.index[np.searchsorted(filled, table.shard_of)], splits.names), ""


def _read_images(table: ArrowTable, name: str, tree: Tree, root: Path | None) -> _ImageColumn:
    """Returns the images of a column of bytes or of paths; a row without bytes names a file of the tree, or root."""
    paths: list[str] = []
    having = [shard for shard in table.shards if name in shard.schema.names]
    if lacking := [shard.path for shard in table.shards if shard.num_rows and shard not in having]:
        raise SourceError(
            f"{lacking[0]}: there is no column {name!r}, which holds the images in {having[0].path.name}. "
            "Move this file away if it is no part of the dataset."
        )
    if name in table.images and not str(having[0].schema.field(name).type).endswith("string"):
        files, sizes = _stored_images(table.shards, name, tree.path, paths)
    else:
        paths = table.values(name).texts()
        sizes = np.zeros(len(paths), np.int64)
        files = JoinedFiles((), sizes.astype(np.int32), sizes.copy())
    mtimes, bad = np.zeros(len(sizes), np.int64), dict[int, str]()
    absent = np.flatnonzero(sizes == 0)
    if not len(absent):
        return _ImageColumn(files, sizes, mtimes, paths, bad)
    index = _image_index(tree, root)
    for shard in np.unique(table.shard_of[absent]).tolist():
        rows = absent[table.shard_of[absent] == shard]
        here = index if root else index.at(split_path(table.files[shard])[0])
        found = here.find([paths[row] for row in rows.tolist()], [""] * len(rows))
        there, at = rows[found.positions >= 0], found.positions[found.positions >= 0]
        files.part[there], files.index[there] = len(files.parts), at
        sizes[there], mtimes[there] = index.tree.sizes[at], index.tree.mtimes_ns[at]
        for k in np.flatnonzero(found.positions < 0).tolist():
            path = paths[rows[k]]
            only = f"holds no bytes, only the path {path!r}, which {found.reasons.get(k, 'is not there')}"
            bad[int(rows[k])] = only if path else "holds no image: its bytes are null or empty"
    files = JoinedFiles((*files.parts, index.tree.files), files.part, files.index)
    return _ImageColumn(files, sizes, mtimes, paths, bad)


def _stored_images(
    shards: list[Shard], name: str, dataset_folder: Path, paths: list[str]
) -> tuple[JoinedFiles, NDArray[np.int64]]:
    """Returns the images of a column of bytes, of Arrow in place, of Parquet unpacked to a temporary file; their sizes.

    The path of each row is appended to `paths`.
    """
    parquet = shards[0].parquet
    spill = UnpackedImages(sum(shard.num_bytes() for shard in shards), dataset_folder) if parquet else None
    pieces: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    for shard in shards:
        if name not in shard.schema.names:
            pieces.append((np.zeros(0, np.int64), np.zeros(0, np.int64)))
            continue
        here, lengths = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for array, base in shard.batches(name):
            with translate_errors(shard.path):
                starts, length, buffer = _bytes_of(array, paths)
            if spill:
                first, last = (int(starts[0]), int(starts[-1] + length[-1])) if len(starts) else (0, 0)
                at = spill.write(memoryview(buffer)[first:last]) if buffer is not None and last > first else 0
                starts = starts - first + at
            elif buffer is not None:
                starts = starts + (buffer.address - base)
            here.append(starts)
            lengths.append(length)
        pieces.append((np.concatenate(here), np.concatenate(lengths)))
        shard.check(len(pieces[-1][0]))
    spans = [((spill or shard).spans(*piece), len(piece[0])) for shard, piece in zip(shards, pieces, strict=True)]
    return JoinedFiles.of(spans), np.concatenate([sizes for _, sizes in pieces])


def _bytes_of(array: Any, paths: list[str]) -> tuple[NDArray[np.int64], NDArray[np.int64], Any]:
    """Returns where each image begins in an array's buffer, its length (0: null), and the buffer; appends to paths."""
    import pyarrow as pa
    import pyarrow.compute as pc

    while isinstance(array.type, pa.BaseExtensionType):
        array = array.storage
    rows = len(array)
    if pa.types.is_struct(array.type):
        names = [array.type.field(i).name for i in range(array.type.num_fields)]
        path = next((name for name in ("path", "name", "filename", "file_name") if name in names), "")
        paths += [path or "" for path in pc.struct_field(array, path).to_pylist()] if path else [""] * rows
        array = pc.struct_field(array, bytes_field(array.type))  # null where the struct is
    else:
        paths += [""] * rows
    if pa.types.is_null(array.type):
        return np.zeros(rows, np.int64), np.zeros(rows, np.int64), None
    if not (pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type)):
        array = array.cast(pa.large_binary())
    valid = np.asarray(array.is_valid().to_numpy(zero_copy_only=False))
    _, ends, data = array.buffers()
    offsets = np.frombuffer(ends, np.int64 if pa.types.is_large_binary(array.type) else np.int32)
    starts = offsets[array.offset : array.offset + rows + 1].astype(np.int64)
    return starts[:-1], np.where(valid, np.diff(starts), 0), data


def _image_index(tree: Tree, root: Path | None) -> ImageIndex:
    """Returns the index of the image files in the folder of the tables, or below a root of theirs."""
    return ImageIndex(open_tree(root or tree.path) if root or tree.file else tree)
