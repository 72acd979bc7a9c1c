"""Some classes of a packed file, their labels counted anew when they are loaded."""

from __future__ import annotations

import pickle
from contextlib import closing

import numpy as np
import pytest
import torch
from late_backend import Device
from ragged_cases import varied_file
from small_files import write_random
from torch.utils.data import DataLoader

from fastload import FastLoader, PackedDataset
from fastload.errors import OptionError, StateError
from fastload.format.ragged import Column
from fastload.transforms import MixUp, RandomResizedCrop

CLASSES = ("cat", "dog", "owl", "car", "bus")
ROWS = 30


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("only")
    return write_random(folder / "a.h5", rows=ROWS, size=(8, 8, 3), classes=CLASSES, splits={"train": 25, "val": 5})


def as_it_is(sample):
    return sample


def test_labels_count_the_classes_in_the_order_given(path):
    dataset = PackedDataset(path).only(["owl", "cat"])
    assert dataset.classes == ("owl", "cat") and len(dataset) == 12
    rows = [row for row in range(ROWS) if row % 5 in (0, 2)]
    assert dataset.rows.tolist() == rows
    assert [int(dataset[i][1]) for i in range(12)] == [int(row % 5 == 0) for row in rows]
    by_number = PackedDataset(path).only([2, np.int64(0)])
    assert by_number.classes == ("owl", "cat") and by_number.data_identity() == dataset.data_identity()
    assert PackedDataset(path).only(["cat", "owl"]).data_identity() != dataset.data_identity()
    assert len(PackedDataset(path, split="val").only(["owl", "cat"])) == 2
    again = pickle.loads(pickle.dumps(dataset))
    assert again.classes == ("owl", "cat") and int(again[0][1]) == 1


@pytest.mark.parametrize("classes", [np.array([2, 0]), torch.tensor([2, 0]), (2, 0), range(2, -1, -2)])
def test_numbers_come_in_any_sequence(path, classes):
    assert PackedDataset(path).only(classes).classes == ("owl", "cat")


@pytest.mark.parametrize("classes", [{"owl", "cat"}, (name for name in ("owl", "cat")), 3, None, "owl"])
def test_what_has_no_order_is_refused(path, classes):
    with pytest.raises(OptionError, match="give a list of names or numbers of classes"):
        PackedDataset(path).only(classes)


def test_another_field_of_classes_counts_anew_too(tmp_path):
    colours = Column(np.array([0, 1, 2, 1] * 5, np.int32), {"names": ("red", "green", "blue")})
    path = write_random(tmp_path / "a.h5", rows=20, size=(8, 8, 3), classes="ab", columns={"colour": colours})
    dataset = PackedDataset(path, fields=["images", "labels", "colour"]).only(["blue", "green"], field="colour")
    with closing(FastLoader(dataset, 3, shuffle=False, workers=1)) as loader:
        found = [(batch[1].tolist(), batch[2].tolist()) for batch in loader]
    assert [number for _, colours in found for number in colours] == [1, 0, 1] * 5
    assert dataset.file.fields["colour"].names == ("blue", "green") and dataset.classes == ("a", "b")
    both = dataset.only(["b"])
    assert [int(both[i][2]) for i in range(3)] == [
        int(value) for value in dataset.class_numbers("colour")[dataset.class_numbers() == 1][:3]
    ]
    assert both.classes == ("b",) and both.file.fields["colour"].names == ("blue", "green")
    assert len({one.data_identity() for one in (dataset, both, PackedDataset(path).only(["b"]))}) == 3


def test_a_mapping_merges_classes(path):
    dataset = PackedDataset(path).only({"cat": "animal", "car": "thing", "dog": "animal"})
    assert dataset.classes == ("animal", "thing") and len(dataset) == 18
    assert [int(label) for _, label in (dataset[i] for i in range(6))] == [0, 0, 1, 0, 0, 1]
    rest = dataset.only(["thing"])
    assert rest.classes == ("thing",) and len(rest) == 6 and int(rest[0][1]) == 0


@pytest.mark.parametrize("way", ["threads", "processes", "device", "cache", "transform", "DataLoader"])
def test_each_way_to_load_gives_the_new_labels(path, way):
    dataset = PackedDataset(path, transform=as_it_is if way == "processes" else None).only(["bus", "dog", "owl"])
    options = {
        "device": {"device": Device()},
        "cache": {"device": Device(), "cache": "device"},
        "transform": {"transform": [RandomResizedCrop(6)]},
    }.get(way, {})
    if way == "DataLoader":
        batches = [labels for _, labels in DataLoader(dataset, 5)]
    else:
        with closing(FastLoader(dataset, 5, shuffle=False, workers=1, **options)) as loader:
            batches = [labels.clone() for _, labels in loader]
    labels = torch.cat(batches)
    new = {4: 0, 1: 1, 2: 2}
    assert labels.dtype == torch.int64
    assert labels.tolist() == [new[row % 5] for row in range(ROWS) if row % 5 in new]


def test_stored_images_of_several_sizes_have_the_new_labels(tmp_path):
    path = tmp_path / "a.h5"
    varied_file(path)
    dataset = PackedDataset(path).only(["cat", "ant"])
    with closing(FastLoader(dataset, 4, shuffle=False, workers=1, transform=[RandomResizedCrop(8)])) as loader:
        assert torch.cat([labels for _, labels in loader]).tolist() == [1, 0] * 4


def test_mixing_knows_the_number_of_classes(path):
    dataset = PackedDataset(path).only(["cat", "dog"])
    with closing(FastLoader(dataset, 4, workers=1, transform=[MixUp(num_classes=2)])) as loader:
        assert next(iter(loader))[1].shape == (4, 2)


def test_a_state_of_other_classes_is_refused(path):
    with closing(FastLoader(PackedDataset(path).only(["cat", "dog"]), 4, workers=1)) as loader:
        state = loader.state_dict()
    with (
        closing(FastLoader(PackedDataset(path).only({"cat": "a", "dog": "a"}), 4, workers=1)) as loader,
        pytest.raises(StateError, match="belongs to other data"),
    ):
        loader.load_state_dict(state)


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        (["cat", "dgo"], "no class 'dgo'; did you mean 'dog'.*It has cat, dog, owl, car, bus"),
        ([7], "no class 7"),
        ([True], "no class True"),
        (["cat", 0], "named twice"),
        ([], "a list of names or numbers"),
        ("cat", "a list of names or numbers"),
    ],
)
def test_classes_that_are_not_there_are_errors(path, classes, message):
    with pytest.raises(OptionError, match=message):
        PackedDataset(path).only(classes)


def test_classes_without_a_sample_or_files_without_labels_are_errors(path, tmp_path):
    with pytest.raises(OptionError, match="no sample has the class 'owl'"):
        PackedDataset(path).select([0, 1]).only(["cat", "owl"])
    bare = write_random(tmp_path / "a.h5", rows=4)
    with pytest.raises(OptionError, match=r"'labels' is not in the file\. Name a field of one class"):
        PackedDataset(bare).only(["cat"])
