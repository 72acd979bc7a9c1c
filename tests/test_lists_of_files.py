"""A list of packed files is read as the index that `fastload index` would make of them, without one."""

from __future__ import annotations

import glob
import itertools
import pickle
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ragged_cases import varied_file, varied_rows
from small_files import write_random
from torch.utils.data import DataLoader

from fastload import ChunkSampler, FastLoader, PackedDataset, index_files, inspect_file
from fastload.errors import (
    DamagedRowError,
    FileChangedError,
    FormatError,
    MissingFileError,
    OptionError,
    SourceError,
    StateError,
)
from fastload.format.header import read_header
from fastload.format.ragged import Column

SPLITS = ({"train": 9, "val": 4}, {"train": 6, "val": 1}, {"train": 12, "val": 5})


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Three files in folders of their own, with two splits."""
    made = []
    for number, splits in enumerate(SPLITS):
        (tmp_path / str(number)).mkdir()
        rows = sum(splits.values())
        keys = Column(np.array([f"{number}/{row:03}".encode() for row in range(rows)]))
        path, columns = tmp_path / str(number) / "part.h5", {"key": keys}
        write_random(path, rows=rows, seed=number, classes="abc", columns=columns, splits=splits, chunk_rows=4)
        made.append(path)
    return made


def batches(source: Any, **options: Any) -> list[tuple[torch.Tensor, ...]]:
    with closing(FastLoader(source, 4, seed=3, ends="exact", **options)) as loader:
        return [tuple(one.clone() for one in batch) for _ in range(2) for batch in loader]


def assert_equal(mine: list[Any], theirs: list[Any]) -> None:
    for one, other in zip(mine, theirs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("as_path", [str, Path])
def test_batches_are_those_of_the_index_of_the_files(files, tmp_path, as_path: Callable[[Path], Any]):
    index_files(files, tmp_path / "out.h5")
    listed = [as_path(file) for file in files]
    for shuffle in (True, "full", False):
        for share in ((0, 1), (1, 2)):
            options = {"shuffle": shuffle, "share": share}
            assert_equal(batches(listed, **options), batches(tmp_path / "out.h5", **options))
    fields = ("images", "labels", "split", "row")
    mine, theirs = (PackedDataset(source, "val", fields) for source in (tuple(listed), tmp_path / "out.h5"))
    assert len(mine) == 10 and mine.file.splits == theirs.file.splits
    assert_equal([mine[row] for row in range(10)], [theirs[row] for row in range(10)])
    assert mine.keys_of(np.array([0, 12])) == ("0/000", "1/003")


def test_the_order_of_the_list_is_the_order_of_the_rows(files):
    backwards = PackedDataset(files[::-1], "train")
    assert backwards.keys_of(np.array([0, 12, 18])) == ("2/000", "1/000", "0/000")


def test_an_index_in_the_list_counts_as_its_shards(files, tmp_path):
    index_files(files[:2], tmp_path / "two.h5")
    found = PackedDataset([tmp_path / "two.h5", files[2]])
    assert_equal([found[row] for row in range(37)], [PackedDataset(files)[row] for row in range(37)])
    assert found.file.header_digest == PackedDataset(files).file.header_digest
    one = PackedDataset([tmp_path / "two.h5"])
    assert len(one) == 20
    with pytest.raises(SourceError, match=r"1/part.h5: holds the same as .*two.h5 \(1/part.h5\).*Leave it out"):
        PackedDataset([tmp_path / "two.h5", files[1]])


def test_rows_of_several_sizes_are_those_of_one_after_the_other(tmp_path):
    rows = varied_rows()
    cuts = [0, 5, 6, len(rows)]
    made = [
        varied_file(tmp_path / f"s{i}.h5", rows[first:stop], prefix=f"{i}-", splits={"all": stop - first})
        for i, (first, stop) in enumerate(itertools.pairwise(cuts))
    ]
    index_files(made, tmp_path / "out.h5")
    listed, index = PackedDataset(made), PackedDataset(tmp_path / "out.h5")
    assert listed.file.fields["images"].chunk_rows == index.file.fields["images"].chunk_rows
    assert_equal([listed[row] for row in range(len(rows))], [index[row] for row in range(len(rows))])
    with_index = PackedDataset([tmp_path / "out.h5"])
    assert torch.equal(with_index[7][0], index[7][0])


def test_selections_classes_samplers_and_descriptions_of_a_list(files):
    dataset = PackedDataset(files, "train", fields=("images", "labels", "row"))
    assert [int(one[2]) for one in (dataset.select([26, 0])[0], dataset.only(["b"])[0])] == [26, 1]
    assert dataset.only(["c", "a"]).classes == ("c", "a")
    assert "[part.h5, part.h5, part.h5], split train, 27 rows" in repr(dataset)
    with closing(FastLoader(dataset, 4)) as loader:
        assert "[part.h5, part.h5, part.h5]" in repr(loader)
    rows = [int(row) for _, _, some in DataLoader(dataset, 5, sampler=ChunkSampler(dataset)) for row in some]
    assert sorted(rows) == list(range(27))
    found = inspect_file(files)
    assert (found.num_samples, found.num_shards, found.splits) == (37, 3, {"train": (0, 27), "val": (27, 37)})


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_processes_read_a_list(files, start):
    dataset = PackedDataset(files, fields=("images", "row"))
    again = pickle.loads(pickle.dumps(dataset))
    assert torch.equal(again[36][0], dataset[36][0]) and again.data_identity() == dataset.data_identity()
    loader = DataLoader(dataset, 5, num_workers=1, multiprocessing_context=start)
    for images, rows in loader:
        assert torch.equal(images, torch.stack([dataset[int(row)][0] for row in rows]))


def test_a_state_goes_on_also_where_the_files_were_moved_and_not_with_others(files, tmp_path):
    with closing(FastLoader(files, 4)) as loader:
        rows = []
        for step, batch in enumerate(loader):
            rows += batch.rows.tolist()
            if step == 2:
                break
        state = loader.state_dict()
    moved = [Path(shutil.move(file, tmp_path / f"moved-{number}.h5")) for number, file in enumerate(files)]
    with closing(FastLoader(moved, 4)) as again:
        again.load_state_dict(state)
        rows += [row for batch in again for row in batch.rows.tolist()]
    assert len(rows) == len(set(rows)) == 36
    with closing(FastLoader(moved[::-1], 4)) as other, pytest.raises(StateError, match="other data"):
        other.load_state_dict(state)


def test_files_that_do_not_go_together_are_named_with_how_they_differ(files, tmp_path):
    names = [f"class {number}" for number in range(20)]
    one, other = (tmp_path / f"{name}.h5" for name in ("one", "other"))
    write_random(one, rows=20, classes=names)
    write_random(other, rows=20, seed=1, classes=[*names[:18], "dog", "class 19"])
    with pytest.raises(SourceError, match=r"`labels`: .*, names class 18 in .*one.h5, .*, names dog in .*other.h5"):
        PackedDataset([one, other])
    with pytest.raises(SourceError, match=r"one.h5: has no splits, and .*part.h5 has some \(train, val\)"):
        write_random(one, rows=5, seed=7, classes="abc")
        FastLoader([files[0], one], 4)
    with pytest.raises(SourceError, match=r"part.h5: is given twice.*dataset.select"):
        PackedDataset([files[0], files[1], files[0]])
    with pytest.raises(SourceError, match=r"copy.h5: holds the same as .*part.h5"):
        PackedDataset([files[0], shutil.copy(files[0], tmp_path / "copy.h5")])
    with pytest.raises(SourceError, match=r"`images`: rows of uint8 \(16, 12, 3\) in .*, rows of uint8 \(8, 8, 3\) in"):
        write_random(other, rows=5, size=(8, 8, 3), classes="abc", splits={"train": 3, "val": 2})
        PackedDataset([files[0], other])
    for wrong, why in (
        ([], r"\[\]: a list without a file has no rows. Give packed files"),
        ([str(files[0]), 3], r"\[1\] of this list of files is 3 \(int\), not a path. Give packed files"),
        (["s3://bucket/a.h5", 3], r"\[1\] of this list of files is 3 \(int\), not a path. Give packed files"),
    ):
        for opens in (PackedDataset, lambda given: FastLoader(given, 4)):
            with pytest.raises(OptionError, match=why):
                opens(wrong)
    with pytest.raises(OptionError, match=r"3 \(int\) is neither a path nor a list of paths"):
        PackedDataset(3)
    with pytest.raises(MissingFileError, match=r"none.h5: no such file"):
        PackedDataset([files[0], tmp_path / "none.h5"])


def test_a_file_that_is_replaced_or_damaged_is_an_error_when_it_is_read(files):
    dataset = PackedDataset(files)
    images = read_header(files[1]).fields["images"]
    with open(files[1], "r+b") as opened:
        opened.seek(images.offset)
        opened.write(b"\1" * 100)
    with pytest.raises(DamagedRowError, match=r"part.h5"):
        dataset[9]
    write_random(files[2], rows=17, seed=9, classes="abc", splits=SPLITS[2])
    with pytest.raises(FileChangedError, match=r"its shard 2/part.h5 is not the file that"):
        dataset[20]


def test_a_folder_or_pattern_of_files_says_what_to_give(files, tmp_path):
    folder = tmp_path / "all"
    folder.mkdir()
    for number, file in enumerate(files):
        shutil.copy(file, folder / f"{number}.h5")
    for open_it in (PackedDataset, lambda path: FastLoader(path, 4)):
        with pytest.raises(
            FormatError, match=r"a folder, not a packed file. Give the list.*sorted\(glob.glob\("
        ) as told:
            open_it(folder)
        with pytest.raises(MissingFileError, match=r"patterns are not expanded.*sorted\(glob.glob\("):
            open_it(str(folder / "*.h5"))
        with pytest.raises(MissingFileError, match="patterns are not expanded"):
            open_it(str(folder / "part-*"))
    line = str(told.value).partition("sorted(")[2].partition("; or")[0]
    assert len(PackedDataset(eval(f"sorted({line}", {"glob": glob}))) == 37
    index_files(sorted(folder.glob("*.h5")), folder / "out.h5")
    with pytest.raises(FormatError, match=r"Give the index in it: '.*out.h5'"):
        PackedDataset(folder)
