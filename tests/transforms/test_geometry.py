from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from batches import LAYOUTS, draws_for, in_channels_last_memory, some_images
from hypothesis import example, given
from hypothesis import strategies as st

from fastload.errors import OptionError
from fastload.system import native
from fastload.transforms import (
    CenterCrop,
    Draws,
    ImageSpec,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
)
from fastload.transforms.engine import place, resample
from fastload.transforms.engine.place import gather
from fastload.transforms.geometry import joint_placement, packed_move

DTYPES = (np.uint8, np.uint16, np.float32)
MODES = ("constant", "edge", "reflect", "symmetric")


def batch_of(shape, dtype=np.uint8, layout="nhwc") -> torch.Tensor:
    return some_images(shape[0], *shape[2:], dtype, channels=shape[1], layout=layout)


def padded_by_numpy(image: np.ndarray, padding: tuple[int, int, int, int], mode: str, fill: tuple) -> np.ndarray:
    left, top, right, bottom = padding
    sides = ((0, 0), (top, bottom), (left, right))
    if mode != "constant":
        return np.pad(image, sides, mode=mode)
    value = np.array(fill if len(fill) == len(image) else fill * len(image)).astype(image.dtype)
    padded = np.broadcast_to(
        value[:, None, None], (len(image), image.shape[1] + top + bottom, image.shape[2] + left + right)
    ).copy()
    padded[:, top : top + image.shape[1], left : left + image.shape[2]] = image
    return padded


shapes = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 9), st.integers(1, 9))
dtypes = st.sampled_from(DTYPES)
memories = st.sampled_from(LAYOUTS)


@pytest.mark.parametrize(("flip", "axis"), [(RandomVerticalFlip, 1), (RandomHorizontalFlip, 2)])
@given(
    shape=shapes,
    dtype=dtypes,
    memory=memories,
    p=st.sampled_from([0, 0.3, 1]),
    small=st.booleans(),
    serial=st.sampled_from([400, 1 << 15]),
)
def test_flip_turns_the_drawn_images_and_no_other(flip, axis, shape, dtype, memory, p, small, serial):
    images, draws = batch_of(shape, dtype, memory), draws_for(shape[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, "SMALL_SAMPLE_BYTES", 1 << 14 if small else 0)
        for module in (place, resample):
            patch.setattr(module, "SERIAL_VALUES", serial)
        flipped = flip(p).apply(images, draws)
    for image, result, turned in zip(images.numpy(), flipped.numpy(), draws.uniform() < p, strict=True):
        assert np.array_equal(result, np.flip(image, axis) if turned else image)
    assert flipped.dtype == images.dtype
    assert in_channels_last_memory(flipped)


@st.composite
def crops(draw, modes=MODES):
    shape = draw(shapes)
    mode = draw(st.sampled_from(modes))
    most = {"constant": 12, "edge": 12, "reflect": min(shape[2:]) - 1, "symmetric": min(shape[2:])}[mode]
    padding = draw(st.none() | st.tuples(*[st.integers(0, most)] * 4))
    left, top, right, bottom = padding or (0, 0, 0, 0)
    needed = mode in ("constant", "edge") and draw(st.booleans())
    most_high, most_wide = (14, 14) if needed else (shape[2] + top + bottom, shape[3] + left + right)
    size = draw(st.tuples(st.integers(1, most_high), st.integers(1, most_wide)))
    fill = draw(st.sampled_from([0, 200, tuple(range(10, 10 + shape[1]))]))
    return shape, RandomCrop(size, padding, needed, fill, mode)


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("mode", MODES)
@given(data=st.data(), dtype=dtypes, memory=memories)
def test_crop_is_a_window_of_the_padded_image(mode, small, data, dtype, memory):
    shape, transform = data.draw(crops([mode]))
    images, draws = batch_of(shape, dtype, memory), draws_for(shape[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, "SMALL_SAMPLE_BYTES", 1 << 14 if small else 0)
        windows = transform.apply(images, draws)
    height, width = transform.size
    left, top, right, bottom = transform.padding
    # Images that are smaller all the same are padded on both sides by what is missing.
    high, wide = max(0, height - shape[2] - top - bottom), max(0, width - shape[3] - left - right)
    left, top, right, bottom = padding = left + wide, top + high, right + wide, bottom + high
    tops = draws.stream(0).integers(0, shape[2] + top + bottom - height + 1)
    lefts = draws.stream(1).integers(0, shape[3] + left + right - width + 1)
    assert windows.shape == (shape[0], shape[1], height, width)
    for image, window, y, x in zip(images.numpy(), windows.numpy(), tops, lefts, strict=True):
        padded = padded_by_numpy(image, padding, transform.padding_mode, transform.fill)
        assert np.array_equal(window, padded[:, y : y + height, x : x + width])
    assert in_channels_last_memory(windows)


@given(crop=crops(), dtype=dtypes, memory=memories, p=st.sampled_from([0, 0.5]))
def test_the_gather_for_devices_crops_and_flips_as_the_cpu_does(crop, dtype, memory, p):
    shape, transform = crop
    images = batch_of(shape, dtype, memory)
    draws = draws_for(shape[0])
    fill = torch.tensor(transform.fill, dtype=torch.float64).to(images.dtype).expand(shape[1])
    for move in (transform, RandomHorizontalFlip(p), RandomVerticalFlip(p)):
        placement = move.place(ImageSpec.of(images).sizes, draws)
        gathered = gather(images, placement, fill)
        assert torch.equal(gathered, move.apply(images, draws))
        assert gathered.dtype == images.dtype
        assert in_channels_last_memory(gathered)


@given(shape=shapes, dtype=dtypes, memory=memories, data=st.data())
def test_center_crop_cuts_the_middle_as_torchvision_does(shape, dtype, memory, data):
    size = data.draw(st.tuples(st.integers(1, shape[2]), st.integers(1, shape[3])))
    images = batch_of(shape, dtype, memory)
    windows = CenterCrop(size).apply(images, draws_for(shape[0]))
    top, left = round((shape[2] - size[0]) / 2.0), round((shape[3] - size[1]) / 2.0)
    assert torch.equal(windows, images[:, :, top : top + size[0], left : left + size[1]])
    assert in_channels_last_memory(windows)
    assert windows.data_ptr() != images.data_ptr()


@given(shape=shapes, data=st.data())
def test_masks_stay_on_their_pixels(shape, data):
    shape = (shape[0], 1, *shape[2:])
    images = batch_of(shape)
    masks = images[:, 0].clone()
    size = data.draw(st.tuples(st.integers(1, shape[2]), st.integers(1, shape[3])))
    mode = data.draw(st.sampled_from(["constant", "edge", "symmetric"]))
    crop = RandomCrop(size, padding=1, fill=255, padding_mode=mode)
    for transform in (RandomHorizontalFlip(), crop, CenterCrop(size)):
        draws = draws_for(shape[0])
        moved = transform.apply_masks(masks, draws, 255)
        assert torch.equal(moved, transform.apply(images, draws)[:, 0])
        assert moved.is_contiguous()
    moved = RandomCrop(6, padding=2, fill=9).apply_masks(torch.ones((3, 2, 2), dtype=torch.uint8), draws_for(3), 255)
    assert moved.unique().tolist() == [1, 255] and (moved == 1).sum() == 3 * 4, "ignore_index, not the images' fill"


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (RandomCrop((9, 4)), r"images of 8x8 .* are smaller than the window"),
        (RandomCrop(13, padding=2), r"are with their padding smaller"),
        (RandomCrop(4, padding=8, padding_mode="reflect"), r"at most 7 rows"),
        (RandomCrop(4, padding=9, padding_mode="symmetric"), r"at most 8 rows"),
        (RandomCrop(4, padding=1, fill=(1, 2)), r"2 values for images of 3 channels"),
        (RandomCrop(4, padding=1, fill=256), r"whole number from 0 to 255"),
        (RandomCrop(4, padding=1, fill=0.5), r"whole number from 0 to 255"),
        (CenterCrop((8, 9)), r"images of 8x8 .* are smaller than the window"),
    ],
)
def test_images_that_do_not_fit_are_refused(transform, message):
    with pytest.raises(OptionError, match=message):
        transform.output(ImageSpec(3, 8, 8, torch.uint8))
    with pytest.raises(OptionError, match=message):
        transform.apply(batch_of((2, 3, 8, 8)), draws_for(2))


def spec_of(height: int, width: int) -> ImageSpec:
    return ImageSpec(3, height, width, torch.uint8)


sides = st.integers(1, 300)
areas = st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)).map(sorted)
ratios = st.tuples(st.floats(0.2, 5), st.floats(0.2, 5)).map(sorted)


@given(height=sides, width=sides, scale=areas, ratio=ratios)
def test_windows_lie_within_the_image_and_their_bounds(height, width, scale, ratio):
    crop = RandomResizedCrop(16, scale=scale, ratio=ratio)
    placement = crop.place(np.array([[height, width]]), Draws(1, 0, np.arange(40)))
    first, window = placement.first, placement.window
    assert (first >= 0).all() and (first + window <= [height, width]).all() and (window >= 1).all()
    for high, wide in window.tolist():
        fallback = high in (height, max(1, round(width / ratio[0]))) or wide in (
            width,
            max(1, round(height * ratio[1])),
        )
        # Rounding a side moves it by up to half a pixel.
        low, high_area = (high - 0.5) * (wide - 0.5), (high + 0.5) * (wide + 0.5)
        assert fallback or (low <= scale[1] * height * width + 1e-6 and high_area >= scale[0] * height * width - 1e-6)
        assert fallback or (
            (wide - 0.5) / (high + 0.5) <= ratio[1] + 1e-9 and (wide + 0.5) / (high - 0.5) >= ratio[0] - 1e-9
        )


def test_area_and_proportions_are_drawn_evenly():
    placement = RandomResizedCrop(8, scale=(0.1, 0.5), ratio=(0.5, 2)).place(
        np.array([[2000, 2000]]), Draws(7, 0, np.arange(20_000))
    )
    parts = placement.window.prod(axis=1) / 2000**2
    logs = np.log2(placement.window[:, 1] / placement.window[:, 0])
    for values, low, high in ((parts, 0.1, 0.5), (logs, -1, 1)):
        cumulated = np.sort((values - low) / (high - low))
        # Kolmogorov-Smirnov: 1.95 / sqrt(n) is passed by an even distribution but once in a thousand times.
        assert np.abs(cumulated - np.arange(20_000) / 20_000).max() < 1.95 / math.sqrt(20_000)
    places = (placement.first + 0.5) / (2000 - placement.window + 1)
    assert (abs(places.mean(axis=0) - 0.5) < 0.01).all()


def test_images_whose_proportions_never_fit_are_cut_in_the_middle():
    crop = RandomResizedCrop(8, scale=(0.9, 1), ratio=(0.9, 1.1))
    placement = crop.place(np.array([[20, 100]]), Draws(0, 0, np.arange(50)))
    assert (placement.window == [20, 22]).all() and (placement.first == [0, 39]).all()


@pytest.mark.parametrize(
    ("resize", "image", "expected"),
    [
        (Resize(20), (40, 60), (20, 30)),
        (Resize(20), (60, 40), (30, 20)),
        (Resize([20]), (33, 50), (20, 30)),  # 30.3 is cut off, as torchvision does
        (Resize((7, 9)), (40, 60), (7, 9)),
        (Resize(20, max_size=25), (40, 60), (16, 25)),
        (Resize(20, max_size=25), (20, 21), (20, 21)),
        (Resize(1), (1, 300), (1, 300)),
    ],
)
def test_one_number_is_the_shorter_side(resize, image, expected):
    assert resize.output(spec_of(*image))[1:3] == expected
    assert resize.place(np.array([image]), Draws(0, 0, np.arange(2))).size == expected


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RandomCrop(0), r"RandomCrop\(size=0\).*positive"),
        (lambda: RandomCrop((3, 4, 5)), r"size=\(3, 4, 5\)"),
        (lambda: CenterCrop(2.5), r"CenterCrop\(size=2.5\)"),
        (lambda: RandomCrop(3, padding=-1), r"padding=-1.*none is negative"),
        (lambda: RandomCrop(3, padding=(1, 2, 3)), r"padding=\(1, 2, 3\)"),
        (lambda: RandomCrop(3, padding_mode="wrap"), r"'wrap'.*'constant', 'edge', 'reflect', 'symmetric'"),
        (lambda: RandomResizedCrop(20, scale=(0.5, 0.2)), r"scale=.*larger number comes first.*scale=\(0.2, 0.5\)"),
        (lambda: RandomResizedCrop(20, ratio=(2, 0.5)), r"ratio=.*larger number comes first.*ratio=\(0.5, 2.0\)"),
        (lambda: RandomResizedCrop(20, scale=(0, 1)), "numbers from 0 to 1, 0 not included"),
        (lambda: RandomResizedCrop(20, scale=(0.5, 1.5)), "numbers from 0 to 1"),
        (lambda: RandomResizedCrop(20, ratio=(-1, 1)), "numbers above 0"),
        (lambda: RandomResizedCrop(20, scale=0.5), "give .smallest, largest."),
        (lambda: RandomResizedCrop(20, scale=(0.5, float("nan"))), "scale="),
        (lambda: RandomResizedCrop(20, scale=(float("nan"), 1)), "two numbers from 0 to 1"),
        (lambda: RandomResizedCrop(0), "positive whole number"),
        (lambda: Resize(2.5), "positive whole number"),
        (lambda: Resize((1, 2, 3)), "positive whole number"),
        (lambda: Resize((10, 20), max_size=30), "max_size"),
        (lambda: Resize(20, max_size=20), "above size"),
        (lambda: Resize(20).output(ImageSpec(3, 8, 8, torch.float32)), "images are torch.float32.*Put it before"),
        (lambda: RandomResizedCrop(20).apply(torch.zeros(1, 3, 8, 8), Draws(0, 0, np.arange(1))), "torch.float32"),
        (lambda: Resize(20).output(spec_of(0, 8)), "no pixels"),
    ],
)
def test_options_without_meaning_are_refused_at_once(make, message):
    with pytest.raises(OptionError, match=message):
        make()


some_ratios = st.tuples(st.floats(0.01, 50), st.floats(0.01, 50)).map(sorted) | st.sampled_from([(1, 1), (2, 2)])
some_areas = st.tuples(st.floats(1e-3, 1), st.floats(1e-3, 1)).map(sorted) | st.sampled_from([(0.25, 0.25), (1, 1)])


@st.composite
def lists_and_sizes(draw):
    """Transforms that one placement describes, and sizes of images that they fit."""
    batch, longest = draw(st.integers(1, 9)), draw(st.sampled_from([12, 3000]))
    one_size = draw(st.booleans())
    side = st.integers(1, longest)
    sizes = given_sizes = np.array(draw(st.lists(st.tuples(side, side), min_size=1 if one_size else batch,
                                                 max_size=1 if one_size else batch)))  # fmt: skip
    moves, resized, padded = [], False, False
    for index in range(draw(st.integers(0, 4))):
        least = sizes.min(axis=0).tolist()
        part = draw(st.integers(1, least[0])), draw(st.integers(1, least[1]))
        own = draw(st.integers(1, 2 * longest)), draw(st.integers(1, 2 * longest))
        chance = draw(st.sampled_from([0.0, 0.5, 1.0]))
        choices = [RandomHorizontalFlip(chance), RandomVerticalFlip(chance), CenterCrop(part), RandomCrop(part)]
        if not resized and not padded:
            most = draw(st.none() | st.integers(own[0] + 1, own[0] + 50))
            choices += [Resize(own), Resize(own[0], max_size=most)]
            choices.append(RandomResizedCrop(own, draw(some_areas), draw(some_ratios)))
        if one_size and not padded and all(isinstance(move, RandomHorizontalFlip) for _, move in moves):
            around = draw(st.lists(st.integers(0, 9), min_size=4, max_size=4))
            choices += [RandomCrop(part, around, fill=7), RandomCrop(own, around, True, padding_mode="edge")]
        move = draw(st.sampled_from(choices))
        moves.append((index + draw(st.integers(0, 3)), move))
        resized, padded = resized or move.resizes, padded or move.pads(sizes)
        sizes = move.target(sizes)
    return moves, given_sizes, batch


needs_native = pytest.mark.skipif(native.library() is None, reason="needs the compiled loops")


@needs_native
@given(case=lists_and_sizes(), seed=st.integers(-(2**70), 2**70), echo=st.integers(0, 3), again=st.booleans())
@example(([(0, RandomResizedCrop(3, (0.25, 0.25), (1, 1)))], np.array([[5, 5]]), 4), 0, 0, False)  # sides of 2.5
@example(([(0, RandomResizedCrop(9)), (1, RandomHorizontalFlip())], np.array([[50, 70]]), 9000), 1, 0, True)
def test_placements_are_drawn_as_numpy_draws_them(case, seed, echo, again):
    moves, sizes, batch = case
    rows = np.arange(2 * batch)[::2]
    times = np.arange(batch) % 3 if again else None
    echoes = 1 if len(sizes) > 1 else 2
    table = np.empty(10 * batch * echoes, np.int32)
    compiled = joint_placement(moves, sizes, Draws(seed, 5, rows, echo, echoes=echoes, times=times), table)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library", lambda: None)
        expected = joint_placement(moves, sizes, Draws(seed, 5, rows, echo, echoes=echoes, times=times))
    for name, numbers in vars(expected).items():
        found = getattr(compiled, name)
        assert np.array_equal(found, numbers), name
        assert np.asarray(found).dtype == np.asarray(numbers).dtype, name
    assert np.array_equal(table, expected.table().reshape(-1))


@needs_native
@pytest.mark.parametrize(
    ("crop", "size", "sure"),
    [
        (RandomResizedCrop(3, (0.25, 0.25), (1, 1)), 5, False),  # sides of 2.5: the exponential function decides
        (RandomResizedCrop(3, (0.25, 0.25), (1, 1)), 4, True),
        (RandomResizedCrop(3, ratio=(1e-320, 1)), 4, False),
        (RandomCrop(5), 4, False),  # NumPy finds that there is no such window
    ],
)
def test_numbers_that_may_be_rounded_either_way_are_left_to_numpy(crop, size, sure):
    drawn = native.draw_placement(Draws(0, 0, np.arange(8)).keys, np.array([[size, size]]), [packed_move(crop, 0)])
    assert (drawn is not None) == sure


class Shifted(RandomHorizontalFlip):
    """A transform of a user's that places in its own way."""

    def place(self, sizes, draws):
        placement = super().place(sizes, draws)
        placement.turned[:] = True
        return placement


def test_a_derived_transform_is_placed_by_its_own_method():
    placement = joint_placement([(0, Shifted(0.5))], np.array([[4, 4]]), Draws(0, 0, np.arange(8)))
    assert placement.turned.all()
