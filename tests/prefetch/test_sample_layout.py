"""What samples look like, and how they lie in a slot."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastload.prefetch.ring import slot_arrays, slot_bytes
from fastload.prefetch.sample_layout import as_array, describe, fields_of, layout_of, unwritten, write


def image(height=4, width=5, channels=3):
    return torch.arange(channels * height * width, dtype=torch.uint8).reshape(channels, height, width)


@pytest.mark.parametrize(
    ("sample", "names", "expected"),
    [
        ((image(), 3), ("images", "labels"), ("images", "labels")),
        ((image()[0], 3), ("images", "labels"), ("0", "labels")),  # no image any more
        ((image(), 3, 4), ("images", "labels"), ("images", "labels", "2")),  # not the dataset's own fields
        ((image(), 3), None, ("images", "labels")),
        ((image(), 0.5), None, ("images", "1")),  # no class number
        ([3, image()], None, ("0", "1")),
        ((image(), image()[0]), None, ("images", "masks")),
        (image(), None, ("images",)),
        (7, None, ("0",)),
        ({"label": 1, "image": image()}, None, ("labels", "images")),
        ({"image": 1, "images": image(), "m": image()[0]}, None, ("0:image", "images", "masks")),
        ({}, None, ()),
    ],
)
def test_fields_have_names_that_transforms_know(sample, names, expected):
    layout = layout_of(sample, names)
    assert layout.form.names == expected
    assert len(fields_of(sample, layout.form)) == len(expected)


def test_samples_of_another_structure_have_no_fields():
    form = layout_of((1, 2), None).form
    assert [fields_of(other, form) for other in ((1, 2, 3), {"a": 1, "b": 2}, 1)] == [None] * 3
    form = layout_of({"a": 1, "b": 2}, None).form
    assert fields_of({"b": 2, "a": 1}, form) == [1, 2]
    assert fields_of({"a": 1}, form) is None and fields_of((1, 2), form) is None


@pytest.mark.parametrize(
    "value", [image(), image().permute(1, 2, 0), torch.tensor(3), torch.zeros(2, requires_grad=True), np.float32(2),
              np.arange(6.0).reshape(2, 3)[:, ::2], 3, 2.5, True, torch.zeros(3, dtype=torch.complex64)]
)  # fmt: skip
def test_numbers_tensors_and_arrays_become_what_torch_would_collate(value):
    found = torch.as_tensor(as_array(value).copy())
    collated = torch.utils.data.default_collate([value.detach() if isinstance(value, torch.Tensor) else value])[0]
    assert torch.equal(found, collated) and found.dtype == collated.dtype


@pytest.mark.parametrize(
    "value", ["text", None, b"bytes", [1, 2], {"a": 1}, torch.zeros(2, dtype=torch.bfloat16), 10**30, np.array("text"),
              np.array([None]), torch.zeros(2, 2).to_sparse()]
)  # fmt: skip
def test_what_numpy_and_torch_do_not_share_has_no_place(value):
    assert as_array(value) is None


def test_a_sample_comes_back_out_of_the_slot_as_it_went_in():
    samples = [(image().permute(1, 2, 0).contiguous().permute(2, 0, 1), i, f"{i}", float(i)) for i in range(4)]
    layout = layout_of(samples[0], None)
    assert [leaf and leaf.channels_last for leaf in layout.leaves] == [True, False, None, False]
    fields = layout.slot_fields(4)
    memory = np.zeros(slot_bytes(fields), np.uint8)
    arrays = layout.in_axes_of_sample(slot_arrays(fields, memory))
    places = [arrays.get(name) for name in layout.form.names]
    for place, sample in enumerate(samples):
        new = unwritten(places, place, sample, layout.form)
        assert new[2] == f"{place}" and write(places, place, new) and new == [None, None, f"{place}", None]
    assert torch.equal(torch.from_numpy(arrays["images"]), torch.stack([sample[0] for sample in samples]))
    assert arrays["images"].transpose(0, 2, 3, 1).flags.c_contiguous
    assert arrays["labels"].tolist() == [0, 1, 2, 3] and arrays["3"].dtype == np.float64
    # What lies in its place is not copied; a view of it in another order is.
    lying = ["1" if array is None else array[1, ...] for array in places]
    assert unwritten(places, 1, lying, layout.form) == [None, None, "1", None]
    turned = lying[0][:, ::-1]
    assert np.array_equal(unwritten(places, 1, [turned, *lying[1:]], layout.form)[0], turned)


@pytest.mark.parametrize("value", [image(4, 6), image().float(), "text", image().permute(1, 0, 2)])
def test_a_sample_that_does_not_fit_is_noticed(value):
    layout = layout_of((image(),), None)
    fields = layout.slot_fields(2)
    places = list(slot_arrays(fields, np.zeros(slot_bytes(fields), np.uint8)).values())
    assert unwritten(places, 1, (value,), layout.form) is None


def test_layouts_fit_whatever_their_order_in_memory():
    as_file = layout_of((image().permute(1, 2, 0).contiguous().permute(2, 0, 1),), None)
    assert as_file.leaves[0].channels_last and as_file.fits(layout_of((image(),), None))
    assert not as_file.fits(layout_of((image(4, 6),), None))
    assert not as_file.fits(layout_of({"image": image()}, None))


def test_descriptions_show_what_differs():
    assert describe((image(), 3, "x")) == "(uint8 (3, 4, 5), int64 (), str)"
    assert describe({"a": 1.5, "b": None}) == "{'a': float64 (), 'b': NoneType}"
    assert describe(torch.zeros(2)) == "float32 (2,)"
