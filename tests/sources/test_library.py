"""Datasets of torchvision by their name, folders that only it reads, and what Hugging Face cached."""

from __future__ import annotations

import io
import pickle
import re
import shlex
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from interrupted import stop_at
from layout_trees import FURTHER, SUBROOT, make, number_of, truth_of
from PIL import Image
from small_trees import notes_of, refused, values

from fastload import pack_images, verify_file
from fastload.cli import app
from fastload.errors import MissingExtraError, MissingFileError, OptionError, SourceError
from fastload.options.pack import SourceOptions
from fastload.sources import library
from fastload.sources.layouts import list_source
from fastload.sources.listing import Files
from fastload.sources.objects import list_objects
from fastload.sources.open_tree import open_tree


def listed(name, root, **options):
    where = root / name / SUBROOT.get(name, "")
    further = FURTHER.get(name, "").format(root / name)
    return list_source(f"torchvision:{name}{further}", options=SourceOptions(root=where, **options))


def image_of(listing, i):
    found = listing.files.read(i)
    if isinstance(found, bytes):
        with Image.open(io.BytesIO(found)) as image:
            return np.asarray(image.convert("RGB"))
    return found


def content_of(listing):
    """{number: (split, label)} of a listing, as `truth_of`."""
    labels = values(listing) if "labels" in listing.columns else [None] * len(listing)
    splits = [listing.split_names[i] for i in listing.split.tolist()]
    return {number_of(image_of(listing, i)): (splits[i], labels[i]) for i in range(len(listing))}


AS_FILES = (
    "Caltech101 CLEVRClassification DTD FGVCAircraft Flowers102 Food101 GTSRB INaturalist Imagenette Kitti Omniglot "
    "OxfordIIITPet Places365 SBDataset SBU SUN397 StanfordCars WIDERFace"
).split()
AS_PIXELS = "CIFAR10 EMNIST FER2013 PCAM QMNIST SEMEION STL10 SVHN USPS".split()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # SBU leaves its lists open
@pytest.mark.parametrize("name", [*AS_FILES, *AS_PIXELS])
def test_every_split_of_a_dataset_of_torchvision_is_listed_as_its_class_gives_it(torchvision_datasets, tmp_path, name):
    make(name, tmp_path)
    listing = listed(name, tmp_path)
    expected = truth_of(torchvision_datasets, name, tmp_path / name)
    found = content_of(listing)
    assert found.keys() == expected.keys()
    for number, (split, label) in expected.items():
        assert found[number] == (split, -1 if label is None and found[number][1] == -1 else label), number
    assert isinstance(listing.files, Files) == (name in AS_FILES)
    keys = listing.keys
    assert len(set(keys)) == len(keys) and (name in AS_PIXELS or (tmp_path / name / keys[0]).is_file())


def test_masks_boxes_and_names_of_classes_of_torchvision_are_listed(torchvision_datasets, tmp_path):
    for name in ("OxfordIIITPet", "SBDataset", "WIDERFace", "Kitti"):
        make(name, tmp_path)
    pets = listed("OxfordIIITPet", tmp_path)
    assert pets.columns["labels"].attrs["names"] == ("Abyssinian", "Beagle", "Bengal", "Pug")
    assert isinstance(pets.masks.files, Files) and pets.masks.present.all()
    at = pets.keys.index("oxford-iiit-pet/images/beagle_4.jpg")
    mask = (tmp_path / "OxfordIIITPet/oxford-iiit-pet/annotations/trimaps/beagle_4.png").read_bytes()
    assert pets.masks.files.read(at) == mask
    without = listed("OxfordIIITPet", tmp_path, masks="none")
    assert without.masks is None and values(without) == values(pets)
    sbd = listed("SBDataset", tmp_path)
    for i, key in enumerate(sbd.keys):
        data = torchvision_datasets.SBDataset(
            str(tmp_path / "SBDataset"), sbd.split_names[sbd.split[i]], "segmentation"
        )
        row = [Path(path).name for path in data.images].index(Path(key).name)
        assert np.array_equal(sbd.masks.files.read(i), np.asarray(data[row][1]))
    faces = listed("WIDERFace", tmp_path)
    in_test = faces.split == faces.split_names.index("test")
    assert faces.columns["boxes"].values[~in_test][0].tolist() == [[5, 6, 20, 22], [30, 8, 10, 12]]
    assert not faces.columns["num_boxes"].values[in_test].any()
    assert "NOT READ: parts of the samples that are not packed (6): blur, expression" in notes_of(faces)
    cars = listed("Kitti", tmp_path)
    assert cars.columns["boxes"].values[0].tolist() == [[10, 12, 30, 32], [5, 6, 4, 3]]
    assert cars.columns["box_labels"].attrs["names"] == ("Car", "DontCare")


def test_the_command_packs_verifies_and_continues_a_dataset_of_torchvision(torchvision_datasets, tmp_path, capsys):
    make("Flowers102", tmp_path)
    make("CIFAR10", tmp_path)
    for name, root, store in (
        ("Flowers102", tmp_path / "Flowers102", "source"),
        ("CIFAR10", tmp_path / "CIFAR10", "raw"),
    ):
        out = tmp_path / f"{name}.h5"
        packing = {"root": root, "store": store, "workers": 0, "chunk_bytes": 1}
        with pytest.raises(KeyboardInterrupt):
            pack_images(f"torchvision:{name}", out, **packing, progress=stop_at(3, "packing"))
        report = pack_images(f"torchvision:{name}", out, **packing)
        assert 0 < report.chunks_kept < report.chunks
        assert verify_file(out, source=f"torchvision:{name}", root=root, workers=0).ok
        with h5py.File(out) as file:
            assert file.attrs["source_layout"] == b"torchvision" and b"root" not in file.attrs["pack_options"]
    encodings = pack_images(
        "torchvision:Flowers102", tmp_path / "two.h5", root=tmp_path / "Flowers102", store="source", workers=1, shards=2
    ).encodings
    assert encodings["jpeg"] == 12
    with pytest.raises(SystemExit) as stopped:
        app(
            [
                "pack",
                "torchvision:Flowers102",
                str(tmp_path / "x.h5"),
                "--root",
                str(tmp_path / "Flowers102"),
                "--dry-run",
            ]
        )
    said = capsys.readouterr().out
    assert stopped.value.code == 0 and "would pack 12 images (layout torchvision)" in said
    assert "train 4, val 4, test 4" in said and not (tmp_path / "x.h5").exists()


def test_an_image_that_the_class_changes_is_packed_as_the_pixels_that_it_gives(torchvision_datasets, tmp_path):
    for i in range(3):
        Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3) + i).save(tmp_path / f"{i}.png")

    class Kept:
        def __init__(self, root):
            self.root = root

        def __len__(self):
            return 3

        def __getitem__(self, i):
            return Image.open(f"{self.root}/{i}.png").convert("RGB"), i

    class Turned(Kept):
        def __getitem__(self, i):
            return Image.open(f"{self.root}/{i}.png").rotate(90), i

    class Drawn(Kept):
        def __getitem__(self, i):
            return Image.fromarray(255 - np.asarray(Image.open(f"{self.root}/{i}.png"))), i

    class OfAnother(Kept):
        def __getitem__(self, i):
            Image.open(f"{self.root}/{i}.png").convert("RGB")
            return Image.open(f"{self.root}/{(i + 1) % 3}.png").convert("L"), i

    assert [library.TorchvisionSplit(kind, str(tmp_path), {}).is_of_files() for kind in (Kept, Turned, Drawn)] == [
        True, False, False,
    ]  # fmt: skip
    other = library.TorchvisionSplit(OfAnother, str(tmp_path), {})
    other.paths = other.is_of_files()
    assert [Path(other[i]["image"]).name for i in range(3)] == ["1.png", "2.png", "0.png"]
    with Image.open(tmp_path / "0.png") as image:  # nothing stands for images any more
        assert isinstance(image, Image.Image)


def test_a_split_is_pickled_without_its_samples_and_opened_again(torchvision_datasets, tmp_path):
    make("CIFAR10", tmp_path)
    files = listed("CIFAR10", tmp_path).files
    pickled = pickle.dumps(files)
    assert len(pickled) < 20_000 and np.array_equal(pickle.loads(pickled).read(7), files.read(7))


def test_what_torchvision_lacks_or_does_not_find_is_said(torchvision_datasets, tmp_path):
    make("Flowers102", tmp_path)
    (tmp_path / "Flowers102/flowers-102/setid.mat").rename(tmp_path / "moved.mat")

    def says(error, message, name, root=tmp_path / "Flowers102", **options):
        with pytest.raises(error, match=message):
            list_source(f"torchvision:{name}", options=SourceOptions(root=root, **options))

    says(OptionError, "no dataset 'flower102'. Is it Flowers102", "flower102")
    says(OptionError, "no dataset 'VisionDataset'", "VisionDataset")
    says(OptionError, "say which folder it lies in.*--root", "Flowers102", None)
    says(MissingFileError, "there is no such folder", "Flowers102", tmp_path / "nothing")
    says(MissingFileError, r"does not find it in .*Dataset not found.*--download", "Flowers102")
    says(OptionError, "'fold=1' is no argument: write NAME=VALUE, of split, partition", "DTD,fold=1")
    says(OptionError, "torchvision does not download it", "ImageFolder", download=True)
    says(OptionError, "`--labels` means nothing to the layout torchvision", "DTD", labels=("a",))
    says(SourceError, "fastload pack FOLDER OUT.h5", "VOCDetection")
    says(SourceError, "videos", "UCF101")
    says(SourceError, "pairs of images and disparities", "Kitti2012Stereo")
    (tmp_path / "moved.mat").rename(tmp_path / "Flowers102/flowers-102/setid.mat")
    one = list_source("torchvision:Flowers102,split=val", options=SourceOptions(root=tmp_path / "Flowers102"))
    assert one.split_names == ("val",) and len(one) == 4


def test_splits_that_are_not_there_are_noted(torchvision_datasets, tmp_path):
    make("SVHN", tmp_path)
    (tmp_path / "SVHN/extra_32x32.mat").unlink()
    listing = listed("SVHN", tmp_path)
    assert listing.split_names == ("train", "test")
    assert "Splits that are not there: extra: Dataset not found" in notes_of(listing)
    assert list_source("torchvision:SVHN", options=SourceOptions(root=tmp_path / "SVHN")).keys == listing.keys


@pytest.mark.parametrize(("found", "message"), [
    ("absent", "torchvision:DTD: torchvision is not installed: `pip install torchvision`"),
    ("broken", "cannot be imported: operator torchvision::nms does not exist.*built for another torch"),
])  # fmt: skip
def test_torchvision_that_is_absent_or_of_another_torch_is_named(tmp_path, monkeypatch, found, message):
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    if found == "absent":
        monkeypatch.setitem(sys.modules, "torchvision", None)
    else:
        (tmp_path / "torchvision").mkdir()
        text = "raise RuntimeError('operator torchvision::nms does not exist')"
        (tmp_path / "torchvision/__init__.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingExtraError, match=message):
        list_source("torchvision:DTD", options=SourceOptions(root=tmp_path))


GIVEN = {name: folder.partition("/")[0] for name, (folder, _) in library._FOLDERS.items()}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # SBU leaves its lists open
@pytest.mark.parametrize("name", GIVEN)
def test_a_folder_that_only_torchvision_reads_is_refused_with_the_command_that_reads_it(
    torchvision_datasets, tmp_path, name
):
    root = make(name, tmp_path / "with a space")
    for folder in {root, root / GIVEN[name]}:
        with pytest.raises(SourceError, match=rf"show.* torchvision's {name}\. `fastload pack") as error:
            list_source(folder)
    _, *command = shlex.split(re.search(r"`(fastload pack torchvision:[^`]*)`", str(error.value)).group(1))
    command[command.index("OUT.h5")] = str(tmp_path / "out.h5")
    with pytest.raises(SystemExit) as done:
        app([*command, "--workers", "0"])
    assert done.value.code == 0
    with h5py.File(tmp_path / "out.h5") as file:
        assert len(file["key"]) == len(truth_of(torchvision_datasets, name, root))


def test_a_folder_that_is_renamed_is_known_by_what_is_in_it_and_the_right_name_is_said(tmp_path):
    pytest.importorskip("scipy", reason="scipy is not installed")
    make("Flowers102", tmp_path)
    (tmp_path / "Flowers102/flowers-102").rename(tmp_path / "flowers")
    refused(r"--root FOLDER` reads it, once its folder .*flowers is called FOLDER/flowers-102", tmp_path / "flowers")
    known = library.known_as(open_tree(tmp_path / "flowers"))
    assert [one.what for one in known] == ["torchvision's Flowers102"]
    assert len(list_source(tmp_path / "flowers", "folder")) == 12


@pytest.mark.parametrize("name", ["CIFAR10", "CIFAR100"])
def test_the_lines_that_pack_cifars_binary_version_do(tmp_path, name):
    rng = np.random.default_rng(0)
    fine = name == "CIFAR100"
    for file in ("train.bin", "test.bin", "fine_label_names.txt") if fine else ("data_batch_1.bin", "test_batch.bin"):
        rows = rng.integers(0, 10, (3, 3074 if fine else 3073), dtype=np.uint8)
        (tmp_path / file).write_bytes(rows.tobytes())
    with pytest.raises(SourceError, match=r"CIFAR-\d+'s binary version") as error:
        list_source(tmp_path)
    rows = np.fromfile(tmp_path / ("train.bin" if fine else "data_batch_1.bin"), np.uint8).reshape(3, -1)
    given = {"numpy": np, "FILE": tmp_path / ("train.bin" if fine else "data_batch_1.bin"), "pack_images": pack_images}
    lines = re.findall("`([^`]*)`", str(error.value))
    for line in lines[:2]:
        exec(line.replace("'OUT.h5'", repr(str(tmp_path / "out.h5"))), given)
    with h5py.File(tmp_path / "out.h5") as file:
        order = np.argsort(file["key"][()])
        assert np.array_equal(file["labels"][()][order], rows[:, 1 if fine else 0])
        planes = rows[:, -3072:].reshape(3, 3, 32, 32)
        assert np.array_equal(file["images"][()][order], planes.transpose(0, 2, 3, 1))


@pytest.mark.filterwarnings("ignore:Image.Image.getdata is deprecated")  # what torchvision's PhotoTour calls
@pytest.mark.parametrize("name", ["MovingMNIST", "PhotoTour"])
def test_the_lines_that_pack_other_datasets_do(torchvision_datasets, tmp_path, monkeypatch, name):
    root = make(name, tmp_path)
    given = {"numpy": np, "pack_images": lambda images, out: pack_images(images, out, workers=0)}
    if name == "PhotoTour":
        torchvision = sys.modules["torchvision"]
        monkeypatch.setitem(torchvision_datasets.PhotoTour.lens, "notredame", 48)
        given |= {"torchvision": torchvision, "ROOT": str(root), "NAME": "notredame"}
    else:
        given["FILE"] = root / "MovingMNIST/mnist_test_seq.npy"
    with pytest.raises(SourceError, match="packed from Python") as error:
        list_source(root)
    for line in [line for line in re.findall("`([^`]*)`", str(error.value)) if "--layout" not in line]:
        exec(line.replace("'OUT.h5'", repr(str(tmp_path / "out.h5"))), given)
    with h5py.File(tmp_path / "out.h5") as file:
        assert len(file["key"]) == {"MovingMNIST": 120, "PhotoTour": 48}[name]


NO_IMAGES = (
    "CREStereo CarlaStereo ETH3DStereo FallingThingsStereo FlyingChairs FlyingThings3D HD1K HMDB51 InStereo2k Kinetics "
    "Kitti2012Stereo Kitti2015Stereo KittiFlow Middlebury2014Stereo SceneFlowStereo Sintel SintelStereo UCF101"
).split()


@pytest.mark.parametrize("name", NO_IMAGES)
def test_flow_disparities_and_videos_are_not_packed_as_photos(tmp_path, name):
    root = make(name, tmp_path)
    message = "does not read videos" if name in ("HMDB51", "Kinetics", "UCF101") else "one image a sample"
    refused(message, root)
    refused(message, next(path for path in root.iterdir() if path.is_dir() and path.name != "annotations")
            if name not in ("UCF101", "HMDB51") else root)  # fmt: skip


def test_what_looks_like_those_datasets_and_is_none_is_packed(tmp_path):
    make("ImageFolder", tmp_path)
    for name, content in {"train.txt": "", "readme.bin": "x", "cat/a.mp4": "x", "semeion.txt": ""}.items():
        (tmp_path / "ImageFolder" / name).write_text(content)
    assert library.known_as(open_tree(tmp_path / "ImageFolder")) == []
    for folder in ("annotations", "images_background"):
        (tmp_path / "ImageFolder" / folder).mkdir()
    assert library.known_as(open_tree(tmp_path / "ImageFolder")) == []
    odd = tmp_path / "torchvision:cats"
    (tmp_path / "ImageFolder/cat").rename(odd)
    assert len(list_source(odd)) == 4


def test_several_objects_are_splits_and_paths_are_files(tmp_path):
    root = make("ImageFolder", tmp_path)
    paths = sorted(root.glob("*/*.jpg"))
    samples = {"train": [(path, path.parent.name) for path in paths[:8]], "validation": [(paths[8], "horse")]}
    listing = list_objects(samples)
    assert isinstance(listing.files, Files) and listing.split_names == ("train", "val")
    assert listing.keys[0] == "cat/1.jpg" and listing.columns["labels"].attrs["names"] == ("cat", "dog", "horse")
    assert [listing.files.read(i) for i in (0, 8)] == [paths[0].read_bytes(), paths[8].read_bytes()]
    report = pack_images(samples, tmp_path / "out.h5", store="source", workers=0)
    assert report.splits == {"train": 8, "val": 1} and report.encodings["jpeg"] == 9
    with pytest.raises(SourceError, match=r"is the path .*nothing\.jpg, which cannot be read: No such file"):
        list_objects([(root / "nothing.jpg", 0)])
    with pytest.raises(SourceError, match="some images are paths of files, others are not"):
        list_objects([paths[0], np.zeros((4, 4), np.uint8)])
    masked = list_objects([{"image": np.zeros((4, 4), np.uint8), "mask": paths[0]}, np.zeros((4, 4), np.uint8)])
    assert masked.masks.present.tolist() == [True, False] and masked.masks.files.read(0) == paths[0].read_bytes()


def test_splits_that_number_their_classes_apart_are_brought_together_by_name():
    class Photos(list):
        def __init__(self, labels, classes):
            super().__init__([(np.full((4, 4), label, np.uint8), label) for label in labels])
            self.classes = classes

    parts = {"train": Photos([0, 1], ["cat", "dog"]), "test": Photos([0, 1], ["ant", "dog"])}
    column = list_objects(parts).columns["labels"]
    assert [column.attrs["names"][label] for label in column.values] == ["cat", "dog", "ant", "dog"]
    parts["test"] = Photos([0, 2], ["ant", "dog"])
    with pytest.raises(SourceError, match=r"have different `classes`, and labels without a name in them"):
        list_objects(parts)
    parts["test"] = Photos([0, 2], ())
    assert list_objects(parts).columns["labels"].values.tolist() == [0, 1, 0, 2]
    for columns in ({"image": [np.zeros((4, 4), np.uint8)]}, {"a": np.zeros((2, 4, 4), np.uint8)}):
        with pytest.raises(SourceError, match="has no length or no indexing"):
            list_objects(columns)


def test_boxes_of_objects_are_packed():
    image = np.zeros((40, 40), np.uint8)
    objects = {"bbox": [[1, 2, 3, 4], [5, 6, 7, 8]], "category": ["cat", "dog"]}
    listing = list_objects([{"image": image, "objects": objects}, {"image": image, "objects": {"bbox": []}}])
    assert listing.columns["boxes"].values[0].tolist() == objects["bbox"] and values(listing, "num_boxes") == [2, 0]
    with pytest.raises(SourceError, match='"objects" of its samples are no boxes'):
        list_objects([{"image": image, "objects": "two cats"}])


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """Writes what `datasets` or the hub's client would keep of a dataset, and returns a function that does."""
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    for name in ("HF_DATASETS_CACHE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    make("ImageFolder", tmp_path)
    photos = [path.read_bytes() for path in sorted((tmp_path / "ImageFolder").glob("*/*.jpg"))]

    def write(path, count):
        images = pa.array([{"bytes": photo, "path": None} for photo in photos[:count]],
                          pa.struct([("bytes", pa.binary()), ("path", pa.string())]))  # fmt: skip
        table = pa.table({"image": images, "label": pa.array(range(count))})
        path = tmp_path / "home" / path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            pq.write_table(table, path)
        else:
            (path.parent / ("state.json" if path.name.startswith("data-") else "dataset_info.json")).write_text("{}")
            with pa.ipc.new_stream(str(path), table.schema) as out:
                out.write_table(table)
        return path

    return write


def test_a_dataset_that_hugging_face_saved_or_cached_is_packed_by_its_name(cached, tmp_path):
    cached("datasets/me___photos/default/0.0.0/abc/photos-train.arrow", 5)
    cached("datasets/me___photos/default/0.0.0/abc/photos-test.arrow", 2)
    report = pack_images("hf:me/photos", tmp_path / "out.h5", store="source", workers=0)
    assert report.splits == {"train": 5, "test": 2} and report.encodings["jpeg"] == 7
    assert verify_file(tmp_path / "out.h5", source="hf:me/photos", workers=0).ok
    cached("hub/datasets--me--cats/snapshots/123/data/train-00000-of-00001.parquet", 3)
    cached("hub/datasets--me--cats/snapshots/123/data/validation-00000-of-00001.parquet", 1)
    assert list_source("hf:me/cats").split_names == ("train", "val")
    folder = cached("saved/data-00000-of-00001.arrow", 4).parent
    assert len(list_source(f"hf:{folder}")) == 4
    cached("datasets/me___photos/large/0.0.0/abc/photos-train.arrow", 6)
    refused("several configurations of it in .*: default, large. Say which one: `hf:me/photos,default`", "hf:me/photos")
    assert len(list_source("hf:me/photos,large")) == 6
    for name in ("en", "fr"):
        cached(f"hub/datasets--texts/snapshots/1/{name}/train.parquet", 1)
    refused("several configurations", "hf:texts")
    assert len(list_source("hf:texts,fr")) == 1
    with pytest.raises(
        MissingFileError, match=r"neither a folder, nor.*load_dataset\(\"me/dogs\"\).save_to_disk\(\"dogs"
    ):
        list_source("hf:me/dogs")
    with pytest.raises(OptionError, match="`--download` means nothing to the layout parquet; it is for torchvision"):
        list_source("hf:me/cats", options=SourceOptions(download=True))
