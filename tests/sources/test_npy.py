from __future__ import annotations

import os
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_trees import notes_of, npy, read, refused, values

from fastload.errors import SourceError
from fastload.options.pack import SourceOptions
from fastload.sources.layouts import detect_layout, list_source
from fastload.sources.raw_rows import MemoryRows, RawRows

RNG = np.random.default_rng(0)
N = 6
PIXELS = RNG.integers(0, 256, (N, 5, 7, 3), dtype=np.uint8)
LABELS = np.arange(N) % 3


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def npz(path, packed=False, **arrays):
    (np.savez_compressed if packed else np.savez)(path, **arrays)
    return path


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["images", "x", "X", "data", "features", "imgs"])
@pytest.mark.parametrize("pixels", [PIXELS, PIXELS.transpose(0, 3, 1, 2).copy(), PIXELS[..., 0].copy()])
def test_images_and_labels_of_an_npz(tmp_path, name, pixels, packed):
    source = npz(tmp_path / "a.npz", packed, **{name: pixels}, y=LABELS)
    assert detect_layout(source) == ("arrays", ["a.npz"])
    listing = list_source(source)
    expected = {4: PIXELS, 3: pixels[..., None]}[pixels.ndim]
    assert np.array_equal(read(listing.files, range(N)), expected)
    assert isinstance(listing.files, MemoryRows if packed else RawRows)
    assert values(listing) == LABELS.tolist() and listing.columns["labels"].values.dtype == np.int64
    assert listing.keys[:2] == ("000000", "000001") and listing.split_names == ("all",)
    assert "arrays of 6 rows" in listing.notes[0]


@pytest.mark.parametrize("dtype", ["<u2", ">u2"])
@pytest.mark.parametrize("order", "CF")
def test_a_folder_of_npy_keeps_16_bits_and_any_memory_order(tmp_path, dtype, order):
    pixels, labels = np.array(RNG.integers(0, 65536, (N, 5, 4)), dtype, order=order), np.arange(2 * N).reshape(N, 2) % 2
    np.save(tmp_path / "images.npy", pixels)
    np.save(tmp_path / "labels.npy", np.asfortranarray(labels).astype(">i4"))
    (tmp_path / "readme.md").write_text("x")
    os.utime(tmp_path / "images.npy", ns=(1, 1))
    os.utime(tmp_path / "labels.npy", ns=(2, 2))
    listing = list_source(tmp_path)
    assert listing.mtimes_ns.tolist() == [2] * N  # a changed file next to the images is noticed
    assert np.array_equal(read(listing.files, range(N))[..., 0], pixels) and listing.files.dtype == np.uint16
    assert listing.columns["labels"].values.dtype == np.uint8 and values(listing) == labels.tolist()
    assert "readme.md" in notes_of(listing)


def test_a_single_npy_and_an_archive_of_them(tmp_path):
    np.save(tmp_path / "train.npy", PIXELS)
    listing = list_source(tmp_path / "train.npy")
    assert np.array_equal(read(listing.files, range(N)), PIXELS)
    assert listing.split_names == ("train",) and not listing.columns
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.write(tmp_path / "train.npy", "x/images.npy")
        archive.writestr("x/labels.npy", npy(LABELS))
    listing = list_source(tmp_path / "a.zip")
    assert np.array_equal(read(listing.files, range(N)), PIXELS) and "labels" in listing.columns


SPLITS = {
    "keras": lambda root, a, b: npz(root / "a.npz", x_train=a, y_train=LABELS, x_test=b, y_test=LABELS[:2]),
    "medmnist": lambda root, a, b: npz(
        root / "a.npz", train_images=a, train_labels=LABELS[:, None], test_images=b, test_labels=LABELS[:2, None]
    ),
    "an npz a split": lambda root, a, b: (
        npz(root / "train.npz", x=a, y=LABELS), npz(root / "test.npz", x=b, y=LABELS[:2]), root
    )[2],
    "folders, one without labels": lambda root, a, b: [
        [write(root / "val" / split / f"{name}.npy", npy(values)) for name, values in arrays.items()] and root
        for split, arrays in (("train", {"images": a, "labels": LABELS}), ("test", {"images": b}))
    ][1],
}  # fmt: skip


@pytest.mark.parametrize("way", SPLITS)
def test_splits_are_found_by_names(tmp_path, way):
    listing = list_source(SPLITS[way](tmp_path, PIXELS, PIXELS[:2]))
    assert listing.split_names == ("train", "test") and listing.split.tolist() == [0] * 6 + [1] * 2
    assert np.array_equal(read(listing.files, range(8)), np.concatenate([PIXELS, PIXELS[:2]]))
    labelled = way != "folders, one without labels"
    assert values(listing) == [*LABELS, *(LABELS[:2] if labelled else (-1, -1))]
    assert ("no labels for test" in notes_of(listing)) != labelled
    assert listing.keys[0] == "train/000000" and listing.keys[6] == "test/000000"


def test_token_arrays_are_a_dataset_without_images(tmp_path):
    tokens = RNG.integers(0, 999, (N, 8)).astype(np.int32)
    mask = RNG.integers(0, 2, (N, 8)).astype(bool)
    source = npz(tmp_path / "text.npz", tokens=tokens, attention_mask=mask, labels=LABELS.astype(np.float32))
    listing = list_source(source)
    assert listing.files is None and "no images" in notes_of(listing) and values(listing) == LABELS.tolist()
    for name, stored, dtype in (("tokens", tokens, "i4"), ("attention_mask", mask, "u1")):
        assert np.array_equal(listing.columns[name].values, stored) and listing.columns[name].values.dtype == dtype
    targets = np.linspace(0, 1, N)  # no labels
    listing = list_source(npz(tmp_path / "text.npz", tokens=tokens, y=targets))
    assert list(listing.columns) == ["targets", "tokens"] and values(listing, "targets") == targets.tolist()
    assert "packed as targets" in notes_of(listing)


def test_masks_names_keys_and_text_labels(tmp_path):
    masks = RNG.integers(0, 3, (N, 5, 7, 1), dtype=np.uint8)
    source = npz(
        tmp_path / "a.npz", images=PIXELS.transpose(0, 3, 1, 2), masks=masks, labels=np.array(list("bacbac")),
        filenames=np.array([f"f{i}.png" for i in range(N)]), mean=np.float32(3),
        split=np.array(["test", "train", "train", "valid", "train", "test"]),
    )  # fmt: skip
    listing = list_source(source)
    assert np.array_equal(read(listing.masks.files, range(N)), masks[..., 0]) and listing.masks.present.all()
    assert values(listing) == [1, 0, 2, 1, 0, 2] and listing.columns["labels"].attrs["names"] == ("a", "b", "c")
    assert listing.keys == tuple(f"f{i}.png" for i in range(N))
    assert listing.split_names == ("train", "val", "test") and listing.split.tolist() == [2, 0, 0, 1, 0, 2]
    assert "single values (1): mean" in notes_of(listing)


def test_reserved_and_odd_names_are_renamed_with_a_note(tmp_path):
    odd = dict.fromkeys(("split", "digest", "key", "row", "valid", "my/odd name"), LABELS)
    texts = {"words": np.array(["x"] * N), "class_names": np.array(["a", "b", "c"])}
    source = npz(tmp_path / "a.npz", images=PIXELS, y=LABELS, **odd, **texts)
    listing = list_source(source)
    assert sorted(listing.columns) == ["digest_", "key_", "labels", "my_odd_name", "row_", "split_", "valid_"]
    assert listing.columns["labels"].attrs["names"] == ("a", "b", "c")
    assert "split is packed as split_" in notes_of(listing) and "not numeric: words" in notes_of(listing)


class Evil:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize("packed", [False, True])
def test_arrays_of_objects_are_refused_and_nothing_is_executed(tmp_path, packed):
    evil = np.array([Evil(f"touch {tmp_path / 'canary'}")] * N, dtype=object)
    source = npz(tmp_path / "a.npz", packed, images=PIXELS, labels=evil)
    refused(r"a.npz: labels.npy: an array of Python objects", source)
    np.save(tmp_path / "images.npy", evil, allow_pickle=True)
    refused(r"images.npy: an array of Python objects", tmp_path / "images.npy")
    (tmp_path / "pickle.npy").write_bytes(b"\x80\x04cos\nsystem\n.")
    refused(r"pickle.npy: not an .npy array", tmp_path / "pickle.npy")
    assert not (tmp_path / "canary").exists()


REFUSED = {
    "unequal lengths": ({"images": PIXELS, "labels": LABELS[:4]}, "unequal length: images 6, labels 4"),
    "float images": ({"images": PIXELS / 255}, r"the images are float64 \(6, 5, 7, 3\); .*images \* 255"),
    "float x": ({"x": PIXELS / 255}, r"the images are float64"),
    "int images": ({"images": PIXELS.astype(int)}, r"the images are int64 .*astype\('uint8'\)"),
    "flat images": ({"images": PIXELS.reshape(N, -1)}, r"expected uint8 or uint16 \(N, H, W\)"),
    "NaN labels": ({"images": PIXELS, "y": np.array([0, np.nan, 1, 2, np.nan, 0])}, r"\(2\), in the rows 1, 4"),
    "huge labels": ({"images": PIXELS, "y": np.full(N, 2**63, np.uint64)}, "beyond what int64 holds"),
    "masks of another size": (
        {"images": PIXELS, "masks": np.zeros((N, 7, 5), np.uint8)}, r"masks are uint8 \(6, 7, 5\), the images 5x7"
    ),
    "records": ({"images": PIXELS, "r": np.zeros(N, [("a", "i4")])}, "an array of records"),
    "no rows": ({"images": PIXELS[:0]}, "hold no row"),
    "only texts": ({"words": np.array(["a"])}, "no numeric array"),
    "two of one name": ({"images": PIXELS, "a b": LABELS, "a_b": LABELS}, "a b and a_b would both be a_b"),
    "repeated keys": ({"images": PIXELS, "keys": np.array(["a"] * N)}, "names occur more than once: a"),
    "complex labels": ({"images": PIXELS, "y": np.zeros(N, complex)}, "the labels are complex128"),
    "images for one split": ({"train_x": PIXELS, "train_y": LABELS, "test_y": LABELS}, "none for test"),
    "labels of another shape": (
        {"x": PIXELS, "y": np.zeros((N, 5, 6), np.uint8)}, r"y.npy: the labels are uint8 \(6, 5, 6\)"
    ),
    "negative masks": ({"x": PIXELS, "masks": np.full((N, 5, 7), -1)}, r"masks.npy: the masks hold -1 to -1"),
    "too many splits": (
        {"n": np.zeros(300), "split": np.arange(300).astype(str)}, r"split.npy: names 300 splits; 255 can be"
    ),
    "a column for one split": (
        {"train_x": PIXELS, "train_a": LABELS, "test_x": PIXELS}, "there is an array a for some splits, none for test"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_named(tmp_path, case):
    arrays, reason = REFUSED[case]
    refused(reason, npz(tmp_path / "a.npz", **arrays))


def test_damaged_files_are_named(tmp_path):
    np.save(tmp_path / "images.npy", PIXELS)
    whole = (tmp_path / "images.npy").read_bytes()
    for content, reason in (
        (whole[:-1], "holds 757 bytes, its header promises 758"), (whole[:50], "not an .npy"), (b"", "not an .npy"),
        (whole + b"x", "holds 759 bytes"), (whole.replace(b"(6, 5", b"(-6,5"), "not an .npy"),
        (whole.replace(b"False", b"exit("), "not an .npy"), (b"\x93NUMPY\x09\x00" + whole[8:], "not an .npy"),
    ):  # fmt: skip
        (tmp_path / "images.npy").write_bytes(content)
        refused(f"images.npy: {reason}", tmp_path / "images.npy")
    source = npz(tmp_path / "a.npz", True, images=PIXELS)
    whole = source.read_bytes()
    for content in (b"", whole[:100], whole[:-30], b"PK\x05\x06" + bytes(18), whole[:90] + b"zzzzzz" + whole[96:]):
        source.write_bytes(content)
        refused(r"a\.npz", source)
    damaged = whole.replace(b"images.npy", b"\xffmages.npy")
    at = damaged.rindex(b"PK\1\2")
    for content in (
        damaged[: at + 9] + b"\x08" + damaged[at + 10 :],  # a name that is said to be UTF-8
        damaged[: at + 6] + b"\xeb" + damaged[at + 7 :],  # needs version 23.5 of zip
    ):
        source.write_bytes(content)
        refused(r"a\.npz: cannot be read as an \.npz", source)
    with zipfile.ZipFile(source, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("images.npy", npy(PIXELS))
    refused("not compressed by NumPy", source)
    with zipfile.ZipFile(source, "w", zipfile.ZIP_DEFLATED) as archive:  # a bomb is not unpacked
        archive.writestr("images.npy", npy(np.zeros(0, np.uint8)) + bytes(30 << 20))
    refused(r"holds 31,[0-9,]+ bytes, its header promises", source)


@given(place=st.integers(0, 5000), to=st.integers(0, 255), packed=st.booleans())
def test_a_changed_byte_is_refused_or_read(place, to, packed):
    with tempfile.TemporaryDirectory() as folder:
        source = npz(Path(folder) / "a.npz", packed, images=PIXELS, labels=LABELS)
        data = bytearray(source.read_bytes())
        data[place % len(data)] = to
        source.write_bytes(data)
        try:
            files = list_source(source).files
            if files is not None:
                read(files, [0])
        except SourceError as exc:
            assert "a.npz" in str(exc)


def test_several_npz_and_images_beside_npy_are_no_guess(tmp_path):
    npz(tmp_path / "a.npz", images=PIXELS)
    npz(tmp_path / "b.npz", images=PIXELS)
    refused(r"several .npz files \(2\): a.npz, b.npz", tmp_path)
    (tmp_path / "photo.jpg").write_bytes(b"x")
    assert detect_layout(tmp_path)[0] == "folder"


@pytest.mark.parametrize(("name", "shape"), [("y", (5, 7)), ("masks", (1, 5, 7)), ("labels", (5, 7, 1))])
@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.bool_])
def test_integers_of_the_images_size_are_masks_whatever_their_type(tmp_path, name, shape, dtype):
    masks = RNG.integers(0, 2, (N, *shape)).astype(dtype)
    source = npz(tmp_path / "a.npz", x=PIXELS, **{name: masks})
    listing = list_source(source)
    assert not listing.columns and listing.masks.files.dtype == np.uint8
    assert np.array_equal(read(listing.masks.files, range(N)), masks.reshape(N, 5, 7))
    without = list_source(source, options=SourceOptions(masks="none"))
    assert without.masks is None and not without.columns
    assert f"left alone, as asked for: {name}" in notes_of(without)


def test_arrays_that_savez_named_by_number(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", PIXELS, LABELS)
    listing = list_source(tmp_path / "a.npz")
    assert listing.files is not None and values(listing) == LABELS.tolist()
    assert "arr_0 is taken for images, arr_1 is taken for labels" in notes_of(listing)
    np.savez(tmp_path / "a.npz", PIXELS, LABELS, LABELS)
    refused(r"arrays without names: arr_0 uint8 .*images=\.\.\., labels=", tmp_path / "a.npz")
