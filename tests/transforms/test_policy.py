from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from batches import draws_for, some_images
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageOps

from fastload.errors import OptionError
from fastload.transforms import policy
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

    def turned() -> Image.Image:
        return picture.rotate(sign * 30 * part, fillcolor=(FILL,) * 3 if picture.mode == "RGB" else FILL)

    return {
        "Identity": lambda: picture,
        "ShearX": lambda: moved(1, sign * 0.3 * part, 0, 0, 1, 0),
        "ShearY": lambda: moved(1, 0, 0, sign * 0.3 * part, 1, 0),
        "TranslateX": lambda: moved(1, 0, -sign * int(round(150 / 331 * width * part, 6)), 0, 1, 0),
        "TranslateY": lambda: moved(1, 0, 0, 0, 1, -sign * int(round(150 / 331 * height * part, 6))),
        "Rotate": turned,
        "Brightness": lambda: ImageEnhance.Brightness(picture).enhance(factor),
        "Color": lambda: ImageEnhance.Color(picture).enhance(factor),
        "Contrast": lambda: ImageEnhance.Contrast(picture).enhance(factor),
        "Sharpness": lambda: ImageEnhance.Sharpness(picture).enhance(factor),
        "Posterize": lambda: ImageOps.posterize(picture, round(8 - 4 * part)),
        "Solarize": lambda: ImageOps.solarize(picture, math.ceil(round(255 * (1 - part), 6))),
        "AutoContrast": lambda: ImageOps.autocontrast(picture),
        "Equalize": lambda: ImageOps.equalize(picture),
    }[name]()


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
    moved = transform.move_points(centres, spec, draws_for(batch))[:, 0]
    boxes = transform.move_boxes(torch.cat([centres - 1.5, centres + 1.5], dim=2), spec, draws_for(batch))[:, 0]
    assert torch.allclose((boxes[:, :2] + boxes[:, 2:]) / 2, moved, atol=1e-4)
    for image, centre in zip(result[:, 0], moved.numpy(), strict=True):
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


DTYPES = (np.uint8, np.uint16, np.float32, np.int64)


def random_matrices(batch: int, height: int, width: int, seed: int) -> np.ndarray:
    """Shears, moves and turns together, (B, 2, 3)."""
    generator = np.random.default_rng(seed)
    along_x, along_y, x, y, degrees = generator.uniform(-1, 1, (5, batch))
    none = np.zeros(batch)
    sheared = policy.affine((along_x * (degrees > 0), along_y * (degrees <= 0)), (none, none), none, height, width)
    moved = policy.followed(sheared, policy.affine((none, none), (x * width, y * height), none, height, width))
    return policy.followed(moved, rotated(180 * degrees, height, width))


def rotated(degrees: np.ndarray, height: int, width: int) -> np.ndarray:
    return policy.affine((0, 0), (0, 0), degrees, height, width)


def sampled_by_float64(image: np.ndarray, matrix: np.ndarray, fill: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The moved image (C, H, W), and where a place lies so near a border between pixels that rounding decides."""
    height, width = image.shape[1:]
    rows, columns = np.mgrid[:height, :width] + 0.5
    x = matrix[0, 0] * columns + matrix[0, 1] * rows + matrix[0, 2]
    y = matrix[1, 0] * columns + matrix[1, 1] * rows + matrix[1, 2]
    near = (np.abs(x - np.rint(x)) < 1e-7) | (np.abs(y - np.rint(y)) < 1e-7)
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    x, y = np.clip(x, 0, width - 1).astype(int), np.clip(y, 0, height - 1).astype(int)
    return np.where(inside, image[:, y, x], fill[:, None, None]), near


@given(
    batch=st.integers(1, 5),
    channels=st.integers(1, 4),
    height=st.integers(1, 15),
    width=st.integers(1, 15),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 999),
)
def test_pixels_are_the_nearest_in_float64(batch, channels, height, width, dtype, seed):
    images = some_images(batch, height, width, dtype, channels=channels, seed=seed)
    matrices = random_matrices(batch, height, width, seed)
    fill = np.arange(251, 251 + channels).astype(dtype)
    result = policy.sample_nearest(images, matrices, torch.from_numpy(fill))
    assert result.dtype == images.dtype
    for i in range(batch):
        expected, near = sampled_by_float64(images[i].numpy(), matrices[i], fill)
        assert np.array_equal(result[i].numpy()[:, ~near], expected[:, ~near])


def test_quarter_and_half_turns_of_squares_are_exact():
    images = some_images(3, 8, 8, np.uint16, channels=2)
    matrices = rotated(np.array([0.0, 180.0, 360.0]), 8, 8)
    result = policy.sample_nearest(images, matrices, torch.zeros(2, dtype=torch.uint16)).numpy()
    expected = [np.rot90(image.numpy(), k, (1, 2)) for image, k in zip(images, (0, 2, 0), strict=True)]
    assert np.array_equal(result, np.stack(expected))


@given(seed=st.integers(0, 999), height=st.integers(2, 40), width=st.integers(2, 40))
def test_points_and_box_corners_go_where_the_pixels_go(seed, height, width):
    """Forward and back is the same place, whatever the matrix; the inverse is NumPy's, of the whole 3 x 3."""
    matrices = random_matrices(4, height, width, seed)
    generator = np.random.default_rng(seed)
    points = generator.uniform(0, [width, height], (4, 6, 2)).astype(np.float32)
    moved = policy.move_points(torch.from_numpy(points), matrices)
    assert moved.dtype == torch.float32
    corner = np.sort(generator.uniform(0, 1, (4, 2, 2)), axis=1) * [width, height]
    boxes = corner.reshape(4, 4).astype(np.float32)
    moved_boxes = policy.move_boxes(torch.from_numpy(boxes), matrices)
    assert moved_boxes.dtype == torch.float32
    for i in range(4):
        forward = np.linalg.inv(np.vstack([matrices[i], [0, 0, 1]]))
        expected = points[i].astype(np.float64) @ forward[:2, :2].T + forward[:2, 2]
        assert np.allclose(moved[i].numpy(), expected, atol=1e-4, rtol=1e-6)
        x1, y1, x2, y2 = boxes[i].astype(np.float64)
        corners = np.array([[x1, y1], [x1, y2], [x2, y1], [x2, y2]]) @ forward[:2, :2].T + forward[:2, 2]
        expected = [*corners.min(axis=0), *corners.max(axis=0)]
        assert np.allclose(moved_boxes[i].numpy(), expected, atol=1e-4, rtol=1e-6)


def test_one_move_after_another_is_their_composition():
    first, second = (random_matrices(5, 20, 30, seed) for seed in (1, 2))
    points = torch.rand((5, 3, 2), dtype=torch.float64) * 20
    one_by_one = policy.move_points(policy.move_points(points, first), second)
    assert torch.allclose(policy.move_points(points, policy.followed(first, second)), one_by_one, atol=1e-9)


def test_moves_of_nothing_pass():
    for shape in ((0, 3, 4, 5), (5, 3, 0, 5), (5, 3, 4, 0)):
        images, draws = torch.zeros(shape, dtype=torch.uint8), draws_for(shape[0])
        turned = rotated(np.zeros(shape[0]), *shape[2:])
        assert policy.sample_nearest(images, turned, torch.zeros(3, dtype=torch.uint8)).shape == shape
        assert RandAugment().apply(images, draws).shape == shape
        assert RandAugment().apply_masks(images[:, 0], draws, 255).shape == images[:, 0].shape
    assert policy.move_points(torch.zeros(0, 5, 2), rotated(np.zeros(0), 4, 5)).shape == (0, 5, 2)
    assert policy.move_points(torch.zeros(3, 0, 2), rotated(np.zeros(3), 4, 5)).shape == (3, 0, 2)
    assert policy.move_boxes(torch.zeros(0, 4), rotated(np.zeros(0), 4, 5)).shape == (0, 4)
