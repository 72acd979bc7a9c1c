"""Exports for others: torchvision's ImageFolder, WebDataset, Hugging Face; each is read back, by us and by them."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from interrupted import killed_at
from PIL import Image
from small_files import rows_by_key

from fastload.errors import OptionError, OutputError
from fastload.export import JOURNAL, export_file
from fastload.format.ragged import Column
from fastload.pack import pack_images
from fastload.sources.exported import FIELDS, SIDECAR
from fastload.sources.layouts import detect_layout
from sample_files import write_packed

N = 24
NAMES = ("ant", "bee", "cat")


def made(path: Path, *, labels: Any = None, extra: Any = (), names: tuple[str, ...] = NAMES, **options: Any) -> Path:
    """A file of 24 images of noise, 8 of each class in turn."""
    images = np.random.default_rng(0).integers(0, 256, (N, 6, 5, 3), np.uint8)
    values = np.arange(N) % 3 if labels is None else labels
    columns = {"labels": Column(values, {"names": names} if names else {})} if labels is not False else {}
    return write_packed(path, images, columns | dict(extra), **options)


SPLITS = {"train": 15, "val": 9}


def digests(path: Path) -> dict[bytes, tuple[str, Any]]:
    """Pixel digest -> split and label of its row."""
    return {row["digest"]: (row["split"], row.get("labels")) for row in rows_by_key(path).values()}


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def packed_again(folder: Path, **options: Any) -> Path:
    # Drawn boxes lie anywhere.
    options = {"outside_boxes": "keep", **options}
    return pack_images(folder, folder.parent / "b.h5", workers=0, overwrite=True, **options).path


def assert_same_pixels(source: Path, again: Path, *names: str) -> None:
    """Rows come back with the same pixels, labels and other values, in whatever order."""
    with h5py.File(source) as a, h5py.File(again) as b:
        order = [a["images"][()].tolist().index(image) for image in b["images"][()].tolist()]
        assert sorted(order) == list(range(N))
        for name in names:
            then, now = a[name][()][order], b[name][()]
            assert np.array_equal(then, now, equal_nan=then.dtype.kind == "f"), name


@pytest.mark.parametrize("splits", [None, SPLITS])
def test_imagefolder_has_class_folders_in_splits_and_nothing_else(tmp_path: Path, splits: Any) -> None:
    source = made(tmp_path / "a.h5", splits=splits)
    report = export_file(source, tmp_path / "out", format="imagefolder", workers=1)
    assert (report.layout, report.num_images, report.notes) == ("imagefolder", N, ())
    tops = ["train/", "val/"] if splits else [""]
    assert {name.rpartition("/")[0] for name in files_in(tmp_path / "out")} == {f"{t}{c}" for t in tops for c in NAMES}
    assert digests(packed_again(tmp_path / "out")) == digests(source)


def test_torchvision_reads_the_same_classes_and_pixels(tmp_path: Path, torchvision_datasets: Any) -> None:
    source = made(tmp_path / "a.h5", splits=SPLITS)
    export_file(source, tmp_path / "out", format="imagefolder")
    read = torchvision_datasets.ImageFolder(str(tmp_path / "out" / "train"))
    assert read.classes == list(NAMES) and len(read) == 15
    with h5py.File(source) as file:
        pixels = {image.tobytes(): label for image, label in zip(file["images"][:15], file["labels"][:15], strict=True)}
    assert {np.asarray(image).tobytes(): label for image, label in read} == pixels


def test_stored_jpegs_keep_their_bytes_in_every_format(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    data: set[bytes] = set()
    for number in range(6):
        path = photos / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((9 + number, 8, 3), number * 9, np.uint8)).save(path)
        data.add(path.read_bytes())
    pack_images(photos, tmp_path / "a.h5", store="source", workers=0)
    for format in ("imagefolder", "hf", "webdataset"):
        report = export_file(tmp_path / "a.h5", tmp_path / format, format=format)
        assert any("stored as JPEG" in note for note in report.notes)
        found = [path.read_bytes() for path in (tmp_path / format).rglob("*.jpg")]
        for shard in (tmp_path / format).glob("*.tar"):
            with tarfile.open(shard) as tar:
                found += [tar.extractfile(name).read() for name in tar.getnames() if name.endswith(".jpg")]  # type: ignore[union-attr]
        assert set(found) == data and len(found) == 6


def test_what_imagefolder_cannot_hold_is_refused_or_named(tmp_path: Path) -> None:
    def noted(**options: Any) -> str:
        source = made(tmp_path / "a.h5", **options)
        folder = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        return " ".join(export_file(source, folder, format="imagefolder").notes)

    with pytest.raises(OptionError, match=r"a\.h5: imagefolder needs one class .* none such\. Choose `--format webdat"):
        noted(labels=False)
    with pytest.raises(OptionError, match=r"one class for each image: 1 have none, the first 00000003\."):
        noted(labels=np.where(np.arange(N) == 3, -1, 1))
    masks = np.zeros((N, 6, 5), np.uint8)
    assert "cannot hold it: masks, identity" in noted(masks=masks, extra={"identity": Column(np.arange(N))})
    assert "other numbers than the file has" in noted(names=("cat", "bee", "ant"))
    assert "of val other numbers" in noted(labels=np.repeat([0, 1, 2], 8), splits={"train": 17, "val": 7})
    assert "no names of folders (1): a/b as a_b" in noted(names=("a/b", "bee", "cat"))


WIDE = {
    "identity": Column(np.arange(N) * 7),
    "angle": Column(np.where(np.arange(N) == 4, np.nan, np.arange(N) / 8)),
    "bbox": Column(np.arange(4 * N).reshape(N, 4).astype(np.float32), {"names": ("x", "y", "width", "height")}),
    "tokens": Column(np.arange(5 * N).reshape(N, 5)),
}


@pytest.mark.parametrize("splits", [None, SPLITS])
def test_webdataset_shards_come_back_with_pixels_labels_masks_and_values(tmp_path: Path, splits: Any) -> None:
    masks = np.random.default_rng(1).integers(0, 4, (N, 6, 5), np.uint8)
    source = made(tmp_path / "a.h5", splits=splits, masks=masks, extra=WIDE)
    report = export_file(source, tmp_path / "out", format="webdataset", shard_bytes=20_000, workers=2)
    shards = sorted((tmp_path / "out").iterdir())
    assert len(shards) > 3 and all(shard.stat().st_size <= 20_000 for shard in shards)
    assert shards[0].name == ("train-000000.tar" if splits else "shard-000000.tar")
    assert any("`label_name`" in note for note in report.notes) and report.num_masks == N
    with tarfile.open(shards[0]) as tar:
        assert tar.getnames()[:4] == ["00000000.png", "00000000.seg.png", "00000000.cls", "00000000.json"]
        said = json.load(tar.extractfile("00000000.json"))  # type: ignore[arg-type]
        assert said == {"key": "00000000", "identity": 0, "angle": 0.0, "label_name": "ant"}
    assert detect_layout(tmp_path / "out")[0] == "webdataset"
    again = packed_again(tmp_path / "out", mask_values="keep")
    assert_same_pixels(source, again, "labels", "masks", "identity", "angle", "bbox", "split")
    with h5py.File(again) as file:
        assert np.array_equal(file["tokens_npy"].shape, (N, 5))


def test_keys_with_dots_folders_and_any_length_are_samples_of_their_own(tmp_path: Path) -> None:
    keys = [f"a.b/{'x' * 120}.{number}/ö.png" for number in range(N - 2)] + ["A.jpg", "a.jpg"]
    source = made(tmp_path / "a.h5", extra={"key": Column(np.array([key.encode() for key in keys]))})
    export_file(source, tmp_path / "out", format="webdataset")
    with tarfile.open(tmp_path / "out" / "shard-000000.tar") as tar:
        said = [json.load(tar.extractfile(name)) for name in tar.getnames() if name.endswith(".json")]  # type: ignore[arg-type]
    assert [one["key"] for one in said] == keys
    assert_same_pixels(source, packed_again(tmp_path / "out"), "labels")


def test_shards_that_were_changed_are_not_overwritten(tmp_path: Path) -> None:
    source = made(tmp_path / "a.h5")
    options: dict[str, Any] = {"format": "webdataset", "shard_bytes": 12_000, "workers": 1}
    settings = {"fastload.export._BLOCK_ROWS": 2}
    killed_at(9, "fastload.export.export_file", source, tmp_path / "out", settings=settings, **options)
    (tmp_path / "out" / "shard-000000.tar").write_bytes(b"")
    with pytest.raises(OutputError, match=r"shard-000000\.tar: was changed since it was exported"):
        export_file(source, tmp_path / "out", **options)


def test_a_sample_larger_than_a_shard_may_be_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        OptionError, match=r"shard_bytes=3,000: the sample 00000000 alone takes 4,\d+\. .*--shard-bytes"
    ):
        export_file(made(tmp_path / "a.h5"), tmp_path / "out", format="webdataset", shard_bytes=3000)


@pytest.mark.parametrize("format", ["imagefolder", "webdataset", "hf"])
def test_an_interrupted_export_is_continued_to_the_same_files(tmp_path: Path, format: Any) -> None:
    source = made(tmp_path / "a.h5", splits=SPLITS, extra=WIDE)
    options = {"format": format, "shard_bytes": 12_000 if format == "webdataset" else None, "workers": 1}
    export_file(source, tmp_path / "whole", **options)
    whole = {name: (tmp_path / "whole" / name).read_bytes() for name in files_in(tmp_path / "whole")}
    settings = {"fastload.export._BLOCK_ROWS": 2}
    killed_at(9, "fastload.export.export_file", source, tmp_path / "out", settings=settings, **options)
    assert (tmp_path / "out" / JOURNAL).exists()
    half = files_in(tmp_path / "out")
    assert len(half) > 1 and not set(whole) <= set(half)
    report = export_file(source, tmp_path / "out", **options)
    assert report.kept > 0
    assert {name: (tmp_path / "out" / name).read_bytes() for name in files_in(tmp_path / "out")} == whole
    with pytest.raises(OutputError, match="is not empty"):
        export_file(source, tmp_path / "out", **options)


@pytest.mark.parametrize("splits", [None, SPLITS])
def test_hf_metadata_comes_back_through_the_table_layout(tmp_path: Path, splits: Any) -> None:
    masks = np.random.default_rng(1).integers(0, 4, (N, 6, 5), np.uint8)
    source = made(tmp_path / "a.h5", splits=splits, masks=masks, extra=WIDE)
    export_file(source, tmp_path / "out", format="hf")
    top = "train/" if splits else ""
    lines = (tmp_path / "out" / f"{top}metadata.jsonl").read_text().splitlines()
    assert len(lines) == (15 if splits else N)
    first = json.loads(lines[0])
    assert first["file_name"] == "00000000.png" and first["mask_file_name"] == "mask_images/00000000.png"
    assert (first["label"], first["identity"], first["bbox_width"]) == ("ant", 0, 2.0)
    assert detect_layout(tmp_path / "out")[0] == "manifest"
    again = packed_again(tmp_path / "out", mask_values="keep")
    assert_same_pixels(source, again, "labels", "masks", "identity", "angle", "split")
    with h5py.File(again) as file:
        assert list(file["labels"].attrs["names"]) == [name.encode() for name in NAMES]


def test_wide_arrays_attributes_and_names_like_numbers_do_not_stop_hf_from_being_packed(tmp_path: Path) -> None:
    wide = {"tokens": Column(np.arange(300 * N).reshape(N, 300)), "grid": Column(np.ones((N, 2, 2), np.float32))}
    source = made(tmp_path / "a.h5", names=("10", "a|b", "nan"), extra=wide)
    notes = export_file(source, tmp_path / "out", format="hf").notes
    assert not any("fastload.json" in note for note in notes) and any("`label_name`" in note for note in notes)
    line = json.loads((tmp_path / "out" / "metadata.jsonl").read_text().splitlines()[1])
    assert (line["label"], line["label_name"], line["tokens"][:2], line["grid"]) == (1, "a|b", [300, 301], [[1, 1]] * 2)
    assert_same_pixels(source, packed_again(tmp_path / "out"), "labels")
    vectors = np.random.default_rng(2).integers(0, 2, (N, 3), np.uint8)
    vectors[:2] = [[0, 1, 0], [1, 0, 1]]
    source = made(tmp_path / "v.h5", labels=vectors)
    export_file(source, tmp_path / "vectors", format="hf")
    assert_same_pixels(source, packed_again(tmp_path / "vectors"), "labels")
    with pytest.raises(OptionError, match="imagefolder needs one class"):
        export_file(source, tmp_path / "no", format="imagefolder")
    export_file(source, tmp_path / "shards", format="webdataset")
    with h5py.File(packed_again(tmp_path / "shards")) as file:
        assert file["labels_npy"].shape == (N, 3)


def test_images_of_16_bits_and_turned_jpegs_are_noted(tmp_path: Path) -> None:
    deep = np.random.default_rng(0).integers(0, 65536, (4, 6, 5, 1), np.uint16)
    write_packed(tmp_path / "a.h5", deep, {"labels": Column(np.arange(4) % 2)})
    assert "16 bits a channel" in " ".join(export_file(tmp_path / "a.h5", tmp_path / "a", format="imagefolder").notes)
    with Image.open(tmp_path / "a" / "0" / "00000000.png") as image:
        assert np.array_equal(np.asarray(image), deep[0, ..., 0])
    exif = Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "photos" / "x").mkdir(parents=True)
    for number in range(3):
        image = Image.new("RGB", (8 + number, 6), number)
        image.save(tmp_path / "photos" / "x" / f"{number}.jpg", **({"exif": exif.tobytes()} if number else {}))
    pack_images(tmp_path / "photos", tmp_path / "b.h5", layout="folder", store="source", workers=0)
    notes = " ".join(export_file(tmp_path / "b.h5", tmp_path / "b", format="webdataset").notes)
    assert "2 of these are upright only after their EXIF orientation" in notes


def test_boxes_are_objects_with_categories(tmp_path: Path) -> None:
    counts = np.arange(N) % 3
    boxes = np.where(np.arange(2)[:, None] < counts[:, None, None], [1.0, 2.0, 3.0, 2.5], 0).astype(np.float32)
    extra = {
        "boxes": Column(boxes, {"names": ("x", "y", "width", "height")}),
        "box_labels": Column(np.where(np.arange(2) < counts[:, None], [1, 0], -1), {"names": ("cat", "dog")}),
        "num_boxes": Column(counts),
    }
    source = made(tmp_path / "a.h5", labels=False, extra=extra)
    export_file(source, tmp_path / "out", format="hf")
    lines = [json.loads(line) for line in (tmp_path / "out" / "metadata.jsonl").read_text().splitlines()]
    assert lines[2]["objects"] == {"bbox": [[1.0, 2.0, 3.0, 2.5]] * 2, "category": ["dog", "cat"]}
    assert lines[0]["objects"] == {"bbox": [], "category": []}
    again = packed_again(tmp_path / "out")
    assert_same_pixels(source, again, "boxes", "box_labels", "num_boxes")


def test_datasets_reads_images_labels_and_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    source = made(tmp_path / "a.h5", splits=SPLITS, extra={"identity": Column(np.arange(N))})
    export_file(source, tmp_path / "out", format="hf")
    read = datasets.load_dataset("imagefolder", data_dir=str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))
    assert {name: len(rows) for name, rows in read.items()} == {"train": 15, "validation": 9}
    with h5py.File(source) as file:
        for row in read["train"]:
            assert np.array_equal(np.asarray(row["image"]), file["images"][row["identity"]])
            assert row["label"] == NAMES[file["labels"][row["identity"]]]


def test_options_of_one_format_are_refused_by_another(tmp_path: Path) -> None:
    source = made(tmp_path / "a.h5")
    with pytest.raises(OptionError, match="`--layout` means nothing to the format hf; it is for folder"):
        export_file(source, tmp_path / "out", format="hf", layout="csv")
    with pytest.raises(OptionError, match="`--shard-bytes` means nothing to the format folder; it is for webdataset"):
        export_file(source, tmp_path / "out", shard_bytes=2**20)
    with pytest.raises(OptionError, match="format='zip' is not known; accepted: folder, imagefolder, webdataset, hf"):
        export_file(source, tmp_path / "out", format="zip")  # type: ignore[arg-type]
    export_file(source, tmp_path / "out", format="folder")
    assert {SIDECAR, FIELDS} <= set(files_in(tmp_path / "out"))
