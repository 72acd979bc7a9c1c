import io
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from small_trees import listed, make, notes_of, picture, refused, write

from fastload.errors import OptionError, SourceError
from fastload.format.ragged import Column
from fastload.sources.assemble import Draft, MaskFiles, Samples, Splits, assemble, fill_value, values_in_masks
from fastload.sources.layouts import detect_layout, list_source
from fastload.sources.open_tree import open_tree


class InMemory:
    def __init__(self, *masks: np.ndarray) -> None:
        self.data = []
        for mask in masks:
            file = io.BytesIO()
            Image.fromarray(mask).save(file, "PNG")
            self.data.append(file.getvalue())

    def read(self, i: int) -> bytes:
        return self.data[i]


def gray(*values: int) -> np.ndarray:
    return np.array([values], np.uint8)


def test_an_absent_mask_is_a_value_that_no_other_holds() -> None:
    present = np.array([True, False, True])
    draft = Draft("folder", None, where="x")
    assert fill_value(draft, InMemory(gray(0)), np.array([True])) is None and draft.notes == []
    assert fill_value(draft, InMemory(gray(0, 1), gray(9), gray(2, 2)), present) == 255
    value, notes = fill_value(draft, InMemory(gray(0, 255), gray(9), gray(254, 1)), present), draft.notes[1:]
    assert value == 253 and "(1): theirs are 253 throughout, as other masks hold 255, 254" in notes[0]
    assert values_in_masks(InMemory(np.array([[True, False]])), [0]).tolist() == [0, 1]  # masks of one bit
    assert values_in_masks(InMemory(np.array([[7, 40_000]], np.uint16)), [0]).tolist() == [7, 40_000]
    full = InMemory(gray(*range(256)), gray(0), gray(0))
    assert fill_value(draft, full, present) == 65_535, "packed as uint16 then"
    assert fill_value(draft, np.array([0, 300, 65_535]), present) == 65_534
    with pytest.raises(SourceError, match=r"use all values from 0 to 65535"):
        fill_value(draft, np.arange(65_536), present)


@given(st.lists(st.sampled_from(["", "test", "train", "b", "val", "all", "a"])))
def test_splits_keep_their_names_train_val_and_test_first(names: list[str]) -> None:
    splits = Splits.of(names)
    assert [splits.names[i] for i in splits.index] == [name or "all" for name in names]
    usual = [name for name in ("train", "val", "test") if name in names]
    others = sorted({name or "all" for name in names} - set(usual))
    assert splits.names == ((*usual, *others) or ("all",))


def test_samples_that_only_some_splits_have_are_said_first(tmp_path) -> None:
    make(tmp_path, *(f"Images/{i}.jpg" for i in range(3)))
    write(tmp_path / "Flickr8k.token.txt", "0.jpg#0\ta\n1.jpg#0\tb\n2.jpg#0\tc\n")
    write(tmp_path / "Flickr_8k.trainImages.txt", "0.jpg\n")
    listing = listed(tmp_path)
    assert listing.split_names == ("train", "all")
    assert listing.notes[1] == (
        "In none of the splits (train), and packed as split `all` (2 of 3): Images/1.jpg, Images/2.jpg."
    )


def test_every_field_of_a_listing_is_in_one_order(tmp_path) -> None:
    tree = open_tree(make(tmp_path, "b.jpg", "a.jpg", "m.png", "c.jpg"))
    at, masks = [1, 0, 2], MaskFiles([-1, 3, 3], ignore_index=9)
    splits, columns = Splits.of(["val", "train", "train"]), {"x": Column(np.arange(3))}
    listing = assemble(Draft("folder", tree), Samples.in_tree(tree, at, splits, columns, masks, by_name=True))
    assert listing.keys == ("a.jpg", "c.jpg", "b.jpg") and listing.split.tolist() == [0, 0, 1]
    assert listing.columns["x"].values.tolist() == [1, 2, 0] and listing.masks.present.tolist() == [True, True, False]
    assert [listing.files.read(i) for i in range(3)] == [b"a.jpg", b"c.jpg", b"b.jpg"]
    assert listing.sizes.tolist() == [10, 10, 5]  # those of a mask included, so that a resume notices another
    some = assemble(Draft("folder", tree), Samples.in_tree(tree, at, splits, columns).without({1}))
    assert some.keys == ("b.jpg", "c.jpg") and some.columns["x"].values.tolist() == [0, 2]


def test_what_is_left_out_is_an_error_or_named(tmp_path) -> None:
    tree = open_tree(make(tmp_path, "a.jpg"))
    for on_error in ("skip", "fail"):
        draft = Draft("folder", tree, on_error)
        draft.leave_out("b.jpg", "has no mask")
        draft.leave_out("b.jpg", "is not listed")
        if on_error == "fail":
            with pytest.raises(SourceError, match=r"contradicts \(1\): b.jpg has no mask. Fix .* `--on-error skip`"):
                assemble(draft, Samples.in_tree(tree, [0], Splits.one(1)))
            with pytest.raises(SourceError, match=r"without x \(1\): b y. Fetch it, or leave .* `--on-error skip`"):
                draft.leave_out_all([("b", "y")], "rows without x", "Fetch it", 2)
            with pytest.raises(SourceError, match=r"without x \(1\): b y. Fetch it\.$"):  # nothing would be left
                draft.leave_out_all([("b", "y")], "rows without x", "Fetch it", 1)
            with pytest.raises(SourceError, match=r"b.jpg has no mask. Fix the lists or the files\.$"):
                assemble(draft, Samples.in_tree(tree, [], Splits.one(0)))
        else:
            assert assemble(draft, Samples.in_tree(tree, [0], Splits.one(1))).skipped == (("b.jpg", "has no mask"),)
            with pytest.raises(SourceError, match=r"no sample is left .* as folder. Left out: b.jpg has no mask"):
                assemble(draft, Samples.in_tree(tree, [], Splits.one(0)))
    with pytest.raises(SourceError, match=r"1 names occur more than once: a.jpg"):
        assemble(Draft("folder", tree), Samples.in_tree(tree, [0, 0], Splits.one(2)))


class Paired(NamedTuple):
    """Where a layout keeps the image and the mask of a name, and images without masks."""

    image: str
    mask: str
    names: tuple[str, str]
    unmasked: str = ""


LAYOUTS = {
    "camvid": Paired("train/{}.png", "trainannot/{}.png", ("0001TP_006690", "0016E5_00390")),
    "ade20k": Paired(
        "images/training/{}.jpg",
        "annotations/training/{}.png",
        ("ADE_train_00000001", "ADE_train_00000002"),
        "release_test/testing/ADE_test_00000001.jpg",
    ),
    "mask-folders": Paired("images/train/{}.png", "masks/train/{}_mask.png", ("a", "b"), "images/test/c.png"),
}


@pytest.fixture(params=LAYOUTS)
def paired(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Paired]:
    layout = LAYOUTS[request.param]
    for name in layout.names:
        picture(tmp_path / layout.image.format(name))
        picture(tmp_path / layout.mask.format(name), 0, 1)
    assert detect_layout(tmp_path)[0] == request.param
    return tmp_path, layout


def test_half_a_pair_fails_or_is_skipped(paired: tuple[Path, Paired]) -> None:
    root, layout = paired
    image, mask = layout.image.format(layout.names[1]), layout.mask.format(layout.names[1])
    for gone, left, reason in ((mask, image, "has no mask"), (image, mask, "is a mask without its image")):
        (root / gone).rename(root / "away")
        refused(f"{left} {reason}", root)
        listing = listed(root, on_error="skip")
        assert listing.keys == (layout.image.format(layout.names[0]),) and listing.skipped == ((left, reason),)
        (root / "away").rename(root / gone)


def test_an_unreadable_image_is_named_once(paired: tuple[Path, Paired]) -> None:
    root, layout = paired
    key = layout.image.format(layout.names[1])
    (root / key).unlink()
    (root / key).symlink_to("nowhere.jpg")
    refused("is a link to a file that does not exist", root)
    assert [skipped for skipped, _ in listed(root, on_error="skip").skipped] == [key]


def test_masks_may_be_left_out_and_are_not_of_instances(paired: tuple[Path, Paired]) -> None:
    root, _ = paired
    masks = listed(root).masks
    assert masks is not None and masks.present.tolist() == [True, True]
    listing = listed(root, "none")
    assert listing.masks is None and len(listing) == 2
    with pytest.raises(OptionError, match=r"no instance masks|do not say of which kind"):
        listed(root, "instance")


@pytest.mark.parametrize("paired", ["ade20k", "mask-folders"], indirect=True)
def test_a_split_without_masks_is_packed_without(paired: tuple[Path, Paired]) -> None:
    root, layout = paired
    picture(root / layout.unmasked)
    listing = listed(root)
    assert listing.split_names == ("train", "test") and listing.keys[-1] == layout.unmasked
    assert listing.masks is not None and listing.masks.present.tolist() == [True, True, False]
    assert "without" in notes_of(listing)


@pytest.mark.parametrize("paired", ["camvid", "mask-folders"], indirect=True)
def test_images_elsewhere_are_noted(paired: tuple[Path, Paired]) -> None:
    root, _ = paired
    picture(root / "more" / "x.png")
    layout = "camvid" if (root / "trainannot").exists() else "mask-folders"
    if layout == "mask-folders":  # known datasets may have further folders
        refused("images/train/ and masks/train/ are images and masks, but more/ next to them has none", root)
    assert (
        f"NOT READ: images that layout {layout} does not list (1): more/ (1), e.g. more/x.png."
        in list_source(root, layout).notes
    )
