from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image

from fastload.transforms import colour, policy

DTYPES = (np.uint8, np.uint16, np.float32, np.int64)


def batch_of(batch, channels, height, width, dtype=np.uint8, seed=0) -> torch.Tensor:
    values = np.random.default_rng(seed).integers(1, 250, (batch, height, width, channels)).astype(dtype)
    return torch.from_numpy(values).permute(0, 3, 1, 2)


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
    block_values=st.sampled_from([1, 300, 1 << 18]),
    contiguous=st.booleans(),
)
def test_pixels_are_the_nearest_in_float64(batch, channels, height, width, dtype, seed, block_values, contiguous):
    images = batch_of(batch, channels, height, width, dtype, seed)
    images = images.contiguous() if contiguous else images
    before = images.numpy().copy()
    matrices = random_matrices(batch, height, width, seed)
    fill = np.arange(251, 251 + channels).astype(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(colour, "BLOCK_VALUES", block_values)
        result = policy.sample_nearest(images, matrices, torch.from_numpy(fill))
    assert result.dtype == images.dtype
    assert result.permute(0, 2, 3, 1).is_contiguous()
    assert np.array_equal(images.numpy(), before)
    for i in range(batch):
        expected, near = sampled_by_float64(before[i], matrices[i], fill)
        assert np.array_equal(result[i].numpy()[:, ~near], expected[:, ~near])
        alone = policy.sample_nearest(images[i : i + 1], matrices[i : i + 1], torch.from_numpy(fill))
        assert np.array_equal(alone[0].numpy(), result[i].numpy())


@pytest.mark.parametrize("size", [(40, 53), (31, 31), (1, 20)])
def test_pixels_are_pillows_but_for_its_16_bit_positions(size):
    images = batch_of(24, 3, *size)
    matrices = random_matrices(24, *size, seed=1)
    result = policy.sample_nearest(images, matrices, torch.tensor([9, 8, 7], dtype=torch.uint8))
    different = 0
    for image, matrix, mine in zip(images.permute(0, 2, 3, 1).numpy(), matrices, result, strict=True):
        picture, (height, width) = Image.fromarray(image), size
        moved = picture.transform(
            (width, height),
            Image.Transform.AFFINE,
            data=tuple(matrix.ravel()),
            resample=Image.Resampling.NEAREST,
            fillcolor=(9, 8, 7),
        )
        different += (np.asarray(moved) != mine.permute(1, 2, 0).numpy()).any(axis=2).sum()
    assert different <= 24 * size[0] * size[1] * 0.002


def test_turns_are_pillows_rotate():
    images = batch_of(9, 3, 33, 46)
    degrees = np.array([-30, -7.5, 0.0, 1.0, 10.1, 30.0, 90.0, 180.0, 123.4])
    result = policy.sample_nearest(images, rotated(degrees, 33, 46), torch.zeros(3, dtype=torch.uint8))
    for image, angle, mine in zip(images.permute(0, 2, 3, 1).numpy(), degrees.tolist(), result, strict=True):
        theirs = np.asarray(Image.fromarray(image).rotate(angle))
        different = (theirs != mine.permute(1, 2, 0).numpy()).any(axis=2).mean()
        assert different < (0.03 if angle == 90 else 0.002)  # by 90 degrees 46 x 33 lies half a pixel off: all ties


def test_quarter_and_half_turns_of_squares_are_exact():
    images = batch_of(3, 2, 8, 8, np.uint16)
    matrices = rotated(np.array([0.0, 180.0, 360.0]), 8, 8)
    result = policy.sample_nearest(images, matrices, torch.zeros(2, dtype=torch.uint16)).numpy()
    expected = [np.rot90(image.numpy(), k, (1, 2)) for image, k in zip(images, (0, 2, 0), strict=True)]
    assert np.array_equal(result, np.stack(expected))


def test_translations_move_right_and_down_and_leave_fill():
    image = torch.arange(1, 13, dtype=torch.uint8).view(1, 1, 3, 4)
    moved = policy.sample_nearest(
        image, policy.affine((0, 0), (1, -1), np.zeros(1), 3, 4), torch.tensor([99], dtype=torch.uint8)
    )
    assert moved[0, 0].tolist() == [[99, 5, 6, 7], [99, 9, 10, 11], [99, 99, 99, 99]]


def test_shears_are_about_the_upper_left_corner():
    """torchvision's RandAugment has it so: slope m moves row r by m * (r + 0.5) pixels."""
    image = torch.arange(1, 21, dtype=torch.uint8).view(1, 1, 4, 5)
    fill = torch.zeros(1, dtype=torch.uint8)
    along_x = policy.sample_nearest(image, policy.affine((0.75, 0), (0, 0), np.zeros(1), 4, 5), fill)
    rows = [[math.floor(c + 0.5 + 0.75 * (r + 0.5)) for c in range(5)] for r in range(4)]
    expected = [[5 * r + x + 1 if x < 5 else 0 for x in row] for r, row in enumerate(rows)]
    assert along_x[0, 0].tolist() == expected
    along_y = policy.sample_nearest(image.transpose(2, 3), policy.affine((0, 0.75), (0, 0), np.zeros(1), 5, 4), fill)
    assert along_y[0, 0].T.tolist() == expected


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


@given(seed=st.integers(0, 999), row=st.integers(0, 30), column=st.integers(0, 40))
def test_a_marked_pixel_is_found_at_its_moved_centre(seed, row, column):
    generator = np.random.default_rng(seed)
    matrices = rotated(generator.uniform(-30, 30, 1), 31, 41)
    centre = torch.tensor([[[column + 0.5, row + 0.5]]])
    x, y = policy.move_points(centre, matrices)[0, 0].tolist()
    assume(1 <= x < 40 and 1 <= y < 30)
    image = torch.zeros((1, 1, 31, 41), dtype=torch.uint8)
    image[0, 0, row, column] = 1
    moved = policy.sample_nearest(image, matrices, torch.zeros(1, dtype=torch.uint8))[0, 0]
    near = moved[max(int(y) - 1, 0) : int(y) + 2, max(int(x) - 1, 0) : int(x) + 2]
    assert near.sum() == moved.sum()  # a turn may show a pixel once, twice or not at all, but nowhere else


def test_one_move_after_another_is_their_composition():
    first, second = (random_matrices(5, 20, 30, seed) for seed in (1, 2))
    points = torch.rand((5, 3, 2), dtype=torch.float64) * 20
    one_by_one = policy.move_points(policy.move_points(points, first), second)
    assert torch.allclose(policy.move_points(points, policy.followed(first, second)), one_by_one, atol=1e-9)


def test_empty_batches_and_images_pass():
    for shape in ((0, 3, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0)):
        images = torch.zeros(shape, dtype=torch.uint8)
        result = policy.sample_nearest(
            images, rotated(np.zeros(shape[0]), *shape[2:]), torch.zeros(3, dtype=torch.uint8)
        )
        assert result.shape == shape
    assert policy.move_points(torch.zeros(0, 5, 2), rotated(np.zeros(0), 4, 5)).shape == (0, 5, 2)
    assert policy.move_points(torch.zeros(3, 0, 2), rotated(np.zeros(3), 4, 5)).shape == (3, 0, 2)
    assert policy.move_boxes(torch.zeros(0, 4), rotated(np.zeros(0), 4, 5)).shape == (0, 4)
