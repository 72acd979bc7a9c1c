"""Makes columns of WebDataset's fields other than images: numbers, and texts as captions. Pickles are refused."""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import OptionError, SourceError
from fastload.format.ragged import Column
from fastload.sources.arrays.raw_rows import npy_header
from fastload.sources.assemble import Draft
from fastload.sources.box_forms import BOXES, POINTS
from fastload.sources.captions import caption_column, caption_columns, maybe_captions, texts_in
from fastload.sources.listing import SourceOptions, first_few, free_name
from fastload.sources.tables.frame import categories, usual_names
from fastload.sources.tables.read_table import Values, mostly_empty
from fastload.sources.tree import key_of
from fastload.sources.webdataset.samples import GroupedSamples, is_picture
from fastload.system.machine import available_memory
from fastload.system.text import read_json

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
