from __future__ import annotations

import gc
import io
import json
import os
import pickle
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image
from small_trees import make, notes_of, refused, refused_or_skipped, values

from fastload import pack_images
from fastload.errors import FileChangedError, MissingExtraError, SourceError
from fastload.options.pack import SourceOptions
from fastload.sources.layouts import detect_layout, list_source
from fastload.sources.parquet import Shard

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def features(**named: Any) -> dict[bytes, bytes]:
    return {b"huggingface": json.dumps({"info": {"features": named}}).encode()}


def save_arrow(path: Path, table: Any) -> None:
    """As `datasets` saves it, with a state.json."""
    path.with_name("state.json").write_text("{}")
    with pa.ipc.new_stream(str(path), table.schema) as out:
        out.write_table(table)


def write(path: Path, rows: Any, metadata: dict[bytes, bytes] | None = None, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(rows) if isinstance(rows, dict) else rows
    pq.write_table(table.replace_schema_metadata(metadata) if metadata else table, path, **options)
    return path


def images(*cells: tuple[bytes | None, str | None] | None) -> Any:
    return pa.array([None if cell is None else {"bytes": cell[0], "path": cell[1]} for cell in cells], IMAGE)


def test_a_hub_folder_gives_splits_labels_and_names(tmp_path: Path) -> None:
    meta = features(image={"_type": "Image"}, label={"_type": "ClassLabel", "names": ["cat", "dog"]})
    data = tmp_path / "set" / "data"
    first = {"image": images((b"0", "a.jpg"), (b"one", "b.jpg"), (b"2", "c.jpg")), "label": [0, 1, 1]}
    write(data / "train-00000-of-00002.parquet", first, meta, row_group_size=2)
    write(data / "train-00001-of-00002.parquet", {"image": images((b"3", "a.jpg")), "label": [0]}, meta)
    last = {"image": images((b"4", None), (b"5", "x")), "label": [1, 0]}
    write(data / "validation-00000-of-00001.parquet", last, meta)
    assert detect_layout(tmp_path / "set")[0] == "parquet"
    listing = list_source(tmp_path / "set")
    assert listing.keys == (
        *(f"data/train-00000-of-00002.parquet/{name}.jpg" for name in "abc"),
        "data/train-00001-of-00002.parquet/a.jpg",
        *(f"data/validation-00000-of-00001.parquet/0000000{row}" for row in "01"),
    )
    assert listing.split_names == ("train", "val") and listing.split.tolist() == [0, 0, 0, 0, 1, 1]
    assert values(listing) == [0, 1, 1, 0, 1, 0]
    assert listing.columns["labels"].attrs == {"names": ("cat", "dog")}
    assert [listing.files.read(i) for i in range(6)] == [b"0", b"one", b"2", b"3", b"4", b"5"]
    assert listing.files.take(np.array([5, 1])).read_head(1, 2) == b"on" and listing.sizes[1] == 3


def test_a_label_of_minus_one_beside_named_classes_is_none(tmp_path: Path) -> None:
    meta = features(image={"_type": "Image"}, label={"_type": "ClassLabel", "names": ["cat", "dog"]})
    cells = images((b"0", "a.jpg"), (b"1", "b.jpg"))
    listing = list_source(write(tmp_path / "a.parquet", {"image": cells, "label": [-1, 1]}, meta))
    assert values(listing) == [-1, 1] and "CHECK" not in " ".join(listing.notes)


def test_files_that_number_their_classes_differently_are_renumbered_by_name(tmp_path: Path) -> None:
    def shard(name: str, labels: list[int], *names: str) -> None:
        meta = features(image={"_type": "Image"}, label={"_type": "ClassLabel", "names": list(names)})
        cells = images(*[(b"x", None)] * len(labels))
        write(tmp_path / name, {"image": cells, "label": pa.array(labels, pa.int64())}, meta)

    shard("train.parquet", [0, 1, 2, -1], "zeb", "ant", "cow")
    shard("test.parquet", [0, 1, 2], "ant", "cow", "dog")
    listing = list_source(tmp_path)
    named = listing.columns["labels"].attrs["names"]
    said = ["" if label < 0 else named[label] for label in values(listing)]
    assert sorted(named) == ["ant", "cow", "dog", "zeb"]
    assert [f"{key[:2]} {name}" for key, name in zip(listing.keys, said, strict=True)] == [
        *["te ant", "te cow", "te dog"],
        *["tr zeb", "tr ant", "tr cow", "tr "],
    ]
    assert "renumbered by name" in notes_of(listing)
    shard("test.parquet", [3], "ant", "cow", "dog")
    refused(r"test.parquet: column 'label' holds the class 3, but .* names only 3", tmp_path)


def test_files_that_are_missing_by_the_names_of_the_others(tmp_path: Path) -> None:
    meta = features(image={"_type": "Image"})
    for name in ("train-00000-of-00003-ab12", "train-00002-of-00003-cd34", "test-00000-of-00001"):
        write(tmp_path / f"{name}.parquet", {"image": images((b"x", None)), "label": [0]}, meta)
    refused(r"missing by the names of the others \(1\): train-00001-of-00003.parquet", tmp_path)
    assert "train-00001-of-00003.parquet" in notes_of(list_source(tmp_path, on_error="skip"))


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()])
def test_plain_binary_in_several_batches_also_if_their_offsets_do_not_begin_at_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    cells = [b"x" * (i % 7 + 1) for i in range(3000)]
    listing = list_source(write(tmp_path / "t.parquet", {"img": pa.array(cells, kind), "y": np.arange(3000)}))
    assert listing.split_names == ("all",) and listing.keys[2999] == "t.parquet/00002999"
    assert [listing.files.read(i) for i in range(0, 3000, 7)] == cells[::7]
    some = pa.array([b"zero", b"one", b"2", b"three"], kind)[1:]
    path = write(tmp_path / "t.parquet", {"img": some})
    monkeypatch.setattr(Shard, "batches", lambda *_: iter([(some[:1], 0), (some[1:], 0)]))
    assert [list_source(path).files.read(i) for i in range(3)] == some.to_pylist()  # type: ignore[union-attr]


def test_the_temporary_file_serves_other_processes_and_goes_with_its_owner(tmp_path: Path) -> None:
    listing = list_source(write(tmp_path / "t.parquet", {"image": images((b"abc", "a"), (b"de", "b"))}))
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).read(1).decode())"
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(listing.files), capture_output=True, check=True
    )
    assert done.stdout == b"de\n"
    other = pickle.loads(pickle.dumps(listing.files))
    taken = listing.take(np.array([1]))
    del listing
    gc.collect()
    assert taken.files.read(0) == b"de"  # type: ignore[union-attr]
    del taken
    gc.collect()
    with pytest.raises(FileChangedError):
        other.read(0)


def test_null_rows_are_named_and_skip_leaves_them_out(tmp_path: Path) -> None:
    cells = images((b"0", "a"), None, (None, "far/x.jpg"), (b"", None), (b"4", "e"))
    path = write(tmp_path / "t.parquet", {"image": cells, "label": [0, 1, 2, 3, None]})
    listing = refused_or_skipped(r"\(3\): row 1 of t.parquet holds no image.*row 2 .*path 'far/x.jpg'", path)
    assert [listing.files.read(i) for i in range(len(listing))] == [b"0"]
    assert [key for key, _ in listing.skipped] == [f"row {i} of t.parquet" for i in (1, 2, 3, 4)]
    assert listing.skipped[3][1] == "lacks its label: empty or NaN"
    refused("leads out of the folder", write(path, {"image": images((None, "../a.jpg"))}))


def test_a_table_without_images_is_a_dataset_of_columns(tmp_path: Path) -> None:
    rows = {"input_ids": [[1, 2, 3], [4, 5, 6]], "mask": pa.array([[True, False], [True, True]]), "label": [1, 0],
            "text": ["word " * 20, "other " * 20], "grid": [[[1.5], [2.5]], [[3.5], [4.5]]]}  # fmt: skip
    listing = list_source(write(tmp_path / "tokens.parquet", rows))
    assert listing.files is None and listing.keys == ("tokens.parquet/00000000", "tokens.parquet/00000001")
    assert values(listing, "input_ids") == [[1, 2, 3], [4, 5, 6]]
    assert listing.columns["input_ids"].values.dtype == np.int64
    assert listing.columns["mask"].values.dtype == np.uint8
    assert listing.columns["grid"].values.shape == (2, 2, 1) and values(listing) == [1, 0]
    assert "text (text, mostly different in each row)" in notes_of(listing)


def test_columns_keep_their_meaning(tmp_path: Path) -> None:
    rows = {
        "image": images((b"0", None), (b"1", None), (b"2", None)),
        "tags": pa.array([[0, 2], [], [1]]),
        "age": pa.array([1, None, 3]),
        "ragged": pa.array([[1], [1, 2], []]),
        "kind": pa.array(["a", "b", "a"]).dictionary_encode(),
        "nested": pa.array([{"x": 1}] * 3),
        "none": pa.nulls(3),
    }
    meta = features(tags={"feature": {"_type": "ClassLabel", "names": ["p", "q", "r"]}, "_type": "Sequence"})
    listing = list_source(write(tmp_path / "t.parquet", rows, meta))
    assert values(listing) == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
    assert listing.columns["labels"].attrs == {"names": ("p", "q", "r")}
    assert np.isnan(listing.columns["age"].values[1]) and values(listing, "kind") == [0, 1, 0]
    assert all(f"{name} (" in notes_of(listing) for name in ("ragged", "nested", "none"))
    assert list_source(tmp_path / "t.parquet", options=SourceOptions(labels=("kind",))).columns["labels"].attrs == {
        "names": ("a", "b")
    }


def test_a_second_image_column_of_masks_becomes_masks(tmp_path: Path) -> None:
    rows = {"pixel_values": images((b"0", None), (b"1", None)), "label": images((b"m", None), None)}
    listing = list_source(write(tmp_path / "t.parquet", rows))
    assert listing.masks is not None and listing.masks.present.tolist() == [True, False]
    assert listing.masks.ignore_index == 255 and listing.masks.files.read(0) == b"m"


@pytest.mark.parametrize("listed", [False, True])
def test_objects_are_boxes_with_the_names_of_their_classes(tmp_path: Path, listed: bool) -> None:
    cell: Any = {"bbox": [[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]], "category": [1, 0]}
    if listed:
        cell = [{"bbox": box, "category": label} for box, label in zip(cell["bbox"], cell["category"], strict=True)]
    label = {"_type": "ClassLabel", "names": ["cat", "dog"]}
    inner = {"category": label} if listed else {"category": {"feature": label, "_type": "List"}}
    meta = features(objects={"feature": inner, "_type": "List"} if listed else inner)
    rows = {"image": images((b"0", None), (b"1", None)), "objects": [cell, None]}
    listing = list_source(write(tmp_path / "t.parquet", rows, meta))
    assert values(listing, "num_boxes") == [2, 0]
    assert listing.columns["boxes"].values[0].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert values(listing, "box_labels") == [[1, 0], [-1, -1]]
    assert listing.columns["box_labels"].attrs == {"names": ("cat", "dog")}


def test_shards_of_other_columns_are_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", {"image": images((b"0", None)), "label": [1]})
    write(tmp_path / "b.parquet", {"image": images((b"0", None)), "label": ["x"]})
    refused(r"b.parquet: column 'label' is string, but int64 in a.parquet", tmp_path)


@pytest.mark.parametrize(
    "features",
    [
        *(b"{", b"[]", b'{"info": {"features": [1]}}', b"[" * 100_000),
        b'{"info": {"features": {"label": {"_type": "Value", "names": ["a", "b", "c"]}}}}',
    ],
)
def test_metadata_that_make_no_sense_are_passed_over(tmp_path: Path, features: bytes) -> None:
    path = write(tmp_path / "t.parquet", {"image": images((b"0", None)), "label": [2]}, {b"huggingface": features})
    listing = list_source(path)
    assert values(listing) == [2] and listing.columns["labels"].attrs == {}


@pytest.mark.parametrize("cut", [0, 6, 200])
def test_a_damaged_file_is_named(tmp_path: Path, cut: int) -> None:
    path = write(tmp_path / "t.parquet", {"image": images(*[(os.urandom(90), None)] * 9), "label": list(range(9))})
    path.write_bytes(path.read_bytes()[:cut])
    refused(r"t.parquet cannot be read: ", path)


def test_offsets_of_a_mapped_file_that_point_elsewhere_are_refused(tmp_path: Path) -> None:
    good = pa.table({"image": images((b"abcd", None), (b"efgh", None)), "label": [0, 1]})
    save_arrow(tmp_path / "data.arrow", good)
    assert list_source(tmp_path).files.read(1) == b"efgh"  # type: ignore[union-attr]
    data = (tmp_path / "data.arrow").read_bytes()
    offsets = np.array([0, 4, 8], np.int32).tobytes()
    assert data.count(offsets) == 1
    (tmp_path / "data.arrow").write_bytes(data.replace(offsets, np.array([0, 4, 2**30], np.int32).tobytes()))
    refused(r"data.arrow cannot be read", tmp_path)


def test_without_pyarrow_the_extra_is_named_and_a_stray_parquet_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, "cat/1.jpg")
    path = write(tmp_path / "embeddings.parquet", {"x": [[0.5, 1.5]]})
    for _ in range(2):
        assert detect_layout(tmp_path)[0] == "folder"
        monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"pip install pyarrow"):
        list_source(path)


def test_what_datasets_saves_is_read_in_place_and_as_it_reads_it(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="Hugging Face's datasets is not installed")
    rng = np.random.default_rng(0)
    encoded = []
    for orientation, shape in ((1, (12, 8, 3)), (6, (8, 12, 3))):
        exif = Image.Exif()
        exif[0x0112] = orientation
        stream = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, shape, np.uint8)).save(stream, "JPEG", exif=exif)
        encoded.append(stream.getvalue())
    table = datasets.Dataset.from_dict(
        {"image": [{"bytes": data, "path": None} for data in encoded], "label": [1, 0]},
        features=datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])}),
    )
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(tmp_path / "saved")
    table.to_parquet(tmp_path / "set" / "train-00000-of-00001.parquet")
    wanted = [np.asarray(table[i]["image"]) for i in range(2)]
    assert wanted[0].shape == wanted[1].shape == (12, 8, 3)
    for folder in ("saved", "set"):
        listing = list_source(tmp_path / folder)
        assert listing.layout == "parquet" and listing.columns["labels"].attrs == {"names": ("a", "b")}
        assert [listing.files.read(i) for i in range(2)] == encoded
        packed = tmp_path / f"{folder}.h5"
        pack_images(tmp_path / folder, packed, shuffle=False, workers=2)
        with h5py.File(packed) as file:
            assert np.array_equal(file["images"][:2], wanted)
            assert file["labels"][:2].tolist() == [1, 0] and file["split"].attrs["names"][0] == b"train"


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_shards_are_not_kept_open_and_a_lack_of_descriptors_is_no_damage(tmp_path: Path, suffix: str) -> None:
    table = pa.table({"image": images((b"one", "a.jpg")), "label": [1]})
    for i in range(40):
        (save_arrow if suffix == "arrow" else write)(tmp_path / f"{i:02d}.{suffix}", table)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    last = max(map(int, os.listdir("/proc/self/fd")))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (last + 20, hard))
        listing = list_source(tmp_path)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        with pytest.raises(SourceError, match=r"too many open files. Allow more with `ulimit -n`"):
            Shard(tmp_path / f"00.{suffix}")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(listing) == 40 and listing.files is not None and listing.files.read(39) == b"one"


def test_rows_without_bytes_and_columns_of_paths_are_files_beside_the_table(tmp_path: Path) -> None:
    make(tmp_path, "pictures/a.jpg", "b.png", "masks/a.png")
    rows = {"image": images((None, "a.jpg"), (None, "b.png"), (b"within", "c.jpg")),
            "mask": images((None, "masks/a.png"), (b"m", None), None)}  # fmt: skip
    write(tmp_path / "t.parquet", rows)
    before = list_source(tmp_path)
    assert before.layout == "parquet" and before.masks is not None and before.masks.files.read(1) == b"m"
    assert [before.files.read(i) for i in range(3)] == [b"pictures/a.jpg", b"b.png", b"within"]
    (tmp_path / "masks/a.png").write_text("another mask")
    (tmp_path / "b.png").write_text("photo")  # as many bytes as before
    after = list_source(tmp_path)
    assert (before.sizes != after.sizes).tolist() == [True, False, False]
    assert (before.mtimes_ns != after.mtimes_ns).tolist() == [True, True, False]
    path = write(tmp_path / "t.parquet", {"file_name": ["b.png", "pictures/a.jpg"], "label": ["x", "y"]})
    listing = list_source(path)
    assert [listing.files.read(i) for i in range(2)] == [b"photo", b"pictures/a.jpg"] and values(listing) == [0, 1]


def test_images_of_a_cache_that_names_them_by_their_whole_path_are_those_below_the_root(tmp_path: Path) -> None:
    photos = make(tmp_path / "photos", "train/a.jpg", "train/b.jpg")
    column = images(*[(None, str(photos / f"train/{name}.jpg")) for name in "ba"])
    save_arrow(make(tmp_path / "cache", "state.json") / "a.arrow", pa.table({"image": column}))  # as of an imagefolder
    refused("b.jpg', which lies outside. .*give that: as `--root`", tmp_path / "cache")
    listing = list_source(tmp_path / "cache", options=SourceOptions(root=photos))
    assert [listing.files.read(i) for i in range(2)] == [b"train/b.jpg", b"train/a.jpg"]
    write(tmp_path / "tables/t.parquet", {"file_name": ["b.jpg", "a.jpg"]})
    listing = list_source(tmp_path / "tables", options=SourceOptions(root=photos / "train"))
    assert [listing.files.read(i) for i in range(2)] == [b"train/b.jpg", b"train/a.jpg"]


@pytest.mark.parametrize(
    "kind",
    [
        pa.binary(80),
        pa.dictionary(pa.int32(), pa.binary()),
        pa.binary_view(),
        pa.large_binary(),
        pa.struct([("bytes", pa.binary())]),
        pa.struct([("bytes", pa.large_binary()), ("path", pa.large_string())]),
        pa.struct([("data", pa.binary()), ("name", pa.string())]),
    ],
)
def test_images_are_read_whatever_type_holds_their_bytes(tmp_path: Path, kind: Any) -> None:
    cells: list[Any] = [bytes([n]) * 80 for n in (1, 2, 3)]
    if pa.types.is_struct(kind):
        fields = [kind.field(i).name for i in range(kind.num_fields)]
        cells = [dict(zip(fields, (cell, f"{cell[0]}.png"), strict=False)) for cell in cells]
    column = pa.array(cells, pa.binary()).cast(kind) if pa.types.is_dictionary(kind) else pa.array(cells, kind)
    write(tmp_path / "a.parquet", {"image": column, "label": pa.array(["x", "y", "x"], pa.string_view())})
    listing = list_source(tmp_path)
    assert [listing.files.read(i) for i in range(3)] == [bytes([n]) * 80 for n in (1, 2, 3)]
    assert values(listing) == [0, 1, 0]


def test_ids_of_a_fixed_number_of_bytes_are_no_images(tmp_path: Path) -> None:
    ids = pa.array([bytes(16), bytes(16)], pa.binary(16))
    write(tmp_path / "a.parquet", {"image": images((b"1", None), (b"2", None)), "hash": ids, "label": [0, 1]})
    assert "NOT READ" not in notes_of(list_source(tmp_path))
    write(tmp_path / "a.parquet", {"hash": ids, "label": [0, 1]})
    assert list_source(tmp_path).files is None


def test_further_images_of_a_row_and_nested_labels_are_said_not_to_be_read(tmp_path: Path) -> None:
    one, two = (b"1", "a.png"), (b"2", "b.png")
    lists = pa.array([[{"bytes": b"3", "path": "c"}], []], pa.list_(IMAGE))
    labels = pa.array([{"id": 1}, {"id": 2}])
    write(
        tmp_path / "a.parquet", {"left": images(one, two), "right": images(two, one), "views": lists, "label": labels}
    )
    said = notes_of(list_source(tmp_path))
    assert "Images by column 'left'" in said and "NOT READ: more images in right, views. `--image-column`" in said
    assert "NOT READ: labels in column 'label', which is nested" in said
    listing = list_source(tmp_path, options=SourceOptions(image_column="right"))
    assert listing.files.read(0) == b"2" and "more images in left, views" in notes_of(listing)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([[{"bytes": b"1", "path": "a"}], []], pa.list_(IMAGE)), "column 'image' holds lists of images"),
        (pa.array([[b"1", b"2"], [b"3"]]), "column 'image' holds lists of images.*explode"),
        (["https://x.org/a.jpg", "http://x.org/b.jpg"], "'image' holds addresses.*img2dataset"),
        (["iVBORw0KGgoAAA", "/9j/4AAQSkZ"], "'image' holds images as base64 text.*b64decode"),
        (["data:image/png;base64,iVBORw0KGgoAAA"] * 2, "'image' holds images as base64 text"),
        (["x/a.jpg", "x/b.jpg"], "'image' names images, such as x/a.jpg, and none of them lies below"),
    ],
)
def test_images_in_a_form_that_is_not_read_are_refused_with_the_way_out(
    tmp_path: Path, column: Any, message: str
) -> None:
    write(tmp_path / "a.parquet", {"image": column, "label": [0, 1]})
    refused(message, tmp_path)


def test_paths_in_parquet_beside_the_images_are_read_also_in_a_folder(tmp_path: Path) -> None:
    make(tmp_path, "x/a.jpg", "x/b.jpg")
    write(tmp_path / "a.parquet", {"image": ["x/b.jpg", "x/a.jpg"], "label": [0, 1]})
    listing = list_source(tmp_path)
    assert listing.layout == "parquet" and [listing.files.read(i) for i in (0, 1)] == [b"x/b.jpg", b"x/a.jpg"]


def test_a_file_without_the_column_of_images_is_named_unless_it_is_empty(tmp_path: Path) -> None:
    write(tmp_path / "data/train-0.parquet", {"image": images((b"1", "a")), "label": [0]})
    write(tmp_path / "data/train-1.parquet", {"label": pa.array([], pa.int64())})
    assert len(list_source(tmp_path)) == 1
    for name in ("a.parquet", "z.parquet"):
        write(tmp_path / name, {"id": [1, 2]})
        refused(f"{name}: there is no column 'image', which holds the images in train-0.parquet", tmp_path)
        (tmp_path / name).unlink()
    (tmp_path / "data/train-1.parquet").write_text("version https://git-lfs.github.com/spec/v1\n")
    refused("train-1.parquet cannot be read: .*pointer of Git LFS.*`git lfs pull`", tmp_path)


def test_lists_of_boxes_in_columns_of_their_own_are_boxes(tmp_path: Path) -> None:
    boxes, labels = [[[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]], [[1.0, 1.0, 2.0, 2.0]]], pa.array([[0, 1], [1]])
    meta = features(labels={"feature": {"_type": "ClassLabel", "names": ["cat", "dog"]}, "_type": "Sequence"})
    image = images((b"1", "a"), (b"2", "b"))
    write(tmp_path / "a.parquet", {"image": image, "bboxes": boxes, "labels": labels}, meta)
    listing = list_source(tmp_path, options=SourceOptions(boxes="xyxy"))
    assert values(listing, "boxes") == [[[1, 2, 2, 2], [5, 6, 2, 2]], [[1, 1, 1, 1], [0] * 4]]
    assert values(listing, "box_labels") == [[0, 1], [1, -1]]
    assert listing.columns["box_labels"].attrs["names"] == ("cat", "dog") and "labels" not in listing.columns


def test_folders_that_partition_a_dataset_are_columns(tmp_path: Path) -> None:
    for label, split, data in (("a%20b", "train", b"0"), ("c", "train", b"1"), ("c", "test", b"2")):
        write(tmp_path / f"split={split}/label={label}/0.parquet", {"image": images((data, None))})
    listing = list_source(tmp_path)
    assert listing.columns["labels"].attrs["names"] == ("a b", "c") and sorted(values(listing)) == [0, 1, 1]
    assert listing.split_names == ("train", "test") and "by the names of folders: split, label" in notes_of(listing)
    assert "CHECK" not in notes_of(listing)


def test_files_of_one_name_in_several_folders_are_doubted(tmp_path: Path) -> None:
    for name in ("full/train", "small/train", "full/test"):
        write(tmp_path / f"{name}-0.parquet", {"image": images((b"0", None))})
    notes = notes_of(list_source(tmp_path))
    assert "CHECK: files of one name in several folders (full/train-0.parquet, small/train-0.parquet)" in notes
    for folder in ("train", "test"):
        write(tmp_path / f"b/{folder}/0.parquet", {"image": images((b"0", None))})
    assert "CHECK" not in notes_of(list_source(tmp_path / "b"))
