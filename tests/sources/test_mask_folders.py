from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image
from small_trees import make, notes_of, photo, picture, refused, refused_or_skipped, write

from fastload import pack_images
from fastload.errors import FastloadError
from fastload.options.pack import SourceOptions
from fastload.sources.layouts import detect_layout, list_source
from fastload.sources.mask_folders import doubtful_pairs
from fastload.sources.open_tree import open_tree


def mask(path: Path, seed: int = 0, size: tuple[int, int] = (24, 32), mode: str = "L", depth: int = 8) -> Path:
    """A mask of four areas: numbers, a palette, or colours."""
    path.parent.mkdir(parents=True, exist_ok=True)
    areas = np.zeros(size, np.uint16 if depth == 16 else np.uint8)
    areas[4 : 12 + seed % 5, 3:20] = 1
    areas[14:, 8:] = 2
    areas[20:, :5] = 7
    image = Image.fromarray(areas)
    if mode != "L":
        image.putpalette([n * 37 % 256 for n in range(768)])
    (image.convert("RGB") if mode == "RGB" else image).save(path)
    return path


def pairs(root: Path, image: str, of: str, stems: tuple[str, ...] = ("0001", "0002", "0010"), **how: object) -> None:
    """Photographs, and masks of them unless `of` is empty; `{}` stands for the stem."""
    for seed, stem in enumerate(stems):
        photo(root / image.format(stem), seed)
        if of:
            mask(root / of.format(stem), seed, **how)  # type: ignore[arg-type]


# Names of folders in use, as code that trains on them has them: (where, images and masks, other pictures next to them).
# `P:` before masks stands for a palette.
IN_USE = [
    ("milesial/Pytorch-UNet", [("data/imgs/{}.jpg", "data/masks/{}_mask.gif")], []),
    ("maobin1996/Unet", [("imgs/{}.jpg", "labels/{}.png")], []),
    ("open-mmlab/mmsegmentation, Potsdam", [
        ("img_dir/train/2_10_{}.png", "ann_dir/train/2_10_{}.png"), ("img_dir/val/3_{}.png", "ann_dir/val/3_{}.png")
    ], []),
    ("open-mmlab/mmsegmentation, COCO-Stuff", [
        ("images/train2017/{}.jpg", "annotations/train2017/{}_labelTrainIds.png"),
        ("images/val2017/{}.jpg", "annotations/val2017/{}_labelTrainIds.png"),
    ], []),
    ("open-mmlab/mmsegmentation, DRIVE", [
        ("images/training/{}.png", "annotations/training/{}_manual1.png"),
        ("images/validation/{}.png", "annotations/validation/{}_manual1.png"),
    ], []),
    ("wkentaro/labelme", [("JPEGImages/2011_{}.jpg", "P:SegmentationClassPNG/2011_{}.png")],
     ["SegmentationClassVisualization/2011_{}.jpg", "SegmentationClass/2011_{}.npy"]),
    ("tensorflow/datasets, Oxford Pets", [("images/Abyssinian_{}.jpg", "annotations/trimaps/Abyssinian_{}.png")], []),
    ("Cuzyoung/CrossEarth, LoveDA", [
        ("Train/Rural/images_png/{}.png", "Train/Rural/masks_png/{}.png"),
        ("Train/Urban/images_png/1{}.png", "Train/Urban/masks_png/1{}.png"),
        ("Val/Rural/images_png/2{}.png", "Val/Rural/masks_png/2{}.png"),
    ], []),
    ("ompugao/dm6190, Semantic Drone", [("original_images/{}.jpg", "label_images_semantic/{}.png")], []),
    ("stevenwudi/6DVNET, KITTI", [("training/image_2/{}_10.png", "training/semantic/{}_10.png")],
     ["16:training/instance/{}_10.png", "RGB:training/semantic_rgb/{}_10.png"]),
    ("supervisely/docs", [("ds0/img/{}.jpg", "ds0/masks_machine/{}.png")], ["RGB:ds0/masks_human/{}.png"]),
    ("Mud-Fire/LML, Penn-Fudan", [("PNGImages/FudanPed{}.png", "PedMasks/FudanPed{}_mask.png")], []),
    ("alkynee/Alkynee-AerialSemanticDataset", [
        (f"data/{split}/images/{{}}.jpg", f"data/{split}/gray_masks/{{}}.png") for split in ("train", "val")
    ], ["RGB:data/train/rgb_masks/{}.png", "RGB:data/val/rgb_masks/{}.png"]),
    ("YinYinOvO/SDNet", [
        ("Train/images/{}.jpg", "Train/masks/{}.png"), ("Test/images/9{}.jpg", "Test/masks/9{}.png")
    ], ["L:Train/edges/{}.png"]),
    ("lartpang/MINet", [("ECSSD/Image/{}.jpg", "ECSSD/Mask/{}.png")], []),
    ("Tennine2077/DIS-SAM", [
        ("DIS-TR/im/1#{}.jpg", "DIS-TR/gt/1#{}.png"), ("DIS-VD/im/{}.jpg", "DIS-VD/gt/{}.png")
    ], []),
    ("xuebinqin/U-2-Net", [("TDP_IMAGES/{}.jpg", "TDP_MASKS/{}.png")], []),
    ("kovmartin/DD2424VT191_Group90, ISIC 2018", [
        ("ISIC2018_Task1-2_Training_Input/ISIC_{}.jpg", "ISIC2018_Task1_Training_GroundTruth/ISIC_{}_segmentation.png")
    ], []),
    ("Riya-l209/road-extraction-unet", [
        ("train_images/{}.png", "train_masks/{}.png"), ("val_images/{}.png", "val_masks/{}.png"),
        ("test_images/{}.png", "test_masks/{}.png"),
    ], []),
    ("Spidartist/mmseg", [("TrainDataset/image/{}.png", "TrainDataset/masks/{}.png")], []),
    ("divamgupta/image-segmentation-keras", [
        ("images_prepped_train/{}.png", "annotations_prepped_train/{}.png"),
        ("images_prepped_test/{}.png", "annotations_prepped_test/{}.png"),
    ], []),
    ("diegopenilla/AI_Experiments, fastai's CamVid", [("images/s_{}.png", "labels/s_{}_P.png")], []),
    ("GeorgeSeif/Semantic-Segmentation-Suite", [
        (f"{split}/{{}}.png", f"{split}_labels/{{}}_L.png") for split in ("train", "val", "test")
    ], []),
    ("DeepGlobe roads (`*_sat.jpg`, `*_mask.png` in one folder)", [("train/{}_sat.jpg", "train/{}_mask.png")], []),
    ("G30rg3ab/Computer-Vision-Project", [
        ("TrainVal/color/{}.jpg", "TrainVal/label/{}.png"), ("Test/color/{}.jpg", "Test/label/{}.png")
    ], []),
    ("RoadAnomaly in mmsegmentation (`images_val`, `labels_masks`)", [
        ("images_val/{}.jpg", "labels_masks/{}_labels_semantic.png")
    ], []),
    ("Potsdam (`2_Ortho_RGB`, `labels_index`)", [("2_Ortho_RGB/top_{}_RGB.tif", "labels_index/top_{}.png")], []),
    ("UAVid (`seq1/Images`, `seq1/Labels`)", [
        (f"train/seq{n}/Images/{{}}.png", f"train/seq{n}/Labels/{{}}.png") for n in range(1, 16)
    ], []),
    ("Cloth segmentation (`train_imgs/train`, `train_mask/train`)", [
        ("train_imgs/train/{}.jpg", "train_mask/train/{}.png"), ("val_imgs/val/{}.jpg", "val_mask/val/{}.png"),
        ("test_imgs/test/{}.jpg", ""),
    ], []),
    ("mmsegmentation, a user's (`img`, `labels_fixed`)", [("img/train/{}.jpg", "labels_fixed/train/{}.png")], []),
    ("DAVIS (`JPEGImages/480p`, `Annotations/480p`)", [
        (f"JPEGImages/480p/{clip}/{{}}.jpg", f"P:Annotations/480p/{clip}/{{}}.png") for clip in ("bear", "bus", "cows")
    ], []),
    ("YouTube-VOS (`JPEGImages`, `Annotations`)", [
        (f"train/JPEGImages/{clip}/{{}}.jpg", f"P:train/Annotations/{clip}/{{}}.png") for clip in ("0032a", "0043f")
    ], []),
    ("one folder, `x.jpg` and `x_seg.png`", [("x{}.jpg", "x{}_seg.png")], []),
    ("one folder, `x.jpg` and `x.png`", [("{}.jpg", "{}.png")], []),
    ("splits below (`img/train`, `lab/train`)", [
        ("img/train/{}.png", "lab/train/{}.png"), ("img/val/{}.png", "lab/val/{}.png")
    ], []),
    ("splits above (`train/img`, `train/lab`)", [
        ("train/img/{}.png", "train/lab/{}.png"), ("val/img/{}.png", "val/lab/{}.png")
    ], []),
]  # fmt: skip


@pytest.mark.parametrize(("source", "folders", "others"), IN_USE, ids=[source for source, _, _ in IN_USE])
def test_images_and_masks_are_paired_by_their_names_whatever_their_folders_are_called(
    tmp_path: Path, source: str, folders: list[tuple[str, str]], others: list[str]
) -> None:
    expected: dict[str, str] = {}
    for image, of in folders:
        of, mode = (of[2:], "P") if of.startswith("P:") else (of, "L")
        pairs(tmp_path, image, of, mode=mode)
        expected |= {image.format(stem): of.format(stem) for stem in ("0001", "0002", "0010")}
    for other in others:
        how, _, name = other.rpartition(":")
        for stem in ("0001", "0002", "0010"):
            path = tmp_path / name.format(stem)
            if path.suffix == ".npy":
                make(tmp_path, name.format(stem))
            elif how:
                mask(path, mode=how if how == "RGB" else "L", depth=16 if how == "16" else 8)
            else:
                photo(path)
    assert detect_layout(tmp_path)[0] == "mask-folders"
    listing = list_source(tmp_path)
    assert set(listing.keys) == set(expected)
    masks = listing.masks
    assert masks is not None
    for row, key in enumerate(listing.keys):
        assert masks.present[row] == bool(expected[key])
        if expected[key]:
            assert masks.files.read(row) == (tmp_path / expected[key]).read_bytes()  # type: ignore[union-attr]
    paths = [image.rpartition("/")[0].lower().replace("trainval", "") for image, _ in folders]
    named = {split for split in ("train", "val", "test") if any(split in path for path in paths)}
    assert {*listing.split_names} - {"all"} == named


@pytest.mark.parametrize(
    "folders",
    [
        ["face", "face_mask", "other"],
        ["with_mask", "without_mask"],
        ["mask", "no_mask"],
        ["masks", "faces"],
        ["label", "box", "bag"],
        [str(digit) for digit in range(10)],
        ["train/cat", "train/dog", "val/cat", "val/dog"],
        ["dog", "dog_house"],
        ["gt", "suv", "coupe"],
        ["target", "ikea"],
        ["seg", "other"],
        [f"class{n}" for n in range(20)],
        [f"{split}/n0{n}" for split in ("train", "val") for n in range(20)],
        ["L", "R"],
    ],
)
@pytest.mark.parametrize("suffix", [".jpg", ".png"])
def test_classes_whose_images_have_equal_names_stay_classes(tmp_path: Path, folders: list[str], suffix: str) -> None:
    for n, folder in enumerate(folders):
        for stem in ("image_0001", "image_0002", "image_0003"):
            photo(tmp_path / folder / f"{stem}{suffix}", n)
    listing = list_source(tmp_path)
    assert listing.layout == "folder" and len(listing) == 3 * len(folders)
    assert listing.columns["labels"].attrs["names"] == tuple(sorted({folder.rpartition("/")[2] for folder in folders}))


def pictures(root: Path, *names: str) -> Path:
    for i, name in enumerate(names):
        picture(root / name, i)
    return root


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["images/a.jpg", "images/b.jpg", "masks/a.png", "masks/b.png"], ["all", "all"]),
        (["images/train/a.jpg", "images/val/b.jpg", "gt/train/a.png", "gt/val/b.png"], ["train", "val"]),
        (["train/imgs/a.jpg", "valid/imgs/b.jpg", "train/labels/a.png", "valid/labels/b.png"], ["train", "val"]),
        (["train/a.jpg", "train/b.jpg", "train_masks/a_mask.gif", "train_masks/b_mask.gif"], ["train", "train"]),
        (["train/a.png", "test/b.png", "trainannot/a.png", "testannot/b.png"], ["train", "test"]),
        (["images/a.jpg", "images/s/b.jpg", "images_mask/a.png", "images_mask/s/b.png"], ["all", "all"]),
    ],
)
def test_pairs_are_found_in_each_way_of_keeping_them(tmp_path: Path, names: list[str], splits: list[str]) -> None:
    root = pictures(tmp_path, *names)
    assert detect_layout(root)[0] == "mask-folders"
    listing = list_source(root)
    assert listing.keys == tuple(names[:2])
    assert [listing.split_names[i] for i in listing.split] == splits
    assert listing.masks is not None and listing.masks.names == () and listing.masks.ignore_index is None
    assert [listing.masks.files.read(i) for i in range(2)] == [(root / name).read_bytes() for name in names[2:]]


def test_a_split_without_masks_is_filled_with_255(tmp_path: Path) -> None:
    listing = list_source(pictures(tmp_path, "images/train/a.png", "images/test/b.png", "masks/train/a.png"))
    assert listing.masks is not None and listing.masks.present.tolist() == [True, False]
    assert listing.masks.ignore_index == 255 and "Splits without masks: test" in " ".join(listing.notes)
    picture(tmp_path / "masks/train/a.png", 0, 7, 255, 7)
    assert "Values in a sample of the masks: 0, 7, 255." in list_source(tmp_path).notes[-1]
    picture(tmp_path / "images/train/a.jpg")
    refused(r"images/train/a.jpg and images/train/a.png", tmp_path)


@pytest.mark.parametrize(
    "names",
    [
        ["mask/1.jpg", "no_mask/1.jpg"],  # classes
        ["with_mask/1.jpg", "without_mask/1.jpg"],
        ["images/1.jpg", "labels/1.txt"],  # YOLO
        ["train/images/1.jpg", "train/masked/1.jpg"],
    ],
)
def test_what_only_looks_like_pairs_is_left_to_others(tmp_path: Path, names: list[str]) -> None:
    make(tmp_path, *names)
    pictures(tmp_path, *[name for name in names if not name.endswith("txt")])
    assert detect_layout(tmp_path)[0] == "folder"
    refused("no image has a mask of the same name", tmp_path, "mask-folders")


def trees(root: Path, kind: str) -> Path:
    """Images and masks of which it is not certain which belong to which."""
    if kind == "names that do not agree":
        pairs(root, "images/{}.jpg", "")
        mask(root / "masks/x.png")
        mask(root / "masks/y.png")
    elif kind == "several masks of each image":  # as the Data Science Bowl of 2018 has them
        for n in range(15):
            photo(root / f"id{n}/images/id{n}.png", n)
            mask(root / f"id{n}/masks/{n * 7919 % 997:x}.png")
            mask(root / f"id{n}/masks/{n * 104729 % 991:x}.png", 1)
    elif kind == "a third folder":
        pairs(root, "images/{}.jpg", "masks/{}.png")
        pairs(root, "other/{}.jpg", "")
    elif kind == "two kinds of masks":
        pairs(root, "images/{}.jpg", "masks/{}.png")
        pairs(root, "images/{}.jpg", "labels/{}.png")
    elif kind == "two kinds of masks by their ends":
        pairs(root, "rgb/{}_rgb.png", "gt/{}_gt_labelIds.png")
        pairs(root, "rgb/{}_rgb.png", "gt/{}_gt_labelTrainIds.png")
    elif kind == "no name in use":
        pairs(root, "A/{}.jpg", "B/{}.png")
    elif kind == "two kinds of images":
        pairs(root, "left/{}.jpg", "gt/{}.png")
        pairs(root, "right/{}.jpg", "")
    elif kind == "a third folder of equal names":
        pairs(root, "rgb/{}.png", "label/{}.png")
        pairs(root, "depth/{}.png", "")
    elif kind == "photographs of photographs":
        pairs(root, "input/{}.jpg", "")
        pairs(root, "target/{}.jpg", "")
    return root


@pytest.mark.parametrize(
    ("kind", "seen", "way"),
    [
        (
            "names that do not agree",
            r"masks/ looks like masks of the images in images/.*\(0001.jpg and x.png\)",
            "one mask",
        ),
        ("several masks of each image", r"\*/masks/ looks like masks .* or each image has several", "one mask"),
        (
            "a third folder",
            "images/ and masks/ are images and masks, but other/ next to",
            "`--layout mask-folders`",
        ),
        ("two kinds of masks", "several kinds of masks, labels/, masks/", r"`--mask-files 'labels/\*'`"),
        ("two kinds of masks by their ends", "several kinds of masks", r"`--mask-files 'gt/\*_labelTrainIds.\*'`"),
        ("no name in use", "B/ looks like masks of the images in A/", "`--layout mask-folders`, if they are"),
        ("two kinds of images", "gt/ may be masks of left/ or of right/", "move those away"),
        (
            "a third folder of equal names",
            "rgb/ and label/ are images and masks, but depth/ next to",
            "mask-folders",
        ),
        (
            "photographs of photographs",
            "input/ and target/ hold photographs of the same names .* are called as images and masks are: pairs",
            "give that folder itself",
        ),
        ("photographs of photographs", "pairs, as of an input and its target", r"read by `zip\(FastLoader\('input.h5'"),
    ],
)
def test_likely_pairs_that_are_not_certain_are_refused_with_what_would_be_right(
    tmp_path: Path, kind: str, seen: str, way: str
) -> None:
    trees(tmp_path, kind)
    refused(f"{seen}.*{way}", tmp_path)
    assert doubtful_pairs(open_tree(tmp_path))
    assert list_source(tmp_path, "folder").masks is None


def drawing(path: Path, seed: int) -> None:
    """Black lines on white, as of a sketch."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.full((24, 32), 255, np.uint8)
    pixels[4 + seed % 7 :: 11, 2:29] = pixels[3:20, 5 + seed :: 9] = 0
    Image.fromarray(pixels).save(path)


@pytest.mark.parametrize(
    ("image", "of"), [("photos/{}.jpg", "sketches/{}.png"), ("images/{}.jpg", "drawn/{}.png"), ("{}.jpg", "{}.png")]
)
def test_drawings_next_to_photographs_are_masks_only_if_that_is_said(tmp_path: Path, image: str, of: str) -> None:
    pairs(tmp_path, image, "")
    for seed, stem in enumerate(("0001", "0002", "0010")):
        drawing(tmp_path / of.format(stem), seed)
    refused("looks like masks, or drawings, of the images.*`--layout mask-folders`.*`--mask-files '.*`--layout folder`",
            tmp_path)  # fmt: skip
    assert list_source(tmp_path, "mask-folders").masks is not None and list_source(tmp_path, "folder").masks is None
    assert list_source(tmp_path, options=SourceOptions(mask_files="*.png")).masks is not None


def test_lines_in_folders_called_masks_are_masks(tmp_path: Path) -> None:
    pairs(tmp_path, "images/{}.jpg", "")
    for seed, stem in enumerate(("0001", "0002", "0010")):
        drawing(tmp_path / f"manual/{stem}.png", seed)
    assert list_source(tmp_path).masks is not None


COUNTED, NAMED = [f"{n:04}" for n in range(1, 9)], ["anna", "bert", "carla", "dora", "emil", "fritz", "gabi", "hugo"]
VIEWS = [
    ("LR/{}.png", "HR/{}.png", COUNTED, "small"),
    ("DIV2K_LR_bicubic/X4/{}x4.png", "DIV2K_HR/{}.png", COUNTED, "small"),
    ("A/{}.jpg", "B/{}.jpg", COUNTED, "other"),
    ("trainA/{}.jpg", "trainB/{}.jpg", COUNTED, "other"),
    ("train/rain/{}.png", "train/clean/{}.png", COUNTED, "dark"),
    ("low/{}.jpg", "high/{}.jpg", COUNTED, "dark"),
    ("day/{}.jpg", "night/{}.jpg", NAMED, "other"),
    ("{}_rgb.png", "{}_nir.png", COUNTED, "negative"),
    ("{}_rgb.png", "{}_depth.png", COUNTED, "negative"),
    ("input/{}.png", "target/{}.png", COUNTED, "dark"),
]


@pytest.mark.parametrize(("one", "other", "stems", "kind"), VIEWS, ids=[f"{a} and {b}" for a, b, _, _ in VIEWS])
def test_pairs_of_photographs_are_no_classes(tmp_path: Path, one: str, other: str, stems: list[str], kind: str) -> None:
    for seed, stem in enumerate(stems):
        photo(tmp_path / other.format(stem), seed, (96, 128))
        image = Image.open(tmp_path / other.format(stem))
        pixels = np.asarray(image)
        shown = {
            "small": image.resize((32, 24), Image.Resampling.BOX),
            "dark": Image.fromarray(pixels // 5),
            "negative": Image.fromarray(255 - pixels),
        }
        photo(tmp_path / one.format(stem), 100 + seed, (96, 128))
        if kind in shown:
            shown[kind].save(tmp_path / one.format(stem), quality=95)
    refused("photographs.*`--layout folder`", tmp_path)
    assert list_source(tmp_path, "folder").masks is None


@pytest.mark.parametrize(
    "files",
    [
        ("cats/{}.jpg", "dogs/{}.jpg", COUNTED),
        ("low/{}.jpg", "high/{}.jpg", COUNTED),
        ("cats/cat.{}.jpg", "dogs/dog.{}.jpg", COUNTED),
        ("train/cat/{}.jpg", "train/dog/{}.jpg", COUNTED),
        ("real/img_{}.png", "fake/img_{}.png", COUNTED),
        ("train/{}.png", "test/{}.png", COUNTED),
        ("good/{}.png", "bad/{}.png", ["3", "17", "42", "77"]),
        ("happy/s01_{}.png", "sad/s01_{}.png", COUNTED),
        ("x/({}).jpg", "y/({}).jpg", COUNTED),
        ("train/x/{}.jpg", "train/y/{}.jpg", COUNTED[:3]),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("camera", ["many", "fixed"])
def test_classes_whose_images_are_numbered_alike_are_no_pairs(
    tmp_path: Path, files: tuple[str, str, list[str]], camera: str
) -> None:
    scene = np.random.default_rng(0).integers(0, 120, (48, 64, 3))
    for n, stem in enumerate(files[2]):
        for m, pattern in enumerate(files[:2]):
            path = tmp_path / pattern.format(stem)
            photo(path, 100 * m + n, (48, 64))
            if camera == "fixed":
                Image.fromarray((scene + np.asarray(Image.open(path)) // 4).astype(np.uint8)).save(path)
    assert list_source(tmp_path).layout == "folder"


def test_folders_called_by_split_and_domain_are_no_classes(tmp_path: Path) -> None:
    for n, folder in enumerate(("trainA", "trainB", "testA", "testB")):
        for m in range(3):
            photo(tmp_path / folder / f"{n}{m}.jpg", 3 * n + m)
    refused("testA, testB, trainA, trainB are splits of a, b.*a/train.*`--layout folder`", tmp_path)
    for seed, folder in enumerate(("training_shoes", "test_tubes", "train_station")):
        photo(tmp_path / "classes" / folder / "1.jpg", seed)
    assert list_source(tmp_path / "classes").layout == "folder"


def test_the_lines_for_pairs_of_photographs_give_both_in_one_order(tmp_path: Path) -> None:
    from fastload import FastLoader

    for seed, stem in enumerate(COUNTED):
        photo(tmp_path / f"HR/{stem}.png", seed, (48, 64))
        photo(tmp_path / f"LR/{stem}.png", seed, (12, 16))
    for name in ("HR", "LR"):
        pack_images(tmp_path / name, tmp_path / f"{name}.h5", workers=0)
    loaders = [FastLoader(tmp_path / f"{name}.h5", 4, shuffle="full") for name in ("LR", "HR")]
    with h5py.File(tmp_path / "LR.h5") as small, h5py.File(tmp_path / "HR.h5") as large:
        assert small["key"][()].tolist() == large["key"][()].tolist()
    assert all(one.rows.tolist() == other.rows.tolist() for one, other in zip(*loaders, strict=True))


def test_commands_of_a_refusal_pack_what_they_say(tmp_path: Path) -> None:
    listing = list_source(trees(tmp_path / "third", "a third folder"), "mask-folders")
    assert len(listing) == 3 and "(3): other/ (3), e.g. other/0001.jpg." in notes_of(listing)
    root = trees(tmp_path / "kinds", "two kinds of masks")
    refused("has several kinds of masks", root, "mask-folders")
    assert list_source(root, "mask-folders", options=SourceOptions(masks="none")).masks is None
    for name in ("labels", "masks"):
        listing = list_source(root, options=SourceOptions(mask_files=f"{name}/*"))
        assert listing.keys == ("images/0001.jpg", "images/0002.jpg", "images/0010.jpg") and listing.masks is not None
        assert listing.masks.files.read(2) == (root / name / "0010.png").read_bytes()  # type: ignore[union-attr]
    root = trees(tmp_path / "ends", "two kinds of masks by their ends")
    listing = list_source(root, "mask-folders", options=SourceOptions(mask_files="*_labelIds.png"))
    assert listing.masks is not None and listing.keys[0] == "rgb/0001_rgb.png"
    assert listing.masks.files.read(0) == (root / "gt/0001_gt_labelIds.png").read_bytes()  # type: ignore[union-attr]
    refused("no mask fits `--mask-files gone/", root, "mask-folders", options=SourceOptions(mask_files="gone/*"))


def test_images_without_masks_are_packed_where_no_masks_are_wanted(tmp_path: Path) -> None:
    pairs(tmp_path, "images/{}.jpg", "masks/{}.png")
    photo(tmp_path / "images/more.jpg")
    refused(r"images/more.jpg has no mask.*`--on-error skip`; `--masks none` packs all images without masks", tmp_path)
    assert len(list_source(tmp_path, options=SourceOptions(masks="none"))) == 4


def test_classes_of_images_with_masks_are_said_not_to_be_labels(tmp_path: Path) -> None:
    for name in ("benign", "normal"):
        pairs(tmp_path, f"{name}/{name} ({{}}).png", f"{name}/{name} ({{}})_mask.png", stems=("1", "2", "10", "11"))
    listing = list_source(tmp_path)
    assert listing.columns == {} and listing.masks is not None and listing.masks.present.all()
    assert "NOT READ: folders of images, as labels (2): benign/, normal/." in notes_of(listing)


def test_of_several_kinds_of_masks_names_in_use_choose(tmp_path: Path) -> None:
    pairs(tmp_path, "images/{}.jpg", "semantic_masks/{}.png")
    pairs(tmp_path, "images/{}.jpg", "instance_masks/{}.png")
    listing = list_source(tmp_path)
    assert listing.masks is not None
    assert listing.masks.files.read(0) == (tmp_path / "semantic_masks/0001.png").read_bytes()  # type: ignore[union-attr]
    assert "`--mask-files` chooses (1): instance_masks/" in notes_of(listing)


def test_many_folders_of_classes_with_masks_are_paired_folder_by_folder(tmp_path: Path) -> None:
    for n in range(15):
        pairs(tmp_path, f"class{n}/{{}}.png", f"class{n}_mask/{{}}.png", stems=("0001", "0002"))
    listing = list_source(tmp_path)
    assert listing.layout == "mask-folders" and len(listing) == 30
    assert listing.masks is not None
    row = listing.keys.index("class3/0002.png")
    assert listing.masks.files.read(row) == (tmp_path / "class3_mask/0002.png").read_bytes()  # type: ignore[union-attr]


def test_colours_of_classes_that_lie_beside_masks_are_used(tmp_path: Path) -> None:
    root = tmp_path / "CamVid"
    for split in ("train", "val"):
        pairs(root, f"{split}/{{}}.png", f"{split}_labels/{{}}_L.png", mode="RGB")
    listing = list_source(root)
    assert "`--palette FILE` must say which is which class" in notes_of(listing)
    with pytest.raises(FastloadError, match=r"holds colours.*`--palette FILE`"):
        pack_images(root, tmp_path / "refused.h5", workers=0)
    colours = {
        tuple(int(part) for part in pixel)
        for file in root.glob("*_labels/*.png")
        for pixel in np.asarray(Image.open(file)).reshape(-1, 3)
    }
    ordered = sorted(colours)
    rows = [f"class{n},{r}, {g},{b}" for n, (r, g, b) in enumerate(ordered)]
    write(root / "class_dict.csv", "\n".join(["name,r,g,b", *rows]))
    assert "of the 4 classes in class_dict.csv" in notes_of(list_source(root))
    pack_images(root, tmp_path / "out.h5", shuffle=False, workers=0)
    with h5py.File(tmp_path / "out.h5") as file:
        first = np.asarray(Image.open(root / "train_labels/0001_L.png"))
        expected = [ordered.index(tuple(pixel)) for pixel in first.reshape(-1, 3).tolist()]
        assert file["masks"][0].flatten().tolist() == expected
        assert file["masks"].attrs["names"].tolist() == [b"class0", b"class1", b"class2", b"class3"]
    write(tmp_path / "mine.csv", "\n".join(f"{r},{g},{b},mine{n}" for n, (r, g, b) in enumerate(ordered)))
    pack_images(root, tmp_path / "mine.h5", palette=tmp_path / "mine.csv", ignore_index="mine0", workers=0)
    with h5py.File(tmp_path / "mine.h5") as file:
        assert file["masks"].attrs["names"].tolist() == [b"mine1", b"mine2", b"mine3"]


def test_a_second_mask_of_an_image_is_neither_an_image_nor_lost(tmp_path: Path) -> None:
    for i in (1, 2, 3):
        photo(tmp_path / f"x ({i}).png", i)
        mask(tmp_path / f"x ({i})_mask.png", i)
    mask(tmp_path / "x (3)_mask_1.png", 3)
    listing = refused_or_skipped(r"x \(3\).png has several masks, such as x \(3\)_mask_1.png", tmp_path)
    assert listing.keys == ("x (1).png", "x (2).png") and listing.masks is not None
    alone = list_source(tmp_path, options=SourceOptions(masks="none"))
    assert alone.keys == ("x (1).png", "x (2).png", "x (3).png") and alone.masks is None
