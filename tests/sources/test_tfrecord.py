import gzip
import json
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from record_files import example, image_file, record, write_tfrecord
from small_trees import refused, refused_or_skipped, values

from fastload import pack_images
from fastload.errors import FastloadError
from fastload.options.pack import SourceOptions
from fastload.sources.layouts import detect_layout, list_source
from fastload.sources.listing import Listing


def sample(i: int, **more: Any) -> dict[str, Any]:
    """An Example as the scripts of ImageNet write it."""
    return {
        "image/encoded": image_file(i, (10, 20, 3)),
        "image/class/label": i % 3 + 1,
        "image/class/text": b"ant" if i % 3 else b"bee",
        "image/filename": f"n01/n01_{i}.JPEG".encode(),
    } | {f"image/{name.replace('_', '/')}": value for name, value in more.items()}


def contents(listing: Listing) -> list[bytes]:
    files = pickle.loads(pickle.dumps(listing.files))
    return [files.read(i) for i in range(len(listing))]


def test_records_become_samples_whose_images_stay_in_place(tmp_path: Path) -> None:
    write_tfrecord(tmp_path / "train-00000-of-00002", sample(0), sample(1))
    write_tfrecord(tmp_path / "train-00001-of-00002", sample(2))
    write_tfrecord(tmp_path / "validation-00000-of-00001", sample(3), sample(4))
    assert detect_layout(tmp_path)[0] == "tfrecord"
    listing = list_source(tmp_path)
    assert listing.split_names == ("train", "val") and listing.split.tolist() == [0, 0, 0, 1, 1]
    assert contents(listing) == [image_file(i, (10, 20, 3)) for i in range(5)]
    assert values(listing) == [1, 2, 3, 1, 2] and values(listing, "image_class_text") == [1, 0, 0, 1, 0]
    assert listing.keys[2:4] == ("train-00001-of-00002/n01_2.JPEG", "validation-00000-of-00001/n01_3.JPEG")
    assert listing.sizes.tolist() == list(map(len, contents(listing)))
    (tmp_path / "train-00001-of-00002").unlink()
    assert len(refused_or_skipped(r"missing by the names of the others \(1\): train-00001-of-00002", tmp_path)) == 4
    assert len(list_source(tmp_path / "train-00000-of-00002")) == 2


@pytest.mark.parametrize("name", ["a.tfrecord", "a.tfrecords", "a.tfrec", "data.record", "x.tf_record", "A.TFRecord"])
def test_a_file_is_known_by_its_name_and_its_first_checksum(tmp_path: Path, name: str) -> None:
    path = write_tfrecord(tmp_path / "in" / name, sample(0))
    assert detect_layout(path)[0] == detect_layout(path.parent)[0] == "tfrecord"
    path.write_bytes(b"\0" * 8 + path.read_bytes()[8:])
    assert detect_layout(path.parent)[0] == "folder"
    path.write_bytes(gzip.compress(record(example(sample(1))) * 2))
    assert contents(list_source(path)) == [image_file(1, (10, 20, 3))] * 2


def test_boxes_in_fractions_become_pixels(tmp_path: Path) -> None:
    def boxed(i: int, *boxes: tuple[float, ...], label: list[int] | None = None) -> dict[str, Any]:
        sides = {
            f"object_bbox_{side}": [box[at] for box in boxes]
            for at, side in enumerate(("xmin", "ymin", "xmax", "ymax"))
        }
        return sample(i, **sides, object_class_label=label or [7] * len(boxes), object_class_text=[b"dog"] * len(boxes))

    path = tmp_path / "a.tfrecord"
    write_tfrecord(
        path,
        boxed(0, (0.1, 0.2, 0.5, 0.6), (0.0, 0.0, 1.0, 1.0), label=[7, 9]),
        boxed(1),
        boxed(2, (0.5, 0.5, 1.0, 1.0)),
    )
    for form in ("yxyx", "xywh", "cxcywh"):  # the names say another one
        refused("are xyxy by their names. Leave `--boxes` out", path, options=SourceOptions(boxes=form))
    listing = list_source(path)
    expected = [[[2, 2, 8, 4], [0, 0, 20, 10]], [[0] * 4] * 2, [[10, 5, 10, 5], [0] * 4]]
    assert np.allclose(values(listing, "boxes"), expected, atol=1e-5) and listing.columns["boxes"].moves == "xywh"
    assert values(listing, "num_boxes") == [2, 0, 1] and values(listing, "box_labels") == [[7, 9], [-1, -1], [7, -1]]
    assert values(listing) == [1, 2, 3]
    for wrong, said in (
        (boxed(3, (10.0, 20.0, 50.0, 60.0)), "boxes with numbers from 10 to 60, where TensorFlow has fractions"),
        (boxed(3, (0.5, 0.2, 0.1, 0.6)), "a box that ends before it begins"),
        (boxed(3, (0.1, 0.2, 0.5, 0.6), label=[1, 2]), "1 boxes and 2 labels of boxes"),
    ):
        write_tfrecord(path, boxed(0), wrong)
        assert len(refused_or_skipped(f"record 1 of a.tfrecord has {said}", path)) == 1


def test_boxes_of_an_image_turned_by_exif_are_refused(tmp_path: Path) -> None:
    turned = sample(0, **{f"object_bbox_{side}": 0.5 for side in ("xmin", "ymin", "xmax", "ymax")})
    exif = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0"
    turned["image/encoded"] = image_file(0, (10, 20, 3), "JPEG", exif=exif)
    refused(
        "is turned by its EXIF orientation, which TensorFlow ignores", write_tfrecord(tmp_path / "a.tfrecord", turned)
    )


def of_tfds(root: Path, *, stated: int = 2) -> Path:
    """A dataset as tensorflow-datasets writes it."""
    for split, count in (("train", 2), ("extra", 1)):
        write_tfrecord(root / f"toys-{split}.tfrecord-00000-of-00001", *[
            {"image": image_file(i, (10, 20, 3)), "label": i, "objects/bbox": [0.2, 0.1, 0.6, 0.5] * i,
             "objects/label": [1] * i}
            for i in range(count)
        ])  # fmt: skip
    (root / "label.labels.txt").write_text("cat\ndog\n")
    (root / "objects-label.labels.txt").write_text("ear\ntail\n")
    (root / "features.json").write_text('{"pythonClassName": "tensorflow_datasets.core.features.BBoxFeature"}')
    splits = [{"name": "train", "shardLengths": [str(stated)]}, {"name": "extra", "shardLengths": ["1"]}]
    (root / "dataset_info.json").write_text(json.dumps({"name": "toys", "splits": splits}))
    return root


def test_tensorflow_datasets_name_their_classes_splits_and_boxes(tmp_path: Path) -> None:
    listing = list_source(of_tfds(tmp_path / "a"))
    assert listing.split_names == ("train", "extra") and values(listing) == [0, 1, 0]
    assert listing.columns["labels"].attrs["names"] == ("cat", "dog")
    assert listing.columns["box_labels"].attrs["names"] == ("ear", "tail") and values(listing, "num_boxes") == [0, 1, 0]
    assert np.allclose(values(listing, "boxes")[1], [[2, 2, 8, 4]], atol=1e-5)
    refused("dataset_info.json states 3 records of 'train', there are 2", of_tfds(tmp_path / "b", stated=3))


@pytest.mark.parametrize("form", ["yxyx", "xyxy", "xywh", "cxcywh"])
def test_boxes_whose_order_nothing_says_are_read_only_as_the_user_says(tmp_path: Path, form: str) -> None:
    written = {"yxyx": [0.2, 0.1, 0.6, 0.5], "xyxy": [0.1, 0.2, 0.5, 0.6], "xywh": [0.1, 0.2, 0.4, 0.4],
               "cxcywh": [0.3, 0.4, 0.4, 0.4]}[form]  # fmt: skip
    rows = [sample(i) | {"image/object/bbox": written * i, "image/object/label": [4] * i} for i in range(3)]
    path = write_tfrecord(tmp_path / "a.tfrecord", *rows)
    refused("the feature 'image/object/bbox' holds boxes as four numbers in a row, .* nothing says what they are", path)
    listing = list_source(path, options=SourceOptions(boxes=form))
    assert np.allclose(values(listing, "boxes")[1:], [[[2, 2, 8, 4], [0] * 4], [[2, 2, 8, 4]] * 2], atol=1e-5)
    assert values(listing, "box_labels") == [[-1, -1], [4, -1], [4, 4]]
    scale = [10, 20, 10, 20] if form == "yxyx" else [20, 10, 20, 10]
    pixels = (np.array(written) * scale).tolist()
    write_tfrecord(path, *[row | {"image/object/bbox": pixels * i} for i, row in enumerate(rows)])
    listing = list_source(path, options=SourceOptions(boxes=form))
    assert np.allclose(values(listing, "boxes")[2], [[2, 2, 8, 4]] * 2, atol=1e-5)


def test_boxes_are_read_by_the_names_of_their_numbers_whatever_these_are(tmp_path: Path) -> None:
    for names, box in (("y_max x_min x_max y_min", (0.6, 0.1, 0.5, 0.2)), ("h w y x", (0.4, 0.4, 0.2, 0.1)),
                       ("x_center y_center width height", (0.3, 0.4, 0.4, 0.4))):  # fmt: skip
        sides = {f"image/object/bbox/{name}": [one] for name, one in zip(names.split(), box, strict=True)}
        listing = list_source(write_tfrecord(tmp_path / "a.tfrecord", sample(0) | sides))
        assert np.allclose(values(listing, "boxes"), [[[2, 2, 8, 4]]], atol=1e-5)


def test_boxes_of_tensorflow_datasets_in_another_order_are_refused(tmp_path: Path) -> None:
    root = of_tfds(tmp_path)
    (root / "features.json").write_text('{"pythonClassName": "BBoxFeature", "boundingBox": {"bboxFormat": "XYWH"}}')
    refused("the feature 'objects/bbox' holds boxes as four numbers in a row", root)


def test_a_record_whose_checksum_is_wrong_is_not_packed(tmp_path: Path) -> None:
    path = write_tfrecord(tmp_path / "a.tfrecord", *[sample(i) for i in range(3)])
    data = bytearray(path.read_bytes())
    data[data.index(b"image/class/label") + 23] ^= 2  # another label
    path.write_bytes(data)
    assert list_source(path)
    with pytest.raises(FastloadError, match=r"a\.tfrecord/n01_0\.JPEG.*the checksum of its record is another"):
        pack_images(path, tmp_path / "o.h5", workers=0)
    packed = pack_images(path, tmp_path / "p.h5", workers=0, on_error="skip")
    assert packed.num_samples == 2 and len(packed.skipped) == 1


def test_raw_pixels_need_their_shape(tmp_path: Path) -> None:
    images = [np.random.default_rng(i).integers(0, 256, (4, 6, 3), dtype=np.uint8) for i in range(3)]
    rows = [
        {"image_raw": one.tobytes(), "height": 4, "width": 6, "depth": 3, "label": i} for i, one in enumerate(images)
    ]
    path = write_tfrecord(tmp_path / "a.tfrecords", *rows)
    listing = list_source(path)
    for i, one in enumerate(images):
        assert np.array_equal(listing.files.read(i), one)
    assert values(listing) == [0, 1, 2] and pack_images(path, tmp_path / "o.h5", workers=0).image_shape == (4, 6, 3)
    write_tfrecord(path, *[{name: row[name] for name in ("image_raw", "label")} for row in rows])
    refused(r"Raw pixels in image_raw \(72 bytes\) are read only where integer features say their height", path)
    write_tfrecord(path, *[row | {"height": 5} for row in rows])
    refused("Raw pixels in image_raw", path)
    write_tfrecord(path, *[{"x": 1.5, "label": 1}])
    refused("no field holds images. Its records have", path)


def test_damage_names_the_file_the_record_and_what_to_do(tmp_path: Path) -> None:
    path = write_tfrecord(tmp_path / "a.tfrecord", sample(0), sample(1))
    whole = path.read_bytes()
    second = len(record(example(sample(0))))
    for cut in (len(whole) - 1, second + 30, second + 5):
        path.write_bytes(whole[:cut])
        refused(f"a.tfrecord: record 1, at byte {second}, is cut short: the file ends at byte {cut}", path)
    path.write_bytes(whole[: second + 2] + b"\xff" + whole[second + 3 :])
    refused(f"record 1, at byte {second}: the checksum of its length is wrong", path)
    for message in (b"\x0b\x00", b"\x12\x02\x0a\x00", b"\x0a\x05\x0a\x03\x0a\x20x", b"not a message"):
        path.write_bytes(record(message))
        refused("record 0, at byte 0, is no tf.train.Example", path)


def test_values_are_read_however_they_are_written(tmp_path: Path) -> None:
    varints = b"\x08\x05" + b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"  # not packed: 5, -1
    floats = b"".join(b"\x0d" + struct.pack("<f", one) for one in (0.5, 2.0))
    features = {"a": b"\x1a" + bytes([len(varints)]) + varints, "b": b"\x12" + bytes([len(floats)]) + floats}
    entries = b""
    for name, value in features.items():
        entry = b"\x0a\x01" + name.encode() + b"\x12" + bytes([len(value)]) + value
        entries += b"\x0a" + bytes([len(entry)]) + entry
    image = example({"image": image_file(), "empty": [], "many": [3, -4, 5], "words": [b"x", b"y"]})
    # Messages of one kind behind each other are one.
    path = tmp_path / "a.tfrecord"
    path.write_bytes(record(image + b"\x0a" + bytes([len(entries)]) + entries))
    listing = list_source(path)
    assert (
        values(listing, "a") == [[5, -1]]
        and values(listing, "b") == [[0.5, 2.0]]
        and values(listing, "many") == [[3, -4, 5]]
    )


def test_shards_of_which_only_some_name_a_split_are_refused(tmp_path: Path) -> None:
    write_tfrecord(tmp_path / "train.tfrecord", sample(0))
    write_tfrecord(tmp_path / "more.tfrecord", sample(1))
    refused(r"shards that name no split \(1\): more.tfrecord; the others are train", tmp_path)


def test_labels_and_images_are_those_the_user_names(tmp_path: Path) -> None:
    path = write_tfrecord(
        tmp_path / "a.tfrecord", *[sample(i) | {"thumb/encoded": image_file(9), "age": 3} for i in range(2)]
    )
    refused("several fields hold images: image/encoded, thumb/encoded", path)
    options = SourceOptions(image_column="thumb/encoded", labels=("age",))
    listing = list_source(path, options=options)
    assert contents(listing) == [image_file(9)] * 2 and values(listing) == [3, 3]


def test_the_writer_of_another_package_writes_what_is_read(tmp_path: Path) -> None:
    writer = pytest.importorskip("tfrecord.writer", reason="tfrecord is not installed")
    out = writer.TFRecordWriter(str(tmp_path / "a.tfrecord"))
    for i in range(4):
        out.write({"image": (image_file(i), "byte"), "label": (-i, "int"), "score": ([0.5, i], "float")})
    out.close()
    listing = list_source(tmp_path)
    assert contents(listing) == [image_file(i) for i in range(4)] and values(listing) == [0, -1, -2, -3]
    assert values(listing, "score") == [[0.5, i] for i in range(4)]
