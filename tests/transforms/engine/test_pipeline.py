from __future__ import annotations

import numpy as np
import pytest
import torch

from fastload.errors import OptionError
from fastload.transforms import (
    CenterCrop,
    Draws,
    ImageSpec,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    apply_transforms,
    check_pipeline,
)

SHAPE = (3, 12, 10)
FLIP, CROP, NORMALIZE = RandomHorizontalFlip(), RandomCrop((6, 5), padding=3), Normalize([0.5] * 3, [0.5] * 3)


class Shift:
    """A user's own transform that moves pixels and knows nothing of masks."""

    geometric = True

    def apply(self, images, draws):
        return images.roll(1, 3)


class AddNoise:
    """A user's own transform, with random numbers."""

    geometric = False

    def apply(self, images, draws):
        return images + torch.from_numpy(draws.integers(0, 5))[:, None, None, None].to(images.dtype)


def patterned(batch: int) -> dict[str, torch.Tensor]:
    """Images and masks that carry the same pattern, so that a pixel tells where it came from."""
    values = torch.arange(batch * 120, dtype=torch.int64).view(batch, 12, 10) % 251
    images = values.to(torch.uint8)[..., None].expand(batch, 12, 10, 3).contiguous().permute(0, 3, 1, 2)
    return {"images": images, "labels": torch.arange(batch), "masks": values.to(torch.uint8)}


def test_masks_follow_the_images_through_the_pipeline():
    fields = patterned(50)
    before = {name: tensor.clone() for name, tensor in fields.items()}
    crop = RandomCrop((6, 5), padding=3, fill=251)
    result = apply_transforms([FLIP, crop, CenterCrop(4)], fields, Draws(1, 0, np.arange(50)), ignore_index=251)
    assert torch.equal(result["images"][:, 0], result["masks"])
    assert (result["masks"] == 251).any()
    assert result["labels"] is fields["labels"]
    assert all(torch.equal(fields[name], before[name]) for name in fields)


def test_transforms_of_one_kind_draw_independently():
    fields = {"images": torch.arange(10, dtype=torch.uint8).expand(200, 1, 1, 10).contiguous()}
    rows = np.arange(200)
    once = apply_transforms([FLIP], fields, Draws(0, 0, rows))["images"]
    twice = apply_transforms([FLIP, RandomHorizontalFlip()], fields, Draws(0, 0, rows))["images"]
    assert not torch.equal(twice, fields["images"])  # had both the same draws, the second would undo the first
    assert not torch.equal(twice, once)


def test_leaving_out_the_last_transform_changes_nothing_for_the_others():
    draws = Draws(0, 3, np.arange(8))
    cropped = apply_transforms([FLIP, CROP], patterned(8), draws)["images"]
    normalized = apply_transforms([FLIP, CROP, NORMALIZE], patterned(8), draws)["images"]
    assert torch.equal(NORMALIZE.apply(cropped), normalized)


def test_functions_are_called_with_the_image_batch_and_own_transforms_with_draws():
    fields = patterned(4)
    draws = Draws(0, 0, np.arange(4))
    result = apply_transforms([lambda images: 255 - images, AddNoise(), torch.nn.Identity()], fields, draws)
    added = torch.from_numpy(draws.stream(1).integers(0, 5)).to(torch.uint8)[:, None, None, None]
    assert torch.equal(result["images"], 255 - fields["images"] + added)
    assert torch.equal(result["masks"], fields["masks"])


def test_no_transforms_give_the_fields_as_they_are():
    fields = patterned(2)
    assert apply_transforms((), fields, Draws(0, 0, np.arange(2)))["images"] is fields["images"]


def test_check_gives_the_spec_of_the_output():
    fields = ["images", "labels", "masks"]
    spec = check_pipeline([FLIP, CROP, CenterCrop(4), NORMALIZE], SHAPE, torch.uint8, fields)
    assert spec == ImageSpec(3, 4, 4, torch.float32)
    assert check_pipeline((), SHAPE, torch.uint16, fields) == ImageSpec(*SHAPE, torch.uint16)
    assert check_pipeline([FLIP, lambda images: images, CROP], SHAPE, torch.uint8, ["images"]) is None
    assert check_pipeline([CROP, AddNoise(), NORMALIZE], SHAPE, torch.uint8, ["images", "bbox"][:1]) is None
    assert check_pipeline([NORMALIZE, torch.nn.Identity()], SHAPE, torch.uint8, ["images", "bbox"]) is None


@pytest.mark.parametrize(
    ("transforms", "fields", "message"),
    [
        ([NORMALIZE, FLIP], ["images"], "RandomHorizontalFlip stands after Normalize"),
        ([NORMALIZE, NORMALIZE], ["images"], "Normalize stands after Normalize"),
        (
            [FLIP],
            ["images", "landmarks"],
            "coordinates in landmarks cannot follow: nothing says what its .* Leave landmarks out",
        ),
        ([CROP], ["images", "bbox", "landmarks"], "coordinates in bbox cannot follow"),
        ([Shift()], ["images", "masks"], "Shift moves pixels, and has no apply_masks"),
        ([CenterCrop(11)], ["images"], "images of 12x10"),
        ([CenterCrop(8), RandomCrop(9)], ["images"], "images of 8x8"),
        ([Normalize([0.5], [0.5])], ["images"], "1 values, the images 3 channels"),
        ([RandomHorizontalFlip], ["images"], "with its parentheses"),
        (["flip"], ["images"], "'flip' is not a transform"),
        (FLIP, ["images"], r"a list of transforms.*got RandomHorizontalFlip.*transform=\[...\]"),
    ],
)
def test_pipelines_that_cannot_work_are_refused(transforms, fields, message):
    with pytest.raises(OptionError, match=message):
        check_pipeline(transforms, SHAPE, torch.uint8, fields)


def test_floats_before_normalize_are_refused_where_they_are_seen():
    assert check_pipeline([lambda images: images.float(), NORMALIZE], SHAPE, torch.uint8, ["images"]) is None
    with pytest.raises(OptionError, match="divides uint8"):
        apply_transforms([lambda images: images.float(), NORMALIZE], patterned(2), Draws(0, 0, np.arange(2)))


def test_draws_of_another_batch_are_refused():
    images = torch.zeros(8, 3, 12, 10, dtype=torch.uint8)
    with pytest.raises(OptionError, match="draws are for 4 samples, and the batch has 8"):
        apply_transforms([FLIP], {"images": images}, Draws(0, 0, np.arange(4)))
    with pytest.raises(OptionError, match="a dict of fields"):
        apply_transforms([FLIP], images, Draws(0, 0, np.arange(8)))


def test_transforms_that_are_done_are_left_out_and_the_others_draw_alike():
    fields, draws = patterned(40), Draws(1, 0, np.arange(40))
    transforms = [CenterCrop(8), FLIP, AddNoise(), RandomCrop(4), NORMALIZE]
    whole = apply_transforms(transforms, fields, draws)
    for done in range(6):
        begun = apply_transforms(transforms[:done], fields, draws)
        rest = apply_transforms(transforms, begun, draws, done=done)
        assert torch.equal(rest["images"], whole["images"]) and torch.equal(rest["masks"], whole["masks"])


def test_transforms_that_are_done_are_checked_for_fields_but_not_for_the_images_they_had():
    crop = CenterCrop(20)
    assert check_pipeline([crop, FLIP], (3, 20, 20), torch.uint8, ["images"], done=1) == ImageSpec(
        3, 20, 20, torch.uint8
    )
    assert check_pipeline([RandomCrop(20, 4), FLIP], (3, 20, 20), torch.uint8, ["images"], done=1) is not None
    with pytest.raises(OptionError, match="RandomCrop moves pixels, and the coordinates in boxes cannot follow"):
        check_pipeline([RandomCrop(20)], (3, 20, 20), torch.uint8, ["images", "boxes"], done=1)
