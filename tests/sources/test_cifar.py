from __future__ import annotations

import pickle

import numpy as np
import pytest
from small_trees import archived, make, notes_of, read, refused, values

from fastload.sources.arrays.raw_rows import MemoryRows, RawRows
from fastload.sources.layouts import detect_layout, list_source

TEN = tuple("airplane automobile bird cat deer dog frog horse ship truck".split())


def python2_dump(batch):
    """As Python 2 wrote CIFAR: protocol 2, byte strings, the array's bytes as one BINSTRING."""
    parts = [b"\x80\x02}q\x01("]
    for key, value in batch.items():
        parts.append(b"U" + bytes([len(key)]) + key.encode())
        if isinstance(value, np.ndarray):
            head = b"cnumpy.core.multiarray\n_reconstruct\nq\x05cnumpy\nndarray\nq\x06K\x00\x85U\x01b\x87R(K\x01"
            shape = b"".join(b"J" + n.to_bytes(4, "little") for n in value.shape) + b"\x86"
            dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
            parts += [head, shape, dtype, b"T", value.nbytes.to_bytes(4, "little"), value.tobytes(), b"tb"]
        elif isinstance(value, list):
            items = [b"K" + bytes([v]) if isinstance(v, int) else b"U" + bytes([len(v)]) + v.encode() for v in value]
            parts.append(b"](" + b"".join(items) + b"e")
        else:
            parts.append(b"U" + bytes([len(value)]) + value.encode())
    return b"".join([*parts, b"u."])


def batch(seed, count=7, **more):
    rng = np.random.default_rng(seed)
    return {
        "batch_label": f"batch {seed}",
        "labels": rng.integers(0, 10, count).tolist(),
        "data": rng.integers(0, 256, (count, 3072), dtype=np.uint8),
        "filenames": [f"thing_s_{seed:03d}{i:03d}.png" for i in range(count)],
        **more,
    }


def cifar10(root, dump=python2_dump):
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    batches = {f"data_batch_{i}": batch(i) for i in range(1, 6)} | {"test_batch": batch(9, 4)}
    for name, value in batches.items():
        (folder / name).write_bytes(dump(value))
    (folder / "batches.meta").write_bytes(dump({"label_names": list(TEN)}))
    (folder / "readme.html").write_text("<a href=x>")
    return folder, batches


def pixels(data):
    return data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


DUMPS = {"python 2": python2_dump} | {
    f"protocol {p}": lambda value, p=p: pickle.dumps(value, protocol=p) for p in (0, 2, 3, 5)
}


@pytest.mark.parametrize("dump", DUMPS)
def test_cifar10_for_python_is_read_with_labels_names_splits_and_file_names(tmp_path, dump):
    _, batches = cifar10(tmp_path / "x", DUMPS[dump])
    layout, evidence = detect_layout(tmp_path)
    assert layout == "cifar" and any(name.endswith("data_batch_1") for name in evidence)
    listing = list_source(tmp_path / "x")
    assert np.array_equal(read(listing.files, range(39)), pixels(np.concatenate([b["data"] for b in batches.values()])))
    assert values(listing) == [v for b in batches.values() for v in b["labels"]]
    assert listing.columns["labels"].attrs["names"] == TEN
    assert listing.split_names == ("train", "test") and listing.split.tolist() == [0] * 35 + [1] * 4
    assert listing.keys[0] == "cifar-10-batches-py/data_batch_1/thing_s_001000.png" and len(set(listing.keys)) == 39
    in_place = dump in ("python 2", "protocol 3", "protocol 5")
    assert all(isinstance(part, RawRows if in_place else MemoryRows) for part in listing.files.parts)
    assert "CIFAR-10 for Python" in listing.notes[0]
    assert listing.notes[1] == "Ignored the other files (1): cifar-10-batches-py/readme.html."
    inside = list_source(archived(tmp_path / "x", tmp_path / "cifar-10-python.tar"))
    assert inside.keys == listing.keys and np.array_equal(read(inside.files, range(39)), read(listing.files, range(39)))
    cifar10(tmp_path / "y")
    refused(r"CIFAR-10 for Python in x/cifar-10-batches-py/ and CIFAR-10 for Python", tmp_path)


def test_cifar100_has_fine_and_coarse_labels(tmp_path):
    fine, coarse = [f"fine{i}" for i in range(100)], [f"coarse{i}" for i in range(20)]
    for name, count in (("train", 6), ("test", 3)):
        labels = {"fine_labels": list(range(90, 90 + count)), "coarse_labels": list(range(9, 9 + count))}
        value = {key: cells for key, cells in batch(count, count).items() if key != "labels"}
        (tmp_path / name).write_bytes(python2_dump(value | labels))
    (tmp_path / "meta").write_bytes(python2_dump({"fine_label_names": fine, "coarse_label_names": coarse}))
    listing = list_source(tmp_path)
    assert values(listing) == [*range(90, 96), *range(90, 93)]
    assert values(listing, "coarse_labels") == [*range(9, 15), *range(9, 12)]
    assert listing.columns["labels"].attrs["names"] == tuple(fine)
    assert listing.columns["coarse_labels"].attrs["names"] == tuple(coarse)
    assert listing.split.tolist() == [0] * 6 + [1] * 3 and listing.keys[6] == "test/thing_s_003000.png"


@pytest.mark.parametrize("classes", [10, 100])
@pytest.mark.parametrize("zipped", [False, True])
def test_the_binary_version_is_read_by_stride(tmp_path, classes, zipped):
    root = tmp_path / "bin"
    root.mkdir()
    rng = np.random.default_rng(0)
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
    limits = [10]
    if classes == 100:
        names, limits = ["train.bin", "test.bin"], [20, 100]
        (root / "fine_label_names.txt").write_text("\n".join(f"f{i}" for i in range(100)) + "\n")
        (root / "coarse_label_names.txt").write_text("\n".join(f"c{i}" for i in range(20)) + "\n\n")
    else:
        (root / "batches.meta.txt").write_text("\n".join(TEN) + "\n\n")
    records = []
    for name in names:
        labels = [rng.integers(0, limit, (5, 1)) for limit in limits]
        records.append(np.concatenate([*labels, rng.integers(0, 256, (5, 3072))], 1).astype(np.uint8))
        (root / name).write_bytes(records[-1].tobytes())
    listing = list_source(archived(root, tmp_path / "bin.zip") if zipped else root)
    table, order = np.concatenate(records), [7, 0, 9, 3]
    assert listing.layout == "cifar"
    assert np.array_equal(read(listing.files, order), pixels(table[order, len(limits) :]))
    assert np.array_equal(listing.columns["labels"].values, table[:, len(limits) - 1])
    assert len(listing.columns["labels"].attrs["names"]) == classes
    if classes == 100:
        assert np.array_equal(listing.columns["coarse_labels"].values, table[:, 0])
    assert listing.keys[1] == f"{names[0]}/00001"
    (root.parent / "cut").mkdir()
    for content in (b"", b"\0" * 3072, b"\0" * 3074):
        (root.parent / "cut/test_batch.bin").write_bytes(content)
        refused(r"test_batch.bin: [0-9,]+ bytes are no whole number of records of 3073", root.parent / "cut")


def test_a_missing_batch_is_an_error_or_named_as_skipped(tmp_path):
    folder, _ = cifar10(tmp_path)
    (folder / "data_batch_3").unlink()
    (folder / "batches.meta").unlink()
    refused(r"lacks cifar-10-batches-py/data_batch_3, so 1 of 5 parts", tmp_path)
    listing = list_source(tmp_path, on_error="skip")
    assert listing.skipped == (("cifar-10-batches-py/data_batch_3", "is absent with all of its images"),)
    assert len(listing) == 32 and "names" not in listing.columns["labels"].attrs
    assert "no batches.meta" in notes_of(listing)
    (folder / "test_batch").unlink()
    listing = list_source(tmp_path, on_error="skip")
    assert listing.split_names == ("train",) and "no test images" in notes_of(listing)


WRONG = {
    "data of another shape": ({"data": np.zeros((7, 3071), np.uint8)}, r"`data` is uint8 \(7, 3071\)"),
    "no data": ({"data": "x"}, "`data` is bytes; expected"),
    "too few labels": ({"labels": [1]}, "`labels`: 1 labels for 7 images"),
    "a label out of range": ({"labels": [0, 1, 2, 10, 3, 4, 5]}, "image 3 has the label 10; expected 0 to 9"),
    "labels that are names": ({"labels": ["a"] * 7}, "no list of integers"),
    "a program": (None, r"the pickle asks for os\.system"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_batch_is_named_with_what_is_wrong(tmp_path, case):
    folder, _ = cifar10(tmp_path)
    change, reason = WRONG[case]
    (folder / "data_batch_2").write_bytes(python2_dump(batch(2) | change) if change else b"cos\nsystem\n(S'id'\ntR.")
    refused(rf"data_batch_2: .*{reason}", tmp_path)


def test_repeated_file_names_get_their_row(tmp_path):
    value = batch(1) | {"filenames": ["same.png"] * 7}
    (tmp_path / "test_batch").write_bytes(python2_dump(value))
    listing = list_source(tmp_path)
    assert listing.keys[:2] == ("test_batch/same.png", "test_batch/same.png#00001") and len(set(listing.keys)) == 7
    # One long name that the pickle holds once and names seven times: keys must not outgrow the file.
    (tmp_path / "test_batch").write_bytes(pickle.dumps(value | {"filenames": ["a" * 9000] * 7}))
    assert list_source(tmp_path).keys[6] == "test_batch/00006"
    (tmp_path / "test_batch").write_bytes(pickle.dumps(value | {"data": np.asfortranarray(value["data"])}, 5))
    assert np.array_equal(read(list_source(tmp_path).files, range(7)), pixels(value["data"]))


def test_files_named_train_and_test_that_are_no_cifar_are_left_to_others(tmp_path):
    make(tmp_path, "train", "test", "meta", "train.bin", "test.bin")
    assert detect_layout(tmp_path) == ("folder", [])
    refused("no batches of CIFAR", tmp_path, layout="cifar")
