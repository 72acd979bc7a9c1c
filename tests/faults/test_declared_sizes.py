"""Numbers and lists in a file that would take memory or time out of all proportion to it: refused, in little memory."""

from __future__ import annotations

import gzip
import io
import json
import struct
import tracemalloc
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image
from record_files import write_mds
from small_trees import npy, picture, refused, values, write_tar

from fastload import PackedDataset, pack_images
from fastload.errors import FormatError, ImageError, SourceError
from fastload.format.ragged import Column
from fastload.sources.boxes import BoxSlots
from fastload.sources.coco import fill_polygon
from fastload.sources.layouts import list_source
from fastload.sources.open_tree import open_tree


@contextmanager
def at_most(megabytes: int) -> Iterator[None]:
    """Fails if Python and NumPy allocate more within."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < megabytes * 2**20
    finally:
        tracemalloc.stop()


def png() -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (3, 2)).save(out, "PNG")
    return out.getvalue()


def header(name: bytes, kind: bytes, size: int, content: bytes = b"") -> bytes:
    """A header of a tar with the right checksum, and content filled up to whole blocks."""
    block = bytearray(512)
    block[:100] = name.ljust(100, b"\0")
    block[100:108], block[124:136], block[148:156] = b"0000644\0", b"%011o\0" % size, b" " * 8
    block[156:157], block[257:265] = kind, b"ustar\x0000"
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + content + bytes(-len(content) % 512)


def test_a_name_of_thousands_of_folders_takes_no_memory_for_each_of_them(tmp_path: Path) -> None:
    names = ["a/" * 30_000 + "x.txt", "c/x.png"]
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for name in names:
            archive.writestr(name, png())
    write_tar(tmp_path / "a.tar", dict.fromkeys(names, png()))
    for path in (tmp_path / "a.zip", tmp_path / "a.tar"):
        with at_most(16):
            tree = open_tree(path)
        assert tree.names == ["c/x.png"] and tree.folders == ["c"] and "30000 folders" in tree.notes[0]
        assert len(tree.notes[0]) < 1000


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (header(b"pax", b"x", 2**32) + bytes(1024), "a header of 4294967296 bytes"),
        (header(b"long", b"L", 2**31) + bytes(1024), "a header of 2147483648 bytes"),
        (header(b"pax", b"x", 300_000, b"9" * 300_000) + bytes(1024), "a number of more than 256 digits"),
        (header(b"long", b"L", 2, b"a\0") * 3000 + bytes(1024), "recursion"),
    ],
)
def test_headers_of_a_tar_that_describe_others_take_no_more_than_they_hold(
    tmp_path: Path, data: bytes, message: str
) -> None:
    (tmp_path / "a.tar").write_bytes(header(b"a.png", b"0", 3, b"abc") + data)
    with at_most(16), pytest.raises(SourceError, match=message):
        open_tree(tmp_path / "a.tar")


def test_a_zip_whose_stored_member_claims_another_size_than_it_has_is_not_believed(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("c/x.png", png())
        archive.writestr("c/y.png", png())
    data = bytearray((tmp_path / "a.zip").read_bytes())
    at = data.rindex(b"PK\1\2") + 24
    data[at : at + 4] = struct.pack("<L", 2**32 - 2)
    (tmp_path / "a.zip").write_bytes(data)
    assert [name for name, _ in open_tree(tmp_path / "a.zip").broken] == ["c/y.png"]


@pytest.mark.parametrize("shape", [(2**40,), (0, 2**62), (0, 10**400), (-2, -3), (1,) * 70, (2**20, 2**20, 2**20)])
def test_a_shape_in_an_npy_reserves_nothing_before_the_bytes_are_there(tmp_path: Path, shape: tuple[int, ...]) -> None:
    head = repr({"descr": "|u1", "fortran_order": False, "shape": shape}).encode()
    whole = b"\x93NUMPY\1\0" + struct.pack("<H", len(head) + 1) + head + b"\n"
    (tmp_path / "labels.npy").write_bytes(whole + bytes(6))
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as bundle:
        bundle.writestr("images.npy", npy(np.zeros((6, 2, 2), np.uint8)))
        bundle.writestr("labels.npy", whole + bytes(6))
    for path in (tmp_path / "labels.npy", tmp_path / "a.npz"):
        with at_most(16):
            refused("not an .npy array|its header promises", path)


def test_a_stored_array_that_reaches_beyond_its_npz_is_refused(tmp_path: Path) -> None:
    path, many = tmp_path / "a.npz", 2**31
    with zipfile.ZipFile(path, "w") as bundle:
        bundle.writestr("labels.npy", npy(np.zeros(9, np.uint8)).replace(b"(9,), }" + b" " * 9, b"(%d,), }" % many))
    data, found = bytearray(path.read_bytes()), many + 128
    at = data.rindex(b"PK\1\2")
    data[at + 20 : at + 28] = struct.pack("<2L", found, found)
    path.write_bytes(data)
    with at_most(16):
        refused("cut short", path)


def test_lines_of_json_that_share_no_name_are_no_table_of_all_names(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    lines = [json.dumps({f"name {i}": i}) for i in range(4000)]
    (tmp_path / "metadata.jsonl").write_text("\n".join(lines))
    with at_most(32):
        refused("4000 lines have 4000 different names", tmp_path, "manifest")


def test_names_that_few_samples_of_a_webdataset_have_take_no_column_each(tmp_path: Path) -> None:
    members: list[tuple[str, bytes]] = []
    for i in range(3500):
        about = {"label": i % 3, f"name {i}": 1.5}
        members += [(f"{i:05}.png", b"x"), (f"{i:05}.json", json.dumps(about).encode())]
    write_tar(tmp_path / "a-000.tar", members)
    with at_most(64):
        listing = list_source(tmp_path, "webdataset")
    assert list(listing.columns) == ["labels"] and "names that few samples have" in " ".join(listing.notes)


def test_a_polygon_that_crosses_its_rows_far_too_often_is_an_error_of_that_mask() -> None:
    mask = np.zeros((4000, 10), np.uint8)
    corners = np.stack([np.arange(20_000) % 10, np.arange(20_000) % 2 * 4000], axis=1).astype(np.float64)
    with at_most(16), pytest.raises(ImageError, match="a polygon of 20000 corners"):
        fill_polygon(mask, corners, 1)


def test_one_sample_with_most_boxes_gives_the_others_no_room_for_as_many() -> None:
    count = 30_000
    slots = BoxSlots.of(np.full(count, 3), count, "a.json")
    with at_most(16), pytest.raises(SourceError, match=f"a.json: one sample has {count} boxes"):
        slots.columns(np.zeros((count, 4), np.float32), Column(np.zeros(count, np.int64)))


def test_a_label_far_beyond_emnists_takes_no_name_for_each_number_below_it(tmp_path: Path) -> None:
    images = b"\0\0\x08\3" + struct.pack(">3I", 2, 3, 3) + bytes(18)
    labels = b"\0\0\x0c\1" + struct.pack(">I2i", 2, 0, 2_000_000_000)
    (tmp_path / "emnist-x-train-images-idx3-ubyte").write_bytes(images)
    (tmp_path / "emnist-x-train-labels-idx1-int").write_bytes(labels)
    (tmp_path / "emnist-x-mapping.txt").write_text("0 48\n2000000000 49\n")
    with at_most(16):
        listing = list_source(tmp_path, "mnist")
    assert values(listing) == [0, 2_000_000_000] and not listing.columns["labels"].attrs


def test_classes_of_voc_by_the_thousand_take_a_byte_for_each_image_and_class(tmp_path: Path) -> None:
    count = 1500
    picture(tmp_path / "JPEGImages/0000.jpg")
    image = (tmp_path / "JPEGImages/0000.jpg").read_bytes()
    box = "<bndbox><xmin>1</xmin><ymin>1</ymin><xmax>2</xmax><ymax>2</ymax></bndbox>"
    (tmp_path / "Annotations").mkdir()
    for i in range(count):
        (tmp_path / f"JPEGImages/{i:04}.jpg").write_bytes(image)
        xml = f"<annotation><object><name>c{i}</name>{box}</object></annotation>"
        (tmp_path / f"Annotations/{i:04}.xml").write_text(xml)
    with at_most(14):
        listing = list_source(tmp_path, "voc")
    labels: Column = listing.columns["labels"]
    assert labels.values.shape == (count, count) and (labels.values.sum(axis=1) == 1).all()


def test_columns_of_one_name_are_named_however_many_there_are(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    (tmp_path / "t.csv").write_text(
        ",".join(["file_name", *map(str, range(50_000)), "7"]) + "\n" + ",".join(["a.png"] * 50_002)
    )
    refused("two columns are called '7'", tmp_path / "t.csv")


def bomb(num_bytes: int, *, raw: bool = False) -> bytes:
    """So many zeros, deflated to a thousandth."""
    packing, block = zlib.compressobj(1, zlib.DEFLATED, -15 if raw else 15), bytes(2**20)
    return b"".join([packing.compress(block) for _ in range(num_bytes // len(block))]) + packing.flush()


@pytest.mark.parametrize(
    ("field", "filters", "message"),
    [
        ("images", {}, "`images` cannot be decoded .*769 bytes where 768 are expected"),
        ("images", {"shuffle": True}, "`images` cannot be decoded .*769 bytes where 768 are expected"),
        ("images", {"fletcher32": True}, "`images` has a chunk of .* which should stand for 768"),
        ("labels", {}, "`labels` has a chunk of .* which should stand for 32"),
    ],
)
def test_a_chunk_in_gzip_is_inflated_no_further_than_to_its_own_bytes(
    tmp_path: Path, field: str, filters: dict[str, bool], message: str
) -> None:
    shapes = {"images": (4, 8, 8, 3), "labels": (4,)}
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, shape in shapes.items():
            file.create_dataset(name, shape, "u1" if name == "images" else "i8", chunks=shape, **(
                {"compression": "gzip"} | filters if name == field else {}
            ))  # fmt: skip
        file[field].id.write_direct_chunk((0,) * len(shapes[field]), bomb(2**27) + bytes(4 * len(filters)))
    with at_most(16), pytest.raises(SourceError, match=message):
        pack_images(tmp_path / "a.h5", tmp_path / "o.h5", workers=0)
    with at_most(16), pytest.raises(FormatError, match=message):
        dataset = PackedDataset(tmp_path / "a.h5", fields=("images", "labels"))
        dataset[0]


def test_a_dataset_that_claims_more_than_its_file_can_hold_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["images"] = np.zeros((4, 8, 8, 3), np.uint8)
        file.create_dataset("labels", (2**40,), "i8", chunks=(2**20,), compression="gzip")
    with at_most(16):
        refused("`labels` claims .*it was cut short, or damaged", tmp_path / "a.h5")


def test_a_member_of_a_zip_is_inflated_no_further_than_to_the_size_that_is_stated(tmp_path: Path) -> None:
    path, data = tmp_path / "a.zip", bomb(2**27, raw=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("c/x.png", png())
        archive.writestr("c/y.png", data)
    stored = bytearray(path.read_bytes())
    for begin, method, size in ((b"PK\3\4", 8, 22), (b"PK\1\2", 10, 24)):
        at = stored.rindex(begin)
        stored[at + method : at + method + 2], stored[at + size : at + size + 4] = b"\x08\0", struct.pack("<L", 768)
    path.write_bytes(stored)
    with at_most(16):
        report = pack_images(path, tmp_path / "o.h5", layout="folder", workers=0, on_error="skip")
    assert report.num_samples == 1 and [key for key, _ in report.skipped] == ["c/y.png"]


def test_a_shard_of_mosaicml_is_unpacked_no_further_than_its_index_states(tmp_path: Path) -> None:
    write_mds(tmp_path, {"image": "png", "label": "int"}, [[png(), bytes(8)]], pack=("gz", gzip.compress))
    [packed] = tmp_path.glob("*.gz")
    packed.write_bytes(gzip.compress(bytes(2**27), 1))
    refused(r"has [0-9]{1,8} bytes unpacked, where its index.json says", tmp_path)
