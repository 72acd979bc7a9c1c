from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import h5py
import numpy as np
import pytest
import xxhash

from fastload.errors import FormatError, MissingFileError
from fastload.format.digests import header_digest, row_digests
from fastload.format.header import IMAGES_OFFSET, read_header
from fastload.format.ragged import Column
from fastload.format.texts import text_arrays
from sample_files import write_packed


@pytest.fixture
def images():
    return np.random.default_rng(0).integers(0, 256, (50, 9, 7, 3), dtype=np.uint8)


def _column(num_rows=50, names=("cat", "hund", "größe")):
    return Column(np.arange(num_rows, dtype=np.int64) % len(names), {"names": names})


@pytest.mark.parametrize("num_rows", [1, 2, 49, 50])
def test_rows_lie_back_to_back_from_the_documented_byte(tmp_path, images, num_rows):
    images, masks = images[:num_rows], images[:num_rows, ..., 0] % 12
    columns = {"labels": _column(num_rows)}
    path = write_packed(tmp_path / "a.h5", images, columns, masks=masks, ignore_index=255, chunk_rows=8)
    header = read_header(path)
    field, mask_field = header.fields["images"], header.fields["masks"]
    assert field.offset == IMAGES_OFFSET and field.shape == (9, 7, 3) and field.chunk_rows == min(8, num_rows)
    data = path.read_bytes()
    assert data[IMAGES_OFFSET : IMAGES_OFFSET + images.nbytes] == images.tobytes()
    assert mask_field.attrs["ignore_index"] == 255 and mask_field.offset is not None
    assert data[mask_field.offset : mask_field.offset + masks.nbytes] == masks.tobytes()
    with h5py.File(path) as file:
        np.testing.assert_array_equal(file["images"][()], images)
        np.testing.assert_array_equal(file["labels"][()], np.arange(num_rows) % 3)


def test_header_says_what_was_written(tmp_path, images):
    options = {"splits": {"train": 40, "val": 10}, "seed": 5, "shuffled": False}
    header = read_header(write_packed(tmp_path / "a.h5", images, {"labels": _column()}, **options))
    assert header.version == 1 and header.num_rows == 50 and header.seed == 5 and not header.shuffled
    assert header.splits == {"train": range(40), "val": range(40, 50)}
    assert header.fields["labels"].names == ("cat", "hund", "größe")
    names = tuple(f"n{i:08d} some longer class name" for i in range(20_000))  # so many fit, too
    many = write_packed(tmp_path / "b.h5", images, {"labels": Column(np.arange(50), {"names": names})})
    assert read_header(many).fields["labels"].names == names
    assert list(header.fields)[:2] == ["images", "labels"]
    assert header.attrs["fastload_version"] == 1
    assert all(field.offset is not None for field in header.fields.values())


def test_digests_cover_pixels_labels_attributes_and_names_and_equal_arrays_give_equal_bytes(tmp_path, images):
    def digest(images=images, **options):
        options = {"columns": {"labels": _column()}, **options}
        return read_header(write_packed(tmp_path / "x.h5", images, **options)).header_digest

    base = digest()
    other = images.copy()
    other[33, 4, 2, 1] ^= 1
    changed = [
        digest(other),
        digest(columns={"labels": Column((np.arange(50) + 1) % 3, {"names": ("cat", "hund", "größe")})}),
        digest(columns={"labels": _column(names=("cat", "hund", "grösse"))}),
        digest(seed=1),
        digest(splits={"train": 40, "val": 10}),
        digest(chunk_rows=7),
    ]
    assert digest() == base
    assert len({base, *changed}) == 7
    same = [write_packed(tmp_path / name, images, {"labels": _column()}) for name in ("a.h5", "b.h5")]
    assert same[0].read_bytes() == same[1].read_bytes()
    with h5py.File(same[0]) as file:
        assert file.attrs["header_digest"] == header_digest(file).encode()
    a, b = np.arange(6, dtype=np.int64).reshape(3, 2), np.array([b"x", b"yy", b"zzz"])
    found = row_digests({"b": b, "a": a})  # in the order of the names
    assert int(found[1]) == xxhash.xxh3_64_intdigest(a[1].tobytes() + b"yy\0")


def _virtual(file):
    layout = h5py.VirtualLayout(shape=(50,), dtype="u1")
    layout[:] = h5py.VirtualSource("other.h5", "x", shape=(50,))
    file.create_virtual_dataset("extra", layout)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file.__setitem__("extra", h5py.ExternalLink("other.h5", "/x")), "link into another file"),
        (
            lambda file: file.__setitem__("extra", h5py.SoftLink("/nowhere")),
            "damaged, or a link to nothing",
        ),
        (lambda file: file.create_dataset("extra", (50,), "u1", external=[("other.bin", 0, 50)]), "in another file"),
        (_virtual, "virtual dataset"),
        (lambda file: file.create_dataset("extra", data=["a"] * 50, dtype=h5py.string_dtype()), "type object"),
        (lambda file: file.create_dataset("extra", data=np.zeros(49)), "49 rows"),
        (lambda file: file.create_group("extra"), "is a group"),
        (lambda file: (file["split"].__setitem__(3, 1), file["key"].__setitem__(3, b"x")), "one contiguous run"),
        (lambda file: file.attrs.modify("fastload_version", 3), "format version 3"),
    ],
)
def test_unsafe_newer_or_mismatched_files_are_refused_by_name(tmp_path, images, change, message):
    path = write_packed(tmp_path / "a.h5", images, splits={"train": 40, "val": 10})
    with h5py.File(path, "r+") as file:
        change(file)
    with pytest.raises(FormatError, match=message):
        read_header(path)


def test_absent_folder_foreign_empty_and_truncated_files_are_named_errors(tmp_path, images):
    with pytest.raises(MissingFileError, match="no such file"):
        read_header(tmp_path / "absent.h5")
    (tmp_path / "absent.h5.part").touch()
    with pytest.raises(MissingFileError, match=r"absent.h5: not complete yet, only absent.h5.part is there.*again"):
        read_header(tmp_path / "absent.h5")
    with pytest.raises(FormatError, match="a folder"):
        read_header(tmp_path)
    for content, message in [(b"", "empty"), (b"not hdf5" * 100, "not an HDF5 file")]:
        (tmp_path / "bad.h5").write_bytes(content)
        with pytest.raises(FormatError, match=message):
            read_header(tmp_path / "bad.h5")
    path = write_packed(tmp_path / "a.h5", images)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(FormatError, match="truncated"):
        read_header(path)


@pytest.mark.parametrize("locking", [True, False, "best-effort", None])
def test_a_file_that_the_user_has_open_is_read_all_the_same(tmp_path, images, locking):
    path = write_packed(tmp_path / "a.h5", images)
    with h5py.File(path, locking=locking) as file:
        assert read_header(path).num_rows == len(file["images"])


def test_compressed_foreign_and_big_endian_datasets_have_no_offset(tmp_path, images):
    path = tmp_path / "foreign.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=images, chunks=(5, 9, 7, 3), compression="gzip", shuffle=True)
        file.create_dataset("labels", data=np.arange(50, dtype=">i4"))
        file.create_dataset("cut", data=images, chunks=(10, 9, 4, 3))
        file.create_dataset("whole", data=images)
        file.create_dataset("other", data=np.arange(3))
        file.create_group("group")
    header = read_header(path)
    assert header.version is None and header.splits == {} and header.num_rows == 50
    assert header.fields["images"].offset is None and header.fields["images"].filters == ("shuffle", "deflate")
    assert header.fields["labels"].offset is None and header.fields["cut"].offset is None
    assert header.fields["whole"].offset is not None
    assert "other" not in header.fields and "group" not in header.fields
    assert header.header_digest == read_header(path).header_digest


def test_hugging_face_hdf5_builder_loads_a_packed_file(tmp_path, images):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    values, counts = text_arrays([[b"a dog", "zwei Hündchen".encode()][: row % 3] for row in range(50)])
    columns = {"labels": _column(), "caption": Column(values), "num_captions": Column(counts)}
    path = write_packed(tmp_path / "a.h5", images, columns, splits={"train": 40, "val": 10})
    loaded = datasets.load_dataset("hdf5", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    assert len(loaded) == 50
    np.testing.assert_array_equal(np.array(loaded[7]["images"], np.uint8), images[7])
    assert loaded[7]["labels"] == 7 % 3
    assert loaded[7]["caption"] == [b"a dog", b""] and loaded[7]["num_captions"] == 1
    assert loaded[8]["caption"][1].decode() == "zwei Hündchen"


def test_h5dump_reads_it(tmp_path, images):
    if shutil.which("h5dump") is None:
        pytest.skip("needs h5dump: `apt-get install hdf5-tools`")
    path = write_packed(tmp_path / "a.h5", images[:1])
    assert "images" in subprocess.run(["h5dump", "-H", path], capture_output=True, text=True, check=True).stdout


def test_the_golden_file_of_version_1_is_read_as_it_was_written():
    path = Path(__file__).parents[1] / "data" / "format_v1.h5"
    header = read_header(path)
    images = (np.arange(10 * 5 * 4 * 3) * 7 % 251).astype(np.uint8).reshape(10, 5, 4, 3)
    assert header.version == 1 and header.num_rows == 10 and header.seed == 11 and header.shuffled
    assert header.splits == {"train": range(7), "val": range(7, 10)}
    assert list(header.fields) == [
        "images", "masks", "labels", "bbox", "digest", "digest_fields", "key", "split",
    ]  # fmt: skip
    assert header.fields["images"].chunks == (4, 5, 4, 3) and header.fields["images"].offset == 4096
    assert header.fields["labels"].names == ("cat", "dog", "größe")
    assert header.fields["masks"].attrs == {"ignore_index": 3}
    assert header.header_digest == "fa387a44de290a992c38fec339ea0d92"
    data = np.frombuffer(path.read_bytes(), np.uint8)
    np.testing.assert_array_equal(data[4096 : 4096 + images.size].reshape(images.shape), images)
    with h5py.File(path) as file:
        assert int(file["digest"][4]) == xxhash.xxh3_64_intdigest(
            images[4].tobytes() + (images[4, ..., 0] % 4).tobytes()
        )
        assert file["key"][3] == b"train/3.png"
