"""What belongs to an image goes where the image goes: masks, boxes, arrays; and samples without any image."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from interrupted import stop_at
from numpy.typing import NDArray
from PIL import Image

from fastload import pack_images
from fastload.errors import OptionError, SourceError
from fastload.format.header import read_header
from fastload.format.ragged import Column
from fastload.inspection.verify import verify_file
from fastload.options.pack import PackOptions, SourceOptions
from fastload.pack import PackJob, pack_listing
from fastload.repack import repack_file
from fastload.sources.layouts import list_source
from fastload.sources.listing import Listing, Masks
from fastload.sources.raw_rows import MemoryRows

H, W = 40, 56


def drawn(root: Path, count: int, size: tuple[int, int] = (H, W)) -> Path:
    """Images with a white rectangle, its mask of the image's number + 1, of images/ and masks/."""
    rng = np.random.default_rng(3)
    (root / "images").mkdir(parents=True)
    (root / "masks").mkdir()
    for i in range(count):
        pixels = rng.integers(0, 120, (*size, 3), dtype=np.uint8)
        mask = np.zeros(size, np.uint8)
        pixels[10:20, 8:32], mask[10:20, 8:32] = 255, i % 200 + 1
        Image.fromarray(pixels).save(root / "images" / f"{i:03d}.png")
        Image.fromarray(mask).save(root / "masks" / f"{i:03d}.png")
    return root


def listed(root: Path, *, split_at: int | None = None) -> Listing:
    listing = list_source(root, "mask-folders")
    count = len(listing)
    split = (np.arange(count) >= (split_at or count)).astype(np.uint8)
    boxes = np.tile(np.array([[8, 10, 24, 10], [0, 0, 0, 0]], np.float32), (count, 1, 1))
    columns = {
        "number": Column(np.arange(count)),
        "boxes": Column(boxes, {"names": ("x", "y", "width", "height")}, "xywh"),
    }
    assert listing.masks is not None
    return replace(
        listing, split=split, split_names=("train", "val")[: int(split.max()) + 1], columns=columns,
        masks=replace(listing.masks, ignore_index=255),
    )  # fmt: skip


def pack(listing: Listing, output: Path, **options: object) -> h5py.File:
    # Without worker processes, unless a test is about them: a few images are packed before one has started.
    workers, on_error = options.pop("workers", 0), options.pop("on_error", "fail")
    pack_listing(PackJob("SRC", output, listing, PackOptions(**options), on_error), workers)  # type: ignore[arg-type]
    report = verify_file(output)
    assert report.ok and report.header_ok
    return h5py.File(output)


def assert_holds(file: h5py.File, root: Path, numbers: set[int]) -> None:
    """Each row has image and mask of its number, and there are these numbers."""
    assert sorted(file["number"][()].tolist()) == sorted(numbers)
    for row, number in enumerate(file["number"][()].tolist()):
        for name in ("images", "masks"):
            assert np.array_equal(file[name][row], np.asarray(Image.open(root / name / f"{number:03d}.png")))


def rectangle(mask: NDArray[np.uint8]) -> tuple[int, int, int, int]:
    rows, columns = np.nonzero((mask > 0) & (mask < 255))
    return int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_mask_lies_in_the_row_of_its_image(tmp_path: Path, workers: int) -> None:
    root = drawn(tmp_path / "src", 70)
    with pack(listed(root, split_at=50), tmp_path / "a.h5", workers=workers, chunk_bytes=32_000) as file:
        assert file["masks"].dtype == np.uint8 and file["masks"].shape == (70, H, W)
        assert file["masks"].attrs["ignore_index"] == 255
        assert_holds(file, root, set(range(70)))
    assert read_header(tmp_path / "a.h5").fields["masks"].offset is not None


@pytest.mark.parametrize("fit", ["crop", "pad", "stretch"])
def test_resizing_moves_image_mask_and_boxes_together(tmp_path: Path, fit: str) -> None:
    root = drawn(tmp_path / "src", 3)
    with pack(listed(root), tmp_path / "a.h5", size=(60, 60), fit=fit) as file:
        for row in range(3):
            left, top, right, bottom = rectangle(file["masks"][row])
            x, y, width, height = file["boxes"][row, 0]
            assert np.abs(np.array([x, y, x + width, y + height]) - (left, top, right, bottom)).max() <= 1
            white = (file["images"][row] > 200).all(axis=2)
            assert abs(int(white.sum()) - (right - left) * (bottom - top)) < 0.15 * white.sum()
            assert not file["boxes"][row, 1].any()
        assert set(np.unique(file["masks"])) <= {0, 1, 2, 3, 255}, "never blended"
        assert (file["masks"][0, 0, 0] == 255) == (fit == "pad")


def test_an_image_without_a_mask_has_one_of_ignored_pixels(tmp_path: Path) -> None:
    root = drawn(tmp_path / "src", 4)
    whole = listed(root)
    assert whole.masks is not None
    masks = replace(whole.masks, present=np.arange(4) != 2)
    with pack(replace(whole, masks=masks), tmp_path / "a.h5", shuffle=False) as file:
        assert (file["masks"][2] == 255).all() and not (file["masks"][1] == 255).any()
    some = Masks(MemoryRows.of(np.full((4, 28, 28), 7, np.uint8)), np.arange(4) != 2, (), 255)
    with pack(arrays(4, masks=some), tmp_path / "c.h5", shuffle=False) as file:
        assert file["masks"][:, 0, 0].tolist() == [7, 7, 255, 7]
    with pytest.raises(SourceError, match=r"images have no mask \(1\): images/002.png.*--masks none"):
        pack(replace(whole, masks=replace(masks, ignore_index=None)), tmp_path / "b.h5")


@pytest.mark.parametrize("shuffle", [True, False])
def test_samples_left_out_take_their_masks_with_them(tmp_path: Path, shuffle: bool) -> None:
    root = drawn(tmp_path / "src", 90)
    Image.new("L", (W - 1, H)).save(root / "masks" / "007.png")
    (root / "images" / "011.png").write_bytes((root / "images" / "011.png").read_bytes()[:-3000])
    (root / "masks" / "060.png").write_bytes((root / "masks" / "060.png").read_bytes()[:60])
    with pytest.raises(SourceError, match=f"007.png: its mask is {W - 1}x{H}, the image {W}x{H}"):
        pack(listed(root, split_at=50), tmp_path / "a.h5")
    with pack(
        listed(root, split_at=50), tmp_path / "a.h5", on_error="skip", shuffle=shuffle, chunk_bytes=32_000
    ) as file:
        assert_holds(file, root, set(range(90)) - {7, 11, 60})
        assert shuffle or (np.diff(file["number"]) > 0).all()


@pytest.mark.parametrize("codec", ["none", "gzip"])
def test_skipping_after_a_failure_gives_the_bytes_of_skipping_at_once(tmp_path: Path, codec: str) -> None:
    """What the first call wrote is kept, though masks then lie elsewhere, and other rows share a chunk."""
    root = drawn(tmp_path / "src", 60)
    path = root / "images" / "041.png"
    path.write_bytes(path.read_bytes()[:-3000])
    options = {"shuffle": False, "chunk_bytes": 32_000, "codec": codec}
    pack(listed(root), tmp_path / "whole.h5", on_error="skip", **options)
    with pytest.raises(SourceError, match=r"041\.png"):
        pack(listed(root), tmp_path / "a.h5", **options)
    report = pack_listing(PackJob("S", tmp_path / "a.h5", listed(root), PackOptions(**options), "skip"), workers=0)
    assert report.chunks_kept >= 7 and report.num_samples == 59
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "whole.h5").read_bytes()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.h5", "src", "whole.h5"]


@pytest.mark.parametrize("seed", range(10))
def test_stopped_anywhere_and_continued_in_either_mode_the_bytes_are_those_of_an_unbroken_pack(
    tmp_path: Path, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    root = drawn(tmp_path / "src", int(rng.integers(20, 50)), (9, 11))
    for number in rng.choice(20, int(rng.integers(4)), replace=False).tolist():
        path = root / str(rng.choice(["images", "masks"])) / f"{number:03d}.png"
        path.write_bytes(path.read_bytes()[:-20])
    codec, shuffle = str(rng.choice(["none", "gzip"])), bool(rng.integers(2))
    chunk_bytes = int(rng.choice([400, 1500, 10**6]))
    options = PackOptions(codec=codec, shuffle=shuffle, chunk_bytes=chunk_bytes, outside_boxes="keep")

    def packed(name: str, on_error: str, call: int = 0) -> bytes:
        progress = stop_at(call)
        job = PackJob("S", tmp_path / name, listed(root, split_at=15), options, on_error, on_progress=progress)  # type: ignore[arg-type]
        pack_listing(job, workers=0)
        return (tmp_path / name).read_bytes()

    whole = packed("whole.h5", "skip")
    for _ in range(3):
        if not (tmp_path / "a.h5").exists():
            with contextlib.suppress(KeyboardInterrupt, SourceError):
                packed("a.h5", str(rng.choice(["fail", "skip"])), int(rng.integers(1, 30)))
    found = (tmp_path / "a.h5").read_bytes() if (tmp_path / "a.h5").exists() else packed("a.h5", "skip")
    assert found == whole and sorted(each.name for each in tmp_path.iterdir()) == ["a.h5", "src", "whole.h5"]


def test_polygons_are_drawn_by_workers_and_checked_against_the_size_of_the_image(tmp_path: Path) -> None:
    root = tmp_path / "coco"
    for name in ("val2017/0.jpg", "val2017/1.jpg", "val2017/2.jpg", "test2017/t.jpg", "annotations/"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (30, 20)).save(root / name) if name.endswith("g") else (root / name).mkdir()
    images = [{"id": i, "file_name": f"{i}.jpg", "height": 20, "width": 30} for i in range(3)]
    square = [[4, 2, 10, 2, 10, 8, 4, 8]]
    thing = {"id": 1, "image_id": 2, "category_id": 50, "bbox": [4, 2, 6, 6], "area": 36, "segmentation": square}
    content = {"images": images, "annotations": [thing], "categories": [{"id": 50, "name": "spoon"}]}
    path = root / "annotations/instances_val2017.json"
    path.write_text(json.dumps(content))
    expected = np.zeros((20, 30), np.uint8)
    expected[2:8, 4:10] = 1
    options = {"masks": "semantic", "workers": 1, "overwrite": True}
    for size, step in ((None, 1), ((10, 15), 2)):
        pack_images(root, tmp_path / "a.h5", size=size, **options)
        with h5py.File(tmp_path / "a.h5") as file:
            keys = file["key"][()].astype(str).tolist()
            first, drawn, without = map(keys.index, ("val2017/0.jpg", "val2017/2.jpg", "test2017/t.jpg"))
            masks, boxes = file["masks"][()], file["boxes"][()] * step
            assert (masks[drawn] == expected[::step, ::step]).all() and not masks[first].any()
            assert (masks[without] == 255).all() and file["masks"].attrs["ignore_index"] == 255
            assert boxes[drawn].tolist() == [[4, 2, 6, 6]] and file["num_boxes"][first] == 0
    with pytest.raises(OptionError, match=r"masks='both' is not known; accepted: auto, none, semantic, instance"):
        pack_images(root, tmp_path / "b.h5", masks="both")  # type: ignore[arg-type]
    images[2]["height"] = 21
    path.write_text(json.dumps(content))
    with pytest.raises(SourceError, match=r"val2017/2\.jpg: is 30x20 .*, its annotation declares 30x21"):
        pack_images(root, tmp_path / "b.h5", **options)


def arrays(count: int, **changes: object) -> Listing:
    pixels = np.random.default_rng(1).integers(0, 255, (count, 28, 28, 1), dtype=np.uint8)
    keys, zeros = tuple(f"{i:05d}" for i in range(count)), np.zeros(count, np.int64)
    columns = {"labels": Column(np.arange(count) % 10)}
    rows = MemoryRows.of(pixels)
    listing = Listing("arrays", keys, zeros.astype(np.uint8), ("all",), columns, (), zeros, zeros, rows)
    return replace(listing, **changes)  # type: ignore[arg-type]


def test_arrays_are_brought_to_size(tmp_path: Path) -> None:
    with pack(arrays(8), tmp_path / "a.h5", shuffle=False) as file:
        pixels = file["images"][5, ..., 0]
    with pack(arrays(8), tmp_path / "b.h5", shuffle=False, size=(14, 14), mode="rgb") as file:
        small = np.asarray(Image.fromarray(pixels).resize((14, 14), Image.Resampling.BILINEAR))
        assert np.array_equal(file["images"][5], np.repeat(small[..., None], 3, axis=2))


def test_samples_without_images_are_their_columns(tmp_path: Path) -> None:
    tokens = np.arange(50 * 12, dtype=np.int32).reshape(50, 12)
    listing = arrays(50, files=None, columns={"tokens": Column(tokens), "labels": Column(np.arange(50) % 2)})
    with pack(listing, tmp_path / "a.h5") as file:
        assert "images" not in file
        order = [int(key) for key in file["key"][()]]
        assert np.array_equal(file["tokens"][()], tokens[order]) and order != sorted(order)
    with pytest.raises(OptionError, match="holds no images"):
        pack(listing, tmp_path / "b.h5", size=(32, 32))


def test_lost_boxes_and_turned_images_are_counted(tmp_path: Path) -> None:
    root = drawn(tmp_path / "src", 3)
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    picture = Image.open(root / "images" / "001.png")
    picture.load()
    picture.save(root / "images" / "001.png", exif=exif)
    listing = listed(root)
    far = np.array([[50, 0, 6, 8], [8, 10, 24, 10]], np.float32)  # at the right edge, which a square crop cuts off
    boxes = replace(listing.columns["boxes"], values=np.tile(far, (3, 1, 1)))
    listing = replace(listing, columns={**listing.columns, "boxes": boxes})
    options = PackOptions(size=(20, 20), source=SourceOptions(boxes_of="upright"))
    report = pack_listing(PackJob("SRC", tmp_path / "a.h5", listing, options), workers=0)
    assert report.converted["boxes that the crop cuts away whole -> no area"] == 3
    assert report.converted["EXIF orientation -> upright (masks, boxes and points count as upright already)"] == 1


def boxes_file(folder: Path, *rows: str) -> Path:
    for name in "abc":
        Image.new("RGB", (20, 10)).save(folder / f"{name}.png")
    table = folder / "boxes.csv"
    table.write_text("\n".join(["file,x,y,width,height", *rows, ""]))
    return table


def test_boxes_that_reach_out_of_their_image_are_refused_left_out_cut_or_kept(tmp_path):
    source = boxes_file(tmp_path, "a.png,1,1,10,5", "b.png,1,1,25,5", "c.png,-3,-4,30,40", "a.png,0,0,21,11")
    with pytest.raises(SourceError) as raised:
        pack_images(source, tmp_path / "o.h5", workers=0)
    said = str(raised.value)
    assert "2 of 3 images have boxes that reach out of them: b.png: has in boxes a box that reaches out of its" in said
    assert (
        "(20x10, width x height): 1, 1, 25, 5" in said
        and "`--outside-boxes clip`" in said
        and "`--on-error skip`" in said
    )
    assert not (tmp_path / "o.h5").exists() and not list(tmp_path.glob("o.h5.*"))
    report = pack_images(source, tmp_path / "o.h5", workers=0, on_error="skip")
    assert [key for key, _ in report.skipped] == ["b.png", "c.png"] and report.num_samples == 1
    expected = {
        "clip": {"b.png": [[1, 1, 19, 5], [0] * 4], "c.png": [[0, 0, 20, 10], [0] * 4]},
        "keep": {"b.png": [[1, 1, 25, 5], [0] * 4], "c.png": [[-3, -4, 30, 40], [0] * 4]},
    }
    for how, boxes in expected.items():
        report = pack_images(source, tmp_path / "o.h5", workers=0, outside_boxes=how, overwrite=True)
        said = {"clip": "cut to it", "keep": "kept"}[how]
        assert f"Boxes that reach out of their image {said} (2): b.png, c.png." in report.notes
        with h5py.File(tmp_path / "o.h5") as file:
            found = dict(zip(file["key"].asstr()[()].tolist(), file["boxes"][()].tolist(), strict=True))
        assert {key: found[key] for key in boxes} == boxes
        # What was packed is compared, appended to and copied as it is.
        assert verify_file(tmp_path / "o.h5", source=source, workers=0).ok
        repack_file(tmp_path / "o.h5", tmp_path / "copy.h5", overwrite=True)
        with h5py.File(tmp_path / "copy.h5") as file:
            assert sorted(file["boxes"][()].tolist()) == sorted(found.values())


def test_boxes_are_cut_and_compared_alike_where_they_reach_out_by_less_than_a_pixel(tmp_path):
    source = boxes_file(tmp_path, "a.png,1,1,10,5", "b.png,1,1,19.5,5", "c.png,2,2,4,4")
    pack_images(source, tmp_path / "o.h5", workers=0, outside_boxes="clip", shuffle=False)
    with h5py.File(tmp_path / "o.h5") as file:
        assert file["bbox"][1].tolist() == [1, 1, 19, 5]
    assert verify_file(tmp_path / "o.h5", source=source, workers=0).ok


def test_boxes_follow_a_size_after_they_were_cut(tmp_path):
    source = boxes_file(tmp_path, "a.png,1,1,10,5", "b.png,1,1,25,5", "c.png,2,2,4,4")
    pack_images(source, tmp_path / "o.h5", workers=0, outside_boxes="clip", size=(5, 10), shuffle=False)
    with h5py.File(tmp_path / "o.h5") as file:
        assert file["bbox"][()].tolist() == [[0.5, 0.5, 5, 2.5], [0.5, 0.5, 9.5, 2.5], [1, 1, 2, 2]]
