from __future__ import annotations

import json
from pathlib import Path

import h5py
import hdf5plugin  # noqa: F401  # h5py reads zstd with it
import numpy as np
import pytest
from small_files import rows_by_key, write_tokens

from fastload.errors import MissingFileError, OptionError, OutputError, SourceError
from fastload.format.header import read_header
from fastload.format.ragged import Column
from fastload.inspection.verify import verify_file
from fastload.pack.index import index_files
from fastload.repack import merge_files
from sample_files import write_packed


def make(path: Path, names=("ant", "bee"), *, splits=None, seed=0, shape=(4, 5, 3), extra=(), **options) -> Path:
    rng = np.random.default_rng(seed)
    splits = splits or {"train": 6, "val": 4}
    num_rows = sum(splits.values())
    labels = np.arange(num_rows) % max(len(names), 2)
    labels[-1] = -1
    columns = {"labels": Column(labels, {"names": names} if names else {})}
    columns["key"] = Column(np.array([f"{path.stem}{i}".encode() for i in range(num_rows)]))
    columns |= dict(extra)
    dtype = options.pop("dtype", np.uint8)
    images = rng.integers(0, 256, (num_rows, *shape)).astype(dtype)
    return write_packed(path, images, columns, splits=splits, seed=3, **options)


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_splits_and_different_classes_are_joined_by_name_in_the_order_given(tmp_path, codec):
    a = make(tmp_path / "a.h5")
    b = make(tmp_path / "b.h5", ("cat", "bee", "dog"), splits={"test": 3, "train": 5}, seed=1)
    report = merge_files([a, b], tmp_path / "c.h5", codec=codec)
    header = read_header(tmp_path / "c.h5")
    assert header.splits == {"train": range(11), "val": range(11, 15), "test": range(15, 18)}
    with h5py.File(tmp_path / "c.h5") as file:
        keys = file["key"][()].astype(str).tolist()
    assert keys == [
        *(f"a{i}" for i in range(6)), *(f"b{i}" for i in range(3, 8)), *(f"a{i}" for i in range(6, 10)), "b0",
        "b1", "b2",
    ]  # fmt: skip
    assert rows_by_key(tmp_path / "c.h5") == rows_by_key(a) | rows_by_key(b)
    assert (header.shuffled, header.seed) == (False, 0) and verify_file(tmp_path / "c.h5").ok
    told = json.loads(header.attrs["repacked"])["merged"]
    assert told == [{"name": "a.h5", "rows": 10}, {"name": "b.h5", "rows": 8}]
    assert "Merged a.h5 (10 rows), b.h5 (8 rows)." in report.notes
    assert header.fields["labels"].names == ("ant", "bee", "cat", "dog")
    assert any("classes differ (2 in a.h5, 3 in b.h5); they were joined by name into 4" in n for n in report.notes)


def test_a_file_without_splits_is_not_joined_to_one_with_splits(tmp_path):
    a, b = make(tmp_path / "a.h5"), make(tmp_path / "b.h5", splits={"all": 8}, seed=1)
    for join in (merge_files, index_files):
        with pytest.raises(SourceError, match=r"b\.h5: has no splits, and .*a\.h5 has some \(train, val\).*train/ and"):
            join([a, b], tmp_path / "c.h5")
    assert not (tmp_path / "c.h5").exists()


def boxed(path: Path, classes: tuple[str, ...], ids: tuple[int, ...], most: int, seed: int) -> Path:
    counts = np.arange(10) % (most + 1)
    there = np.arange(most) < counts[:, None]
    box = np.where(there[..., None], np.arange(1, 5), 0).astype(np.float32) + there[..., None] * np.float32(seed)
    extra = {
        "boxes": Column(box, {"names": ("x", "y", "width", "height")}),
        "box_labels": Column(np.where(there, len(classes) - 1, -1), {"names": classes, "category_ids": ids}),
        "box_crowd": Column(there.astype(np.uint8)),
        "keypoints": Column(np.tile(box[:, :, None, :3], (1, 1, 2, 1)), {"names": ("a", "b"), "flip_pairs": (1, 0)}),
        "num_boxes": Column(counts),
    }
    return make(path, extra=extra, seed=seed)


def boxes_in(path: Path) -> dict[bytes, list[tuple[str, list[float], int]]]:
    """Key -> class, box and crowd of each of its boxes; nothing stands behind the last."""
    with h5py.File(path) as file:
        names = file["box_labels"].attrs["names"].astype(str)
        values = [file[name][()] for name in ("key", "num_boxes", "box_labels", "boxes", "box_crowd")]
        assert np.array_equal(file["keypoints"][()][:, :, 1], file["boxes"][()][..., :3])
        assert file["keypoints"].attrs["flip_pairs"].tolist() == [1, 0]
    for _, count, labels, boxes, crowd in zip(*values, strict=True):
        assert (labels[count:] == -1).all() and not boxes[count:].any() and not crowd[count:].any()
    return {
        key: [(names[labels[i]], boxes[i].tolist(), int(crowd[i])) for i in range(count)]
        for key, count, labels, boxes, crowd in zip(*values, strict=True)
    }


@pytest.mark.parametrize(("other_ids", "ids"), [((7, 1, 9), [1, 2, 7, 9]), ((1, 2, 3), None)])
def test_boxes_of_other_classes_and_numbers_are_joined(tmp_path, other_ids, ids):
    a = boxed(tmp_path / "a.h5", ("cat", "dog"), (1, 2), 2, 1)
    b = boxed(tmp_path / "b.h5", ("bird", "cat", "cow"), other_ids, 3, 2)
    report = merge_files([a, b], tmp_path / "c.h5")
    assert boxes_in(tmp_path / "c.h5") == boxes_in(a) | boxes_in(b)
    field = read_header(tmp_path / "c.h5").fields["box_labels"]
    assert field.names == ("cat", "dog", "bird", "cow") and field.shape == (3,)
    found = field.attrs.get("category_ids")
    assert (found if found is None else list(found)) == ids
    assert any("category_ids contradict" in note for note in report.notes) == (ids is None)
    assert any("room for up to 3 boxes (2 in a.h5, 3 in b.h5)" in note for note in report.notes)
    assert verify_file(tmp_path / "c.h5").ok


def test_keys_that_clash_get_their_files_name(tmp_path):
    (tmp_path / "x").mkdir()
    a, b = make(tmp_path / "a.h5"), make(tmp_path / "x" / "a.h5", seed=1)
    report = merge_files([a, b], tmp_path / "c.h5")
    wanted = {f"a/{key}": value for key, value in rows_by_key(a).items()}
    assert rows_by_key(tmp_path / "c.h5") == wanted | {f"a-2/{key}": value for key, value in rows_by_key(b).items()}
    assert any("(10): all now begin with their file's name, a/, a-2/" in note for note in report.notes)


@pytest.mark.parametrize(
    ("first", "other", "message"),
    [
        ({}, {"names": ()}, r"`labels` has names in some of the files and none in .*b\.h5"),
        ({}, {"shape": (5, 5, 3)}, r"`images`: uint8 \(4, 5, 3\) in .*a\.h5, uint8 \(5, 5, 3\) in .*b\.h5"),
        ({}, {"dtype": np.uint16}, r"uint8 \(4, 5, 3\) in .*a\.h5, uint16"),
        (
            {"masks": np.zeros((10, 4, 5), np.uint8), "ignore_index": 255},
            {"masks": np.zeros((10, 4, 5), np.uint8), "ignore_index": 0},
            r"ignore_index of `masks` is 255 in .*a\.h5, 0 in .*b\.h5",
        ),
        ({}, {"masks": np.zeros((10, 4, 5), np.uint8)}, r"`masks`: absent in .*a\.h5, uint8 \(4, 5\) in .*b\.h5"),
        ({}, {"extra": {"identity": Column(np.arange(10))}}, r"`identity`: absent in .*a\.h5, int64 \(\) in .*b\.h5"),
        *(
            (
                {"extra": {"bbox": Column(values, {"names": ("x", "y", "width", "height")})}},
                {"extra": {"bbox": Column(values, {"names": ("xmin", "ymin", "xmax", "ymax")})}},
                r"names of `bbox` are x, y, width, height in .*a\.h5, xmin",
            )
            for values in (np.ones((10, 4)), np.full((10, 4), 9))  # neither are numbers of classes
        ),
    ],
)
def test_files_that_differ_are_an_error_that_names_both(tmp_path, first, other, message):
    a, b = make(tmp_path / "a.h5", **first), make(tmp_path / "b.h5", **other)
    with pytest.raises(SourceError, match=message):
        merge_files([a, b], tmp_path / "c.h5")
    assert not (tmp_path / "c.h5").exists()


def test_masks_of_the_same_meaning_are_merged(tmp_path):
    masks = np.zeros((10, 4, 5), np.uint8)
    files = [make(tmp_path / f"{name}.h5", masks=masks + n, ignore_index=255) for n, name in enumerate("ab")]
    merge_files(files, tmp_path / "c.h5")
    assert verify_file(tmp_path / "c.h5").ok


def test_a_merge_needs_two_different_files_and_another_output(tmp_path):
    a, b = make(tmp_path / "a.h5"), make(tmp_path / "b.h5")
    with pytest.raises(OptionError, match="at least two"):
        merge_files([a], tmp_path / "c.h5")
    with pytest.raises(OptionError, match="given twice"):
        merge_files([a, b, tmp_path / "." / "a.h5"], tmp_path / "c.h5")
    with pytest.raises(OutputError, match="is the file to be read"):
        merge_files([a, b], b, overwrite=True)
    with pytest.raises(MissingFileError, match=r"no\.h5: no such file"):
        merge_files([a, tmp_path / "no.h5"], tmp_path / "c.h5")


def test_files_without_images_are_merged(tmp_path):
    files = [write_tokens(tmp_path / f"{name}.h5") for name in "ab"]
    merge_files(files, tmp_path / "c.h5")
    with h5py.File(tmp_path / "c.h5") as file:
        assert np.array_equal(file["tokens"][()], np.tile(np.arange(60).reshape(20, 3), (2, 1)))
