import pickle
from pathlib import Path

import numpy as np
import pytest
from small_trees import notes_of, npy, refused, refused_or_skipped, values, write_tar

from fastload.errors import MissingFileError, OptionError
from fastload.options.pack import SourceOptions
from fastload.sources.layouts import detect_layout, list_source
from fastload.sources.listing import Listing


def shard(path: Path, samples: dict[str, dict[str, bytes]]) -> Path:
    """A shard of samples by key: field -> content."""
    return write_tar(
        path, [(f"{key}.{field}", data) for key, fields in samples.items() for field, data in fields.items()]
    )


def contents(listing: Listing) -> list[bytes]:
    files = pickle.loads(pickle.dumps(listing.files))
    return [files.read(i) for i in range(len(listing))]


def test_a_shard_becomes_samples_in_its_order(tmp_path: Path) -> None:
    members = {
        "sub/b.JPG": b"image b", "sub/b.cls": b"7\n", "sub/b.index": b"1", "sub/b.txt": b"a caption",
        "sub/b.json": b'{"size": 3, "score": 0.5, "ok": true, "url": "x", "of": [1], "index": 5}',
        "__meta__": b"{}", "README": b"",
        "sub/a.png": b"image a", "sub/a.cls": b" -1 ", "sub/a.index": b"0", "sub/a.txt": b"another",
        "sub/a.json": b'{"size": 4, "score": null, "ok": false, "url": "y", "of": [], "index": 6}',
    }  # fmt: skip
    path = write_tar(tmp_path / "x.tar", members)
    assert detect_layout(path) == ("webdataset", ["sub/b.JPG", "sub/b.cls"])
    listing = list_source(path)
    assert listing.layout == "webdataset" and listing.split_names == ("all",)
    assert listing.keys == ("sub/b.JPG", "sub/a.png") and contents(listing) == [b"image b", b"image a"]
    assert values(listing) == [7, -1] and listing.columns["labels"].values.dtype == np.int64
    assert values(listing, "index") == [1, 0] and values(listing, "json_index") == [5, 6]
    assert values(listing, "size") == [3, 4] and values(listing, "ok") == [1, 0]
    assert listing.columns["score"].values.dtype == np.float64 and np.isnan(listing.columns["score"].values[1])
    assert set(listing.columns) == {"labels", "index", "json_index", "size", "ok", "score", "caption", "num_captions"}
    assert listing.sizes.tolist() == [7, 7] and set(listing.mtimes_ns.tolist()) == {path.stat().st_mtime_ns}
    assert "Captions by 'txt'." in listing.notes
    assert "not numbers in every sample: url (str), of (list)" in notes_of(listing)
    assert "no fields of a sample were ignored (2): __meta__, README." in notes_of(listing)


def test_shards_in_folders_are_one_dataset_with_splits_by_name(tmp_path: Path) -> None:
    for name, keys in {"train-9": "ab", "train-10": "ac", "val/x-000000": "a"}.items():
        shard(tmp_path / f"{name}.tar", {key: {"jpg": f"{name}{key}".encode(), "cls": b"3"} for key in keys})
    (tmp_path / "sizes.json").write_text("{}")
    listing = list_source(tmp_path)
    assert listing.split_names == ("train", "val") and listing.split.tolist() == [0, 0, 0, 0, 1]
    assert listing.keys == (
        "train-9.tar/a.jpg", "train-9.tar/b.jpg", "train-10.tar/a.jpg", "train-10.tar/c.jpg", "val/x-000000.tar/a.jpg",
    )  # fmt: skip
    assert contents(listing)[2:] == [b"train-10a", b"train-10c", b"val/x-000000a"]
    assert "Ignored other files (1): sizes.json." in listing.notes
    write_tar(tmp_path / "more.tar", {"a.jpg": b"1", "a.cls": b"1"})
    listing = list_source(tmp_path)
    assert listing.split_names == ("all",) and "Not every shard names its split" in notes_of(listing)


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ([("a.jpg", b""), ("b.jpg", b""), ("a.cls", b"1"), ("b.cls", b"2")], "a has fields that are not adjacent"),
        ([("a.jpg", b""), ("a.JPG", b""), ("a.cls", b"1")], "a has the field 'jpg' twice"),
        ([("a.jpg", b""), ("a.cls", b"one")], r"a has in 'cls' b'one', not an integer as text"),
        ([("a.jpg", b""), ("a.cls", b"%d" % 2**64)], "which does not fit 64 bits"),
        ([("a.jpg", b""), ("a.json", b"{")], "no JSON that can be read"),
        ([("a.jpg", b""), ("a.json", b"[" * 99_999)], "no JSON that can be read"),
        ([("a.jpg", b""), ("a.npy", b"x" * 200)], "a has in 'npy' no array that can be read"),
        ([("a.jpg", b""), ("a.npy", npy(np.zeros(9)).replace(b"'shape'", b"'sha(\0("))], "no array that can be read"),
        ([("a.jpg", b""), ("a.npy", npy(np.zeros(9))[:-8])], r"an array \(9,\) of float64 in 64 bytes"),
        ([("a.jpg", b""), ("a.npy", npy([{}], allow_pickle=True))], "array of Python objects, which is a pickle"),
        ([("a.jpg", b""), ("a.cls", b"1"), ("c.cls", b"1")], "c has no image, only cls"),
        ([("a.jpg", b""), ("a.cls", b"1"), ("c.jpg", b"")], "c has no field 'cls'"),
    ],
)
def test_a_sample_that_contradicts_itself_is_named(tmp_path: Path, members: list, reason: str) -> None:
    good = {"good.jpg": b"good", "good.cls": b"5"}
    if not any(name.endswith(".cls") for name, _ in members):
        good = {"good.jpg": b"good"} | {f"good.{k}": v for k, v in (("json", b'{"x": 1}'), ("npy", npy(np.zeros(9))))
                                        if any(name.endswith(k) for name, _ in members)}  # fmt: skip
    path = write_tar(tmp_path / "x.tar", [*good.items(), *members])
    refused(reason, path, "webdataset")
    listing = list_source(path, "webdataset", "skip")
    assert listing.keys[0] == "good.jpg" and contents(listing)[0] == b"good" and listing.skipped


@pytest.mark.parametrize("kind", ["pyd", "pkl", "pickle", "pth", "pt"])
def test_pickles_are_refused_and_never_read(tmp_path: Path, kind: str) -> None:
    class Bomb:
        def __reduce__(self):
            return (Path(tmp_path / "exploded").touch, ())

    path = write_tar(tmp_path / "x.tar", {"a.jpg": b"", "a.cls": b"1", f"a.{kind}": pickle.dumps(Bomb())})
    listing = refused_or_skipped(rf"a.{kind} is a pickle, which can run any program", path)
    assert values(listing) == [1] and set(listing.columns) == {"labels"}
    assert f"Fields that are pickles were left out ({kind})" in notes_of(listing)
    assert not (tmp_path / "exploded").exists()


def test_a_dot_in_the_stem_is_reported(tmp_path: Path) -> None:
    names = [f"img_{n}.5_{n}" for n in range(3)]
    path = write_tar(tmp_path / "x.tar", [(f"{n}.{f}", b"1") for n in names for f in ("jpg", "cls")])
    refused(r"img_0 has the field '5_0.cls': its files have a dot before their suffix", path, "webdataset")
    some = [("a.jpg", b""), ("a.cls", b"1"), ("b.jpg", b""), ("b.cls", b"1"), ("c.x.jpg", b""), ("c.x.cls", b"1")]
    path = write_tar(tmp_path / "y.tar", some)
    refused(r"\(1\): c has the field 'x.jpg'", path)
    assert list_source(path, on_error="skip").keys == ("a.jpg", "b.jpg")


def test_several_images_in_a_sample_need_a_word(tmp_path: Path) -> None:
    fields = {"left.jpg": b"l", "right.jpg": b"r", "cls": b"1"}
    path = shard(tmp_path / "x.tar", {"a": fields, "b": fields})
    refused(r"a has 2 images.*left.jpg \(2\), right.jpg \(2\).*--image-column left.jpg", path)
    listing = list_source(path, options=SourceOptions(image_column="right.jpg"))
    assert contents(listing) == [b"r", b"r"]
    with pytest.raises(OptionError, match=r"has the field --image-column 'middle.jpg'; there are cls, left.jpg"):
        list_source(path, options=SourceOptions(image_column="middle.jpg"))
    path = write_tar(tmp_path / "y.tar", {"a.jpg": b"a", "a.small.jpg": b"s", "a.cls": b"1"})
    listing = list_source(path)
    assert contents(listing) == [b"a"] and "samples were not packed: small.jpg" in notes_of(listing)


def test_masks_may_be_absent_and_be_left_out(tmp_path: Path) -> None:
    # The key ends at the first dot of the name, and fields are in lower case.
    path = shard(
        tmp_path / "x.tar", {"a.b/c": {"JPEG": b"a", "Seg.PNG": b"m", "ID": b"1"}, "b": {"jpg": b"b", "id": b"2"}}
    )
    listing = list_source(path)
    assert listing.keys == ("a.b/c.JPEG", "b.jpg") and values(listing, "id") == [1, 2]
    masks = listing.masks
    assert masks is not None and masks.present.tolist() == [True, False] and masks.ignore_index == 255
    assert masks.files.read(0) == b"m"
    assert list_source(path, options=SourceOptions(masks="none")).masks is None


def test_arrays_without_images_are_columns(tmp_path: Path) -> None:
    tokens = np.arange(12, dtype=">i4").reshape(2, 6)
    fields = [{"tokens.npy": npy(tokens[i]), "fat.npy": npy(np.zeros(i)), "cls": b"%d" % i} for i in range(2)]
    listing = list_source(shard(tmp_path / "x.tar", {"0": fields[0], "1": fields[1]}))
    assert listing.layout == "webdataset"
    assert listing.files is None and listing.keys == ("0", "1") and values(listing) == [0, 1]
    assert listing.columns["tokens_npy"].values.dtype == np.int32
    np.testing.assert_array_equal(listing.columns["tokens_npy"].values, tokens)
    assert "'fat.npy' is not packed, since its arrays are not numbers of one shape" in notes_of(listing)


def test_labels_are_chosen_by_usual_name_or_by_the_user(tmp_path: Path) -> None:
    members = {"a.jpg": b"", "a.json": b'{"label": 3, "key": 4, "kind": 5, "score": 0.5}'}
    path = write_tar(tmp_path / "x.tar", members)
    assert values(list_source(path)) == [3]
    listing = list_source(path, options=SourceOptions(labels=("kind",)))
    assert values(listing) == [5] and values(listing, "key_") == [4] and values(listing, "label") == [3]
    with pytest.raises(OptionError, match="there is no column sort for --labels; there are key_, kind, label, score"):
        list_source(path, options=SourceOptions(labels=("sort",)))
    with pytest.raises(OptionError, match="the column 'score' holds float64 numbers; labels are integers"):
        list_source(path, options=SourceOptions(labels=("score",)))


@pytest.mark.parametrize(
    "names",
    [
        ["cat/1.jpg", "cat/2.jpg", "dog/1.jpg"],
        ["1.jpg", "2.jpg", "README.txt"],
        ["cat/1.jpg", "cat/1.txt", "dog/2.jpg", "dog/2.txt"],  # captions in class folders
        ["images/1.jpg", "images/2.jpg", "labels/1.txt", "labels/2.txt"],
    ],
)
def test_other_tars_are_not_webdataset(tmp_path: Path, names: list[str]) -> None:
    path = write_tar(tmp_path / "a" / "x.tar", dict.fromkeys(names, b""))
    assert detect_layout(path)[0] == "folder" and detect_layout(path.parent)[0] == "folder"
    path.write_bytes(b"no tar")
    assert detect_layout(path.parent)[0] == "folder"


def test_unsafe_members_are_named(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", {"a.jpg": b"a", "a.cls": b"1", "../b.jpg": b"b", "../b.cls": b"2"})
    listing = refused_or_skipped(r"../b.jpg has `..` in its name", path)
    assert listing.keys == ("a.jpg",) and listing.skipped[0][0] == "../b.jpg"
    assert "../b.cls has `..` in its name" in notes_of(listing)


@pytest.mark.parametrize("odd", ["{}", '{"label": null}', '{"label": NaN}', '{"label": Infinity}', '{"label": "cat"}'])
def test_a_sample_whose_json_has_no_usable_label_is_named_and_takes_no_labels_from_the_others(
    tmp_path: Path, odd: str
) -> None:
    texts = enumerate((b'{"label": 3}', odd.encode(), b'{"label": 1}'))
    path = shard(tmp_path / "a.tar", {str(i): {"jpg": b"image", "json": text} for i, text in texts})
    listing = refused_or_skipped(r"not as the others \(1\): 1 has .*label", path)
    assert values(listing) == [3, 1] and [key for key, _ in listing.skipped] == ["1"]


def test_text_labels_in_the_json_become_classes(tmp_path: Path) -> None:
    texts = enumerate(b'{"label": %s, "of": "x"}' % label for label in (b'"dog"', b"5", b'"cat"', b'"dog"'))
    path = shard(tmp_path / "a.tar", {str(i): {"jpg": b"", "json": text} for i, text in texts})
    listing = refused_or_skipped(r"not as the others \(1\): 1 has in 'json' the label 5", path)
    assert values(listing) == [1, 0, 1] and listing.columns["labels"].attrs == {"names": ("cat", "dog")}
    assert list(listing.columns) == ["labels"] and "of (str)" in notes_of(listing)


@pytest.mark.parametrize(("field", "message"), [("cls", "are not adjacent"), ("pyd", "pickle")])
def test_images_do_not_lose_labels_that_lie_apart_or_are_pickles(tmp_path: Path, field: str, message: str) -> None:
    members = [(f"{k:03d}.{kind}", b"1") for k in range(100) for kind in ("png", field)]
    members.sort(key=lambda member: field == "cls" and member[0].endswith(".cls"))  # all images first
    first = write_tar(tmp_path / "of" / "s-0.tar", members)
    for path in (first, first.parent):
        assert detect_layout(path)[0] == "webdataset"
        refused(message, path)


def test_a_folder_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=f"Patterns are not expanded.*give the folder.*: {tmp_path}"):
        list_source(tmp_path / "train-{000000..000123}.tar")
    (tmp_path / "x.tar.gz").write_bytes(b"")
    refused(r"holds no shard: no .tar. Unpack them first", tmp_path, "webdataset")
    write_tar(tmp_path / "x.tar", {"README": b""})
    refused("holds no sample: no member is named like", tmp_path, "webdataset")
    for number in (0, 1, 4):
        shard(tmp_path / f"a-{number:06d}.tar", {str(number): {"jpg": b"x", "cls": b"1"}})
    assert "missing by the numbers of the others (2): a-000002.tar, a-000003.tar" in notes_of(list_source(tmp_path))
