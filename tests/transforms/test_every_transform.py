"""What holds for every transform of samples: alike in any batch and after pickling; kept batches stay as they were."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from fastload.transforms import (
    CenterCrop,
    ColorJitter,
    Cutout,
    Draws,
    Grayscale,
    Normalize,
    RandAugment,
    RandomCrop,
    RandomErasing,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
)

EVERY = [
    RandomHorizontalFlip(0.2),
    RandomVerticalFlip(0.4),
    RandomCrop((5, 4), padding=2, padding_mode="reflect"),
    RandomCrop((4, 3), padding=(1, 2)),
    CenterCrop(4),
    Resize((5, 6)),
    RandomResizedCrop(9),
    ColorJitter(0.4, 0.4, 0.4, 0.1),
    Grayscale(1),
    Grayscale(3),
    RandomGrayscale(0.5),
    RandomErasing(0.5, value="random"),
    RandomErasing(value=3),
    Cutout(2),
    RandAugment(3, 11, 21, (1, 2, 3)),
    Normalize(np.array([0.5, 0.4, 0.3]), torch.tensor([0.2, 0.25, 0.3]), torch.bfloat16),
]


def some_images(count: int) -> torch.Tensor:
    values = np.random.default_rng(0).integers(0, 256, (count, 12, 11, 3), np.uint8)
    return torch.from_numpy(values).permute(0, 3, 1, 2)


@pytest.mark.parametrize("transform", EVERY, ids=repr)
def test_a_sample_is_transformed_alike_in_any_batch_and_after_pickling(transform):
    images, rows = some_images(16), np.arange(16) * 11
    before = images.clone()
    whole = transform.apply(images, Draws(1, 0, rows))
    copy = pickle.loads(pickle.dumps(transform))
    assert repr(copy) == repr(transform)
    for keep in ([], [3], [15, 0, 7], [2, 2, 9, 1, 4]):
        assert torch.equal(copy.apply(images[keep], Draws(1, 0, rows[keep])), whole[keep])
    assert torch.equal(images, before)


@pytest.mark.parametrize("transform", EVERY, ids=repr)
def test_batches_that_are_kept_stay_what_they_were(transform):
    images, draws = some_images(6), [Draws(3, epoch, np.arange(6)) for epoch in range(9)]
    kept = [transform.apply(images, drawn) for drawn in draws]
    again = [transform.apply(images, drawn).clone() for drawn in draws]
    assert all(torch.equal(one, other) for one, other in zip(kept, again, strict=True))
