"""What holds for all layouts that pair images with masks by their names."""

from pathlib import Path
from typing import NamedTuple

import pytest
from small_trees import listed, notes_of, picture, refused

from fastload.errors import OptionError
from fastload.sources import detect_layout


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
    assert "Ignored images outside the pairs of folders (1): more/x.png." in listed(root).notes
