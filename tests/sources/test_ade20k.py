from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from small_trees import archived, listed, notes_of, picture, refused, values, write

from fastload.sources.layouts import detect_layout

NAMES = ["wall", "building, edifice", "sky", *[f"thing {n}, something {n}" for n in range(4, 151)]]


@pytest.fixture
def ade(tmp_path: Path) -> Path:
    root = tmp_path / "ADEChallengeData2016"
    for split, stems in {
        "training": ["ADE_train_00000001", "ADE_train_00003020"],
        "validation": ["ADE_val_00000001"],
    }.items():
        for stem in stems:
            picture(root / f"images/{split}/{stem}.jpg")
            picture(root / f"annotations/{split}/{stem}.png", 0, 1, 150)
    # Some cells of the real table end in spaces.
    rows = [f"{i}\t0.{i:04}\t{i}\t{i}\t{name}{'  ' if i % 3 else ''}" for i, name in enumerate(NAMES, 1)]
    (root / "objectInfo150.txt").write_text("Idx\tRatio\tTrain\tVal\tName\r\n" + "\r\n".join(rows) + "\r\n")
    (root / "sceneCategories.txt").write_text(
        "ADE_train_00000001 airport_terminal\nADE_train_00003020 zoo\nADE_val_00000001 airport_terminal\n"
    )
    return root


def test_masks_keep_0_as_other_and_scenes_are_labels_if_there_are_any(ade: Path) -> None:
    assert detect_layout(ade)[0] == "ade20k"
    listing = listed(ade)
    assert listing.split_names == ("train", "val")
    assert listing.keys == (
        "images/training/ADE_train_00000001.jpg",
        "images/training/ADE_train_00003020.jpg",
        "images/validation/ADE_val_00000001.jpg",
    )
    masks = listing.masks
    assert masks is not None and masks.ignore_index == 0 and masks.present.all()
    assert len(masks.names) == 151 and masks.names[:3] == ("other", "wall", "building, edifice")
    assert masks.names[-1] == "thing 150, something 150"
    assert masks.files.read(2) == (ade / "annotations/validation/ADE_val_00000001.png").read_bytes()
    labels = listing.columns["labels"]
    assert labels.values.dtype == np.int64 and labels.values.tolist() == [0, 1, 0]
    assert labels.attrs["names"] == ("airport_terminal", "zoo")
    assert "corrupted: ADE_train_00003020." in notes_of(listing)
    assert "0 = other and ignored, 1..150, by their values (0..150" in notes_of(listing)
    archived(ade, ade.parent / "ade.zip", ade.name)
    inside = listed(ade.parent / "ade.zip")
    assert inside.keys == tuple(f"ADEChallengeData2016/{key}" for key in listing.keys)
    assert inside.masks is not None and inside.masks.names == masks.names and values(inside) == values(listing)
    # Images for testing have neither masks nor scenes; a text file at the top counts before one elsewhere.
    picture(ade / "release_test/testing/ADE_test_00000001.jpg")
    write(ade / "a/sceneCategories.txt", "ADE_val_00000001 attic\n")
    listing = listed(ade)
    assert listing.split_names == ("train", "val", "test")
    assert listing.masks is not None and listing.masks.present.tolist() == [True, True, True, False]
    assert values(listing) == [0, 1, 0, -1] and "Splits without masks: test" in notes_of(listing)
    (ade / "sceneCategories.txt").unlink()
    listing = listed(ade)
    assert values(listing) == [-1, -1, 0, -1] and "without a scene in sceneCategories.txt (3)" in notes_of(listing)


def test_the_numbering_of_masks_is_known_by_their_values_and_the_original_ones_are_preferred(ade: Path) -> None:
    picture(ade / "annotations_detectron2/training/ADE_train_00000001.png", 255)
    assert "not those in annotations_detectron2" in notes_of(listed(ade))
    (ade / "annotations_detectron2").rename(ade / "away")
    for folder, other in (("annotations_detectron2", "annotations"), ("annotations", "annotations_detectron2")):
        masks = listed(ade).masks
        assert masks is not None and masks.ignore_index == 0
        (ade / other).rename(ade / folder)
    for path in (ade / "annotations").rglob("*.png"):
        picture(path, 255, 0, 149)
    for folder in ("annotations", "annotations_detectron2"):  # shifted masks are not shifted back
        (ade / "annotations").rename(ade / folder)
        listing = listed(ade)
        assert listing.masks is not None and listing.masks.ignore_index == 255
        assert len(listing.masks.names) == 150 and listing.masks.names[0] == "wall"
        assert listing.masks.files.read(0) == (ade / folder / "training/ADE_train_00000001.png").read_bytes()
        assert "255 = ignore, shifted as for detectron2, by their values (0..149, 255" in notes_of(listing)


@pytest.mark.parametrize(("held", "message"), [((0, 151), "masks hold 151"), ((150, 255), "both 150, .* and 255")])
def test_values_of_neither_numbering_are_an_error(ade: Path, held: tuple[int, ...], message: str) -> None:
    picture(ade / "annotations/training/ADE_train_00000001.png", *held)
    refused(message, ade)


def test_masks_of_16_bits_with_further_classes_are_an_error(ade: Path) -> None:
    Image.fromarray(np.full((4, 6), 3000, np.uint16)).save(ade / "annotations/training/ADE_train_00000001.png")
    refused("masks hold 3000", ade)


def test_without_the_text_files_and_without_masks(ade: Path) -> None:
    (ade / "objectInfo150.txt").unlink()
    (ade / "sceneCategories.txt").unlink()
    listing = listed(ade)
    assert listing.layout == "ade20k" and listing.columns == {}
    assert listing.masks is not None and listing.masks.names == ()
    assert "no objectInfo150.txt" in notes_of(listing) and "no sceneCategories.txt" in notes_of(listing)
    (ade / "annotations").rename(ade.parent / "away")
    assert listed(ade).masks is None
    refused("there is no mask in annotations", ade, masks="semantic")
    picture(ade / "old/images/training/ADE_train_00000009.jpg")
    refused("images lie in several places, ., old/. Give the one to pack", ade)
    (ade / "old").rename(ade.parent / "old")
    (ade / "images").rename(ade / "pictures")
    refused("there are no images in images/training", ade)


def test_a_scene_without_its_image_fails_or_is_skipped(ade: Path) -> None:
    for gone in ("images/training/ADE_train_00000001.jpg", "annotations/training/ADE_train_00000001.png"):
        (ade / gone).unlink()
    refused(r"ADE_train_00000001 is listed in sceneCategories.txt, but has no image", ade)
    assert [key for key, _ in listed(ade, on_error="skip").skipped] == ["ADE_train_00000001"]
    for folder in ("images", "annotations"):  # without train, its scenes are no contradiction
        (ade / folder / "training").rename(ade.parent / f"{folder} of training")
    listing = listed(ade)
    assert listing.split_names == ("val",) and listing.columns["labels"].attrs["names"] == ("airport_terminal", "zoo")


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("sceneCategories.txt", "ADE_val_00000001\n", "line 1: 'ADE_val_00000001', expected an image and its scene"),
        ("sceneCategories.txt", "ADE_val_00000001 a\nADE_val_00000001 b\n", "line 2: ADE_val_00000001 has a second"),
        ("objectInfo150.txt", "Idx\tRatio\tTrain\tVal\tName\n1\t0.1\t1\t1\twall\n", "it names 1 classes, expected 1"),
        ("objectInfo150.txt", "1 0.1 1 1 wall\n", "line 1: '1 0.1 1 1 wall', expected Idx"),
    ],
)
def test_damaged_text_files_are_named(ade: Path, file: str, text: str, message: str) -> None:
    (ade / file).write_text(text)
    refused(f"{file}.*{message}", ade)
