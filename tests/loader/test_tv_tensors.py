"""torchvision's v2 transforms: masks, boxes and points move with their images, however samples are read."""

from __future__ import annotations

import functools
import operator

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from fastload import FastLoader, OptionError, PackedDataset
from fastload import transforms as own
from fastload.format.ragged import Column
from fastload.transforms.tv_tensors import is_v2
from sample_files import write_packed, write_ragged

ROWS, HEIGHT, WIDTH = 8, 20, 16
COUNTS = [0, 1, 2, 3, 3, 2, 1, 3]
FIELDS = ("images", "masks", "boxes", "num_boxes", "box_labels", "keypoints", "landmarks", "bbox", "labels")


@pytest.fixture(scope="module")
def v2(torchvision_datasets):
    """torchvision.transforms.v2; the tests are skipped where it is not installed."""
    return pytest.importorskip("torchvision.transforms.v2")


@pytest.fixture(scope="module")
def tv(v2):
    from torchvision import tv_tensors

    return tv_tensors


def columns(form):
    """Returns boxes of up to three an image in a form, with what belongs to them, as packing writes it."""
    rng = np.random.default_rng(2)
    x, y = rng.integers(0, 8, (2, ROWS, 3)).astype(np.float32)
    w, h = rng.integers(3, 8, (2, ROWS, 3)).astype(np.float32)
    there = np.arange(3) < np.array(COUNTS)[:, None]
    numbers = (x, y, w, h) if form == "xywh" else (x, y, x + w, y + h)
    names = ("x", "y", "width", "height") if form == "xywh" else ("xmin", "ymin", "xmax", "ymax")
    keypoints = np.stack([rng.uniform(0, 16, (ROWS, 3, 2)), rng.uniform(0, 20, (ROWS, 3, 2))], axis=-1)
    seen = rng.integers(0, 3, (ROWS, 3, 2, 1)) * there[..., None, None]
    keypoints = np.concatenate([keypoints * (seen > 0), seen], axis=-1).astype(np.float32)
    boxes = (np.stack(numbers, axis=-1) * there[..., None]).astype(np.float32)
    return {
        "labels": Column(np.arange(ROWS)),
        "boxes": Column(boxes, {"names": names}),
        "num_boxes": Column(np.array(COUNTS)),
        "box_labels": Column(np.where(there, np.arange(3), -1)),
        "keypoints": Column(keypoints),
        "landmarks": Column(rng.uniform(0, 16, (ROWS, 6)).astype(np.float32)),
        "bbox": Column(np.tile(np.float32([1, 2, 9, 8]), (ROWS, 1)), {"names": names}),
    }


@pytest.fixture(scope="module", params=["xyxy", "xywh"])
def boxed(request, tmp_path_factory):
    """A file with all that moves, and the form of its boxes."""
    images = np.random.default_rng(1).integers(0, 256, (ROWS, HEIGHT, WIDTH, 3), dtype=np.uint8)
    path = tmp_path_factory.mktemp("boxed") / "b.h5"
    return write_packed(path, images, columns(request.param), masks=images[..., 0].copy()), request.param


def by_hand(tv, dataset, transform, index, form):
    """Returns a sample as torchvision moves it when each part is handed over by itself, and padded anew."""
    size = (HEIGHT, WIDTH)
    given = dict(zip(FIELDS, dataset[index], strict=True))
    n = COUNTS[index]
    boxes = tv.BoundingBoxes(given["boxes"][:n].clone(), format=form.upper(), canvas_size=size)
    points = tv.KeyPoints(given["keypoints"][:n, :, :2].clone(), canvas_size=size)
    landmarks = tv.KeyPoints(given["landmarks"].reshape(3, 2).clone(), canvas_size=size)
    bbox = tv.BoundingBoxes(given["bbox"][None].clone(), format=form.upper(), canvas_size=size)
    image, mask, boxes, points, landmarks, bbox = transform(
        tv.Image(given["images"]), tv.Mask(given["masks"]), boxes, points, landmarks, bbox
    )
    padded = torch.zeros(3, 4)
    padded[:n] = boxes
    keypoints = torch.zeros(3, 2, 3)
    seen = given["keypoints"][:n, :, 2:]
    keypoints[:n] = torch.cat([points, seen], dim=-1) * (seen > 0)
    moved = {"images": image, "masks": mask, "boxes": padded, "keypoints": keypoints}
    moved |= {"landmarks": landmarks.reshape(6), "bbox": bbox[0]}
    return tuple((given | moved)[name] for name in FIELDS)


def chosen(v2, name):
    """Returns transforms that draw nothing, so that any process and any order gives the same."""
    return {
        "flip": functools.partial(v2.RandomHorizontalFlip, p=1),
        "upside down": functools.partial(v2.RandomVerticalFlip, p=1),
        "crop": functools.partial(v2.CenterCrop, (12, 10)),
        "resize": functools.partial(v2.Resize, (10, 24)),
        "all": lambda: v2.Compose([v2.CenterCrop(14), v2.RandomHorizontalFlip(p=1), v2.Resize((9, 7))]),
    }[name]()


def same(found, expected):
    for name, one, other in zip(FIELDS, found, expected, strict=True):
        assert type(one) is torch.Tensor and torch.equal(one, other.as_subclass(torch.Tensor)), name


@pytest.mark.parametrize("name", ["flip", "upside down", "crop", "resize", "all"])
def test_masks_boxes_and_points_move_as_torchvision_moves_them_by_hand(v2, tv, boxed, name):
    path, form = boxed
    transform, plain = chosen(v2, name), PackedDataset(path, fields=FIELDS)
    dataset = PackedDataset(path, fields=FIELDS, transform=transform)
    expected = [by_hand(tv, plain, transform, index, form) for index in range(ROWS)]
    assert not torch.equal(expected[3][1], plain[3][1]) and not torch.equal(expected[3][2], plain[3][2])
    for index in range(ROWS):
        same(dataset[index], expected[index])
        assert not dataset[index][2][COUNTS[index] :].any(), "padding stays padding"


@pytest.mark.parametrize("name", ["flip", "all"])
def test_batches_of_both_loaders_are_the_samples_of_the_dataset(v2, boxed, name):
    dataset = PackedDataset(boxed[0], fields=FIELDS, transform=chosen(v2, name))
    whole = [torch.stack(values) for values in zip(*(dataset[i] for i in range(ROWS)), strict=True)]
    for loader in (
        DataLoader(dataset, batch_size=4),
        DataLoader(dataset, batch_size=4, num_workers=1),
        FastLoader(dataset, batch_size=4, shuffle=False, workers=1),
    ):
        batches = [[values.clone() for values in batch] for batch in loader]
        assert len(batches) == 2
        same([torch.cat(values) for values in zip(*batches, strict=True)], whole)


def test_the_number_of_boxes_is_seen_without_its_field_and_dtypes_are_those_of_the_transform(v2, boxed):
    flip = v2.Compose([v2.RandomHorizontalFlip(p=1), v2.ToDtype(torch.float32, scale=True)])
    image, boxes, valid = PackedDataset(boxed[0], fields=("images", "boxes", "pixel_mask"), transform=flip)[1]
    assert image.dtype == torch.float32 and image.max() <= 1 and valid.dtype == torch.bool and valid.all()
    assert boxes[0].any() and not boxes[1:].any()


def test_images_of_several_sizes_have_canvases_of_their_own(v2, tmp_path):
    rng = np.random.default_rng(3)
    images = [rng.integers(0, 256, (6 + i, 9 - i, 3), dtype=np.uint8) for i in range(4)]
    boxes = np.tile(np.float32([[[0, 1, 2, 4]]]), (4, 1, 1))
    path = write_ragged(
        tmp_path / "r.h5",
        images,
        {"boxes": Column(boxes, {"names": ("xmin", "ymin", "xmax", "ymax")})},
        masks=[image[..., 0].copy() for image in images],
    )
    dataset = PackedDataset(path, fields=("images", "masks", "boxes"), transform=v2.RandomHorizontalFlip(p=1))
    for image, (flipped, mask, moved) in zip(images, dataset, strict=True):
        assert np.array_equal(flipped.permute(1, 2, 0), image[:, ::-1]) and torch.equal(flipped[0], mask)
        assert moved.tolist() == [[image.shape[1] - 2, 1, image.shape[1], 4]]


def labels_of_boxes(sample):
    return (sample[2],)


def test_boxes_that_the_transform_removes_take_their_labels_along_or_are_refused(v2, boxed):
    path, fields = boxed[0], ("images", "boxes", "box_labels", "num_boxes")
    crop, small = v2.CenterCrop((10, 6)), 5
    named = v2.Compose([crop, v2.SanitizeBoundingBoxes(min_size=small, labels_getter=labels_of_boxes)])
    nameless = v2.Compose([crop, v2.SanitizeBoundingBoxes(min_size=small, labels_getter=None)])
    before, dataset = (
        PackedDataset(path, fields=fields, transform=crop),
        PackedDataset(path, fields=fields, transform=named),
    )
    fewer = 0
    for index in range(ROWS):
        _, boxes, labels, count = before[index]
        size = boxes[:, 2:] - (boxes[:, :2] if boxed[1] == "xyxy" else 0)
        stays = (size >= small).all(dim=-1) & (torch.arange(3) < count)
        _, kept, kept_labels, number = dataset[index]
        assert number == stays.sum() and torch.equal(kept[:number], boxes[stays]) and not kept[number:].any()
        assert torch.equal(kept_labels[:number], labels[stays]) and (kept_labels[number:] == -1).all()
        fewer += int(number < count)
    assert fewer
    with pytest.raises(OptionError, match=r"did not remove the same rows of box_labels.*returns \(sample\[2\],\)"):
        list(PackedDataset(path, fields=fields, transform=nameless))


def test_coordinates_of_which_the_form_is_not_known_are_refused_when_the_dataset_is_made(v2, tmp_path):
    images = np.zeros((2, 8, 8, 3), np.uint8)
    path = write_packed(tmp_path / "n.h5", images, {"bbox": Column(np.ones((2, 4), np.float32))})
    with pytest.raises(OptionError, match=r"coordinates in bbox cannot follow.*sample\[0\]"):
        PackedDataset(path, fields=("images", "bbox"), transform=v2.RandomHorizontalFlip())
    assert PackedDataset(path, fields=("bbox",), transform=v2.Identity())[0][0].tolist() == [1, 1, 1, 1]


def test_a_transform_that_makes_something_else_of_the_sample_keeps_its_form(v2, boxed):
    class Named(v2.Transform):
        def forward(self, sample):
            return {"image": sample[0], "mask": sample[1]}

    found = PackedDataset(boxed[0], fields=("images", "masks"), transform=Named())[0]
    assert set(found) == {"image", "mask"} and type(found["mask"]) is torch.Tensor


@pytest.fixture(scope="module")
def v1(v2):
    from torchvision import transforms

    return transforms


class Own(torch.nn.Module):
    def forward(self, sample):
        return sample


WRAPPED = {
    "a Sequential": lambda v1, v2, one: torch.nn.Sequential(one, Own()),
    "a Compose of the older ones": lambda v1, v2, one: v1.Compose([one]),
    "its forward": lambda v1, v2, one: one.forward,
    "its call": lambda v1, v2, one: one.__call__,
    "a partial": lambda v1, v2, one: functools.partial(one),
    "several of these": lambda v1, v2, one: v1.Compose([torch.nn.Sequential(Own()), v1.Lambda(one.forward)]),
    "a list that draws": lambda v1, v2, one: v2.RandomOrder([one]),
    "an older one that draws": lambda v1, v2, one: v1.RandomApply([one], p=1),
    "compiled": lambda v1, v2, one: torch.compile(one, backend="eager"),
}


@pytest.mark.parametrize("form", WRAPPED)
def test_masks_follow_v2_transforms_within_lists_methods_and_partials(v1, v2, boxed, form):
    dataset = PackedDataset(boxed[0], fields=("images", "masks"), transform=v2.RandomHorizontalFlip(p=1))
    wrapped = WRAPPED[form](v1, v2, v2.RandomHorizontalFlip(p=1))
    if form == "compiled":  # to be seen, not to be run: what it compiles is torchvision's affair
        assert is_v2(wrapped)
        return
    found = PackedDataset(boxed[0], fields=("images", "masks"), transform=wrapped)[3]
    assert all(
        type(one) is torch.Tensor and torch.equal(one, other) for one, other in zip(found, dataset[3], strict=True)
    )


@pytest.mark.parametrize("form", ["flip", "list", "function", "partial"])
def test_transforms_of_one_image_are_refused_for_samples(v1, v2, boxed, form):
    given = {
        "flip": lambda: v1.RandomHorizontalFlip(),
        "list": lambda: v1.Compose([torch.nn.Sequential(v1.RandomHorizontalFlip())]),
        "function": lambda: v2.functional.horizontal_flip,
        "partial": lambda: functools.partial(v1.functional.hflip),
    }[form]()
    with pytest.raises(OptionError, match=r"of torchvision takes an image alone.*torchvision\.transforms\.v2"):
        PackedDataset(boxed[0], fields=("images", "masks"), transform=given)


def test_code_of_the_user_s_own_that_calls_torchvision_is_left_alone(v1, v2, boxed):
    class Paired(v1.RandomHorizontalFlip):
        def forward(self, sample):
            return tuple(part.flip(-1) for part in sample)

    image, mask = PackedDataset(boxed[0], fields=("images", "masks"), transform=Paired())[3]
    assert torch.equal(image[0], mask)

    only = PackedDataset(boxed[0], transform=v1.Compose([operator.itemgetter(0), v1.RandomHorizontalFlip(p=1)]))[3]
    assert torch.equal(only, image)

    class Each(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.flip = v2.RandomHorizontalFlip(p=1)

        def forward(self, images):
            return torch.stack([self.flip(image) for image in images])

    def flipped(images):
        return v2.functional.horizontal_flip(images)

    plain = next(iter(FastLoader(boxed[0], batch_size=2, shuffle=False, workers=1)))[0]
    for own_code in (Each(), flipped, torch.nn.Sequential(Each()), v1.Lambda(flipped)):
        loader = FastLoader(boxed[0], batch_size=2, shuffle=False, workers=1, transform=[own_code])
        assert torch.equal(next(iter(loader))[0], plain.flip(-1))


@pytest.mark.parametrize("form", ["list", "alone", "composed"])
def test_v2_transforms_of_whole_batches_are_refused_by_the_name_of_ours(v2, boxed, form):
    flip, blur, scale = v2.RandomHorizontalFlip(), v2.GaussianBlur(3), v2.ToDtype(torch.float32, scale=True)
    given = {"list": [own.RandomVerticalFlip(), flip, blur, scale], "alone": flip}
    given["composed"] = [v2.Compose([flip, blur, scale])]
    with pytest.raises(
        OptionError, match=r"fastload.transforms' RandomHorizontalFlip.*PackedDataset\(transform"
    ) as error:
        FastLoader(boxed[0], batch_size=2, transform=given[form])
    if form != "alone":
        assert "has no GaussianBlur" in str(error.value) and "Leave ToDtype out" in str(error.value)
    with pytest.raises(OptionError, match="would draw once for a whole batch"):
        FastLoader(torch.utils.data.TensorDataset(torch.zeros(4, 3, 8, 8)), batch_size=2, transform=given[form])


@pytest.mark.parametrize(
    "make",
    [
        *(lambda v1, v2, of=of: of(v1, v2, v2.RandomHorizontalFlip()) for of in WRAPPED.values()),
        lambda v1, v2: v1.RandomHorizontalFlip(),
        lambda v1, v2: v1.Compose([v1.RandomCrop(4)]),
        lambda v1, v2: torch.nn.Sequential(v1.RandomRotation(9), v1.RandomVerticalFlip()),
        lambda v1, v2: v1.AutoAugment(),
        lambda v1, v2: v1.RandomHorizontalFlip().forward,
    ],
)
def test_transforms_of_torchvision_are_refused_for_batches_however_they_are_given(v1, v2, boxed, make):
    with pytest.raises(OptionError, match="of torchvision would draw once for a whole batch"):
        FastLoader(PackedDataset(boxed[0], fields=("images", "masks")), batch_size=2, transform=[make(v1, v2)])


def test_of_transforms_that_draw_nothing_only_what_is_true_is_said(v1, v2, boxed):
    still = [v2.Identity(), v2.ToDtype(torch.float32, scale=True), v2.Normalize((0.5,), (0.5,)), v1.CenterCrop(4)]
    for given in (still, [v2.functional.horizontal_flip], [functools.partial(v1.functional.vflip)]):
        with pytest.raises(OptionError, match="would get the images of a batch alone") as error:
            FastLoader(boxed[0], batch_size=2, transform=given)
        assert "draw" not in str(error.value)
        if given is still:
            assert "Take fastload.transforms' Normalize, CenterCrop" in str(error.value)
            assert "Leave Identity, ToDtype out" in str(error.value)
