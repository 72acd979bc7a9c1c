"""Memory and time depend on the number of rows, never on the values of their labels."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from child_processes import run_python
from small_files import random_pixels

from fastload.errors import OptionError
from fastload.export import export_file
from fastload.format.ragged import Column
from fastload.pack import pack_images
from fastload.repack import repack_file
from sample_files import write_packed

LABELS = {
    "two billion": np.array([2_000_000_000, 0, 7, 2_000_000_000, 1, 7, 0, 0], np.int64),
    "below none": np.array([-5, 3, -2_000_000_000, 3, -1, 0, 3, 3], np.int64),
    "ends of int64": np.array([2**63 - 1, -(2**63), 0, 2**63 - 1, -1, 5, 0, 0], np.int64),
    "ends of uint64": np.array([2**64 - 1, 0, 2**63, 2**64 - 1, 1, 0, 1, 1], np.uint64),
    "floats": np.array([2e9, -1.5, 0.0, 1e300, -0.0, 2e9, 0.5, 0.5], np.float64),
}


def with_labels(path: Path, labels: np.ndarray, names: tuple[str, ...] = ()) -> Path:
    column = Column(labels, {"names": names} if names else {})
    return write_packed(path, random_pixels(len(labels), (4, 5, 3)), {"labels": column})


def labels_by_digest(path: Path) -> dict[int, float]:
    with h5py.File(path) as file:
        name = "labels" if "labels" in file else "targets"  # of a table, for numbers that are no classes
        return dict(zip(file["digest"][()].tolist(), file[name][()].tolist(), strict=True))


@pytest.mark.parametrize("kind", LABELS)
def test_no_command_makes_a_table_of_all_numbers_up_to_a_label(tmp_path, kind):
    labels = LABELS[kind]
    file = with_labels(tmp_path / "a.h5", labels)
    np.save(tmp_path / "a.npy", labels)
    done = run_python(Path(__file__).with_name("any_labels.py"), file)
    if labels.dtype.kind != "f":
        assert int(done) == np.count_nonzero(labels == labels.max())
    for again in ("auto.h5", "csv.h5"):
        assert labels_by_digest(tmp_path / again) == labels_by_digest(file)


def test_class_folders_are_named_by_the_numbers_that_occur(tmp_path):
    labels = np.minimum(LABELS["two billion"], 2_000_000)  # with a name for each number this takes seconds, and ends
    export_file(with_labels(tmp_path / "a.h5", labels), tmp_path / "out")
    folders = sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_dir())
    assert folders == ["0000000", "0000001", "0000007", "2000000"]
    (tmp_path / "out" / "fastload.json").unlink()
    again = labels_by_digest(pack_images(tmp_path / "out", tmp_path / "b.h5", workers=0).path)
    number = {2_000_000: 3, 0: 0, 7: 2, 1: 1}
    assert again == {digest: number[label] for digest, label in labels_by_digest(tmp_path / "a.h5").items()}


def test_labels_below_none_are_not_taken_for_none(tmp_path):
    file = with_labels(tmp_path / "a.h5", LABELS["below none"], ("ant", "bee", "cat", "dog"))
    with pytest.raises(OptionError, match="its label -2000000000 is no class number, nor -1 for none"):
        export_file(file, tmp_path / "folders", layout="folder")
    export_file(file, tmp_path / "out")
    assert "-2000000000" in (tmp_path / "out" / "manifest.csv").read_text()


def test_rows_are_chosen_by_any_label_that_occurs(tmp_path):
    file = with_labels(tmp_path / "a.h5", LABELS["ends of int64"])
    report = repack_file(file, tmp_path / "b.h5", label=(str(-(2**63)), "5"), workers=0)
    assert report.num_samples == 2
    with pytest.raises(OptionError, match=r"no label '4': .*numbers are -9223372036854775808 to 9223372036854775807"):
        repack_file(file, tmp_path / "c.h5", label=("4",), workers=0)
