"""One small dataset of each layout, for `golden_packs`: the same on every machine and with every version of a library.

Pixels come from SHAKE-256, since NumPy may change what its generators draw. Images are PNG files, also those that a
layout calls .jpg: what they are is told by their first bytes, and libraries decode a JPEG to slightly different pixels.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import struct
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from PIL import Image
from record_files import write_mds, write_tfrecord
from small_trees import npy, tar_of

# 16 rows of 24 pixels, in colour and in gray. Never encoded anew: `--store source` keeps these very bytes.
COLOUR_JPEG = base64.b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDABQODxIPDRQSEBIXFRQYHjIhHhwcHj0sLiQySUBMS0dARkVQWnNiUFVtVkVGZIhlbXd7gYKBTmCNl4x9"
    "lnN+gXz/2wBDARUXFx4aHjshITt8U0ZTfHx8fHx8fHx8fHx8fHx8fHx8fHx8fHx8fHx8fHx8fHx8fHx8fHx8fHx8fHx8fHx8fHz/wAARCAAQABgD"
    "ASIAAhEBAxEB/8QAFwAAAwEAAAAAAAAAAAAAAAAAAAQFBv/EABcQAAMBAAAAAAAAAAAAAAAAAAADBGH/xAAWAQEBAQAAAAAAAAAAAAAAAAADAgX/"
    "xAAZEQACAwEAAAAAAAAAAAAAAAAAAgEDBCH/2gAMAwEAAhEDEQA/AM8qPBxUeFNUeDao8JVwaNZNVHgF5UeAPDmumvh//9k="
)
GRAY_JPEG = base64.b64decode(
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDABQODxIPDRQSEBIXFRQYHjIhHhwcHj0sLiQySUBMS0dARkVQWnNiUFVtVkVGZIhlbXd7gYKBTmCNl4x9"
    "lnN+gXz/wAALCAAQABgBAREA/8QAFQABAQAAAAAAAAAAAAAAAAAABgf/xAAWEAADAAAAAAAAAAAAAAAAAAAABEH/2gAIAQEAAD8ANJQQJQQJQn6U"
    "ECUECUP/2Q=="
)
# Its first segment, put behind the two bytes that begin a JPEG: EXIF orientation 6, a quarter turn clockwise.
TURNED = bytes.fromhex("ffe1 0022 457869660000 4d4d002a00000008 0001 0112 0003 00000001 00060000 00000000")


def noise(name: str, *shape: int, dtype: str = "u1", below: int | None = None) -> np.ndarray:
    """Numbers that depend on nothing but the name: (*shape) of an unsigned dtype, below a bound where one is given."""
    kind = np.dtype(dtype).newbyteorder("<")
    data = hashlib.shake_256(name.encode()).digest(int(np.prod(shape)) * kind.itemsize)
    values = np.frombuffer(data, kind).reshape(shape).astype(kind.newbyteorder("="))
    return values % below if below is not None else values


def png(pixels: np.ndarray) -> bytes:
    """A PNG file of uint8 (H, W[, 3 or 4]) or uint16 (H, W) pixels."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def image(path: Path, *shape: int, below: int | None = None) -> Path:
    """An image of noise, by default 6 x 8 x 3, that is another for each name of a file."""
    return write(path, png(noise(path.name, *(shape or (6, 8, 3)), below=below)))


def mask(path: Path, *values: int, palette: bool = False, size: tuple[int, int] = (6, 8)) -> Path:
    """A mask of these values and no other."""
    picture = Image.fromarray(np.array(values, np.uint8)[noise(path.name, *size, below=len(values))])
    if palette:
        picture.putpalette([n * 7 % 256 for n in range(768)])
    file = io.BytesIO()
    picture.save(file, "PNG")
    return write(path, file.getvalue())


def tar(path: Path, members: dict[str, bytes]) -> Path:
    return write(path, tar_of(members, tarfile.USTAR_FORMAT))


def folder(root: Path) -> Path:
    for name in ("train/cat/1", "train/cat/2", "train/dog/1", "train/dog/2", "train/dog/3", "val/dog/4", "val/größe/5"):
        image(root / f"{name}.png")
    image(root / "test/6.png")
    return root


def classes(root: Path, pictures: Iterable[np.ndarray]) -> Path:
    """PNG files in two folders of classes, in turn."""
    for n, pixels in enumerate(pictures):
        write(root / f"{'ab'[n % 2]}/{n}.png", png(pixels))
    return root


def sized_folder(root: Path) -> Path:
    """Images of several sizes, one of them gray."""
    shapes = [(6, 8, 3), (5, 9, 3), (12, 4, 3), (7, 7), (30, 20, 3), (6, 8, 3), (1, 1, 3)]
    # Few values, so that compression makes all but the single pixel smaller, whichever version compresses.
    return classes(root, (noise(f"{n}.png", *shape, below=3) for n, shape in enumerate(shapes)))


def deep_folder(root: Path) -> Path:
    """PNG files of 16 bits, which hold all of their bits."""
    return classes(root, (noise(f"deep {n}", 6, 8, dtype="u2") for n in range(5)))


def alpha_folder(root: Path) -> Path:
    return classes(root, (noise(f"alpha {n}", 6, 8, 4 if n else 3) for n in range(5)))


def jpeg_folder(root: Path) -> Path:
    """JPEG files upright, turned and gray, and a PNG among them."""
    for n in range(6):
        # A comment of its own makes each file another one.
        comment = b"\xff\xfe\x00\x03" + bytes([n])
        data = GRAY_JPEG if n == 2 else COLOUR_JPEG
        write(root / f"{'ab'[n % 2]}/{n}.jpg", data[:2] + (TURNED if n == 4 else b"") + comment + data[2:])
    image(root / "b/6.png", 5, 9, 3)
    return root


def broken_folder(root: Path, *, sizes: bool = False, masks: bool = False) -> Path:
    """Twelve images, of which one is empty and two break off behind their header."""
    for n in range(12):
        folder = f"{'train' if n < 8 else 'val'}/{'images' if masks else 'ab'[n % 2]}"
        path = image(root / folder / f"{n:02}.png", 6 + n % 3 * sizes, 8, 3)
        if masks:
            mask(root / f"{'train' if n < 8 else 'val'}/masks/{n:02}.png", 0, 1, 255)
        data = path.read_bytes()
        if n == 1 and not masks:
            path.write_bytes(b"")
        if n in (4, 9):
            path.write_bytes(data[: len(data) // 2])
    return root


def manifest(root: Path) -> Path:
    """A table with a class, a split, a box, a number and a mask for each image."""
    text = "image;mask;label;split;x;y;w;h;age\n"
    for n in range(7):
        image(root / f"images/{n}.png", 8, 12, 3)
        mask(root / f"drawn/{n}.png", 0, 1, 2, size=(8, 12))
        label, split = "cat" if n % 3 else "dog", "dev" if n == 5 else "train"
        text += f"images/{n}.png;drawn/{n}.png;{label};{split};{n};2;4;6;{n * 1.5}\n"
    write(root / "table.csv", text)
    return root


def manifest_of_objects(root: Path) -> Path:
    """JSON lines as Hugging Face's imagefolder has them, with a list of boxes for each image."""
    lines = []
    for n in range(4):
        image(root / f"{n}.png", 8, 12, 3)
        boxes = [[i, 1, 4.5, 2 + n] for i in range(n)]
        objects = {"bbox": boxes, "categories": ["cat", "dog", "cat"][:n]}
        lines.append(json.dumps({"file_name": f"{n}.png", "objects": objects}))
    write(root / "metadata.jsonl", "\n".join(lines))
    return root


def parquet(root: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    named = {"_type": "ClassLabel", "names": ["cat", "dog"]}
    features = {
        "image": {"_type": "Image"},
        "label": named,
        "objects": {"bbox": {}, "category": {"feature": named, "_type": "List"}},
    }
    root.mkdir(parents=True)
    for name, numbers in {"train-00000-of-00002": (0, 1, 2), "train-00001-of-00002": (3, 4), "test": (5, 6)}.items():
        cells = [{"bytes": png(noise(f"parquet {n}", 6, 8, 3)), "path": f"{n}.png"} for n in numbers]
        boxes = [{"bbox": [[1.0, 2.0, 3.0, 4.0]] * (n % 3), "category": [1, 0][: n % 3]} for n in numbers]
        table = pa.table({
            "image": pa.array(cells, pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
            "label": pa.array([n % 2 for n in numbers], pa.int64()),
            "objects": pa.array(boxes, pa.struct([("bbox", pa.list_(pa.list_(pa.float64()))),
                                                  ("category", pa.list_(pa.int64()))])),
            "weight": pa.array([n / 4 for n in numbers], pa.float32()),
        })  # fmt: skip
        metadata = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
        pq.write_table(table.replace_schema_metadata(metadata), root / f"{name}.parquet")
    return root


def webdataset(root: Path) -> Path:
    for shard, numbers in {"train-0": (0, 1, 2), "train-1": (3, 4), "val-0": (5, 6)}.items():
        tar(root / f"{shard}.tar", {
            f"{n}.{field}": data
            for n in numbers
            for field, data in {
                "png": png(noise(f"shard {n}", 6, 8, 3)),
                "seg.png": png(noise(f"mask {n}", 6, 8, below=4)),
                "cls": b"%d\n" % (n % 3),
                "json": json.dumps({"score": n / 4, "ok": n % 2 == 0, "id": n}).encode(),
                "box.npy": npy([n, 1.5, 2, 3]),
            }.items()
        })  # fmt: skip
    return root


def mds(root: Path) -> Path:
    for split, numbers in {"train": range(5), "val": range(5, 7)}.items():
        write_mds(root / split, {"x": "png", "y": "int", "score": "float32", "v": "ndarray:float32:2"}, [
            [png(noise(f"record {n}", 6, 8, 3)), np.int64(n % 3).tobytes(), np.float32(n / 4).tobytes(),
             np.array([n, 0.5], "f4").tobytes()]
            for n in numbers
        ], shards=2)  # fmt: skip
    return root


def tfrecord(root: Path) -> Path:
    for split, numbers in {"train": range(5), "validation": range(5, 7)}.items():
        write_tfrecord(root / f"{split}-00000-of-00001", *[
            {"image/encoded": png(noise(f"record {n}", 6, 8, 3)), "image/class/label": n % 3, "image/id": n,
             **{f"image/object/bbox/{side}": [at / 8] * (n % 3)
                for side, at in (("xmin", 1), ("ymin", 2), ("xmax", 5), ("ymax", 6))},
             "image/object/class/label": [n] * (n % 3)}
            for n in numbers
        ])  # fmt: skip
    return root


def saved(root: Path, **values: np.ndarray) -> Path:
    """A folder of .npy files."""
    root.mkdir(parents=True)
    for name, array in values.items():
        np.save(root / f"{name}.npy", array)
    return root


def arrays(root: Path) -> Path:
    root.mkdir(parents=True)
    np.savez(
        root / "set.npz", train_images=noise("train", 7, 6, 5, 3), train_labels=noise("labels", 7, 1, below=4),
        test_images=noise("test", 3, 6, 5, 3), test_labels=noise("more", 3, 1, below=4),
    )  # fmt: skip
    return root / "set.npz"


def deep_arrays(root: Path) -> Path:
    """16 bits in colour, big-endian, channels first, with masks and vectors of labels."""
    return saved(
        root, images=noise("deep", 6, 3, 5, 7, dtype="u2").astype(">u2"), masks=noise("masks", 6, 5, 7, below=3),
        labels=np.asfortranarray(noise("labels", 6, 4, below=2)).astype(">i4"),
        weights=noise("weights", 6, 2, 3).astype("f2"),
    )  # fmt: skip


def token_arrays(root: Path) -> Path:
    """A dataset without images."""
    return saved(
        root, tokens=noise("tokens", 9, 5, dtype="u2", below=999).astype("i4"),
        attention_mask=noise("attention", 9, 5, below=2), labels=noise("labels", 9, below=3).astype("i8"),
    )  # fmt: skip


def hdf5(root: Path) -> Path:
    root.mkdir(parents=True)
    with h5py.File(root / "set.h5", "w") as file:
        for split, count in (("train", 6), ("test", 3)):
            file.create_dataset(
                f"{split}/images", data=noise(split, count, 3, 6, 5), chunks=(2, 3, 6, 5), compression="gzip"
            )
            file[f"{split}/labels"] = noise(f"labels {split}", count, below=3)
            file[f"{split}/labels"].attrs["names"] = ["ant", "bee", "cow"]
    return root / "set.h5"


def mask_folders(root: Path) -> Path:
    """Pairs in two splits, and images alone in a third."""
    for n in range(6):
        split = "train" if n < 4 else "val"
        image(root / f"{split}/images/{n}.png", 8, 12, 3)
        mask(root / f"{split}/masks/{n}.png", 0, 1, 7, size=(8, 12))
    image(root / "test/images/6.png", 8, 12, 3)
    return root


def sized_mask_folders(root: Path) -> Path:
    for n, size in enumerate([(6, 8), (5, 9), (12, 4), (30, 20), (6, 8)]):
        image(root / f"images/{n}.png", *size, 3, below=3)
        mask(root / f"masks/{n}.png", 0, 1, size=size)
    return root


def large_mask_folders(root: Path, *, noisy: bool) -> Path:
    """More than 1 MiB of masks, so that packing tries whether compression makes them half as large."""
    for n in range(5):
        shades = np.full((512, 512), n, np.uint8)
        write(root / f"images/{n}.png", png(shades))
        write(root / f"masks/{n}.png", png(noise(f"mask {n}", 512, 512) if noisy else shades))
    return root


CAT, DOG, EEL = "n02123045", "n02085620", "n01440764"


def imagenet(root: Path) -> Path:
    """As on Kaggle: classes of val in a table, images of test without any."""
    data = root / "ILSVRC/Data/CLS-LOC"
    for wnid in (CAT, DOG, EEL):
        for n in (10, 2):
            image(data / f"train/{wnid}/{wnid}_{n}.JPEG")
    solutions = ["ImageId,PredictionString"]
    for n, wnid in enumerate((DOG, CAT), 1):
        image(data / f"val/ILSVRC2012_val_{n:08}.JPEG")
        solutions.append(f"ILSVRC2012_val_{n:08},{wnid} 1 2 3 4 ")
    image(data / "test/ILSVRC2012_test_00000001.JPEG")
    write(root / "LOC_val_solution.csv", "\n".join(solutions))
    write(root / "LOC_synset_mapping.txt", f"{EEL} tench, Tinca tinca\n{DOG} Chihuahua\n{CAT} tabby, tabby cat\n")
    return root


def imagenet_tars(root: Path) -> Path:
    """The train archive as it is downloaded: an archive of each class in one archive."""
    archives = {}
    for wnid in (DOG, CAT):
        inner = tar(root / f"{wnid}.tar", {f"{wnid}_{n}.JPEG": png(noise(f"{wnid} {n}", 6, 8, 3)) for n in (3, 1)})
        archives[inner.name] = inner.read_bytes()
    return tar(root / "ILSVRC2012_img_train.tar", archives)


def ade20k(root: Path) -> Path:
    root = root / "ADEChallengeData2016"
    for split, stems in {"training": ("train_00000001", "train_00000002"), "validation": ("val_00000001",)}.items():
        for stem in stems:
            image(root / f"images/{split}/ADE_{stem}.jpg")
            mask(root / f"annotations/{split}/ADE_{stem}.png", 0, 1, 150)
    names = ["wall", *(f"thing {n}, something {n}" for n in range(2, 151))]
    rows = [f"{n}\t0.{n:04}\t{n}\t{n}\t{name}" for n, name in enumerate(names, 1)]
    write(root / "objectInfo150.txt", "Idx\tRatio\tTrain\tVal\tName\r\n" + "\r\n".join(rows) + "\r\n")
    write(root / "sceneCategories.txt", "ADE_train_00000001 bar\nADE_train_00000002 zoo\nADE_val_00000001 bar\n")
    return root


def voc(root: Path) -> Path:
    box = "<bndbox><xmin>{}</xmin><ymin>{}</ymin><xmax>{}</xmax><ymax>{}</ymax></bndbox>"
    thing = "<object><name>{}</name><difficult>{}</difficult>{}</object>"
    year = root / "VOCdevkit/VOC2012"
    for n in range(1, 5):
        image(year / f"JPEGImages/2007_{n}.jpg")
        things = thing.format("dog", 0, box.format(1, 1, 8, 6)) + thing.format("cat", 1, box.format(2, 3, 4.5, 5))
        size = "<size><width>8</width><height>6</height></size>"
        text = f"<annotation><filename>2007_{n}.jpg</filename>{size}{things if n != 2 else ''}</annotation>"
        write(year / f"Annotations/2007_{n}.xml", text)
    for n in (1, 3):
        mask(year / f"SegmentationClass/2007_{n}.png", 0, 12, 255, palette=True)
    lists = {
        "Segmentation/train": "2007_3\n", "Segmentation/val": "2007_1\n",
        "Main/train": "2007_3\n2007_2\n2007_4\n", "Main/val": "2007_1\n",
        "Main/dog_train": "2007_3  1\n2007_2 -1\n2007_4  0\n", "Main/dog_val": "2007_1 -1\n",
        "Main/cat_train": "2007_3  0\n2007_2 -1\n2007_4  1\n", "Main/cat_val": "2007_1  1\n",
    }  # fmt: skip
    for name, text in lists.items():
        write(year / f"ImageSets/{name}.txt", text)
    return root / "VOCdevkit"


def coco(root: Path) -> Path:
    categories = [{"id": 90, "name": "toothbrush"}, {"id": 1, "name": "person"}, {"id": 18, "name": "dog"}]

    def things(*rows: tuple[int, int, list[float], Any, int]) -> list[dict[str, Any]]:
        return [
            {"id": n, "image_id": of, "category_id": category, "bbox": box, "area": box[2] * box[3], "iscrowd": crowd,
             "segmentation": drawn}
            for n, (of, category, box, drawn, crowd) in enumerate(rows, 1)
        ]  # fmt: skip

    def annotations(split: str, numbers: tuple[int, ...], found: list[dict[str, Any]]) -> None:
        listed = [{"id": n, "file_name": f"{n:012}.jpg", "height": 10, "width": 16} for n in numbers]
        content = {"images": listed, "annotations": found, "categories": categories}
        write(root / f"annotations/instances_{split}.json", json.dumps(content))
        for n in numbers:
            image(root / f"{split}/{n:012}.jpg", 10, 16, 3)

    square, dot = [[2, 2, 6, 2, 6, 6, 2, 6]], [[3, 3, 5, 3, 5, 5, 3, 5]]
    crowd = {"counts": [0, 80, 80], "size": [10, 16]}
    annotations("train2017", (25, 9, 30), things(
        (25, 18, [2, 2, 4, 4], square, 0), (9, 90, [3.5, 3, 2, 2], dot, 0), (25, 1, [0, 0, 8, 10], crowd, 1),
        (9, 1, [2, 2, 4, 4], square, 0),
    ))  # fmt: skip
    annotations("val2017", (139,), things((139, 1, [2, 2, 4, 4], square, 0)))
    return root


def captions(root: Path) -> Path:
    for split, numbers in {"train2017": (25, 9, 30), "val2017": (139,)}.items():
        listed = [{"id": n, "file_name": f"{n:012}.jpg", "height": 10, "width": 16} for n in numbers]
        texts = [{"id": n * 10 + k, "image_id": n, "caption": f"{k} Hündchen"} for n in numbers for k in range(n % 4)]
        content = json.dumps({"images": listed, "annotations": texts[::-1]})
        write(root / f"annotations/captions_{split}.json", content)
        for n in numbers:
            image(root / f"{split}/{n:012}.jpg", 10, 16, 3)
    return root


def camvid(root: Path) -> Path:
    root = root / "CamVid"
    for split, frames in {"train": ("0001TP_1", "0016E5_2"), "val": ("0016E5_3",), "test": ("Seq05VD_4",)}.items():
        for frame in frames:
            image(root / split / f"{frame}.png")
            mask(root / f"{split}annot/{frame}.png", 0, 5, 11)
        rows = [f"/SegNet/CamVid/{split}/{frame}.png /SegNet/CamVid/{split}annot/{frame}.png\n" for frame in frames]
        write(root / f"{split}.txt", "".join(rows))
    return root


def cityscapes(root: Path) -> Path:
    for split, frames in {"train": ("ulm_000000_000019", "ulm_000001_000019"), "val": ("bonn_000000_000019",)}.items():
        for frame in frames:
            city = frame.partition("_")[0]
            image(root / f"leftImg8bit/{split}/{city}/{frame}_leftImg8bit.png")
            mask(root / f"gtFine/{split}/{city}/{frame}_gtFine_labelIds.png", 7, 26, 4, 33)
    return root


def cub(root: Path) -> Path:
    names = ["001.Albatross/a.jpg", "001.Albatross/b.jpg", "002.Wren/c.jpg"]
    for name in names:
        image(root / "images" / name)
    write(root / "images.txt", "".join(f"{n} {name}\n" for n, name in enumerate(names, 1)))
    write(root / "image_class_labels.txt", "1 1\n2 1\n3 2\n")
    write(root / "classes.txt", "1 001.Albatross\n2 002.Wren\n")
    write(root / "train_test_split.txt", "1 1\n2 0\n3 1\n")
    write(root / "bounding_boxes.txt", "1 1.0 2.0 3.0 1.0\n2 0.0 0.0 2.0 2.0\n3 1.0 1.0 1.0 1.0\n")
    return root


def yolo(root: Path) -> Path:
    lines_of = {"train/a": "1 0.5 0.5 0.5 0.25\n0 0.25 0.5 0.5 1\n", "train/b": "", "val/c": "0 0.5 0.5 1 1\n"}
    for name, lines in lines_of.items():
        image(root / f"images/{name}.png")
        write(root / f"labels/{name}.txt", lines)
    write(root / "classes.txt", "cat\ndog\n")
    return root


def celeba(root: Path) -> Path:
    """The officially named folders with every text file, whose columns are all packed."""
    count = 6
    files = [f"{n:06}.jpg" for n in range(1, count + 1)]
    points = "lefteye_x lefteye_y righteye_x righteye_y nose_x nose_y leftmouth_x leftmouth_y rightmouth_x rightmouth_y"

    def rows(values: np.ndarray) -> list[str]:
        return [f"{file} {' '.join(map(str, row))}" for file, row in zip(files, values.tolist(), strict=True)]

    names = " ".join(f"Attribute_{n}" for n in range(40))
    texts = {
        "Anno/list_attr_celeba.txt": [str(count), names, *rows(noise("attr", count, 40, below=2) * 2 - 1.0)],
        "Anno/identity_CelebA.txt": rows(noise("identity", count, 1, dtype="u2")),
        "Eval/list_eval_partition.txt": rows(np.array([[0], [0], [0], [1], [1], [2]])),
        "Anno/list_bbox_celeba.txt": [str(count), "image_id x_1 y_1 width height", *rows(noise("bbox", count, 4))],
        "Anno/list_landmarks_align_celeba.txt": [str(count), points, *rows(noise("aligned", count, 10, below=8))],
        "Anno/list_landmarks_celeba.txt": [str(count), points, *rows(noise("landmarks", count, 10))],
    }
    for name, lines in texts.items():
        write(root / name, "\r\n".join(lines).replace(".0", "") + "\r\n")
    for file in files:
        image(root / f"Img/img_align_celeba/{file}")
    return root


def mnist(root: Path) -> Path:
    """Files of train as they are, those of t10k gzipped."""
    for name, count in (("train", 9), ("t10k", 4)):
        for what, values in (("images", noise(name, count, 7, 5)), ("labels", noise(f"l {name}", count, below=10))):
            data = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()
            path = f"{name}-{what}-idx{values.ndim}-ubyte"
            write(root / (path if name == "train" else f"{path}.gz"), data if name == "train" else gzip.compress(data))
    return root


SOURCES: dict[str, Callable[[Path], Path]] = {
    "folder": folder, "manifest": manifest, "manifest of objects": manifest_of_objects, "parquet": parquet,
    "webdataset": webdataset, "arrays": arrays, "arrays of 16 bits": deep_arrays, "arrays of tokens": token_arrays,
    "hdf5": hdf5, "mask-folders": mask_folders, "imagenet": imagenet, "imagenet in tars": imagenet_tars,
    "ade20k": ade20k, "voc": voc, "coco": coco, "camvid": camvid, "celeba": celeba,
    "mnist": mnist, "cityscapes": cityscapes, "cub": cub, "yolo": yolo, "captions": captions,
    "mds": mds, "tfrecord": tfrecord,
}  # fmt: skip
"""Each makes its source in a folder that need not exist yet, and returns the path to pack. Only `exported` is not among
them: `fastload export` makes it of a packed file."""
