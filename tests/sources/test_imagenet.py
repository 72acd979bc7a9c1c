"""ImageNet in all its forms, made small: the real names, wnids and tables, contents that are their own names."""

import gzip
import io
import pickle
import sys
import tarfile
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image
from small_trees import archived, make, notes_of, refused, refused_or_skipped, tar_of, values, write, write_tar

from fastload.errors import MissingExtraError, SourceError
from fastload.pack import pack_images
from fastload.sources.imagenet import parse_ground_truth
from fastload.sources.layouts import detect_layout, list_source
from fastload.sources.listing import Listing

CAT, DOG, EEL = "n02123045", "n02085620", "n01440764"  # sorted: EEL 0, DOG 1, CAT 2
WORDS = {CAT: "tabby, tabby cat", DOG: "Chihuahua", EEL: "tench, Tinca tinca"}
IDS = {1: CAT, 2: EEL, 3: DOG}  # of ILSVRC2012: neither sorted nor the reverse
TRUTH = [3, 1, 1, 2]  # the classes of validation images 1 to 4
VAL = [f"ILSVRC2012_val_{n:08d}.JPEG" for n in range(1, 5)]
VAL_LABELS = [1, 2, 2, 0]


def class_tars(format: int = tarfile.GNU_FORMAT) -> dict[str, bytes]:
    """The members of the train archive: one archive a class, of three images each."""
    names = {wnid: [f"{wnid}_{n}.JPEG" for n in (10, 2, 33)] for wnid in (DOG, CAT, EEL)}
    return {f"{wnid}.tar": tar_of({name: name.encode() for name in of}, format) for wnid, of in names.items()}


def meta_mat() -> bytes:
    savemat = pytest.importorskip("scipy.io", reason="scipy is not installed").savemat
    kinds = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("num_children", "O")]
    rows = [(i, wnid, WORDS[wnid], 0) for i, wnid in IDS.items()] + [(1001, "n00001740", "entity", 3)]
    out = io.BytesIO()
    savemat(out, {"synsets": np.array(rows, kinds).reshape(-1, 1)})
    return out.getvalue()


def devkit() -> dict[str, bytes]:
    truth = "".join(f"{n}\n" for n in TRUTH).encode()
    top = "ILSVRC2012_devkit_t12/data"
    return {f"{top}/meta.mat": meta_mat(), f"{top}/ILSVRC2012_validation_ground_truth.txt": truth}


@pytest.fixture
def originals(tmp_path: Path) -> Path:
    write_tar(tmp_path / "ILSVRC2012_img_train.tar", class_tars())
    write_tar(tmp_path / "ILSVRC2012_img_val.tar", {name: name.encode() for name in reversed(VAL)})
    (tmp_path / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(gzip.compress(tar_of(devkit())))
    return tmp_path


def contents(listing: Listing) -> list[str]:
    files = pickle.loads(pickle.dumps(listing.files))
    return [files.read(i).decode() for i in range(len(listing))]


def test_the_original_archives_are_read_in_place_and_ids_mapped_to_sorted_wnids(originals: Path) -> None:
    assert detect_layout(originals)[0] == "imagenet"
    listing = list_source(originals)
    assert listing.layout == "imagenet" and listing.split_names == ("train", "val")
    train = [f"{wnid}_{n}.JPEG" for wnid in (EEL, DOG, CAT) for n in (10, 2, 33)]
    assert contents(listing) == train + VAL
    assert listing.keys[0] == f"ILSVRC2012_img_train.tar/{EEL}.tar/{EEL}_10.JPEG"
    assert listing.keys[-1] == f"ILSVRC2012_img_val.tar/{VAL[-1]}"
    assert values(listing) == [0, 0, 0, 1, 1, 1, 2, 2, 2, *VAL_LABELS]
    assert listing.columns["labels"].attrs == {"names": (EEL, DOG, CAT), "words": (WORDS[EEL], WORDS[DOG], WORDS[CAT])}
    assert [listing.files.read_head(i, 5) for i in (0, 12)] == [b"n0144", b"ILSVR"]
    assert listing.sizes.tolist() == [len(name) for name in train + VAL]
    assert {path.stat().st_mtime_ns for path in originals.glob("*.tar")} == set(listing.mtimes_ns.tolist())


def test_archives_extracted_folders_and_kaggle_agree(originals: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    whole = list_source(originals)
    want = dict(zip(contents(whole), values(whole), strict=True))
    root = tmp_path_factory.mktemp("more")
    train = [f"{wnid}/{wnid}_{n}.JPEG" for wnid in WORDS for n in (10, 2, 33)]
    val_wnids = [IDS[n] for n in TRUTH]
    extracted = make(root / "a", *[f"train/{name}" for name in train])
    make(extracted, *[f"val/{wnid}/{name}" for wnid, name in zip(val_wnids, VAL, strict=True)])
    kaggle = make(root / "k", *[f"ILSVRC/Data/CLS-LOC/train/{name}" for name in train])
    make(kaggle / "ILSVRC", *[f"Data/CLS-LOC/val/{name}" for name in VAL], "Annotations/CLS-LOC/val/x.xml")
    make(kaggle / "ILSVRC", "Data/CLS-LOC/test/ILSVRC2012_test_00000001.JPEG", "ImageSets/CLS-LOC/val.txt")
    (kaggle / "LOC_synset_mapping.txt").write_text("".join(f"{k} {WORDS[k]}\n" for k in sorted(WORDS)))
    rows = [f"{n[:-5]},{w} 1 2 3 4 {w} 5 6 7 8 ".replace(",", ',"') + '"' for n, w in zip(VAL, val_wnids, strict=True)]
    (kaggle / "LOC_val_solution.csv").write_text("\n".join(["ImageId,PredictionString", *reversed(rows)]))
    archived(kaggle, root / "kaggle.zip")
    for path in (extracted, kaggle, root / "kaggle.zip"):
        assert detect_layout(path)[0] == "imagenet"
        listing = list_source(path)
        found = dict(zip([key.rpartition("/")[2] for key in listing.keys], values(listing), strict=True))
        if path == extracted:
            assert "words" not in listing.columns["labels"].attrs
            assert "classes have only wnids as names" in notes_of(listing)
        else:
            assert found.pop("ILSVRC2012_test_00000001.JPEG") == -1
            assert listing.split_names == ("train", "val", "test")
            assert listing.columns["labels"].attrs == whole.columns["labels"].attrs
            assert "test: 1 images, without labels (-1)." in listing.notes
        assert found == want


@pytest.mark.parametrize("name", ["ILSVRC2012_img_train.tar", "renamed.tar"])
@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT])
def test_the_train_archive_alone_and_unpacked_once(tmp_path: Path, name: str, format: int) -> None:
    (tmp_path / name).write_bytes(tar_of(class_tars(format), format))
    listing = list_source(tmp_path / name)
    assert listing.layout == "imagenet" and values(listing) == [0] * 3 + [1] * 3 + [2] * 3
    assert listing.split_names == (("train",) if name.startswith("ILSVRC") else ("all",))
    assert listing.keys[3] == f"{DOG}.tar/{DOG}_10.JPEG" and contents(listing)[3] == f"{DOG}_10.JPEG"
    assert "label = rank of the sorted wnid" in notes_of(listing)
    (tmp_path / name).unlink()
    (tmp_path / "train").mkdir()  # unpacked once
    for member, data in class_tars().items():
        (tmp_path / "train" / member).write_bytes(data)
    listing = list_source(tmp_path)
    assert listing.split_names == ("train",) and values(listing) == [0] * 3 + [1] * 3 + [2] * 3
    assert listing.keys[0] == f"train/{EEL}.tar/{EEL}_10.JPEG" and contents(listing)[0] == f"{EEL}_10.JPEG"
    assert "There is no split 'val'." in listing.notes


def test_damage_in_a_class_archive_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ILSVRC2012_img_train.tar"
    whole = class_tars()[f"{CAT}.tar"]
    for bad, message in {
        whole[:512]: "cut short",
        whole[:1024]: "no end mark",  # or the next archive's headers would be taken for its own
        whole[:1536]: "cut short",
        whole[:2560]: "cut short",
        whole[:-9728]: "no end mark|damaged|cut short",
        b"": "is an empty file",
        b"x" * 2000: "damaged",
        gzip.compress(whole): r"compressed as a whole \(gzip\)",
        tar_of([("a.JPEG", b""), ("a.JPEG", b"")]): "more than once: a.JPEG",
        tar_of({}): f"without an image.*{CAT}.tar",
    }.items():
        path.write_bytes(tar_of({**class_tars(), f"{CAT}.tar": bad}))
        with pytest.raises(SourceError, match=message) as error:
            list_source(path)
        assert f"{CAT}.tar" in str(error.value)
        listing = list_source(path, on_error="skip")
        assert set(values(listing)) == {0, 1} and len(listing) == 6
        assert bad == tar_of({}) or listing.skipped[0][0] == f"{CAT}.tar"
    path.write_bytes(tar_of(class_tars())[:-12000])
    refused("cut short", path)


def test_links_and_bad_names_in_a_class_archive_are_refused(tmp_path: Path) -> None:
    inner = write_tar(tmp_path / f"{CAT}.tar", {f"{CAT}_1.JPEG": b"1", f"../{CAT}_2.JPEG": b"2"}).read_bytes()
    for path in (write_tar(tmp_path / "x.tar", {f"{CAT}.tar": inner}), tmp_path):
        listing = refused_or_skipped(r"`\.\.` in its name", path)
        assert [key for key, _ in listing.skipped] == [f"{CAT}.tar/../{CAT}_2.JPEG"]
        assert listing.keys == (f"{CAT}.tar/{CAT}_1.JPEG",)


def test_validation_images_without_a_truth_are_an_error_that_says_what_to_do(originals: Path) -> None:
    (originals / "ILSVRC2012_devkit_t12.tar.gz").unlink()
    for path in (originals, originals / "ILSVRC2012_img_val.tar"):
        refused(r"classes of 4 validation images.*LOC_val_solution.csv, or ILSVRC2012_dev", path)
        listing = list_source(path, on_error="skip")
        assert values(listing)[-4:] == [-1] * 4 and listing.split_names[-1] == "val"
        assert "Images without a class have the label -1" in notes_of(listing)


def test_without_scipy_the_devkit_names_its_extra(originals: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(MissingExtraError, match=r"pip install scipy"):
        list_source(originals)
    (originals / "ILSVRC2012_img_val.tar").unlink()  # then only the words are missing
    listing = list_source(originals)
    assert "words" not in listing.columns["labels"].attrs
    assert "words of the classes stay unknown" in notes_of(listing)


def test_an_unpacked_devkit_serves_too_and_its_damage_is_named(originals: Path) -> None:
    (originals / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(b"\x1f\x8b broken")
    refused(r"devkit_t12.tar.gz is damaged or cut short", originals)
    (originals / "ILSVRC2012_devkit_t12.tar.gz").write_bytes(gzip.compress(bytes(2**26 + 1), 1))
    refused("holds more than 67108864 bytes", originals)
    (originals / "ILSVRC2012_devkit_t12.tar.gz").unlink()
    for name, data in devkit().items():
        make(originals, name)
        (originals / name).write_bytes(data)
    truth = originals / "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt"
    truth.write_bytes(truth.read_bytes() + b"2\n")
    listing = list_source(originals)
    assert values(listing)[-4:] == VAL_LABELS
    assert "but have no file (1): ILSVRC2012_val_00000005." in notes_of(listing)
    meta = bytearray(truth.with_name("meta.mat").read_bytes())
    meta[128::8] = b"\xfe" * len(meta[128::8])  # the types of elements: SciPy's reader crashes
    truth.with_name("meta.mat").write_bytes(meta)
    refused(r"meta.mat is not the devkit's table of classes", originals)


@pytest.mark.parametrize("line", [b"0", b"1001", b"-1", b"cat", b"9" * 5000])
def test_an_id_that_no_class_has_is_named_with_its_line(line: bytes) -> None:
    meta = {number: (wnid, WORDS[wnid]) for number, wnid in IDS.items()}
    assert parse_ground_truth(b"2\n3\n", meta, "x") == {VAL[0][:-5]: EEL, VAL[1][:-5]: DOG}
    with pytest.raises(SourceError, match=r"x, line 3: '.*' is not an ILSVRC2012_ID of meta.mat \(1 to 3\)"):
        parse_ground_truth(b"3\n1\n" + line, meta, "x")


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("LOC_synset_mapping.txt", f"{CAT} cat\nn123 dog\n", r"line 2: 'n123' is no wnid"),
        ("LOC_synset_mapping.txt", f"{CAT} cat\n{CAT} dog\n", r"line 2: '.*' occurs twice"),
        ("LOC_val_solution.csv", f"ImageId,Prediction\n{VAL[0][:-5]},cat 1 2 3 4\n", "line 2: .* has not one wnid"),
        ("LOC_val_solution.csv", f"{VAL[0][:-5]},{CAT} 1 2 3 4 {DOG} 1 2 3 4\n", "line 1: .* has not one wnid"),
        ("LOC_val_solution.csv", f"{VAL[0][:-5]},{CAT} 1 2 3 4\n" * 2, "line 2: .* occurs twice"),
        ("LOC_val_solution.csv", f"{VAL[1][:-5]},{CAT} 1 2 3 4\n", "classes of 1 validation images.*a whole LOC_val"),
        ("LOC_val_solution.csv", "\udcff", r"line 1: .*xff.* has not one wnid"),
    ],
)
def test_bad_tables_are_named_with_their_line(tmp_path: Path, file: str, text: str, message: str) -> None:
    make(tmp_path, f"train/{CAT}/1.JPEG", f"val/{VAL[0]}")
    (tmp_path / file).write_text(text, errors="surrogateescape")
    refused(message, tmp_path)


def test_classes_are_those_of_the_table_and_tiny_imagenet_has_its_own(tmp_path: Path) -> None:
    root = make(tmp_path / "a", f"train/{CAT}/1.JPEG", f"train/{EEL}/1.JPEG", f"val/{CAT}/2.JPEG")
    assert values(list_source(root)) == [0, 1, 1]
    write(root / "LOC_synset_mapping.txt", "".join(f"{k} {WORDS[k]}\n" for k in WORDS))
    listing = list_source(root)
    assert values(listing) == [0, 2, 2] and "train: 2 images, none of 1 classes." in listing.notes
    tiny = make(tmp_path, *[f"t/train/{wnid}/images/{wnid}_0.JPEG" for wnid in WORDS], f"t/train/{CAT}/{CAT}_boxes.txt")
    make(tiny / "t", "val/images/val_0.JPEG", "val/images/val_1.JPEG", "test/images/test_0.JPEG")
    rows = [f"val_1.JPEG\t{CAT}\t0\t1\t2\t3\n", f"val_0.JPEG\t{DOG}\t1\t1\t2\t3\n"]
    write(tiny / "t/val/val_annotations.txt", "".join(rows))
    listing = list_source(tiny / "t")
    assert listing.layout == "imagenet" and values(listing) == [0, 1, 2, 1, 2, -1]
    assert listing.split_names == ("train", "val", "test")


def test_other_class_folders_are_not_imagenet_and_strays_and_empty_classes_are_named(tmp_path: Path) -> None:
    for i, names in enumerate([("cat/1.jpg", f"{CAT}/1.jpg"), (f"train/{CAT}/1.jpg", "val/1.jpg"), ("1.jpg",)]):
        assert detect_layout(make(tmp_path / str(i), *names))[0] == "folder"
    refused(r"images in no class \(1\): cat/1.jpg", tmp_path / "0", "imagenet")
    refused("holds no image of ImageNet", make(tmp_path / "e", "x.txt"), "imagenet")
    refused(r"lie outside the splits train \(1\)", make(tmp_path / "o", f"train/{CAT}/1.jpg", f"{CAT}/1.jpg"))
    refused(
        rf"Classes without an image \(1\): train/{DOG}", make(tmp_path / "n", f"train/{CAT}/1.JPEG", f"train/{DOG}/")
    )
    write_tar(tmp_path / "c" / f"{CAT}.tar", {f"{CAT}_1.JPEG": b"1"})
    refused("lies in a zip, where it cannot be read in place", archived(tmp_path / "c", tmp_path / "x.zip"))


def test_folders_are_preferred_to_their_archives_and_flat_names_hold_the_class(originals: Path, tmp_path: Path) -> None:
    make(originals, *[f"train/{wnid}/{wnid}_1.JPEG" for wnid in WORDS])
    listing = list_source(originals)
    assert listing.keys[0] == f"train/{EEL}/{EEL}_1.JPEG" and len(listing) == 3 + 4
    assert "Read the images of 'train' in its folder, not ILSVRC2012_img_train.tar." in listing.notes
    write_tar(make(tmp_path / "one", f"{CAT}/{CAT}_1.JPEG") / f"{CAT}.tar", {f"{CAT}_2.JPEG": b"2"})
    listing = list_source(tmp_path / "one")
    assert listing.keys == (f"{CAT}/{CAT}_1.JPEG",)
    assert f"Read the images of {CAT} in its folder, not {CAT}.tar." in listing.notes
    listing = list_source(make(tmp_path / "flat", f"{EEL}_tench.JPEG", f"{CAT}_tabby.JPEG", "README.md"))
    assert listing.layout == "imagenet" and listing.split_names == ("all",)
    assert values(listing) == [0, 1] and listing.keys == (f"{EEL}_tench.JPEG", f"{CAT}_tabby.JPEG")
    assert "Ignored, since they are no images by their suffix (1): README.md." in listing.notes


def test_a_png_named_jpeg_and_cmyk_files_are_handed_over_as_they_are(tmp_path: Path) -> None:
    # n02105855_2933.JPEG is a PNG, and 22 of train are CMYK: their headers show it, when they are decoded.
    members = {}
    for name, mode, kind in (("n02105855_2933.JPEG", "RGB", "PNG"), ("n02105855_1.JPEG", "CMYK", "JPEG")):
        out = io.BytesIO()
        Image.new(mode, (8, 6), (7,) * len(mode)).save(out, kind)
        members[name] = out.getvalue()
    (tmp_path / "train.tar").write_bytes(tar_of({"n02105855.tar": tar_of(members)}))
    listing = list_source(tmp_path / "train.tar")
    opened = [Image.open(io.BytesIO(listing.files.read(i))) for i in range(2)]
    assert [(image.format, image.mode) for image in opened] == [("JPEG", "CMYK"), ("PNG", "RGB")]
    pack_images(tmp_path / "train.tar", tmp_path / "out.h5", workers=1, shuffle=False)
    with h5py.File(tmp_path / "out.h5") as file:
        assert file["images"].shape == (2, 6, 8, 3) and file["images"][1].max() == 7
        assert file["key"][1] == b"n02105855.tar/n02105855_2933.JPEG"
        assert file["labels"].attrs["names"].tolist() == [b"n02105855"]
