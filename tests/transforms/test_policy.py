from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from batches import draws_for, in_channels_last_memory, nothing_waits, on_cuda
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageOps

from fastload.errors import OptionError
from fastload.transforms import colour, policy
from fastload.transforms.draws import Draws
from fastload.transforms.policy import OPERATIONS, RandAugment
from fastload.transforms.spec import ImageSpec

FILL = 7


class Given(RandAugment):
    """Does what it is told: codes and signs, (B, num_ops)."""

    def __init__(self, codes, signs, magnitude=9, fill=FILL):
        super().__init__(codes.shape[1], magnitude, fill=fill)
        self.told = list(zip(codes.T, signs.T, strict=True))

    def rounds(self, draws):
        return self.told


def batch_of(batch, channels, height, width, seed=0) -> torch.Tensor:
    """Noise, smooth, dark and constant images in turn, (B, C, H, W) in channels_last memory."""
    values = np.random.default_rng(seed).integers(0, 256, (batch, height, width, channels))
    values[1::4] = values[1::4, :1, :1] // 2 + values[1::4] // 16
    values[2::4] = values[2::4] // 4 + 5
    values[3::4] = values[3::4, :1, :1]
    return torch.from_numpy(values.astype(np.uint8)).permute(0, 3, 1, 2)


def only(name: str, sign: int, batch: int, magnitude: int, fill=FILL) -> Given:
    codes = np.full((batch, 1), OPERATIONS.index(name))
    return Given(codes, np.full((batch, 1), sign), magnitude, fill)


def by_pillow(picture: Image.Image, name: str, sign: int, magnitude: int) -> Image.Image:
    """What torchvision's RandAugment does to a Pillow image, with its table of magnitudes (31 bins)."""
    width, height = picture.size
    part, factor = magnitude / 30, 1 + sign * 0.9 * magnitude / 30

    def moved(*matrix: float) -> Image.Image:
        fill = (FILL,) * 3 if picture.mode == "RGB" else FILL
        return picture.transform(picture.size, Image.Transform.AFFINE, data=matrix, fillcolor=fill)

    match name:
        case "Identity":
            return picture
        case "ShearX":
            return moved(1, sign * 0.3 * part, 0, 0, 1, 0)
        case "ShearY":
            return moved(1, 0, 0, sign * 0.3 * part, 1, 0)
        case "TranslateX":
            return moved(1, 0, -sign * int(round(150 / 331 * width * part, 6)), 0, 1, 0)
        case "TranslateY":
            return moved(1, 0, 0, 0, 1, -sign * int(round(150 / 331 * height * part, 6)))
        case "Rotate":
            return picture.rotate(sign * 30 * part, fillcolor=(FILL,) * 3 if picture.mode == "RGB" else FILL)
        case "Brightness":
            return ImageEnhance.Brightness(picture).enhance(factor)
        case "Color":
            return ImageEnhance.Color(picture).enhance(factor)
        case "Contrast":
            return ImageEnhance.Contrast(picture).enhance(factor)
        case "Sharpness":
            return ImageEnhance.Sharpness(picture).enhance(factor)
        case "Posterize":
            return ImageOps.posterize(picture, round(8 - 4 * part))
        case "Solarize":
            return ImageOps.solarize(picture, math.ceil(round(255 * (1 - part), 6)))
        case "AutoContrast":
            return ImageOps.autocontrast(picture)
        case "Equalize":
            return ImageOps.equalize(picture)
    raise AssertionError(name)


# Levels that results may differ by. Blends: Pillow makes gray levels and their mean whole, a level each, times
# |1 - factor| <= 0.9, and truncates; its sharpening and stretching are in float32 and truncated: 1.
TOLERANCES = {"Brightness": 1, "Color": 2, "Contrast": 2, "Sharpness": 1, "AutoContrast": 1}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("magnitude", [0, 5, 9, 17, 30])  # none whose shears end between two pixels
@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_is_pillows(name, magnitude, channels):
    images = batch_of(8, channels, 37, 52)
    for sign in (1, -1):
        result = only(name, sign, 8, magnitude).apply(images, draws_for(8)).permute(0, 2, 3, 1).numpy().astype(int)
        for image, mine in zip(images.permute(0, 2, 3, 1).numpy(), result, strict=True):
            picture = Image.fromarray(image[..., 0] if channels == 1 else image)
            theirs = np.asarray(by_pillow(picture, name, sign, magnitude)).reshape(mine.shape).astype(int)
            off = np.abs(mine - theirs)
            if name in ("ShearX", "ShearY", "Rotate"):  # Pillow's positions have 16 bits behind the point
                assert (off > 0).any(axis=2).mean() < 0.02
            else:
                assert off.max() <= TOLERANCES.get(name, 0)


@pytest.mark.parametrize("name", ["ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"])
def test_moves_are_the_float64_matrices(name):
    """Their direction and centre, in torchvision's terms, against a matrix written out."""
    images, spec = batch_of(2, 3, 20, 33), ImageSpec(3, 20, 33, torch.uint8)
    transform = only(name, -1, 2, 12)
    angle = math.radians(-12)
    cosine, sine = math.cos(angle), math.sin(angle)
    matrix = {
        "ShearX": [[1, -0.12, 0], [0, 1, 0]],
        "ShearY": [[1, 0, 0], [-0.12, 1, 0]],
        "TranslateX": [[1, 0, 5], [0, 1, 0]],  # 0.4 * 150 / 331 * 33 = 5.98
        "TranslateY": [[1, 0, 0], [0, 1, 3]],  # 0.4 * 150 / 331 * 20 = 3.63
        "Rotate": [[cosine, -sine, 16.5 - cosine * 16.5 + sine * 10], [sine, cosine, 10 - sine * 16.5 - cosine * 10]],
    }[name]
    matrices = np.array([matrix, matrix], dtype=np.float64)
    expected = policy.sample_nearest(images, matrices, torch.full((3,), FILL, dtype=torch.uint8))
    assert torch.equal(transform.apply(images, draws_for(2)), expected)
    points = torch.tensor([[[3.0, 4.0], [30.0, 18.5]]]).expand(2, 2, 2)
    moved = transform.move_points(points, spec, draws_for(2))
    assert torch.allclose(moved, policy.move_points(points, matrices), atol=1e-5)
    boxes = torch.tensor([[3.0, 4.0, 30.0, 18.5]]).expand(2, 4)
    moved_boxes = transform.move_boxes(boxes, spec, draws_for(2))
    assert torch.allclose(moved_boxes, policy.move_boxes(boxes, matrices), atol=1e-5)


def test_levels_are_stretched_exactly():
    images = batch_of(12, 3, 9, 11)
    result = only("AutoContrast", 1, 12, 0).apply(images, draws_for(12)).numpy()
    for image, mine in zip(images.numpy().astype(int), result, strict=True):
        for levels, stretched in zip(image, mine, strict=True):
            low, high = levels.min(), levels.max()
            expected = levels if low == high else (levels - low) * 255 // (high - low)
            assert np.array_equal(stretched, expected)


def test_sharpness_is_the_float64_blend_within_a_level():
    images = batch_of(4, 3, 12, 13)
    levels = images.numpy().astype(np.float64)
    kernel = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]]) / 13
    smooth = levels.copy()
    windows = np.lib.stride_tricks.sliding_window_view(levels, (3, 3), axis=(2, 3))
    smooth[:, :, 1:-1, 1:-1] = np.rint((windows * kernel).sum(axis=(4, 5)))
    for sign in (1, -1):
        factor = 1 + sign * 0.9 * 20 / 30
        expected = np.floor(np.clip(factor * levels + (1 - factor) * smooth, 0, 255) + 1e-9)
        result = only("Sharpness", sign, 4, 20).apply(images, draws_for(4)).numpy()
        assert np.abs(result - expected).max() <= 1
        assert (result != expected).mean() < 0.02
    thin = batch_of(4, 3, 2, 9)
    assert torch.equal(only("Sharpness", 1, 4, 20).apply(thin, draws_for(4)), thin)


def test_strengths_are_torchvisions_table():
    weakest, usual, strongest = (RandAugment(2, magnitude).strengths(331, 662) for magnitude in (0, 9, 30))
    assert weakest == {
        **dict.fromkeys(("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"), 0.0),
        **dict.fromkeys(("Brightness", "Color", "Contrast", "Sharpness"), 0.0),
        "Posterize": 8.0,
        "Solarize": 255.0,
    }
    assert (usual["TranslateX"], usual["TranslateY"], usual["Posterize"]) == (90, 45, 7)
    assert usual["ShearX"] == pytest.approx(0.09)
    assert usual["Rotate"] == pytest.approx(9)
    assert usual["Color"] == pytest.approx(0.27)
    assert usual["Solarize"] == pytest.approx(178.5)
    assert (strongest["TranslateX"], strongest["TranslateY"], strongest["Rotate"]) == (300, 150, 30)
    assert (strongest["Posterize"], strongest["Solarize"]) == (4, 0)


@given(
    batch=st.integers(1, 12),
    channels=st.sampled_from([1, 3]),
    height=st.integers(1, 12),
    width=st.integers(1, 12),
    num_ops=st.integers(0, 3),
    epoch=st.integers(0, 99),
    block_values=st.sampled_from([1, 500, 1 << 18]),
    contiguous=st.booleans(),
)
def test_a_sample_is_augmented_alike_alone_and_in_any_batch(
    batch, channels, height, width, num_ops, epoch, block_values, contiguous
):
    images = batch_of(batch, channels, height, width, epoch)
    images = images.contiguous() if contiguous else images
    masks = torch.from_numpy(np.random.default_rng(epoch).integers(0, 9, (batch, height, width)))
    before, masks_before, draws = images.clone(), masks.clone(), draws_for(batch, epoch)
    points = torch.rand(batch, 4, 2) * 10
    transform = RandAugment(num_ops, 25)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(colour, "BLOCK_VALUES", block_values)
        together = transform.apply(images, draws)
        moved_masks = transform.apply_masks(masks, draws, 255)
    moved = transform.move_points(points, ImageSpec.of(images), draws)
    assert in_channels_last_memory(together)
    assert (together.shape, together.dtype) == (images.shape, torch.uint8)
    assert together.data_ptr() != images.data_ptr()
    assert moved_masks.data_ptr() != masks.data_ptr()
    assert (moved_masks.shape, moved_masks.dtype) == (masks.shape, masks.dtype)
    assert torch.equal(images, before)
    assert torch.equal(masks, masks_before)
    for i in range(batch):
        one, alone = slice(i, i + 1), Draws(3, epoch, np.array([i * 7 + 1]))
        assert torch.equal(transform.apply(images[one], alone)[0], together[i])
        assert torch.equal(transform.apply_masks(masks[one], alone, 255)[0], moved_masks[i])
        assert torch.equal(transform.move_points(points[one], ImageSpec.of(images), alone)[0], moved[i])


@given(epoch=st.integers(0, 99), num_ops=st.integers(1, 4))
def test_rounds_follow_one_another(epoch, num_ops):
    images, draws = batch_of(9, 3, 14, 11, epoch), draws_for(9, epoch)
    transform = RandAugment(num_ops, 20, fill=FILL)
    one_by_one = images
    for codes, signs in transform.rounds(draws):
        one_by_one = Given(codes[:, None], signs[:, None], 20).apply(one_by_one, draws)
    assert torch.equal(transform.apply(images, draws), one_by_one)


@given(epoch=st.integers(0, 99))
def test_masks_move_with_the_images(epoch):
    """Moves alone: a mask that is the image ends as the image does, its own fill where no image was."""
    generator = np.random.default_rng(epoch)
    codes, signs = generator.integers(0, 6, (8, 2)), generator.choice([-1, 1], (8, 2))
    images = batch_of(8, 1, 17, 12, epoch)
    transform = Given(codes, signs, 22)
    masks = transform.apply_masks(images[:, 0].to(torch.int64), draws_for(8), FILL)
    assert masks.dtype == torch.int64
    assert torch.equal(masks.to(torch.uint8), transform.apply(images, draws_for(8))[:, 0])
    ignored = transform.apply_masks(torch.ones(8, 17, 12, dtype=torch.uint8), draws_for(8), 255)
    assert set(ignored.unique().tolist()) <= {1, 255}


def test_levels_alone_leave_masks_and_places_where_they_are():
    codes = np.arange(6, 14)[:, None]
    transform = Given(codes, np.ones_like(codes), 30)
    masks = torch.randint(0, 9, (8, 5, 6))
    spec, draws = ImageSpec(3, 5, 6, torch.uint8), draws_for(8)
    assert torch.equal(transform.apply_masks(masks, draws, 255), masks)
    points, boxes = torch.rand(8, 3, 2), torch.tensor([[1.0, 2, 3, 4]]).expand(8, 4)
    assert torch.equal(transform.move_points(points, spec, draws), points)
    assert torch.equal(transform.move_boxes(boxes, spec, draws), boxes)


def test_a_marked_pixel_is_found_at_its_moved_centre():
    batch, spec = 60, ImageSpec(1, 61, 61, torch.uint8)
    generator = np.random.default_rng(0)
    rows, columns = generator.integers(20, 40, (2, batch))
    images = torch.zeros((batch, 1, 61, 61), dtype=torch.uint8)
    for i in range(batch):  # 3 x 3, since a turned image shows some pixels twice and some not at all
        images[i, 0, rows[i] - 1 : rows[i] + 2, columns[i] - 1 : columns[i] + 2] = 200
    codes, signs = generator.integers(0, 6, (batch, 2)), generator.choice([-1, 1], (batch, 2))
    transform = Given(codes, signs, 9, fill=0)
    result = transform.apply(images, draws_for(batch)).numpy()
    centres = torch.from_numpy(np.stack([columns, rows], axis=1)[:, None] + 0.5).to(torch.float32)
    moved = transform.move_points(centres, spec, draws_for(batch))[:, 0].numpy()
    for image, centre in zip(result[:, 0], moved, strict=True):
        y, x = np.nonzero(image)
        assert np.abs([x.mean() + 0.5 - centre[0], y.mean() + 0.5 - centre[1]]).max() < 1


def test_operations_and_signs_are_drawn_evenly():
    codes, signs = np.array(RandAugment(2).rounds(draws_for(28000))).swapaxes(0, 1)
    pairs = codes[0] * 14 + codes[1]
    assert np.abs(np.bincount(codes[0], minlength=14) - 2000).max() < 220
    counts = np.bincount(pairs, minlength=196)
    assert np.abs(counts - 28000 / 196).max() < 60  # five standard deviations of 143
    assert set(np.unique(signs)) == {-1, 1}
    assert abs(signs.mean()) < 0.02
    assert abs((signs[0] * signs[1]).mean()) < 0.03
    assert all(abs(signs[codes == code].mean()) < 0.1 for code in range(14))


def test_an_earlier_round_does_not_depend_on_how_many_follow():
    one, three = (RandAugment(n).rounds(draws_for(40)) for n in (1, 3))
    assert (len(one), len(three)) == (1, 3)
    assert np.array_equal(one[0], three[0])


def test_each_channel_may_have_its_fill():
    images = torch.full((2, 3, 20, 20), 50, dtype=torch.uint8)
    result = only("TranslateX", 1, 2, 30, fill=(1, 2, 3)).apply(images, draws_for(2))
    assert result[0, :, 0, 0].tolist() == [1, 2, 3]
    assert result[0, :, 0, -1].tolist() == [50, 50, 50]


@on_cuda
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_device_gives_the_same_levels_but_one_and_waits_for_nothing(name):
    images, masks, spec = batch_of(8, 3, 31, 45), torch.randint(0, 9, (8, 31, 45)), ImageSpec(3, 31, 45, torch.uint8)
    transform, draws = only(name, -1, 8, 17), draws_for(8)
    points, boxes = torch.rand(8, 3, 2) * 30, torch.rand(8, 4) * 30
    given = images, masks, points, boxes

    def all_moved(images, masks, points, boxes) -> list[torch.Tensor]:
        moved = [transform.apply(images, draws), transform.apply_masks(masks, draws, 255)]
        return [*moved, transform.move_points(points, spec, draws), transform.move_boxes(boxes, spec, draws)]

    there = [tensor.cuda() for tensor in given]
    all_moved(*there)  # what is set up once may wait
    with nothing_waits():
        results = all_moved(*there)
    assert in_channels_last_memory(results[0])
    tolerances = (1 if name in TOLERANCES else 0, 0, 1e-4, 1e-4)
    for result, expected, tolerance in zip(results, all_moved(*given), tolerances, strict=True):
        assert (result.cpu().double() - expected.double()).abs().max() <= tolerance


def test_empty_batches_and_images_pass():
    transform = RandAugment()
    for shape in ((0, 3, 4, 5), (5, 3, 0, 5)):
        spec = ImageSpec(*shape[1:], torch.uint8)
        draws = draws_for(shape[0])
        assert transform.apply(torch.zeros(shape, dtype=torch.uint8), draws).shape == shape
        masks = torch.zeros((shape[0], *shape[2:]), dtype=torch.uint8)
        assert transform.apply_masks(masks, draws, 255).shape == masks.shape
        assert transform.move_points(torch.zeros(shape[0], 2, 2), spec, draws).shape == (shape[0], 2, 2)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_ops": -1}, "num_ops is"),
        ({"num_ops": 1.5}, "num_ops is"),
        ({"num_ops": True}, "num_ops is"),
        ({"magnitude": -1}, "magnitude is"),
        ({"magnitude": 31}, "magnitude is"),
        ({"magnitude": 9.5}, "magnitude is"),
        ({"magnitude": 0, "num_magnitude_bins": 1}, "num_magnitude_bins is"),
        ({"num_magnitude_bins": "31"}, "num_magnitude_bins is"),
        ({"fill": "black"}, "fill"),
        ({"fill": None}, "fill"),
        ({"fill": ()}, "fill"),
    ],
)
def test_options_without_a_meaning_are_named(options, named):
    with pytest.raises(OptionError, match=named):
        RandAugment(**options)


def test_other_images_are_refused_before_they_come():
    spec = ImageSpec(3, 8, 8, torch.uint8)
    for channels in (2, 4):
        with pytest.raises(OptionError, match=f"{channels} channels"):
            RandAugment().output(spec._replace(channels=channels))
    for dtype in (torch.uint16, torch.float32):
        with pytest.raises(OptionError, match=f"{dtype}"):
            RandAugment().apply(torch.zeros(1, 3, 4, 4, dtype=dtype), draws_for(1))
    for fill in (256, 0.5, (1, 2)):
        with pytest.raises(OptionError, match="fill"):
            RandAugment(fill=fill).output(spec)
    assert RandAugment(fill=(1, 2, 3)).output(spec) == spec
