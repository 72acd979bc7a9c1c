"""What a folder of images would lose refuses it, with what was seen and a way out; ordinary folders raise no alarm."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from small_trees import archived, make, notes_of, photo, picture, refused, values, write

from fastload.errors import SourceError
from fastload.options.pack import SourceOptions
from fastload.sources.layouts import list_source

CAFE, CAFE_APART = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))


def tree(root: Path, files: str, **texts: str) -> Path:
    """Files by their names between spaces, `{a,b}` for each of several; texts by name, `__` for `/` and `_` for `.`."""
    for pattern in files.split():
        names = [""]
        for part in pattern.replace("}", "{").split("{"):
            choices = part.split(",") if "," in part else [part]
            names = [name + choice for name in names for choice in choices]
        make(root, *names)
    return root


SIGNS = {
    "splits next to a folder of another name": (
        "box_{train,test}/{1,2}.jpg query/{1,2}.jpg",
        {},
        r"box_test/, box_train/ are called as splits.*query/ lies next.*move query/ away",
    ),
    "splits that are wrapped, next to images to predict": (
        "seg_{train,test}/seg_{train,test}/{sea,wood}/{1,2}.jpg seg_pred/seg_pred/{3,4}.jpg",
        {},
        r"seg_test/, seg_train/ are called as splits(?!.*--labels top)",
    ),
    "labels of images that are several files": (
        "train/{00a1,00b2,00c3}_{red,green,blue}.png",
        {"train.csv": "Id,Target\n00a1,16 0\n00b2,7\n00c3,7 2\n"},
        r"train.csv \('00a1,16 0'\) names images",
    ),
    "labels of folders": (
        "train/{0001,0002,0003,0004}/{a,b}.png",
        {"labels.csv": "patient,grade\n0001,0\n0002,1\n0003,1\n0004,0\n"},
        r"labels.csv .*gives each folder one of few values",
    ),
    "labels of folders in one object": (
        "{vid1,vid2,vid3,vid4}/{1,2}.png",
        {"labels.json": '{"vid1": 0, "vid2": 1, "vid3": 0, "vid4": 1}'},
        r"labels.json \('vid1,0'\) gives each folder",
    ),
    "labels of folders whose numbers lack their zeros": (
        "train/{0000,0001,0002,0003}/{1,2}.png",
        {"labels.csv": "patient,grade\n0,0\n1,1\n2,0\n3,1\n"},
        r"labels.csv \('0,0'\) gives each folder",
    ),
    "names with commas in lines of JSON": (
        "notes.md",
        {f"Images/{i},a1.jpg": "" for i in (27, 28, 29)}
        | {"train.odgt": "".join(f'{{"ID": "{i},a1", "boxes": []}}\n' for i in (27, 28, 29))},
        r"train.odgt .* names images",
    ),
    "annotations without a suffix": (
        "images/{sea,wood}/{n01_1,n01_2}.jpg",
        {f"annotation/{top}/n01_{i}": "<annotation><object/></annotation>" for top in ("sea", "wood") for i in (1, 2)},
        r"annotation/sea/n01_1 and 3 more files without a suffix are called like images.*VOC's layout.*called .xml",
    ),
    "annotations next to each folder of frames": (
        "train/{a,b,c}/frames/{1,2}.jpg",
        {f"train/{scene}/gt/gt.txt": "1,2,3,4\n" for scene in "abc"},
        r"have next to them, gt/gt.txt",
    ),
    "classes in folders of patients": (
        "{p1,p2,p3}/{ill,well}/{1,2}.jpg",
        {},
        r"hold the same folders \(ill, well\).*`--layout folder --labels last`",
    ),
    "a class alone": ("cat/{1,2,3}.jpg", {}, r"one folder, cat/: one class.*--labels none"),
    "images that all lie deeper": ("{a,b}/{x,y,z}/{1,2}.jpg", {}, r"hold the same folders \(x, y, z\)|lies directly"),
    "labels behind numbers": ("{1,2}_cat.jpg {3,4}-great_dane.jpg", {}, r"2 words: cat \(2, as 1_cat.jpg\)"),
    "labels in names": (
        "{cat,dog}.{0,1,12}.jpg",
        {},
        r"are numbers with 2 words: cat \(3, as cat.0.jpg\).*--labels names",
    ),
    "labels in names of a split": (
        "train/{cat,great_dane}_{1,2}.jpg test/{1,2}.jpg",
        {},
        r"in train/ are numbers with 2 words",
    ),
    "labels in names in one folder": (
        "pics/{кот,cat} ({1,2}).jpg".replace(" ", ""),
        {},
        r"one folder.*are numbers with 2 words",
    ),
    "splits in names": ("{train,test}_{1,2}.jpg", {}, "are numbers with 2 words.*for splits, folders called train"),
    "one letter above the class": (
        "a/{abbey,airport}/1.jpg b/{bar,bank}/1.jpg",
        {},
        r"no image lies directly in a class folder: a/ holds abbey, airport.*--labels deepest",
    ),
    "versions": ("{v1,v2,small}/{cat,dog,cow}/{1,2}.jpg", {}, r"hold the same folders \(cat, cow, dog\).*versions"),
    "splits of unusual names": ("{fold0,fold1}/{cat,dog}/{1,2}.jpg", {}, r"fold0, fold1 hold the same folders"),
    "splits and more": (
        "{set_train,set_test,other}/{cat,dog}/{1,2}.jpg",
        {},
        r"are called as splits of one.*other/ lies next.*move other/ away",
    ),
    "a text with labels of the images": (
        "{cat,dog}/{001,002,003}.jpg",
        {"splits.txt": "cat/001.jpg train\ncat/002.jpg test\ndog/003.jpg train\n"},
        r"splits.txt \('cat/001.jpg train'\) names images",
    ),
    "names without their suffix": (
        "images/{cat,dog}/{1,2,3}.jpg",
        {"meta/train.txt": "cat/1\ncat/2\ndog/1\n", "meta/test.txt": "cat/3\ndog/2\ndog/3\n"},
        r"meta/(train|test).txt.* and meta/|name images",
    ),
    "a table of another column": (
        "photos/{cat,dog}/{001,002,003}.jpg",
        {"notes/seen.csv": "who;what\nann;cat/001.jpg\nbob;cat/002.jpg\nann;dog/003.jpg\n"},
        "seen.csv .* names images",
    ),
    "a JSON of everything": (
        "{cat,dog}/{001,002}.jpg",
        {"all.json": '{"cat/001.jpg": [1, 2], "cat/002.jpg": [3, 4], "dog/001.jpg": [5, 6]}'},
        "all.json .* names images",
    ),
    "names with spaces": (
        "{cat,dog}/{img_1,img_2}.jpg cat/{my,your}_cat_1.jpg",
        {"l.csv": "f,l\nimg_1.jpg,4\nmy_cat_1.jpg,3\nyour_cat_1.jpg,2\n"},
        "l.csv .* name",
    ),
    "a list of only some images": (
        "{cat,dog}/{001,002,003}.jpg",
        {"test.lst": "cat/001.jpg\ncat/002.jpg\ndog/003.jpg\n"},
        "test.lst .* names images",
    ),
    "a file for each image next to it": ("{a_1,a_2}.{jpg,xml}", {}, r"a_1.xml and 1 more .xml files are called like"),
    "a file for each image elsewhere": ("pics/{a_1,a_2,a_3}.jpg notes/{a_1,a_2,a_3}.json", {}, "called like images"),
    "called like the whole name": ("{a,b}/{1,2}.jpg {a,b}/{1,2}.jpg.json", {}, r"a/1.jpg.json and 3 more .json"),
    "a point file": ("{a,b}/{1,2}.jpg {a,b}/{1,2}.pts", {}, r".pts files are called like images"),
    "MATLAB": ("jpg/image_{1,2,3}.jpg labels.mat", {}, "labels.mat is of MATLAB"),
    "a spreadsheet": ("{cat,dog}/{1,2}.jpg labels.xlsx", {}, "labels.xlsx is of a spreadsheet program"),
    "labels in order": ("{001,002,003}.jpg", {"labels.txt": "3\n1\n2\n"}, r"labels.txt \('3'\) holds numbers alone"),
    "classes of a split": (
        "faces/{ann,bob,cid,dan}/{1,2}.jpg",
        {"train.txt": "ann\t2\nbob\t2\n", "test.txt": "cid\t2\ndan\t2\n"},
        "name some of the class folders",
    ),
    "a folder of other files": ("{cat,dog}/{1,2}.jpg scans/{x,y}.raw", {}, r"scans/ .* holds no image, but 2 .raw"),
    "files next to splits": (
        "{train,test}/{cat,dog}/{1,2}.jpg labels/{x,y}.bin",
        {},
        r"labels/ next to folders of images holds no image, but 2 .bin",
    ),
    "the same files in each folder": (
        "{scene_1,scene_2,scene_3}/{im0,im1}.png {scene_1,scene_2,scene_3}/{calib.txt,view.bin}",
        {},
        r"most folders of images also hold, or have next to them, calib.txt",
    ),
    "Unicode forms": (f"{{{CAFE},{CAFE_APART},tea}}/{{1,2}}.jpg", {}, "differ only in their Unicode form"),
    "case between splits": ("train/{Cat,dog}/{1,2}.jpg val/{cat,dog}/{1,2}.jpg", {}, "differ only in case"),
}


@pytest.mark.parametrize("name", SIGNS)
def test_what_a_folder_would_lose_refuses_it_with_a_way_out(tmp_path: Path, name: str) -> None:
    files, texts, message = SIGNS[name]
    root = tree(tmp_path / "data", files)
    for path, text in texts.items():
        write(root / path, text)
    with pytest.raises(SourceError, match=message) as error:
        list_source(root)
    assert "`--layout folder`, which packs" in str(error.value) and str(root) in str(error.value)
    assert "emove" not in str(error.value), "it never advises to remove what holds files"
    assert len(list_source(root, "folder")), "who says that it is a folder of images gets it"


ORDINARY = {
    "two classes": "{cat,dog}/{1,2}.jpg",
    "splits": "{train,val,test}/{cat,dog}/{1,2}.jpg",
    "splits of other names": "{training,validation,testing}/{cat,dog}/{1,2}.jpg",
    "capital splits": "{Train,Test}/{cat,dog}/{1,2}.jpg",
    "a test without classes": "train/{cat,dog}/{1,2}.jpg test/{8,9}.jpg",
    "flat": "{1,2,3}.jpg",
    "flat splits": "{train,test}/{1,2}.jpg",
    "equal numbers in each class": "{0,1,2,3}/{1,2,3}.png",
    "equal names in each class": "{accordion,anchor,ant}/image_{0001,0002}.jpg",
    "faces and masks": "{face,face_mask,other}/{1,2,3}.jpg",
    "with and without masks": "{with_mask,without_mask}/{1,2}.jpg",
    "words of splits in classes": "{training_shoes,test_tubes}/{1,2}.jpg",
    "words of splits, three": "{training_shoes,test_tubes,valid_tickets}/{1,2}.jpg",
    "one more class than its split word": "{train_station,bus_stop,harbour}/{1,2}.jpg",
    "sub-folders in one class": "cat/{1,2}.jpg cat/kittens/3.jpg dog/1.jpg",
    "sub-folders in some classes": "{cat,dog}/{1,2}.jpg {cat,dog}/more/3.jpg",
    "a wrapping folder": "photos/{cat,dog}/{1,2}.jpg",
    "two wrapping folders": "archive/photos/{cat,dog}/{1,2}.jpg",
    "a readme": "{cat,dog}/{1,2}.jpg README.md LICENSE",
    "a readme of the name of a class": "{cat,dog}/{1,2}.jpg cat.txt",
    "a list of the classes": "{cat,dog,cow}/{1,2}.jpg classes.txt",
    "a list of all images": "{cat,dog}/{001,002}.jpg files.txt",
    "hidden things": "{cat,dog}/{1,2}.jpg .DS_Store cat/.ipynb_checkpoints/1.jpg",
    "NAS": "{cat,dog}/{1,2}.jpg @eaDir/cat/1.jpg cat/@eaDir/1.jpg",
    "bins": "{cat,dog}/{1,2}.jpg {#recycle,$RECYCLE.BIN}/old/1.jpg",
    "Windows": "{cat,dog}/{1,2}.jpg {cat,dog}/Thumbs.db desktop.ini",
    "letters in both cases": "{A,a,B,b}/{1,2}.png",
    "digits": "{0,1,2,3,4,5,6,7,8,9}/{01,02}.png",
    "numbers as names": "{class_01,class_02}/{1,2}.JPEG",
    "names with spaces": "{polar_bear,sun_bear}/img_{1,2}.jpg",
    "many suffixes": "cat/{1.jpg,2.PNG,3.jpeg,4.bmp} dog/{1.webp,2.gif}",
    "a log of training": "{cat,dog}/{1,2}.jpg log.csv",
    "numbers next to classes": "{cat,dog}/{1,2}.jpg counts.txt",
    "the form of an answer": "{cat,dog}/{001,002}.jpg sample_submission.csv",
    "a script": "{cat,dog}/{1,2}.jpg make.py requirements.txt",
    "a config": "{cat,dog}/{1,2}.jpg config.json settings.yaml",
    "classes called like annotations": "{label,ticket,stamp}/{1,2}.jpg",
    "a class called images": "{images,drawings,scans}/{1,2}.jpg",
    "disjoint classes in splits": "train/{a1,a2}/{1,2}.jpg val/{b1,b2}/{1,2}.jpg test/{c1,c2}/{1,2}.jpg",
    "one class more in a split": "train/{cat,dog,cow}/{1,2}.jpg val/{cat,dog}/{1,2}.jpg",
    "the same person in sessions": "p{1,2,3,4,5,6,7,8,9}/{1,2}.jpg",
}
TEXTS = {
    "classes.txt": "cat\ncow\ndog\n",
    "files.txt": "cat/001.jpg\ncat/002.jpg\ndog/001.jpg\ndog/002.jpg\n",
    "sample_submission.csv": "id,label\n001,0\n002,0\n",
    "log.csv": "epoch,loss\n1,0.5\n2,0.4\n",
    "counts.txt": "1 2 3 4 5\n6 7 8 9 10\n",
    "README.md": "# Photos\nFor example cat/1.jpg shows a cat.\nThe others are alike.\n",
    "requirements.txt": "torch\nnumpy==1.26\n",
    "config.json": '{"lr": 0.1, "epochs": 3}',
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_folders_raise_no_alarm(tmp_path: Path, name: str) -> None:
    root = tree(tmp_path / "data", ORDINARY[name])
    for path in TEXTS:
        if (root / path).exists():
            write(root / path, TEXTS[path])
    for seed, path in enumerate(sorted(root.rglob("*.*g"))):
        photo(path, seed)
    listing = list_source(root)
    assert listing.layout == "folder" and "NOT READ" not in notes_of(listing)
    if "labels" in listing.columns:
        for key, label in zip(listing.keys, values(listing), strict=True):
            assert label == -1 or listing.columns["labels"].attrs["names"][label] in key.split("/")


@pytest.mark.parametrize(
    ("files", "splits", "classes"),
    [
        ("{training_set,test_set}/{cats,dogs}/{1,2}.jpg", "train test", "cats dogs"),
        ("training_set/training_set/{cats,dogs}/1.jpg test_set/test_set/{cats,dogs}/1.jpg", "train test", "cats dogs"),
        ("seg_train/seg_train/{sea,street}/1.jpg seg_test/seg_test/{sea,street}/1.jpg", "train test", "sea street"),
        ("Final_Training/Images/{00000,00001}/1.ppm Final_Test/Images/{1,2}.ppm", "train test", "00000 00001"),
        ("2021_train_mini/{s1,s2,s3}/1.jpg 2021_valid/{s1,s2}/1.jpg", "train val", "s1 s2 s3"),
        ("{imgs_train,imgs_val}/{1,2}.jpg", "train val", ""),
        ("{trainset,validset,testset}/{a,b}/1.png", "train val test", "a b"),
        ("{TrainImages,TestImages}/{a,b}/1.png", "train test", "a b"),
        ("train/train/{a,b}/1.png val/val/{a,b}/1.png", "train val", "a b"),
        ("{train,test}/images/{a,b}/1.png", "train test", "a b"),
    ],
)
def test_splits_spelled_otherwise_are_splits_where_the_folders_in_them_say_so(
    tmp_path: Path, files: str, splits: str, classes: str
) -> None:
    listing = list_source(tree(tmp_path, files))
    assert listing.layout == "folder" and listing.split_names == tuple(splits.split())
    assert np.bincount(listing.split).all()
    assert (listing.columns["labels"].attrs["names"] if classes else ()) == tuple(classes.split())
    for key, split, label in zip(
        listing.keys, listing.split, values(listing) if classes else listing.split, strict=True
    ):
        assert label == -1 or not classes or key.split("/")[-2] == listing.columns["labels"].attrs["names"][label]
        assert listing.split_names[split][:3].lower() in key.lower()


def test_labels_of_a_folder_are_the_outermost_or_the_deepest_folder_or_none(tmp_path: Path) -> None:
    root = tree(tmp_path / "SUN", "a/{abbey,airport}/{1,2}.jpg b/bar/{indoor,outdoor}/1.jpg")
    named = {}
    for level in ("top", "deepest", "none"):
        listing = list_source(root, "folder", options=SourceOptions(labels=(level,)))
        named[level] = listing.columns["labels"].attrs["names"] if listing.columns else ()
        assert len(listing) == 6
    assert named == {
        "top": ("a", "b"),
        "deepest": ("a/abbey", "a/airport", "b/bar/indoor", "b/bar/outdoor"),
        "none": (),
    }


def test_labels_are_the_words_that_names_begin_with(tmp_path: Path) -> None:
    root = tree(tmp_path / "pets", "train/{cat,great_dane}.1.jpg train/002_{cat,great_dane}.jpg test/7.jpg")
    listing = list_source(root, options=SourceOptions(labels=("names",)))
    assert listing.keys[:2] == ("train/002_cat.jpg", "train/cat.1.jpg") and listing.keys[-1] == "test/7.jpg"
    assert values(listing) == [0, 0, 1, 1, -1] and listing.columns["labels"].attrs["names"] == ("cat", "great_dane")
    assert "are not a word and a number have the label -1 (1): test/7.jpg" in notes_of(listing)
    with pytest.raises(SourceError, match=r"no image is called by a word and a number.*7.jpg is not"):
        list_source(root / "test", options=SourceOptions(labels=("names",)))


@pytest.mark.parametrize(
    "files",
    [
        "{IMG_,DSC,PXL_}{0001,0002}.jpg",
        "{frame,scene}_{0001,0002}.png",
        "cat_{1,2,3}.jpg",
        "cat_{1,2,3}.jpg IMG_{1,2}.jpg",
        "{2021-01-02,2022-03-04}T{10,11}.jpg",
        "{IMG,VID}-{20210101,20210102}-WA0001.jpg",
        "{left,right}_{1,2}.png",
        "video{1,2}_{0001,0002}.jpg",
        "{0001,0002}_c{1,2}s1_000451.jpg",
        "{a3f09b,b21c4d,0a77e1,a9f2c0,b00d12,ab12f0}.jpg",
        "{rome,oslo,bern}_1.jpg",
        "{party,beach,cat}.jpg",
        "{1,2,3}_{nadir,oblique,tilted}.jpg",
        "{123,124}_{o,b}.jpg {125,126}_b.jpg",
    ],
)
def test_names_by_cameras_numbers_hashes_and_dates_are_no_labels(tmp_path: Path, files: str) -> None:
    assert "without labels" in notes_of(list_source(tree(tmp_path / "flat", files)))


def test_folders_called_by_numbers_are_said_to_be_no_labels(tmp_path: Path) -> None:
    root = tree(tmp_path / "a", "{1,2,10}/x.jpg")
    assert "1 is 0" in notes_of(list_source(root))
    assert "numbers" not in notes_of(list_source(tree(tmp_path / "b", "{0,1,2}/x.jpg")))


def test_a_script_sees_the_refusal_of_an_unpacked_folder(tmp_path: Path) -> None:
    from fastload.pack import pack_images

    root = tree(tmp_path / "data", "jpg/image_{1,2}.jpg labels.mat")
    with pytest.raises(SourceError, match="not packed as a folder of images"):
        pack_images(root, tmp_path / "out.h5")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]


def test_who_says_which_folder_is_the_class_is_not_asked_again(tmp_path: Path) -> None:
    root = tree(tmp_path / "SUN", "a/{abbey,airport}/{1,2}.jpg b/{bar,bank}/1.jpg")
    listing = list_source(root, options=SourceOptions(labels=("deepest",)))
    assert listing.columns["labels"].attrs["names"] == ("a/abbey", "a/airport", "b/bank", "b/bar")
    write(root / "list.txt", "".join(f"a/abbey/{i}.jpg train\n" for i in (1, 2)) + "b/bar/1.jpg test\n")
    with pytest.raises(SourceError, match=r"list.txt .* names images"):
        list_source(root, options=SourceOptions(labels=("deepest",)))


def test_annotations_of_coco_under_another_name_are_known(tmp_path: Path) -> None:
    root = tree(tmp_path / "data", "pics/{001,002}.jpg")
    write(root / "annotations/labels.json", '{"images": [{"id": 1, "file_name": "001.jpg"}], "annotations": []}')
    with pytest.raises(SourceError, match=r"annotations/labels.json is written as COCO's .* annotations/instances_"):
        list_source(root)


def test_a_table_next_to_a_folder_or_archive_that_names_its_images_is_said(tmp_path: Path) -> None:
    root = tree(tmp_path / "data", "images/{001,002,003}.jpg")
    write(root / "labels.csv", "file,label\n001.jpg,a\n002.jpg,b\n003.jpg,a\n")
    write(root / "notes.txt", "photos\n")
    (tmp_path / "zipped").mkdir()
    archive = archived(root / "images", tmp_path / "zipped" / "images.zip")
    write(tmp_path / "zipped" / "metadata.jsonl", "".join(f'{{"file_name": "00{i}.jpg"}}\n' for i in (1, 2, 3)))
    for given, table in ((root / "images", root / "labels.csv"), (archive, archive.parent / "metadata.jsonl")):
        notes = notes_of(list_source(given))
        assert f"NOT READ: {table}, next to what was given, names its images" in notes
        assert f"`fastload pack {table} OUT.h5 --root {given}` reads both" in notes
    assert len(list_source(root / "labels.csv", options=SourceOptions(root=root / "images"))) == 3
    (root / "labels.csv").unlink()
    assert "NOT READ" not in notes_of(list_source(root / "images"))


def test_images_of_sixteen_bits_are_no_class_next_to_photographs(tmp_path: Path) -> None:
    for i in range(3):
        photo(tmp_path / f"rgb/{i}5.png", i)
        (tmp_path / "depth").mkdir(exist_ok=True)
        Image.fromarray(np.full((24, 32), 1000 + i, np.uint16)).save(tmp_path / f"depth/{i}7.png")
    refused(r"images in depth/ have 16 bits a channel, those in rgb/ have 8.*`fastload pack \S+/rgb OUT.h5`", tmp_path)


def test_copies_are_no_pairs(tmp_path: Path) -> None:
    for i in range(6):
        photo(tmp_path / f"yes/{i * 37}.png", i)
        photo(tmp_path / f"set/yes/{i * 37}.png", i)
    refused("yes/ and set/yes/ hold the same files|set/yes/ and yes/ hold the same files", tmp_path)


def test_folders_around_splits_are_no_signs(tmp_path: Path) -> None:
    root = tree(tmp_path / "a", "b/c/{train,test}/{cat,dog}/{1,2}.jpg")
    assert list_source(root).split_names == ("train", "test") and len(list_source(root)) == 8
    root = tree(tmp_path / "dogs_cats", "train/{cat,dog}.{1,2}.jpg test1/{1,2}.jpg")
    listing = list_source(root, "folder", options=SourceOptions(labels=("names",)))
    assert listing.split_names == ("train", "test") and values(listing) == [0, 0, 1, 1, -1, -1]


def test_the_folder_that_an_image_lies_in_can_be_its_class(tmp_path: Path) -> None:
    root = tree(tmp_path / "a", "{p1,p2}/{ill,well}/{1,2}.jpg")
    listing = list_source(root, "folder", options=SourceOptions(labels=("last",)))
    assert listing.columns["labels"].attrs["names"] == ("ill", "well") and sum(values(listing)) == 4


def test_packing_as_a_folder_is_offered_only_where_it_can_be_done(tmp_path: Path) -> None:
    for i in range(3):
        photo(tmp_path / f"train/good/{i}.png", i)
        photo(tmp_path / f"test/good/{i}.png", i + 3)
        photo(tmp_path / f"test/bad/{i}.png", i + 6)
        picture(tmp_path / f"ground_truth/bad/{i}_mask.png", 0, 255)
    with pytest.raises(SourceError, match="not packed as a folder") as error:
        list_source(tmp_path)
    assert "if it is no more than a folder" not in str(error.value)
    with pytest.raises(SourceError, match="look like splits"):
        list_source(tmp_path, "folder")


def test_files_about_folders_and_kinds_of_classes_are_no_signs(tmp_path: Path) -> None:
    root = tree(tmp_path / "a", "{cat,dog,car}/{1,2}.jpg {cat,dog,car}/LICENSE.txt README.md readme.txt")
    write(root / "kinds.csv", "class,kind\ncat,animal\ndog,animal\ncar,thing\n")
    assert list_source(root).columns["labels"].attrs["names"] == ("car", "cat", "dog")


def test_an_archive_that_is_not_unpacked_is_said(tmp_path: Path) -> None:
    root = tree(tmp_path / "a", "test/{cat,dog}/{1,2}.jpg train.zip test.zip")
    notes = notes_of(list_source(root))
    assert "NOT READ: archives of further splits; unpack them here (1): train.zip" in notes
