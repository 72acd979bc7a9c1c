"""WebDataset: tar shards in which the files that share a name up to its first dot are one sample.

    train-000000.tar     00000.jpg  00000.cls  00001.jpg  00001.cls  ...
    train-000001.tar     ...                  a folder of shards, or one shard

The part of the base name behind the first dot, in lower case, is the field: `jpg` or another image, `cls` and the like
(an integer as text), `json` (its numbers), `npy` (arrays of one shape), `seg.png` (a mask), `txt` (a caption). Members
are read in place; nothing is unpickled.
"""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastload.errors import OptionError, SourceError
from fastload.format.ragged import Column
from fastload.options.pack import SourceOptions
from fastload.sources.archives import first_names, list_archive, tar_order
from fastload.sources.assemble import Draft, Samples, Splits, fill_value
from fastload.sources.boxes import BOXES, POINTS
from fastload.sources.captions import caption_column, caption_columns, maybe_captions, texts_in
from fastload.sources.listing import Files, Masks, first_few, free_name, split_of_shard
from fastload.sources.raw_rows import npy_header
from fastload.sources.spans import JoinedFiles
from fastload.sources.tables import Values, categories, mostly_empty, usual_names
from fastload.sources.tree import Tree, is_image, key_of
from fastload.system.machine import available_memory
from fastload.system.text import read_json

MASK_WORDS = frozenset("seg mask masks segmentation semantic semseg annotation".split())
"""Words before the suffix of an image that make it a mask: seg.png."""

_KEY = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)
_META = re.compile(r"__[^/]*__")


class Sample(NamedTuple):
    """One sample: its name (shard and key), its shard, and field -> member."""

    name: str
    shard: int
    fields: dict[str, int]


@dataclass(frozen=True, eq=False)
class GroupedSamples:
    """All samples of the shards, and their F members, one shard behind the other, each in its archive's order."""

    shards: list[str]  # prefix of the names of each shard; "" if the shard itself was given
    names: list[str]  # path of each member relative to what was given: shard.tar/member
    files: JoinedFiles  # reads the members
    sizes: NDArray[np.int64]  # (F,), bytes of each member
    mtimes_ns: NDArray[np.int64]  # (F,), time of modification of its shard
    samples: list[Sample]  # in the order of the shards
    counts: Counter[str]  # field -> number of samples that have it
    unusable: dict[int, str]  # index of a sample -> why it cannot be packed, the first reason; added to


def split_name(name: str) -> tuple[str, str] | None:
    """Returns the key (with folder) and the field (in lower case) of a member; None if it belongs to no sample."""
    match = _KEY.fullmatch(name)
    return (match[1], match[2].lower()) if match and not _META.fullmatch(name) else None


def is_picture(field: str) -> bool:
    """Whether a field is an image or mask, by its suffix."""
    return is_image(f".{field}")


def is_mask(field: str) -> bool:
    """Whether a field is a mask: seg.png."""
    return is_picture(field) and not MASK_WORDS.isdisjoint(field.split(".")[:-1])


def _open_shards(draft: Draft, tree: Tree) -> list[tuple[str, Tree]]:
    """Returns the shard given, or all shards in a folder, by the prefix of their members' names."""
    shards = [("", tree)]
    tree.known[:] = tree.archive
    if not tree.archive:
        positions = [i for i, name in tree.not_images if name.lower().endswith(".tar")]
        if not positions:
            packed = [name for name in tree.names if name.lower().endswith((".tar.gz", ".tgz"))]
            fix = f"Unpack them first (`gunzip {key_of(packed[0])}`)." if packed else "Is it the right folder?"
            raise SourceError(f"{tree.path} holds no shard: no .tar. {fix}")
        tree.known[positions] = True
        found = [tree.names[i] for i in positions]
        # By number, so that 9 precedes 10 even without leading zeros.
        found.sort(key=lambda name: [int(word) if word.isdecimal() else word for word in re.split(r"(\d+)", name)])
        shards = [(f"{name}/", list_archive(tree.path / Path(name))) for name in found]
    for prefix, shard in shards:
        draft.leave_out_broken(shard, key_of(prefix))
    draft.trees += [shard for _, shard in shards]
    there: dict[tuple[str, int, str], set[int]] = {}
    for prefix, _ in shards:
        if match := re.fullmatch(r"(.*?)(\d+)(\D*)", prefix, re.DOTALL):
            before, digits, after = match.groups()
            there.setdefault((before, len(digits), after), set()).add(int(digits))
    lacking: list[str] = []  # between the first and the last number
    for (before, width, after), numbers in there.items():
        if min(numbers) <= 1 and max(numbers) < 10 * len(numbers) + 10:  # else the numbers are dates or the like
            gaps = sorted(set(range(1, max(numbers))) - numbers)
            lacking += [key_of(f"{before}{number:0{width}d}{after.rstrip('/')}") for number in gaps]
    draft.note("Shards are missing by the numbers of the others", lacking)
    return shards


def group_samples(draft: Draft, tree: Tree) -> GroupedSamples:
    """Returns the samples of the shard given, or of all shards in a folder; raises as `_open_shards` does."""
    shards = _open_shards(draft, tree)
    names: list[str] = []
    parts: list[tuple[Files, int]] = []
    sizes, mtimes_ns = [], []
    samples: list[Sample] = []
    unusable: dict[int, str] = {}
    known: dict[str, int] = {}
    others: list[str] = []
    for number, (prefix, shard) in enumerate(shards):
        order = tar_order(shard)
        if not tree.archive and len(order) < len(shard.names):
            raise SourceError(f"{tree.path}: a shard is not a tar but a zip named so. Move it away.")
        parts.append((shard.files.take(order), len(order)))
        sizes.append(shard.sizes[order])
        mtimes_ns.append(shard.mtimes_ns[order])
        for i in order.tolist():
            name, split = prefix + shard.names[i], split_name(shard.names[i])
            names.append(name)
            if split is None:
                others.append(key_of(name))
                continue
            whole, field = prefix + split[0], split[1]
            if not samples or samples[-1].name != whole:
                if whole in known:
                    why = f"has fields that are not adjacent in the shard: {key_of(name)} is elsewhere"
                    unusable[known[whole]] = why
                    continue
                known[whole] = len(samples)
                samples.append(Sample(whole, number, {}))
            if samples[-1].fields.setdefault(field, len(names) - 1) != len(names) - 1:
                unusable[len(samples) - 1] = f"has the field {field!r} twice"
    draft.note("Members that are no fields of a sample were ignored", others)
    return GroupedSamples(
        shards=[prefix for prefix, _ in shards],
        names=names,
        files=JoinedFiles.of(parts),
        sizes=np.concatenate(sizes),
        mtimes_ns=np.concatenate(mtimes_ns),
        samples=samples,
        counts=Counter(field for sample in samples for field in sample.fields),
        unusable=unusable,
    )


def choose_images(draft: Draft, grouped: GroupedSamples, wanted: str) -> NDArray[np.int64]:
    """Returns the member that is the image of each sample, -1 for a sample without one.

    `wanted` is the field that the user names as the image; "" to find it.

    Raises:
        OptionError: no sample has the field wanted.
        SourceError: a sample has several images.
    """
    samples, counts = grouped.samples, grouped.counts
    pictures = [field for field in counts if is_picture(field) and not is_mask(field)]
    if wanted:
        if wanted.lower() not in counts:
            there = first_few(sorted(counts))
            raise OptionError(f"{draft.where}: no sample has the field --image-column {wanted!r}; there are {there}.")
        pictures = [wanted.lower()]
    else:
        _leave_out_dotted(grouped)
    images = np.full(len(samples), -1, np.int64)
    passed: Counter[str] = Counter()
    for i, sample in enumerate(samples):
        here = [field for field in pictures if field in sample.fields]
        plain = [field for field in here if "." not in field]
        if len(here) > 1 and len(plain) == 1:  # 0.jpg and 0.thumb.jpg
            passed.update(set(here) - {plain[0]})
            here = plain
        if len(here) > 1 and i not in grouped.unusable:
            said = ", ".join(f"{field} ({counts[field]})" for field in sorted(pictures))
            raise SourceError(
                f"{draft.where}: the sample {key_of(sample.name)} has {len(here)} images; its shards have the fields "
                f"{said}. Say which one to pack: `--image-column {here[0]}`."
            )
        if here:
            images[i] = sample.fields[here[0]]
    if passed:
        draft.notes.append(f"Further images of samples were not packed: {first_few(sorted(passed))}.")
    if (images >= 0).any():
        for i in np.flatnonzero(images < 0).tolist():
            grouped.unusable.setdefault(i, f"has no image, only {first_few(sorted(samples[i].fields))}")
    return images


def _leave_out_dotted(grouped: GroupedSamples) -> None:
    """Notes samples cut at a dot in the stem of their files as unusable: a_0.5.jpg is the field 5.jpg of a_0."""
    samples, counts = grouped.samples, grouped.counts
    rare = {field for field, count in counts.items() if 2 * count < len(samples) and is_picture(field)}
    dotted = {field for field in counts if "." in field}
    odd = {field for field in dotted if field[0].isdecimal() or (field in rare and not is_mask(field))}
    why = (
        "its files have a dot before their suffix, and the key ends at the first one (rename the files, or say which "
        "field is the image with `--image-column`)"
    )
    for i, sample in enumerate(samples) if odd else ():
        if found := sorted(odd.intersection(sample.fields)):
            grouped.unusable.setdefault(i, f"has the field {found[0]!r}: {why}")


INTEGERS = frozenset("cls cls2 class count index inx id".split())
PICKLES = frozenset("pyd pkl pickle pth pt".split())
JSON, ARRAY, TEXT = "json", "npy", "txt"

_LABELS = ("cls", "class", "label")  # fields that are the labels, unless the user names others


def kind_of(field: str) -> str:
    """Returns the last suffix of a field, which says what it holds: `cls` of `top.cls`."""
    return field.rpartition(".")[2]


def collect_columns(draft: Draft, grouped: GroupedSamples, options: SourceOptions) -> dict[str, Column]:
    """Returns the columns of all samples; those without a field that most have, or with a damaged one, become unusable.

    Captions come from a json, which may have several, else from a field of text.

    Raises:
        SourceError: a field is a pickle (unless skipped).
        OptionError: there is no column named in `options.labels`.
    """
    labels = options.labels
    samples, counts = grouped.samples, grouped.counts
    if pickles := sorted(field for field in counts if kind_of(field) in PICKLES):
        member = next(sample.fields[field] for sample in samples for field in pickles if field in sample.fields)
        said = f"{key_of(grouped.names[member])} is a pickle, which can run any program when it is read"
        if draft.on_error == "fail":
            raise SourceError(
                f"{draft.where}: {said}. Write the field {', '.join(pickles)} as json or npy instead, or leave it out "
                "with `--on-error skip`."
            )
        draft.notes.append(f"Fields that are pickles were left out ({first_few(pickles)}): {said}.")
    columns: dict[str, Column] = {}
    unused: list[str] = []
    captions: dict[str, list[Any]] = {}  # by where they are
    for field, count in sorted(counts.items()):
        kind = kind_of(field)
        if kind == TEXT and 2 * count >= len(samples) and options.captions != "none":
            if not captions:
                captions[repr(field)] = _read_field(draft, field, grouped, optional=True)
            continue
        if kind not in INTEGERS and kind not in (JSON, ARRAY):
            if not is_picture(field) and kind not in PICKLES:
                unused.append(f"{field} ({count})")
            continue
        if 2 * count < len(samples):
            unused.append(f"{field} (in {count} of {len(samples)} samples)")
            continue
        values = _read_field(draft, field, grouped)
        if kind == JSON and options.captions != "none" and (name := _captions_in(values, labels)):
            captions[f"{name!r} of {field!r}"] = [value and value.pop(name, None) for value in values]
        if kind == JSON:
            found = _json_columns(draft, grouped, field, values, labels, columns)
            columns |= {f"{_name(field)}_{name}" if name in columns else name: found[name] for name in found}
        elif kind == ARRAY:
            columns |= _array_columns(draft, grouped, field, values)
        else:
            columns[_name(field)] = Column(np.array([value or 0 for value in values], np.int64))
    if unused:
        draft.notes.append(f"Fields that are not packed: {first_few(unused, 12)}.")
    if captions:
        where, cells = next(iter(captions.items()))
        draft.notes.append(f"Captions by {where}.")
        columns |= caption_columns(draft, list(map(texts_in, cells)), options, lambda i: key_of(samples[i].name))
    return _with_labels(draft, columns, labels)


def _captions_in(values: list[Any], labels: tuple[str, ...]) -> str:
    """Returns the name of the captions in jsons, None for unusable ones; "" if there are none."""
    names = [name for name in dict.fromkeys(name for value in values for name in value or ()) if maybe_captions(name)]
    return caption_column({name: [value and value.get(name) for value in values] for name in names}, labels)


def _read_field(draft: Draft, field: str, grouped: GroupedSamples, *, optional: bool = False) -> list[Any]:
    """Returns the parsed content of a field of each sample; None for samples that are, or thereby become, unusable.

    `optional`: samples may lack it.
    """
    parse = {JSON: _json, ARRAY: _array, TEXT: _text}.get(kind_of(field), _integer)
    members = [sample.fields[field] for sample in grouped.samples if field in sample.fields]
    # Links can name one member again and again.
    if (needed := int(grouped.sizes[members].sum())) > max(2**28, available_memory() // 2):
        raise SourceError(
            f"{draft.where}: the field {field!r} of all samples ({key_of(grouped.names[members[0]])}, ...) takes "
            f"{needed:,} bytes, too many for the free memory. Are there links to one member? Write the shards "
            f"without that field, or pack where there is more memory."
        )
    values: list[Any] = []
    for i, sample in enumerate(grouped.samples):
        values.append(None)
        if field not in sample.fields:
            if not optional:
                grouped.unusable.setdefault(i, f"has no field {field!r}")
            continue
        try:
            values[i] = parse(grouped.files.read(sample.fields[field]))
        except ValueError as exc:
            grouped.unusable.setdefault(i, f"has in {field!r} {exc}")
    return values


def _integer(data: bytes) -> int:
    try:
        return int(np.int64(int(data.decode("ascii"))))
    except ValueError:
        raise ValueError(f"{data[:40]!r}, not an integer as text") from None
    except OverflowError:
        raise ValueError(f"{data[:40]!r}, which does not fit 64 bits") from None


def _text(data: bytes) -> list[str]:
    try:
        return [data.decode("utf-8")]
    except UnicodeDecodeError as exc:
        raise ValueError(f"no text in UTF-8 ({exc.reason} at byte {exc.start})") from None


def _json(data: bytes) -> dict[str, Any]:
    try:
        found = read_json(data)
    except ValueError as exc:
        raise ValueError(f"no JSON that can be read ({exc})") from None
    return found if isinstance(found, dict) else {"": found}


def _array(data: bytes) -> NDArray[Any]:
    # Not np.load: it allocates what the header claims before it checks that the data is there.
    file = io.BytesIO(data)
    try:
        shape, fortran, dtype = npy_header(file)
    except ValueError as exc:
        raise ValueError(f"no array that can be read ({exc})") from None
    if dtype.hasobject:
        raise ValueError("an array of Python objects, which is a pickle and never read")
    if math.prod(shape) * dtype.itemsize != len(data) - file.tell():
        raise ValueError(f"an array {shape} of {dtype} in {len(data) - file.tell()} bytes")
    flat = np.frombuffer(data, dtype, offset=file.tell())
    return flat.reshape(shape, order="F" if fortran else "C")


def _column_of(field: str, name: str) -> str:
    return _name(f"{field.removesuffix(JSON)}{name}" if name else field)


def _json_columns(
    draft: Draft,
    grouped: GroupedSamples,
    field: str,
    values: list[Any],
    labels: tuple[str, ...],
    columns: dict[str, Column],
) -> dict[str, Column]:
    """Returns a column for each number in the jsons: int64, uint8 (true and false), or float64 (NaN if absent).

    The label may also be text. Samples without a usable label become unusable.
    """
    label = None
    if labels or not any(name in columns for name in _LABELS):
        label = _json_label(grouped, field, values, labels or _LABELS)
    usable = np.array([i not in grouped.unusable for i in range(len(values))])
    there = [value for i, value in enumerate(values) if usable[i]]
    found, unused = {}, []
    given = Counter(name for value in there for name in value)
    if mostly_empty(len(given) * len(there), given.total()):
        given = Counter({name: count for name, count in given.items() if 2 * count >= len(there)})
        unused.append("names that few samples have")
    for name in given:
        cells = [value.get(name) for value in there]
        kinds = set(map(type, cells))
        if name == label and kinds == {str}:
            texts = np.full(len(values), "", object)
            texts[usable] = cells
            found[_column_of(field, name)] = categories(Values("text", texts, ~usable))
            continue
        if kinds <= {bool}:
            dtype: type[np.generic] = np.uint8
        elif kinds <= {int}:
            dtype = np.int64
        elif float in kinds and kinds <= {int, float, type(None)}:
            dtype = np.float64
        else:
            unused.append(f"{name} ({', '.join(sorted(kind.__name__ for kind in kinds))})")
            continue
        made = np.zeros(len(values), dtype)
        try:
            made[usable] = [math.nan if cell is None else cell for cell in cells]
            found[_column_of(field, name)] = Column(made)
        except OverflowError:
            unused.append(f"{name} (numbers too large)")
    if unused:
        draft.notes.append(f"Not packed of {field!r}, as not numbers in every sample: {first_few(unused, 12)}.")
    return found


def _json_label(grouped: GroupedSamples, field: str, values: list[Any], known: Sequence[str]) -> str | None:
    """Returns the name in the json that is the label, None if none is; samples without a usable one become unusable."""
    there = {i: value for i, value in enumerate(values) if i not in grouped.unusable}
    names = {name for value in there.values() for name in value}
    kinds: dict[str, Counter[str]] = {}
    for name in usual_names(names, known, partial(_column_of, field)):
        kinds[name] = Counter(_label_kind(value.get(name)) for value in there.values() if name in value)
        if 2 * (kinds[name]["number"] + kinds[name]["text"]) < len(values):
            del kinds[name]
    if not kinds:
        return None
    # If there is a text `class` and a number `label`, the number is the label.
    label = next((name for name in kinds if kinds[name]["number"] >= kinds[name]["text"]), next(iter(kinds)))
    kind = max(("number", "text"), key=lambda kind: kinds[label][kind])
    for i, value in there.items():
        if label not in value or value[label] is None:
            grouped.unusable[i] = f"has no {label!r} in {field!r}"
        elif _label_kind(value[label]) != kind:
            grouped.unusable[i] = f"has in {field!r} the {label} {value[label]!r}"[:120]
    return label


def _label_kind(value: Any) -> str:
    if isinstance(value, str):
        return "text"
    return "number" if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)) else "none"


def _array_columns(draft: Draft, grouped: GroupedSamples, field: str, values: list[Any]) -> dict[str, Column]:
    there = {i: value for i, value in enumerate(values) if i not in grouped.unusable}
    kinds = {(value.shape, value.dtype.newbyteorder("=")) for value in there.values()}
    if len(kinds) != 1 or next(iter(kinds))[1].kind not in "biuf":
        said = first_few([f"{shape} {dtype}" for shape, dtype in sorted(kinds, key=str)], 3)
        draft.notes.append(f"The field {field!r} is not packed, since its arrays are not numbers of one shape: {said}.")
        return {}
    ((shape, dtype),) = kinds
    found = np.zeros((len(values), *shape), np.uint8 if dtype.kind == "b" else dtype)
    for i, value in there.items():
        found[i] = value
    plain = field.removesuffix(f".{ARRAY}")
    # Boxes and points keep their own name, by which transforms know them too.
    return {plain if plain in (*BOXES, *POINTS) else _name(field): Column(found)}


def _name(field: str) -> str:
    return free_name(field.replace(".", "_").replace("/", "_"))


def _with_labels(draft: Draft, columns: dict[str, Column], labels: tuple[str, ...]) -> dict[str, Column]:
    """Returns the columns with the labels renamed to `labels`, which come first."""
    if lacking := [name for name in labels if name not in columns]:
        raise OptionError(
            f"{draft.where}: there is no column {', '.join(lacking)} for --labels; there are "
            f"{first_few(sorted(columns), 20) or 'none'}."
        )
    usual = [name for name in usual_names(columns, _LABELS, str) if columns[name].values.dtype.kind == "i"]
    chosen = labels or usual[:1]
    if len(chosen) != 1:
        return columns
    label = columns.pop(chosen[0])
    if label.values.dtype.kind not in "iu" or label.values.ndim != 1:
        held = f"{label.values.dtype} {label.values.shape[1:] or 'numbers'}"
        raise OptionError(
            f"{draft.where}: the column {chosen[0]!r} holds {held}; labels are integers, one a sample. Name another "
            "with `--labels`."
        )
    return {"labels": replace(label, values=label.values.astype(np.int64)), **columns}


# These fields mark a shard only without folders: class folders may hold them too.
_MARKING_IF_FLAT = frozenset(("txt", JSON, ARRAY))
_SEARCHED = 2**16  # members searched for two of one sample that are not adjacent


def webdataset_evidence(tree: Tree) -> list[str]:
    """Returns two members of the (first) tar that are fields of one sample; nothing if there are none.

    They are adjacent among its first members; or anywhere, if one is an image: then listing the shard reports that its
    fields are not adjacent, while as a folder of images it would lose its labels.
    """
    names, prefix = _first_names(tree)
    marking = _marking_fields(names)
    parts = [(name, *split) for name in names if (split := split_name(name))]
    for (one, key, field), (other, next_key, next_field) in pairwise(parts):
        if key == next_key and not marking.isdisjoint((kind_of(field), kind_of(next_field))):
            return [key_of(prefix + one), key_of(prefix + other)]
    if not any(map(is_image, names)) and not marking.intersection(kind_of(field) for _, _, field in parts):
        return []
    names, prefix = _first_names(tree, _SEARCHED)
    marking = _marking_fields(names) | PICKLES
    images = {split[0]: name for name in names if is_image(name) and (split := split_name(name))}
    for name in names:
        split = split_name(name)
        if split and split[0] in images and kind_of(split[1]) in marking:
            return [key_of(prefix + images[split[0]]), key_of(prefix + name)]
    return []


def _marking_fields(names: list[str]) -> frozenset[str]:
    """Returns the fields that mark a WebDataset shard; more if all members lie in one folder."""
    flat = len({name.rpartition("/")[0] for name in names}) == 1
    return INTEGERS | _MARKING_IF_FLAT if flat else INTEGERS


def _first_names(tree: Tree, count: int = 64) -> tuple[list[str], str]:
    """Returns the first members, in order, of a tar or of the first tar in a folder without images; their prefix."""
    if tree.archive:
        return [tree.names[i] for i in tar_order(tree)[:count].tolist()], ""
    shards = [name for _, name in tree.not_images if name.lower().endswith(".tar")]
    if not shards or len(tree.images):
        return [], ""
    return first_names(tree.path / Path(shards[0]), count), f"{shards[0]}/"


def list_webdataset(draft: Draft, tree: Tree, options: SourceOptions) -> Samples:
    """Returns the samples of a shard, or of all shards in a folder, in their order.

    Columns: `labels` int64 (N,) from `cls` (or `class`, or `label` in the json); other integer fields by their names;
    every number of the json; arrays of the npy. Keys are the members that hold the images, below their shard.
    """
    grouped = group_samples(draft, tree)
    samples = grouped.samples
    if not samples:
        raise SourceError(f"{tree.path} holds no sample: no member is named like 00000.jpg. Is it the right folder?")
    said = [f"{field} ({count})" for field, count in grouped.counts.most_common()]
    draft.notes.append(f"{len(samples)} samples in shards ({len(grouped.shards)}), fields: {first_few(said, 12)}.")
    images = choose_images(draft, grouped, options.image_column)
    columns = collect_columns(draft, grouped, options)
    masks = None if options.masks == "none" else _masks(draft, grouped)
    draft.leave_out_all(
        [(key_of(samples[i].name), why) for i, why in sorted(grouped.unusable.items())],
        "samples that are not as the others",
        "Fix the shards",
        len(samples),
    )
    splits = _splits(draft, tree, grouped.shards, samples)
    keep = np.array([i for i in range(len(samples)) if i not in grouped.unusable], np.int64)
    present = np.unique(splits.index[keep])
    names = tuple(splits.names[i] for i in present.tolist())
    # The member whose size and time stand for the sample: its image, else any of its members.
    shown = np.where(images >= 0, images, [next(iter(sample.fields.values())) for sample in samples])
    named = [grouped.names[i] if i >= 0 else sample.name for i, sample in zip(images.tolist(), samples, strict=True)]
    return Samples(
        keys=list(map(key_of, named)),
        files=grouped.files.take(images) if (images >= 0).any() else None,
        sizes=grouped.sizes[shown],
        mtimes_ns=grouped.mtimes_ns[shown],
        splits=Splits(np.searchsorted(present, splits.index).astype(np.uint8), names),
        columns=columns,
        masks=masks,
        rows=keep[np.argsort(splits.index[keep], kind="stable")],
    )


def _masks(draft: Draft, grouped: GroupedSamples) -> Masks | None:
    """Returns the masks of all samples, in the field that most of them have; None if there are none."""
    found = Counter({field: count for field, count in grouped.counts.items() if is_mask(field)})
    if not found:
        return None
    (field, count), *others = found.most_common()
    draft.notes.append(f"Masks: {field} ({count} of {len(grouped.samples)} samples).")
    if others:
        draft.notes.append(f"Other masks are not packed: {first_few([name for name, _ in others])}.")
    at = np.array([sample.fields.get(field, -1) for sample in grouped.samples], np.int64)
    files, present = grouped.files.take(at), at >= 0
    return Masks(files, present, ignore_index=fill_value(draft, files, present))


def _splits(draft: Draft, tree: Tree, shards: list[str], samples: list[Sample]) -> Splits:
    """Returns the split of each sample, by names of shards and folders: train-000000.tar, val/000000.tar."""
    splits = [split_of_shard(shard or tree.path.name) for shard in shards]
    if all(splits):
        return Splits.of([splits[sample.shard] for sample in samples])
    if any(splits):
        draft.notes.append("Not every shard names its split: all are one split, `all`.")
    return Splits.one(len(samples))
