"""What holds for every transform of samples: alike in any batch, memory and after pickling; kept batches stay."""

from __future__ import annotations

import pickle
import sys

import numpy as np
import pytest
import torch
from batches import EVERY, LAYOUTS, applied, in_channels_last_memory, some_images
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fastload.errors import OptionError
from fastload.transforms import (
    CutMix,
    Cutout,
    Draws,
    Grayscale,
    ImageSpec,
    MixUp,
    Normalize,
    RandAugment,
    RandomErasing,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomVerticalFlip,
    colour,
)
from fastload.transforms.engine.buffers import sent


@pytest.mark.parametrize("transform", EVERY, ids=repr)
@given(
    batch=st.integers(1, 9),
    height=st.integers(5, 12),
    width=st.integers(5, 12),
    dtype=st.sampled_from([np.uint8, np.uint16]),
    epoch=st.integers(0, 99),
    block_values=st.sampled_from([1, 500, 1 << 18]),
    layout=st.sampled_from(LAYOUTS),
)
def test_a_sample_is_transformed_alike_in_any_batch_and_memory(
    transform, batch, height, width, dtype, epoch, block_values, layout
):
    dtype = np.uint8 if isinstance(transform, RandAugment) else dtype
    plain, images = (some_images(batch, height, width, dtype, layout=order) for order in ("nhwc", layout))
    rows = np.arange(batch) * 7 + 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(colour, "BLOCK_VALUES", block_values)
        together = applied(transform, images, Draws(3, epoch, rows))
    assert np.array_equal(images.numpy(), plain.numpy())
    assert in_channels_last_memory(together[0]) and together[0].data_ptr() != images.data_ptr()
    assert ImageSpec.of(together[0]) == transform.output(ImageSpec.of(images))
    for some in [[i] for i in range(batch)] + [[batch - 1, 0, 0]]:
        for one, whole in zip(applied(transform, plain[some], Draws(3, epoch, rows[some])), together, strict=True):
            assert np.array_equal(one.float().numpy(), whole[some].float().numpy())


@pytest.mark.parametrize("transform", EVERY, ids=repr)
def test_batches_that_are_kept_stay_what_they_were_and_a_pickle_makes_the_same(transform):
    images, draws = some_images(6), [Draws(3, epoch, np.arange(6)) for epoch in range(9)]
    kept = [transform.apply(images, drawn) for drawn in draws]
    copy = pickle.loads(pickle.dumps(transform))
    assert repr(copy) == repr(transform)
    again = [copy.apply(images, drawn).clone() for drawn in draws]
    assert all(torch.equal(one, other) for one, other in zip(kept, again, strict=True))


@pytest.mark.parametrize("transform", EVERY, ids=repr)
def test_no_samples_give_no_samples(transform):
    expected = transform.output(ImageSpec.of(some_images(0)))
    assert all(len(made) == 0 for made in applied(transform, some_images(0), Draws(0, 0, np.zeros(0, np.int64))))
    assert transform.apply(some_images(0), Draws(0, 0, np.zeros(0, np.int64))).shape == (0, *expected[:3])


def test_each_is_shown_as_the_call_that_makes_it():
    shown = {type(transform).__name__: repr(transform) for transform in EVERY}
    assert shown["RandomVerticalFlip"] == "RandomVerticalFlip(p=0.4)"
    assert repr(RandomHorizontalFlip()) == "RandomHorizontalFlip(p=0.5)"
    assert shown["RandomCrop"] == (
        "RandomCrop(size=(4, 3), padding=(1, 2, 1, 2), pad_if_needed=False, fill=(0.0,), padding_mode='constant')"
    )
    assert shown["Resize"] == "Resize(size=(5, 6), max_size=None)"
    assert repr(RandomErasing(1, value="random")) == (
        "RandomErasing(p=1.0, scale=(0.02, 0.33), ratio=(0.3, 3.3), value='random')"
    )
    assert repr(Normalize([0.5], [1])) == "Normalize(mean=(0.5,), std=(1.0,), dtype=torch.float32)"


@pytest.mark.parametrize("p", [-0.1, 1.5, float("nan"), "half", None, True])
@pytest.mark.parametrize(
    "make", [RandomHorizontalFlip, RandomVerticalFlip, RandomGrayscale, RandomErasing, lambda p: Cutout(4, p)]
)
def test_probabilities_are_checked(make, p):
    with pytest.raises(OptionError, match=rf"p={p!r}\): p is a probability, so give a number from 0 to 1"):
        make(p)


@pytest.mark.parametrize("transform", [EVERY[0], EVERY[2], EVERY[4], EVERY[6], EVERY[-1]], ids=repr)
def test_one_image_is_no_batch(transform):
    with pytest.raises(OptionError, match=r"shape \(B, C, H, W\)"):
        transform.apply(some_images(1)[0], Draws(0, 0, np.arange(1)))


class Sends(TorchDispatchMode):
    """Notes each operation that copies from the host to a device without data, and whether `sent` asked for it."""

    def __init__(self):
        super().__init__()
        self.by_sent = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [one for one in (result, *args) if isinstance(one, torch.Tensor)]
        if isinstance(result, torch.Tensor) and result.is_meta and any(not one.is_meta for one in tensors):
            frame, codes = sys._getframe(), []
            while frame is not None:
                codes.append(frame.f_code)
                frame = frame.f_back
            self.by_sent.append(sent.__code__ in codes)
        return result


@pytest.mark.parametrize("transform", [*EVERY, MixUp(num_classes=3), CutMix(num_classes=3)], ids=repr)
def test_whatever_is_sent_to_a_device_goes_the_pinned_way(transform):
    images, draws = some_images(6).to("meta"), Draws(3, 0, np.arange(6))
    with Sends() as sends:
        if hasattr(transform, "apply_batch"):
            fields = {"images": images, "labels": torch.empty(6, dtype=torch.int64, device="meta")}
            transform.apply_batch(fields, Draws(3, 0, np.arange(1)))
        else:
            applied(transform, images, draws)
    assert all(sends.by_sent)
    drawn = transform not in EVERY or isinstance(transform, Grayscale)
    assert drawn or sends.by_sent, "what is drawn on the host has to be sent"
