"""Images of several sizes in a loader: decoded, cut and resized by the reading threads, as if all had one size."""

from __future__ import annotations

import io
from contextlib import suppress
from pathlib import Path

import h5py
import numpy as np
import pytest
import simplejpeg
import torch
from alone import augmentation, opened, run_alone, untouched
from PIL import Image
from small_loaders import loader_of

import fastload
from fastload import FastLoader, FormatError, OptionError, PackedDataset
from fastload.format.ragged import Column
from fastload.images.decode_part import decode_row
from fastload.plan import PlannedBatch
from fastload.prefetch.stages import cut
from fastload.prefetch.stages.cut import SCRATCH_BYTES, CutRows, PlacedRows, runs
from fastload.prefetch.stages.gather import GatherRows
from fastload.prefetch.stages.transform import TransformInThread
from fastload.prefetch.stages.variable_size import PIXELS
from fastload.transforms import (
    CenterCrop,
    ColorJitter,
    Draws,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    apply_transforms,
)
from fastload.transforms.engine.decode_time_resize import find_decode_time_resize
from sample_files import write_ragged

TRAINING = [RandomResizedCrop(24), RandomHorizontalFlip()]


def photo(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    small = rng.integers(0, 256, (6, 6, 3), np.uint8)
    return np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))


def jpeg(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=90, restart_marker_rows=1)
    return file.getvalue()


@pytest.fixture(scope="module")
def photos() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [photo(rng, *rng.integers(30, 130, 2).tolist()) for _ in range(22)]


def columns(photos: list[np.ndarray]) -> dict[str, Column]:
    boxes = np.array([[1, 2, image.shape[1] - 3, image.shape[0] - 1] for image in photos], np.float32)
    return {
        "labels": Column(np.arange(len(photos)) % 3),
        "bbox": Column(boxes, {"names": ("xmin", "ymin", "xmax", "ymax")}),
    }


@pytest.fixture(scope="module")
def raw(photos: list[np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sizer") / "raw.h5"
    masks = [image[..., 0] // 64 for image in photos]
    return write_ragged(path, photos, columns(photos), masks=masks, chunk_bytes=60_000, ignore_index=255)


@pytest.fixture(scope="module")
def stored(photos: list[np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[np.ndarray]]:
    """JPEGs, one row in four still raw, one in four turned; and the pixels that they decode to."""
    rows, pixels = [], []
    for number, image in enumerate(photos):
        if number % 4 == 1:
            rows.append(image)
            pixels.append(image)
            continue
        orientation = 6 if number % 4 == 2 else 1
        shape = (image.shape[1], image.shape[0], 3) if orientation == 6 else image.shape
        rows.append((jpeg(image), shape, orientation))
        pixels.append(decode_row(rows[-1][0], 1, shape, orientation, np.dtype(np.uint8)))
    path = tmp_path_factory.mktemp("sizer") / "jpeg.h5"
    return write_ragged(path, rows, columns(photos)), pixels


def batches(path: Path, transform: list[object], fields=("images", "row"), **options: object) -> list[torch.Tensor]:
    """The fields of an epoch in the order of rows."""
    loader = loader_of(path, 5, fields=fields, ends="exact", transform=transform, **options)
    parts = [[part[batch.valid] for part in batch] for batch in loader]
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def one_by_one(images: list[np.ndarray], transform: list[object]) -> torch.Tensor:
    """What the transforms make of each image as a batch of its own."""
    made = []
    for row, image in enumerate(images):
        batch = torch.from_numpy(image.copy()).permute(2, 0, 1)[None]
        made.append(apply_transforms(transform, {"images": batch}, Draws(0, 0, np.array([row])))["images"])
    return torch.cat(made)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("read", ["map", "pread"])
def test_each_image_is_what_a_file_of_its_size_would_give(raw, photos, read, workers):
    images, rows = batches(raw, TRAINING, shuffle=True, read=read, workers=workers)
    assert images.shape == (22, 3, 24, 24) and images.dtype == torch.uint8
    assert sorted(rows.tolist()) == list(range(22))
    expected = one_by_one(photos, TRAINING)[rows]
    assert (images.int() - expected.int()).abs().max() <= 1  # rounded after each axis where height is lost
    evaluation = [Resize(32), CenterCrop(28)]
    images, rows = batches(raw, evaluation, shuffle=False, read=read, workers=workers)
    assert (images.int() - one_by_one(photos, evaluation)[rows].int()).abs().max() <= 1


def test_stored_jpegs_raw_rows_and_turned_ones_side_by_side(stored):
    path, pixels = stored
    transform = [RandomResizedCrop(64, scale=(0.9, 1.0)), RandomHorizontalFlip()]  # too large to be decoded smaller
    images, rows = batches(path, transform, shuffle=False)
    assert (images.int() - one_by_one(pixels, transform)[rows].int()).abs().max() <= 1


def test_decoded_smaller_is_close_and_masks_and_boxes_see_the_same_window(photos, raw, tmp_path):
    path = write_ragged(
        tmp_path / "both.h5", [(jpeg(image), image.shape, 1) for image in photos], columns(photos),
        masks=[image[..., 0] // 64 for image in photos],
    )  # fmt: skip
    transform = [RandomResizedCrop(12, scale=(0.5, 1.0)), RandomHorizontalFlip()]
    fields = ("images", "masks", "bbox")
    (images, masks, boxes), (exact, raw_masks, raw_boxes) = (
        batches(file, transform, fields, shuffle=False) for file in (path, raw)
    )
    # Windows are snapped to whole pixels of the smaller image: less than one of the output off.
    assert (images.float() - exact.float()).abs().mean() < 12
    assert (boxes - raw_boxes).abs().max() <= 1.5 and boxes.dtype == torch.float32
    assert (masks == raw_masks).float().mean() > 0.85 and masks.shape == (22, 12, 12)


def test_padding_and_two_resizes_go_one_by_one(raw, photos):
    for transform in ([RandomCrop(100, pad_if_needed=True)], [Resize(40), RandomResizedCrop(20)]):
        images, masks = batches(raw, transform, ("images", "masks"), shuffle=False)
        assert torch.equal(images, one_by_one(photos, transform))
        assert masks.shape[1:] == images.shape[2:]


def test_what_follows_is_done_in_the_threads_too(raw, photos):
    colour = [*TRAINING, ColorJitter(0.4, 0.4), Normalize((0.5,) * 3, (0.25,) * 3)]
    for transform in ([*TRAINING, colour[-1]], colour):
        images, rows = batches(raw, transform, shuffle=False)
        assert images.dtype == torch.float32
        assert (images - one_by_one(photos, transform)[rows]).abs().max() < 0.08  # a level is 0.016


def test_sixteen_bits(photos, tmp_path):
    deep = [image.astype(np.uint16) * 257 for image in photos[:5]]
    path = write_ragged(tmp_path / "deep.h5", deep)
    images, rows = batches(path, TRAINING, shuffle=False)
    assert images.dtype == torch.uint16
    expected = one_by_one(deep, TRAINING)[rows]
    assert torch.equal(images.view(torch.int16), expected.view(torch.int16))


def test_echoes_share_their_crop_and_flip_anew(raw):
    loader = FastLoader(raw, 22, shuffle=False, transform=[RandomResizedCrop(24), RandomHorizontalFlip()], echo=4)
    uses = [images for images, _ in loader]
    assert len(uses) == 4
    for use in uses[1:]:
        same = (use == uses[0]).flatten(1).all(1)
        mirrored = (use.flip(3) == uses[0]).flatten(1).all(1)
        assert bool((same | mirrored).all())
    assert any(not torch.equal(use, uses[0]) for use in uses[1:])


def test_jpegs_of_one_size_need_no_transform(photos, tmp_path):
    rng = np.random.default_rng(1)
    images = [photo(rng, 40, 50) for _ in range(6)]
    path = write_ragged(tmp_path / "one.h5", [(jpeg(image), image.shape, 1) for image in images])
    (whole,) = next(iter(FastLoader(path, 6, shuffle=False)))
    assert whole.shape == (6, 3, 40, 50)
    decoded = [decode_row(jpeg(image), 1, image.shape, 1, np.dtype(np.uint8)) for image in images]
    assert torch.equal(whole, torch.from_numpy(np.stack(decoded)).permute(0, 3, 1, 2))
    (flipped,) = next(iter(FastLoader(path, 6, shuffle=False, transform=[RandomHorizontalFlip(p=1)])))
    assert torch.equal(flipped, whole.flip(3)), "without a transform that gives them a size either"
    (cut,) = next(iter(FastLoader(path, 6, shuffle=False, transform=TRAINING)))
    assert (cut.int() - one_by_one(decoded, TRAINING).int()).abs().max() <= 1


@pytest.mark.parametrize(
    ("transform", "fields", "message"),
    [
        ([], None, r"differ in size.*RandomResizedCrop\(224\).*--size"),
        ([ColorJitter(0.1), RandomResizedCrop(24)], None, "stands before any"),
        ([], ("masks",), "Add images to fields"),
        ([CenterCrop(120)], None, r"image of \d+x\d+"),
        (
            [Resize(32, max_size=33), CenterCrop(32)],
            None,
            r"leaves a shorter side below 32 here: leave max_size out(?!.*pack larger)",
        ),
    ],
)
def test_images_that_do_not_get_one_size_are_refused_with_the_mend(raw, transform, fields, message):
    with pytest.raises(OptionError, match=message):
        list(FastLoader(PackedDataset(raw, fields=fields), 4, transform=transform))


def test_a_jpeg_that_was_packed_broken_is_named_and_said_to_be_so(photos, tmp_path):
    data = [jpeg(image) for image in photos]
    data[7] = data[7][:200] + bytes(len(data[7]) - 200)
    path = write_ragged(tmp_path / "bad.h5", [(one, image.shape, 1) for one, image in zip(data, photos, strict=True)])
    for read in (lambda: list(FastLoader(path, 4, transform=TRAINING)), lambda: PackedDataset(path)[7]):
        with pytest.raises(FormatError, match=r"sample '00000007' \(row 7\).*was packed like that.*--on-error skip"):
            read()


@pytest.mark.parametrize("transform", [TRAINING, [RandomCrop(100, pad_if_needed=True)]])
def test_masks_in_rows_beside_jpegs_of_one_size(transform, tmp_path):
    rng = np.random.default_rng(2)
    images = [photo(rng, 60, 50) for _ in range(8)]
    source = tmp_path / "source"
    for folder in ("images", "masks"):
        (source / folder).mkdir(parents=True)
    for number, image in enumerate(images):
        (source / "images" / f"{number}.jpg").write_bytes(jpeg(image))
        Image.fromarray(image[..., 0] // 64).save(source / "masks" / f"{number}.png")
    path = tmp_path / "out.h5"
    fastload.pack_images(source, path, store="source", shuffle=False, workers=0)
    made, masks = batches(path, transform, ("images", "masks"), shuffle=False)
    exact = tmp_path / "exact.h5"
    fastload.pack_images(source, exact, shuffle=False, workers=0)
    expected, right = batches(exact, transform, ("images", "masks"), shuffle=False)
    assert torch.equal(masks, right) and (made.int() - expected.int()).abs().max() <= 1


def test_a_window_of_a_jpeg_decoded_smaller_is_the_one_that_its_mask_sees(tmp_path):
    """Bright from one row on, in image and mask: both show the step at the same place, at every factor."""
    rows, masks = [], []
    for number in range(40):
        height = 200 + 37 * number
        image = np.zeros((height, 64, 3), np.uint8)
        image[height // 2 :] = 255
        rows.append((jpeg(image), image.shape, 1))
        masks.append(image[..., 0])
    path = write_ragged(tmp_path / "steps.h5", rows, masks=masks)
    images, shown = batches(path, [RandomResizedCrop((24, 8), scale=(0.7, 1.0), ratio=(0.02, 2))], ("images", "masks"))
    steps = (images[:, 0, :, 4] > 127).sum(1) - (shown[:, :, 4] > 127).sum(1)
    assert steps.abs().max() <= 1


def test_a_jpeg_that_only_pillow_decodes_is_taken_at_full_size(photos, tmp_path, monkeypatch):
    """libjpeg warns of what Pillow accepts: it is decoded whole, beside others that are decoded smaller."""
    image = photo(np.random.default_rng(3), 200, 160)
    odd = bytearray(jpeg(image))
    at = len(odd) // 2
    while True:  # until a changed byte makes libjpeg warn
        odd[at] ^= 0x10
        with suppress(ValueError):
            simplejpeg.decode_jpeg(bytes(odd))
            at += 7
            continue
        break
    expected = np.asarray(Image.open(io.BytesIO(bytes(odd))).convert("RGB"))
    path = write_ragged(tmp_path / "odd.h5", [(one, image.shape, 1) for one in (jpeg(image), bytes(odd), jpeg(image))])
    monkeypatch.setattr(cut, "SCRATCH_BYTES", 3 * 25 * 20 * 3)  # no room for it beside the others
    (images,) = batches(path, [Resize((25, 20))], ("images",), shuffle=False)
    assert (images[1:2].int() - one_by_one([expected], [Resize((25, 20))]).int()).abs().max() <= 1
    assert torch.equal(images[0], images[2]) and not torch.equal(images[0], images[1])


def stages(path: Path, transform: list[object], **options: object) -> dict[str, float]:
    """Seconds of each stage, in threads and of a whole epoch."""
    with fastload.Meter() as meter:
        loader = loader_of(path, 5, fields=["images"], transform=transform, **options)
        for _ in meter.watch(loader):
            pass
    demands = meter.demands(loader)
    assert (demands.compression_ratio > 1) == (path.name == "jpeg.h5")
    names = {name for batch in demands.batches for name in batch.stages}
    return {
        name: sum(batch.stages[name].running_s for batch in demands.batches if name in batch.stages) for name in names
    }


@pytest.mark.parametrize("read", ["map", "pread"])
def test_only_what_is_decoded_is_booked_as_decoding(raw, stored, read):
    of_raw, of_jpeg = (stages(path, TRAINING, read=read) for path in (raw, stored[0]))
    assert "decoding" not in of_raw and of_raw["transform"] > 0
    assert of_jpeg["decoding"] > 0 and of_jpeg["transform"] > 0
    one_by_one = stages(raw, [RandomCrop(100, pad_if_needed=True)], read=read)
    assert "decoding" not in one_by_one and one_by_one["transform"] > 0


def test_a_jpeg_that_still_opens_but_changed_after_packing_is_an_error(photos, tmp_path):
    data = [jpeg(image) for image in photos[:6]]
    path = write_ragged(
        tmp_path / "quiet.h5", [(one, image.shape, 1) for one, image in zip(data, photos, strict=False)]
    )
    with h5py.File(path, "r+") as file:
        first, size = int(file["images_offset"][4]), int(file["images_bytes"][4])
        middle = first + size // 2
        file["images"][middle : middle + size // 4] = 0  # gray for Pillow, a warning for libjpeg
    for transform in (TRAINING, [Resize((12, 12))]):
        with pytest.raises(FormatError, match=r"\(row 4\).*damaged after packing"):
            batches(path, transform, ("images",), shuffle=False)
    with pytest.raises(FormatError, match=r"\(row 4\).*damaged after packing"):
        PackedDataset(path)[4]


# The stage alone


def plan_of(rows):
    return PlannedBatch(rows, np.ones(len(rows), np.bool_), len(rows), 0)


def cut_alone(path, transforms, rows, *, behind=(), fields=("images", "labels"), epoch=0):
    """A batch of rows, decoded and cut by the first transforms; others are to run behind it."""
    everything = [*transforms, *behind]
    with opened(PackedDataset(path, fields=fields), transform=everything) as shared:
        dataset = shared.options.packed.dataset
        head = find_decode_time_resize(tuple(everything), 3, torch.uint8, name="it")
        assert head.count == len(transforms)
        gather = GatherRows(dataset, [name for name in fields if name not in PIXELS], into_slot=False)
        stage = CutRows(dataset, augmentation(shared, everything, head.count), head, tuple(behind))
        return stage, run_alone(shared, [gather, stage], rows, epoch=epoch)


def test_alone_it_decodes_into_the_slot_and_moves_masks_and_boxes_with_their_images(raw, photos):
    fields, rows = ("images", "masks", "labels", "bbox"), [5, 21, 0, 5, 13]
    evaluation = [Resize(32), CenterCrop(28)]
    stage, work = cut_alone(raw, evaluation, rows, fields=fields)
    expected = one_by_one(photos, evaluation)[rows]
    found = work.fields["images"]
    assert found.data_ptr() == work.targets["images"].data_ptr() and work.arrays["images"].shape == (5, 28, 28, 3)
    assert (found.int() - expected.int()).abs().max() <= 1
    assert work.fields["masks"].shape == (5, 28, 28) and work.arrays["masks"].dtype == np.uint8
    assert work.fields["bbox"].dtype == torch.float32 and work.arrays["bbox"].dtype == np.float32
    fields_of = batches(raw, evaluation, fields, shuffle=False)
    for name, whole in zip(fields[1:], fields_of[1:], strict=True):
        assert torch.equal(work.fields[name], whole[rows]), name
    assert work.bytes_read == sum(photos[row].nbytes for row in rows) + sum(4 * 4 + 8 for _ in rows)
    assert stage.divisible and stage.why.startswith("Resize, CenterCrop")


def test_alone_a_row_is_cut_anew_in_each_epoch(raw, photos):
    crop = TRAINING[:1]
    first, again, later = (cut_alone(raw, crop, [4, 9], epoch=epoch)[1].fields["images"] for epoch in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, later)
    assert (first.int() - one_by_one(photos, crop)[[4, 9]].int()).abs().max() <= 1


def test_alone_a_normalize_that_follows_is_done_with_it_and_other_transforms_get_images_beside_the_slot(raw, photos):
    evaluation, normalize = [Resize(32), CenterCrop(28)], Normalize((0.5,) * 3, (0.25,) * 3)
    with opened(PackedDataset(raw), transform=[*evaluation, normalize]) as shared:
        dataset = shared.options.packed.dataset
        head = find_decode_time_resize((*evaluation, normalize), 3, torch.uint8, name="it")
        every = augmentation(shared, [*evaluation, normalize], head.count)
        made = [
            GatherRows(dataset, ["labels"], into_slot=False),
            CutRows(dataset, every, head, (normalize,)),
            TransformInThread(every, None),
        ]
        work = run_alone(shared, made, [3, 8])
    assert work.fields["images"].data_ptr() == work.targets["images"].data_ptr()
    assert work.arrays["images"].dtype == np.float32
    expected = one_by_one(photos, [*evaluation, normalize])[[3, 8]]
    assert (work.fields["images"] - expected).abs().max() < 0.02  # a level is 0.016
    _, work = cut_alone(raw, evaluation, [3, 8], behind=[ColorJitter(0.2)])
    assert work.fields["images"].data_ptr() != work.targets["images"].data_ptr() and untouched(work.arrays["images"])


def test_alone_of_a_jpeg_no_more_is_decoded_than_suffices(stored):
    path, pixels = stored
    with opened(PackedDataset(path), transform=[Resize((8, 8))]) as shared:
        rows = np.arange(len(pixels))
        head = find_decode_time_resize((Resize((8, 8)),), 3, torch.uint8, name="it")
        index = shared.reader.within(rows, lambda: shared.reader.encoded("images").index(rows))
        placement = head.placement(index.shape[:, :2], augmentation(shared, [Resize((8, 8))]).draws(0, plan_of(rows)))
        factors = PlacedRows.factors(placement, index)
    sizes = np.array([one.shape[:2] for one in pixels]).min(axis=1)
    expected = [1 if at % 4 == 1 else max(n for n in (1, 2, 4, 8) if size >= 8 * n) for at, size in enumerate(sizes)]
    assert factors.tolist() == expected and {1, 4, 8} <= set(expected)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([row_bytes := SCRATCH_BYTES // 2, row_bytes, 1], [(0, 2), (2, 3)]),
        ([9 * row_bytes, 1, 1], [(0, 1), (1, 3)]),
        ([1, 9 * row_bytes, 1], [(0, 1), (1, 2), (2, 3)]),
    ],
)
def test_images_are_decoded_a_few_at_a_time(sizes, expected):
    assert [(some.start, some.stop) for some in runs(np.array(sizes, np.int64))] == expected
