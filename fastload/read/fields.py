"""What a file's fields are, as readers and users see them: texts, the axes of images, the form of a sample."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from fastload.errors import FormatError
from fastload.format.header import PackedFile
from fastload.format.texts import count_name, is_text


def text_fields(file: PackedFile) -> list[str]:
    """Returns the fields of a file that hold texts."""
    return [name for name, field in file.fields.items() if is_text(field.dtype, field.shape)]


def with_counts(file: PackedFile, names: Iterable[str]) -> list[str]:
    """Returns fields, and behind them the datasets that say how many texts a row has of those that hold several."""
    texts = [
        name for name in names if name in file.fields and is_text(file.fields[name].dtype, file.fields[name].shape)
    ]
    counts = [count_name(name) for name in texts if file.fields[name].shape]
    fitting = [
        name for name in counts if (field := file.fields.get(name)) and field.dtype.kind in "iu" and not field.shape
    ]
    return list(dict.fromkeys([*names, *fitting]))


def image_axes(file: PackedFile) -> Literal["HWC", "CHW", "HW"]:
    """Returns the order of the axes of one image in the file, by its shape: other writers do not say.

    FormatError: neither the first nor the last axis can be channels.
    """
    shape = file.fields["images"].shape
    if len(shape) == 2:
        return "HW"
    if len(shape) == 3 and shape[2] in (1, 3, 4):
        return "HWC"
    if len(shape) == 3 and shape[0] in (1, 3, 4):
        return "CHW"
    raise FormatError(
        f"{file.name}: one image has the shape {shape}; expected (H, W, C), (C, H, W) or (H, W) with 1, 3 or 4 "
        f"channels. Pack the original files."
    )


def forms_of_samples(file: PackedFile | None, fields: Iterable[str]) -> list[str]:
    """Returns fields with type and shape of a sample, `images uint8 (3, H, W)`; without the file their names."""
    forms = []
    for name in fields:
        field = file.fields.get(name) if file is not None else None
        if file is None or field is None:  # "row" and its like are in no file
            forms.append(name)
            continue
        shape = ["HWC"[axis] if field.varied and not length else str(length) for axis, length in enumerate(field.shape)]
        if name == "images":
            axes = image_axes(file)
            shape = ["1", *shape] if axes == "HW" else [shape[2], *shape[:2]] if axes == "HWC" else shape
        if is_text(field.dtype, field.shape):
            forms.append(f"{name} list of str" if field.shape else f"{name} str")
            continue
        dtype = "int64" if name == "labels" and not shape and field.dtype.kind in "iu" else field.dtype.name
        forms.append(f"{name} {dtype}" + (f" ({', '.join(shape)})" if shape else ""))
    return forms
