"""Lists of transforms applied to batches, and to images of different sizes by the numbers that one size has."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from batches import some_images
from hypothesis import given
from hypothesis import strategies as st
from resize_cases import in_one_memory

from fastload.errors import OptionError
from fastload.transforms import (
    CenterCrop,
    ColorJitter,
    Draws,
    ImageSpec,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
    apply_transforms,
    check_pipeline,
)
from fastload.transforms.boxes_and_points import Coordinates
from fastload.transforms.engine.decode_time_resize import DecodeTimeResize, find_decode_time_resize
from fastload.transforms.engine.pipeline import FusedPass, Pipeline, passes_of
from fastload.transforms.engine.place import place_varied_coordinates, place_varied_masks
from fastload.transforms.engine.resample import place_samples

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


def test_functions_are_called_with_the_image_batch_and_own_transforms_with_draws():
    fields = patterned(4)
    draws = Draws(0, 0, np.arange(4))
    result = apply_transforms([lambda images: 255 - images, AddNoise(), torch.nn.Identity()], fields, draws)
    added = torch.from_numpy(draws.stream(1).integers(0, 5)).to(torch.uint8)[:, None, None, None]
    assert torch.equal(result["images"], 255 - fields["images"] + added)
    assert torch.equal(result["masks"], fields["masks"])
    assert apply_transforms((), fields, draws)["images"] is fields["images"], "nothing is done, nothing copied"


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


def test_floats_before_normalize_and_draws_of_another_batch_are_refused_where_they_are_seen():
    floats = [lambda images: images.float(), NORMALIZE]
    assert check_pipeline(floats, SHAPE, torch.uint8, ["images"]) is None
    with pytest.raises(OptionError, match="divides uint8"):
        apply_transforms(floats, patterned(2), Draws(0, 0, np.arange(2)))
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


shapes = st.lists(st.tuples(st.integers(12, 90), st.integers(12, 90)), min_size=1, max_size=6).map(np.array)
flips = st.lists(st.sampled_from([RandomHorizontalFlip(), RandomVerticalFlip(0.4)]), max_size=2)
resizes = st.sampled_from([Resize(12), Resize(40), Resize(16, max_size=70)]).map(lambda resize: [resize])
crops = [CenterCrop((7, 5)), RandomCrop((6, 8)), RandomCrop(4, 0, True), CenterCrop(1)]
makers = st.one_of(
    st.sampled_from([RandomResizedCrop((10, 14)), RandomResizedCrop(9, (0.3, 0.9), (0.9, 1.1))]).map(lambda one: [one]),
    st.sampled_from([Resize((7, 31)), CenterCrop((12, 9)), RandomCrop(11)]).map(lambda one: [one]),
    st.tuples(resizes, flips, st.sampled_from(crops)).map(lambda parts: [*parts[0], *parts[1], parts[2]]),
)


@st.composite
def lists(draw):
    return [*draw(flips), *draw(makers), *draw(flips)]


def making_of(transforms, dtype=torch.uint8) -> DecodeTimeResize:
    return find_decode_time_resize(transforms, 3, dtype, name="a.h5")


def images_of(shapes) -> list[torch.Tensor]:
    return [some_images(1, *shape, seed=number)[0] for number, shape in enumerate(shapes)]


def placed(images, placement) -> torch.Tensor:
    output = torch.empty((len(images), *placement.size, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    flat, sources = in_one_memory([image.permute(1, 2, 0).numpy() for image in images])
    place_samples(flat, sources, placement, output)
    return output


@given(shapes=shapes, transforms=lists(), seed=st.integers(0, 9))
def test_each_sample_is_placed_as_in_a_batch_of_its_size(shapes, transforms, seed):
    making, rows = making_of(transforms).with_flips(), np.arange(len(shapes)) + 5
    assert making.count == len(transforms) and not making.rest
    together = making.placement(shapes, Draws(seed, 1, rows))
    for place, (height, width) in enumerate(shapes.tolist()):
        spec = ImageSpec(3, height, width, torch.uint8)
        (part,) = passes_of(transforms, spec)
        assert isinstance(part, FusedPass)
        alone = part.placement(Draws(seed, 1, rows))
        assert together.size == alone.size == making.size
        assert np.array_equal(together.table()[place], alone.table()[place])


@given(shapes=shapes, transforms=lists())
def test_one_placement_gives_what_the_samples_give_one_by_one(shapes, transforms):
    making, images, draws = making_of(transforms), images_of(shapes), Draws(3, 0, np.arange(len(shapes)))
    masks = [image[0].contiguous() for image in images]
    boxes = torch.tensor([[1.0, 2, 9, 11]] * len(images))
    how = {"boxes": Coordinates("xyxy")}
    each = making.apply_each(images, {"masks": masks, "boxes": boxes}, draws, coordinates=how)
    placement = making.placement(shapes, draws)
    assert (each["images"].int() - placed(images, placement).int()).abs().max() <= 1
    placed_masks = torch.empty((len(masks), *placement.size), dtype=torch.uint8)
    place_varied_masks([mask.numpy() for mask in masks], placement, placed_masks)
    assert torch.equal(each["masks"], placed_masks)
    moved = place_varied_coordinates({"boxes": boxes, "labels": boxes}, placement, how)
    assert list(moved) == ["boxes"]
    assert torch.allclose(moved["boxes"], each["boxes"], atol=1e-4)


@pytest.mark.parametrize(
    ("transforms", "dtype"),
    [
        ([RandomCrop(16, padding=2)], torch.uint8),
        ([RandomCrop(32, pad_if_needed=True)], torch.uint8),
        ([Resize(24), RandomResizedCrop(16)], torch.uint8),
        ([RandomHorizontalFlip(), Resize(20), RandomCrop(24, pad_if_needed=True)], torch.uint8),
        ([Resize(14), CenterCrop(12)], torch.uint16),
    ],
)
def test_what_is_no_single_placement_is_done_sample_by_sample(transforms, dtype):
    shapes = np.array([(18, 40), (30, 17), (40, 40)])
    making, rows = making_of(transforms, dtype), np.array([4, 0, 7])
    images = [image.to(dtype) for image in images_of(shapes)]
    masks = [image[0].contiguous() for image in images]
    assert making.placement(shapes, Draws(1, 2, rows)) is None
    result = making.apply_each(images, {"masks": masks}, Draws(1, 2, rows), ignore_index=255)
    assert result["images"].permute(0, 2, 3, 1).is_contiguous() and result["images"].dtype == dtype
    assert result["images"].shape == (3, 3, *making.size) and result["masks"].shape == (3, *making.size)
    for place, image in enumerate(images):
        one = {"images": image[None], "masks": masks[place][None]}
        alone = apply_transforms(transforms, one, Draws(1, 2, rows[place : place + 1]), ignore_index=255)
        assert torch.equal(result["images"][place], alone["images"][0])
        assert torch.equal(result["masks"][place], alone["masks"][0])


def test_transforms_behind_draw_what_they_would_have_drawn():
    transforms = [
        RandomHorizontalFlip(),
        RandomResizedCrop(16),
        RandomVerticalFlip(),
        ColorJitter(0.4),
        Normalize((0.5,) * 3, (0.5,) * 3),
    ]
    shapes = np.array([(40, 30)] * 5)
    images, draws = images_of(shapes), Draws(8, 1, np.arange(5))
    whole = apply_transforms(transforms, {"images": torch.stack(images)}, draws)["images"]
    for making, count in ((making_of(transforms), 2), (making_of(transforms).with_flips(), 3)):
        assert (
            making.count == count and len(making.rest) == 5 - count and making.spec == ImageSpec(3, 16, 16, torch.uint8)
        )
        sized = making.apply_each(images, {}, draws)
        behind = apply_transforms(transforms, sized, draws, done=making.count)["images"]
        assert torch.allclose(behind, whole, atol=0.05)  # a level or two, where a turn and a resize change places


def test_a_list_that_makes_no_size_is_refused_with_the_mend():
    for transforms in ([], [RandomHorizontalFlip()], [Resize(256)], [RandomHorizontalFlip(), Resize(256)]):
        with pytest.raises(OptionError, match=r"a\.h5: its images differ in size.*RandomResizedCrop\(224\)"):
            making_of(transforms)
    for transforms in (
        [Normalize((0.5,) * 3, (0.5,) * 3), RandomResizedCrop(8)],
        [lambda images: images, CenterCrop(8)],
    ):
        with pytest.raises(OptionError, match=r"a\.h5: .*number 0, .*stands before.*Resize\(256\), CenterCrop\(224\)"):
            making_of(transforms)


@pytest.mark.parametrize(
    ("transforms", "message"),
    [
        ([CenterCrop(20)], r"an image of 30x19: CenterCrop.* Or .* with Resize\(20\) before it"),
        ([RandomCrop(20)], r"an image of 30x19: RandomCrop.* of 30x19 .* Resize\(20\) before it"),
        ([RandomCrop(28, padding=2)], r"an image of 30x19: RandomCrop.* with their padding smaller"),
        ([Resize(18), CenterCrop((18, 22))], r"an image of 30x19: CenterCrop.* of 28x18 .*with --size\.$"),
        ([RandomCrop(20, padding=25, padding_mode="reflect")], r"an image of 30x19: RandomCrop.*Pad less"),
    ],
)
def test_an_image_too_small_for_its_crop_is_told_with_its_size(transforms, message):
    shapes = np.array([(30, 40), (30, 19), (30, 19)])
    with pytest.raises(OptionError, match="^a.h5, " + message):
        making_of(transforms).check(shapes)
    with pytest.raises(OptionError, match=message):
        making_of(transforms).placement(shapes, Draws(0, 0, np.arange(len(shapes))))


def test_no_samples_are_placed_nowhere():
    making = making_of([Resize(20), CenterCrop(16)])
    placement = making.placement(np.zeros((0, 2), np.int64), Draws(0, 0, np.zeros(0, np.int64)))
    assert len(placement) == 0 and placement.table().shape == (0, 10) and placement.size == (16, 16)
    assert making.apply_each([], {}, Draws(0, 0, np.zeros(0, np.int64)))["images"].shape == (0, 3, 16, 16)


def test_tables_are_made_once_for_words_that_come_again_and_go_with_them():
    pipeline = Pipeline([CROP, FLIP, ColorJitter(0.4), Resize(9), NORMALIZE], ImageSpec(*SHAPE, torch.uint8))
    draws, count = Draws(0, 0, np.arange(6)), pipeline.num_words(6)
    words, other = torch.zeros(count, dtype=torch.int32), torch.zeros(count, dtype=torch.int32)
    first = pipeline._tables(words, slice(0, 3), 6)
    assert pipeline._tables(words, slice(0, 3), 6) is first
    second = pipeline._tables(words, slice(3, 6), 6)
    assert pipeline._tables(other, slice(0, 3), 6) is not first
    # They show what is written later.
    drawn = pipeline.draw(draws, 2, words.numpy())
    for tables, samples in ((first, slice(0, 3)), (second, slice(3, 6))):
        for one, (placement, _) in zip(tables, drawn.passes, strict=True):
            assert np.array_equal(one.windows.numpy(), placement.table()[samples])
    gone = weakref.ref(words)
    del words
    assert gone() is None
