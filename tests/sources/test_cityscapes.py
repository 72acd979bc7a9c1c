from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image
from small_trees import picture, refused, refused_or_skipped

from fastload import pack_images
from fastload.options.pack import SourceOptions
from fastload.sources.layouts import detect_layout, list_source

FRAMES = ["train/aachen/aachen_000000_000019", "train/ulm/ulm_000001_000019", "val/munster/munster_000000_000019"]


@pytest.fixture
def cityscapes(tmp_path: Path) -> Path:
    root = tmp_path / "cityscapes"
    for i, frame in enumerate([*FRAMES, "test/berlin/berlin_000000_000019"]):
        picture(root / "leftImg8bit" / f"{frame}_leftImg8bit.png", i)
        picture(root / "gtFine" / f"{frame}_gtFine_labelIds.png", 7, 26, 4, 33)
        picture(root / "gtFine" / f"{frame}_gtFine_color.png", 1)
        picture(root / "gtFine" / f"{frame}_gtFine_instanceIds.png", 2)
    return root


def test_the_19_classes_that_count(cityscapes: Path, tmp_path: Path) -> None:
    assert detect_layout(cityscapes)[0] == "cityscapes"
    listing = list_source(cityscapes)
    assert [key.rpartition("/")[2][:6] for key in listing.keys] == ["aachen", "ulm_00", "munste", "berlin"]
    assert listing.split_names == ("train", "val", "test") and listing.split.tolist() == [0, 0, 1, 2]
    masks = listing.masks
    assert masks is not None and masks.present.tolist() == [True] * 3 + [False] and masks.ignore_index == 255
    assert len(masks.names) == 19 and masks.names[13] == "car"
    pack_images(cityscapes, tmp_path / "out.h5")
    with h5py.File(tmp_path / "out.h5") as file:
        assert file["masks"][2].flatten()[:4].tolist() == [0, 13, 255, 18]
        assert (file["masks"][3] == 255).all()


def test_values_as_trained_with_are_taken_if_all_frames_have_them(cityscapes: Path, tmp_path: Path) -> None:
    for frame in FRAMES[:2]:
        picture(cityscapes / "gtFine" / f"{frame}_gtFine_labelTrainIds.png", 0, 13, 255, 18)
    assert "files labelIds" in " ".join(list_source(cityscapes).notes)
    picture(cityscapes / "gtFine" / f"{FRAMES[2]}_gtFine_labelTrainIds.png", 0, 13, 255, 17)
    assert "files labelTrainIds" in " ".join(list_source(cityscapes).notes)
    pack_images(cityscapes, tmp_path / "out.h5")
    with h5py.File(tmp_path / "out.h5") as file:
        assert file["masks"][2].flatten()[:4].tolist() == [0, 13, 255, 17]


def test_instances_keep_their_16_bits_and_their_label_times_1000(cityscapes: Path, tmp_path: Path) -> None:
    for frame in FRAMES:
        values = np.resize(np.array([7, 26_001, 26, 24_000], np.uint16), (4, 6))
        Image.fromarray(values).save(cityscapes / "gtFine" / f"{frame}_gtFine_instanceIds.png")
    pack_images(cityscapes, tmp_path / "out.h5", masks="instance", workers=0)
    with h5py.File(tmp_path / "out.h5") as file:
        masks = file["masks"]
        assert masks.dtype == np.uint16 and masks[2].flatten()[:4].tolist() == [7, 26_001, 26, 24_000]
        assert masks.attrs["label_divisor"] == 1000 and masks.attrs["ignore_index"] == 65_535
        assert masks.attrs["names"][26] == b"car" and len(masks.attrs["names"]) == 34
        assert (masks[3] == 65_535).all(), "the split test has none"
    for path in cityscapes.rglob("*_instanceIds.png"):
        path.unlink()
    refused("there is no mask of instances in gtFine", cityscapes, masks="instance")


def test_frames_without_masks(cityscapes: Path) -> None:
    (cityscapes / "gtFine" / f"{FRAMES[0]}_gtFine_labelIds.png").unlink()
    skipped = refused_or_skipped("aachen_000000_000019_leftImg8bit.png has no mask", cityscapes).skipped
    assert len(skipped) == 1
    assert list_source(cityscapes, options=SourceOptions(masks="none")).masks is None
    picture(cityscapes / "leftImg8bit" / f"{FRAMES[0].replace('train', 'val')}_leftImg8bit.png")
    refused("have the same name. Keep one of them", cityscapes)
    refused("no frames such as leftImg8bit", cityscapes / "gtFine", "cityscapes")
