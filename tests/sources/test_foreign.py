import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from record_files import image_file
from small_trees import make, notes_of, refused

from fastload import pack_images
from fastload.sources import tree
from fastload.sources.layouts import list_source

LITDATA = {"chunks": [{"chunk_bytes": 9, "filename": "chunk-0-0.bin"}], "config": {"data_format": ["jpeg", "int"]}}

# Files of a dataset of each kind, by name, and what is said of them.
KINDS = [
    ({"index.json": json.dumps(LITDATA).encode(), "chunk-0-0.bin": b"x"}, "LitData's chunks.*litdata import Stream"),
    (
        {"index.json": b'{"shards": [{"format": "jsonl"}], "version": 2}'},
        "shards of MosaicML's Streaming in CSV or JSON.*StreamingDataset",
    ),
    ({"train.beton": b"x" * 99}, "FFCV's files.*ffcv.loader import Loader"),
    ({"_deeplake_log/1/next_base": b"1"}, "Deep Lake's tensors.*deeplake.open_read_only"),
    ({"images/tensor_meta.json": b"{}", "dataset_meta.json": b"{}"}, "Deep Lake's tensors.*deeplake<4"),
    ({"val_lmdb/data.mdb": bytes(16) + b"\xde\xc0\xef\xbe", "val_lmdb/lock.mdb": b""}, "LMDB databases.*lmdb.open"),
    ({"train.rec": b"\x0a\x23\xd7\xce" + bytes(9), "train.idx": b"0\t0"}, "records of MXNet.*/train'.*'.idx'"),
    ({"a-train.array_record-00000-of-00001": b"x"}, "ArrayRecord files.*as_data_source.*convert_format"),
    ({"zarr.json": b"{}", "images/c/0/0/0/0": b"x"}, "arrays of Zarr.*zarr.open"),
    ({"images/0.0.0.0": b"x"}, "arrays of Zarr.*zarr.open"),
    ({"t.lance/data/0.lance": b"x"}, "tables of Lance.*fastload pack out.parquet"),
    ({"x/data-00000-of-00001.arrow": b"x"}, "Arrow files without their state.json.*Dataset.from_file"),
    ({"train.pt": b"PK"}, "pickles.*run any program"),
    ({"clips/a.mp4": b"x", "clips/b.MOV": b"x"}, "videos.*ffmpeg -i .*clips/a.mp4"),
    ({"d.zip.001": b"PK", "d.zip.002": b"x"}, r"parts of a split archive \(2.*cat .*/d.zip'?\.\* > .*/d.zip"),
    ({"d.z01": b"PK", "d.zip": b"x"}, "parts of a split archive.*zip -s 0 .*/d'?.zip --out joined.zip"),
    ({"d.tar.gz.aa": b"\x1f\x8b", "d.tar.gz.ab": b""}, r"parts of a split archive.*cat .*/d.tar.gz'?\* > joined"),
    ({"d.tar.partab": b"x"}, r"parts of a split archive.*cat .*/d.tar'?\* > joined"),
    ({"d.part1.rar": b"Rar!", "d.part2.rar": b""}, "parts of a split archive.*unrar x .*d.part1.rar"),
    ({"train.tar.gz": b"\x1f\x8b"}, "archives that are compressed as a whole.*tar -xf .*train.tar.gz"),
    ({"train.7z": b"7z"}, "archives that are not read in place.*7z x"),
    ({"cat/a.jxl": b"\xff\x0a"}, "JPEG XL images.*djxl"),
    ({"p1/a.dcm": b"x", "p1/b.dcm": b"x"}, r"DICOM images \(2: p1/a.dcm, p1/b.dcm\).*pydicom"),
    ({"a.nii.gz": b"x"}, "volumes of NIfTI.*nibabel"),
    ({"a.svg": b"<svg/>"}, "vector drawings.*rsvg-convert"),
    ({"IMG_1.CR2": b"II*\0"}, "a camera's raw images.*rawpy"),
    ({"shard.00000.mds": b"x", "shard.00001.mds": b"x"}, r"MDS shards without their index.json \(2.*Fetch that file"),
    ({"a.tga": b"x"}, "images of formats that are not read.*magick"),
]


def put(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


@pytest.mark.parametrize(("files", "said"), KINDS, ids=[next(iter(files)) for files, _ in KINDS])
def test_what_is_not_read_is_named_with_a_way_out(tmp_path: Path, files: dict[str, bytes], said: str) -> None:
    put(tmp_path / "a b", files)
    refused(f"fastload does not read {said}", tmp_path / "a b")
    refused(f"fastload does not read {said}", tmp_path / "a b", "folder")


@pytest.mark.parametrize("at", [2, 5, 6, 14, 15, 16, 17, 18])
def test_a_single_file_is_named_alike(tmp_path: Path, at: int) -> None:
    files, said = KINDS[at]
    put(tmp_path, files)
    refused(
        "does not read " + re.sub(r" \\\(2", "", said), tmp_path / min(files, key=lambda name: name.endswith(".mdb"))
    )


def test_an_arrow_index_or_mdb_of_another_kind_is_not_taken_for_one(tmp_path: Path) -> None:
    put(tmp_path, {"index.json": b'{"rows": 3}', "a.mdb": b"Standard Jet DB", "b.rec": b"take 1"})
    refused("holds no image", tmp_path)


def test_images_of_other_kinds_among_those_that_are_read_are_named(tmp_path: Path) -> None:
    make(tmp_path, *[f"{of}/{i}.jpg" for of in ("cat", "dog") for i in range(4)], "cat/9.dcm", "dog/9.jxl")
    listing = list_source(tmp_path)
    assert len(listing) == 8
    assert "NOT READ: DICOM images (1: cat/9.dcm)" in notes_of(listing) and "NOT READ: JPEG XL" in notes_of(listing)
    make(tmp_path, *[f"dog/b{i}.jxl" for i in range(9)])
    refused("JPEG XL images .10: .*, and there are only 8 images that it reads", tmp_path)


def test_a_few_files_of_other_programs_beside_images_are_no_matter(tmp_path: Path) -> None:
    make(tmp_path, *[f"{of}/{i}.jpg" for of in ("cat", "dog") for i in range(9)], "best.pt", "clip.mp4", "train.tar.gz")
    assert "NOT READ" not in notes_of(list_source(tmp_path)) and len(list_source(tmp_path)) == 18


@pytest.mark.parametrize(("suffix", "row"), [(".avif", "AVIF"), (".heic", "HEIC")])
def test_images_that_this_installation_does_not_decode_name_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, row: str
) -> None:
    monkeypatch.setattr(tree, "IMAGE_SUFFIXES", (".jpg",))
    make(tmp_path, f"cat/1{suffix}", f"dog/1{suffix}")
    refused(f"does not read {row} images .2.*pip install '?pillow", tmp_path)


# The lines that messages give, run as they stand where the package is installed.


def run_lines(message: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs the lines of Python in a message, in a folder; returns the file that they pack."""
    lines = re.search(r"In Python: `(.*?)`\.", message)
    assert lines
    monkeypatch.chdir(folder)
    exec(lines[1], {})
    return folder / "out.h5"


def message_of(path: Path) -> str:
    with pytest.raises(Exception, match="In Python") as caught:
        list_source(path)
    return str(caught.value)


def packed(path: Path) -> tuple[int, list[int]]:
    import h5py

    with h5py.File(path) as file:
        return len(file["images"]), sorted(file["labels"][()].tolist()) if "labels" in file else []


def test_the_lines_for_litdata_pack_its_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    litdata = pytest.importorskip("litdata", reason="litdata is not installed")
    from litdata.streaming.cache import Cache

    cache = Cache(str(tmp_path / "in"), chunk_bytes=2**12)
    for i in range(12):
        pixels = np.random.default_rng(i).integers(0, 256, (16, 16, 3), dtype=np.uint8)
        cache[i] = {"image": Image.fromarray(pixels), "class": i % 3}
    cache.done()
    cache.merge()
    assert len(litdata.StreamingDataset(str(tmp_path / "in"))) == 12
    out = run_lines(message_of(tmp_path / "in"), tmp_path, monkeypatch)
    assert packed(out) == (12, [0] * 4 + [1] * 4 + [2] * 4)


@pytest.mark.filterwarnings("ignore")  # its own: files that it leaves open
def test_the_lines_for_mosaicml_pack_shards_of_other_compressions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    streaming = pytest.importorskip("streaming", reason="streaming (mosaicml-streaming) is not installed")
    with streaming.MDSWriter(out=str(tmp_path / "in"), columns={"x": "png", "y": "int"}, compression="br:3") as writer:
        for i in range(6):
            writer.write({"x": Image.fromarray(np.full((8, 8, 3), i, np.uint8)), "y": i})
    assert packed(run_lines(message_of(tmp_path / "in"), tmp_path, monkeypatch)) == (6, list(range(6)))


def test_the_lines_for_lmdb_pack_what_lsun_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lmdb = pytest.importorskip("lmdb", reason="lmdb is not installed")
    with lmdb.open(str(tmp_path / "bedroom_lmdb"), map_size=2**20) as base, base.begin(write=True) as transaction:
        for i in range(5):
            transaction.put(b"%d" % i, image_file(i, (8, 8, 3), "WEBP"))
    assert packed(run_lines(message_of(tmp_path / "bedroom_lmdb"), tmp_path, monkeypatch)) == (5, [])


def test_the_lines_for_zarr_pack_its_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zarr = pytest.importorskip("zarr", reason="zarr is not installed")
    group = zarr.open_group(str(tmp_path / "a.zarr"), mode="w")
    group.create_array("images", data=np.zeros((4, 8, 8, 3), np.uint8))
    group.create_array("labels", data=np.arange(4))
    assert packed(run_lines(message_of(tmp_path / "a.zarr"), tmp_path, monkeypatch)) == (4, [0, 1, 2, 3])


def test_the_lines_for_arrow_pack_a_lone_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    from datasets.arrow_writer import ArrowWriter

    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    writer = ArrowWriter(features=features, path=str(tmp_path / "toy-train.arrow"))
    for i in range(4):
        writer.write({"image": {"bytes": image_file(i), "path": None}, "label": i % 2})
    writer.finalize()
    assert packed(run_lines(message_of(tmp_path), tmp_path, monkeypatch)) == (4, [0, 0, 1, 1])


def test_dicts_of_objects_may_call_their_label_class(tmp_path: Path) -> None:
    samples = [{"image": np.full((4, 4, 3), i, np.uint8), "class": i} for i in range(3)]
    assert pack_images(samples, tmp_path / "o.h5", workers=0).fields == ("labels",)
