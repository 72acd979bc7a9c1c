import bz2
import gzip
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from record_files import image_file, write_mds
from small_trees import listed, notes_of, refused, refused_or_skipped, values

from fastload import pack_images
from fastload.errors import OptionError
from fastload.options.pack import SourceOptions
from fastload.sources.layouts import detect_layout, list_source
from fastload.sources.listing import Listing

FIELDS = {"i": "int", "x": "jpeg", "y": "int"}


def samples(count: int, first: int = 0) -> list[list[bytes]]:
    return [
        [np.int64(i).tobytes(), image_file(i, form="JPEG"), np.int64(i % 3).tobytes()]
        for i in range(first, first + count)
    ]


def contents(listing: Listing) -> list[bytes]:
    files = pickle.loads(pickle.dumps(listing.files))
    return [files.read(i) for i in range(len(listing))]


def pixels(listing: Listing) -> list[np.ndarray]:
    files = pickle.loads(pickle.dumps(listing.files))
    for i in range(len(listing)):
        header = files.header(i)
        assert files.read(i).shape == (header.height, header.width, header.channels)[: files.read(i).ndim]
    return [files.read(i) for i in range(len(listing))]


def test_shards_become_samples_whose_images_stay_in_place(tmp_path: Path) -> None:
    write_mds(tmp_path / "train", FIELDS, samples(7), shards=3)
    write_mds(tmp_path / "val", FIELDS, samples(2, 7))
    (tmp_path / "README.md").write_text("x")
    assert detect_layout(tmp_path) == ("mds", ["train/index.json", "val/index.json"])
    listing = list_source(tmp_path)
    assert listing.split_names == ("train", "val") and listing.split.tolist() == [0] * 7 + [1] * 2
    assert contents(listing) == [image_file(i, form="JPEG") for i in range(9)]
    assert values(listing) == [i % 3 for i in range(9)] and values(listing, "i") == list(range(9))
    assert listing.keys[0] == "train/shard.00000.mds/00000000" and listing.keys[-1] == "val/shard.00000.mds/00000001"
    assert listing.sizes.tolist() == list(map(len, contents(listing)))
    assert "Labels are the column 'y'" in notes_of(listing) and "Ignored other files (1): README.md" in notes_of(
        listing
    )


@pytest.mark.parametrize("pack", [("gz", gzip.compress), ("bz2", bz2.compress), ("zstd", None)])
def test_compressed_shards_give_the_same(tmp_path: Path, pack: tuple) -> None:
    name, compress = pack
    if name == "zstd":
        compress = pytest.importorskip("zstandard", reason="zstandard is not installed").ZstdCompressor().compress
    plain = list_source(write_mds(tmp_path / "plain", FIELDS, samples(6), shards=2))
    packed = list_source(write_mds(tmp_path / "packed", FIELDS, samples(6), shards=2, pack=(name, compress)))
    assert contents(packed) == contents(plain) and values(packed) == values(plain)
    assert packed.keys[0].startswith("shard.00000.mds")
    assert contents(packed.take(np.array([4, 1]))) == [contents(plain)[4], contents(plain)[1]]


def test_an_index_above_folders_names_their_shards_once(tmp_path: Path) -> None:
    merged = []
    for split in ("train", "val"):
        write_mds(tmp_path / split, FIELDS, samples(3), shards=2)
        for shard in json.loads((tmp_path / split / "index.json").read_text())["shards"]:
            shard["raw_data"]["basename"] = f"{split}/{shard['raw_data']['basename']}"
            merged.append(shard)
    (tmp_path / "index.json").write_text(json.dumps({"shards": merged, "version": 2}))
    listing = list_source(tmp_path)
    assert len(listing) == 6 and listing.split_names == ("train", "val")


def test_encodings_become_columns_by_their_kind(tmp_path: Path) -> None:
    fields = {
        "image": "png", "class": "str", "score": "float32", "area": "str_float", "emb": "ndarray:float32:2",
        "free": "ndarray", "meta": "json", "note": "bytes", "depth": "uint16",
    }  # fmt: skip
    rows = [
        [image_file(i), b"ant" if i % 2 else b"bee", np.float32(i / 2).tobytes(), b"1.5",
         np.array([i, 1], np.float32).tobytes(), bytes([33, 2 << 2, 2, 1]) + np.array([[i], [2]], np.int32).tobytes(),
         json.dumps({"a": i, "deep": {"b": 1}}).encode(), b"\xff\xfe\0", np.uint16(300 + i).tobytes()]
        for i in range(4)
    ]  # fmt: skip
    listing = list_source(write_mds(tmp_path, fields, rows))
    assert values(listing) == [1, 0, 1, 0] and listing.columns["labels"].attrs["names"] == ("ant", "bee")
    assert values(listing, "score") == [0, 0.5, 1, 1.5] and values(listing, "area") == [1.5] * 4
    assert values(listing, "emb") == [[i, 1] for i in range(4)] and values(listing, "depth") == [300, 301, 302, 303]
    assert values(listing, "free") == [[[i], [2]] for i in range(4)] and values(listing, "meta.a") == [0, 1, 2, 3]
    assert "NOT READ: meta.deep, note: neither numbers nor text nor images." in notes_of(listing)


@pytest.mark.parametrize(("mode", "shape"), [("RGB", (4, 6, 3)), ("L", (4, 6)), ("RGBA", (4, 6, 4))])
def test_raw_images_of_pillow_are_their_pixels(tmp_path: Path, mode: str, shape: tuple[int, ...]) -> None:
    images = [np.random.default_rng(i).integers(0, 256, shape, dtype=np.uint8) for i in range(3)]
    head = np.array([6, 4, len(mode)], np.uint32).tobytes() + mode.encode()
    folder = write_mds(tmp_path / "in", {"image": "pil", "label": "int"}, [
        [head + Image.fromarray(one).tobytes(), np.int64(i).tobytes()] for i, one in enumerate(images)
    ])  # fmt: skip
    for got, one in zip(pixels(list_source(folder)), images, strict=True):
        assert np.array_equal(got, one)
    report = pack_images(folder, tmp_path / "o.h5", workers=0)
    assert report.image_shape == (*shape, 1)[:3] and report.layout == "mds"


@pytest.mark.parametrize("encoding", ["ndarray:uint8:3,4,6", "ndarray:uint8", "ndarray"])
def test_arrays_shaped_like_images_are_images_with_channels_last(tmp_path: Path, encoding: str) -> None:
    images = [np.random.default_rng(i).integers(0, 256, (3, 4, 6), dtype=np.uint8) for i in range(3)]
    head = {
        "ndarray:uint8:3,4,6": b"",
        "ndarray:uint8": bytes([3 << 2, 3, 4, 6]),
        "ndarray": bytes([8, 3 << 2, 3, 4, 6]),
    }
    folder = write_mds(tmp_path, {"img": encoding, "label": "int"}, [
        [head[encoding] + one.tobytes(), np.int64(0).tobytes()] for one in images
    ])  # fmt: skip
    for got, one in zip(pixels(list_source(folder)), images, strict=True):
        assert np.array_equal(got, one.transpose(1, 2, 0))


def test_an_image_and_a_mask_as_mosaicml_writes_ade20k(tmp_path: Path) -> None:
    masks = [np.random.default_rng(i).integers(0, 5, (4, 6), dtype=np.uint8) for i in range(3)]
    rows = []
    for i, mask in enumerate(masks):
        Image.fromarray(mask).save(tmp_path / "m.png")
        rows.append([f"a_{i}".encode(), image_file(i, form="JPEG"), (tmp_path / "m.png").read_bytes()])
    folder = write_mds(tmp_path / "in", {"file": "str", "x": "jpeg", "y": "png"}, rows)
    listing = list_source(folder)
    assert listing.masks is not None and listing.masks.present.all() and not listing.columns
    assert listing.keys == tuple(f"shard.00000.mds/a_{i}" for i in range(3))
    assert listed(folder, masks="none").masks is None
    two = write_mds(tmp_path / "two", {"left": "png", "right": "png"}, [[image_file(0), image_file(1)]])
    refused("several fields hold images: left, right.*--image-column left", two)
    listing = list_source(two, options=SourceOptions(image_column="right"))
    assert contents(listing) == [image_file(1)] and "NOT READ: further images of each record: left" in notes_of(listing)
    with pytest.raises(OptionError, match="'up' is not there; there are left, right"):
        list_source(two, options=SourceOptions(image_column="up"))


def test_pickles_are_refused_or_left_out_and_never_read(tmp_path: Path) -> None:
    folder = write_mds(tmp_path, {"p": "pkl", "x": "png"}, [[b"cos\nsystem\n(S'touch BAD'\ntR.", image_file()]])
    listing = refused_or_skipped("the fields p are pickles", folder)
    assert len(listing) == 1 and "pickles: fields (1): p" in notes_of(listing)


def damage(folder: Path, **of_shard: object) -> None:
    index = json.loads((folder / "index.json").read_text())
    index["shards"][0] |= of_shard
    (folder / "index.json").write_text(json.dumps(index))


def test_what_does_not_fit_its_index_is_an_error(tmp_path: Path) -> None:
    folder = write_mds(tmp_path / "in", FIELDS, samples(4), shards=2)
    shard = folder / "shard.00001.mds"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-5])
    refused(r"shard.00001.mds has \d+ bytes, where its index.json says \d+. It was cut short", folder)
    shard.write_bytes(whole[:8] + b"\xff\xff\xff\x7f" + whole[12:])
    refused("its table of 2 records is damaged", folder)
    shard.unlink()
    refused(r"shards that index.json names are missing \(1\): shard.00001.mds", folder)
    shard.write_bytes(whole)
    damage(folder, version=1)
    refused("index.json is damaged: .*version 1; read is 'mds', version 2", folder)
    damage(folder, version=2, column_encodings=["int", "jpeg", "list[int]"])
    refused(r"the field 'y' has the encoding 'list\[int\]'", folder)
    damage(folder, column_encodings=list(FIELDS.values()), raw_data={"basename": "../../x.mds", "bytes": 3})
    refused("a shard outside of its folder", folder)
    (folder / "index.json").write_text('{"shards": [{"format": "mds"')
    refused("index.json is damaged", folder)
    other = write_mds(tmp_path / "br", FIELDS, samples(2), pack=("br", bytes))
    refused(r"compressed with 'br'.*StreamingDataset\(local=.*br", other)
    (tmp_path / "br" / "train").mkdir()
    refused("shards inside an archive|holds no image|MDS shards", tmp_path / "br" / "train", "mds")


def test_the_real_package_writes_what_is_read(tmp_path: Path) -> None:
    streaming = pytest.importorskip("streaming", reason="streaming (mosaicml-streaming) is not installed")
    columns = {"x": "jpeg", "y": "int", "t": "str", "raw": "pil", "v": "ndarray:float32:3", "j": "json"}
    with streaming.MDSWriter(out=str(tmp_path / "in"), columns=columns, size_limit=4000) as writer:
        for i in range(12):
            image = Image.fromarray(np.random.default_rng(i).integers(0, 256, (8 + i, 9, 3), dtype=np.uint8))
            vector = np.arange(3, dtype=np.float32) + i
            writer.write({"x": image, "y": i, "t": f"t{i % 2}", "raw": image, "v": vector, "j": {"k": i}})
    theirs = streaming.StreamingDataset(local=str(tmp_path / "in"), shuffle=False, batch_size=1)
    listing = list_source(tmp_path / "in", options=SourceOptions(image_column="raw"))
    assert len(listing) == len(theirs) and len(list((tmp_path / "in").glob("*.mds"))) > 1
    for i, got in enumerate(pixels(listing)):
        assert np.array_equal(got, np.asarray(theirs[i]["raw"])) and values(listing)[i] == theirs[i]["y"]
        assert values(listing, "v")[i] == theirs[i]["v"].tolist() and values(listing, "j.k")[i] == theirs[i]["j"]["k"]
    files = list_source(tmp_path / "in", options=SourceOptions(image_column="x")).files
    (tmp_path / "a.jpg").write_bytes(files.read(5))
    assert np.array_equal(np.asarray(Image.open(tmp_path / "a.jpg")), np.asarray(theirs[5]["x"]))
