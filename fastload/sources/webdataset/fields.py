"""Makes columns of numbers of WebDataset's fields other than images. Pickles are refused, text is left out."""

from __future__ import annotations

import io
import json
import math
from collections import Counter
from dataclasses import replace
from tokenize import TokenError  # NumPy's reader of headers raises it
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import OptionError, SourceError
from fastload.format.column import Column
from fastload.sources.box_forms import BOXES, POINTS
from fastload.sources.listing import OnError, first_few, free_name
from fastload.sources.tree import Tree, key_of
from fastload.sources.webdataset.samples import Members, Sample, is_picture

INTEGERS = frozenset("cls cls2 class count index inx id".split())
PICKLES = frozenset("pyd pkl pickle pth pt".split())
JSON, ARRAY = "json", "npy"

_LABELS = ("cls", "class", "label")  # fields that are the labels, unless the user names others


def kind_of(field: str) -> str:
    """Returns the last suffix of a field, which says what it holds: `cls` of `top.cls`."""
    return field.rpartition(".")[2]


def collect_columns(
    tree: Tree,
    members: Members,
    samples: list[Sample],
    labels: tuple[str, ...],
    on_error: OnError,
    unusable: dict[int, str],
    notes: list[str],
) -> dict[str, Column]:
    """Returns the columns of all samples.

    Args:
        tree: what was given, for messages.
        members: members of all shards.
        samples: all samples.
        labels: the columns that are the labels; (): found by their usual names.
        on_error: "skip" leaves out fields that are pickles.
        unusable: index of a sample -> why it cannot be packed; added to.
        notes: notes are appended about fields that are not packed.

    Raises:
        SourceError: a field is a pickle (unless skipped).
        OptionError: there is no column named in `labels`.
    """
    counts = Counter(field for sample in samples for field in sample.fields)
    _refuse_pickles(tree, members, samples, counts, on_error, notes)
    columns: dict[str, Column] = {}
    unused: list[str] = []
    for field, count in sorted(counts.items()):
        kind = kind_of(field)
        if kind not in INTEGERS and kind not in (JSON, ARRAY):
            if not is_picture(field) and kind not in PICKLES:
                unused.append(f"{field} ({count})")
            continue
        if 2 * count < len(samples):
            unused.append(f"{field} (in {count} of {len(samples)} samples)")
            continue
        values: list[Any] = [None] * len(samples)
        for i, sample in enumerate(samples):
            if field not in sample.fields:
                unusable.setdefault(i, f"has no field {field!r}")
                continue
            try:
                values[i] = _PARSERS.get(kind, _integer)(members.files.read(sample.fields[field]))
            except (ValueError, RecursionError) as exc:
                unusable.setdefault(i, f"has in {field!r} {exc}")
        if kind == JSON:
            label = _json_label(field, values, labels, columns, len(samples), unusable)
            values = [None if i in unusable else value for i, value in enumerate(values)]
            found = _json_columns(field, values, unusable, notes, label)
            columns |= {f"{_name(field)}_{name}" if name in columns else name: found[name] for name in found}
        elif kind == ARRAY:
            columns |= _array_columns(field, values, unusable, notes)
        else:
            columns[_name(field)] = Column(np.array([value or 0 for value in values], np.int64))
    if unused:
        notes.append(f"Fields that are not packed: {first_few(unused, 12)}.")
    return _with_labels(tree, columns, labels)


def _refuse_pickles(
    tree: Tree, members: Members, samples: list[Sample], counts: Counter[str], on_error: OnError, notes: list[str]
) -> None:
    pickles = sorted(field for field in counts if kind_of(field) in PICKLES)
    if not pickles:
        return
    member = next(sample.fields[field] for sample in samples for field in pickles if field in sample.fields)
    said = f"{key_of(members.names[member])} is a pickle, which can run any program when it is read"
    if on_error == "fail":
        raise SourceError(
            f"{tree.path}: {said}. Write the field {', '.join(pickles)} as json or npy instead, or leave it out with "
            "`--on-error skip`."
        )
    notes.append(f"Fields that are pickles were left out ({first_few(pickles)}): {said}.")


def _integer(data: bytes) -> int:
    try:
        value = int(data.decode("ascii"))
    except ValueError:
        raise ValueError(f"{data[:40]!r}, not an integer as text") from None
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{value}, which does not fit 64 bits")
    return value


def _json(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise ValueError(f"no JSON that can be read ({exc})") from None
    return found if isinstance(found, dict) else {"": found}


def _array(data: bytes) -> NDArray[Any]:
    # Not np.load: it allocates what the header claims before it checks that the data is there.
    file = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
    except (ValueError, EOFError, SyntaxError, TypeError, KeyError, RecursionError, TokenError) as exc:
        raise ValueError(f"no array that can be read ({exc})") from None
    if dtype.hasobject:
        raise ValueError("an array of Python objects, which is a pickle and never read")
    if math.prod(shape) * dtype.itemsize != len(data) - file.tell():
        raise ValueError(f"an array {shape} of {dtype} in {len(data) - file.tell()} bytes")
    flat = np.frombuffer(data, dtype, offset=file.tell())
    return flat.reshape(shape, order="F" if fortran else "C")


_PARSERS: dict[str, Any] = {JSON: _json, ARRAY: _array}


def _column_of(field: str, name: str) -> str:
    return _name(f"{field.removesuffix(JSON)}{name}" if name else field)


def _json_label(
    field: str,
    values: list[Any],
    labels: tuple[str, ...],
    columns: dict[str, Column],
    count: int,
    unusable: dict[int, str],
) -> str:
    """Returns the name in the json that is the label, "" for none; samples without a usable one become unusable."""
    if not labels and any(name in columns for name in _LABELS):
        return ""
    there = {i: value for i, value in enumerate(values) if i not in unusable}
    names = {name for value in there.values() for name in value}
    wanted = [name for known in labels or _LABELS for name in names if _column_of(field, name) == known]
    kinds: dict[str, Counter[str]] = {}
    for name in wanted:
        kinds[name] = Counter(_label_kind(value.get(name)) for value in there.values() if name in value)
        if 2 * (kinds[name]["number"] + kinds[name]["text"]) < count:
            del kinds[name]
    if not kinds:
        return ""
    # If there is a text `class` and a number `label`, the number is the label.
    label = next((name for name in kinds if kinds[name]["number"] >= kinds[name]["text"]), next(iter(kinds)))
    kind = max(("number", "text"), key=lambda kind: kinds[label][kind])
    for i, value in there.items():
        if label not in value or value[label] is None:
            unusable[i] = f"has no {label!r} in {field!r}"
        elif _label_kind(value[label]) != kind:
            unusable[i] = f"has in {field!r} the {label} {value[label]!r}"[:120]
    return label


def _label_kind(value: Any) -> str:
    if isinstance(value, str):
        return "text"
    return "number" if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)) else "none"


def _text_label(values: list[Any], name: str, unusable: dict[int, str]) -> Column:
    """Returns the column of a label that is text: the index into its sorted different values, -1 if unusable."""
    texts = ["" if i in unusable else value[name] for i, value in enumerate(values)]
    classes = sorted({text for i, text in enumerate(texts) if i not in unusable})
    index = {text: at for at, text in enumerate(classes)}
    return Column(np.array([index.get(text, -1) for text in texts], np.int64), {"names": tuple(classes)})


def _json_columns(
    field: str, values: list[Any], unusable: dict[int, str], notes: list[str], label: str
) -> dict[str, Column]:
    """Returns a column for each number in the jsons: int64, uint8 (true and false), or float64 (NaN if absent).

    The label may also be text.
    """
    there = [value for i, value in enumerate(values) if i not in unusable]
    names = dict.fromkeys(name for value in there for name in value)
    columns, unused = {}, []
    for name in names:
        kinds = {type(value.get(name)) for value in there}
        if name == label and label and kinds == {str}:
            columns[_column_of(field, name)] = _text_label(values, name, unusable)
            continue
        if kinds <= {bool}:
            dtype: type[np.generic] = np.uint8
        elif kinds <= {int} and all(-(2**63) <= value[name] < 2**63 for value in there):
            dtype = np.int64
        elif float in kinds and kinds <= {int, float, type(None)}:
            dtype = np.float64
        else:
            unused.append(f"{name} ({', '.join(sorted(kind.__name__ for kind in kinds))})")
            continue
        of = [0 if value is None else value.get(name, math.nan) for value in values]
        try:
            found = np.array([math.nan if value is None else value for value in of], dtype)
        except (OverflowError, ValueError):
            unused.append(f"{name} (numbers too large)")
            continue
        columns[_column_of(field, name)] = Column(found)
    if unused:
        notes.append(f"Not packed of {field!r}, as not numbers in every sample: {first_few(unused, 12)}.")
    return columns


def _array_columns(field: str, values: list[Any], unusable: dict[int, str], notes: list[str]) -> dict[str, Column]:
    there = [value for i, value in enumerate(values) if i not in unusable]
    kinds = {(value.shape, value.dtype.newbyteorder("=")) for value in there}
    if len(kinds) != 1 or next(iter(kinds))[1].kind not in "biuf":
        said = first_few([f"{shape} {dtype}" for shape, dtype in sorted(kinds, key=str)], 3)
        notes.append(f"The field {field!r} is not packed, since its arrays are not numbers of one shape: {said}.")
        return {}
    ((shape, dtype),) = kinds
    found = np.zeros((len(values), *shape), np.uint8 if dtype.kind == "b" else dtype)
    for i, value in enumerate(values):
        if i not in unusable:
            found[i] = value
    plain = field.removesuffix(f".{ARRAY}")
    # Boxes and points keep their own name, by which transforms know them too.
    return {plain if plain in (*BOXES, *POINTS) else _name(field): Column(found)}


def _name(field: str) -> str:
    return free_name(field.replace(".", "_").replace("/", "_"))


def _with_labels(tree: Tree, columns: dict[str, Column], labels: tuple[str, ...]) -> dict[str, Column]:
    """Returns the columns with the labels renamed to `labels`.

    Raises:
        OptionError: a column named by the user does not exist, or holds no integers.
    """
    if lacking := [name for name in labels if name not in columns]:
        raise OptionError(
            f"{tree.path}: there is no column {', '.join(lacking)} for --labels; there are "
            f"{first_few(sorted(columns), 20) or 'none'}."
        )
    if labels:
        chosen = labels[0] if len(labels) == 1 else ""
    else:
        chosen = next((name for name in _LABELS if name in columns and columns[name].values.dtype.kind == "i"), "")
    if chosen and (columns[chosen].values.dtype.kind not in "iu" or columns[chosen].values.ndim != 1):
        values = columns[chosen].values
        raise OptionError(
            f"{tree.path}: the column {chosen!r} holds {values.dtype} {values.shape[1:] or 'numbers'}; labels are "
            "integers, one a sample. Name another with `--labels`."
        )
    rest = {name: column for name, column in columns.items() if name != chosen}
    return (
        {"labels": replace(columns[chosen], values=columns[chosen].values.astype(np.int64)), **rest} if chosen else rest
    )
