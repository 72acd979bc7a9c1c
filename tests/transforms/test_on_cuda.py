"""The transforms on a GPU give what they give on the CPU: the same pixels, the same bound for floats."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from batches import nothing_waits

from fastload.transforms import CenterCrop, Draws, Normalize, RandomCrop, RandomHorizontalFlip, apply_transforms

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FILL = RandomCrop((20, 18), padding=6, fill=(9, 8, 7))
MOVES = [RandomHorizontalFlip(), FILL, CenterCrop(15)] + [
    RandomCrop((20, 18), padding=6, padding_mode=mode) for mode in ("edge", "reflect", "symmetric")
]


def batch_of(dtype) -> dict[str, torch.Tensor]:
    generator = np.random.default_rng(0)
    images = generator.integers(0, np.iinfo(dtype).max, (32, 24, 22, 3), dtype)
    masks = generator.integers(0, 20, (32, 24, 22), np.uint8)
    return {"images": torch.from_numpy(images).permute(0, 3, 1, 2), "masks": torch.from_numpy(masks)}


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("move", MOVES, ids=repr)
def test_pixels_and_masks_move_alike_on_both(move, dtype):
    fields = batch_of(dtype)
    draws = Draws(5, 1, np.arange(32))
    here = apply_transforms([move], fields, draws, ignore_index=255)
    there = apply_transforms([move], {name: t.cuda() for name, t in fields.items()}, draws, ignore_index=255)
    for name in fields:
        assert there[name].is_cuda
        assert np.array_equal(there[name].cpu().numpy(), here[name].numpy())
    assert there["images"].permute(0, 2, 3, 1).is_contiguous()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("output", [torch.float32, torch.float16, torch.bfloat16])
def test_floats_agree_to_rounding(dtype, output):
    images = batch_of(dtype)["images"]
    normalize = Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225], dtype=output)
    here, there = normalize.apply(images), normalize.apply(images.cuda())
    assert there.dtype == output
    assert there.permute(0, 2, 3, 1).is_contiguous()
    assert torch.allclose(there.cpu().float(), here.float(), rtol=2 * torch.finfo(output).eps, atol=2e-6)


def test_nothing_waits_for_the_compute_stream():
    fields = {name: tensor.cuda() for name, tensor in batch_of(np.uint8).items()}
    transforms = [*MOVES[:2], Normalize([0.5] * 3, [0.5] * 3)]
    apply_transforms(transforms, fields, Draws(0, 0, np.arange(32)))
    with nothing_waits():
        apply_transforms(transforms, fields, Draws(0, 1, np.arange(32)))
