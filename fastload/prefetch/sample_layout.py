"""The layout of a dataset's samples in a slot, and the writing of samples to it by the worker that made them.

A sample is a tuple (or list) of fields, a dict of them, or a single one. A field that is a tensor, an array or a number
has an array in the slot, as long as it has the same shape and dtype in every sample. Anything else, text or a nested
structure, is an extra field: collated as torch does, and sent through torch's queue.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.errors import OptionError
from fastload.prefetch.ring import SampleForm, SlotField
from fastload.transforms import ImageSpec, check_pipeline

_IMAGE_KEYS = ("images", "image")
_LABEL_KEYS = ("labels", "label", "target")


class Leaf(NamedTuple):
    """One field of a sample that has an array in the slot."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    channels_last: bool  # whether it is (C, H, W) over memory in the order (H, W, C), as it is in the slot then


class SampleLayout(NamedTuple):
    """The fields that a slot holds of each sample."""

    form: SampleForm  # names of the fields, and the keys of a dict
    leaves: tuple[Leaf | None, ...]  # one for each field; None for an extra field
    more: tuple[SlotField, ...] = ()  # further fields of a slot, which the training process writes

    @property
    def images(self) -> ImageSpec | None:
        """The spec of the samples' images; None: they have none."""
        leaf = dict(zip(self.form.names, self.leaves, strict=True)).get("images")
        if leaf is None:
            return None
        channels, height, width = leaf.shape
        return ImageSpec(channels, height, width, torch.from_numpy(np.empty(0, leaf.dtype)).dtype)

    def fits(self, other: SampleLayout) -> bool:
        """Whether samples of this layout fit a slot of the other, whatever their order in memory."""
        return self.form == other.form and [leaf and leaf[:2] for leaf in self.leaves] == [
            leaf and leaf[:2] for leaf in other.leaves
        ]

    def slot_fields(self, batch_size: int) -> list[SlotField]:
        """Returns the fields of a slot for so many samples."""
        fields = []
        for name, leaf in zip(self.form.names, self.leaves, strict=True):
            if leaf is not None:
                shape = (*leaf.shape[1:], leaf.shape[0]) if leaf.channels_last else leaf.shape
                fields.append(SlotField(name, (batch_size, *shape), leaf.dtype))
        return [*fields, *self.more]

    def in_axes_of_sample(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Returns the slot's arrays as views with the axes that samples have: images (B, C, H, W)."""
        leaves = dict(zip(self.form.names, self.leaves, strict=True))
        return {
            name: array.transpose(0, 3, 1, 2) if (leaf := leaves.get(name)) and leaf.channels_last else array
            for name, array in arrays.items()
        }


def layout_of(sample: Any, names: Sequence[str] | None) -> SampleLayout:
    """Returns the layout of a sample; `names` are the dataset's own field names, for tuples of as many values."""
    if sample is None:
        raise TypeError("the sample is None")
    form = _form(sample, names)
    leaves: list[Leaf | None] = []
    for value in fields_of(sample, form) or ():
        array, leaf = as_array(value), None
        if array is not None:
            turned = array.ndim == 3 and not array.flags.c_contiguous and array.transpose(1, 2, 0).flags.c_contiguous
            leaf = Leaf(array.shape, array.dtype.newbyteorder("="), turned)
        leaves.append(leaf)
    return SampleLayout(form, tuple(leaves))


def fields_of(sample: Any, form: SampleForm) -> list[Any] | None:
    """Returns a sample's fields in the form's order; None when it has others."""
    if form.keys is not None:
        same = isinstance(sample, Mapping) and sample.keys() == set(form.keys)
        return [sample[key] for key in form.keys] if same else None
    if isinstance(sample, (tuple, list)):
        return list(sample) if len(sample) == len(form.names) else None
    return [sample] if len(form.names) == 1 and not isinstance(sample, Mapping) else None


def as_array(value: Any) -> NDArray[Any] | None:
    """Returns the value as an array over its memory, of a dtype that torch and NumPy both have; None: it is not one."""
    if isinstance(value, torch.Tensor):
        plain = value.layout is torch.strided and value.device.type == "cpu" and not value.is_conj()
        if not plain or value.dtype in (torch.bfloat16,) or value.is_quantized:
            return None
        return value.detach().numpy()
    if isinstance(value, (bool, int, float, np.generic, np.ndarray)):
        try:
            array = np.asarray(value)
        except OverflowError:
            return None
        return array if array.dtype.kind in "biufc" and array.dtype.itemsize <= 16 else None
    return None


def unwritten(arrays: Sequence[NDArray[Any] | None], index: int, sample: Any, form: SampleForm) -> list[Any] | None:
    """Returns a sample's fields, None for those that lie in its slot already; None when the sample does not fit.

    The slot's arrays are (B, ...) with the axes of a sample, None for extra fields; the sample has this index in the
    batch, and may lie in the slot, or be a view of a part of it.
    """
    if sample is None:
        raise TypeError("the sample is None")
    values = fields_of(sample, form)
    if values is None:
        return None
    new: list[Any] = []
    for array, value in zip(arrays, values, strict=True):
        if array is None:
            if value is None:
                raise TypeError("a field of the sample is None")
            new.append(value)
            continue
        found = as_array(value)
        if found is None or found.shape != array.shape[1:] or found.dtype.newbyteorder("=") != array.dtype:
            return None
        if not np.may_share_memory(found, array):
            new.append(found)
            continue
        here = array[index, ...]
        same = found.__array_interface__["data"] == here.__array_interface__["data"] and found.strides == here.strides
        new.append(None if same else found.copy())
    return new


def write(arrays: Sequence[NDArray[Any] | None], index: int, new: list[Any]) -> bool:
    """Moves fields of `unwritten` to their arrays in the slot; returns whether there was one."""
    written = False
    for field, array in enumerate(arrays):
        if array is not None and new[field] is not None:
            array[index], new[field] = new[field], None
            written = True
    return written


def describe(sample: Any) -> str:
    """Returns a sample's structure in a few words, for messages: `(uint8 (3, 32, 24), int64 ())`."""
    if isinstance(sample, Mapping):
        return "{" + ", ".join(f"{key!r}: {_described(value)}" for key, value in sample.items()) + "}"
    if isinstance(sample, (tuple, list)):
        return "(" + ", ".join(_described(value) for value in sample) + ")"
    return _described(sample)


def warn_of_change(layout: SampleLayout, found: str) -> None:
    """Warns that samples do not fit the slots, which have a layout; `found`: their structure in words."""
    expected = ", ".join(f"{leaf.dtype} {leaf.shape}" if leaf else "other" for leaf in layout.leaves)
    warnings.warn(
        f"the samples' shapes or dtypes change from batch to batch: ({expected}) at first, now {found}. Such batches "
        f"go through torch's own shared memory, as in a plain DataLoader: collated, copied and mapped anew each time "
        f"(0.4 times the images/s for images of 116 kB). One shape for all samples avoids it.",
        stacklevel=3,
    )


def _described(value: Any) -> str:
    array = as_array(value)
    return type(value).__name__ if array is None else f"{array.dtype} {array.shape}"


def _form(sample: Any, names: Sequence[str] | None) -> SampleForm:
    """Returns names for a sample's fields: the dataset's own, or guessed from keys, order and shapes."""
    keys = tuple(sample) if isinstance(sample, Mapping) else None
    values = [sample]
    if isinstance(sample, (Mapping, tuple, list)):
        values = list(sample.values() if isinstance(sample, Mapping) else sample)
    arrays = [as_array(value) for value in values]
    shapes = [None if array is None else array.shape for array in arrays]
    images = [i for i, shape in enumerate(shapes) if shape is not None and len(shape) == 3]
    if keys is None and names is not None and len(names) == len(values):
        # Only what has three axes keeps the name of images.
        own = ["0" if name == "images" and i not in images else name for i, name in enumerate(names)]
        return SampleForm(tuple(own), None)
    # Transforms look for "images", and move "masks" along.
    found = [str(i) if keys is None else f"{i}:{keys[i]}" for i in range(len(values))]
    image = next((i for i in images if (i == 0 if keys is None else keys[i] in _IMAGE_KEYS)), None)
    if image is not None:
        found[image] = "images"
        size = (shapes[image] or ())[1:]
        if size in shapes:
            found[shapes.index(size)] = "masks"
        # MixUp and CutMix look for "labels".
        for i, array in enumerate(arrays):
            named = i == 1 if keys is None else keys[i] in _LABEL_KEYS
            if named and array is not None and array.ndim == 0 and array.dtype.kind in "iu":
                found[i] = "labels"
                break
    return SampleForm(tuple(found), keys)


def check_samples(transforms: Sequence[Any], name: str, layout: SampleLayout) -> None:
    """Raises OptionError if transforms do not fit the samples."""
    spec = layout.images
    if spec is None:
        raise OptionError(
            f"transform: {name}: the samples have no image, a tensor (C, H, W) that comes first in a tuple or is "
            f"called 'image' or 'images' in a dict. Leave transform out, or transform in the loop."
        )
    shape = spec[:3]
    if spec.channels not in (1, 3, 4) and spec.width in (1, 3, 4):
        raise OptionError(
            f"transform: {name}: the samples' image is {shape}, as (height, width, channels), and transforms take "
            f"(C, H, W). Give torch.from_numpy(image).permute(2, 0, 1) as the sample's image."
        )
    check_pipeline(transforms, shape, spec.dtype, layout.form.names)
