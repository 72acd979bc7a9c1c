from __future__ import annotations

import gzip
import struct

import numpy as np
import pytest
from small_trees import archived, notes_of, read, refused, values

from fastload.sources.layouts import detect_layout, list_source
from fastload.sources.raw_rows import RawRows


def idx(values: np.ndarray) -> bytes:
    code = {"uint8": 8, "int8": 9, "int16": 11, "int32": 12, "float32": 13}[str(values.dtype)]
    head = bytes([0, 0, code, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    return head + values.astype(values.dtype.newbyteorder(">")).tobytes()


def images(count, seed=0, size=(7, 5)):
    return np.random.default_rng(seed).integers(0, 256, (count, *size), dtype=np.uint8)


def labels(count):
    return (np.arange(count) % 10).astype(np.uint8)


def write(root, names=("train", "t10k"), pattern="{}-{}-idx{}-ubyte", packed=False, counts=(9, 4)):
    root.mkdir(exist_ok=True)
    for seed, (name, count) in enumerate(zip(names, counts, strict=True)):
        for what, array in (("images", images(count, seed)), ("labels", labels(count))):
            path = root / (pattern.format(name, what, array.ndim) + (".gz" if packed else ""))
            path.write_bytes(gzip.compress(idx(array)) if packed else idx(array))
    return root


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("pattern", ["{}-{}-idx{}-ubyte", "{}-{}.idx{}-ubyte"])
@pytest.mark.parametrize("zipped", [False, True])
def test_idx_files_of_any_spelling_are_read(tmp_path, packed, pattern, zipped):
    source = write(tmp_path / "raw", pattern=pattern, packed=packed)
    source = archived(source, tmp_path / "raw.zip") if zipped else source
    assert detect_layout(source)[0] == "mnist"
    listing = list_source(source)
    assert listing.files.shape == (7, 5, 1)
    assert np.array_equal(read(listing.files, range(13))[..., 0], np.concatenate([images(9, 0), images(4, 1)]))
    assert values(listing) == [*labels(9), *labels(4)]
    assert listing.split_names == ("train", "test") and listing.split.tolist() == [0] * 9 + [1] * 4
    assert all(isinstance(part, RawRows) for part in listing.files.parts) == (not packed and not zipped)
    # Not MNIST by its md5, so its classes are not known.
    assert "names" not in listing.columns["labels"].attrs and "idx files like MNIST's" in listing.notes[0]
    first = pattern.format("train", "images", 3) + (".gz" if packed else "")
    assert listing.keys[0] == f"{first}/00000"


def test_mnist_is_recognised_by_its_md5_and_labels_without_images_are_noted(shared_data):
    listing = list_source(shared_data / "mnist")
    assert listing.layout == "mnist" and listing.split_names == ("test",) and len(listing) == 10_000
    assert listing.columns["labels"].attrs["names"] == tuple("0123456789")
    assert listing.columns["labels"].values[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    assert "MNIST, recognised by" in listing.notes[0] and "md5 of MNIST's" in listing.notes[1]
    assert "Ignored train-labels-idx1-ubyte.gz: the images" in notes_of(listing)
    pixels = read(listing.files, range(10_000))
    assert pixels.shape == (10_000, 28, 28, 1) and pixels.any(axis=(1, 2, 3)).all()


def test_unpacked_files_come_before_gzipped_ones_and_images_without_labels_get_minus_one(tmp_path):
    source = write(tmp_path / "raw")
    (source / "t10k-labels-idx1-ubyte").unlink()
    write(source, packed=True)
    listing = list_source(source)
    assert len(listing) == 13 and listing.keys[0] == "train-images-idx3-ubyte/00000"
    assert "Read the unpacked files, not t10k-images-idx3-ubyte.gz" in notes_of(listing)
    for path in source.glob("*.gz"):
        path.unlink()
    listing = list_source(source)
    assert values(listing) == [*labels(9), -1, -1, -1, -1]
    assert "There are no labels for test: they are -1" in notes_of(listing)
    (source / "train-labels-idx1-ubyte").unlink()
    assert list_source(source).columns == {}
    single = list_source(source / "t10k-images-idx3-ubyte")
    assert len(single) == 4 and single.split_names == ("test",)


def test_emnist_is_turned_upright_and_named_by_its_mapping(tmp_path):
    source = write(tmp_path / "raw", names=("emnist-letters-train", "emnist-letters-test"), packed=True)
    (source / "emnist-letters-mapping.txt").write_text("".join(f"{i} {64 + i} {96 + i}\n" for i in range(1, 27)))
    listing = list_source(source)
    assert listing.files.shape == (5, 7, 1)
    assert np.array_equal(read(listing.files, range(9))[..., 0], images(9, 0).transpose(0, 2, 1))
    assert listing.columns["labels"].attrs["names"][:3] == ("", "Aa", "Bb")
    assert any("transposed" in note for note in listing.notes) and "EMNIST (emnist-letters)" in listing.notes[0]


def test_qmnist_has_eight_numbers_an_image(tmp_path):
    numbers = np.arange(48, dtype=np.int32).reshape(6, 8) % 10
    (tmp_path / "qmnist-train-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images(6))))
    (tmp_path / "qmnist-train-labels-idx2-int.gz").write_bytes(gzip.compress(idx(numbers)))
    listing = list_source(tmp_path)
    assert values(listing) == numbers[:, 0].tolist()
    assert np.array_equal(listing.columns["qmnist"].values, numbers[:, 1:])
    assert len(listing.columns["qmnist"].attrs["names"]) == 7 and "QMNIST" in listing.notes[0]
    (tmp_path / "qmnist-test-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images(2))))
    without = list_source(tmp_path)  # numbers of some images alone are no column
    assert values(without) == [*numbers[:, 0].tolist(), -1, -1] and list(without.columns) == ["labels"]


def test_two_families_are_named(tmp_path):
    source = write(tmp_path / "raw", names=("emnist-digits-train", "emnist-letters-train"))
    refused("more than one dataset of idx files: emnist-digits, emnist-letters", source)
    write(tmp_path / "b"), write(tmp_path / "c")
    for path in source.iterdir():
        path.unlink()
    refused("more than one dataset of idx files: b, c", tmp_path)
    (source / "train-labels-idx1-ubyte").write_bytes(idx(labels(3)))
    refused("no idx file with images", source)
    refused("are both called 'images'", write(tmp_path / "d", names=("test", "t10k")))


BROKEN = {
    "wrong magic": ("images", lambda data: b"\x1f" + data[1:], r"not an idx file: it begins with b'\\x1f"),
    "little-endian": ("images", lambda data: data[3::-1] + data[4:], "not an idx file"),
    "labels in place of images": ("images", lambda _: idx(labels(9)), r"holds uint8 \(9,\); expected images"),
    "floats": ("images", lambda _: idx(images(9).astype(np.float32)), r"holds >f4|float32"),
    "truncated": ("images", lambda data: data[:-1], r"holds 330 bytes, its header promises 331 .*cut short"),
    "cut in its head": ("images", lambda data: data[:10], "not an idx file"),
    "empty": ("images", lambda data: b"", "not an idx file"),
    "two bytes": ("images", lambda data: data[:2], "not an idx file"),
    "no number a label": ("labels", lambda _: idx(np.zeros((9, 0), np.uint8)), "expected labels, integers"),
    "too long": ("images", lambda data: data + b"x", "holds 332 bytes, its header promises 331"),
    "fewer labels": ("labels", lambda _: idx(labels(8)), "8 labels for the 9 images of train-images"),
    "truncated labels": ("labels", lambda data: data[:-2], "holds 15 bytes, its header promises 17"),
    "float labels": ("labels", lambda _: idx(labels(9).astype(np.float32)), "expected labels, integers"),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_named_with_what_is_wrong(tmp_path, case, packed):
    what, change, reason = BROKEN[case]
    source = write(tmp_path / "raw", packed=packed)
    (path,) = source.glob(f"train-{what}*")
    content = change(gzip.decompress(path.read_bytes()) if packed else path.read_bytes())
    path.write_bytes(gzip.compress(content) if packed else content)
    refused(f"train-{what}.*{reason}", source)


def test_a_gzip_is_named_if_damaged_and_unpacked_no_further_than_its_header_says(tmp_path):
    source = write(tmp_path / "raw", packed=True)
    path = source / "train-images-idx3-ubyte.gz"
    whole = path.read_bytes()
    for content in (whole[:-9], whole[:-3] + b"abc", whole[:40] + b"zzzz" + whole[44:]):
        path.write_bytes(content)
        refused(r"train-images-idx3-ubyte.gz: (damaged gzip|holds)", source)
    path.write_bytes(gzip.compress(idx(images(9)) + bytes(50 << 20)))
    refused("holds 332 bytes, its header promises 331", source)
    path.write_bytes(gzip.compress(bytes([0, 0, 8, 3]) + struct.pack(">3I", 2**31, 2**15, 2**15)))
    refused(r"more than the memory there is", source)
