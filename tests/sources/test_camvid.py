from pathlib import Path

import pytest
from small_trees import picture, refused, refused_or_skipped

from fastload.sources.layouts import detect_layout, list_source

FRAMES = {"train": ["0001TP_006690", "0016E5_00390"], "val": ["0016E5_07959"], "test": ["Seq05VD_f00000"]}


@pytest.fixture
def camvid(tmp_path: Path) -> Path:
    root = tmp_path / "CamVid"
    for split, frames in FRAMES.items():
        for i, frame in enumerate(frames):
            picture(root / split / f"{frame}.png", i)
            picture(root / f"{split}annot" / f"{frame}.png", 11 - i)
        rows = [f"/SegNet/CamVid/{split}/{frame}.png /SegNet/CamVid/{split}annot/{frame}.png\n" for frame in frames]
        (root / f"{split}.txt").write_text("".join(rows))
    return root


def test_frames_and_masks_are_paired_and_void_is_ignored(camvid: Path) -> None:
    assert detect_layout(camvid) == ("camvid", ["testannot/", "trainannot/", "valannot/"])
    listing = list_source(camvid)
    assert listing.keys[:2] == ("train/0001TP_006690.png", "train/0016E5_00390.png")
    assert listing.split_names == ("train", "val", "test") and listing.split.tolist() == [0, 0, 1, 2]
    assert listing.masks is not None and listing.masks.ignore_index == 11 and len(listing.masks.names) == 12
    assert listing.masks.files.read(1) == (camvid / "trainannot/0016E5_00390.png").read_bytes()
    assert listing.columns == {} and "Checked against train.txt (2 rows)" in " ".join(listing.notes)
    for path in camvid.glob("*.txt"):  # the lists may be absent
        path.unlink()
    assert len(list_source(camvid)) == 4
    refused("no folder of frames with a sibling of masks", camvid / "train", "camvid")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train/0001TP_006690.png trainannot/0001TP_006690.png\n", "train/0016E5_00390.png is not listed in train.txt"),
        ("a.png b.png c.png\n", "train.txt, line 1: 'a.png b.png c.png', expected an image and its mask"),
        ("a.png 3\n", "expected an image and its mask"),
        ("a.png\na.png\n", "line 2: a.png is listed twice"),
        ("train/a.png trainannot/b.png\n", "is listed with the mask of another frame, trainannot/b.png"),
    ],
)
def test_lists_and_folders_must_agree(camvid: Path, text: str, message: str) -> None:
    (camvid / "train.txt").write_text(text)
    refused(message, camvid)
    (camvid / "train.txt").write_text("train/0001TP_006690.png\ntrain/0016E5_00390.png\ntrain/gone.png\n")
    skipped = refused_or_skipped("train/gone.png is listed in train.txt, but has no file", camvid).skipped
    assert skipped == (("train/gone.png", "is listed in train.txt, but has no file"),)
