"""Whatever the layout: images and annotations next to a dataset that it does not read are NOT READ, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from record_files import image_file, write_mds, write_tfrecord
from small_trees import npy, photo, picture, write, write_tar

from fastload.errors import SourceError
from fastload.sources.layouts import LAYOUTS, list_source

VOC_STEMS = ("2007_000001", "2007_000002", "2007_000003")
VOC = "<annotation><size><width>32</width><height>24</height></size></annotation>"


def photos(root: Path, *names: str) -> Path:
    for seed, name in enumerate(names):
        photo(root / name, seed)
    return root


def paired(root: Path, images: str, masks: str, *stems: str) -> None:
    for stem in stems:
        photo(root / images.format(stem))
        picture(root / masks.format(stem), 0, 1, 2)


def celeba(root: Path) -> None:
    photos(root, "img_align_celeba/000001.jpg", "img_align_celeba/000002.jpg")
    write(root / "list_eval_partition.txt", "000001.jpg 0\n000002.jpg 1\n")


def imagenet(root: Path) -> None:
    photos(root, "train/n01440764/a_1.JPEG", "train/n02102040/a_2.JPEG", "val/n01440764/b_1.JPEG")


def ade20k(root: Path) -> None:
    paired(
        root,
        "images/training/ADE_train_{}.jpg",
        "annotations/training/ADE_train_{}.png",
        "00000001",
        "00000002",
        "00000003",
    )
    write(root / "sceneCategories.txt", "".join(f"ADE_train_0000000{i} zoo\n" for i in (1, 2, 3)))


def voc(root: Path) -> None:
    paired(root, "JPEGImages/{}.jpg", "SegmentationClass/{}.png", *VOC_STEMS)
    for stem in VOC_STEMS:
        picture(root / f"SegmentationObject/{stem}.png", 0, 1)
        write(root / f"Annotations/{stem}.xml", VOC)
    write(root / "ImageSets/Segmentation/train.txt", "".join(f"{stem}\n" for stem in VOC_STEMS))
    for name in ("dog_train", "cat_train"):
        write(root / f"ImageSets/Main/{name}.txt", "2007_000001 1\n2007_000002 -1\n")


def camvid(root: Path) -> None:
    paired(root, "train/{}.png", "trainannot/{}.png", "0001TP_1", "0001TP_2")
    paired(root, "val/{}.png", "valannot/{}.png", "0016E5_1")


def cityscapes(root: Path) -> None:
    for stem in ("a_000000_000019", "a_000001_000019"):
        photo(root / f"leftImg8bit/train/a/{stem}_leftImg8bit.png")
        for kind in ("labelIds", "instanceIds", "color"):
            picture(root / f"gtFine/train/a/{stem}_gtFine_{kind}.png", 7, 8)
        write(root / f"gtFine/train/a/{stem}_gtFine_polygons.json", "{}")


def coco(root: Path) -> None:
    photos(root, "train2017/000000000001.jpg", "train2017/000000000002.jpg")
    images = [{"id": i, "file_name": f"{i:012d}.jpg", "width": 32, "height": 24} for i in (1, 2)]
    boxes = [{"id": i, "image_id": i, "category_id": 1, "bbox": [1, 2, 3, 4], "area": 12, "iscrowd": 0} for i in (1, 2)]
    content = {"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "cat"}]}
    write(root / "annotations/instances_train2017.json", json.dumps(content))


def captions(root: Path) -> None:
    photos(root, "Images/1000_a.jpg", "Images/1001_b.jpg")
    write(root / "captions.txt", "image,caption\n1000_a.jpg,A cat sits .\n1001_b.jpg,A dog runs .\n")


def cub(root: Path) -> None:
    photos(root, "images/001.Albatross/a_1.jpg", "images/002.Wren/c_1.jpg")
    for name, text in {
        "images": "1 001.Albatross/a_1.jpg\n2 002.Wren/c_1.jpg\n",
        "image_class_labels": "1 1\n2 2\n",
        "classes": "1 001.Albatross\n2 002.Wren\n",
        "train_test_split": "1 1\n2 0\n",
        "bounding_boxes": "1 1.0 2.0 3.0 1.0\n2 0.0 0.0 2.0 2.0\n",
    }.items():
        write(root / f"{name}.txt", text)


def idx(array: np.ndarray) -> bytes:
    return b"\0\0\x08" + bytes([array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def mnist(root: Path) -> None:
    root.mkdir()
    (root / "train-images-idx3-ubyte").write_bytes(idx(np.zeros((3, 28, 28), np.uint8)))
    (root / "train-labels-idx1-ubyte").write_bytes(idx(np.arange(3, dtype=np.uint8)))


def manifest(root: Path) -> None:
    photos(root, "pics/p_1.jpg", "pics/p_2.jpg")
    write(root / "train.csv", "file_name,label\npics/p_1.jpg,cat\npics/p_2.jpg,dog\n")


def parquet(root: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    root.mkdir()
    images = [{"bytes": image_file(i), "path": None} for i in range(2)]
    pq.write_table(pa.table({"image": images, "label": [0, 1]}), root / "train.parquet")


def webdataset(root: Path) -> None:
    for shard in ("train-000000", "train-000001"):
        members = [(f"{shard}_{i}.{suffix}", image_file(i) if suffix == "png" else b"1") for i in (1, 2)
                   for suffix in ("png", "cls")]  # fmt: skip
        write_tar(root / f"{shard}.tar", members)


def mds(root: Path) -> None:
    samples = [[image_file(i, form="JPEG"), np.int64(i).tobytes()] for i in range(3)]
    write_mds(root, {"x": "jpeg", "y": "int"}, samples)


def tfrecord(root: Path) -> None:
    root.mkdir()
    write_tfrecord(root / "a.tfrecord", *({"image/encoded": [image_file(i)], "label": [i]} for i in range(2)))


def arrays(root: Path) -> None:
    root.mkdir()
    (root / "images.npy").write_bytes(npy(np.zeros((3, 32, 32, 3), np.uint8)))
    (root / "labels.npy").write_bytes(npy(np.arange(3)))


def hdf5(root: Path) -> None:
    root.mkdir()
    with h5py.File(root / "train.h5", "w") as file:
        file["images"], file["labels"] = np.zeros((3, 32, 32, 3), np.uint8), np.arange(3)


def yolo(root: Path) -> None:
    photos(root, "images/a_1.jpg", "images/a_2.jpg")
    for stem in ("a_1", "a_2"):
        write(root / f"labels/{stem}.txt", "0 0.5 0.5 0.5 0.5\n")


def mask_folders(root: Path) -> None:
    paired(root, "images/{}.jpg", "masks/{}.png", "s_1", "s_2", "s_3")


def folder(root: Path) -> None:
    photos(root, "cat/c_1.jpg", "cat/c_2.jpg", "dog/d_1.jpg", "dog/d_2.jpg")


DATASETS: dict[str, Callable[[Path], None]] = {
    name.replace("_", "-"): maker
    for name, maker in globals().items()
    if name.replace("_", "-") in LAYOUTS and callable(maker)
}


def images_of(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))


def other_images(root: Path) -> str:
    photos(root, "extra/x_1.jpg", "extra/x_2.jpg", "extra/x_3.jpg")
    return "extra"


def class_folders(root: Path) -> str:
    photos(root, "zebra/z_1.jpg", "zebra/z_2.jpg", "yak/y_1.jpg", "yak/y_2.jpg")
    return "zebra"


def further_masks(root: Path) -> str:
    for path in images_of(root)[:9] or [Path("w_1.jpg")]:
        picture(root / f"depths/{path.stem}.png", 0, 1, 3)
    return "depths"


def boxes_for_each(root: Path) -> str:
    for path in images_of(root)[:9] or [Path("w_1.jpg")]:
        write(root / f"further/{path.stem}.json", '{"shapes": [{"points": [[1, 2], [3, 4]]}]}')
    return "further"


def list_of_splits(root: Path) -> str:
    images = images_of(root) or [Path("w_1.jpg"), Path("w_2.jpg")]
    write(root / "lists/fold.lst", "".join(f"{path.name} fold{i % 2}\n" for i, path in enumerate(images[:9])))
    return "fold.lst"


def matlab(root: Path) -> str:
    write(root / "meta/boxes.mat", "MATLAB 5.0")
    return "boxes.mat"


ADDED = (other_images, class_folders, further_masks, boxes_for_each, list_of_splits, matlab)


@pytest.mark.parametrize("name", DATASETS)
def test_a_dataset_alone_raises_no_alarm(tmp_path: Path, name: str) -> None:
    DATASETS[name](tmp_path / "set")
    listing = list_source(tmp_path / "set")
    assert listing.layout == name
    assert [note for note in listing.notes if "NOT READ" in note] == (
        ["NOT READ: parts and attributes of the birds."] if name == "cub" else []
    )


@pytest.mark.parametrize("added", ADDED)
@pytest.mark.parametrize("name", DATASETS)
def test_what_lies_next_to_a_dataset_is_said_or_refused(
    tmp_path: Path, name: str, added: Callable[[Path], str]
) -> None:
    DATASETS[name](tmp_path / "set")
    what = added(tmp_path / "set")
    try:
        listing = list_source(tmp_path / "set")
    except SourceError as error:
        assert what in str(error) or "Say which one it is: `--layout" in str(error)
        return
    if name == "folder" and added in (other_images, class_folders, further_masks):
        assert {"labels", "masks"} & {*listing.columns, "masks" if listing.masks else ""}, "a class more, or masks"
        return
    said = "NOT READ" if images_of(tmp_path / "set") or added is matlab else "Ignored other files"
    assert any(what in note for note in listing.notes if note.startswith(said)), listing.notes
