import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_trees import archived, listed, notes_of, picture, refused, refused_or_skipped

from fastload.errors import OptionError, SourceError
from fastload.options.pack import SourceOptions
from fastload.sources.layouts import detect_layout, list_source
from fastload.sources.listing import Listing
from fastload.sources.mask_classes import type_of_numbers

SEMANTIC, INSTANCE = SourceOptions(masks="semantic"), SourceOptions(masks="instance")
CATEGORIES = [{"id": 90, "name": "toothbrush"}, {"id": 1, "name": "person"}, {"id": 18, "name": "dog"}]
SQUARE = [[2, 2, 6, 2, 6, 6, 2, 6]]  # 4 x 4 pixels
DOT = [[3, 3, 5, 3, 5, 5, 3, 5]]  # 2 x 2 pixels inside it
CROWD = {"counts": [0, 80, 80], "size": [10, 16]}  # the left half, column by column


def annotation(number: int, image: int, category: int, segmentation: Any = None, **more: Any) -> dict[str, Any]:
    return {
        "id": number, "image_id": image, "category_id": category, "bbox": [2, 2, 4, 4], "area": 16, "iscrowd": 0,
        "segmentation": SQUARE if segmentation is None else segmentation, **more,
    }  # fmt: skip


TRAIN = [
    annotation(1, 25, 18),
    annotation(2, 9, 90, DOT, bbox=[3.5, 3, 2, 2], area=4),
    annotation(3, 25, 1, CROWD, bbox=[0, 0, 8, 10], area=80, iscrowd=1),
    annotation(4, 9, 1),
    annotation(5, 25, 90, [[3, 3, 3, 3, 3, 3]], bbox=[3, 3, 0, 0], area=0),
]


def write(path: Path, images: list[tuple[int, str]], annotations: list[Any], **more: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    listed = [{"id": i, "file_name": name, "height": 10, "width": 16} for i, name in images]
    # Categories stand behind the annotations, as in COCO itself.
    content = {"info": {"year": 2017}, "licenses": [], "images": listed, "annotations": annotations}
    path.write_text(json.dumps(content | {"categories": CATEGORIES} | more, indent=1))


@pytest.fixture
def coco(tmp_path: Path) -> Path:
    root = tmp_path / "coco"
    names = ["000000000009.jpg", "000000000025.jpg", "000000000030.jpg"]
    for name in names:
        picture(root / "train2017" / name)
    picture(root / "val2017" / "000000000139.jpg")
    picture(root / "test2017" / "000000000001.jpg")
    write(root / "annotations/instances_train2017.json", [(25, names[1]), (9, names[0]), (30, names[2])], TRAIN)
    write(root / "annotations/instances_val2017.json", [(139, "000000000139.jpg")], [annotation(7, 139, 1)])
    (root / "annotations/captions_train2017.json").write_text("{}")
    (root / "annotations/person_keypoints_train2017.json").write_text("{}")
    return root


def change(root: Path, split: str = "train2017", **more: Any) -> None:
    path = root / f"annotations/instances_{split}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))


def mask_of(listing: Listing, row: int) -> np.ndarray:
    assert listing.masks is not None
    return pickle.loads(pickle.dumps(listing.masks.files)).read(row)


def test_boxes_keep_their_file_order_and_categories_become_dense(coco: Path) -> None:
    assert detect_layout(coco)[0] == "coco"
    listing = listed(coco)
    assert listing.split_names == ("train", "val", "test")
    assert listing.keys[0] == "train2017/000000000009.jpg" and listing.keys[4] == "test2017/000000000001.jpg"
    column = listing.columns
    assert column["image_id"].values.tolist() == [9, 25, 30, 139, -1]
    assert column["num_boxes"].values.tolist() == [2, 3, 0, 1, 0]
    assert column["boxes"].moves == "xywh" and column["boxes"].attrs["names"] == ("x", "y", "width", "height")
    assert column["boxes"].values.dtype == np.float32 and column["boxes"].values.shape == (5, 3, 4)
    assert column["boxes"].values[0].tolist() == [[3.5, 3, 2, 2], [2, 2, 4, 4], [0, 0, 0, 0]]
    assert column["box_labels"].values.tolist()[:2] == [[2, 0, -1], [1, 0, 2]]
    assert column["box_labels"].attrs == {"names": ("person", "dog", "toothbrush"), "category_ids": (1, 18, 90)}
    assert column["box_crowd"].values.tolist()[1] == [0, 1, 0]
    assert listing.masks is None
    notes = notes_of(listing)
    assert "captions_train2017.json" in notes and "person_keypoints_train2017.json" in notes
    assert "Images without an annotation were kept (1)" in notes
    assert "Boxes without area were kept as they are (1)" in notes
    assert "Masks were not drawn" in notes


def test_semantic_masks_have_the_smaller_on_top_and_crowds_below(coco: Path) -> None:
    listing = listed(coco, "semantic")
    masks = listing.masks
    assert masks is not None and masks.present.tolist() == [True, True, True, True, False]
    assert masks.names == ("background", "person", "dog", "toothbrush") and masks.ignore_index == 255
    expected = np.zeros((10, 16), np.uint8)
    expected[2:6, 2:6] = 1
    expected[3:5, 3:5] = 3
    assert (mask_of(listing, 0) == expected).all()
    expected = np.zeros((10, 16), np.uint8)
    expected[:, :8] = 1  # the crowd of persons, though it comes later in the file
    expected[2:6, 2:6] = 2
    assert (mask_of(listing, 1) == expected).all()  # the toothbrush without area covers nothing
    assert not mask_of(listing, 2).any()
    header = masks.files.header(1)
    assert (header.height, header.width, header.channels, header.bits) == (10, 16, 1, 8)
    os.utime(coco / "annotations/instances_val2017.json", ns=(0, 4 * 10**18))  # a resume notices other annotations
    assert (listed(coco, "semantic").mtimes_ns == 4 * 10**18).all() and (listed(coco).mtimes_ns < 4 * 10**18).all()


def test_instance_masks_count_boxes_from_1_and_ignore_crowds(coco: Path) -> None:
    change(coco, "val2017", annotations=[annotation(7, 139, 1, [])])
    listing = listed(coco, "instance")
    assert listing.masks is not None and listing.masks.names == ()
    assert "are not in the masks (1)" in notes_of(listing) and not mask_of(listing, 3).any()
    first, second = mask_of(listing, 0), mask_of(listing, 1)
    assert first[2, 2] == 2 and first[3, 3] == 1 and first[0, 0] == 0
    assert second[2, 2] == 1 and second[0, 0] == 255 and second[0, 8] == 0
    taken = listing.take(np.array([1, 0]))
    assert (mask_of(taken, 0) == second).all() and (mask_of(taken, 1) == first).all()


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_an_archive_and_compressed_runs_give_the_same(coco: Path, tmp_path: Path, kind: str) -> None:
    outside = listed(coco, "semantic")
    # [0, 80, 80] as pycocotools writes it.
    change(
        coco, annotations=[*TRAIN[:2], TRAIN[2] | {"segmentation": {"counts": "0`2`2", "size": [10, 16]}}, *TRAIN[3:]]
    )
    inside = listed(archived(coco, tmp_path / f"a.{kind}", "coco"), "semantic")
    assert inside.keys == tuple(f"coco/{key}" for key in outside.keys)
    assert all((inside.columns[name].values == outside.columns[name].values).all() for name in outside.columns)
    assert (mask_of(inside, 1) == mask_of(outside, 1)).all()


def test_a_split_whose_images_are_not_there_is_left_with_a_note(coco: Path) -> None:
    shutil.rmtree(coco / "train2017")
    # Its file is not even read.
    (coco / "annotations/instances_train2017.json").write_text("no JSON")
    listing = listed(coco)
    assert listing.split_names == ("val", "test")
    assert "instances_train2017.json was ignored: its images are not there" in notes_of(listing)
    (coco / "val2017/000000000139.jpg").unlink()
    refused(r"there are no images of .*instances_train2017", coco)


def test_images_may_lie_in_a_folder_images_or_carry_their_split(coco: Path) -> None:
    (coco / "images").mkdir()
    for name in ("train2017", "val2017", "test2017"):
        (coco / name).rename(coco / "images" / name)
    assert listed(coco).keys[3] == "images/val2017/000000000139.jpg"
    write(coco / "annotations/instances_val2017.json", [(139, "val2017/000000000139.jpg")], [])
    assert listed(coco).keys[3] == "images/val2017/000000000139.jpg"


def test_images_without_a_file_or_a_list_fail_or_are_skipped(coco: Path) -> None:
    (coco / "train2017/000000000025.jpg").rename(coco / "val2017/extra.jpg")
    listing = refused_or_skipped(r"train2017/000000000025.jpg is listed in .*train2017.json, but has no file.*"
                                 r"val2017/extra.jpg is not listed", coco, options=SEMANTIC)  # fmt: skip
    assert listing.columns["image_id"].values.tolist() == [9, 30, 139, -1]
    assert listing.columns["num_boxes"].values.tolist() == [2, 0, 1, 0] and mask_of(listing, 2)[2, 2] == 1
    assert [key for key, _ in listing.skipped] == ["train2017/000000000025.jpg", "val2017/extra.jpg"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"bbox": [1, 2, float("nan"), 4]}, r"train2017/000000000009.jpg .* annotation 8 has the box \[1, 2, nan, 4\]"),
        ({"bbox": [1, 2, -3, 4]}, r"annotation 8 has the box \[1, 2, -3, 4\], whose width is -3, less than 0"),
        ({"bbox": [1, 2, 3]}, r"annotation 8 has the box \[1, 2, 3\], expected a list of four"),
        ({"bbox": None, "segmentation": None}, "annotation 8 has neither a bbox nor a segmentation"),
        ({"bbox": "1 2 3 4"}, "annotation 8 has the box '1 2 3 4'"),
        ({"bbox": [1, 2, 10**400, 1]}, "annotation 8 has the box"),
        ({"area": "large"}, "annotation 8 has the area 'large'"),
        ({"category_id": 2}, "annotation 8 has category id 2, which is not listed"),
        ({"category_id": "dog"}, "annotation 8 has category id 'dog'; ids of images, categories and annotations are"),
        ({"category_id": "18"}, "annotation 8 has category id '18'; ids of .*numbers: write 18 without quotes"),
        ({"category_id": 18.0}, "annotation 8 has category id 18.0; ids of .* are whole numbers"),
        ({"image_id": 999}, "annotation 8 has image id 999, which is not listed"),
        ({"iscrowd": 2}, "annotation 8 has iscrowd 2"),
        ({"segmentation": [[1, 2, 3]]}, "annotation 8 has the polygon"),
        ({"segmentation": [[1, 2, 5, 7]]}, "has the polygon .1, 2, 5, 7. of 2 corners, which has no area; cocoapi"),
        ({"segmentation": [SQUARE[0], [1, 2]]}, "annotation 8 has the polygon .1, 2. of 1 corners, which has no area"),
        ({"segmentation": SQUARE[0]}, "annotation 8 has the polygon 2"),
        ({"keypoints": [1, 2]}, "annotation 8 has keypoints of 2 numbers that are no triples x, y, visibility"),
        ({"keypoints": [1, 2, 0.9]}, "annotation 8 has a keypoint of visibility 0.9, expected 0, 1 or 2"),
        ({"keypoints": "nose"}, "annotation 8 has keypoints that are no triples"),
        ({"segmentation": [[1, 2, float("inf"), 3]]}, "annotation 8 has the polygon"),
        ({"segmentation": [[1, 2, float("nan"), 3]]}, "annotation 8 has the polygon"),
        ({"segmentation": [[1, 2, 10**400, 3]]}, "annotation 8 has the polygon"),
        ({"segmentation": [[1, 2, "3", 3]]}, "annotation 8 has the polygon"),
        ({"segmentation": 5}, "annotation 8 has the region 5"),
        ({"segmentation": {"counts": [3], "size": [10, 16]}}, "annotation 8 has runs of 3 pixels for a size of 16x10"),
        ({"segmentation": {"counts": [160], "size": [16, 10]}}, "annotation 8 has runs of 10x16 for an image of 16x10"),
        ({"segmentation": {"counts": "\x01\x02", "size": [10, 16]}}, "annotation 8 has runs in a string"),
        ({"segmentation": {"counts": [-1, 161], "size": [10, 16]}}, "annotation 8 has runs with lengths"),
        ({"segmentation": {"counts": [160]}}, "annotation 8 has runs of size None"),
    ],
)
def test_a_bad_annotation_is_named_or_skipped_with_its_image(coco: Path, more: dict[str, Any], message: str) -> None:
    change(coco, annotations=[*TRAIN, annotation(8, 9, 1) | more])
    listing = refused_or_skipped(message, coco, options=SEMANTIC)
    assert len(listing.skipped) == 1 and "annotation 8" in " ".join(listing.skipped[0])
    kept = [9, 25, 30, 139, -1] if "image_id" in more else [25, 30, 139, -1]
    assert listing.columns["image_id"].values.tolist() == kept
    assert mask_of(listing, kept.index(25))[2, 2] == 2
    assert listing.columns["num_boxes"].values[kept.index(30)] == 0  # it belongs to no other image


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"images": [] "annotations": []}', "is not well-formed JSON: damaged at character"),
        ('{"images": [], "annotations": [], "categories": []} x', "is not well-formed JSON: there is more"),
        ("", "is not well-formed JSON: it is cut short"),
        ("[" * 100_000, "is not well-formed JSON"),
        ('{"a": ' + "[" * 200_000 + "}", "is not well-formed JSON"),
        ('{"images": [], "info": {}}', "has no annotations and no categories"),
        ('{"images": [], "annotations": [], "categories": []}', "lists no images"),
        ('{"images": [7], "annotations": [], "categories": []}', r"images\[0\] is 7, expected an object"),
        ('{"images": [{"id": 1}], "annotations": [], "categories": []}', "id 1 and file_name None"),
        ('{"images": [], "annotations": [], "categories": [{"id": 1}]}', r"categories\[0\] has id 1 and name None"),
    ],
)
def test_a_damaged_file_is_named(coco: Path, content: str, message: str) -> None:
    (coco / "annotations/instances_train2017.json").write_text(content)
    refused(rf"instances_train2017.json.*{message}", coco)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([(9, "000000000009.jpg"), (9, "000000000025.jpg")], "image id 9 occurs a second time"),
        ([(9, "000000000009.jpg"), (25, "000000000009.jpg")], "000000000009.jpg is listed a second time"),
        ([(9, "../val2017/000000000139.jpg")], "but has no file"),
    ],
)
def test_images_that_contradict_each_other_are_named(coco: Path, images: list[Any], message: str) -> None:
    write(coco / "annotations/instances_train2017.json", images, [])
    refused(message, coco)


def test_files_that_contradict_each_other_and_none_are_errors(coco: Path) -> None:
    for number, message in ((18, "category id 18 occurs a second time, for cat"), (19, "have different categories")):
        change(coco, categories=[*CATEGORIES, {"id": number, "name": "cat"}])
        refused(message, coco)
    picture(coco / "val2014/a.jpg")
    path = coco / "annotations/instances_val2017.json"
    (coco / "annotations/instances_val2014.json").write_text(path.read_text())
    refused("are both the split 'val'", coco)
    for path in [*coco.glob("annotations/instances_*"), *coco.glob("annotations/person_*")]:
        path.unlink()
    refused(r"there is no instances_\*\.json", coco, "coco")


def test_masks_that_cannot_be_drawn_are_an_error(coco: Path) -> None:
    with pytest.raises(OptionError, match="accepted: auto, none, semantic, instance, panoptic"):
        SourceOptions(masks="parts")  # type: ignore[arg-type]
    change(coco, "val2017", images=[{"id": 139, "file_name": "000000000139.jpg"}])
    assert len(listed(coco)) == 5
    refused(r"height and width of val2017/000000000139.jpg are not said", coco, options=SEMANTIC)
    with pytest.raises(SourceError, match="x: 65,535, but a mask of 16 bits holds 65,534"):
        type_of_numbers(65_535, "x")


@pytest.mark.parametrize(("count", "dtype", "void"), [(254, np.uint8, 255), (255, np.uint16, 65_535)])
def test_masks_of_more_than_254_instances_or_categories_have_16_bits(coco: Path, count: int, dtype, void: int) -> None:
    many = [annotation(i, 9, 1) for i in range(count)]
    change(coco, annotations=[*many, annotation(count, 9, 1, iscrowd=1)])
    masks = listed(coco, "instance").masks
    assert (masks.dtype, masks.ignore_index) == (dtype, void)
    drawn = masks.files.read(0)
    assert drawn.dtype == dtype and drawn.max() == count, "the k-th box is k, and crowds lie below all others"
    for split in ("train2017", "val2017"):
        change(coco, split, categories=[{"id": i, "name": f"c{i}"} for i in range(count)])
    masks = listed(coco, "semantic").masks
    assert (masks.dtype, masks.ignore_index, masks.files.values.dtype) == (dtype, void, dtype)
    assert len(masks.names) == count + 1


@pytest.mark.parametrize("folders", [("train", "valid"), ("",)])
def test_roboflows_export_has_its_json_next_to_the_images(tmp_path: Path, folders: tuple[str, ...]) -> None:
    root = tmp_path / "robo"
    for number, folder in enumerate(folders):
        picture(root / folder / f"{number}.jpg")
        write(root / folder / "_annotations.coco.json", [(7, f"{number}.jpg")], [annotation(1, 7, 18)])
    assert detect_layout(root)[0] == "coco"
    listing = listed(root)
    assert listing.split_names == (("train", "val") if len(folders) > 1 else ("all",))
    assert listing.columns["num_boxes"].values.tolist() == [1] * len(folders)


@pytest.mark.parametrize(
    "name",
    ["train2017\\{}", ".\\{}", "./{}", "././train2017/{}", "/home/ann/coco/train2017/{}", "C:\\data\\{}", "images/{}"],
)
def test_names_of_images_are_found_as_windows_or_another_machine_wrote_them(coco: Path, name: str) -> None:
    names = [(25, "000000000025.jpg"), (9, "000000000009.jpg"), (30, "000000000030.jpg")]
    plain = listed(coco)
    write(coco / "annotations/instances_train2017.json", [(i, name.format(at)) for i, at in names], TRAIN)
    listing = listed(coco)
    assert listing.keys == plain.keys and listing.columns["image_id"].values.tolist() == [9, 25, 30, 139, -1]
    note = next(note for note in listing.notes if "that no image has were read" in note)
    assert f"{name.format(names[0][1])} as " in note
    # A name that leads elsewhere is no such name.
    write(coco / "annotations/instances_train2017.json", [(i, f"../{at}") for i, at in names], TRAIN)
    refused(r"000000000025.jpg is listed in .*train2017.json, but has no file", coco)


def test_a_name_with_a_backslash_that_a_file_has_is_that_file(coco: Path) -> None:
    (coco / "train2017/000000000025.jpg").rename(coco / "train2017/a\\25.jpg")
    names = [(25, "a\\25.jpg"), (9, "000000000009.jpg"), (30, "000000000030.jpg")]
    write(coco / "annotations/instances_train2017.json", names, TRAIN)
    listing = listed(coco)
    assert 25 in listing.columns["image_id"].values.tolist() and "were read as" not in notes_of(listing)


def test_ids_of_images_are_whole_numbers_which_is_said(coco: Path) -> None:
    name = "000000000139.jpg"
    change(coco, "val2017", images=[{"id": "139", "file_name": name}])
    refused(r"images\[0\] has id '139'.*ids of .* are whole numbers: write 139 without quotes", coco)
    change(coco, "val2017", images=[{"id": "a7", "file_name": name}])
    refused(r"images\[0\] has id 'a7' and file_name '0+139.jpg'; ids of images", coco)
    change(coco, "val2017", images=[{"id": 139, "file_name": name}], annotations=[annotation(7, "139", 1)])  # type: ignore[arg-type]
    refused("annotation 7 has image id '139'; ids of .* are whole numbers", coco)


def test_a_box_that_is_absent_is_that_around_the_region_and_iscrowd_may_be_absent(coco: Path) -> None:
    runs = {"counts": [34, 3, 7, 3, 113], "size": [10, 16]}  # rows 4 to 6 of columns 3 and 4
    long = {"counts": [38, 4, 118], "size": [10, 16]}  # over the end of a column
    without = [annotation(1, 25, 18), annotation(2, 25, 18, runs), annotation(3, 25, 18, long), annotation(4, 25, 1, {
        "counts": [160], "size": [10, 16]})]  # fmt: skip
    for one in without:
        del one["bbox"], one["iscrowd"]
    without[0] |= {"bbox": [], "iscrowd": None}
    change(coco, annotations=without)
    listing = listed(coco)
    assert listing.columns["boxes"].values[1].tolist() == [[2, 2, 4, 4], [3, 4, 2, 3], [3, 0, 2, 10], [0, 0, 0, 0]]
    assert not listing.columns["box_crowd"].values.any()
    assert "without a bbox got the one around their segmentation (4)" in notes_of(listing)


def test_annotations_that_are_all_crowds_are_said_and_no_instances(coco: Path) -> None:
    for split, number in (("train2017", 25), ("val2017", 139)):
        change(coco, split, annotations=[annotation(1, number, 18, iscrowd=1)])
    assert "Every annotation is a crowd (iscrowd 1), of several objects (2)" in notes_of(listed(coco))
    assert mask_of(listed(coco, "semantic"), 1)[3, 3] == 2
    refused("every annotation is a crowd .iscrowd 1., and those are no instances", coco, options=INSTANCE)
    change(coco, annotations=TRAIN)
    assert "Every annotation is a crowd" not in notes_of(listed(coco, "instance"))


def test_boxes_as_fractions_are_refused(coco: Path) -> None:
    for split, number in (("train2017", 25), ("val2017", 139)):
        change(coco, split, annotations=[annotation(1, number, 18, bbox=[0.25, 0.5, 0.25, 0.125])])
    refused(r"all boxes lie between 0 and 1, as fractions .*first: 0.25, 0.5, 0.25, 0.125", coco)


def test_corners_are_read_as_such_if_that_is_said(coco: Path) -> None:
    for split, number in (("train2017", 25), ("val2017", 139)):
        change(coco, split, annotations=[annotation(1, number, 18, bbox=[2, 3, 9, 8])])
    for form, box in (("xyxy", [2, 3, 7, 5]), ("xywh", [2, 3, 9, 8]), ("cxcywh", [-2.5, -1, 9, 8])):
        listing = list_source(coco, options=SourceOptions(boxes=form))  # type: ignore[arg-type]
        assert listing.columns["boxes"].values[1, 0].tolist() == box
    change(coco, annotations=[annotation(1, 25, 18, bbox=[9, 3, 2, 8])])
    refused(r"has the box \[9, 3, 2, 8\], whose width, as xyxy, is -7", coco, options=SourceOptions(boxes="xyxy"))


NAMES = ["nose", "left_eye", "right_eye"]
PERSON = {"id": 1, "name": "person", "keypoints": NAMES, "skeleton": [[1, 2], [1, 3]]}
POINTS = [3, 4, 2, 5, 4, 1, 0, 0, 0]


def test_keypoints_are_read_where_their_file_stands_alone(coco: Path) -> None:
    for split in ("train2017", "val2017"):
        (coco / f"annotations/instances_{split}.json").unlink()
    persons = [annotation(1, 25, 1, keypoints=POINTS), annotation(2, 25, 1), annotation(3, 9, 1, keypoints=[0] * 9)]
    names = [(25, "000000000025.jpg"), (9, "000000000009.jpg"), (30, "000000000030.jpg")]
    write(coco / "annotations/person_keypoints_train2017.json", names, persons, categories=[PERSON])
    assert detect_layout(coco)[0] == "coco"
    listing = listed(coco)
    column = listing.columns["keypoints"]
    assert column.values.shape == (3 + 1, 2, 3, 3) and column.values.dtype == np.float32 and column.moves == "xyv"
    assert column.values[1].tolist() == [[[3, 4, 2], [5, 4, 1], [0, 0, 0]], [[0, 0, 0]] * 3]
    assert column.attrs == {"names": tuple(NAMES), "skeleton": (0, 1, 0, 2), "flip_pairs": (0, 2, 1)}
    assert listing.columns["num_boxes"].values.tolist() == [1, 2, 0, 0]
    assert "Keypoints of each object: 3 (nose, left_eye, right_eye)." in notes_of(listing)
    assert mask_of(listed(coco, "instance"), 1)[3, 3] == 2
    for wrong, message in (({"keypoints": [1]}, "keypoints that are no names"), ({"skeleton": [[0, 1]]}, "a skeleton")):
        write(coco / "annotations/person_keypoints_train2017.json", names, persons, categories=[PERSON | wrong])
        refused(rf"categories\[0\] has {message}", coco)
    persons[0]["keypoints"] = POINTS[:6]
    write(coco / "annotations/person_keypoints_train2017.json", names, persons, categories=[PERSON])
    refused("annotation 1 has 2 keypoints, its category has names for 3", coco)


def test_keypoints_beside_all_objects_are_not_read_which_is_said(coco: Path) -> None:
    notes = notes_of(listed(coco))
    assert "NOT READ: annotations/person_keypoints_train2017.json, as annotations/instances_train2017.json" in notes
    assert "move the latter away" in notes and "keypoints" not in listed(coco).columns
    # Instances may have keypoints of their own, of several kinds.
    animals = [PERSON, {"id": 18, "name": "dog", "keypoints": ["tail"]}, {"id": 90, "name": "toothbrush"}]
    dogs = [annotation(1, 25, 1, keypoints=POINTS), annotation(2, 25, 18, keypoints=[7, 8, 2]), annotation(3, 9, 90)]
    change(coco, annotations=dogs, categories=animals)
    change(coco, "val2017", categories=animals)
    column = listed(coco).columns["keypoints"]
    assert column.values[1, 1].tolist() == [[7, 8, 2], [0, 0, 0], [0, 0, 0]] and column.attrs == {}
    assert "2 categories name them differently" in notes_of(listed(coco))
    change(coco, "val2017", categories=[PERSON, *CATEGORIES[2:], CATEGORIES[0]])
    refused("have different categories", coco)
